"""Recorded runs: read from a file of JSON lines, and summarised."""

import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gainstage.rules.loss_scale import LossScale
from gainstage.runs.header import checked_header, rule_of

NOTHING: Mapping[str, Any] = MappingProxyType({})
WRONG = (ValueError, TypeError, RecursionError)  # the errors of `json` on other text

Tensors = dict[str, dict[str, float]]


class Run(NamedTuple):
    """A recorded run: arrays with one element per step, NaN if a step has no number."""

    steps: np.ndarray  # int64, rising
    numbers: dict[str, np.ndarray]  # float64, by name
    tensors: Mapping[str, dict[str, float]] = NOTHING  # the reported numbers of each tensor
    gaps: Mapping[str, np.ndarray] = NOTHING  # bool, by name: the steps without such a number
    made: Mapping[str, Any] = NOTHING  # the description: "rule", "dtypes", "versions"
    audited: Mapping[int, str] = MappingProxyType({})  # the worst tensor of each audit, by its step

    def get(self, name: str) -> np.ndarray:
        """Returns the numbers of this name; NaN for all steps if there are none."""
        return self.numbers.get(name, np.full(len(self.steps), math.nan))

    def has(self, name: str) -> np.ndarray:
        """Returns which steps have a number of this name, even if it is NaN."""
        return np.full(len(self.steps), name in self.numbers) & ~self.gaps.get(name, np.False_)

    @property
    def rule(self) -> LossScale | None:
        """The rule of the run; None if it is not recorded, or not one of Gainstage's own."""
        return rule_of(self.made.get("rule", ""))

    @property
    def skipped(self) -> np.ndarray:
        """Which steps were skipped: those recorded as not finite."""
        return self.get("finite") == 0

    @property
    def vetoed(self) -> np.ndarray:
        """Which steps were finite and not applied, because `apply_if` was False."""
        return (self.get("finite") == 1) & (self.get("applied") == 0)


def read_run(path: str | Path) -> Run:
    """Reads a run that `JsonLines` wrote.

    Two records of one step in a row, with different names, are one. Else, if a step is recorded
    twice, as after a return to a checkpoint, the last record counts, and earlier records of later
    steps are dropped. Of the lines of `JsonLines.write_report` the last counts. So does the last
    description of the run, one per start; files without one are read too. A line that a killed
    process or a failed write left incomplete is skipped, with a warning unless it is the last.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a JSON object with an integer `step` and numbers, or there are no
            lines.
    """
    steps: list[int] = []
    records: list[dict[str, float]] = []
    reports: list[tuple[int, Tensors]] = []
    torn: list[int] = []
    made: dict[str, Any] = {}
    audited: dict[int, str] = {}
    for step, record, tensors in _records(Path(path), torn, made, audited):
        again = record if steps and step == steps[-1] else None
        if again is not None and again.keys().isdisjoint(records[-1].keys() - {"written_at"}):
            records[-1] |= again  # two writes for one step
            continue
        went_back = record is not None and bisect_left(steps, step) < len(steps)
        if went_back or tensors is not None:
            del reports[bisect_left(reports, step, key=itemgetter(0)) :]
        if record is not None:
            del records[bisect_left(steps, step) :], steps[bisect_left(steps, step) :]
            steps.append(step)
            records.append(record)
        if tensors is not None:
            reports.append((step, tensors))
    if not records:
        raise ValueError(
            f"Expected at least one recorded step in {path}; got none. "
            f"Call JsonLines.write after each step."
        )
    if torn:
        warnings.warn(
            f"Skipped {len(torn)} line{'s' * (len(torn) > 1)} of {path} that a failed write or a "
            f"killed process has not ended, the first of them line {torn[0]}.",
            stacklevel=2,
        )
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: np.array([r.get(name, math.nan) for r in records], float) for name in names}
    gaps = {name: np.array([name not in r for r in records]) for name in names}
    gaps = {name: gap for name, gap in gaps.items() if gap.any()}
    latest = reports[-1][1] if reports else NOTHING
    known = set(steps)
    audited = {step: name for step, name in audited.items() if step in known}
    return Run(np.array(steps, np.int64), columns, latest, gaps, made, audited)


def _records(
    path: Path, torn: list[int], made: dict[str, Any], audited: dict[int, str]
) -> Iterator[tuple[int, dict[str, float] | None, Tensors | None]]:
    """Yields the steps of a file with their numbers, or with a report's numbers of the tensors.

    Skips incomplete lines, and appends their line numbers to `torn`. Stores the last header in
    `made`, and the worst tensor of each audit in `audited`.
    """
    try:
        *lines, last = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Expected text in {path}; got {error}. Pass a file that JsonLines wrote."
        ) from error
    if last:
        lines += [last] if _is_json(last) else []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            step = record.pop("step")
            if isinstance(step, bool) or not 0 <= step < 2**63 or step != int(step):
                raise ValueError(step)
            if isinstance(record.get("run"), dict):
                said = checked_header(record.pop("run"))
                made.clear()
                made.update(said)
                if not record:  # a line of its own, in files of the first version
                    continue
            tensors = _tensors(record.pop("tensors")) if "tensors" in record else None
            if isinstance(record.get("audit_tensor"), str):
                audited[int(step)] = record.pop("audit_tensor")
            numbers = {str(name): float(value) for name, value in record.items()}
            yield int(step), numbers if numbers or tensors is None else None, tensors
        except (*WRONG, KeyError, AttributeError, OverflowError) as error:
            if line.startswith("{") and not _is_json(line):
                torn.append(number)
                continue
            raise ValueError(
                f"Expected a JSON object with a step and numbers in line {number} of {path}; "
                f"got {line[:60]!r}. Pass a file that JsonLines wrote."
            ) from error


def _tensors(report: Any) -> Tensors:
    """Parses a report: counts and places are integers, the rest are numbers."""
    tensors = {}
    for name, known in report.items():
        tensors[name] = {key: float(value) for key, value in known.items()}
        for key in ("inf", "nan", "first", "last"):
            tensors[name][key] = count = int(known[key])
            if count != known[key]:
                raise ValueError(known[key])
    return tensors


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except WRONG:
        return False
    return True


def measures(run: Run) -> dict[str, Any]:
    """Returns the summary of a run, by name, without what was not recorded."""
    skipped, scale, loss = run.skipped, run.get("loss_scale"), run.get("loss")
    tenth = max(1, len(run.steps) // 10)
    found: dict[str, Any] = {"steps": len(run.steps), "first": run.steps[0], "last": run.steps[-1]}
    if "finite" in run.numbers:
        found |= {"skipped": int(skipped.sum()), "longest": _longest(skipped)}
    retried = run.get("retried_steps")
    if _has_numbers(retried) and np.nanmax(retried):
        found["retried"] = int(np.nanmax(retried))
    if run.vetoed.any():
        found["vetoed"] = int(run.vetoed.sum())
    scale = scale[np.isfinite(scale)]
    if scale.size:
        found |= {
            "scale_first": scale[0], "scale_last": scale[-1], "scale_lowest": scale.min(),
            "scale_highest": scale.max(), "at_lowest": int((scale == scale.min()).sum()),
            "raised": int((scale[1:] > scale[:-1]).sum()),
            "lowered": int((scale[1:] < scale[:-1]).sum()),
        }  # fmt: skip
    if _has_numbers(loss):
        found |= {"loss_first": _median(loss[:tenth]), "loss_last": _median(loss[-tenth:])}
    if _has_numbers(run.get("grad_norm")):
        found["grad_norm"] = _median(run.get("grad_norm")[~skipped])
    return found


def stretches(flags: np.ndarray) -> np.ndarray:
    """The starts and ends of the stretches of True: two columns."""
    return np.flatnonzero(np.diff(np.pad(flags.astype(np.int8), 1))).reshape(-1, 2)


def _longest(flags: np.ndarray) -> int:
    """The length of the longest stretch of True."""
    return int(np.diff(stretches(flags)).max(initial=0))


def _has_numbers(column: np.ndarray) -> bool:
    return bool(np.isfinite(column).any())


def _median(numbers: np.ndarray) -> float:
    finite = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore"):  # in the mean of two
        return float(np.median(finite)) if finite.size else math.nan

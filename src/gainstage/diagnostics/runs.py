"""Recorded runs: read from a file of JSON lines, and boiled down to a few numbers."""

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

NOTHING: Mapping[str, Any] = MappingProxyType({})
STAYS = 2.0**6  # a gradient that is still NaN at so much smaller a scale is so at any
WRONG = (ValueError, TypeError, RecursionError)  # what `json` says of text that is none

Tensors = dict[str, dict[str, float]]


class Run(NamedTuple):
    """What was recorded of a run: arrays with one element a step, nan where there is none."""

    steps: np.ndarray  # int64, rising
    numbers: dict[str, np.ndarray]  # float64, by name
    tensors: Mapping[str, dict[str, float]] = NOTHING  # what is known of each tensor, by name
    gaps: Mapping[str, np.ndarray] = NOTHING  # bool, by name: the steps without such a number

    def get(self, name: str) -> np.ndarray:
        """The numbers of this name: nan for all steps if there are none."""
        return self.numbers.get(name, np.full(len(self.steps), math.nan))

    def has(self, name: str) -> np.ndarray:
        """Which steps have a number of this name, be it nan."""
        return np.full(len(self.steps), name in self.numbers) & ~self.gaps.get(name, np.False_)

    @property
    def skipped(self) -> np.ndarray:
        """Which steps were skipped: those recorded as not finite."""
        return self.get("finite") == 0

    @property
    def vetoed(self) -> np.ndarray:
        """Which steps were finite and not applied, because `apply_if` was False."""
        return (self.get("finite") == 1) & (self.get("applied") == 0)


def read_run(path: str | Path) -> Run:
    """A run that `JsonLines` has written.

    A step that is recorded twice, as after a return to a checkpoint, counts as it was the last
    time, and those behind it not at all. Of the lines of `JsonLines.write_report` the last counts.
    A line that a killed process or a failed write has not ended is skipped, with a warning unless
    it is the last.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line that is no JSON object with an integer `step` and numbers, or no line.
    """
    steps: list[int] = []
    records: list[dict[str, float]] = []
    reports: list[tuple[int, Tensors]] = []
    torn: list[int] = []
    for step, record, tensors in _records(Path(path), torn):
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
        raise ValueError(f"Expected at least one recorded step in {path}; got none.")
    if torn:
        warnings.warn(
            f"Skipped {len(torn)} line{'s' * (len(torn) > 1)} of {path} that a failed write has "
            f"not ended, the first of them line {torn[0]}.",
            stacklevel=2,
        )
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: np.array([r.get(name, math.nan) for r in records], float) for name in names}
    gaps = {name: np.array([name not in r for r in records]) for name in names}
    gaps = {name: gap for name, gap in gaps.items() if gap.any()}
    return Run(np.array(steps, np.int64), columns, reports[-1][1] if reports else NOTHING, gaps)


def _records(
    path: Path, torn: list[int]
) -> Iterator[tuple[int, dict[str, float] | None, Tensors | None]]:
    """The steps of a file, with their numbers, or with what a report says of the tensors.

    Skips the lines of failed writes, and adds their numbers to `torn`.
    """
    try:
        *lines, last = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected text in {path}; got {error}.") from error
    if last:
        lines += [last] if _is_json(last) else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = record.pop("step")
            if isinstance(step, bool) or not 0 <= step < 2**63 or step != int(step):
                raise ValueError(step)
            tensors = _tensors(record.pop("tensors")) if "tensors" in record else None
            numbers = {str(name): float(value) for name, value in record.items()}
            yield int(step), numbers if numbers or tensors is None else None, tensors
        except (*WRONG, KeyError, AttributeError, OverflowError) as error:
            if number > 1 and line.startswith("{") and not _is_json(line):
                torn.append(number)
                continue
            raise ValueError(
                f"Expected a JSON object with a step and numbers in line {number} of {path}; "
                f"got {line[:60]!r}."
            ) from error


def _tensors(report: Any) -> Tensors:
    """What a report says of each tensor: counts and places are integers, the rest numbers."""
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
    """The numbers of a run, by name; what was not recorded is left out."""
    skipped, scale, loss = run.skipped, run.get("loss_scale"), run.get("loss")
    tenth = max(1, len(run.steps) // 10)
    found: dict[str, Any] = {"steps": len(run.steps), "first": run.steps[0], "last": run.steps[-1]}
    if "finite" in run.numbers:
        found |= {"skipped": int(skipped.sum()), "longest": _longest(skipped)}
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
    if np.isfinite(loss).any():
        found |= {"loss_first": _median(loss[:tenth]), "loss_last": _median(loss[-tenth:])}
    if np.isfinite(run.get("grad_norm")).any():
        found["grad_norm"] = _median(run.get("grad_norm")[~skipped])
    return found


def why_skipped(run: Run) -> dict[str, np.ndarray]:
    """Which steps were skipped, by cause: three masks, of which at most one is true of a step.

    "bad loss": the loss was not finite, which no scale would have changed. "NaN": one of a row of
    steps whose gradients stayed NaN while the scale fell by `2**6` or more. "overflow": all others,
    and such a row too if it opens the run and ends, for then the scale was on its way to what fits.
    """
    skipped, scale = run.skipped, run.get("loss_scale")
    loss = skipped & run.has("loss") & ~np.isfinite(run.get("loss"))
    applied = np.flatnonzero(run.has("finite") & ~skipped)
    nan = np.zeros_like(skipped)
    for start, stop in _rows(skipped & run.has("grad_norm") & np.isnan(run.get("grad_norm"))):
        opens = applied.size > 0 and start < applied[0]
        lowest = np.fmin.reduce(scale[start:stop])  # some rules come back from there
        nan[start:stop] = not opens and scale[start] / STAYS >= lowest
    nan &= ~loss
    return {"overflow": skipped & ~loss & ~nan, "NaN": nan, "bad loss": loss}


def _rows(flags: np.ndarray) -> np.ndarray:
    """Where the stretches of True begin, and where they have ended: two columns."""
    return np.flatnonzero(np.diff(np.pad(flags.astype(np.int8), 1))).reshape(-1, 2)


def _longest(flags: np.ndarray) -> int:
    """The longest stretch of True."""
    return int(np.diff(_rows(flags)).max(initial=0))


def _median(numbers: np.ndarray) -> float:
    finite = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore"):  # in the mean of two
        return float(np.median(finite)) if finite.size else math.nan

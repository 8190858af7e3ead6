"""Recorded runs: read from a file of JSON lines, and boiled down to a few numbers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Run(NamedTuple):
    """What was recorded of a run: arrays with one element a step, nan where there is none."""

    steps: np.ndarray  # int64, rising
    numbers: dict[str, np.ndarray]  # float64, by name

    def get(self, name: str) -> np.ndarray:
        """The numbers of this name: nan for all steps if there are none."""
        return self.numbers.get(name, np.full(len(self.steps), math.nan))

    @property
    def skipped(self) -> np.ndarray:
        """Which steps were skipped: those recorded as not finite."""
        return self.get("finite") == 0


def read_run(path: str | Path) -> Run:
    """A run that `JsonLines` has written.

    A step that is recorded twice, as after a return to a checkpoint, counts as it was the last
    time, and those behind it not at all. Of a last line that a killed process has not
    written to its end nothing is read.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line that is no JSON object with an integer `step` and numbers, or no line.
    """
    steps: list[int] = []
    records: list[dict[str, float]] = []
    for step, record in _records(Path(path)):
        while steps and steps[-1] >= step:
            steps.pop()
            records.pop()
        steps.append(step)
        records.append(record)
    if not records:
        raise ValueError(f"Expected at least one recorded step in {path}; got none.")
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: np.array([r.get(name, math.nan) for r in records], float) for name in names}
    return Run(np.array(steps, np.int64), columns)


_NOT_A_STEP = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def _records(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps of a file, with their numbers."""
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
            yield int(step), {str(name): float(value) for name, value in record.items()}
        except _NOT_A_STEP as error:
            raise ValueError(
                f"Expected a JSON object with a step and numbers in line {number} of {path}; "
                f"got {line[:60]!r}."
            ) from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def measures(run: Run) -> dict[str, Any]:
    """The numbers of a run, by name; what was not recorded is left out."""
    skipped, scale, loss = run.skipped, run.get("loss_scale"), run.get("loss")
    tenth = max(1, len(run.steps) // 10)
    found: dict[str, Any] = {"steps": len(run.steps), "first": run.steps[0], "last": run.steps[-1]}
    if "finite" in run.numbers:
        found |= {"skipped": int(skipped.sum()), "longest": _longest(skipped)}
    scale = scale[np.isfinite(scale)]
    if scale.size:
        found |= {
            "scale_first": scale[0], "scale_last": scale[-1], "scale_lowest": scale.min(),
            "scale_highest": scale.max(), "at_lowest": int((scale == scale.min()).sum()),
            "raised": int((np.diff(scale) > 0).sum()), "lowered": int((np.diff(scale) < 0).sum()),
        }  # fmt: skip
    if np.isfinite(loss).any():
        found |= {"loss_first": _median(loss[:tenth]), "loss_last": _median(loss[-tenth:])}
    if np.isfinite(run.get("grad_norm")).any():
        found["grad_norm"] = _median(run.get("grad_norm")[~skipped])
    return found


def _longest(flags: np.ndarray) -> int:
    """The longest stretch of True."""
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


def _median(numbers: np.ndarray) -> float:
    finite = numbers[np.isfinite(numbers)]
    return float(np.median(finite)) if finite.size else math.nan

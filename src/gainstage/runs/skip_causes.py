"""The causes of skipped steps: the only place that decides between them."""

import dataclasses
import enum
import math

import numpy as np

from gainstage.rules.adaptive import HALVINGS
from gainstage.runs.recording import Run

NO_DIGITS = 2.0**-14  # below this largest scaled gradient, all float16 gradients lose digits
FAR_FALL = 2.0**24  # a fall this far reaches that point, if the largest gradient is not known
LOW_SCALE = 2.0**-8  # a scale this low does, if no step was finite
STAYS = 2.0**6  # a gradient that stays NaN over such a fall is not known to overflow


class LargestGradient:
    """Follows the largest gradient; between measurements it is scaled with the gradient norm."""

    def __init__(self) -> None:
        self._last = self._norm = math.nan

    def of(self, max_abs: float, grad_norm: float) -> float:
        """The largest gradient of the next step; `max_abs` is NaN if it was not measured."""
        if not math.isnan(max_abs):
            self._last, self._norm = max_abs, grad_norm
            return max_abs
        ratio = grad_norm / self._norm if self._norm else math.nan
        return self._last * ratio if 0 < ratio < math.inf else self._last


class SkipCause(enum.Enum):
    """Why steps were skipped: the word for it, and what shows it."""

    BAD_LOSS = "bad loss", "the loss was not finite before any scaling"
    OVERFLOW = "overflow", "gradients were finite again at a lower scale"
    LIKELY_OVERFLOW = "overflow", "nothing speaks against it"
    NAN = "NaN", "gradients stayed NaN at lower scales, and were finite again at the first scale"
    NAN_BELOW = "NaN", "gradients were NaN at a scale at which hardly anything of them is left"
    NAN_TO_THE_END = "NaN", "gradients stayed NaN at much lower scales, to the end of the run"

    @property
    def word(self) -> str:
        """The word for it: "bad loss", "overflow" or "NaN"."""
        return self.value[0]


@dataclasses.dataclass
class Streak:
    """Skipped steps in a row: their losses, their norms and their scales.

    Args:
        used: the largest gradient times the scale in the finite step before, NaN if not known.
        fitted: the scale of that step, NaN if there was none.
    """

    used: float = math.nan
    fitted: float = math.nan
    start: int = 0  # the index of the first step, and that after the last
    stop: int = 0
    length: int = 0  # all steps
    held: int = 0  # the latest steps with the same scale
    first: float = math.nan  # the first, lowest and last scale
    low: float = math.nan
    last: float = math.nan
    nan: bool = True  # whether all norms were NaN
    inf: bool = False  # whether any norm was inf
    recorded: bool = False  # whether any loss was recorded
    good_loss: bool = True  # all losses were recorded and finite
    bad_loss: bool = True  # all losses were recorded and not finite
    gave_up: bool = False  # the rule lowered the scale, and raised it again soon
    ended: float | None = None  # the scale of the finite step after it, NaN if the run ended

    def add(self, loss: float | None, norm: float, scale: float, place: int = 0) -> None:
        """Adds a step; its loss is None if it was not recorded."""
        bad = cause_of(loss=loss) is SkipCause.BAD_LOSS
        self.gave_up |= scale > self.last and self.length <= HALVINGS
        self.held = self.held + 1 if scale == self.last else 1
        if not self.length:
            self.start, self.first, self.low = place, scale, scale
        self.length, self.last, self.stop = self.length + 1, scale, place + 1
        self.low = min(scale, self.low)
        self.nan &= math.isnan(norm) or bad
        self.inf |= math.isinf(norm) and not bad
        self.recorded |= loss is not None
        self.good_loss &= loss is not None and not bad
        self.bad_loss &= bad

    def end(self, scale: float, infinite_in_part: bool) -> None:
        """Ends it.

        Args:
            scale: the scale of the finite step after it, NaN if the run ended.
            infinite_in_part: some tensors were infinite and others finite: an overflow.
        """
        self.ended = scale
        self.nan &= not infinite_in_part
        self.inf |= infinite_in_part

    @property
    def is_exhausted(self) -> bool:
        """Whether the scale was so low that overflows would have ended."""
        if self.fitted > 0 and math.isfinite(self.used) and self.used > 0:
            return self.used * self.low / self.fitted < NO_DIGITS
        return self.low <= self.first / FAR_FALL and (self.fitted > 0 or self.low <= LOW_SCALE)


def cause_of(streak: Streak | None = None, loss: float | None = None) -> SkipCause:
    """Returns the cause of a skipped step, or of skipped steps in a row.

    Args:
        streak: the skipped steps in a row, if known.
        loss: the loss of one of them, if it was recorded.
    """
    if loss is not None and not math.isfinite(loss):
        return SkipCause.BAD_LOSS
    if streak is None or not streak.length:
        return SkipCause.LIKELY_OVERFLOW
    if streak.bad_loss:
        return SkipCause.BAD_LOSS
    ended = streak.ended
    if ended is not None and ended < streak.first:
        return SkipCause.OVERFLOW
    if streak.nan:
        if ended is not None and streak.low < streak.first <= ended:
            return SkipCause.NAN
        if streak.is_exhausted:
            return SkipCause.NAN_BELOW
        if ended is not None and math.isnan(ended) and streak.low <= streak.first / STAYS:
            return SkipCause.NAN_TO_THE_END
    return SkipCause.LIKELY_OVERFLOW


def streaks(run: Run) -> list[Streak]:
    """Returns the skipped steps in a row of a recorded run, in order, with how they ended."""
    seen, latest, each = LargestGradient(), Streak(), list[Streak]()
    columns = [run.get(name) for name in ("finite", "loss_scale", "grad_norm", "max_abs", "loss")]
    columns[2] = np.where(run.has("grad_norm"), columns[2], math.inf)
    there = run.has("loss").tolist()
    for place, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        finite, scale, norm, max_abs, loss = row
        if math.isnan(finite):
            continue
        used = seen.of(max_abs, norm) * scale
        if not finite:
            latest.add(loss if there[place] else None, norm, scale, place)
            continue
        if latest.length:
            latest.end(scale, _is_infinite_in_part(run, latest))
            each.append(latest)
        latest = Streak(used, scale)
    if latest.length:
        latest.end(math.nan, _is_infinite_in_part(run, latest))
        each.append(latest)
    return each


def why_skipped(run: Run) -> dict[str, np.ndarray]:
    """Returns which steps were skipped, by cause: three masks; at most one is true for a step.

    - "bad loss": the loss was not finite before scaling: bad data, or a forward overflow.
    - "NaN": gradients stayed NaN while the scale fell, and were finite again at the first scale; or
      they stayed NaN to the end of the run while it fell by `2**6` or more. So they are if float16
      would keep hardly anything of them at the lowest scale.
    - "overflow": all others. It is certain if the steps ended at a lower scale or had infinities,
      and likely otherwise.
    """
    masks = {word: np.zeros(len(run.steps), bool) for word in ("overflow", "NaN", "bad loss")}
    loss, there, skipped = run.get("loss").tolist(), run.has("loss").tolist(), run.skipped.tolist()
    for streak in streaks(run):
        alike = cause_of(streak)
        for place in range(streak.start, streak.stop):
            if skipped[place]:
                of_step = cause_of(loss=loss[place] if there[place] else None)
                cause = of_step if of_step is SkipCause.BAD_LOSS else alike
                masks[cause.word][place] = True
    return masks


def _is_infinite_in_part(run: Run, streak: Streak) -> bool:
    """Whether some tensors were infinite and others finite: an overflow."""
    first, last = run.steps[streak.start], run.steps[streak.stop - 1]
    within = [known for known in run.tensors.values() if first <= known["last"] <= last]
    infinite = any(known["inf"] and not known["nan"] for known in within)
    return infinite and any(known["last"] < first for known in run.tensors.values())

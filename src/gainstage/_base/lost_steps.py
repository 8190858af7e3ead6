"""Warns of steps of one kind that are mostly lost: skipped for an overflow each time they come."""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gainstage._base.checks import brief
from gainstage._base.dead_run import EVERY, is_ready
from gainstage._base.warn import warn

LOOKS_BACK = 1024  # steps
FEWEST = 4  # skips that are a finding
LARGE_LOSS = 8.0  # the factor by which a loss is far larger than those around it
SIDE = 8  # applied steps before a step, and after it, that say what is usual there
CHANCE = 1e-6  # the probability at which a pattern is no coincidence

_UNTIL = "gainstage.train_step(loss_fn, retries=True) takes it again at lower scales until it fits."
_NO_SCALE = (
    "No scale that the rule tries fits such a step: gainstage.xray(loss_fn, state, *batch) names "
    "the operation, and gainstage.transforms.locally_scaled gives a part of the network a scale of "
    "its own."
)
_HYSTERESIS = "Retries need a rule with hysteresis=1, which lowers the scale at once."


class SeenStep(NamedTuple):
    """What is known of a step."""

    number: int
    applied: bool
    loss: float  # NaN if it is not known
    scale: float  # of its loss; NaN if it is not known
    is_retried: bool = False  # whether it was tried again, if it was skipped
    structure: Hashable = None  # of its batch


def lost_steps(steps: Sequence[SeenStep]) -> str | None:
    """Says which kind of steps is mostly lost; None if there is no such kind.

    A row of skipped steps counts once, as its first step, because it ends at a scale that fits.
    Steps without a finite loss are left out: they are bad data.

    Args:
        steps: some steps of a run, in order.
    """
    skipped = {step.number for step in steps if not step.applied}
    if len(skipped) < FEWEST:
        return None
    counted = [
        step
        for step in steps
        if math.isfinite(step.loss) and (step.applied or step.number - 1 not in skipped)
    ]
    lost = [step for step in counted if not step.applied]
    if len(lost) < FEWEST:
        return None
    return (
        _tried_in_vain(lost, len(steps))
        or _far_larger_losses(counted)
        or _other_structures(counted)
        or _at_a_distance(lost, {step.number: step.scale for step in steps if step.applied})
    )


def what_helps(*, retries: bool | None, is_fixed: bool = False, hysteresis: int = 1) -> str:
    """The advice for steps that are lost.

    Args:
        retries: whether steps are retried; True until they fit, None for a number of times.
        is_fixed: whether the loss scale is fixed.
        hysteresis: as for `gainstage.DynamicLossScale`.
    """
    if is_fixed:
        return (
            "Such a step needs a lower loss_scale than the fixed one, or "
            f"gainstage.DynamicLossScale() for it; {_UNTIL}"
        )
    if retries is False:
        more = f" {_HYSTERESIS}" if hysteresis > 1 else ""
        return f"Such a step needs a lower loss scale than the others: {_UNTIL}{more}"
    if hysteresis > 1:
        return _HYSTERESIS
    if retries:
        return _NO_SCALE
    return "gainstage.train_step(loss_fn, retries=True) goes on until a step fits."


class LostStepsWatch:
    """Looks at the last steps, every 64 steps, and warns once if those of one kind are lost.

    It waits for no step that is not computed yet. If all steps were applied it reads the number of
    the last one, and no more; for 1024 steps after a skipped one it reads them all.

    Args:
        advice: what the warning ends with.
        are_retried: whether a skipped step was tried again.
    """

    def __init__(self, advice: str, are_retried: bool) -> None:
        self._advice, self._are_retried = advice, are_retried
        self._count, self._reads_until, self._is_told = 0, 0, False
        self._reached: int | None = None  # the applied steps at the last look
        self._after = 0, math.nan  # the last step that was read, and the scale after it
        self._unread: deque[_Unread] = deque(maxlen=LOOKS_BACK)
        self._steps: deque[SeenStep] = deque(maxlen=LOOKS_BACK)

    def see(self, applied: Any, loss: Any, scale: Any, reached: Any, structure: Hashable) -> None:
        """Notes a step.

        Args:
            applied: whether the step was applied, a bool scalar.
            loss: its true loss.
            scale: the loss scale after it, an array that no step donates.
            reached: the number of applied steps so far, such an array too.
            structure: the structure of its batch.
        """
        self._count += 1
        if not self._is_told:
            self._unread.append(_Unread(self._count, applied, loss, scale, reached, structure))

    def look(self) -> None:
        """Looks at the steps that it has seen, if it is time."""
        if self._is_told or self._count % EVERY:
            return
        ready = list(self._unread)
        while ready and not ready[-1].is_ready:
            ready.pop()
        for _ in ready:
            self._unread.popleft()
        if not ready or not self._is_read(ready):
            return
        for step in ready:
            if step.is_ready:
                self._read(step)
        while self._steps[0].number <= ready[-1].number - LOOKS_BACK:
            self._steps.popleft()
        what = lost_steps(self._steps)
        if what is not None:
            self._is_told = True
            self._unread.clear()
            self._steps.clear()
            warn(f"{what}. What they should teach is lost. {self._advice}")

    def _read(self, step: "_Unread") -> None:
        """Reads a step, which was taken at the scale after the one before, if that is known."""
        applied, loss, scale = map(np.asarray, (step.applied, step.loss, step.scale))
        number, before = self._after
        self._after = step.number, float(scale)
        of_step = before if number == step.number - 1 else math.nan
        seen = float(loss), of_step, self._are_retried, step.structure
        self._steps.append(SeenStep(step.number, bool(applied), *seen))

    def _is_read(self, ready: Sequence["_Unread"]) -> bool:
        """Whether to read these steps: if one of them was skipped, or a step not long before."""
        first, last = ready[0], ready[-1]
        before, self._reached = self._reached, int(np.asarray(last.reached))
        if before is None and first.is_ready:
            before = int(np.asarray(first.reached)) - bool(np.asarray(first.applied))
        if before is None or self._reached - before != len(ready):
            self._reads_until = last.number + LOOKS_BACK
        return last.number <= self._reads_until


class _Unread(NamedTuple):
    """A step that the watch has not read: its number, and the arguments of `LostStepsWatch.see`."""

    number: int
    applied: Any
    loss: Any
    scale: Any
    reached: Any
    structure: Hashable

    @property
    def is_ready(self) -> bool:
        """Whether to read it is not to wait, and none of its arrays is donated elsewhere."""
        return all(map(is_ready, (self.applied, self.loss, self.scale, self.reached)))


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────


def _tried_in_vain(lost: Sequence[SeenStep], count: int) -> str | None:
    """Steps that retries did not save."""
    in_vain = [step for step in lost if step.is_retried]
    if len(in_vain) < FEWEST:
        return None
    return (
        f"{len(in_vain)} times in the last {count} steps all retries failed, and the step was "
        f"skipped, though its loss is finite, {in_vain[-1].loss:.3g} the last time"
    )


def _far_larger_losses(counted: Sequence[SeenStep]) -> str | None:
    """Steps whose loss is far larger than that of the steps around them, such as those with a
    penalty that is computed now and then."""
    size, applied = np.abs([step.loss for step in counted]), _applied(counted)
    usual = _usual(size, applied)
    is_large = size > LARGE_LOSS * usual
    found = _mostly_lost(is_large, applied)
    if found is None:
        return None
    last = np.flatnonzero(is_large & ~applied)[-1]
    return (
        f"{found} steps whose loss was far larger than that of the steps around them, such as "
        f"{size[last]:.3g} beside {usual[last]:.3g}, were skipped, though it is finite"
    )


def _usual(size: np.ndarray, applied: np.ndarray) -> np.ndarray:
    """The size of the loss around each step: the median of applied steps, as many before it as
    after it, so that of a loss that falls no step is far larger; inf where there are too few."""
    of_applied, usual = size[applied], np.full(len(size), np.inf)
    if len(of_applied) < 2 * SIDE:
        return usual
    medians = np.median(np.lib.stride_tricks.sliding_window_view(of_applied, 2 * SIDE), axis=1)
    first = np.cumsum(applied) - applied - SIDE  # the place in `of_applied` of the first of them
    is_known = (first >= 0) & (first < len(medians))
    usual[is_known] = medians[first[is_known]]
    return usual


def _other_structures(counted: Sequence[SeenStep]) -> str | None:
    """Steps whose batch has another structure than those of other steps."""
    applied = _applied(counted)
    for structure in {step.structure for step in counted}:
        found = _mostly_lost(np.array([step.structure == structure for step in counted]), applied)
        if found is not None:
            text = brief(structure)
            return (
                f"{found} steps whose batch has another structure than other batches, {text}, "
                f"were skipped, though their loss is finite"
            )
    return None


def _at_a_distance(lost: Sequence[SeenStep], fitted: dict[int, float]) -> str | None:
    """Steps at a regular distance, each at a scale that has fitted all steps in between. Those that
    a rule loses because it looks for a higher scale follow an increase.

    Args:
        lost: the skipped steps.
        fitted: the scales of the applied ones, by their number.
    """
    distance, count = lost[-1].number - lost[-2].number, 1
    for step, following in zip(reversed(lost[:-1]), reversed(lost), strict=False):
        between = range(step.number + 1, following.number)
        stays = all(fitted.get(number) == following.scale for number in between)
        if following.number - step.number != distance or not stays:
            break
        count += 1
    if count < FEWEST or distance ** (1 - count) > CHANCE:
        return None
    return (
        f"The last {count} skipped steps are at a regular distance of {distance} steps, though "
        f"their loss is finite, and the loss scale fits all steps between them"
    )


def _applied(steps: Sequence[SeenStep]) -> np.ndarray:
    return np.array([step.applied for step in steps])


def _mostly_lost(mask: np.ndarray, applied: np.ndarray) -> str | None:
    """Says how many steps of a kind are lost, if they are more than half and no coincidence.

    Args:
        mask: which steps are of this kind.
        applied: which were applied.
    """
    count, lost, skipped = int(mask.sum()), int((mask & ~applied).sum()), int((~applied).sum())
    if lost < FEWEST or 2 * lost <= count:
        return None
    elsewhere = (skipped - lost + 1) / (len(mask) - count + 2)  # the share of the other steps
    if math.comb(count, lost) * elsewhere**lost > CHANCE:
        return None
    return f"{lost} of the last {count}"

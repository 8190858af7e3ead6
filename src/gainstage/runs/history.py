"""The records of a run, as far as findings ask of them: step by step, in plain Python."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gainstage._base.lost_steps import LOOKS_BACK, SeenStep
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import FixedLossScale, LossScale
from gainstage.runs.skip_causes import LargestGradient, SkipCause, Streak, cause_of
from gainstage.training.audited_run import ENOUGH

WINDOW = 200  # steps that findings look back
MEMORY = 2000  # steps for which an overflow counts as evidence of the limit
LONG_STREAK = 8  # skipped steps in a row


class SameCause(NamedTuple):
    """All streaks of a recorded run that have one cause: the longest, their number and length."""

    longest: Streak
    streaks: int
    steps: int


class History:
    """The records of a run up to a step.

    Args:
        rule: the rule of the run, if it is known.
        limit: the largest number of the backward pass's dtype.
    """

    def __init__(self, rule: LossScale | None, limit: float):
        self.rule: LossScale | None = rule
        self.limit: float = limit
        self.is_fixed: bool = isinstance(rule, FixedLossScale)
        self.is_adaptive: bool = isinstance(rule, AdaptiveLossScale)
        self.floor: float = float(getattr(rule, "min_scale", 0.0))
        self.ceiling: float = _highest_scale(rule)
        self.step: int = 0
        self.finite: bool = True
        self.scale: float = math.nan
        self.scale_before: float = math.nan
        self.streak: Streak = Streak()  # the latest skipped steps in a row
        self.same_cause: SameCause | None = None  # in a recorded run: what is known of all
        self.is_explained: bool = False  # whether a finding explains the streak
        self.skips: deque[str] = deque(maxlen=WINDOW)  # of steps outside of explained streaks
        self.largest: deque[float] = deque(maxlen=WINDOW)  # gradients of finite steps, times scale
        self.lost_loss: bool = False  # whether the step was skipped with a non-finite loss
        self.fell_for_a_loss: bool = False  # whether the scale fell after such a step
        self.retried_in_a_row: int = 0
        self.seen: deque[SeenStep] = deque(maxlen=LOOKS_BACK)
        self.records: int = 0
        self.since_raised: int = 0  # steps since the scale last rose
        self.ever_changed: bool = False  # whether the scale did
        self.overflowed: tuple[float, int] = (math.inf, 0)  # the lowest recent overflow, and when
        self.lowest_overflow: float = math.inf  # of all, unless a later step was finite there
        self.audits: list[Mapping[str, Any]] = []  # the last in a row that are off
        self.unrecorded: tuple[float, float] | None = None  # steps between records, and skipped
        self._seen, self._retries = LargestGradient(), 0.0
        self._counts: deque[tuple[float, float]] = deque()  # of each record: steps, and skipped
        self._fitted = math.nan  # the scale of the last finite step
        self._skip = ""

    @property
    def judged(self) -> Streak:
        """The streak that findings describe."""
        return self.streak if self.same_cause is None else self.same_cause.longest

    def add(self, record: Mapping[str, Any], same_cause: SameCause | None = None) -> bool:
        """Adds the record of a step; returns whether it says if the step was finite.

        Args:
            record: the step's numbers.
            same_cause: all streaks with the cause of this step, in a recorded run.
        """
        finite, scale = record.get("finite"), float(record.get("loss_scale", math.nan))
        if finite is None or math.isnan(np.float64(finite)):
            return False
        before = self.step
        self.step, self.finite, self.same_cause = int(record["step"]), bool(finite), same_cause
        norm = float(record.get("grad_norm", math.nan if self.finite else math.inf))
        loss = float(record["loss"]) if "loss" in record else None
        self.fell_for_a_loss = self.lost_loss and scale < self.scale
        self.lost_loss = not self.finite and cause_of(loss=loss) is SkipCause.BAD_LOSS
        used = self._seen.of(float(record.get("max_abs", math.nan)), norm) * scale
        if self.finite:
            self._end_streak(scale)
            self.largest.append(used)
        else:
            self.streak.add(loss, norm, scale)
        self._skip = "no loss" if loss is None else "bad loss" if self.lost_loss else "loss"
        self._skip = "" if self.finite else self._skip
        self.ever_changed |= scale != self.scale and not math.isnan(self.scale)
        self.since_raised = 0 if scale > self.scale else self.since_raised + 1
        self.scale_before, self.scale = self.scale, scale
        retries = float(record.get("retried_steps", 0))
        if "audit_ok" in record:
            is_off = not record["audit_ok"] and math.isfinite(float(record["audit_gradient_error"]))
            self.audits = [*self.audits[: ENOUGH - 1], record] if is_off else []
        is_retried = retries > self._retries
        self.retried_in_a_row = self.retried_in_a_row + 1 if is_retried else 0
        self._retries = retries
        self.records += 1
        if self.step <= before:  # a restart
            self.seen.clear()
        size = math.nan if loss is None else loss
        is_own = self.step == before + 1  # retries since the last record are those of this step
        self.seen.append(SeenStep(self.step, self.finite, size, scale, is_retried and is_own))
        self._count(record)
        return True

    def explain(self, is_explained: bool) -> None:
        """Notes whether a finding explains the streak; its steps are then no `skips` as well."""
        if is_explained and not self.is_explained:
            for _ in range(min(self.streak.length - 1, len(self.skips))):
                self.skips.pop()
        elif not is_explained and self._fitted > 0:
            self.skips.append(self._skip)
        self.is_explained = is_explained

    def _end_streak(self, scale: float) -> None:
        """Updates the known overflows when a finite step ends skipped steps in a row."""
        streak = self.streak
        not_the_scale = streak.bad_loss or streak.low < streak.first <= scale
        if streak.length and not not_the_scale:
            lowest, when = self.overflowed
            if streak.low <= lowest or self.step - when > MEMORY:
                self.overflowed = (streak.low, self.step)
            self.lowest_overflow = min(self.lowest_overflow, streak.low)
        if scale >= self.lowest_overflow:
            self.lowest_overflow = math.inf
        self._fitted = scale
        self.streak = Streak(self.largest[-1] if self.largest else math.nan, scale)

    def _count(self, record: Mapping[str, Any]) -> None:
        """Counts the steps of which there is no record, by the telemetry in others."""
        applied, skipped = (
            float(record.get(name, math.nan)) for name in ("applied_steps", "skipped_steps")
        )
        counts, steps = self._counts, applied + skipped
        if counts and not steps > counts[-1][0]:  # a restart, or no telemetry
            counts.clear()
        self.unrecorded = None
        if not applied > 0:  # steps before the first good one look for a scale
            return
        counts.append((steps, skipped))
        while len(counts) > 2 and steps - counts[1][0] >= WINDOW:
            counts.popleft()
        steps, skipped = steps - counts[0][0], skipped - counts[0][1]
        if steps >= max(WINDOW, 2 * (len(counts) - 1)):  # else every other step has a record
            self.unrecorded = steps, skipped


def _highest_scale(rule: LossScale | None) -> float:
    """The highest scale that a rule can reach."""
    return float(getattr(rule, "loss_scale_value", getattr(rule, "max_scale", math.inf)))

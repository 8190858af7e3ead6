"""What an alarm says about skipped steps in a row: their probable cause, and what to do."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from gainstage._base.checks import as_power
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import FixedLossScale, LossScale
from gainstage.runs.skip_causes import SkipCause, Streak, cause_of

LONG_STREAK = 8  # skipped steps in a row
XRAY = (
    "gs.diagnostics.xray(loss_fn, params, batch, opt_state=opt_state) of such a step names the "
    "operation"
)
PASS_LOSS = (
    "update(..., value=loss) in an optax loop, apply(..., loss=loss); minimize does it itself"
)
IF_DATA = "If it is the data, rule=gs.AdaptiveLossScale()"
HOLDS = f"{IF_DATA} that is given the loss ({PASS_LOSS}) would hold the scale"
LOSS_MISSING = (
    "The rule, AdaptiveLossScale, is not given the loss, so it cannot tell bad data from an "
    f"overflow. Pass it: {PASS_LOSS}"
)


class Alike(NamedTuple):
    """Runs of skipped steps with one cause: the longest, their number, and that of their steps."""

    longest: Streak
    rows: int = 1
    steps: int = 0


class Between:
    """The skipped steps of which there is no record, by the counts in the telemetry of others.

    Args:
        window: the number of steps to look back.
        share: the largest share of skipped steps that is no problem.
    """

    def __init__(self, window: int, share: float):
        self._window, self._share = window, share
        self._counts: deque[tuple[float, float]] = deque()  # of each record: steps, and skipped

    def message(self, record: Mapping[str, Any]) -> str:
        """Notes a record, and returns what to say; nothing if every other step has a record."""
        applied, skipped = (
            float(record.get(name, math.nan)) for name in ("applied_steps", "skipped_steps")
        )
        counts, steps = self._counts, applied + skipped
        if counts and not steps > counts[-1][0]:  # a restart, or no telemetry
            counts.clear()
        if not applied > 0:  # steps before the first good one look for a scale
            return ""
        counts.append((steps, skipped))
        while len(counts) > 2 and steps - counts[1][0] >= self._window:
            counts.popleft()
        steps, skipped = steps - counts[0][0], skipped - counts[0][1]
        sparse = steps >= 2 * (len(counts) - 1)
        if steps < self._window or not sparse or skipped <= self._share * steps:
            return ""
        return (
            f"{skipped:g} of the last {steps:g} steps were skipped, most of them without a record; "
            f"the scale is {as_power(float(record['loss_scale']))}. The other alarms need a record "
            f"of each step: alarms.write(n, gainstage.telemetry(opt_state), loss=loss)."
        )


def message_on(alike: Alike, rule: LossScale | None) -> tuple[str, str]:
    """Returns the kind of alarm and its message; both are empty if there is none.

    Args:
        alike: the skipped steps.
        rule: the rule of the run, if it is known.
    """
    kind, message = _message_on(alike.longest, rule)
    if message and alike.rows > 1:
        message += f" This happened {alike.rows} times: {alike.steps} steps in all."
    return kind, message


def _message_on(streak: Streak, rule: LossScale | None) -> tuple[str, str]:
    cause, skipped = cause_of(streak), _skipped(streak)
    if cause is SkipCause.BAD_LOSS:
        adaptive = isinstance(rule, AdaptiveLossScale)
        hold = "" if adaptive or streak.low == streak.first else f" {HOLDS}."
        return "data", (
            f"{_steps(streak)} their loss was not finite before any scaling: bad data, too high a "
            f"learning rate, or an overflow in the forward pass. No scale helps that. {XRAY}.{hold}"
        )
    if _lacks_loss(streak, rule):
        record = "Record it too: write(step, info, loss=loss)"
        return "loss", f"{skipped}. {LOSS_MISSING}. {record}. {_outcome(streak)}"
    place = " in the backward pass, for the loss was finite" if streak.good_loss else ""
    if cause is SkipCause.OVERFLOW:
        end = as_power(streak.ended or 0.0)
        return "overflow", f"{skipped}, and finite again at {end}: an overflow{place}. {XRAY}."
    if cause is SkipCause.NAN:
        return "data", f"{skipped}. {_outcome(streak)}"
    if isinstance(rule, FixedLossScale):
        return "", ""  # `Alarms` has another alarm for this case
    if cause is SkipCause.NAN_BELOW:
        look = "Look at the data and the learning rate, and record the loss."
        if streak.good_loss:
            look = "The loss was finite: look for 0/0 or sqrt(0) in the backward pass."
        return "data", (
            f"{skipped}. At the lowest hardly anything of them would be left in float16, so "
            f"probably it is not the scale. {look} {XRAY}."
        )
    if not streak.fitted > 0:
        return "", ""
    if cause is SkipCause.NAN_TO_THE_END:
        data = "" if streak.good_loss else "bad data, "
        return "overflow", (
            f"{skipped}, and that did not end: {data}a formula of the backward pass such as 0/0, "
            f"or an overflow that only a still lower scale ends. {XRAY}."
        )
    sure = "an overflow" if streak.inf else "probably an overflow"
    if not streak.recorded:
        sure = "an overflow, or bad data, which a recorded loss would tell apart"
    fell = streak.low < streak.first and streak.ended is None
    falls = " The scale still falls, which ends an overflow." if fell else ""
    return "overflow", f"{skipped}: {sure}{place}.{falls} {XRAY}."


def _lacks_loss(streak: Streak, rule: LossScale | None) -> bool:
    """Whether `AdaptiveLossScale` gave up as early as it does without a loss."""
    adaptive = isinstance(rule, AdaptiveLossScale) and streak.fitted > 0
    return adaptive and streak.gave_up and streak.nan and not streak.recorded


def _steps(streak: Streak) -> str:
    return f"{streak.length} steps in a row were skipped because"


def _skipped(streak: Streak) -> str:
    scales = f"scales from {as_power(streak.first)} to {as_power(streak.low)}"
    if streak.low == streak.first:
        scales = f"a scale of {as_power(streak.first)}"
    kind = "NaN" if streak.nan else "not finite"
    return f"{_steps(streak)} gradients were {kind}, at {scales}"


def _outcome(streak: Streak) -> str:
    """Says at which scale gradients were finite again, if they were."""
    if streak.ended is None or math.isnan(streak.ended):
        return f"{XRAY}."
    again = f"Gradients were finite again at {as_power(streak.ended)}"
    if streak.ended < streak.first:
        return f"{again}: an overflow. {XRAY}."
    return f"{again}, so it was not the scale: probably bad data. {XRAY}."

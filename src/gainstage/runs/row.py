"""A run of skipped steps in progress: its probable cause, and what to do."""

import math
from typing import NamedTuple

from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.base import FixedLossScale, LossScale, as_power

LONG = 8  # skipped steps in a row
LOWEST = 2.0**-14  # below this largest scaled gradient, all float16 gradients lose digits
FAR = 2.0**24  # a fall this far reaches that point, if the largest gradient is not known
NEVER = 2.0**-8  # a scale this low does, if no step was finite
STAYS = 2.0**6  # a gradient that stays NaN over such a fall is not known to overflow
HALVINGS = 12  # of `AdaptiveLossScale`, before it gives up although it knows the loss
XRAY = (
    "gs.diagnostics.xray(loss_fn, params, batch, opt_state=opt_state) of such a step names the "
    "operation"
)
PASS_LOSS = (
    "update(..., value=loss) in an optax loop, apply(..., loss=loss); minimize does it itself"
)
HOLDS = f"rule=gs.AdaptiveLossScale() that is given the loss ({PASS_LOSS}) would hold the scale"
LOSS_MISSING = (
    "The rule, AdaptiveLossScale, is not given the loss, so it cannot tell bad data from an "
    f"overflow. Pass it: {PASS_LOSS}"
)


class Fate(NamedTuple):
    """How a run of skipped steps ended, according to a recording."""

    length: int
    low: float  # the lowest scale
    ended: float  # the scale of the first finite step after it, NaN if there is none


class Row:
    """Skipped steps in a row: their losses, their norms and their scales.

    Args:
        rule: the rule of the run, if it is known.
        used: the largest gradient times the scale in the last finite step, NaN if not known.
        fitted: the scale of that step, NaN if there was none.
    """

    def __init__(self, rule: LossScale | None, used: float, fitted: float):
        self._rule, self._used, self._fitted = rule, used, fitted
        self.length: int = 0  # all steps
        self.held: int = 0  # the latest steps with the same scale
        self.first: float = math.nan  # the first, lowest and last scale
        self.low: float = math.nan
        self.last: float = math.nan
        self.nan: bool = True  # whether all norms were NaN
        self.inf: bool = False  # whether any norm was inf
        self.recorded: bool = False  # whether any loss was recorded
        self.good_loss: bool = True  # all losses were recorded and finite
        self.bad_loss: bool = True  # all losses were recorded and not finite
        self._gave_up = False  # the rule lowered the scale, and raised it again soon
        self._fate: Fate | None = None

    def add(self, loss: float | None, norm: float, scale: float) -> None:
        """Adds a step; its loss is None if it was not recorded."""
        self._gave_up |= scale > self.last and self.length <= HALVINGS
        self.held = self.held + 1 if scale == self.last else 1
        self.length, self.last = self.length + 1, scale
        if self.length == 1:
            self.first = scale
        self.low = min(scale, self.low) if self.length > 1 else scale
        self.nan &= math.isnan(norm)
        self.inf |= math.isinf(norm)
        self.recorded |= loss is not None
        self.good_loss &= loss is not None and math.isfinite(loss)
        self.bad_loss &= loss is not None and not math.isfinite(loss)

    @property
    def lacks_loss(self) -> bool:
        """Whether `AdaptiveLossScale` gave up as early as it does without a loss."""
        adaptive = isinstance(self._rule, AdaptiveLossScale) and self._fitted > 0
        return adaptive and self._gave_up and self.nan and not self.recorded

    def cause(self, fate: Fate | None = None) -> tuple[str, str]:
        """Returns the kind of alarm and its message; both are empty if there is none.

        Args:
            fate: how the skipped steps ended, if that is known.
        """
        self._fate, ended = fate, math.nan if fate is None else fate.ended
        if self.length < LONG:
            return "", ""
        if self.bad_loss:
            return "data", self._bad_loss()
        if self.lacks_loss:
            record = "Record it too: write(step, info, loss=loss)"
            return "loss", f"{self._skipped()}. {LOSS_MISSING}. {record}. {self._outcome(ended)}"
        if ended < self.first:
            return "overflow", (
                f"{self._skipped()}, and finite again at {as_power(ended)}: an "
                f"overflow{self._place()}. {XRAY}."
            )
        if self.nan and self._deepest < self.first <= ended:
            return "data", f"{self._skipped()}. {self._outcome(ended)}"
        if isinstance(self._rule, FixedLossScale):
            return "", ""  # `Alarms` has another alarm for this case
        if self.nan and self._exhausted():
            return "data", (
                f"{self._skipped()}. At the lowest hardly anything of them would be left in "
                f"float16, so probably it is not the scale. {self._look()}"
            )
        if not self._fitted > 0:
            return "", ""
        open_end = fate is not None and self.nan and self._deepest <= self.first / STAYS
        return "overflow", self._unknown() if open_end else self._overflow()

    @property
    def _deepest(self) -> float:
        return self.low if self._fate is None else self._fate.low

    def _steps(self) -> str:
        length = self.length if self._fate is None else self._fate.length
        return f"{length} steps in a row were skipped because"

    def _skipped(self) -> str:
        scales = f"scales from {as_power(self.first)} to {as_power(self._deepest)}"
        if self._deepest == self.first:
            scales = f"a scale of {as_power(self.first)}"
        kind = "NaN" if self.nan else "not finite"
        return f"{self._steps()} gradients were {kind}, at {scales}"

    def _place(self) -> str:
        return " in the backward pass, for the loss was finite" if self.good_loss else ""

    def _exhausted(self) -> bool:
        """Whether the scale was so low that overflows would have ended."""
        if self._fitted > 0 and math.isfinite(self._used) and self._used > 0:
            return self._used * self._deepest / self._fitted < LOWEST
        return self._deepest <= self.first / FAR and (self._fitted > 0 or self._deepest <= NEVER)

    def _look(self) -> str:
        if self.good_loss:
            return f"The loss was finite: look for 0/0 or sqrt(0) in the backward pass. {XRAY}."
        return f"Look at the data and the learning rate, and record the loss. {XRAY}."

    def _bad_loss(self) -> str:
        adaptive = isinstance(self._rule, AdaptiveLossScale)
        hold = "" if adaptive or self._deepest == self.first else f" {HOLDS}."
        return (
            f"{self._steps()} their loss was not finite before "
            f"any scaling: bad data, too high a learning rate, or an overflow in the forward pass. "
            f"No scale helps that. {XRAY}.{hold}"
        )

    def _overflow(self) -> str:
        sure = "an overflow" if self.inf else "probably an overflow"
        if not self.recorded:
            sure = "an overflow, or bad data, which a recorded loss would tell apart"
        falls = " The scale still falls, which ends an overflow." if self.low < self.first else ""
        return f"{self._skipped()}: {sure}{self._place()}.{falls} {XRAY}."

    def _unknown(self) -> str:
        data = "" if self.good_loss else "bad data, "
        return (
            f"{self._skipped()}, and that did not end: {data}a formula of the backward pass such "
            f"as 0/0, or an overflow that only a still lower scale ends. {XRAY}."
        )

    def _outcome(self, ended: float) -> str:
        if ended < self.first:
            return f"Gradients were finite again at {as_power(ended)}: an overflow. {XRAY}."
        if math.isnan(ended):
            return f"{XRAY}."
        return (
            f"Gradients were finite again at {as_power(ended)}, so it was not the scale: probably "
            f"bad data. {XRAY}."
        )

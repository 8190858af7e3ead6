"""Alarms: warns once about each problem of a run, with a remedy."""

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gainstage._base.checks import LARGEST_FLOAT16, as_power
from gainstage._base.warn import warn
from gainstage._programs.boundary import largest_scale
from gainstage._scaling.step_telemetry import StepInfo
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import FixedLossScale, LossScale
from gainstage.runs.largest import LargestGradient
from gainstage.runs.messages import LONG_STREAK, LOSS_MISSING, XRAY, Alike, Between, message_on
from gainstage.runs.recording import Run
from gainstage.runs.skip_causes import SkipCause, Streak, cause_of, streaks
from gainstage.runs.telemetry import ADVISE
from gainstage.runs.writers import Record, Writer

WINDOW = 200  # steps that alarms look back; also the quiet steps before an alarm repeats
SHARE = 0.1  # the largest share of skipped steps without an alarm
_BOUNDARY = (
    "the loss is computed in float16 to its end, so the scale itself passes through float16, and "
    "more than {largest:g} overflows whatever the gradients are. Compute the loss out of "
    'predicted.astype("float32"), or keep the scale below with {setting}={below}.'
)
_BLIND = (
    "The first {n} records of Alarms have no telemetry, so no skipped step is seen and no alarm "
    "rings. Create the transformation or the optimizer with telemetry=True, and write "
    "alarms.write(n, gainstage.telemetry(opt_state), loss=loss); an optimizer is passed itself."
)
IN_A_ROW = 16  # steps in a row that were retried
ZEROS = 50  # applied steps in a row without any gradient
LOW = 16  # bits between the largest gradient and the limit
MEMORY = 2000  # steps for which an overflow counts as evidence of the limit


class Alarm(UserWarning):
    """A warning about a run that a person should look at.

    Args:
        kind: "data", "overflow", "loss", "floor", "skips", "retries", "headroom", "growth" or
            "boundary".
        step: the step at which the problem was detected.
        message: what happened, and what to do next.
    """

    def __init__(self, kind: str, step: int, message: str):
        super().__init__(f"Step {step}: {message}")
        self.kind: str = kind
        self.step: int = step
        self.message: str = message

    def __reduce__(self) -> Any:
        return type(self), (self.kind, self.step, self.message)


class Alarms(Writer):
    """Watches the telemetry of a run, and warns once about each problem.

    - "data": eight steps in a row were skipped because the loss was not finite, or because
      gradients were NaN at scales so low that a lower one cannot help.
    - "overflow": eight steps in a row were skipped for another reason, probably an overflow.
    - "loss": `AdaptiveLossScale` needs the loss, but does not get it.
    - "floor": the scale is the rule's lowest, and steps are still skipped.
    - "skips": more than a tenth of the last 200 steps were skipped.
    - "retries": each of the last 16 steps was taken more than once, at a lower scale.
    - "headroom": a scale that cannot fall is within one bit of overflow.
    - "growth": for 200 steps the largest gradient was `2**16` below the limit, nothing overflowed,
      and the scale did not rise, except a fixed one of 1. Or all gradients of 50 steps were 0.
    - "boundary": the loss is computed in float16, where the rule's scales overflow; see `look_at`.

    Alarms change nothing in the run. With `warnings.simplefilter("error", Alarm)` an alarm becomes
    an exception of `write`, between two steps, so a checkpoint can be saved.

    Args:
        rule: the rule of the run; some alarms depend on its bounds and its period.
        on_alarm: called with each `Alarm`; by default `warnings.warn`.
        every: as for every `Writer`; an alarm can be this many steps late.
        largest_number: the largest number of the backward pass's dtype, by default float16's.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage.diagnostics import Alarms
        >>> w = gs.Variable([1.0])
        >>> opt = gs.LossScaleOptimizer(gs.optimizers.SGD(0.1), telemetry=True)
        >>> with Alarms(opt.rule, on_alarm=lambda alarm: print(alarm.kind)) as alarms:
        ...     for step in range(20):
        ...         opt.apply([[float("nan")]], [w])
        ...         alarms.write(step, gs.telemetry(opt), loss=float("nan"))
        data
    """

    def __init__(
        self,
        rule: LossScale | None = None,
        on_alarm: Callable[[Alarm], Any] | None = None,
        every: int = 50,
        largest_number: float = LARGEST_FLOAT16,
    ):
        super().__init__(every)
        self._rule, self._watch = rule, _Watch(rule, largest_number)
        self._tell = on_alarm or (lambda alarm: warnings.warn(alarm, stacklevel=5))
        self._blind: int | None = 0  # records without telemetry, None after the first with it

    def write(self, step: int, info: StepInfo | None = None, **numbers: Any) -> None:
        if self._blind is not None:
            knows = info is not None or "finite" in numbers
            self._blind = None if knows else self._blind + 1
            if self._blind == LONG_STREAK:
                warn(_BLIND.format(n=LONG_STREAK))
        super().write(step, info, **numbers)

    def look_at(self, fun: Callable[..., Any], *args: Any) -> None:
        """Checks, before the run, how the loss is computed.

        Args:
            fun: the loss, a function of `args` that returns a scalar or (loss, aux). It is only
                traced.
            *args: arrays, or `jax.ShapeDtypeStruct`s as for `jax.eval_shape`.
        """
        largest, highest = largest_scale(fun, *args), _highest(self._rule)
        if largest < highest:
            fixed = isinstance(self._rule, FixedLossScale)
            setting = "loss_scale_value" if fixed else "max_scale"
            below = as_power(2.0 ** math.floor(math.log2(largest))) if largest > 0 else "0"
            message = _BOUNDARY.format(largest=largest, setting=setting, below=below)
            self._tell(Alarm("boundary", 0, message))

    def put(self, records: list[Record]) -> None:
        found = [alarm for record in records for alarm in self._watch.see(record)]
        for alarm in found:
            self._tell(alarm)


def alarms_in(
    run: Run, rule: LossScale | None = None, largest_number: float = LARGEST_FLOAT16
) -> list[Alarm]:
    """Returns the alarms for a recorded run.

    Later steps are used too: if a run of skipped steps ended at a lower scale, it was an overflow.
    Of all that have one cause, only the longest rings.

    Args:
        run: the result of `read_run`.
        rule: the rule of the run, by default the recorded one.
        largest_number: as for `Alarms`.
    """
    watch, found = _Watch(run.rule if rule is None else rule, largest_number), []
    by_cause: dict[SkipCause, list[Streak]] = defaultdict(list)
    for streak in streaks(run):
        by_cause[cause_of(streak)].append(streak)
    whole: dict[int, Alike] = {}
    for rows in by_cause.values():
        longest = max(rows, key=lambda streak: streak.length)
        alike = Alike(longest, len(rows), sum(streak.length for streak in rows))
        whole |= {place: alike for row in rows for place in range(row.start, row.stop)}
    for i, step in enumerate(run.steps):
        there = {n: c[i] for n, c in run.numbers.items() if n not in run.gaps or not run.gaps[n][i]}
        found += watch.see({"step": step, **there}, i, whole.get(i))
    return found


class _Watch:
    """The state of the alarms, updated step by step, in plain Python."""

    def __init__(self, rule: LossScale | None, limit: float):
        self._rule, self._limit = rule, limit
        self._floor = float(getattr(rule, "min_scale", 0.0))
        self._ceiling = _highest(rule)
        self._quiet: dict[str, int] = {}  # kind: steps since its condition last held
        self._skips: deque[str] = deque(maxlen=WINDOW)  # of each step, "" if it was not skipped
        self._seen, self._between = LargestGradient(), Between(WINDOW, SHARE)
        self._largest: deque[float] = deque(maxlen=WINDOW)  # of each step, times the scale
        self._row = Streak()  # the latest run of skipped steps
        self._fitted = math.nan  # the scale of the last finite step
        self._has_cause = False  # whether the last step had an alarm for the run of skipped steps
        self._retried = (0.0, 0)  # the count of retries, and the steps in a row that had one
        self._lost = False  # whether the last step was skipped with a non-finite loss
        self._before = math.nan  # its scale
        self._raised = 0  # steps since the scale last rose
        self._moved = False  # whether the scale ever changed
        self._overflowed = (math.inf, 0)  # the lowest scale that overflowed recently, and when
        self._lowest = math.inf  # the lowest that ever overflowed, and was not finite since

    def see(self, record: Record, place: int = 0, alike: Alike | None = None) -> list[Alarm]:
        """Returns the alarms of the next step.

        Args:
            record: the step's numbers.
            place: the index of the step in a recorded run.
            alike: all runs of skipped steps with the cause of this step, in a recorded run.
        """
        step, scale = int(record["step"]), float(record.get("loss_scale", math.nan))
        if not _known(record.get("finite")):
            return []
        finite = bool(record["finite"])
        norm = float(record.get("grad_norm", math.nan if finite else math.inf))
        loss = float(record["loss"]) if "loss" in record else None
        lowered = self._lowered_for_a_bad_loss(scale)
        self._lost = not finite and cause_of(loss=loss) is SkipCause.BAD_LOSS
        used = self._seen.of(float(record.get("max_abs", math.nan)), norm) * scale
        if finite:
            self._end_of_row(step, scale)
            self._largest.append(used)
        else:
            self._row.add(loss, norm, scale)
        kind = cause = ""
        if self._row.length >= LONG_STREAK:
            kind, cause = message_on(alike or Alike(self._row), self._rule)
        told = alike is None or alike.longest.start <= place < alike.longest.stop
        if cause:  # do not count these steps as skips too
            for _ in range(
                min(self._row.length - 1, len(self._skips)) if not self._has_cause else 0
            ):
                self._skips.pop()
        elif self._fitted > 0:
            known = "no loss" if loss is None else "bad loss" if self._lost else "loss"
            self._skips.append("" if finite else known)
        self._has_cause = bool(cause)
        self._moved |= scale != self._before and not math.isnan(self._before)
        self._raised = 0 if scale > self._before else self._raised + 1
        self._before = scale
        return [
            Alarm(kind, step, message)
            for kind, message in (
                ("data", cause if told and kind == "data" else ""),
                ("overflow", cause if told and kind == "overflow" else ""),
                ("loss", cause if told and kind == "loss" else lowered),
                ("floor", self._at_floor(scale, finite)),
                ("skips", self._between.message(record) or self._many_skips(scale)),
                ("retries", self._many_retries(float(record.get("retried_steps", 0)), scale)),
                ("headroom", self._no_headroom(scale, finite)),
                ("growth", self._no_growth(step, scale)),
            )
            if self._rings(kind, bool(message))
        ]

    def _rings(self, kind: str, condition: bool) -> bool:
        """Whether the condition holds for the first time, or again after quiet steps."""
        quiet = self._quiet.get(kind, WINDOW)
        self._quiet[kind] = 0 if condition else quiet + 1
        return condition and quiet >= WINDOW

    def _end_of_row(self, step: int, scale: float) -> None:
        """Updates the known overflows when a finite step ends a run of skipped steps."""
        row = self._row
        not_the_scale = row.bad_loss or row.low < row.first <= scale
        if row.length and not not_the_scale:
            lowest, when = self._overflowed
            if row.low <= lowest or step - when > MEMORY:
                self._overflowed = (row.low, step)
            self._lowest = min(self._lowest, row.low)
        if scale >= self._lowest:
            self._lowest = math.inf
        self._fitted = scale
        self._row = Streak(self._largest[-1] if self._largest else math.nan, scale)

    def _lowered_for_a_bad_loss(self, scale: float) -> str:
        if not isinstance(self._rule, AdaptiveLossScale) or not self._lost:
            return ""
        if not scale < self._before:
            return ""
        return (
            f"the scale fell from {as_power(self._before)} to {as_power(scale)} after a loss that "
            f"was not finite. {LOSS_MISSING}."
        )

    def _at_floor(self, scale: float, finite: bool) -> str:
        row = self._row
        if finite or row.bad_loss:
            return ""
        mend = "their loss is finite, so" if row.good_loss else "if their loss is finite,"
        if isinstance(self._rule, FixedLossScale) and row.length >= LONG_STREAK:
            return (
                f"{row.length} steps in a row were skipped, and the scale of {as_power(scale)} "
                f"cannot fall; {mend} it is too high: take a lower loss_scale_value. {XRAY}."
            )
        if self._rule is None and row.held >= 2 * LONG_STREAK and not self._has_cause:
            return (
                f"{row.length} steps in a row were skipped, and the scale stayed at "
                f"{as_power(scale)}; {mend} it is too high, or gradients are beyond what the "
                f"dtype holds: let it fall lower, or lower the learning rate. {XRAY}. {ADVISE}."
            )
        if row.length < 2 or not scale <= self._floor:
            return ""
        return (
            f"the scale is at its lowest, {as_power(scale)}, and steps are still skipped; {mend} "
            f"gradients are beyond what the dtype holds: lower min_scale, or the learning rate. "
            f"{XRAY}. {ADVISE}."
        )

    def _many_skips(self, scale: float) -> str:
        skips = [why for why in self._skips if why]
        if len(self._skips) < WINDOW or len(skips) <= SHARE * WINDOW:
            return ""
        mend = "raised too often: take a longer increment_period"
        if isinstance(self._rule, FixedLossScale):
            mend = "too high: take a lower loss_scale_value"
        bad, good = skips.count("bad loss"), skips.count("loss")
        if bad == len(skips):
            why = f"The loss of those steps was not finite before any scaling. {XRAY}"
        elif good == len(skips):
            why = f"Their loss was finite, so the scale is {mend}. {XRAY}"
        else:
            why = (
                f"{bad} of them had a loss that was not finite, so no scale helps. Of those "
                f"whose loss is finite, the scale is {mend}. {XRAY}"
            )
        return (
            f"{len(skips)} of the last {WINDOW} steps were skipped; the scale is "
            f"{as_power(scale)}. {why}."
        )

    def _many_retries(self, retries: float, scale: float) -> str:
        before, row = self._retried
        row = row + 1 if retries > before else 0
        self._retried = retries, row
        if row < IN_A_ROW:
            return ""
        return (
            f"each of the last {row} steps was computed more than once, because it overflowed at "
            f"first. The scale is {as_power(scale)}: start from a lower one, or take a longer "
            f"increment_period."
        )

    def _no_headroom(self, scale: float, finite: bool) -> str:
        fixed = isinstance(self._rule, FixedLossScale) or scale <= self._floor
        if not fixed or not finite or not self._largest[-1] > self._limit / 2:
            return ""
        lower = "a lower loss_scale_value" if scale > self._floor else "a lower min_scale"
        return (
            f"the largest gradient times the scale is {self._largest[-1]:.3g}, within one bit of "
            f"overflow, and the scale of {as_power(scale)} cannot fall. Take {lower}."
        )

    def _no_growth(self, step: int, scale: float) -> str:
        lowest, when = self._overflowed
        recent = list(self._largest)[-ZEROS:]
        if len(recent) == ZEROS and not any(recent):
            return (
                f"all gradients of the last {ZEROS} applied steps are 0. If that should not be, "
                f"they are flushed: take a higher scale than {as_power(scale)}{self._other()}. "
                f"{ADVISE}."
            )
        learned = lowest <= 4 * scale and step - when <= MEMORY
        if learned or self._raised < WINDOW or any(self._skips):
            return ""
        if len(self._largest) < WINDOW or any(map(math.isnan, self._largest)):
            return ""
        stays = isinstance(self._rule, FixedLossScale) or (self._rule is None and not self._moved)
        if stays and scale == 1:
            return ""  # the run does not scale, on purpose
        largest = max(self._largest)
        bits = int(math.log2(self._limit / largest))
        if bits < LOW:
            return ""
        fits = min(scale * 2.0 ** (bits - 1), self._lowest / 2)
        setting = f"initial_loss_scale={as_power(fits)}"
        if scale >= self._ceiling and not isinstance(self._rule, FixedLossScale):
            why = f"it is at its highest, max_scale={as_power(scale)}"
            setting = setting.replace("initial_loss_scale", "max_scale")
        elif isinstance(self._rule, FixedLossScale):
            why, setting = "it is fixed", setting.replace("initial_loss_scale", "loss_scale_value")
        elif stays:
            why, setting = "it has never been another", setting.replace("initial_loss_scale=", "")
        elif isinstance(self._rule, AdaptiveLossScale):
            why, setting = "an earlier overflow limits it", "a shorter increment_period"
        else:
            why = f"it has not risen for {self._raised} steps"
        if not fits > scale:
            setting = "a shorter increment_period"
        return (
            f"the largest gradient of the last {WINDOW} steps is {bits} bits below what float16 "
            f"holds, so small ones may be lost. The scale is {as_power(scale)}, and {why}. "
            f"Take {setting}{self._other()}."
        )

    def _other(self) -> str:
        """The advice to try another rule, unless the run uses it or its rule is unknown."""
        adaptive = isinstance(self._rule, AdaptiveLossScale | None)
        return "" if adaptive else ", or rule=gs.AdaptiveLossScale()"


def _highest(rule: LossScale | None) -> float:
    """The highest scale that a rule can reach."""
    return float(getattr(rule, "loss_scale_value", getattr(rule, "max_scale", math.inf)))


def _known(number: Any) -> bool:
    return number is not None and not math.isnan(np.float64(number))

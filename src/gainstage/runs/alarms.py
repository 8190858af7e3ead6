"""Alarms: warns once about each problem of a run, with a remedy."""

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gainstage._base.checks import LARGEST_FLOAT16, brief
from gainstage._base.warn import warn
from gainstage.rules.loss_scale import LossScale
from gainstage.runs.findings import FINDINGS, findings_on
from gainstage.runs.history import LONG_STREAK, WINDOW, History, SameCause
from gainstage.runs.recording import Run
from gainstage.runs.skip_causes import SkipCause, Streak, cause_of, streaks
from gainstage.runs.writers import Record, Writer

ALARM_KINDS = tuple(dict.fromkeys(finding.name for finding in FINDINGS))
_BLIND = (
    "The first {n} records of Alarms have no telemetry, so no skipped step is seen and no alarm "
    "rings. Create the transformation or the optimizer with telemetry=True, and write "
    "alarms.write(n, gainstage.diagnostics.telemetry(opt_state), loss=loss); an optimizer is "
    "passed itself."
)


class Alarm(UserWarning):
    """A warning about a run that a person should look at.

    Args:
        kind: "data", "overflow", "loss", "floor", "skips", "retries", "lost", "audit", "headroom"
            or "growth".
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
    - "lost": most of the steps of one kind were skipped, though their loss is finite: those that
      were retried in vain, those whose loss is far larger than around them, or those at a regular
      distance. It needs the loss, and a record of each step.
    - "audit": three audits in a row were past a bound, or one by much; pass them as
      `write(..., audit=step.audit)`.
    - "headroom": a scale that cannot fall is within one bit of overflow.
    - "growth": for 200 steps the largest gradient was `2**16` below the limit, nothing overflowed,
      and the scale did not rise, except a fixed one of 1. Or all gradients of 50 steps were 0.

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
        >>> w = gs.optimizers.Variable([1.0])
        >>> opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1), telemetry=True)
        >>> with Alarms(opt.rule, on_alarm=lambda alarm: print(alarm.kind)) as alarms:
        ...     for step in range(20):
        ...         opt.apply([[float("nan")]], [w])
        ...         alarms.write(step, gs.diagnostics.telemetry(opt), loss=float("nan"))
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
        if not isinstance(rule, LossScale | None):
            raise TypeError(
                f"Expected the rule of the loss scale, or None; got {brief(rule)}. Write "
                f"Alarms(gainstage.DynamicLossScale()), or Alarms(optimizer.rule)."
            )
        self._rule, self._bell = rule, _Bell(rule, largest_number)
        self._tell = on_alarm or (lambda alarm: warnings.warn(alarm, stacklevel=5))
        self._blind: int | None = 0  # records without telemetry, None after the first with it

    def put(self, records: list[Record]) -> None:
        self._look_for_telemetry(records)
        for alarm in [alarm for record in records for alarm in self._bell.see(record)]:
            self._tell(alarm)

    def _look_for_telemetry(self, records: list[Record]) -> None:
        """Warns once if the first records have none."""
        for record in records:
            if "finite" in record:
                self._blind = None
            if self._blind is None:
                return
            self._blind += 1
            if self._blind == LONG_STREAK:
                warn(_BLIND.format(n=LONG_STREAK))


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
    bell, found = _Bell(run.rule if rule is None else rule, largest_number), list[Alarm]()
    by_cause: dict[SkipCause, list[Streak]] = defaultdict(list)
    for streak in streaks(run):
        by_cause[cause_of(streak)].append(streak)
    causes: dict[int, SameCause] = {}  # by the index of the step
    for each in by_cause.values():
        longest = max(each, key=lambda streak: streak.length)
        same = SameCause(longest, len(each), sum(streak.length for streak in each))
        causes |= {place: same for row in each for place in range(row.start, row.stop)}
    for i, step in enumerate(run.steps):
        there = {n: c[i] for n, c in run.numbers.items() if n not in run.gaps or not run.gaps[n][i]}
        same_cause = causes.get(i)
        is_longest = same_cause is None or (same_cause.longest.start <= i < same_cause.longest.stop)
        named = {"audit_tensor": run.audited[step]} if step in run.audited else {}
        found += bell.see({"step": step, **there, **named}, same_cause, is_longest)
    return found


class _Bell:
    """Rings for each kind of finding once, and again after quiet steps."""

    def __init__(self, rule: LossScale | None, limit: float):
        self._history = History(rule, limit)
        self._quiet: dict[str, int] = {}  # by kind: the steps since it was last found

    def see(
        self, record: Record, same_cause: SameCause | None = None, is_longest: bool = True
    ) -> list[Alarm]:
        """The alarms of the next step; of a streak they ring only in the longest one."""
        if not self._history.add(record, same_cause):
            return []
        of_streak, others = findings_on(self._history)
        findings = others | (of_streak if is_longest else {})
        alarms = []
        for kind in ALARM_KINDS:
            quiet = self._quiet.get(kind, WINDOW)
            self._quiet[kind] = 0 if kind in findings else quiet + 1
            if kind in findings and quiet >= WINDOW:
                alarms.append(Alarm(kind, self._history.step, findings[kind]))
        return alarms

"""The audits of a run: when one is due, and what is said of it once it is ready."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gainstage._base.warn import warn
from gainstage.precision.autocast import under_plan
from gainstage.training.audit import (
    PARTS,
    AuditResult,
    Bounds,
    Given,
    compiled_audit,
    is_out_of_memory,
    of_batch,
    shares_axis,
)
from gainstage.training.mending import STEP, mended
from gainstage.transforms.value_and_grad import LossFunction

ENOUGH = 3  # audits in a row that are a little past a bound
KEEP = (
    "with gainstage.keep_float32(): around it, or step.plan.save(path), and gainstage.autocast("
    "loss_fn, gainstage.precision.Plan.load(path))."
)
_INSIDE = (
    "train_step(audit_every=...) audits nothing inside of jax.jit, jax.lax.scan or jax.shard_map, "
    "where each step would have to hold the audit. Call the step outside of them, or call "
    "gainstage.audit(loss_fn, state, *batch) between the steps."
)
_LEFT_OUT = (
    "The audits of this run are left out: the loss in float32 does not fit into memory, {why}. "
    "gainstage.audit(loss_fn, state, *batch) with a smaller batch does one."
)


@dataclasses.dataclass(frozen=True)
class Audits:
    """The audits of a run so far.

    Args:
        count: the number of those that compared half precision with float32.
        bias: the mean of `loss_difference`.
        spread: its standard deviation.
        last: the last of them.
    """

    count: int = 0
    bias: float = 0.0
    spread: float = 0.0
    last: AuditResult | None = None


class AuditedRun:
    """Audits steps of a run, before they are taken, at first soon and then more rarely. It never
    waits for a result, unless it mends.

    Attributes:
        loss: the loss as it is now, mended where that was needed.
        found: the audits so far.
        current: that of the last step.

    Args:
        loss: a loss under autocast.
        every: the number of steps between audits.
        bounds: as for `audit`.
        mends: whether lines that spoil a step go back to float32.
        advice: what a warning says to write, so that a run is mended from the start.
    """

    def __init__(
        self,
        loss: LossFunction,
        every: int,
        bounds: Bounds,
        *,
        mends: bool = False,
        advice: str = KEEP,
    ) -> None:
        self.loss: LossFunction = loss
        self.mends: bool = mends
        self._every, self._bounds, self._advice = every, bounds, advice
        self._compiled = compiled_audit()
        self._part = 1  # of the batch that is used; 0 if audits are left out
        self._next, self._extra = 0, math.inf  # the steps of the next audits
        self._count = 0  # steps so far
        self._again = 0  # steps from which on a mending is tried
        self._soon = 1  # steps until an audit that decided nothing is taken again
        self._suspects: list[AuditResult] = []  # the last audits in a row past a bound
        self._waiting: list[AuditResult] = []
        self._squares = 0.0  # of the distances of loss differences to their mean
        self._told = set[str]()  # the kinds of warnings
        self.found: Audits = Audits()
        self.current: AuditResult | None = None  # that of the last step

    def before(self, arguments: Callable[[], Given], steps: int = 1) -> None:
        """Audits a step before it is taken, if one is due, and reads what is ready.

        Args:
            arguments: a function that returns the arguments of the step.
            steps: the number of steps that are taken now.
        """
        self.current = None
        if self._waiting:
            self._look()
        if self._count >= min(self._next, self._extra) and self._part:
            if self._count >= self._next:
                self._next = _following(self._count, self._every)
            self._extra = math.inf
            given = arguments()
            given = given._replace(step=self._count) if given.step is None else given
            self.current = self._audited(given)
            if self.current is not None and self.mends:
                self.current, given = self._at_scale_that_fits(self.current, given)
                self._read(self.current, given)
            elif self.current is not None:
                self._waiting.append(self.current)
        self._count += steps

    def mend_now(self, arguments: Callable[[], Given]) -> bool:
        """Mends a run whose steps are skipped; returns whether that helps.

        Args:
            arguments: as for `before`.
        """
        # What is ready, by which this was seen, differs between processes, which must agree.
        if not self.mends or not self._part or jax.process_count() > 1:
            return False
        given = arguments()
        audit = self._audited(given)
        if audit is None:
            return False
        audit, given = self._at_scale_that_fits(audit, given)
        return (audit.is_off or audit.overflows) and self._mend(audit, given)

    def finish(self) -> None:
        """Waits for the audits that are not ready yet, and reads them."""
        jax.block_until_ready([audit.numbers for audit in self._waiting])
        self._look()

    def tell_inside(self) -> None:
        """Warns of a step that is traced, which has no audit."""
        self.current = None
        self._tell("inside", _INSIDE)

    def _audited(self, arguments: Given) -> AuditResult | None:
        """The audit of a batch, or of a part of it that fits into memory."""
        while self._part:
            try:
                audit = of_batch(self._compiled, self.loss, arguments, self._bounds, self._part)
                if self.mends:
                    jax.block_until_ready(audit.numbers)
                return audit
            except Exception as error:
                if self._part == 1 and not is_out_of_memory(error):
                    raise  # which the step would raise too
                self._shrink(shares_axis(arguments.batch))
        return None

    def _shrink(self, shares: bool) -> None:
        """Goes on with a smaller part of the batch, or without audits."""
        smaller = [part for part in PARTS if part > self._part] if shares else []
        self._part = smaller[0] if smaller else 0
        if not self._part:
            why = f"nor does an audit of 1/{PARTS[-1]} of the batch" if shares else (
                "and the arrays of the batch have no leading axis in common, of which to take a "
                "part"
            )  # fmt: skip
            self._tell("memory", _LEFT_OUT.format(why=why))

    def _look(self) -> None:
        """Reads the audits that are ready."""
        while self._waiting and self._waiting[0].numbers.is_ready():
            audit = self._waiting.pop(0)
            try:
                self._read(audit)
            except jax.errors.JaxRuntimeError as error:  # of a program that ran out of memory
                if not is_out_of_memory(error):
                    raise
                self._shrink(shares=True)

    def _read(self, audit: AuditResult, given: Given | None = None) -> None:
        """Reads an audit; with the arguments of its step, mends what is off."""
        is_stuck = given is not None and audit.overflows
        if audit.overflows and not is_stuck:
            self._audit_soon()
            return
        self._soon = 1
        if audit.is_comparable and math.isfinite(audit.loss_difference):
            count, mean = self.found.count + 1, self.found.bias
            off = audit.loss_difference - mean
            mean += off / count
            self._squares += off * (audit.loss_difference - mean)
            self.found = Audits(count, mean, math.sqrt(self._squares / count), audit)
        self._suspects = [*self._suspects[: ENOUGH - 1], audit] if audit.is_off else []
        if is_stuck or audit.is_far_off or len(self._suspects) == ENOUGH:
            if given is None or not self._mend(audit, given):
                self._tell("off", str(self._suspects[0] if self._suspects else audit))
        elif audit.is_off:
            # One batch may be past a bound by chance, where a sum of gradients is nearly 0.
            self._audit_soon()
        elif not audit.ok:
            self._tell("reference", str(audit))

    def _at_scale_that_fits(self, audit: AuditResult, given: Given) -> tuple[AuditResult, Given]:
        """The audit at a lower loss scale if the gradients overflow at this one. Where they do so
        at the lowest too, no step will be applied."""
        while audit.overflows and audit.measured.scale > given.floor:
            scale = max(audit.measured.scale / STEP, given.floor)
            given = given._replace(scale=jnp.float32(scale))
            audit = self._audited(given) or audit
        return audit, given

    def _mend(self, audit: AuditResult, given: Given) -> bool:
        """Takes lines back into float32; returns whether any was. What was measured in vain is
        measured again only when the run is twice as long."""
        if self._count < self._again:
            return False

        def audited(loss: LossFunction, given: Given, part: int) -> AuditResult:
            return of_batch(self._compiled, loss, given, self._bounds, part)

        try:
            found = mended(self.loss, given, self._bounds, audit, self._part, audited)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = None
        if found is None or not found.rows:
            self._again = 2 * self._count + 1
        if found is None:
            return False
        if not found.rows:
            self._tell("scale", found.told(self._advice))
            return True
        self.loss = self.loss._replace(fun=under_plan(self.loss.fun, found.plan))
        self._suspects, self.current = [], found.after
        warn(found.told(self._advice))
        return True

    def _audit_soon(self) -> None:
        """Audits one of the next steps. Whether a result is ready differs between processes, which
        must agree: several wait for the next audit that is due, unless they wait for results."""
        if (self.mends or jax.process_count() == 1) and self._soon < self._every:
            self._extra, self._soon = self._count + self._soon - 1, 2 * self._soon

    def _tell(self, kind: str, message: str) -> None:
        """Warns once of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            warn(message)


def _following(count: int, every: int) -> int:
    """The number of steps after which the next audit is due: 1, 3, 10, 30, 100 and so on, and then
    each `every`."""
    early = (number * 10**power for power in range(7) for number in (1, 3))
    return next((n for n in early if count < n < every), (count // every + 1) * every)

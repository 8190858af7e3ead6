"""The audits of a run: when one is due, and what is said of it once it is ready."""

import dataclasses
import math
from collections.abc import Callable

import jax

from gainstage._base.warn import warn
from gainstage.transforms.audit import (
    PARTS,
    AuditResult,
    Given,
    compiled_audit,
    is_out_of_memory,
    of_batch,
    shares_axis,
)
from gainstage.transforms.value_and_grad import LossFunction

ENOUGH = 3  # audits in a row that are a little past a bound
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
    """Audits steps of a run, before they are taken, and never waits for a result.

    Args:
        loss: a loss under autocast.
        every: the number of steps between audits.
        bounds: as for `audit`.
    """

    def __init__(self, loss: LossFunction, every: int, bounds: tuple[float, float, float]) -> None:
        self._loss, self._every, self._bounds = loss, every, bounds
        self._compiled = compiled_audit()
        self._part = 1  # of the batch that is used; 0 if audits are left out
        self._next, self._extra = 0, math.inf  # the steps of the next audits
        self._count = 0  # steps so far
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
                self._next = self._count + self._every
            self._extra = math.inf
            given = arguments()
            given = given._replace(step=self._count) if given.step is None else given
            self.current = self._audited(given)
            self._waiting += [self.current] if self.current is not None else []
        self._count += steps

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
                return of_batch(self._compiled, self._loss, arguments, self._bounds, self._part)
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

    def _read(self, audit: AuditResult) -> None:
        if audit.overflows:
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
        if audit.is_far_off or len(self._suspects) == ENOUGH:
            self._tell("off", str(self._suspects[0]))
        elif audit.is_off:
            # One batch may be past a bound by chance, where a sum of gradients is nearly 0.
            self._audit_soon()
        elif not audit.ok:
            self._tell("reference", str(audit))

    def _audit_soon(self) -> None:
        """Audits one of the next steps. Whether a result is ready differs between processes, which
        must agree; several wait for the next audit that is due."""
        if jax.process_count() == 1 and self._soon < self._every:
            self._extra, self._soon = self._count + self._soon - 1, 2 * self._soon

    def _tell(self, kind: str, message: str) -> None:
        """Warns once of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            warn(message)

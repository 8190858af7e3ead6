"""Mending: the lines that spoil a step in half precision go back to float32."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gainstage._base import checks
from gainstage._base.checks import as_power
from gainstage._base.progress_bar import counted
from gainstage._base.warn import warn
from gainstage._variables.types import PyTree, Scalar, Using
from gainstage.precision.autocast import plan_of, under_plan
from gainstage.precision.emulated import Collected, by_rules
from gainstage.precision.noise_and_bias import GradientAccuracy
from gainstage.precision.plan import Plan, PlanEntry
from gainstage.precision.policy import Level
from gainstage.precision.program_costs import bytes_in_half
from gainstage.precision.samples import Samples
from gainstage.precision.shares import Emulation, Levels, Results, chosen
from gainstage.training.audit import (
    BOUNDS,
    COUNTS,
    AuditResult,
    Bounds,
    Given,
    audited,
    first_part,
    given_to,
    on_a_part_that_fits,
    percentage,
)
from gainstage.transforms.value_and_grad import LossFunction

RESTS = 0.5, 0.1, 0.0  # the parts of the bounds that may be left, as other batches differ
BETTER = 0.5  # the part of the error that is left where a mending helps
TRIES = 4  # choices by the shares for each of these, if they do not add up
STEP = 2.0**4  # between two loss scales that are tried
LARGEST_SCALE = 2.0**24  # loss scale that is tried
TINY = 1e-150  # below which the norm of a gradient is 0


AuditOf = Callable[[LossFunction, Given, int], AuditResult]


class Mended(NamedTuple):
    """What was done to a function, and what for."""

    plan: Plan  # in force from then on
    rows: tuple[PlanEntry, ...]  # those that are new; none if a larger loss scale is the remedy
    before: AuditResult
    after: AuditResult
    scale: float = 0.0  # the larger loss scale

    def told(self, advice: str) -> str:
        """What is said of it, with what to write so that it is so from the start."""
        step = self.before.step
        when = "" if step is None else f"step {int(jax.device_get(step))}: "
        if not self.rows:
            own, better = (as_power(scale) for scale in (self.before.measured.scale, self.scale))
            return (
                f"{when}half precision made {_wrong(self.before)}, as the loss scale {own} loses "
                f"small gradients. At {better} they are right, so nothing goes back to float32. "
                f"Write loss_scale=gainstage.DynamicLossScale({better.replace('^', '.0**')})."
            )
        lines = list(dict.fromkeys(o.code for o in self.rows))
        more = f" and {len(lines) - 5} lines more" * (len(lines) > 5)
        left = f"{self.plan.left:.0%} of what was in half precision is left"
        if not self.plan.left:
            left = "nothing is left in half precision: this program gains nothing by it"
        return (
            f"{when}half precision made {_wrong(self.before)}. From here on "
            f"{', '.join(lines[:5])}{more} {'is' if len(lines) == 1 else 'are'} in float32: "
            f"{_wrong(self.after)}; {left}. To keep that from the start: {advice}"
        )


def _wrong(audit: AuditResult) -> str:
    """How far loss and gradients are off, as text."""
    if not math.isfinite(audit.loss):
        return f"the loss {audit.loss:.4g}, for {audit.float32_loss:.4g} in float32"
    if not math.isfinite(audit.gradient_error):
        return "a gradient not finite at any loss scale"
    return (
        f"the loss {percentage(audit.loss_error)} and the gradients "
        f"{percentage(audit.gradient_error)} wrong"
    )


def mend(
    fun: Callable[..., Any],
    *args: PyTree,
    scale: Scalar | None = None,
    has_aux: bool = False,
    using: Using | None = None,
    bounds: Sequence[float] = BOUNDS,
    progress: bool = True,
) -> Any:
    """Takes the lines that spoil a function in half precision back into float32.

    It audits the function on this batch, as `gainstage.audit` does. If an error is past its bound,
    it measures what each line of the code adds to the error, and takes back those that add most for
    what they cost, until half of the bound is left: the result of a product alone, whose operands
    stay in half precision, before all of it. That takes about two gradients for each line, of one
    program. The loss scale, the state and the weights stay as they are.
    `train_step(loss_fn, audit_every=1000, mend=True)` does so in a run.

    Args:
        fun, *args, scale, has_aux, using, bounds: as for `gainstage.audit`.
        progress: whether to show a progress bar, in a terminal.

    Returns:
        The function with these lines in float32, or `fun` itself where nothing is to be mended. Its
        attribute `plan` says which, and prints: `print(mended.plan)`. `mended.plan.save(path)` and
        `gainstage.autocast(float32_fun, Plan.load(path))` keep it for another run.

    Raises:
        TypeError, ValueError: as for `gainstage.audit`.

    Warns:
        UserWarning: a larger loss scale is what helps, as this one loses small gradients.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> def loss_fn(w, x):
        ...     h = (x + 2000.0) @ w  # an offset
        ...     return jnp.mean(jnp.tanh(h - 2000.0 * w.sum(0)) ** 2)
        >>> w = jax.random.normal(jax.random.key(0), (16, 16)) / 4
        >>> x = jax.random.normal(jax.random.key(1), (64, 16))
        >>> mended = gs.mend(gs.autocast(loss_fn), w, x, scale=1.0)
        >>> for operation in mended.plan.entries:
        ...     print(operation.name, operation.dtype, operation.text)
        dot_general float32 h = (x + 2000.0) @ w  # an offset

    Source: shares of rounding errors that add up, as in precision tuning (Rubio-Gonzalez et al.,
    2013), with a prediction instead of a search.
    """
    loss, given, limits = given_to("mend", fun, args, scale, has_aux, using, bounds)
    shows = checks.flag("progress", progress)
    before, part = audited(loss, given, limits)
    while before.overflows and before.measured.scale > given.floor:
        given = given._replace(scale=max(before.measured.scale / STEP, given.floor))
        before, part = audited(loss, given, limits)
    found = None
    if before.is_off or before.overflows:

        def audit(loss: LossFunction, given: Given, part: int) -> AuditResult:
            return audited(loss, given, limits, part)[0]

        found = mended(loss, given, limits, before, part, audit, shows)
    if found is None or not found.rows:
        if found is not None:
            warn(found.told(""))
        return fun
    return under_plan(fun, found.plan)


def mended(
    loss: LossFunction,
    given: Given,
    bounds: Bounds,
    before: AuditResult,
    part: int,
    audit: AuditOf,
    progress: bool = True,
) -> Mended | None:
    """What to take back into float32 on a batch; None if that would not help.

    Args:
        loss: a loss under autocast.
        given: its arguments.
        bounds: as for `mend`.
        before: the audit of the batch.
        part: as for `of_batch`, the first that is tried.
        audit: `(loss, arguments, part) -> audit`.
        progress: whether to show a progress bar, in a terminal.
    """

    def on_a_part(part: int) -> Mended | None:
        return _mended_on(loss, given, bounds, before, part, audit, progress)

    return on_a_part_that_fits(on_a_part, given.batch, part)


def _mended_on(
    loss: LossFunction,
    given: Given,
    bounds: Bounds,
    before: AuditResult,
    part: int,
    audit: AuditOf,
    progress: bool,
) -> Mended | None:
    """As `mended`, on a part of the batch."""
    extra = [] if given.extra is None else [given.extra]
    batch = first_part(given.batch, part)
    whole = loss._replace(has_extra=given.extra is not None)
    samples = Samples(whole, [(given.params, *extra, *batch)])
    emulation = Emulation(samples, Collected(by_rules))
    plan = plan_of(loss.fun)
    assert plan is not None
    if before.loss_error <= bounds[0] and (larger := _larger_scale(emulation, given, bounds)):
        return Mended(plan, (), before, before, larger)
    with counted(emulation.pieces, "mend", shows=progress) as tick:
        shares = _SharesOfBatch(emulation, given, bounds, tick)
    default, best = bytes_in_half(samples, samples.fun), None
    for rest in RESTS:
        levels = shares.chosen(rest)
        rows = shares.rows(levels, plan)
        if not rows:
            return None
        fun = under_plan(loss.fun, plan.with_plan(Plan(plan.dtype, rows)))
        after = audit(loss._replace(fun=fun), given, part)
        left = plan.left if plan.left == plan.left else 1.0
        left *= bytes_in_half(samples, fun) / default if default else 0.0
        predicted, measured = (
            GradientAccuracy(math.nan, math.nan, error=x)
            for x in (shares.predicted(levels), after.gradient_error)
        )
        new = plan.with_plan(Plan(plan.dtype, rows, predicted, measured, left))
        best = Mended(new, rows, before, after)
        if after.ok:
            return best
    is_better = best and best.after.gradient_error < BETTER * before.gradient_error
    return best if is_better else None


def _larger_scale(emulation: Emulation, given: Given, bounds: Bounds) -> float:
    """A larger loss scale at which half precision is within the bounds; 0 if there is none."""
    scale, exact = float(np.asarray(given.scale)), emulation.run(emulation.widest, 1.0)
    while scale < LARGEST_SCALE:
        scale *= STEP
        found = emulation.run(emulation.narrowest(), scale)
        if not found.is_finite:
            return 0.0
        if _part_of_bounds(found, exact, bounds) <= 1:
            return scale
    return 0.0


def _part_of_bounds(found: Results, exact: Results, bounds: Bounds) -> float:
    """The largest error of loss and gradients, over its bound."""
    off = found.minus(exact)
    if not off.is_finite:
        return math.inf
    of_loss, of_all, _ = bounds
    of_gradients = _norm(off) / (_norm(exact) or 1.0) / of_all
    return max(abs(off.loss) / (abs(exact.loss) or 1.0) / of_loss, of_gradients)


class _SharesOfBatch:
    """The shares of the lines on one batch, and what to take out.

    Args:
        emulation: the function, on one batch.
        given: the arguments of the step, with its loss scale.
        bounds: those of the audit.
        tick: called after each run.
    """

    def __init__(self, emulation: Emulation, given: Given, bounds: Bounds, tick: Callable[[], Any]):
        self._emulation, self._bounds = emulation, bounds
        narrowest, scale = emulation.narrowest(), float(np.asarray(given.scale))
        scales = (max(scale / STEP**n, min(scale, given.floor)) for n in range(TRIES))
        fitting = (s for s in scales if emulation.run(narrowest, s).is_finite)
        self._scale = next(fitting, scale)
        self._exact = emulation.run(emulation.widest, self._scale)
        found = emulation.of_each_line(self._scale, 1, tick)
        self._shares = {key: results.minus(self._exact) for key, (results,) in found.items()}
        self._index = {key: n for n, key in enumerate(self._shares)}
        # What is not finite goes out first, and counts for nothing then.
        self._first = emulation.narrowest(self._is_finite)
        nothing = self._exact.minus(self._exact)
        known = [share if share.is_finite else nothing for share in self._shares.values()]
        self._losses = np.array([share.loss for share in known]) / (abs(self._exact.loss) or 1.0)
        # The products of the errors of two shares, over the squares of the bounds: of all tensors
        # together, and of each that counts.
        norms = np.array([np.linalg.norm(np.float64(g)) for g in self._exact.gradients])
        grams = []
        for number in range(len(norms)):
            vectors = np.array([np.float64(share.gradients[number]) for share in known])
            grams.append(vectors @ vectors.T if len(vectors) else np.zeros((0, 0)))
        whole, (_, of_all, of_tensor) = np.linalg.norm(norms), bounds
        units: list[tuple[Any, Any]] = [(np.sum(grams, axis=0), whole * of_all)]
        counts = norms >= COUNTS * whole
        units += [(grams[n], norms[n] * of_tensor) for n in np.flatnonzero(counts & (norms > 0))]
        self._grams = np.array([gram / max(unit, TINY) ** 2 for gram, unit in units])

    def _is_finite(self, number: int, level: Level) -> bool:
        share = self._shares.get((number, level))
        return share is None or share.is_finite

    def chosen(self, rest: float) -> Levels:
        """The levels that leave a part of the bounds, as predicted and as one run confirms."""
        limit, levels = rest, self._first
        for _ in range(TRIES):
            levels = chosen(self._emulation.lines, self._first, self.left, limit)
            found = self._emulation.run(levels, self._scale)
            if _part_of_bounds(found, self._exact, self._bounds) <= max(rest, RESTS[0]):
                break
            limit /= 2
        return levels

    def left(self, levels: Levels) -> float:
        """The largest error that the shares predict at some levels, over its bound.

        Shares may cancel on one batch by chance. So it is the larger of the norm of their sum, and
        of what independent ones add up to.
        """
        at = self._at(levels)
        losses = self._losses[at]
        of_loss = max(abs(losses.sum()), math.sqrt((losses**2).sum())) / self._bounds[0]
        some = self._grams[:, at][:, :, at]
        sums = np.maximum(some.sum(axis=(1, 2)), np.trace(some, axis1=1, axis2=2))
        return max(of_loss, math.sqrt(max(sums.max(initial=0.0), 0.0)))

    def _at(self, levels: Levels) -> list[int]:
        """The numbers of the shares at some levels."""
        return [self._index[n, level] for n, level in enumerate(levels) if level < Level.FLOAT32]

    def predicted(self, levels: Levels) -> float:
        """The relative error of all gradients that the shares predict at some levels."""
        at = self._at(levels)
        some = self._grams[0][at][:, at]
        return math.sqrt(max(some.sum(), np.trace(some), 0.0)) * self._bounds[1]

    def rows(self, levels: Levels, plan: Plan) -> tuple[PlanEntry, ...]:
        """The rows of the lines that are taken back."""
        found, norm = [], _norm(self._exact) or 1.0
        for number, (line, level) in enumerate(zip(self._emulation.lines, levels, strict=True)):
            if level > line.levels[0]:
                share = self._shares[number, line.levels[0]]
                error = _norm(share) / norm if share.is_finite else math.inf
                reason = f"its share in {line.name_at(line.levels[0], plan.dtype)}"
                reason = reason if share.is_finite else "it overflows"
                row = line.operation(Level(level), plan.dtype, error=error, reason=reason)
                found.append(row)
        return tuple(sorted(found, key=lambda row: -row.error))


def _norm(results: Results) -> float:
    return math.sqrt(sum(float(np.square(np.float64(g)).sum()) for g in results.gradients))

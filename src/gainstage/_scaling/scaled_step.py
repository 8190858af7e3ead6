"""A loss scale around an update: the only code that skips steps and updates the scale."""

# A policy says what happens to the state in a skipped step: `Select`, `Branch`, or one of two
# accumulation windows. Each is a value with a few small pure functions.

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._base.checks import LARGEST, SMALLEST
from gainstage._scaling.finite_check import read_gradients
from gainstage._scaling.gradients import Clip
from gainstage._scaling.measures import measure, measured_of_both
from gainstage._scaling.step_telemetry import at_first, observed
from gainstage._variables.bridge import select
from gainstage._variables.types import Given, PyTree, RuleState
from gainstage._variables.variable import is_inside
from gainstage.rules.loss_scale import LossScale, advance

Update = Callable[..., tuple[Any, PyTree]]  # (state, mask) -> (result, state)


class Taken(NamedTuple):
    """What a policy has made of a step."""

    result: Any
    state: PyTree
    applied: jax.Array  # whether the gradients were used
    # Where the scale is updated between windows, not in each step:
    due: Given = None  # whether this step ends a window
    whole: Given = None  # whether all earlier microbatches of its window were finite


def run_if(applies: jax.Array, update: Update, state: PyTree, *mask: jax.Array) -> PyTree:
    """Returns the state after `update` if `applies`, else the state.

    In a trace the update then does not run. Eagerly it always runs, and its results are selected:
    JAX compiles an eager `lax.cond` at every call.
    """
    if not is_inside():
        return select(applies, lambda state: update(state, *mask), state)[1]
    return lax.cond(applies, lambda state: update(state, *mask)[1], lambda state: state, state)


class Select:
    """The update always runs, and a select stores its results: for steps that are mostly applied.

    XLA can fuse it with earlier computations.
    """

    counter: ClassVar[tuple[str, Any] | None] = None  # name and first value of a window count

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: PyTree) -> Taken:
        """Updates the state, or skips the update.

        Args:
            applies: whether the gradients are finite and the step is not vetoed.
            counts: whether the step counts in its window; False if it was only vetoed.
            update: a function of the state and, if it runs on non-finite gradients, `applies`.
            state: the state that it changes.
        """
        return Taken(*select(applies, update, state), applies)


class Branch(Select):
    """The update runs inside a conditional of a compiled step; eagerly it always runs."""

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: PyTree) -> Taken:
        return Taken(None, run_if(applies, update, state), applies)


@dataclasses.dataclass(frozen=True)
class AccumulationWindow(Branch):
    """Steps are microbatches of a window; a non-finite one extends it.

    Args:
        steps: the number of microbatches in a window.
    """

    steps: int

    def ends(self, state: PyTree) -> jax.Array:
        """Whether this microbatch, if it counts, is the last of its window."""
        return (state.microbatches + 1) % self.steps == 0

    def close(self, state: PyTree) -> tuple[PyTree, Given]:
        """Ends the window: returns the state, and whether there is an update (None: always)."""
        return state, None

    def has_started(self, state: PyTree) -> jax.Array:
        """Whether any microbatch was finite yet."""
        return state.microbatches > 0


class DropWindow(AccumulationWindow):
    """A non-finite microbatch counts; at the end of its window there is no update."""

    counter = ("good_microbatches", 0)

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: PyTree) -> Taken:
        def counted(state: PyTree, mask: jax.Array) -> tuple[Any, PyTree]:
            more = mask.astype(state.window_count.dtype)
            return update(state._replace(window_count=state.window_count + more), mask)

        due, whole = counts & self.ends(state), state.window_count + 1 == self.steps
        runs = applies | due
        state = run_if(runs, counted, state, applies)
        more = jnp.where(counts & ~runs, 1, 0)
        state = state._replace(microbatches=state.microbatches + more)
        return Taken(None, state, applies, due, whole)

    def close(self, state: PyTree) -> tuple[PyTree, Given]:
        whole = state.window_count == self.steps
        state = state._replace(
            accumulators=[jnp.where(whole, total, 0) for total in state.accumulators],
            microbatches=state.microbatches + jnp.where(whole, 0, -self.steps),
            window_count=jnp.zeros_like(state.window_count),
        )
        return state, whole

    def has_started(self, state: PyTree) -> jax.Array:
        return (state.microbatches >= self.steps) | (state.window_count > 0)


WINDOWS = {"extend": AccumulationWindow, "drop_window": DropWindow}


class ScaledStepState(NamedTuple):
    """The state of a `ScaledStep`, as arrays or as variables."""

    rule_state: RuleState  # the rule's state, None without a rule
    observed: Any = None  # the telemetry, if enabled
    measured: Any = ()  # the measurements of the window so far, by name


class StepResult(NamedTuple):
    """The outcome of a step."""

    result: Any
    inner: PyTree  # the state that the update changes, new or unchanged
    state: ScaledStepState
    finite: jax.Array  # whether the gradients were finite
    applied: jax.Array  # whether they were used, for an update or for the one of their window


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """A loss scale: the rule that updates it, what it records, and what a skipped step does.

    Each optimizer or transformation makes one; `step` alone skips steps and updates the scale.

    Args:
        rule: the rule that updates the scale; None for `factor` alone.
        telemetry: whether the state records each step.
        every: the number of steps between telemetry's counts of exponents; None for never.
        unscaled: whether the step of an optimizer gets gradients that are divided by the scale.
        factor: the `loss_scale_factor`, which multiplies the rule's scale.
        clip: how gradients will be clipped: by norms, which must then be finite.
        policy: what happens to the state that a skipped update would change.
    """

    rule: LossScale | None = None
    telemetry: bool = False
    every: int | None = None
    unscaled: bool = False
    factor: float | None = None
    clip: Clip | None = None
    policy: Select = dataclasses.field(default_factory=Select)

    def loss_scale(self, state: RuleState) -> jax.Array:
        """The factor of the loss, by the rule's state."""
        if self.rule is None:
            return jnp.asarray(self.factor, jnp.float32)
        if self.factor is None:
            return state.scale
        return jnp.clip(state.scale * self.factor, SMALLEST, LARGEST)

    def first(self, state: RuleState, count: int) -> ScaledStepState:
        """The state before the first step, by the rule's state and the number of gradients."""
        stats = at_first(self.loss_scale(state), count, self.every) if self.telemetry else None
        names = () if self.rule is None or self.policy.counter is None else self.rule.measures
        return ScaledStepState(state, stats, measure(names, [], True, 0.0))

    def step(
        self,
        update: Callable[..., tuple[Any, Any]],
        state: ScaledStepState,
        inner: PyTree,
        grads: Sequence[Any],
        scale: jax.Array | float = 1.0,
        *,
        onto: Sequence[Any] = (),
        shardings: Sequence[Any] = (),
        checked: Sequence[Any] | None = None,
        loss: jax.Array | None = None,
        apply_if: jax.Array | None = None,
        repeated: jax.Array | None = None,
    ) -> StepResult:
        """Reads the gradients, applies the update or skips it, and updates the loss scale.

        Args:
            update: `(norms, inner, mask) -> (result, inner)`: the step. `norms` are the norms that
                clipping divides by, and `mask` is given if it runs on non-finite gradients.
            state: the state of the loss scale.
            inner: the state that `update` changes: any pytree.
            grads: arrays or None.
            scale: the scale of the gradients.
            onto: the accumulators that they are added to.
            shardings: the sharding of each gradient; empty if unknown.
            checked: the arrays to check, if not the gradients themselves.
            loss: the true loss, if it is known.
            apply_if: a bool scalar. If False, the update is skipped; the scale still reacts to the
                gradients.
            repeated: a bool scalar. If True, the gradients were not finite at this scale, and were
                computed again at a lower one: the scale is lowered, the update not skipped.
        """
        with_norm = state.observed is not None
        arrays = grads if checked is None else checked
        finite, norms, norm = read_gradients(arrays, scale, self.clip, onto, shardings, with_norm)
        applies = finite if apply_if is None else finite & apply_if
        # A microbatch that was only vetoed does not count in its window. A non-finite one counts,
        # even if it was vetoed: that may be the reason for the veto.
        counts = jnp.ones_like(finite) if apply_if is None else apply_if | ~finite

        policy, rule = self.policy, self.rule
        taken = policy.take(applies, counts, functools.partial(update, norms), inner)
        if rule is None:
            return StepResult(taken.result, taken.state, state, finite, taken.applied)
        is_local = bool(shardings) and all(sharding is None for sharding in shardings)
        divisor = scale if isinstance(scale, jax.Array) else None
        measured = {}
        if rule.measures:
            measured = measure(rule.measures, grads, finite, loss, divisor, is_local)
        stats = state.observed
        if norm is not None:
            stats = observed(
                stats,
                grads,
                scale,
                finite=finite,
                applied=taken.applied,
                norm=norm,
                max_abs=measured.get("max_abs"),
                loss_scale=self.loss_scale(state.rule_state),
                every=self.every,
                is_local=is_local,
            )
        due, so_far = taken.due, state.measured
        good = finite if taken.whole is None else finite & taken.whole
        good = good if repeated is None else good & ~repeated
        if due is not None:  # the scale is updated between windows, from the measurements of one
            measured = measured_of_both(so_far, measured)
            so_far = {n: jnp.where(counts, v, so_far[n]) for n, v in measured.items()}
            so_far = {n: jnp.where(due, jnp.zeros_like(v), v) for n, v in so_far.items()}
        moved = advance(rule, state.rule_state, good, **measured)
        if due is not None:
            moved = jax.tree.map(lambda n, o: jnp.where(due, n, o), moved, state.rule_state)
        after = ScaledStepState(moved, stats, so_far)
        return StepResult(taken.result, taken.state, after, finite, taken.applied)

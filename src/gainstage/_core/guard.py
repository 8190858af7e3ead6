"""The guard around an update: the one place that reads gradients, decides, and moves the scale.

What becomes of the state where a step is skipped is a value: `Select`, `Branch`, or one of two
windows of accumulation, each with a few small pure functions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._core.bridge import select
from gainstage._core.readings import inspect
from gainstage._core.stats import measure, measured_of_both, observed
from gainstage._core.variable import is_inside
from gainstage.rules.base import LossScale, advance

Update = Callable[..., tuple[Any, Any]]  # (state, mask) -> (result, state)


def run_if(applies: jax.Array, update: Update, state: Any, *mask: jax.Array) -> Any:
    """The state after `update` where `applies` holds; elsewhere it does not even run.

    Eagerly it runs, and its results are selected: an eager `lax.cond` is compiled at every call.
    """
    if not is_inside():
        return select(applies, lambda state: update(state, *mask), state)[1]
    return lax.cond(applies, lambda state: update(state, *mask)[1], lambda state: state, state)


class Select:
    """An update always runs, and its kernels select what they store: for what is mostly applied.

    XLA can then fuse it with what comes before.
    """

    def take(
        self, applies: jax.Array, counts: jax.Array, update: Update, state: Any
    ) -> tuple[Any, Any, jax.Array]:
        """Updates the state, or not.

        Args:
            applies: whether the gradients are finite, and nobody has vetoed the step.
            counts: whether the step counts in its window: not if it was vetoed alone.
            update: takes the state and, where it runs on gradients that are not finite, `applies`.
            state: what it changes.

        Returns:
            The result, the state, and whether the update was applied.
        """
        result, state = select(applies, update, state)
        return result, state, applies

    def scale_due(
        self, state: Any, finite: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array | None, jax.Array]:
        """Whether the scale is updated after this step, None for always; and whether what it
        reacts to was finite. The state is that before the step."""
        return None, finite


class Branch(Select):
    """An update runs behind a conditional."""

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: Any) -> Any:
        return None, run_if(applies, update, state), applies


@dataclasses.dataclass(frozen=True)
class Window(Branch):
    """Steps are microbatches of a window; one that is not finite extends it.

    Args:
        steps: microbatches in a window.
    """

    steps: int
    counter: ClassVar[tuple[str, Any] | None] = None  # name and first value of what is counted

    def ends(self, state: Any) -> jax.Array:
        """Whether this microbatch, if it counts, is the last of its window."""
        return (state.iterations + 1) % self.steps == 0

    def close(self, state: Any) -> tuple[Any, jax.Array | None]:
        """At its end: the state, and whether there is an update, None for always."""
        return state, None

    def has_started(self, state: Any) -> jax.Array:
        """Whether there has been anything finite yet."""
        return state.iterations > 0


class DropWindow(Window):
    """One that is not finite counts, and spoils its window: there is no update at its end."""

    counter = ("good_microbatches", 0)

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: Any) -> Any:
        def counted(state: Any, mask: jax.Array) -> Any:
            more = mask.astype(state.window_count.dtype)
            return update(state._replace(window_count=state.window_count + more), mask)

        runs = applies | (counts & self.ends(state))
        state = run_if(runs, counted, state, applies)
        more = jnp.where(counts & ~runs, 1, 0)
        return None, state._replace(iterations=state.iterations + more), applies

    def scale_due(self, state: Any, finite: jax.Array, counts: jax.Array) -> Any:
        return counts & self.ends(state), finite & (state.window_count + 1 == self.steps)

    def close(self, state: Any) -> tuple[Any, jax.Array | None]:
        whole = state.window_count == self.steps
        state = state._replace(
            accumulators=[jnp.where(whole, total, 0) for total in state.accumulators],
            iterations=state.iterations + jnp.where(whole, 0, -self.steps),
            window_count=jnp.zeros_like(state.window_count),
        )
        return state, whole

    def has_started(self, state: Any) -> jax.Array:
        return (state.iterations >= self.steps) | (state.window_count > 0)


WINDOWS = {"extend": Window, "drop_window": DropWindow}


class GuardState(NamedTuple):
    """What a guard remembers; of arrays, or of the variables that hold them."""

    scale: Any  # the rule's state, None for a scale that never changes
    observed: Any = None  # with telemetry, what it knows
    measured: Any = ()  # of the window so far, by name


class Reading(NamedTuple):
    """How the gradients of a step are read."""

    scale: jax.Array | float = 1.0  # what they were multiplied by
    limits: Mapping[str, float] | None = None  # the clip option whose norms have to be finite
    onto: Sequence[Any] = ()  # accumulators that they are added to
    shardings: Sequence[Any] = ()  # where each lies; empty if unknown
    leaves: Sequence[Any] | None = None  # the arrays to check, where not the gradients themselves


class Outcome(NamedTuple):
    """What a guarded update comes to."""

    result: Any
    inner: Any  # the new state of what is guarded, or the old one
    state: GuardState
    finite: jax.Array  # whether the gradients were
    applied: jax.Array  # whether they were used: for an update, or for that of their window


def guarded(
    rule: LossScale | None,
    update: Callable[..., tuple[Any, Any]],
    state: GuardState,
    inner: Any,
    grads: Sequence[Any],
    reading: Reading,
    policy: Select,
    *,
    loss: jax.Array | None = None,
    apply_if: jax.Array | None = None,
    loss_scale: jax.Array | None = None,
    every: int | None = None,
) -> Outcome:
    """Reads the gradients, applies the update or skips it, and updates the loss scale.

    Args:
        rule: how the scale is updated; None if it never is.
        update: `(norms, inner, mask) -> (result, inner)`: the step, given the norms that clipping
            divides by, and a mask where it has to run on gradients that are not finite.
        state: what the guard remembers.
        inner: what `update` changes: any pytree.
        grads: arrays or None.
        reading: how to read them.
        policy: what becomes of `inner` where the step is skipped.
        loss: the true loss, if it is known.
        apply_if: a bool scalar; if False the update is skipped, though the scale still reacts to
            the gradients.
        loss_scale: that of this step's loss, by default the rule's.
        every: after so many steps telemetry counts exponents.
    """
    scale, limits, onto, shardings, leaves = reading
    with_norm = state.observed is not None
    leaves = grads if leaves is None else leaves
    finite, norms, norm = inspect(leaves, scale, limits, onto, shardings, with_norm)
    applies = finite if apply_if is None else finite & apply_if
    # A microbatch that was only vetoed is none of its window. One that is not finite is, for that
    # may be why it was vetoed.
    counts = jnp.ones_like(finite) if apply_if is None else apply_if | ~finite

    step = functools.partial(update, norms)
    result, new, applied = policy.take(applies, counts, step, inner)
    if rule is None:
        return Outcome(result, new, state, finite, applied)
    here = bool(shardings) and all(sharding is None for sharding in shardings)
    divisor = scale if isinstance(scale, jax.Array) else None
    measured = {}
    if rule.measures:
        measured = measure(rule.measures, grads, finite, loss, divisor, here)
    stats = state.observed
    if norm is not None:
        now = state.scale.scale if loss_scale is None else loss_scale
        about = (scale, finite, applied, norm, measured.get("max_abs"), now, every, here)
        stats = observed(stats, grads, *about)
    due, good = policy.scale_due(inner, finite, counts)
    so_far = state.measured
    if due is not None:  # the scale is updated between windows, from what was measured in one
        measured = measured_of_both(so_far, measured)
        so_far = {n: jnp.where(counts, v, so_far[n]) for n, v in measured.items()}
        so_far = {n: jnp.where(due, jnp.zeros_like(v), v) for n, v in so_far.items()}
    moved = advance(rule, state.scale, good, **measured)
    if due is not None:
        moved = jax.tree.map(lambda n, o: jnp.where(due, n, o), moved, state.scale)
    return Outcome(result, new, GuardState(moved, stats, so_far), finite, applied)

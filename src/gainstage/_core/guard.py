"""The guard around an update: the one place that reads gradients, decides, and moves the scale."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gainstage._core.inspection import inspect
from gainstage._core.measures import measure, measured_of_both
from gainstage._core.observed import observed
from gainstage._core.rules import LossScale, advance
from gainstage._core.windows import Keep


class GuardState(NamedTuple):
    """What a guard remembers; of arrays, or of the variables that hold them."""

    scale: Any  # the rule's state, None for a scale that never changes
    observed: Any = None  # with telemetry, what it knows
    window: Any = ()  # what has been measured of the window so far, by name


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
    applied: jax.Array  # whether the update was


def guarded(
    rule: LossScale | None,
    update: Callable[..., tuple[Any, Any]],
    state: GuardState,
    inner: Any,
    grads: Sequence[Any],
    reading: Reading,
    keep: Keep,
    *,
    loss: jax.Array | None = None,
    apply_if: jax.Array | None = None,
    loss_scale: jax.Array | None = None,
    every: int | None = None,
) -> Outcome:
    """Reads the gradients, applies the update or skips it, and updates the loss scale.

    Args:
        rule: how the scale is updated; None if it never is.
        update: `(inner, norms, mask) -> (result, inner)`: the step, given the norms that clipping
            divides by, and a mask where it has to run on gradients that are not finite.
        state: what the guard remembers.
        inner: what `update` changes: any pytree.
        grads: arrays or None.
        reading: how to read them.
        keep: what becomes of `inner` where the step is skipped.
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

    def take(inner: Any, mask: jax.Array | None = None) -> tuple[Any, Any]:
        return update(inner, norms, mask)

    result, new, applied = keep.take(applies, counts, take, inner)
    if rule is None:
        return Outcome(result, new, state, finite, applied)
    here = bool(shardings) and all(sharding is None for sharding in shardings)
    divisor = scale if isinstance(scale, jax.Array) else None
    measured = measure(rule.measures, grads, finite, loss, divisor, here)
    stats = state.observed
    if norm is not None:
        now = state.scale.scale if loss_scale is None else loss_scale
        about = (scale, finite, applied, norm, measured.get("max_abs"), now, every, here)
        stats = observed(stats, grads, *about)
    due, good = keep.decide(inner, finite, counts)
    window = state.window
    if due is not None:  # the scale is updated between windows, from what was measured in one
        measured = measured_of_both(window, measured)
        window = {n: jnp.where(counts, v, window[n]) for n, v in measured.items()}
        window = {n: jnp.where(due, jnp.zeros_like(v), v) for n, v in window.items()}
    moved = advance(rule, state.scale, good, **measured)
    if due is not None:
        moved = jax.tree.map(lambda n, o: jnp.where(due, n, o), moved, state.scale)
    return Outcome(result, new, GuardState(moved, stats, window), finite, applied)

"""The state of `loss_scaled`, and how to find it inside of an optax state."""

from typing import Any, NamedTuple

import jax


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`."""

    loss_scale: Any  # the rule's, with at least `scale`
    inner: Any  # the wrapped transformation's
    applied: Any = True  # bool scalar: whether the last step was, True before the first
    observed: Any = None  # with `telemetry`, what it asks


def loss_scaled_state(opt_state: Any) -> LossScaledState:
    """The one state of `loss_scaled` anywhere inside of an optax state, or a ValueError."""

    found = states_in(opt_state)
    if len(found) != 1:
        more = " One loss has one scale: loss_scaled(optax.multi_transform(...))." if found else ""
        raise ValueError(
            f"Expected exactly one state of gainstage.loss_scaled(tx).init(params) in opt_state; "
            f"got {len(found)} in a {type(opt_state).__name__} of "
            f"{jax.tree.structure(opt_state, is_leaf=lambda x: isinstance(x, LossScaledState))}."
            f"{more}"
        )
    state = found[0]
    return state if isinstance(state.loss_scale.scale, jax.Array) else _unboxed(state)


def states_in(tree: Any) -> list[LossScaledState]:
    """All states of `loss_scaled` inside of an optax state."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaledState))
    return [node for node in nodes if isinstance(node, LossScaledState)]


def _unboxed(state: LossScaledState) -> LossScaledState:
    """The scalars themselves, where a library has put each into a box of its own, as Flax does."""

    def unboxed(x: Any) -> Any:
        if x is None or hasattr(x, "_fields"):
            return x and type(x)(*map(unboxed, x))
        return jax.tree.leaves(x)[0]

    told = map(unboxed, (state.applied, state.observed))
    return LossScaledState(unboxed(state.loss_scale), state.inner, *told)

"""The state of `loss_scaled`, and the search for it in an optax state."""

import functools
from typing import Any, NamedTuple

import jax

from gainstage._core.checks import brief
from gainstage._core.stats import Observed
from gainstage._core.types import OptState, PyTree, RuleState
from gainstage._core.variable import Variable


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`."""

    loss_scale: RuleState
    inner: OptState  # the state of the wrapped transformation
    applied: Any = True  # bool scalar: whether the last step was applied, True before the first
    observed: Any = None  # the telemetry, if enabled


def loss_scaled_state(opt_state: OptState) -> LossScaledState:
    """The only state of `loss_scaled` inside an optax state; raises a ValueError otherwise."""

    found = states_in(opt_state)
    if len(found) != 1:
        remedy = (
            "Wrap the transformation: tx = gainstage.loss_scaled(tx); for steps without loss "
            "scaling, loss_scaled(tx, FixedLossScale(1.0))."
        )
        if found:
            remedy = "One loss has one scale: loss_scaled(optax.multi_transform(...))."
        inside = jax.tree.structure(opt_state, is_leaf=lambda x: isinstance(x, LossScaledState))
        raise ValueError(
            f"Expected exactly one state of gainstage.loss_scaled(tx).init(params) in opt_state; "
            f"got {len(found)}. {remedy} It was a {type(opt_state).__name__} of {brief(inside)}."
        )
    state = found[0]
    return state if isinstance(state.loss_scale.scale, jax.Array) else _unboxed(state)


@functools.singledispatch
def applied_in(opt_state: OptState) -> jax.Array | Variable:
    """Whether the last step was applied, by an optax state; optimizers are registered by theirs."""
    return loss_scaled_state(opt_state).applied


@functools.singledispatch
def observed_in(opt_state: OptState) -> Observed:
    """The telemetry in an optax state; optimizers are registered by their own module."""
    observed: Observed | None = loss_scaled_state(opt_state).observed
    if observed is None:
        raise ValueError("Expected telemetry=True for loss_scaled; got a state without it.")
    return observed


def states_in(tree: PyTree) -> list[LossScaledState]:
    """All states of `loss_scaled` inside an optax state."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScaledState))
    return [node for node in nodes if isinstance(node, LossScaledState)]


def without_scalars(opt_state: OptState) -> tuple[OptState, list[Any]]:
    """Splits an optax state into the arrays of a step, and the scalars that describe it: scale and
    telemetry. A program that donates the first leaves the second readable."""
    scalars = []

    def split(node: OptState) -> OptState:
        if not isinstance(node, LossScaledState):
            return node
        stats = node.observed
        scalars.append((node.loss_scale, node.applied, stats and stats.info))
        return node._replace(
            loss_scale=None, applied=None, observed=stats and stats._replace(info=None)
        )

    return jax.tree.map(split, opt_state, is_leaf=lambda x: isinstance(x, LossScaledState)), scalars


def with_scalars(opt_state: OptState, scalars: list[Any]) -> OptState:
    """The optax state that `without_scalars` has split."""
    each = iter(scalars)

    def join(node: OptState) -> OptState:
        if not isinstance(node, LossScaledState):
            return node
        scale, applied, info = next(each)
        stats = node.observed
        return node._replace(
            loss_scale=scale, applied=applied, observed=stats and stats._replace(info=info)
        )

    return jax.tree.map(join, opt_state, is_leaf=lambda x: isinstance(x, LossScaledState))


def _unboxed(state: LossScaledState) -> LossScaledState:
    """The scalars of a state, out of the boxes that a library such as Flax puts them in."""

    def unboxed(x: Any) -> Any:
        if x is None or hasattr(x, "_fields"):
            return x and type(x)(*map(unboxed, x))
        return jax.tree.leaves(x)[0]

    more = map(unboxed, (state.applied, state.observed))
    return LossScaledState(unboxed(state.loss_scale), state.inner, *more)

"""What is no optimizer of optax, what to write in its place, and what an optimizer asks for."""

import re
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax
import optax.contrib

from gainstage._base.checks import brief
from gainstage._variables.types import OptState, PyTree, Transformation

_REFUSED = re.compile(r"got an unexpected keyword argument '(\w+)'")
_WANTED = re.compile(r"missing .*required keyword-only arguments?: (.+)")
_FUNCTION = re.compile(r"\b(?:value_fn|grad_fn|obj_fn)\b")
_PER_EXAMPLE = (
    "Expected a transformation of the gradients of a batch for tx; got one of the gradients of "
    "each example, for differential privacy. Write tx = gainstage.with_loss_scale(tx), then loss, "
    "grads = jax.vmap(gainstage.value_and_grad(loss_fn, opt_state), in_axes=(None, 0))(params, "
    "batch), and updates, opt_state = tx.update(grads, opt_state, params)."
)
_LINES = {
    "value": "loss=loss",
    "value_fn": "value_fn=lambda params: loss_fn(params, *batch)",
    "grad_fn": "grad_fn=lambda params, i: state.replace(params=params).value_and_grad(loss_fn)"
    "(*batch)[2]",
    "obj_fn": "obj_fn=lambda params: float32_loss(params, *batch)",
}


class MissingArgumentError(TypeError):
    """The error for an update that needs more than gradients, state and parameters.

    Args:
        names: those of the arguments.
    """

    def __init__(self, names: list[str]):
        self.names: list[str] = names
        given = [_LINES.get(name, f"{name}={name}") for name in names]
        super().__init__(
            f"Expected {' and '.join(names)} for an update of this transformation of optax; got "
            f"none. Write state.apply_gradients(grads, extra, {', '.join(given)})."
        )


def check_transformation(name: str, value: object) -> None:
    """Raises a TypeError if `value` has not the methods of an `optax.GradientTransformation`."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"Expected an optax.GradientTransformation for {name}; got {brief(value)}."
            f"{_what_to_pass(value)}"
        )


def _what_to_pass(value: object) -> str:
    """What to write, after a space, for what users pass instead."""
    if hasattr(value, "tx"):  # as an `nnx.Optimizer` has
        return " Pass its `tx`."
    if isinstance(value, FunctionType):
        return (
            " A loss is for gainstage.train_step(loss_fn); for a trainer that differentiates it, "
            "gainstage.autocast(loss_fn, loss_scale=2.0**15)."
        )
    if type(value).__module__.startswith("keras."):
        return (
            " Use an optimizer of optax; for a Keras model, gainstage.interop.keras.compile(model, "
            "optimizer, loss)."
        )
    if hasattr(value, "stateless_apply"):
        return (
            " Write optax.adam(1e-3), or another transformation of optax. An optimizer of "
            "gainstage.optimizers has no train state: gainstage.optimizers.LossScaleOptimizer("
            "optimizer).minimize(loss, variables)."
        )
    if isinstance(value, tuple) and jax.tree.leaves(value):
        return " A state of optax is made by TrainState.create: pass tx itself."
    return ""


def refuse_per_example(state: OptState) -> None:
    """Raises a TypeError for a transformation that clips the gradient of each example."""
    kind = optax.contrib.DifferentiallyPrivateAggregateState
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    if any(isinstance(node, kind) for node in nodes):
        raise TypeError(_PER_EXAMPLE)


def updated_by(
    tx: Transformation, grads: PyTree, state: OptState, params: PyTree, more: Mapping[str, Any]
) -> tuple[PyTree, OptState]:
    """The updates of a transformation and its new state, with all that it takes of `more`.

    Most transformations leave out what they do not know; some, as `optax.contrib.sam`, refuse it.

    Raises:
        MissingArgumentError: it needs something else.
    """
    try:
        found: tuple[PyTree, OptState] = tx.update(grads, state, params, **more)
    except (TypeError, ValueError) as error:
        text = str(error)
        refused, wanted = _REFUSED.search(text), _WANTED.search(text)
        if refused and refused[1] in more:
            rest = {name: value for name, value in more.items() if name != refused[1]}
            return updated_by(tx, grads, state, params, rest)
        names = re.findall(r"'(\w+)'", wanted[1]) if wanted else _FUNCTION.findall(text)
        names = [name for name in names if name not in more]  # else it is an error of that function
        if not names:
            raise
        raise MissingArgumentError(names) from error
    return found

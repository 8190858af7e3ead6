"""Gradients as the user gives them to `apply`: listed, checked, in the order of the variables."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._base._jax import Tracer
from gainstage._base.arrays import ARRAYS, strong
from gainstage._base.checks import InvalidArgumentError, brief
from gainstage._base.dead_run import DeadRunWatch
from gainstage._base.warn import warn
from gainstage._variables.bridge import jit
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.saving import wrong_count

# The variables, then types and shardings of the gradients.
Signature = tuple[list[Variable] | None, list[Any], list[Any]]


@dataclasses.dataclass
class Kept:
    """What an optimizer keeps between eager steps; a copy of the optimizer starts anew."""

    program: jit[..., Any] | None = None
    version: object = None  # of the constants of the program
    kind: Signature | None = None  # of the last gradients, if they needed no change
    watch: DeadRunWatch = dataclasses.field(default_factory=DeadRunWatch)


def signature_of(grads: list[Any], variables: Iterable[Variable] | None) -> Signature | None:
    """A cheap key of all that is checked about a step's arguments; None if they are not arrays."""
    classes = set(map(type, grads))
    if any(issubclass(cls, Tracer) or not issubclass(cls, jax.Array) for cls in classes):
        return None
    if variables is not None and not isinstance(variables, (list, tuple)):
        return None
    order = None if variables is None else list(variables)
    # Lists of mostly identical objects are compared quickly; a set would be hashed.
    return order, [gradient.aval for gradient in grads], [gradient.sharding for gradient in grads]


def listed(argument: str, values: Any) -> list[Any]:
    """A user's list of arrays as a list.

    Raises:
        InvalidArgumentError: it is one array, a dictionary, or no iterable.
    """
    if type(values) in (list, tuple):
        return list(values)
    if not isinstance(values, Iterable) or isinstance(values, (str, Mapping, Variable, *ARRAYS)):
        remedy = f" Write [{argument}]." if isinstance(values, (Variable, *ARRAYS)) else ""
        raise InvalidArgumentError(
            f"Expected a list of arrays for {argument}; got {brief(repr(values))}.{remedy}"
        )
    return list(values)


def not_an_array(variable: str, gradient: Any) -> InvalidArgumentError:
    """The error for a gradient that is no array, such as a sparse one of JAX."""
    advice = " Write gradient.todense()." if hasattr(gradient, "todense") else ""
    return InvalidArgumentError(
        f"Expected an array as the gradient of {variable!r}; got {brief(repr(gradient))}.{advice}"
    )


def fitted(grads: Sequence[Any], variables: Sequence[Variable], placed: bool = True) -> list[Any]:
    """Returns gradients as arrays that fit their variables; None stays None. Raises otherwise.

    Args:
        grads: one gradient, or None, per variable.
        variables: the variables.
        placed: whether to move gradients to the devices of their variables.
    """
    if len(grads) != len(variables):
        raise wrong_count("gradients", grads, variables)
    if all(gradient is None for gradient in grads):
        raise ValueError(
            f"Expected a gradient for at least one variable; got None for all of "
            f"{brief([variable.name for variable in variables])}."
        )
    arrays: list[Any] = []
    for gradient, variable in zip(grads, variables, strict=True):
        if isinstance(gradient, Variable):
            gradient = gradient.value()
        if gradient is None:
            arrays.append(None)
            continue
        if not isinstance(gradient, jax.Array) or gradient.weak_type:
            try:
                gradient = strong(gradient)
            except (TypeError, ValueError) as error:
                raise not_an_array(variable.name, gradient) from error
        if gradient.shape != variable.shape:
            raise ValueError(
                f"Expected a gradient of shape {variable.shape} for variable {variable.name!r}; "
                f"got shape {gradient.shape}."
            )
        if not jnp.issubdtype(gradient.dtype, jnp.floating):
            raise TypeError(
                f"Expected a gradient of a floating dtype for variable {variable.name!r}; "
                f"got dtype {gradient.dtype}."
            )
        free = isinstance(gradient, Tracer) or variable._is_bound or variable._is_planned
        if placed and not free and gradient.sharding.device_set != variable.sharding.device_set:
            gradient = jax.device_put(gradient, variable.sharding)
        arrays.append(gradient)
    return arrays


def by_place(grads: list[Any], places: Sequence[int], variables: Sequence[Variable]) -> list[Any]:
    """Orders gradients by the optimizer's variables; a missing one is None."""
    ordered: list[Any] = [None] * len(variables)
    for gradient, place in zip(grads, places, strict=True):
        ordered[place] = gradient
    missing = [variables[p] for g, p in zip(grads, places, strict=True) if g is None]
    if missing:
        warn(f"No gradient for {brief([v.name for v in missing])}: they do not change.")
    return ordered


def check_bound(weights: Sequence[Any], variables: Sequence[Variable]) -> None:
    """Raises a ValueError if the weights are inside a JAX transformation but the state is not."""
    bound = [v.name for v in weights if isinstance(v, Variable) and v._is_bound]
    if bound and not any(variable._is_bound for variable in variables):
        raise ValueError(
            f"Expected {variables[0].name!r} to be in the state of the function that is "
            f"traced or differentiated, as {brief(bound)} are. In `gainstage.optimizers.jit`: add "
            f"`optimizer.variables` to `state`. In a loss: move `apply` out of it, after "
            f"`minimize`."
        )

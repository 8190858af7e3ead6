"""Runs a step on its variables: its gradients checked, compiled or inside another trace."""

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._base._jax import Tracer
from gainstage._base.arrays import ARRAYS, strong
from gainstage._base.checks import InvalidArgumentError, brief
from gainstage._base.dead_run import DeadRunWatch
from gainstage._base.warn import warn
from gainstage._variables.bridge import jit, run_eagerly
from gainstage._variables.variable import Variable, is_inside
from gainstage.optimizers._step.differentiate import Differentiated
from gainstage.optimizers._step.saving import wrong_count
from gainstage.optimizers._step.step import StepInputs

# The variables, then types and shardings of the gradients: see `_signature`.
Signature = tuple[list[Variable] | None, list[Any], list[Any]]


class Runner:
    """Runs a step on its variables, and caches its compiled program."""

    def __init__(self) -> None:
        self.program: jit[..., Any] | None = None
        self._version: tuple[object, int] | None = None  # the version of the program's constants
        # The kind of the last gradients, if they needed no change.
        self._kind: Signature | None = None
        # Inside of `minimize`: its true loss, and what tells whether each of its steps was applied.
        self._minimized: tuple[jax.Array, list[Any]] | None = None
        self._watch = DeadRunWatch()

    def __reduce__(self) -> tuple[type["Runner"], tuple[()]]:
        return Runner, ()  # a copy starts anew

    @property
    def is_minimizing(self) -> bool:
        """Whether the next step is one of `minimize`, which has scaled the loss itself."""
        return self._minimized is not None

    @contextlib.contextmanager
    def minimizing(self, found: Differentiated) -> Iterator[list[Any]]:
        """A context for the step of `minimize`, which has this true loss, whatever list of
        gradients its user's `apply_gradients` or `apply` makes of them.

        Yields:
            A list to which each step in it appends whether it was applied: a bool scalar, or None
            for a step that is always applied.
        """
        decisions: list[Any] = []
        self._minimized = found.loss, decisions
        try:
            yield decisions
        finally:
            self._minimized = None

    @property
    def minimized_loss(self) -> jax.Array | None:
        """The true loss of a step of `minimize`; None for one of a user's own gradients."""
        return None if self._minimized is None else self._minimized[0]

    def checked(
        self,
        grads: list[Any],
        variables: Iterable[Variable] | None,
        check: Callable[..., list[Any]],
        order: list[Variable],
    ) -> list[Any]:
        """Returns `check(grads, variables)`; skips the check if the kind is that of the last step.

        Args:
            grads, variables: as in `apply`.
            check: returns the gradients in the form of a step: one, or None, for each of `order`.
            order: the variables that the optimizer was built with.
        """
        signature = _signature(grads, variables)
        if signature is not None and signature == self._kind:
            return grads
        given, grads = grads, check(grads, variables)
        ordered = signature is not None and signature[0] in (None, order)
        as_given = ordered and all(map(operator.is_, given, grads))
        self._kind = signature if as_given else None
        return grads

    def __call__(
        self,
        apply: Callable[..., Any],
        variables: list[Variable],
        weights: list[Variable],
        inputs: StepInputs,
        version: object,
        loss: Any,
        scale: Callable[[], Any],
    ) -> None:
        """Takes a step.

        Args:
            apply: a method of the inputs that changes `variables` and `weights`, and returns
                whether the step was applied.
            variables: the optimizer's variables.
            weights: the variables that it was built with.
            inputs: what the step is given.
            version: the version of the constants of `apply`; None to run it uncompiled.
            loss: the true loss, or None.
            scale: a function that returns the loss scale.
        """
        inside = any([variable._traces for variable in variables])
        if not inside:
            self._watch.look(scale)
        if inside:
            self._kind = None  # the shardings of traced gradients were not checked
            applied = apply(inputs)  # already inside a traced function
        elif version is None or is_inside():
            applied = run_eagerly(apply, (variables, weights), inputs)
        else:
            if self.program is None or self._version != (version, len(variables)):
                self.program = jit(_weakly(apply), (variables, weights), donate=True)
                self._version = (version, len(variables))
            applied = self.program(inputs)
        if not inside and applied is not None:
            wanted = inputs.apply_if
            self._watch.see(applied, loss, True if wanted is None else wanted)
        if self._minimized is not None:
            self._minimized[1].append(applied)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method with a weak reference to its object. An object that holds its own method would be
    freed, with all of its arrays, only when Python collects cycles."""
    reference: Any = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return reference()(*args)

    return call


def _signature(grads: list[Any], variables: Iterable[Variable] | None) -> Signature | None:
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

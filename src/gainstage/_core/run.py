"""Runs a step: checked, differentiated, compiled, or inside another trace."""

import contextlib
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._core import jaxprs
from gainstage._core._jax import Tracer
from gainstage._core.arrays import strong
from gainstage._core.bridge import assign, functional, jit, read, recorded, run
from gainstage._core.buffers import buffers
from gainstage._core.checks import brief
from gainstage._core.gradients import upcast
from gainstage._core.saving import wrong_count
from gainstage._core.variable import Variable, is_inside

# The variables, then types and shardings of the gradients: see `_signature`.
Signature = tuple[list[Variable] | None, list[Any], list[Any]]
VarList = Sequence[Variable] | Callable[[], Sequence[Variable]]


class WithLoss(list[Any]):
    """A list of gradients, or of (gradient, variable) pairs, with their true loss.

    Args:
        elements: the gradients or pairs.
        loss: the true loss.
        aux: the auxiliary output of the loss.
        assigned: the variables that the loss assigned, with their new values.
    """

    def __init__(
        self,
        elements: Iterable[Any],
        loss: jax.Array | None,
        aux: Any = None,
        assigned: Mapping[Variable, jax.Array] | None = None,
    ):
        super().__init__(elements)
        self.loss, self.aux, self.assigned = loss, aux, assigned or {}

    def of(self, elements: Iterable[Any]) -> "WithLoss":
        """Returns a list of other elements with the same loss."""
        return WithLoss(elements, self.loss, self.aux, self.assigned)


def loss_of(elements: object) -> jax.Array | None:
    """The loss of a `WithLoss`, else None."""
    return elements.loss if isinstance(elements, WithLoss) else None


class Runner:
    """Runs a step on its variables, and caches its compiled program."""

    def __init__(self) -> None:
        self.program: jit[..., Any] | None = None
        self._version: tuple[int, int] | None = None  # the version of the program's constants
        self._kind: Signature | None = (
            None  # the kind of the last gradients, if they needed no change
        )
        self._decisions: list[Any] | None = None  # whether steps were applied, if requested

    def take(self, apply_gradients: Callable[[WithLoss], object], pairs: WithLoss) -> list[Any]:
        """Takes a step with what `differentiate` returned, and assigns what the loss assigned.

        Args:
            apply_gradients: the method that takes the step, with this runner.
            pairs: the gradients with their variables; if none has a gradient, there is no step.

        Returns:
            Bool scalars: the step was applied if all are True.
        """
        decisions: list[Any] = []
        self._decisions = decisions
        try:
            apply_gradients(pairs)
        finally:
            self._decisions = None
        conditions = [applied for applied in decisions if applied is not None]
        if decisions and pairs.assigned:
            _assign_if(conditions, pairs.assigned)
        return conditions

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
        args: tuple[Any, ...],
        rate: Callable[[], Any],
        version: int | None,
    ) -> None:
        """Takes a step.

        Args:
            apply: a method, `(grads, rate, loss, apply_if)`, that changes `variables` and
                `weights`, and returns whether the step was applied.
            variables: the optimizer's variables.
            weights: the variables that it was built with.
            args: gradients, loss and `apply_if`.
            rate: returns the learning rate if Python computes it for each step, else None.
            version: the version of the constants of `apply`; None to run it uncompiled.
        """
        grads, *more = args
        if any([variable._traces for variable in variables]):
            self._kind = None  # the shardings of traced gradients were not checked
            applied = apply(grads, rate(), *more)  # already inside a traced function
        elif version is None:
            applied = run(apply, (variables, weights), grads, rate(), *more)
        else:
            if self.program is None or self._version != (version, len(variables)):
                self.program = jit(_weakly(apply), (variables, weights), donate=True)
                self._version = (version, len(variables))
            applied = self.program(grads, rate(), *more)
        if self._decisions is not None:
            self._decisions.append(applied)


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


def differentiate(
    loss: Callable[[], Any],
    variables: list[Variable],
    scale_loss: Callable[[Any], Any],
    has_aux: bool = False,
    may_assign: bool = False,
) -> WithLoss:
    """Returns the (gradient, variable) pairs of the scaled loss; None if it is independent of one.

    Args:
        loss: a function of no argument that returns the loss.
        variables: the variables to differentiate with respect to.
        scale_loss: the function that multiplies the loss by the scale.
        has_aux: whether `loss` returns (loss, aux).
        may_assign: whether the loss may assign other variables; here they keep their values.
    """
    if not callable(loss):
        raise TypeError(f"Expected a callable of no argument for loss; got {loss!r}.")
    assigned: list[Variable] = []

    def scaled_and_true_loss() -> tuple[jax.Array, Any]:
        before = read(variables)
        records: contextlib.AbstractContextManager[list[Variable]] = contextlib.nullcontext([])
        with recorded() if may_assign else records as also:
            value, aux = _with_aux(loss()) if has_aux else (loss(), None)
            assigned[:], values = also, read(also)
        if changed := [v.name for v, b in zip(variables, before, strict=True) if v._value is not b]:
            raise ValueError(
                f"Expected a loss that does not assign what it trains; got {brief(changed)}."
            )
        value = jnp.asarray(value)
        if value.shape:
            raise ValueError(f"Expected loss() to be a scalar; got shape {value.shape}.")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"Expected loss() to be floating; got dtype {value.dtype}.")
        value = upcast(value)
        return scale_loss(value), (value, aux, values)

    check_floating(variables)
    pure, values = functional(scaled_and_true_loss, variables), read(variables)
    try:
        scaled, linear, more = jax.linearize(lambda v: pure(v)[0], values, has_aux=True)
    except jax.errors.UnexpectedTracerError as error:
        error.add_note(
            "Expected a loss without jax.jit, jax.checkpoint or lax.scan over a named function "
            "that reads variables itself; pass it `variable.value()` as an argument."
        )
        raise
    # A gradient is None if the program does not depend on the variable; zeros do not prove that.
    depends = jaxprs.used_arguments(jax.make_jaxpr(linear)(values))
    (grads,) = jax.linear_transpose(linear, values)(jnp.ones_like(scaled))
    if not is_inside():  # a result may share the buffer of a weight, which a step donates
        memory = set(itertools.chain(*map(buffers, jax.tree.leaves((grads, more)))))
        for variable, array in zip(variables, values, strict=True):
            if not memory.isdisjoint(buffers(array)):
                variable.value()  # marks it as held by others
    grads = [g if used else None for g, used in zip(grads, depends, strict=True)]
    value, aux, new = more
    return WithLoss(
        zip(grads, variables, strict=True), value, aux, dict(zip(assigned, new, strict=True))
    )


def _with_aux(result: object) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"Expected (loss, aux) from loss() with has_aux=True; got "
            f"{brief(jax.tree.structure(result))}."
        )
    return result


def _assign_if(conditions: list[Any], new: Mapping[Variable, jax.Array]) -> None:
    """Assigns the values that a loss has assigned, if all conditions are True."""
    variables, values = list(new), list(new.values())
    if conditions:
        values = _selected(conditions, values, read(variables))
    assign(variables, values)


@jax.jit
def _selected(conditions: list[Any], new: list[Any], old: list[Any]) -> list[jax.Array]:
    applied = jnp.stack(conditions).all()
    return [jnp.where(applied, n, o) for n, o in zip(new, old, strict=True)]


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
            gradient = strong(gradient)
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
    missing = [variables[p].name for g, p in zip(grads, places, strict=True) if g is None]
    if missing:
        warnings.warn(f"No gradient for {brief(missing)}: they do not change.", stacklevel=5)
    return ordered


VERBS = ("minimize", "compute_gradients", "apply_gradients", "apply", "stateless_apply")


def overrides(optimizer: object, name: str) -> type | None:
    """The class of a user that overrides an attribute of our classes; None if there is none."""
    owner = next(cls for cls in type(optimizer).__mro__ if name in vars(cls))
    return None if owner.__module__.partition(".")[0] == "gainstage" else owner


def check_verbs(optimizer: object, caller: str, verbs: Sequence[str] = VERBS) -> None:
    """Raises a TypeError if the user's class overrides one of `verbs`, which `caller` bypasses."""
    for verb in verbs:
        if owner := overrides(optimizer, verb):
            raise TypeError(
                f"{owner.__name__} overrides {verb}, which {caller} does not call. Override "
                f"update_step, or change the gradients before they are given to the optimizer."
            )


def check_bound(weights: Sequence[Any], variables: Sequence[Variable]) -> None:
    """Raises a ValueError if the weights are inside a JAX transformation but the state is not."""
    bound = [v.name for v in weights if isinstance(v, Variable) and v._is_bound]
    if bound and not any(variable._is_bound for variable in variables):
        raise ValueError(
            f"Expected {variables[0].name!r} to be in the state of the function that is "
            f"traced or differentiated, as {brief(bound)} are. In `gainstage.jit`: add "
            f"`optimizer.variables` to `state`. In a loss: move `apply` out of it, after "
            f"`minimize`."
        )


def check_floating(variables: Sequence[Variable]) -> None:
    """Raises a TypeError that names the first variable without a floating dtype."""
    for variable in variables:
        if not jnp.issubdtype(variable.dtype, jnp.floating):
            raise TypeError(
                f"Expected variables of a floating dtype; got {variable.name!r} of dtype "
                f"{variable.dtype}."
            )

"""How a step is run: checked, differentiated, compiled, or inside of somebody else's trace."""

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._core._jax import Tracer, used_arguments
from gainstage._core.bridge import functional, jit, read, run
from gainstage._core.gradients import upcast
from gainstage._core.saving import wrong_count
from gainstage._core.variable import Variable, is_inside, strong

VarList = Sequence[Variable] | Callable[[], Sequence[Variable]]


class WithLoss(list[Any]):
    """Gradients, or (gradient, variable) pairs, that know the true loss they are of."""

    def __init__(self, elements: Iterable[Any], loss: Any):
        super().__init__(elements)
        self.loss = loss


def loss_of(elements: Any) -> Any:
    """The loss that a list knows, if it does."""
    return elements.loss if isinstance(elements, WithLoss) else None


class Runner:
    """Runs a step on the variables it is about, and keeps its compiled program."""

    def __init__(self) -> None:
        self.program: jit | None = None
        self._version: Any = None  # of the constants of the program
        self._kind: Any = None  # of the last gradients, if a step took them as they came

    def checked(
        self,
        grads: list[Any],
        variables: Any,
        check: Callable[..., list[Any]],
        order: list[Variable],
    ) -> list[Any]:
        """`check(grads, variables)`, without a second check of gradients of the kind of the last.

        Args:
            grads, variables: as `apply` got them.
            check: returns the gradients as a step takes them: one, or None, for each of `order`.
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
        apply: Callable[..., None],
        variables: list[Variable],
        weights: list[Variable],
        args: tuple[Any, ...],
        rate: Callable[[], Any],
        version: int | None,
    ) -> None:
        """Takes a step.

        Args:
            apply: a method, `(grads, rate, loss, apply_if)`, that changes `variables` and
                `weights`.
            variables: the optimizer's.
            weights: those that it was built with.
            args: gradients, loss and `apply_if`.
            rate: returns a learning rate that Python has to compute for each step, else None.
            version: of the constants of `apply`; None to run it uncompiled.
        """
        grads, *more = args
        if any([variable._traces for variable in variables]):
            self._kind = None  # nothing was asked about where arrays lie
            apply(grads, None, *more)  # already inside of a traced function
            return
        state = (variables, weights)
        if version is None:
            run(apply, state, grads, rate(), *more)
            return
        if self.program is None or self._version != (version, len(variables)):
            self.program = jit(_weakly(apply), state, donate=True)
            self._version = (version, len(variables))
        self.program(grads, rate(), *more)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose object it does not keep: one that keeps it in turn would only be freed, with
    all of its arrays, when Python collects cycles."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return reference()(*args)  # type: ignore[misc]

    return call


def _signature(grads: list[Any], variables: Any) -> Any:
    """All that is checked about a step's arguments, at little cost; None if they are not arrays."""
    classes = set(map(type, grads))
    if any(issubclass(cls, Tracer) or not issubclass(cls, jax.Array) for cls in classes):
        return None
    if variables is not None and not isinstance(variables, (list, tuple)):
        return None
    order = None if variables is None else list(variables)
    # Lists of what mostly is the same object are compared quickly; a set of it would be hashed.
    return order, [gradient.aval for gradient in grads], [gradient.sharding for gradient in grads]


def differentiate(
    loss: Callable[[], Any], variables: list[Variable], scale_loss: Callable[[Any], Any]
) -> WithLoss:
    """The (gradient, variable) pairs of the scaled loss: None for what it does not depend on."""
    if not callable(loss):
        raise TypeError(f"Expected a callable of no argument for loss; got {loss!r}.")

    def scaled_and_true_loss() -> tuple[jax.Array, jax.Array]:
        value = jnp.asarray(loss())
        if value.shape:
            raise ValueError(f"Expected loss() to be a scalar; got shape {value.shape}.")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"Expected loss() to be floating; got dtype {value.dtype}.")
        value = upcast(value)
        return scale_loss(value), value

    check_floating(variables)
    pure, values = functional(scaled_and_true_loss, variables), read(variables)
    try:
        scaled, linear, value = jax.linearize(lambda v: pure(v)[0], values, has_aux=True)
    except jax.errors.UnexpectedTracerError as error:
        error.add_note(
            "Expected a loss without jax.jit, jax.checkpoint or lax.scan over a named function "
            "that reads variables itself; pass it `variable.value()` as an argument."
        )
        raise
    # A gradient is None where nothing flows back to: known from the program, not from zeros.
    depends = used_arguments(jax.make_jaxpr(linear)(values))
    (grads,) = jax.linear_transpose(linear, values)(jnp.ones_like(scaled))
    if not is_inside():  # a gradient may be the very array of a weight, which a step reuses
        memory = set(itertools.chain(*map(_buffers, (*grads, value))))
        for variable, array in zip(variables, values, strict=True):
            if not memory.isdisjoint(_buffers(array)):
                variable.value()  # which marks it as held
    grads = [g if used else None for g, used in zip(grads, depends, strict=True)]
    return WithLoss(zip(grads, variables, strict=True), value)


def _buffers(array: jax.Array) -> list[int]:
    """Where the parts of an array that are in this process lie in memory."""
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def fitted(grads: Sequence[Any], variables: Sequence[Variable], placed: bool = True) -> list[Any]:
    """Gradients as arrays that fit their variables, None staying None; or an error.

    Args:
        grads: one for each variable, or None.
        variables: those variables.
        placed: whether to move gradients to where their variables lie.
    """
    if len(grads) != len(variables):
        raise wrong_count("gradients", grads, variables)
    if all(gradient is None for gradient in grads):
        raise ValueError(
            f"Expected a gradient for at least one variable; got None for all of "
            f"{[variable.name for variable in variables]}."
        )
    arrays = []
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
    """One gradient or None for each variable that an optimizer was built with."""
    ordered: list[Any] = [None] * len(variables)
    for gradient, place in zip(grads, places, strict=True):
        ordered[place] = gradient
    missing = [variables[p].name for g, p in zip(grads, places, strict=True) if g is None]
    if missing:
        warnings.warn(f"No gradient for {missing}: left as they are.", stacklevel=5)
    return ordered


VERBS = ("minimize", "compute_gradients", "apply_gradients", "apply", "stateless_apply")


def check_verbs(optimizer: Any, caller: str, verbs: Sequence[str] = VERBS) -> None:
    """A TypeError if the user's class overrides one of `verbs`, which `caller` does not call."""
    for verb in verbs:
        owner = next(cls for cls in type(optimizer).__mro__ if verb in vars(cls))
        if owner.__module__.partition(".")[0] != "gainstage":
            raise TypeError(
                f"{owner.__name__} overrides {verb}, which {caller} does not call. Override "
                f"update_step, or change the gradients before they are given to the optimizer."
            )


def check_bound(weights: Sequence[Any], variables: Sequence[Variable]) -> None:
    """A ValueError if the weights belong to a transformation of JAX and the state does not."""
    bound = [v.name for v in weights if isinstance(v, Variable) and v._is_bound]
    if bound and not any(variable._is_bound for variable in variables):
        raise ValueError(
            f"Expected {variables[0].name!r} to be in the state of the function that is "
            f"traced or differentiated, as {bound} are. In `gainstage.jit`: add "
            f"`optimizer.variables` to `state`. In a loss: call `apply` after `minimize`."
        )


def check_floating(variables: Sequence[Variable]) -> None:
    """A TypeError that names the first variable that cannot be trained."""
    for variable in variables:
        if not jnp.issubdtype(variable.dtype, jnp.floating):
            raise TypeError(
                f"Expected variables of a floating dtype; got {variable.name!r} of dtype "
                f"{variable.dtype}."
            )

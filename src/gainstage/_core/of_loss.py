"""The gradients of a loss with respect to variables, with its value."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._core import jaxprs
from gainstage._core.bridge import assign, functional, read, recorded
from gainstage._core.buffers import buffers
from gainstage._core.checks import brief
from gainstage._core.gradients import WithLoss, upcast
from gainstage._core.variable import Variable, is_inside

VarList = Sequence[Variable] | Callable[[], Sequence[Variable]]


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


def assign_if_applied(new: Mapping[Variable, jax.Array], decisions: Sequence[Any]) -> None:
    """Assigns the values that a loss has assigned, if its step was applied.

    Args:
        new: the variables with their values.
        decisions: the list from `Runner.decisions`; empty if no step was taken.
    """
    if not decisions or not new:
        return
    variables, values = list(new), list(new.values())
    if conditions := [applied for applied in decisions if applied is not None]:
        values = _selected(conditions, values, read(variables))
    assign(variables, values)


@jax.jit
def _selected(conditions: list[Any], new: list[Any], old: list[Any]) -> list[jax.Array]:
    applied = jnp.stack(conditions).all()
    return [jnp.where(applied, n, o) for n, o in zip(new, old, strict=True)]


def check_floating(variables: Sequence[Variable]) -> None:
    """Raises a TypeError that names the first variable without a floating dtype."""
    for variable in variables:
        if not jnp.issubdtype(variable.dtype, jnp.floating):
            raise TypeError(
                f"Expected variables of a floating dtype; got {variable.name!r} of dtype "
                f"{variable.dtype}."
            )

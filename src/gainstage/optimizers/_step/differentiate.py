"""The gradients of a loss with respect to variables, with its value."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gainstage._base.arrays import buffers
from gainstage._base.checks import brief
from gainstage._programs import jaxprs
from gainstage._scaling import gradients
from gainstage._variables.arguments import variables_in
from gainstage._variables.bridge import assign, functionalize, read, recorded
from gainstage._variables.reads import linearized_by_reads
from gainstage._variables.variable import Variable, is_inside

VarList = Sequence[Variable] | Callable[[], Sequence[Variable]]
ALL_READ: Any = object()  # in place of a `VarList`: all trainable variables that the loss reads


class Differentiated(NamedTuple):
    """What `differentiate` returns.

    Args:
        grads: the gradient of the scaled loss for each variable; None if it is independent of it.
        variables: the variables.
        loss: the true loss.
        aux: what the loss has returned beside it, None if nothing.
        assigned: the variables that the loss has assigned, with their new values.
    """

    grads: list[Any]
    variables: list[Variable]
    loss: jax.Array
    aux: Any
    assigned: dict[Variable, jax.Array]

    def assign(self, decisions: Sequence[Any]) -> list[Any]:
        """Assigns what the loss has assigned, if there was a step, and all were applied.

        Args:
            decisions: what tells whether each step was applied; None: always.

        Returns:
            Those that are not None.
        """
        conditions = [applied for applied in decisions if applied is not None]
        if decisions and self.assigned:
            variables, values = list(self.assigned), list(self.assigned.values())
            if conditions:
                values = new_or_old(conditions, values, read(variables))
            assign(variables, values)
        return conditions


def differentiate(
    loss: Callable[[], Any],
    var_list: VarList,
    scale: jax.Array | None,
    has_aux: bool = False,
    may_assign: bool = False,
    sums: bool = False,
    among: Collection[Variable] | None = None,
) -> Differentiated:
    """Returns the gradients of the scaled loss, with its true value.

    Args:
        loss: a function of no argument that returns the loss; it is called once.
        var_list: the variables to differentiate with respect to, or a callable that returns them,
            which is called after the loss, or `ALL_READ`.
        scale: the scale of the loss; None for no scaling.
        has_aux: whether `loss` returns (loss, aux).
        may_assign: whether the loss may assign other variables; here they keep their values.
        sums: whether a loss that is not a scalar is summed.
        among: all variables that a callable `var_list` may return, if they are known.
    """
    if not callable(loss):
        raise TypeError(f"Expected a callable of no argument for loss; got {loss!r}.")

    def called(before: Mapping[Variable, Any]) -> tuple[jax.Array, tuple[Any, ...]]:
        """Calls the loss; `before` has, at the end, the values that it read."""
        records: contextlib.AbstractContextManager[list[Variable]] = contextlib.nullcontext([])
        with recorded() if may_assign else records as also:
            value, aux = _with_aux(loss()) if has_aux else (loss(), None)
            changed = [v for v, value in before.items() if v._value is not value]
            assigned[:] = dict.fromkeys([*also, *changed])
            new = read(assigned)
        value = _checked_loss(value, sums)
        return value, (value, aux, new)

    def scaled(result: tuple[jax.Array, tuple[Any, ...]]) -> tuple[jax.Array, tuple[Any, ...]]:
        return result[0] if scale is None else gradients.scaled(result[0], scale), result[1]

    assigned: list[Variable] = []
    try:
        if var_list is ALL_READ or callable(var_list):
            scalar, linear, more, read_by_loss = linearized_by_reads(called, scaled, among)
            if callable(var_list):
                variables = variables_in(var_list(), "var_list")
            else:
                trained = (variable for variable in read_by_loss if variable.trainable)
                variables = sorted(trained, key=lambda variable: variable._created)
        else:
            variables = read_by_loss = variables_in(var_list, "var_list")
            check_floating(variables)
            given = functionalize(
                lambda: scaled(called({v: v._value for v in variables})), variables
            )
            scalar, linear, more = jax.linearize(
                lambda v: given(v)[0], read(variables), has_aux=True
            )
    except jax.errors.UnexpectedTracerError as error:
        error.add_note(
            "Expected a loss without jax.jit, jax.checkpoint or lax.scan over a named function "
            "that reads variables itself; pass it `variable.value()` as an argument."
        )
        raise
    check_floating(variables)
    changed = [v.name for v in assigned if v in variables or not may_assign]
    if changed:
        raise ValueError(
            f"Expected a loss that does not assign what it trains; got {brief(changed)}."
        )
    values = read(read_by_loss)
    # A gradient is None if the program does not depend on the variable; zeros do not prove that.
    depends = jaxprs.used_arguments(jax.make_jaxpr(linear)(values))
    (all_grads,) = jax.linear_transpose(linear, values)(jnp.ones_like(scalar))
    gradient_of = {
        v: g for v, g, used in zip(read_by_loss, all_grads, depends, strict=True) if used
    }
    grads = [gradient_of.get(variable) for variable in variables]
    if not is_inside():  # a result may share the buffer of a weight, which a step donates
        memory = set(itertools.chain(*map(buffers, jax.tree.leaves((grads, more)))))
        for variable in variables:
            if not memory.isdisjoint(buffers(variable._value)):
                variable.value()  # marks it as held by others
    value, aux, new = more
    return Differentiated(grads, variables, value, aux, dict(zip(assigned, new, strict=True)))


def array_of_loss(value: Any, sums: bool = True) -> jax.Array:
    """What a loss has returned as an array; raises a TypeError if it is none."""
    several = isinstance(value, tuple) and not sums
    if value is None or several or isinstance(value, (str, Mapping)):
        advice = " For (loss, aux), pass has_aux=True to `minimize`." if several else ""
        got = f"a {type(value).__name__} of {len(value)}" if value else repr(value)
        raise TypeError(f"Expected loss() to be one number; got {got}.{advice}")
    return jnp.asarray(value)


def _checked_loss(value: Any, sums: bool) -> jax.Array:
    """The loss as a floating scalar."""
    value = array_of_loss(value, sums)
    value = jnp.sum(value) if sums else value
    if value.shape:
        raise ValueError(f"Expected loss() to be a scalar; got shape {value.shape}.")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"Expected loss() to be floating; got dtype {value.dtype}.")
    return gradients.upcast(value)


def _with_aux(result: object) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"Expected (loss, aux) from loss() with has_aux=True; got "
            f"{brief(jax.tree.structure(result))}."
        )
    return result


@jax.jit
def new_or_old(conditions: list[Any], new: list[Any], old: list[Any]) -> list[jax.Array]:
    """The new values if all conditions hold, else the old ones."""
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

"""Derivatives with respect to the variables that a function reads, which it may create itself."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gainstage._base._jax import AbstractValue, JaxprEqn, Primitive, return_to_trace
from gainstage._programs import jaxprs
from gainstage._variables.variable import Variable, recording

Called = TypeVar("Called")
Reads = dict[
    Variable, jax.Array
]  # variables in the order of their first reading, with what was read

# Marks in a linear program where a variable's tangent enters. It is never computed.
_entry = Primitive("variable_read")


@_entry.def_abstract_eval  # type: ignore[untyped-decorator]
def _(unit: AbstractValue, *, kind: AbstractValue, index: int) -> AbstractValue:
    return kind


def linearized_by_reads(
    function: Callable[[Reads], Called],
    result: Callable[[Called], tuple[jax.Array, Any]],
    among: Collection[Variable] | None = None,
) -> tuple[jax.Array, Callable[[list[Any]], jax.Array], Any, list[Variable]]:
    """`jax.linearize` with respect to all floating variables that a function reads.

    JAX has to know the arguments before it calls the function. So it gets one number in place of
    them, and each variable marks in the linear program where its tangent enters.

    Args:
        function: called once, with a dictionary that gains each variable when it is first read.
        result: `result of function -> (scalar, aux)`; what it reads does not count.
        among: the variables that count; None for all.

    Returns:
        The scalar, a linear function of a list of tangents, aux, and the variables of the tangents.
    """
    variables: list[Variable] = []

    def of_unit(unit: jax.Array) -> tuple[jax.Array, Any]:
        with _watched(unit, among) as reads:
            value = function(reads)
        variables[:] = reads
        return result(value)

    unit = jnp.float32(0)
    scalar, linear, aux = jax.linearize(of_unit, unit, has_aux=True)
    program = jax.make_jaxpr(linear)(unit)

    def of_tangents(tangents: list[Any]) -> jax.Array:
        def compute(eqn: JaxprEqn, operands: list[Any], path: tuple[int, ...]) -> list[Any]:
            if eqn.primitive is _entry:
                return [tangents[eqn.params["index"]]]
            return jaxprs.bind(eqn, operands)

        return jaxprs.interpret(program, [unit], compute)[0]

    return scalar, of_tangents, aux, variables


@contextlib.contextmanager
def _watched(unit: jax.Array, among: Collection[Variable] | None) -> Iterator[Reads]:
    """Binds each floating variable, when it is first read, to a value with a derivative."""
    before = getattr(recording, "note_read", None)
    reads: Reads = {}
    previous: list[tuple[Any, ...]] = []
    in_this_trace = return_to_trace()

    def enter(variable: Variable) -> None:
        if variable in reads:
            return
        if before is not None:  # an outer derivative is of this reading too
            before(variable)
        if among is not None and variable not in among:
            return
        value = variable._value
        if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
            return
        with in_this_trace():  # the first reading may be in the body of a loop
            reads[variable] = _with_tangent(value, unit, len(reads))
            with _noted_by(None):
                previous.extend(Variable._held([variable]))
            Variable._bind([variable], [reads[variable]], [variable._sharding])

    try:
        with _noted_by(enter):
            yield reads
    finally:
        Variable._unbind(list(reads), previous)


@contextlib.contextmanager
def _noted_by(note_read: Callable[[Variable], None] | None) -> Iterator[None]:
    before = getattr(recording, "note_read", None)
    recording.note_read = note_read
    try:
        yield
    finally:
        recording.note_read = before


def _with_tangent(value: jax.Array, unit: jax.Array, index: int) -> jax.Array:
    """A value whose tangent enters the linear program there."""
    kind = jax.typeof(value).to_tangent_aval()

    @jax.custom_jvp
    def entered(unit: jax.Array) -> jax.Array:
        return value

    @entered.defjvp
    def _(units: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, Any]:
        return value, _entry.bind(tangents[0], kind=kind, index=index)

    return entered(unit)

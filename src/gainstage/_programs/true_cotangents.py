"""Backward passes that users have written, on true cotangents though a loss is scaled.

Such a pass may clip its cotangents, take their sign, or iterate until they are small enough. On
cotangents times a loss scale it would be another function. So where `autocast` runs a program again
in a loss that is multiplied by a known scale, it divides the cotangents of such a pass by that, and
multiplies what the pass returns.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from gainstage._base._jax import JaxprEqn, Tracer, differentiations, trace_ctx
from gainstage._programs.backward_at import backward_at, is_inexact, is_small_float, open_program


class NeedsScaleError(Exception):
    """Ends the trace of a loss that turns out to need a scale where it is too late for one."""


@dataclasses.dataclass
class Undecided:
    """A loss that is traced, and that gets a scale if it turns out to need one.

    Attributes:
        is_asked_for: whether a function under `autocast` in float16 was called in it, so that it
            is multiplied by the scale.
        is_left_out: whether another function under `autocast` was called before, without a scale.
        trace: the trace in which it is computed.
    """

    is_asked_for: bool = False
    is_left_out: bool = False
    trace: Any = dataclasses.field(default_factory=lambda: trace_ctx.trace)

    def answers(self, half: str) -> bool:
        """Whether a function under `autocast` in a dtype gets the scale."""
        if half != "float16" and not self.is_asked_for:
            self.is_left_out = True
            return False
        # A function that is compiled inside would keep the scale.
        if self.is_left_out or trace_ctx.trace is not self.trace:
            raise NeedsScaleError
        self.is_asked_for = True
        return True


class _Scale(NamedTuple):
    """What the cotangents of all that is computed are multiplied by."""

    value: jax.Array
    is_eager: bool  # whether it was given outside of a compiled function
    by: dict[int, Any]  # what differentiates the loss
    undecided: Undecided | None


_GIVEN: ContextVar[_Scale | None] = ContextVar("the scale of a loss", default=None)
_USED: ContextVar[jax.Array | None] = ContextVar("the scale in a program", default=None)
# Functions that are compiled inside are traced for each scale: they close over it.
_TRACED_FOR: Any = jax.make_user_context(None)


@contextlib.contextmanager
def loss_times(scale: jax.Array, undecided: Undecided | None = None) -> Iterator[None]:
    """Says to functions under `autocast` that are called inside of this context by which scale
    the loss is multiplied that is computed there, or may be."""
    is_eager = not _is_tracing()
    is_same = is_eager or undecided is not None
    token = _GIVEN.set(_Scale(scale, is_eager, differentiations(), undecided))
    try:
        with contextlib.nullcontext() if is_same else _TRACED_FOR(object()):
            yield
    finally:
        _GIVEN.reset(token)


def called_at(
    loss: Callable[..., Any], scale: Callable[[], jax.Array | None]
) -> Callable[..., Any]:
    """A loss that is called in the context of the scale by which it is multiplied, if there is
    one."""

    @functools.wraps(loss, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        own = scale()
        with contextlib.nullcontext() if own is None else loss_times(own):
            return loss(*args, **kwargs)

    return called


@contextlib.contextmanager
def of_no_loss() -> Iterator[None]:
    """Inside of this context nothing is known of a scale."""
    tokens = _GIVEN.set(None), _USED.set(None)
    try:
        with _TRACED_FOR(None) if _TRACED_FOR.value else contextlib.nullcontext():
            yield
    finally:
        _GIVEN.reset(tokens[0])
        _USED.reset(tokens[1])


def given_scale(half: str) -> jax.Array | None:
    """The scale that `loss_times` has given to a function under `autocast` in this dtype, where it
    is one of the cotangents here; else None."""
    record = _GIVEN.get()
    if record is None:
        return None
    if differentiations().keys() - record.by.keys():  # a gradient inside of the loss, without it
        return None
    if record.undecided is not None:
        return record.value if record.undecided.answers(half) else None
    # A function that is compiled inside would keep the number of its first call.
    return None if record.is_eager and _is_tracing() else record.value


@contextlib.contextmanager
def cotangents_times(scale: jax.Array | None) -> Iterator[None]:
    """Programs that are run again inside of this context get cotangents times a scale, of which
    derivatives that users have written are spared."""
    token = _USED.set(scale)
    try:
        yield
    finally:
        _USED.reset(token)


def scale_of_cotangents() -> jax.Array | None:
    """The scale of the context around, or None."""
    return _USED.get()


def with_true_cotangents(
    call: Callable[..., list[Any]], values: Sequence[Any], scale: jax.Array, closed_over: int = 0
) -> list[Any]:
    """The results of a call with a derivative of its own, which gets cotangents divided by the
    scale, and whose results are multiplied by it.

    A derivative that is computed in float16 keeps the scale, which it needs.

    Args:
        call: the function of all operands.
        values: its operands.
        scale: that of the cotangents.
        closed_over: how many of the first operands are no arguments of the user's function.
    """
    if _is_in_float16(call, values, closed_over):
        return call(*values)
    constants, arguments = values[:closed_over], values[closed_over:]

    def of_arguments(constants: Sequence[Any], *arguments: Any) -> list[Any]:
        return call(*map(_refusing, constants), *arguments)

    return list(backward_at(of_arguments, 1 / scale)(list(constants), *arguments))


@jax.custom_jvp
def _refusing(x: jax.Array) -> jax.Array:
    """A value that a function with its own derivative closes over, which JAX cannot
    differentiate."""
    return x


@_refusing.defjvp
def _refuse_forward(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "A function with a jax.custom_vjp closes over a value that is differentiated. Pass the "
        "value as an argument, and return its derivative."
    )


def _is_in_float16(call: Callable[..., list[Any]], values: Sequence[Any], closed_over: int) -> bool:
    """Whether a call, or its derivative, computes in a dtype of a smaller range than bfloat16."""

    def both(*values: Any) -> Any:
        constants, arguments = values[:closed_over], values[closed_over:]
        results, pull = jax.vjp(lambda *arguments: call(*constants, *arguments), *arguments)
        return pull([x if is_inexact(x) else np.zeros(x.shape, float0) for x in results])

    def has_small(program: Any) -> bool:
        program = open_program(program)
        each = (v.aval for eqn in program.eqns for v in (*eqn.invars, *eqn.outvars))
        dtypes = {getattr(aval, "dtype", None) for aval in each}
        inner = (p for eqn in program.eqns for p in _programs_in(eqn))
        return any(map(is_small_float, dtypes)) or any(map(has_small, inner))

    return has_small(jax.make_jaxpr(both)(*values))


def _programs_in(eqn: JaxprEqn) -> list[Any]:
    each = [p if isinstance(p, (tuple, list)) else (p,) for p in eqn.params.values()]
    return [p for ps in each for p in ps if hasattr(p, "eqns")]


def _is_tracing() -> bool:
    return isinstance(jnp.zeros(()), Tracer)

"""The largest scale that does not overflow in a loss by itself, from the dtypes on its way."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn
from gainstage._base.checks import LARGEST
from gainstage._programs import jaxprs
from gainstage._programs.operations import VIEWS


def largest_scale(fun: Callable[..., Any], *args: Any) -> float:
    """Returns the largest loss scale that does not overflow by itself, whatever the gradients are.

    The backward pass starts with the scale and multiplies it by derivatives of the loss. The first
    factors may be constants, such as 1 / n for a mean. If an operation on such a product is
    float16, the product must not exceed float16. This limits the scale if the loss is float16 to
    its end. It does not if the loss is computed in float32 from float16 predictions.

    Args:
        fun: the loss, a function of `args` that returns a scalar or (loss, aux). It is only traced.
        *args: arrays, or `jax.ShapeDtypeStruct`s as for `jax.eval_shape`.

    Returns:
        A number > 0; infinity if there is no such operation. Loops and branches of the program are
        not analysed.

    Raises:
        TypeError: `fun` does not return a floating scalar.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gainstage.diagnostics import largest_scale
        >>> half = jnp.ones(16, jnp.float16)
        >>> largest_scale(lambda w: (w * w).sum(), half)
        65504.0
        >>> largest_scale(lambda w: ((w * w).astype("float32") ** 2).mean(), half)
        inf
    """

    def scalar(*args: Any) -> jax.Array:
        loss = jax.tree.leaves(fun(*args))[0]
        if jnp.shape(loss) or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(f"Expected a floating scalar from fun; got {loss!r}.")
        return loss.astype(jnp.float32)

    def backward(scale: jax.Array, *args: Any) -> list[jax.Array]:
        grads = jax.tree.leaves(jax.vjp(scalar, *args)[1](scale))
        return [gradient for gradient in grads if gradient.dtype != jax.dtypes.float0]

    program = jax.make_jaxpr(backward)(jnp.float32(1), *args)
    limits: list[float] = []

    def follow(
        eqn: JaxprEqn, operands: list[_Number | None], path: tuple[int, ...]
    ) -> list[_Number | None]:
        program = jaxprs.called(eqn)
        if program is not None:
            return jaxprs.interpret(program, operands, follow, _constant, _constant)
        result = _computed(eqn, operands)
        if result is not None and result.scaled and result.value:
            most = float(jnp.finfo(jaxprs.array(eqn.outvars[0]).dtype).max)
            limits.extend([most / abs(result.value)] if most < LARGEST else [])
        return [result, *[None] * (len(eqn.outvars) - 1)]

    unknown = [None] * (len(program.invars) - 1)
    jaxprs.interpret(program, [_Number(1.0, True), *unknown], follow, _constant, _constant)
    return min(limits, default=math.inf)


class _Number(NamedTuple):
    """An array of equal elements whose value is known at tracing time."""

    value: float
    scaled: bool  # whether the scale is a factor of it


def _constant(value: ArrayLike) -> _Number | None:
    number = np.size(value) == 1 and jnp.issubdtype(jnp.result_type(value), jnp.number)
    return _Number(float(np.real(value)), False) if number else None


def _computed(equation: JaxprEqn, operands: Sequence[_Number | None]) -> _Number | None:
    """The known value of an operation's result."""
    name = equation.primitive.name
    if not operands or any(number is None for number in operands):
        return None
    first, *rest = [number for number in operands if number is not None]
    if name in VIEWS:
        return first
    if name == "neg":
        return first._replace(value=-first.value)
    if name == "reduce_sum":
        before, after = (jaxprs.array(vs[0]) for vs in (equation.invars, equation.outvars))
        count = before.size / max(after.size, 1)
        return first._replace(value=first.value * count)
    if name == "mul" and not (first.scaled and rest[0].scaled):
        return _Number(first.value * rest[0].value, first.scaled or rest[0].scaled)
    if name == "div" and not rest[0].scaled and rest[0].value:
        return first._replace(value=first.value / rest[0].value)
    if name in ("add", "add_any") and first.scaled == rest[0].scaled:
        return first._replace(value=first.value + rest[0].value)
    return None

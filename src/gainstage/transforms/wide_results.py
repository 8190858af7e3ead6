"""Operations on half-precision arrays that are computed in float32, because their results may be
too large for half precision. The backward pass keeps the half-precision arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage._core import jaxprs
from gainstage._core._jax import JaxprEqn, Primitive
from gainstage.transforms.replay import SINGLE, Operand

# Bounded functions, whose results are in half precision: each with its derivative, by its result.
BOUNDED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": lambda y: 1 - y * y,
    "logistic": lambda y: y * (1 - y),
}


def power_of(eqn: JaxprEqn) -> int:
    """The integer to whose power an equation raises its operand, such as 2 in a variance; 0 if it
    does something else."""
    name = eqn.primitive.name
    twice = name == "mul" and eqn.invars[0] is eqn.invars[1]
    if twice or name == "square":
        return 2
    exponent = eqn.params["y"] if name == "integer_pow" else 0
    return 0 if exponent == 1 else exponent


def power(eqn: JaxprEqn, value: Operand) -> jax.Array:
    """The power in float32 of a half-precision array, which the backward pass keeps instead."""
    with jaxprs.inside(eqn):
        return _power(power_of(eqn))(value.float32, value.x)


@functools.cache
def _power(exponent: int) -> Callable[..., jax.Array]:
    """A power of an array, from the array in float32 and in half precision."""

    @jax.custom_jvp
    def raised(wide: jax.Array, kept: jax.Array) -> jax.Array:
        return lax.integer_pow(wide, exponent)

    @raised.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def product(kept: jax.Array, tangent: jax.Array) -> jax.Array:
            factor = lax.integer_pow(kept.astype(SINGLE), exponent - 1)
            return exponent * factor * tangent

        return raised(*primals), product(primals[1], tangents[0])

    return jax.jit(raised, inline=True)


def bounded(eqn: JaxprEqn, wide: jax.Array, dtype: np.dtype) -> jax.Array:
    """The result in half precision of a bounded function of a float32 array. The backward pass
    keeps the result, and computes with it in half precision: XLA would keep float32 otherwise."""
    with jaxprs.inside(eqn):
        return _bounded(eqn.primitive, tuple(eqn.params.items()), dtype)(wide)


@functools.cache
def _bounded(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], dtype: np.dtype
) -> Callable[..., jax.Array]:
    """A bounded function of a float32 array."""
    slope = BOUNDED[primitive.name]

    @jax.custom_jvp
    def function(wide: jax.Array) -> jax.Array:
        return primitive.bind(wide, **dict(params)).astype(dtype)

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        result = function(*primals)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def product(kept: jax.Array, tangent: jax.Array) -> jax.Array:
            return slope(kept) * tangent.astype(dtype)

        return result, product(result, tangents[0])

    return jax.jit(function, inline=True)


def broadcast_product(
    eqn: JaxprEqn, xs: Sequence[jax.Array], within: np.dtype, dtype: np.dtype
) -> jax.Array:
    """A product with a broadcast operand, whose derivative is summed in float32.

    Args:
        eqn: a product of elements.
        xs: its operands.
        within: the dtype in which it is computed.
        dtype: the dtype of the result, in half precision.
    """
    with jaxprs.inside(eqn):
        return _broadcast_product(jaxprs.array(eqn.outvars[0]).shape, within, dtype)(*xs)


@functools.cache
def _broadcast_product(
    shape: tuple[int, ...], within: np.dtype, dtype: np.dtype
) -> Callable[..., jax.Array]:
    """A product of elements, with a result of this shape."""

    @jax.custom_jvp
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.mul(x.astype(within), y.astype(within)).astype(dtype)

    @product.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def pushed(xs: Any, tangents: Any) -> jax.Array:
            x, y = (x.astype(within) for x in xs)
            dx, dy = (jnp.broadcast_to(d, shape).astype(within) for d in tangents)
            return (dx * y + x * dy).astype(dtype)

        return product(*primals), pushed(primals, tangents)

    return jax.jit(product, inline=True)


def may_be_large(eqn: JaxprEqn) -> bool:
    """Whether a product is a square, or an operand has no axis that stays: a norm, a count, or a
    matrix times a vector. Its result may be large, and costs little in float32."""
    return eqn.primitive.name == "dot_general" and (is_square(eqn) or not all(_free_axes(eqn)))


def is_square(eqn: JaxprEqn) -> bool:
    """Whether a product is of an array with itself, or leaves no axis, as a norm does."""
    return eqn.invars[0] is eqn.invars[1] or not any(_free_axes(eqn))


def is_outer(eqn: JaxprEqn) -> bool:
    """Whether a product sums over no axis, so half precision makes it no faster."""
    return eqn.primitive.name == "dot_general" and not any(eqn.params["dimension_numbers"][0])


def _free_axes(eqn: JaxprEqn) -> list[int]:
    """How many axes of each operand of a product are neither summed nor those of a batch."""
    contracted, batch = eqn.params["dimension_numbers"]
    operands = zip(eqn.invars, contracted, batch, strict=True)
    return [len(jaxprs.array(v).shape) - len(c) - len(b) for v, c, b in operands]


def wide_product(eqn: JaxprEqn, xs: Sequence[jax.Array]) -> jax.Array:
    """A product of half-precision operands with a result in float32."""
    params = {**eqn.params, "preferred_element_type": SINGLE, "precision": None}
    return jaxprs.bind_shared(eqn, list(xs), params)[0]

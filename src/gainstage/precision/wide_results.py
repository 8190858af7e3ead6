"""Operations on half-precision arrays that are computed in float32, because their results may be
too large for half precision. The backward pass keeps the half-precision arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage._base._jax import JaxprEqn, Primitive
from gainstage._programs import jaxprs
from gainstage._programs.patterns import exponent_of
from gainstage.transforms.retrace import SINGLE, Retraced

# Bounded functions, whose results are in half precision: each with its derivative, by its result.
BOUNDED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": lambda y: 1 - y * y,
    "logistic": lambda y: y * (1 - y),
}


def power(eqn: JaxprEqn, value: Retraced) -> jax.Array:
    """The power in float32 of a half-precision array, which the backward pass keeps instead."""
    with jaxprs.inside(eqn):
        return _power(exponent_of(eqn))(value.float32, value.x)


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
        return _broadcast_product(within, dtype)(*xs)


@functools.cache
def _broadcast_product(within: np.dtype, dtype: np.dtype) -> Callable[..., jax.Array]:
    """A product of elements."""

    @jax.custom_jvp
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.mul(x.astype(within), y.astype(within)).astype(dtype)

    @product.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def pushed(xs: Any, tangents: Any) -> jax.Array:
            x, y = (x.astype(within) for x in xs)
            shape = jnp.broadcast_shapes(x.shape, y.shape)
            dx, dy = (jnp.broadcast_to(d, shape).astype(within) for d in tangents)
            return (dx * y + x * dy).astype(dtype)

        return product(*primals), pushed(primals, tangents)

    return jax.jit(product, inline=True)


def wide_product(eqn: JaxprEqn, xs: Sequence[jax.Array]) -> jax.Array:
    """A product of half-precision operands with a result in float32."""
    params = {**eqn.params, "preferred_element_type": SINGLE, "precision": None}
    return jaxprs.bind_shared(eqn, list(xs), params)[0]

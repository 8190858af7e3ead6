"""Norms from sums of squares, over the whole range of float32, and over several devices."""

import math

import jax
import jax.numpy as jnp
from jax import lax

# Devices send norms as squares: a single norm in two ranges, separated by this value.
LARGE = 2.0**12


def from_sums(sums: jax.Array, factors: jax.Array, scale: jax.Array) -> jax.Array:
    """The norms of true gradients, from the sums of squares of scaled ones times each factor."""
    # In this order an intermediate overflows or underflows only if the result does. The barrier
    # keeps XLA (jaxlib 0.10.2) from computing a / b / c as a / (b c).
    divisors = jnp.maximum(factors, 1), jnp.minimum(factors, 1) * jnp.maximum(scale, 1)
    each = jnp.sqrt(sums)
    for divisor in (*divisors, jnp.minimum(scale, 1)):
        each = lax.optimization_barrier(each / jnp.broadcast_to(divisor, each.shape))
    place = jnp.argmax(jnp.isfinite(sums).at[:, -1].set(True), axis=1)
    return jnp.take_along_axis(each, place[:, None], axis=1)[:, 0]


def _times(x: jax.Array, factor: float) -> jax.Array:
    """`x * factor`, to be squared; XLA would compute `(c x)**2` as `c**2 x**2`, which overflows."""
    return x * lax.optimization_barrier(jnp.asarray(factor, x.dtype))


def together(norms: jax.Array) -> jax.Array:
    """The norm of all arrays together, from the norm of each."""
    largest = jnp.max(norms, initial=0)
    whole = largest * jnp.sqrt(jnp.sum(jnp.square(norms / largest)))
    return jnp.where((largest > 0) & jnp.isfinite(largest), whole, jnp.sum(norms))


def pack(norms: jax.Array, unit: float | None) -> jax.Array:
    """Norms of parts, as numbers whose sum over all devices gives the norms of the whole.

    They are squares, followed by one number that becomes inf if something is not finite. For a
    single norm, that number is its square if it is at least `LARGE`, else 0.

    Args:
        norms: the norm of each part; a single one, for all together, if `unit` is None.
        unit: the result of `unit_for`, for several norms.
    """
    if unit is not None:
        return jnp.append(jnp.square(_times(norms, unit)), 0)
    large = norms >= LARGE
    small = _times(jnp.where(large, 0, norms), 2.0**41)
    # The norm of finite elements may be inf: then send a number that is too large.
    rest = jnp.minimum(_times(jnp.where(large, norms, 0), 2.0**-75), 2.0**55)
    return jnp.square(jnp.append(small, rest))


def unpack(packed: jax.Array, unit: float | None) -> jax.Array:
    """The norms of the whole, from the sum of all devices' `pack`."""
    norms = jnp.sqrt(packed[:-1])
    if unit is not None:
        return norms / unit
    norm = jnp.hypot(norms * 2.0**-41, jnp.sqrt(packed[-1:]) * 2.0**75)
    return jnp.where(jnp.isnan(norms), jnp.nan, norm)  # nan beside inf


def unit_for(limit: float) -> float:
    """The power of two by which norms that are clipped to `limit` are multiplied, to be squared."""
    return 2.0 ** min(max(-20 - math.frexp(limit)[1], -100), 100)

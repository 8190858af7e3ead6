"""Counts the exponents of gradients: what float16 flushes, and what overflows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage._scaling.finite_check import fold
from gainstage._variables.sharding import varying, varying_like

# Exponents of float16: numbers below 2**-25 become 0, numbers below 2**-14 lose digits.
FLUSHED, SUBNORMAL, TOP = -25, -14, 15
DIGITS = 10  # binary digits behind the first
LOWEST, HIGHEST = -40, 40  # exponents beyond are counted here
BINS = HIGHEST - LOWEST + 2  # one per exponent, and the first for zeros
NEVER = float(np.finfo(np.float32).max)  # not inf, which `jax_debug_infs` would refuse


class Exponents(NamedTuple):
    """How large the elements of each gradient were, times the loss scale, when last counted."""

    step: jax.Array  # int32: the step of the count, -1 for never
    scale: jax.Array  # float32: the scale of that step
    counts: jax.Array  # float32, one row per gradient: elements that are 0, then by exponent
    # float32: the lowest scale of a non-finite step that no finite one reached, `NEVER` at first
    overflowed: jax.Array


def lowest_overflow(before: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """The lowest scale of a non-finite step, until a step is finite at that scale or above."""
    kept = jnp.where(scale >= before, NEVER, before)
    return jnp.where(finite, kept, jnp.minimum(before, scale)).astype(jnp.float32)


def exponents_of(gradient: jax.Array, scale: jax.Array, longest: int) -> jax.Array:
    """Counts elements that are 0, then elements of each exponent from `LOWEST` on."""

    def more(so_far: jax.Array, part: jax.Array) -> jax.Array:
        x = jnp.abs(jnp.atleast_1d(part)).astype(jnp.float32) * scale
        exponent = jnp.clip(jnp.frexp(x)[1] - 1, LOWEST, HIGHEST)
        place = jnp.where(x == 0, 0, exponent - LOWEST + 1).astype(jnp.int8)

        def count(bin: jax.Array) -> jax.Array:
            rows = jnp.sum(place == bin, axis=tuple(range(1, x.ndim)), dtype=jnp.int32)
            return jnp.sum(rows.astype(jnp.float32 if x.ndim > 1 else jnp.int32))

        # Comparisons, not a scatter: on a mesh each device counts its own shards. One bin after the
        # other, because XLA would store the comparisons with all bins.
        return so_far + lax.map(count, jnp.arange(BINS, dtype=jnp.int8)).astype(jnp.float32)

    none = varying_like(jnp.zeros(BINS, jnp.float32), [gradient])
    return summed_over_devices(fold(more, none, gradient, longest=longest))


def summed_over_devices(counts: jax.Array) -> jax.Array:
    """Sums counts over all devices, inside `jax.shard_map`; each has counted its own shards."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return lax.psum(varying(counts, axes), tuple(axes)) if axes else counts

"""Conversions of values to arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

ARRAYS = (jax.Array, np.ndarray, np.generic)  # the classes of arrays


def strong(value: npt.ArrayLike) -> jax.Array:
    """`value` as an array without a weak type, which would need a compilation of its own."""
    value = jnp.asarray(owned(value))
    return jnp.asarray(value, value.dtype)


def owned(value: npt.ArrayLike) -> npt.ArrayLike:
    """A copy of a numpy array, because JAX may still read memory that the caller then changes."""
    return value.copy() if isinstance(value, np.ndarray) else value

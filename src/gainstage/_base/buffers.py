"""The memory of arrays. Two arrays may share a buffer, but a program can donate it only once."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def buffers(array: object) -> list[int]:
    """The memory addresses of an array's shards in this process."""
    if not isinstance(array, jax.Array) or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return []
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards if array.size]


def unshared(donated: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Returns the arrays to donate, with a copy of each whose buffer another argument has too.

    Some optax states begin with the parameters themselves, and weights may be tied.
    """
    taken = {address for array in others for address in buffers(array)}
    free = []
    for array in donated:
        own = buffers(array)
        free.append(array if taken.isdisjoint(own) else jnp.copy(array))
        taken.update(own)
    return free

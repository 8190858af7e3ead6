"""Pack small arrays into one."""

import math
from collections.abc import Iterable, Sequence

import jax
from jax import lax

SMALL = 4096  # elements: the largest array that is joined with others


def join(arrays: Iterable[jax.Array]) -> jax.Array:
    """Joins all elements of arrays of one dtype, in order, into one flat array."""
    return lax.concatenate([x.reshape(-1) for x in arrays], 0)


def part(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Splits the result of `join` into arrays of these shapes."""
    return [
        lax.slice(flat, (start,), (start + math.prod(shape),)).reshape(shape)
        for start, shape in zip(offsets(shapes), shapes, strict=True)
    ]


def offsets(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The first element of each array in the joined one."""
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + math.prod(shape))
    return starts[:-1]

"""Many small arrays as one: a kernel of its own for each would cost more than its work."""

import math
from collections.abc import Iterable, Sequence

import jax
from jax import lax
from jax.core import Tracer

SMALL = 4096  # elements: what has at most so many is joined with others


def join(arrays: Iterable[jax.Array]) -> jax.Array:
    """All elements of arrays of one dtype, in order, as one flat array."""
    return lax.concatenate([x.reshape(-1) for x in arrays], 0)


def part(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Arrays of these shapes out of what `join` made of them."""
    return [
        lax.slice(flat, (start,), (start + math.prod(shape),)).reshape(shape)
        for start, shape in zip(offsets(shapes), shapes, strict=True)
    ]


def offsets(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where each of the arrays starts in the joined one."""
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + math.prod(shape))
    return starts[:-1]


def bundle(*columns: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
    """Rows of arrays of one shape each, with all small rows of the same dtypes joined into one.

    Only a reduction over everything may be told so: it no longer knows which array is which.
    """
    large, small = [], {}
    for row in zip(*columns, strict=True):
        alone = row[0].size > SMALL or any(map(is_spread, row))
        dtypes = tuple(x.dtype for x in row)
        (large if alone else small.setdefault(dtypes, [])).append(row)
    return large + [tuple(map(join, zip(*rows, strict=True))) for rows in small.values()]


def is_spread(x: jax.Array) -> bool:
    """Whether an array is known to be spread over devices, so that its elements have no order."""
    if isinstance(x, Tracer):
        return any(jax.typeof(x).sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
    return len(x.devices()) > 1

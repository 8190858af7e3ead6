"""Pack small arrays into one; reduce large ones in chunks."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

Key = TypeVar("Key", bound=Hashable)
SMALL = 4096  # elements: the largest array that is joined with others
BUNDLE = 64  # arrays: XLA:GPU fuses the computation of so many into one `concatenate`
CHUNK = 2**15  # elements: this many float32 numbers fit into a core's cache


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


def bundle(
    keys: Sequence[Key], *columns: Sequence[jax.Array]
) -> list[tuple[Key, tuple[jax.Array, ...]]]:
    """Joins the small rows of one key and one dtype; returns keys and rows of arrays.

    Use it only for a reduction over everything, because the array of an element is lost.
    """
    large, small = [], dict[Any, Any]()
    for key, row in zip(keys, zip(*columns, strict=True), strict=True):
        if row[0].size > SMALL:
            large.append((key, row))
        else:
            small.setdefault((key, *(x.dtype for x in row)), []).append(row)
    joined = [
        (key, tuple(map(join, zip(*some, strict=True))))
        for (key, *_), rows in small.items()
        for some in [rows[i : i + BUNDLE] for i in range(0, len(rows), BUNDLE)]
    ]
    return large + joined


def fold(fn: Callable[..., Any], so_far: Any, *arrays: jax.Array, longest: int = CHUNK) -> Any:
    """Computes `fn(so_far, *arrays)`, a reduction, as a loop over chunks of large arrays.

    XLA:CPU (jaxlib 0.10.2) stores the operand of a reduction, unless it is the input itself or one
    of a few float32 operations on it. The operand of a chunk fits into the cache.

    Args:
        fn: a function of the result so far and chunks of the arrays; returns the new result.
        so_far: a pytree of small arrays, of the types that `fn` returns.
        arrays: arrays of one shape, on one device.
        longest: the most elements of a chunk; 0 for no loop.
    """
    chunk = chunk_of(arrays[0].size, longest)
    if chunk == arrays[0].size:
        return fn(so_far, *arrays)
    tables = [x.reshape(-1, chunk) for x in arrays]

    def more(i: Any, so_far: Any) -> Any:
        return fn(so_far, *(lax.dynamic_index_in_dim(t, i, keepdims=False) for t in tables))

    return lax.fori_loop(0, arrays[0].size // chunk, more, so_far)


def chunk_of(size: int, longest: int) -> int:
    """The number of elements per chunk of an array; all of them if it should not be divided."""
    chunk = next((n for n in range(min(size // 2, longest), 0, -1) if size % n == 0), 1)
    return size if size <= SMALL or chunk < SMALL // 4 else chunk


def chunk_for(arrays: Sequence[jax.Array]) -> int:
    """The number of elements of a chunk: 0.5 % of the arrays' elements, within bounds."""
    return min(max(sum(x.size for x in arrays) // 200, CHUNK), 8 * CHUNK)

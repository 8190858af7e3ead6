"""Pack small arrays into one; reduce large ones in chunks."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

Key = TypeVar("Key", bound=Hashable)
SMALL = 4096  # elements: an array of at most so many is joined with others
BUNDLE = 64  # arrays: XLA for GPUs fuses what computes them into a `concatenate` of so many
CHUNK = 2**15  # elements: so many float32 fit into a core's cache


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


def bundle(
    keys: Sequence[Key], *columns: Sequence[jax.Array]
) -> list[tuple[Key, tuple[jax.Array, ...]]]:
    """Keys and rows of arrays of one shape, with small rows of one key and dtypes joined.

    Only for a reduction over everything: which array an element came from is lost.
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
    """`fn(so_far, *arrays)`, a reduction, as a loop over chunks of large arrays.

    XLA for CPU (jaxlib 0.10.2) stores what it reduces, unless that is the input itself or one of a
    few float32 operations on it. What a chunk takes fits into the cache.

    Args:
        fn: takes the result so far and chunks of the arrays, and returns the new result.
        so_far: a pytree of small arrays, of the types that `fn` returns.
        arrays: of one shape, on one device.
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
    """Elements of the chunks of an array of so many; all where it should not be divided."""
    chunk = next((n for n in range(min(size // 2, longest), 0, -1) if size % n == 0), 1)
    return size if size <= SMALL or chunk < SMALL // 4 else chunk


def chunk_for(arrays: Sequence[jax.Array]) -> int:
    """Elements of a chunk that takes up half a percent of what the arrays do, in float32."""
    return min(max(sum(x.size for x in arrays) // 200, CHUNK), 8 * CHUNK)

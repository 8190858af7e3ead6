"""Arrays of the right size: many small ones as one, a large one row by row."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._core._jax import Tracer

SMALL = 4096  # elements: what has at most so many is joined with others
ROW = 2**15  # elements: so many float32 fit into a core's cache
LONG = 2**18  # elements: so many are worth the work of several cores


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


def by_rows(fn: Callable[..., Any], so_far: Any, *arrays: jax.Array) -> Any:
    """`fn(so_far, *arrays)`, a reduction; on CPU row by row, as XLA stores there what it computes
    on the way.

    Args:
        fn: takes what is known so far, and rows of the arrays, and returns what then is known.
        so_far: a pytree of small arrays, of the types that `fn` returns.
        arrays: of one shape, and, unless `is_spread` can tell, on one device.
    """
    row = _row(arrays, ROW)
    if row is None:
        return fn(so_far, *arrays)

    def loop(so_far: Any, *arrays: jax.Array) -> Any:
        count, rows = _rows(row, *arrays)
        return lax.fori_loop(0, count, lambda i, so_far: fn(so_far, *rows(i)), so_far)

    return lax.platform_dependent(so_far, *arrays, cpu=loop, default=fn)


class Reduction(NamedTuple):
    """A reduction of arrays to one number each."""

    element: Callable[[jax.Array], jax.Array]  # one for each element, in float32 or wider
    combine: Callable[[jax.Array, jax.Array], jax.Array]  # two arrays of them; leaves out a 0
    total: Callable[[jax.Array], jax.Array]  # an array of them
    at_once: Callable[[jax.Array], jax.Array]  # what these come to, of an array as it is


def reduce_each(
    way: Reduction, arrays: Sequence[jax.Array], ordered: bool, zero: jax.Array
) -> list[jax.Array]:
    """A reduction of each array to a number that is not negative.

    Args:
        way: the reduction.
        arrays: of any dtypes and shapes.
        ordered: whether their elements have an order, on one device.
        zero: a scalar, of a type that differs over devices wherever one of the arrays does.
    """
    longest, reduced, before = _longest_row(arrays), [], zero

    @jax.jit  # traced once for arrays of one shape
    def in_rows(x: jax.Array, before: jax.Array) -> jax.Array:
        return _reduce_by_rows(way, x, longest, before)

    for x in arrays:
        # XLA for CPU has fast reductions for all dtypes but this one, which it would widen first.
        in_parts = ordered and x.dtype == jnp.float16
        reduced.append(in_rows(x, before) if in_parts else way.at_once(x))
        before += reduced[-1]
    return reduced


def _reduce_by_rows(way: Reduction, array: jax.Array, longest: int, before: jax.Array) -> jax.Array:
    """A reduction; on CPU rows are joined with one another first, for XLA uses all cores there, and
    all of each, for what is no reduction.

    Args:
        way: the reduction.
        array: as for `by_rows`.
        longest: the largest number of elements in a row, of `_longest_row`.
        before: a scalar that is not negative, of something that is to be computed before.
    """
    row = _row([array], longest)
    if row is None:
        return way.at_once(array)

    def loop(array: jax.Array, before: jax.Array) -> jax.Array:
        count, rows = _rows(row, array)
        # It is all 0, but XLA does not know: so the loops take turns, and share their memory.
        start = jnp.full(row, before == -1).astype(jax.eval_shape(way.element, array).dtype)

        def combine_row(i: Any, so_far: jax.Array) -> jax.Array:
            return way.combine(so_far, way.element(*rows(i)))

        return way.total(lax.fori_loop(0, count, combine_row, start))

    return lax.platform_dependent(array, before, cpu=loop, default=lambda x, _: way.at_once(x))


def _longest_row(arrays: Sequence[jax.Array]) -> int:
    """So long that rows of it take up half a percent of what the arrays do, in float32."""
    return min(max(sum(x.size for x in arrays) // 200, ROW), LONG)


def _row(arrays: Sequence[jax.Array], longest: int) -> int | None:
    """The length of rows that arrays of one shape fall into, None if they should be left whole."""
    size = arrays[0].size
    # At least two rows: XLA would unroll a loop over one.
    row = next((n for n in range(min(size // 2, longest), 0, -1) if size % n == 0), 1)
    return None if row < SMALL // 4 or any(map(is_spread, arrays)) else row


def _rows(row: int, *arrays: jax.Array) -> tuple[int, Callable[[Any], list[jax.Array]]]:
    """How many rows of this length arrays have, and a function for the one of a number."""
    tables = [x.reshape(x.size // row, row) for x in arrays]

    def rows(i: Any) -> list[jax.Array]:
        return [lax.dynamic_index_in_dim(table, i, keepdims=False) for table in tables]

    return arrays[0].size // row, rows


def is_spread(x: jax.Array) -> bool:
    """Whether an array is known to be spread over devices, so that its elements have no order."""
    if isinstance(x, Tracer):
        return any(jax.typeof(x).sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
    return len(x.devices()) > 1

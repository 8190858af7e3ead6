"""One reading of the gradients, for all that a step must know of them before it is taken."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gainstage._core.bridge import compiled_if_eager
from gainstage._core.gradients import real_parts, wide
from gainstage._core.joining import Reduction, bundle, by_rows, reduce_each
from gainstage._core.sharding import (
    axes_of,
    is_first,
    knows_what_varies,
    typed_layout,
    varying,
    varying_axes,
    varying_like,
)
from gainstage._core.variable import placed


class Inspection(NamedTuple):
    """What one reading of scaled gradients tells of the true ones."""

    finite: jax.Array  # bool scalar: whether all their elements, and the norms, are finite
    norms: list[jax.Array]  # what clipping divides by, as `gradients.clip` takes it
    norm: jax.Array | None  # of all of them together, if it was asked for


class Reading(NamedTuple):
    """What one device, or all of them, have read."""

    finite: jax.Array  # bool scalar: whether all elements are
    norms: Any  # one for each norm that is requested, None if none is


# Squares of float32 numbers cover half of its exponents. A norm is found from the sum of the
# squares times the first of these factors for which that sum is finite.
FACTORS = (2.0**64, 1.0, 2.0**-65)
# Devices send norms as squares too: a single one in two ranges, of which this is the border.
LARGE = 2.0**12
# A bound that the norm of finite numbers never reaches, whose factor flushes none of them.
ENDLESS = 2.0**164


@compiled_if_eager
def inspect(
    grads: Sequence[Any],
    scale: jax.Array | float = 1.0,
    limits: Mapping[str, float] | None = None,
    onto: Sequence[Any] = (),
    layouts: Sequence[Any] = (),
    norm: bool = False,
) -> Inspection:
    """Reads scaled gradients once, for the finiteness and the norms of the true ones.

    On a mesh every device reads its own part, and one `psum` of 4 bytes and 4 for each norm makes
    it known to all. A norm is right wherever it is a float32 number; on a mesh if it is above
    `2**-104`, and with `clipnorm` from `2**-40` to `2**70` times the limit.

    Args:
        grads: arrays of any floating dtype, or None.
        scale: what they were multiplied by.
        limits: the clip option in force, as for `gradients.clip`.
        onto: finite accumulators, to which the true gradients will be added: the sums have to be
            finite, and so has the norm of all of them if `limits` has one.
        layouts: the sharding of each, None for those that are on one device; if empty, only what
            the arrays themselves tell is known.
        norm: whether the norm of all of them together is wanted, even if clipping needs none; nan
            of finite gradients inside of `jax.shard_map(check_vma=False)`.

    Raises:
        ValueError: a limit for a norm inside of `jax.shard_map(check_vma=False)`.
    """
    known = bool(layouts) or jax.device_count() == 1
    layouts = layouts or [typed_layout(gradient) for gradient in grads]
    here = [i for i, gradient in enumerate(grads) if gradient is not None]
    leaves = [grads[i] for i in here]
    onto = [onto[i] for i in here] if onto else []
    spread = {i: layouts[i] for i in here if isinstance(layouts[i], NamedSharding)}
    limits = {name: limit for name, limit in (limits or {}).items() if name != "clipvalue"}
    bound = ENDLESS
    if onto and limits:
        limits, bound = {}, 2.0**128
    clips = bool(limits)
    if norm and not clips:
        limits = {"global_clipnorm": math.inf}
    mesh = jax.sharding.get_abstract_mesh()
    unknown = bool(mesh.manual_axes) and not knows_what_varies(mesh)
    if unknown and clips:
        (name,) = limits
        raise ValueError(
            f"{name} needs to know which gradients differ between devices, and "
            f"jax.shard_map(check_vma=False) does not tell. Use check_vma=True, or clip the "
            f"gradients before the step."
        )
    if mesh.manual_axes:  # inside of `jax.shard_map`
        axes = [varying_axes(leaf) for leaf in leaves]
        ordered = set(mesh.manual_axes) == set(mesh.axis_names)
        told = _read_part(leaves, onto, scale, limits, bound, axes, mesh.manual_axes, ordered)
        reading = _agreed(told, limits)
    elif not spread:
        reading = _read(leaves, onto, scale, limits, bound, ordered=known)
    else:
        alone = NamedSharding(next(iter(spread.values())).mesh, PartitionSpec())
        reading = _read_mesh(
            leaves, onto, scale, limits, bound, [spread.get(i, alone) for i in here]
        )
    norms = reading.norms
    if norms is None:
        return Inspection(reading.finite, [], None)
    whole = _norm_of(norms) if "clipnorm" in limits else norms[0]
    whole = jnp.where(reading.finite, jnp.nan, whole) if unknown else whole
    finite = reading.finite & jnp.isfinite(norms).all() if clips else reading.finite
    return Inspection(finite, list(norms) if clips else [], whole if norm else None)


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of a pytree is finite: a bool scalar, true of an empty tree."""
    leaves = real_parts([jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)])
    return inspect(leaves).finite


@compiled_if_eager
def norms(
    grads: Sequence[Any], limits: Mapping[str, float], layouts: Sequence[Any] = ()
) -> list[jax.Array]:
    """What `gradients.clip` divides by, of gradients that are not scaled."""
    clips = any(name != "clipvalue" for name in limits)
    return inspect(grads, 1.0, limits, layouts=layouts).norms if clips else []


def _read(
    leaves: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
    bound: float,
    ordered: bool = True,
) -> Reading:
    """Reads arrays on one device; with `ordered=False` they may be on many, for all we know.

    Terms of a finite sum are finite. So the sums of squares, the cheapest reading there is and one
    that clipping needs anyway, prove for almost every step that all elements are finite. They are
    read a second time, and more slowly, only where a sum says nothing, because it is too large or
    not finite itself, or where squares were flushed to zero that a limit is as small as.

    Args:
        leaves, onto, scale, limits: as for `inspect`, without None.
        bound: the norm of the sums of `leaves` and `onto` has to be below it.
        ordered: whether the arrays are known to be on this device.
    """
    columns = (leaves, onto) if onto else (leaves,)
    alone = "clipnorm" in limits or not ordered
    rows = [*zip(*columns, strict=True)] if alone else bundle(*columns)
    total, each = _squares([row[0] for row in rows], ordered)
    squares = _wanted(total, each, limits)
    norms = None if squares is None else jnp.sqrt(squares) / scale
    # What is below 2**100 moves no finite sum, or norm, of float32 beyond the largest number.
    proved = jnp.sqrt(total) / scale < 2.0**100
    if squares is not None:
        # Squares that were flushed to zero are those of norms far below any such limit.
        small = min(limits.values()) * jnp.asarray(scale) <= 2.0**-30
        proved &= ~small | (squares > 2.0**-60).all()

    # XLA would compute (c x)**2 as c**2 x**2, which overflows, for a number c that it knows.
    one = jnp.where(jnp.isnan(total), jnp.nan, 1)

    def exactly(gradient: jax.Array, *onto: jax.Array) -> jax.Array:
        true = gradient.astype(wide(gradient.dtype)) / scale
        # `max` would be no test of it: XLA drops NaN from a float32 `max` on CPU.
        terms = [(sum(onto, true), 2.0**64 / bound)]
        terms += [(true, factor) for factor in FACTORS if limits]
        known = one.astype(true.dtype)
        sums = [jnp.sum(jnp.square(x * (known * factor))) for x, factor in terms]
        return jnp.stack(sums) if limits else sums[0]

    def ask() -> Reading:
        total, each = _sums(exactly, rows, (1 + len(FACTORS),) if limits else (), ordered)
        asked = _wanted(total, each, limits)
        finite = jnp.isfinite(total[0] if limits else total)
        return Reading(finite, None if norms is None else _norms(asked[:, 1:]).astype(norms.dtype))

    return lax.cond(proved, lambda: Reading(proved, norms), ask)


def _wanted(total: jax.Array, each: list[jax.Array], limits: Mapping[str, float]) -> Any:
    """Of all sums those that clipping wants, None if it wants none."""
    chosen = each if "clipnorm" in limits else [total] if "global_clipnorm" in limits else []
    return jnp.array(chosen, total.dtype) if chosen else None


def _norms(sums: jax.Array) -> jax.Array:
    """The norms of arrays, of the sums of the squares of their elements times each of `FACTORS`."""
    each = jnp.sqrt(sums) / jnp.array(FACTORS, sums.dtype)
    place = jnp.argmax(jnp.isfinite(sums).at[:, -1].set(True), axis=1)
    return jnp.take_along_axis(each, place[:, None], axis=1)[:, 0]


def _norm_of(norms: jax.Array) -> jax.Array:
    """The norm of all arrays together, given those of each."""
    largest = jnp.max(norms)
    whole = largest * jnp.sqrt(jnp.sum(jnp.square(norms / largest)))
    return jnp.where((largest > 0) & jnp.isfinite(largest), whole, jnp.sum(norms))


def _read_mesh(
    leaves: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
    bound: float,
    layouts: Sequence[NamedSharding],
) -> Reading:
    """Reads arrays that are spread over a mesh: every device its part, then one sum over all."""
    mesh, specs = layouts[0].mesh, [layout.spec for layout in layouts]
    axes = [axes_of(spec) for spec in specs]

    def part(leaves: list[jax.Array], onto: list[jax.Array], scale: jax.Array) -> jax.Array:
        return _read_part(leaves, onto, scale, limits, bound, axes, mesh.axis_names)

    columns = [[placed(x, s) for x, s in zip(c, layouts, strict=False)] for c in (leaves, onto)]
    everywhere: Any = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(specs, specs[: len(onto)], PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return _agreed(everywhere(*columns, jnp.asarray(scale, jnp.float32)), limits)


def _read_part(
    leaves: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
    bound: float,
    axes: Sequence[frozenset[str]],
    everywhere: Sequence[str],
    ordered: bool = True,
) -> jax.Array:
    """On each device of a mesh: its part of the arrays, summed over all devices.

    Args:
        leaves, onto, scale, limits, bound, ordered: as for `_read`.
        axes: of the mesh, those along which each array differs.
        everywhere: all axes.

    Returns:
        What `_agreed` takes: the norms that clipping wants, as `_packed` has them, and behind them
        a number that is finite if all parts are.
    """
    alike: dict[frozenset[str], list[int]] = {}
    for i, own in enumerate(axes):
        alike.setdefault(own, []).append(i)
    bound /= math.prod(map(lax.axis_size, everywhere), start=len(alike)) ** 0.5
    finite, told = jnp.array(True), None
    count = len(leaves) if "clipnorm" in limits else 1
    for own, places in alike.items():
        mine = [onto[i] for i in places if onto]
        reading = _read([leaves[i] for i in places], mine, scale, limits, bound, ordered)
        # What several devices hold alike is counted on the first of them.
        first = is_first(axis for axis in everywhere if axis not in own)
        finite &= reading.finite
        if reading.norms is None:
            continue
        more = _packed(jnp.where(first, reading.norms, 0), limits)
        told = jnp.zeros(count + 1, more.dtype) if told is None else told
        told = told.at[jnp.array([*(places if "clipnorm" in limits else [0]), -1])].add(more)
    if told is None:
        told = jnp.zeros(1 + (count if limits else 0), jnp.float32)
    told = told.at[-1].set(jnp.where(finite, told[-1], jnp.inf))
    return lax.psum(varying(told, everywhere), tuple(everywhere))


def _packed(norms: jax.Array, limits: Mapping[str, float]) -> jax.Array:
    """Norms of parts, as numbers whose sum over all devices tells the norms of the whole.

    They are squares, and behind them a number that leaves room for what is not finite: for a single
    norm it is the square of one that is `LARGE`, else 0.
    """
    one = jnp.where(jnp.isnan(norms), jnp.nan, 1)  # as in `_read`
    if "clipnorm" in limits:
        return jnp.append(jnp.square(norms * (one * _unit(limits))), 0)
    large = norms >= LARGE
    small = jnp.where(large, 0, norms) * (one * 2.0**41)
    # The norm of finite elements may be infinite, which is told by a number that is too large.
    rest = jnp.minimum(jnp.where(large, norms, 0) * (one * 2.0**-75), 2.0**55)
    return jnp.square(jnp.append(small, rest))


def _agreed(told: jax.Array, limits: Mapping[str, float]) -> Reading:
    """What the sum of what all devices have `_packed` tells."""
    norms, finite = jnp.sqrt(told[:-1]), jnp.isfinite(told[-1])
    if not limits:
        return Reading(finite, None)
    if "clipnorm" in limits:
        return Reading(finite, norms / _unit(limits))
    norm = jnp.hypot(norms * 2.0**-41, jnp.sqrt(told[-1:]) * 2.0**75)
    return Reading(finite, jnp.where(jnp.isnan(norms), jnp.nan, norm))  # nan beside inf


def _unit(limits: Mapping[str, float]) -> float:
    """The power of two that norms are multiplied by before they are squared."""
    return 2.0 ** min(max(-20 - math.frexp(limits["clipnorm"])[1], -100), 100)


def _squares(
    arrays: Sequence[jax.Array], ordered: bool = True
) -> tuple[jax.Array, list[jax.Array]]:
    """The sum of the squares of all arrays, and that of each.

    Args:
        arrays: of any floating dtypes.
        ordered: whether their elements have an order, on one device.
    """
    nothing = _nothing(_widest(arrays), (), arrays)
    each = reduce_each(_SQUARE, arrays, ordered, nothing)
    return sum(each, nothing), each


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(wide(x.dtype)))


_SQUARE = Reduction(_square, jnp.add, jnp.sum, lambda x: jnp.sum(_square(x)))


def _sums(
    fn: Callable[..., jax.Array],
    rows: Sequence[tuple[jax.Array, ...]],
    shape: tuple[int, ...],
    ordered: bool = True,
) -> tuple[jax.Array, list[jax.Array]]:
    """`fn` of each row of arrays, and of all together.

    Args:
        fn: the sums that are wanted of a row, each over its elements.
        rows: arrays of one shape each.
        shape: that of the array which these are.
        ordered: as for `_squares`.
    """
    total, each = _nothing(_widest([r[0] for r in rows]), shape, itertools.chain(*rows)), []
    more = functools.partial(_with, fn)
    row_by_row = jax.jit(functools.partial(by_rows, more))  # traced once for rows of one shape
    for row in rows:
        nothing = _nothing(wide(row[0].dtype), shape, row)
        # The total that is handed on makes the loops take turns, and so share their memory.
        total, own = (row_by_row if ordered else more)((total, nothing), *row)
        each.append(own)
    return total, each


def _widest(arrays: Iterable[jax.Array]) -> Any:
    return jnp.result_type(jnp.float32, *(wide(x.dtype) for x in arrays))


def _nothing(dtype: Any, shape: tuple[int, ...], arrays: Iterable[jax.Array]) -> jax.Array:
    """The sums of nothing, of the type that those of the arrays have."""
    return varying_like(jnp.zeros(shape, dtype), arrays)


def _with(fn: Callable[..., jax.Array], so_far: tuple[Any, Any], *arrays: jax.Array) -> Any:
    """All sums and those of one row of arrays, with `fn` of (a part of) it added to both."""
    part = fn(*arrays)
    return so_far[0] + part, so_far[1] + part

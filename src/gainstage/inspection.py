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

from gainstage.bridge import compiled_if_eager
from gainstage.gradients import real_parts, wide
from gainstage.joining import Reduction, bundle, by_rows, reduce_each
from gainstage.sharding import axes_of, is_first, typed_layout, varying, varying_axes, varying_like
from gainstage.variable import placed


class Inspection(NamedTuple):
    """What one reading of scaled gradients tells of the true ones."""

    finite: jax.Array  # bool scalar: whether all their elements, and the norms, are finite
    norms: list[jax.Array]  # what clipping divides by, as `gradients.clip` takes it
    norm: jax.Array | None  # of all of them together, if it was asked for


class Sums(NamedTuple):
    """What is added up over elements, arrays and devices."""

    finite: jax.Array  # bool scalar: whether all elements are
    # Of one array or several together; in the end one element for each norm that is wanted, and
    # None if none is: XLA does not bear arrays without elements everywhere.
    squares: Any


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
    it known to all.

    Args:
        grads: arrays of any floating dtype, or None.
        scale: what they were multiplied by.
        limits: the clip option in force, as for `gradients.clip`.
        onto: finite accumulators, to which the true gradients will be added: the sums are asked.
        layouts: the sharding of each, None for those that are on one device; if empty, only what
            the arrays themselves tell is known.
        norm: whether the norm of all of them together is wanted, even if clipping needs none.
    """
    known = bool(layouts) or jax.device_count() == 1
    layouts = layouts or [typed_layout(gradient) for gradient in grads]
    here = [i for i, gradient in enumerate(grads) if gradient is not None]
    leaves = [grads[i] for i in here]
    onto = [onto[i] for i in here] if onto else []
    spread = {i: layouts[i] for i in here if isinstance(layouts[i], NamedSharding)}
    limits = {name: limit for name, limit in (limits or {}).items() if name != "clipvalue"}
    clips = bool(limits)
    if norm and not clips:
        limits = {"global_clipnorm": math.inf}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:  # inside of `jax.shard_map`
        axes = [varying_axes(leaf) for leaf in leaves]
        ordered = set(mesh.manual_axes) == set(mesh.axis_names)
        sums = _agreed(_read_part(leaves, onto, scale, limits, axes, mesh.manual_axes, ordered))
    elif not spread:
        sums = _read(leaves, onto, scale, limits, ordered=known)
    else:
        alone = NamedSharding(next(iter(spread.values())).mesh, PartitionSpec())
        sums = _read_mesh(leaves, onto, scale, limits, [spread.get(i, alone) for i in here])
    if sums.squares is None:
        return Inspection(sums.finite, [], None)
    norms = jnp.sqrt(sums.squares)
    whole = jnp.sqrt(jnp.sum(jnp.square(norms))) if "clipnorm" in limits else norms[0]
    finite = sums.finite & jnp.isfinite(norms).all() if clips else sums.finite
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
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual or any(isinstance(layout, NamedSharding) for layout in layouts):
        return inspect(grads, 1.0, limits, layouts=layouts).norms if limits else []
    squares = _wanted(*_squares([g for g in grads if g is not None and limits]), limits)
    return [] if squares is None else list(jnp.sqrt(squares))


def _read(
    leaves: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
    ordered: bool = True,
) -> Sums:
    """Reads arrays on one device; with `ordered=False` they may be on many, for all we know.

    Terms of a finite sum are finite. So the sums of squares, the cheapest reading there is and one
    that clipping needs anyway, vouch for almost every step; elements are asked one by one only
    where a sum says nothing, because it is too large or not finite itself.
    """
    columns = (leaves, onto) if onto else (leaves,)
    alone = "clipnorm" in limits or not ordered
    rows = [*zip(*columns, strict=True)] if alone else bundle(*columns)
    total, each = _squares([row[0] for row in rows], ordered)
    squares = _wanted(total, each, limits)
    norms = None if squares is None else jnp.sqrt(squares) / scale
    # What is below 2**100 does not move a finite sum of float32 beyond the largest number.
    vouched = jnp.sqrt(total) / scale < 2.0**100
    # Squares that were flushed to zero are those of norms far below any such limit.
    vouched &= min(limits.values(), default=1.0) * jnp.asarray(scale) > 2.0**-30

    def exactly(gradient: jax.Array, *onto: jax.Array) -> Sums:
        true = gradient.astype(wide(gradient.dtype)) / scale
        # `max` would be no test of it: XLA drops NaN from a float32 `max` on CPU.
        finite = jnp.isfinite(sum(onto, true)).all()
        return Sums(finite, jnp.sum(jnp.square(true)) if limits else jnp.zeros((), true.dtype))

    def ask() -> Sums:
        total, each = _sums(exactly, rows, ordered)
        asked = _wanted(total.squares, [sums.squares for sums in each], limits)
        return Sums(total.finite, None if norms is None else asked.astype(norms.dtype))

    known = None if norms is None else jnp.square(norms)
    return lax.cond(vouched, lambda: Sums(vouched, known), ask)


def _wanted(total: jax.Array, each: list[jax.Array], limits: Mapping[str, float]) -> Any:
    """The squares that clipping wants, None if it wants none."""
    chosen = each if "clipnorm" in limits else [total] if "global_clipnorm" in limits else []
    return jnp.array(chosen, total.dtype) if chosen else None


def _read_mesh(
    leaves: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
    layouts: Sequence[NamedSharding],
) -> Sums:
    """Reads arrays that are spread over a mesh: every device its part, then one sum over all."""
    mesh, specs = layouts[0].mesh, [layout.spec for layout in layouts]
    axes = [axes_of(spec) for spec in specs]

    def part(leaves: list[jax.Array], onto: list[jax.Array], scale: jax.Array) -> jax.Array:
        return _read_part(leaves, onto, scale, limits, axes, mesh.axis_names)

    columns = [[placed(x, s) for x, s in zip(c, layouts, strict=False)] for c in (leaves, onto)]
    everywhere: Any = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(specs, specs[: len(onto)], PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return _agreed(everywhere(*columns, jnp.asarray(scale, jnp.float32)))


def _read_part(
    leaves: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
    axes: Sequence[frozenset[str]],
    everywhere: Sequence[str],
    ordered: bool = True,
) -> jax.Array:
    """On each device of a mesh: its part of the arrays, summed over all devices.

    Args:
        leaves, onto, scale, limits, ordered: as for `_read`.
        axes: of the mesh, those along which each array differs.
        everywhere: all axes.

    Returns:
        The squares that clipping wants, and behind them the number of devices with a part that is
        not finite.
    """
    alike: dict[frozenset[str], list[int]] = {}
    for i, own in enumerate(axes):
        alike.setdefault(own, []).append(i)
    finite, squares = jnp.array(True), None
    for own, places in alike.items():
        mine = [onto[i] for i in places if onto]
        sums = _read([leaves[i] for i in places], mine, scale, limits, ordered)
        # What several devices hold alike is counted on the first of them.
        first = is_first(axis for axis in everywhere if axis not in own)
        finite &= sums.finite
        if sums.squares is None:
            continue
        counted = jnp.where(first, sums.squares, 0)
        if "clipnorm" in limits:
            squares = jnp.zeros(len(leaves), counted.dtype) if squares is None else squares
            squares = squares.at[jnp.array(places)].set(counted)
        else:
            squares = counted if squares is None else squares + counted
    if squares is None and not leaves:
        squares = _read([], [], scale, limits).squares
    told = jnp.float32(~finite)[None] if squares is None else jnp.append(squares, ~finite)
    return lax.psum(varying(told, everywhere), tuple(everywhere))


def _agreed(told: jax.Array) -> Sums:
    """What `_read_part` has told all devices."""
    return Sums(told[-1] == 0, told[:-1] if told.size > 1 else None)


def _joined(some: Sums, more: Sums) -> Sums:
    return Sums(some.finite & more.finite, some.squares + more.squares)


def _squares(
    arrays: Sequence[jax.Array], ordered: bool = True
) -> tuple[jax.Array, list[jax.Array]]:
    """The sum of the squares of all arrays, and that of each.

    Args:
        arrays: of any floating dtypes.
        ordered: whether their elements have an order, on one device.
    """
    nothing = _nothing(_widest(arrays), arrays).squares
    each = reduce_each(_SQUARE, arrays, ordered, nothing)
    return sum(each, nothing), each


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(x.astype(wide(x.dtype)))


_SQUARE = Reduction(_square, jnp.add, jnp.sum, lambda x: jnp.sum(_square(x)))


def _sums(
    fn: Callable[..., Sums], rows: Sequence[tuple[jax.Array, ...]], ordered: bool = True
) -> tuple[Sums, list[Sums]]:
    """`fn` of each row of arrays, and of all together.

    Args:
        fn: what is wanted of a row; of its parts it is joined.
        rows: arrays of one shape each.
        ordered: as for `_squares`.
    """
    total, each = _nothing(_widest([row[0] for row in rows]), itertools.chain(*rows)), []
    more = functools.partial(_with, fn)
    row_by_row = jax.jit(functools.partial(by_rows, more))  # traced once for rows of one shape
    for row in rows:
        nothing = _nothing(jax.eval_shape(fn, *row).squares.dtype, row)
        # The total that is handed on makes the loops take turns, and so share their memory.
        total, own = (row_by_row if ordered else more)((total, nothing), *row)
        each.append(own)
    return total, each


def _widest(arrays: Iterable[jax.Array]) -> Any:
    return jnp.result_type(jnp.float32, *(wide(x.dtype) for x in arrays))


def _nothing(dtype: Any, arrays: Iterable[jax.Array]) -> Sums:
    """The sums of nothing, of the type that those of the arrays have."""
    return varying_like(Sums(jnp.array(True), jnp.zeros((), dtype)), arrays)


def _with(fn: Callable[..., Sums], so_far: tuple[Sums, Sums], *arrays: jax.Array) -> Any:
    """All sums and those of one row of arrays, with `fn` of (a part of) it added to both."""
    part = fn(*arrays)
    return _joined(so_far[0], part), _joined(so_far[1], part)

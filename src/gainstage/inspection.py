"""One reading of the gradients, for all that a step must know of them before it is taken."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gainstage.gradients import wide
from gainstage.joining import SMALL, bundle, is_spread
from gainstage.sharding import axes_of
from gainstage.variable import placed

ROW = 2**15  # elements: so many float32 fit into a core's cache


class Inspection(NamedTuple):
    """What one reading of scaled gradients tells of the true ones."""

    finite: jax.Array  # bool scalar: whether all their elements, and the norms, are finite
    norms: list[jax.Array]  # what clipping divides by, as `gradients.clip` takes it


class Sums(NamedTuple):
    """What is to be added up over the devices of a mesh."""

    finite: jax.Array  # bool scalar: whether all elements here are finite
    squares: jax.Array  # of the true gradients: none, one of all, or one of each, as clipping wants


def inspect(
    grads: Sequence[Any],
    scale: jax.Array | float = 1.0,
    limits: Mapping[str, float] | None = None,
    onto: Sequence[Any] = (),
    layouts: Sequence[Any] = (),
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
    """
    known = bool(layouts) or jax.device_count() == 1
    layouts = layouts or [typed_layout(gradient) for gradient in grads]
    here = [i for i, gradient in enumerate(grads) if gradient is not None]
    leaves = [grads[i] for i in here]
    onto = [onto[i] for i in here] if onto else []
    spread = {i: layouts[i] for i in here if isinstance(layouts[i], NamedSharding)}
    limits = limits or {}
    if jax.sharding.get_abstract_mesh().manual_axes:
        sums = _read(leaves, onto, scale, limits)
    elif not spread:
        sums = _read(leaves, onto, scale, limits, ordered=known)
    else:
        alone = NamedSharding(next(iter(spread.values())).mesh, PartitionSpec())
        sums = _read_mesh(leaves, onto, scale, limits, [spread.get(i, alone) for i in here])
    norms = jnp.sqrt(sums.squares)
    return Inspection(sums.finite & jnp.isfinite(norms).all(), list(norms))


def typed_layout(x: Any) -> NamedSharding | None:
    """The layout that is part of an array's type: on a mesh of Explicit axes."""
    layout = None if x is None else jax.typeof(x).sharding
    kinds = getattr(getattr(layout, "mesh", None), "axis_types", ())
    return layout if kinds and set(kinds) == {AxisType.Explicit} else None


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of a pytree is finite: a bool scalar, true of an empty tree."""
    return inspect([jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]).finite


def norms(
    grads: Sequence[Any], limits: Mapping[str, float], layouts: Sequence[Any] = ()
) -> list[jax.Array]:
    """What `gradients.clip` divides by, of gradients that are not scaled."""
    if any(isinstance(layout, NamedSharding) for layout in layouts):
        return inspect(grads, 1.0, limits, layouts=layouts).norms if limits else []
    sums = _sums_of_squares([g for g in grads if g is not None] if limits else [])
    return list(jnp.sqrt(_wanted(*sums, limits)))


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
    leaves = [row[0] for row in rows]

    total, each = _sums_of_squares(leaves, ordered=ordered)
    norms = jnp.sqrt(_wanted(total, each, limits)) / scale
    # What is below 2**100 does not move a finite sum of float32 beyond the largest number.
    vouched = jnp.sqrt(total) / scale < 2.0**100
    # Squares that were flushed to zero are those of norms far below any such limit.
    vouched &= min(limits.values(), default=1.0) * jnp.asarray(scale) > 2.0**-30

    def ask() -> Sums:
        finite = jnp.array(True)
        for row in rows:
            one = _by_rows if ordered else _at_once
            finite, _ = one(_finite_sum(scale), _ALL, finite, *row)
        squares = _wanted(*_sums_of_squares(leaves if limits else [], scale, ordered), limits)
        return Sums(finite, squares.astype(norms.dtype))

    return lax.cond(vouched, lambda: Sums(jnp.array(True), jnp.square(norms)), ask)


def _wanted(total: jax.Array, each: list[jax.Array], limits: Mapping[str, float]) -> jax.Array:
    """The sums that clipping wants."""
    chosen = each if "clipnorm" in limits else [total] if "global_clipnorm" in limits else []
    return jnp.array(chosen, total.dtype)


def _read_mesh(
    leaves: Sequence[jax.Array],
    onto: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
    layouts: Sequence[NamedSharding],
) -> Sums:
    """Reads arrays that are spread over a mesh: every device its part, then one sum over all."""
    mesh, specs, each = layouts[0].mesh, [layout.spec for layout in layouts], "clipnorm" in limits
    alike: dict[frozenset[str], list[int]] = {}
    for i, spec in enumerate(specs):
        alike.setdefault(axes_of(spec), []).append(i)

    def part(leaves: list[jax.Array], onto: list[jax.Array], scale: jax.Array) -> jax.Array:
        finite, squares = jnp.array(True), None
        for axes, places in alike.items():
            mine = [onto[i] for i in places if onto]
            sums = _read([leaves[i] for i in places], mine, scale, limits)
            # What several devices hold alike is counted on the first of them.
            first = [lax.axis_index(axis) == 0 for axis in mesh.axis_names if axis not in axes]
            own = jnp.where(jnp.array(first, bool).all(), sums.squares, 0)
            if each:
                squares = jnp.zeros(len(leaves), own.dtype) if squares is None else squares
                squares = squares.at[jnp.array(places)].set(own)
            else:
                squares = own if squares is None else squares + own
            finite &= sums.finite
        assert squares is not None
        return lax.psum(jnp.append(squares, ~finite), mesh.axis_names)

    columns = [[placed(x, s) for x, s in zip(c, layouts, strict=False)] for c in (leaves, onto)]
    everywhere: Any = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(specs, specs[: len(onto)], PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    told = everywhere(*columns, jnp.asarray(scale, jnp.float32))
    return Sums(told[-1] == 0, told[:-1])


def _sums_of_squares(
    grads: Iterable[jax.Array], scale: jax.Array | float = 1.0, ordered: bool = True
) -> tuple[jax.Array, list[jax.Array]]:
    """The sum of the squares of all elements divided by `scale`, and that of each array alone."""

    def of(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(wide(x.dtype)) / scale))

    grads = list(grads)
    total, each = jnp.zeros((), jnp.result_type(jnp.float32, *(wide(x.dtype) for x in grads))), []
    for x in grads:
        # XLA for CPU has a fast sum of squares of what is stored; the rest it would store first.
        at_once = not ordered or (x.dtype.itemsize >= 4 and isinstance(scale, float))
        total, own = (_at_once if at_once else _by_rows)(of, _SUM, total, x)
        each.append(own)
    return total, each


def _finite_sum(scale: jax.Array | float) -> Callable[..., jax.Array]:
    # `max` would be no test of it: XLA drops NaN from a float32 `max` on CPU.
    def of(gradient: jax.Array, *onto: jax.Array) -> jax.Array:
        return jnp.isfinite(sum(onto, gradient.astype(wide(gradient.dtype)) / scale)).all()

    return of


class _Fold(NamedTuple):
    join: Callable[[Any, Any], jax.Array]
    nothing: Any


_SUM, _ALL = _Fold(jnp.add, 0.0), _Fold(jnp.logical_and, True)
Folded = tuple[jax.Array, jax.Array]


def _at_once(fn: Callable[..., Any], fold: _Fold, total: jax.Array, *arrays: jax.Array) -> Folded:
    """`total` joined with `fn` of the arrays, and that alone."""
    own = fn(*arrays)
    return fold.join(total, own), own


def _by_rows(fn: Callable[..., Any], fold: _Fold, total: jax.Array, *arrays: jax.Array) -> Folded:
    """The same; on CPU row by row, as XLA stores there what it computes on the way."""
    size = arrays[0].size
    # At least two rows: XLA would unroll a loop over one.
    row = next((n for n in range(min(size // 2, ROW), 0, -1) if size % n == 0), 1)
    at_once = functools.partial(_at_once, fn, fold)
    if row < SMALL // 4 or any(map(is_spread, arrays)):
        return at_once(total, *arrays)

    def by_rows(total: jax.Array, *arrays: jax.Array) -> Folded:
        tables = [x.reshape(size // row, row) for x in arrays]
        nothing = jnp.asarray(fold.nothing, jax.eval_shape(fn, *arrays).dtype)

        def one_more(i: Any, so_far: Folded) -> Folded:
            part = fn(*(lax.dynamic_index_in_dim(table, i) for table in tables))
            return fold.join(so_far[0], part), fold.join(so_far[1], part)

        # The total that is handed on makes the loops take turns, and so share their memory.
        return lax.fori_loop(0, size // row, one_more, (total, nothing))

    return lax.platform_dependent(total, *arrays, cpu=by_rows, default=at_once)

"""What is done to gradients between the backward pass and the update: pure functions of pytrees."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage.joining import bundle, is_spread

ROW = 2**15  # elements: so many float32 fit into a core's cache


def wide(dtype: Any) -> np.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return np.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def widen(tree: Any) -> Any:
    """The floating leaves of a pytree in float32 or wider; the others as they are."""

    def one(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


class Gradient(NamedTuple):
    """A gradient as it came, and the scalars that make it the one to use: small until it is."""

    array: jax.Array
    factors: tuple[jax.Array, ...] = ()

    def value(self) -> jax.Array:
        """The gradient, in float32 or wider."""
        value = widen(self.array)
        # XLA computes a product again in every kernel that wants it, but would store a quotient.
        for factor in self.factors:
            value = value * factor.astype(value.dtype)
        return value

    def times(self, factor: jax.Array) -> "Gradient":
        """The gradient times one more scalar."""
        return Gradient(self.array, (*self.factors, factor))


Gradients = list[Gradient | None]


def unscale(grads: Any, scale: jax.Array) -> Any:
    """The true gradients of a loss that was multiplied by `scale`, never in half precision."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, grads))
    return structure.unflatten(g and g.value() for g in divided(leaves, scale))


def divided(grads: Sequence[Any], scale: jax.Array | None = None) -> Gradients:
    """Arrays, or None, as gradients of a loss that was multiplied by `scale`."""
    inverse = functools.cache(lambda dtype: () if scale is None else (1 / scale.astype(dtype),))
    return [None if g is None else Gradient(g, inverse(wide(g.dtype))) for g in grads]


class Inspection(NamedTuple):
    """What one reading of scaled gradients tells of the true ones."""

    finite: jax.Array  # bool scalar: whether all their elements, and the norms, are finite
    norms: list[jax.Array]  # what clipping divides by, as `clip` takes it


def inspect(
    grads: Sequence[Any],
    scale: jax.Array | float = 1.0,
    limits: Mapping[str, float] | None = None,
    onto: Sequence[Any] = (),
) -> Inspection:
    """Reads scaled gradients once, for the finiteness and the norms of the true ones.

    Terms of a finite sum are finite. So the sums of squares, the cheapest reading there is and one
    that clipping needs anyway, vouch for almost every step; elements are asked one by one only
    where a sum says nothing, because it is too large or not finite itself.

    Args:
        grads: arrays of any floating dtype, or None.
        scale: what they were multiplied by.
        limits: the clip option in force, as for `clip`.
        onto: finite accumulators, to which the true gradients will be added: the sums are asked.
    """
    limits, leaves = limits or {}, [g for g in grads if g is not None]
    onto = [a for a, g in zip(onto, grads, strict=True) if g is not None] if onto else []
    columns = (leaves, onto) if onto else (leaves,)
    rows = [*zip(*columns, strict=True)] if "clipnorm" in limits else bundle(*columns)
    leaves = [row[0] for row in rows]
    total, each = sums_of_squares(leaves)
    norms = _norms(total, each, scale, limits)
    # What is below 2**100 does not move a finite sum of float32 beyond the largest number.
    vouched = jnp.sqrt(total) / scale < 2.0**100
    # Squares that were flushed to zero are those of norms far below any such limit.
    vouched &= min(limits.values(), default=1.0) * jnp.asarray(scale) > 2.0**-30

    def ask() -> Inspection:
        norms = _norms(*sums_of_squares(leaves, scale), 1.0, limits) if limits else []
        finite = jnp.array([jnp.isfinite(norm) for norm in norms], bool).all()
        for row in rows:
            finite, _ = _by_rows(_finite_sum(scale), _ALL, finite, *row)
        return Inspection(finite, norms)

    return lax.cond(vouched, lambda: Inspection(jnp.array(True), norms), ask)


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of a pytree is finite: a bool scalar, true of an empty tree."""
    return inspect([jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]).finite


def sums_of_squares(
    grads: Iterable[jax.Array], scale: jax.Array | float = 1.0
) -> tuple[jax.Array, list[jax.Array]]:
    """The sum of the squares of all elements divided by `scale`, and that of each array alone."""

    def of(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(wide(x.dtype)) / scale))

    grads = list(grads)
    total, each = jnp.zeros((), jnp.result_type(jnp.float32, *(wide(x.dtype) for x in grads))), []
    for x in grads:
        # XLA for CPU has a fast sum of squares of what is stored; the rest it would store first.
        stored = x.dtype.itemsize >= 4 and isinstance(scale, float)
        total, own = (_at_once if stored else _by_rows)(of, _SUM, total, x)
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
    row = next(n for n in range(min(size, ROW), 0, -1) if size % n == 0) if size else 1
    at_once = functools.partial(_at_once, fn, fold)
    if size <= ROW or row < ROW // 32 or any(map(is_spread, arrays)):
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


def _norms(
    total: jax.Array,
    each: Sequence[jax.Array],
    scale: jax.Array | float,
    limits: Mapping[str, float],
) -> list[jax.Array]:
    """What `clip` divides by, from sums of squares of gradients that were scaled."""
    chosen = each if "clipnorm" in limits else [total] if "global_clipnorm" in limits else []
    return [jnp.sqrt(squares) / scale for squares in chosen]


def measure(names: Sequence[str], grads: Any, loss: Any = None) -> dict[str, jax.Array]:
    """What a loss-scale rule asks for in its `measures`, of unscaled gradients and the true loss.

    Raises:
        ValueError: a name that is none of `max_abs`, `any_nan`, `any_inf`, `loss`.
    """
    leaves = jax.tree.leaves(grads)

    def largest(g: jax.Array) -> jax.Array:
        finite = jnp.where(jnp.isfinite(g), jnp.abs(g), 0)
        return finite.max(initial=0).astype(jnp.float32)

    known = {
        "max_abs": lambda: jnp.array([largest(g) for g in leaves], jnp.float32).max(initial=0),
        "any_nan": lambda: jnp.array([jnp.isnan(g).any() for g in leaves], bool).any(),
        "any_inf": lambda: jnp.array([jnp.isinf(g).any() for g in leaves], bool).any(),
        "loss": lambda: jnp.asarray(jnp.nan if loss is None else loss, jnp.float32),
    }
    for name in names:
        if name not in known:
            raise ValueError(f"Expected measures among {sorted(known)}; got {name!r}.")
    return {name: known[name]() for name in names}


def norms(grads: Sequence[Any], limits: Mapping[str, float]) -> list[jax.Array]:
    """What `clip` divides by, of gradients that are not scaled."""
    return _norms(*sums_of_squares(g for g in grads if g is not None), 1.0, limits)


def clip(grads: Gradients, limits: Mapping[str, float], norms: Sequence[jax.Array]) -> Gradients:
    """The gradients, clipped.

    Args:
        grads: a gradient, or None, per variable.
        limits: by name, at most one of `clipnorm` (the norm of each), `global_clipnorm` (the norm
            of all together) and `clipvalue` (the absolute value of each element).
        norms: for the first, that of each gradient; for the second, that of all; else empty.
            Where one is not finite the gradients become nan: times 1 / inf they would vanish.
    """
    if "clipvalue" in limits:
        limit = limits["clipvalue"]
        return [g and Gradient(jnp.clip(g.value(), -limit, limit)) for g in grads]
    factors = [
        jnp.where(jnp.isfinite(norm), limit / jnp.maximum(norm, limit), jnp.nan)
        for norm in norms
        for limit in limits.values()
    ]
    if not factors:
        return grads
    each = iter(factors if "clipnorm" in limits else itertools.repeat(factors[0]))
    return [g and g.times(next(each)) for g in grads]

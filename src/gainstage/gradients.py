"""What is done to gradients between the backward pass and the update: pure functions of pytrees."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint

from gainstage.fp8 import Seen
from gainstage.joining import bundle, longest_row, reduce_by_rows
from gainstage.sharding import on_one_device, varying, varying_axes
from gainstage.variable import placed


def wide(dtype: Any) -> np.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return np.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def widen(tree: Any) -> Any:
    """The floating leaves of a pytree in float32 or wider; the others as they are."""

    def one(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def real_parts(arrays: Iterable[Any]) -> list[Any]:
    """The arrays, with the real and the imaginary part in the place of each complex one."""
    parts = [[x.real, x.imag] if jnp.iscomplexobj(x) else [x] for x in arrays]
    return [part for both in parts for part in both]


def in_order(gradient: Any) -> Any:
    """A gradient on one device, stored in the order of its variable's elements; None stays None.

    XLA for CPU may compute that of a product in half precision transposed. Left to itself it would
    store it both ways, for the check and for the update. An array on several devices it would
    gather.
    """
    if not isinstance(gradient, Tracer) or gradient.ndim < 2:
        return gradient
    rows = Layout(tuple(range(gradient.ndim)))
    pin = functools.partial(with_layout_constraint, layouts=rows)
    return lax.platform_dependent(gradient, cpu=pin, default=lambda x: x)


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

    def on(self, layout: Any) -> "Gradient":
        """The gradient in this layout, if it is one on a mesh."""
        return self._replace(array=placed(self.array, layout))

    def times(self, factor: jax.Array) -> "Gradient":
        """The gradient times one more scalar."""
        return Gradient(self.array, (*self.factors, factor))


Gradients = list[Gradient | None]


def unscale(grads: Any, scale: jax.Array) -> Any:
    """The true gradients of a loss that was multiplied by `scale`, never in half precision.

    What casts to float8 have seen comes with them, and is no gradient: it stays as it is.
    """
    leaves, structure = jax.tree.flatten(grads, is_leaf=_is_seen)
    true = divided([None if _is_seen(leaf) else jnp.asarray(leaf) for leaf in leaves], scale)
    pairs = zip(leaves, true, strict=True)
    return structure.unflatten(leaf if g is None else g.value() for leaf, g in pairs)


def _is_seen(node: Any) -> bool:
    return isinstance(node, Seen)


def divided(grads: Sequence[Any], scale: jax.Array | None = None) -> Gradients:
    """Arrays, or None, as gradients of a loss that was multiplied by `scale`."""
    inverse = functools.cache(lambda dtype: () if scale is None else (1 / scale.astype(dtype),))
    return [None if g is None else Gradient(g, inverse(wide(g.dtype))) for g in grads]


def measure(
    names: Sequence[str],
    grads: Any,
    loss: Any = None,
    scale: jax.Array | None = None,
    ordered: bool = False,
) -> dict[str, jax.Array]:
    """What a loss-scale rule asks for in its `measures`, of true gradients and the true loss.

    Args:
        names: any of `max_abs`, `any_nan`, `any_inf`, `loss`.
        grads: a pytree of gradients.
        loss: the true loss, if it is known. Measured, it is inf where it is nan, and nan where it
            is not known.
        scale: what the gradients were multiplied by; None if they are true.
        ordered: whether they are known to be on one device.

    Raises:
        ValueError: another name.
    """
    known = (*_MEASURES, "loss")
    for name in names:
        if name not in known:
            raise ValueError(f"Expected measures among {sorted(known)}; got {name!r}.")
    wanted = [name for name in names if name in _MEASURES]
    leaves = jax.tree.leaves(grads)
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    ordered = on_one_device(ordered)
    measured = {name: jnp.zeros((), _MEASURES[name].dtype) for name in wanted}
    ways = {name: (_MEASURES[name].join, _MEASURES[name].reduce) for name in wanted}
    axes = tuple(frozenset().union(*map(varying_axes, leaves)))
    measured = lax.pcast(measured, axes, to="varying") if axes and wanted else measured
    longest = longest_row(leaves)
    for (array,) in bundle(leaves) if ordered and wanted else zip(leaves if wanted else ()):
        (gradient,) = divided([array], scale)
        assert gradient is not None
        elements = functools.partial(_elements, wanted, gradient.factors)
        if ordered:
            after = measured[wanted[0]].astype(jnp.float32)
            more = reduce_by_rows(elements, ways, array, longest, after)
        else:
            more = {name: ways[name][1](value) for name, value in elements(array).items()}
        measured = {name: ways[name][0](measured[name], more[name]) for name in wanted}
    if "loss" in names:
        value = jnp.asarray(jnp.nan if loss is None else loss, jnp.float32)
        measured["loss"] = value if loss is None else jnp.where(jnp.isnan(value), jnp.inf, value)
    if not manual:
        return measured
    # Inside of `jax.shard_map` each device has measured its own part, and all have to agree.
    together = {"max_abs": lax.pmax, "loss": lax.pmean}
    return {
        name: together[name](varying(value, manual), manual)
        if name in together
        else lax.psum(varying(value.astype(jnp.int32), manual), manual) > 0
        for name, value in measured.items()
    }


def measured_of_both(before: Mapping[str, jax.Array], more: Mapping[str, jax.Array]) -> Any:
    """What has been measured of several microbatches, and of one more: of the losses the last, but
    the first that is not finite."""
    joined: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        "max_abs": jnp.maximum,
        "any_nan": jnp.logical_or,
        "any_inf": jnp.logical_or,
        "loss": lambda old, new: jnp.where(jnp.isfinite(old), new, old),
    }
    return {name: joined[name](before[name], value) for name, value in more.items()}


class _Measure(NamedTuple):
    dtype: Any
    element: Callable[[jax.Array], jax.Array]  # of true gradients, each by itself
    join: Callable[[jax.Array, jax.Array], jax.Array]
    reduce: Callable[[jax.Array], jax.Array]


def _elements(names: Sequence[str], factors: Any, array: jax.Array) -> dict[str, jax.Array]:
    value = Gradient(array, factors).value()
    return {name: _MEASURES[name].element(value) for name in names}


def _size(value: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(value), jnp.abs(value), 0).astype(jnp.float32)


_MEASURES = {
    "max_abs": _Measure(jnp.float32, _size, jnp.maximum, functools.partial(jnp.max, initial=0)),
    "any_nan": _Measure(jnp.bool_, jnp.isnan, jnp.logical_or, jnp.any),
    "any_inf": _Measure(jnp.bool_, jnp.isinf, jnp.logical_or, jnp.any),
}


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

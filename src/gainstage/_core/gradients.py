"""What is done to gradients between the backward pass and the update: pure functions of pytrees."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import float0

from gainstage._core._jax import Layout, Tracer, with_layout_constraint
from gainstage._core.variable import placed
from gainstage.fp8 import Seen


def float32_or_wider(dtype: Any) -> np.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return np.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def upcast(tree: Any) -> Any:
    """The floating leaves of a pytree in float32 or wider; the others as they are."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = map(jnp.asarray, leaves)
    return structure.unflatten(
        x.astype(float32_or_wider(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in arrays
    )


def scaled(loss: Any, scale: Any) -> jax.Array:
    """A loss times the scale, in float32 or wider: a float16 one would overflow.

    Raises:
        TypeError: several losses, or something else than an array.
    """
    if not jax.tree_util.all_leaves([loss]) or loss is None:
        raise TypeError(f"Expected one loss, an array; got {loss!r}. Add several up before.")
    loss = upcast(loss)
    return loss * jnp.asarray(scale, loss.dtype)


def with_square(gradient: jax.Array) -> jax.Array:
    """The gradient, clipped to numbers whose square is finite: `2**63` in float32."""
    largest = 2.0 ** (jnp.finfo(gradient.dtype).maxexp // 2 - 1)
    return jnp.clip(gradient, -largest, largest)


def real_parts(arrays: Iterable[Any]) -> list[Any]:
    """The arrays, with the real and the imaginary part in the place of each complex one."""
    parts = [[x.real, x.imag] if jnp.iscomplexobj(x) else [x] for x in arrays]
    return [part for both in parts for part in both]


def row_major(gradient: Any) -> Any:
    """A gradient on one device, stored in the order of its variable's elements; None stays None.

    XLA for CPU may compute that of a product in half precision transposed. Left to itself it would
    store it both ways, for the check and for the update. An array on several devices it would
    gather.
    """
    if not isinstance(gradient, Tracer) or gradient.ndim < 2 or gradient.dtype == float0:
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
        value = self.array
        if not jnp.iscomplexobj(value):
            value = value.astype(float32_or_wider(value.dtype))
        # XLA computes a product again in every kernel that wants it, but would store a quotient.
        for factor in self.factors:
            value = value * factor.astype(value.dtype)
        return value

    def on(self, sharding: Any) -> "Gradient":
        """The gradient in this layout, if it is one on a mesh."""
        return self._replace(array=placed(self.array, sharding))

    def times(self, *factors: jax.Array) -> "Gradient":
        """The gradient times more scalars."""
        return Gradient(self.array, (*self.factors, *factors))


Gradients = list[Gradient | None]


def unscale(grads: Any, scale: jax.Array) -> Any:
    """The true gradients of a loss that was multiplied by `scale`, never in half precision.

    What casts to float8 have seen comes with them, and is no gradient: it stays as it is. So does
    the gradient by an integer.
    """
    inverse = functools.cache(lambda dtype: 1 / scale.astype(dtype))

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Seen) or getattr(leaf, "dtype", None) == float0:
            return leaf
        value = jnp.asarray(leaf)
        dtype = float32_or_wider(value.dtype)
        value = value if jnp.iscomplexobj(value) else value.astype(dtype)
        return value * inverse(dtype).astype(value.dtype)

    return jax.tree.map(one, grads, is_leaf=lambda leaf: isinstance(leaf, Seen))


def divided(grads: Sequence[Any], scale: jax.Array | None = None) -> Gradients:
    """Arrays, or None, as gradients of a loss that was multiplied by `scale`."""
    inverse = functools.cache(lambda dtype: () if scale is None else (1 / scale.astype(dtype),))
    return [None if g is None else Gradient(g, inverse(float32_or_wider(g.dtype))) for g in grads]


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
    factors = [_factors(norm, limit) for norm in norms for limit in limits.values()]
    if not factors:
        return grads
    each = iter(factors if "clipnorm" in limits else itertools.repeat(factors[0]))
    return [g and g.times(*next(each)) for g in grads]


def _factors(norm: jax.Array, limit: float) -> tuple[jax.Array, jax.Array]:
    """Two factors that together clip a norm: their product may be 0 in float32."""
    first = jnp.where(norm * 2.0**-100 > limit, 2.0**-100, 1.0)
    second = limit / jnp.maximum(norm * first, limit)
    return first, jnp.where(jnp.isfinite(norm), second, jnp.nan)

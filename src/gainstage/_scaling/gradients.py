"""Operations on gradients between the backward pass and the update: pure functions of pytrees."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import float0
from jax.sharding import Sharding

from gainstage._base._jax import Layout, Tracer, with_layout_constraint
from gainstage._variables.types import PyTree, Scalar
from gainstage._variables.variable import placed


def float32_or_wider(dtype: np.dtype) -> np.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return np.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def upcast(tree: PyTree) -> PyTree:
    """Upcasts the floating leaves of a pytree to float32 or wider."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = map(jnp.asarray, leaves)
    upcasted = (
        x.astype(float32_or_wider(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in arrays
    )
    return jax.tree.unflatten(structure, upcasted)


def scaled(loss: Scalar, scale: Scalar) -> jax.Array:
    """Returns a loss times the scale, in float32 or wider; float16 could overflow, and integers
    too.

    Raises:
        TypeError: `loss` is not a number or array.
    """
    if not jax.tree_util.all_leaves([loss]):
        raise TypeError(f"Expected one loss, an array; got {loss!r}. Sum several losses into one.")
    if loss is None or callable(loss) or isinstance(loss, (str, bytes)):
        advice = " Call it first." if callable(loss) else ""
        raise TypeError(f"Expected a number or an array for loss; got {loss!r}.{advice}")
    value = upcast(loss)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        value = value.astype(jnp.float32)
    return value * jnp.asarray(scale, value.dtype)


def with_square(gradient: jax.Array) -> jax.Array:
    """Clips a gradient to numbers whose square is finite: `2**63` in float32."""
    largest = 2.0 ** (jnp.finfo(gradient.dtype).maxexp // 2 - 1)
    return jnp.clip(gradient, -largest, largest)


def real_parts(arrays: Iterable[Any]) -> list[Any]:
    """The arrays; each complex one is replaced by its real and imaginary parts."""
    parts = [[x.real, x.imag] if jnp.iscomplexobj(x) else [x] for x in arrays]
    return [part for both in parts for part in both]


def row_major(arrays: Sequence[Any]) -> list[Any]:
    """Stores gradients on one device in their variables' element order; None stays None.

    XLA:CPU may compute the gradient of a half-precision product transposed. It would then store it
    both ways, for the check and for the update. An array on several devices would be gathered.
    """
    is_matrix = [isinstance(x, Tracer) and x.ndim > 1 and x.dtype != float0 for x in arrays]

    def pinned(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, layouts=Layout(tuple(range(x.ndim))))

    return _on_cpu(pinned, arrays, is_matrix)


def behind_barriers(arrays: Sequence[Any], larger_than: int) -> list[Any]:
    """The arrays; of those with more elements, XLA:CPU does not know that they are the same."""
    is_large = [x is not None and x.size > larger_than for x in arrays]
    return _on_cpu(lax.optimization_barrier, arrays, is_large)


def _on_cpu(
    fun: Callable[[jax.Array], jax.Array], arrays: Sequence[Any], where: Sequence[bool]
) -> list[Any]:
    """Applies a function to some arrays, if the platform is a CPU. It is one operation for all, as
    JAX traces each as two conditionals."""
    chosen = [x for x, is_chosen in zip(arrays, where, strict=True) if is_chosen]
    if not chosen:
        return list(arrays)
    found = lax.platform_dependent(
        *chosen, cpu=lambda *xs: list(map(fun, xs)), default=lambda *xs: list(xs)
    )
    new = iter(found)
    return [next(new) if is_chosen else x for x, is_chosen in zip(arrays, where, strict=True)]


class Gradient(NamedTuple):
    """A gradient and the scalars that multiply it, in a small dtype until it is used."""

    array: jax.Array
    factors: tuple[jax.Array, ...] = ()

    def value(self) -> jax.Array:
        """The product, in float32 or wider."""
        value = self.array
        if not jnp.iscomplexobj(value):
            value = value.astype(float32_or_wider(value.dtype))
        # XLA recomputes a product in every kernel that uses it, but would store a quotient.
        for factor in self.factors:
            value = value * factor.astype(value.dtype)
        return value

    def on(self, sharding: Sharding | None) -> "Gradient":
        """The gradient with this sharding, if it is one on a mesh."""
        return self._replace(array=placed(self.array, sharding))

    def times(self, *factors: jax.Array) -> "Gradient":
        """The gradient times more scalars."""
        return Gradient(self.array, (*self.factors, *factors))


Gradients = list[Gradient | None]


def unscale(grads: PyTree, scale: jax.Array | None) -> PyTree:
    """Returns the true gradients of a loss that was multiplied by `scale`, or by nothing if that is
    None, in float32 or wider.

    Gradients of integers, which are float0, and integers that a trainer made stay as they are.
    """
    inverse = functools.cache(lambda dtype: None if scale is None else 1 / scale.astype(dtype))

    def one(leaf: Any) -> Any:
        value: Any = jnp.asarray(leaf)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return leaf
        dtype = float32_or_wider(value.dtype)
        value = value if jnp.iscomplexobj(value) else value.astype(dtype)
        by = inverse(dtype)
        return value if by is None else value * by.astype(value.dtype)

    return jax.tree.map(one, grads)


def as_gradients(grads: Sequence[Any], scale: jax.Array | None = None) -> Gradients:
    """Wraps arrays, or None, as gradients of a loss that was multiplied by `scale`."""
    inverse = functools.cache(lambda dtype: () if scale is None else (1 / scale.astype(dtype),))
    return [None if g is None else Gradient(g, inverse(float32_or_wider(g.dtype))) for g in grads]


class Clip(NamedTuple):
    """A clip option and its limit."""

    option: str  # `clipnorm` for the norm of each gradient, `global_clipnorm`, or `clipvalue`
    limit: float

    @property
    def by_norm(self) -> bool:
        """Whether it needs norms."""
        return self.option != "clipvalue"

    @property
    def each(self) -> bool:
        """Whether it needs the norm of each gradient, not that of all together."""
        return self.option == "clipnorm"


def clipped(grads: Gradients, clip: Clip | None, norms: Sequence[jax.Array]) -> Gradients:
    """Clips gradients.

    Args:
        grads: a gradient, or None, per variable.
        clip: how; None for not at all.
        norms: what the clip needs: the norm of each gradient, that of all, or nothing. A non-finite
            norm makes its gradients NaN; times 1 / inf they would become 0.
    """
    if clip is None:
        return grads
    if not clip.by_norm:
        return [g and Gradient(jnp.clip(g.value(), -clip.limit, clip.limit)) for g in grads]
    factors = [_clip_factors(norm, clip.limit) for norm in norms]
    if not factors:
        return grads
    own = iter(factors if clip.each else itertools.repeat(factors[0]))
    return [g and g.times(*next(own)) for g in grads]


def _clip_factors(norm: jax.Array, limit: float) -> tuple[jax.Array, jax.Array]:
    """Two factors that together clip a norm; in float32 their product may be 0."""
    first = jnp.where(norm * 2.0**-100 > limit, 2.0**-100, 1.0)
    second = limit / jnp.maximum(norm * first, limit)
    return first, jnp.where(jnp.isfinite(norm), second, jnp.nan)

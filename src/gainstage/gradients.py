"""What is done to gradients between the backward pass and the update: pure functions of pytrees."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def wide(dtype: Any) -> np.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return np.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def widen(tree: Any) -> Any:
    """The floating leaves of a pytree in float32 or wider; the others as they are."""

    def one(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def unscale(grads: Any, scale: jax.Array) -> Any:
    """The true gradients of a loss that was multiplied by `scale`, never in half precision."""
    return jax.tree.map(lambda g: g / scale.astype(g.dtype), widen(grads))


def all_finite(grads: Any) -> jax.Array:
    """Whether every element is finite: a bool scalar, true of an empty tree.

    `max` would be no test of it: XLA drops NaN from a float32 `max` on CPU.
    """
    return jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)], bool).all()


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


def global_norm(grads: Any) -> jax.Array:
    """The Euclidean norm of all gradients together."""
    return jnp.asarray(optax.tree.norm(grads))


def clip(grads: list[Any], limits: Mapping[str, float]) -> list[Any]:
    """The gradients, clipped.

    Args:
        grads: one array, or None, per variable.
        limits: by name, at most one of `clipnorm` (the norm of each), `global_clipnorm` (the norm
            of all together) and `clipvalue` (the absolute value of each element).
    """
    if "clipvalue" in limits:
        limit = limits["clipvalue"]
        return jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)
    if "clipnorm" in limits:
        return [clip_by_norm(g, limits["clipnorm"]) for g in grads]
    return clip_by_norm(grads, limits["global_clipnorm"]) if limits else grads


def clipped_norms(grads: list[Any], limits: Mapping[str, float]) -> list[jax.Array]:
    """The norms that `clip` divides by: those of large finite gradients may be infinite."""
    if "clipnorm" in limits:
        return [global_norm(g) for g in grads if g is not None]
    return [global_norm(grads)] if "global_clipnorm" in limits else []


def clip_by_norm(grads: Any, limit: float) -> Any:
    """A pytree scaled down to a norm of at most `limit`; nan if its norm is not finite.

    Times 1 / inf a gradient would silently vanish.
    """
    norm = global_norm(grads)
    factor = jnp.where(jnp.isfinite(norm), limit / jnp.maximum(norm, limit), jnp.nan)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)

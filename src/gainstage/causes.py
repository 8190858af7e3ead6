"""Which tensor it was: what of the gradients was not finite, counted on the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gainstage.sharding import varying


class Causes(NamedTuple):
    """The steps that were skipped, by the gradients that made them be."""

    steps: jax.Array  # int32: steps so far, the skipped ones too
    counts: jax.Array  # int32, one row a gradient: steps with an inf, with a NaN, first and last


def none_yet(count: int) -> Causes:
    """Before the first step, of so many gradients."""
    never = jnp.array([0, 0, -1, -1], jnp.int32)
    return Causes(jnp.int32(0), jnp.tile(never, (count, 1)))


def leaves_and_none(tree: Any) -> list[Any]:
    """The leaves of a tree, None being one."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def counted(causes: Causes, grads: Sequence[Any], finite: jax.Array) -> Causes:
    """After one more step on these gradients, arrays or None.

    They are read once more only where the step is not finite."""

    def kinds(gradient: Any) -> list[jax.Array]:
        if gradient is None:
            return [jnp.array(False), jnp.array(False)]
        return [jnp.isinf(gradient).any(), jnp.isnan(gradient).any()]

    def more() -> jax.Array:
        found = jnp.array([kinds(gradient) for gradient in grads], bool).reshape(-1, 2)
        axes = jax.sharding.get_abstract_mesh().manual_axes
        if axes:  # inside of `jax.shard_map` each device has seen its own part
            found = lax.psum(varying(found.astype(jnp.int32), axes), tuple(axes)) > 0
        hit, step = found.any(axis=1), causes.steps
        inf, nan, first, last = causes.counts.T
        first = jnp.where(hit & (first < 0), step, first)
        last = jnp.where(hit, step, last)
        return jnp.stack([inf + found[:, 0], nan + found[:, 1], first, last], axis=1)

    return Causes(causes.steps + 1, lax.cond(finite, lambda: causes.counts, more))

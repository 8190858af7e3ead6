"""What a step tells of itself, as scalars that stay on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class StepInfo(NamedTuple):
    """What the last step was like: four device scalars, to be returned from a compiled step."""

    finite: jax.Array  # bool: whether it was applied, and not skipped; True before the first
    loss_scale: jax.Array  # float32: the scale of its loss; the next step's may be another
    skipped_steps: jax.Array  # int32: how many steps have been skipped so far
    grad_norm: jax.Array  # float32: of all true gradients together, before clipping; 0 at first


def at_first(scale: jax.Array) -> StepInfo:
    """Before the first step."""
    return StepInfo(jnp.array(True), jnp.float32(scale), jnp.int32(0), jnp.float32(0))


def following(before: StepInfo, finite: jax.Array, scale: jax.Array, norm: jax.Array) -> StepInfo:
    """After one more step."""
    skipped = before.skipped_steps + jnp.where(finite, 0, 1).astype(jnp.int32)
    return StepInfo(finite, jnp.float32(scale), skipped, norm.astype(jnp.float32))

"""ZeRO: the state of an optimizer, divided over the devices that hold the same weights."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding

from gainstage._variables.sharding import UNDIVIDED, axes_in, axes_of
from gainstage._variables.variable import Variable


def sharding_of_state(variable: Variable, over: tuple[str, ...]) -> Sharding | None:
    """The sharding of a variable's state: that of the variable, or over more axes of its mesh; None
    off a mesh."""
    sharding = variable._sharding
    if not over or not isinstance(sharding, NamedSharding):
        return sharding
    return divided_over(sharding, variable.shape, over)


def divided_over(
    sharding: NamedSharding, shape: Sequence[int], over: tuple[str, ...]
) -> NamedSharding:
    """The sharding of the state of a variable with this sharding, over more axes of the mesh.

    It shards the dimension with the most elements per device among those that can be divided; the
    first of several. State is unchanged if it is small, cannot be divided evenly, or is sharded
    over these axes already.

    Source: Rajbhandari et al., 2020, arXiv:1910.02054 (ZeRO, stage 1).
    """
    sizes = dict(sharding.mesh.shape)
    parts, used = math.prod(sizes[axis] for axis in over), axes_of(sharding.spec)
    if math.prod(shape) < UNDIVIDED or used & set(over):
        return sharding
    entries = [axes_in(entry) for entry in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    shards = [math.prod(sizes[axis] for axis in entry) for entry in entries]
    fit = [i for i, n in enumerate(shape) if n % (shards[i] * parts) == 0]
    if not fit:
        return sharding
    chosen = max(fit, key=lambda i: shape[i] // shards[i])
    entries[chosen] = (*entries[chosen], *over)
    return NamedSharding(sharding.mesh, PartitionSpec(*(entry or None for entry in entries)))


def axis_names(over: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes of `shard_state_over`."""
    return (over,) if isinstance(over, str) else tuple(over or ())


def check_axes(axes: Sequence[str], shardings: Sequence[Any]) -> None:
    """Raises a ValueError that names the first axis of `shard_state_over` that no mesh has."""
    # A mesh may have one device, and then nothing to shard.
    meshes = [getattr(sharding, "mesh", None) for sharding in shardings]
    known = next((mesh.axis_names for mesh in meshes if mesh is not None), ())
    for axis in axes:
        if not known:
            raise ValueError(
                f"shard_state_over={axis!r} needs a mesh. Put the variables on a mesh first, or "
                f"the parameters: jax.device_put(value, NamedSharding(mesh, spec))."
            )
        if axis not in known:
            raise ValueError(
                f"Expected axes of the mesh, {known}, for shard_state_over; got {axis!r}."
            )

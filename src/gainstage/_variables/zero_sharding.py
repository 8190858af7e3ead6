"""ZeRO: the state of an optimizer, divided over the devices that hold the same weights."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from gainstage._base._jax import Tracer
from gainstage._variables.sharding import (
    UNDIVIDED,
    axes_in,
    axes_of,
    on_mesh,
    replicated_like,
    typed_sharding,
)
from gainstage._variables.types import OptState, PyTree
from gainstage._variables.variable import Variable, placed


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
    axes_of_mesh = next((mesh.axis_names for mesh in meshes if mesh is not None), ())
    for axis in axes:
        if not axes_of_mesh:
            raise ValueError(
                f"shard_state_over={axis!r} needs a mesh. Put the variables on a mesh first, or "
                f"the parameters: jax.device_put(value, NamedSharding(mesh, spec))."
            )
        if axis not in axes_of_mesh:
            raise ValueError(
                f"Expected axes of the mesh, {axes_of_mesh}, for shard_state_over; got {axis!r}."
            )


# ── the state of an optax transformation ─────────────────────────────────────────────────────


def created_over(
    create: Callable[[PyTree], OptState], params: PyTree, over: tuple[str, ...]
) -> OptState:
    """What `create` makes for `params`, with what has a parameter's shape sharded over more axes.

    Each device creates its own shards: the whole may not fit on one.
    """
    leaves = jax.tree.leaves(params)
    if any(isinstance(x, Tracer) for x in leaves):
        return create(params)
    check_axes(over, list(map(on_mesh, leaves)))
    state = jax.eval_shape(create, params)
    places = places_of_state(state, params, over, replicated_like(params))
    return jax.jit(create, out_shardings=places)(params)


def places_of_state(
    state: OptState,
    params: PyTree,
    over: tuple[str, ...],
    everywhere: NamedSharding | None,
    otherwise: NamedSharding | None = None,
) -> PyTree:
    """The sharding of each array of a state: that of the parameter with its path and shape, over
    more axes; else `everywhere`. A parameter on no mesh counts as on `otherwise`."""
    known = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding | None:
        for i in range(len(path) + 1):  # `path` ends with the path of its parameter
            sharding = on_mesh(known.get(path[i:])) or otherwise
            if sharding is not None and jnp.shape(leaf) == getattr(known.get(path[i:]), "shape", 0):
                return divided_over(sharding, jnp.shape(leaf), over)
        return everywhere

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def divided_state(
    state: OptState, params: PyTree, over: tuple[str, ...], everywhere: NamedSharding
) -> OptState:
    """A state, divided as by `created_over` where its arrays are whole, such as those that were
    loaded from a file. What is on no mesh counts as on `everywhere`."""
    places = places_of_state(state, params, over, everywhere, everywhere)

    def divided(x: Any, place: NamedSharding) -> Any:
        is_whole = (on_mesh(x) or everywhere).is_fully_replicated
        return jax.device_put(x, place) if is_whole and not place.is_fully_replicated else x

    return jax.tree.map(divided, state, places)


def divided_gradients(
    grads: PyTree, shardings: Sequence[Sharding | None], over: tuple[str, ...]
) -> tuple[PyTree, Sequence[Sharding | None]]:
    """The gradients with the shardings of their slots, where those of the parameters are known."""
    leaves, structure = jax.tree.flatten(grads, is_leaf=lambda x: x is None)
    shardings = [
        divided_over(sharding, g.shape, over) if isinstance(sharding, NamedSharding) else sharding
        for g, sharding in zip(leaves, shardings or map(typed_sharding, leaves), strict=True)
    ]
    pairs = zip(leaves, shardings, strict=True)
    placed_leaves = [g if g is None else placed(g, sharding) for g, sharding in pairs]
    return jax.tree.unflatten(structure, placed_leaves), shardings

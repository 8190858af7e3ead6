"""Where the state of an optimizer lies on a mesh: with its variable, or divided more (ZeRO-1)."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

UNDIVIDED = 1024  # elements: what has fewer stays as it is


def mesh_of(variables: Sequence[Any]) -> Mesh | None:
    """The mesh that variables lie on, None if all are on one device.

    Raises:
        ValueError: two meshes, a variable that is on one device while others are not, two devices,
            a layout over several devices that names no mesh, or one that does not divide its
            variable.
    """
    spread = [v for v in variables if v._sharding is not None]
    for variable in variables if spread else ():
        if variable._sharding is None:
            raise ValueError(
                f"Expected {variable.name!r} on the mesh of {spread[0].name!r}; got it on one "
                f"device. Make it of jax.device_put(value, NamedSharding(mesh, PartitionSpec()))."
            )
        if not isinstance(variable._sharding, NamedSharding):
            raise ValueError(
                f"Expected a jax.sharding.NamedSharding for {variable.name!r}; "
                f"got {variable._sharding}."
            )
        if variable._sharding.mesh != spread[0]._sharding.mesh:
            raise ValueError(
                f"Expected all variables on one mesh; got {spread[0].name!r} on "
                f"{spread[0]._sharding.mesh} and {variable.name!r} on {variable._sharding.mesh}."
            )
        _check_divides(variable)
    if not spread:
        _check_one_device(variables)
    return spread[0]._sharding.mesh if spread else None


def _check_one_device(variables: Sequence[Any]) -> None:
    """What the user has put on a device stays there; a step takes place on one."""
    chosen = [v for v in variables if getattr(v._value, "committed", False)]
    for variable in chosen[1:]:
        (first,), (device,) = chosen[0]._value.devices(), variable._value.devices()
        if device != first:
            raise ValueError(
                f"Expected all variables on one device, or on one mesh; got {chosen[0].name!r} on "
                f"{first} and {variable.name!r} on {device}."
            )


def _check_divides(variable: Any) -> None:
    """JAX checks arrays, but not the layouts of those that are only planned."""
    sizes = dict(variable._sharding.mesh.shape)
    for i, (size, entry) in enumerate(zip(variable.shape, variable._sharding.spec, strict=False)):
        parts = {axis: sizes[axis] for axis in _axes(entry)}
        if size % math.prod(parts.values()):
            raise ValueError(
                f"Expected dimension {i} of {variable.name!r}, of size {size}, to be a multiple of "
                f"{math.prod(parts.values())}, over mesh axes {parts}."
            )


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """The axes of the mesh over which a sharding divides an array."""
    return frozenset(axis for entry in spec for axis in _axes(entry))


def is_first(axes: Iterable[str]) -> jax.Array:
    """Inside of `jax.shard_map`: whether this device is the first along all of these axes, and so
    the one that speaks for those that hold the same."""
    firsts = [lax.axis_index(axis) == 0 for axis in axes]
    return functools.reduce(jnp.logical_and, firsts, jnp.array(True))


def varying_axes(x: Any) -> frozenset[str]:
    """The axes of the mesh along which an array differs, inside of `jax.shard_map`; none with
    `check_vma=False`, where JAX does not know."""
    kind = jax.typeof(x)
    axes = getattr(getattr(kind, "manual_axis_type", None), "varying", getattr(kind, "vma", ()))
    return frozenset(axes)


def knows_what_varies(mesh: Any) -> bool:
    """Whether `varying_axes` is right inside of `jax.shard_map`: it is not with `check_vma=False`,
    unless there is one device alone."""
    axes = [axis for axis in mesh.manual_axes if lax.axis_size(axis) > 1]
    return all(varying_axes(lax.axis_index(axis)) for axis in axes)


def varying_like(tree: Any, arrays: Iterable[Any]) -> Any:
    """A pytree of arrays as of a type that differs wherever one of `arrays` does: such are what a
    loop or a branch that reads them starts from."""
    axes = frozenset().union(*map(varying_axes, arrays))

    def one(x: Any) -> Any:
        alike = tuple(axes - varying_axes(x))
        return lax.pcast(x, alike, to="varying") if alike else x

    return jax.tree.map(one, tree)


def varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Inside of `jax.shard_map`: an array as a collective over these axes takes it, that is, not
    of a type that differs along some of them and is known to be alike along others."""
    alike = tuple(set(axes) - varying_axes(x))
    return lax.pcast(x, alike, to="varying") if varying_axes(x) and alike else x


def typed_sharding(x: Any) -> NamedSharding | None:
    """The layout that is part of an array's type: on a mesh of Explicit axes."""
    sharding = None if x is None else jax.typeof(x).sharding
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return sharding if kinds and set(kinds) == {AxisType.Explicit} else None


def on_one_device(known: bool, arrays: Iterable[Any] = ()) -> bool:
    """Whether the elements of arrays have an order: if they are known to be on one device, or there
    is no other; and not inside of `jax.shard_map`. The devices that a program is compiled for may
    not be those of this process: a mesh in force, or in the type of an array, says so."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = jax.device_count() == 1 and mesh.size <= 1 and not any(map(typed_sharding, arrays))
    return (known or alone) and not mesh.manual_axes


def replicate(
    owner: str, mesh: Mesh | None, scalars: Iterable[Any], variables: Sequence[Any]
) -> None:
    """Puts an optimizer's scalars on its mesh, or else on that of its variables."""
    theirs = mesh_of(variables)
    if theirs is not None and mesh not in (None, theirs):
        raise ValueError(
            f"Expected variables on the mesh of {owner!r}, {mesh}; got {variables[0].name!r} on "
            f"{theirs}."
        )
    mesh = mesh or theirs
    for scalar in scalars:
        if mesh is not None:
            scalar._place(NamedSharding(mesh, PartitionSpec()))
        else:
            scalar._move_to(variables[0])


def sharding_of_state(variable: Any, over: tuple[str, ...]) -> Any:
    """Where the state for a variable lies: with it, or divided over more axes of its mesh; None off
    a mesh."""
    sharding = variable._sharding
    if not over or not isinstance(sharding, NamedSharding):
        return sharding
    return divided_over(sharding, variable.shape, over)


def divided_over(
    sharding: NamedSharding, shape: Sequence[int], over: tuple[str, ...]
) -> NamedSharding:
    """The layout of the state for a variable of that layout, divided over more axes of the mesh.

    Among the dimensions that can be divided the one with the most elements on a device is, the
    first of several. What is small, cannot be divided evenly, or is divided over these axes
    already stays as it is.

    Source: Rajbhandari et al., 2020, arXiv:1910.02054 (ZeRO, stage 1).
    """
    sizes = dict(sharding.mesh.shape)
    parts, used = math.prod(sizes[axis] for axis in over), axes_of(sharding.spec)
    if math.prod(shape) < UNDIVIDED or used & set(over):
        return sharding
    entries = [_axes(entry) for entry in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    shards = [math.prod(sizes[axis] for axis in entry) for entry in entries]
    fit = [i for i, n in enumerate(shape) if n % (shards[i] * parts) == 0]
    if not fit:
        return sharding
    chosen = max(fit, key=lambda i: shape[i] // shards[i])
    entries[chosen] = (*entries[chosen], *over)
    return NamedSharding(sharding.mesh, PartitionSpec(*(entry or None for entry in entries)))


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def check_axes(axes: Sequence[str], shardings: Sequence[Any]) -> None:
    """A ValueError that names the first of `axes`, for `shard_state_over`, that no mesh has."""
    # A mesh may be of one device, where there is nothing to divide.
    meshes = [getattr(sharding, "mesh", None) for sharding in shardings]
    known = next((mesh.axis_names for mesh in meshes if mesh is not None), ())
    for axis in axes:
        if axis not in known:
            raise ValueError(
                f"Expected axes of the variables' mesh, {known}, for shard_state_over; "
                f"got {axis!r}. Put the variables on a mesh first: "
                f"Variable(jax.device_put(value, NamedSharding(mesh, spec)))."
            )

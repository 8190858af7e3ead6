"""Meshes and shardings of arrays: what lies where, what varies over devices, what is a sum.

Where the state of an optimizer lies is in `zero_sharding.py`.
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn, Tracer
from gainstage._base.arrays import ARRAYS
from gainstage._base.warn import warn
from gainstage._programs.jaxprs import AnyJaxpr, equations
from gainstage._variables.types import PyTree, Tree
from gainstage._variables.variable import Variable, is_inside

_sharding_of = operator.attrgetter("sharding")
UNDIVIDED = 1024  # elements: smaller state is not sharded further


def mesh_of(variables: Sequence[Variable]) -> Mesh | None:
    """The mesh of the variables, None if all are on one device.

    Raises:
        ValueError: variables are on two meshes, on two devices, or only some on a mesh; a sharding
            over several devices names no mesh, or does not divide its variable.
    """
    first = next((v for v in variables if v._sharding is not None), None)
    if first is None:
        _check_one_device(variables)
        return None
    mesh = getattr(first._sharding, "mesh", None)
    for variable in variables:
        sharding = variable._sharding
        if sharding is None:
            raise ValueError(
                f"Expected {variable.name!r} on the mesh of {first.name!r}; got it on one device. "
                f"Make it from jax.device_put(value, NamedSharding(mesh, PartitionSpec()))."
            )
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"Expected a jax.sharding.NamedSharding for {variable.name!r}; got {sharding}."
            )
        if sharding.mesh != mesh:
            raise ValueError(
                f"Expected all variables on one mesh; got {first.name!r} on {mesh} and "
                f"{variable.name!r} on {sharding.mesh}."
            )
        _check_divides(variable, sharding)
    return mesh


def _check_one_device(variables: Sequence[Variable]) -> None:
    """Raises if the user has put variables on several devices; a step runs on one."""
    chosen = [v for v in variables if getattr(v._value, "committed", False)]
    for variable in chosen[1:]:
        (first,), (device,) = chosen[0]._value.devices(), variable._value.devices()
        if device != first:
            raise ValueError(
                f"Expected all variables on one device, or on one mesh; got {chosen[0].name!r} on "
                f"{first} and {variable.name!r} on {device}."
            )


def _check_divides(variable: Variable, sharding: NamedSharding) -> None:
    """Checks a sharding as JAX does for arrays, but not for planned ones."""
    sizes = dict(sharding.mesh.shape)
    for i, (size, entry) in enumerate(zip(variable.shape, sharding.spec, strict=False)):
        parts = {axis: sizes[axis] for axis in axes_in(entry)}
        if size % math.prod(parts.values()):
            raise ValueError(
                f"Expected dimension {i} of {variable.name!r}, of size {size}, to be a multiple of "
                f"{math.prod(parts.values())}, over mesh axes {parts}."
            )


def on_mesh(x: object) -> NamedSharding | None:
    """The sharding of an array, or of its description, if it is on a mesh. That of a traced array
    is not known."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def replicated_like(tree: PyTree) -> NamedSharding | None:
    """The sharding of an array that is replicated over the mesh of a pytree; None off a mesh."""
    leaves = jax.tree.leaves(tree)
    # Each kind of leaf and of sharding is looked at once: this is called at each step.
    kinds = set(map(type, leaves))
    placed = {k for k in kinds if hasattr(k, "sharding") and not issubclass(k, Tracer)}
    if placed != kinds:
        leaves = [x for x in leaves if type(x) in placed]
    shardings = list(map(_sharding_of, leaves))
    if NamedSharding not in set(map(type, shardings)):
        return None
    found = next(sharding for sharding in shardings if isinstance(sharding, NamedSharding))
    return NamedSharding(found.mesh, PartitionSpec())


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes over which a spec shards an array."""
    return frozenset(axis for entry in spec for axis in axes_in(entry))


def is_first(axes: Iterable[str]) -> jax.Array:
    """Inside `jax.shard_map`: whether this device is the first along all of these axes, which
    represents the replicas."""
    firsts = [lax.axis_index(axis) == 0 for axis in axes]
    return functools.reduce(jnp.logical_and, firsts, jnp.array(True))


def varying_axes(x: Any) -> frozenset[str]:
    """Inside `jax.shard_map`: the mesh axes along which an array, or a `jax.ShapeDtypeStruct`,
    varies; none with `check_vma=False`, where JAX does not know."""
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    axes = getattr(getattr(kind, "manual_axis_type", None), "varying", getattr(kind, "vma", ()))
    return frozenset(axes)


def knows_what_varies(mesh: AbstractMesh) -> bool:
    """Whether `varying_axes` is right inside `jax.shard_map`: it is not with `check_vma=False`,
    unless there is only one device."""
    axes = [axis for axis in mesh.manual_axes if lax.axis_size(axis) > 1]
    return all(varying_axes(lax.axis_index(axis)) for axis in axes)


# What is said of a loss whose gradients JAX sums over devices: {at} says which, {over} the axes.
SUMMED = (
    "The loss {at} varies over {over} inside of jax.shard_map, so JAX sums the gradients over "
    "these devices. If it is a mean over a device's part of the batch, they are too large: return "
    "jax.lax.pmean(loss, {over}) from loss_fn. If it is a part of a sum, return "
    "jax.lax.psum(loss, {over}), with the same gradients as now."
)


def summed_over(loss: ArrayLike, params: PyTree) -> str:
    """Inside `jax.shard_map`: the axes along which a loss varies, and not all parameters do, as JAX
    sums their gradients over these: as they are written in code, or "" if there are none."""
    axes = varying_axes(loss)
    shared = [axes - varying_axes(x) for x in jax.tree.leaves(params)] if axes else []
    found = sorted(axis for axis in frozenset().union(*shared) if lax.axis_size(axis) > 1)
    return repr(found[0] if len(found) == 1 else tuple(found)) if found else ""


def varying_like(tree: Tree, arrays: Iterable[Any]) -> Tree:
    """A pytree of arrays, cast to a type that varies wherever one of `arrays` does. Initial values
    of loops and branches that read `arrays` need it."""
    axes = frozenset().union(*map(varying_axes, arrays))

    def one(x: ArrayLike) -> ArrayLike:
        alike = tuple(axes - varying_axes(x))
        return lax.pcast(x, alike, to="varying") if alike else x

    return jax.tree.map(one, tree)


def varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Inside `jax.shard_map`: an array that varies along some of these axes is made to vary along
    all of them, as a collective over them asks for."""
    alike = tuple(set(axes) - varying_axes(x))
    return lax.pcast(x, alike, to="varying") if varying_axes(x) and alike else x


def on_all_devices(flag: jax.Array) -> jax.Array:
    """Whether a flag is True on all devices of the `jax.shard_map` around the caller."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return lax.pmin(varying(flag.astype(jnp.int32), axes), axes) > 0 if axes else flag


def typed_sharding(x: ArrayLike | None) -> NamedSharding | None:
    """The sharding in an array's type, on a mesh of Explicit axes."""
    sharding = None if x is None else jax.typeof(x).sharding
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return sharding if kinds and set(kinds) == {AxisType.Explicit} else None


def typed_like(new: jax.Array, old: ArrayLike) -> jax.Array:
    """`new`, on a mesh of Explicit axes with the sharding of `old`, so that a select takes both."""
    sharding = typed_sharding(old)
    if sharding is None or sharding == typed_sharding(new):
        return new
    return jax.sharding.reshard(new, sharding)


def on_one_device(is_known: bool, arrays: Iterable[Any] = ()) -> bool:
    """Whether the elements of arrays are on one device: if that is known, or if there is only one
    device; never inside `jax.shard_map`. A program may be compiled for other devices than those of
    this process; the current mesh, or the mesh in an array's type, shows that."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = jax.device_count() == 1 and mesh.size <= 1 and not any(map(typed_sharding, arrays))
    return (is_known or alone) and not mesh.manual_axes


def replicate(
    owner: str, mesh: Mesh | None, scalars: Iterable[Variable], variables: Sequence[Variable]
) -> None:
    """Replicates an optimizer's scalars on its mesh, or else on the mesh of its variables."""
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


def axes_in(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def tell_if_whole(arrays: PyTree, batch: PyTree, program: AnyJaxpr) -> None:
    """Warns if each device of a mesh would compute a whole batch of the host or of one device. One
    that is replicated over the mesh is meant so.

    Args:
        arrays, batch: the parameters, and what the step is given beside them.
        program: the step's program, which may itself divide the work.
    """
    mesh = getattr(replicated_like((arrays, batch)), "mesh", None)
    if mesh is None or mesh.size == 1:
        return
    leaves = jax.tree.leaves((arrays, batch))
    if any(sharding and not sharding.is_fully_replicated for sharding in map(on_mesh, leaves)):
        return
    of_host = [x for x in jax.tree.leaves(batch) if isinstance(x, ARRAYS) and not on_mesh(x)]
    large = any(x.size >= UNDIVIDED and jnp.shape(x)[0] % mesh.size == 0 for x in of_host)
    if large and not any(map(_divides, equations(program))):
        axes = ", ".join(f'"{axis}"' for axis in mesh.axis_names)
        spec = f"PartitionSpec(({axes}))" if len(mesh.axis_names) > 1 else f"PartitionSpec({axes})"
        warn(
            f"Each of the {mesh.size} devices computes the whole batch, because nothing is sharded "
            f"over the mesh. Write batch = jax.device_put(batch, NamedSharding(mesh, {spec})). If "
            f"each device needs all of it, say so: NamedSharding(mesh, PartitionSpec())."
        )


def _divides(eqn: JaxprEqn) -> bool:
    """Whether an operation divides an array over a mesh."""
    found = [getattr(v.aval, "sharding", None) for v in eqn.outvars]
    found += [eqn.params.get("sharding"), *eqn.params.get("in_shardings", ())]
    named = [sharding for sharding in found if isinstance(sharding, NamedSharding)]
    specs = eqn.params.get("in_specs", ()) if eqn.primitive.name == "shard_map" else ()
    return any(map(axes_of, specs)) or not all(s.is_fully_replicated for s in named)


def on_one_mesh(arrays: list[Any], batch: PyTree) -> tuple[list[Any], tuple[Any, ...] | None]:
    """The arrays of a state on the mesh of any argument, with their shardings.

    An array on no chosen device is replicated. JAX would do so too, but compile the next step
    again, which gets it back from the mesh.
    """
    everywhere = None if is_inside() else replicated_like((arrays, batch))
    if everywhere is None:
        return arrays, None
    shardings = [
        x.sharding if on_mesh(x) or getattr(x, "committed", False) else everywhere for x in arrays
    ]
    arrays = [
        jax.device_put(x, everywhere) if sharding is everywhere and isinstance(x, ARRAYS) else x
        for x, sharding in zip(arrays, shardings, strict=True)
    ]
    return arrays, tuple(shardings)

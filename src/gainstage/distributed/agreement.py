"""Checks that all processes agree; JAX matches collectives by their order only, unchecked."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gainstage import __version__
from gainstage._base._jax import multihost_utils
from gainstage._base.arrays import is_key
from gainstage._base.configurable import readable
from gainstage._variables.bridge import read
from gainstage._variables.sharding import axes_of, is_first, on_mesh
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.saving import unique_names
from gainstage.optimizers.optimizer import Optimizer


def assert_consistent(optimizer: Optimizer) -> None:
    """Raises an error on every process unless all have the same optimizer, built alike.

    If one process has another learning rate or option, weights are wrong without an error. Call
    this once before the first step. It compares the class, the configuration, and the variables'
    order, names, shapes, dtypes and shardings. It also compares all scalars of the state, such as
    learning rate and scale, and the versions of gainstage and JAX. Callables are compared by name.

    Args:
        optimizer: an optimizer, built on every process or on none.

    Raises:
        ValueError: the processes differ; the first difference and its processes are named.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage import distributed
        >>> opt = gs.optimizers.SGD(0.1)
        >>> opt.build([gs.optimizers.Variable(1.0)])
        >>> distributed.assert_consistent(opt)
    """
    facts = [json.loads(report) for report in _gather(json.dumps(facts_of(optimizer)))]
    for key in dict.fromkeys(key for fact in facts for key in fact):
        values = [fact.get(key) for fact in facts]
        for process, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"Expected the same {key} on every process; got {values[0]!r} on process 0 "
                    f"and {value!r} on process {process}."
                )


def facts_of(optimizer: Optimizer) -> dict[str, Any]:
    """What of an optimizer has to be the same in every process, as JSON data."""
    trainable, state = optimizer.trainable_variables, optimizer.variables
    facts: dict[str, Any] = {
        "class": type(optimizer).__name__,
        "version of gainstage": __version__,
        "version of JAX": jax.__version__,
        **_with_dotted_names(readable(optimizer.get_config())),
        "jit_compile": optimizer.jit_compile,
        "names of the variables": unique_names(trainable),
        "names of the state": unique_names(state),
    }
    for variables in (trainable, state):
        for name, variable in zip(unique_names(variables), variables, strict=True):
            about = [list(variable.shape), str(variable.dtype), str(on_mesh(variable))]
            facts[f"shape, dtype and sharding of {name!r}"] = about
            if not variable.shape and not variable._is_planned:
                facts[f"value of {name!r}"] = repr(variable.numpy().item())
    return facts


def _with_dotted_names(config: object, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested configuration to dotted names."""
    if not isinstance(config, dict):
        return {prefix.removesuffix("."): config}
    parts = [_with_dotted_names(value, f"{prefix}{key}.") for key, value in config.items()]
    return {name: value for part in parts for name, value in part.items()}


def _gather(text: str) -> list[str]:
    """Gathers the texts of all processes."""
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.int32(mine.size)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: mine.size] = mine
    texts = np.reshape(multihost_utils.process_allgather(padded), (len(lengths), -1))
    return [row[:n].tobytes().decode() for row, n in zip(texts, lengths, strict=True)]


def check_replicas(tree: PyTree) -> jax.Array:
    """Returns whether all replicas have the same bits: a bool scalar, replicated.

    JAX assumes that replicas are equal, and reads one of them. They drift apart if a process
    computes something else, a device is broken, or a collective is not deterministic. A difference
    in one element is always found, even in its last bit; any other is missed once in billions. The
    check is one all-reduce of 8 bytes between steps, and does not synchronise.

    Args:
        tree: a pytree of arrays or variables on one mesh. Arrays on one device are ignored.

    Raises:
        ValueError: the arrays are on several meshes.

    Examples:
        >>> import jax, gainstage as gs
        >>> from gainstage import distributed
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        >>> bool(distributed.check_replicas({"w": jax.device_put(1.0, everywhere)}))
        True
    """
    leaves = [read(x) if isinstance(x, Variable) else x for x in jax.tree.leaves(tree)]
    arrays = [x for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)]
    shardings = [array.sharding for array in arrays]
    meshes = {sharding.mesh for sharding in shardings}
    if len(meshes) > 1:
        raise ValueError(f"Expected all arrays on one mesh; got {len(meshes)} meshes.")
    if not meshes:
        return jnp.array(True)
    return all_same(tuple(shardings))(arrays)


@functools.cache
def all_same(shardings: tuple[NamedSharding, ...]) -> Callable[..., jax.Array]:
    """The compiled check of arrays with these shardings: whether all replicas of each are equal."""
    mesh, specs = shardings[0].mesh, [sharding.spec for sharding in shardings]

    def part(arrays: list[jax.Array]) -> jax.Array:
        # Of n replicas the first has weight n - 1, the others -1: equal ones add up to 0.
        total = jnp.zeros(2, jnp.uint32)
        for i, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
            over = [axis for axis in mesh.axis_names if axis not in axes_of(spec)]
            replicas = math.prod(mesh.shape[axis] for axis in over)
            times = jnp.where(is_first(over), replicas, 0).astype(jnp.uint32) - jnp.uint32(1)
            total += hashes(array, i) * (times if replicas > 1 else jnp.uint32(0))
        return lax.psum(total, mesh.axis_names)

    sums: Callable[[list[jax.Array]], jax.Array] = jax.shard_map(
        part, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(lambda arrays: (sums(arrays) == 0).all())


def hashes(array: jax.Array, number: int = 0) -> jax.Array:
    """Two sums over the elements, of the lower and the upper halves of their 32-bit words.

    Each element of each array has its own factor. The halves are below `2**16` and the factors are
    odd. So a difference in one element, times the number of replicas, is never a multiple of
    `2**32`.
    """
    if is_key(array):
        array = jax.random.key_data(array)
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    words = lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    places = jnp.uint32(number * 2654435761 % 2**32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        places += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    odd = _mixed(places) | jnp.uint32(1)
    return jnp.stack([jnp.sum(half * odd) for half in (words & 0xFFFF, words >> 16)])


def _mixed(x: jax.Array) -> jax.Array:
    """Hashes consecutive numbers to unrelated ones (MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)

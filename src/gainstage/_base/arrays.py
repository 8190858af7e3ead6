"""Arrays: which values are arrays, conversions to them, their names and memory, and pytrees."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

# What JAX raises if Python asks for the value of an array that is traced.
NOT_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
ARRAYS = (jax.Array, np.ndarray, np.generic)  # the classes of arrays
LARGEST_COUNT = 2**31 - 1  # the largest int32
_ARRAY = object()  # marks the place of an array


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh or sharding in the state of an object, for a copy of that object. It cannot be
    pickled: its devices may not exist in the process that reads the file."""

    value: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Never:
        raise TypeError(
            "An optimizer or variable on a mesh cannot be pickled, because devices cannot. Save "
            "`optimizer.state()`, and pass it to `load_state` of an optimizer that is built for "
            "variables on a mesh."
        )


def with_devices(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an object; each `Devices` is replaced by its value."""
    return {k: v.value if isinstance(v, Devices) else v for k, v in state.items()}


@dataclasses.dataclass(frozen=True)
class Static:
    """A pytree without its arrays, as `partition` returns it. It can be hashed if the rest can."""

    structure: Any
    leaves: tuple[Any, ...]  # `_ARRAY` in the place of an array; others are functions and the like

    @classmethod
    def of_arrays(cls, structure: Any) -> Self:
        """That of a pytree all of whose leaves are arrays."""
        return cls(structure, (_ARRAY,) * structure.num_leaves)

    @functools.cached_property
    def count(self) -> int:
        """How many arrays it takes."""
        return sum(leaf is _ARRAY for leaf in self.leaves)

    @property
    def others(self) -> list[Any]:
        """The leaves that are not arrays."""
        return [leaf for leaf in self.leaves if leaf is not _ARRAY]

    def combine(self, arrays: Iterable[Any]) -> Any:
        """The pytree with these arrays."""
        return jax.tree.unflatten(self.structure, self.placed(arrays))

    def placed(self, arrays: Iterable[Any]) -> list[Any]:
        """All leaves, with these arrays in their places."""
        each = iter(arrays)
        return [next(each) if leaf is _ARRAY else leaf for leaf in self.leaves]

    def built(self, tree: Any) -> Any:
        """The pytree of `structure` itself, as that is the structure of the whole."""
        return tree


def partition(tree: Any, kinds: tuple[type, ...] = ARRAYS) -> tuple[list[Any], Static]:
    """Splits a pytree into its arrays, the leaves of these kinds, and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    if all(issubclass(kind, kinds) for kind in set(map(type, leaves))):
        return leaves, Static.of_arrays(structure)
    return separated(tree, [isinstance(leaf, kinds) for leaf in leaves])


def separated(tree: Any, chosen: Sequence[bool]) -> tuple[list[Any], Static]:
    """Splits a pytree into the leaves that are chosen, and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    each = list(zip(leaves, chosen, strict=True))
    places = tuple(_ARRAY if is_chosen else leaf for leaf, is_chosen in each)
    return [leaf for leaf, is_chosen in each if is_chosen], Static(structure, places)


def strong(value: npt.ArrayLike) -> jax.Array:
    """`value` as an array without a weak type, which would need a compilation of its own."""
    value = jnp.asarray(owned(value))
    return jnp.asarray(value, value.dtype)


def owned(value: npt.ArrayLike) -> npt.ArrayLike:
    """A copy of a numpy array, because JAX may still read memory that the caller then changes."""
    return value.copy() if isinstance(value, np.ndarray) else value


def is_key(leaf: object) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaves_and_none(tree: Any) -> list[Any]:
    """The leaves of a pytree, with None as a leaf."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def joined(path: Sequence[Any], head: str = "") -> str:
    """The keys of a path in a pytree, joined by slashes, without NNX's final `value`."""
    keys = [head] if head else []
    keys += [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "/".join(keys[:-1] if len(keys) > 1 and keys[-1] == "value" else keys)


def buffers(array: object) -> list[Any]:
    """The memory addresses of an array's shards in this process; of a key, which shows none, what
    tells it from others."""
    if not isinstance(array, jax.Array):
        return []
    if is_key(array):
        return [("key", id(array))]
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards if array.size]


def unshared(donated: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Returns the arrays to donate, with a copy of each whose buffer another argument has too.

    Some states begin with the parameters themselves, and weights may be tied.
    """
    taken = {address for array in others for address in buffers(array)}
    free = []
    for array in donated:
        own = buffers(array)
        free.append(array if taken.isdisjoint(own) else jnp.copy(array))
        taken.update(own)
    return free


def one_more(count: ArrayLike | None, limit: int = LARGEST_COUNT) -> jax.Array:
    """The count plus one, at most `limit`: a loaded count may be any int32."""
    return jnp.minimum(jnp.maximum(jnp.asarray(count), 0), limit - 1) + 1

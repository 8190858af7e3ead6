"""States in files, of which every name, shape, dtype and kind is compared when they are read."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base._jax import multihost_utils
from gainstage._base.arrays import is_key, joined
from gainstage._base.checks import brief
from gainstage._base.tensor_file import TensorFile, write_tensors
from gainstage._variables.types import PyTree
from gainstage.precision.plan import Plan
from gainstage.transforms.train_state import TrainState, refuse_deleted
from gainstage.transforms.with_loss_scale import transformation_of

Like = TypeVar("Like")
STATE_VERSION = 1  # of the facts
MOST_DIFFERENCES = 10  # differences in an error


def save(path: str | Path, state: PyTree, *, plan: Plan | None = None) -> None:
    """Writes a state to one file, in the format safetensors.

    It has the weights, the state of the optimizer, the loss scale with its counters, `extra` and
    the number of steps, each by its name. `load` compares names, shapes, dtypes, the optimizer and
    the rule, and refuses what differs. The file is written beside its place and moved there when it
    is whole, so an interruption keeps the old one.

    On several processes, each one calls it: sharded arrays are gathered, and process 0 writes. For
    models that no host can hold, use Orbax.

    Args:
        path: the file, such as "run.safetensors". Its folder must exist.
        state: a `TrainState`, or another pytree of arrays.
        plan: the plan of a step that was mended, `step.plan`; `Plan.load` reads it from the file.

    Raises:
        ValueError: a step has deleted the state, or two arrays have one name.
        TypeError: a leaf of the state is no array.
        OSError: the file cannot be written.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax, tempfile
        >>> state = gs.TrainState.create({"w": jnp.ones(2)}, optax.adam(0.1))
        >>> path = tempfile.mkdtemp() + "/run.safetensors"
        >>> gs.save(path, state)
        >>> print(gs.load(path, state).params)
        {'w': Array([1., 1.], dtype=float32)}

    Source: the format safetensors.
    """
    if isinstance(state, str | Path):
        raise TypeError("Expected a path, and then a state: gainstage.save(path, state).")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"Expected a folder that exists for {str(path)!r}; make it first.")
    refuse_deleted(state)
    leaves = _arrays_by_name(state)
    keys = {n: str(jax.random.key_impl(x)) for n, x in leaves.items() if is_key(x)}
    arrays = {name: _on_host(name, x) for name, x in leaves.items()}
    facts = {**_kinds_of(state), "version": STATE_VERSION, "keys": keys}
    if plan is not None:
        facts["plan"] = plan.to_json()
    if jax.process_index() == 0:
        write_tensors(Path(path), arrays, facts)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"gainstage.save {path}")


def load(path: str | Path, like: Like | Callable[[], Like]) -> Like:
    """Reads a state that `save` has written.

    Args:
        path: the file.
        like: a state of the same model, optimizer and rule, from which the new one takes its
            structure, its transformation and its shardings; or a function that makes one, such as
            `lambda: gainstage.TrainState.create(init(key), tx)`, of which nothing is computed.

    Returns:
        The state, with the arrays of the file.

    Raises:
        ValueError: a name, shape or dtype differs, or the optimizer, or the rule; or the file is
            none of `save`, or damaged. Nothing is changed then.
        OSError: the file cannot be read.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax, tempfile
        >>> path = tempfile.mkdtemp() + "/run.safetensors"
        >>> gs.save(path, gs.TrainState.create(jnp.ones(2), optax.adam(0.1)))
        >>> state = gs.load(path, lambda: gs.TrainState.create(jnp.zeros(2), optax.adam(0.1)))
        >>> print(state.params, state.loss_scale)
        [1. 1.] 32768.0

    Source: the format safetensors.
    """
    if isinstance(like, str | Path) or not isinstance(path, str | os.PathLike):
        raise TypeError("Expected a path, and then a state: gainstage.load(path, like).")
    given: Any = like
    whole: Any = _shapes_of(given) if _makes(like) else given
    leaves = _arrays_by_name(whole)
    with TensorFile(Path(path)) as file:
        keys = _only_texts(file.facts.get("keys"))
        _refuse_another(path, file, leaves, keys, _kinds_of(whole))
        arrays = [_placed(file.read(name), x, keys.get(name)) for name, x in leaves.items()]
    found: Like = jax.tree.unflatten(jax.tree.structure(whole), arrays)
    return found


def _shapes_of(make: Callable[[], Any]) -> Any:
    """What a function would return, without its numbers; with them, if it cannot be traced. Arrays
    of numpy stay what they are."""
    made = list[Any]()

    def traced() -> Any:
        whole = make()
        made[:] = jax.tree.leaves(whole)
        return whole

    try:
        leaves, structure = jax.tree.flatten(jax.eval_shape(traced))
    except Exception:  # such as one that iterates over an array of keys
        return make()
    own = [x if isinstance(x, np.ndarray | np.generic) else None for x in made]
    kinds = [shape if x is None else x for shape, x in zip(leaves, own, strict=True)]
    return jax.tree.unflatten(structure, kinds)


def _refuse_another(
    path: str | Path,
    file: TensorFile,
    leaves: Mapping[str, Any],
    keys: Mapping[str, str],
    kinds: Mapping[str, dict[str, str]],
) -> None:
    """Raises a ValueError if a file is not that of a state with these arrays and kinds."""
    if file.facts.get("version") != STATE_VERSION:
        raise ValueError(
            f"Expected a file of version {STATE_VERSION}; got {str(path)!r} of version "
            f"{brief(file.facts.get('version'))}. Read it with the release that has written it."
        )
    differ = [*_differences(file, leaves, keys), *_other_kinds(file.facts, kinds)]
    if differ:
        more = len(differ) - MOST_DIFFERENCES
        first = "; ".join(differ[:MOST_DIFFERENCES]) + f", and {more} more" * (more > 0)
        raise ValueError(
            f"Expected a file of a state like this one; {str(path)!r} differs in {len(differ)}: "
            f"{first}. Nothing was loaded. Make the state with the model, the optimizer and the "
            f"rule of the one that was saved; with_params(params, tx) of a state then goes on with "
            f"others."
        )


def _makes(like: Any) -> bool:
    """Whether it is a function, and no model, which can be called too."""
    return callable(like) and jax.tree_util.all_leaves([like])


def _arrays_by_name(tree: PyTree) -> dict[str, Any]:
    """The arrays of a pytree by their names, in its order."""
    found = dict[str, Any]()
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = joined(path) or "array"
        name = jax.tree_util.keystr(path) if name in found else name
        if name in found or name == "__metadata__":
            raise ValueError(f"Expected one array of each name; got {name!r} twice.")
        found[name] = x
    return found


def _on_host(name: str, x: Any) -> np.ndarray:
    """The numbers of an array, gathered from all devices."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"Expected arrays in the state; got {brief(x)} for {name!r}.")
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)  # of 64 bits too, which JAX would make 32
    array: Any = jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x) else x
    try:
        array = jnp.asarray(array)
    except OverflowError as error:
        raise ValueError(
            f"Expected a number of 32 bits; got {x} for {name!r}. Write numpy.int64({x})."
        ) from error
    if not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _placed(data: np.ndarray, like: Any, key: str | None) -> Any:
    """An array with the sharding of the one whose place it takes."""
    sharding = getattr(like, "sharding", None)
    if key is not None:
        array = jax.random.wrap_key_data(jnp.asarray(data), impl=key)
        return array if sharding is None else jax.device_put(array, sharding)
    if isinstance(like, np.ndarray | np.generic):
        return data if isinstance(like, np.ndarray) else data[()]
    if sharding is None or not getattr(like, "committed", True):
        return jnp.asarray(data)
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def _differences(file: TensorFile, leaves: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    """How the arrays of a file differ from those of a state."""
    found = [f"{name} is missing in the file" for name in leaves if name not in file.entries]
    found += [f"{name} is in the file alone" for name in file.entries if name not in leaves]
    for name, x in leaves.items():
        if name not in file.entries:
            continue
        entry, shape = file.entries[name], jnp.shape(x)
        dtype = x.dtype if isinstance(x, np.ndarray | np.generic) else jnp.result_type(x)
        own = str(dtype) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else None
        saved = _key_kind(keys[name]) if name in keys else None
        if own:
            data = jax.eval_shape(jax.random.key_data, x)
            shape, dtype = data.shape, data.dtype
        if saved != own:
            kinds = [kind or "no key" for kind in (saved, own)]
            found.append(f"{name} is {kinds[0]} in the file, and {kinds[1]} here")
        elif entry.shape != shape:
            found.append(f"{name} has shape {entry.shape} in the file, and {shape} here")
        elif entry.dtype != dtype:
            found.append(f"{name} is {entry.dtype} in the file, and {dtype} here")
    return found


def _key_kind(impl: str) -> str:
    """The dtype of keys by the name of what makes them."""
    try:
        return str(jax.random.key(0, impl=impl).dtype)
    except (ValueError, TypeError):
        return f"an unknown key of {brief(impl)}"


def _other_kinds(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """How the kinds of the optimizer, of the rule and of the whole differ."""
    old = {name: _only_texts(saved.get(name)) for name in own}
    found = []
    for name, kinds in own.items():
        for place in sorted(kinds.keys() | old[name].keys()):
            given = [each.get(place, "nothing") for each in (old[name], kinds)]
            if given[0] != given[1]:
                found.append(f"{place} is {brief(given[0])} in the file, and {given[1]} here")
    return found


def _only_texts(facts: Any) -> dict[str, str]:
    """The facts of a file that are texts by name."""
    pairs = facts.items() if isinstance(facts, dict) else ()
    return {name: text for name, text in pairs if isinstance(text, str)}


def _kinds_of(state: PyTree) -> dict[str, dict[str, str]]:
    """The kinds of a state: of the whole, its rule, and each part of the state of its optimizer."""
    if not isinstance(state, TrainState):
        return {"kinds": {}}
    kinds = {"the whole": "TrainState"}
    scaled = transformation_of(state.tx) if state.tx is not None else None
    if scaled is not None:
        kinds["the rule"] = type(scaled.rule).__name__
    return {"kinds": kinds | dict(_named_tuples(state.opt_state, "opt_state"))}


def _named_tuples(tree: Any, place: str) -> list[tuple[str, str]]:
    """The named tuples in the state of an optimizer, by their places."""
    fields = getattr(tree, "_fields", None)
    own = [(place, type(tree).__name__)] if fields else []
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        inner = tree.items()
    elif isinstance(tree, tuple | list):
        inner = zip(fields or range(len(tree)), tree, strict=True)
    return own + [pair for name, x in inner for pair in _named_tuples(x, f"{place}/{name}")]

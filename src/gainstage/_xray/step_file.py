"""The file of a bad step: the leaves of a loss's arguments by their paths, as safetensors."""

# `params["w"]` of the first argument is the array `0/w`. PRNG keys are stored as their data; the
# facts of the file say what each leaf was. They also have the structure of dictionaries with
# strings as keys, lists and tuples; others are given as `like`.

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._base.arrays import is_key
from gainstage._base.tensor_file import TensorFile, TensorFileError, write_tensors_to
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable

STEP_FORMAT = 4
STEP_WRITER = "gainstage.diagnostics.StepRecorder"
# How to pass a missing `like`, in Python and on the command line.
HOW_TO_PASS = {
    "like": "pass a tuple of the arguments up to this one, such as (model,), or a function that "
    "returns it",
    "--like": "pass MODULE:FUNCTION, a function without arguments that returns a model like that "
    "of the run, or a tuple of the arguments up to this one",
}
# What a description that no run has written makes of the code that reads it.
_DAMAGE = ValueError, TypeError, LookupError, AttributeError, RuntimeError, MemoryError


class Packed(NamedTuple):
    """Arguments, ready to be written; their arrays are still on the device."""

    arrays: dict[str, Any]  # by the number of the argument and the path of the leaf: `0/w`
    kinds: dict[str, str]  # what each leaf was
    args: list[dict[str, Any]]  # of each argument: its class and structure; None if it needs `like`

    @property
    def bytes(self) -> int:
        """The size of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def packed(args: Sequence[Any]) -> Packed:
    """Describes arguments.

    Raises:
        ValueError: an array cannot be read: it was donated, is on devices of other processes, or
            is traced; or two leaves have the same path.
    """
    result = Packed({}, {}, [])
    for number, arg in enumerate(args):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            leaf = leaf.value() if isinstance(leaf, Variable) else leaf
            name = "/".join(filter(None, [str(number), leaf_path(path)]))
            _check_readable(leaf, f"argument {number}" + f" ({leaf_path(path)})" * bool(path))
            if name in result.kinds:
                raise ValueError(f"two leaves of argument {number} have the path {leaf_path(path)}")
            array, result.kinds[name] = _as_array(leaf)
            if array is not None:
                result.arrays[name] = array
        tree: dict[str, Any] | None = None
        with contextlib.suppress(TypeError):  # a class, or keys that are not strings
            tree = _structure_of(arg)
        kind = f"{type(arg).__module__}.{type(arg).__qualname__}"
        result.args.append({"type": kind, "tree": tree})
    return result


def write_step_file(path: Path, about: dict[str, Any], arguments: Packed) -> None:
    """Writes a file."""
    arrays = {
        name: np.asarray(jax.random.key_data(x) if _is_key_array(x) else x)
        for name, x in arguments.arrays.items()
    }
    described = {"leaves": arguments.kinds, "args": arguments.args}
    write_tensors_to(path, arrays, {"gainstage step": STEP_FORMAT, **about, **described})


def description(path: Path) -> dict[str, Any]:
    """Returns the description without reading an array; raises as `read_step_file`."""
    with _opened(path) as file:
        return file.facts


def needs_like(about: dict[str, Any]) -> bool:
    """Whether `like` is needed to read a step file, according to its description."""
    others = (kind.startswith("other ") for kind in about["leaves"].values())
    return any(others) or any(arg["tree"] is None for arg in about["args"])


def read_step_file(
    path: Path, like: Sequence[Any], option: str
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Returns the description and the arguments of the loss.

    Args:
        path: the file.
        like: templates of the first arguments, whose structures they get.
        option: the name of `like` for the user, "like" or "--like".

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is damaged, incomplete, or something else; its 64-bit arrays need
            `jax_enable_x64`; a required template is missing, or differs.
    """
    with _opened(path) as file, _read_as_step(path):
        about = file.facts
        if len(like) > len(about["args"]):
            raise TensorFileError(
                f"Expected at most {len(about['args'])} arguments in {option}; got {len(like)}."
            )
        values: list[dict[str, Any]] = [{} for _ in about["args"]]
        for name, kind in about["leaves"].items():
            number, _, path_in_it = name.partition("/")
            values[int(number)][path_in_it] = _restored(file, name, kind)
        pairs = enumerate(zip(about["args"], values, strict=True))
        return about, tuple(
            _filled(n, values_of_argument, like[n], option)
            if n < len(like)
            else _rebuilt(n, arg, values_of_argument, option)
            for n, (arg, values_of_argument) in pairs
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TensorFile]:
    """The file, whose description is one of a step.

    Raises:
        TensorFileError: it is no such file, or was damaged.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(TensorFile(path, STEP_WRITER))
        except TensorFileError as error:
            with path.open("rb") as opened:
                is_record = opened.read(1) == b"{"
            run = f" If it is a recorded run, write: gainstage report {path}" * is_record
            raise TensorFileError(f"{error}{run}") from error
        _check_description(path, file.facts)
        yield file


def _check_description(path: Path, about: dict[str, Any]) -> None:
    """Raises an error for facts that are not those of a step."""
    if "gainstage step" not in about:
        raise TensorFileError(
            f"Expected a file that {STEP_WRITER} has written; got {str(path)!r}, which has no step."
        )
    form = about["gainstage step"]
    if type(form) is not int or form != STEP_FORMAT:
        raise TensorFileError(
            f"Expected a step file of format {STEP_FORMAT} at {path}; got format {form!r}. Read "
            f"it with the gainstage that wrote it, {about.get('versions')}."
        )
    with _read_as_step(path):
        for name, kind in (("versions", str), ("settings", object)):
            values = about.get(name)
            if not (isinstance(values, dict) and all(isinstance(v, kind) for v in values.values())):
                raise ValueError(f"{values!r} for {name!r}")
        checks.integer("step", about["step"], low=0, high=2**53)
        checks.real("scale", about["scale"], above=0)
        if not isinstance(about["finite"], bool):
            raise TypeError(f"finite is {about['finite']!r}")
        if not all(isinstance(kind, str) for kind in about["leaves"].values()):
            raise TypeError("a leaf without a kind")
        if not all("tree" in arg and isinstance(arg["type"], str) for arg in about["args"]):
            raise TypeError("an argument without a class or structure")


@contextlib.contextmanager
def _read_as_step(path: Path) -> Iterator[None]:
    """Says which file it is that holds something impossible."""
    try:
        yield
    except TensorFileError:
        raise
    except _DAMAGE as error:
        raise TensorFileError(
            f"Expected a step file as {STEP_WRITER} writes it at {path}; got one that was changed "
            f"or damaged ({error}). Copy the file of the run again."
        ) from error


def _rebuilt(number: int, arg: dict[str, Any], values: dict[str, Any], option: str) -> PyTree:
    """An argument of dictionaries, lists and tuples."""
    other = next((f"{name}, a {x.dtype}" for name, x in values.items() if _is_missing(x)), "")
    if arg["tree"] is not None and not other:
        return _with_values(_template(arg["tree"]), values)
    names = ", ".join(list(values)[:3]) + ", ..." * (len(values) > 3)
    missing = "like=" if option == "like" else option
    raise TensorFileError(
        f"Expected {missing} for argument {number}, a {arg['type']} with "
        f"{other or 'the leaves ' + names}; got none. A step file stores arrays and numbers in "
        f"lists, tuples and dictionaries with strings as keys: {HOW_TO_PASS[option]}."
    )


def _structure_of(tree: Any) -> dict[str, Any]:
    """The structure of a pytree of dictionaries, lists and tuples, for JSON.

    Raises:
        TypeError: there is something else in it, or a key that is no string.
    """
    if tree is None:
        return {"kind": "none"}
    if type(tree) in (list, tuple):
        return {"kind": type(tree).__name__, "of": [_structure_of(x) for x in tree]}
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {"kind": "dict", "of": {key: _structure_of(x) for key, x in tree.items()}}
    if not jax.tree_util.all_leaves([tree]):
        raise TypeError
    return {"kind": "leaf"}


def _template(described: Any) -> PyTree:
    """A pytree with this structure, each leaf of which is 0."""
    kind, of = described["kind"], described.get("of")
    if kind == "none":
        return None
    if kind == "dict" and isinstance(of, dict):
        return {key: _template(x) for key, x in of.items()}
    if kind in ("list", "tuple") and isinstance(of, list):
        each = [_template(x) for x in of]
        return each if kind == "list" else tuple(each)
    if kind != "leaf":
        raise ValueError(f"{kind!r} in the place of a structure")
    return 0


def _with_values(template: PyTree, values: dict[str, Any]) -> PyTree:
    """A template with these values by their paths."""
    found, structure = jax.tree_util.tree_flatten_with_path(template)
    names = [leaf_path(path) for path, _ in found]
    if names != list(values):
        raise ValueError(f"leaves {list(values)[:3]} in the place of {names[:3]}")
    return jax.tree.unflatten(structure, values.values())


def _filled(number: int, values: dict[str, Any], like: PyTree, option: str) -> PyTree:
    """An argument with the structure of a template."""
    template, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted, names = list(values), [leaf_path(path) for path, _ in template]
    if wanted != names:
        missing = [name for name in wanted if name not in names]
        unknown = [name for name in names if name not in wanted]
        raise TensorFileError(
            f"Expected {len(wanted)} leaves in {option} for argument {number}; got "
            f"{len(names)}, with {missing[:3] or 'none'} missing and {unknown[:3] or 'none'} "
            f"unknown. Create it as the run did."
        )
    leaves = []
    for (name, value), (_, leaf) in zip(values.items(), template, strict=True):
        shape, ours = getattr(value, "shape", None), getattr(leaf, "shape", None)
        if shape is not None and ours is not None and shape != tuple(ours):
            raise TensorFileError(
                f"Expected shape {shape} in {option} for {name} of argument {number}; got "
                f"{tuple(ours)}. Create it as the run did."
            )
        leaves.append(leaf if _is_missing(value) else value)
    return jax.tree.unflatten(structure, leaves)


def leaf_path(path: tuple[Any, ...]) -> str:
    """The path of a leaf in a pytree, such as `w/0`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check_readable(leaf: object, where: str) -> None:
    if isinstance(leaf, Tracer):
        raise ValueError(f"{where} is traced; call it outside of compiled functions")
    if not isinstance(leaf, jax.Array):
        return
    if leaf.is_deleted():
        raise ValueError(
            f"{where} was donated, and is gone; pass what the step returned, or do not donate it"
        )
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(f"{where} lies on devices of other processes; gather it first")


class _Missing(NamedTuple):
    """A leaf that is neither an array nor a number, such as a function in a model."""

    dtype: str  # its class


def _is_missing(value: Any) -> bool:
    return isinstance(value, _Missing)


def _is_key_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and is_key(x)


def _as_array(leaf: Any) -> tuple[Any, str]:
    """A leaf as an array, None if it is none, and what it was."""
    if isinstance(leaf, jax.Array):
        if is_key(leaf):
            return leaf, f"key {jax.random.key_impl(leaf)}"
        return leaf, "weak" if leaf.weak_type else "jax"
    kinds = {np.ndarray: "numpy", np.generic: "scalar"}
    kinds |= dict.fromkeys((bool, int, float, complex, str), "python")
    kind = next((name for of, name in kinds.items() if isinstance(leaf, of)), None)
    array = None if kind is None else np.asarray(leaf)
    if array is None or array.dtype.hasobject or array.dtype.fields:  # would be pickled
        return None, f"other {type(leaf).__qualname__}"
    return array, str(kind)


def _restored(file: TensorFile, name: str, kind: str) -> Any:
    """A leaf as it was."""
    if kind.startswith("other "):
        return _Missing(kind.removeprefix("other "))
    array = file.read(name)
    if kind.startswith("key "):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind.removeprefix("key "))
    if kind in ("python", "scalar", "numpy"):
        return array.item() if kind == "python" else array.copy() if kind == "numpy" else array[()]
    if kind not in ("jax", "weak"):
        raise ValueError(f"{kind!r} in the place of a kind of array")
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise TensorFileError(
            f"Expected jax_enable_x64, with which the step file's {array.dtype} was made; got "
            f'False. Call jax.config.update("jax_enable_x64", True) first.'
        )
    if kind == "jax":
        return jnp.asarray(array)
    weak = jnp.asarray(array.dtype.type(0).item())  # a Python number gives a weak type, ...
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)  # ... which `set` keeps

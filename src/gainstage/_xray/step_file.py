"""The file of a bad step: an .npz archive of the leaves of a loss's arguments, by their paths."""

# `numpy.load` reads it too: `params["w"]` of the first argument is the array `0/w`. Nothing is
# pickled or compressed. numpy has no names for bfloat16, float8 and int4, so these are stored as
# unsigned integers, and PRNG keys as their data; `step.json` says what each was. It also has the
# structure of dictionaries with strings as keys, lists and tuples; others are given as `like`.

import contextlib
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable

STEP_FORMAT = 3
DESCRIPTION = "step.json"
WRITER = "gainstage.diagnostics.StepRecorder writes step files"
# How to pass a missing `like`, in Python and on the command line.
HOW_TO_PASS = {
    "like": "pass a tuple of the arguments up to this one, such as (model,), or a function that "
    "returns it",
    "--like": "pass MODULE:FUNCTION, a function without arguments that returns a model like that "
    "of the run, or a tuple of the arguments up to this one",
}
_SMALL = re.compile(r"b?float\d+\w*|u?int[24]")  # the dtypes for which numpy has no name
# The errors of reading a damaged archive.
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, TypeError, LookupError, AttributeError,
           EOFError, RuntimeError, MemoryError, OSError)  # fmt: skip


class StepFileError(ValueError):
    """A file that is not a complete step file, or that cannot be read here."""


class Packed(NamedTuple):
    """Arguments, ready to be written; their arrays are still on the device."""

    arrays: dict[str, Any]  # by the number of the argument and the path of the leaf: `0/w`
    kinds: dict[str, tuple[str, str]]  # of each leaf: what it was, and its dtype
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
            array, kind = _as_array(leaf)
            result.kinds[name] = kind, str(array.dtype)
            if kind != "other":
                result.arrays[name] = array
        tree: dict[str, Any] | None = None
        with contextlib.suppress(TypeError):  # a class, or keys that are not strings
            tree = _structure_of(arg)
        kind = f"{type(arg).__module__}.{type(arg).__qualname__}"
        result.args.append({"type": kind, "tree": tree})
    return result


def write_step_file(path: Path, about: dict[str, Any], arguments: Packed) -> None:
    """Writes a file and flushes it to the disk; arrays are read from the device one by one."""
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arguments.arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _in_numpy(array), allow_pickle=False)
            described = {"leaves": arguments.kinds, "args": arguments.args}
            archive.writestr(
                DESCRIPTION, json.dumps({"gainstage step": STEP_FORMAT, **about, **described})
            )
        file.flush()
        os.fsync(file.fileno())


def description(path: Path) -> dict[str, Any]:
    """Returns the description without reading an array; raises as `read`."""
    with _opened(path) as archive:
        return _description(path, archive)


def needs_like(about: dict[str, Any]) -> bool:
    """Whether `like` is needed to read a step file, according to its description."""
    kinds = (kind for kind, _ in about["leaves"].values())
    return "other" in kinds or any(arg["tree"] is None for arg in about["args"])


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
    with _opened(path) as archive:
        about = _description(path, archive)
        if len(like) > len(about["args"]):
            raise StepFileError(
                f"Expected at most {len(about['args'])} arguments in {option}; got {len(like)}."
            )
        values: list[dict[str, Any]] = [{} for _ in about["args"]]
        for name, (kind, dtype) in about["leaves"].items():
            number, _, path_in_it = name.partition("/")
            array = None if kind == "other" else _read_array(path, archive, name)
            values[int(number)][path_in_it] = _restored(array, kind, dtype)
        pairs = enumerate(zip(about["args"], values, strict=True))
        return about, tuple(
            _filled(n, values_of_argument, like[n], option)
            if n < len(like)
            else _rebuilt(n, arg, values_of_argument, option)
            for n, (arg, values_of_argument) in pairs
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive; what is wrong with it, or with what is read from it, is a `StepFileError`."""
    with path.open("rb") as file:
        start = file.read(4)
        if start != b"PK\x03\x04":
            begins = f"{start.decode(errors='replace')!r} at its beginning"
            what = begins if start else "an empty file"
            run = f" If it is a recorded run, write: gainstage report {path}"
            run *= start.startswith(b"{")
            raise StepFileError(f"Expected a step file at {path}; got {what}. {WRITER}.{run}")
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive
        except StepFileError:
            raise
        except _DAMAGE as error:
            raise StepFileError(
                f"Expected a complete step file at {path}; got one that is cut short or damaged "
                f"({error}). A run leaves only complete ones: copy the file again."
            ) from error


def _description(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    names = archive.namelist()
    compressed = [m.filename for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED]
    if DESCRIPTION in names and compressed:  # a small file could fill the memory
        raise StepFileError(
            f"Expected a step file without compression at {path}; got one with a compressed "
            f"{compressed[0]!r}. Copy the file that the run wrote."
        )
    total = sum(member.file_size for member in archive.infolist())
    if total > path.stat().st_size:  # entries that overlap could fill the memory
        raise ValueError(f"its entries have {total} bytes together, which are more than the file")
    about = json.loads(archive.read(DESCRIPTION)) if DESCRIPTION in names else {}
    if not isinstance(about, dict) or "gainstage step" not in about:
        raise StepFileError(
            f"Expected a step file at {path}; got an archive of {names[:5]}. {WRITER}."
        )
    form = about["gainstage step"]
    if type(form) is not int or form != STEP_FORMAT:
        raise StepFileError(
            f"Expected a step file of format {STEP_FORMAT} at {path}; got format {form!r}. Read "
            f"it with the gainstage that wrote it, {about.get('versions')}."
        )
    for name, kind in (("versions", str), ("settings", object)):
        values = about.get(name)
        if not (isinstance(values, dict) and all(isinstance(v, kind) for v in values.values())):
            raise ValueError(f"{values!r} for {name!r}")
    checks.integer("step", about["step"], low=0, high=2**53)
    checks.real("scale", about["scale"], above=0)
    if not isinstance(about["finite"], bool):
        raise TypeError(f"finite is {about['finite']!r}")
    return about


def _read_array(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array; its size is checked before memory is taken, and its checksum with the reading."""
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        expected = file.tell() + math.prod(shape) * dtype.itemsize
    if not member.file_size == expected <= path.stat().st_size:
        raise ValueError(f"{member.filename} has {member.file_size} bytes, not {expected}")
    return np.lib.format.read_array(io.BytesIO(archive.read(member)), allow_pickle=False)


def _rebuilt(number: int, arg: dict[str, Any], values: dict[str, Any], option: str) -> PyTree:
    """An argument of dictionaries, lists and tuples."""
    other = next((f"{name}, a {x.dtype}" for name, x in values.items() if _is_missing(x)), "")
    if arg["tree"] is not None and not other:
        return _with_values(_template(arg["tree"]), values)
    names = ", ".join(list(values)[:3]) + ", ..." * (len(values) > 3)
    missing = "like=" if option == "like" else option
    raise StepFileError(
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
        raise StepFileError(
            f"Expected {len(wanted)} leaves in {option} for argument {number}; got "
            f"{len(names)}, with {missing[:3] or 'none'} missing and {unknown[:3] or 'none'} "
            f"unknown. Create it as the run did."
        )
    leaves = []
    for (name, value), (_, leaf) in zip(values.items(), template, strict=True):
        shape, ours = getattr(value, "shape", None), getattr(leaf, "shape", None)
        if shape is not None and ours is not None and shape != tuple(ours):
            raise StepFileError(
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


def _as_array(leaf: Any) -> tuple[Any, str]:
    """A leaf as an array, and what it was; `_Missing` if it is none."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf, f"key {jax.random.key_impl(leaf)}"
        return leaf, "weak" if leaf.weak_type else "jax"
    kinds = {np.ndarray: "numpy", np.generic: "scalar"}
    kinds |= dict.fromkeys((bool, int, float, complex, str), "python")
    kind = next((name for of, name in kinds.items() if isinstance(leaf, of)), None)
    array = None if kind is None else np.asarray(leaf)
    if array is None or array.dtype.hasobject or array.dtype.fields:  # would be pickled
        return _Missing(type(leaf).__qualname__), "other"
    return array, str(kind)


def _in_numpy(array: Any) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}") if array.dtype.isbuiltin == 2 else array


def _restored(array: np.ndarray | None, kind: str, dtype: str) -> Any:
    """A leaf as it was."""
    if array is None:
        return _Missing(dtype)
    if kind.startswith("key "):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind.removeprefix("key "))
    if str(array.dtype) != dtype:
        if not _SMALL.fullmatch(dtype):
            raise ValueError(f"{dtype!r} in the place of a dtype")
        array = array.view(jnp.dtype(dtype))
    if kind in ("python", "scalar", "numpy"):
        return array.item() if kind == "python" else array if kind == "numpy" else array[()]
    if kind not in ("jax", "weak"):
        raise ValueError(f"{kind!r} in the place of a kind of array")
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise StepFileError(
            f"Expected jax_enable_x64, with which the step file's {array.dtype} was made; got "
            f'False. Call jax.config.update("jax_enable_x64", True) first.'
        )
    if kind == "jax":
        return jnp.asarray(array)
    weak = jnp.asarray(array.dtype.type(0).item())  # a Python number gives a weak type, ...
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)  # ... which `set` keeps

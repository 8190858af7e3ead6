"""The file of a bad step: a pytree of arguments as an .npz archive, with a JSON description."""

# Nothing is pickled or compressed. Each array is a member `N.npy`. numpy has no names for bfloat16,
# float8 and int4, so these are stored as unsigned integers, and PRNG keys as their data. Each
# member has a checksum and the list of members is at the end, so a damaged or incomplete file is
# detected.

import io
import itertools
import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable

STEP_FORMAT = 1
# How to pass a missing `like`, in Python and on the command line.
HOW_TO_PASS = {
    "like": "pass a tuple of the arguments up to this one, such as (model,), or a function that "
    "returns it",
    "--like": "pass MODULE:FUNCTION, a function without arguments that returns a model like that "
    "of the run, or a tuple of the arguments up to this one",
}
DESCRIPTION = "step.json"
WRITER = "gainstage.diagnostics.StepRecorder writes step files"
# The errors of reading a damaged archive, beside OSError.
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, TypeError, LookupError, AttributeError,
           EOFError, RuntimeError, MemoryError)  # fmt: skip
_SCALARS: dict[str, Callable[[str], Any]] = {
    "bool": "True".__eq__, "int": int, "float": float, "complex": complex, "str": str,
}  # fmt: skip


class Packed(NamedTuple):
    """Arguments, ready to be written; their arrays are still on the device."""

    args: list[dict[str, Any]]  # the leaves and the structure of each argument, in JSON
    arrays: list[Any]

    @property
    def bytes(self) -> int:
        """The size of all arrays."""
        return sum(array.nbytes for array in self.arrays)


class Other(NamedTuple):
    """A leaf that is neither an array nor a number, such as a function in a model."""

    kind: str


class Argument(NamedTuple):
    """An argument that was read."""

    kind: str  # its class
    leaves: list[tuple[str, Any]]  # with their paths
    is_plain: bool  # whether it consists of dictionaries, lists and tuples
    tree: PyTree  # the argument itself, if it is plain


class _Needs64BitsError(ValueError):
    pass


def packed(args: Sequence[Any]) -> Packed:
    """Describes arguments.

    Raises:
        ValueError: an array cannot be read: it was donated, is on devices of other processes, or
            is traced.
    """
    arrays: list[Any] = []
    described = []
    for number, arg in enumerate(args):
        found, structure = jax.tree_util.tree_flatten_with_path(arg)
        leaves = []
        for path, leaf in found:
            leaf = leaf.value() if isinstance(leaf, Variable) else leaf
            name = name_of(path)
            _check_readable(leaf, f"argument {number}" + (f" ({name})" if name else ""))
            leaves.append([name, _described(leaf, arrays)])
        plain = _is_plain(arg)
        places = jax.tree.unflatten(structure, range(len(leaves))) if plain else None
        kind = f"{type(arg).__module__}.{type(arg).__qualname__}"
        tree = _in_json(places) if plain else None
        described.append({"type": kind, "leaves": leaves, "tree": tree})
    return Packed(described, arrays)


def write(path: Path, about: dict[str, Any], arguments: Packed) -> None:
    """Writes a file and flushes it to the disk; arrays are read from the device one by one."""
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            for number, array in enumerate(arguments.arrays):
                with archive.open(f"{number}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _in_numpy(array))
            description = {"gainstage step": STEP_FORMAT, **about, "args": arguments.args}
            archive.writestr(DESCRIPTION, json.dumps(description))
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[dict[str, Any], list[Argument]]:
    """Returns the description and the arguments.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is damaged, incomplete, or something else; or its 64-bit arrays need
            `jax_enable_x64`.
    """
    with path.open("rb") as file:
        about = _description(path, file)
        try:
            checks.integer("step", about["step"], low=0, high=2**53)
            checks.real("scale", about["scale"], above=0)
            if not isinstance(about["finite"], bool):
                raise TypeError(f"finite is {about['finite']!r}")
            with zipfile.ZipFile(file) as archive:
                arrays = iter(_arrays(archive))
                return about, [_argument(arg, arrays) for arg in about["args"]]
        except _Needs64BitsError:
            raise
        except (*_DAMAGE, OSError) as error:
            raise _damaged(path, error) from error


def description(path: Path) -> dict[str, Any]:
    """Returns the description without reading an array; raises as `read`."""
    with path.open("rb") as file:
        return _description(path, file)


def _description(path: Path, file: BinaryIO) -> dict[str, Any]:
    start = file.read(4)
    if start != b"PK\x03\x04":
        what = f"{start.decode(errors='replace')!r} at its beginning" if start else "an empty file"
        run = f" If it is a recorded run, write: gainstage report {path}" * start.startswith(b"{")
        raise ValueError(f"Expected a step file at {path}; got {what}. {WRITER}.{run}")
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            compressed = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED]
            is_readable = DESCRIPTION in names and not compressed
            found = json.loads(archive.read(DESCRIPTION)) if is_readable else None
    except (*_DAMAGE, OSError) as error:
        raise _damaged(path, error) from error
    if DESCRIPTION in names and compressed:  # a small file could fill the memory
        raise ValueError(
            f"Expected a step file without compression at {path}; got one with a compressed "
            f"{compressed[0]!r}. Copy the file that the run wrote."
        )
    form = found.get("gainstage step") if isinstance(found, dict) else None
    if found is None or form is None:
        raise ValueError(
            f"Expected a step file at {path}; got an archive of {names[:5]}. {WRITER}."
        )
    if type(form) is not int or form != STEP_FORMAT:
        raise ValueError(
            f"Expected a step file of format {STEP_FORMAT} at {path}; got format {form!r}. Read "
            f"it with the gainstage that wrote it, {found.get('versions')}."
        )
    for name, kind in (("versions", str), ("settings", object)):
        values = found.get(name)
        if not (isinstance(values, dict) and all(isinstance(v, kind) for v in values.values())):
            raise ValueError(
                f"Expected a complete step file at {path}; got {values!r} for {name!r}. Copy the "
                f"file that the run wrote."
            )
    return found


def needs_like(about: dict[str, Any]) -> bool:
    """Whether `like` is needed to read a step file, according to its description."""
    return any(
        arg["tree"] is None or any("other" in leaf for _, leaf in arg["leaves"])
        for arg in about["args"]
    )


def _damaged(path: Path, error: BaseException) -> ValueError:
    return ValueError(
        f"Expected a complete step file at {path}; got one that is cut short or damaged ({error}). "
        f"A run leaves only complete ones: copy the file again."
    )


def unpacked(args: Sequence[Argument], like: Sequence[Any], option: str) -> tuple[Any, ...]:
    """Returns the arguments of a loss; the first ones get the structures in `like`.

    Args:
        args: the arguments as `read` returns them.
        like: the structures.
        option: the name of `like` for the user, "like" or "--like".

    Raises:
        ValueError: a required structure is missing, or differs.
    """
    if len(like) > len(args):
        raise ValueError(f"Expected at most {len(args)} arguments in {option}; got {len(like)}.")
    return tuple(
        _filled(n, arg, like[n], option) if n < len(like) else _rebuilt(n, arg, option)
        for n, arg in enumerate(args)
    )


def _rebuilt(number: int, arg: Argument, option: str) -> PyTree:
    other = next((f"{n}, a {x.kind}" for n, x in arg.leaves if isinstance(x, Other)), "")
    if arg.is_plain and not other:
        return arg.tree
    names = ", ".join(name for name, _ in arg.leaves[:3]) + ", ..." * (len(arg.leaves) > 3)
    missing = "like=" if option == "like" else option
    raise ValueError(
        f"Expected {missing} for argument {number}, a {arg.kind} with "
        f"{other or 'the leaves ' + names}; got none. A step file stores arrays and numbers in "
        f"dictionaries, lists and tuples: {HOW_TO_PASS[option]}."
    )


def _filled(number: int, arg: Argument, like: PyTree, option: str) -> PyTree:
    found, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted, given = [name for name, _ in arg.leaves], [name_of(path) for path, _ in found]
    if wanted != given:
        missing = [name for name in wanted if name not in given]
        unknown = [name for name in given if name not in wanted]
        raise ValueError(
            f"Expected {len(wanted)} leaves in {option} for argument {number}; got "
            f"{len(given)}, with {missing[:3] or 'none'} missing and {unknown[:3] or 'none'} "
            f"unknown. Create it as the run did."
        )
    values = []
    for (name, leaf), (_, own) in zip(arg.leaves, found, strict=True):
        shape, ours = getattr(leaf, "shape", None), getattr(own, "shape", None)
        if shape is not None and ours is not None and shape != tuple(ours):
            raise ValueError(
                f"Expected shape {shape} in {option} for {name} of argument {number}; got "
                f"{tuple(ours)}. Create it as the run did."
            )
        values.append(own if isinstance(leaf, Other) else leaf)
    return jax.tree.unflatten(structure, values)


def name_of(path: tuple[Any, ...]) -> str:
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


def _described(leaf: Any, arrays: list[Any]) -> dict[str, Any]:
    """Describes a leaf in JSON; an array is appended to `arrays`."""
    if type(leaf).__name__ in _SCALARS and type(leaf).__module__ == "builtins":
        return {"scalar": [type(leaf).__name__, str(leaf)]}
    kinds = {jax.Array: "jax", np.ndarray: "numpy", np.generic: "generic"}
    kind = next((name for of, name in kinds.items() if isinstance(leaf, of)), None)
    # JAX has no arrays with fields, and objects would be pickled.
    if kind is None or (kind != "jax" and (leaf.dtype.hasobject or leaf.dtype.fields)):
        return {"other": type(leaf).__qualname__}
    arrays.append(leaf)
    about = {"kind": kind, "dtype": str(leaf.dtype), "shape": leaf.shape}
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return {**about, "key": str(jax.random.key_impl(leaf))}
    return {**about, "view": leaf.dtype.isbuiltin == 2, "weak": getattr(leaf, "weak_type", False)}


def _in_numpy(array: jax.Array | np.ndarray) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}") if array.dtype.isbuiltin == 2 else array


def _arrays(archive: zipfile.ZipFile) -> Iterator[np.ndarray]:
    for number in itertools.count():
        member = archive.getinfo(f"{number}.npy")
        with archive.open(member) as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            expected = file.tell() + math.prod(shape) * dtype.itemsize
        if member.file_size != expected:
            raise ValueError(f"{member.filename} has {member.file_size} bytes, not {expected}")
        content = io.BytesIO(archive.read(member))  # a full read verifies the checksum
        yield np.lib.format.read_array(content)


def _argument(about: dict[str, Any], arrays: Iterator[np.ndarray]) -> Argument:
    leaves = [(str(name), _value(leaf, arrays)) for name, leaf in about["leaves"]]
    is_plain = about["tree"] is not None
    tree = _out_of_json(about["tree"], [value for _, value in leaves]) if is_plain else None
    return Argument(str(about["type"]), leaves, is_plain, tree)


def _value(leaf: dict[str, Any], arrays: Iterator[np.ndarray]) -> Any:
    """Restores a leaf."""
    if "other" in leaf:
        return Other(str(leaf["other"]))
    if "scalar" in leaf:
        kind, text = leaf["scalar"]
        value = _SCALARS[kind](text)
        if str(value) != text:
            raise ValueError(f"{text!r} in the place of a {kind}")
        return value
    array = next(arrays)
    if "key" in leaf:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=leaf["key"])
    array = array.view(jnp.dtype(leaf["dtype"])) if leaf["view"] else array
    if (str(array.dtype), list(array.shape)) != (leaf["dtype"], leaf["shape"]):
        raise ValueError(f"{array.dtype}{list(array.shape)} in the place of {leaf}")
    if leaf["kind"] not in ("jax", "numpy", "generic"):
        raise ValueError(f"{leaf['kind']!r} in the place of a kind of array")
    if leaf["kind"] != "jax":
        return array if leaf["kind"] == "numpy" else array[()]
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise _Needs64BitsError(
            f"Expected jax_enable_x64, with which the step file's {array.dtype} was made; got "
            f'False. Call jax.config.update("jax_enable_x64", True) first.'
        )
    weak = jnp.asarray(array.dtype.type(0).item())  # a Python number gives a weak type, ...
    if not leaf["weak"] or weak.dtype != array.dtype:
        return jnp.asarray(array)
    return jnp.broadcast_to(weak, array.shape).at[...].set(array)  # ... which `set` keeps


def _is_plain(tree: PyTree) -> bool:
    """Whether a pytree consists only of dictionaries, lists, tuples, None and leaves."""
    if type(tree) is dict:
        keys = all(type(key) in (str, int, bool) for key in tree)
        return keys and all(map(_is_plain, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(_is_plain, tree))
    return tree is None or jax.tree_util.all_leaves([tree])


def _in_json(places: PyTree) -> dict[str, Any]:
    """A plain pytree in JSON; each leaf is its number."""
    if type(places) is dict:
        return {"dict": [[key, _in_json(value)] for key, value in places.items()]}
    if type(places) in (list, tuple):
        return {type(places).__name__: [_in_json(value) for value in places]}
    return {"none": 0} if places is None else {"leaf": places}


def _out_of_json(node: dict[str, Any], values: list[Any]) -> PyTree:
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _out_of_json(value, values) for key, value in content}
    if kind in ("list", "tuple"):
        children = [_out_of_json(value, values) for value in content]
        return children if kind == "list" else tuple(children)
    if kind == "none":
        return None
    if kind != "leaf" or type(content) is not int or content not in range(len(values)):
        raise ValueError(f"{node} in the place of one of {len(values)} leaves")
    return values[content]

"""A file of named arrays and facts, in the format safetensors, which executes nothing."""

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

FACTS_KEY = "gainstage"  # the name of the facts in the metadata of a file
# The dtypes of the format by their names in a file. Others are written as bytes.
STORED_AS = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Writes a file beside its place, flushes it, and moves it there: whatever happens, the file is
    the old one or the new one, whole.

    Args:
        path: where it will be. Its folder exists.
        arrays: the arrays by name.
        facts: what else it says, as for JSON.
    """
    whole: dict[str, np.ndarray] = {
        name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()
    }
    raw = {n: x for n, x in whole.items() if x.dtype.name not in STORED_AS.values()}
    facts = {**facts, "dtypes": {name: x.dtype.name for name, x in raw.items()}}
    for name, x in raw.items():
        whole[name] = x.reshape(*x.shape, 1).view(np.uint8)
    specs = {
        name: TensorSpec(
            dtype=x.dtype.name, shape=list(x.shape), data_ptr=x.ctypes.data, data_len=x.nbytes
        )
        for name, x in whole.items()
    }
    with replacing(path) as part:
        serialize_file(specs, part, {FACTS_KEY: json.dumps(facts)})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a new file, which is flushed and replaces that at `path` if all goes well:
    whatever happens, `path` is the old file or the new one, whole."""
    part = part_of(path)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _flush_folder(path.parent)


def part_of(path: Path) -> Path:
    """The path of a new file beside another, which no other process and no other call has."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")


def _flush_folder(folder: Path) -> None:
    """Makes a renaming last, where a folder can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Entry(NamedTuple):
    """An array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int  # its first byte in the file
    stored: tuple[int, ...]  # its shape there, which has one more axis if it is stored as bytes


class TensorFile:
    """A file that `write_tensors` has written. Its arrays are read one by one.

    Args:
        path: the file.

    Raises:
        ValueError: it is no such file, or was damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="numpy") as file:  # checks all sizes and places
                self.facts: dict[str, Any] = _facts_of(file.metadata(), path)
                named = [(name, file.get_slice(name)) for name in file.offset_keys()]
                kinds = [(name, s.get_shape(), s.get_dtype()) for name, s in named]
        except SafetensorError as error:
            raise ValueError(
                f"Expected a file that gainstage.save has written; got {str(path)!r}, which is "
                f"another one or was damaged: {error}."
            ) from error
        with path.open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
        self.entries: dict[str, Entry] = {}
        for name, shape, kind in kinds:
            entry = self._entry(name, tuple(shape), kind, start)
            self.entries[name] = entry
            start += math.prod(entry.shape) * entry.dtype.itemsize

    def _entry(self, name: str, stored: tuple[int, ...], kind: str, start: int) -> Entry:
        other = self.facts["dtypes"].get(name)
        if kind not in STORED_AS or not isinstance(other, str | None):
            raise self._damaged(f"{name!r} is of dtype {kind}")
        if other is None:
            return Entry(stored, jnp.dtype(STORED_AS[kind]), start, stored)
        try:
            dtype = jnp.dtype(other)
        except TypeError:
            raise self._damaged(f"{name!r} is of dtype {other!r}") from None
        if kind != "U8" or not stored or stored[-1] != dtype.itemsize or dtype.kind not in "fV":
            raise self._damaged(f"{name!r} is not of dtype {other!r}")
        return Entry(stored[:-1], dtype, start, stored)

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"Expected a file that gainstage.save has written; got {str(self._path)!r}, in which "
            f"{what}."
        )

    def read(self, name: str) -> np.ndarray:
        """An array of the file."""
        entry = self.entries[name]
        size = math.prod(entry.shape) * entry.dtype.itemsize
        with self._path.open("rb") as file:
            file.seek(entry.start)
            data = file.read(size)
        if len(data) != size:
            raise self._damaged(f"{name!r} ends too early")
        return np.frombuffer(data, entry.dtype).reshape(entry.shape)


def _facts_of(metadata: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    """The facts of a file, each of its type."""
    try:
        facts = json.loads((metadata or {})[FACTS_KEY])
        if not isinstance(facts["dtypes"], dict):
            raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(
            f"Expected a file that gainstage.save has written; got {str(path)!r}, which lacks what "
            f"it says of itself. To read weights of another library, use that one."
        ) from None
    return dict(facts)

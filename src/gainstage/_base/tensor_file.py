"""A file of named arrays and facts, in the format safetensors, which executes nothing."""

import contextlib
import json
import math
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

# The metadata of a file: its facts as JSON, and the checksum of this text.
FACTS_KEY, CHECKSUM_KEY = "gainstage", "gainstage crc32"
# The dtypes of the format by their names in a file. Others are written as bytes.
STORED_AS = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
# Those of numpy and of ml_dtypes, by their names there. None of them holds an object.
_OTHER = re.compile(r"[<>|][biufcUSmM]\d+(\[\w+\])?|b?float\d+\w*|u?int[24]")


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Writes a file: whatever happens, `path` is the old one or the new one, whole.

    Args:
        path: where it will be. Its folder exists.
        arrays: the arrays by name.
        facts: what else it says, as for JSON.
    """
    with replacing(path) as part:
        write_tensors_to(part, arrays, facts)


def write_tensors_to(
    path: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> None:
    """Writes the file that `write_tensors` describes, directly to `path`, without a flush."""
    whole: dict[str, np.ndarray] = {
        name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()
    }
    raw = {n: x for n, x in whole.items() if not _has_name(x.dtype)}
    text = json.dumps(
        {
            **facts,
            "dtypes": {name: _name_of(x.dtype) for name, x in raw.items()},
            "checksums": {n: _checksum(n, x.dtype, x.shape, x) for n, x in whole.items()},
        }
    )
    for name, x in raw.items():
        whole[name] = x.reshape(*x.shape, 1).view(np.uint8)
    specs = {
        name: TensorSpec(
            dtype=x.dtype.name, shape=list(x.shape), data_ptr=x.ctypes.data, data_len=x.nbytes
        )
        for name, x in whole.items()
    }
    serialize_file(specs, path, {FACTS_KEY: text, CHECKSUM_KEY: str(zlib.crc32(text.encode()))})


@contextlib.contextmanager
def replacing(
    path: Path, last: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> Iterator[Path]:
    """Yields the path of a new file, which is flushed to the disk and takes the place of that at
    `path` if all goes well: whatever happens, `path` is the old file or the new one, whole.

    Args:
        path: the file. Its folder exists.
        last: the context in which the new file takes the place.
    """
    # No other process and no other call has this name.
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        with last():
            part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _has_name(dtype: np.dtype) -> bool:
    """Whether the format has a name for a dtype."""
    return dtype.isnative and dtype.name in STORED_AS.values()


def _name_of(dtype: np.dtype) -> str:
    """The name of a dtype that the format does not have."""
    return dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: of ml_dtypes


def _checksum(name: str, dtype: np.dtype, shape: Sequence[int], data: Any) -> int:
    """The checksum of an array and of what it is."""
    start = zlib.crc32(f"{name} {_name_of(dtype)} {list(shape)}".encode())
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8)
    return zlib.crc32(data, start)


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


class TensorFileError(ValueError):
    """A file that is not what it should be, was damaged, or cannot be read here."""


class TensorFile:
    """A file that `write_tensors` has written. Its arrays are read one by one, and their checksums
    are compared. Open it by `with`: all that is read is then of one file, whatever takes its place.

    Args:
        path: the file.
        writer: what writes such files, for errors.

    Raises:
        ValueError: it is no such file, or was damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, writer: str = "gainstage.save") -> None:
        self._path, self._writer = path, writer
        self.facts: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}

    def __enter__(self) -> "TensorFile":
        self._file = self._path.open("rb")
        try:
            kinds = self._described()
            while not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                self._file.close()  # another file took its place meanwhile
                self._file = self._path.open("rb")
                kinds = self._described()
            start = 8 + int.from_bytes(self._file.read(8), "little")
            for name, shape, kind in kinds:
                entry = self._entry(name, tuple(shape), kind, start)
                self.entries[name] = entry
                start += math.prod(entry.shape) * entry.dtype.itemsize
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _described(self) -> list[tuple[str, list[int], str]]:
        """Reads the facts; the name, shape and dtype of each array, in the order of the file."""
        try:
            with safe_open(self._path, framework="numpy") as file:  # checks all sizes and places
                self.facts = self._facts_in(file.metadata() or {})
                named = [(name, file.get_slice(name)) for name in file.offset_keys()]
                return [(name, s.get_shape(), s.get_dtype()) for name, s in named]
        except SafetensorError as error:
            raise self._refused(f"which is another one or was damaged: {error}") from error

    def _facts_in(self, metadata: Mapping[str, str]) -> dict[str, Any]:
        """The facts of a file, of which the dtypes and checksums of its arrays are dictionaries."""
        text = metadata.get(FACTS_KEY)
        if text is None:
            raise self._refused("which lacks what it says of itself, as a file of another library")
        if metadata.get(CHECKSUM_KEY) != str(zlib.crc32(text.encode())):
            raise self._refused("of which the checksum differs: it was damaged")
        try:
            facts = json.loads(text)
            if not isinstance(facts["dtypes"], dict) or not isinstance(facts["checksums"], dict):
                raise TypeError
        except (KeyError, TypeError, ValueError, RecursionError):
            raise self._refused("which does not say what its arrays are") from None
        return dict(facts)

    def _entry(self, name: str, stored: tuple[int, ...], kind: str, start: int) -> Entry:
        other = self.facts["dtypes"].get(name)
        if kind not in STORED_AS or not isinstance(other, str | None):
            raise self._refused(f"in which {name!r} is of dtype {kind}")
        if other is None:
            return Entry(stored, jnp.dtype(STORED_AS[kind]), start)
        try:
            dtype = jnp.dtype(other) if _OTHER.fullmatch(other) else None
        except TypeError:
            dtype = None
        if dtype is None:
            raise self._refused(f"in which {name!r} is of dtype {other!r}")
        if kind != "U8" or not stored or stored[-1] != dtype.itemsize or not dtype.itemsize:
            raise self._refused(f"in which {name!r} is not of dtype {other!r}")
        return Entry(stored[:-1], dtype, start)

    def _refused(self, what: str) -> TensorFileError:
        return TensorFileError(
            f"Expected a file that {self._writer} has written; got {str(self._path)!r}, {what}."
        )

    def read(self, name: str) -> np.ndarray:
        """An array of the file.

        Raises:
            ValueError: it was damaged.
        """
        entry = self.entries[name]
        self._file.seek(entry.start)
        data = self._file.read(math.prod(entry.shape) * entry.dtype.itemsize)
        if _checksum(name, entry.dtype, entry.shape, data) != self.facts["checksums"].get(name):
            raise self._refused(f"of which the checksum of {name!r} differs: it was damaged")
        return np.frombuffer(data, entry.dtype).reshape(entry.shape)

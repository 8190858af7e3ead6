"""The line of code of each operation of a program, by which it is found again."""

# A number of an equation changes with the shapes, with more layers and with each edit. The text of
# the line that wrote it, with those of the calls around, stays: in another run, on another machine,
# for another batch.

import collections
import functools
import hashlib
import linecache
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gainstage._base._jax import user_frames
from gainstage._base.warn import is_installed
from gainstage._programs import jaxprs
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage._programs.places import is_library, scope_of
from gainstage._programs.scopes import KEEP_FLOAT32

NUMBER = re.compile(r"_?\d+\b")  # of one of several equal layers


class CodeLine(NamedTuple):
    """The line of code of an operation."""

    name: str  # of the operation, such as `dot_general`
    line: str  # file and line of the user; of a library where there is no layer either
    text: str  # what stands there
    layer: str  # from `jax.named_scope`, as in Flax Linen, Haiku and Keras
    key: str  # the same in each program in which these lines do the same


def code_lines(program: AnyJaxpr) -> dict[Path, CodeLine]:
    """The lines of code of all operations that contain no changeable program, by path."""
    found, equals = dict[Path, CodeLine](), dict[tuple[str, ...], list[str]]()
    calls = dict[CodeLine, tuple[str, ...]]()
    for path, eqns in jaxprs.operations_within(program):
        name = jaxprs.name_of(eqns[-1])
        frames = [frame for eqn in reversed(eqns) for frame in _calls_of(eqn.source_info.traceback)]
        layers = [
            n for n in "/".join(map(scope_of, eqns)).split("/") if n not in ("", KEEP_FLOAT32)
        ]
        layer = _layer_text(layers)
        texts = [name, _layer_text(_numbered(layers, equals))]
        texts += [f"{frame.function} {frame.text}" for frame in frames]
        key = hashlib.blake2s("\n".join(texts).encode(), digest_size=8).hexdigest()
        own = [frame for frame in frames if not is_library(frame.file)] or frames[: not layer]
        line = CodeLine(name, "", own[0].text if own else "", layer, key)
        found[path] = line
        calls.setdefault(line, tuple(f"{frame.file_name}:{frame.number}" for frame in own))
    lines = _lines_with_callers(calls)
    return {path: line._replace(line=lines[line]) for path, line in found.items()}


def _lines_with_callers(calls: dict[CodeLine, tuple[str, ...]]) -> dict[CodeLine, str]:
    """The innermost line of the user's in each of some calls, and that of the call around it which
    tells it from the others, if it is the line of several."""
    counts = collections.Counter(
        (line.name, line.layer, own[:n])
        for line, own in calls.items()
        for n in range(1, 1 + len(own))
    )
    found = {}
    for line, own in calls.items():
        alone = (n for n in range(len(own)) if counts[line.name, line.layer, own[: n + 1]] == 1)
        around = own[next(alone, 0) :][:1]
        found[line] = " from ".join(dict.fromkeys((*own[:1], *around)))
    return found


class _Frame(NamedTuple):
    """A call in which an operation was written."""

    file: str
    file_name: str
    function: str
    number: int
    text: str  # the code of the line; its number where that is not known


def _calls_of(traceback: Any) -> tuple[_Frame, ...]:
    """The calls in which an equation was written, the innermost first, up to the next that JAX has
    traced. Those of this library are left out."""
    if traceback is None:
        return ()
    return tuple(
        _Frame(file, os.path.basename(file), function, number, _text(file, number))
        for file, function, number in _calls(traceback)
    )


def _calls(traceback: Any) -> list[tuple[str, str, int]]:
    each = ((f.file_name, f.function_name, f.start_line) for f in user_frames(traceback))
    return [call for call in each if not _is_ours(call[0])]


@functools.cache
def _is_ours(file: str) -> bool:
    """Whether a file is of this library or of Python."""
    return is_installed(file) and not re.search(r"[/\\](?:site|dist)-packages[/\\]", file)


def _text(file: str, number: int) -> str:
    return linecache.getline(file, number).strip() or str(number)


def _layer_text(layers: Sequence[str]) -> str:
    """The layer of an operation, without the numbers of the equal layers around it."""
    return "/".join([*(NUMBER.sub("", each) for each in layers[:-1]), *layers[-1:]])


def _numbered(layers: Sequence[str], equals: dict[tuple[str, ...], list[str]]) -> Sequence[str]:
    """The layers, the last with its number among its equals: Keras counts them over all models.

    Args:
        layers: the layers of an operation, the outermost first.
        equals: those so far, by the layers around and the name without its number.
    """
    if not layers:
        return ()
    *around, own = layers
    name = NUMBER.sub("", own)
    known = equals.setdefault((*around, name), [])
    if own not in known:
        known.append(own)
    return *around, f"{name}_{known.index(own)}"

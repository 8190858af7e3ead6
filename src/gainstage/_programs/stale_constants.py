"""What a compiled function reads from outside by name: constants of its program."""

import contextlib
import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gainstage._base.arrays import is_key, partition
from gainstage._base.warn import library_folders, warn
from gainstage._programs import jaxprs

CHANGES = 3  # calls with new values of a name, after which it is told
_LOOKS = 64  # calls between two looks for arrays that were replaced inside of an object
_NUMERIC = "biufV"  # of arrays of numpy: numbers, also in bfloat16
_NUMBERS = (bool, int, float)
_Part = tuple[Any, bool]  # an attribute, or a key of a dictionary
_STALE = (
    "`{names}` has changed, but {what} goes on with its first value: what it reads from outside "
    "is a constant of the compiled program. Make it an argument: {remedy}."
)


class Captured:
    """Sees that a name which a compiled function reads gets new values, which it does not see.

    It watches names of numbers, and those whose arrays are constants of the program. A value that
    was new when the function was compiled again is known to its program.

    Args:
        fn: what is compiled.
        what: how a warning names it.
        remedy: what to write instead.
    """

    def __init__(self, fn: Callable[..., Any], what: str, remedy: str):
        self._what, self._remedy, self._calls = what, remedy, 0
        self.traces = 0  # how often it was traced
        self._names = _names_of(fn)
        self.watched: list[_Name] | None = None  # None before the first call

    def begin(self, program: Callable[[], Any]) -> None:
        """Chooses what to watch, before the first call; `program` returns what is compiled."""
        self.watched = []
        known = [(name, _arrays_in(name.read())) for name in self._names]
        known = [row for row in known if row[1] or type(row[0].read()) in _NUMBERS]
        if not known:
            return
        compiled = program()
        calls_back = jaxprs.calls_back(compiled)  # its functions may read numbers in each step
        for name, arrays in known:
            found = {i: _constant_of(x, compiled.consts) for i, x in enumerate(arrays)}
            constants = {i: weakref.ref(x) for i, x in found.items() if x is not None}
            if constants or not (arrays or calls_back):
                name.begin(constants)
                self.watched.append(name)

    def traced(self) -> None:
        """Notes that the function is being traced, with the values of now."""
        self.traces += 1

    def look(self) -> None:
        """Looks at the names before a call, and warns of one that has changed in vain."""
        self._calls += 1
        looks_inside = self._calls % _LOOKS == 0
        stale = [x for x in self.watched or () if x.is_stale(self.traces, looks_inside)]
        if stale:
            self._names, self.watched = [], []
            stale = list({x.name: x for x in stale}.values())
            names, new = (", ".join(getattr(x, of) for x in stale) for of in ("name", "argument"))
            remedy = self._remedy.format(names=names, new=new)
            warn(_STALE.format(names=names, what=self._what, remedy=remedy))


class _Name:
    """A name that a function reads: `rate`, or one inside of an object, such as `self.rate`.

    Args:
        root: returns the object that the name begins with, None if it is gone.
        base: how the function names that object.
        path: the attributes and the keys that lead from it to what is read.
    """

    def __init__(self, root: Callable[[], Any], base: str, path: tuple[_Part, ...] = ()):
        self._root, self._base, self._path = root, base, path
        self.name = base + "".join(f"[{key!r}]" if by_key else f".{key}" for key, by_key in path)
        last = str(path[-1][0]) if path else base
        self.argument = last if last.isidentifier() else "value"  # its name as an argument

    def begin(self, constants: dict[int, weakref.ref[Any]]) -> None:
        """Notes the first value, of whose arrays these are constants of a program, by place."""
        self._last = _is(self.read())  # the value of the last call
        self._known = [self._last]  # those that the function was compiled for
        self._constants = constants
        self._traces: int | None = None  # when the last call began with a value that is not known
        self._changes = self._equal = 0

    def read(self) -> Any:
        """The value, None if there is none."""
        return functools.reduce(_part, self._path, self._root())

    def method(self) -> Any:
        """The value; a function of a class is the method of the object that it was read from."""
        value = self.read()
        if not (self._path and isinstance(value, types.FunctionType)):
            return value
        owner = functools.reduce(_part, self._path[:-1], self._root())
        return value if isinstance(owner, types.ModuleType) else types.MethodType(value, owner)

    def parts(self) -> set[object]:
        """The names, attributes and keys on the way to the value, each of which may be assigned."""
        return {self._base, *(key for key, _ in self._path)}

    def is_stale(self, traces: int, looks_inside: bool) -> bool:
        """Whether calls have got new values, without being compiled for them."""
        if self._traces is not None and traces > self._traces:  # compiled for the last value
            self._known.append(self._last)
        elif self._traces is not None:
            self._changes += 1
        value, self._traces = self.read(), None
        known = any(same(value) for same in self._known)
        if not (known or self._last(value)):
            self._traces = traces
        self._last = _is(value)
        replaced = looks_inside and known and bool(self._constants) and len(self._known) == 1
        return (replaced or self._changes >= CHANGES) and self._differs(value)

    def _differs(self, value: Any) -> bool:
        """Whether a value is for sure another one than the first. It does not wait for it."""
        if not self._constants:
            return True
        arrays = dict(enumerate(_arrays_in(value)))
        for i, constant in self._constants.items():
            old, new = constant(), arrays.get(i)
            if old is None or new is old or not (new is None or _is_here(new)):  # not known yet
                continue
            if new is None or not _is_here(old) or is_key(old) or np.shape(old) != np.shape(new):
                return True
            if self._equal < CHANGES:  # it may be made anew in each turn, of the same numbers
                self._equal += 1
                if not np.array_equal(np.asarray(old), np.asarray(new, old.dtype)):
                    return True
        return False


def _names_of(fn: Any) -> list[_Name]:
    """The names that a function reads from outside and does not assign, and those of the functions
    of its module, and of its object, that it calls."""
    todo, found, assigned, seen = [fn], list[_Name](), set[object](), set[int]()
    library = library_folders()
    while todo:
        fn = todo.pop()
        fn = inspect.unwrap(getattr(fn, "func", fn))
        fn, owner = getattr(fn, "__func__", fn), getattr(fn, "__self__", None)
        if not isinstance(fn, types.FunctionType) or id(fn) in seen:
            continue
        seen.add(id(fn))
        if fn.__code__.co_filename.startswith(library):
            continue
        names = list[_Name]()
        for kind, base, path in dict.fromkeys(_reads(fn.__code__)):
            if kind == "STORE":
                assigned.add(base)
            elif (root := _root(fn, owner, kind, base)) is not None:
                names.append(_Name(root, base, path))
        found += names
        called = [inspect.unwrap(value) for value in map(_Name.method, names) if callable(value)]
        todo += [f for f in called if getattr(f, "__globals__", None) is fn.__globals__]
    return [name for name in found if assigned.isdisjoint(name.parts())]


def _root(fn: types.FunctionType, owner: Any, kind: str, name: str) -> Callable[[], Any] | None:
    """What reads a name of a function from outside of it; None if it is its own."""
    code, function = fn.__code__, weakref.ref(fn)
    if kind == "GLOBAL":
        return lambda: getattr(function(), "__globals__", {}).get(name)
    if kind == "DEREF" and name in code.co_freevars:
        place = code.co_freevars.index(name)
        return lambda: _cell(function(), place)
    if owner is None or code.co_varnames[:1] != (name,):
        return None
    with contextlib.suppress(TypeError):  # no weak reference to it
        return weakref.ref(owner)
    return None


def _cell(function: Any, place: int) -> Any:
    """The variable of the functions around it that a function reads, None if there is none."""
    with contextlib.suppress(AttributeError, IndexError, ValueError):  # gone, or not assigned yet
        return function.__closure__[place].cell_contents
    return None


def _reads(code: types.CodeType) -> Iterator[tuple[str, Any, tuple[_Part, ...]]]:
    """What a function, and those inside of it, read: from where, the name, and what inside of it.
    `FAST` are its own variables; `STORE` is what they assign: a name, an attribute or a key."""
    read: list[tuple[str, Any]] = [(x.opname, x) for x in dis.get_instructions(code)]
    for i, (op, x) in enumerate(read):
        if op in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"):
            yield "STORE", x.argval, ()
        elif op == "STORE_SUBSCR" and read[i - 1][0].startswith("LOAD_CONST"):
            yield "STORE", read[i - 1][1].argval, ()
        elif op == "LOAD_GLOBAL" or op.startswith(("LOAD_DEREF", "LOAD_FAST")):
            name = x.argval[-1] if isinstance(x.argval, tuple) else x.argval
            yield op.split("_")[1], name, _path(read[i + 1 : i + 9])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from (read for read in _reads(constant) if read[0] != "FAST")


def _path(read: Sequence[tuple[str, Any]]) -> tuple[_Part, ...]:
    """The attributes and constant keys that these instructions read one inside of the other."""
    path = list[_Part]()
    while read and len(path) < 4:
        (op, x), then = read[0], read[1] if len(read) > 1 else ("", None)
        if op in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append((x.argval, False))
            read = read[1:]
        elif op.startswith("LOAD_CONST") and (
            then[0] == "BINARY_SUBSCR" or getattr(then[1], "argrepr", "") == "[]"
        ):
            path.append((x.argval, True))
            read = read[2:]
        else:
            break
    return tuple(path)


def _part(value: Any, part: _Part) -> Any:
    """An attribute of an object, or a value of a dictionary, None if it has none; runs no code."""
    key, by_key = part
    if by_key:
        return value.get(key) if type(value) is dict else None
    holders = [value, *type(value).__mro__]
    return next((vars(x)[key] for x in holders if key in getattr(x, "__dict__", ())), None)


def _is(value: Any) -> Callable[[Any], bool]:
    """A function that tells whether it gets this very value, or the same number."""
    if type(value) in _NUMBERS:
        return lambda x: type(x) in _NUMBERS and (x == value or x != x != value != value)
    try:
        reference = weakref.ref(value)
    except TypeError:  # such as a list
        number = id(value)
        return lambda x: id(x) == number
    return lambda x: reference() is x


def _arrays_in(value: Any) -> list[Any]:
    """The arrays in a value that is one, or a pytree or a model of them."""
    if isinstance(value, (types.FunctionType, types.ModuleType, type)):
        return []
    with contextlib.suppress(Exception):  # such as a dictionary whose keys cannot be sorted
        arrays = partition(value)[0]
        return [
            x for x in arrays if isinstance(x, jax.Array) or (x.ndim and x.dtype.kind in _NUMERIC)
        ]
    return []


def _constant_of(array: Any, constants: Sequence[Any]) -> Any:
    """The constant of a program that an array is, or a copy of if it is of numpy; else None."""
    if isinstance(array, jax.Array):
        return next((x for x in constants if array is x), None)
    of_host = [x for x in constants if isinstance(x, np.ndarray) and x.shape == array.shape]
    return next((x for x in of_host if np.array_equal(x, array.astype(x.dtype))), None)


def _is_here(array: Any) -> bool:
    """Whether an array can be read without waiting for it."""
    if not isinstance(array, jax.Array):
        return array is not None
    x: Any = array  # of which type checkers know no `is_ready`
    there = is_key(x) or (x.is_ready() and x.is_fully_addressable)
    return not x.is_deleted() and there

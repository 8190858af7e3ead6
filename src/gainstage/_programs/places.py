"""The place of an equation: its layer in the model, and its line in the user's files."""

# Not all frameworks name their layers. So an equation is named by the parameter that it uses, or by
# the last parameter used before it. An equation of the backward pass has the name of its forward
# equation.

import contextlib
import math
import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from gainstage._base._jax import JaxprEqn, user_frames
from gainstage._base.warn import is_installed
from gainstage._programs import jaxprs
from gainstage._programs.jaxprs import AnyJaxpr
from gainstage._programs.operations import Trait, names_with
from gainstage._programs.scopes import DIVIDED, KERNEL, MULTIPLIED, SELF_SCALED

Frames = tuple[tuple[str, int, int], ...]
# The names of a layer's parameters in Flax, Keras, Equinox, Haiku and torch.
OWN_NAMES = frozenset(
    ("kernel", "weight", "bias", "scale", "embedding", "embeddings", "gamma", "beta", "w", "b",
     "offset", "pos_embedding", "lora_a", "lora_b")
)  # fmt: skip
INDEXING = names_with(Trait.INDEX)  # whose results from a parameter count as data
WRAPPERS = re.compile(r"\b(?:jvp|transpose|vmap|jit|pjit|checkpoint|remat|linearize)\(([^()]*)\)")
ANONYMOUS = re.compile(
    rf"rematted_computation|checkpoint|remat|while|body|cond|closed_call|<lambda>|{KERNEL}|{SELF_SCALED}"
    rf"|{MULTIPLIED}|{DIVIDED}"
)


class Note(NamedTuple):
    """The facts about a value besides its numbers."""

    own: str = ""  # the parameter of which it is another form
    near: str = ""  # the last parameter that was used before it
    id: int | None = None  # the id of its result
    parts: "tuple[Note, ...]" = ()  # the notes of its parts, if it is a stack
    is_backward: bool = False  # whether it depends on the loss scale
    order: float = math.inf  # for a cotangent: when its forward equation was run
    is_data: bool = False  # whether it depends on the data, and is no constant or parameter
    tag: int = 0  # for a cotangent: log2 of its local scale
    # For a cotangent of a part under `locally_scaled`, or of a gradient inside of the loss: log2 of
    # the factor that it is multiplied by. None elsewhere.
    factor: float | None = None


class Place(NamedTuple):
    """The place of an equation."""

    near: str  # a parameter, or an argument if none has been used yet
    at: bool  # whether the equation uses it, or is after it
    scope: str  # from `jax.named_scope`, as in Flax Linen, Haiku and Keras
    line: str  # file and line of the user
    via: str  # the library function that the line calls

    def __str__(self) -> str:
        words = [self.line] if self.line else []
        if self.near:
            words.append(f"{'at' if self.at else 'after'} {self.near}")
        if self.scope:
            words.append(f"in {self.scope}")
        return ", ".join(words)


class Places:
    """Finds the places of equations, in the order in which they are run."""

    def __init__(self) -> None:
        # Maps the user's frames, with those of the calls around, to the forward equations of that
        # line: when they were run, and at which parameter.
        self._forward: dict[tuple[Frames, ...], list[tuple[int, str, bool]]] = defaultdict(list)
        self._calls: tuple[Frames, ...] = ()
        self._scopes: tuple[str, ...] = ()
        self._line = "", ""
        self._of_library: Frames | None = None  # of the call of a library's function around
        self._order: list[tuple[str, bool]] = []  # the parameter at each forward equation

    @property
    def scopes(self) -> str:
        """The scopes around the current equation, with the transformations around them."""
        return "/".join(self._scopes)

    def source(self, kind: str, name: str, own: bool) -> Note:
        """Returns the note of an argument or a constant of the program."""
        if own:
            return Note(own=name, near=name)
        return Note(near=name, is_data=kind == "argument")

    @contextlib.contextmanager
    def inside(self, eqn: JaxprEqn) -> Iterator[None]:
        """Enters an equation that may be a call: its inner equations have relative scopes, and
        often no line."""
        kept = self._calls, self._scopes, self._line, self._of_library
        if self._of_library is None:
            self._calls += (frames_of(eqn),)
            self._line = _user_line(_frames(eqn)) or self._line
            if any(map(is_of_a_library, jaxprs.inner(eqn))):
                self._of_library = self._calls[-1]
        else:
            self._calls += (self._of_library,)
        self._scopes += (str(eqn.source_info.name_stack),)
        try:
            yield
        finally:
            self._calls, self._scopes, self._line, self._of_library = kept

    def of(self, eqn: JaxprEqn, notes: Sequence[Note]) -> tuple[Place, Note]:
        """Returns the place of the current equation, and the note of its results."""
        parameters = sorted({note.own for note in notes if note.own})
        data = [note for note in notes if note.is_data or note.is_backward]
        takes = eqn.primitive.name in INDEXING
        order = min((note.order for note in notes if note.is_backward), default=None)
        if order is not None:
            order, near, at = self._behind(order)
            note = Note(near=near, is_backward=True, is_data=True, order=order)
        else:
            near, at = self._nearest(parameters, data)
            if parameters and not data and not takes:  # another form of a parameter
                only = parameters[0] if len(parameters) == 1 else ""
                note = Note(own=only, near=near, is_data=not only)
            else:
                note = Note(near=near, is_data=bool(data) or takes)
            self._order.append((near, at))
            for calls in _suffixes(self._calls):
                self._forward[calls].append((len(self._order), near, at))
        line, via = self._line
        return Place(near, at, _scope(self.scopes), line, via), note

    def _behind(self, order: float) -> tuple[float, str, bool]:
        """Finds the forward equation of a backward one: the last of its line that was run before
        those of its cotangents. If none is known, as for a custom_vjp, it is the last of all
        before them."""
        for calls in _suffixes(self._calls):
            known = self._forward.get(calls, ())
            place = bisect_right(known, order, key=itemgetter(0))
            if place:
                return known[place - 1]
        place = int(min(order, len(self._order) + 1)) - 2
        near = self._order[place][0] if place >= 0 else ""
        return order, near, False

    def _nearest(self, own: list[str], data: list[Note]) -> tuple[str, bool]:
        if own:
            return own[-1], True
        latest = sorted(data, key=lambda note: -1 if note.id is None else -note.id)
        behind = (note.near for note in latest if note.near)
        last = (near for near, _ in reversed(self._order) if near)
        return next(behind, None) or next(last, ""), False


def _suffixes(calls: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The calls around an equation, then without the outermost ones: a backward loop is another
    call."""
    return (calls[i:] for i in range(len(calls)) if calls[-1] or (i == 0 and any(calls)))


def layer_of(place: Place) -> str:
    """The layer of a place: the parameter without `kernel` or the like; its scope if it has a
    number instead of a name."""
    layer, _, last = place.near.rpartition("/")
    if last.isdigit() and place.scope:
        return place.scope
    return layer if layer and last in OWN_NAMES else place.near


def is_gradient_inside(scopes: str, is_constant: bool) -> bool:
    """Whether scopes are those of the backward pass of a gradient that is part of the loss, of an
    equation that does not depend on the loss scale.

    Args:
        scopes: all around the equation.
        is_constant: whether it depends neither on the parameters nor on the data. JAX moves it out
            of the loops around it, and of their scopes.
    """
    is_recomputed = "rematted_computation" in scopes
    begins = scopes.startswith("transpose(")  # as the backward pass of the whole loss does
    return "transpose(" in scopes and not is_recomputed and (is_constant or not begins)


def frames_of(eqn: JaxprEqn) -> Frames:
    """The files, lines and columns of the calls that an equation comes from."""
    return tuple((f.file_name, f.start_line, f.start_column) for f in _frames(eqn))


def line_of(eqn: JaxprEqn) -> str:
    """The user's file and line of an equation."""
    found = _user_line(_frames(eqn))
    return found[0] if found else ""


def scope_of(eqn: JaxprEqn) -> str:
    """The names of the layers around an equation, in its own program."""
    return _scope(str(eqn.source_info.name_stack))


def _frames(eqn: JaxprEqn) -> list[Any]:
    return list(user_frames(eqn.source_info.traceback))


def _user_line(frames: list[Any]) -> tuple[str, str] | None:
    """The user's innermost line, and the library function that it calls."""
    own = next((f for f in frames if not is_library(f.file_name)), None)
    if own is None:
        return None
    called = "" if frames[0] is own else frames[0].function_name.rpartition(".")[2]
    via = "" if called.startswith(("<", "_")) else called
    return f"{os.path.basename(own.file_name)}:{own.start_line}", via


def is_library(file: str) -> bool:
    """Whether a file of a traceback is installed, instead of the user's own."""
    return is_installed(file) or file.startswith("<")


def is_of_a_library(program: AnyJaxpr) -> bool:
    """Whether a program is that of a function of a library, such as `jnp.clip`: it may have been
    traced for another line of the user."""
    about = getattr(jaxprs.open_jaxpr(program), "debug_info", None)
    place = str(getattr(about, "func_src_info", "")).partition(" at ")[2]
    return is_library(place)


def _scope(stack: str) -> str:
    """The names in a stack of scopes, without the transformations around them."""
    before = None
    while before != stack:
        before, stack = stack, WRAPPERS.sub(r"\1", stack)
    names = [n for n in stack.split("/") if n and not ANONYMOUS.fullmatch(n)]
    names = [n for n in names if "->" not in n and "(" not in n]
    return "/".join(names)

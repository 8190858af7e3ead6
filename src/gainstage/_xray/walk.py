"""Runs a program equation by equation, with a float32 reference of every value."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn, ShapedArray
from gainstage._programs import jaxprs
from gainstage._programs.in_dtype import HALF, down, in_dtype, is_half, up
from gainstage._programs.jaxprs import CALLBACKS, Path
from gainstage._programs.places import Note, Place, Places, is_gradient_inside, layer_of
from gainstage._programs.scopes import DIVIDED, MULTIPLIED, SELF_SCALED
from gainstage._xray.numbers import Numbers, has_floats, largest, numbers_of, relative_error
from gainstage._xray.program import Program

FACTOR_ROUNDS = 1e-3  # by which log2 of a factor and of one over it may differ


class Value(NamedTuple):
    """An array as the program computes it, and its float32 reference."""

    x: Any  # in float32 if `Changes.islands` keeps it so
    ref: Any  # the same object if nothing was rounded; None if no reference is kept
    note: Note


class Result(NamedTuple):
    """The result of an equation, or an argument or constant of the program."""

    id: int
    path: tuple[int, ...]  # the indices of the equation in the program and its inner programs
    turns: tuple[int, ...]  # the iterations of the loops around it
    op: str
    place: Place
    dtype: np.dtype
    shape: tuple[int, ...]
    is_backward: bool
    operands: tuple[int, ...]  # the ids of its operands
    numbers: Numbers
    ref: Numbers  # of the float32 reference
    error: float  # of all elements, relative to the reference
    is_born: bool  # not finite, though all operands are
    derivative_of: str = ""  # the operation in the user's line, if it is another one
    factor: float | None = None  # that of its note

    @property
    def is_half(self) -> bool:
        """Whether its dtype in the program has less than 32 bits."""
        return self.dtype in HALF

    @property
    def overflows(self) -> bool:
        """Whether the float32 reference is finite, but beyond that dtype."""
        return self.is_half and not self.ref.bad and self.ref.max > largest(self.dtype) * 0.999

    @property
    def flushed(self) -> int:
        """The number of elements that are 0, but not in float32."""
        return max(self.numbers.zero - self.ref.zero, 0) if self.is_half else 0


class Changes(NamedTuple):
    """Changes to a program that is run again."""

    scale: float = 1.0
    islands: frozenset[tuple[int, ...]] = frozenset()  # paths of equations that stay in float32
    local: Mapping[str, int] = MappingProxyType({})  # layer: log2 of its own scale


class Ran(NamedTuple):
    """The outcome of a run of a program."""

    loss: jax.Array
    gradients: list[Any]
    references: list[Any]  # of the loss and the gradients, in float32
    origins: list[int | None]  # the ids of their results
    results: list[Result]

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite."""
        return all(_holds_finite(x) for x in (self.loss, *self.gradients))


def walk_through(
    program: Program,
    changes: Changes,
    watch: bool = True,
    tick: Callable[[], Any] = lambda: None,
) -> Ran:
    """Runs a program equation by equation.

    Args:
        program: the result of `program_of`.
        changes: the changes to make.
        watch: whether to keep a reference and the statistics of every result. If False, only loss
            and gradients are returned.
        tick: called after each equation.
    """
    walk = _Walk(changes, watch, tick)
    scale = jnp.float32(changes.scale)
    values = [Value(scale, scale if watch else None, Note(is_backward=True, is_data=False))]
    for x, name, own in zip(program.arguments, program.names, program.is_parameter, strict=True):
        values.append(walk.source("argument", x, name, own))
    outs = walk.run(program.jaxpr, values)
    found = [walk.unscaled(v) for v in outs]
    return Ran(
        found[0], found[1:], [v.ref for v in outs] if watch else [], [v.note.id for v in outs],
        walk.results,
    )  # fmt: skip


class _Walk:
    """The state of a run: the results so far, and the current place in the program."""

    def __init__(self, changes: Changes, watch: bool, tick: Callable[[], Any]):
        self.results: list[Result] = []
        self._changes, self._watch, self._tick = changes, watch, tick
        self._places = Places()

    def source(self, kind: str, x: jax.Array, name: str, own: bool) -> Value:
        """Wraps an argument or a constant of the program, with a result for it."""
        note = self._places.source(kind, name, own)
        if not self._watch:
            return Value(x, None, note)
        if has_floats(x):
            numbers = numbers_of(x)
            place = Place(name, True, "", "", "")
            note = note._replace(id=len(self.results))
            result = Result(
                len(self.results), (), (), kind, place, x.dtype, x.shape, False, (), numbers,
                numbers, 0.0, False,
            )  # fmt: skip
            self.results.append(result)
        ref = x.astype(jnp.float32) if is_half(x) else x
        return Value(x, ref, note)

    def unscaled(self, value: Value) -> jax.Array:
        """An output of the program, divided by the local scale of its layer."""
        return value.x if not value.note.tag else value.x * 2.0**-value.note.tag

    def run(
        self,
        program: jaxprs.AnyJaxpr,
        values: Sequence[Value],
        path: tuple[int, ...] = (),
        turns: tuple[int, ...] = (),
    ) -> list[Value]:
        """Runs a jaxpr on these arguments."""
        return jaxprs.interpret(
            program,
            values,
            functools.partial(self._equation, turns=turns),
            lambda array: self.source("constant", array, "", False),
            lambda number: Value(number, number, Note()),
            path,
        )

    def _equation(self, eqn: JaxprEqn, values: list[Value], path: Path, turns: Path) -> list[Value]:
        name = eqn.primitive.name
        with self._places.inside(eqn):
            if name == "scan":
                return self._scan(eqn.params, values, path, turns)
            if name == "while":
                return self._while(eqn.params, values, path, turns)
            if name == "cond":
                chosen = int(values[0].x)
                return self.run(eqn.params["branches"][chosen], values[1:], (*path, chosen), turns)
            inner = jaxprs.called(eqn)
            if inner is not None:
                return self.run(inner, values, path, turns)
            self._tick()
            return self._primitive(eqn, values, path, turns)

    def _primitive(
        self, eqn: JaxprEqn, values: list[Value], path: Path, turns: Path
    ) -> list[Value]:
        name = eqn.primitive.name
        if name.startswith("debug_"):
            return [Value(None, None, Note()) for _ in eqn.outvars]
        place, note = self._places.of(eqn, [v.note for v in values])
        note = note._replace(factor=self._factor(eqn, values, note.is_backward))
        tag = self._changes.local.get(layer_of(place), 0) if note.is_backward else 0
        note = note._replace(tag=tag)
        island = path in self._changes.islands and name not in CALLBACKS
        xs_in = [_scaled(v, tag) for v in values]
        if island:
            xs = in_dtype(eqn, [up(x, v) for x, v in zip(xs_in, eqn.invars, strict=True)])
        else:
            downs = [down(x, v) for x, v in zip(xs_in, eqn.invars, strict=True)]
            xs = jaxprs.bind(eqn, downs)
        if not self._watch:
            return [Value(x, None, note) for x in xs]
        half = any(is_half(v.aval) for v in (*eqn.invars, *eqn.outvars))
        if not half and all(v.x is v.ref for v in values):
            refs = xs
        elif name in CALLBACKS or name == "bitcast_convert_type":
            refs = [up(x, v) for x, v in zip(xs, eqn.outvars, strict=True)]
        else:
            ups = [up(v.ref, var) for v, var in zip(values, eqn.invars, strict=True)]
            refs = in_dtype(eqn, ups, is_exact=True)
        outs = []
        for var, x, ref in zip(eqn.outvars, xs, refs, strict=True):
            aval = jaxprs.array(var)
            if has_floats(aval):
                value = Value(x, ref, note)
                result = self._result(eqn, values, path, turns, place, value, aval)
                self.results.append(result)
                outs.append(Value(x, ref, note._replace(id=result.id)))
            else:
                outs.append(Value(x, ref, note))
        return outs

    def _result(
        self, eqn: JaxprEqn, values: list[Value], path: Path, turns: Path, place: Place,
        value: Value, aval: ShapedArray,
    ) -> Result:  # fmt: skip
        x, ref, note = value
        numbers = numbers_of(x)
        same = x is ref
        reference = numbers if same else numbers_of(ref)
        error = 0.0 if same else relative_error(x, ref, reference)
        is_born = bool(numbers.bad) and not any(self._is_bad(v) for v in values)
        operands = tuple(v.note.id for v in values if v.note.id is not None)
        return Result(
            id=len(self.results), path=path, turns=turns, op=eqn.primitive.name, place=place,
            dtype=aval.dtype, shape=aval.shape, is_backward=note.is_backward, operands=operands,
            numbers=numbers, ref=reference, error=error, is_born=is_born,
            derivative_of=self._derivative_of(eqn, values), factor=note.factor,
        )  # fmt: skip

    def _factor(self, eqn: JaxprEqn, values: list[Value], is_backward: bool) -> float | None:
        """Finds the factor of a result: `locally_scaled` multiplies by it and divides again. A
        gradient inside of the loss starts with none, which is a factor of 1."""
        notes = [v.note for v in values]
        known = [n.factor for n in notes if n.factor is not None and n.is_backward >= is_backward]
        factor, scopes = max(known, key=abs, default=None), self._places.scopes
        name, multiplies, divides = eqn.primitive.name, MULTIPLIED in scopes, DIVIDED in scopes
        if name == "mul" and (multiplies or (divides and factor)) and not notes[1].is_backward:
            with np.errstate(divide="ignore"):
                found = (factor or 0.0) + float(np.log2(np.max(np.asarray(values[1].x))))
            return found if multiplies or abs(found) > FACTOR_ROUNDS else None
        if factor or (factor is not None and name == "convert_element_type"):
            return factor
        if is_backward or SELF_SCALED in scopes:
            return None
        is_constant = not any(n.is_data or n.own for n in notes)
        return 0.0 if is_gradient_inside(scopes, is_constant) else None

    def _derivative_of(self, eqn: JaxprEqn, values: list[Value]) -> str:
        """Recognises the derivative of a square root: a number divided by the root."""
        if eqn.primitive.name != "div":
            return ""
        above, below = (value.note for value in values)
        is_root = below.id is not None and self.results[below.id].op == "sqrt"
        return "sqrt" if is_root and not above.is_data and not above.own else ""

    def _is_bad(self, value: Value) -> bool:
        if value.x is None or not hasattr(value.x, "dtype") or not has_floats(value.x):
            return isinstance(value.x, float) and not np.isfinite(value.x)
        known = value.note.id
        if known is not None and not self.results[known].numbers.bad:
            return False
        return not _holds_finite(value.x)

    def _scan(
        self, params: Mapping[str, Any], values: list[Value], path: Path, turns: Path
    ) -> list[Value]:
        consts, carries = jaxprs.scan_counts(params, len(values))
        fixed, carry = values[:consts], values[consts : consts + carries]
        xs, length = values[consts + carries :], params["length"]
        rows: list[list[Value]] = []
        for i in reversed(range(length)) if params["reverse"] else range(length):
            row = [self._taken(value, i) for value in xs]
            outs = self.run(params["jaxpr"], [*fixed, *carry, *row], path, (*turns, i))
            carry = outs[:carries]
            rows.append(outs[carries:])
        if params["reverse"]:
            rows.reverse()
        if not rows:  # a loop without iterations
            avals = [jaxprs.array(v) for v in jaxprs.open_jaxpr(params["jaxpr"]).outvars[carries:]]
            empty = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in avals]
            return [
                *carry,
                *(Value(x, up(x, None) if self._watch else None, Note()) for x in empty),
            ]
        return [*carry, *(self._stacked(column) for column in zip(*rows, strict=True))]

    def _taken(self, value: Value, i: int) -> Value:
        if not hasattr(value.x, "dtype"):
            return value
        x = value.x[i]
        ref = x if value.ref is value.x else None if value.ref is None else value.ref[i]
        return Value(x, ref, value.note.parts[i] if value.note.parts else value.note)

    def _stacked(self, column: Sequence[Value]) -> Value:
        x = jnp.stack([value.x for value in column])
        parts = tuple(value.note for value in column)
        note = parts[-1]._replace(parts=parts)
        if not self._watch:
            return Value(x, None, note)
        same = all(value.x is value.ref for value in column)
        ref = x if same else jnp.stack([value.ref for value in column])
        if any(part.id is None for part in parts):
            return Value(x, ref, note)
        each = [self.results[part.id] for part in parts if part.id is not None]
        whole = each[-1]._replace(
            id=len(self.results), op="stack", operands=tuple(r.id for r in each), is_born=False,
            numbers=_joint_numbers([r.numbers for r in each]),
            ref=_joint_numbers([r.ref for r in each]),
            error=max(r.error for r in each), shape=x.shape,
        )  # fmt: skip
        self.results.append(whole)
        return Value(x, ref, note._replace(id=whole.id))

    def _while(
        self, params: Mapping[str, Any], values: list[Value], path: Path, turns: Path
    ) -> list[Value]:
        tests, bodies = params["cond_nconsts"], params["body_nconsts"]
        test, body = values[:tests], values[tests : tests + bodies]
        carry, turn = values[tests + bodies :], 0
        while True:
            (goes_on,) = self.run(params["cond_jaxpr"], [*test, *carry], (*path, 0), (*turns, turn))
            if not bool(goes_on.x):
                return carry
            carry = self.run(params["body_jaxpr"], [*body, *carry], (*path, 1), (*turns, turn))
            turn += 1


def _scaled(value: Value, tag: int) -> ArrayLike:
    """A cotangent, rescaled to the local scale of the layer that uses it."""
    if not value.note.is_backward or tag == value.note.tag or not has_floats(value.x):
        return value.x
    factor = jnp.float32(2.0 ** (tag - value.note.tag))
    return (value.x * factor).astype(value.x.dtype)


def _joint_numbers(each: Sequence[Numbers]) -> Numbers:
    count, nan, inf, zero = (sum(column) for column in list(zip(*each, strict=True))[:4])
    squares = sum(n.rms**2 * n.size for n in each)
    return Numbers(
        count, nan, inf, zero, max(n.max for n in each), (squares / max(count, 1)) ** 0.5
    )


def _holds_finite(x: ArrayLike) -> bool:
    a = np.asarray(jax.device_get(x))
    a = a if a.dtype.kind in "fc" and a.dtype.itemsize >= 4 else a.astype(np.float32)
    return bool(np.isfinite(a).all())

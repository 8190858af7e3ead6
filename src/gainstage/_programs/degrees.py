"""Which power of the loss scale each value of a program has, and what was done to it on its way.

A value that a loss scale has multiplied has degree 1 in it, one that is divided again degree 0. The
library marks some values of a program by `jax.ad_checkpoint.checkpoint_name`, which compiles to
nothing; what is known of them is what `marks_of` returns. What is not known says nothing.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from gainstage._base._jax import JaxprEqn, Tracer, Var
from gainstage._base._jax import Literal as Written
from gainstage._programs import jaxprs
from gainstage._programs.jaxprs import AnyJaxpr
from gainstage._programs.operations import DOES, PRODUCTS, Does
from gainstage._programs.places import is_of_a_library, line_of

PREFIX = "gainstage:"  # of the names of marks
THROWN_AWAY = "lost"  # the mark of a result that may be a loss scale before an update
OWN = "own"  # the unit of a loss that scales itself, by no state
NO_SCALE = "unscaled"  # that of a loss that needs no scale, and its mark

Unit: TypeAlias = Any  # a loss scale: where it comes from
Powers: TypeAlias = tuple[tuple[Unit, int], ...]
# The powers of the loss scales; "any" of 0, inf and NaN; None if they are not known.
Degree: TypeAlias = Powers | Literal["any"] | None
FREE: Literal["any"] = "any"
ONE: Powers = ()


_D = Does
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
# What keeps a number finite, and how a user calls it.
BOUNDING = {"clamp": "jax.lax.clamp", "sign": "jnp.sign", "tanh": "jnp.tanh", "erf": "jax.lax.erf",
           "logistic": "jax.nn.sigmoid", "atan": "jnp.arctan"}  # fmt: skip
# After which a number that is written out is one still.
_NUMERIC = {"broadcast_in_dim", "convert_element_type", "reshape", "copy", "name", "stop_gradient"}
# Of whose result an element is an element of the operands: what was done to these stays.
_MOVES = {n for n, does in DOES.items() if does in (_D.KEEP, _D.SUM)} - {
    "reduce_sum", "reduce_max", "reduce_min", "cumsum",
}  # fmt: skip
_ADDS = {"reduce_sum", "cumsum", "reduce_window_sum"}  # numbers of one operand
_SUMS_OF_DEVICES = {"psum", "psum2", "psum_invariant"}
TO_FLOAT16, CLIP, WHERE = "float16", "jnp.clip", "jnp.where(jnp.isfinite(...), ...)"
WITHOUT_SCALE = "a gradient without the scale"  # is added to one that had it
ROUNDS = {"round": "jnp.round", "floor": "jnp.floor", "ceil": "jnp.ceil"}


# ── what is known of a value ─────────────────────────────────────────────────────────────────────


class Flaw(NamedTuple):
    """Something that was done to a gradient: afterwards, or in the backward pass itself, which has
    to be linear in it."""

    name: str
    eqn: JaxprEqn
    is_inside: bool  # of the backward pass


class Summed(NamedTuple):
    """What was done to gradients that JAX has summed over devices."""

    eqn: JaxprEqn  # that of the mark
    over: str  # the axes, as they are written in code
    times: float = 1.0  # what they were multiplied by since
    copies: frozenset[str] = frozenset()  # the axes along which they are equal, and may be summed


class Seen(NamedTuple):
    """What is known of a value."""

    degree: Degree = ONE
    through: frozenset[Unit] = frozenset()  # the loss scales that have multiplied it on its way
    divided: bool = False  # by one of them
    derived: bool = False  # a backward pass of this program has made it
    half: bool = False  # float16 products have made it
    number: float | None = None  # what is written out
    spread: bool = False  # a scalar, or one that is broadcast
    asks: bool = False  # a bool that asks what is finite
    if_finite: bool = False  # one that is True only if something is finite
    bounds: frozenset[str] = frozenset()  # how numbers limit it
    origin: Any = None  # the argument, the constant or the result that it is
    still: bool = False  # a loop does not change it
    is_bare: bool = False  # a backward pass in float16 has made it, without a loss scale
    is_new: bool = False  # it is the loss scale after an update
    chosen: JaxprEqn | None = None  # what has chosen between that and another one
    flaws: tuple[Flaw, ...] = ()
    last: JaxprEqn | None = None  # the equation that has changed the degree last
    summed: Summed | None = None  # it is such gradients


def degree_of_product(a: Degree, b: Degree, sign: int = 1) -> Degree:
    """The degree of a product, or of a quotient."""
    if a == FREE or b == FREE:
        return FREE
    if a is None or b is None:
        return None
    powers: dict[Unit, int] = dict(a)
    for unit, n in b:
        powers[unit] = powers.get(unit, 0) + sign * n
    return tuple(sorted(((unit, n) for unit, n in powers.items() if n), key=repr))


def scale_power(degree: Degree, unit: Unit) -> int:
    """The power of one loss scale in a degree; 0 if it is not known."""
    return 0 if degree in (FREE, None) else dict(degree).get(unit, 0)


def _raised(degree: Degree, n: Any) -> Degree:
    if degree in (FREE, None):
        return degree
    powers = [(unit, p * n) for unit, p in degree]
    is_whole = all(float(p).is_integer() for _, p in powers)
    return tuple((unit, int(p)) for unit, p in powers) if is_whole else None


def _common(degrees: Iterable[Degree]) -> Degree:
    """The degree of a sum: that of all terms, if they have the same."""
    known = [degree for degree in degrees if degree != FREE]
    if not known:
        return FREE
    return known[0] if all(degree == known[0] for degree in known) else None


def _joined(values: Sequence[Seen]) -> Seen:
    """What is known of a value that is one of several."""
    first, *others = values
    for x in others:
        if x != first:
            first = Seen(
                degree=_common([first.degree, x.degree]),
                through=first.through | x.through,
                divided=first.divided or x.divided,
                derived=first.derived or x.derived,
                half=first.half or x.half,
                number=first.number if first.number == x.number else None,
                spread=first.spread and x.spread,
                asks=first.asks or x.asks,
                bounds=first.bounds | x.bounds,
                origin=first.origin if first.origin == x.origin else None,
                still=first.still and x.still,
                is_bare=first.is_bare or x.is_bare,
                is_new=first.is_new or x.is_new,
                chosen=first.chosen or x.chosen,
                flaws=_merged(x.flaws, first.flaws),
                last=first.last or x.last,
                summed=first.summed if first.summed == x.summed else None,
            )
    return first


def _merged(*each: Iterable[Flaw]) -> tuple[Flaw, ...]:
    """Flaws, each name once."""
    return tuple({flaw.name: flaw for flaws in each for flaw in flaws}.values())


# ── an equation ──────────────────────────────────────────────────────────────────────────────────


def _degree(eqn: JaxprEqn, xs: Sequence[Seen]) -> Degree:
    name, does = eqn.primitive.name, DOES.get(eqn.primitive.name)
    degrees: list[Degree] = [x.degree for x in xs]
    if does is _D.FORGET or not degrees:
        return ONE
    if does is _D.KEEP:
        return degrees[0]
    if name == "triangular_solve":  # of a matrix, and what it divides
        return degree_of_product(degrees[1], degrees[0], -1)
    if does in (_D.TIMES, _D.DIVIDE):
        return degree_of_product(degrees[0], degrees[1], 1 if does is _D.TIMES else -1)
    if does is _D.POWER:
        n = xs[1].number if name == "pow" else eqn.params.get("y", _POWERS.get(name))
        return None if n is None and degrees[0] not in (ONE, FREE) else _raised(degrees[0], n or 0)
    if name == "select_n":
        return _common(degrees[1:])
    if name in ("dynamic_update_slice", "pad"):
        return _common(degrees[:2])
    if name.startswith("scatter"):
        return _common([degrees[0], degrees[2]])
    if does is _D.SUM:
        return _common(degrees)
    return ONE if all(degree in (ONE, FREE) for degree in degrees) else None


def _result(eqn: JaxprEqn, xs: Sequence[Seen], variable: Var, is_inside: bool) -> Seen:
    """What is known of a result of an equation without a program inside.

    Args:
        eqn: the equation.
        xs: what is known of its operands.
        variable: the result.
        is_inside: whether it is part of a backward pass.
    """
    name, does = eqn.primitive.name, DOES.get(eqn.primitive.name)
    if name == "select_n" and not getattr(variable.aval, "shape", ()) and not xs[0].asks:
        others = [x for x in xs[1:] if x.number != 1]
        if len(others) == 1 < len(xs) - 1:  # the loss scale of a state is its rule's, or 1
            return others[0]
    degree = _degree(eqn, xs)
    powers = [n for x in xs if x.degree not in (FREE, None) for _, n in x.degree]
    units = {u for x in xs if x.degree not in (FREE, None) for u, n in x.degree if n > 0}
    number = xs[0].number if name in _NUMERIC and xs else None
    if name == "neg" and xs[0].number is not None:
        number = -xs[0].number
    if name == "mul" and 0 in (x.number for x in xs):
        number = 0.0
    falls = name == "div" and xs[1].degree not in (FREE, None, ONE)
    falls |= name == "mul" and any(n < 0 for n in powers)
    bounds = frozenset[str]()
    if name in ("max", "min"):
        bounds = _bounds(eqn, xs)
    elif name in _MOVES and xs:
        bounds = xs[0].bounds
    # By a scale itself: what a scale has multiplied keeps the place where that was.
    changes = does in (_D.TIMES, _D.DIVIDE) and any(
        x.degree not in (ONE, FREE, None) and not x.through for x in xs
    )
    forgets = does is _D.FORGET and name not in BOUNDING  # such as a comparison
    kept = _kept(eqn, xs)
    known = {flaw.name for flaw in kept}
    names = _not_linear(eqn, xs, degree) if is_inside else _new_flaws(eqn, xs, degree)
    new = [Flaw(name, eqn, is_inside) for name in names if name not in known]
    return Seen(
        degree=degree,
        through=frozenset() if forgets else frozenset().union(units, *(x.through for x in xs)),
        divided=any(x.divided for x in xs) or falls,
        derived=any(x.derived for x in xs) or is_inside,
        half=any(x.half for x in xs) or _is_half_product(eqn),
        number=number,
        spread=not getattr(variable.aval, "shape", ())
        or (name == "broadcast_in_dim" and xs[0].spread),
        asks=_asks(eqn, xs),
        if_finite=_if_finite(eqn, xs),
        bounds=bounds,
        origin=xs[0].origin if name in ("convert_element_type", "copy") else ("made", id(variable)),
        still=bool(xs) and all(x.still or x.number is not None for x in xs),
        is_bare=_is_bare(eqn, xs, is_inside),
        is_new=name in _MOVES and any(x.is_new for x in xs),
        chosen=_choice(eqn, xs),
        flaws=_merged(kept, new),
        last=eqn if changes else next((x.last for x in xs if x.last is not None), None),
        summed=_still_summed(eqn, xs),
    )


def _still_summed(eqn: JaxprEqn, xs: Sequence[Seen]) -> Summed | None:
    """What is known of gradients that JAX has summed over devices, if a result is still that: in
    another form, multiplied by a number, or their own sum or mean over devices, of equal ones."""
    name, each = eqn.primitive.name, [x.summed for x in xs if x.summed is not None]
    if len(each) != 1:
        return None
    (found,) = each
    if name in _NUMERIC:
        return found
    if name == "pvary":
        return found._replace(copies=found.copies.union(eqn.params["axes"]))
    if name in _SUMS_OF_DEVICES and len(xs) == 1 and found.copies.issuperset(eqn.params["axes"]):
        sizes = jaxprs.array(eqn.invars[0]).sharding.mesh.shape
        count = math.prod(sizes[axis] for axis in eqn.params["axes"])
        return found._replace(times=found.times * count)
    number = xs[1].number if xs[0].summed else xs[0].number
    if number and (name == "mul" or (name == "div" and xs[0].summed)):
        return found._replace(times=found.times * (number if name == "mul" else 1 / number))
    return None


def _is_bare(eqn: JaxprEqn, xs: Sequence[Seen], is_inside: bool) -> bool:
    """Whether a backward pass in float16 without a loss scale has made a result, or most of it."""
    if eqn.primitive.name in ("mul", "div"):  # a weight may have had the scale
        return any(x.is_bare and not x.spread for x in xs)
    if eqn.primitive.name in _MOVES and not is_inside:
        return any(x.is_bare for x in xs)
    is_half = any(x.half for x in xs) or _is_half_product(eqn)
    return is_inside and is_half and not any(x.through for x in xs)


def _choice(eqn: JaxprEqn, xs: Sequence[Seen]) -> JaxprEqn | None:
    """What has chosen between the loss scale after an update and another one: by something else
    than what is finite, or the other one where something is not."""
    of = xs[1:] if eqn.primitive.name == "select_n" else xs
    is_new = [x.is_new for x in of]
    if eqn.primitive.name == "select_n" and any(is_new) and not all(is_new):
        is_lost = xs[0].if_finite and is_new == [False, True]
        if is_lost or not xs[0].asks:
            return eqn
    return next((x.chosen for x in of if x.chosen is not None), None)


def _is_backward(eqn: JaxprEqn) -> bool:
    return "transpose(" in str(eqn.source_info.name_stack)


def _is_half_product(eqn: JaxprEqn) -> bool:
    dtypes = (getattr(v.aval, "dtype", None) for v in eqn.invars)
    return eqn.primitive.name in PRODUCTS and np.float16 in dtypes


def _rises(x: Seen) -> bool:
    """Whether a value grows with a loss scale."""
    return x.degree not in (FREE, None) and any(n > 0 for _, n in x.degree)


def _kept(eqn: JaxprEqn, xs: Sequence[Seen]) -> list[Flaw]:
    """The flaws of the operands that the result has too: those of gradients, not of factors, and
    not of what another scaled backward pass uses."""
    name = eqn.primitive.name
    if name in _MOVES or name in BOUNDING:
        return [flaw for x in (xs[1:] if name == "select_n" else xs) for flaw in x.flaws]
    if name in _ADDS or name in PRODUCTS:  # to a gradient of a parameter, or of a layer before
        inside = [flaw for x in xs for flaw in x.flaws if flaw.is_inside]
        rises = sum(map(_rises, xs))
        return inside if name in _ADDS or rises < 2 else []
    if name not in ("mul", "div") or 0 in (x.number for x in xs):  # of a gradient that is 0
        return []
    kept = list[Flaw]()
    for x, other, is_divisor in ((xs[0], xs[1], False), (xs[1], xs[0], name == "div")):
        is_factor = x.spread and not other.spread
        if not (is_factor or is_divisor or (name == "mul" and _rises(other))):
            kept += x.flaws
    return kept


def _new_flaws(eqn: JaxprEqn, xs: Sequence[Seen], degree: Degree) -> list[str]:
    """What an equation does to gradients that have come out of a scaled backward pass."""
    name = eqn.primitive.name
    of = xs[1:] if name == "select_n" else xs
    if not any(x.through and x.number is None for x in of):
        return []
    if name in BOUNDING and (name != "clamp" or xs[1].through):
        return [BOUNDING[name]]
    if name == "select_n" and xs[0].asks and any(map(_is_finite, of)):
        return [WHERE]
    if name in ("max", "min") and _bounds(eqn, xs) >= {"max", "min"}:
        return [CLIP]
    if name in ("add", "add_any", "sub") and degree == ONE:
        are_bare = [x.is_bare for x in xs]
        return [WITHOUT_SCALE] if any(are_bare) and not all(are_bare) else []
    is_narrow = name == "convert_element_type" and eqn.params["new_dtype"] == np.float16
    return [TO_FLOAT16] if is_narrow and degree == ONE else []


def _not_linear(eqn: JaxprEqn, xs: Sequence[Seen], degree: Degree) -> list[str]:
    """What an equation of a backward pass does to cotangents that is not in proportion to them."""
    name, does = eqn.primitive.name, DOES.get(eqn.primitive.name)
    scaled = [x for x in xs if x.degree not in (FREE, None) and any(n > 0 for _, n in x.degree)]
    if not scaled:
        return []
    if name in BOUNDING or name in ROUNDS:
        return [BOUNDING.get(name, "") or ROUNDS[name]]
    # Such as a norm with a small number added to it, of which no degree is known.
    if name == "div" and (xs[1] in scaled or any(flaw.is_inside for flaw in xs[1].flaws)):
        return ["A division by what has the loss scale in it too"]
    if does is _D.TIMES and len(scaled) > 1 and all(x.derived for x in scaled):
        return ["A product of two numbers with the loss scale in them"]
    if does is _D.SUM and degree is None and not any(x.degree is None for x in xs):
        return ["A sum with numbers that do not have the loss scale in them"]
    return []


def _is_finite(x: Seen) -> bool:
    return x.number is not None and bool(np.isfinite(x.number))


def _bounds(eqn: JaxprEqn, xs: Sequence[Seen]) -> frozenset[str]:
    """How numbers limit the result of `max` and `min`."""
    before = frozenset[str]().union(*(x.bounds for x in xs))
    return before | {eqn.primitive.name} if any(map(_is_finite, xs)) else before


def _asks(eqn: JaxprEqn, xs: Sequence[Seen]) -> bool:
    """Whether a result tells what is finite."""
    name = eqn.primitive.name
    if name in ("eq", "ne", "lt", "gt", "le", "ge"):
        return any(x.number is not None and np.isinf(x.number) for x in xs)
    passes = DOES.get(name) is _D.FORGET or name in _NUMERIC
    return name == "is_finite" or (passes and any(x.asks for x in xs))


def _if_finite(eqn: JaxprEqn, xs: Sequence[Seen]) -> bool:
    """Whether a bool is True only if something is finite."""
    name = eqn.primitive.name
    if name in ("lt", "le", "gt", "ge"):
        return any(x.number is not None and np.isinf(x.number) for x in xs)
    if name in ("and", "reduce_and", *_NUMERIC):
        return any(x.if_finite for x in xs)
    return name == "is_finite"


# ── a program ────────────────────────────────────────────────────────────────────────────────────


class Mark(NamedTuple):
    """A mark of the library in a program."""

    name: str
    options: tuple[str, ...]
    value: Seen
    eqn: JaxprEqn
    line: str  # of the user's code, or of the call around, as of `jax.jit(tx.update)`


TURNS = 8  # of a loop, after which what is known of its carry does not settle


def marks_of(program: AnyJaxpr) -> list[Mark]:
    """The marks of a program, in the order in which they are computed."""
    first = _Reading(frozenset())
    first.whole(program)
    # A scale may be used before it is marked: which values are scales is known from then on.
    second = _Reading(frozenset(first.scales))
    second.whole(program)
    return second.marks


class _Reading:
    """One reading of a program.

    Args:
        units: the values that are known to be loss scales, by their origins.
    """

    def __init__(self, units: frozenset[Unit]) -> None:
        self._units = units
        self._is_inside = False  # of a backward pass
        self._line = ""  # of the call around
        self.marks: list[Mark] = []
        self.scales: set[Unit] = set()  # the values that are marked as loss scales

    def whole(self, program: AnyJaxpr) -> None:
        """Reads a program from its arguments on."""
        arguments = range(len(jaxprs.open_jaxpr(program).invars))
        found = self._run(program, [self._seen(Seen(origin=("argument", i))) for i in arguments])
        lost = [x for x in found if x.is_new and x.chosen is not None]
        self.marks += [
            Mark(THROWN_AWAY, (), x, x.chosen, line_of(x.chosen)) for x in lost if x.chosen
        ]

    def _seen(self, x: Seen) -> Seen:
        """A value, which has a unit if it is known to be a loss scale."""
        is_scale = x.origin in self._units and x.degree in (ONE, FREE)
        return x._replace(degree=((x.origin, 1),), number=None) if is_scale else x

    def _run(self, program: AnyJaxpr, values: Sequence[Seen]) -> list[Seen]:
        """Reads a program, or one inside of it; returns what is known of its results."""
        jaxpr = jaxprs.open_jaxpr(program)
        constants = getattr(program, "consts", None) or [None] * len(jaxpr.constvars)
        known: dict[Var, Seen] = {
            v: self._seen(Seen(number=_scalar(c), origin=("constant", id(c)), still=True))
            for v, c in zip(jaxpr.constvars, constants, strict=True)
        }
        known |= dict(zip(jaxpr.invars, values, strict=True))
        for eqn in jaxpr.eqns:
            found = self._step(eqn, [self._read(v, known) for v in eqn.invars])
            known.update(zip(eqn.outvars, map(self._seen, found), strict=True))
        return [self._read(v, known) for v in jaxpr.outvars]

    def _read(self, v: Var | Written, known: Mapping[Var, Seen]) -> Seen:
        if not isinstance(v, Written):
            return known[v]
        number = _scalar(v.val)
        is_any = number is not None and (number == 0 or not np.isfinite(number))
        origin = ("constant", id(v.val)) if isinstance(v.val, jax.Array) else None
        degree: Degree = FREE if is_any else ONE
        return self._seen(Seen(degree, number=number, spread=True, origin=origin, still=True))

    def _step(self, eqn: JaxprEqn, xs: list[Seen]) -> list[Seen]:
        """What is known of the results of an equation."""
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(PREFIX):
            return [self._marked(eqn, xs[0])]
        around = self._is_inside, self._line
        self._is_inside |= _is_backward(eqn)
        self._line = (line_of(eqn) if jaxprs.inner(eqn) else "") or self._line
        try:
            outs = self._computed(eqn, xs)
            return [x._replace(derived=True) for x in outs] if self._is_inside else outs
        finally:
            self._is_inside, self._line = around

    def _computed(self, eqn: JaxprEqn, xs: list[Seen]) -> list[Seen]:
        """What is known of the results of an equation that is no mark."""
        name, params = eqn.primitive.name, eqn.params
        # What the table knows may hold a program too: that of a scatter adds two numbers.
        parts = [] if name in DOES else jaxprs.inner(eqn)
        if name == "cond":
            each = [self._run(branch, xs[1:]) for branch in params["branches"]]
            return [_joined(column) for column in zip(*each, strict=True)]
        if name == "scan":
            consts, carries = jaxprs.scan_counts(params, len(xs))
            fixed = [x._replace(still=True) for x in xs[:consts]]
            rows = [x._replace(still=False) for x in xs[consts + carries :]]
            turn = lambda carry: self._run(params["jaxpr"], [*fixed, *carry, *rows])  # noqa: E731
            return self._loop(eqn, turn, xs[consts : consts + carries])
        if name == "while":
            tests, bodies = params["cond_nconsts"], params["body_nconsts"]
            fixed = [x._replace(still=True) for x in xs[tests : tests + bodies]]
            turn = lambda carry: self._run(params["body_jaxpr"], [*fixed, *carry])  # noqa: E731
            return self._loop(eqn, turn, xs[tests + bodies :])
        if name == "custom_linear_solve":  # of what its programs need, and the right-hand sides
            consts = sum(params["const_lengths"])
            if all(x.degree in (ONE, FREE) for x in xs[:consts]):
                return [x._replace(number=None) for x in xs[consts:]]
        if len(parts) == 1 and len(jaxprs.open_jaxpr(parts[0]).invars) == len(xs):
            outs = self._run(parts[0], xs)
            return [_at_call(x, xs, eqn) for x in outs] if is_of_a_library(parts[0]) else outs
        if DOES.get(name) is _D.EACH and len(xs) == len(eqn.outvars):
            return list(xs)
        # A kernel, a callback, a reference; a sum over devices has the effect of naming an axis.
        if parts or (eqn.effects and name not in DOES):
            return [_unknown(xs)] * len(eqn.outvars)
        return [_result(eqn, xs, v, self._is_inside) for v in eqn.outvars]

    def _loop(
        self, eqn: JaxprEqn, turn: Callable[[list[Seen]], list[Seen]], carry: Sequence[Seen]
    ) -> list[Seen]:
        """What is known of the results of a loop: its carry is what it is before, and after each
        turn, so it is read until no turn tells anything new."""
        places = [("carry", id(eqn), i) for i in range(len(carry))]
        carried = [
            self._seen(x._replace(still=False, number=None, origin=place))
            for x, place in zip(carry, places, strict=True)
        ]
        outs, before = carried, len(self.marks)
        for _ in range(TURNS):
            del self.marks[before:]
            outs = turn(carried)
            both = zip(carried, outs, strict=False)
            new = [
                _joined(pair)._replace(origin=place)
                for pair, place in zip(both, places, strict=True)
            ]
            if list(map(_without_places, new)) == list(map(_without_places, carried)):
                return outs
            carried = new
        del self.marks[before:]
        return [x._replace(degree=None) for x in outs]

    def _marked(self, eqn: JaxprEqn, x: Seen) -> Seen:
        """What is known of a value that the library has marked."""
        name, *options = eqn.params["name"].removeprefix(PREFIX).split(",")
        if name in ("scale", "state"):
            unit = x.origin or ("made", id(eqn) if x.number is None else x.number)
            self.scales.add(unit)
            if x.degree in (ONE, FREE):
                x = x._replace(degree=((unit, 1),), number=None)
        elif name == "new":  # the scale of the state after an update is that before, later
            state = next((mark for mark in reversed(self.marks) if mark.name == "state"), None)
            x = Seen(state.value.degree if state else None, is_new=True)
        elif name == OWN:
            x = Seen(x.degree, x.through | {OWN}, derived=x.derived)
        elif name == NO_SCALE:
            x = Seen(x.degree, x.through | {NO_SCALE})
        elif name == "summed":
            x = x._replace(summed=Summed(eqn, ",".join(options)))
        self.marks.append(Mark(name, tuple(options), x, eqn, line_of(eqn) or self._line))
        # What an update makes of its gradients are numbers, with which others may begin.
        return Seen(self._divisor()) if name == "gradient" else x

    def _divisor(self) -> Degree:
        """The degree of what the update that is read now divides by."""
        for mark in reversed(self.marks):
            if mark.name == "by" or "divides" in mark.options:
                return mark.value.degree
            if mark.name == "state":
                break
        return ONE


def _scalar(x: Any) -> float | None:
    """A number that is written out; None for an array."""
    if isinstance(x, Tracer | jax.Array) or np.ndim(x):
        return None
    if np.iscomplexobj(x):
        return float(np.real(x)) if np.imag(x) == 0 else None
    try:
        return float(x)
    except TypeError:
        return None


def _at_call(x: Seen, operands: Sequence[Seen], eqn: JaxprEqn) -> Seen:
    """What is known of a result of a function of a library, with the place of its call."""
    before = {flaw for value in operands for flaw in value.flaws}
    renamed = "jnp.nan_to_num" if eqn.params.get("name") == "nan_to_num" else None
    flaws = [
        flaw if flaw in before else Flaw(renamed or flaw.name, eqn, flaw.is_inside)
        for flaw in x.flaws
    ]
    is_new = x.last is not None and all(value.last is not x.last for value in operands)
    return x._replace(flaws=_merged(flaws), last=eqn if is_new else x.last)


def _unknown(xs: Sequence[Seen]) -> Seen:
    is_plain = all(x.degree in (ONE, FREE) for x in xs)
    through = frozenset[Unit]().union(*(x.through for x in xs))
    return Seen(ONE if is_plain else None, through, derived=any(x.derived for x in xs))


def _without_places(x: Seen) -> Seen:
    return x._replace(last=None, flaws=(), origin=None, chosen=None)

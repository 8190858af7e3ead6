"""What must be exact in a program for what is computed with it."""

# Half precision rounds 0.9999 to 1, and a small number to 0: a logarithm, a root or a quotient of
# that is infinite. So what reaches one through cheap operations is computed in float32, and a
# product at the start of that way has a result in float32. So does what reaches the square of a
# difference of all pairs, as in a distance: near numbers are subtracted there.
#
# After the last product there is nothing to gain: a bias that is larger than a prediction would
# round it. What these rules do not see, an audit measures, and a mending takes back: see
# `training/mending.py`.

import enum
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gainstage._base._jax import JaxprEqn, Literal, Var
from gainstage._programs import jaxprs, patterns
from gainstage._programs.in_dtype import in_range, is_float32, is_floating
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage._programs.operations import PRODUCTS, TRAITS, Trait, names_with
from gainstage._programs.patterns import moves

PASSES = names_with(Trait.PASSES)
COMBINES = frozenset(("add", "sub", "mul", "div", "max", "min", "add_any"))
LEAVES = COMBINES | {"neg", "abs", "clamp", "select_n"}  # a logit one
MULTIPLYING = PRODUCTS | {"mul", "div"}
STOPS = names_with(Trait.OPAQUE) | names_with(Trait.ALGEBRA)  # which compute more than cheap ones


class Need(enum.Flag):
    """What must be exact for what is computed with a value, each with a case that needs it."""

    NOTHING = 0
    # The value, through cheap operations. "personalized ranking" of the corpus.
    RESULT = enum.auto()
    # The product that it is, with its operands. "value of exponential bins".
    OPERANDS = enum.auto()
    # It reaches a result without another product: what it meets on the way. A bias of 288.
    LAST = enum.auto()
    # Nothing for LAST: exp divides out an offset. Logits, the largest array of a language model.
    EXPONENT = enum.auto()
    # It reaches the first result, which is differentiated. A metric beside the loss has none.
    GRADIENT = enum.auto()
    # A product of an array with itself: the result, which may be large. A distance written out.
    SQUARE = enum.auto()


# What a product needs by itself, and a difference: names for a study that leaves them out.
FACTS = CONSTANTS, MOMENTS = "a wide constant", "moments"


class Fact(enum.Flag):
    """A property of a value, from what it is made of."""

    NOTHING = 0
    CONSTANT = enum.auto()  # it depends on no argument
    WIDE = enum.auto()  # half precision may not hold it, because of a constant that multiplies


def needs_of(
    program: AnyJaxpr, dtype: np.dtype, without: frozenset[str] = frozenset()
) -> dict[Path, Need]:
    """What must be exact in each operation of a program for which something must.

    Args:
        program: a program in float32.
        dtype: the half-precision dtype, which may not hold the constants of the program.
        without: the names of needs and facts that are left out, in a study.
    """
    jaxpr, needs = jaxprs.open_jaxpr(program), dict[Path, Need]()
    reader = _Reader(program, [Fact.NOTHING] * len(jaxpr.invars), (), needs, dtype, without)
    # After a scalar loss come aux and state, which have no gradient.
    first = jaxpr.outvars[:1]
    is_loss = any(is_floating(v) and not jaxprs.array(v).shape for v in first)
    others = Need.LAST if is_loss else Need.LAST | Need.GRADIENT
    results = [others] * len(jaxpr.outvars)
    results[:1] = [Need.LAST | Need.GRADIENT] * len(first)
    reader.read(results)
    return needs


class _Reader:
    """Reads a program from its results to its arguments.

    Args:
        program: a program, or one inside of it.
        facts: the properties of each argument.
        path: where the program is.
        needs: what must be exact in each operation, to which this adds.
        dtype: the half-precision dtype.
        without: the names of needs and facts that are left out.
        arguments: the numbers of each argument that is a constant of the whole program, or None.
    """

    def __init__(
        self,
        program: AnyJaxpr,
        facts: Sequence[Fact],
        path: Path,
        needs: dict[Path, Need],
        dtype: np.dtype,
        without: frozenset[str],
        arguments: Sequence[Any] = (),
    ):
        self._jaxpr, self._path, self._needs = jaxprs.open_jaxpr(program), path, needs
        self._dtype, self._without = dtype, without
        self._left_out = ~functools.reduce(
            operator.or_, (need for need in Need if need.name in without), Need.NOTHING
        )
        constants = getattr(program, "consts", ())
        self._constants = dict(zip(self._jaxpr.constvars, constants, strict=False))
        known = zip(self._jaxpr.invars, arguments, strict=False)
        self._constants |= {variable: x for variable, x in known if x is not None}
        self._equations = list(jaxprs.backwards(program))
        self._producers = {v: eqn for _, eqn in self._equations for v in eqn.outvars}
        self._known: dict[Var, Need] = {}
        self._facts = dict(zip(self._jaxpr.invars, facts, strict=True))
        self._facts |= dict.fromkeys(self._jaxpr.constvars, Fact.CONSTANT)
        for _, eqn in reversed(self._equations):
            given = [self._fact(v) for v in eqn.invars]
            fact, name = self._fact_of(eqn, given), eqn.primitive.name
            if name in MULTIPLYING or any(Fact.WIDE in one for one in given):
                fact |= Fact.WIDE if self._is_wide(eqn, given) else Fact.NOTHING
            self._facts |= dict.fromkeys(eqn.outvars, fact)

    def read(self, results: Sequence[Need]) -> list[Need]:
        """What is needed of the arguments, for what is needed of the results."""
        self._add(zip(self._jaxpr.outvars, results, strict=True))
        for n, eqn in self._equations:
            needs = [self._known.get(v, Need.NOTHING) for v in eqn.outvars]
            parts = jaxprs.changeable(eqn)
            for part, number in parts:
                own = (*self._path, n) if number is None else (*self._path, n, number)
                self._add(self._of_part(eqn, part, number, needs, own))
            if not parts:
                need = functools.reduce(operator.or_, needs, Need.NOTHING)
                need |= self._by_itself(eqn)
                self._add(self._of_operands(eqn, need))
                exact = self._of_operation(eqn, need)
                if exact:
                    path = (*self._path, n)
                    self._needs[path] = self._needs.get(path, exact) | exact
        return [self._known.get(v, Need.NOTHING) for v in self._jaxpr.invars]

    def _add(self, needs: Iterable[tuple[Var | Literal, Need]]) -> None:
        for variable, need in needs:
            need &= self._left_out
            if need and not isinstance(variable, Literal):
                self._known[variable] = self._known.get(variable, need) | need

    def _fact(self, variable: Var | Literal) -> Fact:
        if isinstance(variable, Literal):
            return Fact.CONSTANT
        return self._facts.get(variable, Fact.NOTHING)

    def _fact_of(self, eqn: JaxprEqn, each: Sequence[Fact]) -> Fact:
        """What results are made of, from the properties of the operands."""
        inside = (e for part in jaxprs.inner(eqn) for e in jaxprs.equations(part))
        is_product = any(e.primitive.name in PRODUCTS for e in (eqn, *inside))
        is_constant = not is_product and all(Fact.CONSTANT in fact for fact in each)
        return Fact.CONSTANT if is_constant else Fact.NOTHING

    def _by_itself(self, eqn: JaxprEqn) -> Need:
        """What a product needs, whatever is computed with it."""
        if eqn.primitive.name not in PRODUCTS:
            return Need.NOTHING
        is_wide = Fact.WIDE in self._facts[eqn.outvars[0]] and CONSTANTS not in self._without
        need = Need.OPERANDS if is_wide else Need.NOTHING
        need |= Need.SQUARE if patterns.is_square(eqn, self._producers) else Need.NOTHING
        return need & self._left_out

    def _is_wide(self, eqn: JaxprEqn, given: Sequence[Fact]) -> bool:
        """Whether half precision may not hold what an operation multiplies, nor its result, because
        of a constant."""
        name, is_given = eqn.primitive.name, any(Fact.WIDE in fact for fact in given)
        if name in MULTIPLYING:
            is_new = any(map(self._is_out_of_range, eqn.invars))
            # A large number brings a small one back.
            return is_given or is_new if name in PRODUCTS else is_given != is_new
        return moves(eqn) or name in ("add", "sub", "neg", "add_any")

    def _is_out_of_range(self, variable: Var | Literal) -> bool:
        """Whether an operand is a constant that half precision does not hold."""
        if Fact.CONSTANT not in self._fact(variable) or not is_float32(variable):
            return False
        known = patterns.constant_of(variable, self._producers, self._constants)
        return known is not None and not in_range(self._dtype, known)

    def _of_operation(self, eqn: JaxprEqn, need: Need) -> Need:
        """What of an operation must be exact."""
        name, exact = eqn.primitive.name, Need.NOTHING
        if name in PRODUCTS:
            exact |= need & (Need.RESULT | Need.OPERANDS | Need.SQUARE)
            if Need.LAST in need and Need.GRADIENT not in need:
                exact |= Need.RESULT
        elif name in COMBINES and Need.EXPONENT not in need:
            exact |= need & Need.LAST
        if name in PASSES or moves(eqn):
            exact |= need & Need.RESULT
        return exact & self._left_out

    def _of_operands(self, eqn: JaxprEqn, need: Need) -> Iterator[tuple[Var | Literal, Need]]:
        """What an operation needs of its operands."""
        name, passed = eqn.primitive.name, need & _passes_on(eqn)
        if name == "exp" or (name.startswith("custom_") and _has(eqn, "exp")):
            passed |= Need.EXPONENT
        if Need.OPERANDS in need and name in PRODUCTS:
            passed |= Need.RESULT
        yield from ((v, passed) for v in eqn.invars)
        singular = TRAITS.get(name, Trait(0))
        yield from ((v, Need.RESULT) for v in eqn.invars[:1] if Trait.FIRST in singular)
        yield from ((v, Need.RESULT) for v in eqn.invars[1:2] if Trait.SECOND in singular)
        if name == "integer_pow" and eqn.params["y"] < 0:
            yield eqn.invars[0], Need.RESULT
        if name == "sub" and MOMENTS not in self._without:
            addends = patterns.addends_of(eqn, self._producers)
            moments = patterns.moments(addends, self._producers)
            yield from ((value, Need.OPERANDS | Need.RESULT) for value in moments)

    def _of_part(
        self,
        eqn: JaxprEqn,
        part: AnyJaxpr,
        number: int | None,
        results: Sequence[Need],
        path: Path,
    ) -> Iterator[tuple[Var | Literal, Need]]:
        """What a program inside of an operation needs of the operands."""
        name, operands = eqn.primitive.name, list(eqn.invars)
        first, carries = 0, 0  # of a loop
        if name == "cond":
            operands = operands[1:]
        elif name == "while":
            tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            own = operands[:tests] if number == 0 else operands[tests : tests + bodies]
            operands = [*own, *operands[tests + bodies :]]
            if number == 0:  # the test
                results = [Need.NOTHING]
            else:
                first, carries = bodies, len(results)
        elif name == "scan":
            first, carries = jaxprs.scan_counts(eqn.params, len(operands))
        facts = [self._fact(v) for v in operands]
        facts[first : first + carries] = [self._fact(v) for v in eqn.outvars[:carries]]
        known = [None if isinstance(v, Literal) else self._constants.get(v) for v in operands]
        reader = _Reader(part, facts, path, self._needs, self._dtype, self._without, known)
        while True:
            arguments = reader.read(results)
            again = zip(arguments[first : first + carries], results, strict=False)
            more = [*(a | r for a, r in again), *results[carries:]]
            if more == results:  # no turn of a loop needs more than the last one
                return zip(operands, arguments, strict=True)
            results = more


def _passes_on(eqn: JaxprEqn) -> Need:
    """The needs of a result that are those of the operands too."""
    name, is_moved = eqn.primitive.name, moves(eqn)
    found = Need.NOTHING
    if name in PASSES or is_moved:
        found |= Need.RESULT
    if name in LEAVES or is_moved:
        found |= Need.EXPONENT
    if name != "stop_gradient":
        found |= Need.GRADIENT
    if name not in PRODUCTS | STOPS:
        found |= Need.LAST
    return found


def _has(eqn: JaxprEqn, name: str) -> bool:
    """Whether a program inside of an operation has an operation of this name."""
    return any(e.primitive.name == name for p in jaxprs.inner(eqn) for e in jaxprs.equations(p))

"""What must be exact in a program for what is computed with it.

Half precision rounds 0.9999 to 1, and a small number to 0: a logarithm, a root or a quotient of
that is infinite. So what reaches one through cheap operations is computed in float32, and a product
at the start of that way has a result in float32. So does what reaches the square of a difference of
all pairs, as in a distance: near numbers are subtracted there.
"""

import enum
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from gainstage._base._jax import JaxprEqn, Literal, Var
from gainstage._programs import jaxprs
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage.precision.plan import moves
from gainstage.precision.wide_results import PRODUCTS, power_of

# Operations that pass on how exact their operands are.
PASSES = frozenset(
    ("add", "sub", "mul", "neg", "max", "min", "abs", "select_n", "clamp", "add_any", "tanh",
     "logistic", "integer_pow", "square", "custom_jvp_call")
)  # fmt: skip
# Operations near whose poles, or the ends of whose domains, rounding changes the kind of result;
# with the places of the operands that count.
SINGULAR = {
    "log": (0,), "log1p": (0,), "sqrt": (0,), "rsqrt": (0,), "cbrt": (0,), "div": (1,),
    "pow": (0, 1), "rem": (1,), "acos": (0,), "asin": (0,), "acosh": (0,), "atanh": (0,),
    "erf_inv": (0,), "lgamma": (0,), "digamma": (0,), "reduce_prod": (0,), "cumprod": (0,),
}  # fmt: skip
PERIODIC = frozenset(("sin", "cos", "tan"))
FEW = 4  # terms of a sum of products, which cost little in float32
AMPLIFIES = 32.0  # the factor from which a difference is one of near numbers


class Need(enum.Flag):
    """What must be exact for what is computed with a value."""

    NOTHING = 0
    RESULT = enum.auto()  # the value, through cheap operations
    ALL = enum.auto()  # all that it is made of
    ANGLE = enum.auto()  # a product with few terms, from which it comes
    SMALL = enum.auto()  # both sides, if it is a difference: what multiplies it is large


def needs_of(program: AnyJaxpr) -> dict[Path, Need]:
    """What must be exact in each operation of a program for which something must."""
    jaxpr, needs = jaxprs.open_jaxpr(program), dict[Path, Need]()
    reader = _Reader(program, [False] * len(jaxpr.invars), (), needs)
    reader.read([Need.NOTHING] * len(jaxpr.outvars))
    return needs


class _Reader:
    """Reads a program from its results to its arguments.

    Args:
        program: a program, or one inside of it.
        products: for each argument, whether it is computed from products.
        path: where the program is.
        needs: what must be exact in each operation, to which this adds.
    """

    def __init__(
        self, program: AnyJaxpr, products: Sequence[bool], path: Path, needs: dict[Path, Need]
    ):
        self._jaxpr, self._path, self._needs = jaxprs.open_jaxpr(program), path, needs
        self._equations = list(jaxprs.backwards(program))
        self._made = {v: eqn for _, eqn in self._equations for v in eqn.outvars}
        self._known: dict[Var, Need] = {}
        self._from_products = {
            v for v, is_known in zip(self._jaxpr.invars, products, strict=True) if is_known
        }
        for _, eqn in reversed(self._equations):
            if any(self._is_from_products(v) for v in eqn.invars) or _contains_products(eqn):
                self._from_products.update(eqn.outvars)

    def read(self, results: Sequence[Need]) -> list[Need]:
        """What is needed of the arguments, for what is needed of the results."""
        self._add(zip(self._jaxpr.outvars, results, strict=True))
        for n, eqn in self._equations:
            found = [self._known.get(v, Need.NOTHING) for v in eqn.outvars]
            parts = jaxprs.changeable(eqn)
            for part, number in parts:
                own = (*self._path, n) if number is None else (*self._path, n, number)
                self._add(self._of_part(eqn, part, number, found, own))
            if not parts:
                need = functools.reduce(operator.or_, found, Need.NOTHING)
                self._add(self._of_operands(eqn, need))
                exact = self._of_operation(eqn, need)
                if exact:
                    path = (*self._path, n)
                    self._needs[path] = self._needs.get(path, exact) | exact
        return [self._known.get(v, Need.NOTHING) for v in self._jaxpr.invars]

    def _add(self, needs: Iterable[tuple[Var | Literal, Need]]) -> None:
        for variable, need in needs:
            if need and not isinstance(variable, Literal):
                self._known[variable] = self._known.get(variable, need) | need

    def _is_from_products(self, variable: Var | Literal) -> bool:
        return not isinstance(variable, Literal) and variable in self._from_products

    def _of_operation(self, eqn: JaxprEqn, need: Need) -> Need:
        """What of an operation must be exact."""
        name = eqn.primitive.name
        if Need.ALL in need or (Need.ANGLE in need and _terms(eqn) <= FEW):
            return Need.ALL
        is_passed = name in PASSES or moves(eqn) or name == "dot_general"
        return Need.RESULT if Need.RESULT in need and is_passed else Need.NOTHING

    def _of_operands(self, eqn: JaxprEqn, need: Need) -> Iterator[tuple[Var | Literal, Need]]:
        """What an operation needs of its operands."""
        name, passed = eqn.primitive.name, need & Need.ALL
        if name in PASSES or moves(eqn):
            passed |= need & Need.RESULT
        if name in PERIODIC:
            passed |= Need.ANGLE
        if name in ("add", "sub", "mul", "neg", "div") or moves(eqn):
            passed |= need & Need.ANGLE
        if _amplifies(eqn):
            passed |= Need.SMALL
        yield from ((v, passed) for v in eqn.invars)
        yield from ((eqn.invars[i], Need.RESULT) for i in SINGULAR.get(name, ()))
        if name == "integer_pow" and eqn.params["y"] < 0:
            yield eqn.invars[0], Need.RESULT
        yield from ((v, Need.RESULT) for v in _pairs(eqn, self._made))
        if Need.SMALL in need:
            sides = list(_sides(eqn, self._made))
            are_near = any(is_less for _, is_less in sides)
            are_near &= sum(self._is_from_products(v) for v, _ in sides) > 1
            yield from ((v, Need.ALL if are_near else Need.SMALL) for v, _ in sides)

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
        products = [self._is_from_products(v) for v in operands]
        of_carries = map(self._is_from_products, eqn.outvars)
        products[first : first + carries] = list(of_carries)[:carries]
        reader = _Reader(part, products, path, self._needs)
        arguments = reader.read(results)
        while any(
            a & ~r for a, r in zip(arguments[first : first + carries], results, strict=False)
        ):
            again = zip(arguments[first : first + carries], results, strict=False)
            results = [*(a | r for a, r in again), *results[carries:]]
            arguments = reader.read(results)
        return zip(operands, arguments, strict=True)


def _contains_products(eqn: JaxprEqn) -> bool:
    """Whether an operation is a product, or has one inside."""
    inside = (e for part in jaxprs.inner(eqn) for e in jaxprs.equations(part))
    return any(e.primitive.name in PRODUCTS for e in (eqn, *inside))


def _terms(eqn: JaxprEqn) -> float:
    """How many products are summed for a number of a `dot_general`; many for other operations."""
    if eqn.primitive.name != "dot_general":
        return float("inf")
    shape, (axes, _) = jaxprs.array(eqn.invars[0]).shape, eqn.params["dimension_numbers"][0]
    return math.prod(shape[axis] for axis in axes)


def _amplifies(eqn: JaxprEqn) -> bool:
    """Whether an operation multiplies by a large number, or divides by a small one."""
    name, numbers = eqn.primitive.name, [v.val for v in eqn.invars if isinstance(v, Literal)]
    if len(numbers) != 1 or np.ndim(numbers[0]) or name not in ("mul", "div"):
        return False
    size = abs(float(numbers[0]))
    return size >= AMPLIFIES if name == "mul" else 0 < size <= 1 / AMPLIFIES


def _sides(
    eqn: JaxprEqn, made: Mapping[Var, JaxprEqn], is_less: bool = False
) -> Iterator[tuple[Var, bool]]:
    """What is added up in an operation, each with whether it is subtracted."""
    name = eqn.primitive.name
    is_scaled = name in ("mul", "div") and any(isinstance(v, Literal) for v in eqn.invars)
    if not (name in ("add", "sub", "neg") or is_scaled or moves(eqn)):
        return
    for place, variable in enumerate(eqn.invars):
        if isinstance(variable, Literal):
            continue
        is_negative = is_less ^ (name == "neg" or (name == "sub" and place == 1))
        sides = list(_sides(made[variable], made, is_negative)) if variable in made else []
        yield from sides or [(variable, is_negative)]


def _pairs(eqn: JaxprEqn, made: Mapping[Var, JaxprEqn]) -> list[Var]:
    """The operand of a square of a difference of all pairs, such as `(x[:, None] - y) ** 2`."""
    operand = eqn.invars[0] if eqn.invars else None
    if not isinstance(operand, Var) or power_of(eqn) != 2:
        return []
    difference = made.get(operand)
    if difference is None or difference.primitive.name != "sub":
        return []
    size = jaxprs.array(operand).size
    return [operand] if all(_source(v, made) < size for v in difference.invars) else []


def _source(variable: Var | Literal, made: Mapping[Var, JaxprEqn]) -> int:
    """The size of what an operand was before it was broadcast."""
    eqn = None if isinstance(variable, Literal) else made.get(variable)
    if eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "reshape", "expand_dims"):
        return _source(eqn.invars[0], made)
    return jaxprs.array(variable).size

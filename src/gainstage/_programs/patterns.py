"""What a few operations of one program are together, such as a difference of near numbers.

What an operation is by itself is in `operations.py`.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from gainstage._base._jax import JaxprEqn, Literal, Tracer, Var
from gainstage._programs import jaxprs
from gainstage._programs.in_dtype import is_float32
from gainstage._programs.operations import CHOICES, MOVES, PRODUCTS, VIEWS

Producers = Mapping[Var, JaxprEqn]  # the operation that has made each value
FEW = 4  # terms of a sum of products, which cost little in float32
CHEAP = 2**20  # multiplications in a product that takes no time, however exact it is
# Matrix units work on tiles of 16 x 8 x 16 numbers (an H100) or 8 x 8 x 4 (a T4).
NARROW = 8  # a side of a product up to which a tile is not filled
FEW_TILES = 32  # two sides up to which a product is a few tiles, and takes no time in any precision
MOST_SUMS = 64  # within a sum, that are looked into
SMALL_CONSTANT = 2**16  # elements of a constant that is computed to look at it


class Addend(NamedTuple):
    """One of the values that are added up in an operation."""

    value: Var
    is_less: bool  # whether it is subtracted


def moves(eqn: JaxprEqn) -> bool:
    """Whether a float32 operation moves numbers, or casts them, as a weak type to a strong one."""
    is_cast = eqn.primitive.name == "convert_element_type"
    return eqn.primitive.name in MOVES or (is_cast and all(map(is_float32, eqn.invars)))


def exponent_of(eqn: JaxprEqn) -> int:
    """The integer to whose power an equation raises its operand, such as 2 in a variance; 0 if it
    does something else."""
    name = eqn.primitive.name
    twice = name == "mul" and eqn.invars[0] is eqn.invars[1]
    if twice or name == "square":
        return 2
    exponent = eqn.params["y"] if name == "integer_pow" else 0
    return 0 if exponent == 1 else exponent


def number_of(eqn: JaxprEqn) -> float:
    """The size of the number by which an operation multiplies; 0 if it does something else."""
    name, numbers = eqn.primitive.name, [v.val for v in eqn.invars if isinstance(v, Literal)]
    if len(numbers) != 1 or np.ndim(numbers[0]) or name not in ("mul", "div"):
        return 0.0
    size = float(abs(numbers[0]))
    return 1 / size if name == "div" and size else size


def maker(value: Var | Literal, producers: Producers) -> JaxprEqn | None:
    """The operation that has made a value, before it was moved."""
    eqn = None if isinstance(value, Literal) else producers.get(value)
    while eqn is not None and moves(eqn) and len(eqn.invars) == 1:
        value = eqn.invars[0]
        eqn = None if isinstance(value, Literal) else producers.get(value)
    return eqn


def constant_of(
    value: Var | Literal, producers: Producers, constants: Mapping[Var, Any]
) -> np.ndarray | None:
    """The numbers of a value that depends on no argument, if they are known or found by a few small
    operations.

    Args:
        value: a constant of the program, or what is computed from some.
        producers: the operation that has made each value.
        constants: the arrays that the program contains.
    """
    numbers: dict[Var, Any] = {v: x for v, x in constants.items() if not isinstance(x, Tracer)}
    left = MOST_SUMS

    def computed(one: Var | Literal) -> Any:
        nonlocal left
        if isinstance(one, Literal):
            return one.val
        if one not in numbers:
            eqn = producers.get(one)
            left -= 1
            if left < 0 or eqn is None or eqn.effects or eqn.primitive.name in jaxprs.OF_DEVICES:
                raise LookupError
            if jaxprs.array(one).size > SMALL_CONSTANT:
                raise LookupError
            numbers.update(
                zip(eqn.outvars, jaxprs.bind(eqn, list(map(computed, eqn.invars))), strict=True)
            )
        return numbers[one]

    try:
        with jax.ensure_compile_time_eval():
            return np.asarray(computed(value))
    except LookupError:
        return None


def root(value: Var | Literal, producers: Producers) -> Var | Literal:
    """The value of which another is a view, or a multiple by a number."""
    eqn = None if isinstance(value, Literal) else producers.get(value)
    while eqn is not None and (eqn.primitive.name in VIEWS | {"neg"} or number_of(eqn)):
        value = next(v for v in eqn.invars if v is eqn.invars[-1] or not isinstance(v, Literal))
        eqn = None if isinstance(value, Literal) else producers.get(value)
    return value


def is_square(eqn: JaxprEqn, producers: Producers) -> bool:
    """Whether an operation is a product of an array with itself, such as `x.T @ x`."""
    if eqn.primitive.name != "dot_general":
        return False
    a, b = (root(v, producers) for v in eqn.invars)
    return a is b


def terms_of(eqn: JaxprEqn) -> float:
    """How many products are summed for a number of a product or a convolution; infinite for
    others."""
    if eqn.primitive.name == "conv_general_dilated":
        _, *axes = eqn.params["dimension_numbers"].rhs_spec
        kernel = jaxprs.array(eqn.invars[1]).shape
        return float(np.prod([kernel[axis] for axis in axes]))
    if eqn.primitive.name != "dot_general":
        return np.inf
    shape, (axes, _) = jaxprs.array(eqn.invars[0]).shape, eqn.params["dimension_numbers"][0]
    return float(np.prod([shape[axis] for axis in axes]))


def sides(eqn: JaxprEqn) -> tuple[int, int, int] | None:
    """The sizes of a `dot_general`, without its batch: rows, terms of a sum, and columns; None for
    another product."""
    if eqn.primitive.name != "dot_general":
        return None
    (summed, also_summed), (batch, also_batch) = eqn.params["dimension_numbers"]
    left, right = (jaxprs.array(v).shape for v in eqn.invars)
    rows = math.prod(n for i, n in enumerate(left) if i not in (*summed, *batch))
    columns = math.prod(n for i, n in enumerate(right) if i not in (*also_summed, *also_batch))
    return rows, math.prod(left[i] for i in summed), columns


def is_small(eqn: JaxprEqn) -> bool:
    """Whether a product is one of small matrices, which no matrix unit computes faster: two of its
    sides are small, and one of these is narrow. One term alone adds nothing up."""
    found = sides(eqn)
    if found is None or found[1] == 1:
        return False
    least, middle, _ = sorted(found)
    return least <= NARROW and middle <= FEW_TILES


def exact_params(eqn: JaxprEqn) -> dict[str, Any] | None:
    """The parameters with which a product is as exact as float32 on each device, where that costs
    little: few terms are summed for a number, or few for all numbers together. None for another
    operation, a large product, or one whose precision the user has chosen."""
    terms = terms_of(eqn)
    if terms == np.inf or not _is_default(eqn.params["precision"]):
        return None
    is_cheap = terms <= FEW or terms * jaxprs.array(eqn.outvars[0]).size <= CHEAP
    return {**eqn.params, "precision": (lax.Precision.HIGHEST,) * 2} if is_cheap else None


def _is_default(precision: object) -> bool:
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(one in (None, lax.Precision.DEFAULT) for one in each)


def addends_of(eqn: JaxprEqn, producers: Producers) -> list[Addend]:
    """What is added up in an operation, through other sums and what is linear in them."""
    addends: list[Addend] = []
    todo, left = [(eqn, False)] if _is_linear(eqn) else [], MOST_SUMS
    while todo:
        now, is_less = todo.pop()
        for place, value in enumerate(now.invars):
            if isinstance(value, Literal):
                continue
            name, inner = now.primitive.name, producers.get(value)
            is_negative = is_less ^ (name == "neg" or (name == "sub" and place == 1))
            if left and inner is not None and _is_linear(inner):
                todo.append((inner, is_negative))
                left -= 1
            else:
                addends.append(Addend(value, is_negative))
    return addends


def _is_linear(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    moves_all = moves(eqn) and name not in CHOICES
    return name in ("add", "sub", "neg") or bool(number_of(eqn)) or moves_all


def moments(addends: list[Addend], producers: Producers) -> list[Var]:
    """The products in a mean of squares less the square of a mean, as in a local variance; and in
    a square of a difference that is written out, as `x ** 2 - 2 * x @ y + y ** 2`."""
    found: list[Var] = []
    squares = [
        (addend, _factors_of(addend.value, producers), _squared(addend.value, producers))
        for addend in addends
    ]
    for addend in addends:
        operands = _operands(addend.value, producers)
        for square, factors, squared in squares if operands else ():
            if factors and addend.is_less != square.is_less:
                shared = [operands & _operands(factor, producers) for factor in factors]
                found += [addend.value, *factors] if all(shared) else []
            if operands & squared:
                found += [addend.value, square.value]
    return found


def _squared(value: Var, producers: Producers) -> set[Var]:
    """The values whose squares are summed, by an axis or in a product."""
    eqn = maker(value, producers)
    if eqn is None or eqn.primitive.name not in PRODUCTS | {"reduce_sum"}:
        return set()
    each = (maker(v, producers) for v in eqn.invars)
    roots = (root(e.invars[0], producers) for e in each if e is not None and exponent_of(e) == 2)
    return {r for r in roots if not isinstance(r, Literal)}


def _factors_of(value: Var, producers: Producers) -> list[Var]:
    """The factors of a product of elements, or of a square."""
    eqn = maker(value, producers)
    if eqn is None or not (exponent_of(eqn) == 2 or eqn.primitive.name == "mul"):
        return []
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _operands(value: Var, producers: Producers) -> set[Var]:
    """What a product multiplies, before it was moved."""
    eqn = maker(value, producers)
    each = eqn.invars if eqn is not None and eqn.primitive.name in PRODUCTS else []
    return {r for r in (root(v, producers) for v in each) if not isinstance(r, Literal)}

"""What `autocast` computes in half precision, in two lists: products, and what follows them."""

# A product is in half precision where a matrix unit then computes it faster, or where less is read.
# That is a matter of its sizes alone, so cost is asked first.
#
# Nothing else is faster in half precision, but what follows a product there is read and written in
# two bytes an element instead of four. Each row of the second list says how much that saves.
# Safety, what must be exact for what is computed with it, restricts both lists: see `needs.py`.

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage._base._jax import JaxprEqn, Tracer, is_differentiated
from gainstage._programs import jaxprs, patterns
from gainstage._programs.in_dtype import converted, in_dtype, in_range, is_float32
from gainstage._programs.operations import MOVES, PRODUCTS, Trait, names_with
from gainstage._programs.patterns import exponent_of, moves
from gainstage.precision.calls import Call
from gainstage.precision.needs import STOPS, Need
from gainstage.precision.wide_results import (
    BOUNDED,
    bounded,
    broadcast_product,
    power,
    wide_product,
)
from gainstage.transforms.retrace import SINGLE, Kind, Retraced, as_written, function_of

SUMS = names_with(Trait.SUM)
LARGE_FACTOR = 1024.0  # a number that is too large to multiply half-precision numbers of any size


# ── products ─────────────────────────────────────────────────────────────────────────────────────


class Level(enum.IntEnum):
    """How wide an operation is, from the narrowest to the widest."""

    FLOAT8 = 0  # operands and cotangent of a product; the result is in half precision
    HALF = 1  # the half-precision dtype of the plan
    BFLOAT16 = 2  # beside float16
    RESULT = 3  # the result of a product is in float32, its operands in half precision
    FLOAT32 = 4


class WideProduct(NamedTuple):
    """A row of the list of products: those that it holds for are not in half precision."""

    name: str
    level: Level
    holds: Callable[[Call], bool]
    why: str


def _is_narrow(call: Call) -> bool:
    """Whether a result is that of few columns, or rows, for many rows of data.

    A narrow side beside a long one of a parameter is a small batch, and its result is not what
    costs little. What `jax.vmap` does to the sizes, the program does not show.
    """
    found = patterns.sides(call.eqn)
    if found is None or min(found[0], found[2]) > patterns.NARROW:
        return False
    if len(call.floats) < 2 or call.is_batched:
        return False
    long = 0 if found[0] >= found[2] else 1
    return call.floats[long].kind is not Kind.FREE or call.held[long]


def _is_vector(call: Call) -> bool:
    """Whether an operand has no axis but those that are summed, and those of a batch."""
    axes = _free_axes(call.eqn)
    return bool(axes) and not all(axes) and not call.is_batched


def _is_square(call: Call) -> bool:
    """Whether a product multiplies an array with itself, or vectors: a norm may be large."""
    axes = _free_axes(call.eqn)
    is_square = Need.SQUARE in call.need or not any(axes)
    return bool(axes) and is_square and not call.is_batched


def _free_axes(eqn: JaxprEqn) -> list[int]:
    """How many axes of each operand of a `dot_general` are neither summed nor those of a batch;
    none of another product."""
    if eqn.primitive.name != "dot_general":
        return []
    contracted, batch = eqn.params["dimension_numbers"]
    operands = zip(eqn.invars, contracted, batch, strict=True)
    return [len(jaxprs.array(v).shape) - len(c) - len(b) for v, c, b in operands]


def _is_precise(call: Call) -> bool:
    """Whether the user asks for a product as exact as float32, as by `precision="highest"`.

    On a GPU `Precision.HIGH` is TF32, which has the digits of float16. So it is no such request,
    nor is an algorithm with operands of TF32, float16 or bfloat16, unless it multiplies several
    times for more digits.
    """
    precision = call.eqn.params.get("precision")
    if isinstance(precision, lax.DotAlgorithmPreset):
        return precision.name.startswith(("F32_", "F64_")) or "_X" in precision.name
    if isinstance(precision, lax.DotAlgorithm):
        types = precision.lhs_precision_type, precision.rhs_precision_type
        is_repeated = precision.num_primitive_operations > 1
        return is_repeated or any(jnp.finfo(type_).bits >= 32 for type_ in types)
    each = precision if isinstance(precision, tuple) else (precision,)
    return lax.Precision.HIGHEST in each


def _is_outer(call: Call) -> bool:
    """Whether a product of arrays in float32 sums nothing, as of positions and frequencies."""
    is_dot = call.name == "dot_general"
    return is_dot and not any(call.eqn.params["dimension_numbers"][0]) and not any(call.held)


# A convolution is in half precision whatever its channels. Compiled for an H100, a network of
# depthwise ones reads and writes 17 % more if their results are float32, and 2 % more if those of
# at most 8 channels are; a stem of three channels in float32 adds 11 % to a ResNet and a ViT.
WIDE_PRODUCTS = (
    WideProduct("nothing to cast", Level.FLOAT32, lambda call: not call.floats, "other dtypes"),
    WideProduct("asked for", Level.FLOAT32, _is_precise, 'precision="highest"'),
    WideProduct(
        "exact operands", Level.FLOAT32, lambda call: bool(call.need & Need.OPERANDS),
        "for what is computed with it: see needs.py",
    ),
    WideProduct(
        "small matrices", Level.FLOAT32,
        lambda call: patterns.is_small(call.eqn) and not call.has_one_batch,
        "no unit computes them faster",
    ),
    WideProduct("an outer product", Level.FLOAT32, _is_outer, "it adds nothing up"),
    WideProduct(
        "a square in float32", Level.FLOAT32, lambda call: _is_square(call) and not all(call.held),
        "its operands may be large too",
    ),
    WideProduct("a narrow result", Level.RESULT, _is_narrow, "its few columns cost nothing"),
    WideProduct("a square", Level.RESULT, _is_square, "it may be large"),
    WideProduct("a vector", Level.RESULT, _is_vector, "it may be large, and costs nothing"),
    WideProduct(
        "an exact result", Level.RESULT, lambda call: Need.RESULT in call.need,
        "for what is computed with it: see needs.py",
    ),
)  # fmt: skip


def level_of(call: Call, without: frozenset[str] = frozenset()) -> Level:
    """How wide a product is by default: the first row that holds says so.

    Args:
        call: a product.
        without: the names of rows that are left out, in a study.
    """
    rows = (row for row in WIDE_PRODUCTS if row.name not in without)
    return next((row.level for row in rows if row.holds(call)), Level.HALF)


# ── what follows ─────────────────────────────────────────────────────────────────────────────────


class Follower(NamedTuple):
    """A row of the list of what follows a product in half precision."""

    name: str
    operations: frozenset[str]
    holds: Callable[[Call], bool]
    compute: Callable[[Call], list[Retraced]]
    saves: str  # at most, of what a large model reads and writes on an H100, or of its temporaries


def _follows(call: Call) -> bool:
    """Whether an operation may follow: an operand is in half precision, and what is not may be
    rounded."""
    # What meets a value on the way to a result, such as a bias, may be larger than that.
    is_last = Need.LAST in call.need and not all(call.held)
    if call.need & ~Need.LAST or is_last or not any(call.held):
        return False
    return call.others <= {Kind.FREE, Kind.NORMALISED}


def _multiplies(call: Call) -> bool:
    """Whether a product of elements may follow: one of different ones, by no large number."""
    is_by_much = any(abs(x) >= LARGE_FACTOR for x in call.numbers)
    return not is_by_much and not exponent_of(call.eqn) and _follows(call)


def _is_normalised(call: Call) -> bool:
    """Whether the factor or the bias of a normalisation, which is broadcast, meets its result."""
    is_pair = call.others == {Kind.FREE, Kind.NORMALISED} and bool(call.broadcast)
    return is_pair and not any(call.held) and not call.need


def _is_of_power(call: Call) -> bool:
    """Whether an operand is made of powers."""
    return not call.need and any(value.kind is Kind.POWER for value in call.floats)


def _is_activation(call: Call) -> bool:
    """Whether an operation is a function such as `relu`: cheap, with its own derivative."""
    if not call.is_half or call.need or not all(map(is_float32, call.eqn.invars)):
        return False
    parts = jaxprs.equations(call.eqn.params["call_jaxpr"])
    return all(moves(e) or e.primitive.name in MAY_FOLLOW or jaxprs.called(e) for e in parts)


def may_round(call: Call) -> bool:
    """Whether a plan may have an operation in half precision: it computes, from float32 to float32.

    The others are as by default. A sum grows with the batch, and so does its error; it is small.
    A product of small matrices gains nothing, and coordinates, which come from such, need digits
    near a solution that no measurement at the start asks for.
    """
    name, eqn = call.name, call.eqn
    if moves(eqn) or name in STOPS or name.startswith("custom_") or "callback" in name:
        return False
    if not all(any(map(is_float32, side)) for side in (eqn.invars, eqn.outvars)):
        return False
    is_sum = name in SUMS or all(jaxprs.array(v).size == 1 for v in eqn.outvars)
    return not patterns.is_small(eqn) if name in PRODUCTS else not is_sum


def half(call: Call, is_planned: bool = False) -> list[Retraced]:
    """The results of an operation in half precision.

    Args:
        call: the operation.
        is_planned: whether a plan says so, which has measured what that costs.
    """
    eqn, values, dtype = call.eqn, call.values, call.dtype
    if call.name == "mul" and call.broadcast:
        # A factor of a layer, which may be small, stays in float32, unless a plan has measured it;
        # that of a normalisation is about 1.
        is_measured = is_planned or any(v.kind is Kind.NORMALISED for v in values)
        own = set(map(id, call.broadcast))
        xs = [v.float32 if id(v) in own else converted(v.x, dtype) for v in values]
        return [Retraced(broadcast_product(eqn, xs, dtype if is_measured else SINGLE, dtype))]
    if not all(_holds(dtype, number, is_planned) for number in call.numbers):
        # Linear in the array, so that nothing is kept for the derivative.
        dtypes = [dtype if isinstance(v.x, jax.Array) else SINGLE for v in values]
        xs = [converted(v.x, own) for v, own in zip(values, dtypes, strict=True)]
        with jaxprs.inside(eqn):
            product = jnp.multiply(*(x.astype(SINGLE) for x in xs))
            return [Retraced(product.astype(dtype))]
    pairs = zip(values, eqn.invars, strict=True)
    xs = [
        _rounded_operand(call, value) if is_float32(variable) else value.x
        for value, variable in pairs
    ]
    return [Retraced(x) for x in in_dtype(eqn, xs, dtype, {SINGLE})]


def _rounded_operand(call: Call, value: Retraced) -> jax.Array:
    """An operand of an operation in half precision."""
    x = value.x
    if call.name in ("add", "sub") and any(value is each for each in call.broadcast):
        # The derivative of a bias is a sum over an axis, which stays in float32.
        x = jnp.broadcast_to(value.float32, jaxprs.array(call.eqn.outvars[0]).shape)
    return converted(x, call.dtype)


def _holds(dtype: np.dtype, number: float, is_planned: bool) -> bool:
    """Whether a number that multiplies may be rounded to half precision. A plan has measured what
    that costs, unless the number is subnormal there."""
    if is_planned:
        return not 0 < abs(number) < float(jnp.finfo(dtype).tiny)
    return float(dtype.type(number)) == number


def raised(call: Call) -> list[Retraced]:
    """A power in float32 of what is in half precision, which the backward pass keeps."""
    return [Retraced(power(call.eqn, call.floats[0]), Kind.POWER)]


def _compute_bounded(call: Call) -> list[Retraced]:
    return [Retraced(bounded(call.eqn, call.floats[0].x, call.dtype))]


def activated(call: Call) -> list[Retraced]:
    """The results of an activation and its derivative in half precision."""
    eqn, dtype = call.eqn, call.dtype

    def compute(eqn: JaxprEqn, values: list[Retraced], _: Any) -> list[Retraced]:
        return default(Call(eqn, values, dtype))

    def computed(program: Any, xs: Sequence[jax.Array]) -> list[jax.Array]:
        evaluate = function_of(compute, constant, program, ())
        return [value.x.astype(dtype) for value in evaluate(*map(Retraced, xs))]

    def constant(x: Any) -> Retraced:
        return rounded_constant(x, dtype)

    @jax.custom_jvp
    def activation(*xs: jax.Array) -> list[jax.Array]:
        return computed(eqn.params["call_jaxpr"], xs)

    @activation.defjvp
    def derivative(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> Any:
        def pushed(primals: Any, tangents: Any) -> Any:
            return jax.jvp(lambda *xs: jaxprs.bind(eqn, list(xs)), primals, tangents)

        wide = [jax.ShapeDtypeStruct(x.shape, SINGLE) for x in primals]
        found = computed(jax.make_jaxpr(pushed)(tuple(wide), tuple(wide)), [*primals, *tangents])
        return found[: len(found) // 2], found[len(found) // 2 :]

    return [Retraced(x) for x in activation(*(value.x for value in call.floats))]


MAY_FOLLOW = names_with(Trait.CHEAP)
MOVED = (MOVES | {"convert_element_type"}) - jaxprs.OF_DEVICES
FOLLOWERS = (
    Follower("a move", MOVED, lambda call: moves(call.eqn) and _follows(call), half,
        "49.7% of bytes, PINN, second derivatives (Equinox)"),
    Follower("a bias or a residual", frozenset(("add", "sub")), _follows, half,
        "48.2% of bytes, PINN, second derivatives (Equinox)"),
    Follower("a gate or a factor", frozenset(("mul",)), _multiplies, half,
        "12.8% of bytes, PINN, second derivatives (Equinox)"),
    Follower(
        "a choice", frozenset(("max", "min", "select_n", "clamp", "abs", "neg", "sign")),
        _follows, half,
        "7.0% of temporaries, PINN, second derivatives (Equinox)",
    ),
    Follower("a bounded function", frozenset(("tanh", "logistic", "erf")), _follows, half,
        "48.2% of bytes, PINN, second derivatives (Equinox)"),
    Follower(
        "a normalisation's factor and bias", frozenset(("mul", "add", "sub")), _is_normalised,
        half,
        "16.0% of temporaries, features with an offset (NNX)",
    ),
    Follower(
        "a power", frozenset(("mul", "square", "integer_pow")),
        lambda call: call.is_half and bool(exponent_of(call.eqn)), raised,
        "32.0% of temporaries, features with an offset (NNX)",
    ),
    Follower("a bounded function of a power", frozenset(BOUNDED), _is_of_power, _compute_bounded,
        "32.0% of temporaries, features with an offset (NNX)"),
    Follower(
        "an activation", frozenset(("custom_jvp_call",)), _is_activation, activated,
        "6.5% of bytes, ResNet, BatchNorm (Linen)",
    ),
)  # fmt: skip
BY_OPERATION: dict[str, list[Follower]] = {}
for _row in FOLLOWERS:
    for _name in _row.operations:
        BY_OPERATION.setdefault(_name, []).append(_row)


def rounded_constant(x: Any, dtype: np.dtype) -> Retraced:
    """A constant of a program, which may be rounded if half precision holds it."""
    # What a function closes over and is differentiated is a parameter, as a bound variable is.
    if isinstance(x, Tracer):
        return Retraced(x, Kind.FREE if is_differentiated(x) else Kind.OTHER)
    is_held = getattr(x, "dtype", SINGLE) == SINGLE and in_range(dtype, x)
    return Retraced(x, Kind.FREE if is_held else Kind.OTHER)


def default(call: Call, without: frozenset[str] = frozenset()) -> list[Retraced]:
    """The results of an operation by the two lists; what is in neither is computed in float32.

    Args:
        call: the operation.
        without: as for `level_of`.
    """
    if call.name in PRODUCTS:
        return multiplied(call, level_of(call, without))
    for row in BY_OPERATION.get(call.name, ()):
        if row.name not in without and row.holds(call):
            return row.compute(call)
    return wide(call)


def measured(call: Call) -> list[Retraced]:
    """The results of an operation that a plan keeps in float32, or says nothing of."""
    if call.is_half and exponent_of(call.eqn):
        return raised(call)
    if call.name == "custom_jvp_call" and _is_activation(call):
        return activated(call)
    return wide(call)


def multiplied(call: Call, level: Level) -> list[Retraced]:
    """The result of a product at a level."""
    if level is Level.RESULT:
        operands = [converted(value.x, call.dtype) for value in call.floats]
        return [Retraced(wide_product(call.eqn, operands))]
    return wide(call) if level is Level.FLOAT32 else half(call)


# The kinds of results of operations on kinds.
KINDS: dict[tuple[str | Kind, ...], Kind] = {
    ("add", Kind.FREE, Kind.FREE): Kind.FREE,
    ("sub", Kind.FREE, Kind.FREE): Kind.FREE,
    ("div", Kind.FREE, Kind.ROOT): Kind.INVERSE,
    ("mul", Kind.FREE, Kind.INVERSE): Kind.INVERSE,
    ("mul", Kind.INVERSE, Kind.FREE): Kind.INVERSE,
    ("div", Kind.OTHER, Kind.ROOT): Kind.NORMALISED,
    ("mul", Kind.OTHER, Kind.INVERSE): Kind.NORMALISED,
    ("mul", Kind.INVERSE, Kind.OTHER): Kind.NORMALISED,
}


def wide(call: Call) -> list[Retraced]:
    """The results of an operation in float32."""
    is_exact = bool(call.need & Need.OPERANDS)
    params = patterns.exact_params(call.eqn) if is_exact else None
    return [
        Retraced(value.x, _kind_of_result(call))
        for value in as_written(call.eqn, call.values, params)
    ]


def _kind_of_result(call: Call) -> Kind:
    """The kind of the result of an operation in float32."""
    name, kinds = call.name, [value.kind for value in call.floats]
    own = {Kind.FREE if h else kind for h, kind in zip(call.held, kinds, strict=True)}
    is_cheap = name in ("add", "sub", "mul", "neg")
    if is_cheap and Kind.POWER in own and own <= {Kind.POWER, Kind.FREE}:
        return Kind.POWER
    if name in ("sqrt", "rsqrt"):
        return Kind.ROOT if name == "sqrt" else Kind.INVERSE
    if moves(call.eqn) and len(set(kinds)) == 1:
        return kinds[0]
    return KINDS.get((name, *kinds), Kind.OTHER)

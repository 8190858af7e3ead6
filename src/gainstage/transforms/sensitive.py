"""Which operations must stay in float32 for what is computed with their results.

Half precision rounds 0.9999 to 1, and a small number to 0: a logarithm, a root or a quotient of
that is infinite. So what reaches one through cheap operations is computed in float32, and a product
at the start of that way has a result in float32. So does what reaches the square of a difference of
all pairs, as in a distance: near numbers are subtracted there.
"""

from collections.abc import Mapping, Sequence

from gainstage._core import jaxprs
from gainstage._core._jax import JaxprEqn, Literal, Var
from gainstage._core.jaxprs import AnyJaxpr, Path
from gainstage.transforms.precision_plan import moves
from gainstage.transforms.wide_results import power_of

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


def sensitive(program: AnyJaxpr) -> frozenset[Path]:
    """The paths of the operations from which a singular one is reached."""
    paths: set[Path] = set()
    _visit(program, [False] * len(jaxprs.open_jaxpr(program).outvars), (), paths)
    return frozenset(paths)


def _visit(program: AnyJaxpr, wanted: Sequence[bool], path: Path, paths: set[Path]) -> list[bool]:
    """Adds the paths of a program, of whose results some are wanted; returns for each of its
    arguments whether it is wanted."""
    jaxpr = jaxprs.open_jaxpr(program)
    made = {v: eqn for _, eqn in jaxprs.backwards(jaxpr) for v in eqn.outvars}  # by which equation
    known = {v for v, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted}
    for n, eqn in jaxprs.backwards(jaxpr):
        results = [v in known for v in eqn.outvars]
        parts = jaxprs.changeable(eqn)
        if not parts:
            known.update(_operands(eqn, results, (*path, n), paths))
            known.update(_pairs(eqn, made))
        for part, number in parts:
            own = (*path, n) if number is None else (*path, n, number)
            known.update(_of_part(eqn, part, number, results, own, paths))
    return [v in known for v in jaxpr.invars]


def _operands(eqn: JaxprEqn, results: Sequence[bool], path: Path, paths: set[Path]) -> list[Var]:
    """The operands of an operation that are wanted."""
    name = eqn.primitive.name
    places: Sequence[int] = SINGULAR.get(name, ())
    if name == "integer_pow" and eqn.params["y"] < 0:
        places = (0,)
    if any(results) and name == "dot_general":
        paths.add(path)
    if any(results) and (name in PASSES or moves(eqn)):
        paths.add(path)
        places = range(len(eqn.invars))
    operands = (eqn.invars[i] for i in places)
    return [v for v in operands if not isinstance(v, Literal)]


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


def _of_part(
    eqn: JaxprEqn,
    part: AnyJaxpr,
    number: int | None,
    results: Sequence[bool],
    path: Path,
    paths: set[Path],
) -> list[Var]:
    """The operands of an operation with a program inside that are wanted in it."""
    name = eqn.primitive.name
    count = len(jaxprs.open_jaxpr(part).outvars)
    if name == "while" and number == 0:  # the test of a loop
        results = [False] * count
    arguments = _visit(part, results, path, paths)
    operands = list(eqn.invars)
    if name == "cond":
        operands = operands[1:]
    elif name == "while":
        tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        own = operands[:tests] if number == 0 else operands[tests : tests + bodies]
        operands = [*own, *operands[tests + bodies :]]
    elif name == "scan":
        consts, carries = jaxprs.scan_counts(eqn.params, len(operands))
        again = arguments[consts : consts + carries]
        if any(a and not r for a, r in zip(again, results, strict=False)):
            wanted = [a or r for a, r in zip(again, results, strict=False)]
            arguments = _visit(part, [*wanted, *results[carries:]], path, paths)
    pairs = zip(operands, arguments, strict=True)
    return [v for v, is_wanted in pairs if is_wanted and not isinstance(v, Literal)]

"""Functions that are traced, and run again with some operations computed in another way."""

import contextlib
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base._jax import AbstractValue, ClosedJaxpr, JaxprEqn
from gainstage._base.arrays import partition
from gainstage._base.warn import warn
from gainstage._programs import in_dtype, jaxprs
from gainstage._programs.in_dtype import converted
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage._programs.scopes import KEEPS
from gainstage._programs.true_cotangents import cotangents_times, given_scale, of_no_loss
from gainstage._variables.bridge import assign, read, recorded
from gainstage._variables.types import P, PyTree, R
from gainstage._variables.variable import is_tracing
from gainstage.transforms.models import Changeable, apply_changes, explain, kind_of

SINGLE = np.dtype(np.float32)
# Whether a call is made inside of `keep_float32`. Compiled functions are traced for each of both.
IS_KEPT: Any = jax.make_user_context(False)
# The half-precision dtype of the autocast around a call, "" without one. Compiled functions are
# traced for each.
CAST_TO: Any = jax.make_user_context("")
# An error that says that half precision must be given; a type such as float16[2] is no such name.
REFUSES = re.compile(
    r"(?is)^(?=.*\b(float16|bfloat16|fp16|bf16|f16)\b(?!\[))(?=.*\b(only|must|support|expect))"
)
EAGER_CALLS = 16  # calls outside of a compiled function before a warning


class Kind(enum.Enum):
    """What a value is, as far as rounding is concerned."""

    OTHER = enum.auto()
    # a parameter in any shape, a constant that half precision holds, or a sum of them
    FREE = enum.auto()
    ROOT = enum.auto()
    INVERSE = enum.auto()  # of a root, perhaps times what is free
    NORMALISED = enum.auto()  # another value divided by a root, so its size is about one
    POWER = enum.auto()  # of half-precision values, perhaps times and plus what may be rounded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Retraced:
    """A value of a program."""

    x: Any  # an array, perhaps in half precision though it is float32 in the program
    kind: Kind = dataclasses.field(default=Kind.OTHER, metadata={"static": True})

    @functools.cached_property
    def float32(self) -> jax.Array:
        """The value in float32. One cast serves all uses, so cotangents are added in float32."""
        return converted(self.x, SINGLE)

    def once(self, make: Callable[[Any], Any]) -> Any:
        """What a function makes of the array. One call serves all uses."""
        made = vars(self).setdefault("made", {})
        if make not in made:
            made[make] = make(self.x)
        return made[make]


# `(equation, operands, path) -> results` of an operation.
Compute = Callable[[JaxprEqn, list[Retraced], Path], list[Retraced]]


class Replay(NamedTuple):
    """How one program is run again.

    Args:
        compute: computes an operation, unless it contains a program, or the user keeps it.
        constant: makes a value of a constant of the program.
        done: called after the program was run.
    """

    compute: Compute
    constant: Callable[[Any], Retraced] = Retraced
    done: Callable[[], None] = lambda: None


def replayed(
    fun: Callable[P, R], begin: Callable[[AnyJaxpr], Replay], *, half: str
) -> Callable[P, R]:
    """Returns `fun` with its operations computed in another way.

    It is traced and run again in the context of the caller: it can be differentiated, batched and
    compiled. Variables and models of NNX that it changes are changed by the second run.

    Args:
        fun: a function of pytrees or models.
        begin: called with each program of it; returns how that one is run again.
        half: the dtype of kernels under `half_only`, which are then one operation each.
    """

    def run(program: ClosedJaxpr, arrays: Sequence[Any], arguments: PyTree) -> list[Any]:
        types = [variable.aval for variable in program.outvars]
        with cotangents_times(given_scale(half)):
            if IS_KEPT.value:
                return as_float32_function(program, types)(*arrays)
            replay = begin(program)
            pairs = zip(arrays, _kinds(arguments), strict=True)
            evaluate = function_of(replay.compute, replay.constant, program, types)
            values = evaluate(*(Retraced(x, kind) for x, kind in pairs))
        replay.done()
        return [value.x for value in values]

    again = traced(fun, run, half=half)
    vars(again)["half"] = half
    return again


def half_of(fun: Any) -> str:
    """The half-precision dtype of a function from `replayed`, also of one that
    `functools.partial`, `jax.jit` or `functools.wraps` has made of it; "" of another."""
    while fun is not None:
        half = getattr(fun, "half", "")
        if isinstance(half, str) and half:
            return half
        fun = getattr(fun, "func", None) or getattr(fun, "__wrapped__", None)
    return ""


def traced(
    fun: Callable[P, R],
    run: Callable[[ClosedJaxpr, Sequence[Any], PyTree], list[Any]],
    prepare: Callable[[Any], Any] = lambda x: x,
    half: str | None = None,
) -> Callable[P, R]:
    """Returns `fun`, traced to a program that `run` evaluates.

    Variables and models of NNX that `fun` changes get what `run` returns for them.

    Args:
        fun: a function of pytrees or models.
        run: `(program, its arguments, (args, kwargs) of fun) -> results`.
        prepare: called with each array of the arguments, before the program is traced.
        half: as for `replayed`; None to leave kernels as they are around it.
    """
    untyped: Callable[..., R] = fun
    eager = 0  # calls outside of a compiled function

    @functools.wraps(fun)
    def again(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal eager
        original = args, kwargs
        arrays, static = partition(original)
        variables: list[Any] = []
        runs_now = not is_tracing()  # otherwise an outer trace keeps what it reads
        eager += runs_now
        if eager == EAGER_CALLS:
            eager += 1
            warn(
                f"{checks.brief(fun)} under autocast was called {EAGER_CALLS} "
                f"times outside of jax.jit, and traced each time. Put the step that calls it into "
                f"jax.jit."
            )

        def pure(arrays: Sequence[ArrayLike]) -> tuple[R, PyTree, PyTree]:
            copy = Changeable(original, static.combine(arrays))
            args, kwargs = copy.tree
            with recorded(runs_now) as assigned, _context(half), of_no_loss():
                result = untyped(*args, **kwargs)
                variables[:] = assigned
                return result, read(assigned), copy.changes()

        arrays = list(map(prepare, arrays))
        try:
            program, shapes = jax.make_jaxpr(pure, return_shape=True)(arrays)
        except Exception as error:
            explain(error)
            if half:
                explain_float32(error)
            raise
        found = run(program, arrays, original)
        result, new, changed = jax.tree.unflatten(jax.tree.structure(shapes), found)
        assign(variables, new)
        apply_changes(original, changed)
        return result

    return again


def function_of(
    compute: Compute,
    constant: Callable[[Any], Retraced],
    program: AnyJaxpr,
    types: Sequence[AbstractValue],
    path: Path = (),
    keeps: bool = False,
) -> Callable[..., list[Retraced]]:
    """The function of a program, on values.

    Args:
        compute, constant: as for `Replay`.
        program: a jaxpr.
        types: the types of its first results; others may be in half precision.
        path: the indices of the equations around it.
        keeps: whether the user keeps it in float32.
    """

    def equation(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
        kept = keeps or bool(KEEPS.search(jaxprs.scopes(eqn)))

        def inner(
            program: AnyJaxpr, types: Sequence[AbstractValue], number: int | None
        ) -> Callable[..., list[Retraced]]:
            own = path if number is None else (*path, number)
            return function_of(compute, constant, program, types, own, kept)

        with jaxprs.inside(eqn), eqn.ctx.manager:
            found = jaxprs.rebuilt(eqn, values, inner, settled)
        if found is not None:
            return found
        return as_written(eqn, values) if kept else compute(eqn, values, path)

    def evaluate(*values: Retraced) -> list[Retraced]:
        own = [Retraced(value.x, value.kind) for value in values]  # casts belong to one trace
        found = jaxprs.interpret(program, own, equation, constant, constant, path)
        return [*map(settled, found, types), *found[len(types) :]]

    return evaluate


def as_float32_function(
    program: AnyJaxpr, types: Sequence[AbstractValue]
) -> Callable[..., list[jax.Array]]:
    """The function of a program, on arrays, as it is written."""
    evaluate = function_of(lambda eqn, xs, _: as_written(eqn, xs), Retraced, program, types)
    return lambda *arrays: [value.x for value in evaluate(*map(Retraced, arrays))]


def explain_float32(error: Exception) -> None:
    """Adds what to do to the error of a kernel that takes no float32."""
    note = (
        "Autocast traces a function in float32. Wrap a kernel that takes half precision only in "
        "gainstage.half_only(kernel, float32=another), for example: attend = gainstage.half_only("
        'functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), '
        "float32=jax.nn.dot_product_attention)"
    )
    if REFUSES.search(str(error)) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _context(half: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if half is None else CAST_TO("" if IS_KEPT.value else half)


def as_written(
    eqn: JaxprEqn, values: Sequence[Retraced], params: Mapping[str, Any] | None = None
) -> list[Retraced]:
    """The results of an operation in the dtypes that it has in the program, perhaps with other
    parameters."""
    if eqn.primitive.name == "cond" and jaxprs.is_kernel(eqn):
        found = of_kernel(eqn, values, is_half=False)
        return [settled(v, var.aval) for v, var in zip(found, eqn.outvars, strict=True)]
    settled_values = (settled(v, var.aval).x for v, var in zip(values, eqn.invars, strict=True))
    return [Retraced(x) for x in jaxprs.bind_shared(eqn, list(settled_values), params)]


def of_kernel(eqn: JaxprEqn, values: Sequence[Retraced], is_half: bool = True) -> list[Retraced]:
    """The results of a kernel of `half_only`, by one of its two programs. What is in half precision
    stays so: the casts around the kernel are not computed."""

    def compute(e: JaxprEqn, xs: list[Retraced], path: Path) -> list[Retraced]:
        if e.primitive.name == "convert_element_type":
            (given,), (wanted,) = e.invars, e.outvars
            is_there = getattr(xs[0].x, "dtype", None) == jaxprs.array(wanted).dtype
            if is_there or (in_dtype.is_half(given.aval) and in_dtype.is_float32(wanted)):
                return [Retraced(xs[0].x)]
        return as_written(e, xs)

    program = jaxprs.kernel_of(eqn, is_half)
    with jaxprs.inside_kernel(eqn):
        return jaxprs.interpret(program, values[1:], compute, Retraced, Retraced)


def settled(value: Retraced, aval: AbstractValue) -> Retraced:
    """A value in the dtype that it has in the program."""
    is_float32 = getattr(aval, "dtype", None) == SINGLE and hasattr(value.x, "dtype")
    is_rounded = is_float32 and value.x.dtype != SINGLE
    return Retraced(value.float32 if is_rounded else value.x)


def _kinds(arguments: PyTree) -> list[Kind]:
    """For each array of (args, kwargs), what it is: parameters may be rounded."""
    args, kwargs = arguments
    parts = [*args, *(kwargs[name] for name in sorted(kwargs))]
    own = [(i == 0 and bool(args)) or kind_of(part).is_model for i, part in enumerate(parts)]
    kinds = [Kind.FREE if o else Kind.OTHER for o in own]
    return [kind for kind, part in zip(kinds, parts, strict=True) for _ in partition(part)[0]]

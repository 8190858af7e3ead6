"""Programs as JAX traces them, finished: their equations read, counted, and run again."""

# `interpret` serves two kinds of work. One has concrete values, as the X-ray, which runs a
# differentiated program operation by operation. The other has traced values: `bridge.select` and
# transformations of functions run a program again to change it, and JAX compiles or differentiates
# the result. A program is what `jax.make_jaxpr` returns, or an inner program of an equation.

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar, cast

import jax
from jax.typing import ArrayLike

from gainstage._base._jax import (
    AbstractValue,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    ShapedArray,
    Var,
    dce_jaxpr,
    given_arrays,
    is_differentiated,
    new_jaxpr_eqn,
    primitives,
    source_info_util,
)
from gainstage._programs.backward_at import (
    OWN_DERIVATIVE,
    backward_at,
    factor_of,
    is_backward_at,
)
from gainstage._programs.operations import Trait, names_with
from gainstage._programs.scopes import KERNEL
from gainstage._programs.true_cotangents import (
    cotangents_times,
    scale_of_cotangents,
    with_true_cotangents,
)

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
V = TypeVar("V")  # what a program is run on, such as an array or its description
Path = tuple[int, ...]  # the indices of an equation and of those around it

# A program and the types of its first results, and its number if an equation has several.
FunctionOf = Callable[[AnyJaxpr, Sequence[AbstractValue], int | None], Callable[..., list[V]]]
Cast = Callable[[V, AbstractValue], V]

CALLS = names_with(Trait.CALL)
CALLBACKS = names_with(Trait.CALLBACK)
OPAQUE = names_with(Trait.OPAQUE)
OF_DEVICES = names_with(Trait.DEVICES)


def interpret(
    program: AnyJaxpr,
    values: Sequence[V],
    compute: Callable[[JaxprEqn, list[V], Path], Sequence[V]],
    constant: Callable[[Any], V] = lambda array: array,
    number: Callable[[Any], V] = lambda number: number,
    path: Path = (),
) -> list[V]:
    """Runs through a program; returns its results.

    Equations whose results nobody uses are left out. A value is dropped after its last use.

    Args:
        program: a jaxpr, with or without its constants.
        values: its arguments, of any type that `compute` takes.
        compute: `(equation, operands, path) -> results`.
        constant: makes a value of an array that the program contains.
        number: makes a value of a number that an equation contains.
        path: the indices of the equations around the program; `compute` gets its own behind them.
    """
    jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    environment = dict(zip(jaxpr.constvars, map(constant, constants), strict=True))
    environment.update(zip(jaxpr.invars, values, strict=True))
    del values
    used = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
    last = {v: n for n, some in enumerate(used) for v in some if not isinstance(v, Literal)}
    indices = itertools.count(), itertools.count(-1, -1)  # as in `_indexed`
    for n, eqn in enumerate(jaxpr.eqns):
        index = next(indices[eqn.primitive.name in OF_DEVICES])
        if eqn.effects or any(variable in last for variable in eqn.outvars):
            each = (number(v.val) if isinstance(v, Literal) else environment[v] for v in eqn.invars)
            environment.update(
                zip(eqn.outvars, compute(eqn, list(each), (*path, index)), strict=True)
            )
        for variable in eqn.invars:
            if not isinstance(variable, Literal) and last[variable] == n:
                environment.pop(variable, None)
    return [number(v.val) if isinstance(v, Literal) else environment[v] for v in jaxpr.outvars]


def with_selects(
    program: ClosedJaxpr, applies: Var, old: Mapping[Var, Var]
) -> tuple[ClosedJaxpr, set[Var]]:
    """A program in which some values are others unless something applies, and which values are so:
    those that one of its equations computes.

    Args:
        program: a program.
        applies: its argument that decides, a bool scalar.
        old: for each such value, the argument of the same type that it is if `applies` is False.
    """
    equations, selected = list[JaxprEqn](), set[Var]()
    for eqn in program.jaxpr.eqns:
        new = {v: Var(v.aval) for v in eqn.outvars if v in old}
        selected |= new.keys()
        equations.append(eqn.replace(outvars=[new.get(v, v) for v in eqn.outvars]) if new else eqn)
        equations += [
            new_jaxpr_eqn(
                [applies, old[v], n], [v], primitives.select_n_p, {}, set(),
                source_info=eqn.source_info, ctx=eqn.ctx,
            )
            for v, n in new.items()
        ]  # fmt: skip
    return ClosedJaxpr(program.jaxpr.replace(eqns=equations), program.consts), selected


def bind(
    eqn: JaxprEqn, values: Sequence[ArrayLike], params: Mapping[str, Any] | None = None
) -> list[jax.Array]:
    """Evaluates an equation, with the user's source line and the names of its layers.

    Args:
        eqn: an equation.
        values: its operands.
        params: the parameters to use instead of its own.
    """
    parameters = dict(eqn.params if params is None else params)
    if "bwd" in parameters:  # of a `jax.custom_vjp`
        parameters["bwd"] = given_arrays(parameters["bwd"])
    scale = scale_of_cotangents() if "bwd" in parameters else None
    with inside(eqn), eqn.ctx.manager:
        if scale is not None:
            call = lambda *xs: eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(parameters))  # noqa: E731
            return with_true_cotangents(call, values, scale, parameters["num_consts"])
        found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(parameters))
    return list(found) if eqn.primitive.multiple_results else [found]


def bind_shared(
    eqn: JaxprEqn, values: Sequence[ArrayLike], params: Mapping[str, Any] | None = None
) -> list[jax.Array]:
    """As `bind`; but an operation that is used often is differentiated once."""
    chosen = eqn.primitive.get_bind_params(dict(eqn.params if params is None else params))
    key = tuple(chosen.items())
    if not (any(map(is_differentiated, values)) and _is_shared(key)):
        return bind(eqn, values, params)
    with inside(eqn), eqn.ctx.manager:
        return _function_of(eqn.primitive, key)(*values)


@functools.lru_cache(4096)
def _function_of(
    primitive: Primitive, params: tuple[tuple[str, Any], ...]
) -> Callable[..., list[jax.Array]]:
    """An operation as a function of its own, of which JAX keeps the derivative."""

    def operation(*values: ArrayLike) -> list[jax.Array]:
        found = primitive.bind(*values, **dict(params))
        return list(found) if primitive.multiple_results else [found]

    return jax.jit(operation, inline=True)


def _is_shared(params: tuple[tuple[str, Any], ...]) -> bool:
    """Whether the parameters of an equation can stand in others: they contain no program, which
    belongs to one trace, and can be compared."""
    each = (part for _, p in params for part in (p if isinstance(p, (tuple, list)) else (p,)))
    if any(callable(part) or hasattr(part, "eqns") for part in each):
        return False
    try:
        hash(params)
    except TypeError:
        return False
    return True


def inside(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """A context in which new equations get the source line and the scopes of `eqn`."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=names)


def scopes(eqn: JaxprEqn) -> str:
    """The names of the scopes around an equation, as `jax.named_scope` sets them."""
    return str(source_info_util.current_name_stack() + eqn.source_info.name_stack)


def is_kernel(eqn: JaxprEqn) -> bool:
    """Whether an equation is a kernel of `half_only`: a `cond` with two programs, in half precision
    and in float32. It keeps its scope when it is differentiated and batched."""
    return eqn.primitive.name == "cond" and KERNEL in str(eqn.source_info.name_stack)


def kernel_of(eqn: JaxprEqn, is_half: bool) -> AnyJaxpr:
    """The program of a kernel of `half_only`, in half precision or in float32."""
    return cast(AnyJaxpr, eqn.params["branches"][0 if is_half else 1])


def inside_kernel(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """As `inside`, for the program of a kernel: what branches in it is no kernel itself."""
    own = [part for part in eqn.source_info.name_stack.stack if part.name != KERNEL]
    names = source_info_util.current_name_stack() + source_info_util.NameStack(tuple(own))
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=names)


def name_of(eqn: JaxprEqn) -> str:
    """The name of an operation, as a plan has it."""
    return "half_only" if is_kernel(eqn) else eqn.primitive.name


def changeable(eqn: JaxprEqn) -> list[tuple[AnyJaxpr, int | None]]:
    """The programs inside an equation that `rebuilt` can change, each with its place if the
    equation has several. Functions with their own derivatives and kernels have none."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("remat", "remat2", "checkpoint", "scan", "shard_map"):
        return [(params["jaxpr"], None)]
    if name == "while":
        return [(params["cond_jaxpr"], 0), (params["body_jaxpr"], 1)]
    if name == "cond":
        branches = [] if is_kernel(eqn) else params["branches"]
        return [(branch, n) for n, branch in enumerate(branches)]
    if name in OWN_DERIVATIVE and is_backward_at(eqn):
        return [(params["call_jaxpr"], None)]
    program = None if name.startswith("custom_") else called(eqn)
    return [] if program is None else [(program, None)]


def operations(program: AnyJaxpr) -> Iterator[tuple[Path, JaxprEqn]]:
    """The paths and equations of a program, without those that contain a changeable program."""
    return ((path, eqns[-1]) for path, eqns in operations_within(program))


def operations_within(
    program: AnyJaxpr, path: Path = (), around: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[Path, tuple[JaxprEqn, ...]]]:
    """As `operations`, each equation with those around it, the outermost first."""
    for n, eqn in _indexed(open_jaxpr(program)):
        parts, eqns = changeable(eqn), (*around, eqn)
        for part, number in parts:
            own = (*path, n) if number is None else (*path, n, number)
            yield from operations_within(part, own, eqns)
        if not parts:
            yield (*path, n), eqns


def backwards(program: AnyJaxpr) -> Iterator[tuple[int, JaxprEqn]]:
    """The numbers and equations of a program, the last one first."""
    return reversed(_indexed(open_jaxpr(program)))


def _indexed(jaxpr: Jaxpr) -> list[tuple[int, JaxprEqn]]:
    """The equations with their indices. Those that `jax.shard_map` adds count by themselves, from
    -1 downwards: the others have the same indices outside of it."""
    indices = itertools.count(), itertools.count(-1, -1)
    return [(next(indices[eqn.primitive.name in OF_DEVICES]), eqn) for eqn in jaxpr.eqns]


def rebuilt(
    eqn: JaxprEqn, values: Sequence[V], function_of: FunctionOf[V], typed: Cast[V]
) -> list[V] | None:
    """Evaluates an equation with programs inside, after a change to these programs.

    Calls are inlined. Loops, branches, `jax.checkpoint` and `jax.shard_map` are built again, so
    that the result can be differentiated.

    Args:
        eqn: an equation.
        values: its operands, pytrees with one array each.
        function_of: `(program, types, number) -> function of values`, with first results of these
            types. `number` is the place of the program if the equation has several, else None.
        typed: `(value, type) -> value` of that type, for the first carry of a loop.

    Returns:
        The results, or None if the equation has no changeable program.
    """
    name, params, parts = eqn.primitive.name, eqn.params, changeable(eqn)
    if not parts:
        return None
    if name == "scan":
        return _scan(params, values, function_of, typed)
    if name == "while":
        return _while(params, values, function_of, typed)
    if name == "cond":
        types = [variable.aval for variable in eqn.outvars]
        (index,) = jax.tree.leaves(values[0])
        return jax.lax.switch(index, [function_of(b, types, n) for b, n in parts], *values[1:])
    ((program, _),) = parts
    if name == "shard_map":
        types = [variable.aval for variable in open_jaxpr(program).outvars]
        body = function_of(program, types, None)
        return jax.shard_map(
            lambda *values: body(*values),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )(*values)
    body = function_of(program, (), None)
    if name in OWN_DERIVATIVE:  # of which only this can be changed
        scale, factor = scale_of_cotangents(), factor_of(eqn, values)
        whole = None if scale is None else scale * factor

        def inner(whole: jax.Array | None, *values: V) -> list[V]:
            with cotangents_times(whole):
                return body(*values)

        return list(backward_at(inner, factor)(whole, *values))
    if name in ("remat", "remat2", "checkpoint"):
        options = {key: params[key] for key in ("policy", "prevent_cse") if key in params}
        body = jax.checkpoint(body, **options)
    return body(*values)


def _scan(
    params: Mapping[str, Any], values: Sequence[V], function_of: FunctionOf[V], typed: Cast[V]
) -> list[V]:
    consts, carries = scan_counts(params, len(values))
    first = values[consts : consts + carries]
    types = [variable.aval for variable in open_jaxpr(params["jaxpr"]).outvars[:carries]]
    body = function_of(params["jaxpr"], types, None)

    def turn(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        found = body(*values[:consts], *carry, *row)
        return found[:carries], found[carries:]

    carry, rows = jax.lax.scan(
        turn,
        list(map(typed, first, types)),
        list(values[consts + carries :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *rows]


def _while(
    params: Mapping[str, Any], values: Sequence[V], function_of: FunctionOf[V], typed: Cast[V]
) -> list[V]:
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    fixed, first = values[: tests + bodies], values[tests + bodies :]
    types = [variable.aval for variable in open_jaxpr(params["body_jaxpr"]).outvars]
    test = function_of(params["cond_jaxpr"], (), 0)
    body = function_of(params["body_jaxpr"], types, 1)
    return jax.lax.while_loop(
        lambda carry: jax.tree.leaves(test(*fixed[:tests], *carry))[0],
        lambda carry: body(*fixed[tests:], *carry),
        list(map(typed, first, types)),
    )


def open_jaxpr(program: AnyJaxpr) -> Jaxpr:
    """A program without its constants."""
    # In jax 0.10, `make_jaxpr` returns a wrapper of this jaxpr. Since 0.11 a jaxpr is its own
    # `jaxpr`, which JAX calls a legacy name.
    return cast(Jaxpr, getattr(program, "jaxpr", program))


def array(variable: Var | Literal) -> ShapedArray:
    """The shape and dtype of an operand or a result."""
    return cast(ShapedArray, variable.aval)


def inner(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """The programs that an equation contains."""
    each = [p if isinstance(p, (tuple, list)) else (p,) for p in eqn.params.values()]
    return [p for ps in each for p in ps if hasattr(p, "eqns")]


def called(eqn: JaxprEqn) -> AnyJaxpr | None:
    """The inner program of an equation that is only a call, or None."""
    found = inner(eqn) if eqn.primitive.name in CALLS else []
    fits = found and len(open_jaxpr(found[0]).invars) == len(eqn.invars)
    return found[0] if fits else None


def scan_counts(params: Mapping[str, Any], operands: int) -> tuple[int, int]:
    """The number of constants and the number of carries among the operands of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    parts = params["ft_in"].update(range(operands)).unpack()  # since jax 0.12
    return len(list(parts[0])), len(list(parts[1]))


def count(program: AnyJaxpr) -> int:
    """The number of equations that are run; a `while` loop counts as one iteration."""
    total = 0
    for eqn in open_jaxpr(program).eqns:
        name, each = eqn.primitive.name, [count(p) for p in inner(eqn)]
        if name == "scan":
            total += each[0] * eqn.params["length"]
        elif name == "while":
            total += sum(each)
        elif name == "cond":
            total += max(each)
        else:
            total += 1 if called(eqn) is None else each[0]
    return total


def equations(program: AnyJaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program and of those inside it."""
    for eqn in open_jaxpr(program).eqns:
        yield eqn
        for part in inner(eqn):
            yield from equations(part)


def repeated(program: AnyJaxpr, times: int = 1) -> Iterator[tuple[int, JaxprEqn]]:
    """As `equations`, each with how often it is run; a `while` loop counts as one iteration."""
    for eqn in open_jaxpr(program).eqns:
        yield times, eqn
        for part in inner(eqn):
            yield from repeated(part, times * eqn.params.get("length", 1))


def calls_back(program: AnyJaxpr) -> bool:
    """Whether a program calls Python code, which may raise."""
    # `jax.debug.print` has an effect; `jax.pure_callback` has a name and no effect.
    names = (eqn.primitive.name for eqn in equations(program))
    return bool(program.effects) or any("callback" in name for name in names)


def without_dead_code(program: AnyJaxpr) -> Jaxpr:
    """A program without what its results do not depend on, at any depth."""
    jaxpr = open_jaxpr(program)
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def used_arguments(program: AnyJaxpr) -> list[bool]:
    """Whether the only result of a program depends on each argument."""
    return dce_jaxpr(open_jaxpr(program), [True])[1]

"""Programs as JAX traces them: the only module that runs through the equations of a jaxpr.

`run` serves two kinds of work. One has concrete values, as the X-ray, which runs a differentiated
program operation by operation. The other has traced values: `bridge.select` and transformations of
functions run a program again to change it, and JAX compiles or differentiates the result.

A program is what `jax.make_jaxpr` returns, or an inner program of an equation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gainstage._core._jax import Literal, dce_jaxpr, source_info_util

# Operations that only call one inner program.
CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "core_closed_call", "remat", "remat2", "checkpoint",
     "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "named_call",
     "custom_transpose_call", "xla_call")
)  # fmt: skip
CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
# Operations with a program inside that is not written in operations of JAX on whole arrays.
OPAQUE = frozenset(
    ("shard_map", "pallas_call", "custom_partitioning", "run_state", "core_map", "ffi_call",
     "custom_call", "tpu_custom_call", "triton_kernel_call")
)  # fmt: skip


def run(
    program: Any,
    values: Sequence[Any],
    compute: Callable[[Any, list[Any], tuple[int, ...]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda array: array,
    number: Callable[[Any], Any] = lambda number: number,
    path: tuple[int, ...] = (),
) -> list[Any]:
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
    jaxpr = open_jaxpr(program)
    known = dict(zip(jaxpr.constvars, map(constant, getattr(program, "consts", ())), strict=True))
    known.update(zip(jaxpr.invars, values, strict=True))
    del values
    used = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
    last = {v: n for n, some in enumerate(used) for v in some if not isinstance(v, Literal)}
    for n, eqn in enumerate(jaxpr.eqns):
        if eqn.effects or any(variable in last for variable in eqn.outvars):
            each = (number(v.val) if isinstance(v, Literal) else known[v] for v in eqn.invars)
            known.update(zip(eqn.outvars, compute(eqn, list(each), (*path, n)), strict=True))
        for variable in eqn.invars:
            if not isinstance(variable, Literal) and last[variable] == n:
                known.pop(variable, None)
    return [number(v.val) if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]


def bind(eqn: Any, values: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Evaluates an equation, with the user's source line and the names of its layers.

    Args:
        eqn: an equation.
        values: its operands.
        params: the parameters to use instead of its own.
    """
    chosen = eqn.primitive.get_bind_params(dict(eqn.params if params is None else params))
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names), eqn.ctx.manager:
        found = eqn.primitive.bind(*values, **chosen)
    return list(found) if eqn.primitive.multiple_results else [found]


def open_jaxpr(program: Any) -> Any:
    """A program without its constants."""
    # In jax 0.10, `make_jaxpr` returns a wrapper of this jaxpr. Since 0.11 a jaxpr is its own
    # `jaxpr`, which JAX calls a legacy name.
    return getattr(program, "jaxpr", program)


def inner(eqn: Any) -> list[Any]:
    """The programs that an equation contains."""
    each = [p if isinstance(p, (tuple, list)) else (p,) for p in eqn.params.values()]
    return [p for ps in each for p in ps if hasattr(p, "eqns")]


def called(eqn: Any) -> Any:
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


def count(program: Any) -> int:
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


def equations(program: Any) -> Iterator[Any]:
    """All equations of a program and of those inside it."""
    for eqn in open_jaxpr(program).eqns:
        yield eqn
        for part in inner(eqn):
            yield from equations(part)


def calls_back(program: Any) -> bool:
    """Whether a program calls Python code, which may raise."""
    # `jax.debug.print` has an effect; `jax.pure_callback` has a name and no effect.
    names = (eqn.primitive.name for eqn in equations(program))
    return bool(program.effects) or any("callback" in name for name in names)


def used_arguments(program: Any) -> list[bool]:
    """Whether the only result of a program depends on each argument."""
    return dce_jaxpr(open_jaxpr(program), [True])[1]

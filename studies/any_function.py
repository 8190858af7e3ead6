"""Whether `gs.autocast` keeps the gradients of ordinary functions.

Each function of `functions/` is differentiated at usual numbers, and with its data (or parameters)
at 100 times and at 1/100 of them: in float32, under `gs.autocast` with its default rules in float16
and bfloat16, with a plan of `precision.find_plan`, and under `torch.autocast` on a CPU, where torch
is installed. XLA keeps all roundings to half precision.

A gradient is right within 2 % of the norm. Left out, and counted, are cases in which float32 has no
gradient, or in which inputs, parameters, products or their operands do not
fit float16. Counted apart are those in
which inputs and parameters that are rounded to float16 once move the gradient in float32 by more.
Results are written after each function; one that is there is not repeated.
"""

import argparse
import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from rich.progress import track

import gainstage as gs
from benchmarks.harness import environment, file_to_write
from gainstage._programs.jaxprs import scan_counts
from gainstage.precision import find_plan

from . import DOCS, RESULTS
from . import any_function_page as page
from .any_function_page import COUNTED, MOVED, NO_FLOAT32, NO_GRADIENT, RIGHT, TOO_LARGE, Row
from .autocast_keeps_the_gradient import PRODUCTS, at_the_largest_scale, error, scaled
from .functions import Function, corpus
from .functions.spaces import JAX, of_torch

FACTORS = (1.0, 100.0, 0.01)
PLANNED = (1.0, 100.0)  # the factors at which a plan is measured
AGREES = 1e-3  # the largest difference of a twin in float32
LARGEST = 65504.0
SCALES = tuple(2.0**exponent for exponent in range(15, -61, -3))
# Programs are small, so it is the compiler that takes the time.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" + (
    " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
)
KEEP_ROUNDINGS = {"xla_allow_excess_precision": False}

# ── what float32 says ────────────────────────────────────────────────────────────────────────


def largest(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A program of a loss, and of the largest of its parameters, inputs, and products and their
    operands."""

    def found(params: Any, data: Any) -> Any:
        closed = jax.make_jaxpr(loss)(params, data)
        args = jax.tree.leaves((params, data))
        floats = [arg for arg in args if jnp.issubdtype(arg.dtype, jnp.floating)]
        start = jnp.max(jnp.stack([jnp.abs(arg).max() for arg in floats]))
        outs, top = walked(closed.jaxpr, closed.consts, args, start)
        return outs[0], top

    return jax.jit(found)


def walked(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], top: Any) -> tuple[Any, Any]:
    """What a program returns, and the largest of `top`, its products and their operands."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        outs, top = computed(eqn, [read(variable) for variable in eqn.invars], top)
        values |= dict(zip(eqn.outvars, outs, strict=True))
    return [read(variable) for variable in jaxpr.outvars], top


def computed(eqn: Any, args: list[Any], top: Any) -> tuple[Any, Any]:
    """The results of one operation, and the largest number."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        inner, (fixed, carried) = params["jaxpr"], scan_counts(params, len(args))
        carries = fixed + carried

        def turn(carry: Any, xs: Any) -> Any:
            outs, top = walked(inner.jaxpr, inner.consts, [*args[:fixed], *carry[0], *xs], carry[1])
            return (outs[: carries - fixed], top), outs[carries - fixed :]

        start, xs = (args[fixed:carries], top), args[carries:]
        (carry, top), ys = lax.scan(
            turn, start, xs, length=params["length"], reverse=params["reverse"]
        )
        return [*carry, *ys], top
    if name == "cond":
        branches = [
            lambda *args, b=branch: walked(b.jaxpr, b.consts, args[1:], args[0])
            for branch in params["branches"]
        ]
        return lax.switch(args[0], branches, top, *args[1:])
    inside = list(jaxprs_in_params(params))
    if len(inside) == 1 and len(inside[0].invars) == len(args) and name != "while":
        closed = next(v for v in params.values() if getattr(v, "jaxpr", v) is inside[0])
        return walked(inside[0], getattr(closed, "consts", ()), args, top)
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    outs = outs if eqn.primitive.multiple_results else [outs]
    if name in PRODUCTS:
        for x in (*args, outs[0]):
            top = jnp.maximum(top, jnp.abs(x).max(initial=0).astype(top.dtype))
    return outs, top


def rounded(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The numbers as float16 has them."""
    with np.errstate(over="ignore"):
        return {
            name: x.astype(np.float16).astype(np.float32) if x.dtype == np.float32 else x
            for name, x in arrays.items()
        }


# ── gradients ────────────────────────────────────────────────────────────────────────────────


def gradient(program: Any, params: Any, data: Any) -> list[np.ndarray] | None:
    """The gradients of a program of `scaled`; None if no loss scale fits."""
    return at_the_largest_scale(program, params, data, SCALES)


def fits(program: Any, params: Any, data: Any) -> bool:
    """Whether the gradients are finite at a loss scale of 1 or more."""
    usual = [scale for scale in SCALES if scale >= 1]
    return at_the_largest_scale(program, params, data, usual) is not None


def of_torch_in(
    function: Function, space: Any, params: Any, data: Any, dtype: str | None
) -> list[np.ndarray] | None:
    """The gradients of a twin, under autocast in this dtype."""
    import torch

    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in params.items()}
    batch = {
        name: torch.tensor(x if x.dtype == np.float32 else x.astype(np.int64))
        for name, x in data.items()
    }
    half = torch.autocast("cpu", getattr(torch, dtype)) if dtype else contextlib.nullcontext()
    with half:
        loss = function.loss(space)(leaves, batch)
    inputs = [leaves[name] for name in sorted(leaves)]
    for scale in SCALES:
        found = torch.autograd.grad(
            loss.float() * scale, inputs, retain_graph=True, allow_unused=True
        )
        grads = [
            np.zeros(leaf.shape) if g is None else g.double().numpy() / scale
            for g, leaf in zip(found, inputs, strict=True)
        ]
        if all(np.isfinite(g).all() for g in grads):
            return grads
    return None


def judged(found: list[np.ndarray] | None, exact: list[np.ndarray]) -> tuple[str, float | None]:
    """The class of a gradient, and its error."""
    if found is None:
        return "not finite", None
    off = error(found, exact)
    return ("right" if off <= RIGHT else "off"), float(f"{off:.3g}")


def attempt(compute: Callable[[], Any], exact: list[np.ndarray]) -> Row:
    """What a dtype makes of a case: a class, an error, and what we say about it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            kind, off = judged(compute(), exact)
        except Exception as problem:
            is_ours = str(problem).startswith("Expected")
            text = f"{type(problem).__name__}: {problem}"[:300]
            return {"is": "refused" if is_ours else "error", "says": text}
    row: Row = {"is": kind, "error": off}
    ours = [str(w.message) for w in seen if "find_plan" in f"{w.message}{w.filename}"
            or "autocast" in str(w.message) or "max_error" in str(w.message)]  # fmt: skip
    return row | ({"says": ours[0][:300]} if ours else {})


def examined(
    function: Function, space: Any = None, arms: Sequence[str] = ("autocast", "bfloat16")
) -> Row:
    """What the study says about a function without a plan; torch needs its namespace."""
    loss = function.loss(JAX)
    programs = {
        name: jax.jit(scaled(each), compiler_options=KEEP_ROUNDINGS)
        for name, each in (
            ("float32", loss),
            ("autocast", gs.autocast(loss)),
            ("bfloat16", gs.autocast(loss, "bfloat16")),
        )
    }
    top, cases = largest(loss), {}
    for factor in FACTORS:
        params, data = function.arguments(factor)
        exact = gradient(programs["float32"], params, data)
        value, most = top(params, data)
        case: Row = {"status": COUNTED}
        cases[f"{factor:g}"] = case
        if exact is None or not np.isfinite(value):
            case["status"] = NO_FLOAT32
            continue
        if not any(g.any() for g in exact):
            case["status"] = NO_GRADIENT
            continue
        case["largest"] = float(f"{float(most):.3g}")
        if not case["largest"] < LARGEST:
            case["status"] = TOO_LARGE
            continue
        once = error(gradient(programs["float32"], rounded(params), rounded(data)), exact)
        case["moved"] = float(f"{once:.2g}")
        if not once <= RIGHT:
            case["status"] = MOVED
        for arm in arms:
            case[arm] = attempt(functools.partial(gradient, programs[arm], params, data), exact)
        is_traced = case["autocast"]["is"] in ("right", "off", "not finite")
        if is_traced and not fits(programs["autocast"], params, data):
            case["needs a scale below 1"] = True
        if space is not None and function.has_twin:
            case |= of_twin(function, space, params, data, exact)
    return {"family": function.family, "scales": function.scales, "cases": cases}


def with_plans(function: Function, row: Row) -> Row:
    """The same, with a plan for each case that has a gradient."""
    loss = function.loss(JAX)
    program = jax.jit(scaled(loss), compiler_options=KEEP_ROUNDINGS)
    for factor in PLANNED:
        params, data = function.arguments(factor)
        case = row["cases"][f"{factor:g}"]
        if case["status"] in (COUNTED, MOVED):
            exact = gradient(program, params, data)
            case["plan"] = attempt(functools.partial(planned, loss, params, data), exact)
    return row | {"planned": True}


def renewed(row: Row, own: Row) -> Row:
    """A row with new results by default rules, and those of plans and of torch as they were."""
    cases = {factor: row["cases"][factor] | case for factor, case in own["cases"].items()}
    return row | own | {"cases": cases}


def planned(loss: Callable[..., Any], params: Any, data: Any) -> list[np.ndarray] | None:
    """The gradients with a plan of these numbers."""
    plan = find_plan(loss, params, [(data,)], max_error=0.005, progress=False)
    program = jax.jit(scaled(gs.autocast(loss, plan)), compiler_options=KEEP_ROUNDINGS)
    return gradient(program, params, data)


def of_twin(function: Function, space: Any, params: Any, data: Any, exact: Any) -> Row:
    """The rows of torch, or why there are none."""
    twin = of_torch_in(function, space, params, data, None)
    off = error(twin, exact)
    if not off <= AGREES:
        return {"twin differs by": float(f"{off:.2g}")}
    return {
        f"torch {dtype}": attempt(
            lambda dtype=dtype: of_torch_in(function, space, params, data, dtype), exact
        )
        for dtype in ("float16", "bfloat16")
    }


# ── the run ──────────────────────────────────────────────────────────────────────────────────────


def torch_or_none() -> Any:
    """The namespace of torch, where it is installed."""
    try:
        return of_torch()
    except ModuleNotFoundError:
        return None


def write(found: Row, path: Path) -> None:
    """Writes the results, a line for each function, and lets compiled programs go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    rows = ",\n".join(f"{json.dumps(n)}: {json.dumps(r)}" for n, r in found["functions"].items())
    head = json.dumps({name: part for name, part in found.items() if name != "functions"})
    part.write_text(f'{head[:-1]},\n"functions": {{\n{rows}\n}}}}\n')
    os.replace(part, path)
    jax.clear_caches()


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is missing in the results, then writes the table of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every tenth function")
    parser.add_argument("--no-plans", action="store_true", help="default rules alone")
    parser.add_argument(
        "--again", action="store_true", help="default rules again, in results that are there"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some functions, by name")
    output = RESULTS / "autocast" / "any_function.json"
    parser.add_argument("--output", type=file_to_write, default=output)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args(argv)
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    every, space = corpus(), torch_or_none()
    names = options.only or list(every)[:: 10 if options.quick else 1]
    found: Row = json.loads(options.output.read_text()) if options.output.exists() else {}
    functions = found.setdefault("functions", {})
    if space is not None:
        found["torch"] = space.__version__

    def add(name: str, row: Row) -> None:
        functions[name], found["environment"] = row, environment()
        write(found, options.output)

    for name in () if options.report else track(names, "default rules"):
        if name not in functions:
            add(name, examined(every[name], space))
        elif options.again:
            add(name, renewed(functions[name], examined(every[name])))
    for name in () if options.report or options.no_plans else track(names, "plans"):
        if "planned" not in functions[name]:
            add(name, with_plans(every[name], functions[name]))
    functions = {name: functions[name] for name in names if name in functions}
    print(page.markdown(functions), page.listed(functions), sep="\n\n")
    print("reaches the goal" if page.reaches_the_goal(functions) else "misses the goal")
    if not (options.quick or options.only):
        page.write(functions, options.docs)


if __name__ == "__main__":
    main()

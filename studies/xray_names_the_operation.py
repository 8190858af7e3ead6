"""The X-ray names the operation and the layer of 200 planted faults, and what it prescribes works.

Each fault is planted behind one layer of one model: an overflow in the forward or the backward
pass, an underflow, a formula or a mask that is not finite, NaN in the data or in a parameter;
plain, or inside of jit, remat, scan, cond or vmap. What is right is known from where it was
planted. The same faults are given to `jax.debug_nans`, `jax.debug_infs` and `checkify`.
"""

import argparse
import collections
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify

from benchmarks.harness import between_marks, environment, file_to_write
from gainstage import xray

from . import DOCS, RESULTS, planted
from .planted import HALF, MODELS, Fault, Model

COUNT, HEALTHY, SCALE = 200, 100, 2.0**10


class Kind(NamedTuple):
    """A kind of fault: what is planted, and which operations it may rightly be called."""

    group: str
    fault: Fault | None
    operations: frozenset[str]
    is_backward: bool = False
    scale: float = SCALE
    has_remedy: bool = True


class Case(NamedTuple):
    """One fault in one model."""

    model: str
    seed: int
    place: str
    kind: str
    wrapper: str


# ── faults ───────────────────────────────────────────────────────────────────────────────────

BIG = 2.0**15


def _through(inside: Callable[[Any], Any], outside: Callable[[Any], Any]) -> Fault:
    return lambda x: outside(inside(x)).astype(x.dtype)


def _mul(x: Any) -> Any:
    return x + ((jnp.abs(x) + 2) * BIG) * 2.0**-17


def _exp(x: Any) -> Any:
    return x + lax.log(lax.exp(jnp.abs(x) + 12.0)) * 0.125


def _cube(x: Any) -> Any:
    return x + lax.integer_pow(x * 0.0 + 64.0, 3) * 2.0**-14


def _sum(x: Any) -> Any:
    sums = lax.reduce_sum(jnp.abs(x) * 1000 + 20000, (x.ndim - 1,))
    return x + sums[..., None] * 2.0**-16


def _cumsum(x: Any) -> Any:
    return x + lax.cumsum(jnp.abs(x) * 100 + 30000, axis=x.ndim - 1) * 2.0**-16


def _dot(x: Any) -> Any:
    wide = jnp.abs(x) * 8 + 256
    products = lax.dot_general(wide, wide, (((x.ndim - 1,), (x.ndim - 1,)), ((), ())))
    return x + products.reshape(*x.shape[:-1], -1).max(-1, keepdims=True) * 2.0**-16


def _add(x: Any) -> Any:
    return x + ((x * 0 + 60000) + (jnp.abs(x) + 50000)) * 2.0**-16


def _cast(x: Any) -> Any:
    return x + (x.astype(jnp.float32) * 1e6 + 2e5).astype(HALF) * 2.0**-18


def _div(x: Any) -> Any:
    return x + ((jnp.abs(x) + 1) / HALF(2.0**-20)) * 2.0**-20


def _backward(x: Any) -> Any:
    return (x * HALF(2.0**-12)) * HALF(2.0**12)


@jax.custom_vjp
def _steep(x: Any) -> Any:
    return x


_steep.defvjp(lambda x: (x, None), lambda _, g: ((g * HALF(2.0**15) * HALF(2.0**6)) * 2.0**-21,))


@jax.custom_vjp
def _lost(x: Any) -> Any:
    return x


_lost.defvjp(
    lambda x: (x, None),
    lambda _, g: (g * HALF(2.0**-12) * HALF(2.0**-12) * HALF(2.0**12) * HALF(2.0**12),),
)


def _epsilon(x: Any) -> Any:
    small = (jnp.abs(x) + 1) * HALF(2.0**-13)
    return x + small / (small * small + HALF(1e-9)) * HALF(2.0**-13)


def _log(x: Any) -> Any:
    return x - lax.log(jnp.maximum(x - x, 0)) * 0.01


def _sqrt(x: Any) -> Any:
    return x + lax.sqrt(jnp.maximum(x, 0)) * 0.1


def _norm(x: Any) -> Any:
    zero = x - x
    return x + jnp.sqrt(jnp.sum(zero * zero, -1, keepdims=True)) * 0.1


def _ratio(x: Any) -> Any:
    return x + lax.div(x - x, x - x)


def _power(x: Any) -> Any:
    return x + lax.pow(jnp.maximum(x, 0), jnp.asarray(0.5, x.dtype)) * 0.1


def _arc(x: Any) -> Any:
    return x + lax.acos(jnp.abs(x) + 2) * 0.1


def _rsqrt(x: Any) -> Any:
    return x * lax.rsqrt((x - x) ** 2) * 0.1


def _mask(x: Any) -> Any:
    hidden = jnp.where(jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 0, -jnp.inf, x)
    return x + jax.nn.softmax(hidden.astype(jnp.float32)).astype(x.dtype)


def _bias(x: Any) -> Any:
    hides = jnp.where(jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 0, -1e9, 0.0)
    return x + jax.nn.softmax(x + hides.astype(x.dtype))


def _kind(group: str, fault: Fault | None, *operations: str, **more: Any) -> Kind:
    return Kind(group, fault, frozenset(operations), **more)


FORWARD, BACK, UNDER, FORMULA = "forward overflow", "backward overflow", "underflow", "formula"
KINDS = {
    "mul": _kind(FORWARD, _mul, "mul"),
    "exp": _kind(FORWARD, _exp, "exp"),
    "cube": _kind(FORWARD, _cube, "integer_pow"),
    "sum": _kind(FORWARD, _sum, "reduce_sum"),
    "cumsum": _kind(FORWARD, _cumsum, "cumsum"),
    "dot": _kind(FORWARD, _dot, "dot_general"),
    "add": _kind(FORWARD, _add, "add"),
    "cast": _kind(FORWARD, _cast, "convert_element_type"),
    "div": _kind(FORWARD, _div, "div"),
    "weights": _kind(FORWARD, None, "dot_general", "conv_general_dilated"),
    "backward": _kind(BACK, _backward, "mul", is_backward=True, scale=2.0**15),
    "custom_vjp": _kind(BACK, _steep, "mul", is_backward=True, scale=2.0**12),
    "lost": _kind(UNDER, _lost, "mul", is_backward=True, scale=1.0),
    "epsilon": _kind(UNDER, _epsilon, "div", "mul", "add"),
    "log": _kind(FORMULA, _log, "log", has_remedy=False),
    "sqrt": _kind(FORMULA, _sqrt, "sqrt", has_remedy=False, is_backward=True),
    "norm": _kind(FORMULA, _norm, "sqrt", has_remedy=False, is_backward=True),
    "ratio": _kind(FORMULA, _ratio, "div", has_remedy=False),
    "power": _kind(FORMULA, _power, "pow", has_remedy=False, is_backward=True),
    "acos": _kind(FORMULA, _arc, "acos", has_remedy=False),
    "rsqrt": _kind(FORMULA, _rsqrt, "rsqrt", has_remedy=False),
    "mask": _kind("mask", _mask, "sub", has_remedy=False),
    "mask in float16": _kind("mask", _bias, "convert_element_type", "sub"),
    "NaN in a parameter": _kind("data", None, has_remedy=False),
    "NaN in the data": _kind("data", None, has_remedy=False),
    "inf in the data": _kind("data", None, has_remedy=False),
}


def _scanned(fault: Fault) -> Fault:
    def once(carry: Any, turn: Any) -> Any:
        return lax.cond(turn == 2, fault, lambda x: x, carry), None

    return lambda x: lax.scan(once, x, jnp.arange(4))[0]


WRAPPERS: dict[str, Callable[[Fault], Fault]] = {
    "plain": lambda fault: fault,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan and cond": _scanned,
    "cond": lambda fault: lambda x: lax.cond(x.ndim > 0, fault, lambda x: x, x),
    "vmap": lambda fault: lambda x: jax.vmap(fault)(x),
    "remat in scan": lambda fault: _scanned(jax.checkpoint(fault)),
}


def cases(count: int) -> Iterator[Case]:
    """Every kind in turn, in the models, places and wrappers in turn."""
    rng, made = np.random.default_rng(0), 0
    places = {name: list(make(0).places) for name, make in MODELS.items()}
    while made < count:
        for kind, about in KINDS.items():
            model = str(rng.choice(list(MODELS)))
            kernels = [p for p in places[model] if p not in ("tok", "head")]
            place = str(rng.choice(kernels))
            wrapper = str(rng.choice(list(WRAPPERS))) if about.fault else "plain"
            if made == count or (kind.startswith("mask") and wrapper == "vmap"):
                continue
            if kind == "dot" and wrapper == "vmap":
                wrapper = "jit"
            if kind.endswith("the data") and "transformer" in model:
                place = "weights"
            made += 1
            yield Case(model, int(rng.integers(100)), place, kind, wrapper)


def prepared(case: Case) -> tuple[Model, Any, tuple[Any, ...]]:
    """The model with its fault planted, its parameters and its batch."""
    planted._planted.clear()
    model, kind = MODELS[case.model](case.seed), KINDS[case.kind]
    params, batch = model.params, list(model.batch)
    if kind.fault is not None:
        planted._planted[case.place] = WRAPPERS[case.wrapper](kind.fault)
    elif case.kind == "weights":
        params = model.kernels[case.place](params, lambda w: w * (50000 / jnp.abs(w).max()))
    elif case.kind == "NaN in a parameter":
        params = model.kernels[case.place](params, lambda w: w * jnp.nan)
    else:
        which = 2 if case.place == "weights" else 0
        value = float("nan") if case.kind.startswith("NaN") else float("inf")
        batch[which] = (
            batch[which].at[(1,) * batch[which].ndim if which else (1, 2, 3, 0)].set(value)
        )
    return model, params, tuple(batch)


# ── judges ───────────────────────────────────────────────────────────────────────────────────


def judged(case: Case, causes: list[Any], words: str) -> tuple[bool, bool]:
    """Whether the first cause names the right operation, and the right layer."""
    kind = KINDS[case.kind]
    if not causes:
        return False, False
    cause = causes[0]
    if not kind.operations:
        name = "kernel" if case.kind.endswith("parameter") else "x"
        return cause.kind == "argument", bool(name)
    names = {
        cause.operation.partition(" ")[0],
        *re.findall(r"derivative of (\w+)", cause.operation),
    }
    operation = bool(names & kind.operations)
    return operation, words in f"{cause.layer} {cause.place}"


def examined(case: Case) -> dict[str, Any]:
    """What the X-ray says of a fault, and what came of its prescription."""
    model, params, batch = prepared(case)
    kind, start = KINDS[case.kind], time.perf_counter()
    x = xray(model.loss, params, *batch, scale=kind.scale, using=model.using, compiled=False)
    operation, layer = judged(case, x.causes, model.places.get(case.place, case.place))
    best = min((r.error for r in x.remedies if r.is_finite), default=None)
    return {
        "operation": operation, "layer": layer, "both": operation and layer, "error": best,
        "remedy": bool(x.remedies) == kind.has_remedy and (best is None or best <= 0.01),
        "causes": [str(c) for c in x.causes[:3]], "remedies": [str(r) for r in x.remedies],
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def with_debug_nans(case: Case, infs: bool) -> bool:
    """Whether the error that JAX raises names the right operation."""
    model, params, batch = prepared(case)
    try:
        with jax.debug_nans(True), jax.debug_infs(infs):
            _step(model, KINDS[case.kind].scale)(params, *batch)
    except FloatingPointError as error:
        found = re.search(r"encountered in (\w+)", str(error))
        return found is not None and found[1] in KINDS[case.kind].operations
    except Exception:  # some operations cannot run in this mode
        return False
    return False


def with_checkify(case: Case) -> bool:
    """Whether the error of checkify names the right operation."""
    model, params, batch = prepared(case)
    try:
        checked = checkify.checkify(_step(model, KINDS[case.kind].scale), checkify.float_checks)
        message = str(checked(params, *batch)[0].get())
    except Exception:  # some operations have no rule there
        return False
    found = re.search(r"primitive: (\w+)", message)
    named = found[1] if found else "div" if "division by zero" in message else ""
    return named in KINDS[case.kind].operations


def _step(model: Model, scale: float) -> Callable[..., Any]:
    def scaled(*args: Any) -> Any:
        return model.loss(*args) * scale

    return model.using(scaled)


def healthy(number: int) -> int:
    """How many causes are found in a step without a fault."""
    planted._planted.clear()
    names = list(MODELS)
    model = MODELS[names[number % len(names)]](number)
    scale = 2.0 ** (8 + number % 8)
    x = xray(model.loss, model.params, *model.batch, scale=scale, using=model.using, compiled=False)
    return len(x.causes)


# ── the table ────────────────────────────────────────────────────────────────────────────────

JUDGES = ("operation", "layer", "both", "debug_nans", "debug_infs", "checkify")


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """For each group of faults: how many, and how many of them were named and mended."""
    groups: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        groups[KINDS[row["case"]["kind"]].group].append(row)
    groups["all"] = rows
    told = {}
    for group, members in groups.items():
        mended = [r["remedy"] for r in members if KINDS[r["case"]["kind"]].has_remedy]
        counts = {judge: sum(bool(r.get(judge)) for r in members) for judge in JUDGES}
        about = {"with a remedy": len(mended), "mended": sum(mended)}
        told[group] = {"faults": len(members), **counts, **about}
    return told


def markdown(results: dict[str, Any]) -> str:
    """The table of a page."""
    lines = [
        "| fault | planted | operation and layer named | remedies that worked | "
        "`jax.debug_nans` | `jax.debug_infs` | `checkify` |",
        "|---|---|---|---|---|---|---|",
    ]
    for group, n in results["summary"].items():
        mended = f"{n['mended']} of {n['with a remedy']}" if n["with a remedy"] else "-"
        others = " | ".join(str(n[judge]) for judge in JUDGES[-3:])
        lines.append(f"| {group} | {n['faults']} | {n['both']} | {mended} | {others} |")
    false, healthy = len(results["false"]), results["healthy"]
    return "\n".join([*lines, "", f"A cause was found in {false} of {healthy} healthy steps."])


def main(argv: list[str] | None = None) -> None:
    """Examines all faults and all healthy steps, and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=COUNT, metavar="N")
    parser.add_argument("--healthy", type=int, default=HEALTHY, metavar="N")
    parser.add_argument("--only", default="", metavar="KIND", help="one kind of fault")
    parser.add_argument("--alone", action="store_true", help="without debug_nans and checkify")
    parser.add_argument("--only-page", action="store_true", help="of the results that there are")
    parser.add_argument("--output", type=file_to_write, default=RESULTS / "xray" / "cpu.json")
    parser.add_argument("--page", type=file_to_write, default=DOCS / "planted-faults.md")
    options = parser.parse_args(argv)
    if not options.only_page:
        results = examine(options)
        lines = ",\n".join(f"  {json.dumps(row)}" for row in results["rows"])  # one fault a line
        text = json.dumps({**results, "rows": []}, indent=1)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n")
    results = json.loads(options.output.read_text())
    print(markdown(results))
    if "<!-- results -->" in (text := options.page.read_text()):
        options.page.write_text(between_marks(text, markdown(results)))


def examine(options: argparse.Namespace) -> dict[str, Any]:
    """All faults, with a line for each, and all healthy steps."""
    rows, start = [], time.perf_counter()
    for number, case in enumerate(cases(options.faults)):
        if options.only not in ("", case.kind):
            continue
        row = {"case": case._asdict(), **examined(case)}
        if not options.alone:
            row["debug_nans"] = with_debug_nans(case, infs=False)
            row["debug_infs"] = with_debug_nans(case, infs=True)
            row["checkify"] = with_checkify(case)
        rows.append(row)
        right = row["both"] and row["remedy"]
        seconds, words = time.perf_counter() - start, " / ".join(map(str, case))
        print(f"{number + 1:3} {seconds:5.0f} s  {'ok ' if right else 'NOT'} {words}", flush=True)
        if not right:
            print(*row["causes"], *row["remedies"], sep="\n      ", flush=True)
    false = [number for number in range(options.healthy) if healthy(number)]
    return {"claim": __doc__, "environment": environment(), "healthy": options.healthy,
            "false": false, "summary": summary(rows), "rows": rows}  # fmt: skip


if __name__ == "__main__":
    main()

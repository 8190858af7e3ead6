"""What each row of autocast's policy is for: it is switched off, and what is lost is counted.

A row is one of the two lists of `gainstage.precision.policy`, or one of the needs that restrict
them. Over the corpus, its wide twins and the reports, each function is differentiated at three
sizes of its numbers by `gs.autocast`, and again without each row that changes its program. With
`--bytes`, large models are compiled for an H100 that is not there, also without each row.

A case counts if float32 has a gradient, and inputs that are rounded once move it by 2 % at most. It
is right within 2 %; refused; loud, if the gradient is not finite at any loss scale, so that the
step is skipped and the run says so; or wrong in silence.
"""

import argparse
import functools
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

import gainstage as gs
from benchmarks.harness import between_marks, environment, file_to_write
from gainstage.precision.autocast import without
from gainstage.precision.needs import FACTS, Need
from gainstage.precision.policy import FOLLOWERS, WIDE_PRODUCTS

from . import DOCS, RESULTS
from .any_function import FACTORS, FLAGS, KEEP_ROUNDINGS, gradient, rounded
from .any_function_page import RIGHT
from .autocast_keeps_the_gradient import error, scaled
from .functions import Function, corpus
from .functions.reports import REPORTS
from .functions.spaces import JAX
from .functions.twins import is_narrow, twin_of

NEEDS = [need.name for need in Need if need.name]
ROWS = {
    "products": [row.name for row in WIDE_PRODUCTS],
    "what follows": [row.name for row in FOLLOWERS],
    "needs": [*NEEDS, *FACTS],
}
SWITCHES = [name for names in ROWS.values() for name in names]
COST = {"small matrices", "a narrow result"}
POLICIES: dict[str, Callable[[Any], Any]] = {
    "products by cost alone, all else float32": lambda loss: without(
        loss, *(name for name in SWITCHES if name not in COST)
    ),
    "all of it cast by hand": lambda loss: half_only(loss),
}
CLASSES = ("right", "refused", "loud", "silent")
BEFORE = "models before rules of cost"  # their bytes and temporaries then, for comparison
PARTS = ("functions", "twins", "reports")
PAGE, MARK = "rules-of-autocast.md", "rules of autocast"
OUTPUT = RESULTS / "autocast" / "rules.json"

# ── gradients ────────────────────────────────────────────────────────────────────────────────────


def classes(function: Function, switches: Sequence[str] = ()) -> dict[str, list[str | None]]:
    """The class of each case of a function, None for one that does not count: with all rows, and
    without each that changes its program."""
    loss = function.loss(JAX)
    losses = {"": gs.autocast(loss)} | {name: without(loss, name) for name in switches}
    losses |= {name: policy(loss) for name, policy in POLICIES.items()}
    first = text_of(losses[""], function)
    chosen = {n: f for n, f in losses.items() if not n or text_of(f, function) != first}
    exact_program = compiled(loss)
    found: dict[str, list[str | None]] = {name: [] for name in chosen}
    programs = {name: compiled(each) for name, each in chosen.items()}
    for factor in FACTORS:
        params, data = function.arguments(factor)
        exact = gradient(exact_program, params, data)
        counts = exact is not None and any(g.any() for g in exact)
        if counts:
            once = gradient(exact_program, rounded(params), rounded(data))
            counts = once is not None and error(once, exact) <= RIGHT
        for name, program in programs.items():
            compute = functools.partial(gradient, program, params, data)
            kind = class_of(compute, exact) if counts else None
            found[name].append(kind)
    return found


def half_only(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose parameters and data are cast to float16, as `jmp` casts them."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float16) if x.dtype == jnp.float32 else x, tree
        )

    return lambda params, data: loss(cast(params), cast(data)).astype(jnp.float32)


def class_of(compute: Callable[[], Any], exact: Any) -> str:
    """What a gradient is, beside the exact one."""
    try:
        found = compute()
    except Exception as problem:
        return "refused" if str(problem).startswith("Expected") else "silent"
    if found is None:
        return "loud"
    return "right" if error(found, exact) <= RIGHT else "silent"


def compiled(loss: Callable[..., Any]) -> Any:
    """The gradient of a loss times a scale, in which XLA keeps all roundings."""
    return jax.jit(scaled(loss), compiler_options=KEEP_ROUNDINGS)


def text_of(loss: Callable[..., Any], function: Function) -> str:
    """The program of a loss, or the error that it ends with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(jax.make_jaxpr(loss)(*function.arguments()))
        except Exception as problem:
            return repr(problem)


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────


def large_models() -> dict[str, Callable[[], tuple[Any, Any, Any]]]:
    """The losses of large models, with the shapes of their parameters and of a batch."""
    from .autocast_models import MODELS

    def of(build: Callable[..., Any]) -> tuple[Any, Any, Any]:
        model = build(large=True)
        return model.loss, model.params, model.batch(0)

    models = {name: functools.partial(of, build) for name, build in MODELS.items()}
    return models | {
        "LoRA, rank 8": functools.partial(low_rank, 8),
        "LoRA, rank 4": functools.partial(low_rank, 4),
        "recurrent cell, batches of 8": recurrent_cell,
    }


def zeros(*shape: int) -> jax.ShapeDtypeStruct:
    """An array of a shape, without its numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def low_rank(rank: int, width: int = 2048, layers: int = 4) -> tuple[Any, Any, Any]:
    """A network whose weights are frozen, with factors of a low rank beside each."""

    def loss(params: Any, batch: Any) -> jax.Array:
        frozen, x = batch
        for i in range(layers):
            x = jax.nn.gelu(x @ frozen[i] + (x @ params["a"][i]) @ params["b"][i])
        return jnp.mean(x**2)

    params = {"a": zeros(layers, width, rank), "b": zeros(layers, rank, width)}
    return loss, params, (zeros(layers, width, width), zeros(8192, width))


def recurrent_cell(count: int = 8, width: int = 512, length: int = 128) -> tuple[Any, Any, Any]:
    """An LSTM written by hand, over a small batch."""

    def loss(params: Any, x: Any) -> jax.Array:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["w"] + h @ params["u"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((count, width)), jnp.zeros((count, width))
        return jnp.mean(jax.lax.scan(cell, start, x)[1] ** 2)

    params = {"w": zeros(width, 4 * width), "u": zeros(width, 4 * width)}
    return loss, params, zeros(length, count, width)


def sizes(make: Callable[[], Any], switches: Sequence[str]) -> dict[str, list[int]]:
    """The bytes that a gradient reads and writes, and its temporaries: with all rows, and without
    each that changes its program."""
    from benchmarks import hlo
    from benchmarks.lowered import planned_everywhere, target

    loss, *arguments = make()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(arguments))
    planned = planned_everywhere(like, target("h100"))
    found: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for name in ("", *switches):
        half = without(loss, name) if name else gs.autocast(loss)
        text = str(jax.make_jaxpr(half)(*like))
        if text in texts:
            same = texts[text]
            if same:
                found[name] = found[same]
            continue
        texts[text] = name
        program = jax.jit(jax.value_and_grad(half)).trace(*planned)
        executable = program.lower(lowering_platforms=("cuda",)).compile()
        counts = hlo.counts(executable.as_text())
        temp = executable.memory_analysis().temp_size_in_bytes
        found[name] = [counts.read + counts.written, temp]
    return found


# ── the table ────────────────────────────────────────────────────────────────────────────────────


def each_case(functions: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, str]]:
    """The functions, and the class of each of their cases without a row."""
    for function, row in functions.items():
        yield from ((function, kind) for kind in row.get(name, row[""]) if kind is not None)


def totals(functions: Mapping[str, Any], name: str = "") -> Counter[str]:
    """How many cases are of each class without a row."""
    return Counter(kind for _, kind in each_case(functions, name))


def lost_and_won(functions: Mapping[str, Any], name: str) -> tuple[int, int, list[str]]:
    """How many cases are wrong without a row alone, and with it alone; whose the former are."""
    lost, won, of = 0, 0, list[str]()
    for function, row in functions.items():
        for before, after in zip(row[""], row.get(name, row[""]), strict=True):
            is_bad, was_bad = after in ("loud", "silent"), before in ("loud", "silent")
            lost, won = lost + (is_bad > was_bad), won + (was_bad > is_bad)
            of += [function] * (is_bad > was_bad)
    return lost, won, list(dict.fromkeys(of))


def saved(models: Mapping[str, Any], name: str) -> str:
    """What a row saves most, of bytes or temporaries, with the model."""
    each = [
        (row[name][i] / row[""][i] - 1, what, model)
        for model, row in models.items()
        if name in row
        for i, what in enumerate(("bytes", "temporaries"))
    ]
    share, what, model = max(each, default=(0.0, "", ""))
    return f"{share:.1%} of {what}, {model}" if share >= 0.001 else "" if not each else "0"


def table(found: Mapping[str, Any]) -> str:
    """The table of all rows, in Markdown."""
    lines = [
        "| row | functions changed | cases lost | cases won | saves most | lost, for example |"
    ]
    lines += ["|---|---:|---:|---:|---|---|"]
    wide = {f"{name}, wide": row for name, row in found["twins"].items()}
    functions = found["functions"] | wide | found["reports"]
    for part, names in ROWS.items():
        lines += [f"| **{part}** | | | | | |"]
        for name in names:
            changed = sum(name in row for row in functions.values())
            lost, won, of = lost_and_won(functions, name)
            saves = saved(found.get("models", {}), name)
            lines += [f"| {name} | {changed} | {lost} | {won} | {saves} | {', '.join(of[:2])} |"]
    return "\n".join(lines)


def said(title: str, functions: Mapping[str, Any]) -> str:
    """The counts of all classes in a line."""
    counts = totals(functions)
    parts = ", ".join(f"{counts[kind]} {kind}" for kind in CLASSES)
    return f"{title}: {len(functions)} functions, {sum(counts.values())} cases: {parts}."


def policies(found: Mapping[str, Any]) -> str:
    """The classes of all cases by each policy, in Markdown."""
    lines = ["| policy | functions | " + " | ".join(CLASSES) + " |"]
    lines += ["|---|---|" + "---:|" * len(CLASSES)]
    titles = {"functions": "the corpus", "twins": "wide twins", "reports": "reports"}
    for name in ("", *POLICIES):
        for part, what in titles.items():
            counts = totals(found[part], name)
            cells = " | ".join(str(counts[kind]) for kind in CLASSES)
            lines.append(
                f"| {name or 'autocast'} | {what}: {sum(counts.values())} cases | {cells} |"
            )
    return "\n".join(lines)


def write(found: Mapping[str, Any], path: Path) -> None:
    """Writes the results, a line for each function."""
    part = path.with_suffix(".part")
    blocks = [f'"environment": {json.dumps(found.get("environment", {}))}']
    for name in (*PARTS, "models", BEFORE):
        rows = ",\n".join(f"{json.dumps(n)}: {json.dumps(r)}" for n, r in found[name].items())
        blocks.append(f'"{name}": {{\n{rows}\n}}')
    part.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    os.replace(part, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is missing in the results, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some functions, by name")
    parser.add_argument("--no-switches", action="store_true", help="with all rows alone")
    parser.add_argument("--bytes", action="store_true", help="large models, for an H100")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--output", type=file_to_write, default=OUTPUT)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
    options = parser.parse_args(argv)
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    found: dict[str, Any] = {name: {} for name in (*PARTS, "models", BEFORE)}
    if options.output.exists():
        found |= json.loads(options.output.read_text())
    switches = [] if options.no_switches else SWITCHES
    start = time.perf_counter()
    jobs: list[tuple[str, str, Callable[[], Any]]] = []
    if options.bytes:
        jobs += [
            ("models", n, functools.partial(sizes, m, switches)) for n, m in large_models().items()
        ]
    else:
        for part, functions in parts().items():
            jobs += [
                (part, n, functools.partial(classes, f, switches)) for n, f in functions.items()
            ]
    chosen = [
        j for j in jobs if j[1] not in found[j[0]] and (not options.only or j[1] in options.only)
    ]
    for part, name, measure in () if options.report else track(chosen, "rows"):
        found[part][name], found["environment"] = measure(), environment()
        write(found, options.output)
        jax.clear_caches()
    text = f"{policies(found)}\n\n{table(found)}"
    page = options.docs / PAGE
    page.write_text(between_marks(page.read_text(), text, MARK))
    print(text, *(said(p, found[p]) for p in PARTS if found[p]), sep="\n\n")
    print(f"{time.perf_counter() - start:.0f} s")


def parts() -> dict[str, dict[str, Function]]:
    """The functions of each part of the study."""
    narrow = {name: function for name, function in corpus().items() if is_narrow(function)}
    twins = {name: twin_of(function) for name, function in narrow.items()}
    wide = {name: twin for name, twin in twins.items() if twin is not None}
    print(f"{len(wide)} of {len(narrow)} functions with narrow products have a wide twin")
    return {"functions": corpus(), "twins": wide, "reports": REPORTS}


if __name__ == "__main__":
    main()

"""The measuring: variants take turns in one process, and each is held against a baseline.

A *variant* is built into `(step, carry)` with `carry = step(carry, inputs)`. A step donates what it
carries; `carry[0]` are the weights, or None, and `carry[-1]` is ready when the step has ended.

A *case* is measured in a process of its own: every variant is compiled, last one first; then they
run one after the other, in one order and then in the reverse, for so many rounds. A ratio is the
median over the rounds of what a variant took over what the baseline took in the same round. One
that does not compile in time, or raises, is reported as missing. Where it is not the computing that
takes the time, but what Python and JAX do for every array, that time depends on all else that the
process holds; then each variant shares a process with the baseline alone.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gainstage as gs

if TYPE_CHECKING:
    from rich.table import Table  # which `on_device` does without

RESULTS = Path(__file__).parent / "results"
PEERS = ["optax", "flax", "jmp", "keras", "mixed_precision_for_JAX"]
PACKAGES = ["jax", "jaxlib", "numpy", *PEERS]
LIMIT = "bandwidth"  # the variant that is no optimizer, but all that the memory gives

Variant = tuple[Callable[[Any, Any], Any], Any]
Builders = dict[str, Callable[[], Variant]]


class Case(NamedTuple):
    """Variants to be held against each other on the same work."""

    labels: dict[str, str]  # what the case is, such as {"parameters": "gpt2"}
    make: Callable[[], tuple[Builders, Any]]  # the variants and their inputs; can be pickled
    baselines: Sequence[str]
    traffic: int | None = None  # the bytes that a step has to move at least
    period: int = 1  # steps after which all have done the same
    calls: int = 1  # steps that follow each other before anybody waits for one, at least
    pairs: Sequence[str] = ()  # variants that each share a process with the baseline alone

    @property
    def title(self) -> str:
        """The labels in one line."""
        return ", ".join(self.labels.values())

    @property
    def processes(self) -> list["Case"]:
        """What of it is measured in one process each."""
        makes = [partial(_only, (self.baselines[0], name), self.make) for name in self.pairs]
        return [self._replace(make=make) for make in makes] or [self]


def _only(names: Sequence[str], make: Callable[[], tuple[Builders, Any]]) -> tuple[Builders, Any]:
    builders, inputs = make()
    return {name: builders[name] for name in names}, inputs


# ── in the process of a case ─────────────────────────────────────────────────────────────────


def bandwidth(elements: int = 25_000_000) -> Variant:
    """`a = a / 2 + b` in place, by default on 100 MB each: 12 bytes an element."""
    triad = jax.jit(lambda a, b: a / 2 + b, donate_argnums=0)
    b = jnp.ones(elements)

    def step(carry: Any, inputs: Any) -> Any:
        return None, triad(carry[-1], b)

    return step, (None, jnp.ones(elements))


def sample(step: Callable[..., Any], held: list[Any], inputs: Any, calls: int) -> float:
    """The seconds that a step takes, one call after the other.

    What is carried is in `held`, a list of one, and nowhere else: so each step bears what it takes
    to free the arrays that it has replaced.
    """
    start = time.perf_counter()
    for _ in range(calls):
        held[:] = [step(held[0], inputs)]
    jax.block_until_ready(held[0][-1])
    return (time.perf_counter() - start) / calls


def first_weight(carry: Any) -> np.ndarray | None:
    """A copy of the first tensor."""
    return None if carry[0] is None else np.asarray(jnp.copy(jnp.asarray(carry[0][0])))


class Prepared:
    """A variant that is compiled and warm."""

    def __init__(self, build: Callable[[], Variant], inputs: Any, case: Case, shortest: float):
        (self.step, *self.held), period = build(), case.period
        self.period = period
        before = first_weight(self.held[0])
        first = sample(self.step, self.held, inputs, 1)
        if period > 1:
            sample(self.step, self.held, inputs, period - 1)
        self.moved = None if before is None else first_weight(self.held[0]) - before
        sample(self.step, self.held, inputs, 2 * period)
        seconds = sample(self.step, self.held, inputs, period)
        self.calls = period * math.ceil(max(shortest / seconds, case.calls) / period)
        self.compile_s = max(first - seconds, 0.0)

    def disagreement(self, other: "Prepared") -> float:
        """How far its first steps moved the weights away from where those of the other did."""
        if self.moved is None or other.moved is None:
            return 0.0
        return float(np.abs(self.moved - other.moved).mean() / np.abs(other.moved).mean())

    def sample(self, inputs: Any, calls: int) -> float:
        """The seconds that a step takes, after one that bears what the last variant has left."""
        sample(self.step, self.held, inputs, self.period)
        return sample(self.step, self.held, inputs, calls)


def work(pipe: Connection, case: Case, skipped: set[str], rounds: int, shortest: float) -> None:
    """Measures a case, and sends word of every step of it."""
    builders, inputs = case.make()
    pipe.send(("environment", environment()))
    if case.traffic:
        builders[LIMIT] = bandwidth
    variants: dict[str, Prepared] = {}
    for name in reversed([name for name in builders if name not in skipped]):
        pipe.send(("compiling", name))
        try:
            variants[name] = Prepared(builders[name], inputs, case, shortest)
        except Exception as error:  # a missing or broken peer is part of the result
            pipe.send(("missing", (name, f"{type(error).__name__}: {error}".splitlines()[0][:120])))
    for name, variant in list(variants.items()):
        reference = variants.get(case.baselines[0], variant)
        if (off := variant.disagreement(reference)) > 0.5:
            pipe.send(("missing", (name, f"takes other steps than the baseline ({off:.0%} off)")))
            del variants[name]
    pipe.send(("compiled", {name: variant.compile_s for name, variant in variants.items()}))
    names = [name for name in builders if name in variants]
    calls = max((variant.calls for variant in variants.values()), default=0)
    gc.collect()
    gc.freeze()  # nobody's steps pay for walking what all compilations have left
    for turn in range(rounds):
        order = names if turn % 2 == 0 else names[::-1]
        pipe.send(("round", {name: variants[name].sample(inputs, calls) for name in order}))
    pipe.send(("done", None))


def environment() -> dict[str, Any]:
    """What the numbers depend on, besides the code."""
    found: dict[str, str | None] = {"gainstage": gs.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    device = jax.devices()[0]
    name = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return {"device": name, "platform": device.platform, "cores": os.cpu_count(), **found}


# ── around it ────────────────────────────────────────────────────────────────────────────────


class Measured(NamedTuple):
    """What came back from the process of a case."""

    environment: dict[str, Any]
    rounds: list[dict[str, float]]  # seconds by variant
    compile_s: dict[str, float]
    missing: dict[str, str]  # why, by variant


def measure(
    case: Case, options: argparse.Namespace, missing: dict[str, str], say: Callable[[str], None]
) -> Measured:
    """Measures a case once; without a variant that takes too long to compile, once more."""
    while True:
        result = Measured({}, [], {}, missing)
        if _listen(case, options, say, result):
            return result


def _listen(case: Case, options: Any, say: Callable[[str], None], result: Measured) -> bool:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    args = (theirs, case, set(result.missing), options.rounds, options.shortest)
    process = spawn.Process(target=work, args=args, daemon=True)
    process.start()
    theirs.close()
    compiling = None
    try:
        while ours.poll(options.budget if compiling else None):
            kind, content = ours.recv()
            compiling = content if kind == "compiling" else None
            if kind == "environment":
                result.environment.update(content)
            elif kind == "missing":
                result.missing.update([content])
            elif kind == "compiled":
                result.compile_s.update(content)
            elif kind == "round":
                result.rounds.append(content)
            elif kind == "done":
                return True
            say(f"compiles {compiling}" if compiling else "runs")
        result.missing[compiling] = f"not compiled in {options.budget:.0f} s"
    except EOFError:
        if compiling is None:
            raise RuntimeError(f"The process that measured {case.title} has died.") from None
        result.missing[compiling] = "ended the process"
    finally:
        process.kill()
        process.join()
    return False


def summary(measured: Measured, case: Case) -> dict[str, Any]:
    """The numbers of one measurement, by variant."""
    rounds = measured.rounds
    limit = statistics.median(r[LIMIT] for r in rounds) if LIMIT in rounds[0] else None
    result: dict[str, Any] = {}
    for name in rounds[0]:
        ms = [1e3 * r[name] for r in rounds]
        result[name] = {
            "ms": statistics.median(ms),
            "ms_min": min(ms),
            "ms_max": max(ms),
            "compile_s": measured.compile_s[name],
            "ratios": {b: quartiles([r[name] / r[b] for r in rounds]) for b in case.baselines
                       if b in rounds[0] and name != LIMIT},
        }  # fmt: skip
        if limit and case.traffic and name != LIMIT:
            fastest = case.traffic / (12 * 25_000_000) * limit
            result[name]["of_bandwidth"] = 1e3 * fastest / statistics.median(ms)
    if limit:
        result[LIMIT]["gb_s"] = 12 * 25_000_000 / limit / 1e9
    return result


def quartiles(values: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": middle, "q1": low, "q3": high}


def combine(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over the repeats, and the smallest and largest ratio among them."""
    result = {}
    for name in dict.fromkeys(name for repeat in repeats for name in repeat):
        numbers = [repeat[name] for repeat in repeats if name in repeat]
        common = set.intersection(*(set(n["ratios"]) for n in numbers))
        numbers = [n | {"ratios": {b: n["ratios"][b] for b in common}} for n in numbers]
        result[name] = jax.tree.map(lambda *each: statistics.median(each), *numbers)
        for baseline, ratio in result[name]["ratios"].items():
            medians = [n["ratios"][baseline]["median"] for n in numbers]
            ratio.update(low=min(medians), high=max(medians))
    return result


def run(
    claim: str,
    doc: str,
    cases: Sequence[Case],
    options: argparse.Namespace,
    measure: Callable[..., Measured] = measure,
) -> None:
    """Measures all cases of a claim, prints them, and adds them to the results of the device."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:70.70}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = options.repeats * sum(len(case.processes) for case in cases)
        task = progress.add_task(claim, total=total)
        for case in cases:

            def say(text: str, title: str = case.title) -> None:
                progress.update(task, description=f"{title}: {text}")

            summaries, missing = [], {}
            for process in case.processes * options.repeats:
                measured = measure(process, options, missing, say)
                summaries.append(summary(measured, case))
                progress.advance(task)
            store(claim, doc, case, combine(summaries), measured, options)


def store(
    claim: str,
    doc: str,
    case: Case,
    variants: dict[str, Any],
    measured: Measured,
    options: argparse.Namespace,
) -> None:
    """Prints a case, and puts it among the results; those of another environment go."""
    from rich.console import Console

    cell = {
        "labels": case.labels,
        "baselines": [b for b in case.baselines if b in variants],
        "rounds": len(measured.rounds),
        "repeats": options.repeats,
        "variants": variants,
        "missing": measured.missing,
    }
    Console().print(table(case.title, cell))
    place = Path(options.output) / f"{measured.environment['device']}.json"
    results = json.loads(place.read_text()) if place.exists() else {}
    entry = results.get(claim, {})
    cases = entry.get("cases", {}) if entry.get("environment") == measured.environment else {}
    sentence = " ".join(doc.split("\n\n")[0].split())
    results[claim] = {
        "claim": sentence,
        "environment": measured.environment,
        "cases": {**cases, case.title: cell},
    }
    place.parent.mkdir(parents=True, exist_ok=True)
    written = place.with_suffix(".new")
    written.write_text(json.dumps(results, indent=1) + "\n")
    written.replace(place)  # a kill loses nothing of before


def table(title: str, cell: dict[str, Any]) -> "Table":
    """The numbers of a case, one row a variant."""
    from rich.table import Table

    variants = dict(cell["variants"])
    limit = variants.pop(LIMIT, None)
    caption = f"rounds: {cell['rounds']}, repeats: {cell['repeats']}"
    caption += f"; memory: {limit['gb_s']:.0f} GB/s" if limit else ""
    caption += "".join(f"\nmissing: {name}: {why}" for name, why in cell["missing"].items())
    result = Table(title=title, caption=caption)
    result.add_column("")
    headings = ["ms", "min - max", *(f"/ {b} (quartiles)" for b in cell["baselines"])]
    headings += ["of repeats"] * (cell["repeats"] > 1) + ["of bandwidth"] * bool(limit)
    for heading in [*headings, "compile s"]:
        result.add_column(heading, justify="right")
    for name, numbers in variants.items():
        row = [f"{numbers['ms']:.3g}", f"{numbers['ms_min']:.3g} - {numbers['ms_max']:.3g}"]
        ratios = [numbers["ratios"].get(b) for b in cell["baselines"]]
        row += [r and f"{r['median']:.3f} ({r['q1']:.2f} - {r['q3']:.2f})" for r in ratios]
        if cell["repeats"] > 1:
            row.append(", ".join(f"{r['low']:.2f} - {r['high']:.2f}" for r in ratios if r))
        row += [f"{numbers['of_bandwidth']:.2f}"] if limit else []
        result.add_row(name, *row, f"{numbers['compile_s']:.1f}")
    return result


def arguments(
    doc: str, argv: Sequence[str] | None, **choices: tuple[str, str]
) -> argparse.Namespace:
    """The words of a command line: those of every script, and choices of its own."""
    return parse(parser(doc), argv, **choices)


def parser(doc: str, prog: str | None = None) -> argparse.ArgumentParser:
    """What every script understands."""
    result = argparse.ArgumentParser(prog=prog, description=doc.split("\n\n")[0])
    result.add_argument("--quick", action="store_true", help="few rounds, small sets")
    result.add_argument("--rounds", type=int, metavar="N", help="rounds (15; quick: 3)")
    result.add_argument("--repeats", type=int, default=1, metavar="N", help="repeats (1)")
    result.add_argument("--budget", type=float, default=60, metavar="S", help="to compile in (60)")
    result.add_argument("--output", default=RESULTS, metavar="DIR", help="folder of the results")
    return result


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **choices: tuple[str, str]
) -> argparse.Namespace:
    """Reads a command line.

    Args:
        parser: what it may say.
        argv: its words, by default those of the process.
        **choices: what else can be chosen, each with its default and that of `--quick`, in words.
    """
    for name, (full, _) in choices.items():
        parser.add_argument(f"--{name}", nargs="+", metavar="NAME", help=f"default: {full}")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (3 if options.quick else 15)
    options.shortest = 0.0 if options.quick else 0.02  # seconds that a sample takes at least
    for name, (full, quick) in choices.items():
        if getattr(options, name) is None:
            setattr(options, name, (quick if options.quick else full).split())
    return options


def file_to_write(word: str) -> Path:
    """A word of a command line that names a file to write."""
    if Path(word).is_dir():
        raise argparse.ArgumentTypeError(f"Expected a file; got the folder {word}.")
    return Path(word)


def between_marks(page: str, results: str, name: str = "results") -> str:
    """A page of the documentation with these results between the two marks of that name."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.split(f"{start}\n")
    _, after = rest.split(end)
    return f"{before}{start}\n\n{results}\n\n{end}{after}"

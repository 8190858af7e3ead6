"""Measures in a few minutes what only a GPU can show: `python -m benchmarks.on_device`.

It runs from a checkout that is not installed (`PYTHONPATH=src`) and needs jax and optax alone; it
reports what else is missing. The most valuable measurements come first. Each is written when it is
done, and a second run measures what is left. Each part has its own budget, and what did not fit
into it gets what is left of the whole.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs
from gainstage import _doctor
from gainstage.optimizers import Adam

from . import beside_torch, harness, models, peers
from . import train_steps_do_not_notice_scaling as train_steps

IF_FINITE = "optax.apply_if_finite"
STEPS = (
    peers.OPTAX,
    peers.OURS,
    peers.OURS_IN_TRAIN_STEP,
    peers.OURS_IN_OPTAX,
    IF_FINITE,
    "ours, stateless_apply",
    "ours, eager",  # `apply` alone: a compiled program too
)
EAGER = (peers.OPTAX, "ours, eager", "ours, eager, no scaling")
CHECKS = (peers.OPTAX, peers.SELECT, peers.CONDITIONAL, IF_FINITE, peers.OURS)
DTYPES = ("float32", "float16", "bfloat16", "float8")

Measure = Callable[[float, Any], dict[str, Any]]  # is given the time to end at, and the options


class Part(NamedTuple):
    """Measurements that share a budget."""

    claim: str
    seconds: float  # of a budget of 500
    measurements: Callable[[bool], dict[str, Measure]]  # by title; small ones where it is quick


# ── variants beside each other ───────────────────────────────────────────────────────────────


class Race:
    """Variants that are compiled, the baseline first, and then run in turns."""

    def __init__(self, case: harness.Case, until: float, options: Any):
        builders, self.inputs = case.make()
        if case.traffic:
            builders[harness.LIMIT] = harness.bandwidth
        self.ready: dict[str, harness.Prepared] = {}
        self.missing: dict[str, str] = {}
        for name, build in builders.items():
            if self.ready and time.perf_counter() > until:
                self.missing[name] = "no time was left"
                continue
            try:
                new = harness.Prepared(build, self.inputs, case, options.shortest)
            except Exception as error:  # a missing or broken variant is part of the result
                self.missing[name] = reason(error)
                continue
            first = next(iter(self.ready.values()), new)
            if (off := new.disagreement(first)) > 0.5:
                self.missing[name] = f"takes other steps than the baseline ({off:.0%} off)"
            else:
                self.ready[name] = new
        gc.collect()
        self.calls = max((one.calls for one in self.ready.values()), default=0)
        self.compile_s = {name: one.compile_s for name, one in self.ready.items()}

    def rounds(self, count: int, until: float) -> list[dict[str, float]]:
        """So many, or what fits into the time, but two at least."""
        found: list[dict[str, float]] = []
        while len(found) < count and (len(found) < 2 or time.perf_counter() < until):
            names = list(self.ready) if len(found) % 2 == 0 else list(self.ready)[::-1]
            found.append({n: self.ready[n].sample(self.inputs, self.calls) for n in names})
        return found

    def cell(self, case: harness.Case, rounds: list[dict[str, float]], **compile_s: float) -> Any:
        """The numbers, as the results of the other benchmarks have them."""
        times = self.compile_s | compile_s
        variants = harness.summary(harness.Measured({}, rounds, times, self.missing), case)
        for name, numbers in variants.items():
            if case.traffic and name != harness.LIMIT:
                numbers["gb_s"] = case.traffic / numbers["ms"] / 1e6
        return {
            "labels": case.labels,
            "baselines": [b for b in case.baselines if b in variants],
            "rounds": len(rounds),
            "repeats": 1,
            "variants": variants,
            "missing": self.missing,
        }


def compare(case: harness.Case, until: float, options: Any) -> dict[str, Any]:
    """Measures a case in this process."""
    race = Race(case, until, options)
    return race.cell(case, race.rounds(options.rounds, until))


def compare_with_torch(cell: Sequence[str], until: float, options: Any) -> dict[str, Any]:
    """Turns of PyTorch, each in a process of its own, between rounds of ours."""
    if importlib.util.find_spec("torch") is None:
        return {"missing": {"torch": "is not installed"}}
    names = (peers.OPTAX, peers.OURS, peers.OURS_IN_TRAIN_STEP)
    baselines = [beside_torch.SCALED, beside_torch.PLAIN]
    case = peers.case(names, peers.OPTAX, *cell)._replace(baselines=baselines)
    race = Race(case, until, options)
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    words = [*cell, device, 0, options.rounds, options.shortest]
    rounds: list[dict[str, float]] = []
    while len(rounds) < 3 and (not rounds or time.perf_counter() < until):
        ours = race.rounds(options.rounds, until)
        medians = {name: statistics.median(r[name] for r in ours) for name in ours[0]}
        left = max(until - time.perf_counter(), 30.0)
        rounds.append({**beside_torch.call(sys.executable, words, left)["seconds"], **medians})
    return race.cell(case, rounds, **dict.fromkeys(baselines, 0.0))


def reason(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# ── the parts ────────────────────────────────────────────────────────────────────────────────


def doctor(until: float, options: Any) -> dict[str, Any]:
    """`gainstage doctor`, with what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = _doctor.main()
    return {"status": status, "output": said.getvalue().splitlines()}


def master_weights(dtype: str, quick: bool, until: float, options: Any) -> dict[str, Any]:
    """A thousand updates, each far below a unit in the last place of the weights.

    A GPU's compiler may leave out that a master copy is rounded to the weight's dtype, where the
    two are compared. Then copies are taken for foreign, and updates are lost: the masters would
    not be where the same run in float32 is.
    """
    steps, size = (50, 1000) if quick else (1000, 1_000_000)
    rng = np.random.default_rng(0)
    start, gradient = (jnp.asarray(rng.standard_normal(size), dtype) for _ in range(2))

    def run(start: jax.Array, **wanted: Any) -> tuple[np.ndarray, np.ndarray | None]:
        weight = gs.optimizers.Variable(start)
        optimizer = gs.optimizers.LossScaleOptimizer(Adam(1e-5, **wanted), initial_scale=1.0)
        optimizer.build([weight])

        def step() -> jax.Array:
            turn = jnp.asarray(optimizer.iterations, jnp.float32)
            optimizer.apply([(gradient * (1 + 0.5 * jnp.cos(turn))).astype(dtype)], [weight])
            return optimizer.loss_scale

        program = gs.optimizers.jit(step, ([weight], optimizer.variables), donate=True)
        for _ in range(steps):
            done = program()
        jax.block_until_ready(done)
        masters = optimizer.inner_optimizer._store.masters.get(weight)
        return weight.numpy(), None if masters is None else masters.numpy()

    weights, masters = run(start, master_weights=True)
    exact, _ = run(start.astype(jnp.float32))
    alone, _ = run(start)
    moved = np.abs(exact - np.asarray(start, np.float32)).mean()
    assert masters is not None
    return {
        "steps": steps,
        "elements": size,
        # Of the movement of the same run in float32 variables.
        "masters away from float32": float(np.abs(masters - exact).mean() / moved),
        "without masters": float(np.abs(np.float32(alone) - exact).mean() / moved),
        "weights that are not the masters rounded": int(
            (masters.astype(weights.dtype) != weights).sum()
        ),
    }


def train_step(name: str, dtype: str, until: float, options: Any) -> dict[str, Any]:
    """A whole train step."""
    baselines = [train_steps.PLAIN, train_steps.IF_FINITE]
    make = partial(train_steps.steps, name, dtype)
    return compare(train_steps.case(name, dtype, make, baselines), until, options)


def autocast(name: str, quick: bool, until: float, options: Any) -> dict[str, Any]:
    """A train step of a model written in float32: as it is, by hand in float16, and cast."""
    from studies.autocast_models import MODELS  # some need Flax or Equinox

    written = MODELS[name](large=not quick)
    cast, scaled = gs.autocast(written.loss), gs.DynamicLossScale(2.0**12)
    losses: dict[str, tuple[Any, ...]] = {
        "float32": (written.loss, gs.FixedLossScale(1.0)),
        "by hand": (written.by_hand, scaled),
        "autocast": (cast, scaled),
        "autocast, retries": (cast, scaled, 8),
    }
    known = {variant: how for variant, how in losses.items() if how[0] is not None}
    model = written.params, written.batch(0)
    return by_loss(name, *model, known, ["float32", "by hand"], until, options)


def by_loss(
    name: str,
    params: Any,
    batch: Any,
    losses: dict[str, tuple[Any, ...]],
    baselines: Sequence[str],
    until: float,
    options: Any,
) -> dict[str, Any]:
    """Train steps of one model with several losses: `(loss, its rule, retries)`."""
    peaks: dict[str, float] = {}

    def build(variant: str, loss: Any, rule: gs.LossScale, retries: int = 0) -> harness.Variant:
        copied = jax.tree.map(jnp.copy, params)
        state = gs.TrainState.create(copied, optax.adam(1e-3), rule=rule)
        step = gs.train_step(loss, retries=retries)
        sizes = step.lower(state, batch).compile().memory_analysis()
        arrays = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        peaks[variant] = (arrays - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes) / 1e9
        return train_steps.of_state(step, state)

    builders = {variant: partial(build, variant, *how) for variant, how in losses.items()}
    case = harness.Case({"model": name}, lambda: (builders, batch), baselines)
    cell = compare(case, until, options)
    for variant, numbers in cell["variants"].items():
        numbers["peak_gb"] = peaks[variant]
    return cell


def float8_rule(width: int, until: float, options: Any) -> dict[str, Any]:
    """A train step of a language model under autocast, by dtype."""
    sizes: dict[str, Any] = {"letters": 8192, "places": 1024, "batch": (8, 1024)}
    small: dict[str, Any] = {"letters": 64, "places": 16, "batch": (2, 16)}
    model = models.transformer(jnp.float32, width, 2, **(sizes if width > 64 else small))
    losses = {
        dtype: (gs.autocast(model.loss, dtype), gs.DynamicLossScale(2.0**12))
        for dtype in ("float16", "bfloat16", "float8")
    }
    title = f"language model, width {width}"
    return by_loss(title, model.params, model.batch, losses, ["float16"], until, options)


def fp8_memory(quick: bool, until: float, options: Any) -> dict[str, Any]:
    """Forward and backward pass of eight products, by dtype: memory between, and time."""
    width, rows = (64, 128) if quick else (4096, 8192)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, width), np.float32))
    weights = [models.dense(rng, width, width) for _ in range(8)]
    found: dict[str, Any] = {"width": width, "rows": rows}

    def product(w: Any, x: Any) -> Any:
        for one in w:
            x = jax.nn.relu(x @ one)
        return jnp.square(x).mean()

    programs, wanted = {}, (weights, x)
    for dtype in DTYPES:
        loss = product if dtype == "float32" else gs.autocast(product, dtype)
        start = time.perf_counter()
        try:
            program = jax.jit(jax.value_and_grad(loss)).lower(*wanted).compile()
        except Exception as error:  # each backend says no in its own way
            found[dtype] = {"missing": reason(error)}
            continue
        seconds, text = time.perf_counter() - start, program.as_text() or ""
        targets = re.findall(r'custom_call_target="([^"]+)"', text)
        found[dtype] = {
            "temp_bytes": program.memory_analysis().temp_size_in_bytes,
            "compile_s": seconds,
            "custom calls": sorted(set(targets)),
        }
        programs[dtype] = program
    samples: dict[str, list[float]] = {dtype: [] for dtype in programs}
    for turn in range(options.rounds + 1):
        for dtype in list(programs)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            for _ in range(3):
                out = programs[dtype](*wanted)
            jax.block_until_ready(out)
            samples[dtype] += [(time.perf_counter() - start) / 3] if turn else []  # the first warms
    for dtype, seconds in samples.items():
        found[dtype] |= {"ms": 1e3 * statistics.median(seconds), "ms_max": 1e3 * max(seconds)}
    return found


def faults(place: int, quick: bool, until: float, options: Any) -> dict[str, Any]:
    """A configuration of the campaign of faults, in this process."""
    from studies import faults_never_reach_a_weight as campaign  # which needs the extra `demo`

    configuration = campaign.configurations(quick=True)[place]
    if quick:
        training = campaign.Training(configuration)
        clean, outcomes = training.outcomes(list(campaign.single_faults(training))[::9])
    else:
        clean, outcomes = campaign.examine(configuration)
    return {
        "configuration": configuration._asdict(),
        "accuracy without faults": clean,
        "tried": len(outcomes),
        "safe": sum(o.safe for o in outcomes),
        "survived": sum(o.survived for o in outcomes),
        "not survived": [o.row for o in outcomes if not o.survived],
    }


def cells(variants: Sequence[str], *wanted: Sequence[str]) -> dict[str, Measure]:
    """Measurements of the optimizer step alone."""
    cases = [peers.case(variants, peers.OPTAX, *cell) for cell in wanted]
    return {case.title: partial(compare, case) for case in cases}


def optimizer_steps(quick: bool) -> dict[str, Measure]:
    """The sets of parameters, the largest first."""
    if quick:
        return cells(STEPS, ("tiny20", "adam", "float16"))
    first = [
        ("gpt2", "adam", "float16"),
        ("one", "adam", "float32"),
        ("resnet50", "adam", "float16"),
    ]
    every = product(("one", "resnet50", "gpt2"), ("adam", "sgd"), ("float32", "float16"))
    return cells(STEPS, *first, *(cell for cell in every if cell not in first))


def train_step_cells(quick: bool) -> dict[str, Measure]:
    """The models, the one where the optimizer matters most first."""
    every = product(("gpt2", "transformer", "mlp"), ("float16", "float32"))
    chosen = [("mlp", "float16")] if quick else every
    return {", ".join(cell): partial(train_step, *cell) for cell in chosen}


def autocast_cells(quick: bool) -> dict[str, Measure]:
    """The models of the study of autocast, in its order."""
    from studies.autocast_models import MODELS

    chosen = ["mixture of experts"] if quick else MODELS
    return {name: partial(autocast, name, quick) for name in chosen}


def float8_cells(quick: bool) -> dict[str, Measure]:
    """Widths at which all linear layers gain by float8, some, and none."""
    widths = [64] if quick else [2048, 512, 256]
    return {f"width {width}": partial(float8_rule, width) for width in widths}


def campaign_cells(quick: bool) -> dict[str, Measure]:
    """Adam on float16 variables, with each option and rule."""
    places = [0] if quick else sorted(range(14), key=lambda place: place % 3)  # by rule
    return {f"configuration {place}": partial(faults, place, quick) for place in places}


def torch_cells(quick: bool) -> dict[str, Measure]:
    """What PyTorch is compared on: float32 gradients."""
    tensors = ("tiny20",) if quick else ("gpt2", "resnet50")
    wanted = [(name, kind) for kind in ("adam", "sgd") for name in tensors]
    return {", ".join(cell): partial(compare_with_torch, cell) for cell in wanted}


PARTS = {
    "doctor": Part("What the device computes, and whether scaling works", 20,
        lambda quick: {"doctor": doctor}),
    "master_weights": Part("Master weights are a run in float32, rounded", 30,
        lambda quick: {d: partial(master_weights, d, quick) for d in ("bfloat16", "float16")}),
    "optimizer_steps": Part("An optimizer step beside optax", 100, optimizer_steps),
    "train_steps": Part("A train step beside optax", 80, train_step_cells),
    "autocast": Part("Models in float32, by hand in float16, and under autocast", 60,
        autocast_cells),
    "float8": Part('A language model under autocast, "float16" and "float8"', 40, float8_cells),
    "select": Part("Skipping by a select, and by a conditional", 35,
        lambda quick: cells(CHECKS, *product(["tiny20"] if quick else ["gpt2", "one"], ["adam"]))),
    "torch": Part("An optimizer step beside PyTorch's fused one", 60, torch_cells),
    "eager": Part("An eager step beside a compiled one of optax", 25,
        lambda quick: cells(EAGER, ("tiny20" if quick else "tiny161", "adam"))),
    "fp8_memory": Part("Eight products, forward and backward", 25,
        lambda quick: {"products": partial(fp8_memory, quick)}),
    "faults": Part("A gradient that is not finite never reaches a weight", 65, campaign_cells),
}  # fmt: skip


# ── the run ──────────────────────────────────────────────────────────────────────────────────


class Results:
    """What there is, in a file that is written after each measurement."""

    def __init__(self, folder: Path, quick: bool):
        environment = harness.environment()
        device = jax.devices()[0]
        self.tried: set[tuple[str, str]] = set()
        self.file = folder / f"{environment['device']}{'-quick' * quick}.json"
        self.found = {"environment": environment, "device": {}, "parts": {}}
        if self.file.exists():
            old = json.loads(self.file.read_text())
            self.found = old if old["environment"] == environment else self.found
        self.found["device"] = {
            "kind": device.device_kind,
            "platform": device.client.platform_version.splitlines()[0],
            "memory_limit_gb": ((device.memory_stats() or {}).get("bytes_limit", 0)) / 1e9,
            **copy_bandwidth(4_000_000 if quick else 250_000_000),
        }
        self.write()

    def has(self, part: str, title: str) -> bool:
        """Whether a measurement is there; the next run tries again what failed."""
        return "error" not in self.found["parts"].get(part, {}).get(title, {"error": ""})

    def add(self, part: str, title: str, numbers: dict[str, Any]) -> None:
        """Keeps a measurement."""
        self.found["parts"].setdefault(part, {})[title] = numbers
        self.write()

    def write(self) -> None:
        """Replaces the file: a kill loses nothing of before."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = self.file.with_suffix(".new")
        written.write_text(json.dumps(self.found, indent=1) + "\n")
        written.replace(self.file)


def copy_bandwidth(elements: int) -> dict[str, float]:
    """What the memory gives: `a = a / 2 + b` in place, in GB/s."""
    step, held = harness.bandwidth(elements)
    held = [held]
    harness.sample(step, held, None, 3)
    rates = [12e-9 * elements / harness.sample(step, held, None, 10) for _ in range(7)]
    return {"gb_s": statistics.median(rates), "gb_s_min": min(rates), "gb_s_max": max(rates)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is not there yet, until the time is up."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a test")
    parser.add_argument("--budget", type=float, default=500, metavar="S", help="seconds (500)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"some of: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds (11; quick: 2)")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "devices", metavar="DIR")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write it, and measure nothing")
    options = parser.parse_args(argv)
    if options.page:
        options.page.write_text(page(options.output))
        return
    options.rounds = options.rounds or (2 if options.quick else 11)
    options.shortest = 0.0 if options.quick else 0.03  # seconds that a sample takes at least
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # PyTorch has the rest
    end = start + 0.92 * options.budget  # nothing begins after it
    watchdog = threading.Timer(options.budget, stop)  # a compilation cannot be interrupted
    watchdog.daemon = True
    watchdog.start()
    results = Results(options.output, options.quick)
    tell("device", results.found["device"])
    for is_last in (False, True):
        for part in options.parts:
            seconds = PARTS[part].seconds * options.budget / 500
            until = end if is_last else min(end, time.perf_counter() + seconds)
            measure(part, until, results, options)
    watchdog.cancel()
    left = [
        f"{part} ({title})"
        for part in options.parts
        for title in PARTS[part].measurements(options.quick)
        if not results.has(part, title)
    ]
    print(f"\n{time.perf_counter() - start:.0f} s; results: {results.file}")
    print(f"Not measured: {', '.join(left) or 'nothing'}.", flush=True)


def stop() -> None:
    """Ends the process, whatever it is at; what was measured is in the file."""
    print("The budget is spent. What was measured is kept; run again for the rest.", flush=True)
    os._exit(3)


def measure(part: str, until: float, results: Results, options: Any) -> None:
    """Measures what is missing of a part, as long as there is time."""
    for title, one in PARTS[part].measurements(options.quick).items():
        done = results.has(part, title) or (part, title) in results.tried
        if done or (start := time.perf_counter()) > until:
            continue
        results.tried.add((part, title))
        try:
            numbers: dict[str, Any] = one(until, options)
        except Exception as error:  # the other measurements are worth as much
            numbers = {"error": reason(error)}
        numbers["seconds"] = round(time.perf_counter() - start, 1)
        results.add(part, title, numbers)
        tell(f"{part}: {title}", numbers)
        gc.collect()
        jax.clear_caches()


def tell(title: str, numbers: dict[str, Any]) -> None:
    """Prints a measurement; rich may be missing here."""
    print(f"\n{title}")
    for name, one in numbers.get("variants", {}).items():
        words = [f"{one['ms']:10.4g} ms ({one['ms_min']:.4g} - {one['ms_max']:.4g})"]
        words += [
            f"/ {baseline} {ratio['median']:.3f} ({ratio['q1']:.2f} - {ratio['q3']:.2f})"
            for baseline, ratio in one["ratios"].items()
        ]
        words += [f"{one['gb_s']:.0f} GB/s"] if "gb_s" in one else []
        words += [f"{one['peak_gb']:.3g} GB at most"] if "peak_gb" in one else []
        print(f"  {name:28}{', '.join(words)}, compiled in {one['compile_s']:.1f} s")
    for name, value in numbers.items():
        if name not in ("variants", "labels", "baselines", "repeats") and value != {}:
            lines = value if isinstance(value, list) else [value]
            print(f"  {name}:", *lines, sep="\n    " if len(lines) > 1 else " ")
    sys.stdout.flush()


# ── the page ─────────────────────────────────────────────────────────────────────────────────


def page(folder: Path) -> str:
    """All devices of a folder of results, in Markdown."""
    lines = ["# On a GPU", "", "Written by `python -m benchmarks.on_device --page`.", ""]
    for file in sorted(folder.glob("*.json")):
        lines += device_page(json.loads(file.read_text()))
    return "\n".join(lines)


def device_page(results: dict[str, Any]) -> Iterator[str]:
    """What was measured on a device: the tables of comparisons, and the rest as it is."""
    from . import report  # which needs matplotlib

    device = results["device"]
    yield f"## {device['kind']}\n"
    yield f"`a = a / 2 + b`, in place, on large arrays: {device['gb_s']:.0f} GB/s.\n"
    for name, part in results["parts"].items():
        compared = {title: one for title, one in part.items() if "variants" in one}
        claim = {"claim": PARTS[name].claim, "environment": results["environment"]}
        if compared:
            yield report.section("on_device", claim | {"cases": compared})
        else:
            yield f"### {claim['claim']}\n"
        for title in [title for title in part if title not in compared]:
            yield f"{title}:\n\n```json\n{json.dumps(part[title], indent=1)}\n```\n"


if __name__ == "__main__":
    main()

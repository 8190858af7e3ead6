"""Measures in a few minutes what only a GPU can show: `python -m benchmarks.on_device`.

It runs from a checkout that is not installed (`PYTHONPATH=src`) and needs jax and optax alone; it
reports what else is missing. The rows stand in the order of their worth. Each is measured whole or
not at all, is written when it is done, and begins only if the time that it took on an H200 is left;
a second run measures what is left. Compiled programs are kept beside the results.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs
from gainstage import _doctor
from gainstage.optimizers import Adam

from . import beside_torch, harness, language_model, models, peers
from . import train_steps_do_not_notice_scaling as train_steps

STEPS = (
    peers.OPTAX,
    peers.SELECT,
    peers.CONDITIONAL,
    "optax.apply_if_finite",
    peers.OURS,
    "ours, stateless_apply",
    peers.OURS_IN_TRAIN_STEP,
    "ours, eager",  # `apply` alone: a compiled program too
)
HITS = {"count": 0}  # programs that came from the compilation cache
DTYPES = ("float16", "float32")
TRIES = 20  # steps until the first is applied: each halves the scale

Measure = Callable[[Any], dict[str, Any]]  # is given the options


def _count_hits(event: str, **_: Any) -> None:
    HITS["count"] += event == "/jax/compilation_cache/cache_hits"


class Row(NamedTuple):
    """A measurement, and about the seconds that it took on an H200."""

    seconds: float
    measure: Measure


class Part(NamedTuple):
    """Measurements that say the same of different things."""

    claim: str
    rows: Callable[[bool], dict[str, Row]]  # by title; small ones where it is quick


# ── train steps of a model beside each other ─────────────────────────────────────────────────


class Trained:
    """A train step that is compiled and warm, with what it carries.

    Args:
        loss: `(params, batch) -> loss`.
        params: float32.
        batch: what each step is trained on.
        tx: of optax, with Adam inside.
        rule: of loss scaling; None is a step of plain optax.
        shortest: seconds that a sample takes at least.
    """

    def __init__(
        self,
        loss: Any,
        params: Any,
        batch: Any,
        tx: Any,
        rule: gs.LossScale | None,
        shortest: float,
    ):
        params = jax.tree.map(jnp.copy, params)
        if rule is None:
            self.state: Any = (params, tx.init(params))
            self.step: Any = jax.jit(partial(plain_step, loss, tx), donate_argnums=0)
        else:
            self.state = gs.TrainState.create(params, tx, loss_scale=rule)
            self.step = gs.train_step(loss)
        del params
        before, start = HITS["count"], time.perf_counter()
        sizes = self.step.lower(self.state, batch).compile().memory_analysis()
        # A program from the cache says nothing of how long it takes to compile.
        is_cached = HITS["count"] > before
        self.compile_s = None if is_cached else time.perf_counter() - start
        arrays = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        self.peak_gb = (arrays - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes) / 1e9
        self.batch = batch
        for _ in range(TRIES):
            self.state, self.loss = self.step(self.state, batch)
            self.gradient = self._first_moments()  # of the first applied step: a tenth of it
            if optax.tree.norm(self.gradient) > 0:
                break
        seconds = [self.sample(1) for _ in range(3)][-1]
        self.calls = math.ceil(shortest / seconds) or 1

    def _first_moments(self) -> Any:
        inner = self.state.opt_state if isinstance(self.state, gs.TrainState) else self.state[1]
        return jax.tree.map(jnp.copy, optax.tree.get(inner, "mu"))

    def sample(self, calls: int) -> float:
        """The seconds that a step takes, one call after the other."""
        start = time.perf_counter()
        for _ in range(calls):
            self.state, loss = self.step(self.state, self.batch)
        jax.block_until_ready(loss)
        return (time.perf_counter() - start) / calls


def plain_step(loss: Any, tx: Any, state: Any, batch: Any) -> Any:
    """A step without loss scaling."""
    params, inner = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, inner = tx.update(grads, inner, params)
    return (optax.apply_updates(params, updates), inner), value


def train(
    labels: dict[str, str],
    losses: dict[str, tuple[Any, ...]],
    params: Any,
    batch: Any,
    tx: Any,
    baselines: Sequence[str],
    options: Any,
) -> dict[str, Any]:
    """Train steps of one model with several losses, `(loss, its rule)`, in turns.

    Each says how far the gradients of its first step are from those of the first variant.
    """
    ready: dict[str, Trained] = {}
    missing: dict[str, str] = {}
    off: dict[str, float] = {}
    exact: Any = None
    for name, (loss, rule) in losses.items():
        try:
            new = Trained(loss, params, batch, tx, rule, options.shortest)
        except Exception as error:  # a missing or broken variant is part of the result
            missing[name] = reason(error)
            continue
        exact = new.gradient if exact is None else exact
        off[name] = float(distance(new.gradient, exact))
        del new.gradient
        ready[name] = new
        gc.collect()
    rounds = in_turns({name: (one.sample, one.calls) for name, one in ready.items()}, options)
    compile_s = {name: one.compile_s or 0.0 for name, one in ready.items()}
    case = harness.Case(labels, dict, baselines)
    cell = cell_of(case, rounds, compile_s, missing)
    for name, one in ready.items():
        cell["variants"][name] |= {
            "compile_s": one.compile_s,
            "peak_gb": one.peak_gb,
            "loss": float(one.loss),
            "gradient_off": off[name],
        }
    return cell


@jax.jit
def distance(found: Any, exact: Any) -> jax.Array:
    """The norm of the difference over that of the second."""
    return optax.tree.norm(jax.tree.map(jnp.subtract, found, exact)) / optax.tree.norm(exact)


def in_turns(samples: dict[str, tuple[Any, int]], options: Any) -> list[dict[str, float]]:
    """Seconds by variant, in one order and then in the other."""
    found = []
    for turn in range(options.rounds):
        names = list(samples) if turn % 2 == 0 else list(samples)[::-1]
        found.append({name: samples[name][0](samples[name][1]) for name in names})
    return found


def cell_of(
    case: harness.Case, rounds: Any, compile_s: dict[str, float], missing: dict[str, str]
) -> dict[str, Any]:
    """The numbers, as the results of the other benchmarks have them."""
    variants = harness.summary(harness.Measured({}, rounds, compile_s, missing), case)
    return {
        "labels": case.labels,
        "baselines": [b for b in case.baselines if b in variants],
        "rounds": len(rounds),
        "repeats": 1,
        "variants": variants,
        "missing": missing,
    }


def compare(case: harness.Case, options: Any) -> dict[str, Any]:
    """A case of another benchmark, with the same gradients in each variant."""
    builders, inputs = case.make()
    ready: dict[str, harness.Prepared] = {}
    missing: dict[str, str] = {}
    for name, build in builders.items():
        try:
            new = harness.Prepared(build, inputs, case, options.shortest)
        except Exception as error:
            missing[name] = reason(error)
            continue
        first = next(iter(ready.values()), new)
        if (off := new.disagreement(first)) > 0.5:
            missing[name] = f"takes other steps than the baseline ({off:.0%} off)"
        else:
            ready[name] = new
    gc.collect()
    calls = max((one.calls for one in ready.values()), default=0)
    samples = {name: (partial(one.sample, inputs), calls) for name, one in ready.items()}
    compile_s = {name: one.compile_s for name, one in ready.items()}
    return cell_of(case, in_turns(samples, options), compile_s, missing)


def reason(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# ── the rows ─────────────────────────────────────────────────────────────────────────────────


def language(
    sizes: language_model.Sizes, ours: Sequence[str], theirs: Sequence[str], options: Any
) -> dict[str, Any]:
    """A train step of a language model, and the same in PyTorch, in a process of its own."""
    torch = run_torch(sizes, theirs, options)  # before JAX takes the memory
    every = language_model.variants(sizes)
    params, ids = language_model.parameters(sizes), language_model.tokens(sizes)
    adam = optax.adamw(language_model.RATE, weight_decay=language_model.DECAY)
    tx = optax.chain(optax.clip_by_global_norm(language_model.CLIP), adam)
    labels = {"model": sizes.title}
    cell = train(labels, {n: every[n] for n in ours}, params, ids, tx, [ours[0]], options)
    cell["missing"] |= torch["missing"]
    cell["variants"] |= torch["variants"]
    for numbers in cell["variants"].values():
        numbers["tokens_s"] = 1e3 * sizes.tokens / numbers["ms"]
    return cell | {"environment": torch["environment"]}


def run_torch(sizes: language_model.Sizes, names: Sequence[str], options: Any) -> dict[str, Any]:
    """What PyTorch's turn printed."""
    nothing: dict[str, Any] = {"variants": {}, "environment": {}}
    if importlib.util.find_spec("torch") is None:
        return nothing | {"missing": dict.fromkeys(names, "PyTorch is not installed")}
    words = [list(sizes), options.rounds, options.shortest, *names]
    command = [sys.executable, "-m", "benchmarks.language_model", *map(json.dumps, words)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return nothing | {"missing": dict.fromkeys(names, said[:200])}
    found = json.loads(done.stdout.splitlines()[-1])
    for numbers in found["variants"].values():
        numbers["ratios"] = {}
    return found | {"missing": {}}


def language_rows(quick: bool) -> dict[str, Row]:
    """The width at which float8 gains nothing, one between, and one at which it gains."""
    sizes = language_model.Sizes
    every, torch = list(language_model.variants(sizes(64, 1, 1))), [language_model.TORCH_FLOAT16]
    if quick:
        small = sizes(64, 1, 2, 128, 64)
        return {small.title: Row(60, partial(language, small, every, torch))}
    float16, fused16, _, float8 = every[3:]
    first = ["float32, optax", "bfloat16 by hand, optax, cuDNN", *every[3:]]
    more = [*torch, language_model.TORCH_BFLOAT16, language_model.TORCH_TF32]
    wanted: list[tuple[language_model.Sizes, list[str], list[str], float]] = [
        (sizes(1024, 8, 16), first, more, 213),
        (sizes(2048, 6, 8), [float16, fused16, float8], torch, 102),
        (sizes(4096, 2, 8), [fused16, float8], torch, 123),
    ]
    return {one.title: Row(s, partial(language, one, a, b)) for one, a, b, s in wanted}


def gpt2_step(dtype: str, quick: bool, options: Any) -> dict[str, Any]:
    """A train step on GPT-2's tensors."""
    batch = (8, 512)
    model = models.mlp(jnp.dtype(dtype)) if quick else models.gpt2(jnp.dtype(dtype), batch)
    baselines = [train_steps.PLAIN, train_steps.IF_FINITE]
    case = train_steps.case(
        "mlp" if quick else f"gpt2, {batch[0]} x {batch[1]} tokens",
        dtype,
        partial(train_steps.steps_of, model),
        baselines,
    )
    return compare(case, options)


def optimizer_step(tensors: str, options: Any) -> dict[str, Any]:
    """An optimizer step of Adam, and PyTorch's fused one, in a process of its own."""
    case = peers.case(STEPS, peers.OPTAX, tensors, "adam")
    cell = compare(case._replace(traffic=None), options)
    if importlib.util.find_spec("torch") is None:
        cell["missing"][beside_torch.SCALED] = "PyTorch is not installed"
        return cell
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    words = [tensors, "adam", device, 0, options.rounds, options.shortest]
    for name, seconds in beside_torch.call(sys.executable, words, 60)["seconds"].items():
        cell["variants"][name] = {"ms": 1e3 * seconds, "compile_s": None, "ratios": {}}
    return cell


def autocast(name: str, quick: bool, options: Any) -> dict[str, Any]:
    """A train step of a model written in float32: as it is, by hand in float16, and cast."""
    from studies.autocast_models import MODELS  # some need Flax or Equinox

    written = MODELS[name](large=not quick)
    scaled = gs.DynamicLossScale(2.0**12)
    losses: dict[str, tuple[Any, ...]] = {
        "float32": (written.loss, None),
        "by hand": (written.by_hand, scaled),
        "autocast": (gs.autocast(written.loss), scaled),
    }
    known = {variant: how for variant, how in losses.items() if how[0] is not None}
    baselines, batch = list(known)[:-1], written.batch(0)
    return train(
        {"model": name}, known, written.params, batch, optax.adam(1e-3), baselines, options
    )


def autocast_rows(quick: bool) -> dict[str, Row]:
    """The models of the study of autocast, in its order."""
    from studies.autocast_models import MODELS

    chosen = ["mixture of experts"] if quick else MODELS
    return {name: Row(30, partial(autocast, name, quick)) for name in chosen}


def doctor(options: Any) -> dict[str, Any]:
    """`gainstage doctor`, with what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = _doctor.main()
    return {"status": status, "output": said.getvalue().splitlines()}


def master_weights(dtype: str, quick: bool, options: Any) -> dict[str, Any]:
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


PARTS = {
    "language_model": Part("A language model's train step, beside PyTorch's", language_rows),
    "gpt2": Part("A train step on GPT-2's tensors, beside optax", lambda quick: {
        d: Row(58, partial(gpt2_step, d, quick)) for d in (["float16"] if quick else DTYPES)}),
    "optimizer_step": Part("An optimizer step, beside optax and PyTorch's fused one", lambda quick:
        {n: Row(60, partial(optimizer_step, n)) for n in (["tiny20"] if quick else ["gpt2"])}),
    "autocast": Part("Models in float32, by hand in float16, and under autocast", autocast_rows),
    "doctor": Part("What the device computes, and whether scaling works", lambda quick: {
        "doctor": Row(6, doctor)}),
    "master_weights": Part("Master weights are a run in float32, rounded", lambda quick: {
        d: Row(2, partial(master_weights, d, quick)) for d in ("bfloat16", "float16")}),
}  # fmt: skip


# ── the run ──────────────────────────────────────────────────────────────────────────────────


class Results:
    """What there is, in a file that is written after each measurement."""

    def __init__(self, folder: Path, quick: bool):
        environment = harness.environment()
        device = jax.devices()[0]
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
        self.found["date"] = time.strftime("%Y-%m-%d")
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
    parser.add_argument("--budget", type=float, default=400, metavar="S", help="seconds (400)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"some of: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds (7; quick: 2)")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "devices", metavar="DIR")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.shortest = 0.0 if options.quick else 0.25  # seconds that a sample takes at least
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.7")  # PyTorch has the rest
    jax.monitoring.register_event_listener(_count_hits)
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(options.output / "compiled"))
    end = start + options.budget
    watchdog = threading.Timer(options.budget, stop)  # a compilation cannot be interrupted
    watchdog.daemon = True
    watchdog.start()
    results = Results(options.output, options.quick)
    tell("device", results.found["device"])
    for part in options.parts:
        measure(part, end, results, options)
    watchdog.cancel()
    left = [
        f"{part} ({title})"
        for part in options.parts
        for title in PARTS[part].rows(options.quick)
        if not results.has(part, title)
    ]
    print(f"\n{time.perf_counter() - start:.0f} s; results: {results.file}")
    print(f"Not measured: {', '.join(left) or 'nothing'}.", flush=True)


def stop() -> None:
    """Ends the process, whatever it is at; what was measured is in the file."""
    print("The budget is spent. What was measured is kept; run again for the rest.", flush=True)
    os._exit(3)


def measure(part: str, end: float, results: Results, options: Any) -> None:
    """Measures what is missing of a part, as long as there is time."""
    for title, row in PARTS[part].rows(options.quick).items():
        start = time.perf_counter()
        if results.has(part, title) or start + row.seconds > end:
            continue
        try:
            numbers = row.measure(options)
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
    if numbers.get("variants"):
        print("\n".join(table(numbers)))
    for name, value in numbers.items():
        if name not in ("variants", "labels", "baselines", "repeats") and value != {}:
            lines = value if isinstance(value, list) else [value]
            print(f"  {name}:", *lines, sep="\n    " if len(lines) > 1 else " ")
    sys.stdout.flush()


# What a table shows of a variant, and how; what no variant has is left out.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "ms a step": lambda one: f"{one['ms']:.4g}",
    "thousand tokens/s": lambda one: f"{one['tokens_s'] / 1e3:.1f}",
    "peak GB": lambda one: f"{one['peak_gb']:.3g}",
    "compile s": lambda one: f"{one['compile_s']:.1f}",
    "gradients off": lambda one: f"{one['gradient_off']:.2g}",
    "loss": lambda one: f"{one['loss']:.3f}",
}


def table(cell: dict[str, Any]) -> Iterator[str]:
    """The variants in Markdown, and their ratios to each baseline with the quartiles."""

    def ratio(one: dict[str, Any], baseline: str) -> str:
        found = one["ratios"].get(baseline)
        return f"{found['median']:.3f} ({found['q1']:.3f}-{found['q3']:.3f})" if found else ""

    def shown(one: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> str:
        try:
            return show(one)
        except (KeyError, TypeError):  # not measured, or None
            return ""

    rows = [["", *COLUMNS, *(f"time / {b}" for b in cell["baselines"])]]
    for name, one in cell["variants"].items():
        numbers = [shown(one, show) for show in COLUMNS.values()]
        rows.append([name, *numbers, *(ratio(one, b) for b in cell["baselines"])])
    kept = [i for i in range(len(rows[0])) if i == 0 or any(row[i] for row in rows[1:])]
    rows.insert(1, ["---" if i == 0 else "---:" for i in range(len(rows[0]))])
    for row in rows:
        yield f"| {' | '.join(row[i] for i in kept)} |"


if __name__ == "__main__":
    main()

"""How far `gs.autocast` moves the gradients of real models, and what it saves.

Each model of `autocast_models.py` is differentiated in float32, in bfloat16 and in float16: by hand
where its library has a `dtype` argument, under `gs.autocast` with its default rules, and with a
plan of `precision.find_plan`. Three of them are trained. Programs for an H100 are compiled without
one, where the packages of the group `programs` are installed.

Results are written after each model; a model that is there is not repeated, so the command goes on
where it was stopped.
"""

import argparse
import functools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params
from rich.console import Console

import gainstage as gs
from benchmarks import hlo, lowered
from benchmarks.harness import environment, file_to_write
from gainstage.precision import Plan, find_plan
from gainstage.precision.program_costs import kept

from . import DOCS, RESULTS
from . import autocast_page as page
from .autocast_models import MODELS, Loss, Model, transformer

ALL = ("float32", "bfloat16", "by hand", "autocast", "plan")
PRODUCTS = ("dot_general", "conv_general_dilated")
BOUND, OF_BFLOAT16 = 0.005, 1 / 4  # the error that a plan may have: the larger of the two
SCALES = tuple(2.0**exponent for exponent in range(15, -1, -3))
QUICK = ("mixture of experts", "contrastive (Linen)", "features with an offset (NNX)")
TRAINED = {  # and their learning rates
    "transformer (NNX)": 3e-3,
    "ResNet, BatchNorm (Linen)": 3e-3,
    "diffusion, U-Net (Linen)": 3e-3,
}
STEPS = 300
TUNED = {"width": 456, "blocks": (4, 8)}  # of transformers; 10 million parameters with 4


# ── gradients ────────────────────────────────────────────────────────────────────────────────


def bound(bfloat16: float) -> float:
    """The largest error that a plan may have, for the error in bfloat16."""
    return max(BOUND, OF_BFLOAT16 * bfloat16)


def scaled(loss: Loss) -> Callable[..., Any]:
    """A program of the gradients of the loss times a scale."""
    program = jax.grad(lambda params, batch, scale: loss(params, batch) * scale)
    return jax.jit(program)


def gradients(loss: Loss, params: Any, batch: Any) -> list[np.ndarray] | None:
    """The gradients at the largest loss scale at which they are finite; None if no scale fits."""
    return at_the_largest_scale(scaled(loss), params, batch)


def at_the_largest_scale(
    program: Callable[..., Any], params: Any, batch: Any, scales: Iterable[float] = SCALES
) -> list[np.ndarray] | None:
    """What a program of `scaled` returns at the largest scale at which it is finite."""
    for scale in scales:
        found = program(params, batch, np.float32(scale))
        leaves = [np.asarray(leaf, np.float64) / scale for leaf in jax.tree.leaves(found)]
        if all(np.isfinite(leaf).all() for leaf in leaves):
            return leaves
    return None


def error(found: Sequence[np.ndarray] | None, exact: Sequence[np.ndarray] | None) -> float:
    """The norm of the difference over the norm."""
    if found is None or exact is None:
        return float("inf")
    off = sum(float(((a - b) ** 2).sum()) for a, b in zip(found, exact, strict=True))
    return float((off / sum(float((b**2).sum()) for b in exact)) ** 0.5)


def tuned(model: Model, batch: Any, largest: float) -> Plan:
    """The plan of a model; the page says so if it does not keep the bound."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Expected max_error", UserWarning)
        return find_plan(model.loss, model.params, [(batch,)], max_error=largest, progress=False)


def errors(model: Model) -> tuple[dict[str, Any], Plan]:
    """The errors of the gradients on two batches, and the plan measured on the first."""
    batch, other = model.batch(0), model.batch(1)
    exact = gradients(model.loss, model.params, batch)

    def off(loss: Loss) -> float | None:
        try:
            return error(gradients(loss, model.params, batch), exact)
        except ValueError:  # XLA has no such product on a CPU
            return None

    found = {
        "bfloat16": off(gs.autocast(model.loss, "bfloat16")),
        "by hand": off(model.by_hand) if model.by_hand else None,
        "autocast": off(gs.autocast(model.loss)),
    }
    start, largest = time.perf_counter(), bound(found["bfloat16"] or 0.0)
    plan = tuned(model, batch, largest)
    seconds = time.perf_counter() - start
    planned = gs.autocast(model.loss, plan)
    exact_of_other = gradients(model.loss, model.params, other)
    found["plan"] = off(planned)
    return {
        "errors": found,
        "bound": largest,
        "predicted": plan.predicted.error,
        "other batch": error(gradients(planned, model.params, other), exact_of_other),
        "tune_s": seconds,
        "operations": len(plan.entries),
        "halves": sum(operation.dtype == plan.dtype for operation in plan.entries),
        "shares": shares(plan),
        "products": products(model, plan, batch),
    }, plan


def shares(plan: Plan) -> dict[str, float]:
    """The error that each kind of operation would cause in float16, by its name."""
    total: dict[str, float] = {}
    for row in plan.entries:
        if np.isfinite(row.error):
            total[row.name] = total.get(row.name, 0.0) + row.error**2
    return {name: square**0.5 for name, square in sorted(total.items(), key=lambda row: -row[1])}


def products(model: Model, plan: Plan, batch: Any) -> dict[str, Any]:
    """How many of the products of the forward and backward pass are in half precision."""
    found: dict[str, Any] = {}
    for arm, cast in (
        ("autocast", gs.autocast(model.loss)),
        ("plan", gs.autocast(model.loss, plan)),
    ):
        program = jax.make_jaxpr(jax.grad(cast))(model.params, batch)
        kinds = list(dtypes_of_products(program.jaxpr))
        found[arm] = [sum(kind == {"float16"} for kind in kinds), len(kinds)]
    wide = [o for o in plan.entries if o.name in PRODUCTS and o.dtype != plan.dtype]
    return found | {"why": [[o.line, o.reason, o.error] for o in wide]}


def dtypes_of_products(jaxpr: Any) -> Iterable[set[str]]:
    """The dtypes of the operands of each product in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            yield {str(variable.aval.dtype) for variable in eqn.invars}
        for inner in jaxprs_in_params(eqn.params):
            yield from dtypes_of_products(inner)


# ── what it costs and saves ──────────────────────────────────────────────────────────────────


def arms(model: Model, plan: Plan) -> dict[str, Loss]:
    """The losses that are compared, by name."""
    found = {"float32": model.loss, "by hand": model.by_hand}
    found |= {"autocast": gs.autocast(model.loss), "plan": gs.autocast(model.loss, plan)}
    return {name: loss for name, loss in found.items() if loss is not None}


def compile_times(losses: dict[str, Loss], params: Any, batch: Any, rounds: int) -> dict[str, Any]:
    """The CPU seconds to trace and compile the gradient in float32, and the ratios of all to them.

    Each is the median of some rounds, of the time of all threads. XLA for a CPU cannot compile
    some models by hand.
    """
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(rounds):
        for name in list(losses)[:: 1 if turn % 2 else -1]:
            jax.clear_caches()
            start = time.process_time()
            try:
                jax.jit(jax.value_and_grad(losses[name])).lower(params, batch).compile()
            except ValueError:
                continue
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(some) for name, some in seconds.items() if some}
    exact = medians["float32"]
    return {"float32_s": exact, "ratios": {name: one / exact for name, one in medians.items()}}


def on_h100(name: str, plan: Plan) -> dict[str, Any]:
    """What the gradient of the large model moves and stores on an H100; empty without packages."""
    if lowered.missing("h100"):
        return {}
    where, model = lowered.target("h100"), MODELS[name](large=True)
    planned = functools.partial(lowered.planned_everywhere, target=where)
    args, found = (planned(model.params), planned(model.batch(0))), {}
    for arm, loss in arms(model, plan).items():
        start = time.perf_counter()
        program = jax.jit(jax.value_and_grad(loss)).trace(*args)
        executable = program.lower(lowering_platforms=("cuda",)).compile()
        counts = hlo.counts(executable.as_text() or "")
        found[arm] = {
            "moved": counts.read + counts.written,
            "temp": executable.memory_analysis().temp_size_in_bytes,
            "kernels": counts.kernels,
            "seconds": time.perf_counter() - start,
        }
    return found


def examined(name: str, rounds: int = 3) -> dict[str, Any]:
    """All that the study says about a model."""
    start, model = time.perf_counter(), MODELS[name]()
    found, plan = errors(model)
    batch, losses = model.batch(0), arms(model, plan)
    found["kept"] = {arm: kept(loss, model.params, batch) for arm, loss in losses.items()}
    found["compile"] = compile_times(losses, model.params, batch, rounds)
    found["h100"] = on_h100(name, plan)
    return found | {"seconds": round(time.perf_counter() - start, 1)}


# ── training ─────────────────────────────────────────────────────────────────────────────────


class Arm(NamedTuple):
    """How a model is trained."""

    cast: Callable[[Loss], Loss]
    rule: gs.LossScale


TRAINING = {
    "float32": Arm(lambda loss: loss, gs.FixedLossScale(1.0)),
    "bfloat16": Arm(lambda loss: gs.autocast(loss, "bfloat16"), gs.FixedLossScale(1.0)),
    "autocast": Arm(gs.autocast, gs.DynamicLossScale()),
}


def trained(name: str, steps: int = STEPS) -> dict[str, Any]:
    """The losses of a model by arm, and the error of its gradients at the last parameters."""
    start, model = time.perf_counter(), MODELS[name]()
    losses: dict[str, list[float]] = {}
    for arm, (cast, rule) in TRAINING.items():
        params = jax.tree.map(jnp.copy, model.params)
        state = gs.TrainState.create(params, optax.adam(TRAINED[name]), loss_scale=rule)
        step, seen = gs.train_step(cast(model.loss)), []
        for seed in range(100, 100 + steps):
            state, loss = step(state, model.batch(seed))
            seen.append(loss)
        losses[arm] = [float(loss) for loss in jax.device_get(seen)]
    last, batch = model._replace(params=state.params), model.batch(0)
    plan = tuned(model, batch, bound(0.0))
    exact = gradients(last.loss, last.params, batch)
    after = {
        "bfloat16": gs.autocast(model.loss, "bfloat16"),
        "autocast": gs.autocast(model.loss),
        "plan of the start": gs.autocast(model.loss, plan),
    }
    errors = {arm: error(gradients(loss, last.params, batch), exact) for arm, loss in after.items()}
    return {
        "losses": losses,
        "errors after": errors,
        "seconds": round(time.perf_counter() - start, 1),
    }


# ── the time of `precision.find_plan` ─────────────────────────────────────────────────────────────


def tuning(blocks: int, width: int = TUNED["width"]) -> dict[str, Any]:
    """How long `precision.find_plan` takes for a transformer, beside one gradient in float32."""
    model = transformer(blocks=blocks, width=width)
    batch, program = model.batch(0), jax.jit(jax.grad(model.loss))
    jax.block_until_ready(program(model.params, batch))
    steps = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(program(model.params, batch))
        steps.append(time.perf_counter() - start)
    start, of_all_threads = time.perf_counter(), time.process_time()
    plan = tuned(model, batch, BOUND)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "operations": len(plan.entries),
        "gradient_s": statistics.median(steps),
        "tune_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - of_all_threads,
    }


# ── the run ──────────────────────────────────────────────────────────────────────────────────


class Results:
    """The file that has all that is measured."""

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, part: str, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measures what is missing, and writes the file."""
        if name in self.found.get(part, {}):
            return
        Console().print(f"{part}: {name}", end=" ")
        start, numbers = time.perf_counter(), measure()
        self.found.setdefault(part, {})[name] = numbers
        self.found["environment"] = environment()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part_file = self.path.with_suffix(".part")
        part_file.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(part_file, self.path)
        Console().print(f"{time.perf_counter() - start:.0f} s")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is missing in the results, then writes the tables and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS,
                        metavar="MODEL", help=f"some of: {', '.join(MODELS)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="three small models, no training")
    parser.add_argument("--output", type=file_to_write, default=RESULTS / "autocast" / "cpu.json")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page and picture")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args(argv)
    results, rounds = Results(options.output), 1 if options.quick else 3
    if not options.report:
        for name in QUICK if options.quick else options.models:
            results.add("models", name, functools.partial(examined, name, rounds))
        for name in () if options.quick else TRAINED:
            results.add("training", name, functools.partial(trained, name))
        for blocks in () if options.quick else TUNED["blocks"]:
            results.add("tuning", f"{blocks} blocks", functools.partial(tuning, blocks))
    print(page.markdown(results.found))
    if not options.quick:
        page.write(results.found, options.docs)


if __name__ == "__main__":
    main()

"""Does what a precision costs a gradient before training predict what training loses?

For twelve models in plain JAX, Flax and Equinox and three of their examples: noise and bias of each
precision, and of a plan, on six batches, at the start, in the middle and at the end of training;
and the loss after training in it. One point for each model and precision; Spearman's rank
correlation of price and penalty. Run: `python -m studies.price_predicts_training`.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import gainstage as gs
from benchmarks.harness import environment, file_to_write
from gainstage.precision.autocast import with_float8
from gainstage.precision.noise_and_bias import Reference
from gainstage.precision.samples import is_finite, largest_exponent

from . import DOCS, RESULTS
from . import price_page as page
from .autocast_models import MODELS, Model
from .example_models import EXAMPLES

PATH = RESULTS / "price_predicts_training.json"
EVERY = {**MODELS, **EXAMPLES}
BATCHES, STEPS, LAST, RATE = 6, 200, 50, 3e-3
FIRST_SCALE = 2.0**9  # low enough that no step is skipped until it fits
# Models whose steps take long on a CPU are trained for half as long, and from fewer seeds.
SLOW = ("transformer (NNX)", "ResNet, BatchNorm (Linen)", "ResNet with swish (Linen)", "ViT (NNX)")
SEEDS, SEEDS_OF_SLOW = 5, 3

Loss = Callable[..., Any]


def steps_of(name: str) -> int:
    """The number of steps of training."""
    return STEPS // 2 if name in SLOW else STEPS


class Trained(NamedTuple):
    """Trainings of a model in one precision."""

    losses: list[float]  # for each seed, the mean of the last steps
    skipped: list[int]  # steps, which would make a training shorter
    on_the_way: list[
        Any
    ]  # the parameters of the first one: at the start, in the middle, at the end


def trained(model: Model, loss: Loss, steps: int, seeds: int) -> Trained:
    """Trains from each seed."""
    tx = gs.with_loss_scale(optax.adam(RATE), gs.DynamicLossScale(FIRST_SCALE), telemetry=True)
    step, found = gs.train_step(loss), Trained([], [], [])
    for seed in range(seeds):
        state, losses = gs.TrainState.create(jax.tree.map(jnp.array, model.params), tx), []
        for number in range(steps):
            if seed == 0 and number in (0, steps // 2):
                found.on_the_way.append(jax.tree.map(jnp.array, state.params))
            batch = model.batch(BATCHES + seed * steps + number)
            state, value = step(state, batch)
            losses.append(value)
        if seed == 0:
            found.on_the_way.append(state.params)
        found.losses.append(float(np.mean([float(value) for value in losses[-LAST:]])))
        found.skipped.append(int(state.info.skipped_steps))
    return found


class Priced:
    """What precisions cost a model, with some parameters."""

    def __init__(self, model: Model, points: Sequence[Any]):
        self._points = points
        self._batches = [model.batch(number) for number in range(BATCHES)]
        exact = self._gradients(model.loss)
        self._references = [Reference(exact(params, 1.0)) for params in points]

    def prices(self, loss: Loss) -> list[tuple[float, float]]:
        """Noise and bias at each of the parameters, at the largest loss scale that fits."""
        run = self._gradients(loss)
        prices = []
        for params, reference in zip(self._points, self._references, strict=True):

            def fits(exponent: int, params: Any = params) -> bool:
                return all(is_finite(each) for each in run(params, 2.0**exponent))

            noise, bias = reference.price(run(params, 2.0 ** largest_exponent(fits)))[:2]
            prices.append((noise, bias))
        return prices

    def _gradients(self, loss: Loss) -> Callable[[Any, float], list[list[np.ndarray]]]:
        """A function `(parameters, loss scale)` that returns the gradients on each batch."""

        @jax.jit
        def gradients(params: Any, batch: Any, scale: Any) -> Any:
            return jax.grad(lambda params: loss(params, batch) * scale)(params)

        def run(params: Any, scale: float) -> list[list[np.ndarray]]:
            each = (gradients(params, batch, np.float32(scale)) for batch in self._batches)
            leaves = (jax.tree.leaves(jax.device_get(grads)) for grads in each)
            return [[np.asarray(g, np.float64) / scale for g in grads] for grads in leaves]

        return run


def measure(name: str, console: Console) -> dict[str, Any]:
    """What each precision costs a model, before and after training."""
    model, start = EVERY[name](), time.perf_counter()
    batches = [model.batch(number) for number in range(BATCHES)]
    plan = gs.precision.find_plan(
        model.loss, model.params, [(batch,) for batch in batches], dtype="float8", card=None
    )
    dtypes = [o.dtype for o in plan.entries if o.name == "dot_general"]
    found: dict[str, Any] = {
        "steps": steps_of(name),
        "predicted": [plan.predicted.noise, plan.predicted.bias],
        "measured": [plan.measured.noise, plan.measured.bias],
        "products": {dtype: dtypes.count(dtype) for dtype in sorted(set(dtypes))},
    }
    console.print(f"{name}: tuned in {time.perf_counter() - start:.0f} s, {found['products']}")
    seeds = SEEDS_OF_SLOW if name in SLOW else SEEDS
    exact = trained(model, model.loss, steps_of(name), seeds)
    priced = Priced(model, exact.on_the_way)
    found["float32"] = {"losses": exact.losses}
    arms: dict[str, Loss] = {
        "bfloat16": gs.autocast(model.loss, "bfloat16"),
        "float16": gs.autocast(model.loss),
        "float8": with_float8(model.loss),
        "plan": gs.autocast(model.loss, plan),
    }
    for arm, loss in arms.items():
        prices = priced.prices(loss)
        runs = trained(model, loss, steps_of(name), seeds)
        found[arm] = {"prices": prices, "losses": runs.losses, "skipped": runs.skipped}
        noise, bias = prices[0]
        console.print(f"    {arm:9} noise {noise:9.4%} bias {bias:8.3%} losses {runs.losses}")
    console.print(f"    {time.perf_counter() - start:.0f} s")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(EVERY))
    parser.add_argument("--json", type=file_to_write, default=PATH, metavar="PATH")
    options = parser.parse_args(argv)
    console = Console()
    models = {}
    for name in options.models:
        models[name] = measure(name, console)
        content = {"environment": environment(), "models": models}
        Path(options.json).write_text(json.dumps(content, indent=1))
    found = page.points(models)
    table = Table("model", "precision", "part of the budget", "over float32")
    for point in found:
        row = (f"{point.part:.3f}", f"{point.penalty:+.2%}")
        table.add_row(point.model, point.precision, *row)
    console.print(table)
    correlation = page.correlation(found)
    console.print(f"Spearman's rank correlation over {len(found)} points: {correlation:.2f}")
    if options.json == PATH:
        page.write(content, DOCS)


if __name__ == "__main__":
    main()

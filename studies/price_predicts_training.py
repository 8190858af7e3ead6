"""Does what `precision.advise` measures before training predict what training loses?

For models in plain JAX, Flax and Equinox: the noise and the bias of each precision on six batches,
and the loss after training in it. One point for each model and precision; Spearman's rank
correlation between the price and the penalty. Run: `python -m studies.price_predicts_training`.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import gainstage as gs
from benchmarks.harness import environment, file_to_write
from gainstage.precision import advise
from gainstage.precision.autocast import with_float8

from . import DOCS, RESULTS
from . import price_page as page
from .autocast_models import MODELS, Model

PATH = RESULTS / "price_predicts_training.json"
BATCHES, STEPS, LAST, RATE = 6, 200, 50, 3e-3
NAMES = (
    "features with an offset (NNX)", "mixture of experts", "GRPO step", "contrastive (Linen)",
    "LSTM (Linen)", "transformer in a scan (Equinox)", "PINN, second derivatives (Equinox)",
)  # fmt: skip
SEEDS = {name: 3 for name in NAMES[:4]}  # of training; the others have one


def arms(model: Model) -> dict[str, Any]:
    """The loss in each precision."""
    return {
        "float32": model.loss,
        "bfloat16": gs.autocast(model.loss, "bfloat16"),
        "float16": gs.autocast(model.loss),
        "float8": with_float8(model.loss),
    }


def trained(model: Model, loss: Any, seed: int) -> float:
    """The mean loss of the last steps of training."""
    tx = gs.loss_scaled(optax.adam(RATE))
    params = jax.tree.map(jnp.array, model.params)
    state, step = tx.init(params), gs.train_step(loss, tx)
    losses = []
    for number in range(STEPS):
        params, state, value = step(params, state, model.batch(seed * STEPS + number + BATCHES))
        losses.append(value)
    return float(np.mean([float(value) for value in losses[-LAST:]]))


def measure(name: str, console: Console) -> dict[str, Any]:
    """What each precision costs a model, before and after training."""
    model, start = MODELS[name](), time.perf_counter()
    advice = advise(model.loss, model.params, [model.batch(i) for i in range(BATCHES)])
    prices = {cost.name: cost.price for cost in advice.costs}
    console.print(f"{name}: advised in {time.perf_counter() - start:.0f} s")
    found: dict[str, Any] = {"is_clear": advice.is_clear, "recommended": advice.recommended.name}
    for arm, loss in arms(model).items():
        if arm not in prices:
            continue
        losses = [trained(model, loss, seed) for seed in range(SEEDS.get(name, 1))]
        noise, bias = prices[arm].noise, prices[arm].bias
        found[arm] = {"noise": noise, "bias": bias, "losses": losses}
        console.print(f"    {arm:9} noise {noise:9.4%} bias {bias:8.3%} losses {losses}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(NAMES))
    parser.add_argument("--json", type=file_to_write, default=PATH, metavar="PATH")
    options = parser.parse_args(argv)
    console = Console()
    models = {}
    for name in options.models:
        models[name] = measure(name, console)
        content = {"environment": environment(), "steps": STEPS, "models": models}
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

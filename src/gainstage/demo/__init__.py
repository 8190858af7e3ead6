"""`gainstage demo`: float16 with and without loss scaling, on a task where it matters.

The command imports it; no other room needs it.
"""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gainstage.demo.photographs import Batch, Task, draw_batches, initial_weights, loss
from gainstage.demo.training import MODES, UNSCALED, Comparison, Trainer, Training
from gainstage.precision.advice import Advice, advise


def main(output: Path, steps: int | None, seed: int, as_json: bool) -> None:
    """Trains in the four modes, then prints the numbers and draws the picture.

    Args:
        output: the picture's file.
        steps: steps of training, >= 1; None for as many as the network needs.
        seed: of the weights and the batches.
        as_json: whether to print one JSON object in the place of the table.
    """
    from gainstage.demo import console, picture  # which need more than the task does

    task = Task() if steps is None else Task(steps)
    found = compare(task, seed)
    picture.save(found, output)
    if as_json:
        about = {"steps": task.steps, "seed": seed, "picture": str(output)}
        print(json.dumps({**about, **summary(found)}))
    else:
        console.show(found, str(output), advised(task, seed))


def compare(task: Task, seed: int) -> Comparison:
    """Trains in each mode, and in float16 without scaling with each number of ranks."""
    from gainstage.demo import console

    plan = [(mode, task.ranks) for mode in MODES]
    plan += [(UNSCALED, ranks) for ranks in task.other_ranks]
    trainers = {mode: Trainer(task, mode) for mode in MODES}
    runs: list[Training] = []
    with console.progress() as progress:
        bars = [
            progress.add_task(f"{mode.name}, {n} rank{'s' * (n > 1)}", total=task.steps)
            for mode, n in plan
        ]
        for (mode, ranks), bar in zip(plan, bars, strict=True):
            advance = functools.partial(progress.advance, bar)
            runs.append(trainers[mode].run(seed, ranks, advance))
    unscaled = [run for run in runs if run.mode == UNSCALED]
    by_ranks = sorted(unscaled, key=lambda run: run.ranks)
    return Comparison(task, dict(zip(MODES, runs, strict=False)), by_ranks)


def advised(task: Task, seed: int) -> Advice:
    """What `advise` says of a task before its training, on two batches."""

    def loss_fn(weights: dict[str, jax.Array], batch: Batch) -> jax.Array:
        return loss(list(weights.values()), batch) / task.ranks

    names = (f"weights[{number:02}]" for number in itertools.count())  # JAX sorts them
    start = map(jnp.asarray, initial_weights(task, seed))
    weights = dict(zip(names, start, strict=False))
    batches = [(batch,) for batch in itertools.islice(draw_batches(task, seed), 2)]
    return advise(loss_fn, weights, batches)


def summary(found: Comparison) -> dict[str, Any]:
    """The numbers of the table and how they came about."""
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "ranks": found.task.ranks,
        "modes": {mode.name: run.measures for mode, run in found.by_mode.items()},
        "float16_by_ranks": {run.ranks: run.measures for run in found.by_ranks},
    }

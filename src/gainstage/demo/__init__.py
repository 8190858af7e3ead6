"""`gainstage demo`: float16 with and without loss scaling, on a task where it matters.

The command imports it; no other room needs it.
"""

import itertools
import json
import math
import sys
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from gainstage.demo import picture
from gainstage.demo.training import (
    BFLOAT16,
    FLOAT32,
    SCALED,
    UNSCALED,
    Comparison,
    Task,
    compare,
    initial_weights,
    mean_squared,
    patches,
)
from gainstage.precision.advice import advise
from gainstage.runs.report import WIDTH

HARM = 1.02  # times the error of float32, from which on float16 is said to suffer
ROWS = {
    "test_error": ("Squared error, test", "{:.5f}"),
    "test_psnr": ("PSNR, test", "{:.2f} dB"),
    "gradient_error": ("Gradient's relative error", "{:.3%}"),
    "flushed_share": ("Gradient elements flushed to 0", "{:.3%}"),
    "skipped_steps": ("Steps skipped", "{}"),
    "final_scale": ("Loss scale at the end", "2^{:.0f}"),
    "seconds": ("Seconds", "{:.1f}"),
}


def main(output: Path, steps: int | None, seed: int, as_json: bool) -> None:
    """Trains in the four modes, then prints the numbers and draws the picture.

    Args:
        output: the picture's file.
        steps: steps of training, >= 1; None for as many as the network needs.
        seed: of the weights and the batches.
        as_json: whether to print one JSON object in the place of the table.
    """
    task = Task() if steps is None else Task(steps)
    comparison = compare(task, seed)
    picture.save_picture(comparison, output)
    if as_json:
        about = {"steps": task.steps, "seed": seed, "picture": str(output)}
        print(json.dumps({**about, **json_object(comparison)}))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(table(comparison))
    for paragraph in [*conclusions(comparison), advised(task, seed)]:
        console.print(f"\n{paragraph}", width=WIDTH)
    console.print("\nFor your model: gainstage advise MODULE:FUNCTION")
    console.print(f"Picture: {output}", soft_wrap=True)


def json_object(comparison: Comparison) -> dict[str, object]:
    """The numbers of the table and how they came about."""
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "ranks": comparison.task.ranks,
        "modes": {mode: run.measures for mode, run in comparison.by_mode.items()},
        "float16_by_ranks": {ranks: run.measures for ranks, run in comparison.by_ranks.items()},
    }


def table(comparison: Comparison) -> Table:
    """One column a mode, one row a measure."""
    result = Table(title="Photographs without their noise: the same network, data and seed")
    result.add_column("", no_wrap=True)
    for mode in comparison.by_mode:
        result.add_column(mode, justify="right")
    for key, (title, form) in ROWS.items():
        values = [run.measures[key] for run in comparison.by_mode.values()]
        values = [math.log2(scale) for scale in values] if key == "final_scale" else values
        result.add_row(title, *map(form.format, values))
    return result


def conclusions(comparison: Comparison) -> list[str]:
    """What this run showed, and what it did not."""
    task, numbers = comparison.task, {m: run.measures for m, run in comparison.by_mode.items()}
    times = {mode: comparison.times(run) for mode, run in comparison.by_mode.items()}
    off = {mode: f"{measures['gradient_error']:.2%}" for mode, measures in numbers.items()}
    suffers = (
        "What suffers: the pictures. float16 ends with"
        if times[UNSCALED] >= HARM
        else "In this run float16 did about as well:"
    )
    factor = 2 / (task.values * task.ranks)  # of a pixel's error, as the loss is differentiated
    ratios = {n * task.values: comparison.times(run) for n, run in comparison.by_ranks.items()}
    rows = ", ".join(f"{ratio:.2f} ({size:,} values)" for size, ratio in ratios.items())
    harmless = list(itertools.takewhile(lambda size: ratios[size] < HARM, ratios))
    return [
        f"{suffers} {times[UNSCALED]:.2f} times the error of float32 on test images. With loss "
        f"scaling it is {times[SCALED]:.2f} times.",
        f"Why: the loss passes a pixel's error back times {factor:.1e}. float16 rounds what is "
        f"below {2**-25:.1e} to 0: here errors below {2**-25 / factor:.2g}. So "
        f"{numbers[UNSCALED]['flushed_share']:.1%} of the gradient's elements are 0, and the "
        f"gradient is {off[UNSCALED]} off. Scaled it is {off[SCALED]} off, and in bfloat16 "
        f"{off[BFLOAT16]} (relative error by norm, after a quarter of the steps).",
        f"What does not: bfloat16, which ends at {numbers[BFLOAT16]['test_psnr']:.2f} dB, "
        f"float32 at {numbers[FLOAT32]['test_psnr']:.2f} dB.",
        "Where it begins: the more values the loss is a mean over, the smaller its gradient. The "
        f"error of unscaled float16, as a multiple of float32's: {rows}."
        + "".join(f" Up to {size:,} values it needs no scaling." for size in harmless[-1:]),
        f"This process is one of {task.ranks} data-parallel ranks: it trains on its own "
        f"{task.patches} patches, and divides its loss by the size of the whole batch. The other "
        "ranks are not run. A sum in place of the mean would help float16 as well.",
    ]


def advised(task: Task, seed: int) -> str:
    """What `advise` says of a task before its training, on two batches."""
    advice = advise(
        lambda weights, batch: mean_squared(weights, batch) / task.ranks,
        initial_weights(task, seed),
        [(batch,) for batch in itertools.islice(patches(task, seed), 2)],
    )
    return f"Before the training gs.advise says: {advice.scaling} Use {advice.reason}"

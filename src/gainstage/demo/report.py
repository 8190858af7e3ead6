"""What the demo says: progress bars, a table, and sentences made from this run's numbers."""

import math
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gainstage.demo.task import BATCH, RECONSTRUCTION_WEIGHT
from gainstage.demo.training import FLOAT32, SCALED, UNSCALED, Run

WIDTH = 78  # of the text, for a terminal of 80 columns
PIXEL_ERROR = 2 * RECONSTRUCTION_WEIGHT / (BATCH * 64)


def progress() -> Progress:
    """Bars on standard error, which leave standard output alone."""
    return Progress(
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def measures(run: Run) -> dict[str, Any]:
    """The numbers of one mode, by name."""
    return {
        "train_reconstruction_error": float(run.train.reconstruction_error),
        "test_reconstruction_error": float(run.test.reconstruction_error),
        "train_accuracy": float(run.train.accuracy),
        "test_accuracy": float(run.test.accuracy),
        "flushed_share": run.probe.flushed,
        "subnormal_share": run.probe.subnormal,
        "skipped_steps": int(run.skipped.sum()),
        "final_scale": float(run.scales[-1]),
        "seconds": run.seconds,
    }


def table(runs: list[Run]) -> Table:
    """One column a mode, one row a measure."""
    result = Table(title="The same network, data and seed, trained three ways")
    result.add_column("")
    for run in runs:
        result.add_column(run.mode.name, justify="right")
    rows = {
        "Reconstruction error, train": ("train_reconstruction_error", "{:.5f}"),
        "Reconstruction error, test": ("test_reconstruction_error", "{:.5f}"),
        "Digits told apart, train": ("train_accuracy", "{:.1%}"),
        "Digits told apart, test": ("test_accuracy", "{:.1%}"),
        "Gradient elements flushed to 0": ("flushed_share", "{:.4%}"),
        "Gradient elements made subnormal": ("subnormal_share", "{:.4%}"),
        "Steps skipped": ("skipped_steps", "{}"),
        "Loss scale at the end": ("final_scale", "2^{:.0f}"),
        "Seconds": ("seconds", "{:.1f}"),
    }
    for title, (key, form) in rows.items():
        numbers = [measures(run)[key] for run in runs]
        if key == "final_scale":
            numbers = [math.log2(scale) for scale in numbers]
        result.add_row(title, *(form.format(number) for number in numbers))
    return result


def conclusions(runs: list[Run]) -> list[str]:
    """What this run showed, and what it did not."""
    numbers = {run.mode: measures(run) for run in runs}
    exact, plain, scaled = (numbers[mode] for mode in (FLOAT32, UNSCALED, SCALED))
    key = "test_reconstruction_error"
    hurt, cured = plain[key] / exact[key], scaled[key] / exact[key]
    accuracies = [n["test_accuracy"] for n in numbers.values()]
    suffers = (
        f"What suffers: the drawing. float16 ends with {hurt:.2f} times the test error of float32"
        if hurt >= 1.25
        else f"In this run float16 drew about as well as float32 ({hurt:.2f} times its test error)"
    )
    return [
        f"{suffers}; with loss scaling it is {cured:.2f} times.",
        f"Why: a pixel's error reaches the network as {PIXEL_ERROR:.1e} times the difference, and "
        f"the smallest number of float16 is {2**-24:.1e}. Of the gradient elements that float32 "
        f"keeps, float16 made {plain['flushed_share']:.1%} zero and "
        f"{plain['subnormal_share']:.1%} subnormal; scaled, {scaled['flushed_share']:.4%} and "
        f"{scaled['subnormal_share']:.1%} (at a quarter of the way).",
        f"What does not: telling the digits apart, {min(accuracies):.1%} to "
        f"{max(accuracies):.1%} in the three modes; those gradients are large enough.",
        f"The weight of the drawing in the loss, {RECONSTRUCTION_WEIGHT:g}, is the one known from "
        f"capsule networks. A larger weight, or a sum over the pixels in the place of the mean, "
        f"would help float16 as well.",
    ]


def show(runs: list[Run], picture: str) -> None:
    """Prints the table and what follows from it."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(table(runs))
    for sentence in conclusions(runs):
        console.print(f"\n{sentence}", width=WIDTH)
    console.print(f"\nPicture: {picture}", soft_wrap=True)

"""What the demo says: progress bars, a table, and sentences made from this run's numbers."""

import itertools
import math
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gainstage.demo.training import BFLOAT16, FLOAT32, SCALED, UNSCALED, Comparison
from gainstage.precision.advice import Advice
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


def progress() -> Progress:
    """Bars on standard error, which leave standard output alone."""
    return Progress(
        TextColumn("{task.description:25}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def table(found: Comparison) -> Table:
    """One column a mode, one row a measure."""
    result = Table(title="Photographs without their noise: the same network, data and seed")
    result.add_column("", no_wrap=True)
    for mode in found.by_mode:
        result.add_column(mode.name, justify="right")
    for key, (title, form) in ROWS.items():
        numbers = [run.measures[key] for run in found.by_mode.values()]
        if key == "final_scale":
            numbers = [math.log2(scale) for scale in numbers]
        result.add_row(title, *(form.format(number) for number in numbers))
    return result


def conclusions(found: Comparison) -> list[str]:
    """What this run showed, and what it did not."""
    task, numbers = found.task, {mode: run.measures for mode, run in found.by_mode.items()}
    times = {mode: found.times(run) for mode, run in found.by_mode.items()}
    off = {mode: f"{measures['gradient_error']:.2%}" for mode, measures in numbers.items()}
    suffers = (
        f"What suffers: the pictures. float16 ends with {times[UNSCALED]:.2f} times the error"
        if times[UNSCALED] >= HARM
        else f"In this run float16 did about as well: {times[UNSCALED]:.2f} times the error"
    )
    begins = {run.ranks * task.values: found.times(run) for run in found.by_ranks}
    rows = ", ".join(f"{ratio:.2f} ({size:,} values)" for size, ratio in begins.items())
    small = itertools.takewhile(lambda size: begins[size] < HARM, begins)
    harmless = [f" Up to {size:,} values it needs no scaling." for size in small]
    return [
        f"{suffers} of float32 on test images. With loss scaling it is {times[SCALED]:.2f} times.",
        f"Why: the loss passes a pixel's error back times {found.factor:.1e}. float16 rounds what "
        f"is below {2**-25:.1e} to 0: here errors below {2**-25 / found.factor:.2g}. So "
        f"{numbers[UNSCALED]['flushed_share']:.1%} of the gradient's elements are 0, and the "
        f"gradient is {off[UNSCALED]} off. Scaled it is {off[SCALED]} off, and in bfloat16 "
        f"{off[BFLOAT16]} (relative error by norm, after a quarter of the steps).",
        f"What does not: bfloat16, which ends at {numbers[BFLOAT16]['test_psnr']:.2f} dB, "
        f"float32 at {numbers[FLOAT32]['test_psnr']:.2f} dB.",
        f"Where it begins: the more values the loss is a mean over, the smaller its gradient. The "
        f"error of unscaled float16, as a multiple of float32's: {rows}.{''.join(harmless[-1:])}",
        f"This process is one of {task.ranks} data-parallel ranks: it trains on its own "
        f"{task.patches} patches, and divides its loss by the size of the whole batch. The other "
        "ranks are not run. A sum in place of the mean would help float16 as well.",
    ]


def show(found: Comparison, picture: str, advice: Advice) -> None:
    """Prints the table and what follows from it, and at the end what `advise` says."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(table(found))
    for sentence in conclusions(found):
        console.print(f"\n{sentence}", width=WIDTH)
    said = f"Before the training gs.advise says: {advice.scaling} Use {advice.reason}"
    console.print(f"\n{said}", width=WIDTH)
    console.print("\nFor your model: gainstage advise MODULE:FUNCTION")
    console.print(f"Picture: {picture}", soft_wrap=True)

"""`gainstage report RUN.jsonl`: a table and a picture of a recorded run."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gainstage.diagnostics.runs import Run, measures, read_run
from gainstage.diagnostics.writers import as_power

WIDTH = 78  # of the text, for a terminal of 80 columns
BLUE, RED = "#00798c", "#d1495b"


def main(path: Path, output: Path) -> int:
    """Reads a run, prints its table and draws its picture.

    Args:
        path: the file that `JsonLines` has written.
        output: the picture's file.

    Returns:
        The exit status: 0, or 1 if the file cannot be read, or the picture not be written.
    """
    try:
        run = read_run(path)
        draw(run, path.name).savefig(output)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    console.print(table(run, path.name))
    console.print(f"\nPicture: {output}", soft_wrap=True)
    return 0


def table(run: Run, title: str) -> Table:
    """One row a measure; what was not recorded has none."""
    found = measures(run)
    result = Table(title=Text(title), show_header=False)
    result.add_column("")
    result.add_column("", justify="right")
    rows = {
        "Steps recorded": "{steps} ({first} to {last})",
        "Skipped, of those recorded": "{skipped} ({skipped_share:.1%})",
        "Longest run of skipped steps": "{longest}",
        "Loss scale, first and last": "{scale_first}, {scale_last}",
        "Loss scale, lowest and highest": "{scale_lowest}, {scale_highest}",
        "Steps at the lowest": "{at_lowest}",
        "Times raised, lowered": "{raised}, {lowered}",
        "Loss, first and last tenth (median)": "{loss_first:.4g}, {loss_last:.4g}",
        "Norm of all gradients (median)": "{grad_norm:.4g}",
    }
    shown: dict[str, Any] = {
        k: as_power(v) if k.startswith("scale") else v for k, v in found.items()
    }
    shown["skipped_share"] = found.get("skipped", 0) / found["steps"]
    for name, form in rows.items():
        try:
            result.add_row(name, form.format(**shown))
        except KeyError:
            continue
    return result


def draw(run: Run, title: str) -> Figure:
    """One panel for each of loss, scale and norm that was recorded, one above the other."""
    panels = {"loss": "Loss", "loss_scale": "Loss scale", "grad_norm": "Norm of all gradients"}
    there = [name for name in panels if np.isfinite(run.get(name)).any()]
    figure = Figure(figsize=(10, 1 + 2.6 * max(len(there), 1)), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=15, fontweight="bold", parse_math=False)
    grid: Any = figure.subplots(max(len(there), 1), 1, sharex=True, squeeze=False)
    for axes, name in zip(grid[:, 0], there, strict=False):
        _panel(axes, run, name, panels[name])
    grid[-1, 0].set_xlabel("step")
    return figure


def _panel(axes: Axes, run: Run, name: str, title: str) -> None:
    numbers = np.where(np.isfinite(run.get(name)), run.get(name), np.nan)
    stairs: Any = {"drawstyle": "steps-post"} if name == "loss_scale" else {}
    axes.plot(run.steps, numbers, color=BLUE, linewidth=1.8, **stairs)
    if (numbers[np.isfinite(numbers)] > 0).all():
        axes.set_yscale("log", base=2 if name == "loss_scale" else 10)
    if name == "loss_scale" and run.skipped.any():
        label = f"skipped ({run.skipped.sum()} of {len(run.steps)} steps)"
        style = {"markersize": 8, "markeredgewidth": 2, "color": RED, "label": label}
        axes.plot(run.steps[run.skipped], numbers[run.skipped], "x", **style)
        axes.legend(loc="best", framealpha=0.9)
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

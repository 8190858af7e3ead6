"""The plot of a recorded run: its loss, its scale with the skipped steps, and its norm."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gainstage.runs.run import Run

BLUE, RED = "#00798c", "#d1495b"


def draw(run: Run, title: str) -> Figure:
    """One panel each for loss, scale and norm, if recorded, one above the other."""
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
    gap = run.skipped if name == "grad_norm" else np.False_
    numbers = np.where(np.isfinite(run.get(name)) & ~gap, run.get(name), np.nan)
    stairs: Any = {"drawstyle": "steps-post"} if name == "loss_scale" else {}
    if np.any(gap):
        stairs = {"marker": ".", "markersize": 2}  # also shows a step between two gaps
    axes.plot(run.steps, numbers, color=BLUE, linewidth=1.8, **stairs)
    if (numbers[np.isfinite(numbers)] > 0).all():
        axes.set_yscale("log", base=2 if name == "loss_scale" else 10)
    if name == "loss_scale" and run.skipped.any():
        label = f"skipped ({run.skipped.sum()} of {len(run.steps)} steps)"
        style: Any = {"markersize": 8, "markeredgewidth": 2, "color": RED, "label": label}
        axes.plot(run.steps[run.skipped], numbers[run.skipped], "x", **style)
        axes.legend(loc="best", framealpha=0.9)
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

"""The demo's picture: how the three runs went, why, and what the networks draw."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from gainstage.demo.task import Digits
from gainstage.demo.training import FLOAT32, SCALED, UNSCALED, Run

COLORS = {FLOAT32: "#9aa5b8", UNSCALED: "#d1495b", SCALED: "#00798c"}
SHOWN = 8  # digits


def draw(runs: list[Run], data: Digits) -> Figure:
    """Four panels: losses, scale, exponents, digits."""
    by_mode = {run.mode: run for run in runs}
    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    figure.suptitle(
        "One network, trained in float32, in float16, and in float16 with loss scaling",
        fontsize=18,
        fontweight="bold",
    )
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.05, 1])
    top, bottom = halves
    losses, scale = top.subplots(1, 2)
    left, right = bottom.subfigures(1, 2)
    draw_losses(losses, runs)
    draw_scale(scale, by_mode[SCALED])
    draw_exponents(left.subplots(), by_mode[SCALED])
    draw_digits(right, runs, data)
    return figure


def draw_losses(axes: Axes, runs: list[Run]) -> None:
    """The reconstruction error on the batches, smoothed a little."""
    for run, (style, width) in zip(runs, [("-", 5), ("-", 2.5), ("--", 2.5)], strict=True):
        window = min(10, len(run.losses))
        smooth = np.convolve(run.losses, np.ones(window) / window, mode="valid")
        label = f"{run.mode.name} (test {float(run.test.reconstruction_error):.4f})"
        steps = np.arange(len(smooth)) + window
        axes.plot(steps, smooth, style, color=COLORS[run.mode], label=label, linewidth=width)
    axes.set(title="Reconstruction error while training", xlabel="step", yscale="log")
    tidy(axes)


def draw_scale(axes: Axes, run: Run) -> None:
    """The scale of each step, with the skipped ones marked."""
    steps = np.arange(1, len(run.scales) + 1)
    axes.step(steps, run.scales, where="mid", color=COLORS[SCALED], linewidth=2.5, label="scale")
    skipped = run.skipped
    label = f"skipped: a gradient overflowed ({skipped.sum()} of {len(steps)} steps)"
    axes.plot(
        steps[skipped], run.scales[skipped], "x", color=COLORS[UNSCALED],
        markersize=10, markeredgewidth=2.5, label=label,
    )  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.set(title="Loss scale: up while all is finite, down after an overflow", xlabel="step")
    tidy(axes, loc="lower right")


def draw_exponents(axes: Axes, run: Run) -> None:
    """The sizes of the gradients' elements against what float16 can hold."""
    exponents, shift = run.probe.exponents, np.log2(run.probe.scale)
    low, high = np.floor(exponents.min()), 20.0
    bins = np.arange(max(low, -60), high + 1).tolist()
    axes.axvspan(bins[0], -25, color="#d1495b", alpha=0.22, lw=0)
    axes.axvspan(-25, -14, color="#edae49", alpha=0.22, lw=0)
    axes.axvspan(16, high, color="#d1495b", alpha=0.22, lw=0)
    for values, color, label in [
        (exponents, COLORS[UNSCALED], "as they are"),
        (exponents + shift, COLORS[SCALED], f"times the scale, $2^{{{shift:.0f}}}$"),
    ]:
        axes.hist(values, bins=bins, histtype="stepfilled", color=color, alpha=0.55, label=label)
    top = axes.get_ylim()[1] * 1.32
    axes.set_ylim(0, top)
    zones = {"becomes 0": (bins[0] - 25) / 2, "loses bits": -19.5, "float16 holds it": 1, "inf": 18}
    for text, x in zones.items():
        axes.text(x, top * 0.97, text, ha="center", va="top", fontsize=12)
    axes.set(
        title="Gradient elements by size, a quarter of the way", xlabel="exponent, base 2",
        xlim=(bins[0], high), yticks=[], ylabel="elements",
    )  # fmt: skip
    tidy(axes, loc="center left")


def draw_digits(figure: SubFigure, runs: list[Run], data: Digits) -> None:
    """Test images, and what each network draws of them."""
    first = [int(np.flatnonzero(np.asarray(data.labels) == digit)[0]) for digit in range(SHOWN)]
    rows = [("test image", "black", data.images)]
    rows += [(run.mode.name, COLORS[run.mode], run.test.drawn) for run in runs]
    figure.suptitle("What the networks draw of digits they have not seen", fontsize=14)
    grid = figure.subplots(len(rows), SHOWN)
    for axes_row, (name, color, images) in zip(grid, rows, strict=True):
        for axes, index in zip(axes_row, first, strict=True):
            image = np.asarray(images[index]).reshape(8, 8)
            axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        axes_row[0].set_ylabel(
            name.replace(", ", ",\n"), color=color, rotation=0, ha="right", va="center",
            fontsize=12, fontweight="bold",
        )  # fmt: skip


def tidy(axes: Axes, loc: Any = "best") -> None:
    """A light grid, no frame, a legend."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc=loc, frameon=True, framealpha=0.9, fontsize=11)
    axes.title.set_fontsize(14)


def save(runs: list[Run], data: Digits, path: Path) -> None:
    """Writes the picture."""
    draw(runs, data).savefig(path)

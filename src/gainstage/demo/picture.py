"""The demo's picture: what the networks make of the images, how the runs went, and why."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from gainstage.demo.training import (
    BFLOAT16,
    FLOAT32,
    PERIOD,
    SCALED,
    UNSCALED,
    Comparison,
    Training,
    held_out,
    quality,
)
from gainstage.runs.render import LIGHT

CROP, CROPS = 56, [(228, 4), (100, 56)]  # rows and held-out columns to look at, in each picture
RED, YELLOW = LIGHT["overflow"], LIGHT["loss"]
COLORS = {FLOAT32: LIGHT["faint"], BFLOAT16: LIGHT["nan"], UNSCALED: RED, SCALED: LIGHT["curve"]}
LINES = {FLOAT32: ("-", 7), BFLOAT16: (":", 3), UNSCALED: ("-", 3), SCALED: ("--", 3)}
MARKERS = {FLOAT32: ("s", 17), BFLOAT16: ("D", 10), SCALED: ("*", 10)}
BOLD: dict[str, Any] = {"fontsize": 20, "fontweight": "bold"}
OVER: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
STYLE: dict[Any, Any] = {
    "font.size": 15,
    "axes.titlesize": 18,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save_picture(comparison: Comparison, path: Path) -> None:
    """Draws the images of each mode, and four panels: errors, batches, gradient, scale."""
    plain, scaled = (comparison.by_mode[mode] for mode in (UNSCALED, SCALED))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(15, 14.5), dpi=100, layout="constrained")
        figure.suptitle(
            f"float16 ends with {comparison.times(plain):.2f} × the error of float32, "
            f"with loss scaling {comparison.times(scaled):.2f} ×",
            **BOLD | {"fontsize": 23},
        )
        halves: Any = figure.subfigures(2, 1, height_ratios=[1, 1.5])
        draw_images(halves[0].subplots(1, 6), comparison)
        (errors, batches), (gradient, scale) = halves[1].subplots(2, 2)
        draw_errors(errors, comparison)
        draw_batches(batches, comparison)
        draw_gradient(gradient, scaled, comparison)
        draw_scale(scale, scaled)
        figure.savefig(path)


def draw_images(panels: Any, comparison: Comparison) -> None:
    """Details of each mode's images, between those that no network has made, with their scores."""
    noisy, clean = held_out()
    made = {mode: run.images for mode, run in comparison.by_mode.items()}
    shown = {"noisy": noisy, **made, "original": clean}
    for axes, (name, images) in zip(panels, shown.items(), strict=True):
        above, below = (
            image[row : row + CROP, column : column + CROP]
            for image, (row, column) in zip(np.clip(images, 0, 1), CROPS, strict=True)
        )
        between, color = np.ones((2, CROP, 3), np.float32), COLORS.get(name, "black")
        axes.imshow(np.concatenate([above, between, below]), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(name, color=color, **BOLD)
        if images is not clean:
            axes.set_xlabel(f"{quality(images)['test_psnr']:.2f} dB", color=color, **BOLD)
        axes.spines[:].set(color=color, linewidth=4, visible=True)


def draw_errors(axes: Axes, comparison: Comparison) -> None:
    """The error on the batches, smoothed a little."""
    for mode, run in comparison.by_mode.items():
        window = min(10, len(run.errors))
        smooth = np.convolve(run.errors, np.ones(window) / window, mode="valid")
        style, width = LINES[mode]
        steps = np.arange(len(smooth)) + window
        axes.plot(steps, smooth, style, color=COLORS[mode], label=mode, linewidth=width)
    axes.set(title="Squared error while training", xlabel="step", yscale="log")
    axes.legend()


def draw_batches(axes: Axes, comparison: Comparison) -> None:
    """The error that float16 ends with, by the number of values that its loss is a mean over."""
    task = comparison.task
    ratios = {n * task.values: comparison.times(run) for n, run in comparison.by_ranks.items()}
    sizes, color = list(ratios), COLORS[UNSCALED]
    axes.plot(
        sizes, list(ratios.values()), "o-", color=color, linewidth=3, markersize=10, label=UNSCALED
    )
    for at in ratios.items():
        axes.annotate(f"{at[1]:.2f} ×", at, (0, 12), color=color, **OVER)
    for mode, (marker, size) in MARKERS.items():
        at = task.ranks * task.values, comparison.times(comparison.by_mode[mode])
        axes.plot(*at, marker, color=COLORS[mode], markersize=size, label=mode)
    title = "Test error by batch, as a multiple of float32's"
    axes.set(title=title, xscale="log", xlabel="values that the loss is a mean over", xticks=sizes)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
    axes.margins(x=0.1, y=0.2)
    axes.legend(loc="upper left")


def draw_gradient(axes: Axes, scaled: Training, comparison: Comparison) -> None:
    """The sizes of the gradient's elements against what float16 can hold."""
    shift, high = np.log2(scaled.scales[comparison.task.probed]), 20.0
    low = max(np.floor(scaled.exponents.min()), -40.0)
    for start, end, color in [(low, -25, RED), (-25, -14, YELLOW), (16, high, RED)]:
        axes.axvspan(start, end, color=color, alpha=0.22, lw=0)
    labels = {0.0: ("gradient", UNSCALED), shift: (f"times $2^{{{shift:.0f}}}$", SCALED)}
    for by, (label, mode) in labels.items():
        values, color = scaled.exponents + by, COLORS[mode]
        counts, *_ = axes.hist(values, np.arange(low, high + 1).tolist(), color=color)
        at = np.median(values), np.max(counts)
        axes.annotate(label, at, (0, 4), color=color, fontweight="bold", **OVER)
    top = axes.get_ylim()[1] * 1.32
    regions = {(low - 25) / 2: "0", -19.5: "loses bits", 1: "full precision", 18: "inf"}
    for x, text in regions.items():
        axes.text(x, top * 0.97, text, ha="center", va="top")
    flushed = [comparison.by_mode[mode].measures["flushed_share"] for mode in (UNSCALED, SCALED)]
    axes.set(
        title="{:.0%} of the weights' gradient is 0, scaled {:.0%}".format(*flushed),
        xlabel="exponent, base 2, of the gradient on its way through the network",
        ylabel="elements", xlim=(low, high), ylim=(0, top), yticks=[],
    )  # fmt: skip


def draw_scale(axes: Axes, run: Training) -> None:
    """The scale of each step, with the skipped ones marked."""
    steps, skipped = np.arange(1, len(run.scales) + 1), run.skipped
    label = f"overflow, skipped ({skipped.sum()} of {len(steps)} steps)"
    axes.step(steps, run.scales, where="mid", color=COLORS[SCALED], linewidth=3)
    axes.plot(steps[skipped], run.scales[skipped], "x", color=RED, ms=12, mew=3, label=label)
    axes.set_yscale("log", base=2)
    title = f"Loss scale, here doubled after {PERIOD} good steps"
    axes.set(title=title, xlabel="step (by default it is doubled after 2,000)")
    axes.legend(loc="lower right")

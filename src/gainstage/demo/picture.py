"""The demo's picture: what the networks make of the images, how the runs went, and why."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter

from gainstage.demo.photographs import Evaluation, crops, evaluation, held_out_images
from gainstage.demo.training import (
    BFLOAT16,
    FLOAT32,
    PERIOD,
    SCALED,
    UNSCALED,
    Comparison,
    Probe,
    Training,
)
from gainstage.runs.render import LIGHT

RED, YELLOW = LIGHT["overflow"], LIGHT["loss"]
COLORS = {FLOAT32: LIGHT["faint"], BFLOAT16: LIGHT["nan"], UNSCALED: RED, SCALED: LIGHT["curve"]}
STYLES = {FLOAT32: ("-", 7), BFLOAT16: (":", 3), UNSCALED: ("-", 3), SCALED: ("--", 3)}
MARKERS = {FLOAT32: ("s", 17), BFLOAT16: ("D", 10), SCALED: ("*", 10)}
TITLE_FONT: dict[str, Any] = {"fontsize": 20, "fontweight": "bold"}
FONTS: dict[Any, Any] = {
    "font.size": 15,
    "axes.titlesize": 18,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save(found: Comparison, path: Path) -> None:
    """Draws the images of each mode, and four panels: errors, batches, gradient, scale."""
    plain, scaled = (found.by_mode[mode] for mode in (UNSCALED, SCALED))
    with mpl.rc_context(FONTS):
        figure = Figure(figsize=(15, 14.5), dpi=100, layout="constrained")
        figure.suptitle(
            f"float16 ends with {found.times(plain):.2f} × the error of float32, "
            f"with loss scaling {found.times(scaled):.2f} ×",
            fontsize=23,
            fontweight="bold",
        )
        halves: Any = figure.subfigures(2, 1, height_ratios=[1, 1.5])
        (errors, batches), (gradient, scale) = halves[1].subplots(2, 2)
        draw_images(halves[0], found)
        draw_errors(errors, found)
        draw_batches(batches, found)
        draw_gradient(gradient, scaled.probe, plain.probe)
        draw_scale(scale, scaled)
        figure.savefig(path)


def draw_images(figure: SubFigure, found: Comparison) -> None:
    """Each mode's images, between those that no network has made, with their scores."""
    noisy, clean = held_out_images()
    shown = [
        ("noisy", "black", evaluation(noisy)),
        *((mode.name, COLORS[mode], run.evaluation) for mode, run in found.by_mode.items()),
        ("original", "black", Evaluation({}, crops(clean))),
    ]
    for axes, (name, color, images) in zip(figure.subplots(1, len(shown)), shown, strict=True):
        axes.imshow(images.image, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(name, color=color, **TITLE_FONT)
        if images.measures:
            score = f"{images.measures['test_psnr']:.2f} dB"
            axes.set_xlabel(score, color=color, **TITLE_FONT)
        axes.spines[:].set(color=color, linewidth=4, visible=True)


def draw_errors(axes: Axes, found: Comparison) -> None:
    """The error on the batches, smoothed a little."""
    for mode, run in found.by_mode.items():
        window = min(10, len(run.errors))
        smooth = np.convolve(run.errors, np.ones(window) / window, mode="valid")
        style, width = STYLES[mode]
        steps = np.arange(len(smooth)) + window
        axes.plot(steps, smooth, style, color=COLORS[mode], label=mode.name, linewidth=width)
    axes.set(title="Squared error while training", xlabel="step", yscale="log")
    axes.legend()


def draw_batches(axes: Axes, found: Comparison) -> None:
    """The error that float16 ends with, by the number of values that its loss is a mean over."""
    color, sizes = COLORS[UNSCALED], [run.ranks * found.task.values for run in found.by_ranks]
    ratios = [found.times(run) for run in found.by_ranks]
    axes.plot(sizes, ratios, "o-", color=color, linewidth=3, markersize=10, label="float16")
    for at in zip(sizes, ratios, strict=True):
        text = f"{at[1]:.2f} ×"
        axes.annotate(text, at, (0, 12), textcoords="offset points", ha="center", color=color)
    for mode, (marker, size) in MARKERS.items():
        at = found.task.ranks * found.task.values, found.times(found.by_mode[mode])
        axes.plot(*at, marker, color=COLORS[mode], markersize=size, label=mode.name)
    axes.set(
        title="Test error by batch, as a multiple of float32's", xscale="log",
        xlabel="values that the loss is a mean over",
    )  # fmt: skip
    axes.set_xticks(sizes)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
    axes.margins(x=0.1, y=0.2)
    axes.legend(loc="upper left")


def draw_gradient(axes: Axes, scaled: Probe, plain: Probe) -> None:
    """The sizes of the gradient's elements against what float16 can hold."""
    shift, high = np.log2(scaled.scale), 20.0
    low = max(np.floor(scaled.exponents.min()), -40.0)
    for start, end, color in [(low, -25, RED), (-25, -14, YELLOW), (16, high, RED)]:
        axes.axvspan(start, end, color=color, alpha=0.22, lw=0)
    for values, mode, label in [
        (scaled.exponents, UNSCALED, "gradient"),
        (scaled.exponents + shift, SCALED, f"times $2^{{{shift:.0f}}}$"),
    ]:
        counts, *_ = axes.hist(values, np.arange(low, high + 1).tolist(), color=COLORS[mode])
        at = np.median(values), np.max(counts)
        axes.annotate(
            label, at, (0, 4), textcoords="offset points", ha="center",
            color=COLORS[mode], fontweight="bold",
        )  # fmt: skip
    top = axes.get_ylim()[1] * 1.32
    for text, x in {
        "0": (low - 25) / 2,
        "loses bits": -19.5,
        "full precision": 1,
        "inf": 18,
    }.items():
        axes.text(x, top * 0.97, text, ha="center", va="top")
    axes.set(
        title=f"{plain.flushed:.0%} of the weights' gradient is 0, scaled {scaled.flushed:.0%}",
        xlabel="exponent, base 2, of the gradient on its way through the network",
        ylabel="elements", xlim=(low, high), ylim=(0, top), yticks=[],
    )  # fmt: skip


def draw_scale(axes: Axes, run: Training) -> None:
    """The scale of each step, with the skipped ones marked."""
    steps, skipped = np.arange(1, len(run.scales) + 1), run.skipped
    axes.step(steps, run.scales, where="mid", color=COLORS[SCALED], linewidth=3)
    axes.plot(
        steps[skipped], run.scales[skipped], "x", color=RED, markersize=12, markeredgewidth=3,
        label=f"overflow, skipped ({skipped.sum()} of {len(steps)} steps)",
    )  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.set(
        title=f"Loss scale, here doubled after {PERIOD} good steps",
        xlabel="step (by default it is doubled after 2,000)",
    )
    axes.legend(loc="lower right")

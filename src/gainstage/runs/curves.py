"""The curves of a recorded run, as a picture or as the drawings of a page."""

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from gainstage._base.checks import as_power
from gainstage.runs.recording import Run
from gainstage.runs.render import LIGHT

STRETCHES = 300  # of a long curve; the extremes of each are drawn
EDGE = 1e100  # drawn for larger numbers, which would overflow on the way; below 1 / EDGE is 0
MARKS = {  # of each cause: a color and a shape
    "overflow": ("overflow", "x"), "NaN": ("nan", "^"), "bad loss": ("loss", "s"),
    "vetoed": ("faint", "|"),
}  # fmt: skip
# Of an SVG, in a page that has it all: fonts, ids, comments, empty paths, and the frame.
NEEDLESS = (
    r"<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>|<!--.*?-->|\n *"
    '|<path( clip-path="[^"]*")? style=[^>]*>'
    '| clip-path="[^"]*"|font-family: [^;]*; |(?<=<g) id="[^"]*"'
)
LOOKS: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "xtick.color", "ytick.color"), LIGHT["faint"]),
    "grid.color": LIGHT["line"], "axes.edgecolor": LIGHT["line"], "axes.grid": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none",
    "svg.fonttype": "none", "font.size": 11,
}  # fmt: skip


def draw(
    run: Run, titles: Mapping[str, str], causes: Mapping[str, np.ndarray], title: str
) -> Figure:
    """Returns one panel for each curve, one above the other.

    Args:
        run: the recorded run.
        titles: the titles of the curves, by the names of their numbers.
        causes: which steps were skipped, by cause.
        title: that of the picture.
    """
    with mpl.rc_context(LOOKS):
        height = 1 + 2.6 * max(len(titles), 1)
        figure = Figure(figsize=(10, height), dpi=100, layout="constrained")
        figure.suptitle(title, fontsize=15, color=LIGHT["ink"], parse_math=False)
        grid = figure.subplots(max(len(titles), 1), 1, squeeze=False)
        for axes, (name, words) in zip(grid[:, 0], titles.items(), strict=False):
            _panel(axes, run, name, causes)
            axes.set_title(words, loc="left", fontsize=12, color=LIGHT["ink"], parse_math=False)
        return figure


def drawing(run: Run, name: str, causes: Mapping[str, np.ndarray]) -> Markup:
    """Returns one curve as the SVG of a page, in the colors of the page."""
    with mpl.rc_context(LOOKS):
        figure, file = Figure(figsize=(5.2, 2.6), layout="constrained"), io.StringIO()
        figure.patch.set_visible(False)
        _panel(figure.subplots(), run, name, causes)
        kept_out = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=kept_out)
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub('<svg [^>]*(viewBox="[^"]*")[^>]*>', r"<svg \1>", text)
    text = re.sub(NEEDLESS, "", text, flags=re.DOTALL)
    for token, color in LIGHT.items():
        text = text.replace(color, f"var(--{token})")
    return Markup(text)


def _panel(axes: Axes, run: Run, name: str, causes: Mapping[str, np.ndarray]) -> None:
    """Draws a curve; below the loss scale, one lane for each cause of skipped steps."""
    gap = run.skipped if name == "grad_norm" else np.zeros(len(run.steps), bool)
    places = _points(run.get(name), gap)
    values = np.where(gap, np.nan, run.get(name))[places].clip(-EDGE, EDGE)
    values[np.abs(values) < 1 / EDGE] = 0
    there = np.isfinite(values)
    is_scale = name == "loss_scale"
    least, most = values[there].min(initial=EDGE), values[there].max(initial=-EDGE)
    steps = run.steps[places].astype(float)
    style = "steps-post" if is_scale else "default"
    axes.plot(steps, values, color=LIGHT["curve"], drawstyle=style)
    around = np.pad(there, 1)
    alone = there & ~around[:-2] & ~around[2:]  # between two gaps
    if alone.any():
        axes.plot(steps[alone], values[alone], ".", color=LIGHT["curve"], markersize=2)
    if least > 0 and (is_scale or most > 20 * least):
        axes.set_yscale("log", base=2 if is_scale else 10)
        narrow = not is_scale and most < 100 * least
        axes.yaxis.set_major_locator(
            LogLocator(2 if is_scale else 10, (1, 2, 5) if narrow else (1,), numticks=6)
        )
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda at, _: as_power(at) if is_scale else f"{at:.4g}")
    )
    first, last = float(run.steps[0]), float(run.steps[-1])
    axes.set_xlim(first, max(last, first + max(1, first / 1e9)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:.10g}"))
    lanes = {cause: mask for cause, mask in causes.items() if mask.any()} if is_scale else {}
    for lane, (cause, mask) in enumerate(lanes.items()):
        color, shape = MARKS[cause]
        height, marked = -0.1 * (lane + 0.8), _apart(run.steps[mask])
        place: Any = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(marked, np.full(len(marked), height), shape, color=LIGHT[color], ms=3.5, **place)
        where: Any = {"transform": axes.transAxes, "ha": "right", "va": "center"}
        axes.text(-0.02, height, f"{cause} {mask.sum()}", color=LIGHT[color], **where)
    axes.tick_params("x", pad=4 + 16 * len(lanes), length=0)
    axes.tick_params("y", length=0)


def _points(values: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """The points to draw: of many, the first, last and extreme ones of each stretch, and one of
    each stretch that is a gap."""
    places = np.flatnonzero(np.isfinite(values) | gap)
    if len(places) <= 4 * STRETCHES:
        return places
    kept: set[int] = set()
    for some in np.array_split(places, STRETCHES):
        there = some[~gap[some]]
        ends = [there[0], there[-1]] if len(there) else [some[0]]
        kept.update(ends)
        if len(there):
            kept |= {there[np.argmin(values[there])], there[np.argmax(values[there])]}
    return np.array(sorted(kept))


def _apart(steps: np.ndarray) -> np.ndarray:
    """Steps to mark: one for each place of the drawing."""
    ends = float(steps[0]), float(steps[-1])
    place = (steps - ends[0]) / max(ends[1] - ends[0], 1) * STRETCHES
    return steps[np.unique(place.astype(int), return_index=True)[1]].astype(float)

"""The tables and the picture of `price_predicts_training`, made of its results."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks import float8_programs
from benchmarks.harness import between_marks

PAGE, PICTURE = "what-a-precision-costs.md", "what-a-precision-costs.png"
MAX_NOISE, MAX_BIAS = 0.01, 0.02  # the budget of `gs.advise`
# The precisions, with their colors.
ARMS = {"bfloat16": "#edae49", "float16": "#00798c", "float8": "#d1495b", "plan": "#6d597a"}
FACTOR = 1.5  # between what shares predict and what is measured
FLOOR = 0.01  # the part of the budget below which neither matters


class Point(NamedTuple):
    """A model in a precision."""

    model: str
    precision: str
    noise: float  # before training, as the bias
    bias: float
    parts: tuple[float, ...]  # of the budget: at the start, in the middle and at the end
    loss: float  # after training, the mean over seeds
    seeds: int
    penalty: float  # the loss over that of float32, less 1
    error: float  # the standard error of float32's loss, relative to it
    own_error: float  # that of the penalty, over seeds that have the same batches

    @property
    def is_as_float32(self) -> bool:
        """Whether the loss is at most two standard errors above that of float32."""
        return self.penalty <= 2 * self.error

    @property
    def is_clear(self) -> bool:
        """Whether the penalty can be told from 0."""
        return abs(self.penalty) > 2 * self.own_error


def part_of(noise: float, bias: float) -> float:
    """The part of the budget that a price takes."""
    return max(noise / MAX_NOISE, bias / MAX_BIAS)


def points(models: dict[str, Any]) -> list[Point]:
    """A point for each model and precision."""
    found = []
    for model, arms in models.items():
        losses = arms["float32"]["losses"]
        exact = statistics.mean(losses)
        error = statistics.stdev(losses) / math.sqrt(len(losses)) / exact
        for precision in ARMS:
            prices, own = arms[precision]["prices"], arms[precision]["losses"]
            parts = tuple(part_of(*price) for price in prices)
            loss = statistics.mean(own)
            each = [x / y - 1 for x, y in zip(own, losses, strict=True)]
            own_error = statistics.stdev(each) / math.sqrt(len(each))
            row = (*prices[0], parts, loss, len(own), loss / exact - 1, error, own_error)
            found.append(Point(model, precision, *row))
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of two lists of numbers; equal ones share a rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(array < x).sum() + ((array == x).sum() - 1) / 2 for x in array])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def correlation(found: Sequence[Point], *, whole: bool = False) -> float:
    """That of the part of the budget and the penalty.

    Args:
        found: the points.
        whole: whether the part is the mean of those on the way, or that of the start.
    """
    parts = [statistics.mean(p.parts) if whole else p.parts[0] for p in found]
    return spearman(parts, [p.penalty for p in found])


def markdown(content: dict[str, Any], programs: dict[str, Any]) -> str:
    """The tables, and what they say."""
    models = content["models"]
    found = points(models)
    inside = [p for p in found if p.parts[0] <= 1]
    outside = [p for p in found if p.parts[0] > 1]
    wrong = [p for p in inside if not p.is_as_float32]
    plans = [p for p in found if p.precision == "plan"]
    kept = [p for p in plans if p.is_as_float32]
    told = [sum(_is_predicted(model, which) for model in models.values()) for which in (0, 1)]
    clear = [p for p in found if p.is_clear]
    weak = correlation(found) < 0.5
    rows = [
        "| model | precision | noise | bias | of the budget: start, middle, end | loss | "
        "over float32 | its standard error | seeds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {p.model} | {p.precision} | {p.noise:.3%} | {p.bias:.2%} | "
            f"{', '.join(f'{part:.2g}' for part in p.parts)} | {p.loss:.4g} | {p.penalty:+.1%} | "
            f"{p.error:.1%} | {p.seeds} |"
            for p in found
        ),
    ]
    return "\n".join(
        [
            "Noise and bias on six batches, before training, and the mean loss of the last 50 of "
            "200 steps (four slow models: of 100). The first loss scale is one at which no step is "
            "skipped, since skipped steps at the start cost more than rounding. Float8 is in all "
            'linear layers; the plan is that of `find_plan(..., dtype="float8", card=None)`, '
            "within 1 % and 2 %.",
            "",
            *rows,
            "",
            f"Spearman's rank correlation of the part of the budget and the penalty is "
            f"{correlation(found):.2f} over {len(found)} points, and {correlation(clear):.2f} over "
            f"the {len(clear)} whose penalty can be told from 0 by its own standard error. With "
            f"the mean of the three parts they are {correlation(found, whole=True):.2f} and "
            f"{correlation(clear, whole=True):.2f}."
            + weak
            * " So the price before training says what is safe, and does not rank losses.",
            f"Of {len(inside)} points in the budget {len(inside) - len(wrong)} train as float32 "
            f"does, at most two of its standard errors above; of {len(outside)} out of it "
            f"{sum(p.is_as_float32 for p in outside)} do. It fails for: "
            f"{'; '.join(f'{p.model} in {_name(p)}, {p.penalty:+.1%}' for p in wrong) or 'none'}.",
            f"Of {len(plans)} plans {len(kept)} train as float32 does.",
            "",
            f"![Penalty after training by the part of the budget before]({PICTURE})",
            "",
            "## Plans",
            "",
            "| model | products | predicted noise, bias | measured on other batches |",
            "|---|---|---:|---:|",
            *(_plan_row(name, model) for name, model in models.items()),
            "",
            f"Prediction and measurement are within a factor of {FACTOR}, or both below "
            f"{FLOOR:.0%} of the budget, for the noise of {told[0]} and the bias of {told[1]} of "
            f"{len(models)}. A bias on four batches has an error of its own.",
            "",
            "## Programs for an H100",
            "",
            "Gradients of a language model of two blocks and 8,192 letters on 8 times 1,024 "
            "tokens, compiled without a device. They have never run. Arithmetic and memory "
            "are what the card needs for each at least, by its published rates.",
            "",
            float8_programs.markdown(programs),
        ]
    )


def _name(point: Point) -> str:
    return "its plan" if point.precision == "plan" else point.precision


def _is_predicted(model: dict[str, Any], which: int) -> bool:
    """Whether shares predict the noise, or the bias, that is measured."""
    predicted, measured = model["predicted"][which], model["measured"][which]
    is_small = max(predicted, measured) < FLOOR * (MAX_NOISE, MAX_BIAS)[which]
    return is_small or 1 / FACTOR <= measured / predicted <= FACTOR


def _plan_row(name: str, model: dict[str, Any]) -> str:
    products = ", ".join(f"{count} {dtype}" for dtype, count in model["products"].items())
    predicted, measured = (
        f"{noise:.3%}, {bias:.2%}" for noise, bias in (model["predicted"], model["measured"])
    )
    return f"| {name} | {products} | {predicted} | {measured} |"


def write(content: dict[str, Any], docs: Path) -> None:
    """Writes the page's results, and the picture."""
    page = docs / PAGE
    programs = json.loads(float8_programs.PATH.read_text())
    page.write_text(between_marks(page.read_text(), markdown(content, programs)))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for precision, color in ARMS.items():
        some = [p for p in points(content["models"]) if p.precision == precision]
        ys = [100 * max(p.penalty, 0.0) for p in some]
        axes.plot([max(p.parts[0], 1e-3) for p in some], ys, "o", color=color, label=precision)
    highest = {p.model: p for p in sorted(points(content["models"]), key=lambda p: p.penalty)}
    for p in highest.values():
        if p.penalty > 0.04:
            short = p.model.partition(" (")[0].partition(",")[0]
            offset = (7, -14) if "experts" in short else (7, -3)  # beside a neighbour
            place = (max(p.parts[0], 1e-3), 100 * p.penalty)
            axes.annotate(short, place, offset, textcoords="offset points", fontsize=9)
    axes.axvline(1, color="#5b6675", lw=1)
    axes.text(1.05, 0.02, "budget", transform=axes.get_xaxis_transform(), color="#5b6675")
    axes.set(xscale="log", xlabel="part of the budget of noise and bias, before training")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(-0.3, 300)
    axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    axes.set_ylabel("loss above float32 after training, %")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(docs / PICTURE, dpi=110)

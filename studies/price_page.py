"""The table and the picture of `price_predicts_training`, made of its results."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.harness import between_marks

PAGE, PICTURE = "what-a-precision-costs.md", "what-a-precision-costs.png"
MAX_NOISE, MAX_BIAS = 0.01, 0.02  # the budget of `precision.advise`
ARMS = {"bfloat16": "#edae49", "float16": "#00798c", "float8": "#d1495b"}  # with their colors


class Point(NamedTuple):
    """A model in a precision."""

    model: str
    precision: str
    noise: float
    bias: float
    loss: float  # after training, the mean over seeds
    seeds: int
    penalty: float  # the loss over that of float32, less 1

    @property
    def part(self) -> float:
        """The part of the budget that it takes."""
        return max(self.noise / MAX_NOISE, self.bias / MAX_BIAS)


def points(models: dict[str, Any]) -> list[Point]:
    """A point for each model and precision."""
    found = []
    for model, arms in models.items():
        exact = statistics.mean(arms["float32"]["losses"])
        for precision in (name for name in ARMS if name in arms):
            arm = arms[precision]
            loss = statistics.mean(arm["losses"])
            row = (arm["noise"], arm["bias"], loss, len(arm["losses"]), loss / exact - 1)
            found.append(Point(model, precision, *row))
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of two lists of numbers; equal ones share a rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(array < x).sum() + ((array == x).sum() - 1) / 2 for x in array])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def correlation(found: Sequence[Point]) -> float:
    """That of the part of the budget and the penalty."""
    return spearman([p.part for p in found], [p.penalty for p in found])


def markdown(content: dict[str, Any]) -> str:
    """The table, and what it says."""
    found = points(content["models"])
    inside = [p for p in found if p.part <= 1]
    few = sum(p.penalty <= 0.02 for p in inside)
    worst = max(inside, key=lambda p: p.penalty)
    rows = [
        "| model | precision | noise | bias | of the budget | loss | over float32 | seeds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {p.model} | {p.precision} | {p.noise:.3%} | {p.bias:.2%} | {p.part:.2f} | "
            f"{p.loss:.4g} | {p.penalty:+.1%} | {p.seeds} |"
            for p in found
        ),
    ]
    return "\n".join(
        [
            f"Noise and bias on six batches, before training, and the mean loss of the last 50 of "
            f"{content['steps']} steps. Float8 is in all linear layers.",
            "",
            *rows,
            "",
            f"Spearman's rank correlation of the part of the budget and the penalty is "
            f"{correlation(found):.2f} over {len(found)} points. Of {len(inside)} in the budget "
            f"{few} end at most 2 % above float32; the worst is {worst.model} in "
            f"{worst.precision}, {worst.penalty:+.1%}.",
            "",
            f"![Penalty after training by the part of the budget before]({PICTURE})",
        ]
    )


def write(content: dict[str, Any], docs: Path) -> None:
    """Writes the page's results, and the picture."""
    page = docs / PAGE
    page.write_text(between_marks(page.read_text(), markdown(content)))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for precision, color in ARMS.items():
        some = [p for p in points(content["models"]) if p.precision == precision]
        ys = [100 * max(p.penalty, 0.0) for p in some]
        axes.plot([max(p.part, 1e-3) for p in some], ys, "o", color=color, label=precision, ms=8)
        for p, y in zip(some, ys, strict=True):
            if y > 2:
                short = p.model.partition(" (")[0].partition(",")[0]
                place = (max(p.part, 1e-3), y)
                axes.annotate(short, place, (6, 5), textcoords="offset points", fontsize=9)
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

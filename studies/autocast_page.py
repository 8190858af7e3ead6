"""The tables and the picture of `autocast_keeps_the_gradient`, made of its results."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import between_marks

PAGE, PICTURE = "gradients-under-autocast.md", "autocast-evidence.png"
ARMS = ("float32", "by hand", "autocast", "plan")
LIMIT = 0.01  # of the error under default rules
NOISE = 1.005  # between sizes that are called the same
SLOWER = 1.7  # the most that the time to trace and compile may be, over float32
OPTIMISTIC = 1.5  # the most that the error on another batch may be, over the prediction
COLORS = {"float32": "#9aa5b8", "bfloat16": "#edae49", "autocast": "#00798c"}
KINDS = {
    "products": ("dot_general", "conv_general_dilated"),
    "sums and differences": ("add", "sub", "add_any", "neg"),
    "products of elements, quotients": ("mul", "div", "integer_pow", "square", "pow"),
    "roots, exponentials, logarithms": ("exp", "log", "rsqrt", "sqrt", "log1p", "exp2"),
    "activations": ("tanh", "logistic", "erf", "max"),
}
REST, SHADES = "other", ("#00798c", "#66a182", "#edae49", "#d1495b", "#7d5ba6", "#9aa5b8")
ALT = "Where the error of float16 comes from, and training curves in three dtypes"

Row = dict[str, Any]


def write(results: Row, docs: Path) -> None:
    """Writes the picture, and the tables between the marks of the page."""
    docs.mkdir(parents=True, exist_ok=True)
    if "training" in results:
        picture(results).savefig(docs / PICTURE)
    file = docs / PAGE
    text = file.read_text() if file.exists() else "<!-- results -->\n<!-- end of results -->\n"
    file.write_text(between_marks(text, markdown(results)))


# ── tables ───────────────────────────────────────────────────────────────────────────────────


def markdown(results: Row) -> str:
    """Everything between the marks of the page."""
    models = results["models"]
    parts = [error_table(models), cost_table(models)]
    if any(row["h100"] for row in models.values()):
        parts.append(h100_table(models))
    if "training" in results:
        parts += [f"![{ALT}]({PICTURE})", training_table(results["training"])]
    if "tuning" in results:
        parts.append(tuning_table(results["tuning"]))
    return "\n\n".join(parts)


def error_table(models: Row) -> str:
    """The errors of the gradients; bold is what breaks a bound."""
    head = ["error of the gradient", "bfloat16", "float16 by hand", "autocast", "with a plan",
            "predicted", "on another batch"]  # fmt: skip
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in models.items():
        off = row["errors"]
        lines.append(
            [
                name,
                percent(off["bfloat16"]),
                percent(off["by hand"]),
                percent(off["autocast"], off["autocast"] > LIMIT),
                percent(off["plan"], off["plan"] > row["bound"]),
                percent(row["predicted"]),
                percent(row["other batch"], row["other batch"] > OPTIMISTIC * row["predicted"]),
            ]
        )
    return table(lines)


def cost_table(models: Row) -> str:
    """Products, memory between the passes, and the time to compile."""
    head = ["", "products in float16: autocast", "with a plan",
            "MB kept for the backward pass: float32", "by hand", "autocast", "with a plan",
            "time to trace and compile, over float32: by hand", "autocast",
            "with a plan"]  # fmt: skip
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in models.items():
        counts = [row["products"][arm] for arm in ("autocast", "plan")]
        ratios = row["compile"]["ratios"]
        times = [ratio(ratios[arm], arm) if arm in ratios else "" for arm in ARMS[1:]]
        lines.append(
            [
                name,
                *(f"{half} of {every}" for half, every in counts),
                *megabytes(row["kept"]),
                *times,
            ]
        )
    return table(lines)


def ratio(time: float, arm: str) -> str:
    """A time to compile over that in float32; bold is what is above the bound."""
    return f"**{time:.2f}**" if arm != "by hand" and time > SLOWER else f"{time:.2f}"


def h100_table(models: Row) -> str:
    """Bytes that the gradient of the large models moves, and its temporaries."""
    head = ["on an H100, larger sizes", *(f"MB moved: {ARMS[0]}", *ARMS[1:]),
            *(f"MB of temporaries: {ARMS[0]}", *ARMS[1:])]  # fmt: skip
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in models.items():
        if row["h100"]:
            sizes = [
                {arm: numbers[key] for arm, numbers in row["h100"].items()}
                for key in ("moved", "temp")
            ]
            lines.append([name, *megabytes(sizes[0]), *megabytes(sizes[1])])
    return table(lines)


def megabytes(sizes: dict[str, float]) -> list[str]:
    """The sizes of each arm; bold is what is above those by hand."""
    found = []
    for arm in ARMS:
        text = f"{sizes[arm] / 1e6:,.3g}" if arm in sizes else ""
        text = f"{sizes[arm] / 1e6:,.0f}" if sizes.get(arm, 0) >= 1e9 else text
        is_more = arm in ("autocast", "plan") and sizes[arm] > NOISE * sizes.get("by hand", np.inf)
        found.append(f"**{text}**" if is_more else text)
    return found


def training_table(training: Row) -> str:
    """The losses at the end of training, and the errors of the gradients there."""
    head = ["mean loss of the last 50 steps", "float32", "bfloat16", "autocast",
            "error at the end: bfloat16", "autocast", "with the plan of the start"]  # fmt: skip
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in training.items():
        ends = [f"{np.mean(losses[-50:]):.4f}" for losses in row["losses"].values()]
        lines.append([name, *ends, *map(percent, row["errors after"].values())])
    return table(lines)


def tuning_table(tuning: Row) -> str:
    """The time of `precision.find_plan`."""
    head = ["`precision.find_plan` of a transformer", "parameters", "operations", "one gradient",
            "`precision.find_plan`", "in gradients"]  # fmt: skip
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in tuning.items():
        lines.append(
            [
                name,
                f"{row['parameters'] / 1e6:.1f} million",
                str(row["operations"]),
                f"{row['gradient_s']:.2f} s",
                f"{row['tune_s']:.0f} s",
                f"{row['tune_s'] / row['gradient_s']:.0f}",
            ]
        )
    return table(lines)


def percent(share: float | None, is_bold: bool = False) -> str:
    """Two digits, in per cent; nothing for None."""
    if share is None:
        return ""
    text = f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"
    return f"**{text}**" if is_bold else text


def table(lines: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ── the picture ──────────────────────────────────────────────────────────────────────────────


def picture(results: Row) -> Figure:
    """Shares of the error by kind of operation above, training curves below."""
    training = results["training"]
    figure = Figure(figsize=(15, 9), dpi=110, layout="constrained")
    rows = figure.add_gridspec(2, len(training), height_ratios=(1.15, 1))
    draw_shares(figure.add_subplot(rows[0, :]), results["models"])
    for place, (name, row) in enumerate(training.items()):
        draw_curves(figure.add_subplot(rows[1, place]), name, row["losses"], place == 0)
    return figure


def draw_shares(axes: Axes, models: Row) -> None:
    """For each model, the part of the squared error that each kind of operation causes."""
    names = list(models)[::-1]
    left = np.zeros(len(names))
    for kind, shade in zip((*KINDS, REST), SHADES, strict=True):
        parts = np.array([part(models[name]["shares"], kind) for name in names])
        axes.barh(names, parts, left=left, color=shade, label=kind, height=0.7)
        left += parts
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_title("Where the error comes from if all operations are in float16", loc="left")
    axes.set_xlabel("part of the squared error of the gradient")
    axes.legend(frameon=False, ncols=len(KINDS) + 1, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axes.spines[["top", "right"]].set_visible(False)


def part(shares: dict[str, float], kind: str) -> float:
    """The part of the squared error of a kind of operation."""
    known = {name for names in KINDS.values() for name in names}
    names = KINDS.get(kind) or [name for name in shares if name not in known]
    total = sum(share**2 for share in shares.values())
    return sum(shares.get(name, 0.0) ** 2 for name in names) / total


def draw_curves(axes: Axes, name: str, curves: dict[str, list[float]], has_legend: bool) -> None:
    """The loss of each arm, a mean over ten steps."""
    styles = {"float32": {"lw": 6, "alpha": 0.7}, "bfloat16": {"lw": 2}, "autocast": {"lw": 2}}
    for arm, losses in curves.items():
        means = np.convolve(losses, np.full(10, 0.1), "valid")
        dashes = "--" if arm == "autocast" else "-"
        axes.plot(means, dashes, color=COLORS[arm], label=arm, **styles[arm])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    lowest, highest = axes.get_ylim()
    is_narrow = highest < 10 * lowest
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if is_narrow else "")
    axes.set_title(f"{name}: loss", loc="left")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend:
        axes.legend(frameon=False)

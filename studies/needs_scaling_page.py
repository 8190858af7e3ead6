"""The tables and the picture of `where_float16_needs_scaling`, made of its results."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.harness import between_marks

from .tasks import Task

PAGE, PICTURE = "where-scaling-is-needed.md", "where-float16-needs-scaling.png"
EXACT = "float32"
NAMES = {
    EXACT: EXACT,
    "chance": "float32, again",
    "bfloat16": "bfloat16",
    "unscaled": "float16, unscaled",
    "dynamic": "float16, dynamic",
    "adaptive": "float16, adaptive",
}
WORSE = 0.01  # than float32, relative: what is printed bold
TITLE = "float16 needs loss scaling when the global batch is large"
ALT = "Scores and gradient errors by global batch, in float32, bfloat16 and float16"
COLORS = {"bfloat16": "#edae49", "unscaled": "#d1495b", "dynamic": "#66a182", "adaptive": "#00798c"}
# A curve that hides another has the smaller marks.
STYLES: dict[str, dict[str, Any]] = {
    "bfloat16": {"fmt": "s-", "ms": 13, "mfc": "none", "mew": 2},
    "unscaled": {"fmt": "o-", "ms": 7},
    "dynamic": {"fmt": "o-", "ms": 8, "mfc": "none", "mew": 2},
    "adaptive": {"fmt": "D--", "ms": 4},
}

Run = dict[str, Any]


class Row(NamedTuple):
    """The runs of a task at one global batch."""

    name: str
    task: Task
    batch: int
    runs: dict[str, list[Run]]  # by arm, one a seed

    def complete(self) -> "Row":
        """Without the seeds that an arm lacks, as of a benchmark that was interrupted."""
        seeds = set.intersection(*({run["seed"] for run in runs} for runs in self.runs.values()))
        runs = {arm: [r for r in runs if r["seed"] in seeds] for arm, runs in self.runs.items()}
        return self._replace(runs=runs)

    def score(self, arm: str) -> float:
        """The mean over the seeds; NaN if the arm was not run."""
        runs = self.runs.get(arm)
        return statistics.fmean(run["score"] for run in runs) if runs else math.nan

    def excess(self, arm: str) -> float:
        """How much worse than float32 the score is, relative to it."""
        exact = self.score(EXACT)
        worse = self.score(arm) - exact
        return (-worse if self.task.higher_is_better else worse) / abs(exact)

    def error(self, way: str, key: str) -> float:
        """The mean over the seeds of what was found of the gradients; NaN if nothing was."""
        runs = [run["errors"] for run in self.runs.get("adaptive", [])]
        found = [errors[way][key] for errors in runs if way in errors]
        return statistics.fmean(found) if found else math.nan

    @property
    def lowest_scale(self) -> float | None:
        """The lowest scale that the X-ray of a run found to fit, if it took one."""
        found = [run["lowest_scale"] for run in self.runs["adaptive"] if "lowest_scale" in run]
        return max(found, default=None)


def write(runs: Iterable[Run], tasks: Mapping[str, Task], docs: Path) -> None:
    """Writes the picture, and the tables between the marks of the page, into the folder `docs`."""
    rows = rows_of(runs, tasks)
    if not rows:
        print("Nothing was measured: the results have no runs.")
        return
    docs.mkdir(parents=True, exist_ok=True)
    picture(rows).savefig(docs / PICTURE)
    file = docs / PAGE
    text = file.read_text() if file.exists() else "<!-- results -->\n<!-- end of results -->\n"
    file.write_text(between_marks(text, markdown(rows)))


def rows_of(runs: Iterable[Run], tasks: Mapping[str, Task]) -> list[Row]:
    """The results in the order of the tasks, by global batch; only seeds that every arm has."""
    rows: dict[tuple[str, int], Row] = {}
    for run in runs:
        name, batch = run["task"], run["batch"]
        if name in tasks:
            row = rows.setdefault((name, batch), Row(name, tasks[name], batch, {}))
            row.runs.setdefault(run["arm"], []).append(run)
    order = list(tasks)
    found = [row.complete() for row in rows.values() if EXACT in row.runs]
    found = [row for row in found if row.runs[EXACT]]
    return sorted(found, key=lambda row: (order.index(row.name), row.batch))


# ── tables ───────────────────────────────────────────────────────────────────────────────────


def markdown(rows: list[Row]) -> str:
    """Everything between the marks of the page."""
    return "\n\n".join([scores(rows), f"![{ALT}]({PICTURE})", errors(rows)])


def scores(rows: list[Row]) -> str:
    """The table of the scores; an arrow says which ones are better."""
    head = ["task", "global batch", "score", *NAMES.values(), "seeds"]
    lines = [head, ["---", "---:", "---", *["---:"] * (len(NAMES) + 1)]]
    for row in rows:
        arrow = "↑" if row.task.higher_is_better else "↓"
        found = [score(row, arm) for arm in NAMES]
        seeds = str(len(row.runs[EXACT]))
        lines.append([row.name, batch(row), f"{row.task.measure} {arrow}", *found, seeds])
    return table(lines)


def score(row: Row, arm: str) -> str:
    """A score, bold if it is more than 1 % worse than that of float32."""
    value = row.score(arm)
    text = "" if math.isnan(value) else f"{value:.4g}"
    return f"**{text}**" if row.excess(arm) > WORSE else text


def errors(rows: list[Row]) -> str:
    """The table of the gradients."""
    head = ["relative error of the gradient", "global batch"]
    head += ["float16, unscaled", "float16, scaled", "bfloat16"]
    head += [
        "elements lost, unscaled",
        "unscaled, as `gs.diagnostics.report` estimates",
        "lowest scale that fits",
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        if "adaptive" in row.runs:
            ways = [both_errors(row, way) for way in ("unscaled", "scaled", "bfloat16")]
            lost = percent(row.error("unscaled", "flushed"))
            lowest = f"`2**{math.log2(row.lowest_scale):.0f}`" if row.lowest_scale else ""
            estimate = percent(row.error("estimate", "one"))
            lines.append([row.name, batch(row), *ways, lost, estimate, lowest])
    return table(lines)


def both_errors(row: Row, way: str) -> str:
    """In one microbatch, and in the sum of several."""
    return f"{percent(row.error(way, 'one'))} / {percent(row.error(way, 'sum'))}"


def batch(row: Row) -> str:
    """The number of tokens or elements that the loss is a mean of."""
    return f"{row.batch:,} {row.task.unit}"


def percent(share: float) -> str:
    """Two digits, in per cent; nothing for NaN."""
    if math.isnan(share):
        return ""
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


def table(lines: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ── the picture ──────────────────────────────────────────────────────────────────────────────


def picture(rows: list[Row]) -> Figure:
    """By global batch: scores above, errors of the gradients below; a column a task."""
    tasks = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.name)]
    shown = [group for group in tasks if len(group) > 1] or tasks[:1]
    figure = Figure(figsize=(6.4 * len(shown), 8.4), dpi=110, layout="constrained")
    figure.suptitle(TITLE, size=15, weight="bold")
    panels = figure.subplots(2, len(shown), squeeze=False, sharex="col")
    for column, group in zip(panels.T, shown, strict=True):
        draw_scores(column[0], group)
        draw_errors(column[1], group)
    for axes in panels[:, 0]:  # their colours are those of all panels
        axes.legend(frameon=False, loc="upper left")
    return figure


def draw_scores(axes: Axes, rows: list[Row]) -> None:
    """The difference from float32 of each arm."""
    task = rows[0].task
    for arm in STYLES:
        found = [row for row in rows if arm in row.runs]
        means = [row.score(arm) - row.score(EXACT) for row in found]
        line(axes, [row.batch for row in found], means, arm, NAMES[arm])
    axes.axhline(0, color="#9aa5b8", lw=5, alpha=0.6, zorder=0, label=EXACT)
    better = "higher" if task.higher_is_better else "lower"
    axes.set_title(f"{rows[0].name}: {task.measure}, minus that of float32", loc="left")
    axes.set_ylabel(f"difference ({better} is better)")
    tidy(axes, rows)


def draw_errors(axes: Axes, rows: list[Row]) -> None:
    """The relative errors in one microbatch and, unscaled, in the sum of several."""
    found = [row for row in rows if "adaptive" in row.runs]
    batches = [row.batch for row in found]
    for way, arm, name in (
        ("bfloat16", "bfloat16", "bfloat16"),
        ("unscaled", "unscaled", "float16, unscaled"),
        ("scaled", "adaptive", "float16, scaled"),
    ):
        of_one = [row.error(way, "one") for row in found]
        line(axes, batches, of_one, arm, f"{name}, one microbatch")
        if way == "unscaled":
            of_sum = [row.error(way, "sum") for row in found]
            dotted = {"mfc": "white", "fmt": "o:"}
            line(axes, batches, of_sum, arm, f"{name}, sum of 16 microbatches", **dotted)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.set_title(f"{rows[0].name}: relative error of the gradient", loc="left")
    axes.set_xlabel(f"global batch, {rows[0].task.unit}")
    tidy(axes, rows)


def line(
    axes: Axes, batches: list[int], values: list[float], arm: str, label: str, **style: Any
) -> None:
    """A curve in the colour and with the marks of an arm."""
    how = STYLES[arm] | style
    axes.plot(batches, values, how.pop("fmt"), color=COLORS[arm], label=label, lw=2, **how)


def tidy(axes: Axes, rows: list[Row]) -> None:
    """The batches as ticks, a light grid, no frame."""
    axes.set_xscale("log", base=2)
    axes.set_xticks([row.batch for row in rows], [f"{row.batch:,}" for row in rows])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

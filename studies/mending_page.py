"""The tables of `a_run_mends_itself`, made of its results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import between_marks
from gainstage.training.audit import BOUNDS

PAGE = "mending.md"
YEARS, PRICES, KINDS = "years", "prices in Keras", ("true", "reported")
SEEDED = YEARS, PRICES  # reports that are trained with several seeds
MAY_BE_FURTHER = 0.25 * BOUNDS[1]  # from float32 than the default, on another batch
NEARER = 18  # of 20 batches, at least
ONE_MORE = 1  # row beside those of the planted line

Row = dict[str, Any]


def write(results: Row, docs: Path) -> None:
    """Writes each table between its marks on the page."""
    file = docs / PAGE
    text = file.read_text()
    for name, table in TABLES.items():
        text = between_marks(text, table(results), name)
    file.write_text(text)


def ends(results: Row) -> dict[str, dict[str, float]]:
    """How far the losses of each report with mending are from those in float32 at the end."""
    return {
        name: dict(zip(KINDS, over_float32(rows, "mended"), strict=True))
        for name, rows in with_mean(results["reports"]).items()
    }


def with_mean(rows: Row) -> dict[str, list[Row]]:
    """Each report by itself, and the seeds of one that has several together."""
    seeds = {each: [row for name, row in rows.items() if name.startswith(each)] for each in SEEDED}
    return {name: [row] for name, row in rows.items()} | {k: v for k, v in seeds.items() if v}


def over_float32(rows: list[Row], arm: str) -> list[float]:
    """By how much the losses of an arm are off those of float32, on average."""
    each = [[row[arm][kind] / row["float32"][kind] - 1 for kind in KINDS] for row in rows]
    return [float(x) for x in np.mean(each, axis=0)]


def reports(results: Row) -> str:
    """The losses of what users have reported, over those in float32."""
    head = ["run", "dtype", "steps", "autocast: true loss", "reported loss", "mended: true loss",
            "reported loss", "mended before step", "lines in float32 then",
            "half precision that is left"]  # fmt: skip
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for name, rows in with_mean(results["reports"]).items():
        numbers = [change(x) for arm in ("autocast", "mended") for x in over_float32(rows, arm)]
        if len(rows) > 1:
            lines.append([f"{name}, mean of {len(rows)} seeds", "", "", *numbers, "", "", ""])
            continue
        row, count = rows[0], len({line for *_, line in rows[0]["rows"]})
        when = ", ".join(map(str, row["when"])) or "-"
        lines.append([name, row["dtype"], str(row["steps"]), *numbers, when, str(count),
                      percent(row["left"])])  # fmt: skip
    return table(lines)


def models(results: Row) -> str:
    """What the audits of healthy models found, and the losses at their end."""
    head = ["model", "dtype", "times mended", "warnings", "half precision that is left",
            "largest error in an audit: loss", "gradient", "true loss: float32",
            "float32, weights rounded at the start", "autocast",
            "with audits that mend", "program of the step"]  # fmt: skip
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for name, row in results["models"].items():
        errors = np.array(row["errors"])[:, 1:]
        errors = np.where(np.isfinite(errors), errors, 0).max(axis=0)
        losses = [f"{row[arm]['true']:.4f}" for arm in ("float32", "rounded", "autocast", "mended")]
        program = "the same" if row["same program"] else "another"
        model = name.rsplit(", ", 1)[0]
        lines.append([model, row["dtype"], str(len(row["when"])), str(len(row["told"])),
                      percent(row["left"]), *map(percent, errors), *losses, program])  # fmt: skip
    return table(lines)


def off(results: Row) -> dict[str, Row]:
    """The planted faults that half precision spoils."""
    return {name: row for name, row in results["planted"].items() if row["off"]}


def planted(results: Row) -> str:
    """Each fault that half precision spoils, and the counts of all."""
    spoiled, every = off(results), results["planted"]
    head = ["fault", "model", "dtype", "errors of loss, gradient and worst tensor", "mended before",
            "afterwards",
            "rows of the planted line", "other rows", "half precision that is left"]  # fmt: skip
    lines = [head, ["---", "---", "---", "---:", "---:", "---:", "---:", "---:", "---:"]]
    for name, row in spoiled.items():
        fault, model, dtype = name.split(", ")
        if row["when"] is None:
            lines.append([fault, model, dtype, errors(row["before"]), "never", *[""] * 4])
            continue
        own = len(row["rows"]) - len(row["other"])
        lines.append([fault, model, dtype, errors(row["before"]), f"step {row['when']}",
                      errors(row["after"]), str(own), str(len(row["other"])),
                      percent(row["left"])])  # fmt: skip
    mended = [row for row in spoiled.values() if row["when"] is not None]
    first = sum(row["when"] == 0 for row in mended)
    few = sum(len(row["other"]) <= ONE_MORE for row in mended)
    right = {name: row for name, row in every.items() if not row["off"]}
    sensitive = [name for name, row in right.items() if row["before"][1] > BOUNDS[1]]
    kept = [name for name in right if name not in sensitive]
    said = [
        f"- Of {len(every)} plants, {len(spoiled)} are past the bounds of an audit, and "
        f"{len(mended)} of these were mended: {first} at the first audit, and "
        f"{len(mended) - first} later. There the loss is right in half precision and gradients are "
        "not, which three audits in a row must find.",
        f"- {few} took the rows of the planted line and at most {ONE_MORE} more.",
        f"- {len(kept)} are within the bounds, because the default rules keep what they need in "
        f"float32, or because they are harmless in that dtype: {listed(kept)}.",
        f"- {len(sensitive)} change their gradients as much if a parameter is rounded once, which "
        f"an audit does not hold against half precision: {listed(sensitive)}.",
    ]
    return table(lines) + "\n\n" + "\n".join(said)


def listed(names: list[str]) -> str:
    """The names of faults, with their models and dtypes."""
    return "; ".join("{} ({}, {})".format(*name.split(", ")) for name in names)


def pairs(row: Row) -> list[tuple[float, float]]:
    """The errors of the gradient, by default and mended, on each other batch."""
    return [tuple(np.inf if x is None else x for x in pair) for pair in row["errors"]]


def nearer(row: Row) -> int:
    """On how many batches what was mended is nearer to float32."""
    return sum(mended < default for default, mended in pairs(row))


def beyond(row: Row) -> float:
    """The most by which an error of what was mended is larger; 0 if none is."""
    return max(mended - default if mended > default else 0.0 for default, mended in pairs(row))


def batches(results: Row) -> str:
    """The errors of the gradients of each case on other batches, by default and mended."""
    head = ["case", "dtype", "other batches", "nearer to float32 when mended",
            "median error of the gradient by default", "mended", "further by at most"]  # fmt: skip
    lines = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for name, row in results["batches"].items():
        case, dtype = name.rsplit(", ", 1)
        medians = np.median(np.array(pairs(row)), axis=0)
        lines.append([case, dtype, str(len(row["errors"])), str(nearer(row)),
                      *["not finite" if np.isinf(x) else percent(x) for x in medians],
                      percent(beyond(row))])  # fmt: skip
    return table(lines)


def errors(each: list[float | None]) -> str:
    """Those of the loss, all gradients and the worst tensor."""
    return ", ".join("not finite" if x is None else percent(x) for x in dict.fromkeys(each))


def percent(share: float) -> str:
    """Two digits, in per cent."""
    text = f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"
    return "0 %" if share < 5e-7 else text


def change(share: float) -> str:
    """By how much a loss is off, with a sign."""
    return f"{100 * share:+.1f} %" if abs(share) < 10 else f"{share + 1:,.0f} times"


def table(lines: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[Row], str]] = {
    "reports": reports, "models": models, "planted": planted, "batches": batches,
}  # fmt: skip

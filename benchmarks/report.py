"""The picture of the benchmarks and the tables of their page, made of what `results/` holds."""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from . import on_device, programs
from .harness import LIMIT, RESULTS, between_marks

DOCS = Path(__file__).parents[1] / "docs" / "evidence"
INTRODUCTION = """# Benchmarks

![Every ratio to the first baseline](benchmarks.png)

![A language model on a GPU](benchmarks-gpu.png)

<!-- on a GPU -->
<!-- end of on a GPU -->

<!-- results -->
<!-- end of results -->
"""
METHOD = """A ratio is the median, over rounds, of the time of a variant over that of the
baseline in the same round. In parentheses are the smallest and the largest ratio of
the runs or, for a single run, the quartiles of its rounds. If a case names no
model, the gradients are given and only the optimizer's step is measured.
"""
PROGRAMS = """## On GPUs and TPUs, by their programs

XLA can compile for devices that are not there. The optimized program then shows how many bytes a
step moves, how many kernels it starts, and what it sends. These numbers have no noise, and say
nothing about seconds. The state is donated, and the gradients are given. `ours, train_step` is an
optax loop in which `update` divides the gradients, as in `gs.train_step`.

`python -m benchmarks programs`
"""
COLORS = ["#00798c", "#d1495b", "#edae49", "#66a182"]


def main(argv: Sequence[str] | None = None) -> None:
    """Writes `benchmarks.md` and `benchmarks.png`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default=RESULTS, metavar="DIR", help="folder of the results")
    parser.add_argument("--docs", default=DOCS, metavar="DIR", help="folder of the page")
    options = parser.parse_args(argv)
    write(Path(options.output), Path(options.docs))


def write(results: Path, docs: Path) -> None:
    """Makes the page and the picture in `docs` of all files in `results`."""
    devices = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    compiled = devices.pop(programs.NAME, None)
    if not devices:
        print(f"Nothing was measured: {results} has no results.")
        return
    docs.mkdir(parents=True, exist_ok=True)
    file = docs / "benchmarks.md"
    text = file.read_text() if file.exists() else ""
    marked = text if "<!-- results -->" in text else INTRODUCTION
    marked = between_marks(marked, page(devices, compiled))
    found = sorted((results / "devices").glob("*.json"), key=lambda path: path.stem)
    gpus = [json.loads(path.read_text()) for path in found]
    file.write_text(between_marks(marked, "\n".join(map(gpu_page, gpus)), "on a GPU"))
    picture(devices).savefig(docs / "benchmarks.png")
    if gpus:
        gpu_picture(gpus[0]).savefig(docs / "benchmarks-gpu.png")


# ── the page ─────────────────────────────────────────────────────────────────────────────────


def page(devices: dict[str, Any], compiled: dict[str, Any] | None = None) -> str:
    """The programs, and all claims on all devices, in Markdown."""
    parts = [section_of_programs(compiled)] if compiled else []
    parts.append(METHOD)
    for device, claims in devices.items():
        parts.append(f"## On {device}\n")
        parts += [section(name, claim) for name, claim in claims.items()]
    return "\n".join(parts)


def section(name: str, claim: dict[str, Any]) -> str:
    """A claim with its tables: one for each baseline, and one of the times."""
    cases = list(claim["cases"].values())
    versions = [f"{key} {value}" for key, value in claim["environment"].items() if value]
    runs = {f"{case['rounds']} rounds, {runs_of(case)}" for case in cases}
    names = list(dict.fromkeys(name for case in cases for name in variants(case)))
    parts = [f"### {claim['claim']}", f"`benchmarks/{name}.py`; {'; '.join(sorted(runs))}"]
    for baseline in dict.fromkeys(b for case in cases for b in case["baselines"]):
        others = [name for name in names if name != baseline]
        rows = [[ratio(case, other, baseline) for other in others] for case in cases]
        parts.append(f"Times over that of **{baseline}**:\n\n{table(cases, others, rows)}")
    title = "Milliseconds a step / seconds to compile"
    title += (
        " / part of the memory's bandwidth" if any(LIMIT in c["variants"] for c in cases) else ""
    )
    rows = [[times(case, name) for name in names] for case in cases]
    parts.append(f"{title}:\n\n{table(cases, names, rows)}")
    return "\n\n".join([*parts, ", ".join(versions) + ".", ""])


def section_of_programs(compiled: dict[str, Any]) -> str:
    """A table for the steps of optimizers and one for train steps, on GPUs and on meshes."""
    gpu = "on a GPU: bytes over those of optax / kernels / temporary MB"
    mesh = "on a mesh of TPUs: collectives (their bytes)"
    parts = [PROGRAMS]
    for trained, title in ((False, "Optimizer steps"), (True, "Train steps")):
        for on_mesh, what, cell in ((False, gpu, on_gpu), (True, mesh, sent)):
            cases = [
                case
                for case in compiled["cases"].values()
                if case["labels"]["device"].startswith("tpu") == on_mesh
                and case["labels"]["step"].startswith("train") == trained
            ]
            if cases:
                names = list(cases[0]["variants"])
                rows = [[cell(case["variants"], name) for name in names] for case in cases]
                parts.append(f"{title} {what}:\n\n{table(cases, names, rows)}\n")
    versions = [f"{key} {value}" for key, value in compiled["environment"].items() if value]
    return "\n".join([*parts, ", ".join(versions) + ".", ""])


def on_gpu(variants: dict[str, Any], name: str) -> str:
    """What a program moves and starts, and that it waits, if it does."""
    found, base = (programs.Program(**variants[each]) for each in (name, programs.OPTAX))
    moved = f"{base.moved / 1e6:.0f} MB" if name == programs.OPTAX else ""
    moved = moved or f"{found.moved / base.moved:.3f}"
    waits = f" / {found.conditionals} conditionals" if found.conditionals else ""
    return f"{moved} / {found.kernels} / {found.temp / 1e6:.2f}{waits}"


def sent(variants: dict[str, Any], name: str) -> str:
    """What the devices send each other."""
    collectives = programs.Program(**variants[name]).collectives
    return f"{len(collectives)} ({sum(collectives):,})" if collectives else "0"


def runs_of(case: dict[str, Any]) -> str:
    """How often a case was measured."""
    return "1 run" if case["repeats"] == 1 else f"{case['repeats']} runs"


def table(cases: list[Any], names: list[str], rows: list[list[str]]) -> str:
    """One row for each case."""
    labels = list(dict.fromkeys(label for case in cases for label in case["labels"]))
    lines = [[*labels, *names], ["---"] * len(labels) + ["---:"] * len(names)]
    for case, row in zip(cases, rows, strict=True):
        lines.append([*(case["labels"].get(label, "") for label in labels), *row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def variants(case: dict[str, Any]) -> list[str]:
    """The variants of a case, the missing ones last."""
    return [name for name in [*case["variants"], *case["missing"]] if name != LIMIT]


def ratio(case: dict[str, Any], name: str, baseline: str) -> str:
    """A ratio with its spread."""
    numbers = case["variants"].get(name, {}).get("ratios", {}).get(baseline)
    if numbers is None:
        return case["missing"].get(name, "").replace("|", "/")
    low, high = ("low", "high") if case["repeats"] > 1 else ("q1", "q3")
    return f"{numbers['median']:.3g} ({numbers[low]:.3g}-{numbers[high]:.3g})"


def times(case: dict[str, Any], name: str) -> str:
    """How long a step takes, and its compilation."""
    numbers = case["variants"].get(name)
    if numbers is None:
        return ""
    share = f" / {numbers['of_bandwidth']:.0%}" if "of_bandwidth" in numbers else ""
    return f"{numbers['ms']:.3g} / {numbers['compile_s']:.1f}{share}"


def gpu_page(results: dict[str, Any]) -> str:
    """The tables of what was measured on a GPU, with the device, versions and the date."""
    device = results["device"]
    parts = [results["about"]] if "about" in results else []
    torch = ""
    for name, part in results["parts"].items():
        cells = {title: cell for title, cell in part.items() if "variants" in cell}
        for title, cell in cells.items():
            torch = cell.get("environment", {}).get("torch", torch)
            heading = f"**{on_device.PARTS[name].claim}**: {title}"
            parts.append("\n".join([f"{heading}\n", *on_device.table(cell)]))
    versions = ["jax", "jaxlib", "optax"]
    said = [f"{key} {results['environment'][key]}" for key in versions]
    said += [f"torch {torch}"] if torch else []
    said += [results["date"]] if "date" in results else []
    memory = f"`a = a / 2 + b` on large arrays moves {device['gb_s']:.0f} GB/s"
    return "\n\n".join(
        [
            f"### {device['kind']}{', again' if 'about' in results else ''}",
            *parts,
            f"{memory}. {', '.join(said)}.",
            "",
        ]
    )


# ── the pictures ───────────────────────────────────────────────────────────────────────────────


def picture(devices: dict[str, Any]) -> Figure:
    """One panel a claim, one line a variant, one dot a case."""
    claims = list(dict.fromkeys(name for claims in devices.values() for name in claims))
    rows = {claim: lines(devices, claim) for claim in claims}
    heights = [len(names) + 2 for names in rows.values()]
    figure = Figure(figsize=(10, 0.34 * sum(heights)), dpi=110, layout="constrained")
    panels = figure.subplots(len(claims), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, claim in zip(panels, claims, strict=True):
        draw(axes, {d: c[claim] for d, c in devices.items() if claim in c}, rows[claim])
    return figure


def gpu_picture(results: dict[str, Any]) -> Figure:
    """Tokens a second and the memory of a language model's train step, by variant."""
    (title, cell), *_ = results["parts"]["language_model"].items()
    variants = dict(reversed(cell["variants"].items()))
    figure = Figure(figsize=(10, 0.7 + 0.36 * len(variants)), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    shown = (("tokens_s", 1e-3, "thousand tokens a second"), ("peak_gb", 1, "peak memory, GB"))
    for axes, (key, unit, label) in zip(panels, shown, strict=True):
        values = [unit * one[key] for one in variants.values()]
        colors = [COLORS[0] if name.startswith("gs.") else "#9aa5b8" for name in variants]
        bars = axes.barh(list(variants), values, color=colors)
        axes.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
        axes.set_xlabel(label, fontsize=9)
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    figure.suptitle(f"{results['device']['kind']}: {title}", fontsize=10, fontweight="bold")
    return figure


def lines(devices: dict[str, Any], claim: str) -> list[str]:
    """The variants of a claim that are held against another."""
    cases = [case for c in devices.values() if claim in c for case in c[claim]["cases"].values()]
    names = dict.fromkeys(name for case in cases for name in variants(case))
    measured = [name for name in names if any(name in case["variants"] for case in cases)]
    return [name for name in measured if any(name != first_baseline(case) for case in cases)]


def first_baseline(case: dict[str, Any]) -> str | None:
    """The first of the baselines that could be measured."""
    return next(iter(case["baselines"]), None)


def draw(axes: Any, devices: dict[str, Any], names: list[str]) -> None:
    """The ratios of one claim, with a bar at their median."""
    for color, (device, claim) in zip(COLORS * len(devices), devices.items(), strict=False):
        for height, name in enumerate(names):
            ratios = [
                case["variants"][name]["ratios"][first_baseline(case)]["median"]
                for case in claim["cases"].values()
                if name in case["variants"] and case["baselines"]
            ]
            if not ratios:
                continue
            axes.plot(ratios, [height] * len(ratios), "o", color=color, alpha=0.5, label=device)
            axes.plot(statistics.median(ratios), height, "|", color=color, ms=18, mew=3)
    example = next(iter(devices.values()))
    baseline = first_baseline(next(iter(example["cases"].values())))
    axes.axvline(1, color="#9aa5b8", zorder=0)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.45), max(high, 2.2))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(example["claim"], loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel(f"time / that of {baseline}", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if len(devices) > 1:
        handles, labels = axes.get_legend_handles_labels()
        one_each = dict(zip(labels, handles, strict=True))
        axes.legend(one_each.values(), one_each.keys())


if __name__ == "__main__":
    main()

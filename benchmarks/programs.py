"""What a step moves, starts and waits for on GPUs and TPUs, read from its compiled program.

XLA compiles for a device that is not there. The optimized program then says how many bytes a step
reads and writes, how many kernels it starts, and whether it waits for a conditional: facts without
noise. Only what needs the device is left out: the seconds, and the choice among the kernels of a
matrix product.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from . import harness, hlo, lowered

NAME = "programs"  # of the file of the results, which are those of no device
OPTAX, CHECKED = "optax", "optax.apply_if_finite"
CHOICES = {  # of everything, and of --quick
    "devices": ("h100 a100 v100 t4 tpu4 tpu256", "h100 tpu4"),
    "sets": ("one resnet50 gpt2 sharded", "one sharded"),
    "models": ("mlp transformer", "mlp"),
    "optimizers": ("sgd adam", "adam"),
    "dtypes": ("float32 float16", "float16"),
}
PACKAGES = ["gainstage", "jax", "optax", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "libtpu"]


class Program(NamedTuple):
    """What the optimized program of a step does, and takes up."""

    read: int  # bytes
    written: int
    kernels: int
    conditionals: int
    copies: int  # kernels that only copy
    temp: int  # bytes, beside arguments and results
    aliased: int  # bytes of arguments whose memory the results reuse
    collectives: list[int]  # the bytes of each
    compile_s: float

    @property
    def moved(self) -> int:
        """The bytes that are read or written."""
        return self.read + self.written


def program(lowered: Any, text: Path | None = None) -> Program:
    """Compiles a lowered step and reads its program; writes that into a file, if one is given."""
    start = time.perf_counter()
    executable = lowered.compile()
    seconds = time.perf_counter() - start
    if text is not None:
        text.write_text(executable.as_text())
    found, memory = hlo.counts(executable.as_text()), executable.memory_analysis()
    return Program(
        read=found.read,
        written=found.written,
        kernels=found.kernels,
        conditionals=found.conditionals,
        copies=found.copies,
        temp=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        collectives=list(found.collectives),
        compile_s=round(seconds, 1),
    )


class Case(NamedTuple):
    """The variants of a step, to be held against each other."""

    labels: dict[str, str]
    steps: dict[str, Callable[[], Any]]  # each returns what it has lowered

    @property
    def title(self) -> str:
        """The labels in one line."""
        return ", ".join(self.labels.values())


def cases(
    devices: Sequence[str],
    sets: Sequence[str],
    models: Sequence[str],
    optimizers: Sequence[str],
    dtypes: Sequence[str],
) -> Iterator[Case]:
    """The chosen ones that make sense: the set `sharded` is for a mesh, the others for a device."""
    for device, tensors, kind, dtype in product(devices, sets, optimizers, dtypes):
        if (tensors == "sharded") != (device in lowered.TPUS):
            continue
        cell = (device, tensors, kind, dtype)
        labels = {"device": device, "step": tensors, "optimizer": kind, "gradients": dtype}
        steps = lowered.OPTIMIZER_STEPS
        yield Case(labels, {n: partial(lowered.optimizer_step, n, *cell) for n in steps})
    for device, model in product(devices, models):
        cell = (device, model, "adam", "float16")
        labels = {"device": device, "step": f"train {model}", "optimizer": "adam"}
        labels["gradients"] = "float16"
        steps = lowered.TRAIN_STEPS
        yield Case(labels, {n: partial(lowered.train_step, n, *cell) for n in steps})


def table(title: str, programs: dict[str, Program]) -> Table:
    """One row a variant, with the ratios to optax."""
    result = Table(title=title)
    result.add_column("", no_wrap=True)
    headings = ["MB", "/ optax", "kernels", "/ optax", "conditionals", "copies", "temp MB",
                "reused MB", "collectives", "compiled in s"]  # fmt: skip
    for heading in headings:
        result.add_column(heading, justify="right")
    for name, p in programs.items():
        result.add_row(name, *row(p, programs[OPTAX]), f"{p.compile_s:.1f}")
    return result


def row(p: Program, base: Program) -> list[str]:
    """The numbers of a program, and the ratios to another."""
    collectives = f"{len(p.collectives)}, {sum(p.collectives):,} bytes" if p.collectives else "-"
    return [
        f"{p.moved / 1e6:.1f}", f"{p.moved / base.moved:.3f}",
        f"{p.kernels}", f"{p.kernels / base.kernels:.2f}",
        f"{p.conditionals}", f"{p.copies}",
        f"{p.temp / 1e6:.2f}", f"{p.aliased / 1e6:.1f}", collectives,
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles what was chosen, prints a table for each case, and keeps the numbers."""
    jax.config.update("jax_platforms", "cpu")  # the compilers for others need none of them here
    doc = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=doc)
    parser.add_argument("--quick", action="store_true", help="small sets, two devices")
    for name, (full, _) in CHOICES.items():
        parser.add_argument(f"--{name}", nargs="*", metavar="NAME", help=f"default: {full}")
    parser.add_argument("--variants", nargs="+", metavar="PART", help="of these beside optax only")
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder for the programs' text")
    parser.add_argument("--output", default=harness.RESULTS, type=Path, metavar="DIR")
    options = parser.parse_args(argv)
    defaults = {name: words[options.quick].split() for name, words in CHOICES.items()}
    chosen = {
        name: words if (words := getattr(options, name)) is not None else defaults[name]
        for name in CHOICES
    }
    for device in chosen["devices"]:
        if device not in CHOICES["devices"][0].split():
            parser.error(f"Expected one of {CHOICES['devices'][0]}; got {device}.")
        if message := lowered.missing(device):
            parser.error(message)
    run(list(cases(**chosen)), options)


def run(cases: list[Case], options: argparse.Namespace) -> None:
    """Compiles all variants of all cases; those of a case that is complete are kept."""
    printed = Console()
    printed = printed if printed.is_terminal else Console(width=140)
    columns = (TextColumn("{task.description:60.60}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(len(case.steps) for case in cases))
        for case in cases:
            programs = {}
            for name, step in case.steps.items():
                progress.update(task, description=f"{case.title}: {name}")
                if name == OPTAX or any(part in name for part in options.variants or [""]):
                    file = re.sub(r"\W+", "_", f"{case.title} {name}") + ".txt"
                    programs[name] = program(step(), options.text and options.text / file)
                progress.advance(task)
            printed.print(table(case.title, programs))
            if not options.variants:
                store(options.output, case, programs)


def store(folder: Path, case: Case, programs: dict[str, Program]) -> None:
    """Puts a case among the results; those of another environment go."""
    place = folder / f"{NAME}.json"
    results = json.loads(place.read_text()) if place.exists() else {}
    found = environment()
    kept = results.get("cases", {}) if results.get("environment") == found else {}
    variants = {name: program._asdict() for name, program in programs.items()}
    cell = {"labels": case.labels, "variants": variants}
    results = {"environment": found, "cases": {**kept, case.title: cell}}
    folder.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(results, indent=1) + "\n")


def environment() -> dict[str, str | None]:
    """What the numbers depend on, besides the code."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


if __name__ == "__main__":
    main()

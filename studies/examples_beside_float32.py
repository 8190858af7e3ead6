"""What each example ends with in float32, bfloat16 and float16: the table of `docs/examples.md`.

Each script runs as a user runs it, in a process of its own. A number of the table is one that the
script has printed. The lines are kept in `results/examples.json`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from benchmarks.harness import between_marks

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "examples.md", Path(__file__).parent / "results" / "examples.json"
DTYPES = "float32", "bfloat16", "float16"
ACCURACY = r"([\d.]+)% of the test images, loss ([\d.]+)"


class Example(NamedTuple):
    """How to run one, and which of the numbers that it prints are in the table."""

    measures: str  # what the numbers are
    numbers: str  # a pattern; of several lines that match, the last one counts
    words: tuple[str, ...] = ()  # of the command line
    is_one_dtype: bool = False  # whether `--dtype` says which; else each line begins with its dtype


EXAMPLES = {
    **{
        f"digits_{library}.py": Example("test images in %, and the loss at the end", ACCURACY)
        for library in ("optax", "nnx", "linen", "equinox", "haiku", "keras")
    },
    "digits_batch_norm.py": Example(
        "the same, and how many of three bad batches were skipped", ACCURACY + r".*, (\d+) steps"
    ),
    "small_loss.py": Example("squared error of a drawing", r"squared error ([\d.]+)"),
    "attention.py": Example("test images in %, and the loss at the end", ACCURACY),
    "microbatches.py": Example(
        "in four parts: test images in %, and MB of temporaries", r"in 4: ([\d.]+)%.*, ([\d.]+) MB"
    ),
    "fsdp.py": Example(
        "the loss on 8 devices, and how far from that on one",
        r"loss ([\d.]+) at the end, (\S+) from",
    ),
    "gan.py": Example("distance of made images from real ones", r"([\d.]+) \("),
    "language_model.py": Example(
        "validation loss, `--quick`", r"validation ([\d.]+)", ("--quick",), True
    ),
    "grpo.py": Example("reward, `--quick`", r"GRPO.*reward ([\d.]+)", ("--quick",), True),
    "multi_process.py": Example(
        "the loss on two processes", r"loss ([\d.]+)", ("--steps=40", "--devices=2"), True
    ),
}


def printed(script: str, *words: str) -> str:
    """What an example prints, in a new folder."""
    environment = {**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / script), *words]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return done.stdout


def rows_of(script: str, example: Example) -> dict[str, str]:
    """The numbers of one example by the name of the precision, as it has printed them."""
    if example.is_one_dtype:
        texts = {d: printed(script, *example.words, f"--dtype={d}") for d in DTYPES}
    else:
        texts = {}
        for line in printed(script, *example.words).splitlines():
            name = re.split(r"  +", line)[0]
            if name.startswith(DTYPES):
                texts[name] = texts.get(name, "") + line + "\n"
    found = {name: list(re.finditer(example.numbers, text)) for name, text in texts.items()}
    return {name: ", ".join(matches[-1].groups()) for name, matches in found.items() if matches}


def table(rows: dict[str, dict[str, str]]) -> str:
    """The rows in Markdown; what is beside the three dtypes has a row of its own, and examples that
    end alike share one."""
    lines = [
        "| example | what is measured | float32 | bfloat16 | float16 |",
        "|---|---|---:|---:|---:|",
    ]
    alike = groupby(EXAMPLES, key=lambda script: (EXAMPLES[script].measures, rows[script]))
    for (measures, own), scripts in alike:
        script = ", ".join(f"`{script}`" for script in scripts)
        cells = [own.get(dtype, "") for dtype in DTYPES]
        lines.append(" | ".join([f"| {script}", measures, *cells]) + " |")
        for name in own.keys() - set(DTYPES):
            lines.append(f"| {script}, {name} | {measures} | | | **{own[name]}** |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the examples, and writes the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=EXAMPLES, help="run these; keep the others")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    rows = json.loads(options.results.read_text()) if options.results.exists() else {}
    for script in track(options.only or list(EXAMPLES), "examples"):
        rows[script] = rows_of(script, EXAMPLES[script])
        options.results.write_text(json.dumps(rows, indent=2) + "\n")
    print(table(rows))
    if options.results == RESULTS:
        PAGE.write_text(between_marks(PAGE.read_text(), table(rows), "examples"))


if __name__ == "__main__":
    main()

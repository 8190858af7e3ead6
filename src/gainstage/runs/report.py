"""`gainstage report RUN.jsonl`: tables in the terminal, and a page or a plot of a run."""

import importlib
import math
import sys
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gainstage.runs.findings import Findings, Rows, findings, printable
from gainstage.runs.page import page
from gainstage.runs.run import read_run

SHOWN = 5  # tensors that underflow
WIDTH = 78  # of the text, for a terminal of 80 columns
LONG = 34  # characters of a rule, after which it is broken behind its bracket


def main(path: Path, output: Path) -> int:
    """Reads a run, prints its tables, and writes its page or its plot.

    Args:
        path: the file that `JsonLines` wrote.
        output: the file of the page, `.html`, or of the plot.

    Returns:
        The exit status: 0, or 1 if the run cannot be read or the output cannot be written.
    """
    title = printable(path.name)
    try:
        run = read_run(path)
        if output.exists() and output.samefile(path):
            raise ValueError(f"Expected another file than the run for the page; got {output}.")
        found = findings(run)
        if output.suffix.lower() == ".html":
            output.write_text(page(run, found, title), encoding="utf-8")
        else:
            picture = importlib.import_module("gainstage.runs.picture")
            picture.draw(run, title).savefig(output)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    _print(found, title)
    kind = "Page" if output.suffix.lower() == ".html" else "Picture"
    _console().print(f"\n{kind}: {printable(str(output), 4096)}", soft_wrap=True)
    return 0


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)


def _print(found: Findings, title: str) -> None:
    console = _console()
    numbers = Table(title=Text(title), show_header=False)
    numbers.add_column("")
    numbers.add_column("", justify="right")
    for name, number in found.headline.items():
        numbers.add_row(name, number)
    console.print(numbers)
    if found.overflows.rows:
        _print_rows(console, found.overflows)
    if found.underflow or found.underflow_summary:
        known = 1 if found.underflow_summary else 3  # an older recording has no rounding errors
        worst = []
        for name, *shares in found.underflow[:SHOWN]:
            worst.append((name, *(_percent(float(share)) for share in shares[known - 1 :])))
        more = len(found.underflow) - SHOWN
        notes = [f"and {more} more"] * (more > 0) + found.underflow_summary
        columns = ("Tensor", *("Off", "Unscaled", "Flushed", "Subnormal", "Zero")[known - 1 :])
        _print_rows(console, Rows("Underflow", columns, worst, "\n".join(notes)))
    _print_rows(console, found.replay)
    if found.advice:
        console.print("\nAdvice", style="bold")
    for sentence in found.advice:
        console.print(f"- {sentence}", style="none")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else "overflow" if math.isinf(share) else f"{share:.2%}"


def _print_rows(console: Console, table: Rows) -> None:
    result = Table(title=Text(table.title), box=box.SIMPLE_HEAD, padding=0)
    for column in table.columns:
        justify: Literal["left", "right"] = "right" if column != table.columns[0] else "left"
        result.add_column(column, justify=justify, overflow="fold")
    for first, *others in table.rows:
        broken = first.replace("(", "(\n ", 1) if len(first) > LONG else first
        result.add_row(Text(broken), *map(Text, others))
    console.print()
    if table.rows:
        console.print(result)
    else:
        console.print(table.title, style="bold")
    if table.note:
        console.print(table.note)

"""`gainstage report RUN.jsonl`: tables in the terminal, and a page or a plot of a run."""

import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gainstage.runs.curves import draw, drawing
from gainstage.runs.recording import NOTHING, Run, read_run
from gainstage.runs.render import render
from gainstage.runs.rows import Rows, printable
from gainstage.runs.summary import StepFile, Summary, summary

WIDTH = 78  # of the text, for a terminal of 80 columns
RULE = re.compile(r"\w+\(.*\)")
LONG_RULE = 34  # characters of a rule, after which it is broken behind its bracket


def main(path: Path, output: Path, step_files: Mapping[str, StepFile] = NOTHING) -> int:
    """Reads a run, prints its tables, and writes its page or its plot.

    Args:
        path: the file that `JsonLines` wrote.
        output: the file of the page, `.html`, or of the plot.
        step_files: the step files beside it, by the commands that look into them.

    Returns:
        The exit status: 0, or 1 if the run cannot be read or the output cannot be written.
    """
    title = printable(path.name)
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if start[8:] == b"{" and start[:1] != b"{":  # as safetensors begins
            raise ValueError(
                f"Expected a run that gainstage.diagnostics.JsonLines wrote in {path}; got a "
                f"file of arrays. If it is a step file, write: gainstage xray "
                f"{shlex.quote(str(path))} --loss MODULE:LOSS_FN"
            )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = read_run(path)
        for warning in told:
            print(warning.message, file=sys.stderr)
        if output.exists() and output.samefile(path):
            raise ValueError(f"Expected another file than the run for --output; got {output}.")
        shown = summary(run, step_files)
        if output.suffix.lower() == ".html":
            output.write_text(page(run, shown, title), encoding="utf-8")
        else:
            draw(run, shown.curves, shown.causes, title).savefig(output)
    except OSError as error:
        what, where, advice = "a page that can be written", output, "Pass another path to --output"
        if str(error.filename) == str(path):
            what, where = "a run that gainstage.diagnostics.JsonLines wrote", path
            advice = "Pass the path that JsonLines was given"
        got = f"{where} ({error.strerror})"
        print(f"Expected {what}; got {got}. {advice}.", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    numbers = Table(title=Text(title), show_header=False)
    numbers.add_column("")
    numbers.add_column("", justify="right")
    for name, number in shown.headline.items():
        numbers.add_row(name, number)
    console.print(numbers)
    for table in shown.tables:
        _print(console, table)
    if shown.advice:
        console.print("\nAdvice", style="bold")
    for sentence in shown.advice:
        console.print(f"- {sentence}", style="none")
    kind = "Page" if output.suffix.lower() == ".html" else "Picture"
    console.print(f"\n{kind}: {printable(str(output), 4096)}", soft_wrap=True)
    return 0


def page(run: Run, shown: Summary, title: str) -> str:
    """Returns the page of a run, as HTML.

    Args:
        run: the recorded run.
        shown: what it shows.
        title: the name of the run, as text.
    """
    curves = [(words, drawing(run, name, shown.causes)) for name, words in shown.curves.items()]
    return render("run.html", title, found=shown, curves=curves)


def _print(console: Console, table: Rows) -> None:
    """Prints a table with the lines above and below it, if it says anything."""
    if not (table.rows or table.lead or table.notes):
        return
    console.print(f"\n{table.title}", style="bold")
    for line in table.lead:
        console.print(line)
    if table.rows:
        result = Table(box=box.SIMPLE_HEAD, padding=0)
        for place, column in enumerate(table.columns):
            result.add_column(column, justify="right" if place else "left", overflow="fold")
        for first, *others in table.rows:
            is_long = len(first) > LONG_RULE and RULE.fullmatch(first)
            broken = first.replace("(", "(\n ", 1) if is_long else first
            result.add_row(Text(broken), *map(Text, others))
        console.print(result)
    for line in table.notes:
        console.print(line)

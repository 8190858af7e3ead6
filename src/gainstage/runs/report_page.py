"""The report on a recorded run as one HTML file."""

from gainstage.runs.curves import drawing
from gainstage.runs.findings import Findings
from gainstage.runs.recording import Run
from gainstage.runs.render import render


def page(run: Run, found: Findings, title: str) -> str:
    """Returns the page of a run, as HTML.

    Args:
        run: the recorded run.
        found: its findings.
        title: the name of the run, as text.
    """
    curves = [(words, drawing(run, name, found.causes)) for name, words in found.curves.items()]
    return render("run.html", title, found=found, curves=curves)

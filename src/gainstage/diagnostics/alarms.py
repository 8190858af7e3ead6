"""Alarms: a stand-in of the interface."""

from typing import NamedTuple

from gainstage.diagnostics.runs import Run
from gainstage.rules import LossScale


class Alarm(NamedTuple):
    """What was found, where, and what to do."""

    kind: str
    step: int
    message: str


def alarms_in(run: Run, rule: LossScale | None = None) -> list[Alarm]:
    """The alarms of a run."""
    return []

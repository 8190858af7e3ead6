"""Records runs and explains them: writers, alarms, reports, and the causes of bad steps."""

import importlib
from typing import TYPE_CHECKING, Any

from gainstage.runs.alarms import Alarm, Alarms, alarms_in
from gainstage.runs.recording import Run, read_run
from gainstage.runs.telemetry import Report, Underflow, report
from gainstage.runs.writers import JsonLines, Writer, described
from gainstage.xray.step_recorder import BadStep, StepRecorder, read_step
from gainstage.xray.xray import Cause, Remedy, Window, Xray, xray

if TYPE_CHECKING:
    from gainstage.runs.progress import ProgressBar as ProgressBar

__all__ = [
    "Alarm",
    "Alarms",
    "BadStep",
    "Cause",
    "JsonLines",
    "ProgressBar",
    "Remedy",
    "Report",
    "Run",
    "StepRecorder",
    "Underflow",
    "Window",
    "Writer",
    "Xray",
    "alarms_in",
    "described",
    "read_run",
    "read_step",
    "report",
    "xray",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "ProgressBar":  # imports rich, an extra
        return importlib.import_module("gainstage.runs.progress").ProgressBar
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

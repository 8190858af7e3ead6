"""Records runs and explains them: writers, alarms, reports, and the causes of bad steps."""

from gainstage._xray.step_recorder import BadStep, StepRecorder, read_step
from gainstage._xray.xray import Cause, LocalFactor, Remedy, Window, Xray
from gainstage.runs.alarms import Alarm, Alarms, alarms_in
from gainstage.runs.recording import Run, read_run
from gainstage.runs.telemetry import Report, Underflow, report, telemetry
from gainstage.runs.writers import JsonLines, Writer

__all__ = [
    "Alarm",
    "Alarms",
    "BadStep",
    "Cause",
    "JsonLines",
    "LocalFactor",
    "Remedy",
    "Report",
    "Run",
    "StepRecorder",
    "Underflow",
    "Window",
    "Writer",
    "Xray",
    "alarms_in",
    "read_run",
    "read_step",
    "report",
    "telemetry",
]


def __dir__() -> list[str]:
    return __all__

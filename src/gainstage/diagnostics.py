"""Records runs and explains them: writers, alarms, reports, and the causes of bad steps."""

from gainstage._core.boundary import largest_scale
from gainstage.runs.alarms import Alarm, Alarms, alarms_in
from gainstage.runs.log_probabilities import Mismatch, mismatch
from gainstage.runs.run import Run, read_run
from gainstage.runs.writers import JsonLines, Writer, described
from gainstage.xray.capsule import BadStep, Capsule, read_capsule
from gainstage.xray.xray import Cause, Remedy, Window, Xray, xray

__all__ = [
    "Alarm",
    "Alarms",
    "BadStep",
    "Capsule",
    "Cause",
    "JsonLines",
    "Mismatch",
    "Remedy",
    "Run",
    "Window",
    "Writer",
    "Xray",
    "alarms_in",
    "described",
    "largest_scale",
    "mismatch",
    "read_capsule",
    "read_run",
    "xray",
]

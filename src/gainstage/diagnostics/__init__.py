"""Records runs and explains them: writers, alarms, reports, and the causes of bad steps."""

from gainstage.diagnostics.alarms import Alarm, Alarms, alarms_in
from gainstage.diagnostics.boundary import largest_scale
from gainstage.diagnostics.capsule import BadStep, Capsule, read_capsule
from gainstage.diagnostics.log_probabilities import Mismatch, mismatch
from gainstage.diagnostics.runs import Run, read_run
from gainstage.diagnostics.writers import JsonLines, Writer, described
from gainstage.diagnostics.xrays import Cause, Remedy, Window, Xray, xray

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

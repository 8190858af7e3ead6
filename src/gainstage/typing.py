"""Types for annotations: states, and what a step returns."""

from gainstage._scaling.step_telemetry import StepInfo
from gainstage.rules import ScaleState
from gainstage.training.audit import AuditResult
from gainstage.training.audited_run import Audits
from gainstage.transforms.lint import Fault
from gainstage.transforms.loss_scale_state import LossScaleState

__all__ = ["AuditResult", "Audits", "Fault", "LossScaleState", "ScaleState", "StepInfo"]

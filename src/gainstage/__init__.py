"""Keras-style optimizers with static and dynamic loss scaling, on JAX."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from gainstage import fp8, schedules
from gainstage._lazy import lazy
from gainstage._telemetry import Report, Underflow, report, telemetry
from gainstage._to_optax import to_optax
from gainstage.adaptive import AdaptiveLossScale
from gainstage.bridge import functional, jit
from gainstage.local import locally_scaled
from gainstage.loss_scale_optimizer import LossScaleOptimizer
from gainstage.observed import StepInfo
from gainstage.optimizer import Optimizer
from gainstage.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, Lion, Optax, RMSprop
from gainstage.policy import Policy, global_policy, set_global_policy
from gainstage.rules import DynamicLossScale, FixedLossScale, LossScale, ScaleState
from gainstage.serialization import deserialize, get, serialize
from gainstage.transformation import (
    LossScaledState,
    apply_updates,
    loss_scale,
    loss_scaled,
    scale_loss,
    step_was_applied,
    value_and_grad,
)
from gainstage.variable import Variable

if TYPE_CHECKING:
    from gainstage import compat as compat
    from gainstage import diagnostics as diagnostics
    from gainstage import distributed as distributed
    from gainstage import interop as interop
else:
    __getattr__, __dir__ = lazy(globals(), "compat", "diagnostics", "distributed", "interop")

__version__ = _version("gainstage")

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveLossScale",
    "DynamicLossScale",
    "FixedLossScale",
    "Lion",
    "LossScale",
    "LossScaleOptimizer",
    "LossScaledState",
    "Optax",
    "Optimizer",
    "Policy",
    "RMSprop",
    "Report",
    "ScaleState",
    "StepInfo",
    "Underflow",
    "Variable",
    "apply_updates",
    "deserialize",
    "fp8",
    "functional",
    "get",
    "global_policy",
    "jit",
    "locally_scaled",
    "loss_scale",
    "loss_scaled",
    "report",
    "scale_loss",
    "schedules",
    "serialize",
    "set_global_policy",
    "step_was_applied",
    "telemetry",
    "to_optax",
    "value_and_grad",
]

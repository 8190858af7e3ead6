"""Train in float16 on JAX without losing small gradients: loss scaling and autocast."""

from typing import TYPE_CHECKING

from gainstage import schedules
from gainstage._base.lazy import lazy
from gainstage._scaling.step_telemetry import StepInfo
from gainstage._variables.bridge import functional, jit
from gainstage._variables.variable import Variable
from gainstage.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, Lion, Optax, RMSprop
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
from gainstage.optimizers.multi import MultiOptimizer
from gainstage.optimizers.optimizer import Optimizer
from gainstage.optimizers.serialization import deserialize, get, serialize
from gainstage.optimizers.to_optax import to_optax
from gainstage.precision import float8 as fp8
from gainstage.precision.autocast import autocast, keep_float32
from gainstage.precision.policy import Policy
from gainstage.rules import (
    AdaptiveLossScale,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    ScaleState,
)
from gainstage.runs.telemetry import Report, Underflow, report, telemetry
from gainstage.transforms.apply_updates import apply_updates, keep_if_applied, step_was_applied
from gainstage.transforms.locally_scaled import locally_scaled
from gainstage.transforms.loss_scaled import loss_scaled
from gainstage.transforms.loss_scaled_state import LossScaledState
from gainstage.transforms.models import WithLossScale
from gainstage.transforms.self_scaled import self_scaled
from gainstage.transforms.train_step import train_step
from gainstage.transforms.value_and_grad import loss_scale, scale_loss, value_and_grad
from gainstage.transforms.with_loss_scale import with_loss_scale

if TYPE_CHECKING:
    from gainstage import compat as compat
    from gainstage import diagnostics as diagnostics
    from gainstage import distributed as distributed
    from gainstage import interop as interop
else:
    __getattr__, __dir__ = lazy(globals(), "compat", "diagnostics", "distributed", "interop")

__version__ = "0.1.0"

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
    "MultiOptimizer",
    "Optax",
    "Optimizer",
    "Policy",
    "RMSprop",
    "Report",
    "ScaleState",
    "StepInfo",
    "Underflow",
    "Variable",
    "WithLossScale",
    "apply_updates",
    "autocast",
    "deserialize",
    "fp8",
    "functional",
    "get",
    "jit",
    "keep_float32",
    "keep_if_applied",
    "locally_scaled",
    "loss_scale",
    "loss_scaled",
    "report",
    "scale_loss",
    "schedules",
    "self_scaled",
    "serialize",
    "step_was_applied",
    "telemetry",
    "to_optax",
    "train_step",
    "value_and_grad",
    "with_loss_scale",
]

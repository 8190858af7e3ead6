"""Keras-style optimizers with static and dynamic loss scaling, on JAX."""

from importlib.metadata import version as _version

from gainstage import schedules
from gainstage.bridge import functional, jit
from gainstage.loss_scale import DynamicLossScale, FixedLossScale, LossScale, ScaleState
from gainstage.loss_scale_optimizer import LossScaleOptimizer
from gainstage.optimizer import Optimizer
from gainstage.optimizers import SGD, Adam
from gainstage.transformation import LossScaledState, loss_scaled, value_and_grad
from gainstage.variable import Variable

__version__ = _version("gainstage")

__all__ = [
    "SGD",
    "Adam",
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleOptimizer",
    "LossScaledState",
    "Optimizer",
    "ScaleState",
    "Variable",
    "functional",
    "jit",
    "loss_scaled",
    "schedules",
    "value_and_grad",
]

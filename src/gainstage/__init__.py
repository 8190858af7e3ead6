"""Train in float16 on JAX without losing small gradients: loss scaling and autocast.

Who owns the step?

    you                              TrainState, train_step
    you, and gradients pass          TrainState; or its parts: loss_scaled, value_and_grad,
      through your hands               apply_updates, select_if_applied, loss_scale, scale_loss
    a trainer that differentiates    autocast with `loss_scale`, loss_scaled
    an optimizer, as in Keras        LossScaleOptimizer, Variable, jit, functionalize
    Keras's `fit`                    interop.keras.LossScaleOptimizer

With any of them: `autocast` computes in half precision, and `keep_float32` keeps a part of that in
float32; `locally_scaled` scales a part of a network, `FixedLossScale`, `DynamicLossScale` and
`AdaptiveLossScale` are rules, and `telemetry` tells what a step did.

Modules: `optimizers`, `precision`, `diagnostics`, `distributed`, `interop`, `compat`, `typing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from gainstage import optimizers, precision, typing
from gainstage._variables.bridge import functionalize, jit
from gainstage._variables.variable import Variable
from gainstage.optimizers import LossScaleOptimizer
from gainstage.precision.autocast import autocast, keep_float32
from gainstage.rules import AdaptiveLossScale, DynamicLossScale, FixedLossScale, LossScale
from gainstage.runs.telemetry import telemetry
from gainstage.transforms.apply_updates import apply_updates, select_if_applied, step_was_applied
from gainstage.transforms.locally_scaled import locally_scaled
from gainstage.transforms.loss_scaled import loss_scaled
from gainstage.transforms.train_state import TrainState
from gainstage.transforms.train_step import train_step
from gainstage.transforms.value_and_grad import loss_scale, scale_loss, value_and_grad

_LAZY = ("compat", "diagnostics", "distributed", "interop")  # imported when they are first used

if TYPE_CHECKING:
    from gainstage import compat as compat
    from gainstage import diagnostics as diagnostics
    from gainstage import distributed as distributed
    from gainstage import interop as interop
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return import_module(f"gainstage.{name}")
        advice = ""
        if name == "GradScaler":
            advice = ". Wrap the optimizer: tx = gainstage.loss_scaled(tx). See docs/from/torch.md."
        elif name in ("from_torch", "from_flax"):
            advice = ". It is in gainstage.interop.importers."
        raise AttributeError(f"module 'gainstage' has no attribute {name!r}{advice}")


def __dir__() -> list[str]:
    return [*__all__, *_LAZY]


__version__ = "0.1.0"

__all__ = [
    "AdaptiveLossScale",
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleOptimizer",
    "TrainState",
    "Variable",
    "apply_updates",
    "autocast",
    "functionalize",
    "jit",
    "keep_float32",
    "locally_scaled",
    "loss_scale",
    "loss_scaled",
    "optimizers",
    "precision",
    "scale_loss",
    "select_if_applied",
    "step_was_applied",
    "telemetry",
    "train_step",
    "typing",
    "value_and_grad",
]

"""Train JAX models in bfloat16, float16 and float8, written in float32: autocast, loss scaling.

Who owns the step?

    you                              TrainState, train_step
    you, and gradients pass          TrainState; or, in a chain of optax, with_loss_scale,
      through your hands               value_and_grad and the module `transforms`
    a trainer that differentiates    autocast with `loss_scale`, skip_nonfinite
    an optimizer, as in Keras        the module `optimizers`
    Keras's `fit`                    interop.keras.compile

With any of them: `autocast` computes in half precision, `keep_float32` keeps a part of that in
float32, and `half_only` gives a fused kernel half precision; `FixedLossScale`, `DynamicLossScale`
and `AdaptiveLossScale` are rules; `advise` says what each precision costs, `audit` how far a step
is off float32, `mend` takes the lines that spoil it back into float32, `lint` says whether a step
of your own scales its loss once and divides once, and `xray` where a step overflows. `save` and
`load` keep a state in a file.

Modules: `transforms`, `optimizers`, `precision`, `diagnostics`, `distributed`, `interop`, `compat`,
`typing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from gainstage import optimizers, precision, transforms, typing
from gainstage.precision.advice import advise
from gainstage.precision.autocast import autocast, keep_float32
from gainstage.precision.half_only import half_only
from gainstage.rules import AdaptiveLossScale, DynamicLossScale, FixedLossScale, LossScale
from gainstage.saving.state_file import load, save
from gainstage.training.audit import audit
from gainstage.training.mending import mend
from gainstage.training.train_step import train_step
from gainstage.transforms.lint import lint
from gainstage.transforms.train_state import TrainState
from gainstage.transforms.value_and_grad import value_and_grad
from gainstage.transforms.with_loss_scale import skip_nonfinite, with_loss_scale

_LAZY = ("compat", "diagnostics", "distributed", "interop")  # imported when they are first used
_WITH_NAMES = ("transforms", "optimizers", "precision", "diagnostics", "distributed", "typing")

if TYPE_CHECKING:
    from gainstage import compat as compat
    from gainstage import diagnostics as diagnostics
    from gainstage import distributed as distributed
    from gainstage import interop as interop
    from gainstage._xray.xray import xray as xray
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return import_module(f"gainstage.{name}")
        if name == "xray":
            return import_module("gainstage._xray.xray").xray
        advice = ""
        if name in ("GradScaler", "DynamicScale"):
            advice = ". Write gainstage.TrainState.create(params, tx), which has the loss scale."
        elif name in ("from_torch", "from_flax"):
            advice = ". It is in gainstage.interop.importers."
        elif name == "keras":
            advice = ". It is gainstage.interop.keras."
        elif not name.startswith("_"):
            modules = (import_module(f"gainstage.{module}") for module in _WITH_NAMES)
            found = [module.__name__ for module in modules if name in module.__all__]
            advice = f". It is {found[0]}.{name}." if found else ""
        raise AttributeError(f"module 'gainstage' has no attribute {name!r}{advice}")


def __dir__() -> list[str]:
    return [*__all__, *_LAZY]


__version__ = "0.1.0"

__all__ = [
    "AdaptiveLossScale",
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "TrainState",
    "advise",
    "audit",
    "autocast",
    "half_only",
    "keep_float32",
    "lint",
    "load",
    "mend",
    "optimizers",
    "precision",
    "save",
    "skip_nonfinite",
    "train_step",
    "transforms",
    "typing",
    "value_and_grad",
    "with_loss_scale",
    "xray",
]

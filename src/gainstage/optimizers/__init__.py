"""Keras-style optimizers, with the formulas of `keras.optimizers`: each update rule in a file.

Their wrapper `LossScaleOptimizer` is here too, with the variables that they train, and `jit` and
`functionalize` for code that assigns to variables. Rooms above may import all of it.
"""

from gainstage._variables.bridge import functionalize, jit
from gainstage._variables.variable import Variable
from gainstage.optimizers import schedules
from gainstage.optimizers.adadelta import Adadelta
from gainstage.optimizers.adagrad import Adagrad
from gainstage.optimizers.adam import Adam, AdamW
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
from gainstage.optimizers.optimizer import Optimizer
from gainstage.optimizers.rmsprop import RMSprop
from gainstage.optimizers.serialization import deserialize, get, serialize
from gainstage.optimizers.sgd import SGD
from gainstage.optimizers.wrapped_optax import from_optax

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "LossScaleOptimizer",
    "Optimizer",
    "RMSprop",
    "Variable",
    "deserialize",
    "from_optax",
    "functionalize",
    "get",
    "jit",
    "schedules",
    "serialize",
]


def __dir__() -> list[str]:
    return __all__

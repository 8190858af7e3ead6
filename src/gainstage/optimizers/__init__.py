"""The Keras face: one optimizer per file, each update rule as in its paper, and their wrapper.

Users import them from `gainstage`; rooms above may import all of it.
"""

from gainstage.optimizers.adadelta import Adadelta
from gainstage.optimizers.adagrad import Adagrad
from gainstage.optimizers.adam import Adam, AdamW
from gainstage.optimizers.from_optax import Optax
from gainstage.optimizers.lion import Lion
from gainstage.optimizers.rmsprop import RMSprop
from gainstage.optimizers.sgd import SGD

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Lion", "Optax", "RMSprop"]

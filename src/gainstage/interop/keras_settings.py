"""The settings of an optimizer in Keras: what a compiled step has as constants."""

from collections.abc import Hashable
from typing import Any

from gainstage.interop.keras_backend import keras
from gainstage.optimizers._step.options import ARGUMENTS, OPTIONS
from gainstage.optimizers.optimizer import Optimizer

CONSTANTS = (bool, int, float, str, tuple, type(None))  # the types of settings


def constants(optimizer: Any) -> Hashable:
    """The numbers and flags of an optimizer, and its learning rate unless that is a variable: if
    one has changed, an eager step is compiled again."""
    rate: Any = optimizer._learning_rate
    ours = getattr(optimizer, "_ours", None)
    kept = (keras.optimizers.schedules.LearningRateSchedule, keras.Variable)
    if ours is None and callable(rate) and not isinstance(rate, kept):
        now: Any = rate()  # as Keras does in each step
        rate = float(now)
    rate = None if isinstance(rate, keras.Variable) else rate
    each = {**vars(optimizer), **vars(optimizer if ours is None else ours)}
    schedule = getattr(rate, "__dict__", {})
    each |= {f"learning_rate.{name}": value for name, value in schedule.items()}
    own = [(name, value) for name, value in each.items() if isinstance(value, CONSTANTS)]
    return rate, *own, *(getattr(optimizer, name, None) for name in OPTIONS)


def own_settings(optimizer: Optimizer) -> set[str]:
    """The arguments that only this class of optimizers has, such as `momentum`."""
    return set(type(optimizer).__signature__.parameters) - {"learning_rate", *OPTIONS, *ARGUMENTS}

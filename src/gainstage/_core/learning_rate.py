"""The learning rate of an optimizer: a number that can change, a schedule, or a callable."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._core import checks
from gainstage._core.configurable import serialize
from gainstage._core.variable import Variable, is_tracing
from gainstage.schedules import LearningRateSchedule


class LearningRate:
    """What an optimizer was given as `learning_rate`: a number, or a callable.

    A number lives in a variable, so that a compiled step takes a new one without being compiled
    again. A callable of the step is traced into the step; a callable of no argument is called by
    Python, once per eager step, and its value enters the step as an argument. Inside of a traced
    function, which would keep its first value, the latter is an error.

    Raises:
        TypeError: neither a number nor a callable of at most one argument.
        ValueError: a number that is not finite in float32.
    """

    def __init__(self, source: Any, owner: str):
        self.source, self._owner = source, owner
        self.variable: Variable | None = None
        self._takes_step = False
        if not callable(source) or isinstance(source, Variable):
            number = source.value() if isinstance(source, Variable) else source
            number = checks.real("learning_rate", number)
            if abs(number) > float(np.finfo(np.float32).max):
                raise ValueError(
                    f"Expected a number that float32 holds for learning_rate; got {number!r}."
                )
            name = f"{owner}/learning_rate"
            self.variable = Variable(number, jnp.float32, name, trainable=False)
        else:
            self._takes_step = _takes_step(source)

    @property
    def is_called(self) -> bool:
        """Whether Python calls it once per eager step."""
        return self.variable is None and not self._takes_step

    def now(self) -> jax.Array | None:
        """The value to pass to a compiled step; None where the step finds its rate itself.

        Raises:
            ValueError: a callable of no argument, inside of a traced function.
        """
        if not self.is_called:
            return None
        if is_tracing():
            raise ValueError(
                f"The learning rate of {self._owner!r} is a callable of no argument, whose value "
                f"would be a constant of the compiled function. Use a schedule or callable of the "
                f"step, or a number, and assign `learning_rate` between steps."
            )
        rate = self.source()
        if isinstance(rate, Variable):
            rate = rate.value()
        if isinstance(rate, jax.Array):
            return rate.astype(jnp.float32)
        return jax.device_put(np.float32(checks.real("the result of learning_rate()", rate)))

    def at(self, step: jax.Array, number: jax.Array | None = None) -> jax.Array:
        """The rate of the step after `step` others, given the number that its variable holds."""
        if self.variable is not None:
            return self.variable.value() if number is None else number
        if self._takes_step:
            return jnp.asarray(self.source(step), jnp.float32)
        rate = self.now()
        assert rate is not None
        return rate

    def get_config(self) -> Any:
        """A number, a schedule's description, or the callable itself."""
        if self.variable is not None:
            return checks.shortest(self.variable)
        if isinstance(self.source, LearningRateSchedule):
            return serialize(self.source)
        return self.source


def _takes_step(rate: Callable[..., Any]) -> bool:
    """Whether a callable wants an argument: one without a default, or any number of them."""
    parameters = inspect.signature(rate).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    if len(positional) > 1 or len(positional) < len(required):
        raise TypeError(
            f"Expected learning_rate to be a number, a schedule, or a callable of the step or of "
            f"nothing; got {rate!r}."
        )
    return bool(positional)

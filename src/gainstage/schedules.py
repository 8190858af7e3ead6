"""Learning-rate schedules with Keras names and configurations, over optax."""

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gainstage import checks
from gainstage.configurable import serialize
from gainstage.variable import Variable


class LearningRateSchedule(abc.ABC):
    """A learning rate as a function of the step; subclass it, as a frozen dataclass, for your own.

    Source: `keras.optimizers.schedules.LearningRateSchedule`.
    """

    @abc.abstractmethod
    def __call__(self, step: jax.Array) -> jax.Array:
        """The rate at `step`, the number of steps taken before: an int32 scalar, maybe traced."""

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, for a schedule that is a dataclass."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The schedule that `get_config` describes."""
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: steps after which the rate has been multiplied by `decay_rate` once, >= 1.
        decay_rate: the factor, > 0.
        staircase: whether the exponent is rounded down to an integer.
        name: kept for configurations.

    Raises:
        TypeError: an argument is no number, or a bool.
        ValueError: an argument is out of range.

    Example:
        >>> import gainstage as gs
        >>> rate = gs.schedules.ExponentialDecay(0.4, decay_steps=1, decay_rate=0.5)
        >>> print(rate(0), rate(2))
        0.4 0.1

    Source: `keras.optimizers.schedules.ExponentialDecay`.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str = "ExponentialDecay"

    def __post_init__(self) -> None:
        checks.real("initial_learning_rate", self.initial_learning_rate)
        checks.real("decay_steps", self.decay_steps, above=0)
        checks.real("decay_rate", self.decay_rate, above=0)

    def __call__(self, step: jax.Array) -> jax.Array:
        decay = optax.exponential_decay(
            self.initial_learning_rate,
            transition_steps=self.decay_steps,
            decay_rate=self.decay_rate,
            staircase=self.staircase,
        )
        return jnp.asarray(decay(step), jnp.float32)


class LearningRate:
    """What an optimizer was given as `learning_rate`: a number, or a callable.

    A number lives in a variable, so that a compiled step takes a new one without being compiled
    again. A callable of the step is traced into the step; a callable of no argument is called by
    Python, once per eager step, and its value enters the step as an argument.

    Raises:
        TypeError: neither a number nor a callable of at most one argument.
        ValueError: a number that is not finite.
    """

    def __init__(self, source: Any, owner: str):
        self.source = source
        self.variable: Variable | None = None
        self._takes_step = False
        if not callable(source) or isinstance(source, Variable):
            number = source.value() if isinstance(source, Variable) else source
            number = checks.real("learning_rate", number)
            self.variable = Variable(number, jnp.float32, name=f"{owner}/learning_rate")
        else:
            self._takes_step = _takes_step(source)

    def now(self) -> jax.Array | None:
        """The value to pass to a compiled step; None where the step finds its rate itself."""
        if self.variable is not None or self._takes_step:
            return None
        rate = self.source()
        if isinstance(rate, Variable):
            rate = rate.value()
        if isinstance(rate, jax.Array):
            return rate.astype(jnp.float32)
        return jax.device_put(np.float32(checks.real("the result of learning_rate()", rate)))

    def at(self, step: jax.Array) -> jax.Array:
        """The rate of the step after `step` others."""
        if self.variable is not None:
            return self.variable.value()
        if self._takes_step:
            return jnp.asarray(self.source(step), jnp.float32)
        rate = self.now()
        assert rate is not None
        return rate

    def get_config(self) -> Any:
        """A number, a schedule's description, or the callable itself."""
        if self.variable is not None:
            return float(str(np.float32(self.variable)))  # 0.1, not 0.10000000149011612
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

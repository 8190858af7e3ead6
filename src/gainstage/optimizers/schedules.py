"""Learning-rate schedules with Keras's names and configurations, most of them built on optax."""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from gainstage._base import checks, configurable
from gainstage._base.configurable import Fields

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "deserialize",
    "serialize",
]


def __dir__() -> list[str]:
    return __all__


def _number(name: str, value: Any, **bounds: float) -> int | float:
    """Returns `value` as a Python number, checked against the bounds: an int if it is an integer of
    32 bits, which JAX takes."""
    if hasattr(value, "assign"):  # a variable: of ours, or of Keras, which this does not import
        value = value.value() if callable(value.value) else value.value
    number = checks.real(name, value, **bounds)
    value = value.item() if isinstance(value, (np.generic, np.ndarray, jax.Array)) else value
    return int(number) if isinstance(value, int) and abs(number) < 2**31 else number


def _number_or_none(name: str, value: Any) -> int | float | None:
    return None if value is None else _number(name, value)


def _checked_numbers(name: str, value: Any) -> tuple[int | float, ...]:
    listed = isinstance(value, (Sequence, np.ndarray, jax.Array))
    if isinstance(value, (str, bytes)) or not listed:
        raise TypeError(f"Expected a list of numbers for {name}; got {value!r}.")
    return tuple(_number(name, number) for number in value)


# The fields of schedules: their types, each with the check of a value, `(name, value) -> value`.
Number = Annotated[float, _number]
Positive = Annotated[float, functools.partial(_number, above=0)]
Steps = Annotated[int, functools.partial(_number, above=0)]
Bool = Annotated[bool, checks.flag]


class LearningRateSchedule(Fields, abc.ABC):
    """A learning rate as a function of the step. Subclass it, as a frozen dataclass, for your own.

    The schedules here take a variable of Gainstage or Keras for a number, such as the rate of an
    optimizer. They store its current value.

    Examples:
        >>> import dataclasses
        >>> from gainstage.optimizers import schedules
        >>> @dataclasses.dataclass(frozen=True)
        ... class Inverse(schedules.LearningRateSchedule):
        ...     first: float
        ...     def __call__(self, step):
        ...         return self.first / (1 + step)
        >>> print(Inverse(0.5)(4))
        0.1

    Source: `keras.optimizers.schedules.LearningRateSchedule`.
    """

    def __post_init__(self) -> None:
        """Checks the fields, each as its annotation says."""
        for field in dataclasses.fields(cast(Any, self)):
            for check in getattr(field.type, "__metadata__", ()):
                value = check(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, value)

    @abc.abstractmethod
    def __call__(self, step: jax.Array) -> jax.Array:
        """Returns the rate at `step`, an int32 scalar: the number of earlier steps."""

    def get_config(self) -> dict[str, Any]:
        if not dataclasses.is_dataclass(self):
            raise NotImplementedError(
                f"{type(self).__name__} must define get_config, or be a frozen dataclass."
            )
        return super().get_config()


@dataclasses.dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """`initial_learning_rate * decay_rate ** (step / decay_steps)`.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: the number of steps in which the rate is multiplied by `decay_rate` once, > 0.
        decay_rate: the factor, > 0.
        staircase: whether the exponent is rounded down to an integer.
        name: stored in the configuration.

    Raises:
        TypeError: an argument is not a number, or is a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> rate = gs.optimizers.schedules.ExponentialDecay(0.4, decay_steps=1, decay_rate=0.5)
        >>> print(rate(0), rate(2))
        0.4 0.1

    Source: `keras.optimizers.schedules.ExponentialDecay`.
    """

    initial_learning_rate: Number
    decay_steps: Steps
    decay_rate: Positive
    staircase: Bool = False
    name: str = "ExponentialDecay"

    def __call__(self, step: ArrayLike) -> jax.Array:
        decay = optax.exponential_decay(
            self.initial_learning_rate,
            transition_steps=self.decay_steps,
            decay_rate=self.decay_rate,
            staircase=self.staircase,
        )
        return jnp.asarray(decay(step), jnp.float32)


@dataclasses.dataclass(frozen=True)
class InverseTimeDecay(LearningRateSchedule):
    """`initial_learning_rate / (1 + decay_rate * step / decay_steps)`.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: the number of steps per period of decay, > 0.
        decay_rate: the decay per period.
        staircase: whether `step / decay_steps` is rounded down to an integer.
        name: stored in the configuration.

    Raises:
        TypeError: an argument is not a number, or is a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> rate = gs.optimizers.schedules.InverseTimeDecay(0.5, decay_steps=1, decay_rate=0.5)
        >>> print(rate(0), rate(2))
        0.5 0.25

    Source: `keras.optimizers.schedules.InverseTimeDecay`.
    """

    initial_learning_rate: Number
    decay_steps: Steps
    decay_rate: Number
    staircase: Bool = False
    name: str = "InverseTimeDecay"

    def __call__(self, step: ArrayLike) -> jax.Array:
        periods = jnp.asarray(step, jnp.float32) / self.decay_steps
        periods = jnp.floor(periods) if self.staircase else periods
        return self.initial_learning_rate / (1 + self.decay_rate * periods)


@dataclasses.dataclass(frozen=True)
class PolynomialDecay(LearningRateSchedule):
    """Decays to `end_learning_rate` along `(1 - step / decay_steps)**power`.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: the step at which the decay ends, > 0.
        end_learning_rate: the rate from then on.
        power: the exponent; 1 for linear decay.
        cycle: whether to decay again, over the next multiple of `decay_steps`, instead of staying
            at the end.
        name: stored in the configuration.

    Raises:
        TypeError: an argument is not a number, or is a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> from gainstage.optimizers import schedules
        >>> rate = schedules.PolynomialDecay(1.0, decay_steps=4, end_learning_rate=0.0)
        >>> print(rate(1), rate(9))
        0.75 0.0

    Source: `keras.optimizers.schedules.PolynomialDecay`.
    """

    initial_learning_rate: Number
    decay_steps: Steps
    end_learning_rate: Number = 0.0001
    power: Number = 1.0
    cycle: Bool = False
    name: str = "PolynomialDecay"

    def __call__(self, step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        cycles = jnp.maximum(jnp.ceil(step / self.decay_steps), 1) if self.cycle else 1
        end = self.decay_steps * cycles
        decay = optax.polynomial_schedule(1.0, 0.0, self.power, 1)
        share = jnp.asarray(decay(jnp.minimum(step, end) / end))
        span = self.initial_learning_rate - self.end_learning_rate
        return jnp.asarray(span * share + self.end_learning_rate, jnp.float32)


@dataclasses.dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """Half a cosine from the rate down to `alpha` times it, after an optional linear warm-up.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: the length of the decay, > 0.
        alpha: the final rate as a share of the rate that decays.
        name: stored in the configuration.
        warmup_target: the rate at the end of the warm-up, where the decay starts; None for no
            warm-up.
        warmup_steps: the length of the warm-up, >= 0.

    Raises:
        TypeError: an argument is not a number, or is a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> rate = gs.optimizers.schedules.CosineDecay(0.0, 10, warmup_target=1.0, warmup_steps=10)
        >>> print(rate(5), rate(10), rate(20))
        0.5 1.0 0.0

    Source: `keras.optimizers.schedules.CosineDecay`; Loshchilov and Hutter, 2016,
    arXiv:1608.03983.
    """

    initial_learning_rate: Number
    decay_steps: Steps
    alpha: Number = 0.0
    name: str = "CosineDecay"
    warmup_target: Annotated[float | None, _number_or_none] = None
    warmup_steps: Annotated[int, functools.partial(checks.integer, low=0)] = 0

    def __call__(self, step: ArrayLike) -> jax.Array:
        start = self.initial_learning_rate
        peak = start if self.warmup_target is None else self.warmup_target
        rate = optax.cosine_decay_schedule(peak, self.decay_steps, self.alpha)
        if self.warmup_target is not None and self.warmup_steps:
            warmup = optax.linear_schedule(start, peak, self.warmup_steps)
            rate = optax.join_schedules([warmup, rate], [self.warmup_steps])
        return jnp.asarray(rate(step), jnp.float32)


@dataclasses.dataclass(frozen=True)
class CosineDecayRestarts(LearningRateSchedule):
    """Half a cosine from the rate down to `alpha` times it, repeated. Each period is `t_mul` times
    as long as the one before, and starts at `m_mul` times its rate.

    Args:
        initial_learning_rate: the rate at step 0.
        first_decay_steps: the length of the first period, > 0.
        t_mul: the ratio of a period's length to the one before, >= 1.
        m_mul: the ratio of a period's first rate to the one before.
        alpha: the share of `initial_learning_rate` that remains at the end of each period.
        name: stored in the configuration.

    Raises:
        TypeError: an argument is not a number, or is a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> rate = gs.optimizers.schedules.CosineDecayRestarts(1.0, first_decay_steps=2, m_mul=0.5)
        >>> print(rate(0), rate(2), rate(6))
        1.0 0.5 0.25

    Source: `keras.optimizers.schedules.CosineDecayRestarts`; Loshchilov and Hutter, 2016,
    arXiv:1608.03983.
    """

    initial_learning_rate: Number
    first_decay_steps: Steps
    t_mul: Annotated[float, functools.partial(_number, low=1)] = 2.0
    m_mul: Number = 1.0
    alpha: Number = 0.0
    name: str = "SGDRDecay"

    def __call__(self, step: ArrayLike) -> jax.Array:
        growth, periods = self.t_mul, jnp.asarray(step, jnp.float32) / self.first_decay_steps

        def start(number: jax.Array) -> jax.Array:
            """The start of a period, in lengths of the first."""
            return number if growth == 1 else (jnp.power(growth, number) - 1) / (growth - 1)

        number = periods if growth == 1 else jnp.log1p(periods * (growth - 1)) / math.log(growth)
        number = jnp.floor(number)
        # Rounding can put the first step of a period into its neighbour.
        reached = periods * (1 + 1e-6)
        number += jnp.where(reached >= start(number + 1), 1, 0)
        number -= jnp.where(reached < start(number), 1, 0)
        share = (periods - start(number)) / jnp.power(growth, number)
        cosine = 0.5 * jnp.power(self.m_mul, number) * (1 + jnp.cos(jnp.pi * jnp.clip(share, 0, 1)))
        rate = self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)
        return jnp.asarray(rate, jnp.float32)


@dataclasses.dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """`values[i]` up to and including step `boundaries[i]`, then the last value.

    Args:
        boundaries: steps, in ascending order.
        values: rates, one more than boundaries.
        name: stored in the configuration.

    Raises:
        TypeError: an argument is not a list, or an element is not a number, or is a bool.
        ValueError: the lengths do not fit, or the boundaries do not ascend.

    Examples:
        >>> import gainstage as gs
        >>> rate = gs.optimizers.schedules.PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.25])
        >>> print(rate(10), rate(11), rate(30))
        1.0 0.5 0.25

    Source: `keras.optimizers.schedules.PiecewiseConstantDecay`.
    """

    boundaries: Annotated[Sequence[int], _checked_numbers]
    values: Annotated[Sequence[float], _checked_numbers]
    name: str = "PiecewiseConstant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.boundaries) != len(self.values) - 1:
            raise ValueError(
                f"Expected one value more than boundaries; got {len(self.boundaries)} boundaries "
                f"and {len(self.values)} values."
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"Expected boundaries to ascend; got {self.boundaries}.")

    def __call__(self, step: ArrayLike) -> jax.Array:
        constants = [optax.constant_schedule(value) for value in self.values]
        # Clip to 32 bits: JAX takes no larger integers, and no step is larger.
        later = [math.floor(max(min(b, 2**31 - 2), -(2**31))) + 1 for b in self.boundaries]
        return jnp.asarray(optax.join_schedules(constants, later)(step), jnp.float32)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, with lists for sequences."""
        return {**super().get_config(), "boundaries": [*self.boundaries], "values": [*self.values]}


def serialize(schedule: LearningRateSchedule) -> dict[str, Any]:
    """Returns the configuration of a schedule, with the name of its class.

    Raises:
        TypeError: `schedule` is no schedule.

    Examples:
        >>> from gainstage.optimizers import schedules
        >>> config = schedules.serialize(schedules.ExponentialDecay(0.1, 1000, 0.5))
        >>> print(config["class_name"], schedules.deserialize(config)(1000))
        ExponentialDecay 0.05

    Source: `keras.optimizers.schedules.serialize`.
    """
    if not isinstance(schedule, LearningRateSchedule):
        raise TypeError(f"Expected a schedule of gainstage; got {schedule!r}.")
    return configurable.description_of(schedule)


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
) -> LearningRateSchedule:
    """Returns the schedule of a configuration, the inverse of `serialize`.

    Args:
        config: the result of `serialize`, or of Keras for a schedule of the same name.
        custom_objects: your own classes by name.

    Raises:
        ValueError: `config` is no such configuration, or its class is unknown.

    Source: `keras.optimizers.schedules.deserialize`.
    """
    return configurable.object_from(config, LearningRateSchedule, custom_objects)

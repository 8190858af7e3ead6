"""Adagrad."""

import operator
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gainstage._scaling.gradients import with_square
from gainstage._variables.types import Rate
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.options import OptimizerOptions, Setting, within
from gainstage.optimizers.optimizer import Optimizer


class Adagrad(Optimizer):
    """Adagrad:

        a += g**2
        w -= learning_rate * g / sqrt(a + epsilon)

    Args:
        learning_rate: a number, schedule or callable.
        initial_accumulator_value: the first value of `a`, >= 0.
        epsilon: a number >= 0, added to `a`.
        *options, **named_options: options of every `Optimizer`, `weight_decay` first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable(10.0)
        >>> opt = gs.optimizers.Adagrad(learning_rate=0.1)
        >>> loss = opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(round(float(var), 4))
        9.9001

    Source: `keras.optimizers.Adagrad`; Duchi et al., 2011.
    """

    initial_accumulator_value: Setting[float] = Setting(
        check=within(low=0), needs_state=operator.ne
    )
    epsilon: Setting[float] = Setting(check=within(low=0))

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        *options: Any,
        **named_options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, *options, **named_options)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)

        def start(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            return jnp.full(shape, self.initial_accumulator_value, dtype)

        self.accumulators: list[Variable] = self.add_optimizer_variables(
            var_list, "accumulator", start
        )

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        a = self.accumulators[self._get_variable_index(variable)]
        gradient = with_square(gradient)
        self.assign_add(a, jnp.square(gradient))
        self.assign_sub(variable, learning_rate * gradient / jnp.sqrt(a.value() + self.epsilon))

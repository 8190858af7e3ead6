"""Lion."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from gainstage._variables.types import Rate
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.options import OptimizerOptions, Setting, within
from gainstage.optimizers.optimizer import Optimizer


class Lion(Optimizer):
    """Lion: a step of the sign of an interpolated momentum:

        w -= learning_rate * sign(beta_1 * m + (1 - beta_1) * g)
        m = beta_2 * m + (1 - beta_2) * g

    Args:
        learning_rate: a number, schedule or callable; about a tenth of Adam's.
        beta_1: the share of the momentum in the step, in (0, 1].
        beta_2: the decay rate of the momentum, in [0, 1].
        *options, **named_options: options of every `Optimizer`, `weight_decay` first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.Variable(10.0)
        >>> loss = gs.optimizers.Lion(learning_rate=0.1).minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(round(float(var), 4))
        9.9

    Source: `keras.optimizers.Lion`; Chen et al., 2023, arXiv:2302.06675.
    """

    beta_1: Setting[float] = Setting(check=within(above=0, high=1))
    beta_2: Setting[float] = Setting(check=within(low=0, high=1))

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        *options: Any,
        **named_options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, *options, **named_options)
        self.beta_1 = beta_1
        self.beta_2 = beta_2

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)
        self.momentums: list[Variable] = self.add_optimizer_variables(var_list, "momentum")

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        m = self.momentums[self._get_variable_index(variable)]
        step = jnp.sign(self.beta_1 * m + (1 - self.beta_1) * gradient)
        self.assign_sub(variable, learning_rate * step)
        self.assign(m, self.beta_2 * m + (1 - self.beta_2) * gradient)

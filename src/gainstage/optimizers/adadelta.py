"""Adadelta."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from gainstage._scaling.gradients import with_square
from gainstage._variables.types import Rate
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.options import OptimizerOptions, Setting, within
from gainstage.optimizers.optimizer import Optimizer


class Adadelta(Optimizer):
    """Adadelta:

        a = rho * a + (1 - rho) * g**2
        step = -g * sqrt(d + epsilon) / sqrt(a + epsilon)
        d = rho * d + (1 - rho) * step**2
        w += learning_rate * step

    Args:
        learning_rate: a number, schedule or callable; the paper's is 1.
        rho: the decay rate of the averages, in [0, 1].
        epsilon: a number >= 0, added to both averages.
        *options, **named_options: options of every `Optimizer`, `weight_decay` first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable(10.0)
        >>> opt = gs.optimizers.Adadelta(learning_rate=1.0)
        >>> loss = opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(round(float(var), 4))
        9.9986

    Source: `keras.optimizers.Adadelta`; Zeiler, 2012, arXiv:1212.5701.
    """

    rho: Setting[float] = Setting(check=within(low=0, high=1))
    epsilon: Setting[float] = Setting(check=within(low=0))
    accumulated_grads: list[Variable]
    accumulated_steps: list[Variable]

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        *options: Any,
        **named_options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, *options, **named_options)
        self.rho = rho
        self.epsilon = epsilon

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)
        self.accumulated_grads, self.accumulated_steps = self.add_optimizer_variables(
            var_list, ("accumulated_grad", "accumulated_delta_var")
        )

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        i, rho = self._get_variable_index(variable), self.rho
        gradient = with_square(gradient)
        a, d = self.accumulated_grads[i], self.accumulated_steps[i]
        self.assign(a, rho * a + (1 - rho) * jnp.square(gradient))
        step = -gradient * jnp.sqrt(d + self.epsilon) / jnp.sqrt(a + self.epsilon)
        self.assign(d, rho * d + (1 - rho) * jnp.square(step))
        self.assign_add(variable, learning_rate * step)

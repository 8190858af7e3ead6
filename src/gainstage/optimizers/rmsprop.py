"""RMSprop."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from gainstage._base import checks
from gainstage._scaling.gradients import with_square
from gainstage._variables.types import Rate
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.options import OptimizerOptions, Setting, needs_slot, within
from gainstage.optimizers.optimizer import Optimizer


class RMSprop(Optimizer):
    """RMSprop, plain or centered, with momentum:

        v = rho * v + (1 - rho) * g**2
        a = rho * a + (1 - rho) * g                     # centered; else a = 0
        step = learning_rate * g / sqrt(max(v - a**2, 0) + epsilon)
        m = momentum * m + step                         # momentum > 0; else m = step
        w -= m

    Args:
        learning_rate: a number, schedule or callable.
        rho: the decay rate of the averages, in [0, 1].
        momentum: in [0, 1].
        epsilon: a number >= 0, added to the variance.
        centered: whether to divide by the variance instead of the mean square.
        *options, **named_options: options of every `Optimizer`, `weight_decay` first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable(10.0)
        >>> opt = gs.optimizers.RMSprop(learning_rate=0.1)
        >>> loss = opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(round(float(var), 4))
        9.6838

    Source: `keras.optimizers.RMSprop`; Hinton, 2012, lecture 6e.
    """

    rho: Setting[float] = Setting(check=within(low=0, high=1))
    momentum: Setting[float] = Setting(check=within(low=0, high=1), needs_state=needs_slot)
    epsilon: Setting[float] = Setting(check=within(low=0))
    centered: Setting[bool] = Setting(check=checks.flag, needs_state=needs_slot)

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        *options: Any,
        **named_options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, *options, **named_options)
        self.rho = rho
        self.momentum = momentum
        self.epsilon = epsilon
        self.centered = centered

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)
        self.velocities: list[Variable] = self.add_optimizer_variables(var_list, "velocity")
        if self.momentum:
            self.momentums: list[Variable] = self.add_optimizer_variables(var_list, "momentum")
        if self.centered:
            self.averages: list[Variable] = self.add_optimizer_variables(
                var_list, "average_gradient"
            )

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        i, rho = self._get_variable_index(variable), self.rho
        gradient = with_square(gradient)
        v = self.velocities[i]
        self.assign(v, rho * v + (1 - rho) * jnp.square(gradient))
        variance = v.value()
        if self.centered:
            a = self.averages[i]
            self.assign(a, rho * a + (1 - rho) * gradient)
            variance = jnp.maximum(variance - jnp.square(a.value()), 0)  # rounding can go below 0
        step = learning_rate * gradient / jnp.sqrt(variance + self.epsilon)
        if self.momentum:
            m = self.momentums[i]
            self.assign(m, self.momentum * m + step)
            step = m.value()
        self.assign_sub(variable, step)

"""Adam and AdamW (Adam with weight decay by default)."""

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


class Adam(Optimizer):
    """Adam, with the bias correction in the learning rate:

        alpha = learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t)
        m += (1 - beta_1) * (g - m)
        v += (1 - beta_2) * (g**2 - v)
        w -= alpha * m / (sqrt(v) + epsilon)            # amsgrad: the largest v so far

    Args:
        learning_rate: a number, schedule or callable.
        beta_1, beta_2: the decay rates of the two moments, in [0, 1).
        epsilon: a number >= 0, added in float32, where it cannot underflow.
        amsgrad: whether to divide by the largest second moment so far.
        *options, **named_options: options of every `Optimizer`, `weight_decay` first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable(1.0)
        >>> loss = gs.optimizers.Adam(learning_rate=0.1).minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(round(float(var), 4))
        0.9

    Source: `keras.optimizers.Adam`; Kingma and Ba, 2014, arXiv:1412.6980; Reddi et al., 2018.
    """

    beta_1: Setting[float] = Setting(check=within(low=0, below=1))
    beta_2: Setting[float] = Setting(check=within(low=0, below=1))
    epsilon: Setting[float] = Setting(check=within(low=0))
    amsgrad: Setting[bool] = Setting(check=checks.flag, needs_state=needs_slot)

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *options: Any,
        **named_options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, *options, **named_options)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.amsgrad = amsgrad

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)
        firsts, seconds = self.add_optimizer_variables(var_list, ("momentum", "velocity"))
        self.momentums: list[Variable] = firsts
        self.velocities: list[Variable] = seconds
        if self.amsgrad:
            self.velocity_hats: list[Variable] = self.add_optimizer_variables(
                var_list, "velocity_hat"
            )

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        i = self._get_variable_index(variable)
        gradient = with_square(gradient)
        m, v = self.momentums[i], self.velocities[i]
        t = jnp.asarray(self.iterations, variable.dtype) + 1
        alpha = learning_rate * jnp.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)

        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        self.assign_add(v, (jnp.square(gradient) - v) * (1 - self.beta_2))
        if self.amsgrad:
            v_hat = self.velocity_hats[i]
            self.assign(v_hat, jnp.maximum(v_hat.value(), v.value()))
            v = v_hat
        self.assign_sub(variable, alpha * m / (jnp.sqrt(v.value()) + self.epsilon))


class AdamW(Adam):
    """Adam with decoupled weight decay: `w -= w * weight_decay * learning_rate` before each update.

    Args:
        learning_rate: a number, schedule or callable.
        weight_decay: a number >= 0.
        beta_1, beta_2, epsilon, amsgrad: as for `Adam`.
        *options, **named_options: options of every `Optimizer`, `clipnorm` first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or `weight_decay` is None.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable(10.0)
        >>> loss = gs.optimizers.AdamW(learning_rate=0.1).minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(round(float(var), 4))
        9.896

    Source: `keras.optimizers.AdamW`; Loshchilov and Hutter, 2019, arXiv:1711.05101.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        weight_decay: float | None = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *options: Any,
        **named_options: Any,
    ):
        if weight_decay is None:
            raise ValueError("Expected a number for weight_decay; got None.")
        own = (beta_1, beta_2, epsilon, amsgrad, weight_decay)
        super().__init__(learning_rate, *own, *options, **named_options)

    def _argument(self, name: str) -> Any:
        value = super()._argument(name)
        return 0.0 if name == "weight_decay" and value is None else value  # None would be refused

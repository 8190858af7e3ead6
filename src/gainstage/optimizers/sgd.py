"""Gradient descent, with momentum."""

from collections.abc import Sequence
from typing import Any, Unpack

import jax

from gainstage._base import checks
from gainstage._variables.types import Rate
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.options import OptimizerOptions, Setting, needs_slot, within
from gainstage.optimizers.optimizer import Optimizer


class SGD(Optimizer):
    """Gradient descent:

        w -= learning_rate * g                          # momentum == 0: no slot
        m = momentum * m - learning_rate * g            # momentum > 0:
        w += m                                          #   plain
        w += momentum * m - learning_rate * g           #   nesterov

    Args:
        learning_rate: a number, schedule or callable.
        momentum: in [0, 1].
        nesterov: whether to use Nesterov momentum.
        *options, **named_options: options of every `Optimizer`, `weight_decay` first.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable(1.0)
        >>> opt = gs.optimizers.SGD(learning_rate=0.1)
        >>> loss = opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(var.value())
        0.9

    Source: `keras.optimizers.SGD`; Sutskever et al., 2013.
    """

    momentum: Setting[float] = Setting(check=within(low=0, high=1), needs_state=needs_slot)
    nesterov: Setting[bool] = Setting(check=checks.flag)

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *options: Any,
        **named_options: Unpack[OptimizerOptions],
    ):
        super().__init__(learning_rate, *options, **named_options)
        self.momentum = momentum
        self.nesterov = nesterov

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)
        if self.momentum:
            self.momentums: list[Variable] = self.add_optimizer_variables(var_list, "momentum")

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        step = -learning_rate * gradient
        if self.momentum:
            m = self.momentums[self._get_variable_index(variable)]
            self.assign(m, self.momentum * m + step)
            step = self.momentum * m + step if self.nesterov else m.value()
        self.assign_add(variable, step)

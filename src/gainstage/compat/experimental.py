"""`tf.mixed_precision.experimental` and `tf.keras.mixed_precision.experimental`."""

import dataclasses
from typing import Any, Self

from gainstage.compat import tf2
from gainstage.compat.stateful_scale import DynamicLossScale, FixedLossScale, LossScale
from gainstage.optimizers.optimizer import Optimizer

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "LossScaleOptimizer"]


def __dir__() -> list[str]:
    return __all__


class LossScaleOptimizer(tf2.LossScaleOptimizer):
    """The older `compat.tf2.LossScaleOptimizer`, with one argument for the scale.

    Args:
        optimizer: the optimizer that takes the steps.
        loss_scale: a number > 0 for a fixed scale, "dynamic", or a loss scale with a multiplier of
            2. Of a dynamic scale the configuration is used, not the current state.

    Raises:
        ValueError: `optimizer` is not an optimizer or is wrapped, or `loss_scale` is anything else.
            If the type is wrong, it is a TypeError too.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage.compat import experimental, tf2
        >>> opt = experimental.LossScaleOptimizer(gs.optimizers.SGD(), 123)
        >>> same = tf2.LossScaleOptimizer(gs.optimizers.SGD(), dynamic=False, initial_scale=123)
        >>> opt.get_config() == same.get_config()
        True

    Source: `tf.keras.mixed_precision.experimental.LossScaleOptimizer` (TensorFlow 2.4).
    """

    _conventions = dataclasses.replace(
        tf2.LossScaleOptimizer._conventions, inner_argument="optimizer"
    )

    def __init__(self, optimizer: Optimizer, loss_scale: Any):
        super().__init__(optimizer, **tf2.scale_arguments(loss_scale))

    @classmethod
    def _created(cls, inner: Any, arguments: dict[str, Any]) -> Self:
        scale, steps = (arguments.pop(n, None) for n in ("initial_scale", "dynamic_growth_steps"))
        if arguments.pop("dynamic", True):
            scale = DynamicLossScale(scale or 2.0**15, 2000 if steps is None else steps)
        return cls(optimizer=inner, loss_scale=scale, **arguments)

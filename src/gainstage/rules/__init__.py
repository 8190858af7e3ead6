"""Rules: how a loss scale is updated after each step.

Users import them from `gainstage`; rooms above may import all of it.
"""

from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import DynamicLossScale, FixedLossScale, LossScale, ScaleState

__all__ = ["AdaptiveLossScale", "DynamicLossScale", "FixedLossScale", "LossScale", "ScaleState"]


def __dir__() -> list[str]:
    return __all__

"""Rules: how a loss scale is updated."""

from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.base import DynamicLossScale, FixedLossScale, LossScale, ScaleState

__all__ = ["AdaptiveLossScale", "DynamicLossScale", "FixedLossScale", "LossScale", "ScaleState"]

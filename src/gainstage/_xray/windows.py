"""The loss scales that fit, for each layer and for all together."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gainstage._programs.places import layer_of
from gainstage._xray.causes import importance, rounding
from gainstage._xray.numbers import largest
from gainstage._xray.walk import Ran, Result

UNKNOWN = -math.inf, math.inf


class Window(NamedTuple):
    """The scales that fit, as powers of two: from `2**low` to `2**high`, inclusive."""

    low: float  # below it, float16 rounding exceeds the requested error
    high: float  # above it, something overflows
    lowest: str = ""  # the result that limits `low`
    highest: str = ""  # the result that limits `high`

    @property
    def is_empty(self) -> bool:
        """Whether no power of two fits."""
        return self.low > self.high


def windows_of(ran: Ran, scale: float, error: float) -> dict[str, Window]:
    """Returns the window of each layer whose backward pass is in half precision.

    The backward pass is linear in the scale, so the float32 reference at one scale is enough.

    Args:
        ran: a run with its references.
        scale: the scale of that run.
        error: the relative error that rounding one result to subnormal numbers may cause.
    """
    weights, at = importance(ran), math.log2(scale)
    layers: dict[str, list[Result]] = defaultdict(list)
    for result in ran.results:
        if result.is_backward and is_measured(result):
            layers[layer_of(result.place)].append(result)
    return {layer: window_of(each, weights, at, error) for layer, each in layers.items()}


def is_measured(result: Result) -> bool:
    """Whether a result is in half precision, and its reference has finite numbers, not only 0."""
    return result.is_half and result.ref.rms > 0 and not result.ref.bad


def window_of(
    results: Sequence[Result], weights: Mapping[int, float], at: float, error: float
) -> Window:
    """Returns the window of results that are proportional to a factor.

    Args:
        results: the results; those that are not in half precision do not matter.
        weights: the importance of each.
        at: log2 of the factor that they have.
        error: the relative error that rounding one result to subnormal numbers may cause.
    """
    window = Window(*UNKNOWN)
    for result in filter(is_measured, results):
        high = math.floor(math.log2(largest(result.dtype) / result.ref.max) + at)
        share = rounding(result) * weights.get(result.id, 0.0)
        low = math.ceil(math.log2(share / error) + at) if share > 0 else -math.inf
        if low > window.low:
            window = window._replace(low=low, lowest=f"{result.op} {result.place}")
        if high < window.high:
            window = window._replace(high=high, highest=f"{result.op} {result.place}")
    return window


def common_window(windows: Mapping[str, Window]) -> Window:
    """Returns the scales that fit all layers."""
    if not windows:
        return Window(*UNKNOWN)
    low = max(windows, key=lambda layer: windows[layer].low)
    high = min(windows, key=lambda layer: windows[layer].high)
    return Window(windows[low].low, windows[high].high, low, high)

"""The loss scales that fit, for each layer and for all together."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from gainstage._programs.places import layer_of
from gainstage._xray.causes import importance, rounding
from gainstage._xray.numbers import largest
from gainstage._xray.walk import Ran

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
    windows: dict[str, Window] = {}
    for result in ran.results:
        ref = result.ref
        if not (result.is_backward and result.is_half and ref.rms > 0) or ref.bad:
            continue
        high = math.floor(math.log2(largest(result.dtype) / ref.max) + at)
        share = rounding(result) * weights.get(result.id, 0.0)
        low = math.ceil(math.log2(share / error) + at) if share > 0 else -math.inf
        layer = layer_of(result.place)
        known = windows.get(layer, Window(*UNKNOWN))
        if low > known.low:
            known = known._replace(low=low, lowest=f"{result.op} {result.place}")
        if high < known.high:
            known = known._replace(high=high, highest=f"{result.op} {result.place}")
        windows[layer] = known
    return windows


def common_window(windows: Mapping[str, Window]) -> Window:
    """Returns the scales that fit all layers."""
    if not windows:
        return Window(*UNKNOWN)
    low = max(windows, key=lambda layer: windows[layer].low)
    high = min(windows, key=lambda layer: windows[layer].high)
    return Window(windows[low].low, windows[high].high, low, high)

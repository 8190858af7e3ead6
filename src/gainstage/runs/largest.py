"""Estimates the largest gradient of the steps in which telemetry did not measure it."""

import math


class LargestGradient:
    """Follows the largest gradient; between measurements it is scaled with the gradient norm.

    Args:
        max_abs: a measured value, for the steps before the first measurement; NaN for none.
        grad_norm: the gradient norm of that step.
    """

    def __init__(self, max_abs: float = math.nan, grad_norm: float = math.nan) -> None:
        self._last, self._norm = max_abs, grad_norm

    def of(self, max_abs: float, grad_norm: float) -> float:
        """The largest gradient of the next step; `max_abs` is NaN if it was not measured."""
        if not math.isnan(max_abs):
            self._last, self._norm = max_abs, grad_norm
            return max_abs
        ratio = grad_norm / self._norm if self._norm else math.nan
        return self._last * ratio if 0 < ratio < math.inf else self._last

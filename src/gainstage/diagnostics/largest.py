"""Estimates the largest gradient of every step; telemetry measures it only in some."""

import math


class LargestGradient:
    """Follows the largest gradient; between measurements it is scaled with the gradient norm.

    Telemetry repeats the last measured value. It is always measured in a skipped step and in the
    step after one.
    """

    def __init__(self) -> None:
        self._last, self._norm = math.nan, math.nan
        self._skipped = True

    def of(self, max_abs: float, grad_norm: float, finite: bool) -> tuple[float, bool]:
        """The largest gradient of the next step, and whether it was measured in that step."""
        moved = grad_norm / self._norm if self._norm else math.nan
        still = max_abs == self._last and finite and not self._skipped
        self._skipped = not finite
        if still and moved != 1 and 0 < moved < math.inf:
            return max_abs * moved, False
        self._last, self._norm = max_abs, grad_norm
        return max_abs, True

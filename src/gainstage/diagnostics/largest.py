"""The largest gradient of each step of a run, of which telemetry tells that of some."""

import math


class LargestGradient:
    """Follows it from step to step: where nobody looked for it, it is taken to move with the norm.

    Telemetry repeats the last one that was looked for; that is always of this step where it was
    skipped, and of the one after.
    """

    def __init__(self) -> None:
        self._last, self._norm = math.nan, math.nan
        self._skipped = True

    def of(self, max_abs: float, grad_norm: float, finite: bool) -> tuple[float, bool]:
        """That of one more step, and whether it is known to be its own."""
        moved = grad_norm / self._norm if self._norm else math.nan
        still = max_abs == self._last and finite and not self._skipped
        self._skipped = not finite
        if still and moved != 1 and 0 < moved < math.inf:
            return max_abs * moved, False
        self._last, self._norm = max_abs, grad_norm
        return max_abs, True

"""The watch of a run: it warns once if its last 50 steps were all skipped, and once, where the
lowest scale of its rule is known, if the scale has fallen to it before."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gainstage._base._jax import Tracer
from gainstage._base.checks import as_power
from gainstage._base.warn import warn

EVERY = 64  # steps between two looks
DEAD = 50  # skipped steps in a row with which a run counts as dead

_LOW = (
    "Skipped steps have lowered the loss scale to its lowest, {lowest}. "
    "gainstage.xray(loss_fn, params, *batch, scale={power}) of such a step names the operation, "
    "and gainstage.diagnostics.Alarms says why steps are skipped."
)


class DeadRunWatch:
    """Looks at the flags of earlier steps, every 64 steps, and warns once of a dead run. It also
    warns once if skipped steps have lowered the scale to the lowest of the rule.

    It waits for no flag: one that is not computed yet is left for the next look. A warning reads
    the current scale, and may wait for it, once. Of a healthy run it keeps the scalars of one step
    in 64. After a skipped one it keeps those of each step, as at the start. It
    looks before a step, so that a warning that is an error loses nothing.

    Args:
        lowest: the scale of which the second warning is; 0 for none.
    """

    def __init__(self, lowest: float = 0.0) -> None:
        self._lowest = lowest
        self._steps: list[tuple[Any, Any, Any, Any]] = []  # those that it has not looked at yet
        self._count, self._keeps_all = 0, True
        self._skipped = 0  # in a row, up to these
        self._warned = False
        self._last: Any = None  # the flag of the last step

    def see(self, applied: Any, loss: Any, wanted: Any = True, scale: Any = None) -> None:
        """Notes a step.

        Args:
            applied: whether the step was applied, a bool scalar.
            loss: its true loss, or None.
            wanted: False, also as an array, for a step that the user left out.
            scale: the loss scale after it, an array that no step donates, or None.
        """
        self._last = applied
        self._count += 1
        if self._keeps_all or not self._steps:
            self._steps.append((applied, loss, wanted, scale))

    def ended_with(self, applied: Any) -> bool:
        """Whether this is the flag of the last step, so that the next one goes on from there."""
        return self._last is applied

    def look(self, scale: Callable[[], Any]) -> None:
        """Looks at the steps that it has seen, if it is time.

        Args:
            scale: a function that returns the current loss scale.
        """
        if self._count == EVERY:
            self._count = 0
            self._look(scale)

    def _look(self, scale: Callable[[], Any]) -> None:
        ready = len(self._steps)
        while ready and not _is_ready(self._steps[ready - 1][0]):
            ready -= 1
        looked, self._steps = self._steps[:ready], self._steps[ready:]
        in_a_row = 0
        for applied, _, wanted, _ in reversed(looked):  # of a healthy run, one flag is read
            if np.asarray(applied):
                break
            in_a_row += bool(np.asarray(wanted))
        else:
            in_a_row += self._skipped
        self._skipped = in_a_row if self._keeps_all else 0
        if looked and self._skipped >= DEAD and not self._warned:
            self._warned = True
            warn(_message(in_a_row, looked[-1][1], float(np.asarray(scale()))))
        elif looked and self._is_low(looked[-1][3]) and not self._warned:
            lowest = as_power(self._lowest)
            self._lowest = 0.0
            warn(_LOW.format(lowest=lowest, power=lowest.replace("2^", "2.0**")))
        if looked:
            self._keeps_all = in_a_row > 0 and not self._warned

    def _is_low(self, scale: Any) -> bool:
        """Whether a scale is the lowest of the rule; False if it is not computed yet."""
        known = self._lowest > 0 and scale is not None and _is_ready(scale)
        return known and float(np.asarray(scale)) <= self._lowest


def _is_ready(x: Any) -> bool:
    return not hasattr(x, "is_ready") or x.is_ready()


def _message(skipped: int, loss: Any, scale: float) -> str:
    known = loss is not None and not isinstance(loss, Tracer) and _is_ready(loss)
    finite = bool(np.isfinite(np.asarray(loss, np.float32)).all()) if known else None
    why = {
        None: "",
        True: " The loss is finite, so a gradient overflows or is NaN.",
        False: " The loss is not finite, which no scale mends: look at the data and the weights.",
    }[finite]
    return (
        f"The last {skipped} steps in a row were skipped, so no weight has changed; the loss scale "
        f"is {as_power(scale)}.{why} gainstage.xray(loss_fn, params, *batch, "
        f"scale={as_power(scale).replace('2^', '2.0**')}) names the operation."
    )

"""Warns of a run whose last 50 steps were all skipped, whose loss scale fell to its lowest, or of
which an applied step returned what is not finite beside its loss."""

from collections import deque
from collections.abc import Callable, Sequence
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
_SPOILED = (
    "{name!r}, which the loss returns beside its value, has an inf or NaN though the step was "
    "applied: its gradients are finite. It is kept as it is. If it is a count, a sum or a metric "
    "that is too large for half precision, compute it inside of `with gainstage.keep_float32():`."
)
_WHY = {
    None: "",
    True: " The loss is finite, so a gradient overflows or is NaN.",
    False: " The loss is not finite, which no scale mends: look at the data and the weights.",
}


class DeadRunWatch:
    """Looks at the flags of the last 64 steps, every 64 steps, and warns once of each of the three.

    It waits for no flag: one that is not computed yet is left for the next look. A warning reads
    the current scale, and may wait for it, once. It looks before a step, so that a warning that is
    an error loses nothing.

    Args:
        lowest: the scale of which the second warning is; 0 for none.
    """

    def __init__(self, lowest: float = 0.0) -> None:
        self._lowest, self._count, self._warned = lowest, 0, False
        self._steps: deque[tuple[Any, Any, Any, Any]] = deque(maxlen=EVERY)
        self._spoiled: deque[tuple[Any, Sequence[str]]] = deque(maxlen=EVERY)

    def see(
        self,
        applied: Any,
        loss: Any,
        wanted: Any = True,
        scale: Any = None,
        spoiled: Any = None,
        beside: Sequence[str] = (),
    ) -> None:
        """Notes a step.

        Args:
            applied: whether the step was applied, a bool scalar.
            loss: its true loss, or None.
            wanted: False, also as an array, for a step that the user left out.
            scale: the loss scale after it, an array that no step donates, or None.
            spoiled: the number in `beside` of what is not finite though the step was applied, -1
                for none, or None.
            beside: the names of what this step has returned beside the loss.
        """
        self._count += 1
        self._steps.append((applied, loss, wanted, scale))
        if spoiled is not None:
            self._spoiled.append((spoiled, beside))

    def look(self, scale: Callable[[], Any], mend: Callable[[], bool] = lambda: False) -> None:
        """Looks at the steps that it has seen, if it is time.

        Args:
            scale: a function that returns the current loss scale.
            mend: what is done for a run whose steps are skipped, before a warning: it returns
                whether it helps.
        """
        if self._count % EVERY:
            return
        ready = [(int(np.asarray(x)), names) for x, names in tuple(self._spoiled) if is_ready(x)]
        spoiled = [names[number] for number, names in ready if number >= 0]
        if spoiled:
            self._spoiled = deque(maxlen=0)  # it is said once
            warn(_SPOILED.format(name=spoiled[-1]))
        if self._warned:
            return
        steps = list(self._steps)
        while steps and not is_ready(steps[-1][0]):
            steps.pop()
        skipped = 0
        for applied, _, wanted, _ in reversed(steps):  # of a healthy run, one flag is read
            if not is_ready(applied) or np.asarray(applied):
                break
            skipped += bool(np.asarray(wanted))
        is_known = self._lowest and steps and is_ready(steps[-1][3])
        is_low = is_known and np.asarray(steps[-1][3]) <= self._lowest
        if (skipped >= DEAD or is_low) and mend():
            self._steps.clear()
        elif skipped >= DEAD:
            self._warned = True
            warn(_message(skipped, steps[-1][1], as_power(float(np.asarray(scale())))))
        elif is_low:
            lowest, self._lowest = as_power(self._lowest), 0.0
            warn(_LOW.format(lowest=lowest, power=lowest.replace("2^", "2.0**")))


def is_ready(x: Any) -> bool:
    """Whether an array can be read without waiting: it is computed, and not donated elsewhere."""
    return not hasattr(x, "is_ready") or (not x.is_deleted() and x.is_ready())


def _message(skipped: int, loss: Any, scale: str) -> str:
    known = loss is not None and not isinstance(loss, Tracer) and is_ready(loss)
    why = _WHY[bool(np.isfinite(np.asarray(loss, np.float32)).all()) if known else None]
    return (
        f"The last {skipped} steps in a row were skipped, so no weight has changed; the loss scale "
        f"is {scale}.{why} gainstage.xray(loss_fn, params, *batch, "
        f"scale={scale.replace('2^', '2.0**')}) names the operation."
    )

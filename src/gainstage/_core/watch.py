"""What a loop is told: that the run is dead, or that it compiles the step in each turn."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from gainstage._core._jax import Tracer
from gainstage._core.checks import as_power
from gainstage._core.warn import warn

EVERY = 64  # steps between two looks
DEAD = 50  # skipped steps in a row with which a run counts as dead
REMADE = 10  # steps that are called once each, in a loop


class Watch:
    """Looks at the flags of earlier steps, every 64 steps, and warns once of a dead run.

    It never waits: a flag that is not computed yet is left for the next look. Of a step it keeps
    scalars, until it has looked at them. It looks before a step, so that a warning that is an
    error loses nothing.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Any, Any]] = []  # those that it has not looked at yet
        self._skipped = 0  # in a row, up to these
        self._warned = False

    def see(self, applied: Any, loss: Any) -> None:
        """Notes a step.

        Args:
            applied: whether the step was applied, a bool scalar.
            loss: its true loss, or None.
        """
        self._steps.append((applied, loss))

    def look(self, scale: Callable[[], Any]) -> None:
        """Looks at the steps that it has seen, if it is time.

        Args:
            scale: a function that returns the current loss scale.
        """
        if len(self._steps) % EVERY == 0 and self._steps:
            self._look(scale)

    def _look(self, scale: Callable[[], Any]) -> None:
        ready = len(self._steps)
        while ready and not _is_ready(self._steps[ready - 1][0]):
            ready -= 1
        looked, self._steps = self._steps[:ready], self._steps[ready:]
        in_a_row = 0
        for applied, _ in reversed(looked):  # of a healthy run, one flag is read
            if np.asarray(applied):
                break
            in_a_row += 1
        else:
            in_a_row += self._skipped
        self._skipped = in_a_row
        if looked and in_a_row >= DEAD and not self._warned:
            self._warned = True
            warn(_message(in_a_row, looked[-1][1], float(np.asarray(scale()))))


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
        f"is {as_power(scale)}.{why} gainstage.diagnostics.xray(loss_fn, params, *batch) names "
        f"the operation."
    )


SAME_STATE = (
    "{n} calls of {name} in a row got the same opt_state, so neither the loss scale nor the state "
    "of the optimizer changes. Pass on what each call returns: {name} returns the new opt_state."
)


class Repeats:
    """Sees a loop in which each step gets one array, because the new one is not passed on.

    Args:
        message: what is said of {n} such steps in a row.
        **names: what else the message names.
    """

    def __init__(self, message: str, **names: str):
        self._message, self._steps = message.format(n=REMADE, **names), 0
        self._last: weakref.ref[Any] | None = None  # the array of the last step
        self._warned = False

    def note(self, array: Any) -> None:
        """Notes a step that got this array."""
        if self._last is None or self._last() is not array:
            self._last, self._steps = weakref.ref(array), 0
        self._steps += 1
        if self._steps == REMADE and not self._warned:
            self._warned = True
            warn(self._message)


_CALLED_ONCE: Counter[tuple[Any, Any]] = Counter()  # steps, by the code of loss and transformation


class Calls:
    """Counts the calls of a compiled step, and warns of a loop that creates it in each turn.

    Args:
        loss_fn, update: the loss and the transformation of the step.
    """

    def __init__(self, loss_fn: Any, update: Any):
        code = getattr(getattr(loss_fn, "func", loss_fn), "__code__", None)
        self._key, self._calls = (code, weakref.ref(update)), 0

    def note(self) -> None:
        """Notes a call."""
        if self._calls == 2:
            return
        self._calls += 1
        _CALLED_ONCE[self._key] += 1 if self._calls == 1 else -1
        if self._calls == 1 and _CALLED_ONCE[self._key] == REMADE:
            warn(
                f"{REMADE} steps of gainstage.train_step with the same loss and transformation "
                f"were called once each, and each was compiled. Create the step before the loop: "
                f"step = gainstage.train_step(loss_fn, tx)."
            )

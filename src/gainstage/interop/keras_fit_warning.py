"""What is said of a Keras fit: that none of its steps was applied, or that it stores statistics."""

import sys
import weakref
from typing import Any

import jax.numpy as jnp

from gainstage._base.checks import as_power
from gainstage._base.dead_run import DEAD
from gainstage._base.warn import warn
from gainstage.interop.keras_backend import keras
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import FixedLossScale, LossScale

STATISTICS = (
    "Keras's trainer stores statistics of skipped steps, so a batch with a NaN ruins {name!r}. "
    "Write model = gainstage.interop.keras.compile(model, optimizer, loss), which keeps them, in "
    "the place of model.compile; with dtype=None for a model under a policy such as mixed_float16. "
    'To silence this warning: warnings.filterwarnings("ignore", message="Keras\'s trainer stores").'
)
FAR = 2.0**16  # a fall of the scale in one fit that no search explains


class Fits:
    """Looks at the state that each fit leaves; the flags of its steps are inside of Keras's
    program.

    Args:
        rule: the rule of the scale.
        scale: the first scale.
    """

    def __init__(self, rule: LossScale, scale: float):
        self.applied: int = 0  # the steps that were applied up to the last fit
        self._rule, self._scale, self._in_vain, self._warned = rule, scale, 0, False
        self._last: weakref.ref[Any] | None = None  # the array of the scale after the last fit

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}

    def look(self, applied: int, scale: Any, bad_steps: Any, ran: bool) -> None:
        """Warns, once, of a fit that is dead.

        Args:
            applied: the number of steps that were applied so far.
            scale: the scale, an array.
            bad_steps: what `AdaptiveLossScale` counts, an array; None for other rules.
            ran: whether a step has run, if this is the first look.
        """
        before, self.applied = self.applied, applied
        begun, self._scale = self._scale, float(scale)
        # A step returns a new array; a fit of no steps leaves the old one.
        ran = ran if self._last is None else self._last() is not scale
        self._last = weakref.ref(scale)
        if applied != before or not ran or self._warned:
            self._in_vain = 0 if applied != before else self._in_vain
            return
        self._in_vain += 1
        is_fixed = isinstance(self._rule, FixedLossScale)
        what = advice = ""
        if is_fixed and (applied == 0 or self._in_vain > 1):  # else it may be one bad batch
            what = f"at the fixed loss scale of {as_power(self._scale)}"
            advice = " A rule finds a lower scale: rule=gainstage.DynamicLossScale()."
        elif isinstance(self._rule, AdaptiveLossScale) and int(bad_steps) >= DEAD:
            what = f"and {int(bad_steps)} in a row were skipped"
        elif not is_fixed and self._scale <= max(getattr(self._rule, "min_scale", 0), begun / FAR):
            what = f"and the loss scale has fallen to {as_power(self._scale)}"
        if what:
            self._warned = True
            warn(
                f"No step since the last fit was applied, {what}. Look at the data, the learning "
                f"rate and the loss; LogLossScale says in which epoch it began.{advice}"
            )


def warned_of_statistics() -> bool:
    """Warns if `stateless_apply`, which calls this, is called by Keras's own step of `fit`, whose
    forward pass has changed numbers of the model; returns whether it has."""
    frame = sys._getframe(2)
    if frame.f_code is not keras.Model.train_step.__code__:
        return False
    found = frame.f_locals
    model, new = found["self"], found["non_trainable_variables"]
    if hasattr(type(model), "_plain"):  # under autocast: it keeps them
        return False
    for variable, old, value in zip(
        model.non_trainable_variables, found["state"][1], new, strict=True
    ):
        if value is not old and jnp.issubdtype(value.dtype, jnp.floating):
            warn(STATISTICS.format(name=variable.path))
            return True
    return False

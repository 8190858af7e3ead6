"""What can be known of how a user uses the loss scale of an optimizer."""

import weakref
from collections.abc import Sequence
from typing import Any

import jax

from gainstage._base._jax import Tracer, computes
from gainstage._base.warn import warn
from gainstage._variables.variable import is_inside

NOT_IN_STATE = (
    "Expected the loss scale of {name!r} in the state of the function that is traced; got a number "
    "that would be frozen into the program. In gainstage.optimizers.jit, add optimizer.variables "
    "to `state`. With stateless_apply, read it from the state: scaled = "
    "gainstage.optimizers.functionalize(optimizer.scale_loss, optimizer.variables) once, then "
    "scaled(state, loss)[0] inside. With `apply` outside, pass optimizer.loss_scale in as an "
    "argument."
)
SCALED_TWICE = (
    "Expected the loss itself for scale_loss; got what scale_loss has multiplied by the loss scale "
    "already. Multiply once."
)
STALE_READS = 10  # of one value after `stateless_apply`, with which it counts as used in vain
IN_STATE = (
    "scaled = gainstage.optimizers.functionalize(optimizer.scale_loss, optimizer.variables), then "
    "scaled(state, loss)[0]"
)
IN_SCOPE = (
    "with keras.StatelessScope(zip(optimizer.variables, state)): loss = optimizer.scale_loss(loss)"
)
_STALE = (
    "The loss scale of {name!r} was read {n} times since stateless_apply, which does not change "
    "it: the new scale is in the values that it returns. Read it from them: {remedy}. Or assign "
    "them to optimizer.variables."
)


class StaleReads:
    """Sees reads of a scale that `stateless_apply` has not changed, and warns once.

    Args:
        name: the optimizer's name.
        remedy: what reads the scale from the values that `stateless_apply` returns.
    """

    def __init__(self, name: str, remedy: str):
        self._message = _STALE.format(name=name, n=STALE_READS, remedy=remedy)
        self._before: weakref.ref[Any] | None = None  # the scale that was not changed
        self._reads, self._told = 0, False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_before": None}

    def step_without(self, value: Any) -> None:
        """Notes a `stateless_apply` while the scale's variable has this value."""
        if isinstance(value, jax.ShapeDtypeStruct):  # of a planned variable, which is never read
            return
        if self._before is None or self._before() is not value:
            self._before, self._reads = weakref.ref(value), 0

    def read(self, value: Any) -> None:
        """Notes a read of the scale, where its variable has this value."""
        if self._before is None or self._before() is not value or self._told:
            return
        self._reads += 1
        if self._reads == STALE_READS:
            self._told = True
            warn(self._message)


class ScaleUses:
    """How the loss scale of one optimizer was used. Copies start anew.

    Args:
        name: the optimizer's name.
        fixed: whether the scale never changes, so that it may be read once for all steps.
    """

    # Whether the user has multiplied a loss by it, or read it in a trace, or once if it is fixed.
    has_scaled: bool = False
    _told = False  # that no loss was multiplied by it
    _was_read = False  # eagerly, since the last `apply`: perhaps to multiply by it
    _scaled: weakref.ref[Any] | None = None  # the last loss that was multiplied
    _tangent: weakref.ref[Any] | None = None  # its derivative, where it is differentiated
    _was_read_since = False  # whether the scale was read after that
    _true: tuple[weakref.ref[Any], ...] = ()  # the gradients that `compute_gradients` divided last

    def __init__(self, name: str, fixed: bool):
        self._name, self._fixed = name, fixed
        self._stale = StaleReads(name, IN_STATE)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_name", "_fixed", "_stale", "has_scaled", "_told")
        return {name: getattr(self, name) for name in kept}

    def read(self, value: Any) -> None:
        """Notes that the scale is read, where its variable has this value; warns, once, if that is
        out of date."""
        self._was_read_since = True
        if is_inside() or self._fixed:
            self.has_scaled = True
        else:
            self._was_read = True
        self._stale.read(value)

    def multiply(self, value: Any, loss: Any) -> Any:
        """Notes, and returns, a loss that the user has multiplied by the scale."""
        self.read(value)
        self.has_scaled, self._was_read_since, self._scaled = True, False, weakref.ref(loss)
        tangent = getattr(loss, "tangent", None)
        self._tangent = weakref.ref(tangent) if isinstance(tangent, Tracer) else None
        return loss

    def check_true(self, loss: Any) -> None:
        """Raises an error for a loss that was multiplied by the scale already."""
        if self._is_scaled(loss):
            raise ValueError(SCALED_TWICE)

    def _is_scaled(self, loss: Any) -> bool:
        """Whether a loss is what was multiplied last, or its derivative is computed from that
        one's, with no scale read since to divide by."""
        scaled, tangent = (x and x() for x in (self._scaled, self._tangent))
        if scaled is not None and loss is scaled:
            return True
        if tangent is None or self._was_read_since:
            return False
        return computes(tangent, getattr(loss, "tangent", None))

    def restore(self, has_scaled: bool) -> None:
        """Forgets what `minimize` has done, which says nothing of the next `apply`."""
        self.has_scaled = has_scaled

    def step_without(self, value: Any) -> None:
        """Notes a `stateless_apply` while the scale's variable has this value."""
        if not self._fixed:
            self._stale.step_without(value)

    def check_scaled(self) -> None:
        """Warns, once, of an `apply` whose gradients cannot be scaled."""
        self._was_read, was_read = False, self._was_read
        if was_read or self.has_scaled or self._told:
            return
        self._told = True
        warn(
            f"`apply` of {self._name!r} divides gradients by the loss scale, but no loss was "
            f"multiplied by it: use `minimize`, or differentiate `optimizer.scale_loss(loss)`."
        )

    def true_loss(self, loss: Any, has_aux: bool = False) -> Any:
        """The loss, which raises an error if it returns what was multiplied by the scale."""

        def checked() -> Any:
            result = loss()
            value = result[0] if has_aux and isinstance(result, tuple) and result else result
            if self._is_scaled(value):
                raise ValueError(
                    "Expected loss() to return the true loss; got what was multiplied by the loss "
                    "scale. `minimize` and `compute_gradients` multiply by it themselves: leave "
                    "scale_loss, or get_scaled_loss, out of the loss."
                )
            return result

        return checked if callable(loss) else loss

    def divide(self, grads: Sequence[Any]) -> None:
        """Notes gradients that are divided by the scale already."""
        self._true = tuple(weakref.ref(gradient) for gradient in grads if gradient is not None)

    def check_divides(self, grads: Sequence[Any]) -> None:
        """Raises an error if gradients that are to be divided are divided already."""
        true = {id(reference()) for reference in self._true} - {id(None)}
        if any(id(gradient) in true for gradient in grads):
            raise ValueError(
                "Expected gradients of a scaled loss; got those of compute_gradients, which are "
                "divided by the loss scale already. Write optimizer.apply_gradients("
                "optimizer.compute_gradients(loss, var_list)), without get_unscaled_gradients."
            )

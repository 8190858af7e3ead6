"""What can be asked of a run while it goes on, of an optimizer or of an optax state alike."""

from typing import Any

from gainstage.loss_scale_optimizer import LossScaleOptimizer
from gainstage.minimizer import Minimizer
from gainstage.step_info import StepInfo
from gainstage.transformation import loss_scaled_state


def telemetry(opt_or_state: Any) -> StepInfo:
    """What the last step was like: `(finite, loss_scale, skipped_steps, grad_norm)`.

    Return it from a compiled step beside the loss: it costs nothing until somebody reads it. The
    writers of `gainstage.diagnostics` and `gainstage.interop.tensorboard` take it as it is.

    Args:
        opt_or_state: a `LossScaleOptimizer(..., telemetry=True)`, or a pytree with exactly one
            state of `loss_scaled(..., telemetry=True)` anywhere inside.

    Raises:
        TypeError: an optimizer that scales no loss.
        ValueError: made without `telemetry=True`; no loss-scale state, or several.

    Examples:
        >>> import gainstage as gs
        >>> w = gs.Variable([3.0, 4.0])
        >>> opt = gs.LossScaleOptimizer(gs.SGD(0.1), telemetry=True)
        >>> loss = opt.minimize(lambda: (w.value() ** 2).sum() / 2, [w])
        >>> info = gs.telemetry(opt)
        >>> print(info.finite, info.loss_scale, info.skipped_steps, info.grad_norm)
        True 32768.0 0 5.0
        >>> opt.apply([[float("nan"), 0.0]])
        >>> print(gs.telemetry(opt).finite, gs.telemetry(opt).skipped_steps)
        False 1
    """
    if isinstance(opt_or_state, Minimizer) and not isinstance(opt_or_state, LossScaleOptimizer):
        raise TypeError(
            f"Expected a LossScaleOptimizer or a state of loss_scaled; got {opt_or_state!r}."
        )
    if isinstance(opt_or_state, LossScaleOptimizer):
        info = opt_or_state._info and StepInfo(*(v.value() for v in opt_or_state._info))
    else:
        info = loss_scaled_state(opt_or_state).info
    if info is None:
        raise ValueError(
            "Expected telemetry=True for the LossScaleOptimizer, or for loss_scaled; got one "
            "without."
        )
    return info

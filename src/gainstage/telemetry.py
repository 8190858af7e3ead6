"""What can be asked of a run while it goes on, of an optimizer or of an optax state alike."""

import dataclasses
from typing import Any

import jax
import numpy as np

from gainstage.causes import Causes, none_yet
from gainstage.loss_scale_optimizer import LossScaleOptimizer
from gainstage.minimizer import Minimizer
from gainstage.step_info import StepInfo
from gainstage.transformation import loss_scaled_state
from gainstage.variable import Variable


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
    return jax.tree.map(_value, _told(opt_or_state)[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """Which tensors made steps be skipped, as `report` returns it; `print` shows it in words.

    Args:
        steps: how many there were, the skipped ones too.
        skipped: how many of them were skipped.
        names: of the tensors, all of them.
        counts: an integer array with one row a tensor: steps in which it held an inf, steps in
            which it held a NaN, the first of them and the last, -1 if there was none.

    Source: NVIDIA apex issue 192, which asks for it.
    """

    steps: int
    skipped: int
    names: tuple[str, ...]
    counts: np.ndarray

    def __str__(self) -> str:
        lines = [f"{self.skipped} of {self.steps} steps were skipped."]
        worst = sorted(zip(self.names, self.counts.tolist(), strict=True), key=_steps, reverse=True)
        for name, (inf, nan, first, last) in worst:
            if first < 0:
                continue
            kinds = "all inf" if not nan else "all NaN" if not inf else f"inf {inf}, NaN {nan}"
            count = f"at least {max(inf, nan)}" if inf and nan else f"{inf + nan}"
            when = f"step {first}" if first == last else f"steps {first} to {last}"
            lines.append(f"{name}: {count} of {self.skipped}, {kinds}, {when}")
        return "\n".join(lines)


def _steps(row: tuple[str, list[int]]) -> int:
    return max(row[1][:2])


def report(opt_or_state: Any, params: Any = None) -> Report:
    """Which tensors overflowed or were NaN, how often and when: read back from the device.

    Args:
        opt_or_state: as for `telemetry`.
        params: for a state, the parameters, whose paths are the names.

    Raises:
        TypeError, ValueError: as `telemetry`; parameters of another number of leaves.

    Examples:
        >>> import gainstage as gs
        >>> a, b = gs.Variable([1.0, 2.0], name="query"), gs.Variable(3.0, name="key")
        >>> opt = gs.LossScaleOptimizer(gs.SGD(0.1), telemetry=True)
        >>> for gradient in (1.0, float("inf"), float("inf")):
        ...     opt.apply([[gradient, 0.0], 1.0], [a, b])
        >>> print(gs.report(opt))
        2 of 3 steps were skipped.
        query: 2 of 2, all inf, steps 1 to 2
    """
    info, causes = jax.tree.map(_value, _told(opt_or_state))
    counts = np.asarray(causes.counts)
    if isinstance(opt_or_state, LossScaleOptimizer):
        names = [variable.name for variable in opt_or_state._index]
    elif params is None:
        names = [f"gradient {place}" for place in range(len(counts))]
    else:
        leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: x is None)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if len(names) != len(counts):
        raise ValueError(f"Expected params of {len(counts)} leaves; got {len(names)}.")
    return Report(int(causes.steps), int(info.skipped_steps), tuple(names), counts)


def _value(x: Any) -> Any:
    return x.value() if isinstance(x, Variable) else x


def _told(opt_or_state: Any) -> tuple[StepInfo, Causes]:
    """What telemetry has put into the state: variables of an optimizer, else arrays."""
    if isinstance(opt_or_state, LossScaleOptimizer):
        info, causes = opt_or_state._info, opt_or_state._causes
    elif isinstance(opt_or_state, Minimizer):
        raise TypeError(
            f"Expected a LossScaleOptimizer or a state of loss_scaled; got {opt_or_state!r}."
        )
    else:
        state = loss_scaled_state(opt_or_state)
        info, causes = state.info, state.causes
    if info is None:
        raise ValueError(
            "Expected telemetry=True for the LossScaleOptimizer, or for loss_scaled; got one "
            "without."
        )
    return info, none_yet(0) if causes is None else causes

"""`tf.compat.v1.train` optimizers and `tf.compat.v1.mixed_precision`, with stateful scales."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._base import checks
from gainstage._variables.types import Values
from gainstage._variables.variable import Variable, is_tracing
from gainstage.compat.stateful_scale import (
    FLOOR,
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    UnscaledLossScaleOptimizer,
)
from gainstage.compat.v1_optimizers import (
    AdamOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    Optimizer,
    Pairs,
    with_name,
)
from gainstage.optimizers._step import saving
from gainstage.optimizers._step.differentiate import array_of_loss
from gainstage.optimizers._step.subclasses import check_verbs
from gainstage.rules import loss_scale as rules

__all__ = [
    "AdamOptimizer",
    "DynamicLossScale",
    "FixedLossScale",
    "GradientDescentOptimizer",
    "LossScale",
    "MixedPrecisionLossScaleOptimizer",
    "MomentumOptimizer",
    "Optimizer",
]


def __dir__() -> list[str]:
    return __all__


class _LossScaleOptimizer(UnscaledLossScaleOptimizer):
    _conventions = dataclasses.replace(
        UnscaledLossScaleOptimizer._conventions,
        scale_names={"scale": "current_loss_scale", "good_steps": "good_steps"},
    )


class MixedPrecisionLossScaleOptimizer(Optimizer):
    """Loss scaling around a v1 optimizer. Gradients are returned unscaled. A step with a non-finite
    gradient is skipped and does not count in `global_step`.

    Args:
        opt: a v1 optimizer that is not wrapped.
        loss_scale: a number >= 1, "dynamic", a `LossScale` of `compat` (or your subclass), or a
            rule of gainstage.
        use_locking, name: by default those of `opt`.

    Raises:
        TypeError: the class of `opt` overrides a method that takes a step.
        ValueError: `opt` is not a v1 optimizer, `loss_scale` is anything else, or `name` is empty.

    Source: `tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`.
    """

    def __init__(
        self,
        opt: Optimizer,
        loss_scale: object,
        use_locking: bool | None = None,
        name: str | None = None,
    ):
        if not isinstance(opt, Optimizer) or isinstance(opt, MixedPrecisionLossScaleOptimizer):
            raise ValueError(f"Expected a v1 optimizer that is not wrapped for opt; got {opt!r}.")
        verbs = ("minimize", "compute_gradients", "apply_gradients")
        check_verbs(opt, type(self).__name__, verbs, "Change the gradients between the two calls.")
        self._inner = opt
        # A user's own scale decides by itself; the inner scale is then 1.
        ours = type(loss_scale) in (FixedLossScale, DynamicLossScale)
        self._own = None if ours or not isinstance(loss_scale, LossScale) else loss_scale
        rule = rules.FixedLossScale(1.0) if self._own is not None else _rule(loss_scale)
        name = opt.get_name() if name is None else name
        use_locking = opt._use_locking if use_locking is None else use_locking
        wrapper = _LossScaleOptimizer(opt._optimizer, loss_scale=rule, name=with_name(name))
        if type(loss_scale) is DynamicLossScale:
            wrapper._scale_store.share(loss_scale._state)  # object and optimizer share one state
        super().__init__(wrapper, use_locking, name)

    @property
    def loss_scale(self) -> jax.Array:
        """The current scale."""
        wrapper: Any = self._optimizer
        return wrapper.loss_scale if self._own is None else jnp.asarray(self._own(), jnp.float32)

    def variables(self) -> list[Variable]:
        """Returns all state, as a list: last, the variables of a `LossScale` of your own."""
        own = [] if self._own is None else jax.tree.leaves(list(vars(self._own).values()))
        return [*super().variables(), *(v for v in own if isinstance(v, Variable))]

    def set_weights(self, weights: Values) -> None:
        self._optimizer._built_variables("set_weights")
        saving.set_all(self.variables(), weights, self._optimizer._weight_checks)

    def _slots(self) -> dict[tuple[Variable, str], Variable]:
        return self._inner._slots()

    def _read_numbers(self) -> None:
        self._inner._read_numbers()

    def compute_gradients(self, loss: Callable[[], Any], *args: Any, **kwargs: Any) -> Pairs:
        """As `Optimizer.compute_gradients`, with a scaled loss and unscaled gradients."""
        if self._own is None or not callable(loss):
            return super().compute_gradients(loss, *args, **kwargs)
        scale = self.loss_scale
        scaled = super().compute_gradients(lambda: array_of_loss(loss()) * scale, *args, **kwargs)
        return [(None if g is None else g / scale, v) for g, v in scaled]

    def _take(self, pairs: Pairs) -> None:
        if self._own is not None:
            grads = [gradient for gradient, _ in pairs]
            self._optimizer._checked(grads, [variable for _, variable in pairs])
            result = _updated(self._own, grads)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(
                    f"Expected (None, whether to apply) from {type(self._own).__name__}.update; "
                    f"got {result!r}."
                )
            _, should_apply = result
            # If the user's scale refuses the step, make its gradients non-finite.
            pairs = [(g if g is None else jnp.where(should_apply, g, jnp.nan), v) for g, v in pairs]
        super()._take(pairs)


def _updated(scale: LossScale, grads: list[Any]) -> Any:
    """The result of the `update` of a user's scale.

    Raises:
        ValueError: inside a compiled step it sets attributes, which would happen only once.
    """
    before = dict(vars(scale))
    result = scale.update(grads)
    changed = [name for name, value in vars(scale).items() if value is not before.get(name)]
    if changed and is_tracing():
        vars(scale).clear()
        vars(scale).update(before)
        name = f"self.{changed[0]}"
        raise ValueError(
            f"Expected the state of {type(scale).__name__} in a gainstage.optimizers.Variable; got "
            f"an update that sets {name} inside a compiled step, which would happen once. Write "
            f"{name} = gainstage.optimizers.Variable(...), {name}.assign(...) in update, and "
            f"opt.variables() in state."
        )
    return result


def _rule(loss_scale: object) -> rules.LossScale:
    """The rule for a `loss_scale` argument."""
    rule = getattr(loss_scale, "rule", loss_scale)
    if isinstance(rule, str) and rule == "dynamic":
        return rules.DynamicLossScale(min_scale=FLOOR)
    if isinstance(rule, rules.LossScale):
        return rule
    try:
        return rules.FixedLossScale(checks.real("loss_scale", rule, low=FLOOR))
    except TypeError as error:
        raise ValueError(
            f"Expected a number >= {FLOOR:g}, 'dynamic' or a LossScale for loss_scale; "
            f"got {loss_scale!r}."
        ) from error

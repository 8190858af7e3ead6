"""TensorFlow's stateful loss-scale objects, and the optimizer that takes unscaled gradients."""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from gainstage._base import checks
from gainstage._base.checks import LARGEST, brief
from gainstage._base.configurable import explains_config
from gainstage._scaling import gradients
from gainstage._scaling.scaled_step import ScaledStep, ScaledStepState
from gainstage._variables.bridge import assign, read
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.conventions import Conventions
from gainstage.optimizers._step.differentiate import array_of_loss
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
from gainstage.rules import loss_scale as rules
from gainstage.rules.loss_scale import start
from gainstage.rules.other_names import explains_arguments

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "UnscaledLossScaleOptimizer"]


def __dir__() -> list[str]:
    return __all__


FLOOR = 1.0  # the lowest dynamic scale in TensorFlow


class LossScale(abc.ABC):
    """A stateful loss scale: call it for the scale, `update` it with the gradients of a step.

    Subclass it and define `__call__`, `update` and `get_config` for your own scale.

    Source: `tf.mixed_precision.experimental.LossScale`.
    """

    @abc.abstractmethod
    def __call__(self) -> jax.Array:
        """Returns the current scale, a float32 scalar."""

    @abc.abstractmethod
    def update(self, grads: PyTree) -> tuple[None, Any]:
        """Updates the scale from unscaled gradients; returns (None, whether to apply them)."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""

    @classmethod
    @explains_config
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Returns a new scale from the result of `get_config`."""
        return cls(**config)


@explains_arguments
class FixedLossScale(LossScale):
    """A constant scale. `update` always returns True; the optimizers check gradients themselves.

    Args:
        loss_scale_value: a number >= 1.

    Raises:
        ValueError: the scale is not a number, or below 1.

    Examples:
        >>> from gainstage.compat.experimental import FixedLossScale
        >>> scale = FixedLossScale(7)
        >>> print(scale, scale(), scale.update([float("inf")]))
        FixedLossScale(7.0) 7.0 (None, True)

    Source: `tf.mixed_precision.experimental.FixedLossScale`.
    """

    def __init__(self, loss_scale_value: float):
        try:
            value = checks.real("loss_scale_value", loss_scale_value, low=FLOOR, high=LARGEST)
        except TypeError as error:
            raise ValueError(str(error)) from error
        self.rule: rules.FixedLossScale = rules.FixedLossScale(value)

    def __call__(self) -> jax.Array:
        return self.rule.init().scale

    def update(self, grads: PyTree) -> tuple[None, bool]:
        return None, True

    def get_config(self) -> dict[str, Any]:
        return self.rule.get_config()

    def __repr__(self) -> str:
        return f"FixedLossScale({self.rule.loss_scale_value})"


@explains_arguments
class DynamicLossScale(LossScale):
    """A scale that rises after a run of finite steps and falls after an overflow, down to 1.

    Args:
        initial_loss_scale: the first scale, > 0.
        increment_period: finite steps in a row before it rises; 0 means 1.
        multiplier: the factor of a rise, and the divisor after an overflow.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Examples:
        >>> from gainstage.compat.experimental import DynamicLossScale
        >>> scale = DynamicLossScale(8, increment_period=2)
        >>> _, should_apply = scale.update({"w": [float("inf"), 1.0], "b": None})
        >>> print(should_apply, scale())
        False 4.0

    Source: `tf.mixed_precision.experimental.DynamicLossScale`.
    """

    def __init__(
        self,
        initial_loss_scale: float = 2.0**15,
        increment_period: int = 2000,
        multiplier: float = 2.0,
    ):
        self.rule: rules.DynamicLossScale = rules.DynamicLossScale(
            initial_loss_scale,
            max(checks.integer("increment_period", increment_period, low=0), 1),
            multiplier,
            min_scale=FLOOR,
        )
        state = start(self.rule)
        scale = Variable(state.scale, name="current_loss_scale", trainable=False)
        good_steps = Variable(state.good_steps, name="good_steps", trainable=False)
        self._state = state._replace(scale=scale, good_steps=good_steps)

    @property
    def initial_loss_scale(self) -> float:
        """The first scale."""
        return self.rule.initial_loss_scale

    @property
    def increment_period(self) -> int:
        """Finite steps in a row before the scale rises."""
        return self.rule.increment_period

    @property
    def multiplier(self) -> float:
        """The factor of a rise."""
        return self.rule.multiplier

    @property
    def variables(self) -> list[Variable]:
        """The current scale and the count of finite steps."""
        return list(jax.tree.leaves(self._state))

    def __call__(self) -> jax.Array:
        return self._state.scale.value()

    def update(self, grads: PyTree, *unexpected: Any) -> tuple[None, jax.Array]:
        """Updates the scale from the unscaled gradients of a step, any pytree; None is ignored.

        Returns:
            (None, whether to apply them), the latter a bool scalar on the device.

        Raises:
            TypeError: a gradient is not floating, or the arguments are those of a rule's `update`.
        """
        if unexpected:
            raise TypeError(
                f"Expected update(grads); got {1 + len(unexpected)} arguments. The rule with "
                f"update(state, finite) is gainstage.DynamicLossScale."
            )
        alone = jax.tree_util.all_leaves([grads]) and not hasattr(grads, "dtype")
        if alone and isinstance(grads, Iterable) and not isinstance(grads, str):
            grads = list(grads)  # the values of a dictionary, or a generator
        leaves = [_array("grads", leaf) for leaf in jax.tree.leaves(grads)]
        for leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(f"Expected gradients of a floating dtype; got {leaf.dtype}.")
        state = ScaledStepState(read(self._state))
        done = ScaledStep(self.rule).step(_nothing, state, (), leaves)
        assign(jax.tree.leaves(self._state), jax.tree.leaves(done.state.rule_state))
        return None, done.finite

    def get_config(self) -> dict[str, Any]:
        names = ("initial_loss_scale", "increment_period", "multiplier")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        scale, good_steps = self._state.scale, self._state.good_steps
        live = f"current_loss_scale={float(scale)}, num_good_steps={int(good_steps)}"
        config = ", ".join(f"{name}={value}" for name, value in self.get_config().items())
        return f"DynamicLossScale({live}, {config})"


def _array(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Expected arrays or numbers in {name}; got {brief(repr(value))}."
        ) from error


def summed(loss: Any, grad_loss: Any = None) -> Any:
    """A loss that sums the elements of another one, times `grad_loss` if that is given."""
    if not callable(loss):
        return loss  # which is an error where it is differentiated

    def one() -> jax.Array:
        value = array_of_loss(loss())
        if grad_loss is None:
            return jnp.sum(value)
        weights = jnp.asarray(grad_loss)
        if weights.shape != value.shape:
            raise ValueError(
                f"Expected grad_loss of the loss's shape, {value.shape}; got shape "
                f"{weights.shape}. Write jax.numpy.broadcast_to(grad_loss, {value.shape})."
            )
        return jnp.sum(value * weights)

    return one


def _nothing(norms: Sequence[jax.Array], state: PyTree) -> tuple[None, Any]:
    """An update that changes nothing: the caller takes the step."""
    return None, state


class UnscaledLossScaleOptimizer(LossScaleOptimizer):
    """A `LossScaleOptimizer` whose `apply` takes gradients that are already unscaled."""

    _is_base = True
    _conventions = Conventions(unscaled=True, sums_losses=True)

    def _divided(self, grads: Iterable[Any]) -> list[Any]:
        arrays = [g if g is None else _array("grads", g) for g in grads]
        floating = [
            g.astype(jnp.float32) if g is not None and jnp.issubdtype(g.dtype, jnp.integer) else g
            for g in arrays
        ]
        return gradients.unscale(floating, self._loss_scale())

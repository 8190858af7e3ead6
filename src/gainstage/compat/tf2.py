"""`tf.keras.mixed_precision.LossScaleOptimizer` of TensorFlow 2.4 to 2.15."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, overload

import jax
import numpy as np
from jax.typing import DTypeLike

from gainstage._base import checks
from gainstage._base.arrays import ARRAYS
from gainstage._base.configurable import description_of, object_from
from gainstage._variables.arguments import pairs_in, variables_in
from gainstage._variables.types import Rate, Scalar, Values
from gainstage._variables.variable import Variable
from gainstage.compat import stateful_scale
from gainstage.optimizers._step import saving
from gainstage.optimizers._step.differentiate import VarList
from gainstage.optimizers._step.slots import Initializer
from gainstage.optimizers._step.store import Computed
from gainstage.optimizers.optimizer import Optimizer
from gainstage.rules import loss_scale as rules

__all__ = ["LossScaleOptimizer"]


def __dir__() -> list[str]:
    return __all__


class LossScaleOptimizer(stateful_scale.UnscaledLossScaleOptimizer):
    """Loss scaling with gradients that the caller unscales: scale, differentiate, unscale, apply.

    A step with a non-finite gradient is skipped, also with a fixed scale, and counts in
    `iterations`. An overflow never lowers the scale below 1.

    Args:
        inner_optimizer: the optimizer that takes the steps.
        dynamic: whether the scale adapts.
        initial_scale: the first scale, by default `2**15`; required if `dynamic` is False.
        dynamic_growth_steps: finite steps in a row before the scale is doubled, by default 2000; 0
            means 1. Not allowed if `dynamic` is False.

    Raises:
        TypeError: no optimizer, one that is wrapped, or `dynamic` is not a bool.
        ValueError: another wrapper has the optimizer, or the scale arguments do not fit.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage.compat import tf2
        >>> var = gs.optimizers.Variable(1.0)
        >>> opt = tf2.LossScaleOptimizer(gs.optimizers.SGD(0.25))
        >>> loss = lambda: var**2
        >>> print(opt.get_scaled_loss(loss)())
        32768.0
        >>> value = opt.minimize(loss, [var])
        >>> print(var.value(), opt.iterations.value())
        0.5 1

    Source: `tf.keras.mixed_precision.LossScaleOptimizer` (TensorFlow 2.15).
    """

    _conventions = dataclasses.replace(
        stateful_scale.UnscaledLossScaleOptimizer._conventions,
        lowest_scale=stateful_scale.FLOOR,
        counts_skipped_steps=True,
        averages_start_as_weights=True,
    )

    def __init__(
        self,
        inner_optimizer: Optimizer,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
    ):
        steps = "dynamic_growth_steps"
        scales = {"initial_scale": initial_scale, steps: dynamic_growth_steps}
        given: dict[str, Any] = {name: value for name, value in scales.items() if value is not None}
        if dynamic_growth_steps is not None:
            given[steps] = max(checks.integer(steps, dynamic_growth_steps, low=0), 1)
        self._given = set(given)
        super().__init__(inner_optimizer, dynamic=dynamic, **given)
        self._forgotten = {"get_scaled_loss", "get_unscaled_gradients"}

    @property
    def learning_rate(self) -> Variable:
        """The inner optimizer's learning rate. Of a schedule, the rate of the last step; before
        any, that of the first."""
        rate = self._inner.learning_rate
        scheduled = isinstance(rate, Computed) and not self._store.has_own_rate
        return self._store.rate_now(steps_ago=1) if scheduled else rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Rate) -> None:
        self._inner.learning_rate = learning_rate

    @property
    def lr(self) -> Variable:
        """The learning rate, by its older name."""
        return self.learning_rate

    def __setattr__(self, name: str, value: object) -> None:
        name = "learning_rate" if name == "lr" else name
        if self._is_of_inner(name):
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that the wrapper itself does not have.
        if self._is_of_inner(name):
            return getattr(self._inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        inner = filter(self._is_of_inner, type(self._inner).__signature__.parameters)
        return [*super().__dir__(), *inner]

    def _get_option(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _set_option(self, name: str, value: object) -> None:
        setattr(self._inner, name, value)

    def _is_of_inner(self, name: str) -> bool:
        """Whether an attribute is an argument of the inner optimizer, and not of the wrapper."""
        inner = vars(self).get("_inner")
        arguments = type(inner).__signature__.parameters if inner else ()
        return name in arguments and name not in vars(self) and not hasattr(type(self), name)

    @property
    def weights(self) -> list[Variable]:
        """The count of steps, then the slots, in TensorFlow's order: each for all variables. Then
        what `add_weight` added. Scale and learning rate are `variables`, but not among these."""
        store = self._store
        kinds = list(dict.fromkeys((name, number) for _, name, number in store.slots.of))
        place = {slot: kinds.index((n, i)) for (_, n, i), slot in store.slots.of.items()}
        scale = jax.tree.leaves(self._scale_store.state)
        left_out = {store.steps, store.rate.variable, *scale}
        rest = [variable for variable in self.variables if variable not in left_out]
        return [store.steps, *sorted(rest, key=lambda v: place.get(v, len(kinds)))]

    def get_weights(self) -> list[np.ndarray]:
        """Returns the values of `weights`."""
        return [variable.numpy() for variable in self.weights]

    def set_weights(self, weights: Values) -> None:
        """Sets all of `weights`, or all of `variables`, by the number of values; changes none if a
        value does not fit.

        Raises:
            TypeError: `weights` is not a list.
            ValueError: not built, the wrong number of arrays, or an array that does not fit.
        """
        own = self.weights
        if not hasattr(weights, "__len__") or len(weights) != len(own):
            super().set_weights(weights)
            return
        self._built_variables("set_weights")
        saving.set_all(own, weights, {})

    def add_slot(
        self, var: Variable, slot_name: str, initializer: Initializer = "zeros"
    ) -> Variable:
        """Returns the inner optimizer's slot of a variable; adds it if there is none. The
        initializer may be a number or an array."""
        slots, key = self._store.slots, (var, slot_name, 0)
        return slots.of[key] if key in slots.of else slots.add_like(var, slot_name, initializer)

    def add_weight(
        self,
        name: str,
        shape: Sequence[int] = (),
        dtype: DTypeLike | None = None,
        initializer: Initializer = "zeros",
        trainable: bool | None = None,
        synchronization: object = None,
        aggregation: object = None,
    ) -> Variable:
        """Adds a variable to the state. The last three of TensorFlow's arguments have no effect."""
        return self.add_variable(shape, initializer, dtype, name=name)

    @property
    def iterations(self) -> Variable:
        """The number of steps so far, skipped ones included. A variable that is assigned before
        `build` becomes the counter."""
        return super().iterations

    @iterations.setter
    def iterations(self, value: Scalar) -> None:
        self._store.set_count(value)

    @overload
    def get_scaled_loss(self, loss: Scalar) -> jax.Array: ...

    @overload
    def get_scaled_loss(self, loss: Callable[[], Scalar]) -> Callable[[], jax.Array]: ...

    def get_scaled_loss(self, loss: Scalar | Callable[[], Scalar]) -> Any:
        """Returns the loss times the scale, in float32 or wider; for a callable, a callable."""
        self._forgotten.discard("get_scaled_loss")
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Returns the gradients divided by the scale, in float32 or wider; None stays None."""
        if not isinstance(grads, Iterable) or isinstance(grads, (*ARRAYS, Variable, Mapping, str)):
            raise TypeError(f"Expected a list of gradients for grads; got {checks.brief(grads)}.")
        self._forgotten.discard("get_unscaled_gradients")
        return self._divided(list(grads))

    def minimize(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        loss: Callable[[], Any],
        var_list: VarList,
        grad_loss: object = None,
        name: str | None = None,
        tape: object = None,
    ) -> jax.Array:
        """Scales, differentiates, unscales and applies; returns the true loss.

        Args:
            loss: a callable of no argument; a result that is not a scalar is summed.
            var_list: the variables to train, or a callable that returns them, called after the
                loss.
            grad_loss: weights of the loss's elements; None for 1.
            name, tape: accepted for TensorFlow; `tape` must be None, as there are no tapes here.
        """
        _refuse(tape)
        if grad_loss is not None:
            loss = stateful_scale.summed(loss, grad_loss)
        return super().minimize(loss, var_list)

    def compute_gradients(
        self, loss: Callable[[], Any], var_list: VarList, tape: object = None
    ) -> list[tuple[jax.Array | None, Variable]]:
        """Returns the unscaled (gradient, variable) pairs of a loss, whose elements are summed."""
        _refuse(tape)
        self._forgotten.clear()  # this method scales and unscales itself
        return super().compute_gradients(loss, var_list)

    def get_gradients(self, loss: Callable[[], Any], params: VarList) -> list[jax.Array | None]:
        """Returns the unscaled gradients of a loss, a callable.

        Raises:
            ValueError: the loss does not depend on one of the variables.
        """
        return [gradient for gradient, _ in self._all_gradients(loss, params)]

    def get_updates(self, loss: Callable[[], Any], params: VarList) -> list[Variable]:
        """Takes a step as `minimize`; returns `iterations` in a list. Raises as `get_gradients`."""
        return [self.apply_gradients(self._all_gradients(loss, params))]

    def _all_gradients(self, loss: Callable[[], Any], params: VarList) -> Any:
        params = params if callable(params) else variables_in(params, "params")
        pairs = self.compute_gradients(loss, params)
        missing = [variable.name for gradient, variable in pairs if gradient is None]
        if missing:
            raise ValueError(
                f"Expected a loss that depends on all of params; it has no gradient for "
                f"{checks.brief(missing)}. `compute_gradients` returns None for these."
            )
        return pairs

    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """Returns the pairs unchanged: gradients here are those of the whole mesh."""
        return pairs_in(grads_and_vars)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        *,
        skip_gradients_aggregation: bool = False,
    ) -> Variable:
        """Takes a step on unscaled gradients, if they are finite.

        Args:
            grads_and_vars: (gradient, variable) pairs.
            name, experimental_aggregate_gradients, skip_gradients_aggregation: accepted for
                TensorFlow and ignored.

        Raises:
            ValueError: there are no gradients.
        """
        pairs = pairs_in(grads_and_vars)
        if not pairs:
            raise ValueError("Expected at least one (gradient, variable) pair; got none.")
        if self._forgotten and self._minimized() is None:
            warnings.warn(
                f"Expected {' and '.join(sorted(self._forgotten))} to be called before "
                f"apply_gradients: is the loss scaled, and are the gradients unscaled?",
                stacklevel=2,
            )
            self._forgotten.clear()
        return super().apply_gradients(pairs)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {
            "inner_optimizer": description_of(self.inner_optimizer),
            "dynamic": self.dynamic,
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Self:
        """Returns the optimizer of a configuration, also in the form `{optimizer, loss_scale}` that
        TensorFlow wrote up to 2.3; does not change `config`."""
        config = dict(config)
        if "loss_scale" in config:
            config |= scale_arguments(config.pop("loss_scale"))
        inner = config.pop("optimizer", None) or config.pop("inner_optimizer")
        return cls._created(object_from(inner, Optimizer, custom_objects), config)

    @classmethod
    def _created(cls, inner: Any, arguments: dict[str, Any]) -> Self:
        """The optimizer around another one, by the arguments of `tf2.LossScaleOptimizer`, and by
        those that a subclass has added."""
        return cls(inner_optimizer=inner, **arguments)


def _refuse(tape: object) -> None:
    if tape is not None:
        raise ValueError("Expected no tape: pass the loss as a callable.")


def scale_arguments(loss_scale: object) -> dict[str, Any]:
    """Converts a `loss_scale` to the arguments `dynamic, initial_scale, dynamic_growth_steps`.

    Args:
        loss_scale: a number, "dynamic", a stateful loss scale, a rule, or a configuration of one.

    Raises:
        ValueError: it is anything else, or a dynamic scale with settings that would be lost.
    """
    if isinstance(loss_scale, Mapping):
        loss_scale = object_from(loss_scale, stateful_scale.LossScale)
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return {"dynamic": True}
    rule = getattr(loss_scale, "rule", loss_scale)
    if isinstance(rule, rules.FixedLossScale):
        rule = rule.loss_scale_value
    if isinstance(rule, rules.DynamicLossScale):
        usual = rules.DynamicLossScale(rule.initial_loss_scale, rule.increment_period)
        floored = dataclasses.replace(usual, min_scale=stateful_scale.FLOOR)
        keras = rules.keras_rule(rule.initial_loss_scale, rule.increment_period)
        if rule not in (usual, floored, keras):
            raise ValueError(
                f"Expected loss_scale with a multiplier of 2, and nothing else but a first scale "
                f"and a period; got {rule}."
            )
        return {
            "dynamic": True,
            "initial_scale": rule.initial_loss_scale,
            "dynamic_growth_steps": rule.increment_period,
        }
    if isinstance(rule, stateful_scale.LossScale):
        raise checks.InvalidArgumentError(
            f"Expected a FixedLossScale or DynamicLossScale for loss_scale; got a "
            f"{type(rule).__name__}. compat.v1.MixedPrecisionLossScaleOptimizer takes your own "
            f"LossScale."
        )
    try:
        return {"dynamic": False, "initial_scale": checks.real("loss_scale", rule, above=0)}
    except TypeError as error:
        raise ValueError(
            f"Expected a number, 'dynamic', a FixedLossScale or a DynamicLossScale for loss_scale; "
            f"got {loss_scale!r}."
        ) from error

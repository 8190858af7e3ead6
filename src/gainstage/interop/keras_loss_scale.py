"""The `LossScaleOptimizer` of Keras, with any rule."""

# Keras is not typed.
# pyright: reportCallIssue=false

import warnings
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._base.checks import as_power, brief
from gainstage._base.configurable import description_of, object_from
from gainstage._base.dead_run import DEAD
from gainstage._base.signals import deferred_signals
from gainstage._base.warn import warn
from gainstage._scaling import gradients
from gainstage._scaling.scaled_step import ScaledStep, ScaledStepState
from gainstage._variables.types import PyTree
from gainstage._variables.variable import is_inside, is_tracing
from gainstage.interop.keras_backend import PACKAGE, keras
from gainstage.interop.keras_statistics import warned_of_statistics
from gainstage.optimizers._step.given_gradients import not_an_array
from gainstage.optimizers._step.options import DEFAULTS, OPTIONS
from gainstage.optimizers.optimizer import Optimizer
from gainstage.rules.loss_scale import (
    FixedLossScale,
    LossScale,
    LossScaleLike,
    as_rule,
    is_default,
    keras_rule,
    start,
    with_number,
)

# Whether a loss was multiplied by the scale; perhaps, if it was read since the last `apply`.
UNSCALED, READ, SCALED = range(3)
FAR = 2.0**16  # a fall of the scale in one fit that no search explains
CONSTANTS = (bool, int, float, str, tuple, type(None))  # the types of an optimizer's settings


@keras.saving.register_keras_serializable(PACKAGE, "LossScaleOptimizer")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras's `LossScaleOptimizer` with any rule, a bounded scale, and an `apply` that works.

    It replaces Keras's own: `compile` with the policy `mixed_float16` does not wrap it again. Its
    decisions are those of Keras, where Keras works. Gradients are unscaled in float32.

    Args:
        inner_optimizer: an optimizer of Keras.
        initial_scale: the first scale, > 0.
        dynamic_growth_steps: finite steps in a row before the scale is doubled, >= 1.
        name: the optimizer's name.
        loss_scale: instead of `initial_scale` and `dynamic_growth_steps`, a number > 0 for a fixed
            scale, a `LossScale`, which is a rule, or None for none; "dynamic" leaves it to them.
        **kwargs: further arguments of Keras's class, which its configurations contain.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer of Keras or scales losses itself, or
            `loss_scale` is not one of those.
        ValueError: an argument is out of range, or `loss_scale` is combined with the two others.

    Examples:
        >>> import keras, numpy as np
        >>> from gainstage.interop.keras import LossScaleOptimizer
        >>> model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
        >>> opt = LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**10)
        >>> model.compile(opt, "mse")
        >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
        >>> print(float(opt.dynamic_scale.value))
        1024.0

    Source: `keras.optimizers.LossScaleOptimizer`.
    """

    # The program of an eager `apply`, after the settings that it has as constants.
    _program: Any = (None, None)
    _scaled = UNSCALED  # whether a loss was multiplied by the scale
    _is_needed = True  # whether its model computes in float16 or float8, by `keras_autocast`
    _told: frozenset[str] = frozenset()  # of what it has warned: "statistics", "dead"
    # The steps that were applied up to the last fit, and the scale after it.
    _last_fit: tuple[int, float | None] = (0, None)
    _compiled_growth_steps: int | None = None  # those of the step that `fit` has compiled

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        loss_scale: LossScaleLike = "dynamic",
        **kwargs: Any,
    ):
        if isinstance(inner_optimizer, Optimizer):
            raise TypeError(
                f"Expected an optimizer of Keras for inner_optimizer, such as "
                f"keras.optimizers.Adam(1e-3); got gainstage's {type(inner_optimizer).__name__}."
            )
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                f"Expected an optimizer of Keras for inner_optimizer; got {inner_optimizer!r}. Use "
                f"keras.optimizers.get to create one by name."
            )
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise TypeError(
                f"Expected an inner_optimizer that does not scale losses; got "
                f"{type(inner_optimizer).__name__} {inner_optimizer.name!r}. Pass its "
                f"`inner_optimizer`."
            )
        rule = _chosen_rule(initial_scale, dynamic_growth_steps, loss_scale)
        first = float(start(rule).scale)
        super().__init__(inner_optimizer, first, dynamic_growth_steps, name, **kwargs)
        self.rule = rule

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of the rule, then that of the inner optimizer."""
        if self.built:
            return
        self.step_counter = self.add_variable((), "zeros", "int", "none", name="step_counter")
        first = keras.initializers.Constant(self.initial_scale)
        self.dynamic_scale = self.add_variable((), first, "float32", "none", name="dynamic_scale")
        # Keras's wrapper builds it with tracking off. A variable that the inner `build` assigns as
        # a plain attribute, as Nadam's does, would then not be one of the optimizer's.
        self.inner_optimizer.build(variables)
        keras.optimizers.Optimizer.build(self, variables)
        state = start(self.rule)._asdict()
        counts = {"good_steps": self.step_counter, "scale": self.dynamic_scale}
        for field, value in state.items():
            if value is not None and field not in counts:
                constant = keras.initializers.Constant(value)
                counts[field] = self.add_variable((), constant, str(value.dtype), name=field)
        self._counts = counts

    @property
    def loss_scale(self) -> jax.Array:
        """The current scale, a float32 scalar; 1 for a model of `compile` or `autocast` that
        computes in bfloat16, which needs none. It can be set. During `fit` Keras keeps the state
        elsewhere; call `model.jax_state_sync()` first in a callback."""
        if not self._is_needed:
            return jnp.float32(1)
        # A trace reads it to compute with it; one that never changes may be read once.
        multiplies = is_inside() or isinstance(self.rule, FixedLossScale)
        self._scaled = max(self._scaled, SCALED if multiplies else READ)
        if not keras.src.backend.common.stateless_scope.in_stateless_scope():
            self._check_that_it_changes()
        elif self.built and self._has_no_value():
            raise RuntimeError(
                "Expected scale_loss and loss_scale where Keras knows the optimizer's variables. "
                "Leave them out of compute_loss: after it, Keras multiplies by the scale itself. "
                "In your own keras.StatelessScope, map `optimizer.variables` to their values."
            )
        if not self.built:
            return jnp.float32(self.initial_scale)
        return self.dynamic_scale.value

    @loss_scale.setter
    def loss_scale(self, scale: ArrayLike) -> None:
        scale = checks.loss_scale("loss_scale", scale)
        if not self.built:
            raise ValueError(
                f"Expected {self.name!r} to be built before loss_scale={scale!r}. Write "
                f"optimizer.build(model.trainable_variables), or pass initial_scale."
            )
        self.dynamic_scale.assign(scale)

    def _has_no_value(self) -> bool:
        """Whether neither the scale's variable nor an active scope has a value for it."""
        scope = keras.src.backend.common.stateless_scope.get_stateless_scope()
        known = scope is not None and scope.get_current_value(self.dynamic_scale) is not None
        return self.dynamic_scale._value is None and not known

    def _check_that_it_changes(self) -> None:
        """Raises an error if the scale is read where Keras has its value, or as a constant."""
        if self.built and self._has_no_value():
            raise RuntimeError(
                "Expected scale_loss and loss_scale to be called where Keras knows the optimizer's "
                "variables: in keras.StatelessScope, as compute_loss_and_updates does, or after "
                "model.jax_state_sync() in a callback."
            )
        traced = self.built and isinstance(self.dynamic_scale._value, Tracer)
        if not traced and not isinstance(self.rule, FixedLossScale) and is_tracing():
            raise ValueError(
                f"Expected the loss scale of {self.name!r} to be an argument of the function that "
                f"is compiled; got a number, which would be frozen into the program. Pass "
                f"`optimizer.loss_scale` in, and multiply the loss by it. With stateless_apply: "
                f"`with keras.StatelessScope(zip(optimizer.variables, state)): loss = "
                f"optimizer.scale_loss(loss)`."
            )

    def scale_loss(self, loss: ArrayLike) -> jax.Array:
        """Returns the loss times the scale, in float32; the loss itself where none is needed."""
        self._check_factor()
        if not self._is_needed:
            self._scaled = SCALED
            return jnp.asarray(gradients.upcast(loss))
        self._scaled = SCALED
        return gradients.scaled(loss, self.loss_scale)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Takes a step on gradients of `scale_loss(loss)`: one compiled program when it is called
        eagerly. Gradients may be None, and variables some of those it was built with."""
        if self._program[1] is not None:  # else `_step` is traced, and looks
            self._check_scaled()
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise ValueError(f"Expected {self.name!r} to be built; call `build(variables)`.")
            self.build(list(trainable_variables))
        weights = self._trainable_variables
        chosen = weights if trainable_variables is None else list(trainable_variables)
        self._check_variables_are_known(chosen)
        if len(grads) != len(chosen):
            raise ValueError(
                f"Expected {len(chosen)} gradients, one for each of "
                f"{brief([v.path for v in chosen])}; got {len(grads)}."
            )
        _warn_of_missing(chosen, grads)
        ordered: list[Any] = [None] * len(weights)
        for variable, gradient in zip(chosen, grads, strict=True):
            ordered[self._get_variable_index(variable)] = gradient
        step = self._step
        if not keras.src.backend.common.stateless_scope.in_stateless_scope():
            constants = self._is_needed, self.rule, _constants_of(self.inner_optimizer)
            if self._program[0] != constants:
                self._program = constants, jax.jit(partial(step))
            step = self._program[1]
        new = step([v.value for v in self.variables], ordered, [v.value for v in weights])
        with deferred_signals():
            for variables, results in zip((weights, self.variables), new, strict=True):
                for variable, value in zip(variables, results, strict=True):
                    variable.assign(value)
        self._scaled = UNSCALED if self._scaled == READ else self._scaled

    def _check_scaled(self) -> None:
        """Warns of gradients of a loss that cannot have been multiplied by the scale."""
        if self._is_needed and self._scaled == UNSCALED and self.rule != FixedLossScale(1.0):
            self._scaled = SCALED  # warn once
            warn(
                f"`apply` of {self.name!r} divides gradients by the loss scale, but no loss was "
                f"multiplied by it. Differentiate optimizer.scale_loss(loss), as "
                f"compute_loss_and_updates does."
            )

    def _step(
        self, optimizer_variables: PyTree, grads: PyTree, trainable_variables: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        self._check_factor()
        self._check_scaled()
        counters = list(optimizer_variables[: len(self._variables)])
        inner = list(optimizer_variables[len(self._variables) :])
        place = {id(v): i for i, v in enumerate(self._variables)}
        places = {field: place[id(v)] for field, v in self._counts.items()}
        empty = start(self.rule)
        state = empty._replace(
            **{f: counters[i] for f, i in places.items() if getattr(empty, f, None) is not None}
        )
        named = zip(self._trainable_variables, grads, strict=True)
        arrays = [g if g is None else _gradient_array(variable.path, g) for variable, g in named]
        optimizer = self.inner_optimizer
        kept = [self._overwrite_variable_with_gradient(v) for v in self._trainable_variables]

        scale = state.scale if self._is_needed else None

        def update(norms: Any, old: PyTree) -> tuple[None, PyTree]:
            # Quantized layers pass a measurement instead of a gradient; it is not unscaled.
            true = [
                g if g is None or keep else gradients.unscale(g, scale)
                for g, keep in zip(grads, kept, strict=True)
            ]
            with warnings.catch_warnings():  # our `apply` has told what the user gave no gradient
                warnings.filterwarnings("ignore", "Gradients do not exist")
                new = tuple(map(list, optimizer.stateless_apply(old[1], true, old[0])))
            return None, jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)

        old = (list(map(jnp.asarray, trainable_variables)), list(map(jnp.asarray, inner)))
        measured = [None if keep else g for g, keep in zip(arrays, kept, strict=True)]
        known = {id(v): value for v, value in zip(optimizer.variables, inner, strict=True)}
        accumulates = optimizer.gradient_accumulation_steps
        sums = [known[id(v)] for v in optimizer._accumulated_gradients] if accumulates else []
        scaling = ScaledStep(self.rule, conditional=True)
        now = ScaledStepState(state)
        by = 1.0 if scale is None else scale
        how: dict[str, Any] = {"checked": arrays, "is_scaled": self._is_needed}
        done = scaling.step(update, now, old, measured, by, onto=sums, **how)
        weights, inner = done.inner
        for field, value in done.state.rule_state._asdict().items():
            if value is not None:
                counters[places[field]] = jnp.asarray(value, counters[places[field]].dtype)
        return weights, counters + inner

    def _check_factor(self) -> None:
        if self.inner_optimizer.loss_scale_factor is not None:
            raise ValueError(
                f"Expected an inner_optimizer without loss_scale_factor, which would divide "
                f"gradients once more; got {self.inner_optimizer.loss_scale_factor!r}. Set "
                f"initial_scale."
            )

    def __setattr__(self, name: str, value: object) -> None:
        if name in OPTIONS and value != DEFAULTS[name] and "inner_optimizer" in vars(self):
            raise AttributeError(
                f"Expected {name} to be set on the inner optimizer: it has no effect on the "
                f"wrapper. Write optimizer.inner_optimizer.{name} = {value!r}."
            )
        if name in ("initial_scale", "dynamic_growth_steps") and "rule" in vars(self):
            self.rule = rule = with_number(self.rule, name, value)
            super().__setattr__("initial_scale", rule.initial_loss_scale)
            super().__setattr__("dynamic_growth_steps", rule.increment_period)
            return
        super().__setattr__(name, value)

    def stateless_apply(
        self, optimizer_variables: PyTree, grads: PyTree, trainable_variables: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Takes the step as a pure function; returns `(trainable, optimizer variables)`."""
        if not self.built:
            raise ValueError(f"Expected {self.name!r} to be built; call `build(variables)`.")
        weights = self._trainable_variables
        if not len(weights) == len(grads) == len(trainable_variables):
            raise ValueError(
                f"{self.name!r} was built with {len(weights)} trainable variables; got "
                f"{len(grads)} gradients for {len(trainable_variables)}. After freezing or "
                f"unfreezing layers compile the model again, with a new optimizer."
            )
        if len(optimizer_variables) != len(self.variables):
            raise ValueError(
                f"{self.name!r} has {len(self.variables)} variables; got "
                f"{len(optimizer_variables)} values for them."
            )
        self._compiled_growth_steps = self.dynamic_growth_steps
        _warn_of_missing(weights, grads)
        if "statistics" not in self._told and warned_of_statistics():
            self._told |= {"statistics"}
        return self._step(optimizer_variables, grads, trainable_variables)

    def update_step(self, gradient: ArrayLike, variable: Any, learning_rate: ArrayLike) -> None:
        """Applies the inner optimizer's update to one variable, with an unscaled gradient."""
        self.inner_optimizer.update_step(gradient, variable, learning_rate)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Sets the variables to the inner optimizer's moving averages, if it keeps them.

        Keras calls it at the end of `fit`. It warns, once, if no step was applied since the last
        time, and the scale has fallen to its minimum, or by `2**16`; of a fixed scale if none was
        ever applied."""
        if self._compiled_growth_steps not in (None, self.dynamic_growth_steps):
            warn(
                f"{self.name!r} was set to dynamic_growth_steps={self.dynamic_growth_steps} after "
                f"fit had compiled its step with {self._compiled_growth_steps}, which went on. "
                f"Write model.compile(optimizer, ...) before the next fit."
            )
            self._compiled_growth_steps = None
        ran = self._scaled == SCALED
        if self._program[1] is None:  # Keras's `fit` has scaled, which says nothing of `apply`
            self._scaled = UNSCALED
        count = self.inner_optimizer._iterations
        if self.built and count._value is None:
            return  # a fit has failed, and left no values
        if self.built:
            self._tell_if_dead(int(count.value), ran)
            if not self._last_fit[0]:
                return  # there is no average before the first step
        super().finalize_variable_values(var_list)
        if self.inner_optimizer.use_ema:
            for variable in var_list:  # Keras shares one buffer, which `fit` would donate twice
                variable.assign(jnp.copy(variable.value))

    def _tell_if_dead(self, applied: int, ran: bool) -> None:
        """Warns, once, at the end of a fit in which no step was applied."""
        before, begun = self._last_fit
        scale = float(self.dynamic_scale.value)
        self._last_fit = applied, scale
        if applied != before or "dead" in self._told:
            return
        bad_steps = int(self._counts["bad_steps"].value) if "bad_steps" in self._counts else 0
        what = advice = ""
        if not self._is_needed:
            if ran and not applied:
                what = "in a precision that needs no loss scale"
        elif isinstance(self.rule, FixedLossScale):
            if ran and not applied:  # later it may be one bad batch
                what = f"at the fixed loss scale of {as_power(scale)}"
                advice = " A rule finds a lower scale: loss_scale=gainstage.DynamicLossScale()."
        elif bad_steps >= DEAD:
            what = f"and {bad_steps} in a row were skipped"
        elif scale <= max(getattr(self.rule, "min_scale", 0), (begun or self.initial_scale) / FAR):
            what = f"and the loss scale has fallen to {as_power(scale)}"
        if what:
            self._told |= {"dead"}
            warn(
                f"No step since the last fit was applied, {what}. Look at the data, the learning "
                f"rate and the loss; LogLossScale says in which epoch it began.{advice}"
            )

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Loads the state, also what Keras's own wrapper of a Nadam has saved without its product;
        it is then computed, with a warning."""
        inner, keys = self.inner_optimizer, store.keys()
        if isinstance(inner, keras.optimizers.Nadam) and len(keys) == len(self.variables) - 1:
            place = {id(variable): i for i, variable in enumerate(self.variables)}
            values = [store[str(i)] for i in range(len(keys))]
            count = int(np.asarray(values[place[id(inner._iterations)]]))
            taken = np.arange(1, 1 + count // (inner.gradient_accumulation_steps or 1))
            product = np.prod(inner.beta_1 * (1 - 0.5 * 0.96**taken))
            values.insert(place[id(inner._u_product)], product)
            store = {str(i): value for i, value in enumerate(values)}
            warn(
                f"Keras's LossScaleOptimizer does not save the product of a Nadam's momenta. For "
                f"{inner.name!r} it was computed from its iterations and beta_1, which are right "
                f"if beta_1 never changed."
            )
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments; without a rule, Keras's own class takes them too."""
        config = super().get_config()
        if self.rule == keras_rule(self.initial_scale, self.dynamic_growth_steps):
            return config
        return {**config, "loss_scale": description_of(self.rule)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Any:
        """Returns the optimizer that `get_config` describes."""
        config = dict(config)
        if isinstance(config.get("loss_scale"), Mapping):
            config["loss_scale"] = object_from(config["loss_scale"], LossScale, custom_objects)
        return super().from_config(config, custom_objects)


def _gradient_array(variable: str, gradient: Any) -> jax.Array:
    try:
        return jnp.asarray(gradient)
    except (TypeError, ValueError) as error:
        raise not_an_array(variable, gradient) from error


def _warn_of_missing(variables: Sequence[Any], grads: Sequence[Any]) -> None:
    missing = [v.path for v, g in zip(variables, grads, strict=True) if g is None]
    if 0 < len(missing) < len(grads):  # if all are missing, the step raises
        warnings.warn(
            f"Gradients do not exist for variables {brief(missing)} when minimizing the loss. They "
            f"stay as they are. With model.compile(), is the `loss` argument given?",
            stacklevel=3,
        )


def _constants_of(optimizer: Any) -> Hashable:
    """The numbers and flags of an optimizer, and its learning rate unless that is a variable: if
    one has changed, an eager step is compiled again."""
    rate: Any = optimizer._learning_rate
    kept = (keras.optimizers.schedules.LearningRateSchedule, keras.Variable)
    if callable(rate) and not isinstance(rate, kept):
        now: Any = rate()  # as Keras does in each step
        rate = float(now)
    rate = None if isinstance(rate, keras.Variable) else rate
    schedule = getattr(rate, "__dict__", {})
    each = vars(optimizer) | {f"learning_rate.{name}": value for name, value in schedule.items()}
    return rate, *((name, value) for name, value in each.items() if isinstance(value, CONSTANTS))


def _chosen_rule(initial_scale: float, growth_steps: int, loss_scale: LossScaleLike) -> LossScale:
    if is_default(loss_scale):
        return keras_rule(initial_scale, growth_steps)
    first = float(start(as_rule("loss_scale", loss_scale)).scale)  # a configuration has it too
    given = {"initial_scale"} if initial_scale not in (2.0**15, first) else set()
    given |= {"dynamic_growth_steps"} if growth_steps != 2000 else set()
    return as_rule("loss_scale", loss_scale, given)

"""Loss scaling around any optimizer: scale the loss, skip overflowed steps, adapt the scale."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, Unpack, overload

import jax

from gainstage._base import checks
from gainstage._base.arrays import one_more
from gainstage._base.configurable import description_of, object_from
from gainstage._base.warn import warn
from gainstage._scaling.finite_check import all_finite
from gainstage._scaling.gradients import Gradient, Gradients
from gainstage._scaling.retry_loop import NO_RETRY, checked_retries
from gainstage._scaling.scaled_step import ScaledStep
from gainstage._scaling.step_telemetry import Observed, at_first, check_telemetry
from gainstage._variables.sharding import replicate
from gainstage._variables.types import Aux, P, PyTree, Rate, Scalar
from gainstage._variables.variable import Variable, is_inside
from gainstage.optimizers._step import saving
from gainstage.optimizers._step.differentiate import VarList
from gainstage.optimizers._step.optimizer_step import OptimizerState, StepInputs
from gainstage.optimizers._step.options import (
    OPTIONS,
    Setting,
    WrapperOptions,
    check_options,
    ignore_decay,
)
from gainstage.optimizers._step.retries import take_with_retries
from gainstage.optimizers._step.slots import Slots
from gainstage.optimizers._step.store import LossScaleStore
from gainstage.optimizers.inner_checks import check_inner, check_one_scale, chosen_rule
from gainstage.optimizers.optimizer import Optimizer
from gainstage.rules import DynamicLossScale, FixedLossScale, LossScale
from gainstage.rules.loss_scale import LossScaleLike, keras_rule, with_number
from gainstage.transforms.loss_scale_state import applied_in, observed_in
from gainstage.transforms.marks import marked

NOT_IN_STATE = (
    "Expected the loss scale of {name!r} in the state of the function that is traced; got a number "
    "that would be frozen into the program. In gainstage.optimizers.jit, add optimizer.variables "
    "to `state`. With stateless_apply, read it from the state: scaled = "
    "gainstage.optimizers.functionalize(optimizer.scale_loss, optimizer.variables) once, then "
    "scaled(state, loss)[0] inside. With `apply` outside, pass optimizer.loss_scale in as an "
    "argument."
)
NEVER_SCALED = (
    "`apply` of {name!r} divides gradients by the loss scale, but no loss was multiplied by it: "
    "use `minimize`, or differentiate `optimizer.scale_loss(loss)`."
)


class LossScaleOptimizer(Optimizer):
    """An optimizer for float16: it scales the loss so that small gradients do not underflow.

    `minimize` multiplies the loss by the scale and divides the gradients by it, in float32. A step
    with a non-finite gradient changes no weight and no slot, and lowers the scale. After
    `dynamic_growth_steps` finite steps the scale is doubled. It is always finite and positive. In
    your own loop, differentiate `scale_loss(loss)` and pass the scaled gradients to `apply`.

    Args:
        inner_optimizer: the optimizer that takes the steps. It belongs to one wrapper; options
            given here act exactly as if they had been given to it.
        initial_scale: the first scale, > 0 and at most `2**126`.
        dynamic_growth_steps: finite steps in a row before the scale is doubled, >= 1.
        name: the prefix of the names of the wrapper's own variables.
        dynamic: whether the scale adapts. False needs an `initial_scale`, which then is fixed.
        loss_scale: instead of `initial_scale`, `dynamic_growth_steps` and `dynamic`, a number > 0
            for a fixed scale, a `LossScale`, which is a rule, or None for none; "dynamic" leaves it
            to them.
        telemetry: whether the state records each step for `gainstage.diagnostics.telemetry`, and
            the tensors that overflowed for `gainstage.diagnostics.report`. Adds eight scalars to
            the state, and four integers per variable.
        underflow_every: the number of steps between histograms of each gradient's magnitudes, from
            which `gainstage.diagnostics.report` computes what float16 loses. Adds 82 numbers per
            variable to the state; None for no histograms.
        **options: options of every `Optimizer`, except those that place its state.
            `loss_scale_factor` multiplies the scale.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer, is a `LossScaleOptimizer`, or its class
            overrides `apply` or another method that takes a step, which would not be called.
        ValueError: another wrapper has the inner optimizer, an option is given to both, another
            argument for the scale is given beside `loss_scale`, or one is out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable(1.0)
        >>> opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.5), initial_scale=2.0**15)
        >>> loss = opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(var.value(), opt.loss_scale)
        0.5 32768.0
        >>> opt.apply([float("inf")], [var])
        >>> print(var.value(), opt.loss_scale)
        0.5 16384.0

    Source: `keras.mixed_precision.LossScaleOptimizer`; Micikevicius et al., 2018,
    arXiv:1710.03740.
    """

    telemetry: Setting[bool] = Setting(fixed=True)
    underflow_every: Setting[int | None] = Setting(fixed=True)
    _told_of_retries = False  # that they have no effect
    _has_scaled = False  # whether a loss was multiplied by the scale, or a program reads it
    _was_read = False  # whether it was read since the last `apply`, perhaps to multiply by it

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        *,
        dynamic: bool = True,
        loss_scale: LossScaleLike = "dynamic",
        telemetry: bool = False,
        underflow_every: int | None = None,
        **options: Unpack[WrapperOptions],
    ):
        conventions, given = self._conventions, self._given
        check_inner(inner_optimizer, given, conventions.inner_argument)
        numbers = initial_scale, dynamic_growth_steps
        chosen = *numbers, dynamic, loss_scale, given, conventions.lowest_scale
        self._rule = rule = chosen_rule(*chosen)
        ignore_decay(options)
        jit_compile, mesh = options.pop("jit_compile", None), options.pop("mesh", None)
        jit_compile = inner_optimizer.jit_compile if jit_compile is None else jit_compile
        store = inner_optimizer._store
        mesh = store.mesh if mesh is None else mesh
        self._set_arguments({"name": name, "jit_compile": jit_compile, "mesh": mesh})
        self.telemetry, self.underflow_every = check_telemetry(telemetry, underflow_every)
        checked = check_options({k: v for k, v in options.items() if v is not None})
        scaled_step = ScaledStep(rule, self.telemetry, self.underflow_every, conventions.unscaled)
        self._scale_store = LossScaleStore(self.name, checked, scaled_step, self.mesh, conventions)
        self._initial_scale = checks.shortest(self._scale_store.state.rule_state.scale.numpy())
        if self.mesh is not None:
            replicate(self.name, self.mesh, jax.tree.leaves(self._scale_store.state), [])
        if store.index:
            check_one_scale(inner_optimizer, list(store.index))
            options_in_force = store.base_options.replaced(checked)
            self._scale_store.build(options_in_force, list(store.index), store.averages)
        self._store = store
        self._slots = Slots(self.name, conventions.slot_name, store.slots.shard_over)
        store.set_outer(self._scale_store)
        self._inner = inner_optimizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._store.outer is None:  # a shallow copy shares the original's
            self._store.set_outer(self._scale_store)

    # ── the scale ────────────────────────────────────────────────────────────────────────────

    @property
    def inner_optimizer(self) -> Optimizer:
        """The optimizer that takes the steps."""
        return self._inner

    @property
    def rule(self) -> LossScale:
        """The rule that updates the scale."""
        return self._rule

    @property
    def initial_scale(self) -> float:
        """The first scale."""
        return self._initial_scale

    @property
    def dynamic_scale(self) -> Variable:
        """The rule's scale, a float32 variable."""
        self._note_read()
        return self._scale_store.state.rule_state.scale

    @property
    def step_counter(self) -> Variable | None:
        """Finite steps in a row since the scale was updated (`AdaptiveLossScale`: its ceiling), an
        int32 variable; None if the rule does not count them."""
        return getattr(self._scale_store.state.rule_state, "good_steps", None)

    dynamic_counter = step_counter

    @property
    def loss_scale(self) -> jax.Array:
        """The loss scale: the rule's scale times `loss_scale_factor`."""
        self._note_read()
        return self._loss_scale()

    def _note_read(self) -> None:
        """Notes that the user reads the scale, where it may be read once for many steps."""
        self._was_read = True
        self._has_scaled |= is_inside() or not self.dynamic

    @overload
    def scale_loss(self, loss: Scalar) -> jax.Array: ...

    @overload
    def scale_loss(self, loss: Callable[P, Any]) -> Callable[P, jax.Array]: ...

    def scale_loss(self, loss: Any) -> Any:
        self._has_scaled = True
        return super().scale_loss(loss)

    @property
    def dynamic(self) -> bool:
        """Whether the scale can change."""
        return not isinstance(self._rule, FixedLossScale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The rule's `increment_period`; None for a rule without one."""
        return getattr(self.rule, "increment_period", None)

    def check_finite(self, grads: PyTree) -> jax.Array:
        """Returns whether all gradients, a pytree or iterable of arrays, are finite: a bool scalar.
        None counts as finite."""
        alone = jax.tree_util.all_leaves([grads]) and not hasattr(grads, "dtype")
        return all_finite(list(grads) if alone and isinstance(grads, Iterable) else grads)

    @overload
    def minimize(
        self,
        loss: Callable[[], Scalar],
        var_list: VarList,
        *,
        has_aux: Literal[False] = False,
        retries: bool | int = 0,
    ) -> jax.Array: ...

    @overload
    def minimize(
        self,
        loss: Callable[[], tuple[Scalar, Aux]],
        var_list: VarList,
        *,
        has_aux: Literal[True],
        retries: bool | int = 0,
    ) -> tuple[jax.Array, Aux]: ...

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: VarList,
        *,
        has_aux: bool = False,
        retries: bool | int = 0,
    ) -> Any:
        """Differentiates the scaled `loss` and takes a step.

        The loss may assign variables that it does not train, such as the running mean of a
        normalisation. They keep their new values only if the step was applied: a skipped step
        changes nothing but the loss scale.

        Args:
            loss: a function of no argument that reads the variables and returns a scalar.
            var_list: the variables to train, or a callable that returns them. It is called after
                the loss, which may create them when it is called for the first time.
            has_aux: whether `loss` returns (loss, aux), where aux is any pytree of arrays.
            retries: True for taking a step with a non-finite gradient again until it fits, or an
                integer >= 0, the largest number of tries. Each retry calls the same loss at the
                scale that the rule has lowered. There is none if the loss is not finite, or the
                rule keeps its scale; if none is applied, the scale is that after one skipped step.
                Inside `gainstage.optimizers.jit` it is a loop of the program; otherwise the host
                reads after each step whether to retry.

        Returns:
            The unscaled loss before the step, in float32 or wider; (loss, aux) with `has_aux`.

        Raises:
            TypeError: as `compute_gradients` and `apply`, or `retries` is not a number.
            ValueError: as these, or `retries` is neither a bool nor an integer >= 0.

        Examples:
            >>> import gainstage as gs
            >>> w = gs.optimizers.Variable(1.0)
            >>> sgd = gs.optimizers.SGD(1 / 16)
            >>> opt = gs.optimizers.LossScaleOptimizer(sgd, initial_scale=2.0**126)
            >>> loss = opt.minimize(lambda: 4 * w**2, [w], retries=True)  # two overflow
            >>> print(w.value(), opt.loss_scale == 2.0**124)
            0.5 True
        """
        has_aux = checks.flag("has_aux", has_aux)
        retries = checked_retries("retries", retries)
        if retries and not self.dynamic and not self._told_of_retries:
            self._told_of_retries = True
            warn(NO_RETRY)
        before = self._has_scaled
        try:
            if not retries:
                return self._take(loss, var_list, has_aux)[0]
            return take_with_retries(
                lambda: self._take(loss, var_list, has_aux),
                lambda: [*self._store.index, *self.variables],
                self._scale_store,
                retries,
            )
        finally:
            self._has_scaled = before  # what its loss reads says nothing of the next `apply`

    def compute_gradients(
        self, loss: Callable[[], Scalar], var_list: VarList
    ) -> list[tuple[jax.Array | None, Variable]]:
        self._has_scaled = True
        return super().compute_gradients(loss, var_list)

    def _loss_scale(self) -> jax.Array:
        scaled_step = self._store.options.of(self._scale_store.scaled_step)
        state = self._scale_store.state.rule_state
        try:
            scale = state.scale.value()
        except ValueError as error:
            if state.scale._is_planned:
                raise
            raise ValueError(NOT_IN_STATE.format(name=self.name)) from error
        return scaled_step.loss_scale(state._replace(scale=scale))

    def _check_scaled(self) -> None:
        was_read, self._was_read = self._was_read, False
        factor = self._store.options.loss_scale_factor
        is_one = self._rule == FixedLossScale(1.0) and factor is None
        if not (was_read or self._has_scaled or self._conventions.unscaled or is_one):
            self._has_scaled = True  # warn once
            warn(NEVER_SCALED.format(name=self.name))

    @property
    def learning_rate(self) -> Variable:
        """The inner optimizer's learning rate."""
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Rate) -> None:
        self._inner.learning_rate = learning_rate

    def _wants_loss(self) -> bool:
        return "loss" in self._rule.measures or self._inner._wants_loss()

    @property
    def _step_state(self) -> OptimizerState:
        return OptimizerState(self._scale_store.state, self._store.state)

    def _take_step(self, state: PyTree, inputs: StepInputs) -> tuple[PyTree, jax.Array | None]:
        options = {
            "variable": True,
            "fixed": not self.dynamic,
            "chosen": inputs.apply_if is not None,
            "divides": not self._conventions.unscaled,
        }
        state = _marked(state, "state", *(word for word in options if options[word]))
        inputs = inputs._replace(grads=marked(inputs.grads, "gradient"))
        step = self._inner._make_step(inputs.loss)
        new, applied = step.scaled(self._scale_store.scaled_step, state, inputs)
        if self._conventions.counts_skipped_steps and not self.gradient_accumulation_steps:
            steps = one_more(state.step_state.steps)
            new = new._replace(step_state=new.step_state._replace(steps=steps))
        return _marked(new, "new"), applied

    # ── the inner optimizer ──────────────────────────────────────────────────────────────────

    @property
    def variables(self) -> list[Variable]:
        """All state: step counter, scale, the rest of the rule's state, telemetry, then that of the
        inner optimizer."""
        rule_state = self._scale_store.state.rule_state
        documented = getattr(rule_state, "good_steps", None), rule_state.scale
        first = {v: None for v in documented if v is not None}
        rest = [v for v in jax.tree.leaves(self._scale_store.state) if v not in first]
        return [*first, *rest, *self._slots.all, *self._store.variables]

    def _get_option(self, name: str) -> Any:
        options = self._scale_store.options
        return options[name] if name in options else super()._get_option(name)

    def _set_option(self, name: str, value: object) -> None:
        self._scale_store.options[name] = self._checked_option(name, value)
        self._store.changed()

    def __setattr__(self, name: str, value: object) -> None:
        inner = vars(self).get("_inner")
        if inner is not None and name in vars(inner) and name not in vars(self):
            raise AttributeError(f"Expected {name} to be set on the inner optimizer.")
        if name == "dynamic_growth_steps" and not self._conventions.unscaled:
            self._rule = with_number(self._rule, name, value)
            self._scale_store.scaled_step = dataclasses.replace(
                self._scale_store.scaled_step, rule=self._rule
            )
            self._store.changed()
            return
        if name in ("initial_scale", "dynamic_growth_steps", "rule", "inner_optimizer"):
            advice = " Write dynamic_scale.assign(value)." if name == "initial_scale" else ""
            raise AttributeError(f"`{name}` can be set only in the constructor.{advice}")
        if name in ("dynamic_scale", "step_counter"):
            raise AttributeError(f"`{name}` is a variable: write {name}.assign(value).")
        super().__setattr__(name, value)

    def build(self, var_list: Sequence[Variable]) -> None:
        """Builds the inner optimizer for these variables."""
        check_one_scale(self._inner, var_list)
        self._slots.start_build()
        built = self.built
        self._inner.build(var_list)
        if not built:
            replicate(self.name, self.mesh, self._slots.all, list(self._store.index))

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        """Applies the inner optimizer's update to one variable, with an unscaled gradient."""
        grads: Gradients = [None] * len(self._store.index)
        grads[self._get_variable_index(variable)] = Gradient(gradient)
        self._inner._update_weights(grads, learning_rate, None)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        self._inner.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Ends the inner optimizer's training: with `use_ema`, sets variables to their averages."""
        self._inner.finalize_variable_values(var_list)

    def get_slot_names(self) -> list[str]:
        """The names of the inner optimizer's slots."""
        return self._inner.get_slot_names()

    def get_slot(self, var: Variable, slot_name: str) -> Variable:
        """Returns the inner optimizer's slot of a variable."""
        return self._inner.get_slot(var, slot_name)

    def __repr__(self) -> str:
        scale = saving.shown(self._scale_store.state.rule_state.scale)
        rule = type(self.rule).__name__
        name = type(self).__name__
        return f"<{name} {self.name!r}: scale {scale}, rule {rule}, around {self._inner!r}>"

    # ── configuration ────────────────────────────────────────────────────────────────────────

    @property
    def _weight_checks(self) -> saving.Checks:
        scale = self._scale_store.state.rule_state.scale
        return {**super()._weight_checks, scale: checks.loss_scale}

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments; each option is with the object that received it."""
        options = dict(self._scale_store.options)
        inner = description_of(self._inner)
        inner["config"] = {k: v for k, v in inner["config"].items() if k not in options}
        if options.get("weight_decay", 0) is None:  # off, whatever the inner optimizer's default
            options["weight_decay"] = 0.0
        config = {"name": self.name, "inner_optimizer": inner, **options}
        recorded = {"telemetry": self.telemetry, "underflow_every": self.underflow_every}
        config |= {name: value for name, value in recorded.items() if value}
        if type(self.rule) is FixedLossScale:
            return {**config, "initial_scale": self.rule.loss_scale_value, "dynamic": False}
        if isinstance(self.rule, DynamicLossScale):
            scale, growth_steps = self.rule.initial_loss_scale, self.rule.increment_period
            if self.rule == keras_rule(scale, growth_steps):
                return {**config, "initial_scale": scale, "dynamic_growth_steps": growth_steps}
        return {**config, "loss_scale": description_of(self.rule)}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Self:
        """Returns the optimizer that `get_config` (or Keras) describes; does not change `config`.

        Args:
            config: the constructor's arguments.
            custom_objects: classes by name for the inner optimizer, its schedule and the rule.
        """
        config = dict(config)
        config["inner_optimizer"] = object_from(
            config["inner_optimizer"], Optimizer, custom_objects
        )
        if isinstance(config.get("loss_scale"), Mapping):
            config["loss_scale"] = object_from(config["loss_scale"], LossScale, custom_objects)
        defaults = {name: p.default for name, p in cls.__signature__.parameters.items()}
        kept = {k: v for k, v in config.items() if k not in OPTIONS or v != defaults[k]}
        return cls(**kept)


def _marked(state: OptimizerState, name: str, *options: str) -> OptimizerState:
    """The same state, whose scale is marked for `lint`."""
    scaled_state = state.scaled_state
    rule_state = scaled_state.rule_state
    rule_state = rule_state._replace(scale=marked(rule_state.scale, name, *options))
    return state._replace(scaled_state=scaled_state._replace(rule_state=rule_state))


@applied_in.register
def _(opt: Optimizer) -> Any:
    return observed_in(opt).info.applied


@observed_in.register
def _(opt: Optimizer) -> Observed:
    """The telemetry of an optimizer, as variables."""
    if not isinstance(opt, LossScaleOptimizer):
        raise TypeError(
            f"Expected a LossScaleOptimizer or a state of with_loss_scale; got {opt!r}."
        )
    if not opt.telemetry:
        raise ValueError(f"Expected telemetry=True for the LossScaleOptimizer; got {opt!r}.")
    observed = opt._scale_store.state.observed
    return at_first(opt._loss_scale(), 0, None) if observed is None else observed  # not built yet

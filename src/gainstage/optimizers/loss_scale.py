"""Loss scaling around any optimizer: scale the loss, skip what overflowed, adapt the scale."""

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, Unpack

import jax
import jax.numpy as jnp

from gainstage._core import checks
from gainstage._core.bridge import read
from gainstage._core.checks import LARGEST, SMALLEST
from gainstage._core.configurable import deserialize, serialize
from gainstage._core.inspection import all_finite
from gainstage._core.measures import measure, measured_of_both
from gainstage._core.minimizer import check_verbs
from gainstage._core.observed import Observed, at_first, check_telemetry, observed
from gainstage._core.options import BEFORE_BUILD, CLIPS, OPTIONS, WrapperOptions, check_option
from gainstage._core.rules import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    advance,
    as_rule,
    start,
)
from gainstage._core.scaled_state import states_in
from gainstage._core.stateful import shown
from gainstage._core.variable import Variable, variables_like
from gainstage._core.windows import is_asked
from gainstage.optimizers.base import Optimizer
from gainstage.optimizers.optax import Optax


class LossScaleOptimizer(Optimizer):
    """An optimizer for float16: it scales the loss so that small gradients survive.

    `minimize` multiplies the loss by the scale and divides the gradients by it again, in float32.
    A step with a gradient that is not finite changes nothing but the scale, which is lowered;
    after `dynamic_growth_steps` finite steps it is doubled. The scale is finite and positive
    whatever happens. In a loop of your own differentiate `scale_loss(loss)` and hand the scaled
    gradients to `apply`.

    Args:
        inner_optimizer: the optimizer that takes the steps. It belongs to one wrapper; the
            options given here act exactly as if they had been given there.
        initial_scale: the first scale, > 0 and at most `2**126`.
        dynamic_growth_steps: finite steps in a row before the scale is doubled, >= 1.
        dynamic: False for a fixed scale, which `initial_scale` must then give.
        rule: a `LossScale` in the place of the three arguments before.
        name: the prefix of the names of the wrapper's own variables.
        telemetry: whether `gainstage.telemetry` may ask what the last step was like, and
            `gainstage.report` which tensors overflowed; adds seven scalars to the state, and four
            integers for each variable.
        underflow_every: after so many steps `telemetry` also counts how large the elements of each
            gradient are, for `gainstage.report` to say what float16 loses: 82 numbers for each in
            the state; None for never.
        **options: those of every `Optimizer` that say how a step is taken, not where its state
            lies. `loss_scale_factor` multiplies the scale.

    Raises:
        TypeError: `inner_optimizer` is no optimizer, or is a `LossScaleOptimizer`, or its class
            overrides `apply` or another method that takes a step, which would not be called.
        ValueError: an inner optimizer that another wrapper has; an option given to both; `rule`
            together with another scale argument; an argument out of range.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.Variable(1.0)
        >>> opt = gs.LossScaleOptimizer(gs.SGD(0.5), initial_scale=2.0**15)
        >>> loss = opt.minimize(lambda: (var ** 2) / 2.0, [var])
        >>> print(var.value(), opt.loss_scale)
        0.5 32768.0
        >>> opt.apply([float("inf")], [var])
        >>> print(var.value(), opt.loss_scale)
        0.5 16384.0

    Source: `keras.mixed_precision.LossScaleOptimizer`; Micikevicius et al., 2018,
    arXiv:1710.03740.
    """

    _unscales = True  # whether `apply` divides gradients by the scale

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        *,
        dynamic: bool = True,
        rule: LossScale | None = None,
        name: str | None = None,
        telemetry: bool = False,
        underflow_every: int | None = None,
        **options: Unpack[WrapperOptions],
    ):
        _check_inner(inner_optimizer, self._given)
        rule = self._chosen_rule(initial_scale, dynamic_growth_steps, dynamic, rule)
        jit_compile, mesh = options.pop("jit_compile", None), options.pop("mesh", None)
        jit_compile = inner_optimizer.jit_compile if jit_compile is None else jit_compile
        self._set_common(name, jit_compile, inner_optimizer.mesh if mesh is None else mesh)
        self._inner, self._rule = inner_optimizer, rule
        self.telemetry, self.underflow_every = check_telemetry(telemetry, underflow_every)
        state = start(rule)
        self._scale_state = variables_like(state, self.name, _DOCUMENTED)
        self._observed: Observed | None = None
        self._measured: dict[str, Variable] = {}  # of the window so far
        self._initial_scale = checks.shortest(self._scale_state.scale.numpy())
        self._has_scaled = False  # whether anybody has asked for the scale, to multiply a loss by
        # An option is an attribute of the wrapper only if it was given to it.
        for option, value in options.items():
            if value is not None:
                vars(self)[option] = check_option(option, value, vars(self))
        if inner_optimizer.built:
            _check_one_scale(inner_optimizer, list(inner_optimizer._index))
            self._build_around(list(self._index))
        inner_optimizer._wrapper_reference = weakref.ref(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._inner._wrapper is None:  # of a shallow copy it is the original's
            self._inner._wrapper_reference = weakref.ref(self)

    def _chosen_rule(
        self, initial_scale: float, growth_steps: int, dynamic: bool, rule: LossScale | None
    ) -> LossScale:
        given = self._given & {"initial_scale", "dynamic_growth_steps", "dynamic"}
        dynamic = checks.flag("dynamic", dynamic)
        checks.loss_scale("initial_scale", initial_scale)
        checks.integer("dynamic_growth_steps", growth_steps, low=1)
        if rule is not None:
            if given:
                raise ValueError(f"Expected rule alone; got rule and {', '.join(sorted(given))}.")
            return as_rule("rule", rule)
        if dynamic:
            return DynamicLossScale(initial_scale, growth_steps)
        if "initial_scale" not in given:
            raise ValueError("Expected initial_scale for dynamic=False; got none.")
        if "dynamic_growth_steps" in given:
            raise ValueError(
                f"Expected no dynamic_growth_steps for dynamic=False; got {growth_steps!r}."
            )
        return FixedLossScale(initial_scale)

    # ── the scale ────────────────────────────────────────────────────────────────────────────

    @property
    def inner_optimizer(self) -> Optimizer:
        """The optimizer that takes the steps."""
        return self._inner

    @property
    def rule(self) -> LossScale:
        """The rule that moves the scale."""
        return self._rule

    @property
    def initial_scale(self) -> float:
        """The first scale."""
        return self._initial_scale

    @property
    def dynamic_scale(self) -> Variable:
        """The rule's scale, a float32 variable."""
        self._has_scaled = True
        return self._scale_state.scale

    @property
    def step_counter(self) -> Variable | None:
        """Finite steps in a row since the scale moved (`AdaptiveLossScale`: its ceiling), an int32
        variable; None if not counted."""
        return getattr(self._scale_state, "good_steps", None)

    dynamic_counter = step_counter

    @property
    def loss_scale(self) -> jax.Array:
        """What the loss is multiplied by: the rule's scale times `loss_scale_factor`."""
        self._has_scaled = True
        return self._loss_scale()

    def scale_loss(self, loss: Any) -> Any:
        self._has_scaled = True
        return super().scale_loss(loss)

    @property
    def dynamic(self) -> bool:
        """Whether the scale can change."""
        return not isinstance(self.rule, FixedLossScale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The rule's `increment_period`; None for a rule without one."""
        return getattr(self.rule, "increment_period", None)

    def check_finite(self, grads: Any) -> jax.Array:
        """Whether all gradients, any pytree or iterable of arrays, are finite: a bool scalar. None
        counts as finite."""
        alone = jax.tree_util.all_leaves([grads]) and not hasattr(grads, "dtype")
        return all_finite(list(grads) if alone and isinstance(grads, Iterable) else grads)

    def _loss_scale(self) -> jax.Array:
        factor = self._option("loss_scale_factor")
        scale = self._scale_state.scale.value()
        return scale if factor is None else jnp.clip(scale * factor, SMALLEST, LARGEST)

    def _divisor(self) -> jax.Array:
        """What the gradients that `apply` gets were multiplied by."""
        return self._loss_scale()

    def _checked(self, grads: list[Any], trainable_variables: Any) -> list[Any]:
        if self._unscales and not self._has_scaled and self._initial_scale != 1:
            self._has_scaled = True  # said once
            warnings.warn(
                f"`apply` of {self.name!r} divides gradients by the loss scale, but no loss was "
                f"multiplied by it: use `minimize`, or differentiate "
                f"`optimizer.scale_loss(loss)`.",
                stacklevel=3,
            )
        return super()._checked(grads, trainable_variables)

    def _wants_loss(self) -> bool:
        return "loss" in self.rule.measures or self.inner_optimizer._wants_loss()

    def _apply(
        self,
        grads: list[Any],
        rate: jax.Array | None,
        loss: jax.Array | None = None,
        only_if: jax.Array | None = None,
    ) -> None:
        scale, inner = self._divisor(), self.inner_optimizer
        grads = inner._pinned(grads)
        before = None if inner._tally is None else inner._window()
        with inner._knows(loss):
            seen, applied = inner._update_if_finite(grads, scale, rate, only_if, self.telemetry)
        ordered = all(layout is None for layout in inner._layouts())
        measured = measure(self.rule.measures, grads, seen.finite, loss, scale, ordered)
        if self._observed is not None and seen.norm is not None:
            told = (scale, seen.finite, applied, seen.norm, measured.get("max_abs"))
            more = (self._loss_scale(), self.underflow_every, ordered)
            new = observed(read(self._observed), grads, *told, *more)
            jax.tree.map(Variable.assign, self._observed, new)
        if before is None:
            self._advance(seen.finite, measured)
        else:
            asked = is_asked(seen.finite, only_if)
            self._advance_window(inner._window_after(before, seen.finite, asked), measured, asked)

    def _advance(self, finite: jax.Array, measured: Any, due: jax.Array | bool = True) -> None:
        """Moves the scale, if it is due."""
        old = read(self._scale_state)
        new = advance(self.rule, old, finite, **measured)
        new = new if due is True else jax.tree.map(lambda n, o: jnp.where(due, n, o), new, old)
        jax.tree.map(Variable.assign, self._scale_state, new)

    def _advance_window(self, window: Any, measured: Any, asked: jax.Array) -> None:
        """Adds what was measured of a microbatch, and moves the scale at the end of its window."""
        due, finite = window
        before = read(self._measured)
        measured = measured_of_both(before, measured)
        self._advance(finite, measured, due)
        for name, value in measured.items():
            new = jnp.where(asked, value, before[name])
            self._measured[name].assign(jnp.where(due, jnp.zeros_like(value), new))

    # ── the inner optimizer ──────────────────────────────────────────────────────────────────

    @property
    def variables(self) -> list[Variable]:
        """All state: step counter, scale (and what else the rule keeps, and telemetry), then the
        inner's."""
        first = [v for v in (self.step_counter, self._scale_state.scale) if v is not None]
        rest = [v for v in self._own() if v not in first]
        return [*first, *rest, *self._slots, *self.inner_optimizer.variables]

    @property
    def groups(self) -> list[list[list[Any]]]:
        return self.inner_optimizer.groups

    @property
    def iterations(self) -> Variable:
        """The inner optimizer's: a skipped step does not count."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's; assign a number to change it."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def _tally(self) -> Variable | None:
        return self.inner_optimizer._tally

    @property
    def _index(self) -> dict[Variable, int]:
        return self.inner_optimizer._index

    def _state_layout(self, reference: Variable) -> Any:
        return self.inner_optimizer._state_layout(reference)

    def _state_of(self, variable: Variable) -> list[Variable]:
        return self.inner_optimizer._state_of(variable)

    def _rate_now(self) -> jax.Array | None:
        return self.inner_optimizer._rate_now()

    def _option(self, name: str) -> Any:
        return self.inner_optimizer._option(name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("_inner")
        if name not in OPTIONS and name in vars(inner or self) and name not in vars(self):
            raise AttributeError(f"Expected {name} to be set on the inner optimizer.")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Reached for options that were not given here: in force is then the inner's own.
        if name in OPTIONS:
            return getattr(self.inner_optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def build(self, var_list: Sequence[Variable]) -> None:
        """Builds the inner optimizer for these variables."""
        _check_one_scale(self.inner_optimizer, var_list)
        self._asked.clear()
        self.inner_optimizer.build(var_list)

    def _build_around(self, variables: Sequence[Variable]) -> None:
        if self.telemetry:
            first = at_first(self._loss_scale(), len(variables), self.underflow_every)
            self._observed = variables_like(first, f"{self.name}/last")
        if self._tally is not None:
            for name, value in measure(self.rule.measures, [], True, 0.0).items():
                own = Variable(value, name=f"{self.name}/window_{name}", trainable=False)
                self._measured[name] = own
        self._replicate([*self._own(), *self._slots], variables)
        self._forget_program()

    def _own(self) -> list[Variable]:
        """The state of the rule, of telemetry, and of a window."""
        return jax.tree.leaves((self._scale_state, self._observed, self._measured))

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        """The inner optimizer's rule for one variable, on a true gradient."""
        self.inner_optimizer.update_step(gradient, variable, learning_rate)

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Names the variables that the inner optimizer does not decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Gives the variables the inner optimizer's moving averages."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def __repr__(self) -> str:
        scale, rule = shown(self._scale_state.scale), type(self.rule).__name__
        name = type(self).__name__
        return f"<{name} {self.name!r}: scale {scale}, rule {rule}, around {self._inner!r}>"

    # ── configuration ────────────────────────────────────────────────────────────────────────

    def _checked_weight(self, variable: Variable, weight: Any) -> jax.Array:
        value = super()._checked_weight(variable, weight)
        if variable is self._scale_state.scale:
            checks.loss_scale(f"the value of {variable.name!r}", value)
        return value

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments; an option is reported once, by the object that got it."""
        options = {name: value for name, value in vars(self).items() if name in OPTIONS}
        inner = serialize(self.inner_optimizer)
        inner["config"] = {k: v for k, v in inner["config"].items() if k not in options}
        if options.get("weight_decay", 0) is None:  # off, whatever the inner optimizer's usual is
            options["weight_decay"] = 0.0
        config = {"name": self.name, "inner_optimizer": inner, **options}
        told = {"telemetry": self.telemetry, "underflow_every": self.underflow_every}
        config |= {name: value for name, value in told.items() if value}
        if type(self.rule) is FixedLossScale:
            return {**config, "initial_scale": self.rule.loss_scale_value, "dynamic": False}
        if isinstance(self.rule, DynamicLossScale):
            scale, growth_steps = self.rule.initial_loss_scale, self.rule.increment_period
            if self.rule == DynamicLossScale(scale, growth_steps):
                return {**config, "initial_scale": scale, "dynamic_growth_steps": growth_steps}
        return {**config, "rule": serialize(self.rule)}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Self:
        """The optimizer that `get_config` (or Keras) describes; `config` is not changed.

        Args:
            config: the constructor's arguments.
            custom_objects: classes by name for the inner optimizer, its schedule and the rule.
        """
        config = dict(config)
        config["inner_optimizer"] = deserialize(
            config["inner_optimizer"], Optimizer, custom_objects
        )
        if isinstance(config.get("rule"), Mapping):
            config["rule"] = deserialize(config["rule"], LossScale, custom_objects)
        defaults = {name: p.default for name, p in cls.__signature__.parameters.items()}
        kept = {k: v for k, v in config.items() if k not in OPTIONS or v != defaults[k]}
        return cls(**kept)


# How the documents call what a rule counts.
_DOCUMENTED = {"scale": "dynamic_scale", "good_steps": "step_counter"}


def _check_one_scale(inner: Optimizer, variables: Sequence[Variable]) -> None:
    if isinstance(inner, Optax) and states_in(jax.eval_shape(inner._init, read(list(variables)))):
        raise ValueError(
            f"Expected the transformation of {inner.name!r} without gainstage.loss_scaled in it; "
            f"got a scale within a scale. LossScaleOptimizer takes care of the scale."
        )


def _check_inner(inner: Any, given: set[str]) -> None:
    if not isinstance(inner, Optimizer) or isinstance(inner, LossScaleOptimizer):
        is_optax = hasattr(inner, "init") and hasattr(inner, "update")
        advice = " Use gainstage.Optax(tx), or gainstage.loss_scaled(tx)." if is_optax else ""
        raise TypeError(
            f"Expected an optimizer that is not wrapped for inner_optimizer; got {inner!r}.{advice}"
        )
    check_verbs(inner, "LossScaleOptimizer")
    if inner._wrapper is not None:
        raise ValueError(
            f"{inner.name!r} is already wrapped by {inner._wrapper.name!r}. Create a new "
            f"optimizer, or reuse the wrapper."
        )
    for option in sorted(given & OPTIONS):
        both = inner._given & (CLIPS if option in CLIPS else {option})
        if both:
            raise ValueError(
                f"Expected {option} on the LossScaleOptimizer or on the inner optimizer; got "
                f"{option} here and {', '.join(sorted(both))} on {inner.name!r}."
            )
    if inner.built and given & BEFORE_BUILD:
        raise ValueError(
            f"Expected {', '.join(sorted(given & BEFORE_BUILD))} before the inner optimizer is "
            f"built; {inner.name!r} is built."
        )

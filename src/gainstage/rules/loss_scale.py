"""Loss-scale rules: immutable configurations that update a small state of device scalars."""

# A rule gets no gradients, only whether they were finite, and the `measures` that it requests. So
# it is a pure function of a few scalars, the same on every device.

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base.arrays import one_more, strong
from gainstage._base.checks import LARGEST, SMALLEST
from gainstage._base.configurable import Fields
from gainstage._variables.types import Flag, RuleState
from gainstage.rules.other_names import explains_arguments


class ScaleState(NamedTuple):
    """The state of a rule. A count that a rule does not keep is None, without a pytree leaf."""

    scale: jax.Array  # float32: the loss scale of the next step
    good_steps: jax.Array | None = None  # int32: finite steps in a row since the last update
    bad_steps: jax.Array | None = None  # int32: non-finite steps in a row, if they are counted


def _explained(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update`, with an error that helps if it is called with gradients, as in TensorFlow."""

    @functools.wraps(update)
    def checked(self: "LossScale", *args: Any, **kwargs: Any) -> Any:
        if len(args) + len({"state", "finite"} & kwargs.keys()) < 2:
            raise TypeError(
                f"Expected update(state, finite) of the rule {self!r}; got {len(args)} argument. "
                f"The object with update(grads) is in gainstage.compat.experimental."
            )
        finite = kwargs["finite"] if "finite" in kwargs else args[1]
        if getattr(finite, "dtype", type(finite)) != np.dtype(bool) or np.shape(finite):
            raise TypeError(f"Expected a bool scalar for finite; got {finite!r}.")
        return update(self, *args, **kwargs)

    return checked


class LossScale(Fields, abc.ABC):
    """The interface of a rule. Subclass it, as a frozen dataclass, to write your own.

    `measures` names the scalars that `update` needs beside `finite`. What it does not name costs
    nothing. They are `max_abs` (of the finite unscaled gradients), `any_nan`, `any_inf`, and `loss`
    (the true loss; inf if it is NaN, NaN if the caller passed none).

    Examples:
        >>> import dataclasses, gainstage as gs
        >>> import jax.numpy as jnp
        >>> @dataclasses.dataclass(frozen=True)
        ... class Halving(gs.LossScale):
        ...     start: float = 8.0
        ...     def init(self):
        ...         return gs.typing.ScaleState(jnp.float32(self.start))
        ...     def update(self, state, finite):
        ...         return state._replace(scale=jnp.where(finite, state.scale, state.scale / 2))
        >>> rule = Halving()
        >>> print(rule.update(rule.init(), finite=False).scale)
        4.0

    Source: `tf.mixed_precision.experimental.LossScale`, split into configuration and state.
    """

    measures: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "update" in vars(cls):
            cls.update = _explained(cls.update)  # type: ignore[method-assign]

    @abc.abstractmethod
    def init(self) -> RuleState:
        """Returns the first state: a NamedTuple of device scalars with at least `scale`."""

    @abc.abstractmethod
    def update(self, state: RuleState, finite: jax.Array, **measured: jax.Array) -> RuleState:
        """Returns the state after a step.

        Args:
            state: the result of `init` or of the last `update`.
            finite: a bool scalar, whether every gradient of the step was finite.
            measured: the scalars named in `measures`.
        """


class HasRule(Protocol):
    """A live fixed scale of `gainstage.compat`, which holds its rule and no other state."""

    @property
    def rule(self) -> "FixedLossScale": ...


Rule = LossScale | HasRule
LossScaleLike = Rule | float | Literal["dynamic"] | None  # from which `as_rule` makes a rule


@explains_arguments
@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """A constant scale; a non-finite step is still skipped.

    A state that holds another scale, such as a loaded one, has this one after its next step.

    Args:
        loss_scale_value: the scale, a number from `2**-126` to `2**126`.

    Raises:
        TypeError: the scale is not a number, or is a bool.
        ValueError: the scale is out of range.

    Examples:
        >>> import gainstage as gs
        >>> print(gs.FixedLossScale(128).init().scale)
        128.0

    Source: `tf.mixed_precision.experimental.FixedLossScale`.
    """

    loss_scale_value: float

    def __post_init__(self) -> None:
        set_field(self, "loss_scale_value", checks.loss_scale)

    def init(self) -> ScaleState:
        return ScaleState(jnp.float32(self.loss_scale_value))

    def update(self, state: ScaleState, finite: Flag, **measured: jax.Array) -> ScaleState:
        return state._replace(scale=self.init().scale)


class DerivedScale(float):
    """A lowest scale that follows from the first one: with another first scale, which
    `dataclasses.replace` gives a rule, it follows again."""


@explains_arguments
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Raises the scale after a run of finite steps, and lowers it after a non-finite step.

    The rule, as code (`multiplier` >= 1):

        if finite:
            good_steps += 1
            if good_steps >= increment_period:
                scale, good_steps = min(scale * multiplier, max_scale), 0
            bad_steps = 0
        else:
            good_steps, bad_steps = 0, bad_steps + 1
            if bad_steps >= hysteresis:
                scale, bad_steps = max(scale * backoff_factor, min_scale), 0

    A state with a scale out of bounds, such as a loaded one, is back within them after a step.

    Args:
        initial_loss_scale: the first scale, > 0 and at most `max_scale`. If it
            is below a `min_scale` that you pass, the first decrease raises it to `min_scale`.
        increment_period: finite steps in a row before the scale is raised, an integer >= 1.
        multiplier: the factor of an increase, > 0. With one below 1 good steps lower the scale,
            and an overflow raises it.
        backoff_factor: the factor of a decrease, between 0 and 1. None means 1 / `multiplier`, so
            a `multiplier` of 1 keeps the scale constant.
        min_scale: the lowest scale, >= `2**-126`; by default 1, or the first scale if that is
            lower. So a run recovers from any number of bad batches. True gradients beyond 65504
            need a lower one.
        max_scale: the highest scale, <= `2**126`.
        hysteresis: the number of non-finite steps in a row that lowers the scale, an integer >= 1;
            a finite step or a decrease resets the count.

    Raises:
        TypeError: an argument is not a number, or is a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> rule = gs.DynamicLossScale(initial_loss_scale=8.0, increment_period=2)
        >>> state = rule.init()
        >>> for finite in (True, True, False):
        ...     state = rule.update(state, finite)
        ...     print(state.scale, state.good_steps)
        8.0 1
        16.0 0
        8.0 0

    Source: Micikevicius et al., 2018, arXiv:1710.03740;
    `tf.mixed_precision.experimental.DynamicLossScale`; bounds and hysteresis as in Megatron-LM.
    """

    initial_loss_scale: float = 2.0**15
    increment_period: int = 2000
    multiplier: float = 2.0
    _: dataclasses.KW_ONLY
    backoff_factor: float | None = None
    min_scale: float = dataclasses.field(default=cast("float", None))
    max_scale: float = LARGEST
    hysteresis: int = 1

    def __post_init__(self) -> None:
        is_derived = self.min_scale is None or isinstance(self.min_scale, DerivedScale)
        if is_derived:
            set_field(self, "initial_loss_scale", checks.loss_scale)
            object.__setattr__(self, "min_scale", min(1.0, self.initial_loss_scale))
        set_scales(self)
        if is_derived:
            object.__setattr__(self, "min_scale", DerivedScale(self.min_scale))
        set_field(self, "multiplier", checks.real, above=0.0)
        set_field(self, "increment_period", checks.integer, low=1)
        set_field(self, "hysteresis", checks.integer, low=1)
        if self.backoff_factor is not None:
            set_field(self, "backoff_factor", checks.real, above=0.0, below=1.0)

    def init(self) -> ScaleState:
        return ScaleState(
            scale=jnp.float32(self.initial_loss_scale),
            good_steps=jnp.int32(0),
            bad_steps=jnp.int32(0) if self.hysteresis > 1 else None,
        )

    def update(self, state: ScaleState, finite: Flag, **measured: jax.Array) -> ScaleState:
        finite = jnp.asarray(finite)
        low = self.min_scale if self.initial_loss_scale >= self.min_scale else SMALLEST
        within = jnp.clip(state.scale, low, self.max_scale)  # a loaded one may be outside
        scale = jnp.where(state.scale > 0, within, state.scale)
        good_steps = jnp.where(finite, one_more(state.good_steps, self.increment_period), 0)
        bad_steps = state.bad_steps
        if bad_steps is not None:
            bad_steps = jnp.where(finite, 0, one_more(bad_steps, self.hysteresis))
        grow = good_steps >= self.increment_period
        lower = ~finite if bad_steps is None else bad_steps >= self.hysteresis

        backoff = 1 / self.multiplier if self.backoff_factor is None else self.backoff_factor
        moved = {  # clipped to the bound in that direction
            by: jnp.maximum(scale * by, self.min_scale)
            if by < 1
            else jnp.minimum(scale * by, self.max_scale)
            for by in (self.multiplier, backoff)
        }
        grown = jnp.where(grow, moved[self.multiplier], scale)
        return ScaleState(
            scale=jnp.where(lower, moved[backoff], grown),
            good_steps=jnp.where(grow, 0, good_steps),
            bad_steps=None if bad_steps is None else jnp.where(lower, 0, bad_steps),
        )


def start(rule: LossScale) -> RuleState:
    """Returns the first state of a rule as arrays, with a float32 scale.

    Raises:
        TypeError: the rule's state is not a NamedTuple with `scale`.
    """
    state = rule.init()
    if not hasattr(state, "_fields") or not hasattr(state, "scale"):
        raise TypeError(f"Expected a NamedTuple with `scale` from {rule!r}.init(); got {state!r}.")
    state = state._replace(scale=jnp.float32(state.scale))
    return jax.tree.map(lambda x: jnp.copy(strong(x)), state)  # each may be donated


def advance(
    rule: LossScale, state: RuleState, finite: jax.Array, **measured: jax.Array
) -> RuleState:
    """Returns the state after a step, with a finite and positive scale whatever the rule returns.

    After a scale that no loss can have, such as a loaded one, comes the rule's first scale. Counts
    stay: one that depended on the scale would be stored by a program of its own on a GPU.
    """
    new = rule.update(state, finite, **measured)
    scale = jnp.where(new.scale > 0, new.scale, state.scale)
    usable = (state.scale > 0) & jnp.isfinite(state.scale)
    scale = jnp.where(usable, jnp.clip(scale, SMALLEST, LARGEST), rule.init().scale)
    new = new._replace(scale=scale)
    return jax.tree.map(lambda x, old: jnp.asarray(x, jnp.result_type(old)), new, state)


def as_rule(name: str, value: object, others: Collection[str] = ()) -> LossScale:
    """Returns the rule of a `loss_scale`: "dynamic", a number, which is fixed, a rule, None for no
    loss scale, which is a fixed one of 1, or a live fixed scale of `gainstage.compat`.

    Raises:
        TypeError: `value` is none of them, or holds a state of its own, which would be left behind.
        ValueError: it is a number that is no loss scale, or the caller has passed `others`,
            arguments of the rule, too.
    """
    if is_default(value):
        return DynamicLossScale()
    if others:
        both = " or ".join(f"`{other}`" for other in sorted(others))
        raise ValueError(f"`{name}` cannot be combined with {both}; set it on the rule.")
    rule = getattr(value, "rule", value)
    if rule is not value and not isinstance(rule, FixedLossScale):
        raise TypeError(
            f"Expected a rule for {name}; got {value!r}, whose state would not be shared. "
            f"Write {name}=scale.rule, which starts anew."
        )
    if rule is None:
        return FixedLossScale(1.0)
    if isinstance(rule, LossScale):
        return rule
    if isinstance(rule, type | str) or not np.isscalar(rule):
        raise TypeError(
            f'Expected "dynamic", a number, None, or a rule for {name}: '
            f"gainstage.DynamicLossScale(), AdaptiveLossScale(), FixedLossScale(scale) or one of "
            f"your own; got {value!r}."
            + " A dtype is that of the loss: gainstage.autocast(loss_fn, dtype)."
            * _is_dtype(value)
        )
    return FixedLossScale(checks.loss_scale(name, rule))


def _is_dtype(value: Any) -> bool:
    """Whether a value is a dtype, or the name of one."""
    if not isinstance(value, str | type | np.dtype):
        return False
    try:
        return bool(jnp.issubdtype(jnp.dtype(value), jnp.number))
    except TypeError:
        return False


def is_default(value: object) -> bool:
    """Whether a `loss_scale` is the default of an argument, "dynamic"."""
    return isinstance(value, str) and value == "dynamic"


KERAS_FLOOR = 2.0**-24  # the lowest scale of rules that have none in Keras and TensorFlow


def keras_rule(initial_scale: float, growth_steps: int) -> DynamicLossScale:
    """Keras's rule, whose scale has no lowest value: ours falls to `KERAS_FLOOR`."""
    lowest = min(KERAS_FLOOR, checks.loss_scale("initial_scale", initial_scale))
    growth_steps = checks.integer("dynamic_growth_steps", growth_steps, low=1)
    return DynamicLossScale(initial_scale, growth_steps, min_scale=lowest)


def with_number(rule: LossScale, name: str, value: Any) -> DynamicLossScale:
    """A dynamic rule with another `initial_scale` or `dynamic_growth_steps`.

    Raises:
        AttributeError: the rule is not Keras's.
    """
    if isinstance(rule, DynamicLossScale):
        scale, growth_steps = rule.initial_loss_scale, rule.increment_period
        if rule == keras_rule(scale, growth_steps):
            first = name == "initial_scale"
            return keras_rule(value if first else scale, growth_steps if first else value)
    raise AttributeError(
        f"Expected {name} to be set where there is no `loss_scale` and no dynamic=False; got "
        f"{value!r} for {rule!r}. Pass loss_scale=... to the constructor."
    )


def set_scales(rule: Any) -> None:
    """Checks the bounds of a rule under construction, and its first scale against them."""
    set_field(rule, "max_scale", checks.loss_scale)
    set_field(rule, "min_scale", checks.loss_scale, high=rule.max_scale)
    set_field(rule, "initial_loss_scale", checks.loss_scale, high=rule.max_scale)


def set_field(rule: LossScale, name: str, check: Callable[..., object], **bounds: float) -> None:
    """Checks a field of a rule under construction, and stores what the check returns."""
    object.__setattr__(rule, name, check(name, getattr(rule, name), **bounds))

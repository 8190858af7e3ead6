"""The options of every optimizer: one table of their names, types, defaults and checks."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypedDict, TypeVar, overload

from jax.sharding import Mesh

from gainstage._base import checks
from gainstage._base.warn import warn
from gainstage._variables.zero_sharding import axis_names
from gainstage.optimizers._step.subclasses import check_attribute

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Option(Generic[T]):
    """A row of the table, and the attribute of an optimizer that holds its value.

    Args:
        default: the value if none is given. Only an option with the default None can be None.
        check: `(name, value) -> value`; raises an error if the value is not valid.
        builds: whether it decides which state exists, so that it is fixed when that is built.
        ours: whether Keras does not have it. It is then passed by keyword, and left out of a
            configuration at its default.
    """

    default: Any = None
    check: Callable[[str, Any], Any] = lambda _, value: value
    _: dataclasses.KW_ONLY
    builds: bool = False
    ours: bool = False

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, owner: type) -> Self: ...

    @overload
    def __get__(self, optimizer: object, owner: type | None = None) -> T: ...

    def __get__(self, optimizer: Any, owner: type | None = None) -> Self | T:
        return self if optimizer is None else optimizer._get_option(self._name)

    def __set__(self, optimizer: Any, value: T) -> None:
        optimizer._set_option(self._name, value)


@dataclasses.dataclass(eq=False)
class Setting(Generic[T]):
    """An attribute that is checked where it is set, by the constructor or later.

    Args:
        default, check, ours: as for an `Option`.
        fixed: whether only the constructor sets it.
        needs_state: `(old, new) -> bool`: whether a change needs other state than `build` created.
    """

    default: Any = None
    check: Callable[[str, Any], Any] = lambda _, value: value
    _: dataclasses.KW_ONLY
    ours: bool = False
    fixed: bool = False
    needs_state: Callable[[Any, Any], bool] = lambda old, new: False

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, owner: type) -> Self: ...

    @overload
    def __get__(self, optimizer: object, owner: type | None = None) -> T: ...

    def __get__(self, optimizer: object, owner: type | None = None) -> Self | T:
        if optimizer is None:
            return self
        if self._name not in vars(optimizer):
            name = type(optimizer).__name__
            raise AttributeError(f"{name!r} object has no attribute {self._name!r}")
        return vars(optimizer)[self._name]

    def __set__(self, optimizer: Any, value: T) -> None:
        held = vars(optimizer)
        is_set = self._name in held
        if self.fixed and is_set:
            raise AttributeError(f"`{self._name}` can be set only in the constructor.")
        value = self.check(self._name, value)
        if is_set and optimizer.built and self.needs_state(held[self._name], value):
            raise ValueError(
                f"Expected {self._name} to be set before {optimizer.name!r} is built, because "
                f"`build` creates its state; got {value!r}. Create a new optimizer."
            )
        held[self._name] = value


def needs_slot(old: object, new: object) -> bool:
    """Whether a change needs a slot that `build` creates only if the value is not 0 or False."""
    return bool(new) and not old


def _accumulation_steps(name: str, value: object) -> int:
    steps = checks.integer(name, value, low=0)
    if steps == 1:
        raise ValueError(f"Expected None or an integer >= 2 for {name}; got {value!r}.")
    return steps


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"Expected a non-empty string for {name}; got {value!r}.")
    return value


def _mesh(name: str, value: object) -> Mesh | None:
    if value is not None and not isinstance(value, Mesh):
        raise ValueError(f"Expected a jax.sharding.Mesh for {name}; got {value!r}.")
    return value


def within(**bounds: Any) -> Callable[[str, Any], float]:
    """The check of a real number within the bounds of `checks.real`."""
    return functools.partial(checks.real, **bounds)


_above_0 = within(above=0)


class Options:
    """The options of a step, in the order of the constructor's arguments.

    `Optimizer` says in its documentation what each does.
    """

    weight_decay: Option[float | None] = Option(None, within(low=0))
    clipnorm: Option[float | None] = Option(None, _above_0)
    clipvalue: Option[float | None] = Option(None, _above_0)
    global_clipnorm: Option[float | None] = Option(None, _above_0)
    use_ema: Option[bool] = Option(False, checks.flag, builds=True)
    ema_momentum: Option[float] = Option(0.99, within(low=0, high=1))
    ema_overwrite_frequency: Option[int | None] = Option(
        None, functools.partial(checks.integer, low=1)
    )
    loss_scale_factor: Option[float | None] = Option(None, checks.loss_scale)
    gradient_accumulation_steps: Option[int | None] = Option(None, _accumulation_steps, builds=True)


class Arguments(Options):
    """The options of a step, and the constructor's other arguments."""

    name: Setting[str] = Setting(None, _name)
    jit_compile: Setting[bool] = Setting(True, checks.flag, ours=True)
    mesh: Setting[Mesh | None] = Setting(None, _mesh, ours=True, fixed=True)
    master_weights: Setting[bool] = Setting(False, checks.flag, ours=True, fixed=True)
    shard_state_over: Setting[tuple[str, ...]] = Setting(
        None, lambda _, axes: axis_names(axes), ours=True, fixed=True
    )

    def __setattr__(self, name: str, value: object) -> None:
        check_attribute(self, name, ["learning_rate", *OPTIONS, *ARGUMENTS])
        super().__setattr__(name, value)


# Type checkers read the keywords of constructors here; a test compares them with the table.
class WrapperOptions(TypedDict, total=False):
    """All keywords that a wrapper takes beside its own."""

    weight_decay: float | None
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None
    jit_compile: bool
    mesh: Mesh | None


class OptimizerOptions(WrapperOptions, total=False):
    """All keywords that a subclass of `Optimizer` passes on to it."""

    name: str | None
    master_weights: bool
    shard_state_over: str | Sequence[str] | None


OPTIONS: dict[str, Option[Any]] = {n: o for n, o in vars(Options).items() if isinstance(o, Option)}
ARGUMENTS: dict[str, Setting[Any]] = {
    name: row for name, row in vars(Arguments).items() if isinstance(row, Setting)
}
DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
PARAMETERS = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY if option.ours else inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=option.default,
        annotation=OptimizerOptions.__annotations__[name],
    )
    for name, option in (OPTIONS | ARGUMENTS).items()
]
CLIPS = frozenset(["clipnorm", "clipvalue", "global_clipnorm"])
BEFORE_BUILD = frozenset(name for name, option in OPTIONS.items() if option.builds)


def ignore_decay(options: Any) -> None:
    """Drops the `decay` of older optimizers from a constructor's options, as Keras 3 does."""
    if options.pop("decay", None) is not None:
        warn(
            "`decay` has no effect, as in Keras 3. Write learning_rate=gainstage.optimizers."
            "schedules.InverseTimeDecay(learning_rate, 1, decay)."
        )


def check_option(name: str, value: object, others: Mapping[str, Any]) -> Any:
    """Checks an option, and returns its value.

    Args:
        name: one of `OPTIONS`.
        value: the value; None means "off", for options with the default None.
        others: options already set, by name.

    Raises:
        TypeError: `name` is unknown, or `value` has the wrong type.
        ValueError: `value` is out of range, or there is a second clip option.
    """
    if name not in OPTIONS:
        raise checks.InvalidArgumentError(
            f"Expected options among {sorted(OPTIONS)}; got {name!r}. Set options of the inner "
            f"optimizer, or of the loss-scale rule, there."
        )
    if value is None:
        if DEFAULTS[name] is not None:
            raise TypeError(f"Expected a value for {name}; got None.")
        return None
    clash = [other for other in CLIPS - {name} if others.get(other) is not None]
    if name in CLIPS and clash:
        raise ValueError(
            f"Expected at most one of clipnorm, clipvalue and global_clipnorm; "
            f"got {clash[0]}={others[clash[0]]!r} and {name}={value!r}."
        )
    return OPTIONS[name].check(name, value)


def check_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks several options, by name, and returns their values."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        checked[name] = check_option(name, value, checked)
    return checked

"""The options of every optimizer: their names and valid values."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypedDict, TypeVar, overload

from jax.sharding import Mesh

from gainstage._core import checks

T = TypeVar("T")


class Option(Generic[T]):
    """An attribute of an optimizer that holds one of the options of a step."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, owner: type) -> Self: ...

    @overload
    def __get__(self, optimizer: Any, owner: type | None = None) -> T: ...

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        return self if optimizer is None else self._of(optimizer)

    def __set__(self, optimizer: Any, value: T) -> None:
        optimizer._set_option(self._name, value)

    def _of(self, optimizer: Any) -> T:
        return optimizer._get_option(self._name)


class Fixed(Option[T]):
    """An attribute of an optimizer that only the constructor sets."""

    def __set__(self, optimizer: Any, value: T) -> None:
        if self._name in vars(optimizer):
            raise AttributeError(f"`{self._name}` can be set only in the constructor.")
        vars(optimizer)[self._name] = value

    def _of(self, optimizer: Any) -> T:
        if self._name not in vars(optimizer):
            name = type(optimizer).__name__
            raise AttributeError(f"{name!r} object has no attribute {self._name!r}")
        return vars(optimizer)[self._name]


class Options(TypedDict, total=False):
    """The options of a step, as keywords of every optimizer's constructor."""

    weight_decay: float | None
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None
    on_bad_microbatch: str


class WrapperOptions(Options, total=False):
    """All keywords that a wrapper takes beside its own."""

    jit_compile: bool
    mesh: Mesh | None


class OptimizerOptions(WrapperOptions, total=False):
    """All keywords that a subclass of `Optimizer` passes on to it."""

    name: str | None
    group_small: bool
    master_weights: bool
    shard_state_over: str | Sequence[str] | None


CLIPS = frozenset(["clipnorm", "clipvalue", "global_clipnorm"])
# They decide which state exists, so they are fixed when the optimizer is built.
BEFORE_BUILD = frozenset(["use_ema", "gradient_accumulation_steps", "on_bad_microbatch"])
# They cannot be None.
ALWAYS = frozenset(["use_ema", "ema_momentum", "on_bad_microbatch"])
# What a non-finite microbatch does to its window: see `guard`.
POLICIES = ("extend", "drop_window")


def _accumulation_steps(name: str, value: Any) -> int:
    if checks.integer(name, value, low=0) == 1:
        raise ValueError(f"Expected None or an integer >= 2 for {name}; got {value!r}.")
    return int(value)


def _policy(name: str, value: Any) -> str:
    if value not in POLICIES:
        raise ValueError(f"Expected one of {', '.join(POLICIES)} for {name}; got {value!r}.")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "weight_decay": lambda name, value: checks.real(name, value, low=0),
    "clipnorm": lambda name, value: checks.real(name, value, above=0),
    "clipvalue": lambda name, value: checks.real(name, value, above=0),
    "global_clipnorm": lambda name, value: checks.real(name, value, above=0),
    "use_ema": checks.flag,
    "ema_momentum": lambda name, value: checks.real(name, value, low=0, high=1),
    "ema_overwrite_frequency": lambda name, value: checks.integer(name, value, low=1),
    "loss_scale_factor": checks.loss_scale,
    "gradient_accumulation_steps": _accumulation_steps,
    "on_bad_microbatch": _policy,
}
OPTIONS = _CHECKS.keys()


def check_option(name: str, value: Any, others: dict[str, Any]) -> Any:
    """Checks an option, and returns its value.

    Args:
        name: one of `OPTIONS`.
        value: the value; None means "off", except for those in `ALWAYS`.
        others: options already set, by name.

    Raises:
        TypeError: `name` is unknown, or `value` has the wrong type.
        ValueError: `value` is out of range, or there is a second clip option.
    """
    if name not in OPTIONS:
        raise TypeError(
            f"Expected options among {sorted(OPTIONS)}; got {name!r}. Set options of the inner "
            f"optimizer, or of the loss-scale rule, there."
        )
    if value is None:
        if name in ALWAYS:
            raise TypeError(f"Expected a value for {name}; got None.")
        return None
    clash = [other for other in CLIPS - {name} if others.get(other) is not None]
    if name in CLIPS and clash:
        raise ValueError(
            f"Expected at most one of clipnorm, clipvalue and global_clipnorm; "
            f"got {clash[0]}={others[clash[0]]!r} and {name}={value!r}."
        )
    return _CHECKS[name](name, value)

"""Checks of arguments, with errors of the form "Expected <what>; got <value>."."""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, SupportsFloat, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gainstage._base._jax import Tracer

# XLA divides by multiplying with the reciprocal and flushes subnormal numbers to zero. Beyond these
# bounds a loss scale or its reciprocal would be 0 in float32.
SMALLEST, LARGEST = 2.0**-126, 2.0**126
LARGEST_FLOAT16 = 65504.0

Function = TypeVar("Function", bound=Callable[..., Any])

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 5
_SHORT.maxother, _SHORT.maxstring, _SHORT.maxlevel = 160, 60, 3


class InvalidArgumentError(TypeError, ValueError):
    """An argument of a wrong type, where a document promises a ValueError."""


class _Text(str):
    """A text that is its own `repr`."""

    __slots__ = ()
    __repr__ = str.__str__


def _without_numbers(leaf: Any) -> Any:
    """An array as its dtype and shape; anything else as it is."""
    if isinstance(leaf, jax.Array | np.ndarray) and (leaf.ndim or isinstance(leaf, Tracer)):
        return _Text(f"{leaf.dtype}{list(leaf.shape)}")
    return leaf


def explains(advice: str) -> Callable[[Function], Function]:
    """A decorator: a call with arguments that a function does not take says what to write."""

    def wrap(fun: Function) -> Function:
        signature = inspect.signature(fun)

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                near = _near_names(set(kwargs) - set(signature.parameters), signature.parameters)
                raise TypeError(f"{fun.__qualname__}: {error}. {near}{advice}") from None
            return fun(*args, **kwargs)

        return cast("Function", call)

    return wrap


def _near_names(others: Iterable[str], names: Iterable[str]) -> str:
    """The names that were meant, in a sentence for an error, if there are any that are alike."""
    for other in others:
        if meant := difflib.get_close_matches(other, names, 1, cutoff=0.7):
            return f"Did you mean {meant[0]}=? "
    return ""


def brief(value: object) -> str:
    """The `repr` of a value for an error, in one line: large arrays by dtype and shape, and of a
    long list, dictionary or pytree only a part."""
    if isinstance(value, str):
        return value if len(value) <= 160 else _SHORT.repr(value)
    if isinstance(value, Tracer):
        return _without_numbers(value)
    text = repr(value)
    if len(text) <= 160 and "\n" not in text:
        return text
    if isinstance(value, tuple | list | dict | jax.Array | np.ndarray):
        with contextlib.suppress(TypeError, ValueError):  # keys that cannot be sorted
            value = jax.tree.map(_without_numbers, value)
    text = repr(value)
    return " ".join((text if len(text) <= 160 else _SHORT.repr(value)).split())


def as_power(scale: float) -> str:
    """Formats a scale as a power of two, if it is one."""
    if scale > 0 and math.isfinite(scale) and math.log2(scale).is_integer():
        return f"2^{int(math.log2(scale))}"
    return f"{scale:g}"


def real(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    low: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
) -> float:
    """Returns `value` as a float, if it is a finite real number inside the bounds and not a bool.

    Args:
        name: the argument's name, for the error.
        value: a Python, numpy or jax scalar.
        above, below: exclusive bounds.
        low, high: inclusive bounds.

    Raises:
        TypeError: `value` is not a real number, or is a bool.
        ValueError: `value` is not finite, or out of bounds.
    """
    expected = _expected("a finite number", above, low, high, below)
    if isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"Expected {expected} for {name}; got {value!r}.")
    try:
        number = float(value)
    except OverflowError:  # an int larger than any float
        number = math.inf
    if not (math.isfinite(number) and above < number < below and low <= number <= high):
        raise ValueError(f"Expected {expected} for {name}; got {value!r}.")
    return number


def shortest(value: SupportsFloat) -> float:
    """Returns the shortest decimal of a float32: 0.1, not 0.10000000149011612."""
    exact = float(value)
    return exact if exact.is_integer() else float(str(np.float32(value)))


def clipped_to_float32(limit: float) -> float:
    """Clips a limit to the normal numbers of float32, where it could become 0 or inf."""
    known = np.finfo(np.float32)
    return min(max(limit, float(known.tiny)), float(known.max))


def loss_scale(name: str, value: object, high: float = LARGEST) -> float:
    """Returns `value` as a float, if it is a valid loss scale."""
    return real(name, value, low=SMALLEST, high=high)


def integer(name: str, value: object, *, low: int, high: int = 2**31 - 1) -> int:
    """Returns `value` as an int, if it is an integer in [low, high] and not a bool.

    Raises:
        TypeError: `value` is not a number, or is a bool.
        ValueError: `value` has a fraction, or is out of bounds.
    """
    expected = _expected("an integer", -math.inf, low, high, math.inf)
    try:
        number = real(name, value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Expected {expected} for {name}; got {value!r}.") from None
    if number != int(number) or not low <= number <= high:
        raise ValueError(f"Expected {expected} for {name}; got {value!r}.")
    return int(number)


def flag(name: str, value: object) -> bool:
    """Returns `value`, if it is a bool.

    Raises:
        TypeError: `value` is anything else.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"Expected a bool for {name}; got {value!r}.")
    return bool(value)


def condition(name: str, value: npt.ArrayLike) -> jax.Array:
    """Returns `value` as a bool array, if it is a bool scalar of Python, numpy or JAX.

    Raises:
        TypeError: `value` is anything else.
        ValueError: `value` is an array of bools, not a scalar.
    """
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.dtype(bool)
    if not is_bool:
        raise TypeError(f"Expected a bool scalar for {name}; got {value!r}.")
    if np.shape(value):
        raise ValueError(f"Expected a bool scalar for {name}; got shape {np.shape(value)}.")
    return jnp.asarray(value)


def not_assignable(value: object) -> TypeError:
    """The error for a value in the place of a variable."""
    return TypeError(f"Expected a variable to assign to; got {brief(value)}.")


def _expected(what: str, above: float, low: float, high: float, below: float) -> str:
    bounds = [(">", above), (">=", low), ("<=", high), ("<", below)]
    return " and ".join([what, *(f"{sign} {_bound(b)}" for sign, b in bounds if math.isfinite(b))])


def _bound(bound: float) -> str:
    return f"2**{int(math.log2(bound))}" if bound in (SMALLEST, LARGEST) else f"{bound:g}"

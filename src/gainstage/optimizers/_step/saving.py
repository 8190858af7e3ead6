"""Saves and loads the state of an optimizer, a flat list of variables: all of it, or an error."""

import itertools
import reprlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._base.arrays import owned
from gainstage._base.checks import brief
from gainstage._variables.bridge import assign
from gainstage._variables.types import Values
from gainstage._variables.variable import Variable

Checks = Mapping[Variable, Callable[[str, Any], Any]]  # more checks of some variables' values


class Saved:
    """An object whose state can be saved and loaded.

    It has `variables`, a `_store`, and `_built_variables(caller)`, which raises an error if there
    is no state yet.
    """

    variables: Any
    _store: Any
    _built_variables: Callable[[str], object]

    def set_weights(self, weights: Values) -> None:
        """Sets all of `variables`, in that order; changes none if a value does not fit.

        Raises:
            ValueError: not built, the wrong number of arrays, or an array that does not fit.
        """
        self._built_variables("set_weights")
        set_all(self.variables, weights, self._weight_checks)

    @property
    def _weight_checks(self) -> Checks:
        """Checks of single variables' values, beside shape and dtype."""
        rate = self._store.rate.variable
        return {} if rate is None else {rate: checks.real}

    def state(self) -> dict[str, jax.Array]:
        """Returns all of `variables` by name, as a dictionary of arrays. The second variable of one
        name gets the suffix "#2", and so on."""
        return as_names(self.variables)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Sets all of `variables` from the result of `state`; changes none if an entry is wrong.

        Raises:
            TypeError: `state` is not a dictionary.
            ValueError: not built, a name is missing or unknown, or an array does not fit.
        """
        self.set_weights(from_names(self.variables, state))

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes all of `variables` to `store`, as numpy arrays under "0", "1", ..."""
        into_store(self.variables, store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Sets all of `variables` from what `save_own_variables` stored, or none.

        Raises:
            TypeError: `store` is not a mapping.
            ValueError: not built, a key is missing, or an array does not fit.
        """
        self._built_variables("load_own_variables")
        self.set_weights(from_store(self.variables, store))


def set_all(variables: Sequence[Variable], weights: Sequence[Any], more: Checks) -> None:
    """Sets variables, in order; changes none if a value does not fit."""
    if not hasattr(weights, "__len__") or isinstance(weights, (str, Mapping)):
        raise TypeError(f"Expected a list of arrays for weights; got {reprlib.repr(weights)}.")
    if len(weights) != len(variables):
        raise wrong_count("weights", weights, variables)
    fitted = [fitted_weight(v, w, more) for v, w in zip(variables, weights, strict=True)]
    assign(variables, fitted)


def fitted_weight(variable: Variable, weight: npt.ArrayLike, more: Checks) -> jax.Array:
    """Returns a value as an array that fits the variable, or raises a ValueError."""
    try:
        value = _converted(weight, variable.dtype)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Expected an array for {variable.name!r}, of numbers that {variable.dtype} holds; "
            f"got {reprlib.repr(weight)}."
        ) from error
    value = variable._fitted(value)
    if variable in more:
        more[variable](f"the value of {variable.name!r}", value)
    return value


def as_names(variables: Sequence[Variable]) -> dict[str, jax.Array]:
    """Returns the values by name."""
    named = zip(unique_names(variables), variables, strict=True)
    return {name: variable.value() for name, variable in named}


def from_names(variables: Sequence[Variable], state: Mapping[str, Any]) -> list[Any]:
    """Returns the values from `as_names`, in the variables' order."""
    names = unique_names(variables)
    check_names("state", state, names)
    return [state[name] for name in names]


def into_store(variables: Sequence[Variable], store: MutableMapping[str, Any]) -> None:
    """Writes the values to `store`, as numpy arrays under "0", "1", ..."""
    for variable in variables:
        variable._read()  # raises before anything is stored
    for i, variable in enumerate(variables):
        store[str(i)] = variable.numpy()


def from_store(variables: Sequence[Variable], store: Mapping[str, Any]) -> list[Any]:
    """Returns the values from `into_store`, in the variables' order."""
    if not hasattr(store, "keys"):
        raise TypeError(f"Expected a store with keys; got {reprlib.repr(store)}.")
    keys = [str(i) for i in range(max(len(variables), len(store.keys())))]
    missing = [key for key in keys if key not in store]
    if missing:
        raise ValueError(
            f"Expected the keys '0' to '{len(variables) - 1}' in the store; "
            f"got {brief(sorted(map(str, store.keys())))}."
        )
    return [store[key] for key in keys]


def shown(scalar: Variable) -> str:
    """Formats a scalar variable's value, or says why it is not available."""
    value = scalar._value
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_deleted():
        return "unknown"
    return f"{checks.shortest(value):.9g}" if value.is_fully_addressable else "on all processes"


def unique_names(variables: Sequence[Variable]) -> list[str]:
    """The variables' names; repeated names get a number."""
    names: dict[str, None] = {}
    for variable in variables:
        numbered = (f"{variable.name}#{n}" for n in itertools.count(2))
        names[next(n for n in itertools.chain([variable.name], numbered) if n not in names)] = None
    return list(names)


def check_names(what: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Checks that there is a value for every name and no other; the error names the difference."""
    if not isinstance(values, Mapping):
        raise TypeError(f"Expected a dictionary of the {what}; got {reprlib.repr(values)}.")
    missing = [name for name in names if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown:
        raise ValueError(
            f"Expected the names of the {what}; got {brief(missing) if missing else 'none'} "
            f"missing and {brief(unknown) if unknown else 'none'} unknown."
        )


def _converted(weight: npt.ArrayLike, dtype: np.dtype) -> jax.Array:
    """Converts a value to an array in the dtype of a variable.

    Floating numbers may be rounded, but not become infinite; other numbers must not change. A whole
    number of any dtype is an integer."""
    array = weight if isinstance(weight, jax.Array) else np.asarray(weight)
    kinds = _rank_of_dtype(array.dtype), _rank_of_dtype(dtype)
    if kinds == (_rank_of_dtype(np.dtype(float)), _rank_of_dtype(np.dtype(int))) and not isinstance(
        array, Tracer
    ):
        array = np.asarray(array)
    elif kinds[0] > kinds[1]:
        raise TypeError(f"{array.dtype} in {dtype}")
    if isinstance(array, np.ndarray) and array.dtype != dtype:
        with np.errstate(all="ignore"):
            given, array = array, array.astype(dtype)
        floating = jnp.issubdtype(dtype, jnp.floating)
        same = np.isfinite(array) == np.isfinite(given) if floating else array == given
        if not np.all(same):
            raise ValueError(f"too large for {dtype}")
    return jnp.asarray(owned(array), dtype)


def _rank_of_dtype(dtype: np.dtype) -> int:
    """The rank of a dtype: each kind of numbers fits into later ones; the last is not real."""
    kinds: tuple[Any, ...] = (jnp.bool_, jnp.integer, jnp.floating)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def wrong_count(what: str, values: Sequence[Any], variables: Sequence[Variable]) -> ValueError:
    """The error for a number of values that differs from the number of variables."""
    names = [variable.name for variable in variables]
    return ValueError(
        f"Expected {len(variables)} {what}, one for each of {brief(names)}; got {len(values)}."
    )


def without_legacy(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of an optimizer without entries that only TensorFlow 2 wrote.

    Raises:
        ValueError: it has a `decay`, which only optimizers of TensorFlow 2 have.
    """
    if config.get("decay"):
        raise ValueError(
            f"Expected an optimizer without decay; got {config['decay']!r}. Give it "
            f"learning_rate=InverseTimeDecay(learning_rate, 1, decay)."
        )
    return {k: v for k, v in config.items() if k not in ("is_legacy_optimizer", "decay")}

"""The variables that an optimizer's `build` adds."""

import functools
import inspect
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.nn import initializers
from jax.sharding import Sharding
from jax.typing import DTypeLike

from gainstage._base.arrays import ARRAYS
from gainstage._base.checks import InvalidArgumentError, brief
from gainstage._scaling import gradients
from gainstage._variables.variable import Variable
from gainstage._variables.zero_sharding import sharding_of_state

Initializer = str | npt.ArrayLike | Variable | Callable[..., Any]
SlotName = Callable[[str, str, str, int], str]


class Slots:
    """The variables that `build` of an optimizer adds.

    Args:
        owner: the optimizer's name.
        named: the name of a slot: see `Conventions`.
        shard_over: the mesh axes over which a variable's state is sharded further.
    """

    def __init__(self, owner: str, named: SlotName, shard_over: tuple[str, ...]):
        self.owner, self.named, self.shard_over = owner, named, shard_over
        self.all: list[Variable] = []
        self.of: dict[tuple[Variable, str, int], Variable] = {}  # the int counts equal ones
        self._slots_of: Counter[Variable] = Counter()  # how many each variable has
        self._added: dict[Any, Variable] = {}  # other variables that builds have added
        self._asked: Counter[Any] = Counter()  # the number of each kind in this build so far

    def start_build(self) -> None:
        """Starts a build, which reuses the variables of an earlier build."""
        self._asked.clear()

    def add(
        self,
        shape: Sequence[int],
        initializer: Initializer,
        dtype: DTypeLike | None,
        name: str | None,
        in_build: bool,
    ) -> Variable:
        """Adds a variable; in a build, reuses the one of an earlier build."""
        dtype, shape = _checked_dtype(dtype), _sizes(shape)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"Expected a string for name; got {name!r}.")
        kind = (name, shape, dtype)
        key = (*kind, self._asked[kind])
        if in_build:
            self._asked[kind] += 1
            if key in self._added:
                return self._added[key]
        value = _initialized(initializer, len(self.all), shape, dtype)
        variable = Variable(value, False, dtype=dtype, name=f"{self.owner}/{name or 'variable'}")
        if in_build:
            self._added[key] = variable
        self.all.append(variable)
        return variable

    def add_like(self, reference: Variable, name: str, initializer: Initializer) -> Variable:
        """Adds a slot of a variable, or reuses the one of an earlier build."""
        if not isinstance(reference, Variable):
            raise TypeError(
                f"Expected a gainstage.optimizers.Variable for the reference of slot {name!r}; "
                f"got {brief(reference)}."
            )
        number = self._asked[reference, name]
        self._asked[reference, name] += 1
        key = reference, name, number
        if key not in self.of:
            self.of[key] = slot = self.like(reference, name, initializer)
            self._slots_of[reference] += 1
            self.all.append(slot)
        return self.of[key]

    @property
    def names(self) -> list[str]:
        """The names of the slots, in the order in which they were added."""
        return list(dict.fromkeys(name for _, name, _ in self.of))

    def get(self, variable: Variable, name: str) -> Variable:
        """Returns the slot of a variable; raises a ValueError if there is none."""
        if not isinstance(variable, Variable):
            raise TypeError(
                f"Expected a gainstage.optimizers.Variable for var; got {brief(repr(variable))}."
            )
        if (variable, name, 0) not in self.of:
            raise ValueError(
                f"{self.owner!r} has no slot {name!r} for {variable.name!r}; its slots are "
                f"{self.names}."
            )
        return self.of[variable, name, 0]

    def like(self, reference: Variable, name: str, initializer: Initializer = "zeros") -> Variable:
        """Creates a variable of the shape and sharding of another, in float32 or wider."""
        dtype = gradients.float32_or_wider(reference.dtype)
        sharding = sharding_of_state(reference, self.shard_over)
        seed = len(self.all)
        value: Any
        if reference._is_planned:
            value = jax.ShapeDtypeStruct(reference.shape, dtype, sharding=sharding)
        else:
            value = _initialized(initializer, seed, reference.shape, dtype, sharding)
        place = self._slots_of[reference]
        slot = Variable(value, False, name=self.named(self.owner, reference.name, name, place))
        if slot._is_planned:
            return slot
        if sharding is not None:
            slot._place(sharding)
        else:
            slot._move_to(reference)
        return slot


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple, from a sequence or a 1-D array of integers."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise InvalidArgumentError(
            f"Expected a list or tuple of integers >= 0 for shape; got {brief(shape)}. "
            f"A scalar has shape ()."
        )
    return sizes


def _checked_dtype(dtype: DTypeLike | None) -> np.dtype:
    try:
        return jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError as error:
        raise TypeError(f"Expected a dtype for dtype; got {dtype!r}.") from error


def _by_fans(create: Callable[..., Any]) -> Callable[..., jax.Array]:
    """An initializer that needs two dimensions, also for vectors and scalars, as in Keras."""

    def one(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        if len(shape) > 1:
            return create(key, shape, dtype)
        (size,) = shape or (1,)
        return create(key, (size, size), dtype)[0].reshape(shape)

    return one


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    rows, columns = shape
    return jnp.eye(rows, columns, dtype=dtype)


# Keras's names, with Keras's default arguments: functions of (key, shape, dtype).
INITIALIZERS: dict[str, Callable[..., Any]] = {
    "zeros": initializers.zeros,
    "ones": initializers.ones,
    "constant": initializers.zeros,
    "identity": _identity,
    "random_normal": initializers.normal(0.05),
    "random_uniform": lambda *args: initializers.uniform(0.1)(*args) - 0.05,
    "truncated_normal": initializers.truncated_normal(0.05),
    "glorot_normal": _by_fans(initializers.glorot_normal()),
    "glorot_uniform": _by_fans(initializers.glorot_uniform()),
    "he_normal": _by_fans(initializers.he_normal()),
    "he_uniform": _by_fans(initializers.he_uniform()),
    "lecun_normal": _by_fans(initializers.lecun_normal()),
    "lecun_uniform": _by_fans(initializers.lecun_uniform()),
    "variance_scaling": _by_fans(initializers.lecun_normal()),
    "orthogonal": initializers.orthogonal(),
}


def _named(name: str, seed: int, shape: tuple[int, ...], dtype: DTypeLike) -> Callable[..., Any]:
    """The initializer of that name, as a function of (shape, dtype)."""
    if name in ("zeros", "ones", "constant"):
        return functools.partial(INITIALIZERS[name], None)
    ndim = 2 if name in ("identity", "orthogonal") else len(shape)
    if len(shape) < ndim or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Expected a floating dtype{' and two dimensions' * (ndim > len(shape))} for "
            f"initializer={name!r}; got {dtype} and shape {shape}."
        )
    return functools.partial(INITIALIZERS[name], jax.random.key(seed))


def _initialized(
    initializer: Initializer,
    seed: int,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sharding: Sharding | None = None,
) -> jax.Array:
    create: Any = initializer
    value: Any  # an initializer of a user may return anything
    if isinstance(initializer, (int, float, list, tuple, *ARRAYS, Variable)):
        first = initializer.value() if isinstance(initializer, Variable) else initializer
        value = jnp.asarray(first)
        create = functools.partial(_broadcast, value)
    if isinstance(initializer, str):
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", initializer).lower()
        create = _named(snake, seed, shape, dtype) if snake in INITIALIZERS else None
    if not callable(create):
        raise ValueError(
            f"Expected one of {', '.join(INITIALIZERS)}, a value, or a callable of (shape, dtype), "
            f"for initializer; got {initializer!r}."
        )
    if not isinstance(initializer, str) and _takes_key(create):
        create = functools.partial(create, jax.random.key(seed))
    if sharding is None:
        value = create(shape, dtype)
    else:  # each device creates its own shards: the whole may not fit on one
        value = jax.jit(lambda: create(shape, dtype), out_shardings=sharding)()
    found = getattr(value, "shape", None) or np.shape(value)
    if found != shape:
        raise ValueError(f"Expected a value of shape {shape} from initializer; got shape {found}.")
    return value


def _broadcast(value: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    if value.shape not in ((), shape):
        raise ValueError(
            f"Expected a scalar or a value of shape {shape} for initializer; got shape "
            f"{value.shape}."
        )
    return jnp.broadcast_to(value.astype(dtype), shape)


def _takes_key(create: Callable[..., Any]) -> bool:
    """Whether an initializer is one of `jax.nn.initializers`: of (key, shape, dtype)."""
    try:
        return next(iter(inspect.signature(create).parameters), None) == "key"
    except ValueError:
        return False

"""A mutable box for one array."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import AxisType, NamedSharding, Sharding
from jax.typing import DTypeLike

from gainstage._base._jax import Tracer, get_opaque_trace_state, holds_arrays, trace_ctx
from gainstage._base.arrays import ARRAYS, Devices, owned, strong, with_devices
from gainstage._variables.operators import Operators


class Variable(Operators):
    """A named box for one `jax.Array` whose shape and dtype never change. Nor does its sharding,
    unless `build` of an optimizer with a mesh places it there.

    A function that reads and assigns variables becomes pure when values are *bound* to them
    (`gainstage.optimizers.functionalize`). Only then may a variable hold traced values. During an
    optimizer's step, a half-precision variable is bound to its float32 value.

    Operators, indexing, the methods of an array such as `sum` and `astype`, `float()`, `int()` and
    `np.asarray()` work on the variable. Pass `variable.value()` to functions of `jax.numpy`. `==`
    compares the value with a number or array; two variables are equal only if they are the same
    object.

    Args:
        initial_value: the first value, of any shape; anything that `jnp.array` takes. It is copied;
            an array on a mesh keeps its sharding. A `jax.ShapeDtypeStruct` makes a *planned*
            variable, without memory until a value is assigned. An optimizer can be built for it,
            described and compiled.
        trainable: whether the variable is to be trained; for code that collects variables.
        dtype: the dtype, by default that of `initial_value`.
        name: any string; names need not be unique, because variables are compared by identity.
        constraint: a function of the value, applied after each step that has a gradient for it.

    Raises:
        TypeError: `trainable` is not a bool, or `name` not a string.
        ValueError: created inside a traced function; its value would outlive the trace.

    Examples:
        >>> import gainstage as gs
        >>> var = gs.optimizers.Variable([1.0, 2.0], name="w")
        >>> var.assign_add([0.5, 0.5])
        >>> print(var * 2)
        [3. 5.]

    Source: `tf.Variable` and `keras.Variable`, as their optimizers use them.
    """

    # A weak reference to an object with a `version`, for which a program has constants.
    _constants_of: Any = None
    __array_priority__ = 100  # numpy leaves `array * variable` to this class

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        *,
        dtype: DTypeLike | None = None,
        name: str = "variable",
        constraint: Callable[[jax.Array], jax.Array] | None = None,
    ):
        if not isinstance(name, str):
            raise TypeError(f"Expected a string for name; got {name!r}.")
        if not isinstance(trainable, (bool, np.bool_)):
            raise TypeError(
                f"Expected a bool for trainable; got {trainable!r}. A dtype is passed as `dtype=`, "
                f"a name as `name=`."
            )
        value = initial_value.value() if isinstance(initial_value, Variable) else initial_value
        self.name: str = name
        self.trainable: bool = trainable
        self.constraint: Callable[[jax.Array], jax.Array] | None = constraint
        self._created = next(_creations)
        # The traces in which it is bound, innermost last: trace, thread and the value before.
        self._traces: list[tuple[Any, int, Any]] = []
        self._shared = False  # whether others may hold the array, so that it must not be donated
        if isinstance(value, jax.ShapeDtypeStruct):
            self._value: Any = value.update(dtype=dtype or value.dtype)
        else:
            self._set(strong(jnp.array(value, dtype=dtype)))
        sharding = getattr(self._value, "sharding", None)
        self._sharding: Sharding | None = (
            sharding if len(getattr(sharding, "device_set", ())) > 1 else None
        )

    def value(self) -> jax.Array:
        """Returns the array. It stays readable: a later step that would donate it copies it
        first."""
        value = self._read()
        if not isinstance(value, Tracer):
            self._shared = True
        return value

    def numpy(self) -> np.ndarray:
        """Returns a copy of the value as a numpy array."""
        return np.array(self._read())

    def _read(self) -> jax.Array:
        """The array, for callers that do not keep it."""
        Variable._note_reads([self])
        value = self._value
        if self._traces or isinstance(value, Tracer):
            value = self._value_here(value)
        if not self._may_hold_tracers() and not isinstance(value, Tracer):
            if is_tracing() and not getattr(recording, "runs_now", False):
                raise ValueError(
                    f"Expected every variable used inside a traced function to be in its state; "
                    f"got {self.name!r}, whose value would be frozen into the program. Add it to "
                    f"the `state` of `gainstage.optimizers.jit` (of an optimizer: all of "
                    f"`optimizer.variables`; inside one: make it with `add_variable`), or read "
                    f"`value()` outside and pass it in."
                )
            if self._is_planned:
                raise ValueError(f"Expected {self.name!r} to have a value; it is only planned.")
        return value

    def _value_here(self, value: jax.Array) -> jax.Array:
        """The value to read while the variable is bound; another thread gets the unbound value."""
        outermost = self._traces[:1]
        if not outermost:
            return self._value  # it was unbound in the meantime
        ((_, thread, own),) = outermost
        return value if thread == threading.get_ident() else own

    def assign(self, value: npt.ArrayLike) -> None:
        """Sets the value, cast to the variable's dtype.

        Raises:
            TypeError: the value is complex and the variable real.
            ValueError: the value has another shape, or is traced and would outlive its trace.
        """
        value = self._assignable(value)
        if getattr(recording, "now", None):
            self._record()
        self._check_that_it_stays(value)
        self._shared = True  # the caller may hold the same array
        self._value = value

    def assign_add(self, value: npt.ArrayLike) -> None:
        """Adds `value`, in the wider of the two dtypes."""
        self.assign(self + self._converted(value))

    def assign_sub(self, value: npt.ArrayLike) -> None:
        """Subtracts `value`, in the wider of the two dtypes."""
        self.assign(self - self._converted(value))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return self._value.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype; during an optimizer's step, float32 for half precision."""
        return self._value.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._value.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._value.size

    @property
    def sharding(self) -> Sharding:
        """The sharding, which each new value gets."""
        return self._sharding or self._value.sharding

    def _assignable(self, value: "npt.ArrayLike | Variable") -> jax.Array:
        """`value`, checked, cast to the variable's dtype and moved to its sharding."""
        return self._here(placed(self._fitted(value), self._sharding))

    def _fitted(self, value: "npt.ArrayLike | Variable") -> jax.Array:
        value = value.value() if isinstance(value, Variable) else value
        kind = getattr(value, "dtype", np.dtype(complex if isinstance(value, complex) else bool))
        if jnp.issubdtype(kind, jnp.complexfloating) and not jnp.issubdtype(
            self.dtype, jnp.complexfloating
        ):
            raise TypeError(f"Expected a real value for variable {self.name!r}; got {value!r}.")
        if not isinstance(value, jax.Array) or value.dtype != self.dtype or value.weak_type:
            value = self._converted(owned(value), self.dtype)
        if value.shape != self.shape:
            raise ValueError(
                f"Expected a value of shape {self.shape} for variable {self.name!r}; "
                f"got shape {value.shape}."
            )
        return value

    def _converted(self, value: Any, dtype: DTypeLike | None = None) -> jax.Array:
        """`value` as an array that can be broadcast to this variable's shape."""
        expected = f"Expected a value of shape {self.shape} for variable {self.name!r}"
        try:
            array = jnp.asarray(value, dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{expected}; got {value!r}.") from error
        same = zip(array.shape[::-1], self.shape[::-1], strict=False)
        if array.ndim > self.ndim or any(size not in (1, own) for size, own in same):
            raise ValueError(f"{expected}; got shape {array.shape}.")
        return array

    def _here(self, value: jax.Array) -> jax.Array:
        """Moves `value` to the device of this variable, if the user has chosen that device."""
        chosen = self._sharding is None and not self._is_planned and not self._is_bound
        if isinstance(value, Tracer) or not chosen or not self._value.committed:
            return value
        (device,) = self._value.devices()
        if value.committed and value.devices() == {device}:
            return value
        return jax.device_put(value, self._value.sharding if value.shape == self.shape else device)

    def _set(self, value: jax.Array) -> None:
        self._check_that_it_stays(value)
        self._value = value

    def _check_that_it_stays(self, value: jax.Array) -> None:
        if isinstance(value, Tracer) and not self._may_hold_tracers():
            raise ValueError(
                f"Expected variable {self.name!r} to be in the state of the function being traced; "
                f"got a traced value, which would leak out of it. Create variables (and call "
                f"`optimizer.build`) outside of the traced function, name those that it assigns in "
                f"the `state` of `gainstage.optimizers.jit` or `functionalize`, and assign after a "
                f"loss or loop, not inside it."
            )

    def _record(self) -> None:
        """Binds the variable to its own value, before code inside `recorded` assigns it."""
        if self._may_hold_tracers():
            return
        trace, variables, own = recording.now
        if trace == get_opaque_trace_state():
            own += Variable._held([self])
            variables.append(self)
            Variable._bind([self], [self._value], [self._sharding])

    def _place(self, sharding: Sharding) -> None:
        """Moves the value to this sharding permanently. On devices that can only be compiled for,
        the variable becomes planned."""
        value, self._sharding = self._value, sharding
        if self._is_planned:
            self._value = value.update(sharding=sharding)
        elif not holds_arrays(sharding):
            self._value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        elif sharding.is_fully_addressable:
            self._set(jax.device_put(value, sharding))
        elif value.is_fully_addressable:  # `device_put` would compare the values of all processes
            copy = np.asarray(value)
            self._set(jax.make_array_from_callback(copy.shape, sharding, copy.__getitem__))

    def _move_to(self, other: "Variable") -> None:
        """Moves the value to the device of another variable, if the user has chosen that device."""
        self._value = other._here(self._value)

    @staticmethod
    def _note_reads(variables: "Iterable[Variable]") -> None:
        """Tells the function that notes what is read that these variables are about to be."""
        note = getattr(recording, "note_read", None)
        if note is not None:
            for variable in variables:
                note(variable)

    @staticmethod
    def _put(variables: "Sequence[Variable]", values: Sequence[Any], shared: bool) -> None:
        """Stores many values; `shared` is whether others hold them."""
        for variable, value in zip(variables, values, strict=True):
            if value is not variable._value:
                variable._value, variable._shared = value, shared

    @staticmethod
    def _bind(
        variables: "Sequence[Variable]",
        values: Sequence[jax.Array],
        shardings: Sequence[Sharding | None],
    ) -> None:
        """Binds values to the variables until `_unbind`, in the current trace."""
        trace, thread = get_opaque_trace_state(), threading.get_ident()
        for variable, value, sharding in zip(variables, values, shardings, strict=True):
            variable._traces.append((trace, thread, variable._value))
            variable._value, variable._sharding = value, sharding
            variable._shared = not isinstance(value, Tracer)  # the caller holds the value

    @staticmethod
    def _held(variables: "Sequence[Variable]") -> list[tuple[Any, ...]]:
        """Everything that `_bind` changes."""
        Variable._note_reads(variables)
        return [(len(v._traces), v._value, v._shared, v._sharding) for v in variables]

    @staticmethod
    def _unbind(variables: "Sequence[Variable]", own: Sequence[tuple[Any, ...]]) -> None:
        """Restores the result of `_held`."""
        for variable, (depth, *before) in zip(variables, own, strict=True):
            variable._value, variable._shared, variable._sharding = before
            del variable._traces[depth:]

    @property
    def _is_planned(self) -> bool:
        return isinstance(self._value, jax.ShapeDtypeStruct)

    @property
    def _is_bound(self) -> bool:
        return bool(self._traces)

    def _may_hold_tracers(self) -> bool:
        return bool(self._traces) and self._traces[-1][0] == get_opaque_trace_state()

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._read(), dtype=dtype)

    def _number(self) -> jax.Array | np.ndarray:
        """The value, for a conversion to a Python number."""
        value = self._read()
        # jax 0.11 converts a scalar through a view that it keeps, so it could not be donated.
        return value if isinstance(value, Tracer) or value.ndim else np.array(value)

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value())

    def __format__(self, spec: str) -> str:
        return format(self._number(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        own = f"name={self.name!r}, shape={self.shape}, dtype={self.dtype}, value={self._value}"
        return f"Variable({own})"

    def __eq__(self, other: object) -> Any:
        return self.value() == other if isinstance(other, _NUMBERS) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return self.value() != other if isinstance(other, _NUMBERS) else NotImplemented

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...
    else:
        __hash__ = object.__hash__

    def __getstate__(self) -> dict[str, Any]:
        self._shared = True  # a shallow copy holds the same array
        return {
            **vars(self),
            "_traces": [],
            "_constants_of": None,
            "_sharding": self._sharding and Devices(self._sharding),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(with_devices(state), _created=next(_creations))


# Per thread. `now`: the recorded trace, the variables assigned in it, and their values before.
# `runs_now`: whether the traced program is run at once, so that it may contain values of variables.
# `note_read`: called with each variable before it is read or bound: see `reads.py`.
recording = threading.local()


def is_tracing() -> bool:
    """Whether new arrays belong to a traced program."""
    return is_inside() and isinstance(jnp.zeros(()), Tracer)


def is_inside() -> bool:
    """Whether this runs inside a JAX transformation, including eager ones."""
    return trace_ctx.trace is not _EAGER


_EAGER = trace_ctx.trace
_creations = itertools.count()  # numbers variables: version 1 lists them as they were created
_NUMBERS = (bool, int, float, *ARRAYS)


def placed(value: jax.Array, sharding: Sharding | None) -> jax.Array:
    """`value` with its variable's sharding."""
    if sharding is None or not isinstance(value, Tracer):
        return value if sharding is None else jax.device_put(value, sharding)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(value, sharding)
    return lax.with_sharding_constraint(value, sharding)

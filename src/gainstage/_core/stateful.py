"""Objects that own variables: they make them, name them and save them."""

import abc
import functools
import itertools
import json
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from gainstage._core import checks, gradients
from gainstage._core._jax import Tracer
from gainstage._core.bridge import assign, read
from gainstage._core.configurable import Configurable
from gainstage._core.groups import Group
from gainstage._core.joining import join, offsets
from gainstage._core.sharding import mesh_of
from gainstage._core.variable import Variable, owned

Initializer = str | Callable[..., Any]


class Stateful(Configurable, abc.ABC):
    """Something with a name and a flat list of variables."""

    name: str
    mesh: Mesh | None
    _slots: list[Variable]
    _slot_of: dict[tuple[Variable, str, int], Variable]  # the last: which of those alike
    _asked: Counter[Any]  # how many variables of each kind a build has asked for so far
    _added: dict[Any, Variable]  # those that builds have added beside slots, by kind and number
    _group_of: dict[Variable, Group]

    @property
    @abc.abstractmethod
    def variables(self) -> list[Variable]:
        """All state, as a flat list."""

    @property
    @abc.abstractmethod
    def built(self) -> bool:
        """Whether the trainable variables are known, so that all state exists."""

    @property
    @abc.abstractmethod
    def groups(self) -> list[list[list[Any]]]:
        """With `group_small`, for each group of small variables whose slots share buffers: the
        name, shape and first element of each variable's part."""

    @abc.abstractmethod
    def _forget_program(self) -> None:
        """Called when the list of variables changes."""

    def add_variable(
        self,
        shape: Sequence[int],
        initializer: Initializer = "zeros",
        dtype: DTypeLike | None = None,
        aggregation: str = "mean",
        name: str | None = None,
    ) -> Variable:
        """A new variable of the optimizer's state. A second `build` gets those of the first.

        Args:
            shape: its shape.
            initializer: "zeros", "ones" or a callable of (shape, dtype).
            dtype: its dtype, float32 by default.
            aggregation: accepted as documented, without effect: there is one value on a mesh.
            name: its name, which the optimizer's is put before.
        """
        dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
        kind = (name, tuple(shape), dtype)
        key = (*kind, self._asked[kind])
        if self.built:  # `Optimizer.build` has begun
            self._asked[kind] += 1
            if key in self._added:
                return self._added[key]
        value = _initialized(initializer, tuple(shape), dtype)
        variable = Variable(value, dtype, f"{self.name}/{name or 'variable'}", trainable=False)
        if self.built:
            self._added[key] = variable
        self._slots.append(variable)
        self._forget_program()
        return variable

    def add_variable_from_reference(
        self,
        reference_variable: Variable,
        name: str | None = None,
        initializer: Initializer = "zeros",
    ) -> Variable:
        """A new slot: a variable of the shape and sharding of another, of its dtype or float32 for
        half precision. A second `build` gets those of the first."""
        alike = (reference_variable, name or "var")
        key = (*alike, self._asked[alike])
        self._asked[alike] += 1
        if key not in self._slot_of:
            group = self._group_of.get(reference_variable)
            if group is None:
                self._slot_of[key] = slot = self._slot_like(*alike, initializer)
            else:
                slot = self._slot_of_group(group, *key, initializer)
            self._slots.append(slot)
            self._forget_program()
        elif (group := self._group_of.get(reference_variable)) and key not in group.started:
            self._start_part(group, *key, initializer)
        return self._slot_of[key]

    def add_optimizer_variables(
        self,
        trainable_variables: Iterable[Variable],
        name: str | Sequence[str],
        initializer: Initializer = "zeros",
    ) -> Any:
        """One slot per variable, as a list; for several names a tuple of such lists."""
        variables = list(trainable_variables)
        if not isinstance(name, str):
            return tuple(self.add_optimizer_variables(variables, n, initializer) for n in name)
        return [self.add_variable_from_reference(v, name, initializer) for v in variables]

    def _slot_like(
        self, reference: Variable, name: str, initializer: Initializer = "zeros"
    ) -> Variable:
        dtype, layout = gradients.wide(reference.dtype), self._state_layout(reference)
        start = functools.partial(_initialized, initializer, reference.shape, dtype, layout)
        planned = jax.ShapeDtypeStruct(reference.shape, dtype, sharding=layout)
        value = planned if reference._is_planned else start()
        slot = Variable(value, name=f"{self.name}/{reference.name}_{name}", trainable=False)
        if slot._is_planned:
            slot._first_value = start
        elif layout is not None:
            slot._place(layout)
        else:
            slot._value = reference._here(slot._value)
        return slot

    def _state_layout(self, reference: Variable) -> jax.sharding.Sharding | None:
        """Where the state for a variable lies: with it; None off a mesh."""
        return reference._layout

    def _slot_of_group(
        self, group: Group, reference: Variable, name: str, number: int, initializer: Initializer
    ) -> Variable:
        others = "zeros" if callable(initializer) else initializer  # they have their own
        parts = [
            self._slot_like(variable, name, initializer if variable is reference else others)
            for variable in group.members
        ]
        planned = any(part._is_planned for part in parts)
        value = jax.eval_shape(join, read(parts)) if planned else join(read(parts))
        slot = Variable(value, name=f"{self.name}/{group.name}_{name}", trainable=False)
        if planned:
            slot._first_value = functools.partial(_joined_first_values, parts)
        self._slot_of |= {(variable, name, number): slot for variable in group.members}
        group.slots.append(slot)
        group.started.add((reference, name, number))
        return slot

    def _start_part(
        self, group: Group, reference: Variable, name: str, number: int, initializer: Initializer
    ) -> None:
        """Starts one variable's part of a buffer that another one has asked for."""
        group.started.add((reference, name, number))
        if not callable(initializer):
            return  # it is that of the other
        slot, place = self._slot_of[reference, name, number], group.members.index(reference)
        part = self._slot_like(reference, name, initializer)
        if slot._is_planned:
            slot._first_value.args[0][place] = part  # type: ignore[union-attr]
        else:
            start = offsets(group.shapes)[place]
            flat = slot.value().at[start : start + part.size].set(part.value().reshape(-1))
            slot.assign(flat)

    def _replicate(self, scalars: Iterable[Variable], variables: Sequence[Variable]) -> None:
        """Puts scalars on the mesh of the optimizer, or else of the variables."""
        mesh = mesh_of(variables)
        if mesh is not None and self.mesh not in (None, mesh):
            raise ValueError(
                f"Expected variables on the mesh of {self.name!r}, {self.mesh}; got "
                f"{variables[0].name!r} on {mesh}."
            )
        mesh = self.mesh or mesh
        for scalar in scalars:
            if mesh is not None:
                scalar._place(NamedSharding(mesh, PartitionSpec()))
            else:
                scalar._value = variables[0]._here(scalar._value)

    def assign(self, variable: Any, value: Any) -> None:
        """Sets a variable: ours, Keras's, or anything else that has `assign`."""
        variable.assign(value)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Adds to a variable."""
        variable.assign_add(value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Subtracts from a variable."""
        variable.assign_sub(value)

    # ── saving ───────────────────────────────────────────────────────────────────────────────

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all of `variables`, in that order, or, if one does not fit, none.

        Raises:
            ValueError: not built, a wrong number of arrays, or an array that does not fit.
        """
        if not self.built:
            raise ValueError(f"Expected {self.name!r} to be built before set_weights.")
        variables = self.variables
        check_count("weights", weights, variables)
        fitted = [self._checked_weight(v, w) for v, w in zip(variables, weights, strict=True)]
        assign(variables, fitted)

    def _checked_weight(self, variable: Variable, weight: Any) -> jax.Array:
        try:
            value = _converted(weight, variable.dtype)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"Expected an array for {variable.name!r}, of numbers that {variable.dtype} holds; "
                f"got {reprlib.repr(weight)}."
            ) from error
        return variable._fitted(value)

    def state(self) -> dict[str, jax.Array]:
        """All of `variables` by name: arrays for whoever saves a dictionary of them. Of variables
        with one name the second has "#2" behind it, and so on. With `group_small` the table of what
        lies where in the buffers stands under "groups"."""
        named = dict(zip(unique_names(self.variables), self.variables, strict=True))
        groups = {"groups": jnp.asarray(self._packed_groups())} if self.groups else {}
        return {name: variable.value() for name, variable in named.items()} | groups

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Sets all of `variables` from what `state` returned, or, if something is wrong, none.

        Raises:
            TypeError: no dictionary.
            ValueError: not built, a name missing or unknown, an array that does not fit, or other
                groups.
        """
        names = unique_names(self.variables)
        check_names("state", state, [*names, *(["groups"] if self.groups else [])])
        self._check_groups(state)
        self.set_weights([state[name] for name in names])

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Puts all of `variables` into `store`, as numpy arrays under "0", "1", ...

        With `group_small` the table of names and places in the buffers stands under "groups"."""
        for variable in self.variables:
            variable._read()  # an error, before anything is stored
        for i, variable in enumerate(self.variables):
            store[str(i)] = variable.numpy()
        if self.groups:
            store["groups"] = self._packed_groups()

    def load_own_variables(self, store: Any) -> None:
        """Sets all of `variables` from what `save_own_variables` stored, or none.

        Raises:
            TypeError: no dictionary, or what is used like one.
            ValueError: not built, a key missing, an array that does not fit, or other groups.
        """
        if not self.built:
            raise ValueError(f"Expected {self.name!r} to be built before load_own_variables.")
        if not hasattr(store, "keys"):
            raise TypeError(f"Expected a store with keys; got {reprlib.repr(store)}.")
        self._check_groups(store)
        count = len(store.keys()) - ("groups" in store)
        keys = [str(i) for i in range(max(len(self.variables), count))]
        missing = [key for key in keys if key not in store]
        if missing:
            raise ValueError(
                f"Expected the keys '0' to '{len(self.variables) - 1}' in the store; "
                f"got {sorted(map(str, store.keys()))}."
            )
        self.set_weights([store[key] for key in keys])

    def _packed_groups(self) -> np.ndarray:
        return np.frombuffer(json.dumps(self.groups).encode(), np.uint8)

    def _check_groups(self, store: Any) -> None:
        """The buffers that were saved hold what they hold here, in the same places."""
        saved = store["groups"] if "groups" in store else np.frombuffer(b"[]", np.uint8)
        try:
            table = json.loads(np.asarray(saved).tobytes())
        except (ValueError, RecursionError):
            table = reprlib.repr(saved)
        if table != self.groups:
            raise ValueError(f"Expected the groups {self.groups} in what was saved; got {table}.")


def _joined_first_values(parts: Sequence[Variable]) -> jax.Array:
    return join(part._first_value() if part._first_value else part._value for part in parts)


def shown(scalar: Variable) -> str:
    """A scalar variable's value as one would write it, or what there is in its place."""
    value = scalar._value
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or value.is_deleted():
        return "unknown"
    return f"{checks.shortest(value):.9g}" if value.is_fully_addressable else "on all processes"


def unique_names(variables: Sequence[Variable]) -> list[str]:
    """The variables' names, each but the first of a kind with its number."""
    names: dict[str, None] = {}
    for variable in variables:
        numbered = (f"{variable.name}#{n}" for n in itertools.count(2))
        names[next(n for n in itertools.chain([variable.name], numbered) if n not in names)] = None
    return list(names)


def check_names(what: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    """A value for every name and no other, or an error that says which."""
    if not isinstance(values, Mapping):
        raise TypeError(f"Expected a dictionary of the {what}; got {reprlib.repr(values)}.")
    missing = [name for name in names if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown:
        raise ValueError(
            f"Expected the names of the {what}; got {missing or 'none'} missing and "
            f"{unknown or 'none'} unknown."
        )


def _converted(weight: Any, dtype: np.dtype) -> jax.Array:
    """An array in the dtype of a variable.

    Floating numbers may be rounded by it, but not made infinite, and everything else is kept."""
    array = weight if isinstance(weight, jax.Array) else np.asarray(weight)
    if _kind(array.dtype) > _kind(dtype):
        raise TypeError(f"{array.dtype} in {dtype}")
    if isinstance(array, np.ndarray) and array.dtype != dtype:
        with np.errstate(all="ignore"):
            given, array = array, array.astype(dtype)
        floating = jnp.issubdtype(dtype, jnp.floating)
        same = np.isfinite(array) == np.isfinite(given) if floating else array == given
        if not np.all(same):
            raise ValueError(f"too large for {dtype}")
    return jnp.asarray(owned(array), dtype)


def _kind(dtype: Any) -> int:
    """Each kind of numbers goes into those after it; the last is what is no real number."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def check_count(what: str, values: Sequence[Any], variables: Sequence[Variable]) -> None:
    """One value for each variable, or a ValueError that names what there should be."""
    if len(values) != len(variables):
        names = [variable.name for variable in variables]
        raise ValueError(
            f"Expected {len(variables)} {what}, one for each of {names}; got {len(values)}."
        )


def _initialized(
    initializer: Initializer, shape: tuple[int, ...], dtype: Any, layout: Any = None
) -> jax.Array:
    known: dict[str, Callable[..., Any]] = {"zeros": jnp.zeros, "ones": jnp.ones}
    create = known.get(initializer) if isinstance(initializer, str) else initializer
    if not callable(create):
        raise ValueError(
            f'Expected "zeros", "ones" or a callable of (shape, dtype) for initializer; '
            f"got {initializer!r}."
        )
    if layout is None:
        return create(shape, dtype)
    # Every device makes its own part: the whole need not fit into one.
    return jax.jit(lambda: create(shape, dtype), out_shardings=layout)()

"""What an optimizer stores: its variables by name and kind, made where they belong."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from gainstage._core import gradients
from gainstage._core.bridge import read
from gainstage._core.groups import Group, groups_of
from gainstage._core.guard import WINDOWS, Window
from gainstage._core.packing import join, offsets
from gainstage._core.sharding import check_axes, replicate, sharding_of_state
from gainstage._core.step import LearningRate, StepOptions, StepState
from gainstage._core.variable import Variable

Initializer = str | Callable[..., Any]


class Slots:
    """The variables that `build` of an optimizer adds.

    Args:
        owner: the optimizer's name, which is put before theirs.
        shard_over: the mesh axes over which the state of a variable is divided more.
    """

    def __init__(self, owner: str, shard_over: tuple[str, ...]):
        self.owner, self.shard_over = owner, shard_over
        self.all: list[Variable] = []
        self.of: dict[tuple[Variable, str, int], Variable] = {}  # the last: which of those alike
        self.groups: list[Group] = []  # of small variables, which share buffers
        self.group_of: dict[Variable, Group] = {}
        self._added: dict[Any, Variable] = {}  # those beside `of` that builds have added
        self._asked: Counter[Any] = Counter()  # how many of each kind this build has asked for

    def start_build(self) -> None:
        """From here on variables that an earlier build has added are returned again."""
        self._asked.clear()

    def add(
        self,
        shape: Sequence[int],
        initializer: Initializer,
        dtype: DTypeLike | None,
        name: str | None,
        in_build: bool,
    ) -> Variable:
        """A new variable; in a build, that which an earlier one got in its place."""
        dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
        kind = (name, tuple(shape), dtype)
        key = (*kind, self._asked[kind])
        if in_build:
            self._asked[kind] += 1
            if key in self._added:
                return self._added[key]
        value = _initialized(initializer, tuple(shape), dtype)
        variable = Variable(value, dtype, f"{self.owner}/{name or 'variable'}", trainable=False)
        if in_build:
            self._added[key] = variable
        self.all.append(variable)
        return variable

    def add_like(self, reference: Variable, name: str, initializer: Initializer) -> Variable:
        """A new slot of a variable, or that which an earlier build got in its place."""
        number = self._asked[reference, name]
        self._asked[reference, name] += 1
        key, group = (reference, name, number), self.group_of.get(reference)
        if key not in self.of:
            if group is None:
                self.of[key] = slot = self.like(reference, name, initializer)
            else:
                slot = self._of_group(group, *key, initializer)
            self.all.append(slot)
        elif group is not None and key not in group.started:
            self._start_part(group, *key, initializer)
        return self.of[key]

    def like(self, reference: Variable, name: str, initializer: Initializer = "zeros") -> Variable:
        """A variable of the shape and sharding of another, in float32 or wider."""
        dtype = gradients.float32_or_wider(reference.dtype)
        sharding = sharding_of_state(reference, self.shard_over)
        start = functools.partial(_initialized, initializer, reference.shape, dtype, sharding)
        planned = jax.ShapeDtypeStruct(reference.shape, dtype, sharding=sharding)
        value = planned if reference._is_planned else start()
        slot = Variable(value, name=f"{self.owner}/{reference.name}_{name}", trainable=False)
        if slot._is_planned:
            slot._start_with(start)
        elif sharding is not None:
            slot._place(sharding)
        else:
            slot._move_to(reference)
        return slot

    def group(self, variables: Sequence[Variable]) -> None:
        """From here on small variables share buffers."""
        self.groups = groups_of(variables, gradients.float32_or_wider)
        for group in self.groups:
            self.group_of |= dict.fromkeys(group.members, group)

    def _of_group(
        self, group: Group, reference: Variable, name: str, number: int, initializer: Initializer
    ) -> Variable:
        others = "zeros" if callable(initializer) else initializer  # they have their own
        parts = [
            self.like(variable, name, initializer if variable is reference else others)
            for variable in group.members
        ]
        planned = any(part._is_planned for part in parts)
        value = jax.eval_shape(join, read(parts)) if planned else join(read(parts))
        slot = Variable(value, name=f"{self.owner}/{group.name}_{name}", trainable=False)
        if planned:
            slot._start_with(functools.partial(_joined_first_values, parts))
        self.of |= {(variable, name, number): slot for variable in group.members}
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
        slot, place = self.of[reference, name, number], group.members.index(reference)
        part = self.like(reference, name, initializer)
        if slot._is_planned:
            slot._first_value.args[0][place] = part  # type: ignore[union-attr]
        else:
            start = offsets(group.shapes)[place]
            flat = slot.value().at[start : start + part.size].set(part.value().reshape(-1))
            slot.assign(flat)


class Computed(Variable):
    """What is computed from other variables: it reads like a variable, and cannot be assigned.

    Args:
        name: as for every variable.
        compute: returns the value now.
        set_by: what to do in the place of assigning, for the error.
    """

    def __init__(self, name: str, compute: Callable[[], jax.Array], set_by: str):
        self.name, self.trainable, self.constraint = name, False, None
        self._traces, self._shared, self._sharding = [], False, None
        self._compute, self._set_by = compute, set_by

    @property
    def _value(self) -> jax.Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._compute()

    def _read(self) -> jax.Array:
        return self._compute()

    def assign(self, value: Any) -> None:
        raise TypeError(f"{self.name!r} is computed and cannot be assigned: {self._set_by}.")


class Guard:
    """What a store knows of the wrapper around its optimizer; `guarded` skips the steps.

    Args:
        owner: its name.
        over: the options that it was given, which go before the optimizer's.
    """

    def __init__(self, owner: str, over: Mapping[str, Any] | None = None):
        self.owner, self.over = owner, dict(over or {})

    def build(self, store: "Store", variables: Sequence[Variable]) -> None:
        """Makes what depends on the weights; called before the store counts as built."""


class Store:
    """All that an optimizer's step reads and changes, and the options it is taken with.

    A wrapper holds the store of its inner optimizer, and a guard, which the store knows as long as
    there is a wrapper.
    """

    def __init__(
        self,
        owner: str,
        learning_rate: Any,
        options: StepOptions,
        mesh: Mesh | None,
        shard_over: tuple[str, ...],
    ):
        self.owner, self.options, self.mesh = owner, options, mesh
        self.version = 0  # of all that is a constant of a compiled step
        self.iterations = Variable(0, jnp.int32, f"{owner}/iteration", trainable=False)
        self.rate = LearningRate(learning_rate, owner)
        self.index: dict[Variable, int] = {}  # the trainable variables, with their places
        self.shardings: list[Any] = []  # where the state of each lies, None off a mesh
        self.averages: list[Variable] = []
        self.accumulators: list[Variable] = []
        self.masters: dict[Variable, Variable] = {}
        self.window_count: Variable | None = None
        self.slots = Slots(owner, shard_over)
        self._guard: weakref.ref[Guard] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_guard": None}  # which a copy of the guard's owner puts back

    @property
    def guard(self) -> Guard | None:
        """What is known of the wrapper that skips steps which are not finite."""
        return self._guard and self._guard()

    def set_guard(self, guard: Guard) -> None:
        """From now on `guard` skips steps, and its options are in force; it is told of `build`."""
        self._guard = weakref.ref(guard)
        self.changed()

    def changed(self) -> None:
        """Says that compiled steps have to be compiled again."""
        if not self.iterations._is_bound:  # else it is the step itself, while it is compiled
            self.version += 1

    def set_options(self, options: StepOptions) -> None:
        """Sets the options, but for those that the guard was given."""
        self.options = options
        self.changed()

    def set_rate(self, learning_rate: Any) -> None:
        """Sets the learning rate: a number stays a number."""
        rate = LearningRate(learning_rate, self.owner)
        if rate.variable is None:
            self.rate = rate
            self.changed()
        elif self.rate.variable is not None:
            self.rate.variable.assign(rate.variable)
        else:
            raise TypeError(
                f"Expected a schedule or callable for learning_rate, as the optimizer was created "
                f"with one; got {learning_rate!r}."
            )

    @property
    def in_force(self) -> StepOptions:
        """The options in force."""
        guard = self.guard
        return self.options if guard is None else self.options.under(guard.over)

    @property
    def skips(self) -> bool:
        """Whether steps that are not finite are skipped."""
        return self.guard is not None or self.in_force.loss_scale_factor is not None

    @property
    def window(self) -> Window | None:
        """How microbatches make up an update; None where each step is one."""
        options = self.in_force
        steps = options.gradient_accumulation_steps
        return WINDOWS[options.on_bad_microbatch](steps) if steps else None

    @property
    def state(self) -> StepState:
        """The variables, in their places."""
        return StepState(
            weights=list(self.index),
            iterations=self.iterations,
            rate=self.rate.variable,
            averages=self.averages,
            accumulators=self.accumulators,
            masters=[self.masters.get(variable) for variable in self.index],
            window_count=self.window_count,
            slots=self.slots.all,
        )

    @property
    def variables(self) -> list[Variable]:
        """All but the weights, in the order of `state`."""
        rate = [] if self.rate.variable is None else [self.rate.variable]
        copies = [*self.averages, *self.accumulators, *self.masters.values()]
        count = [] if self.window_count is None else [self.window_count]
        return [self.iterations, *rate, *copies, *count, *self.slots.all]

    def build(self, variables: Sequence[Variable], master_weights: bool, grouped: bool) -> None:
        """Makes all state for these variables."""
        check_axes(self.slots.shard_over, [variable.sharding for variable in variables])
        options, slots = self.in_force, self.slots
        self.window_count = self._counter(self.window, options.on_bad_microbatch)
        replicate(self.owner, self.mesh, self.variables, variables)
        if options.use_ema:
            self.averages = [slots.like(v, "average") for v in variables]
        if options.gradient_accumulation_steps:
            self.accumulators = [slots.like(v, "gradient_accumulator") for v in variables]
        if master_weights:
            half = [v for v in variables if v.dtype != gradients.float32_or_wider(v.dtype)]
            self.masters = {v: slots.like(v, "master") for v in half}
            for variable, master in self.masters.items():
                if not variable._is_planned:
                    master.assign(variable)
        if self.guard is not None:
            self.guard.build(self, variables)
        self.index = {variable: place for place, variable in enumerate(variables)}
        self.shardings = [sharding_of_state(v, slots.shard_over) for v in variables]
        if grouped:
            slots.group(variables)
        self.changed()

    def _counter(self, window: Window | None, policy: str) -> Variable | None:
        """What has to be counted for `on_bad_microbatch`."""
        if policy != "extend" and not (window and self.skips):
            raise ValueError(
                f"Expected gradient_accumulation_steps and a loss scale for "
                f"on_bad_microbatch={policy!r}; got none."
            )
        if window is None or window.counter is None:
            return None
        name, first = window.counter
        return Variable(first, name=f"{self.owner}/{name}", trainable=False)

    def state_of(self, variable: Variable) -> list[Variable]:
        """The state that belongs to one variable alone."""
        place = self.index[variable]
        copies = [kind[place] for kind in (self.averages, self.accumulators) if kind]
        masters = [self.masters[variable]] if variable in self.masters else []
        slots = [slot for (owner, *_), slot in self.slots.of.items() if owner is variable]
        return [*copies, *masters, *(slots if variable not in self.slots.group_of else [])]

    def first_values(self, values: Mapping[Variable, jax.Array]) -> dict[Variable, jax.Array]:
        """The first values of all state, given those of the weights."""
        own = {v: v._first_value() if v._first_value else v._value for v in self.variables}
        return own | {m: values[v].astype(m.dtype) for v, m in self.masters.items()}


def _joined_first_values(parts: Sequence[Variable]) -> jax.Array:
    return join(part._first_value() if part._first_value else part._value for part in parts)


def _initialized(
    initializer: Initializer, shape: tuple[int, ...], dtype: Any, sharding: Any = None
) -> jax.Array:
    known: dict[str, Callable[..., Any]] = {"zeros": jnp.zeros, "ones": jnp.ones}
    create = known.get(initializer) if isinstance(initializer, str) else initializer
    if not callable(create):
        raise ValueError(
            f'Expected "zeros", "ones" or a callable of (shape, dtype) for initializer; '
            f"got {initializer!r}."
        )
    if sharding is None:
        return create(shape, dtype)
    # Every device makes its own part: the whole need not fit into one.
    return jax.jit(lambda: create(shape, dtype), out_shardings=sharding)()

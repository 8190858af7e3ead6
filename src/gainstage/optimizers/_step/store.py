"""The store of an optimizer: all that its step reads and changes, and its options."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax.sharding import Mesh

from gainstage._base import checks
from gainstage._base.arrays import Devices, with_devices
from gainstage._base.warn import warn
from gainstage._scaling import gradients
from gainstage._scaling.scaled_step import ScaledStep, ScaledStepState
from gainstage._variables.bridge import read, variables_like
from gainstage._variables.sharding import replicate
from gainstage._variables.types import Rate
from gainstage._variables.variable import Variable
from gainstage._variables.zero_sharding import check_axes, sharding_of_state
from gainstage.optimizers._step.conventions import Conventions
from gainstage.optimizers._step.differentiate import check_floating
from gainstage.optimizers._step.optimizer_step import LearningRate, StepOptions, StepState
from gainstage.optimizers._step.slots import Slots
from gainstage.optimizers._step.undecayed import Undecayed
from gainstage.rules.loss_scale import start


class Computed(Variable):
    """A read-only variable that is computed from other variables.

    Args:
        name: as for every variable.
        compute: returns the current value.
        set_by: what to do instead of assigning, for the error.
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

    def assign(self, value: npt.ArrayLike) -> None:
        raise TypeError(f"{self.name!r} is computed and cannot be assigned: {self._set_by}.")


class LossScaleStore:
    """The variables of a loss scale around an optimizer.

    Args:
        owner: the wrapper's name, which takes the steps.
        options: the options of the wrapper, by name.
        scaled_step: the loss scale, without the options of a step.
        mesh: the mesh that replicates its variables, by default that of the weights.
        conventions: the names of its variables, and what averages start as.
    """

    def __init__(
        self,
        owner: str,
        options: Mapping[str, Any],
        scaled_step: ScaledStep,
        mesh: Mesh | None,
        conventions: Conventions,
    ):
        assert scaled_step.rule is not None
        self.owner, self.options, self.scaled_step = owner, dict(options), scaled_step
        self.mesh, self.conventions = mesh, conventions
        rule_state = variables_like(start(scaled_step.rule), owner, conventions.scale_names)
        self.state = ScaledStepState(rule_state)

    def share(self, rule_state: Any) -> None:
        """Shares the rule's state with another object, which holds these variables."""
        self.state = self.state._replace(rule_state=rule_state)

    def build(
        self, options: StepOptions, variables: Sequence[Variable], averages: Sequence[Variable]
    ) -> None:
        """Creates the state that depends on the weights, by the options of a step, the weights and
        their moving averages; called before the store is built."""
        rule_state = self.state.rule_state
        first = options.of(self.scaled_step).first(read(rule_state), len(variables))
        stats = first.observed and variables_like(first.observed, f"{self.owner}/last")
        self.state = ScaledStepState(rule_state, stats)
        replicate(self.owner, self.mesh, jax.tree.leaves(self.state), variables)
        if not self.conventions.averages_start_as_weights:
            return
        for variable, average in zip(variables, averages, strict=False):
            if not average._is_planned:
                started = (average.value() != 0).any()
                average.assign(jnp.where(started, average.value(), variable.value()))


COUNT_OF_MICROBATCHES = (
    "Expected iterations not to be set with gradient_accumulation_steps, where they are computed "
    "from the number of microbatches. Load a state that was saved, or count for yourself."
)


class Store:
    """All that an optimizer's step reads and changes, and its options.

    A `LossScaleOptimizer` uses the store of its inner optimizer, which has a weak reference to its
    own `LossScaleStore`.
    """

    def __init__(
        self,
        owner: str,
        learning_rate: Rate,
        has_own_rate: bool,
        options: StepOptions,
        mesh: Mesh | None,
        slots: Slots,
    ):
        self.owner, self.base_options, self.mesh = owner, options, mesh
        self.has_own_rate = has_own_rate  # whether a subclass overrides `learning_rate`
        self.version = 0  # of the constants of a compiled step
        # A program that steps with this count has the options as constants: see `bridge.jit`.
        self.steps = Variable(0, False, dtype=jnp.int32, name=f"{owner}/iteration")
        self.steps._constants_of = weakref.ref(self)
        self.rate = LearningRate(learning_rate, owner)
        self.index: dict[Variable, int] = {}  # the trainable variables, with their indices
        self.shardings: list[Any] = []  # the sharding of each one's state, None off a mesh
        self.averages: list[Variable] = []
        self.accumulators: list[Variable] = []
        self.masters: dict[Variable, Variable] = {}
        self.has_own_count = False  # whether the user has set `iterations`
        self.slots = slots
        self.added_first: int | None = None  # how many of the slots were added before `build`
        self._outer: weakref.ref[LossScaleStore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of its owner sets the wrapper again.
        return {**vars(self), "_outer": None, "mesh": self.mesh and Devices(self.mesh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(with_devices(state))
        if self.steps._constants_of is None:  # a shallow copy shares the original's
            self.steps._constants_of = weakref.ref(self)

    @property
    def outer(self) -> LossScaleStore | None:
        """The store of the `LossScaleOptimizer` that takes the steps of this optimizer, if any."""
        return None if self._outer is None else self._outer()

    def set_outer(self, outer: LossScaleStore) -> None:
        """Sets the store around this one, whose options replace those of the optimizer."""
        self._outer = weakref.ref(outer)
        self.changed()

    def changed(self, name: str = "") -> None:
        """Notes that a public attribute was set, so compiled steps are outdated; what a trace of a
        step sets itself does not count."""
        if not self.steps._is_bound and not name.startswith("_"):
            self.version += 1

    def set_count(self, count: Any) -> None:
        """Starts to count at a number, or counts in a variable of the user."""
        if self.index:
            raise RuntimeError("Expected iterations to be set before the optimizer is built.")
        if self.options.gradient_accumulation_steps:
            raise ValueError(COUNT_OF_MICROBATCHES)
        self.has_own_count = True
        if not isinstance(count, Variable):
            self.steps.assign(checks.integer("iterations", count, low=0))
            return
        if count.shape or not jnp.issubdtype(count.dtype, jnp.integer):
            raise TypeError(f"Expected an integer scalar for iterations; got {count!r}.")
        count._constants_of = weakref.ref(self)
        self.steps = count

    @property
    def options(self) -> StepOptions:
        """The options in force: the base options, some replaced by those of the wrapper."""
        base, outer = self.base_options, self.outer
        return base.replaced(outer.options) if outer and outer.options else base

    def set_rate(self, learning_rate: Rate) -> None:
        """Sets the learning rate. A number can be set only where the rate is stored in a variable,
        and of a variable only the value."""
        stored = self.rate.source if isinstance(self.rate.source, Variable) else self.rate.variable
        number = learning_rate.value() if isinstance(learning_rate, Variable) else learning_rate
        rate = LearningRate(number, self.owner)
        if rate.variable is None:
            self.rate = rate
            self.changed()
        elif stored is not None:
            stored.assign(rate.variable)
        else:
            raise TypeError(
                f"Expected a schedule or callable for learning_rate, as the optimizer was created "
                f"with one; got {learning_rate!r}."
            )

    def rate_now(self, steps_ago: int = 0) -> Variable:
        """The learning rate of the next step, or of a schedule that some steps ago."""
        rate, count = self.rate, self.steps
        if isinstance(rate.source, Variable):
            return rate.source
        if rate.variable is not None:
            return rate.variable
        set_by = "assign another schedule or callable to the optimizer's `learning_rate`"

        def compute() -> jax.Array:
            step = count.value()
            return rate.at(jnp.maximum(step - steps_ago, 0) if steps_ago else step)

        return Computed(f"{self.owner}/learning_rate", compute, set_by)

    @property
    def state(self) -> StepState:
        """The variables, as a `StepState`."""
        return StepState(
            weights=list(self.index),
            steps=self.steps,
            rate=self.rate.variable,
            averages=self.averages,
            accumulators=self.accumulators,
            masters=[self.masters.get(variable) for variable in self.index],
            slots=self.slots.all,
        )

    @property
    def variables(self) -> list[Variable]:
        """All variables except the weights, in Keras's order: as they were created."""
        rate = [] if self.rate.variable is None else [self.rate.variable]
        copies = [*self.averages, *self.accumulators, *self.masters.values()]
        first, slots = self.slots.all[: self.added_first], self.slots.all
        return [self.steps, *rate, *first, *copies, *slots[len(first) :]]

    def build(
        self,
        variables: Sequence[Variable],
        master_weights: bool,
        undecayed: Undecayed | None,
    ) -> None:
        """Creates all state for these variables."""
        check_floating(variables)
        for variable in [v for v in variables if getattr(v, "overwrite_with_gradient", False)]:
            raise ValueError(
                f"{variable.name!r} has overwrite_with_gradient, which is for Keras models: use "
                f"gainstage.interop.keras."
            )
        check_axes(self.slots.shard_over, [variable.sharding for variable in variables])
        options, slots = self.options, self.slots
        if self.has_own_count and options.gradient_accumulation_steps:
            raise ValueError(COUNT_OF_MICROBATCHES)
        half = [v for v in variables if v.dtype != gradients.float32_or_wider(v.dtype)]
        if options.weight_decay and undecayed is not None:
            undecayed.check(self.owner, variables)
        if half and not master_weights and not half[0]._is_planned:
            warn(
                f"Half-precision parameters lose small updates: {half[0].name!r} is "
                f"{half[0].dtype}, and keeps no update below 2**-"
                f"{jnp.finfo(half[0].dtype).nmant + 1} of a weight. Create {self.owner!r} with "
                f"master_weights=True, or keep variables in float32 and compute in half "
                f"precision. To silence this warning: "
                f'warnings.filterwarnings("ignore", message="Half-precision").'
            )
        mesh = self.mesh or (None if self.outer is None else self.outer.mesh)
        alone = [] if mesh is None else [v for v in variables if v._sharding is None]
        placed = [v for v in variables if v not in alone]
        replicate(self.owner, mesh, [*self.variables, *alone], placed)
        self.added_first = len(slots.all)
        if options.use_ema:
            self.averages = [slots.like(v, "average") for v in variables]
        if options.gradient_accumulation_steps:
            self.accumulators = [slots.like(v, "gradient_accumulator") for v in variables]
        if master_weights:
            self.masters = {v: slots.like(v, "master") for v in half}
            for variable, master in self.masters.items():
                if not variable._is_planned:
                    master.assign(variable)
        if self.outer is not None:
            self.outer.build(options, variables, self.averages)
        self.index = {variable: place for place, variable in enumerate(variables)}
        self.shardings = [sharding_of_state(v, slots.shard_over) for v in variables]
        self.changed()

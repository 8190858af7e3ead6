"""Optimizers of gainstage as optimizers of Keras."""

# Keras is not typed.
# pyright: reportCallIssue=false

import copy
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gainstage._base.checks import brief
from gainstage._base.configurable import deserialize, family, serialize
from gainstage._base.signals import deferred_signals
from gainstage._variables.bridge import functionalize
from gainstage._variables.sharding import on_mesh
from gainstage._variables.types import PyTree
from gainstage._variables.variable import Variable
from gainstage.interop.keras_backend import keras
from gainstage.interop.keras_mirrors import (
    is_mirror,
    mirror_of,
    place_as,
    planned_for,
    updates_counted,
)
from gainstage.interop.keras_settings import constants, own_settings
from gainstage.interop.keras_stale_copy import Original
from gainstage.optimizers._internals import first_values, rate_of_step, store_of, update_one
from gainstage.optimizers._step.options import Options
from gainstage.optimizers._step.step import LearningRate
from gainstage.optimizers._step.subclasses import check_verbs, overrides
from gainstage.optimizers._step.undecayed import Undecayed
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer as Scaled
from gainstage.optimizers.optimizer import Optimizer
from gainstage.optimizers.schedules import LearningRateSchedule

PACKAGE = "gainstage"  # the package name that Keras registers the classes with


class Stateless(keras.optimizers.Optimizer):
    """Implements `apply` by `stateless_apply`: one compiled program when called eagerly."""

    _compiled: Any = None
    _constants: Hashable = None  # the constants of the compiled step

    def _step(
        self, optimizer_variables: PyTree, grads: PyTree, trainable_variables: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The step as a pure function; some gradients may be None."""
        raise NotImplementedError

    def _frozen(self) -> Hashable:
        """The settings that a compiled step has as constants, and that may have changed."""
        raise NotImplementedError

    def apply(
        self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
    ) -> None:
        """Takes a step; gradients may be None, and variables some of those it was built with."""
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise ValueError(f"Expected {self.name!r} to be built; call `build(variables)`.")
            self.build(list(trainable_variables))
        known = self._trainable_variables
        chosen = known if trainable_variables is None else list(trainable_variables)
        self._check_variables_are_known(chosen)
        if len(grads) != len(chosen):
            raise ValueError(
                f"Expected {len(chosen)} gradients, one for each of "
                f"{brief([v.path for v in chosen])}; got {len(grads)}."
            )
        self._warn_of_missing(chosen, grads)
        ordered: list[Any] = [None] * len(known)
        for variable, gradient in zip(chosen, grads, strict=True):
            ordered[self._get_variable_index(variable)] = gradient
        step = self._step
        if not keras.src.backend.common.stateless_scope.in_stateless_scope():
            if self._compiled is None or self._constants != self._frozen():
                self._compiled, self._constants = jax.jit(partial(step)), self._frozen()
            step = self._compiled
        new = step([v.value for v in self.variables], ordered, [v.value for v in known])
        with deferred_signals():
            for variables, results in zip((known, self.variables), new, strict=True):
                for variable, value in zip(variables, results, strict=True):
                    variable.assign(value)

    def stateless_apply(
        self: Any, optimizer_variables: PyTree, grads: PyTree, trainable_variables: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Takes the step as a pure function; returns `(trainable, optimizer variables)`."""
        if not self.built:
            raise ValueError(f"Expected {self.name!r} to be built; call `build(variables)`.")
        known = self._trainable_variables
        if not len(known) == len(grads) == len(trainable_variables):
            raise ValueError(
                f"{self.name!r} was built with {len(known)} trainable variables; got "
                f"{len(grads)} gradients for {len(trainable_variables)}. After freezing or "
                f"unfreezing layers compile the model again, with a new optimizer."
            )
        if len(optimizer_variables) != len(self.variables):
            raise ValueError(
                f"{self.name!r} has {len(self.variables)} variables; got "
                f"{len(optimizer_variables)} values for them."
            )
        self._warn_of_missing(known, grads)
        return self._step(optimizer_variables, grads, trainable_variables)

    def _warn_of_missing(self: Any, variables: Sequence[Any], grads: Sequence[Any]) -> None:
        missing = [v.path for v, g in zip(variables, grads, strict=True) if g is None]
        if 0 < len(missing) < len(grads):  # if all are missing, the step raises
            warnings.warn(
                f"Gradients do not exist for variables {brief(missing)} when minimizing the loss. "
                f"They stay as they are. With model.compile(), is the `loss` argument given?",
                stacklevel=3,
            )


@keras.saving.register_keras_serializable(PACKAGE, "KerasOptimizer")
class KerasOptimizer(Options, Stateless):
    """Wraps an optimizer of gainstage for Keras, for models that need no loss scaling.

    Under the policy `mixed_float16`, pass `auto_scale_loss=False` to `compile`: else Keras wraps it
    in its own `LossScaleOptimizer`.

    Args:
        optimizer: an optimizer that is not built, with all its options; it is not changed.
        name: the name, by default the optimizer's.

    Examples:
        >>> import gainstage as gs, keras, numpy as np
        >>> from gainstage.interop.keras import KerasOptimizer
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(KerasOptimizer(gs.optimizers.Adam(0.1, global_clipnorm=1.0)), "mse")
        >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
        >>> print(int(model.optimizer.iterations.value))
        1
    """

    _learning_rate: Any  # a variable, or a schedule

    def __init__(self, optimizer: Optimizer, name: str | None = None):
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Scaled):
            raise TypeError(
                f"Expected an optimizer of gainstage that does not scale losses; got {optimizer!r}."
            )
        check_verbs(optimizer, "Keras", ("minimize", "compute_gradients", "apply_gradients"))
        if optimizer.built:
            raise ValueError(f"Expected {optimizer.name!r} not to be built before Keras does it.")
        _check_rate(store_of(optimizer).rate)
        super().__init__(learning_rate=0.0, name=name or optimizer.name)
        for variable in super().variables:  # replaced by mirrors of our own variables
            self._untrack_variable(variable)
        shared = {id(s): s for s in [store_of(optimizer).rate.source] if callable(s)}  # as in Keras
        self._ours, self._original = copy.deepcopy(optimizer, shared), Original(optimizer)
        self._undecayed: Any = None  # Keras variables, and names, if they were given
        store = store_of(self._ours)
        count, rate = store.microbatches, store.rate
        self._iterations = mirror_of(count, count.value())  # the assignment tracks it
        self._updates = updates_counted(self._iterations, self._ours)
        self._untrack_variable(self._updates)
        number = rate.variable
        self._learning_rate = rate.source if number is None else mirror_of(number, number.value())

    @property
    def variables(self) -> list[Any]:
        """All state: iterations, the learning rate if it is a number, then the slots."""
        self._original.check()  # Keras reads this at the start of each epoch
        return super().variables

    @keras.src.utils.tracking.no_automatic_dependency_tracking
    def build(self, variables: Sequence[Any]) -> None:
        """Creates a Keras variable for each variable of the optimizer, with its sharding."""
        planned = [planned_for(variable) for variable in variables]
        if self._undecayed is not None:
            known, names = self._undecayed
            pairs = zip(planned, variables, strict=True)
            self._ours.exclude_from_weight_decay(
                [p for p, v in pairs if any(v is x for x in known) or names.names(v.name)]
            )
        self._ours.build(planned)
        values = [variable.value for variable in variables]
        starts = first_values(self._ours, dict(zip(planned, values, strict=True)))
        first = self._mirrors  # iterations and rate, which may have been assigned since
        for slot, mirror in zip(self._ours.variables, first, strict=False):
            place_as(mirror, on_mesh(slot))
        slots = self._ours.variables[len(first) :]
        for slot in slots:
            self._track_variable(mirror_of(slot, starts[slot]))
        self._trainable_variables_indices = {
            self._var_key(variable): i for i, variable in enumerate(variables)
        }
        self._trainable_variables = list(variables)
        self.built = True

    def _step(
        self, optimizer_variables: PyTree, grads: PyTree, trainable_variables: PyTree
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        mirrored = [i for i, variable in enumerate(self.variables) if is_mirror(variable)]
        ours, old, all_state = self._ours, list(trainable_variables), list(optimizer_variables)
        before = [all_state[place] for place in mirrored]
        # Quantized layers pass a measurement as a gradient; it is the variable's new value.
        pairs = enumerate(self._trainable_variables)
        measured = [i for i, v in pairs if self._overwrite_variable_with_gradient(v)]
        given = [None if i in measured else g for i, g in enumerate(grads)]
        if all(g is None for g in given) and any(g is not None for g in grads):
            new, state = list(old), [before[0] + 1, *before[1:]]
        else:
            new, state = ours.stateless_apply(before, given, old)
        steps, taken = self.gradient_accumulation_steps, state[0] != before[0]
        updates = store_of(ours).in_force.updates
        for i in measured:
            new[i] = old[i]
            if grads[i] is None:
                continue
            value, due = jnp.asarray(grads[i], old[i].dtype), taken
            if steps:  # the maximum over a window, at its end
                place = ours.variables.index(store_of(ours).accumulators[i])
                ended = (before[0] + 1) % steps == 0
                value = jnp.maximum(value, before[place])
                state[place] = jnp.where(taken, jnp.where(ended, 0, value), before[place])
                due = taken & ended & (updates(state[0]) > updates(before[0]))
            new[i] = jnp.where(due, value, old[i]).astype(old[i].dtype)
        for place, value in zip(mirrored, state, strict=True):
            all_state[place] = value
        return new, all_state

    def update_step(self, gradient: ArrayLike, variable: Any, learning_rate: ArrayLike) -> None:
        """Applies the optimizer's update to one variable, with an unscaled gradient."""
        if not self.built:
            raise ValueError(f"Expected {self.name!r} to be built; call `build(variables)`.")
        ours = self._ours
        mine = ours.trainable_variables[self._get_variable_index(variable)]
        gradient, rate = jnp.asarray(gradient, jnp.float32), jnp.asarray(learning_rate, jnp.float32)
        self._run(lambda: update_one(ours, gradient, mine, rate))

    def _run(self, change: Callable[[], object]) -> None:
        """Runs what changes the optimizer's variables, on the values of Keras's."""
        ours, theirs = self._ours, (self._trainable_variables, self._mirrors)
        pure = functionalize(change, (ours.trainable_variables, ours.variables))
        new = pure(tuple([v.value for v in variables] for variables in theirs))[1]
        for variables, results in zip(theirs, new, strict=True):
            for each, value in zip(variables, results, strict=True):
                each.assign(value)

    def __setattr__(self, name: str, value: object) -> None:
        ours = vars(self).get("_ours")
        if ours is not None and name in own_settings(ours):
            setattr(ours, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that it does not have.
        ours = vars(self).get("_ours")
        if ours is not None and name in own_settings(ours):
            return getattr(ours, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _get_option(self, name: str) -> Any:
        return getattr(store_of(self._ours).in_force, name)

    def _set_option(self, name: str, value: object) -> None:
        if "_ours" in vars(self):  # Keras's constructor sets its defaults before
            setattr(self._ours, name, value)

    def _frozen(self) -> Hashable:
        return constants(self)

    @property
    def _mirrors(self) -> list[Any]:
        """The Keras variables that mirror the optimizer's, in their order. `variables` has those
        that a user adds, too."""
        return [variable for variable in self.variables if is_mirror(variable)]

    def _mirror(self, ours: Variable) -> Any:
        """The Keras variable that mirrors a variable of the optimizer."""
        return self._mirrors[self._ours.variables.index(ours)]

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        """The moving averages, by the name that Keras's `SwapEMAWeights` uses."""
        if not store_of(self._ours).averages:
            raise AttributeError("Expected use_ema=True; there are no moving averages.")
        return [self._mirror(average) for average in store_of(self._ours).averages]

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        """Returns the loss times `loss_scale_factor`, in float32; without one, the loss itself."""
        return self._ours.scale_loss(loss)

    @property
    def iterations(self) -> Any:
        """The number of updates: a variable. With gradient accumulation it is computed from the
        number of microbatches and cannot be assigned."""
        return self._updates if self.gradient_accumulation_steps else self._iterations

    @property
    def learning_rate(self) -> Any:
        """The current rate: a variable; with a schedule or a `learning_rate` of the optimizer's own
        class, its current value."""
        if store_of(self._ours).has_own_rate:
            pure = functionalize(lambda: rate_of_step(self._ours), self._ours.variables)
            return pure([variable.value for variable in self._mirrors])[0]
        rate = self._learning_rate
        if isinstance(rate, keras.Variable):
            return rate
        return store_of(self._ours).rate.at(self._iterations.value)

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        before: Any = self._learning_rate
        if isinstance(learning_rate, keras.Variable):
            learning_rate = learning_rate.value
        if not callable(learning_rate):
            self._ours.learning_rate = learning_rate
            before.assign(learning_rate)
            return
        if self.built and isinstance(before, keras.Variable):
            raise TypeError(
                f"Expected a number for learning_rate, which was one when {self.name!r} was "
                f"built; got {learning_rate!r}."
            )
        rate = LearningRate(learning_rate, self.name)
        _check_rate(rate)
        self._ours.learning_rate = self._learning_rate = rate.source
        self._untrack_variable(before)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from weight decay: Keras variables, or parts of their names."""
        if self.built:
            raise ValueError("Expected exclude_from_weight_decay to be called before build.")
        known = list(var_list or ())
        for variable in [v for v in known if not isinstance(v, keras.Variable)]:
            raise TypeError(f"Expected Keras variables in var_list; got {brief(variable)}.")
        self._undecayed = known, Undecayed(var_names=var_names)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Sets the variables to their moving averages, once there are any."""
        if overrides(self._ours, "finalize_variable_values"):
            mine = self._ours.trainable_variables
            chosen = [mine[self._get_variable_index(variable)] for variable in var_list]
            self._run(lambda: self._ours.finalize_variable_values(chosen))
            return
        if not store_of(self._ours).averages or not int(self._iterations.value):
            return
        self._check_variables_are_known(var_list)
        for variable in var_list:
            if self._overwrite_variable_with_gradient(variable):
                continue
            average = store_of(self._ours).averages[self._get_variable_index(variable)]
            # A copy, because `fit` donates both, and a buffer can be donated only once.
            variable.assign(jnp.copy(self._mirror(average).value))

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments; the learning rate is the current one."""
        description = serialize(self._ours)
        rate: Any = self._learning_rate
        if isinstance(rate, keras.Variable):
            description["config"]["learning_rate"] = float(rate.value)
        return {"optimizer": description, "name": self.name}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Any:
        """Returns the optimizer that `get_config` describes."""
        description = copy.deepcopy(config["optimizer"])
        rate = description["config"].get("learning_rate")
        if isinstance(rate, Mapping) and not _is_ours(rate, custom_objects):
            rate = keras.saving.deserialize_keras_object(rate, custom_objects)
            description["config"]["learning_rate"] = rate
        return cls(deserialize(description, Optimizer, custom_objects), config.get("name"))


def _is_ours(schedule: Mapping[str, Any], custom_objects: Any) -> bool:
    """Whether a description is of a schedule of gainstage, or of a Keras schedule with a twin here.
    Keras creates all others, with its registry and custom-object scope."""
    name, registered = schedule.get("class_name"), schedule.get("registered_name")
    ours = list(family(LearningRateSchedule))
    if name in (custom_objects or {}):
        return custom_objects[name] in ours
    return registered is None and name in [cls.__name__ for cls in ours]


def _check_rate(rate: LearningRate) -> None:
    """Refuses a callable of no argument: Keras would call it once, when it compiles the step."""
    if rate.is_called:
        raise ValueError(
            f"Expected a number, or a schedule or callable of the step, for learning_rate; got "
            f"{rate.source!r}."
        )

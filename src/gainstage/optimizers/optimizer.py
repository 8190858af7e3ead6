"""The base class of all optimizers: options, state, gradients, steps, saving, configuration."""

import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from gainstage._base import checks
from gainstage._base.arrays import Devices, with_devices
from gainstage._base.checks import brief
from gainstage._base.configurable import Configurable, object_from
from gainstage._programs.true_cotangents import called_at
from gainstage._scaling import gradients
from gainstage._scaling.gradients import Gradients
from gainstage._scaling.scaled_step import ScaledStep, ScaledStepState
from gainstage._variables.arguments import pairs_in, variables_in
from gainstage._variables.bridge import (
    assign,
    functionalize,
    jit,
    read,
    run_eagerly,
    write,
)
from gainstage._variables.sharding import replicate
from gainstage._variables.types import Aux, Flag, Grads, Loss, P, PyTree, Rate, Scalar, Values
from gainstage._variables.variable import Variable, is_inside, is_tracing
from gainstage.optimizers._step import options as all_options
from gainstage.optimizers._step.conventions import Conventions
from gainstage.optimizers._step.differentiate import Differentiated, VarList, differentiate
from gainstage.optimizers._step.given_gradients import (
    Kept,
    by_place,
    check_bound,
    fitted,
    listed,
    signature_of,
)
from gainstage.optimizers._step.optimizer_step import (
    OptimizerState,
    OptimizerStep,
    StepInputs,
    StepOptions,
)
from gainstage.optimizers._step.options import Arguments, OptimizerOptions
from gainstage.optimizers._step.saving import Saved, shown, without_legacy, wrong_count
from gainstage.optimizers._step.slots import Initializer, Slots
from gainstage.optimizers._step.store import Computed, Store
from gainstage.optimizers._step.subclasses import missing_attribute, overrides
from gainstage.optimizers._step.undecayed import Undecayed
from gainstage.optimizers.schedules import LearningRateSchedule


class _Minimized(NamedTuple):
    """A step of `minimize` that goes through an override of `apply_gradients` or `apply`.

    Neither takes the true loss, and either may call them with gradients of its own, several times.
    """

    owner: Any
    loss: jax.Array
    decisions: list[Any]  # whether each step was applied, None for always


_MINIMIZED: ContextVar[_Minimized | None] = ContextVar("the step of minimize", default=None)


class Optimizer(Configurable, Arguments, Saved):
    """The base class of all optimizers. Subclass it to write your own.

    A subclass implements `update_step`, and `build` if that needs state. The code is
    imperative; each step runs it inside one compiled program. A step has a fixed order: finite
    check (with a loss scale), unscale, accumulate, clip, decoupled weight decay, `update_step`,
    moving average, constraints, `iterations` + 1. Steps compute in float32 (float64 for float64
    variables) and cast to the variable's dtype once, at the end.

    Args:
        learning_rate: a number, a variable, a schedule, or a callable. A variable is read in each
            step, and is not one of the optimizer's `variables`. A schedule, or a callable of one
            argument, gets the number of earlier steps and is traced; accumulating steps count,
            skipped ones do not. A callable of no argument runs in Python, once per eager step;
            inside a traced function it is an error.
        weight_decay: decoupled decay, >= 0: `w -= w * weight_decay * learning_rate`.
        clipnorm: the largest norm of each variable's gradient, > 0.
        clipvalue: the largest absolute value of a gradient's element, > 0.
        global_clipnorm: the largest norm of all gradients together, > 0. At most one of the three.
        use_ema: whether to keep an exponential moving average of the variables. As in Keras, every
            step updates it, also a step that only accumulates.
        ema_momentum: the momentum of the average, in [0, 1].
        ema_overwrite_frequency: the number of updates after which the variables are set to their
            average; None leaves that to `finalize_variable_values`. With accumulation, as in Keras,
            each microbatch of the window that ends with such an update does it.
        loss_scale_factor: a fixed loss scale. `scale_loss` multiplies by it, a step divides by it,
            and a step with a non-finite gradient is skipped.
        gradient_accumulation_steps: the number of steps, >= 2, whose average gradient makes one
            update; None or 0 updates at every step. A non-finite step does not count, so its
            window takes one more.
        name: the prefix of the names of the optimizer's variables.
        jit_compile: whether `apply` runs as one compiled program.
        mesh: the `jax.sharding.Mesh` of all variables; by default that of the trained ones.
        master_weights: whether half-precision variables have a float32 copy in the state. Updates
            go to the copy, and the variable is the rounded copy. Assigning a variable from outside
            starts a new copy.
        shard_state_over: the mesh axis or axes over which slots, averages, accumulators and master
            weights are sharded (ZeRO stage 1). Steps are the same up to the rounding of sums.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or two clip options are given.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp
        >>> class SignSGD(gs.optimizers.Optimizer):
        ...     def update_step(self, gradient, variable, learning_rate):
        ...         self.assign_sub(variable, learning_rate * jnp.sign(gradient))
        >>> var = gs.optimizers.Variable(1.0)
        >>> loss = SignSGD(0.25).minimize(lambda: var ** 2, [var])
        >>> float(var)
        0.75

    Source: `keras.optimizers.Optimizer` (Keras 3).
    """

    _keywords = all_options.PARAMETERS
    _left_out = ("jit_compile", "mesh", "shard_state_over")
    _conventions = Conventions()

    def __init__(
        self, learning_rate: Rate, *options: Any, **named_options: Unpack[OptimizerOptions]
    ):
        all_options.ignore_decay(named_options)
        try:
            bound = Optimizer.__signature__.bind(learning_rate, *options, **named_options)
        except TypeError as error:
            names = ", ".join(type(self).__signature__.parameters)
            message = f"{type(self).__name__}: {error}. Its arguments are {names}."
            raise checks.InvalidArgumentError(message) from None
        bound.apply_defaults()
        self._set_arguments(bound.arguments)
        values = {name: bound.arguments[name] for name in all_options.OPTIONS}
        step = StepOptions(all_options.check_options(values))
        has_own_rate = overrides(self, "learning_rate")
        self._slots = Slots(self.name, self._conventions.slot_name, self.shard_state_over)
        self._store = Store(
            self.name, learning_rate, bool(has_own_rate), step, self.mesh, self._slots
        )
        if self.mesh is not None:
            replicate(self.name, self.mesh, self._store.variables, [])
        self._undecayed: Undecayed | None = None

    def _set_arguments(self, given: Mapping[str, Any]) -> None:
        """Sets the attributes that are not options of a step."""
        cls = type(self).__name__
        snake = cls if cls.isupper() else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls).lower()
        given = {**given, "name": snake if given["name"] is None else given["name"]}
        for name in [name for name in all_options.ARGUMENTS if name in given]:
            setattr(self, name, given[name])
        self._kept = Kept()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": Kept(), "mesh": self.mesh and Devices(self.mesh)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(with_devices(state))

    def __repr__(self) -> str:
        rate, count = self._store.rate, len(self._store.index)
        stored = rate.source if isinstance(rate.source, Variable) else rate.variable
        now = rate.source if stored is None else shown(stored)
        built = f"built for {count} variable{'s' * (count > 1)}" if count else "not built"
        return f"<{type(self).__name__} {self.name!r}: learning rate {now}, {built}>"

    # ── options ──────────────────────────────────────────────────────────────────────────────

    def _get_option(self, name: str) -> Any:
        return getattr(self._store.base_options, name)

    def _set_option(self, name: str, value: object) -> None:
        store = self._store
        value = self._checked_option(name, value)
        outer = store.outer
        if value is not None and outer is not None and name in outer.options:
            raise ValueError(
                f"Expected {name} to be set on {outer.owner!r}, where it is "
                f"{outer.options[name]!r}; got {value!r} on {self.name!r}."
            )
        (self._given.discard if value is None else self._given.add)(name)
        store.base_options = store.base_options.replaced({name: value})
        store.changed()

    def _checked_option(self, name: str, value: Any) -> Any:
        now = vars(self._store.options)
        value = all_options.check_option(name, value, {k: v for k, v in now.items() if k != name})
        if name in all_options.BEFORE_BUILD and self.built and value != now[name]:
            raise ValueError(f"Expected {name} to be set before the optimizer is built.")
        return value

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = missing_attribute(self, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")

    def __setattr__(self, name: str, value: object) -> None:
        store = vars(self).get("_store")
        super().__setattr__(name, value)
        if store is not None and name != "learning_rate":
            store.changed(name)  # Python values are constants of the compiled step

    # ── state ────────────────────────────────────────────────────────────────────────────────

    @property
    def variables(self) -> list[Variable]:
        """All state, in the order of `stateless_apply`: iterations, learning rate (if a number),
        variables that were added before `build`, moving averages, accumulators, master weights,
        then the variables that `build` added."""
        return self._store.variables

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables that the optimizer was built with, in that order; none before `build`. A
        copy of an optimizer, or an unpickled one, has copies of them, and trains these."""
        return list(self._store.index)

    @property
    def _step_state(self) -> PyTree:
        """The variables that `_take_step` reads and changes, the weights among them."""
        return self._store.state

    @property
    def built(self) -> bool:
        """Whether `build` has created the state."""
        return bool(self._store.index)

    @built.setter
    def built(self, built: bool) -> None:
        if built is not self.built:
            raise AttributeError(f"Expected super().build(var_list) to set built; got {built!r}.")

    @property
    def iterations(self) -> Variable:
        """The number of updates so far, an int32 variable. With gradient accumulation it is
        computed from the number of microbatches and cannot be assigned."""
        count, options = self._store.steps, self._store.options
        if not options.gradient_accumulation_steps:
            return count
        set_by = "load a state that was saved, or start with a new optimizer"
        return Computed(count.name, lambda: options.updates(count.value()), set_by)

    @property
    def learning_rate(self) -> Variable:
        """The current learning rate, a float32 variable. A number can be assigned without
        recompiling a step. With a schedule or another callable the rate is computed and cannot be
        assigned. If the optimizer was created with a variable, it is that one."""
        return self._store.rate_now()

    @learning_rate.setter
    def learning_rate(self, learning_rate: Rate) -> None:
        self._store.set_rate(learning_rate)

    # ── an optimizer is written with these ───────────────────────────────────────────────────

    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates the state for these variables. An override calls `super().build` first.

        Args:
            var_list: the trainable variables; a second call must name the same ones.

        Raises:
            TypeError: an element is not a variable, or its dtype is not floating.
            ValueError: a variable is given twice, the variables differ from those of the first
                call, or the call is inside a traced function.
        """
        variables = variables_in(var_list, "var_list")
        if isinstance(var_list, Variable) or list(var_list) != variables:
            raise TypeError(f"Expected a list of variables for var_list; got {var_list!r}.")
        self._slots.start_build()
        if self.built and variables != list(self._store.index):
            names, others = ([v.name for v in vs] for vs in (self._store.index, variables))
            again = " These are other variables of these names." if names == others else ""
            raise ValueError(
                f"Expected the variables that {self.name!r} was built with, {brief(names)}; got "
                f"{brief(others)}.{again}"
            )
        if self.built:
            return
        if not variables:
            raise ValueError("Expected at least one variable in var_list; got none.")
        if is_tracing():
            raise ValueError(
                f"Expected {self.name!r} to be built outside of the traced function; call "
                f"`build(variables)` before it."
            )
        self._store.build(variables, self.master_weights, self._undecayed)

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        """Assigns the new value of one variable, and of its slots. Implement this in a subclass.

        Args:
            gradient: the unscaled, clipped gradient, in float32 or wider.
            variable: the variable, in float32 or wider during the step. Operators work on it and
                on slots; pass `value()` to functions of `jax.numpy`.
            learning_rate: a float32 scalar.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update_step.")

    def add_variable(
        self,
        shape: Sequence[int],
        initializer: Initializer = "zeros",
        dtype: DTypeLike | None = None,
        aggregation: str | None = "mean",
        name: str | None = None,
        layout: Sharding | None = None,
    ) -> Variable:
        """Adds a variable to the optimizer's state. A second `build` reuses those of the first.

        Args:
            shape: the shape, a sequence or a 1-D array of integers.
            initializer: a name that Keras has, such as "zeros" or "random_normal", or a callable of
                (shape, dtype), or a value. Random numbers are the same in each run and process.
            dtype: the dtype, float32 by default.
            aggregation: accepted for Keras and ignored: there is one value on a mesh.
            name: the name, prefixed with the optimizer's.
            layout: the sharding; by default the variable is replicated on the optimizer's mesh.
        """
        variable = self._slots.add(shape, initializer, dtype, name, in_build=self.built)
        if layout is not None:
            variable._place(layout)
        elif self.built or self.mesh is not None:
            replicate(self.name, self.mesh, [variable], list(self._store.index))
        return variable

    def add_variable_from_reference(
        self,
        reference_variable: Variable,
        name: str | None = None,
        initializer: Initializer = "zeros",
    ) -> Variable:
        """Adds a slot: a variable with the shape, sharding and dtype of another (float32 for half
        precision). A second `build` reuses those of the first."""
        return self._slots.add_like(reference_variable, name or "var", initializer)

    @overload
    def add_optimizer_variables(
        self, trainable_variables: Iterable[Variable], name: str, initializer: Initializer = ...
    ) -> list[Variable]: ...

    @overload
    def add_optimizer_variables(
        self,
        trainable_variables: Iterable[Variable],
        name: list[str] | tuple[str, ...],
        initializer: Initializer = ...,
    ) -> tuple[list[Variable], ...]: ...

    def add_optimizer_variables(
        self,
        trainable_variables: Iterable[Variable],
        name: str | Sequence[str],
        initializer: Initializer = "zeros",
    ) -> list[Variable] | tuple[list[Variable], ...]:
        """Adds a slot for each variable; returns a list. For several names it returns a tuple of
        lists; all slots of a variable then come before those of the next, as in Keras."""
        names: Any = [name] if isinstance(name, str) else name
        each = initializer if isinstance(initializer, (list, tuple)) else [initializer] * len(names)
        if len(each) != len(names):
            raise ValueError(f"Expected an initializer for each of {names}; got {len(each)}.")
        rows, variables = list(zip(names, each, strict=True)), list(trainable_variables)
        made = [self.add_variable_from_reference(v, *row) for v in variables for row in rows]
        lists = tuple(made[i :: len(rows)] for i in range(len(rows)))
        return lists[0] if isinstance(name, str) else lists

    def get_slot_names(self) -> list[str]:
        """The names of the slots that `build` has added, in that order."""
        return self._store.slots.names

    def get_slot(self, var: Variable, slot_name: str) -> Variable:
        """Returns the slot of a variable, by the name that `add_optimizer_variables` was given.

        In a `LossScaleOptimizer`, the slots are those of the inner optimizer.

        Raises:
            ValueError: there is no such slot.
        """
        return self._store.slots.get(var, slot_name)

    def assign(self, variable: Any, value: Any) -> None:
        """Sets a variable: ours, Keras's, or any other object with `assign`."""
        if not hasattr(variable, "assign"):
            raise checks.not_assignable(variable)
        variable.assign(value)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Adds to a variable."""
        if not hasattr(variable, "assign_add"):
            raise checks.not_assignable(variable)
        variable.assign_add(value)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Subtracts from a variable."""
        if not hasattr(variable, "assign_sub"):
            raise checks.not_assignable(variable)
        variable.assign_sub(value)

    def _get_variable_index(self, variable: Variable) -> int:
        """The index of a variable in the list that the optimizer was built with."""
        index = self._store.index
        if variable not in index:
            names = [v.name for v in index]
            name = getattr(variable, "name", variable)
            again = " It is another variable of that name." if name in names else ""
            raise ValueError(
                f"Expected variables that {self.name!r} was built with, {brief(names)}; "
                f"got {name!r}.{again} Call `build` with all variables before the first step, or "
                f"create a new optimizer. A copied or unpickled one trains copies, its "
                f"`trainable_variables`: assign to these."
            )
        return index[variable]

    def exclude_from_weight_decay(
        self,
        var_list: Iterable[Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ) -> None:
        """Excludes variables from weight decay; a second call replaces the first.

        Args:
            var_list: variables, by identity.
            var_names: substrings or regular expressions, searched in variables' names.

        Raises:
            TypeError: `var_list` has an element that is not a variable, or `var_names` is a string.
            ValueError: the optimizer is built, or an expression is malformed.
        """
        if self.built:
            raise ValueError("Expected exclude_from_weight_decay to be called before build.")
        self._undecayed = Undecayed(var_list, var_names)

    # ── its verbs ────────────────────────────────────────────────────────────────────────────

    @overload
    def scale_loss(self, loss: Loss) -> Loss | jax.Array: ...

    @overload
    def scale_loss(self, loss: Callable[P, Any]) -> Callable[P, Any]: ...

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the loss scale, in float32 or wider; float16 could overflow.

        For a function that returns a loss, it returns a function. Give it a function of
        `gainstage.autocast` in which there is a `jax.custom_vjp` that is not linear, such as one
        that clips: its backward pass then gets true cotangents. A number was computed already.
        """
        if callable(loss):
            called = called_at(loss, self._loss_scale)
            return lambda *args, **kwargs: self.scale_loss(called(*args, **kwargs))
        scale = self._loss_scale()
        return loss if scale is None else gradients.scaled(loss, scale)

    @overload
    def minimize(
        self, loss: Callable[[], Scalar], var_list: VarList, *, has_aux: Literal[False] = False
    ) -> jax.Array: ...

    @overload
    def minimize(
        self,
        loss: Callable[[], tuple[Scalar, Aux]],
        var_list: VarList,
        *,
        has_aux: Literal[True],
    ) -> tuple[jax.Array, Aux]: ...

    def minimize(self, loss: Callable[[], Any], var_list: VarList, *, has_aux: bool = False) -> Any:
        """Differentiates `loss` and takes a step.

        The loss may assign variables that it does not train, such as the running mean of a
        normalisation. They keep their new values only if the step was applied: a skipped step
        changes nothing but the loss scale.

        Args:
            loss: a function of no argument that reads the variables and returns a scalar.
            var_list: the variables to train, or a callable that returns them. It is called after
                the loss, which may create them when it is called for the first time.
            has_aux: whether `loss` returns (loss, aux), where aux is any pytree of arrays.

        Returns:
            The unscaled loss before the step, in float32 or wider; (loss, aux) with `has_aux`.

        Raises:
            TypeError, ValueError: as `compute_gradients` and `apply`.

        Examples:
            >>> import gainstage as gs
            >>> w, mean = gs.optimizers.Variable(2.0), gs.optimizers.Variable(0.0)
            >>> def loss(x):
            ...     mean.assign(0.5 * mean + 0.5 * x)
            ...     return w * x, {"x": x}
            >>> opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.25))
            >>> value, aux = opt.minimize(lambda: loss(4.0), [w], has_aux=True)
            >>> print(value, aux, mean.value(), w.value())
            8.0 {'x': 4.0} 2.0 1.0
            >>> value, aux = opt.minimize(lambda: loss(float("nan")), [w], has_aux=True)
            >>> print(value, mean.value(), w.value())
            nan 2.0 1.0
        """
        return self._take(loss, var_list, checks.flag("has_aux", has_aux))[0]

    def _take(
        self, loss: Callable[[], Any], var_list: VarList, has_aux: bool
    ) -> tuple[Any, list[Any], Differentiated]:
        """Takes a step; returns what `minimize` does, bools of which all are True if the step was
        applied, and the gradients."""
        derivative = self._differentiate(
            loss, var_list, has_aux=has_aux, may_assign=True, among=self._store.index or None
        )
        grads, variables, true_loss, aux, _ = derivative
        if not variables:
            raise ValueError("Expected at least one variable in var_list; got none.")
        if overrides(self, "apply_gradients") or overrides(self, "apply"):
            decisions = self._taken_by_override(derivative)
        else:
            decisions = [self._run_step(grads, variables, true_loss, None)]
        conditions = derivative.assign(decisions)
        return (true_loss, aux) if has_aux else true_loss, conditions, derivative

    def _taken_by_override(self, derivative: Differentiated) -> list[Any]:
        """Lets the user's class take the step; returns whether each of its steps was applied."""
        decisions: list[Any] = []
        token = _MINIMIZED.set(_Minimized(self, derivative.loss, decisions))
        try:
            self.apply_gradients(list(zip(derivative.grads, derivative.variables, strict=True)))
        finally:
            _MINIMIZED.reset(token)
        return decisions

    def _minimized(self) -> _Minimized | None:
        """The step of `minimize` in which a user's override calls this optimizer, if it is one."""
        minimized = _MINIMIZED.get()
        return minimized if minimized and minimized.owner is self else None

    def compute_gradients(
        self, loss: Callable[[], Scalar], var_list: VarList
    ) -> list[tuple[jax.Array | None, Variable]]:
        """Returns the (gradient, variable) pairs of a loss, in order, scaled as `apply` expects.

        The gradient is None for a variable on which the loss does not depend. `loss` runs
        uncompiled; for speed, call this inside `gainstage.optimizers.jit`. Pass `variable.value()`
        as an argument to a `jax.jit` or `lax.scan` inside the loss, because JAX caches its trace.

        Args:
            loss: a function of no argument that reads the variables and returns a scalar.
            var_list: the variables, or a callable that returns them, called after the loss.

        Raises:
            TypeError: `loss` is not callable, or does not return a floating number.
            ValueError: `loss` does not return a scalar.
        """
        derivative = self._differentiate(loss, var_list)
        return list(zip(derivative.grads, derivative.variables, strict=True))

    def _differentiate(self, loss: Any, var_list: VarList, **how: Any) -> Differentiated:
        """Differentiates the scaled loss: the gradients are those that a step expects."""
        scale, conventions = self._loss_scale(), self._conventions
        if callable(loss) and scale is not None:
            loss = called_at(loss, lambda: scale)
        sums = conventions.sums_losses
        derivative = differentiate(loss, var_list, scale, sums=sums, **how)
        if conventions.unscaled and scale is not None:
            return derivative._replace(grads=gradients.unscale(derivative.grads, scale))
        return derivative

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> Variable:
        """Takes a step on (gradient, variable) pairs, and returns `iterations`."""
        pairs = pairs_in(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs])
        return self.iterations

    def apply(
        self,
        grads: Grads,
        trainable_variables: VarList | None = None,
        *,
        loss: Scalar | None = None,
        apply_if: Flag | None = None,
    ) -> None:
        """Takes a step: one program, compiled unless `jit_compile=False`, for which nothing waits.

        The program donates the weights; an array that `value()` has returned is copied first.

        Args:
            grads: gradients of `scale_loss(loss)`, each of its variable's shape, of any floating
                dtype and sharding. None leaves a variable and its slots unchanged, without decay.
                An empty list changes nothing.
            trainable_variables: the variables of `grads`, all or some of those that the optimizer
                was built with, in any order; by default all. The first call builds the optimizer.
            loss: the true loss, a scalar, for loss-scale rules and optax transformations that
                need it; `minimize` passes it itself, `compute_gradients` does not return it.
            apply_if: a bool scalar. If False, the update is skipped, even if all gradients are
                finite. The loss scale still reacts to them, and the microbatch does not count in
                its window. Several optimizers can share a skip decision:

                    finite = opt_a.check_finite(grads_a) & opt_b.check_finite(grads_b)
                    opt_a.apply(grads_a, apply_if=finite)
                    opt_b.apply(grads_b, apply_if=finite)

        Raises:
            TypeError: a gradient is integer, boolean or complex, or `apply_if` is not a bool.
            ValueError: gradients of the wrong number or shape, an unknown variable, only None
                gradients, or no variables for an optimizer that is not built.
        """
        grads = listed("grads", grads)
        apply_if = None if apply_if is None else checks.condition("apply_if", apply_if)
        if not grads:
            return
        if callable(trainable_variables):
            trainable_variables = trainable_variables()
        minimized = self._minimized()
        if minimized is None:
            self._check_scaled()
            self._run_step(grads, trainable_variables, loss, apply_if)
        else:
            loss = minimized.loss if loss is None else loss
            applied = self._run_step(grads, trainable_variables, loss, apply_if)
            minimized.decisions.append(applied)

    def _run_step(
        self,
        grads: list[Any],
        trainable_variables: Iterable[Variable] | None,
        loss: Any,
        apply_if: Any,
    ) -> jax.Array | None:
        """Takes a step with the arguments of `apply`; returns whether it was applied, None for
        always."""
        store, kept = self._store, self._kept
        if isinstance(trainable_variables, Iterator):  # which is read once
            trainable_variables = list(trainable_variables)
        if is_inside():
            weights = store.index if trainable_variables is None else trainable_variables
            check_bound(list(weights), self.variables)
        grads = self._checked(grads, trainable_variables)
        variables, weights = self.variables, list(store.index)  # the check may have built them
        used = jnp.asarray(loss) if self._wants_loss() and loss is not None else None
        inputs = StepInputs(grads, self._rate_of_step(), used, apply_if)
        if any([variable._traces for variable in variables]):
            return self._apply(inputs)  # already inside a traced function
        kept.watch.look(self._loss_scale)
        if is_inside() or not self.jit_compile:
            applied = run_eagerly(self._apply, (variables, weights), inputs)
        else:
            version = store.version, store.rate.changes, len(variables)
            if kept.program is None or kept.version != version:
                this: Any = weakref.ref(self)  # else only Python's collector would free it
                kept.program = jit(lambda x: this()._apply(x), (variables, weights), donate=True)
                kept.version = version
            applied = kept.program(inputs)
        if applied is not None:
            kept.watch.see(applied, loss, True if apply_if is None else apply_if)
        return applied

    def _apply(self, inputs: StepInputs) -> jax.Array | None:
        """Takes one step on the bound variables; returns whether it was applied."""
        state = self._step_state
        new, applied = self._take_step(read(state), inputs)
        write(jax.tree.leaves(state), jax.tree.leaves(new))
        return applied

    def _check_scaled(self) -> None:
        """Warns of gradients that are to be divided by a loss scale that no loss has."""

    def _checked(
        self, grads: list[Any], trainable_variables: Iterable[Variable] | None
    ) -> list[Any]:
        """The gradients in the order of the variables, with None for each that is missing. They
        are not checked if they are of the kind of the last ones."""
        kind = signature_of(grads, trainable_variables)
        if kind is not None and kind == self._kept.kind:
            return grads
        if trainable_variables is None:
            variables = self._built_variables("apply without trainable_variables")
        else:
            variables = variables_in(trainable_variables, "trainable_variables")
        arrays = fitted(grads, variables)
        if not self.built:
            self.build(variables)
            arrays = fitted(arrays, variables)  # which may have moved to the mesh
        if not self.built:
            owner = type(getattr(self, "_inner", self)).__name__
            raise ValueError(f"Expected {owner}.build to call super().build(var_list).")
        places = [self._get_variable_index(variable) for variable in variables]
        weights, state = list(self._store.index), self.variables
        for variable in [v for v in (*state, *weights) if v._is_planned]:
            variable.value()  # raises: a planned variable has no value
        ordered = by_place(arrays, places, weights)
        if not any([variable._traces for variable in state]):  # whose shardings are not checked
            usual = kind is not None and kind[0] in (None, weights)
            as_given = usual and all(map(operator.is_, grads, ordered))
            self._kept.kind = kind if as_given else None
        return ordered

    def stateless_apply(
        self, optimizer_variables: Values, grads: Grads, trainable_variables: Values
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Takes the step as a pure function of lists of arrays; no variable changes.

        Before variables are saved, assign the new values to them. A learning rate that is set
        later counts if it is read again from `variables`.

        Args:
            optimizer_variables: the values of `variables`, in that order.
            grads: as for `apply`, one per trainable variable.
            trainable_variables: the values of the variables that the optimizer was built with.

        Returns:
            The new values `(trainable_variables, optimizer_variables)`.

        Raises:
            TypeError: as `apply`.
            ValueError: as `apply`; or a list has the wrong length, or a value the wrong shape.

        To donate the old values under `jax.jit`, pass the arguments in the order of the results:
        `jax.jit(lambda w, s, g: opt.stateless_apply(s, g, w), donate_argnums=(0, 1))`. The loss
        scale is part of `variables`, so a pure function reads it too:

        Examples:
            >>> import jax, gainstage as gs
            >>> w = gs.optimizers.Variable(1.0)
            >>> opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.25))
            >>> opt.build([w])
            >>> scaled = gs.optimizers.functionalize(opt.scale_loss, opt.variables)
            >>> @jax.jit
            ... def step(weights, state):
            ...     grads = jax.grad(lambda w: scaled(state, w[0] ** 2)[0])(weights)
            ...     return opt.stateless_apply(state, grads, weights)
            >>> weights, state = step([w.value()], [v.value() for v in opt.variables])
            >>> print(weights[0])
            0.5
        """
        trainable, variables = self._built_variables("stateless_apply"), self.variables
        grads = listed("grads", grads)
        optimizer_variables = listed("optimizer_variables", optimizer_variables)
        trainable_variables = listed("trainable_variables", trainable_variables)
        if len(optimizer_variables) != len(variables):
            raise wrong_count("optimizer_variables", optimizer_variables, variables)
        grads = fitted(grads, trainable, placed=False)
        if len(trainable_variables) != len(trainable):
            raise wrong_count("trainable_variables", trainable_variables, trainable)
        own_apply, values = overrides(self, "apply"), (trainable_variables, optimizer_variables)
        grads = grads if own_apply else by_place(grads, range(len(grads)), trainable)

        def step(grads: list[Any]) -> None:
            if own_apply:
                self.apply(grads, trainable)
            else:
                self._apply(StepInputs(grads, self._rate_of_step()))

        return functionalize(step, (trainable, variables))(values, grads)[1]

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Sets the variables to their moving averages, at the end of training with `use_ema`.

        Raises:
            ValueError: the optimizer was not built with one of the variables.
        """
        store = self._store
        if not store.options.use_ema:
            return
        self._built_variables("finalize_variable_values")
        var_list = variables_in(var_list, "var_list")
        places = [(variable, self._get_variable_index(variable)) for variable in var_list]
        started = store.steps.value() > 0
        values = [jnp.where(started, store.averages[i].value(), v.value()) for v, i in places]
        assign([variable for variable, _ in places], values)

    def _built_variables(self, caller: str) -> list[Variable]:
        if not self.built:
            raise ValueError(f"Expected {self.name!r} to be built before {caller}; call `build`.")
        return list(self._store.index)

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def _loss_scale(self) -> jax.Array | None:
        """The loss scale; None for no scaling."""
        factor = self._store.options.loss_scale_factor
        return None if factor is None else jnp.asarray(factor, jnp.float32)

    def _rate_of_step(self) -> jax.Array | None:
        """The learning rate if it is computed for each step outside of it: that of a callable of no
        argument, or of a subclass's own `learning_rate`. Else None."""
        if not self._store.has_own_rate:
            return self._store.rate.now()
        rate: Any = self.learning_rate
        return jnp.asarray(rate.value() if isinstance(rate, Variable) else rate, jnp.float32)

    def _wants_loss(self) -> bool:
        """Whether a step uses the true loss, if it is given."""
        return False

    def _take_step(self, state: PyTree, inputs: StepInputs) -> tuple[PyTree, jax.Array | None]:
        """One step as a pure function: returns the new values of `_step_state`, and whether it was
        applied (None: always)."""
        step = self._make_step(inputs.loss)
        if self._store.options.loss_scale_factor is None:
            return step.plain(state, inputs)
        both = OptimizerState(ScaledStepState(None), state)
        (_, state), applied = step.scaled(ScaledStep(), both, inputs)
        return state, applied

    def _make_step(self, loss: jax.Array | None = None) -> OptimizerStep:
        """The step for the current options and variables."""
        store, options = self._store, self._store.options
        undecayed: Undecayed | Sequence[Variable] = self._undecayed or ()
        decays = options.weight_decay is not None
        return OptimizerStep(
            options=options,
            update=lambda grads, rate: self._update_weights(grads, rate, loss),
            rate=store.rate,
            variables=store.state,
            shardings=store.shardings,
            decays=[decays and variable not in undecayed for variable in store.index],
        )

    def _update_weights(self, grads: Gradients, rate: jax.Array, loss: jax.Array | None) -> None:
        """Updates the bound variables: calls `update_step` for each that has a gradient."""
        step: Callable[..., object] = self.update_step
        more = (rate,) if self._conventions.passes_rate else ()
        for variable, gradient in zip(self._store.index, grads, strict=True):
            if gradient is not None and step(gradient.value(), variable, *more) is not None:
                raise TypeError(
                    f"Expected {type(self).__name__}.update_step to assign the new value and "
                    f"return None; got a result."
                )

    # ── configuration ────────────────────────────────────────────────────────────────────────

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, JSON-serializable except for callables; the learning
        rate is the current one. `jit_compile`, `mesh` and `shard_state_over` are not included."""
        ours = {p.name: p.default for p in all_options.PARAMETERS if p.kind is p.KEYWORD_ONLY}
        return {k: v for k, v in super().get_config().items() if k not in ours or v != ours[k]}

    def _argument(self, name: str) -> Any:
        return self._store.rate.get_config() if name == "learning_rate" else super()._argument(name)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
    ) -> Self:
        """Returns the optimizer that `get_config` (or Keras) describes; does not change `config`.

        Args:
            config: the constructor's arguments. Entries that only TensorFlow 2 wrote are ignored.
            custom_objects: your own schedules by class name, if they cannot be found otherwise.

        Raises:
            ValueError: `config` has a `decay`, which only optimizers of TensorFlow 2 have.
        """
        config = without_legacy(config)
        rate = config.get("learning_rate")
        if isinstance(rate, Mapping):
            schedule = object_from(rate, LearningRateSchedule, custom_objects)
            config = {**config, "learning_rate": schedule}
        return super().from_config(config, custom_objects)

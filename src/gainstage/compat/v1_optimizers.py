"""`tf.compat.v1.train`: its optimizers, with TensorFlow's methods and names."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage import optimizers
from gainstage._base import checks
from gainstage._base.checks import brief
from gainstage._scaling.gradients import Gradients
from gainstage._variables.arguments import pairs_in, variables_in
from gainstage._variables.sharding import varying_axes
from gainstage._variables.types import Rate, Values
from gainstage._variables.variable import Variable, is_tracing
from gainstage.compat.stateful_scale import summed
from gainstage.optimizers import optimizer as core
from gainstage.optimizers._step.conventions import Conventions
from gainstage.optimizers._step.differentiate import ALL_READ, VarList
from gainstage.optimizers._step.options import Setting, within

__all__ = ["AdamOptimizer", "GradientDescentOptimizer", "MomentumOptimizer", "Optimizer"]

# What TensorFlow's subclasses define, and what is not called here.
HOOKS = ("_apply_dense", "_resource_apply_dense", "_apply_sparse", "_resource_apply_sparse",
         "_prepare", "_create_slots", "_finish")  # fmt: skip
Pairs = list[tuple[Any, Variable]]
Number = float | Variable | Callable[[], float]
# The attribute of our rule for each number of a rule there, and its check.
NUMBERS = {
    "momentum": ("momentum", checks.real),
    "beta1": ("beta_1", within(low=0, below=1)),
    "beta2": ("beta_2", within(low=0, below=1)),
    "epsilon": ("epsilon", within(low=0)),
}


class Optimizer:
    """The base of the v1 optimizers: TensorFlow's methods around an optimizer of gainstage.

    Args:
        optimizer: the optimizer of gainstage.
        use_locking: accepted and stored; a step is always one transaction here.
        name: a non-empty string.

    Raises:
        ValueError: `name` is empty, or not a string.

    Source: `tf.compat.v1.train.Optimizer`.
    """

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

    def __init__(self, optimizer: core.Optimizer, use_locking: bool, name: str, **numbers: Any):
        if not isinstance(optimizer, core.Optimizer):
            raise TypeError(
                f"Expected an optimizer of gainstage for optimizer; got {optimizer!r}. For a rule "
                f"of your own, subclass gainstage.optimizers.Optimizer and pass one to this "
                f"constructor."
            )
        for hook in [hook for hook in HOOKS if hasattr(self, hook)]:
            raise TypeError(
                f"{type(self).__name__} defines {hook}, which is not called here. Write the rule "
                f"as `update_step` of a subclass of gainstage.optimizers.Optimizer, and pass one "
                f"to v1.Optimizer(optimizer, use_locking, name)."
            )
        self._numbers = numbers  # functions, or variables, of which each step uses the result
        self._optimizer, self._use_locking, self._name = optimizer, use_locking, name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}: {self._optimizer!r}>"

    def get_name(self) -> str:
        """Returns the name."""
        return self._name

    def variables(self) -> list[Variable]:
        """Returns all state, as a list."""
        return self._optimizer.variables

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables that the optimizer was built with."""
        return self._optimizer.trainable_variables

    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates all state for these variables, as the first step would. A step inside of
        `gainstage.optimizers.jit` needs it, and so does `set_weights`."""
        self._read_numbers()
        self._optimizer.build(variables_in(var_list, "var_list"))

    def set_weights(self, weights: Values) -> None:
        """Sets all of `variables()`, in that order; sets none if a value does not fit.

        Raises:
            ValueError: not built, the wrong number of arrays, or an array that does not fit.

        Examples:
            >>> import gainstage as gs
            >>> from gainstage.compat import v1
            >>> w, opt = gs.optimizers.Variable(1.0), v1.MomentumOptimizer(0.25, 0.5)
            >>> opt.minimize(lambda: w**2, var_list=[w])
            >>> restored = v1.MomentumOptimizer(0.25, 0.5)
            >>> restored.build([w])
            >>> restored.set_weights([v.numpy() for v in opt.variables()])
            >>> print(restored.get_slot(w, "momentum").value())
            2.0
        """
        self._optimizer.set_weights(weights)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots, once there are any."""
        return sorted({name for _, name in self._slots()})

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Returns the slot of a variable, or None."""
        if not isinstance(var, Variable):
            raise TypeError(
                f"Expected a gainstage.optimizers.Variable for var; got {brief(repr(var))}."
            )
        return self._slots().get((var, name))

    def _slots(self) -> dict[tuple[Variable, str], Variable]:
        slots = self._optimizer._store.slots.of
        return {(var, name): slot for (var, name, number), slot in slots.items() if number == 0}

    def compute_gradients(
        self,
        loss: Callable[[], Any],
        var_list: VarList | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: object = None,
    ) -> Pairs:
        """Returns the (gradient, variable) pairs of a loss; None if it ignores the variable.

        Args:
            loss: a callable of no argument; a result that is not a scalar is summed.
            var_list: the variables, or a callable that returns them, called after the loss. By
                default all trainable variables that the loss reads, in the order of creation.
            gate_gradients: `GATE_NONE`, `GATE_OP` or `GATE_GRAPH`; no effect, since XLA decides.
            aggregation_method, colocate_gradients_with_ops: no effect.
            grad_loss: weights of the loss's elements; None for 1.

        Raises:
            RuntimeError: `loss` is not callable. It is a TypeError too.
            TypeError: `var_list` contains something that is not a variable.
            ValueError: `gate_gradients` is anything else, or the loss reads no trainable variable.
        """
        if not callable(loss):
            raise NotCallableError(f"Expected a callable of no argument for loss; got {loss!r}.")
        if gate_gradients not in (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH):
            raise ValueError(
                f"Expected GATE_NONE, GATE_OP or GATE_GRAPH for gate_gradients; got "
                f"{gate_gradients!r}."
            )

        pairs = self._optimizer.compute_gradients(
            summed(loss, grad_loss), ALL_READ if var_list is None else var_list
        )
        if not pairs and var_list is None:
            raise ValueError("Expected a loss that reads a trainable variable, or a var_list.")
        if not pairs:
            raise ValueError("Expected at least one variable in var_list; got none.")
        return pairs

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> None:
        """Takes a step. `global_step`, a `Variable`, counts it unless it is skipped.

        Raises:
            RuntimeError: inside `jax.shard_map`, a gradient differs between devices.
            TypeError: `grads_and_vars` is malformed, or `global_step` is not a variable.
            ValueError: there is no variable, or no gradient.
        """
        pairs = pairs_in(grads_and_vars)
        if not pairs:
            raise ValueError("Expected at least one (gradient, variable) pair; got none.")
        for gradient, variable in pairs:
            if isinstance(gradient, jax.Array) and varying_axes(gradient):
                raise RuntimeError(
                    f"Expected gradients that are the same on every device; that of "
                    f"{variable.name!r} varies over a mesh axis. Reduce it with jax.lax.psum, or "
                    f"use the form for a mesh: gainstage.compat.dtensor."
                )
        if global_step is not None and not isinstance(global_step, Variable):
            raise TypeError(
                f"Expected a gainstage.optimizers.Variable for global_step; got {global_step!r}."
            )
        self._read_numbers()
        count = self._optimizer._store.steps
        before = count.value()
        self._take(pairs)
        if global_step is not None:
            global_step.assign(global_step + (count.value() - before))

    def _read_numbers(self) -> None:
        """Sets the numbers of the rule that were given as functions or variables."""
        for argument, source in self._numbers.items():
            if is_tracing():
                raise ValueError(
                    f"Expected a number for {argument} in a traced function, which would keep the "
                    f"first value of {source!r}."
                )
            attribute, check = NUMBERS[argument]
            number = check(argument, source.item() if isinstance(source, Variable) else source())
            if number != getattr(self._optimizer, attribute):
                setattr(self._optimizer, attribute, number)

    def _take(self, pairs: Pairs) -> None:
        self._optimizer.apply_gradients(pairs)

    def minimize(
        self,
        loss: Callable[[], Any],
        global_step: Variable | None = None,
        var_list: VarList | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: object = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: object = None,
    ) -> None:
        """Calls `compute_gradients`, then `apply_gradients`."""
        pairs = self.compute_gradients(loss, var_list, gate_gradients, grad_loss=grad_loss)
        self.apply_gradients(pairs, global_step, name)


class GradientDescentOptimizer(Optimizer):
    """Gradient descent: `w -= learning_rate * g`.

    Source: `tf.compat.v1.train.GradientDescentOptimizer`.
    """

    def __init__(
        self, learning_rate: Rate, use_locking: bool = False, name: str = "GradientDescent"
    ):
        super().__init__(optimizers.SGD(learning_rate, name=with_name(name)), use_locking, name)


class MomentumOptimizer(Optimizer):
    """TensorFlow 1's momentum: `m = momentum * m + g; w -= learning_rate * m`, or, with
    `use_nesterov`, `w -= learning_rate * (g + momentum * m)`.

    Args:
        learning_rate: a number, a variable, a schedule, or a callable.
        momentum: any finite number, a variable, or a callable of no argument. The last two are
            read in each step; a new value compiles the step again.
        use_locking, name: as for every `Optimizer`.
        use_nesterov: whether to use Nesterov momentum.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage.compat import v1
        >>> var, step = gs.optimizers.Variable(1.0), gs.optimizers.Variable(0)
        >>> opt = v1.MixedPrecisionLossScaleOptimizer(v1.MomentumOptimizer(0.5, 0.9), "dynamic")
        >>> opt.minimize(lambda: var**2, step, [var])
        >>> print(var.value(), step.value(), opt.get_slot_names())
        0.0 1 ['momentum']

    Source: `tf.compat.v1.train.MomentumOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate,
        momentum: Number,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ):
        nesterov = checks.flag("use_nesterov", use_nesterov)
        now, later = _rule_arguments(momentum=momentum)
        optimizer = _Momentum(learning_rate, nesterov=nesterov, name=with_name(name), **now)
        super().__init__(optimizer, use_locking, name, **later)


def _numbered_slot_name(owner: str, variable: str, slot: str, place: int) -> str:
    return f"{variable}/{owner}_{place}" if place else f"{variable}/{owner}"


class _SlotNames(core.Optimizer):
    """Names a slot by its variable and the optimizer, and numbers further ones, as TensorFlow 1."""

    _conventions = Conventions(slot_name=_numbered_slot_name)


class _Momentum(_SlotNames, optimizers.SGD):
    """TensorFlow 1's rule: the learning rate multiplies the momentum, not the gradient."""

    momentum: Setting[float] = Setting(check=checks.real)  # it always has a slot

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)
        if not self.momentum:  # TensorFlow has slots even then
            self.momentums = self.add_optimizer_variables(var_list, "momentum")

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        m = self.momentums[self._get_variable_index(variable)]
        self.assign(m, self.momentum * m + gradient)
        step = gradient + self.momentum * m if self.nesterov else m
        self.assign_sub(variable, learning_rate * step)


class _Adam(_SlotNames, optimizers.Adam):
    """Ours: it has TensorFlow's epsilon already."""


class _AdamOfChangingBetas(_Adam):
    """Corrects the bias by products of the numbers that were used, as TensorFlow 1 does."""

    def build(self, var_list: Sequence[Variable]) -> None:
        super().build(var_list)
        first = [float(self.beta_1), float(self.beta_2)]
        self.powers = [
            self.add_variable((), lambda shape, dtype, x=x: jnp.full(shape, x, dtype), name=name)
            for x, name in zip(first, ("beta1_power", "beta2_power"), strict=True)
        ]

    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        i = self._get_variable_index(variable)
        m, v = self.momentums[i], self.velocities[i]
        one, two = (power.value() for power in self.powers)
        rate = learning_rate * jnp.sqrt(1 - two) / (1 - one)
        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        self.assign_add(v, (jnp.square(gradient) - v) * (1 - self.beta_2))
        self.assign_sub(variable, rate * m / (jnp.sqrt(v.value()) + self.epsilon))

    def _update_weights(self, grads: Gradients, rate: jax.Array, loss: jax.Array | None) -> None:
        super()._update_weights(grads, rate, loss)
        for power, number in zip(self.powers, (self.beta_1, self.beta_2), strict=True):
            self.assign(power, power * number)


class AdamOptimizer(Optimizer):
    """Adam with epsilon outside of the bias correction, as in `gainstage.optimizers.Adam`.

    Args:
        learning_rate: a number, a variable, a schedule, or a callable.
        beta1, beta2, epsilon: numbers, variables, or callables of no argument, as for
            `MomentumOptimizer`.
        use_locking, name: as for every `Optimizer`.

    Source: `tf.compat.v1.train.AdamOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: Number = 0.9,
        beta2: Number = 0.999,
        epsilon: Number = 1e-08,
        use_locking: bool = False,
        name: str = "Adam",
    ):
        now, later = _rule_arguments(beta1=beta1, beta2=beta2, epsilon=epsilon)
        rule = _AdamOfChangingBetas if later.keys() & {"beta1", "beta2"} else _Adam
        optimizer = rule(learning_rate, name=with_name(name), **now)
        super().__init__(optimizer, use_locking, name, **later)

    def _slots(self) -> dict[tuple[Variable, str], Variable]:
        names = {"momentum": "m", "velocity": "v"}
        return {(var, names[name]): slot for (var, name), slot in super()._slots().items()}


def _rule_arguments(**given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers as arguments of our rule, and apart those that each step reads."""
    later = {name: x for name, x in given.items() if callable(x) or isinstance(x, Variable)}
    numbers = {name: x for name, x in given.items() if name not in later}
    return {NUMBERS[n][0]: NUMBERS[n][1](n, x) for n, x in numbers.items()}, later


class NotCallableError(TypeError, RuntimeError):
    """A loss that is no function, for which the document promises a RuntimeError."""


def with_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"Expected a non-empty string for name; got {name!r}.")
    return name

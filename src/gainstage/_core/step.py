"""The order of a step: what happens to gradients and variables around an update rule."""

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._core import gradients
from gainstage._core.bridge import assign, keep_if, lent, read
from gainstage._core.gradients import Gradients
from gainstage._core.inspection import Inspection, inspect
from gainstage._core.inspection import norms as norms_of
from gainstage._core.learning_rate import LearningRate
from gainstage._core.variable import Variable, placed
from gainstage._core.windows import Windows, is_asked


class Step(Windows):
    """A step, in an order that never changes, whatever options are in force.

    Finite check (with a loss scale), unscale, accumulate, clip, decoupled weight decay,
    `update_step`, moving average, constraints, `iterations` + 1. `Optimizer` says what state and
    which options there are, its subclasses the rule for one variable.
    """

    _rate: LearningRate
    _averages: list[Variable]
    _accumulators: list[Variable]
    _masters: dict[Variable, Variable]
    _true_loss: jax.Array | None = None  # of the step that is being traced, if it is known
    _guarded = False  # whether somebody else skips steps that are not finite

    @abc.abstractmethod
    def update_step(
        self, gradient: jax.Array, variable: Variable, learning_rate: jax.Array
    ) -> None:
        """Assigns the new value of one variable, and of its slots."""

    @abc.abstractmethod
    def _clips(self) -> dict[str, float]:
        """The clip option in force, if any, with its limit."""

    @abc.abstractmethod
    def _decays(self, variable: Variable) -> bool:
        """Whether weight decay touches a variable."""

    def _layouts(self) -> list[Any]:
        """Where the state of each trainable variable lies, None off a mesh."""
        return [self._state_layout(variable) for variable in self._index]

    def _limits(self) -> dict[str, float]:
        """The clip option whose norm has to be finite for a step of gradients that do not
        accumulate."""
        return {} if self._option("gradient_accumulation_steps") else self._clips()

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the loss scale, in float32 or wider: a float16 one would overflow."""
        scale = self._loss_scale()
        return loss if scale is None else gradients.scaled(loss, scale)

    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Gives the variables their moving averages, at the end of training with `use_ema`.

        Raises:
            ValueError: a variable that the optimizer was not built with.
        """
        if not self._option("use_ema"):
            return
        places = [(variable, self._get_variable_index(variable)) for variable in var_list]
        started = self._iterations.value() > 0  # before that there is no average
        if self._tally is not None and not self._fails():  # nor after bad microbatches alone
            steps = self._option("gradient_accumulation_steps")
            started &= (self._iterations.value() >= steps) | (self._tally.value() > 0)
        pairs = [(self._averages[place].value(), v.value()) for v, place in places]
        values = [jnp.where(started, average, value) for average, value in pairs]
        assign([variable for variable, _ in places], values)

    def _loss_scale(self) -> jax.Array | None:
        factor = self._option("loss_scale_factor")
        return None if factor is None else jnp.asarray(factor, jnp.float32)

    @contextlib.contextmanager
    def _knows(self, loss: jax.Array | None) -> Iterator[None]:
        """Keeps the true loss of a step while it is traced."""
        self._true_loss = loss
        try:
            yield
        finally:
            self._true_loss = None

    def _apply(
        self,
        grads: list[Any],
        rate: jax.Array | None,
        loss: jax.Array | None = None,
        only_if: jax.Array | None = None,
    ) -> None:
        scale = self._loss_scale()
        if scale is not None:
            self._update_if_finite(self._pinned(grads), scale, rate, only_if)
            return
        norms = [] if self._accumulators else norms_of(grads, self._clips(), self._layouts())

        def update() -> None:
            self._update(gradients.divided(grads), norms, rate)

        if only_if is None:
            update()
        else:
            keep_if(only_if, update, (list(self._index), self.variables), branches=True)

    def _update_if_finite(
        self,
        grads: list[Any],
        scale: jax.Array,
        rate: jax.Array | None,
        only_if: jax.Array | None = None,
        norm: bool = False,
    ) -> tuple[Inspection, jax.Array]:
        """A step on scaled, pinned gradients: all of it, or nothing if one is not finite.

        Returns:
            What was seen of the gradients, and whether the step was taken.
        """
        limits, layouts = self._clips(), self._layouts()
        seen = inspect(grads, scale, limits, read(self._accumulators), layouts, norm)

        def update(fine: jax.Array | None = None) -> None:
            true = [g if g is None or fine is None else jnp.where(fine, g, 0) for g in grads]
            self._update(gradients.divided(true, scale), seen.norms, rate)

        fine = seen.finite if only_if is None else seen.finite & only_if
        if self._tally is not None:
            return seen, self._take_microbatch(update, fine, is_asked(seen.finite, only_if))
        state = (list(self._index), self.variables)
        keep_if(fine, update, state, branches=bool(self._accumulators))
        return seen, fine

    def _pinned(self, grads: list[Any]) -> list[Any]:
        """Gradients that are stored once, however many read them."""
        pairs = zip(grads, self._layouts(), strict=True)
        return [gradients.in_order(g) if layout is None else g for g, layout in pairs]

    def _update(self, grads: Gradients, norms: Sequence[jax.Array], rate: jax.Array | None) -> None:
        """Everything after the finite check, on variables held in float32 or wider."""
        variables, layouts = list(self._index), self._layouts()
        rate = self._rate.at(self._iterations.value()) if rate is None else rate
        values = [placed(self._wide(v), s) for v, s in zip(variables, layouts, strict=True)]
        grads = [g and g.on(layout) for g, layout in zip(grads, layouts, strict=True)]
        with lent(variables, values, layouts):
            if self._accumulators:
                self._accumulate(grads, rate)
            else:
                self._update_weights(grads, norms, rate)
            if self._averages:
                self._average()
            for variable in variables:
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable.value()))
            new = read(variables)
        for variable, value in zip(variables, new, strict=True):
            if variable in self._masters:
                self._masters[variable].assign(value)
            variable.assign(value)
        self._iterations.assign_add(1)

    def _wide(self, variable: Variable) -> jax.Array:
        """A variable's value in float32 or wider: its master copy's, where that rounds to it."""
        value = variable.value()
        wide = value.astype(gradients.wide(value.dtype))
        if variable not in self._masters:
            return wide
        master = self._masters[variable].value()
        return jnp.where(master.astype(value.dtype) == value, master, wide)

    def _accumulate(self, grads: Gradients, rate: jax.Array) -> None:
        """Adds to the accumulators; every so many steps, updates with their average."""
        present = [(g, a) for g, a in zip(grads, self._accumulators, strict=True) if g is not None]
        state = (list(self._index), self.variables)
        for gradient, accumulator in present:
            accumulator.assign(accumulator + gradient.value())

        def update() -> None:
            sums = [a.value() for a in self._accumulators]
            for _, accumulator in present:
                accumulator.assign(jnp.zeros_like(accumulator.value()))
            count, enough = self._close_window()
            if enough is not None and self._option("on_bad_microbatch") == "drop_window":
                for accumulator in self._accumulators:
                    accumulator.assign(jnp.where(enough, accumulator.value(), 0))
            pairs = zip(grads, sums, strict=True)
            means = [None if g is None else s / jnp.asarray(count, s.dtype) for g, s in pairs]
            norms = norms_of(means, self._clips(), self._layouts())

            def update_weights() -> None:
                self._update_weights(gradients.divided(means), norms, rate)

            conditions = [] if enough is None else [enough]
            # Whoever skips steps elsewhere has not seen the norm of the mean.
            if norms and (self._skips() or self._guarded):
                conditions.append(jnp.isfinite(jnp.array(norms)).all())
            if conditions:
                keep = jnp.array(conditions).all()
                keep_if(keep, update_weights, state, branches=True)
            else:
                update_weights()

        keep_if(self._ends_window(), update, state, branches=True)

    def _update_weights(
        self, grads: Gradients, norms: Sequence[jax.Array], rate: jax.Array
    ) -> None:
        """Clips and decays, then updates every variable that has a gradient."""
        decay, grads = self._option("weight_decay"), gradients.clip(grads, self._clips(), norms)
        for variable, gradient in zip(self._index, grads, strict=True):
            if decay is not None and gradient is not None and self._decays(variable):
                variable.assign(variable - variable * decay * rate)
        self._update_all(grads, rate)

    def _update_all(self, grads: Gradients, rate: jax.Array) -> None:
        gradient_of = dict(zip(self._index, grads, strict=True))
        for group in dict.fromkeys(self._group_of.values()):
            members = [gradient_of.pop(variable) for variable in group.members]
            group.update(members, lambda g, v: self._update_one(g, v, rate))
        for variable, gradient in gradient_of.items():
            if gradient is not None:
                self._update_one(gradient.value(), variable, rate)

    def _update_one(self, gradient: jax.Array, variable: Variable, rate: jax.Array) -> None:
        if self.update_step(gradient, variable, rate) is not None:
            raise TypeError(
                f"Expected {type(self).__name__}.update_step to assign the new value and "
                f"return None; got a result."
            )

    def _is_elementwise(self) -> bool:
        """Whether the class that wrote the rule says so: one that overrides it has to repeat it."""
        wrote = next(vars(cls) for cls in type(self).__mro__ if "update_step" in vars(cls))
        return wrote.get("elementwise", False)

    def _average(self) -> None:
        """Moves the averages towards the variables, and, when due, the variables onto them."""
        frequency = self._option("ema_overwrite_frequency")
        steps = self._option("gradient_accumulation_steps")
        updates = self._iterations.value() // (steps or 1)
        momentum = jnp.where(updates <= 0, 0.0, self._option("ema_momentum"))
        # A 1 that XLA does not know. XLA for CPU may round `b * c` in `a + b * c`, or may not; with
        # jax 0.12 that depends on the mesh. In `a + b * c * one` the product is always rounded.
        one = jnp.where(updates < 0, 0.0, 1.0)
        for variable, average in zip(self._index, self._averages, strict=True):
            new, old = variable.value(), average.value()
            change = (1 - momentum) * jnp.where(new == old, 0.0, new - old)
            average.assign(old + change * one)
            if frequency:
                due = (updates + 1) % frequency == 0
                variable.assign(jnp.where(due, average.value(), variable.value()))

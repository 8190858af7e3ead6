"""A step as a pure function: what happens to gradients and weights around an update."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base.arrays import LARGEST_COUNT, NOT_TRACED, one_more
from gainstage._base.configurable import description_of
from gainstage._scaling import gradients
from gainstage._scaling.finite_check import norms as norms_of
from gainstage._scaling.gradients import Gradients
from gainstage._scaling.scaled_step import ScaledStep, ScaledStepState, run_if
from gainstage._variables.bridge import bound, read
from gainstage._variables.types import Rate
from gainstage._variables.variable import Variable, is_tracing, placed
from gainstage.optimizers._step.options import CLIPS, DEFAULTS, Options
from gainstage.optimizers.schedules import LearningRateSchedule


class StepOptions(Options):
    """The values of the options of a step; each is checked."""

    def __init__(self, values: Mapping[str, Any]):
        vars(self).update(values)

    @property
    def clip(self) -> gradients.Clip | None:
        """How gradients are clipped."""
        limits = [(name, getattr(self, name)) for name in sorted(CLIPS)]
        given = [(name, limit) for name, limit in limits if limit is not None]
        return (
            gradients.Clip(given[0][0], checks.clipped_to_float32(given[0][1])) if given else None
        )

    def updates(self, steps: Any) -> Any:
        """The number of updates that this many steps make."""
        return steps // (self.gradient_accumulation_steps or 1)

    def next_steps(self, steps: jax.Array) -> jax.Array:
        """The count after one more step, which stays at the largest int32, or goes through the last
        window below it."""
        more = one_more(steps)
        if window := self.gradient_accumulation_steps:
            more = jnp.where(steps == LARGEST_COUNT, LARGEST_COUNT + 1 - window, more)
        return more

    def replaced(self, options: Mapping[str, Any]) -> "StepOptions":
        """These options with others in their place; a clip option replaces any other."""
        clips = any(options.get(clip) is not None for clip in CLIPS)
        return StepOptions(vars(self) | (dict.fromkeys(CLIPS) if clips else {}) | dict(options))

    def of(self, scaled_step: ScaledStep) -> ScaledStep:
        """A loss scale with these options."""
        return dataclasses.replace(
            scaled_step,
            factor=self.loss_scale_factor,
            clip=self.clip,
            conditional=bool(self.gradient_accumulation_steps),
        )


for _name, _default in DEFAULTS.items():
    setattr(StepOptions, _name, _default)  # instead of a descriptor: the values are in `vars`


class LearningRate:
    """The `learning_rate` of an optimizer: a number, a variable, or a callable.

    A number is stored in a variable, so a new one needs no compilation. A callable of the step is
    traced into the step. A callable of no argument runs in Python, once per eager step, and its
    value is an argument of the step. Inside a traced function, which would keep its first value, it
    is an error. A user's variable is read in each step, like the result of such a callable; inside
    a traced function it must be in the state, as any variable.

    Raises:
        TypeError: neither a number, a scalar variable, nor a callable of at most one argument.
        ValueError: a number that is not finite in float32.
    """

    def __init__(self, source: Any, owner: str):
        self.source, self._owner = source, owner
        self.variable: Variable | None = None
        self._takes_step = False
        # The attributes of a schedule are constants of a compiled step: how often they were others.
        self.changes, self._held = 0, _attributes(source)
        if isinstance(source, Variable):
            if source.shape or not jnp.issubdtype(source.dtype, jnp.floating):
                raise TypeError(
                    f"Expected a floating scalar for learning_rate; got {source.name!r} of shape "
                    f"{source.shape} and dtype {source.dtype}."
                )
        elif not callable(source):
            try:
                number = checks.real("learning_rate", source)
            except TypeError as error:
                raise checks.InvalidArgumentError(str(error)) from None
            if abs(number) > float(np.finfo(np.float32).max):
                raise ValueError(
                    f"Expected a number that float32 holds for learning_rate; got {number!r}."
                )
            name = f"{owner}/learning_rate"
            self.variable = Variable(number, False, dtype=jnp.float32, name=name)
        else:
            self._takes_step = _takes_step(source)
        self.is_called = self.variable is None and not self._takes_step  # by Python, in each step

    def now(self) -> jax.Array | None:
        """Returns the value to pass to a compiled step; None if the step computes its rate itself.

        Raises:
            ValueError: it is a callable of no argument, inside a traced function.
        """
        if not self.is_called:
            if self.variable is None and not self._is_unchanged():
                self._held, self.changes = _attributes(self.source), self.changes + 1
            return None
        if isinstance(self.source, Variable):
            return self.source.value().astype(jnp.float32)
        if is_tracing():
            raise ValueError(
                f"The learning rate of {self._owner!r} is a callable of no argument, whose value "
                f"would be a constant of the compiled function. Use a schedule or callable of the "
                f"step, or a number, and assign `learning_rate` between steps."
            )
        rate = self.source()
        if isinstance(rate, Variable):
            rate = rate.value()
        if isinstance(rate, jax.Array):
            return rate.astype(jnp.float32)
        return jax.device_put(np.float32(checks.real("the result of learning_rate()", rate)))

    def _is_unchanged(self) -> bool:
        """Whether a schedule holds the attributes of the last look at it."""
        values = _attributes(self.source)
        return len(values) == len(self._held) and all(map(operator.is_, values, self._held))

    def at(self, step: jax.Array, number: jax.Array | None = None) -> jax.Array:
        """Returns the rate at `step`, given the number that its variable holds."""
        if self.variable is not None:
            return self.variable.value() if number is None else number
        if self._takes_step:
            unchanged = self._is_unchanged()
            try:
                rate = self.source(step)
            except NOT_TRACED as error:
                raise TypeError(
                    f"Expected learning_rate(step) to work on an array, as the step is compiled; "
                    f"got {type(error).__name__} from {self.source!r}. Write jax.numpy.where(step "
                    f"< 100, a, b) for `a if step < 100 else b`, and jax.numpy for numpy and math; "
                    f"or pass jit_compile=False."
                ) from error
            if unchanged:  # a schedule may count its calls
                self._held = _attributes(self.source)
            if rate is None or isinstance(rate, str):
                raise TypeError(f"Expected a number from learning_rate(step); got {rate!r}.")
            return jnp.asarray(rate, jnp.float32)
        rate = self.now()
        assert rate is not None
        return rate

    def get_config(self) -> Rate | dict[str, Any]:
        """Returns a number, the description of a schedule, or the callable itself."""
        if self.variable is not None:
            return checks.shortest(self.variable)
        if isinstance(self.source, Variable):
            return checks.shortest(self.source)
        if isinstance(self.source, LearningRateSchedule):
            return description_of(self.source)
        return self.source


def _attributes(source: Any) -> list[Any]:
    return list(getattr(source, "__dict__", {}).values())


def _takes_step(rate: Callable[..., Any]) -> bool:
    """Whether a callable requires an argument: one without a default, or any number of them."""
    parameters = inspect.signature(rate).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    if len(positional) > 1 or len(positional) < len(required):
        raise TypeError(
            f"Expected learning_rate to be a number, a schedule, or a callable of the step or of "
            f"nothing; got {rate!r}."
        )
    return bool(positional)


class StepState(NamedTuple):
    """All that a step reads and changes, as arrays or as variables."""

    weights: list[Any]
    steps: Any  # their number; several may make one update
    rate: Any  # None for a callable
    averages: list[Any]
    accumulators: list[Any]
    masters: list[Any]  # None for a weight without a master copy
    slots: list[Any]


class StepInputs(NamedTuple):
    """What a step is given."""

    grads: list[Any]  # None for a variable without a gradient
    rate: jax.Array | None  # the learning rate; None if the step computes it
    loss: jax.Array | None = None  # the true loss, where it is used
    apply_if: jax.Array | None = None  # a bool; None for True


class OptimizerState(NamedTuple):
    """All that a step of an optimizer with a loss scale reads and changes."""

    scaled_state: ScaledStepState
    step_state: StepState


@dataclasses.dataclass(frozen=True)
class OptimizerStep:
    """A step after the finite check. Its order is fixed: accumulate, clip, decoupled weight decay,
    `update`, moving average, constraints, one cast, `steps` + 1.

    Args:
        options: the active options.
        update: `(gradients, rate)`: assigns to the variables, bound to the arrays of the step, in
            which the weights are in float32 or wider.
        rate: the learning rate.
        variables: the variables of the state.
        shardings: the sharding of each weight's state, None off a mesh.
        decays: whether each weight decays.
    """

    options: StepOptions
    update: Callable[[Gradients, jax.Array], None]
    rate: LearningRate
    variables: StepState
    shardings: Sequence[Any]
    decays: Sequence[bool]

    def plain(self, state: StepState, inputs: StepInputs) -> tuple[StepState, jax.Array | None]:
        """Takes a step on true gradients, unless `apply_if` is False; returns the state and whether
        it was taken (None: always)."""
        grads, rate, _, apply_if = inputs
        accumulates = self.options.gradient_accumulation_steps
        clip = None if accumulates else self.options.clip  # a window clips its mean
        read = norms_of(grads, clip, self.shardings)

        def update(state: StepState) -> tuple[None, StepState]:
            return None, self(state, gradients.as_gradients(grads), read, rate)

        new = update(state)[1] if apply_if is None else run_if(apply_if, update, state)
        return new, apply_if

    def scaled(
        self,
        scaled_step: ScaledStep,
        state: OptimizerState,
        inputs: StepInputs,
    ) -> tuple[OptimizerState, jax.Array]:
        """Takes a step on scaled gradients, unless one is non-finite or `apply_if` is False.
        `scaled_step` is the loss scale without options."""
        scaled_step = self.options.of(scaled_step)
        before, scale = state.scaled_state, jnp.float32(1)
        if not scaled_step.unscaled:
            scale = scaled_step.loss_scale(before.rule_state)
        pairs = [*zip(inputs.grads, self.shardings, strict=True)]
        alone = iter(gradients.row_major([g for g, sharding in pairs if sharding is None]))
        grads = [next(alone) if sharding is None else g for g, sharding in pairs]

        def update(norms: Any, state: StepState) -> tuple[None, StepState]:
            return None, self(state, gradients.as_gradients(grads, scale), norms, inputs.rate)

        done = scaled_step.step(
            update,
            before,
            state.step_state,
            grads,
            scale,
            onto=state.step_state.accumulators,
            shardings=self.shardings,
            loss=inputs.loss,
            apply_if=inputs.apply_if,
        )
        return OptimizerState(done.state, done.inner), done.applied

    def __call__(
        self,
        state: StepState,
        grads: Gradients,
        norms: Sequence[jax.Array] = (),
        rate: jax.Array | None = None,
    ) -> StepState:
        """Returns the state after a step; `norms` are for clipping, without a window."""
        rate = self.rate.at(state.steps, state.rate) if rate is None else rate
        grads = [g and g.on(sharding) for g, sharding in zip(grads, self.shardings, strict=True)]
        before, state = state, state._replace(weights=self._in_float32(state))
        if window := self.options.gradient_accumulation_steps:
            state = self._accumulate(window, state, grads, rate)
        else:
            state = self._update(state, grads, norms, rate)
        if self.options.use_ema:
            state = self._average(state)
        weights = [
            w if g is None or variable.constraint is None else self._constrain(variable, w)
            for variable, g, w in zip(self.variables.weights, grads, state.weights, strict=True)
        ]
        return state._replace(
            weights=[
                placed(new.astype(old.dtype), variable._sharding)
                for new, old, variable in zip(
                    weights, before.weights, self.variables.weights, strict=True
                )
            ],
            masters=[m if m is None else w for m, w in zip(state.masters, weights, strict=True)],
            steps=self.options.next_steps(state.steps),
        )

    def _in_float32(self, state: StepState) -> list[jax.Array]:
        """The weights in float32 or wider: master copies, if they round to the weights."""
        weights = []
        for weight, master, sharding in zip(
            state.weights, state.masters, self.shardings, strict=True
        ):
            weight = placed(weight, sharding)
            value = weight.astype(gradients.float32_or_wider(weight.dtype))
            if master is not None:
                value = jnp.where(master.astype(weight.dtype) == weight, master, value)
            weights.append(value)
        return weights

    def _accumulate(
        self, window: int, state: StepState, grads: Gradients, rate: jax.Array
    ) -> StepState:
        """Adds to the accumulators; at the end of a window of so many steps, updates with their
        average."""
        rows = zip(state.accumulators, grads, self.shardings, strict=True)
        sums = [
            a if g is None else placed((a + g.value()).astype(a.dtype), sharding)
            for a, g, sharding in rows
        ]

        def close(state: StepState) -> tuple[None, StepState]:
            sums = state.accumulators
            left = [a if g is None else jnp.zeros_like(a) for a, g in zip(sums, grads, strict=True)]
            state = state._replace(accumulators=left)
            means = [
                None if g is None else a / jnp.asarray(window, a.dtype)
                for a, g in zip(sums, grads, strict=True)
            ]
            norms = norms_of(means, self.options.clip, self.shardings)
            return None, self._update(state, gradients.as_gradients(means), norms, rate)

        ends = self.options.next_steps(state.steps) % window == 0
        return run_if(ends, close, state._replace(accumulators=sums))

    def _update(
        self, state: StepState, grads: Gradients, norms: Sequence[jax.Array], rate: jax.Array
    ) -> StepState:
        """Clips and decays, then updates."""
        options = self.options
        grads = gradients.clipped(grads, options.clip, norms)
        if options.weight_decay is not None:
            rows = zip(state.weights, grads, self.decays, self.shardings, strict=True)
            weights = [
                placed(w - w * options.weight_decay * rate, sharding)
                if decays and g is not None
                else w
                for w, g, decays, sharding in rows
            ]
            state = state._replace(weights=weights)
        variables = jax.tree.leaves(self.variables)
        others = variables[len(self.variables.weights) :]
        shardings = [*self.shardings, *(variable._sharding for variable in others)]
        with bound(variables, jax.tree.leaves(state), shardings):
            self.update(grads, rate)
            return read(self.variables)

    def _average(self, state: StepState) -> StepState:
        """Updates the averages, and, when due, sets the weights to them."""
        frequency = self.options.ema_overwrite_frequency
        updates = self.options.updates(state.steps)
        momentum = jnp.where(updates <= 0, 0.0, self.options.ema_momentum)
        # A 1 that XLA cannot fold, because it does not know that `updates` is never negative.
        # XLA:CPU may round `b * c` in `a + b * c` or not; with jax 0.12 that depends on the mesh.
        # In `a + b * c * one` the product is always rounded.
        one = jnp.where(updates < 0, 0.0, 1.0)
        averages, weights = [], []
        for new, old, sharding in zip(state.weights, state.averages, self.shardings, strict=True):
            change = (1 - momentum) * jnp.where(new == old, 0.0, new - old)
            average = placed((old + change * one).astype(old.dtype), sharding)
            due = (updates + 1) % frequency == 0 if frequency else False
            averages.append(average)
            weights.append(jnp.where(due, average, new) if frequency else new)
        return state._replace(averages=averages, weights=weights)

    def _constrain(self, variable: Variable, weight: jax.Array) -> jax.Array:
        constraint: Any = variable.constraint
        value = jnp.asarray(constraint(weight), weight.dtype)
        if value.shape != weight.shape:
            raise ValueError(
                f"Expected a value of shape {weight.shape} from the constraint of "
                f"{variable.name!r}; got shape {value.shape}."
            )
        return value

"""A loss scale around an update: reads gradients, takes or skips the step, updates the scale."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._base.checks import LARGEST, SMALLEST
from gainstage._scaling.finite_check import read_gradients
from gainstage._scaling.gradients import Clip
from gainstage._scaling.measures import measure
from gainstage._scaling.step_telemetry import at_first, observed
from gainstage._variables.bridge import select
from gainstage._variables.types import PyTree, RuleState
from gainstage._variables.variable import is_inside
from gainstage.rules.loss_scale import LossScale, advance

Update = Callable[[PyTree], tuple[Any, PyTree]]  # state -> (result, state)


def run_if(applies: jax.Array, update: Update, state: PyTree) -> PyTree:
    """Returns the state after `update` if `applies`, else the state.

    In a trace the update then does not run. Eagerly it always runs, and its results are selected:
    JAX compiles an eager `lax.cond` at every call.
    """
    if not is_inside():
        return select(applies, update, state)[1]
    return lax.cond(applies, lambda state: update(state)[1], lambda state: state, state)


class ScaledStepState(NamedTuple):
    """The state of a `ScaledStep`, as arrays or as variables."""

    rule_state: RuleState  # the rule's state, None without a rule
    observed: Any = None  # the telemetry, if enabled


class StepResult(NamedTuple):
    """The outcome of a step."""

    result: Any
    inner: PyTree  # the state that the update changes, new or unchanged
    state: ScaledStepState
    finite: jax.Array  # whether the gradients were finite
    applied: jax.Array  # whether the update was taken


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """A loss scale: the rule that updates it, what it records, and what a skipped step does.

    Each optimizer or transformation makes one.

    Args:
        rule: the rule that updates the scale; None for `factor` alone.
        telemetry: whether the state records each step.
        every: the number of steps between telemetry's counts of exponents; None for never.
        unscaled: whether the step of an optimizer gets gradients that are divided by the scale.
        factor: the `loss_scale_factor`, which multiplies the rule's scale.
        clip: how gradients will be clipped: by norms, which must then be finite.
        conditional: whether a skipped update does not run, inside of a conditional. Else it always
            runs, and a select stores its results, which XLA can fuse with earlier computations.
    """

    rule: LossScale | None = None
    telemetry: bool = False
    every: int | None = None
    unscaled: bool = False
    factor: float | None = None
    clip: Clip | None = None
    conditional: bool = False

    def loss_scale(self, state: RuleState) -> jax.Array:
        """The factor of the loss, by the rule's state."""
        if self.rule is None:
            return jnp.asarray(self.factor, jnp.float32)
        if self.factor is None:
            return state.scale
        return jnp.clip(state.scale * self.factor, SMALLEST, LARGEST)

    def first(self, state: RuleState, count: int) -> ScaledStepState:
        """The state before the first step, by the rule's state and the number of gradients."""
        stats = at_first(self.loss_scale(state), count, self.every) if self.telemetry else None
        return ScaledStepState(state, stats)

    def step(
        self,
        update: Callable[..., tuple[Any, Any]],
        state: ScaledStepState,
        inner: PyTree,
        grads: Sequence[Any],
        scale: jax.Array | float = 1.0,
        *,
        onto: Sequence[Any] = (),
        shardings: Sequence[Any] = (),
        checked: Sequence[Any] | None = None,
        loss: jax.Array | None = None,
        apply_if: jax.Array | None = None,
        is_finite: jax.Array | None = None,
        is_scaled: bool = True,
    ) -> StepResult:
        """Reads the gradients, applies the update or skips it, and updates the loss scale.

        Args:
            update: `(norms, inner) -> (result, inner)`: the step. `norms` are the norms that
                clipping divides by.
            state: the state of the loss scale.
            inner: the state that `update` changes: any pytree.
            grads: arrays or None.
            scale: the scale of the gradients.
            onto: the accumulators that they are added to.
            shardings: the sharding of each gradient; empty if unknown.
            checked: the arrays to check, if not the gradients themselves.
            loss: the true loss, if it is known.
            apply_if: a bool scalar. If False, the update is skipped; the scale still reacts to the
                gradients.
            is_finite: a bool scalar: whether what else the step has computed at this scale is
                finite. If False, that is an overflow as in the gradients.
            is_scaled: whether the loss had a scale. If not, the rule's state stays as it is.
        """
        with_norm = state.observed is not None
        arrays = grads if checked is None else checked
        finite, norms, norm = read_gradients(arrays, scale, self.clip, onto, shardings, with_norm)
        finite = finite if is_finite is None else finite & is_finite
        applies = finite if apply_if is None else finite & apply_if
        step, rule, result = functools.partial(update, norms), self.rule, None
        if self.conditional:
            inner = run_if(applies, step, inner)
        else:
            result, inner = select(applies, step, inner)
        if rule is None:
            return StepResult(result, inner, state, finite, applies)
        is_local = bool(shardings) and all(sharding is None for sharding in shardings)
        divisor = scale if isinstance(scale, jax.Array) else None
        measured = {}
        if rule.measures and is_scaled:
            measured = measure(rule.measures, grads, finite, loss, divisor, is_local)
        stats = state.observed
        if norm is not None:
            stats = observed(
                stats,
                grads,
                scale,
                finite=finite,
                applied=applies,
                norm=norm,
                max_abs=measured.get("max_abs"),
                loss_scale=self.loss_scale(state.rule_state) if is_scaled else jnp.float32(1),
                every=self.every,
                is_local=is_local,
            )
        moved = state.rule_state
        if is_scaled:
            moved = advance(rule, moved, finite, **measured)
        return StepResult(result, inner, ScaledStepState(moved, stats), finite, applies)

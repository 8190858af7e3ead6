"""A rule that measures gradients: it finds the scale in one or two steps, despite bad data."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gainstage._base import checks
from gainstage._base.arrays import one_more
from gainstage._base.checks import LARGEST, LARGEST_FLOAT16
from gainstage._variables.types import Flag
from gainstage.rules.loss_scale import LossScale, set_field, set_scales
from gainstage.rules.other_names import explains_arguments

PROBED = -12  # bits: how far an overflow lowers the scale before any gradient is known
PROBE = 2.0**PROBED
CLIMB = 16.0  # the factor after a step with all gradients 0, if the scale is below its start
PATIENCE = 3  # bad steps in a row before a NaN is attributed to the data
HALVINGS = 12  # bad steps in a row before any other failure is
RETRY = 64  # bad steps after which a lower scale is tried again, in case that was wrong


class AdaptiveState(NamedTuple):
    """The state of `AdaptiveLossScale`."""

    scale: jax.Array  # float32: the loss scale of the next step
    good_steps: jax.Array  # int32: finite steps since the ceiling was updated
    bad_steps: jax.Array  # int32: non-finite steps in a row whose loss was not known to be so
    ceiling: jax.Array  # float32: half of the last scale that overflowed
    before: jax.Array  # float32: the ceiling when the last run of bad steps began
    first: jax.Array  # float32: the scale at that time
    largest: jax.Array  # float32: the largest recent true gradient, 0 if none is known


@explains_arguments
@dataclasses.dataclass(frozen=True)
class AdaptiveLossScale(LossScale):
    """Keeps the largest gradient just below the largest float16 number.

    From the first finite step on, the scale follows the largest recent gradient, `margin` bits
    below the limit. The first scale need not be guessed, and a scale that is too low recovers in
    one step. While all gradients are 0 it doubles, up to `2**12` times the first one. Larger
    gradients inside the network are not measured; overflows reveal them. Each overflow sets a
    ceiling at half the scale, and `increment_period` finite steps double it.

    A bad step, one with a non-finite gradient, lowers the scale only if that can help:

    - The true loss is not finite: the scale does not change.
    - Otherwise the scale is halved; before the first finite step it is divided by `2**12`.
    - Lower scales do not help: after twelve bad steps the scale returns to its value before them,
      and only every 64th bad step tries a lower one. If gradients are NaN and the loss is not
      known, this happens after three. Before the first finite step it happens after three too, and
      the scale returns to the first lower value.

    `minimize` and `train_step` know the loss; pass it to `apply` as `loss=`, to `update` of
    `with_loss_scale` as `value=`.

    Args:
        initial_loss_scale: the scale of the first step, > 0.
        increment_period: finite steps in a row before the ceiling is doubled, an integer >= 1.
        margin: bits between the largest gradient and `largest_number`, >= 0.
        memory: the half-life, in steps, of the largest gradient, an integer >= 1.
        min_scale, max_scale: the bounds, within `2**-126` and `2**126`.
        largest_number: the largest number of the backward pass's dtype, > 0; 65504 for float16.

    Raises:
        TypeError: an argument is not a number, or is a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> w = gs.optimizers.Variable([4.0, 1.0])
        >>> rule, sgd = gs.AdaptiveLossScale(2.0**20), gs.optimizers.SGD(0.1)
        >>> opt = gs.optimizers.LossScaleOptimizer(sgd, loss_scale=rule)
        >>> def loss():  # its gradients pass through float16
        ...     return (w.value().astype("float16").astype("float32") ** 2).sum()
        >>> for _ in range(3):
        ...     value = opt.minimize(loss, [w])
        ...     print(opt.loss_scale)
        256.0
        2048.0
        4096.0

    Source: the ceiling is from Micikevicius et al., 2018, arXiv:1710.03740; the measured scale is
    the delayed scaling of Micikevicius et al., 2022, arXiv:2209.05433.
    """

    measures: ClassVar[tuple[str, ...]] = ("max_abs", "any_nan", "loss")

    initial_loss_scale: float = 2.0**15
    increment_period: int = 2000
    _: dataclasses.KW_ONLY
    margin: float = 1.0
    memory: int = 200
    min_scale: float = 2.0**-24
    max_scale: float = LARGEST
    largest_number: float = LARGEST_FLOAT16

    def __post_init__(self) -> None:
        set_scales(self)
        set_field(self, "increment_period", checks.integer, low=1)
        set_field(self, "margin", checks.real, low=0.0)
        set_field(self, "memory", checks.integer, low=1)
        set_field(self, "largest_number", checks.real, above=0.0)

    def init(self) -> AdaptiveState:
        top = jnp.float32(self.max_scale)
        return AdaptiveState(
            scale=jnp.float32(self.initial_loss_scale),
            good_steps=jnp.int32(0),
            bad_steps=jnp.int32(0),
            ceiling=top,
            before=top,
            first=jnp.float32(self.initial_loss_scale),
            largest=jnp.float32(0),
        )

    def update(self, state: AdaptiveState, finite: Flag, **measured: jax.Array) -> AdaptiveState:
        if missing := [name for name in self.measures if name not in measured]:
            raise TypeError(
                f"AdaptiveLossScale.update needs {', '.join(self.measures)} beside state and "
                f"finite; got no {', '.join(missing)}. Pass `loss=jnp.nan` if there is no loss."
            )
        hopeless = jnp.isinf(measured["loss"])  # the true loss is known and not finite
        unexplained = measured["any_nan"] & jnp.isnan(measured["loss"])
        far = unexplained | (state.largest == 0)  # give up early
        in_vain = state.bad_steps >= jnp.where(far, PATIENCE, HALVINGS)
        retries = (state.bad_steps > 0) & (state.bad_steps % RETRY == 0)
        good = self._after_good(state, measured["max_abs"])
        bad = self._after_bad(state, retries, hopeless, in_vain)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), good, bad)

    def _after_good(self, state: AdaptiveState, max_abs: jax.Array) -> AdaptiveState:
        faded = state.largest * 0.5 ** (1 / self.memory)
        largest = jnp.where(jnp.isfinite(max_abs), jnp.maximum(max_abs, faded), faded)
        good_steps = one_more(state.good_steps, self.increment_period)
        due = good_steps >= self.increment_period
        ceiling = jnp.minimum(jnp.where(due, state.ceiling * 2, state.ceiling), self.max_scale)
        # The power of two below the quotient, which could overflow; `exp2` would round.
        limit, top = math.frexp(self.largest_number * 2.0**-self.margin)
        part, exponent = jnp.frexp(largest)
        bits = top - exponent - jnp.int32(part > jnp.float32(limit))
        power = jnp.ldexp(jnp.float32(1), jnp.clip(bits, -126, 126))
        climbed = state.scale * jnp.where(state.scale < self.initial_loss_scale, CLIMB, 2.0)
        # All gradients are 0, perhaps flushed: climb no further than one probe comes back.
        highest = min(self.initial_loss_scale / PROBE, LARGEST)
        climbed = jnp.maximum(jnp.minimum(climbed, highest), state.scale)
        wanted = jnp.where(largest > 0, power, climbed)
        return state._replace(
            scale=jnp.maximum(jnp.minimum(wanted, ceiling), self.min_scale),
            good_steps=jnp.where(due, 0, good_steps),
            bad_steps=jnp.zeros_like(state.bad_steps),
            ceiling=ceiling,
            largest=largest,
        )

    def _after_bad(
        self, state: AdaptiveState, retries: jax.Array, hopeless: jax.Array, in_vain: jax.Array
    ) -> AdaptiveState:
        """The state after a bad step. The first condition that holds decides:

        - `retries`, and not `hopeless`: scale and ceiling go lower than any step so far.
        - `in_vain`: both return to their values at the first bad step of the run. While no
          gradient is known, the scale returns to the first probe instead.
        - `hopeless`: both stay.
        - Otherwise the scale is halved, or divided by `2**12` while no gradient is known. The
          ceiling becomes half of the scale that overflowed.

        A hopeless step is not counted.
        """
        lowers = (retries | ~in_vain) & ~hopeless
        has_size, began = state.largest > 0, state.bad_steps == 0
        # Undo decreases that did not help, except the first probe.
        first = jnp.where(began, state.scale, state.first)
        back = first * jnp.where(has_size, 1.0, PROBE)
        # The next scale that was not tried; without a known gradient, three probes were.
        deeper = jnp.minimum(state.bad_steps // RETRY, 10) + jnp.where(has_size, 0, 2)
        tried = jnp.ldexp(back, PROBED * deeper)
        lower = jnp.where(retries, tried, state.scale * jnp.where(has_size, 0.5, PROBE))
        held = jnp.where(in_vain, jnp.maximum(back, self.min_scale), state.scale)
        # A probe or retry goes far below the limit, so the ceiling is set in between.
        ceiling = jnp.where(retries, tried * 2.0**6, jnp.where(has_size, state.scale, first) / 2)
        scale = jnp.where(lowers, jnp.maximum(lower, self.min_scale), held)
        return state._replace(
            scale=jnp.minimum(scale, self.max_scale),  # one of another rule's may be beyond
            good_steps=jnp.zeros_like(state.good_steps),
            bad_steps=jnp.where(hopeless, state.bad_steps, jnp.minimum(state.bad_steps, 2**30) + 1),
            ceiling=jnp.where(
                lowers,
                jnp.maximum(ceiling, self.min_scale),  # a ceiling of 0 could not grow again
                jnp.where(in_vain, state.before, state.ceiling),  # the scale was not the cause
            ),
            before=jnp.where(began, state.ceiling, state.before),
            first=first,
        )

"""A rule that measures: it finds the scale in a step or two, and is not misled by bad data."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gainstage._core import checks
from gainstage._core.checks import LARGEST
from gainstage.rules.base import LossScale, one_more, set_field, set_scales

PROBED = -12  # bits: how far down an overflow sends a scale of which nothing is known
PROBE = 2.0**PROBED
CLIMB = 16.0  # how far up a step without any gradient sends it, where it is below its start
PATIENCE = 3  # bad steps in a row after which a NaN is put down to the data
HALVINGS = 12  # the same, after which anything is
RETRY = 64  # steps after which a scale is lowered all the same, should that have been wrong


class AdaptiveState(NamedTuple):
    """The state of `AdaptiveLossScale`."""

    scale: jax.Array  # float32: what the next loss is multiplied by
    good_steps: jax.Array  # int32: finite steps since the ceiling last moved
    bad_steps: jax.Array  # int32: steps in a row that were not finite, though the loss was
    ceiling: jax.Array  # float32: what overflows have taught, half of the last that was one
    before: jax.Array  # float32: the ceiling when the last row of bad steps began
    first: jax.Array  # float32: the scale then
    largest: jax.Array  # float32: the largest true gradient of late, 0 if none is known


@dataclasses.dataclass(frozen=True)
class AdaptiveLossScale(LossScale):
    """Puts the largest gradient just below the largest number of float16.

    The scale follows the largest gradient of late, `margin` bits below the limit, from the first
    finite step on. So it need not be guessed, and comes back in one step after it has been too low.
    What the gradients of the weights do not show (inside of the network there may be larger ones)
    is learned from overflows: each sets a ceiling at half the scale, which is doubled again after
    `increment_period` finite steps. A first overflow, before anything is known, divides the scale
    by `2**12`, so that the second step can be measured.

    A step is not held against the scale if the true loss was not finite, for then no scale would
    have helped. Nor is a row of bad steps, if after twelve something is still not finite, or after
    three a gradient still NaN of which the loss is not known, or anything if no step has been
    finite yet: then the scale goes back to where it was, or to where the first probe went, and
    only every 64th step tries a lower one. The loss is known to `minimize`, to `apply` where it is
    given as `loss=`, and to `loss_scaled` where it is passed as `value=`.

    Args:
        initial_loss_scale: the scale of the first step, > 0.
        increment_period: finite steps in a row before the ceiling is doubled, an integer >= 1.
        margin: bits between the largest gradient and `largest_number`, >= 0.
        memory: the half-life, in steps, of the largest gradient, an integer >= 1.
        min_scale, max_scale: the bounds, within `2**-126` and `2**126`.
        largest_number: the largest number of the dtype of the backward pass, > 0.

    Raises:
        TypeError: an argument is no number, or a bool.
        ValueError: an argument is out of range.

    Examples:
        >>> import gainstage as gs
        >>> w = gs.Variable([4.0, 1.0])
        >>> opt = gs.LossScaleOptimizer(gs.SGD(0.1), rule=gs.AdaptiveLossScale(2.0**20))
        >>> def loss():  # its gradients pass through float16
        ...     return (w.value().astype("float16").astype("float32") ** 2).sum()
        >>> for _ in range(3):
        ...     value = opt.minimize(loss, [w])
        ...     print(opt.loss_scale)
        256.0
        2048.0
        4096.0

    Source: the ceiling is that of Micikevicius et al., 2018, arXiv:1710.03740; the measured scale
    that of the delayed scaling in Micikevicius et al., 2022, arXiv:2209.05433.
    """

    measures: ClassVar[tuple[str, ...]] = ("max_abs", "any_nan", "loss")

    initial_loss_scale: float = 2.0**15
    increment_period: int = 2000
    _: dataclasses.KW_ONLY
    margin: float = 1.0
    memory: int = 200
    min_scale: float = 2.0**-24
    max_scale: float = LARGEST
    largest_number: float = 65504.0

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

    def update(
        self, state: AdaptiveState, finite: jax.Array, **measured: jax.Array
    ) -> AdaptiveState:
        if missing := [name for name in self.measures if name not in measured]:
            raise TypeError(
                f"AdaptiveLossScale.update needs {', '.join(self.measures)} beside state and "
                f"finite; got no {', '.join(missing)}. Pass `loss=jnp.nan` if there is no loss."
            )
        hopeless = jnp.isinf(measured["loss"])  # true, and not finite
        unexplained = measured["any_nan"] & jnp.isnan(measured["loss"])
        far = unexplained | (state.largest == 0)  # each probe goes far
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
        # The power of two below the quotient, which itself might overflow; `exp2` would round.
        limit, bits = math.frexp(self.largest_number * 2.0**-self.margin)
        part, exponent = jnp.frexp(largest)
        bits = bits - exponent - jnp.int32(part > jnp.float32(limit))
        power = jnp.ldexp(jnp.float32(1), jnp.clip(bits, -126, 126))
        climbed = state.scale * jnp.where(state.scale < self.initial_loss_scale, CLIMB, 2.0)
        wanted = jnp.where(largest > 0, power, climbed)  # all 0: flushed, for all we know
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
        """The state after a bad step, by what holds first:

        - `retries`, and not `hopeless`: scale and ceiling go where no step has been yet.
        - `in_vain`: both go back to where they were at the first bad step of the row; the scale,
          while no gradient is known, to where the first probe went.
        - `hopeless`: they stay.
        - none: the scale is halved or, while no gradient is known, divided by `2**12`; its ceiling
          goes to half of what overflowed.

        What is hopeless is not counted.
        """
        lowers = (retries | ~in_vain) & ~hopeless
        known, began = state.largest > 0, state.bad_steps == 0
        # What was tried in vain is taken back, but for the first probe.
        first = jnp.where(began, state.scale, state.first)
        back = first * jnp.where(known, 1.0, PROBE)
        # What was not tried yet: three probes have been, where nothing was known.
        deeper = jnp.minimum(state.bad_steps // RETRY, 10) + jnp.where(known, 0, 2)
        tried = jnp.ldexp(back, PROBED * deeper)
        lower = jnp.where(retries, tried, state.scale * jnp.where(known, 0.5, PROBE))
        held = jnp.where(in_vain, jnp.maximum(back, self.min_scale), state.scale)
        # A probe goes far below the limit, and a retry too: it is somewhere in between.
        ceiling = jnp.where(retries, tried * 2.0**6, jnp.where(known, state.scale, first) / 2)
        return state._replace(
            scale=jnp.where(lowers, jnp.maximum(lower, self.min_scale), held),
            good_steps=jnp.zeros_like(state.good_steps),
            bad_steps=jnp.where(hopeless, state.bad_steps, jnp.minimum(state.bad_steps, 2**30) + 1),
            ceiling=jnp.where(
                lowers,
                jnp.maximum(ceiling, self.min_scale),  # 0 would never grow again
                jnp.where(in_vain, state.before, state.ceiling),  # it was not the scale
            ),
            before=jnp.where(began, state.ceiling, state.before),
            first=first,
        )

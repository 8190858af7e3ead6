"""The telemetry in a state: facts about the last step, and about the gradients of skipped ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from gainstage._base import checks
from gainstage._base.arrays import LARGEST_COUNT, one_more
from gainstage._scaling.exponents import (
    BINS,
    NEVER,
    Exponents,
    exponents_of,
    lowest_overflow,
    summed_over_devices,
)
from gainstage._scaling.finite_check import Reader, fold
from gainstage._scaling.measures import measure
from gainstage._variables.bridge import compiled_if_eager
from gainstage._variables.sharding import on_one_device

LOOK = 17  # applied steps between measurements of `max_abs`; prime, so that tasks take turns


class StepInfo(NamedTuple):
    """The telemetry of the last step: device scalars, to be returned from a compiled step."""

    finite: jax.Array  # bool: whether its gradients were finite; True before the first
    loss_scale: jax.Array  # float32: the scale of its loss; the next step's may differ
    skipped_steps: jax.Array  # int32: the number of skipped steps so far
    # float32: the norm of all true gradients together, before clipping; 0 at first; NaN inside
    # `jax.shard_map(check_vma=False)`, where shards and replicas cannot be distinguished
    grad_norm: jax.Array
    applied_steps: jax.Array  # int32: the number of applied steps so far
    # float32: the largest finite element of the true gradients; 0 before the first step, NaN where
    # it was not measured or a skipped step has no finite element but zeros
    max_abs: jax.Array
    # bool: whether the step was applied; with `apply_if` False, a finite step is skipped too
    applied: jax.Array | bool = True
    # int32: how often a step was taken again with the same batch so far, by `retries`
    retried_steps: jax.Array | int = 0


class Observed(NamedTuple):
    """All telemetry in a state."""

    info: StepInfo
    causes: jax.Array  # int32, one row per gradient: steps with an inf, with a NaN, first and last
    exponents: Exponents | None


def at_first(scale: jax.Array, count: int, every: int | None) -> Observed:
    """Returns the telemetry before the first step.

    Args:
        scale: the first loss scale.
        count: the number of gradients.
        every: the number of steps between counts of exponents; None for never.
    """

    def zero(dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jnp.zeros((), dtype)  # a new array each time, because all may be donated

    info = StepInfo(
        finite=jnp.array(True),
        loss_scale=jnp.array(scale, jnp.float32),
        skipped_steps=zero(jnp.int32),
        grad_norm=zero(),
        applied_steps=zero(jnp.int32),
        max_abs=zero(),
        applied=jnp.array(True),
        retried_steps=zero(jnp.int32),
    )
    causes = jnp.tile(jnp.array([0, 0, -1, -1], jnp.int32), (count, 1))
    counts = jnp.zeros((count, BINS), jnp.float32)
    exponents = Exponents(jnp.int32(-1), zero(), counts, jnp.float32(NEVER))
    return Observed(info, causes, exponents if every else None)


@compiled_if_eager
def observed(
    before: Observed,
    grads: Sequence[Any],
    scale: jax.Array | float,
    finite: jax.Array,
    applied: jax.Array,
    norm: jax.Array,
    max_abs: jax.Array | None,
    loss_scale: jax.Array,
    every: int | None,
    is_local: bool = False,
) -> Observed:
    """Returns the telemetry after one more step.

    Rare work, the causes of a skipped step or exponents, is inside one conditional.

    Args:
        before: the telemetry before the step.
        grads: its gradients, arrays or None. They are read only if the step is skipped, or if
            `max_abs` or exponents are due.
        scale: the scale of the gradients: `loss_scale`, or 1 if they are unscaled.
        finite: whether they are finite.
        applied: whether the step was applied.
        norm: the norm of all true gradients together.
        max_abs: their largest finite element, if it was measured.
        loss_scale: the scale of the step's loss.
        every: as for `at_first`.
        is_local: as for `measure`.
    """
    info = before.info
    step = info.applied_steps
    step += jnp.minimum(info.skipped_steps, LARGEST_COUNT - step)
    scale = jnp.asarray(scale, jnp.float32)
    largest = max_abs
    if largest is None:
        due = ~applied | ~info.applied | (info.applied_steps % LOOK == 0)
        config: Any = jax.config  # of which type checkers know no flags
        if config.jax_debug_nans:  # a NaN for "not measured" would stop a healthy step
            due = jnp.ones_like(due)
        largest = lax.cond(
            due,
            lambda: measure(["max_abs"], grads, finite, scale=scale, is_local=is_local)["max_abs"],
            lambda: jnp.float32(jnp.nan),
        )
    largest = jnp.where(~finite & (largest == 0), jnp.nan, largest)
    new = StepInfo(
        finite=finite,
        loss_scale=jnp.float32(loss_scale),
        skipped_steps=jnp.where(applied, info.skipped_steps, one_more(info.skipped_steps)),
        grad_norm=norm.astype(jnp.float32),
        applied_steps=jnp.where(applied, one_more(info.applied_steps), info.applied_steps),
        max_abs=largest,
        applied=applied,
        retried_steps=jnp.asarray(info.retried_steps),
    )

    def look(longest: int) -> tuple[jax.Array, Exponents | None]:
        unchanged = before.causes, before.exponents

        def causes() -> tuple[jax.Array, Exponents | None]:
            return _more_causes(before.causes, grads, step, longest), before.exponents

        if before.exponents is None or not every:
            return lax.cond(finite, lambda: unchanged, causes)
        more = jnp.float32(loss_scale / scale)

        def exponents() -> tuple[jax.Array, Exponents | None]:
            none = jnp.zeros(BINS, jnp.float32)
            rows = [none if g is None else exponents_of(g, more, longest) for g in grads]
            counts = jnp.stack(rows) if rows else jnp.zeros((0, BINS), jnp.float32)
            counted = Exponents(step, jnp.float32(loss_scale), counts, jnp.float32(NEVER))
            return before.causes, counted

        last = before.exponents.step
        due = (last < 0) | (step - last >= every)
        choice = jnp.where(finite, jnp.where(due, 2, 0), 1)
        return lax.switch(choice, [lambda: unchanged, causes, exponents])

    reader = Reader(is_local=on_one_device(is_local, jax.tree.leaves(grads)))
    causes, exponents = reader.per_platform(look)
    if before.exponents is not None and exponents is not None:
        lowest = lowest_overflow(before.exponents.overflowed, new.loss_scale, finite)
        exponents = exponents._replace(overflowed=lowest)
    return Observed(new, causes, exponents)


def check_telemetry(telemetry: bool, underflow_every: int | None) -> tuple[bool, int | None]:
    """Checks the two settings; raises a TypeError or ValueError."""
    telemetry = checks.flag("telemetry", telemetry)
    if underflow_every is None:
        return telemetry, None
    if not telemetry:
        raise ValueError(f"Expected telemetry=True for underflow_every={underflow_every!r}.")
    return telemetry, checks.integer("underflow_every", underflow_every, low=1)


def _more_causes(
    causes: jax.Array, grads: Sequence[Any], step: jax.Array, longest: int
) -> jax.Array:
    none = jnp.zeros(2, bool)

    def kinds(so_far: jax.Array, part: jax.Array) -> jax.Array:
        return so_far | jnp.stack([jnp.isinf(part).any(), jnp.isnan(part).any()])

    def kinds_of(gradient: jax.Array | None) -> jax.Array:
        return none if gradient is None else fold(kinds, none, gradient, longest=longest)

    found = jnp.array([kinds_of(gradient) for gradient in grads], bool).reshape(-1, 2)
    found = summed_over_devices(found.astype(jnp.int32)) > 0
    hit = found.any(axis=1)
    inf, nan, first, last = causes.T
    first = jnp.where(hit & (first < 0), step, first)
    last = jnp.where(hit, step, last)
    more_inf, more_nan = found.T
    inf = jnp.where(more_inf, one_more(inf), inf)
    nan = jnp.where(more_nan, one_more(nan), nan)
    return jnp.stack([inf, nan, first, last], axis=1)

"""What telemetry keeps of a run, on the device: the last step, what overflowed, what underflows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._core import checks
from gainstage._core.bridge import compiled_if_eager
from gainstage._core.joining import by_rows
from gainstage._core.measures import measure
from gainstage._core.sharding import on_one_device, varying

# The exponents of float16: what is below 2**-25 becomes 0, what is below 2**-14 loses digits.
FLUSHED, SUBNORMAL, TOP = -25, -14, 15
LOWEST, HIGHEST = -40, 40  # what is beyond is counted here
BINS = HIGHEST - LOWEST + 2  # one for each exponent, and the first for zeros
LOOK = 17  # applied steps between looks for the largest element; a prime, so that tasks take turns


class StepInfo(NamedTuple):
    """What the last step was like: device scalars, to be returned from a compiled step."""

    finite: jax.Array  # bool: whether its gradients were finite; True before the first
    loss_scale: jax.Array  # float32: the scale of its loss; the next step's may be another
    skipped_steps: jax.Array  # int32: how many steps have been skipped so far
    # float32: of all true gradients together, before clipping; 0 at first, nan inside of
    # `jax.shard_map(check_vma=False)`, where parts and copies cannot be told apart
    grad_norm: jax.Array
    applied_steps: jax.Array  # int32: how many have not
    # float32: the largest finite element of the true gradients, 0 at first; of this step, or of the
    # last in which it was looked for
    max_abs: jax.Array
    # bool: whether it was applied, and not skipped; a finite one is not where `only_if` is False
    applied: jax.Array | bool = True


class Exponents(NamedTuple):
    """How large the elements of each gradient were, times the loss scale, when last counted."""

    step: jax.Array  # int32: when, -1 for never
    scale: jax.Array  # float32: the scale then
    counts: jax.Array  # float32, one row a gradient: elements that are 0, then by exponent


class Observed(NamedTuple):
    """All of it."""

    info: StepInfo
    causes: jax.Array  # int32, one row a gradient: steps with an inf, with a NaN, first and last
    exponents: Exponents | None


def at_first(scale: jax.Array, count: int, every: int | None) -> Observed:
    """Before the first step, on so many gradients.

    Args:
        scale: the first loss scale.
        count: how many gradients there are.
        every: after so many steps exponents are counted; None for never.
    """

    def zero(dtype: Any = jnp.float32) -> jax.Array:
        return jnp.zeros((), dtype)  # one of its own each time: all of them may be donated

    info = StepInfo(
        finite=jnp.array(True),
        loss_scale=jnp.array(scale, jnp.float32),
        skipped_steps=zero(jnp.int32),
        grad_norm=zero(),
        applied_steps=zero(jnp.int32),
        max_abs=zero(),
        applied=jnp.array(True),
    )
    causes = jnp.tile(jnp.array([0, 0, -1, -1], jnp.int32), (count, 1))
    exponents = Exponents(jnp.int32(-1), zero(), jnp.zeros((count, BINS), jnp.float32))
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
    ordered: bool = False,
) -> Observed:
    """After one more step.

    Args:
        before: what was known before it.
        grads: its gradients, arrays or None, which are read only where the step is skipped, or the
            largest element or exponents are due.
        scale: what they were multiplied by: `loss_scale`, or 1 if they are the true ones.
        finite: whether they are finite.
        applied: whether the step was applied.
        norm: of all true gradients together.
        max_abs: their largest finite element, if it has been measured.
        loss_scale: the scale of its loss.
        every: as for `at_first`.
        ordered: as for `measures.measure`.
    """
    info = before.info
    step = info.applied_steps + info.skipped_steps
    scale = jnp.asarray(scale, jnp.float32)
    largest = max_abs
    if largest is None:
        due = ~applied | ~info.applied | (info.applied_steps % LOOK == 0)
        largest = lax.cond(
            due,
            lambda: measure(["max_abs"], grads, finite, scale=scale, ordered=ordered)["max_abs"],
            lambda: info.max_abs,
        )
    new = StepInfo(
        finite=finite,
        loss_scale=jnp.float32(loss_scale),
        skipped_steps=info.skipped_steps + jnp.where(applied, 0, 1).astype(jnp.int32),
        grad_norm=norm.astype(jnp.float32),
        applied_steps=info.applied_steps + jnp.where(applied, 1, 0).astype(jnp.int32),
        max_abs=largest,
        applied=applied,
    )
    one = on_one_device(ordered)
    causes = lax.cond(
        finite, lambda: before.causes, lambda: _more_causes(before.causes, grads, step, one)
    )
    exponents = before.exponents
    if exponents is not None and every:
        more = jnp.float32(loss_scale / scale)

        def counted() -> Exponents:
            none = jnp.zeros(BINS, jnp.float32)
            rows = [none if g is None else _exponents(g, more, one) for g in grads]
            return Exponents(step, jnp.float32(loss_scale), jnp.stack(rows))

        due = finite & ((exponents.step < 0) | (step - exponents.step >= every))
        exponents = lax.cond(due, counted, lambda: exponents)
    return Observed(new, causes, exponents)


def check_telemetry(telemetry: bool, underflow_every: int | None) -> tuple[bool, int | None]:
    """The two settings as they are kept, or a TypeError or ValueError."""
    telemetry = checks.flag("telemetry", telemetry)
    if underflow_every is None:
        return telemetry, None
    if not telemetry:
        raise ValueError(f"Expected telemetry=True for underflow_every={underflow_every!r}.")
    return telemetry, checks.integer("underflow_every", underflow_every, low=1)


def leaves_and_none(tree: Any) -> list[Any]:
    """The leaves of a tree, None being one."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _more_causes(
    causes: jax.Array, grads: Sequence[Any], step: jax.Array, ordered: bool
) -> jax.Array:
    none = jnp.zeros(2, bool)

    def kinds(so_far: jax.Array, part: jax.Array) -> jax.Array:
        return so_far | jnp.stack([jnp.isinf(part).any(), jnp.isnan(part).any()])

    def kinds_of(gradient: Any) -> jax.Array:
        if gradient is None:
            return none
        return by_rows(kinds, none, gradient) if ordered else kinds(none, gradient)

    found = jnp.array([kinds_of(gradient) for gradient in grads], bool).reshape(-1, 2)
    found = _summed(found.astype(jnp.int32)) > 0
    hit = found.any(axis=1)
    inf, nan, first, last = causes.T
    first = jnp.where(hit & (first < 0), step, first)
    last = jnp.where(hit, step, last)
    more_inf, more_nan = found.astype(jnp.int32).T
    return jnp.stack([inf + more_inf, nan + more_nan, first, last], axis=1)


def _exponents(gradient: jax.Array, scale: jax.Array, ordered: bool) -> jax.Array:
    """How many elements are 0, and how many have each exponent from `LOWEST` on."""

    def more(so_far: jax.Array, part: jax.Array) -> jax.Array:
        x = jnp.abs(jnp.atleast_1d(part)).astype(jnp.float32) * scale
        exponent = jnp.clip(jnp.frexp(x)[1] - 1, LOWEST, HIGHEST)
        place = jnp.where(x == 0, 0, exponent - LOWEST + 1).astype(jnp.int8)

        def count(bin: jax.Array) -> jax.Array:
            rows = jnp.sum(place == bin, axis=tuple(range(1, x.ndim)), dtype=jnp.int32)
            return jnp.sum(rows.astype(jnp.float32 if x.ndim > 1 else jnp.int32))

        # Comparisons, not a scatter: on a mesh every device counts its own part. One bin after
        # the other, for XLA would store the comparisons with all of them.
        return so_far + lax.map(count, jnp.arange(BINS, dtype=jnp.int8)).astype(jnp.float32)

    none = jnp.zeros(BINS, jnp.float32)
    return by_rows(more, none, gradient) if ordered else _summed(more(none, gradient))


def _summed(counts: jax.Array) -> jax.Array:
    """Over all devices, where inside of `jax.shard_map` each has seen its own part."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return lax.psum(varying(counts, axes), tuple(axes)) if axes else counts

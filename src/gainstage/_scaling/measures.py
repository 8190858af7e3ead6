"""The measurements of a step that loss-scale rules and telemetry need."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from gainstage._base import checks
from gainstage._scaling.finite_check import Reader, bundle, fold
from gainstage._scaling.gradients import as_gradients, upcast
from gainstage._variables.bridge import compiled_if_eager
from gainstage._variables.sharding import on_one_device, varying, varying_like
from gainstage._variables.types import Given, PyTree

# Exponents of float16: numbers below 2**-25 become 0, numbers below 2**-14 lose digits.
FLUSHED, SUBNORMAL, TOP = -25, -14, 15
DIGITS = 10  # binary digits behind the first
LOWEST, HIGHEST = -40, 40  # exponents beyond are counted here
BINS = HIGHEST - LOWEST + 2  # one per exponent, and the first for zeros
NEVER = float(np.finfo(np.float32).max)  # not inf, which `jax_debug_infs` would refuse
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


class Exponents(NamedTuple):
    """How large the elements of each gradient were, times the loss scale, when last counted."""

    step: jax.Array  # int32: the step of the count, -1 for never
    scale: jax.Array  # float32: the scale of that step
    counts: jax.Array  # float32, one row per gradient: elements that are 0, then by exponent
    # float32: the lowest scale of a non-finite step that no finite one reached, `NEVER` at first
    overflowed: jax.Array


class Observed(NamedTuple):
    """All telemetry in a state."""

    info: StepInfo
    causes: jax.Array  # int32, one row per gradient: steps with an inf, with a NaN, first and last
    exponents: Exponents | None


def measure(
    names: Sequence[str],
    grads: PyTree,
    finite: jax.Array | bool,
    loss: ArrayLike | None = None,
    scale: jax.Array | None = None,
    ordered: bool = False,
) -> dict[str, jax.Array]:
    """Returns the `measures` of a rule, of the true gradients and the true loss.

    On a CPU, `max_abs` of finite gradients is a maximum and a minimum, the fastest way; only if not
    all are finite it checks each element. Other devices check each element at once.

    Args:
        names: any of `max_abs`, `any_nan`, `any_inf`, `loss`.
        grads: a pytree of gradients.
        finite: whether all elements are finite; a Python bool decides at tracing time.
        loss: the true loss, if it is known. The measured loss is inf if it is NaN, and NaN if it is
            not known.
        scale: the scale of the gradients; None if they are unscaled.
        ordered: whether they are known to be on one device.

    Raises:
        ValueError: another name.
    """
    known = (*_MEASURES, "loss")
    for name in names:
        if name not in known:
            raise ValueError(f"Expected measures among {sorted(known)}; got {name!r}.")
    measured = _of_gradients([n for n in names if n in _MEASURES], grads, finite, scale, ordered)
    if "loss" in names:
        if loss is None:  # moved, not computed: `jax_debug_nans` checks what is computed
            measured["loss"] = jax.device_put(np.float32(np.nan))
        else:
            value = jnp.asarray(loss, jnp.float32)
            measured["loss"] = jnp.where(jnp.isnan(value), jnp.inf, value)
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not manual:
        return measured
    # Inside `jax.shard_map` each device measures its own shards, and all must agree.
    together: dict[str, Callable[..., jax.Array]] = {"max_abs": lax.pmax, "loss": lax.pmean}
    return {
        name: together[name](varying(value, manual), manual)
        if name in together
        else lax.psum(varying(value.astype(jnp.int32), manual), manual) > 0
        for name, value in measured.items()
    }


def measured_of_both(
    before: Mapping[str, jax.Array], more: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Combines the measurements of earlier microbatches with those of one more. Of the losses it
    keeps the last, or the first non-finite one."""
    combined = {name: known.combine for name, known in _MEASURES.items()}
    combined["loss"] = lambda old, new: jnp.where(jnp.isfinite(old), new, old)
    return {name: combined[name](before[name], value) for name, value in more.items()}


class _Measure(NamedTuple):
    nothing: np.generic  # the value for no gradients
    of: Callable[[jax.Array], jax.Array]  # the value for an array, which may be non-finite
    combine: Callable[[jax.Array, jax.Array], jax.Array]


def _largest_finite(x: jax.Array) -> jax.Array:
    sizes = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    return jnp.max(sizes, initial=0).astype(jnp.float32)


_MEASURES = {
    "max_abs": _Measure(np.float32(0), _largest_finite, jnp.maximum),
    "any_nan": _Measure(np.bool_(False), lambda x: jnp.isnan(x).any(), jnp.logical_or),
    "any_inf": _Measure(np.bool_(False), lambda x: jnp.isinf(x).any(), jnp.logical_or),
}


@compiled_if_eager
def _of_gradients(
    names: Sequence[str], grads: PyTree, finite: jax.Array | bool, scale: Given, ordered: bool
) -> dict[str, jax.Array]:
    if not names:
        return {}
    arrays = [leaf for leaf in jax.tree.leaves(grads) if leaf.size]
    reader = Reader(ordered=on_one_device(ordered, arrays))
    nothing = varying_like({name: jnp.asarray(_MEASURES[name].nothing) for name in names}, arrays)
    if reader.ordered:
        arrays = [array for _, (array,) in bundle([0] * len(arrays), arrays)]

    def more(so_far: dict[str, jax.Array], array: jax.Array) -> dict[str, jax.Array]:
        (gradient,) = as_gradients([array], scale)
        assert gradient is not None
        true = gradient.value()
        return {n: _MEASURES[n].combine(so_far[n], _MEASURES[n].of(true)) for n in names}

    def exactly(longest: int) -> dict[str, jax.Array]:
        look = jax.jit(functools.partial(fold, more, longest=longest))  # traced once for each shape
        return functools.reduce(look, arrays, nothing)

    def on_cpu(in_chunks: Callable[[], dict[str, jax.Array]]) -> dict[str, jax.Array]:
        if finite is False:
            return in_chunks()
        quickly = dict(nothing)
        if "max_abs" in names:
            sizes = [
                g.value() for g in as_gradients([*map(_largest, arrays)], scale) if g is not None
            ]
            each = [size.astype(jnp.float32) for size in sizes]
            quickly["max_abs"] = functools.reduce(jnp.maximum, each, nothing["max_abs"])
        return quickly if finite is True else lax.cond(finite, lambda: quickly, in_chunks)

    return reader.per_platform(exactly, on_cpu)


def _largest(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.max(jnp.abs(upcast(x)))
    # Not `max` of `abs`, which XLA:CPU would store in float16 (jaxlib 0.10.2).
    return jnp.maximum(upcast(jnp.max(x)), -upcast(jnp.min(x)))


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
    ordered: bool = False,
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
        ordered: as for `measure`.
    """
    info = before.info
    step = info.applied_steps + info.skipped_steps
    scale = jnp.asarray(scale, jnp.float32)
    largest = max_abs
    if largest is None:
        due = ~applied | ~info.applied | (info.applied_steps % LOOK == 0)
        config: Any = jax.config  # of which type checkers know no flags
        if config.jax_debug_nans:  # a NaN for "not measured" would stop a healthy step
            due = jnp.ones_like(due)
        largest = lax.cond(
            due,
            lambda: measure(["max_abs"], grads, finite, scale=scale, ordered=ordered)["max_abs"],
            lambda: jnp.float32(jnp.nan),
        )
    largest = jnp.where(~finite & (largest == 0), jnp.nan, largest)
    new = StepInfo(
        finite=finite,
        loss_scale=jnp.float32(loss_scale),
        skipped_steps=info.skipped_steps + jnp.where(applied, 0, 1).astype(jnp.int32),
        grad_norm=norm.astype(jnp.float32),
        applied_steps=info.applied_steps + jnp.where(applied, 1, 0).astype(jnp.int32),
        max_abs=largest,
        applied=applied,
        retried_steps=jnp.asarray(info.retried_steps),
    )

    def look(longest: int) -> tuple[jax.Array, Exponents | None]:
        known = before.causes, before.exponents

        def causes() -> tuple[jax.Array, Exponents | None]:
            return _more_causes(before.causes, grads, step, longest), before.exponents

        if before.exponents is None or not every:
            return lax.cond(finite, lambda: known, causes)
        more = jnp.float32(loss_scale / scale)

        def exponents() -> tuple[jax.Array, Exponents | None]:
            none = jnp.zeros(BINS, jnp.float32)
            rows = [none if g is None else _exponents(g, more, longest) for g in grads]
            counts = jnp.stack(rows) if rows else jnp.zeros((0, BINS), jnp.float32)
            counted = Exponents(step, jnp.float32(loss_scale), counts, jnp.float32(NEVER))
            return before.causes, counted

        last = before.exponents.step
        due = (last < 0) | (step - last >= every)
        choice = jnp.where(finite, jnp.where(due, 2, 0), 1)
        return lax.switch(choice, [lambda: known, causes, exponents])

    reader = Reader(ordered=on_one_device(ordered, jax.tree.leaves(grads)))
    causes, exponents = reader.per_platform(look)
    if before.exponents is not None and exponents is not None:
        lowest = _lowest_overflow(before.exponents.overflowed, new.loss_scale, finite)
        exponents = exponents._replace(overflowed=lowest)
    return Observed(new, causes, exponents)


def _lowest_overflow(before: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """The lowest scale of a non-finite step, until a step is finite at that scale or above."""
    kept = jnp.where(scale >= before, NEVER, before)
    return jnp.where(finite, kept, jnp.minimum(before, scale)).astype(jnp.float32)


def check_telemetry(telemetry: bool, underflow_every: int | None) -> tuple[bool, int | None]:
    """Checks the two settings; raises a TypeError or ValueError."""
    telemetry = checks.flag("telemetry", telemetry)
    if underflow_every is None:
        return telemetry, None
    if not telemetry:
        raise ValueError(f"Expected telemetry=True for underflow_every={underflow_every!r}.")
    return telemetry, checks.integer("underflow_every", underflow_every, low=1)


def leaves_and_none(tree: PyTree) -> list[Any]:
    """The leaves of a tree, with None as a leaf."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _more_causes(
    causes: jax.Array, grads: Sequence[Any], step: jax.Array, longest: int
) -> jax.Array:
    none = jnp.zeros(2, bool)

    def kinds(so_far: jax.Array, part: jax.Array) -> jax.Array:
        return so_far | jnp.stack([jnp.isinf(part).any(), jnp.isnan(part).any()])

    def kinds_of(gradient: jax.Array | None) -> jax.Array:
        return none if gradient is None else fold(kinds, none, gradient, longest=longest)

    found = jnp.array([kinds_of(gradient) for gradient in grads], bool).reshape(-1, 2)
    found = _summed(found.astype(jnp.int32)) > 0
    hit = found.any(axis=1)
    inf, nan, first, last = causes.T
    first = jnp.where(hit & (first < 0), step, first)
    last = jnp.where(hit, step, last)
    more_inf, more_nan = found.astype(jnp.int32).T
    return jnp.stack([inf + more_inf, nan + more_nan, first, last], axis=1)


def _exponents(gradient: jax.Array, scale: jax.Array, longest: int) -> jax.Array:
    """Counts elements that are 0, then elements of each exponent from `LOWEST` on."""

    def more(so_far: jax.Array, part: jax.Array) -> jax.Array:
        x = jnp.abs(jnp.atleast_1d(part)).astype(jnp.float32) * scale
        exponent = jnp.clip(jnp.frexp(x)[1] - 1, LOWEST, HIGHEST)
        place = jnp.where(x == 0, 0, exponent - LOWEST + 1).astype(jnp.int8)

        def count(bin: jax.Array) -> jax.Array:
            rows = jnp.sum(place == bin, axis=tuple(range(1, x.ndim)), dtype=jnp.int32)
            return jnp.sum(rows.astype(jnp.float32 if x.ndim > 1 else jnp.int32))

        # Comparisons, not a scatter: on a mesh each device counts its own shards. One bin after the
        # other, because XLA would store the comparisons with all bins.
        return so_far + lax.map(count, jnp.arange(BINS, dtype=jnp.int8)).astype(jnp.float32)

    none = varying_like(jnp.zeros(BINS, jnp.float32), [gradient])
    return _summed(fold(more, none, gradient, longest=longest))


def _summed(counts: jax.Array) -> jax.Array:
    """Sums counts over all devices, inside `jax.shard_map`; each has counted its own shards."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return lax.psum(varying(counts, axes), tuple(axes)) if axes else counts

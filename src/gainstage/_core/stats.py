"""What loss-scale rules and telemetry need of a step beside the finiteness of its gradients."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage._core import checks
from gainstage._core.bridge import compiled_if_eager
from gainstage._core.gradients import divided, upcast
from gainstage._core.packing import CHUNK, bundle, fold
from gainstage._core.sharding import on_one_device, varying, varying_like

# The exponents of float16: what is below 2**-25 becomes 0, what is below 2**-14 loses digits.
FLUSHED, SUBNORMAL, TOP = -25, -14, 15
DIGITS = 10  # binary ones behind the first
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
    # bool: whether it was applied, and not skipped; a finite one is not where `apply_if` is False
    applied: jax.Array | bool = True


class Exponents(NamedTuple):
    """How large the elements of each gradient were, times the loss scale, when last counted."""

    step: jax.Array  # int32: when, -1 for never
    scale: jax.Array  # float32: the scale then
    counts: jax.Array  # float32, one row a gradient: elements that are 0, then by exponent
    overflowed: jax.Array  # float32: the lowest scale of a skipped step that no finite one reached


class Observed(NamedTuple):
    """All of it."""

    info: StepInfo
    causes: jax.Array  # int32, one row a gradient: steps with an inf, with a NaN, first and last
    exponents: Exponents | None


def measure(
    names: Sequence[str],
    grads: Any,
    finite: jax.Array | bool,
    loss: Any = None,
    scale: jax.Array | None = None,
    ordered: bool = False,
) -> dict[str, jax.Array]:
    """What a loss-scale rule asks for in its `measures`, of true gradients and the true loss.

    A CPU reads `max_abs` of finite gradients as a maximum and a minimum, which is the fastest it
    can; only where not all are finite it asks each element. Any other device does so at once.

    Args:
        names: any of `max_abs`, `any_nan`, `any_inf`, `loss`.
        grads: a pytree of gradients.
        finite: whether all their elements are known to be; a Python bool settles it.
        loss: the true loss, if it is known. Measured, it is inf where it is nan, and nan where it
            is not known.
        scale: what the gradients were multiplied by; None if they are true.
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
        value = jnp.asarray(jnp.nan if loss is None else loss, jnp.float32)
        measured["loss"] = value if loss is None else jnp.where(jnp.isnan(value), jnp.inf, value)
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not manual:
        return measured
    # Inside of `jax.shard_map` each device has measured its own part, and all have to agree.
    together = {"max_abs": lax.pmax, "loss": lax.pmean}
    return {
        name: together[name](varying(value, manual), manual)
        if name in together
        else lax.psum(varying(value.astype(jnp.int32), manual), manual) > 0
        for name, value in measured.items()
    }


def measured_of_both(before: Mapping[str, jax.Array], more: Mapping[str, jax.Array]) -> Any:
    """What has been measured of several microbatches, and of one more: of the losses the last, but
    the first that is not finite."""
    combined = {name: known.combine for name, known in _MEASURES.items()}
    combined["loss"] = lambda old, new: jnp.where(jnp.isfinite(old), new, old)
    return {name: combined[name](before[name], value) for name, value in more.items()}


class _Measure(NamedTuple):
    nothing: Any  # what it is of no gradients
    of: Callable[[jax.Array], jax.Array]  # an array of true gradients, not all of them finite
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
    names: Sequence[str], grads: Any, finite: jax.Array | bool, scale: Any, ordered: bool
) -> dict[str, jax.Array]:
    if not names:
        return {}
    arrays = [leaf for leaf in jax.tree.leaves(grads) if leaf.size]
    ordered = on_one_device(ordered, arrays)
    nothing = varying_like({name: jnp.asarray(_MEASURES[name].nothing) for name in names}, arrays)
    if ordered:
        arrays = [array for _, (array,) in bundle([0] * len(arrays), arrays)]

    def more(so_far: Any, array: jax.Array) -> Any:
        (gradient,) = divided([array], scale)
        assert gradient is not None
        true = gradient.value()
        return {n: _MEASURES[n].combine(so_far[n], _MEASURES[n].of(true)) for n in names}

    def exactly(longest: int) -> dict[str, jax.Array]:
        look = jax.jit(functools.partial(fold, more, longest=longest))  # traced once for each shape
        return functools.reduce(look, arrays, nothing)

    def on_cpu() -> dict[str, jax.Array]:
        in_chunks = functools.partial(exactly, CHUNK if ordered else 0)
        if finite is False:
            return in_chunks()
        quickly = dict(nothing)
        if "max_abs" in names:
            sizes = [g.value() for g in divided([*map(_largest, arrays)], scale) if g is not None]
            each = [size.astype(jnp.float32) for size in sizes]
            quickly["max_abs"] = functools.reduce(jnp.maximum, each, nothing["max_abs"])
        return quickly if finite is True else lax.cond(finite, lambda: quickly, in_chunks)

    return lax.platform_dependent(cpu=on_cpu, default=lambda: exactly(0))


def _largest(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.max(jnp.abs(upcast(x)))
    # Not `max` of `abs`, which XLA for CPU would store in float16 (jaxlib 0.10.2).
    return jnp.maximum(upcast(jnp.max(x)), -upcast(jnp.min(x)))


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
    counts, never = jnp.zeros((count, BINS), jnp.float32), jnp.float32(jnp.inf)
    exponents = Exponents(jnp.int32(-1), zero(), counts, never)
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

    One conditional holds what is seldom due: causes of a skipped step, or exponents.

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
        ordered: as for `measure`.
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

    def look(longest: int) -> tuple[jax.Array, Exponents | None]:
        known = before.causes, before.exponents
        never = jnp.float32(jnp.inf)

        def causes() -> tuple[jax.Array, Exponents | None]:
            return _more_causes(before.causes, grads, step, longest), before.exponents

        if before.exponents is None or not every:
            return lax.cond(finite, lambda: known, causes)
        more = jnp.float32(loss_scale / scale)

        def exponents() -> tuple[jax.Array, Exponents | None]:
            none = jnp.zeros(BINS, jnp.float32)
            rows = [none if g is None else _exponents(g, more, longest) for g in grads]
            counted = Exponents(step, jnp.float32(loss_scale), jnp.stack(rows), never)
            return before.causes, counted

        last = before.exponents.step
        due = (last < 0) | (step - last >= every)
        choice = jnp.where(finite, jnp.where(due, 2, 0), 1)
        return lax.switch(choice, [lambda: known, causes, exponents])

    longest = CHUNK if on_one_device(ordered, jax.tree.leaves(grads)) else 0
    looked: Any = lax.platform_dependent(cpu=lambda: look(longest), default=lambda: look(0))
    causes, exponents = looked
    if before.exponents is not None and exponents is not None:
        lowest = _lowest_overflow(before.exponents.overflowed, new.loss_scale, finite)
        exponents = exponents._replace(overflowed=lowest)
    return Observed(new, causes, exponents)


def _lowest_overflow(before: jax.Array, scale: jax.Array, finite: jax.Array) -> jax.Array:
    """The lowest scale of a skipped step; a finite step at that scale or above refutes it."""
    kept = jnp.where(scale >= before, jnp.inf, before)
    return jnp.where(finite, kept, jnp.minimum(before, scale)).astype(jnp.float32)


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
    causes: jax.Array, grads: Sequence[Any], step: jax.Array, longest: int
) -> jax.Array:
    none = jnp.zeros(2, bool)

    def kinds(so_far: jax.Array, part: jax.Array) -> jax.Array:
        return so_far | jnp.stack([jnp.isinf(part).any(), jnp.isnan(part).any()])

    def kinds_of(gradient: Any) -> jax.Array:
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

    none = varying_like(jnp.zeros(BINS, jnp.float32), [gradient])
    return _summed(fold(more, none, gradient, longest=longest))


def _summed(counts: jax.Array) -> jax.Array:
    """Over all devices, where inside of `jax.shard_map` each has seen its own part."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return lax.psum(varying(counts, axes), tuple(axes)) if axes else counts

"""What loss-scale rules and telemetry want to know of gradients beside their finiteness."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage._core.bridge import compiled_if_eager
from gainstage._core.gradients import divided, widen
from gainstage._core.joining import Reduction, bundle, by_rows, reduce_each
from gainstage._core.sharding import on_one_device, varying, varying_like


def measure(
    names: Sequence[str],
    grads: Any,
    finite: jax.Array | bool,
    loss: Any = None,
    scale: jax.Array | None = None,
    ordered: bool = False,
) -> dict[str, jax.Array]:
    """What a loss-scale rule asks for in its `measures`, of true gradients and the true loss.

    The largest element is looked for in one reading, as cheap as there is; only where not all are
    finite, elements are asked one by one.

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
    ordered = on_one_device(ordered)
    leaves = [leaf for leaf in jax.tree.leaves(grads) if leaf.size]
    arrays = [array for (array,) in bundle(leaves)] if ordered else leaves
    nothing = varying_like({name: jnp.asarray(_MEASURES[name].nothing) for name in names}, leaves)

    def more(so_far: Any, array: jax.Array) -> Any:
        (gradient,) = divided([array], scale)
        assert gradient is not None
        true = gradient.value()
        return {n: _MEASURES[n].combine(so_far[n], _MEASURES[n].of(true)) for n in names}

    def exactly() -> dict[str, jax.Array]:
        measured = nothing
        for array in arrays:
            measured = by_rows(more, measured, array) if ordered else more(measured, array)
        return measured

    if finite is False:
        return exactly()
    quickly = dict(nothing)
    if "max_abs" in names:
        sizes = divided(reduce_each(_SIZE, arrays, ordered, nothing["max_abs"]), scale)
        each = [size.value().astype(jnp.float32) for size in sizes if size is not None]
        quickly["max_abs"] = functools.reduce(jnp.maximum, each, nothing["max_abs"])
    return quickly if finite is True else lax.cond(finite, lambda: quickly, exactly)


def _size(x: jax.Array) -> jax.Array:
    return jnp.abs(widen(x))


def _largest(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.max(_size(x))
    # Not `max` of `abs`, which XLA for CPU would store.
    return jnp.maximum(widen(jnp.max(x)), -widen(jnp.min(x)))


_SIZE = Reduction(_size, jnp.maximum, jnp.max, _largest)

"""The measurements of a step that loss-scale rules and telemetry need."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from gainstage._scaling.finite_check import Reader, bundle, fold
from gainstage._scaling.gradients import as_gradients, upcast
from gainstage._variables.bridge import compiled_if_eager
from gainstage._variables.sharding import on_one_device, varying, varying_like
from gainstage._variables.types import PyTree


def measure(
    names: Sequence[str],
    grads: PyTree,
    finite: jax.Array | bool,
    loss: ArrayLike | None = None,
    scale: jax.Array | None = None,
    is_local: bool = False,
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
        is_local: whether they are known to be on one device.

    Raises:
        ValueError: another name.
    """
    known = (*_MEASURES, "loss")
    for name in names:
        if name not in known:
            raise ValueError(f"Expected measures among {sorted(known)}; got {name!r}.")
    measured = _of_gradients([n for n in names if n in _MEASURES], grads, finite, scale, is_local)
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
    names: Sequence[str],
    grads: PyTree,
    finite: jax.Array | bool,
    scale: jax.Array | None,
    is_local: bool,
) -> dict[str, jax.Array]:
    if not names:
        return {}
    arrays = [leaf for leaf in jax.tree.leaves(grads) if leaf.size]
    reader = Reader(is_local=on_one_device(is_local, arrays))
    nothing = varying_like({name: jnp.asarray(_MEASURES[name].nothing) for name in names}, arrays)
    if reader.is_local:
        large, joined = bundle([0] * len(arrays), arrays)
        arrays = [array for _, (array,) in (*large, *joined)]

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
                g.value()
                for g in as_gradients([*map(_largest_magnitude, arrays)], scale)
                if g is not None
            ]
            each = [size.astype(jnp.float32) for size in sizes]
            quickly["max_abs"] = functools.reduce(jnp.maximum, each, nothing["max_abs"])
        return quickly if finite is True else lax.cond(finite, lambda: quickly, in_chunks)

    return reader.per_platform(exactly, on_cpu)


def _largest_magnitude(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.max(jnp.abs(upcast(x)))
    # Not `max` of `abs`, which XLA:CPU would store in float16 (jaxlib 0.10.2).
    return jnp.maximum(upcast(jnp.max(x)), -upcast(jnp.min(x)))

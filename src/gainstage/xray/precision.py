"""Computes a half-precision equation in float32."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._core._jax import bind, open_jaxpr
from gainstage.xray.numbers import HALF, is_half

OPAQUE = frozenset(
    ("shard_map", "pallas_call", "custom_partitioning", "run_state", "core_map", "ffi_call",
     "custom_call", "tpu_custom_call", "triton_kernel_call")
)  # fmt: skip
SCATTER: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "scatter": lambda a, b: b, "scatter-add": jax.lax.add, "scatter_add": jax.lax.add,
        "scatter-sub": jax.lax.sub, "scatter-mul": jax.lax.mul, "scatter_mul": jax.lax.mul,
        "scatter-min": jax.lax.min, "scatter-max": jax.lax.max,
        "scatter_min": jax.lax.min, "scatter_max": jax.lax.max,
    }
)  # fmt: skip


def up(x: Any, var: Any) -> Any:
    """Upcasts a half-precision operand to float32."""
    half = is_half(x) if hasattr(x, "dtype") else var is not None and is_half(var.aval)
    return jnp.asarray(x, jnp.float32) if half else x


def down(x: Any, var: Any) -> Any:
    """Casts an operand to its dtype in the program."""
    half = is_half(var.aval) and getattr(x, "dtype", None) != var.aval.dtype
    return jnp.asarray(x, var.aval.dtype) if half else x


def in_float32(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation in float32, from float32 operands."""
    if eqn.primitive.name == "reduce_precision":
        return list(values)
    params = dict(eqn.params)
    if params.get("update_jaxpr") is not None and eqn.primitive.name in SCATTER:
        zero = jnp.float32(0)
        params["update_jaxpr"] = open_jaxpr(jax.make_jaxpr(SCATTER[eqn.primitive.name])(zero, zero))
    if any(is_half(v.aval) for v in eqn.invars):
        params = {
            k: None if k == "precision" and _is_algorithm(v) else v for k, v in params.items()
        }
    for key in ("preferred_element_type", "new_dtype", "dtype"):
        if params.get(key) is not None and jnp.dtype(params[key]) in HALF:
            params[key] = np.dtype(np.float32)
    try:
        if eqn.primitive.name not in OPAQUE:
            return bind(eqn, values, params)
    except (TypeError, ValueError, NotImplementedError):
        pass  # the operation does not support float32
    lowered = [down(x, var) for x, var in zip(values, eqn.invars, strict=True)]
    return [up(x, None) for x in bind(eqn, lowered, eqn.params)]


def _is_algorithm(precision: Any) -> bool:
    return "Algorithm" in type(precision).__name__

"""An equation of a program, computed in another dtype."""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from gainstage._base._jax import JaxprEqn, Literal, Var, is_differentiated
from gainstage._programs.backward_at import is_small_float
from gainstage._programs.jaxprs import OPAQUE, AnyJaxpr, bind_shared, inner, open_jaxpr

HALF = frozenset(
    map(jnp.dtype, ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                    "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4"))
)  # fmt: skip
Atom = Var | Literal  # an operand of an equation
SCATTER: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "scatter": lambda a, b: b, "scatter-add": jax.lax.add, "scatter_add": jax.lax.add,
        "scatter-sub": jax.lax.sub, "scatter-mul": jax.lax.mul, "scatter_mul": jax.lax.mul,
        "scatter-min": jax.lax.min, "scatter-max": jax.lax.max,
        "scatter_min": jax.lax.min, "scatter_max": jax.lax.max,
    }
)  # fmt: skip


def is_half(x: object) -> bool:
    """Whether an array, or its description, has numbers of less than 32 bits."""
    return getattr(x, "dtype", None) in HALF


def has_small_floats(program: AnyJaxpr) -> bool:
    """Whether something in a program is in float16 or float8, whose range ends far below that of
    float32 and bfloat16."""
    return any(map(is_small_float, dtypes_and_names(program)[0]))


def dtypes_and_names(program: AnyJaxpr) -> tuple[set[Any], set[str]]:
    """The dtypes of all that is in a program, and the names of its primitives."""
    todo, dtypes, names = [program], set[Any](), set[str]()
    while todo:
        each: Any = todo.pop()
        each = getattr(each, "jaxpr", each)  # as `open_jaxpr`
        values: list[Any] = [*each.invars, *each.constvars]
        for eqn in each.eqns:
            names.add(eqn.primitive.name)
            values += eqn.invars
            values += eqn.outvars
            held = (isinstance(p, tuple | list) or hasattr(p, "eqns") for p in eqn.params.values())
            todo += inner(eqn) if any(held) else ()
        dtypes |= {getattr(v.aval, "dtype", None) for v in values}
    return dtypes, names


def is_float32(variable: Atom) -> bool:
    """Whether an operand or a result is float32 in the program."""
    return getattr(variable.aval, "dtype", None) == np.float32


def is_floating(variable: Atom) -> bool:
    """Whether an operand or a result is a floating number, and no integer or boolean."""
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def converted(x: Any, dtype: np.dtype) -> jax.Array:
    """An array in a dtype. JAX differentiates the conversion once, however often it is used."""
    if not isinstance(x, jax.Array):
        return jnp.asarray(x, dtype)
    if x.dtype == dtype:
        return x
    return _conversion(dtype)(x) if is_differentiated(x) else lax.convert_element_type(x, dtype)


@functools.cache
def _conversion(dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: lax.convert_element_type(x, dtype), inline=True)


def up(x: ArrayLike, var: Atom | None, dtype: DTypeLike = np.float32) -> ArrayLike:
    """Casts a half-precision operand to a wider dtype."""
    half = is_half(x) if hasattr(x, "dtype") else var is not None and is_half(var.aval)
    return jnp.asarray(x, dtype) if half else x


def down(x: ArrayLike, var: Atom) -> ArrayLike:
    """Casts an operand to its dtype in the program."""
    dtype = getattr(var.aval, "dtype", None)
    half = dtype in HALF and getattr(x, "dtype", None) != dtype
    return jnp.asarray(x, dtype) if half else x


def in_dtype(
    eqn: JaxprEqn,
    values: Sequence[ArrayLike],
    dtype: DTypeLike = np.float32,
    instead_of: Container[object] = HALF,
    *,
    is_exact: bool = False,
) -> list[Any]:
    """The results of an equation in another dtype, from operands of that dtype.

    Args:
        eqn: an equation.
        values: its operands.
        dtype: the dtype.
        instead_of: the dtypes in the program that it replaces.
        is_exact: whether its products are as exact as float32 on each device.
    """
    if eqn.primitive.name == "reduce_precision":
        return list(values)
    params = dict(eqn.params)
    if params.get("update_jaxpr") is not None and eqn.primitive.name in SCATTER:
        zero = jnp.zeros((), dtype)
        params["update_jaxpr"] = open_jaxpr(jax.make_jaxpr(SCATTER[eqn.primitive.name])(zero, zero))
    if any(getattr(v.aval, "dtype", None) in instead_of for v in eqn.invars):
        is_algorithm = _is_algorithm(params.get("precision"))
        if is_exact and "precision" in params:
            params["precision"] = (lax.Precision.HIGHEST,) * 2
        elif is_algorithm:
            params["precision"] = None
    for key in ("preferred_element_type", "new_dtype", "dtype"):
        if params.get(key) is not None and jnp.dtype(params[key]) in instead_of:
            params[key] = np.dtype(dtype)
    try:
        if eqn.primitive.name not in OPAQUE:
            return bind_shared(eqn, values, params)
    except Exception:
        pass  # it does not support this dtype, and kernels say so by errors of any kind
    lowered = [down(x, var) for x, var in zip(values, eqn.invars, strict=True)]
    return [up(x, None, dtype) for x in bind_shared(eqn, lowered)]


def _is_algorithm(precision: object) -> bool:
    return "Algorithm" in type(precision).__name__


def in_range(dtype: np.dtype, x: ArrayLike) -> bool:
    """Whether a dtype holds the sizes of all finite numbers of an array, but for 0."""
    sizes, limits = np.abs(np.asarray(x, np.float64)), jnp.finfo(dtype)
    held = (sizes == 0) | (sizes >= float(limits.tiny)) & (sizes <= float(limits.max))
    return bool((held | ~np.isfinite(sizes)).all())

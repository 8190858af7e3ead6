"""The one switch of loss scaling: the dtype of what a loss computes.

Small gradients are lost in float16 and float8, so a loss that computes in them is
multiplied by a scale. bfloat16 has the range of float32, so a loss without float16 and float8 is
differentiated as it is.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from gainstage._base._jax import ClosedJaxpr, computed_by, jaxpr_as_fun, values_in
from gainstage._base.arrays import partition
from gainstage._programs.backward_at import is_small_float
from gainstage._programs.in_dtype import dtypes_and_names, has_small_floats
from gainstage._programs.jaxprs import inner
from gainstage._programs.true_cotangents import of_no_loss
from gainstage._variables.bridge import recorded
from gainstage.transforms.models import Changeable
from gainstage.transforms.retrace import half_of


def seen_in_trace(loss: Any, given: Sequence[Any]) -> tuple[bool | None, bool]:
    """What the trace of a loss and its derivative shows, in which they were computed.

    Args:
        loss: what a function has returned.
        given: the `values_in` its arguments.

    Returns:
        Whether something in it is in float16 or float8, and whether a backward pass that a user
        has written may be in it, by a `jax.custom_vjp`. The first is None where a trace has no
        answer: outside of a compiled function, and for such a backward pass, which is in none yet.
    """
    values = values_in(loss)
    if not all(hasattr(x, "parent") for x in values):
        return None, True
    equations, inputs = computed_by(values, given)
    dtypes, names = {getattr(x, "dtype", None) for x in (*values, *inputs)}, set[str]()
    for equation in equations:
        names.add(equation.primitive.name)
        dtypes |= {getattr(x, "dtype", None) for x in equation.in_tracers}
        for part in inner(equation):
            more, others = dtypes_and_names(part)
            dtypes |= more
            names |= others
    is_written = any("custom_vjp" in name or "custom_lin" in name for name in names)
    is_small = any(map(is_small_float, dtypes))
    return (None if is_written and not is_small else is_small), is_written


def needs_scale(
    loss: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> bool:
    """Whether a loss is to be multiplied by a scale: `autocast` in float16 says so, and for any
    other loss a trace of its own, in which something may be in float16 or float8. Nothing of it is
    computed or changed.

    Args:
        loss: a function of arrays and models.
        args, kwargs: its arguments.
    """
    if half_of(loss) == "float16":
        return True
    given = tuple(args), dict(kwargs or {})
    arrays, static = partition(given)

    def results(arrays: Sequence[Any]) -> list[jax.Array]:
        args, kwargs = Changeable(given, static.combine(arrays)).tree
        with recorded(runs_now=True), of_no_loss():  # what it assigns to variables is undone
            found = jax.tree.leaves(loss(*args, **kwargs))
        return [x for x in found if isinstance(x, jax.Array)]

    try:
        with warnings.catch_warnings(action="ignore"):  # the step itself warns
            program = jax.make_jaxpr(results)(arrays)
    except Exception:  # which the step itself explains
        return True
    return is_for_scale(program, arrays)


def is_for_scale(program: ClosedJaxpr, arrays: Sequence[Any]) -> bool:
    """Whether something is in float16 or float8 in a program, or in the backward pass of a
    `jax.custom_vjp` in it."""
    dtypes, names = dtypes_and_names(program)
    if any(map(is_small_float, dtypes)):
        return True
    if not any("custom_vjp" in name for name in names):
        return False

    def backward(arrays: Sequence[Any]) -> Any:
        results, pull = jax.vjp(lambda xs: jaxpr_as_fun(program)(*xs), list(arrays))
        return pull(list(map(_cotangent, results)))

    return has_small_floats(jax.make_jaxpr(backward)(arrays))


def _cotangent(x: jax.Array) -> Any:
    """A cotangent of a result."""
    is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.ones_like(x) if is_inexact else np.zeros(x.shape, float0)

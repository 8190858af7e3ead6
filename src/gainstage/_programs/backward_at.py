"""A call whose backward pass runs on multiples of its cotangents: one function for all orders."""

# Two identities around a function, of which one multiplies cotangents and the other divides them,
# are right in first derivatives alone: what a second one sends back through the division is divided
# and never multiplied. A call that is differentiated as a whole has no such place. Its backward
# pass is written in operations that JAX differentiates, and multiplies and divides by the same.

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn
from gainstage._programs.scopes import KEEP_FLOAT32


def backward_at(fun: Callable[..., Any], factor: ArrayLike) -> Callable[..., Any]:
    """Returns `fun`, whose backward pass gets `factor` times its cotangents, and whose gradients
    are divided by it.

    It is the same function to JAX: all derivatives in reverse mode are those of `fun`, and so are
    forward-mode derivatives of these. JAX refuses `jax.jvp` of it, as of each `jax.custom_vjp`.

    Args:
        fun: a function of arrays, or of pytrees of them. It closes over nothing that is
            differentiated.
        factor: a number or a scalar array, finite and > 0. A power of two causes no rounding.
    """

    def gainstage_backward_at(factor: jax.Array, *args: Any) -> Any:
        return fun(*args)

    def forward(factor: jax.Array, *args: Any) -> tuple[Any, Any]:
        result, pull = jax.vjp(fun, *args)
        return result, (factor, pull)

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        factor, pull = kept
        with jax.named_scope(KEEP_FLOAT32):  # half precision would not hold the quotients
            raised = _times(cotangents, factor)
        grads = pull(raised)
        with jax.named_scope(KEEP_FLOAT32):
            return jnp.zeros_like(factor), *_times(grads, 1 / factor)

    call = jax.custom_vjp(gainstage_backward_at)
    call.defvjp(forward, backward)
    return lambda *args: call(jnp.asarray(factor, jnp.float32), *args)


def is_backward_at(eqn: JaxprEqn) -> bool:
    """Whether an equation is such a call, not differentiated yet."""
    if not eqn.primitive.name.startswith("custom_vjp_call"):
        return False
    about = getattr(_open(eqn.params["call_jaxpr"]), "debug_info", None)
    return str(getattr(about, "func_src_info", "")).startswith("gainstage_backward_at ")


def rebuilt_at(eqn: JaxprEqn, fun: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Makes such a call again, of another function of the same operands.

    Args:
        eqn: the call.
        fun: a function of all of its operands.
        values: the operands, pytrees with one array each.
    """
    return backward_at(fun, factor_of(eqn, values))(*values)


def factor_of(eqn: JaxprEqn, values: Sequence[Any]) -> jax.Array:
    """The factor of such a call, which is the first of its operands but for constants."""
    (factor,) = jax.tree.leaves(values[eqn.params["num_consts"]])
    return factor


def _open(program: Any) -> Any:
    return getattr(program, "jaxpr", program)


def _times(tree: Any, factor: jax.Array) -> Any:
    """The products of arrays and a factor, computed in float32 or wider, in their own dtypes."""

    def one(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):  # float0, of integers
            return x
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)

    return jax.tree.map(one, tree)

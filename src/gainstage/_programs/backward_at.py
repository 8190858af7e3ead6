"""A call whose backward pass runs on multiples of its cotangents: one function for all orders.

Around a part of a network it is a loss scale of its own. Around a function with a derivative that
a user has written, at one over the loss scale, it gives that derivative true cotangents: see
`true_cotangents.py`.
"""

# Two identities around a function, of which one multiplies cotangents and the other divides them,
# are right in first derivatives alone: what a second one sends back through the division is divided
# and never multiplied. A call that is differentiated as a whole has no such place. Its backward
# pass is written in operations that JAX differentiates, and multiplies and divides by the same.

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.dtypes import float0
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn
from gainstage._programs.scopes import DIVIDED, KEEP_FLOAT32, MULTIPLIED, SELF_SCALED

OWN_DERIVATIVE = frozenset(("custom_vjp_call", "custom_vjp_call_jaxpr"))


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

    def forward(factor: Any, *args: Any) -> tuple[Any, Any]:
        primals, structure = jax.tree.flatten(args, is_leaf=_is_primal)
        chosen = [i for i, x in enumerate(primals) if x.perturbed and is_inexact(x.value)]

        def of_chosen(*variables: Any) -> Any:
            values = [x.value for x in primals]
            for i, x in zip(chosen, variables, strict=True):
                values[i] = x
            return fun(*jax.tree.unflatten(structure, values))

        result, pull = jax.vjp(of_chosen, *(primals[i].value for i in chosen))
        return result, (factor.value, pull, _Places(tuple(chosen), len(primals), structure))

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        factor, pull, places = kept
        cotangents = jax.tree.map(_with_zeros, cotangents, is_leaf=_is_symbolic)
        with jax.named_scope(MULTIPLIED):
            cotangents = _by_factor(cotangents, factor)
        grads = pull(cotangents)
        with jax.named_scope(DIVIDED):
            grads = _by_factor(grads, 1 / factor)
        return None, *places.filled(grads)

    call = jax.custom_vjp(gainstage_backward_at)
    call.defvjp(forward, backward, symbolic_zeros=True)
    return lambda *args: call(jnp.asarray(factor, jnp.float32), *args)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Places:
    """Which of the arrays in a pytree are differentiated."""

    chosen: tuple[int, ...]
    count: int
    structure: Any

    def filled(self, grads: Sequence[Any]) -> Any:
        """The pytree with these gradients, and None for the others."""
        each = dict(zip(self.chosen, grads, strict=True))
        return jax.tree.unflatten(self.structure, [each.get(i) for i in range(self.count)])


def _is_primal(x: object) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _is_symbolic(x: object) -> bool:
    return isinstance(x, SymbolicZero)


def _with_zeros(x: Any) -> Any:
    """A cotangent as an array."""
    if not _is_symbolic(x):
        return x
    return np.zeros(x.shape, float0) if x.dtype == float0 else jnp.zeros(x.shape, x.dtype)


def is_backward_at(eqn: JaxprEqn) -> bool:
    """Whether an operation with its own derivative is such a call, not differentiated yet."""
    about = getattr(open_program(eqn.params["call_jaxpr"]), "debug_info", None)
    return str(getattr(about, "func_src_info", "")).startswith("gainstage_backward_at ")


def factor_of(eqn: JaxprEqn, values: Sequence[Any]) -> jax.Array:
    """The factor of such a call, which is the first of its operands but for constants."""
    (factor,) = jax.tree.leaves(values[eqn.params["num_consts"]])
    return factor


def is_small_float(dtype: Any) -> bool:
    """Whether a dtype, or None, is float16, float8 or another one of a small range."""
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_floating and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.bfloat16).maxexp


def is_inexact(x: Any) -> bool:
    """Whether an array has a derivative."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def open_program(program: Any) -> Any:
    """A program without its constants."""
    return getattr(program, "jaxpr", program)


@jax.named_scope(SELF_SCALED)
@jax.named_scope(KEEP_FLOAT32)  # half precision would not hold the quotients
def _by_factor(tree: Any, factor: jax.Array) -> Any:
    """The products of arrays and a factor, computed in float32 or wider, in their own dtypes."""

    def one(x: Any) -> Any:
        if not is_inexact(x):  # float0, of integers
            return x
        wide = np.result_type(x.dtype, np.float32)
        return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)

    return jax.tree.map(one, tree)

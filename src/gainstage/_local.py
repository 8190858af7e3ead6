"""A scale of its own for a part of a network."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._core import checks
from gainstage._core.gradients import float32_or_wider


def locally_scaled(fun: Callable[..., Any], scale: Any) -> Callable[..., Any]:
    """`fun`, whose backward pass is multiplied by one more scale, and divided by it behind.

    The gradients are the same, but for what underflows or overflows on the way: a part of a network
    whose gradients are smaller or larger than those of all others gets a scale that suits it, while
    the loss scale suits the others. What comes in from behind should not have been lost before: let
    `fun` return float32 if it is that small. What goes out in front, in float16, has the loss scale
    alone again; the float32 gradient of a parameter that is cast inside of `fun` has lost nothing.

    Args:
        fun: a function of arrays, or pytrees of them.
        scale: a number > 0 and at most `2**126`, or such a scalar array; a power of two changes no
            digit.

    Returns:
        A function of the arguments of `fun`, by position.

    Raises:
        TypeError, ValueError: `scale` is no such number.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import gainstage as gs
        >>> def layer(w, x):
        ...     return w.astype(jnp.float16) * x
        >>> def loss(w, layer):
        ...     y = layer(w, jnp.float16(2.0**-15))
        ...     return (y.astype(jnp.float32) * 2.0**-10)
        >>> w = jnp.float32(1.0)
        >>> print(jax.grad(loss)(w, layer), jax.grad(loss)(w, gs.locally_scaled(layer, 2.0**20)))
        0.0 2.9802322e-08

    Source: Zhao et al., 2019, arXiv:1910.12385 (adaptive loss scaling, a scale for each layer).
    """

    if not isinstance(scale, jax.Array):
        scale = checks.loss_scale("scale", scale)

    def scaled(*args: Any) -> Any:
        factor = jnp.asarray(scale, jnp.float32)
        # What `fun` closes over, a variable's value say, is an argument like the others.
        leaves, structure = jax.tree.flatten(args)
        arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

        def of_arrays(*values: Any) -> Any:
            chosen = dict(zip(arrays, values, strict=True))
            whole = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
            return fun(*structure.unflatten(whole))

        converted, closed_over = jax.closure_convert(of_arrays, *(leaves[i] for i in arrays))
        values = _times([*(leaves[i] for i in arrays), *closed_over], 1 / factor)
        return _times(converted(*values), factor)

    return scaled


def _times(tree: Any, factor: jax.Array) -> Any:
    """The same arrays, whose gradients are multiplied by a factor."""

    def one(x: Any) -> Any:
        inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        return _passed(jnp.asarray(x), factor) if inexact else x

    return jax.tree.map(one, tree)


@jax.custom_vjp
def _passed(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x


def _forward(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, factor


def _backward(factor: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    is_complex = jnp.iscomplexobj(gradient)
    product = (
        gradient if is_complex else gradient.astype(float32_or_wider(gradient.dtype))
    ) * factor
    return product.astype(gradient.dtype), jnp.zeros_like(factor)


_passed.defvjp(_forward, _backward)

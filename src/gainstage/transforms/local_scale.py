"""A separate loss scale for one part of a network."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base.arrays import partition
from gainstage._scaling.gradients import float32_or_wider
from gainstage._variables.types import P, PyTree, R, Scalar, Tree
from gainstage.transforms import nnx_objects
from gainstage.transforms.marks import marked


def locally_scaled(fun: Callable[P, R], scale: Scalar) -> Callable[P, R]:
    """Multiplies the cotangents of `fun` by `scale` and divides them again at its inputs.

    The gradients are the same, except for underflow and overflow on the way. Use it for a part of a
    network whose gradients are much smaller or larger than the others: the loss scale then suits
    the others. The cotangent of the result must not have underflowed already; if it is that small,
    let `fun` return float32. The cotangents of float16 inputs have the loss scale alone again, and
    may underflow. A float32 parameter that `fun` casts loses nothing.

    A gradient inside of a loss, such as a penalty or the inner step of MAML, is scaled by nothing
    else: `jax.grad(locally_scaled(part, 2.0**15))`.

    Args:
        fun: a function of arrays, or of pytrees of them.
        scale: a number or scalar array, > 0 and at most `2**126`. A power of two causes no
            rounding.

    Returns:
        A function of the positional arguments of `fun`.

    Raises:
        TypeError, ValueError: `scale` is not such a number.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import gainstage as gs
        >>> def layer(w, x):
        ...     return w.astype(jnp.float16) * x
        >>> def loss(w, layer):
        ...     y = layer(w, jnp.float16(2.0**-15))
        ...     return (y.astype(jnp.float32) * 2.0**-10)
        >>> w = jnp.float32(1.0)
        >>> scaled = gs.transforms.locally_scaled(layer, 2.0**20)
        >>> print(jax.grad(loss)(w, layer), jax.grad(loss)(w, scaled))
        0.0 2.9802322e-08

    Source: Zhao et al., 2019, arXiv:1910.12385 (adaptive loss scaling, a scale for each layer).
    """
    untyped: Callable[..., R] = fun
    if not isinstance(scale, jax.Array):
        scale = checks.loss_scale("scale", scale)

    def scaled(*args: PyTree) -> R:
        factor = jnp.asarray(scale, jnp.float32)
        # What `fun` closes over, such as a variable's value, is an argument like the others.
        arrays, static = partition(args)

        def of_arrays(*values: ArrayLike) -> tuple[R, PyTree]:
            own = nnx_objects.sharing_as(args, static.combine(values))
            before = nnx_objects.values_in(own)
            return untyped(*own), nnx_objects.changes(own, before)

        converted, closed_over = jax.closure_convert(of_arrays, *arrays)
        result, changed = converted(*_times([*arrays, *closed_over], 1 / factor))
        nnx_objects.change(args, changed)
        if not any(map(jnp.shape, jax.tree.leaves(result))):  # a loss, and not a part of a network
            result = jax.tree.map(_scales_itself, result)
        return _times(result, factor)

    result: Callable[..., R] = scaled  # it takes no keywords, which a `ParamSpec` cannot say
    return result


def _times(tree: Tree, factor: jax.Array) -> Tree:
    """The same arrays; their cotangents are multiplied by a factor."""

    def one(x: ArrayLike) -> ArrayLike:
        inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        return _passed(jnp.asarray(x), factor) if inexact else x

    return jax.tree.map(one, tree)


@jax.custom_vjp
def _scales_itself(x: ArrayLike) -> ArrayLike:
    return x


_scales_itself.defvjp(lambda x: (x, None), lambda _, g: (marked(g, "own"),))


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

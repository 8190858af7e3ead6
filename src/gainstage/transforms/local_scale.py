"""A separate loss scale for one part of a network."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base.arrays import partition
from gainstage._programs.backward_at import backward_at
from gainstage._variables.types import P, PyTree, R, Scalar
from gainstage.transforms.marks import marked
from gainstage.transforms.models import Changeable, apply_changes


def locally_scaled(fun: Callable[P, R], scale: Scalar) -> Callable[P, R]:
    """Multiplies the cotangents of `fun` by `scale` and divides them again at its inputs.

    The gradients are the same, except for underflow and overflow on the way. Use it for a part of a
    network whose gradients are much smaller or larger than the others: the loss scale then suits
    the others. The cotangent of the result must not have underflowed already; if it is that small,
    let `fun` return float32. The cotangents of float16 inputs have the loss scale alone again, and
    may underflow. A float32 parameter that `fun` casts loses nothing.

    A gradient inside of a loss, such as a penalty or the inner step of MAML, is scaled by nothing
    else: `jax.grad(locally_scaled(part, 2.0**15))`. `gainstage.xray` of a step says which factor
    fits. Its derivatives of all orders are those of
    `fun`, with regard to all arguments and to what `fun` closes over. `jax.jvp` of it is refused,
    as of each function with a `jax.custom_vjp`.

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
        # What `fun` closes over, such as a variable's value, is an argument like the others.
        arrays, static = partition(args)

        def of_arrays(*values: ArrayLike) -> tuple[R, PyTree]:
            copy = Changeable(args, static.combine(values))
            result = untyped(*copy.tree)
            if not any(map(jnp.shape, jax.tree.leaves(result))):  # a loss, not a part of a network
                result = jax.tree.map(_scales_itself, result)
            return result, copy.changes()

        converted, closed_over = jax.closure_convert(of_arrays, *arrays)
        result, changed = backward_at(converted, scale)(*arrays, *closed_over)
        apply_changes(args, changed)
        return result

    result: Callable[..., R] = scaled  # it takes no keywords, which a `ParamSpec` cannot say
    return result


@jax.custom_vjp
def _scales_itself(x: ArrayLike) -> ArrayLike:
    return x


_scales_itself.defvjp(lambda x: (x, None), lambda _, g: (marked(g, "own"),))

"""Sums of gradients over devices, which half precision may be too small for."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gainstage.gradients import measure, widen


def mean_gradients(grads: Any, axis_name: str | Sequence[str]) -> Any:
    """The mean of gradients over the devices of a mesh axis, summed in float32.

    For data parallelism by `jax.shard_map`, between the backward pass and the step. A sum in
    float16 over n devices overflows log2(n) bits earlier than its terms do, and rounds n times.
    Where JAX puts the sums in by itself (on `Auto` and `Explicit` meshes), it adds in the dtype of
    the product that makes the gradient; ask there for `preferred_element_type=jnp.float32`.

    Args:
        grads: a pytree of arrays of any floating dtype, one of each on every device. Each device's
            loss must be differentiated by itself: with `check_vma=True` mark the parameters with
            `jax.lax.pcast(params, axis_name, to="varying")` first, else JAX has added already.
        axis_name: the axis, or axes, of the mesh.

    Returns:
        The means, in float32 or wider.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gainstage import distributed
        >>> halves = jnp.full(2, 60000, jnp.float16)
        >>> grads = jax.vmap(lambda g: distributed.mean_gradients(g, "data"), axis_name="data")
        >>> print(grads(halves))
        [60000. 60000.]

    Source: https://github.com/jax-ml/jax/issues/27496.
    """
    return jax.tree.map(lambda g: lax.pmean(g, axis_name), widen(grads))


def headroom(grads: Any, dtype: Any = jnp.float16, summed_over: int = 1) -> jax.Array:
    """How many bits the loss scale could still grow before a gradient overflows.

    Args:
        grads: a pytree of scaled gradients, or of true ones for the largest scale itself.
        dtype: the dtype that the backward pass computes in.
        summed_over: the number of devices over which gradients are summed in that dtype, each of
            which may hold as large a part of the same sign; 1 if they are summed in float32.

    Returns:
        log2 of the largest number over the largest gradient, less log2(`summed_over`): a float32
        scalar, negative where there is none left, inf if all gradients are 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from gainstage import distributed
        >>> grads = jnp.array([-16.0, 2.0])
        >>> print(distributed.headroom(grads).round(1))
        12.0
    """
    largest = measure(["max_abs"], widen(grads))["max_abs"]
    limit = math.log2(float(jnp.finfo(dtype).max)) - math.log2(summed_over)
    return limit - jnp.log2(largest)

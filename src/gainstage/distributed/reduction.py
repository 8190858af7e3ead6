"""Sums of gradients over devices, which half precision may be too small for."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gainstage._core.gradients import upcast
from gainstage._core.sharding import typed_sharding
from gainstage._core.stats import measure


def sum_in_float32(params: Any, axis_name: str | Sequence[str]) -> Any:
    """The parameters, so marked that JAX adds up their gradients over devices in float32.

    For data parallelism on a mesh of Explicit axes; call it inside of the loss, before parameters
    are cast to half precision. JAX puts the sums in by itself, and without the mark it adds in the
    dtype of the product that makes a gradient: a sum in float16 over n devices overflows log2(n)
    bits earlier than its terms do, and rounds n times. The products stay in half precision.

    Args:
        params: a pytree of arrays, replicated over the axis.
        axis_name: the axis, or axes, of the mesh over which the batch is divided.

    Returns:
        The same values, in the same dtypes.

    Raises:
        ValueError: an array that is not on a mesh of Explicit axes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gainstage import distributed
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> w = jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec()))
        >>> def loss(w):
        ...     half = distributed.sum_in_float32(w, "data").astype(jnp.float16)
        ...     return (half * half).sum().astype(jnp.float32)
        >>> print(jax.jit(jax.grad(loss))(w))
        [2. 2.]

    Source: https://github.com/jax-ml/jax/issues/27496.
    """
    axes = frozenset((axis_name,) if isinstance(axis_name, str) else axis_name)

    def mark(x: Any) -> jax.Array:
        layout = typed_sharding(x)
        if layout is None:
            raise ValueError(
                f"Expected params on a mesh of Explicit axes; got {jax.typeof(x)}. On Auto axes "
                f"ask products for preferred_element_type=jnp.float32."
            )
        spec = PartitionSpec(*layout.spec, reduced=axes)
        marked = jax.sharding.reshard(upcast(x), NamedSharding(layout.mesh, spec))
        return marked.astype(x.dtype)

    return jax.tree.map(mark, params)


def mean_gradients(grads: Any, axis_name: str | Sequence[str]) -> Any:
    """The mean of gradients over the devices of a mesh axis, summed in float32.

    For data parallelism by `jax.shard_map`, between the backward pass and the step.

    Args:
        grads: a pytree of arrays of any floating dtype, one of each on every device. Each device's
            loss must be differentiated by itself: with `check_vma=True` mark the parameters with
            `jax.lax.pcast(params, axis_name, to="varying")` first, else JAX has added already.
        axis_name: the axis, or axes, of the mesh.

    Returns:
        The means, in float32 or wider.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gainstage import distributed
        >>> halves = jnp.full(2, 60000, jnp.float16)
        >>> grads = jax.vmap(lambda g: distributed.mean_gradients(g, "data"), axis_name="data")
        >>> print(grads(halves))
        [60000. 60000.]

    Source: `jax.lax.pmean`; jax-ml/jax issue 27496.
    """
    return jax.tree.map(lambda g: lax.pmean(g, axis_name), upcast(grads))


def headroom(grads: Any, dtype: Any = jnp.float16, summed_over: int = 1) -> jax.Array:
    """How many bits the loss scale could still grow before a gradient overflows.

    Args:
        grads: a pytree of scaled gradients, or of true ones for the largest scale itself.
        dtype: the dtype that the backward pass computes in.
        summed_over: the number of devices over which gradients are summed in that dtype, each of
            which may hold as large a part of the same sign; 1 if they are summed in float32.

    Returns:
        log2 of the largest number over the largest gradient, less log2(`summed_over`): a float32
        scalar, negative where there is none left, -inf if a gradient is inf, inf if all are 0.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gainstage import distributed
        >>> grads = jnp.array([-16.0, 2.0])
        >>> print(distributed.headroom(grads).round(1))
        12.0
    """
    measured = measure(["max_abs", "any_inf"], upcast(grads), False)
    largest = jnp.where(measured["any_inf"], jnp.inf, measured["max_abs"])
    limit = math.log2(float(jnp.finfo(dtype).max)) - math.log2(summed_over)
    return limit - jnp.log2(largest)

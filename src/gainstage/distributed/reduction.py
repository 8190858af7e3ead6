"""Sums of gradients over devices, which can overflow or round in half precision."""

from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gainstage._base.warn import warn
from gainstage._scaling.gradients import upcast
from gainstage._variables.sharding import knows_what_varies, typed_sharding, varying_axes
from gainstage._variables.types import Tree


def sum_in_float32(params: Tree, axis_name: str | Sequence[str]) -> Tree:
    """Marks parameters so that JAX sums their gradients over devices in float32.

    Use it for data parallelism on a mesh of Explicit axes. Call it inside the loss, before
    parameters are cast to half precision. JAX inserts the sums itself. Without the mark it sums in
    the dtype of the product that computes the gradient. A float16 sum over n devices overflows
    log2(n) bits earlier than its terms, and rounds n times. The products stay in half precision.

    Args:
        params: a pytree of arrays, replicated over the axis.
        axis_name: the mesh axis, or axes, over which the batch is sharded.

    Returns:
        The same values, in the same dtypes.

    Raises:
        ValueError: an array is not on a mesh of Explicit axes.

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

    def mark(x: jax.Array) -> jax.Array:
        sharding = typed_sharding(x)
        if sharding is None:
            raise ValueError(
                f"Expected params on a mesh of Explicit axes; got {jax.typeof(x)}. On Auto axes, "
                f"set preferred_element_type=jnp.float32 in products."
            )
        spec = PartitionSpec(*sharding.spec, reduced=axes)
        marked = jax.sharding.reshard(upcast(x), NamedSharding(sharding.mesh, spec))
        return marked.astype(x.dtype)

    return jax.tree.map(mark, params)


def mean_gradients(grads: Tree, axis_name: str | Sequence[str]) -> Tree:
    """Returns the mean of gradients over the devices of a mesh axis, summed in float32.

    Use it for data parallelism with `jax.shard_map`, between the backward pass and the step.

    Args:
        grads: a pytree of arrays of any floating dtype, one of each on every device. Differentiate
            each device's own loss: with `check_vma=True` mark the parameters with
            `jax.lax.pcast(params, axis_name, to="varying")`, or JAX sums the gradients itself.
        axis_name: the mesh axis, or axes.

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
    mesh = jax.sharding.get_abstract_mesh()
    axes = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    ours = {axis for axis in axes.intersection(mesh.manual_axes) if lax.axis_size(axis) > 1}
    found = frozenset().union(*map(varying_axes, jax.tree.leaves(grads)))
    if ours and not ours & found and knows_what_varies(mesh):
        name = repr(axis_name)
        warn(
            f"mean_gradients has no effect here: the gradients do not vary over {name}, as JAX has "
            f"already summed them. If each device has its own loss, they are too large. "
            f"Differentiate at params = jax.lax.pcast(params, {name}, to='varying'). If the loss "
            f"is a jax.lax.pmean, leave mean_gradients out."
        )
    return jax.tree.map(lambda g: lax.pmean(g, axis_name), upcast(grads))

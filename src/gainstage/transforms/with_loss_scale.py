"""Parameters that carry their loss scale into a trainer that differentiates by itself."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gainstage._base import checks
from gainstage._base.arrays import partition
from gainstage._base.checks import LARGEST, SMALLEST, brief
from gainstage._variables.sharding import replicated_like, varying_like
from gainstage._variables.types import PyTree
from gainstage.transforms import models, nnx_objects
from gainstage.transforms.loss_scaled_state import LossScaledState
from gainstage.transforms.models import SCALE, Carrier

# What one retry adds to the gradient of the scale: no norm or sum of a clipping transformation
# changes by it.
RETRIED = -(2.0**-100)


def with_loss_scale(params: PyTree, scale: float = 2.0**15) -> PyTree:
    """Returns parameters that carry the loss scale, for a trainer that differentiates by itself.

    Give the trainer the parameters, `self_scaled(loss_fn)` and `loss_scaled(tx)`. The loss reads
    the scale among the parameters, and the transformation updates it there: the scale adapts, as
    in `train_step`. A step that was retried is applied, and lowers the scale for the next one.

    - Arrays and pytrees become a `WithLossScale`, and Equinox models a module with the same two
      attributes: evaluate with `.params`. `loss_fn` is called with the parameters alone.
    - A model of Flax NNX gets the attribute `loss_scale`, an `nnx.Param`, and is returned itself.
    - What a trainer does to the scale, such as weight decay or a cast, is undone by the next
      update, because the state of `loss_scaled` has the scale too. A step ignores a non-finite
      scale, 0 and a negative one: it starts at the `scale` of `self_scaled`.

    Args:
        params: the parameters: arrays, a pytree of them, or a model. All parameters of one loss
            carry one scale.
        scale: the first scale, > 0 and at most `2**126`. If `loss_scaled` is given a rule, the
            first update replaces it by the scale of the rule.

    Raises:
        TypeError: `scale` is not a number.
        ValueError: `scale` is out of range, `params` carry a scale already, or a model has another
            attribute `loss_scale`.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp, optax
        >>> def loss_fn(w, x):
        ...     return (w.astype(jnp.float16) * x).astype(jnp.float32) ** 2
        >>> params, loss_fn = gs.with_loss_scale(jnp.float32(1.0)), gs.self_scaled(loss_fn)
        >>> tx = gs.loss_scaled(optax.sgd(0.25))
        >>> opt_state = tx.init(params)
        >>> grads = jax.grad(loss_fn)(params, jnp.float16(1.0))  # overflows, and is retried
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> print(params.params, params.loss_scale)
        0.5 16384.0

    Source: Micikevicius et al., 2018, arXiv:1710.03740.
    """
    scale = checks.loss_scale("scale", scale)
    if models.scales_in(params):
        raise ValueError("params carry a loss scale already. Call with_loss_scale once.")
    leaf, everywhere = jnp.float32(scale), replicated_like(params)
    leaf = leaf if everywhere is None else jax.device_put(leaf, everywhere)
    kind = models.library(params)
    if kind != models.NNX:
        return models.carrier_for(kind)(params, leaf)
    if hasattr(params, SCALE):
        raise ValueError(
            f"Expected a model without the attribute {SCALE!r}; got {brief(params.loss_scale)}. "
            f"Rename it: with_loss_scale puts the scale there."
        )
    return models.set_scale(params, leaf)


def places_of_scales(arguments: PyTree) -> list[int]:
    """Which arrays of the arguments of a loss are loss scales, as indices in their `partition`.

    Raises:
        TypeError: a scale is not a scalar array.
    """
    count, places = 0, []
    for node in jax.tree.leaves(arguments, is_leaf=models.carries_scale):
        arrays = partition(node)[0]
        count += len(arrays)
        if models.carries_scale(node):
            _scalar_in(node)
            places.append(count - 1)
    return places


def places_beside(arguments: PyTree, place: int) -> range:
    """Which arrays the argument of a loss has whose array at this place is a loss scale."""
    args, kwargs = arguments
    end = 0
    for part in (*args, *(kwargs[name] for name in sorted(kwargs))):
        start, end = end, end + len(partition(part)[0])
        if place < end:
            return range(start, end)
    return range(0)


def arguments_without_scales(arguments: PyTree) -> PyTree:
    """The arguments of a loss, with the parameters of each `WithLossScale` in its place."""

    def stops(node: object) -> bool:
        return isinstance(node, Carrier) or nnx_objects.is_node(node)

    return jax.tree.map(
        lambda node: node.params if isinstance(node, Carrier) else node,
        arguments,
        is_leaf=stops,
    )


def usable(scale: jax.Array, otherwise: float | jax.Array) -> jax.Array:
    """A scale that was among the parameters, in float32; or another, if no loss can have it."""
    scale = jnp.asarray(scale, jnp.float32)
    known = (scale > 0) & jnp.isfinite(scale)
    return jnp.where(known, jnp.clip(scale, SMALLEST, LARGEST), otherwise)


def reported(retries: jax.Array, scale: jax.Array) -> jax.Array:
    """The gradient of a scale, by which `loss_scaled` learns how often a step was retried."""
    return varying_like((RETRIED * retries).astype(scale.dtype), [scale])


class WithLossScaleState(LossScaledState):
    """The state of `loss_scaled` for parameters that carry the loss scale."""

    __slots__ = ()


def scale_at_first(params: PyTree) -> jax.Array | None:
    """The scale that parameters carry before the first step, None if they carry none.

    Raises:
        TypeError: it is not a scalar array.
        ValueError: there are several, or it is the scale of a part of the parameters.
    """
    found = models.scales_in(params)
    if not found:
        return None
    state = getattr(params, SCALE, None)
    if len(found) > 1 or not (found[0] is params or models.carries_scale(state)):
        raise ValueError(
            f"Expected one loss scale for all params; got {len(found)}, inside of params. One loss "
            f"has one scale: call with_loss_scale with all parameters that tx.init gets."
        )
    return _scalar_in(found[0])


class Carried(NamedTuple):
    """The loss scale of parameters in an update, apart from them."""

    grads: PyTree  # with the gradient of the scale
    place: int  # of the scale among the leaves
    scale: jax.Array  # among the parameters
    repeated: jax.Array | None  # whether the step was retried

    def dropped(self, shardings: Sequence[Any]) -> list[Any]:
        """The shardings, one per leaf, without that of the scale."""
        return [s for i, s in enumerate(shardings) if i != self.place]

    def joined(self, updates: PyTree, scale: jax.Array) -> PyTree:
        """The updates of the parameters and of the scale, which becomes `scale`."""
        largest = 2.0 ** (jnp.finfo(self.scale.dtype).maxexp - 1)  # float16 has no 2**16
        scale = jnp.minimum(scale, largest)
        return models.with_scale(self.grads, updates, scale - self.scale.astype(jnp.float32))


def carried(
    grads: PyTree, state: LossScaledState, params: PyTree
) -> tuple[PyTree, PyTree, Carried]:
    """Gradients and parameters without the loss scale that they carry, and the scale.

    Raises:
        TypeError: a scale is not a scalar array.
        ValueError: not all of gradients, state and parameters carry a scale.
    """
    if models.library(params):
        params = models.chosen(params, grads)
    trees = {"gradients": grads} if params is None else {"gradients": grads, "params": params}
    for name, tree in trees.items():
        if isinstance(tree, Carrier) or (isinstance(tree, Mapping) and SCALE in tree):
            continue
        raise ValueError(
            f"opt_state was made for parameters with a loss scale; the {name} have none. "
            f"Differentiate with respect to what with_loss_scale returned, and pass that on."
        )
    if not isinstance(state, WithLossScaleState):
        raise ValueError(
            "The gradients carry a loss scale; opt_state was made for parameters without one. "
            "Start with opt_state = tx.init(with_loss_scale(params))."
        )
    paths, _ = jax.tree_util.tree_flatten_with_path(grads, is_leaf=lambda x: x is None)
    names = [jax.tree_util.keystr(path[:1], simple=True) for path, _ in paths]
    place = len(names) - 1 - names[::-1].index(SCALE)
    grads_alone, own = models.without_scale(grads)
    repeated = None if own is None else _scalar_in(own) < 0
    scale = state.loss_scale.scale
    if params is not None:
        params, own = models.without_scale(params)
        scale = jnp.asarray(_scalar_in(own))
    return grads_alone, params, Carried(grads, place, scale, repeated)


def _scalar_in(scale: Any) -> Any:
    """The loss scale that a node carries, which is in a variable, or is an array itself."""
    if isinstance(scale, Carrier):
        scale = scale.loss_scale
    scale = scale.get_value() if hasattr(scale, "get_value") else scale
    is_scalar = getattr(scale, "shape", None) == ()
    if not is_scalar or not jnp.issubdtype(jnp.result_type(scale), jnp.floating):
        raise TypeError(
            f"Expected a scalar floating array for the loss scale among the parameters; got "
            f"{brief(scale)}. with_loss_scale makes it."
        )
    return scale

"""The use of an update: parameters, and other state, stay as they are if the step was skipped."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from gainstage._base.checks import brief
from gainstage._scaling import gradients
from gainstage._variables.sharding import typed_like
from gainstage._variables.types import OptState, PyTree, Scalar, Structure, Tree
from gainstage._variables.variable import Variable
from gainstage.transforms.loss_scale_state import applied_in
from gainstage.transforms.marks import marked
from gainstage.transforms.models import kind_of


def step_was_applied(opt_or_state: OptState) -> jax.Array:
    """Returns whether the last step was applied: a bool scalar, True before the first step.

    Use it in your own schedule or counter; `select_if_applied` selects whole pytrees by it. With
    `optax.MultiSteps` it is True for every finite microbatch: `gradient_step` counts the updates.

    Args:
        opt_or_state: a pytree that contains exactly one state of `with_loss_scale`, as `update`
            returned it; or a `LossScaleOptimizer(..., telemetry=True)` after its `apply`.

    Raises:
        TypeError: the optimizer has no loss scale.
        ValueError: the optimizer has no `telemetry=True`, or there is not one loss-scale state.
    """
    applied = applied_in(opt_or_state)
    if isinstance(applied, Variable):
        return applied.value()
    return marked(jnp.asarray(applied), "decision")


def select_if_applied(new: Tree, old: PyTree, opt_or_state: OptState) -> Tree:
    """Returns `new` if the last step was applied, and `old`, bit for bit, if it was skipped.

    Use it for what a step changes besides parameters and optimizer state: running means of batch
    normalisation, moving averages, random states. `Optimizer.minimize` does this itself.
    `gainstage.train_step` does it for what is part of the model, not for what the loss returns as
    aux.

    Args:
        new: a pytree of arrays, after the step.
        old: the same pytree before the step.
        opt_or_state: as for `step_was_applied`, after the step.

    Returns:
        A pytree with the structure of `new` and the dtypes of `old`.

    Raises:
        TypeError: the optimizer has no loss scale.
        ValueError: `new` and `old` differ in structure or hold the same variables, the optimizer
            has no `telemetry=True`, or there is not one loss-scale state.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> tx = gs.with_loss_scale(optax.sgd(0.5))
        >>> params, mean = jnp.float32(1.0), jnp.float32(0.0)
        >>> opt_state = tx.init(params)
        >>> for x in (2.0, jnp.nan):
        ...     loss, grads = gs.value_and_grad(lambda w: w * x, opt_state)(params)
        ...     updates, opt_state = tx.update(grads, opt_state, params)
        ...     params = gs.transforms.apply_updates(params, updates, opt_state)
        ...     mean = gs.transforms.select_if_applied(0.9 * mean + 0.1 * x, mean, opt_state)
        >>> print(params, mean)
        0.0 0.2
    """
    return selected(new, old, step_was_applied(opt_or_state))


def selected(new: Tree, old: PyTree, applied: jax.Array) -> Tree:
    """`select_if_applied` by the decision itself."""
    boxes = [jax.tree.leaves(tree, is_leaf=_is_box) for tree in (new, old)]
    structure: Structure = jax.tree.structure(new)
    if structure != jax.tree.structure(old):
        raise ValueError(
            f"Expected old in the structure of new; got {brief(jax.tree.structure(old))} for old "
            f"and {brief(structure)} for new."
        )
    if any(n is o and _is_box(n) for n, o in zip(*boxes, strict=False)):
        raise ValueError(
            "Expected old to be a copy, made before the step; got the same variables as in new. "
            "In NNX: old = jax.tree.map(jnp.copy, nnx.state(model, ...))."
        )

    def select(n: Scalar, o: Scalar) -> jax.Array:
        n, o = (x.value() if isinstance(x, Variable) else jnp.asarray(x) for x in (n, o))
        n = typed_like(n if n.dtype == o.dtype else n.astype(o.dtype), o)
        return jnp.where(applied, n, o)

    return jax.tree.map(select, new, old)


def _is_box(x: object) -> bool:
    """Whether a node is a variable (ours or of Flax NNX), which a step changes in place."""
    return isinstance(x, Variable) or hasattr(x, "get_value")


def apply_updates(params: Tree, updates: PyTree, opt_state: OptState) -> Tree:
    """`optax.apply_updates`, but a skipped step returns the parameters bit for bit.

    Subnormal weights survive, although a CPU flushes them to 0 when it adds -0.0. Updates that a
    transformation behind `with_loss_scale` makes on a skipped step are dropped. A parameter does
    not change if its update is None or float0.

    Args:
        params: a pytree of parameters, or a model. An NNX model is changed in place.
        updates: their updates, as `update` returned them.
        opt_state: as for `value_and_grad`, as `update` returned it.

    Raises:
        ValueError: `opt_state` has no loss-scale state, or several.

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(gs.with_loss_scale(optax.sgd(0.5)), optax.add_decayed_weights(-0.5))
        >>> params = jnp.float32(1.0)
        >>> opt_state = tx.init(params)
        >>> loss, grads = gs.value_and_grad(lambda w: w * jnp.nan, opt_state)(params)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> print(updates, gs.transforms.apply_updates(params, updates, opt_state))
        -0.5 1.0
    """
    return updated(params, updates, step_was_applied(opt_state))


def updated(params: Tree, updates: PyTree, applied: jax.Array) -> Tree:
    """`apply_updates` by the decision itself."""

    def one(param: jax.Array | None, update: jax.Array | None) -> jax.Array | None:
        if param is None or update is None or getattr(update, "dtype", None) == float0:
            return param
        param, update = jnp.asarray(param), jnp.asarray(update)
        if jnp.issubdtype(param.dtype, jnp.floating) and jnp.issubdtype(update.dtype, jnp.floating):
            # In float32 or wider, without promotion: float8 has none, and it may be strict.
            wide = np.result_type(*map(gradients.float32_or_wider, (param.dtype, update.dtype)))
            new = (param.astype(wide) + update.astype(wide)).astype(param.dtype)
        else:
            new = (param + update).astype(param.dtype)
        new = typed_like(new, param)
        return jnp.where(applied, new, param)

    return kind_of(params).mapped(one, params, updates)

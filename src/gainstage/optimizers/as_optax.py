"""Our optimizers as optax transformations: the same update, with a dictionary as its state."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gainstage._base.checks import brief
from gainstage._variables.sharding import on_mesh
from gainstage._variables.types import OptState, PyTree, Structure
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.saving import unique_names
from gainstage.optimizers._step.subclasses import check_verbs
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
from gainstage.optimizers.optimizer import Optimizer
from gainstage.transforms.loss_scaled import ScaledTransformation


def to_optax(opt: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Converts an optimizer, with its options, to an optax transformation.

    A `LossScaleOptimizer` becomes `loss_scaled`, with the same rule: compute its gradients with
    `value_and_grad`. `from_optax` does the reverse: it makes a transformation an optimizer.

    Args:
        opt: an optimizer that is not built. It is not changed and can be used again.

    Returns:
        A transformation. Its `update` needs `params`. It returns the differences between new and
        old parameters, so `optax.apply_updates` may round in the last bit.

    Raises:
        TypeError: `opt` is not an optimizer, or its class overrides `apply` or `apply_gradients`.
        ValueError: `opt` is built, or has an option that is not supported here. These are
            `loss_scale_factor` (pass a `rule`), `shard_state_over`, and a learning rate that is a
            callable of no argument; `master_weights` with loss scaling; and variables excluded from
            decay (pass names).

    Examples:
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> tx = gs.optimizers.to_optax(gs.optimizers.SGD(0.5, momentum=0.9))
        >>> params = {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        >>> print(updates["w"], list(state))
        [-0.5 -0.5] ['SGD/iteration', 'SGD/learning_rate', 'SGD/w_momentum']
    """
    if not isinstance(opt, Optimizer):
        raise TypeError(f"Expected an optimizer of gainstage; got {opt!r}.")
    if opt.built:
        raise ValueError(f"Expected {opt.name!r} not to be built before to_optax.")
    options = opt._store.in_force
    if options.loss_scale_factor is not None:
        raise ValueError(
            f"Expected {opt.name!r} without loss_scale_factor for to_optax; wrap it in "
            f"LossScaleOptimizer(..., rule=FixedLossScale(factor))."
        )
    check_verbs(opt, "to_optax", ("apply", "apply_gradients"))
    inner = opt.inner_optimizer if isinstance(opt, LossScaleOptimizer) else opt
    if inner._undecayed.variables:
        raise ValueError(
            "Expected exclude_from_weight_decay with var_names for to_optax; got variables."
        )
    if inner.shard_state_over:
        raise ValueError("Expected no shard_state_over for to_optax: you place its state yourself.")
    if inner._store.rate.is_called:
        raise ValueError(
            f"The learning rate of {inner.name!r} is a callable of no argument, which a "
            f"transformation cannot call at each step. Use a schedule or callable of the step."
        )
    inner = copy.deepcopy(inner)
    inner._store.set_options(options)  # with the wrapper's options
    if not isinstance(opt, LossScaleOptimizer):
        return _unscaled(inner)[0]
    if inner.master_weights:
        raise ValueError(
            "Expected no master_weights for to_optax of a LossScaleOptimizer; keep float32 "
            "params, and cast them in the loss."
        )
    tx, sums_in = _unscaled(inner)
    settings = opt.rule, opt.telemetry, opt.underflow_every
    scaled = ScaledTransformation(tx, *settings, clip=options.clip, sums_in=sums_in)
    return scaled.as_optax()


def _unscaled(
    optimizer: Optimizer,
) -> tuple[optax.GradientTransformationExtraArgs, Callable[[Any, Any, Any], list[Any]]]:
    """The transformation, and the accumulators in its state, as `ScaledTransformation` needs
    them."""

    def built_for(params: PyTree) -> tuple[Optimizer, list[Variable]]:
        """The optimizer, built for shapes only."""
        named, _ = jax.tree_util.tree_flatten_with_path(params)
        with jax.ensure_compile_time_eval():
            variables = [
                Variable(
                    jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p), sharding=on_mesh(p)),
                    name=jax.tree_util.keystr(path, simple=True, separator="/"),
                )
                for path, p in named
            ]
            mine = copy.deepcopy(optimizer)
            mine.build(variables)
        return mine, variables

    def init(params: PyTree) -> dict[str, jax.Array]:
        mine, variables = built_for(params)
        leaves = map(jnp.asarray, jax.tree.leaves(params))
        starts = mine._first_values(dict(zip(variables, leaves, strict=True)))
        names = unique_names(mine.variables)
        return {name: starts[v] for name, v in zip(names, mine.variables, strict=True)}

    def update(
        updates: PyTree, state: OptState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, OptState]:
        if params is None:
            raise ValueError("Expected params for the update of to_optax; got None.")
        mine, _ = built_for(params)
        names = unique_names(mine.variables)
        leaves = jax.tree.leaves(params)
        structure: Structure = jax.tree.structure(params)
        try:
            grads = structure.flatten_up_to(updates)
        except ValueError as error:
            raise ValueError(
                f"Expected updates in the structure of params; got "
                f"{brief(jax.tree.structure(updates))} for {brief(structure)}."
            ) from error
        old = [jnp.asarray(leaf) for leaf in leaves]
        new, values = mine.stateless_apply([state[name] for name in names], grads, old)
        changes = [None if g is None else n - o for g, n, o in zip(grads, new, old, strict=True)]
        return structure.unflatten(changes), dict(zip(names, values, strict=True))

    def sums_in(state: OptState, named: object, params: PyTree) -> list[Any]:
        if not optimizer._store.in_force.gradient_accumulation_steps:
            return []
        mine, _ = built_for(params)
        names = dict(zip(mine.variables, unique_names(mine.variables), strict=True))
        return [state[names[total]] for total in mine._store.accumulators]

    return optax.GradientTransformationExtraArgs(init, update), sums_in

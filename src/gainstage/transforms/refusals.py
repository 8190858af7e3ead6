"""What `with_loss_scale` and `train_step` say about arguments that they were not made for."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gainstage._base._jax import Tracer
from gainstage._base.arrays import is_key
from gainstage._base.checks import brief
from gainstage._variables.types import OptState, PyTree, Structure
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import DynamicLossScale, FixedLossScale, LossScale
from gainstage.transforms.loss_scale_state import LossScaleState, no_rule_state
from gainstage.transforms.models import advice_for, outside_models


def refuse_others(params: PyTree) -> None:
    """Raises a TypeError for a model of Keras, and for a class."""
    if hasattr(params, "stateless_call"):
        raise TypeError(
            f"Expected arrays or a model of Flax NNX or Equinox; got {brief(params)}. A model of "
            f"Keras is for gainstage.interop.keras.compile(model, optimizer, loss) and fit."
        )
    if isinstance(params, type):
        raise TypeError(f"Expected a model; got the class {params.__name__}. Make an object of it.")


def check_leaves(tree: PyTree, name: str = "params", advice: str | None = None) -> None:
    """Raises a TypeError for a leaf that is neither an array nor a number."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, complex | float | int):
            raise TypeError(
                f"Expected arrays in {name}; got {brief(leaf)} for "
                f"`{name}{jax.tree_util.keystr(path)}`. {advice or advice_for(tree)}"
            )


def check_parameters(params: PyTree) -> None:
    """Raises a TypeError for parameters that are no numbers: shapes alone, or random keys."""
    check_leaves(params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = f"params{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"Expected arrays in params; got a jax.ShapeDtypeStruct for `{name}`. For the "
                f"shapes of a state, write jax.eval_shape(lambda: TrainState.create(init(), tx))."
            )
        if is_key(leaf):
            raise TypeError(
                f"Expected floating parameters; got {leaf.dtype} for `{name}`. Pass a random key "
                f"in the batch, or as the extra of the state."
            )


def half_in(params: PyTree) -> str | None:
    """A warning for parameters that lose small updates; None if there are none."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if getattr(leaf, "dtype", None) in (jnp.float16, jnp.bfloat16):
            name, bits = jax.tree_util.keystr(path), jnp.finfo(leaf.dtype).nmant + 1
            return (
                f"Half-precision parameters lose small updates: `params{name}` is {leaf.dtype}, "
                f"and keeps no update below 2**-{bits} of a weight. Keep params in float32, and "
                f"compute in half precision: gainstage.autocast(loss_fn). To silence this warning: "
                f'warnings.filterwarnings("ignore", message="Half-precision").'
            )
    return None


def statistics_in(params: PyTree, inner: OptState) -> str | None:
    """A warning for all variables of a Linen module, None if these are no such or `tx`, whose state
    this is, trains some of its parameters only."""
    if not isinstance(params, Mapping) or not {"params", "batch_stats"} <= params.keys():
        return None
    partial = optax.MaskedState, optax.MultiTransformState, optax.transforms.PartitionState
    is_partial = lambda node: isinstance(node, partial)  # noqa: E731
    if any(map(is_partial, jax.tree.leaves(inner, is_leaf=is_partial))):
        return None
    return (
        "These params are all variables of a Flax Linen module, so its batch_stats are trained as "
        "weights are. Write TrainState.create(variables['params'], tx, "
        "extra=variables['batch_stats']); loss_fn(params, extra, x) applies the module to "
        "{'params': params, 'batch_stats': extra} and returns (loss, new extra)."
    )


def wrong_state(state: object) -> TypeError:
    """The error for what is no state of `with_loss_scale`, or a state in the boxes of Flax NNX."""
    kind = type(state).__name__
    if isinstance(state, LossScaleState) and not hasattr(state.rule_state, "scale"):
        return no_rule_state(state.rule_state)
    if isinstance(state, LossScaleState):
        kind = f"a {kind} of {type(state.rule_state.scale).__name__}"
    return TypeError(
        f"Expected the state that tx.init returned for opt_state; got {kind}. Start with "
        f"opt_state = tx.init(params), or tx.init(model): an nnx.Optimizer and its opt_state are "
        f"for optimizer.update alone."
    )


def cast_state(dtype: Any) -> TypeError:
    """The error for a state whose scale, and perhaps its counts, are in half precision."""
    return TypeError(
        f"Expected the float32 loss scale of tx.init in opt_state; got {dtype}, which cannot hold "
        f"all scales and counts. Cast the state of the inner transformation alone: "
        f"opt_state = opt_state._replace(inner=jax.tree.map(lambda x: x.astype(jnp.{dtype}) if "
        f"x.dtype == jnp.float32 else x, opt_state.inner))."
    )


def wrong_rule(rule: LossScale, state: PyTree) -> ValueError:
    """The error for the state of another rule; a fixed scale keeps any state."""
    of, own = type(state).__name__, type(rule).__name__
    others = {"DynamicLossScale": DynamicLossScale(), "AdaptiveLossScale": AdaptiveLossScale()}
    others["DynamicLossScale(hysteresis=...)"] = DynamicLossScale(hysteresis=2)
    others["FixedLossScale"] = FixedLossScale(1.0)
    structure: Structure = jax.tree.structure(state)
    for name, other in others.items():
        if structure == jax.tree.structure(other.init()):
            of = name
    if isinstance(rule, DynamicLossScale) and rule.hysteresis > 1:
        own += f"(hysteresis={rule.hysteresis})"
        of += "(hysteresis=1)" * (of == "DynamicLossScale")
    return ValueError(
        f"The rule of tx is {own}, but opt_state has the scale of {of}. Use the "
        f"rule and options that the state was made with, or start with tx.init(params)."
    )


def unrecorded(option: str) -> ValueError:
    """The error for a state that has no place for what `tx` records."""
    return ValueError(
        f"opt_state was made without {option}, which tx has. Start with tx.init(params), or go on "
        f"from the same scale and moments: opt_state = tx.init(params)._replace("
        f"rule_state=opt_state.rule_state, inner=opt_state.inner)."
    )


def explain_step(error: Exception, state: PyTree, batch: PyTree) -> None:
    """Raises a clearer error than JAX's if a batch has no arrays, or an argument is deleted."""
    trees = {"state": state, "batch": batch}
    leaves = {
        name + jax.tree_util.keystr(path): leaf
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    for name, leaf in leaves.items():
        alive = not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.is_deleted()
        if "deleted" in str(error) and not alive:
            raise ValueError(
                f"`{name}` was donated to an earlier step and deleted. Pass on what that step "
                f"returned. For a state to keep, write best = state.copy() before the step, or "
                f"create the step with train_step(..., donate=False)."
            ) from error
        if isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(error, TypeError):
            raise TypeError(
                f"Expected arrays; got a jax.ShapeDtypeStruct for `{name}`. A step computes with "
                f"numbers. To compile one for these shapes, write step.lower(state, *batch)."
            ) from error
        if isinstance(error, OverflowError) and type(leaf) is int and leaf.bit_length() > 31:
            raise ValueError(
                f"Expected integers of 32 bits at most; got {leaf} for `{name}`. Pass a float, or "
                f"an array of another dtype."
            ) from error
        dtype = getattr(leaf, "dtype", None)
        kind = getattr(dtype, "kind", "O")
        if "requires real" in str(error) and name.startswith("state.params") and kind in "biu":
            raise TypeError(
                f"Expected floating parameters; got {dtype} for `{name}`. Pass what is not "
                f"trained in the batch, or make it floating: jnp.asarray(x, jnp.float32)."
            ) from error
    if isinstance(error, jax.errors.ConcretizationTypeError):
        for name, leaf in leaves.items():
            if isinstance(leaf, bool | int):
                error.add_note(
                    f"`{name}` is {leaf}, which is an array in the compiled step. Bind it to the "
                    f"loss, if it chooses between two programs: functools.partial(loss_fn, "
                    f"name={leaf})."
                )
    if not isinstance(error, TypeError):
        return
    for path, leaf in outside_models(batch):
        is_text = getattr(getattr(leaf, "dtype", None), "kind", "O") in "OSU"
        if is_text and not isinstance(leaf, jax.Array | complex | float | int):
            raise TypeError(
                f"Expected arrays, numbers or models in the batch; got {brief(leaf)} for "
                f"`batch{jax.tree_util.keystr(path)}`. If it is the same in all steps, bind it to "
                f"the loss: functools.partial(loss_fn, name=value)."
            ) from error

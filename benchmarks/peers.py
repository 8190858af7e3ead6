"""The variants: ways to take an optimizer step with loss scaling in JAX, and without.

Each takes `(params, kind, **options)` and returns `(step, carry)`, as `harness` wants them. The
gradients are given, of float32 or float16; parameters are float32. All scales start at 1, so that
every variant takes the same steps and can be checked: the program does not know, and divides.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs
from gainstage._scaling.gradients import unscale
from gainstage.optimizers import SGD, Variable

from . import parameters
from .harness import Builders, Case, Variant

os.environ.setdefault("KERAS_BACKEND", "jax")

RATE, MOMENTUM, EPSILON = 1e-3, 0.9, 1e-7
CLIP, AVERAGE, ACCUMULATE = 1.0, 0.99, 2  # the largest global norm, a momentum, steps
Params = list[Any]


def pure(step: Callable[..., Any], params: Params, state: Any) -> Variant:
    """A variant out of `(weights, state, grads) -> (weights, state)`, which donates both."""
    program = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)

    def call(carry: Any, grads: Any) -> Any:
        weights, state = program(*carry[:2], grads)
        return weights, state, weights[0]

    return call, (copies(params), state, None)


def copies(params: Params) -> Params:
    """The same values in memory of their own."""
    return [jnp.copy(p) for p in params]


def float32(grads: Params) -> Params:
    """The gradients in the parameters' dtype."""
    return [g.astype(jnp.float32) for g in grads]


# ── optax, and what is built on it ───────────────────────────────────────────────────────────


def transformation(kind: str, clip: bool = False, accumulate: bool = False) -> Any:
    """SGD with momentum, or Adam, in optax."""
    tx = optax.sgd(RATE, MOMENTUM) if kind == "sgd" else optax.adam(RATE, eps=EPSILON)
    tx = optax.chain(optax.clip_by_global_norm(CLIP), tx) if clip else tx
    return optax.MultiSteps(tx, ACCUMULATE) if accumulate else tx


def plain_optax(params: Params, kind: str, ema: bool = False, **options: bool) -> Variant:
    """Without scaling."""
    tx = transformation(kind, **options)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        updates, inner = tx.update(float32(grads), state[0], weights)
        weights = optax.apply_updates(weights, updates)
        averages = optax.incremental_update(weights, state[1], 1 - AVERAGE) if ema else None
        return weights, (inner, averages)

    return pure(step, params, (tx.init(params), copies(params) if ema else None))


def with_jmp(params: Params, kind: str) -> Variant:
    """As the example in jmp's README."""
    import jmp

    tx = transformation(kind)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        inner, scale = state
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_inner = tx.update(grads, inner, weights)
        new = (optax.apply_updates(weights, updates), new_inner)
        weights, inner = jmp.select_tree(finite, new, (weights, inner))
        return weights, (inner, scale.adjust(finite))

    scale = jmp.DynamicLossScale(jnp.float32(1), jnp.int32(0))
    return pure(step, params, (tx.init(params), scale))


def with_flax(params: Params, kind: str) -> Variant:
    """As flax's ImageNet example: `DynamicScale`, and a `where` over weights and state."""
    from flax.training.dynamic_scale import DynamicScale

    tx = transformation(kind)

    # A loss with given gradients, whatever it is scaled by: they are scaled already.
    @jax.custom_vjp
    def loss(weights: Any, grads: Any) -> jax.Array:
        return jnp.float32(0)

    loss.defvjp(lambda weights, grads: (jnp.float32(0), grads), lambda g, _: (float32(g), None))

    def step(weights: Any, state: Any, grads: Any) -> Any:
        inner, scale = state
        scale, finite, _, grads = scale.value_and_grad(lambda w: loss(w, grads))(weights)
        updates, new_inner = tx.update(grads, inner, weights)
        new = (optax.apply_updates(weights, updates), new_inner)
        weights, inner = jax.tree.map(partial(jnp.where, finite), new, (weights, inner))
        return weights, (inner, scale)

    scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(1))
    return pure(step, params, (tx.init(params), scale))


def with_mpx(params: Params, kind: str) -> Variant:
    """With the scaling, the check and the update of mpx."""
    import mpx

    tx = transformation(kind)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        inner, scale, counter = state
        scaling = mpx.DynamicLossScaling(scale, jnp.float32(1), counter=counter)
        grads = scaling.unscale(grads)
        finite = mpx.all_finite(grads)
        scaling = scaling.adjust(finite)
        weights, inner = mpx.optimizer_update(weights, tx, inner, grads, finite)
        return weights, (inner, scaling.loss_scaling, scaling.counter)

    return pure(step, params, (tx.init(params), jnp.float32(1), jnp.int32(0)))


def apply_if_finite(params: Params, kind: str) -> Variant:
    """Without scaling, but with optax's own check."""
    tx = optax.apply_if_finite(transformation(kind), 1000)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(float32(grads), state, weights)
        return optax.apply_updates(weights, updates), state

    return pure(step, params, tx.init(params))


def checked(params: Params, kind: str, conditional: bool) -> Variant:
    """Without scaling, but with a check of every gradient: a select, or a conditional."""
    tx = transformation(kind)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        def update(old: Any) -> Any:
            updates, state = tx.update(float32(grads), old[1], old[0])
            return optax.apply_updates(old[0], updates), state

        finite, old = jnp.stack([jnp.isfinite(g).all() for g in grads]).all(), (weights, state)
        if conditional:
            return jax.lax.cond(finite, update, lambda old: old, old)
        return jax.tree.map(partial(jnp.where, finite), update(old), old)

    return pure(step, params, tx.init(params))


# ── Keras ────────────────────────────────────────────────────────────────────────────────────


def keras_optimizer(params: Params, kind: str, scaled: bool) -> tuple[Any, list[Any]]:
    """An optimizer that is built for variables, and these."""
    import keras

    variables = [keras.Variable(p) for p in params]
    optimizers = keras.optimizers
    inner = (
        optimizers.SGD(RATE, MOMENTUM) if kind == "sgd" else optimizers.Adam(RATE, epsilon=EPSILON)
    )
    optimizer = optimizers.LossScaleOptimizer(inner, initial_scale=1.0) if scaled else inner
    optimizer.build(variables)
    return optimizer, variables


def keras_compiled(params: Params, kind: str) -> Variant:
    """Its `LossScaleOptimizer`, pure and compiled; all donated, in the order of the results."""
    optimizer, _ = keras_optimizer(params, kind, scaled=True)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        return optimizer.stateless_apply(state, grads, weights)

    return pure(step, params, [jnp.copy(v.value) for v in optimizer.variables])


def keras_eager(params: Params, kind: str, scaled: bool = False) -> Variant:
    """Its `apply`, which compiles nothing by itself."""
    optimizer, variables = keras_optimizer(params, kind, scaled)

    def call(carry: Any, grads: Any) -> Any:
        optimizer.apply(grads, variables)
        return variables, [v.value for v in variables]

    return call, (variables, None)


# ── ours ─────────────────────────────────────────────────────────────────────────────────────


def our_optimizer(
    params: Params,
    kind: str,
    *,
    scaled: bool = True,
    clip: bool = False,
    ema: bool = False,
    accumulate: bool = False,
    **options: Any,
) -> tuple[gs.optimizers.Optimizer, list[Variable]]:
    """An optimizer that is built for variables, and these."""
    variables = [Variable(p) for p in params]
    options |= {"global_clipnorm": CLIP} if clip else {}
    options |= {"use_ema": True, "ema_momentum": AVERAGE} if ema else {}
    options |= {"gradient_accumulation_steps": ACCUMULATE} if accumulate else {}
    inner = (
        SGD(RATE, MOMENTUM, **options)
        if kind == "sgd"
        else gs.optimizers.Adam(RATE, epsilon=EPSILON, **options)
    )
    optimizer = gs.optimizers.LossScaleOptimizer(inner, initial_scale=1.0) if scaled else inner
    optimizer.build(variables)
    return optimizer, variables


def ours(params: Params, kind: str, **options: Any) -> Variant:
    """A step of a training loop: `gs.optimizers.jit`, which donates, over `apply`."""
    optimizer, variables = our_optimizer(params, kind, **options)

    def step(grads: Any) -> jax.Array:
        optimizer.apply(grads, variables)
        return optimizer.loss_scale

    program = gs.optimizers.jit(step, (variables, optimizer.variables), donate=True)
    return lambda _, grads: (variables, program(grads)), (variables, None)


def ours_eager(params: Params, kind: str, **options: Any) -> Variant:
    """`apply` by itself."""
    optimizer, variables = our_optimizer(params, kind, **options)

    def call(carry: Any, grads: Any) -> Any:
        optimizer.apply(grads, variables)
        return variables, variables[0].value()

    return call, (variables, None)


def ours_stateless(params: Params, kind: str) -> Variant:
    """Pure and compiled; all donated, in the order of the results."""
    optimizer, _ = our_optimizer(params, kind)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        return optimizer.stateless_apply(state, grads, weights)

    return pure(step, params, [jnp.copy(v.value()) for v in optimizer.variables])


def ours_in_optax(params: Params, kind: str, **options: bool) -> Variant:
    """An optax loop with `gs.with_loss_scale`; unscaled by what `gs.value_and_grad` unscales
    with."""
    tx = gs.with_loss_scale(transformation(kind, **options), gs.DynamicLossScale(1.0))

    def step(weights: Any, state: Any, grads: Any) -> Any:
        grads = unscale(grads, state.rule_state.scale)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return pure(step, params, tx.init(params))


def ours_in_train_step(params: Params, kind: str) -> Variant:
    """As `gs.train_step`: `update` is given the scaled gradients, and the scale."""
    tx = gs.with_loss_scale(transformation(kind), gs.DynamicLossScale(1.0))

    def step(weights: Any, state: Any, grads: Any) -> Any:
        scale = state.rule_state.scale
        updates, state = tx.update(grads, state, weights, loss_scale=scale)
        return gs.transforms.apply_updates(weights, updates, state), state

    return pure(step, params, tx.init(params))


def pass_through(params: Params, kind: str) -> Variant:
    """A program with the arguments and results of our step, which computes nothing."""
    optimizer, _ = our_optimizer(params, kind)
    state = [jnp.copy(v.value()) for v in optimizer.variables]
    step, (weights, state, done) = pure(
        lambda weights, state, grads: (weights, state), params, state
    )

    def call(carry: Any, grads: Any) -> Any:
        return None, *step(carry[1:], grads)

    return call, (None, weights, state, done)


# ── what the scripts measure ─────────────────────────────────────────────────────────────────

OPTAX, OURS, OURS_IN_OPTAX = "optax", "ours", "ours, in an optax loop"
OURS_IN_TRAIN_STEP = "ours, gs.train_step"
SELECT, CONDITIONAL = "optax, checked, select", "optax, checked, conditional"
KERAS_EAGER, FLOOR = "Keras, eager, no scaling", "nothing (the floor)"
VARIANTS: dict[str, Callable[..., Variant]] = {
    OPTAX: plain_optax,
    OURS: ours,
    OURS_IN_OPTAX: ours_in_optax,
    OURS_IN_TRAIN_STEP: ours_in_train_step,
    "ours, stateless_apply": ours_stateless,
    "ours, eager": ours_eager,
    "ours, eager, no scaling": partial(ours_eager, scaled=False),
    "optax.apply_if_finite": apply_if_finite,
    SELECT: partial(checked, conditional=False),
    CONDITIONAL: partial(checked, conditional=True),
    "Keras LossScaleOptimizer": keras_compiled,
    "flax DynamicScale": with_flax,
    "jmp": with_jmp,
    "mpx": with_mpx,
    FLOOR: pass_through,
    KERAS_EAGER: keras_eager,
    "Keras LossScaleOptimizer, eager": partial(keras_eager, scaled=True),
}


def steps(
    names: Sequence[str], tensors: str, kind: str, dtype: str, **options: bool
) -> tuple[Builders, Any]:
    """Variants by name for one set of parameters, and its gradients."""
    params = [jnp.asarray(value) for value in parameters.values(tensors, seed=0)]
    grads = [jnp.asarray(value, dtype) for value in parameters.values(tensors, seed=1)]
    return {name: partial(VARIANTS[name], params, kind, **options) for name in names}, grads


def case(
    names: Sequence[str],
    baseline: str,
    tensors: str,
    kind: str,
    dtype: str = "float32",
    **options: bool,
) -> Case:
    """Variants on the optimizer step alone."""
    labels = {"parameters": tensors, "optimizer": kind, "gradients": dtype}
    labels |= {"with": " and ".join(options)} if options else {}
    slots = 1 if kind == "sgd" else 2
    # Weights and slots are read and written, gradients read; options have slots of their own.
    per_element = 8 * (1 + slots + ("ema" in options)) + np.dtype(dtype).itemsize
    make = partial(steps, tuple(names), tensors, kind, dtype, **options)
    large = not tensors.startswith("tiny") and "accumulate" not in options
    traffic = per_element * parameters.size(tensors) if large else None
    period = ACCUMULATE if "accumulate" in options else 1
    crowded = tensors.startswith("tiny") and len(parameters.shapes(tensors)) > 100
    pairs = [name for name in names if name != baseline and crowded]
    return Case(labels, make, [baseline], traffic, period, pairs=pairs)

"""Optimizers of ours as optax transformations: the same steps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Adam, AdamW, schedules, to_optax

from table import OPTIMIZERS

RULES = OPTIMIZERS | {
    "schedule": lambda **o: SGD(schedules.ExponentialDecay(0.1, 3, 0.5), **o),
}
OPTIONS = {
    "plain": {},
    "clipped": {"global_clipnorm": 0.5},
    "averaged": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    "accumulated": {"gradient_accumulation_steps": 2},
}


def trees(rng, steps=6):
    shapes = {"dense": {"kernel": (3, 4), "bias": (4,)}, "scale": ()}

    def tree():
        is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
        values = jax.tree.map(lambda s: rng.normal(size=s), shapes, is_leaf=is_shape)
        return jax.tree.map(np.float32, values)

    return tree(), [tree() for _ in range(steps)]


def by_optax(tx, params, grads):
    """The parameters after all steps, in one compiled loop."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    grads = jax.tree.map(lambda *each: np.stack(each), *grads)
    carry = (params, jax.jit(tx.init)(params))
    return jax.jit(lambda c, g: jax.lax.scan(step, c, g)[0])(carry, grads)


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
def test_a_norm_that_is_not_finite_is_a_skipped_step(clip):
    """Finite gradients whose norm overflows reach no weight, and the scale falls: as in `apply`."""
    opt = gs.LossScaleOptimizer(SGD(0.1, **{clip: 1.0}))
    tx, params = to_optax(opt), jnp.ones(2)
    state = tx.init(params)
    updates, state = tx.update(jnp.float32([3e38, 3e38]), state, params)
    np.testing.assert_array_equal(updates, 0)
    assert float(gs.loss_scale(state)) == 2.0**14


def test_telemetry_comes_with_it():
    """What the optimizer was told to count its transformation counts."""
    opt = gs.LossScaleOptimizer(SGD(0.1), telemetry=True, underflow_every=1)
    tx, params = to_optax(opt), jnp.ones(2)
    _, state = tx.update(params, tx.init(params), params)
    assert gs.diagnostics.report(state, params).underflow is not None


def cases():
    for rule, options in itertools.product(RULES, OPTIONS):
        often = options == "plain" or rule == "adam"
        seldom = pytest.mark.thorough if rule in ("sgd", "optax") else pytest.mark.slow
        yield pytest.param(rule, options, marks=[] if often else [seldom])


@pytest.mark.parametrize(("rule", "options"), list(cases()))
def test_the_steps_are_the_same(rule, options, rng):
    """Every rule, with and without options, in a compiled scan: the parameters of `apply`."""
    params, grads = trees(rng)
    tx = to_optax(RULES[rule](**OPTIONS[options]))
    got, _ = by_optax(tx, params, grads)
    variables = jax.tree.map(gs.Variable, params)
    opt = RULES[rule](**OPTIONS[options])
    for g in grads:
        opt.apply(jax.tree.leaves(g), jax.tree.leaves(variables))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(variables), strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-6)


def test_a_wrapper_becomes_loss_scaled(rng):
    """The same scale, skips and parameters as `LossScaleOptimizer`, options on either object."""
    params, grads = trees(rng, 8)
    params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    grads[3]["scale"] = jnp.float32(np.inf)

    def make():
        return gs.LossScaleOptimizer(Adam(0.1), 8.0, 3, clipnorm=1.0)

    got, state = by_optax(to_optax(make()), params, grads)
    variables, opt = jax.tree.map(gs.Variable, params), make()
    for g in grads:
        scale = opt.loss_scale
        opt.apply([x * scale for x in jax.tree.leaves(g)], jax.tree.leaves(variables))
    assert float(gs.loss_scale(state)) == float(opt.loss_scale)
    assert int(state.inner["adam/iteration"]) == int(opt.iterations) == 7
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(variables), strict=True):
        assert one.dtype == jnp.float16
        np.testing.assert_allclose(np.float32(one), np.float32(other.numpy()), rtol=2e-3, atol=1e-3)


def test_master_weights_start_from_the_parameters():
    """A float16 parameter's float32 copy is part of the state from `init` on."""
    tx = to_optax(SGD(2.0**-14, master_weights=True))
    params = {"w": jnp.float16(1.0)}
    state = tx.init(params)
    assert (state["SGD/w_master"].dtype, float(state["SGD/w_master"])) == (jnp.float32, 1.0)
    for _ in range(16):
        updates, state = jax.jit(tx.update)({"w": jnp.float32(1.0)}, state, params)
        params = optax.apply_updates(params, updates)
    assert float(params["w"]) == 1 - 2.0**-10


def test_a_gradient_of_none_leaves_its_parameter_alone():
    """As in optax: its update is None."""
    params = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
    tx = to_optax(AdamW(0.1))
    updates, _ = tx.update({"a": jnp.float32(1.0), "b": None}, tx.init(params), params)
    assert updates["b"] is None
    assert float(updates["a"]) < 0


def test_wrong_optimizers():
    """What cannot be converted says why; the optimizer itself is not changed."""
    opt = SGD(0.1)
    tx = to_optax(opt)
    tx.init({"w": jnp.ones(3)})
    assert not opt.built
    with pytest.raises(ValueError, match="Expected params for the update"):
        tx.update({"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)}))
    with pytest.raises(TypeError, match="Expected an optimizer of gainstage"):
        to_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match="loss_scale_factor"):
        to_optax(SGD(0.1, loss_scale_factor=8.0))
    for wrong, message in [
        (SGD(0.1, shard_state_over="data"), "shard_state_over"),
        (gs.LossScaleOptimizer(SGD(0.1, master_weights=True)), "master_weights"),
    ]:
        with pytest.raises(ValueError, match=message):
            to_optax(wrong)
    excluding = AdamW(0.1)
    excluding.exclude_from_weight_decay([gs.Variable(1.0)])
    with pytest.raises(ValueError, match="var_names"):
        to_optax(excluding)
    opt.build([gs.Variable(1.0)])
    with pytest.raises(ValueError, match="not to be built"):
        to_optax(opt)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_sum_of_microbatches_that_overflows_is_skipped(clip):
    """Two finite gradients whose sum, or its norm, is infinite do not make an update."""
    inner = SGD(1e-30, gradient_accumulation_steps=2, global_clipnorm=clip)
    tx = to_optax(gs.LossScaleOptimizer(inner))
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    state, applied = tx.init(params), []
    for value in (3e38, 3e38, 1.0, 1.0):
        updates, state = tx.update({"w": jnp.full(3, value), "b": jnp.ones(2)}, state, params)
        params = gs.apply_updates(params, updates, state)
        applied.append(bool(state.applied))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, state)))
    assert applied == ([True, False, True, True] if clip is None else [False, False, True, True])

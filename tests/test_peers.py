"""One test for each known bug of a peer that concerns us: what happens here instead.

The bugs were reproduced on keras 3.15.1, jmp 0.0.4, mpx 0.1.8, flax 0.12.8, jaxamp 0.0.4 and
optax 0.2.8; the peers are not run here, as they may be mended.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs


def test_keras_eager_apply_on_jax():
    """Keras's `LossScaleOptimizer.apply` fails on JAX; ours does what `stateless_apply` does."""
    var = gs.Variable([1.0, 2.0])
    opt = gs.LossScaleOptimizer(gs.SGD(0.5), initial_scale=4.0)
    opt.build([var])
    grads, state = [jnp.array([4.0, 8.0])], [v.value() for v in opt.variables]
    (weights,), state = opt.stateless_apply(state, grads, [var.value()])
    opt.apply(grads, [var])
    assert var.numpy().tolist() == weights.tolist() == [0.5, 1.0]
    assert [float(v) for v in opt.variables] == [float(s) for s in state]


def test_keras_scale_of_zero_writes_inf_into_the_weights():
    """After 200 overflows Keras's scale is 0 and a finite step gives -inf; ours goes on."""
    var = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.5))
    for _ in range(200):
        opt.apply([jnp.inf], [var])
    opt.minimize(lambda: var * 1.0, [var])
    assert float(var) == 0.5


def test_keras_scale_of_inf_never_recovers():
    """After 112 doublings Keras's scale is inf for ever; ours stays finite and comes down."""
    var = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.0), dynamic_growth_steps=1)
    for _ in range(120):
        opt.apply([0.0], [var])
    assert float(opt.loss_scale) == 2.0**126
    opt.apply([jnp.inf], [var])
    assert float(opt.loss_scale) == 2.0**125


def test_keras_loss_scale_factor_applies_nan():
    """A plain optimizer with Keras's static factor applies a NaN; ours checks and skips."""
    var = gs.Variable(1.0)
    opt = gs.SGD(0.5, loss_scale_factor=128.0)
    opt.apply([jnp.nan], [var])
    assert (float(var), int(opt.iterations)) == (1.0, 0)
    assert float(opt.scale_loss(1.0)) == 128.0
    opt.apply([128.0], [var])
    assert (float(var), int(opt.iterations)) == (0.5, 1)


def test_keras_static_factor_unscales_in_half():
    """Keras divides a float16 gradient by 2**15 in float16 and gets 0; ours keeps it."""
    var = gs.Variable(jnp.zeros((), jnp.float16))
    opt = gs.SGD(2.0**15, loss_scale_factor=2.0**15)
    opt.apply([jnp.float16(2.0**-10)], [var])
    assert float(var) == -(2.0**-10)


def test_keras_accumulation_with_float16_variables():
    """Keras crashes on accumulation with float16 variables; ours accumulates in float32."""
    var = gs.Variable(jnp.zeros(2, jnp.float16))
    opt = gs.LossScaleOptimizer(gs.SGD(1.0, gradient_accumulation_steps=2), 2.0)
    opt.apply([jnp.array([2, 4], jnp.float16)], [var])
    opt.apply([jnp.array([6, 4], jnp.float16)], [var])
    assert var.numpy().tolist() == [-2, -2]


@pytest.mark.parametrize(
    "arguments",
    [{"initial_scale": v} for v in (-1, 0, np.nan)]
    + [{"dynamic_growth_steps": v} for v in (0, -5)],
)
def test_keras_accepts_scales_that_cannot_work(arguments):
    """Keras takes a scale of -1, 0 or nan and growth periods of 0 or -5; ours refuses them."""
    with pytest.raises(ValueError, match="Expected"):
        gs.LossScaleOptimizer(gs.SGD(), **arguments)


def test_keras_wraps_twice_and_wipes_the_inner_factor():
    """Keras nests wrappers and erases the inner factor; ours refuses and keeps it in force."""
    inner = gs.SGD(0.5, loss_scale_factor=8.0)
    opt = gs.LossScaleOptimizer(inner, initial_scale=2.0)
    assert (inner.loss_scale_factor, float(opt.loss_scale)) == (8.0, 16.0)
    var = gs.Variable(1.0)
    opt.apply([16.0], [var])
    assert float(var) == 0.5
    with pytest.raises(TypeError, match="not wrapped"):
        gs.LossScaleOptimizer(opt)


def test_keras_from_config_changes_its_argument():
    """Keras's `from_config` takes the inner optimizer out of the caller's dictionary."""
    config = gs.LossScaleOptimizer(gs.SGD(gs.schedules.ExponentialDecay(0.1, 5, 0.5))).get_config()
    before = copy.deepcopy(config)
    gs.LossScaleOptimizer.from_config(config)
    assert config == before


def test_keras_wrapper_options_and_exclusions_do_nothing():
    """On Keras's wrapper a `clipnorm` set later and an exclusion from decay have no effect."""
    w, b = gs.Variable(0.0, name="w"), gs.Variable(1.0, name="b")
    opt = gs.LossScaleOptimizer(gs.SGD(1.0, weight_decay=0.5), initial_scale=1.0)
    opt.exclude_from_weight_decay(var_names=["b"])
    opt.clipnorm = 1.0
    opt.apply([-100.0, 0.0], [w, b])
    assert (float(w), float(b)) == (1.0, 1.0)


def test_jmp_loses_the_floor_under_jit():
    """jmp's floor goes back to 1 when the scale crosses jit; ours is part of the rule."""
    rule = gs.DynamicLossScale(1.0, min_scale=2.0**-4)
    state = jax.tree.map(lambda x: x, rule.init())
    update = jax.jit(rule.update)
    for _ in range(10):
        state = update(state, False)
    assert float(state.scale) == 2.0**-4


def test_mpx_unscales_with_the_new_scale():
    """mpx halves loss and gradient on every growth step; ours unscales with the old scale."""
    rule = gs.DynamicLossScale(8.0, increment_period=1)
    tx = gs.loss_scaled(optax.sgd(1.0), rule)
    params = jnp.float32(1.0)
    state = tx.init(params)
    for _ in range(3):
        loss, grads = gs.value_and_grad(lambda w: 2 * w, state)(params)
        assert (float(loss), float(grads)) == (2 * float(params), 2.0)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params), float(state.loss_scale.scale)) == (-5.0, 64.0)

    var = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(1.0), 8.0, dynamic_growth_steps=1)
    assert [float(opt.minimize(lambda: 2 * var, [var])) for _ in range(3)] == [2.0, -2.0, -6.0]
    assert float(var) == -5.0


def test_flax_loses_the_first_step_and_compiles_twice():
    """flax starts above float16's largest number and with a weak type; ours with neither."""
    traces = []
    params = {"w": jnp.ones(4, jnp.float16)}
    tx = gs.loss_scaled(optax.sgd(0.25))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        traces.append(1)
        loss, grads = gs.value_and_grad(lambda p: p["w"].mean(), state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, loss = step(params, state)
        assert (loss.dtype, bool(jnp.isfinite(loss))) == (jnp.float32, True)
    assert (len(traces), int(state.loss_scale.good_steps)) == (1, 3)
    assert params["w"].tolist() == [0.8125] * 4


def test_flax_truncates_float64():
    """flax hands out float64 gradients cut to float32; ours keep all their digits."""
    with jax.enable_x64(True):
        params = jnp.float64(1 / 3)
        state = gs.loss_scaled(optax.sgd(0.1)).init(params)
        loss, grads = gs.value_and_grad(lambda w: w * w, state)(params)
        assert (float(loss), float(grads)) == (float(params * params), float(2 * params))


def test_flax_grows_one_step_late():
    """flax's interval of 3 grows after 4 finite steps; ours after 3."""
    rule = gs.DynamicLossScale(2.0, increment_period=3)
    state, scales = rule.init(), []
    for _ in range(7):
        state = rule.update(state, True)
        scales.append(float(state.scale))
    assert scales == [2, 2, 4, 4, 4, 8, 8]


def test_jaxamp_and_optax_give_in_after_many_bad_steps():
    """jaxamp's scale reaches 0, `apply_if_finite` in the end applies the NaN; ours never does."""
    params = jnp.float32(1.0)
    tx = gs.loss_scaled(optax.adam(0.1))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(300):
        updates, state = update(jnp.float32(jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params), float(state.loss_scale.scale)) == (1.0, 2.0**-24)


@pytest.mark.parametrize(("gradient", "step"), [(0.0, 0.0), (1e-3, 0.125)])
def test_optax_adam_divides_by_zero_in_float16(gradient, step):
    """optax's Adam on float16 weights gives -inf or NaN for tiny and zero gradients; ours steps."""
    grads, params = jnp.full(3, gradient, jnp.float16), jnp.ones(3, jnp.float16)
    var, opt = gs.Variable(params), gs.Adam(0.125)
    tx = gs.loss_scaled(optax.adam(0.125))
    state = tx.init(params)
    for i in range(1, 4):
        opt.apply([grads], [var])
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(var.numpy(), 1 - i * step, atol=2e-3)
        np.testing.assert_allclose(params, 1 - i * step, atol=2e-3)


def test_optax_clips_float16_gradients_to_zero():
    """The norm of float16 gradients overflows in optax, so that all become 0; ours are clipped."""
    params, grads = jnp.zeros(1000, jnp.float16), jnp.full(1000, 300.0, jnp.float16)
    expected = np.full(1000, -1 / np.sqrt(1000))
    tx = gs.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates, expected, rtol=1e-3)
    for clip in ("clipnorm", "global_clipnorm"):
        var = gs.Variable(params)
        gs.SGD(1.0, **{clip: 1.0}).apply([grads], [var])
        np.testing.assert_allclose(var.numpy(), expected, rtol=1e-3)


def test_overflow_is_not_found_by_sum_or_norm():
    """DeepSpeed and fairseq take large finite gradients, whose sum or norm overflows, for inf."""
    var = gs.Variable(np.zeros(4, np.float32))
    opt = gs.LossScaleOptimizer(gs.SGD(2.0**-100), initial_scale=1.0)
    opt.apply([jnp.full(4, 2.0**127)], [var])
    assert var.numpy().tolist() == [-(2.0**27)] * 4


def test_megatron_does_not_refill_hysteresis():
    """After a backoff Megatron halves at every single overflow; ours counts anew each time."""
    rule = gs.DynamicLossScale(2.0**10, increment_period=1000, hysteresis=2)
    state, scales = rule.init(), []
    for finite in (False, False, True, False, True, False, False):
        state = rule.update(state, finite)
        scales.append(float(state.scale))
    assert scales == [1024, 512, 512, 512, 512, 512, 256]


def test_training_goes_on_after_a_storm_of_bad_batches():
    """After 45 NaN batches the scale is far down, and the next steps are float32's all the same."""
    runs = []
    for storm in (0, 45):
        var = gs.Variable([1.0, -1.0])
        opt = gs.LossScaleOptimizer(gs.Adam(0.1))
        for _ in range(storm):
            opt.apply([[jnp.nan, 1.0]], [var])
        for _ in range(20):
            opt.minimize(lambda var=var: ((var - 0.5) ** 2).sum(), [var])
        runs.append(var.numpy())
    np.testing.assert_array_equal(*runs)
    assert float(opt.loss_scale) == 2.0**-24

"""One test for each known bug of a peer that concerns us: what happens here, and what there.

H1 to H10 are findings on keras 3.15.1, jmp 0.0.4, mpx 0.1.8 (the package is called
mixed_precision_for_JAX), flax 0.12.8, jaxamp 0.0.4 and optax 0.2.8. Our half of a test comes first
and always runs; then the peer's, where the peer is installed and has not been mended since. H11 to
H13 are no behaviours: no JAX training stack has loss scaling, users say what there is is dead, and
float16 is back in use. What follows after H10 concerns peers on other frameworks.
"""

import contextlib
import copy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs


@contextlib.contextmanager
def live(name):
    """A peer's module, whose warnings are its own affair; the test is skipped from here without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip(
            name, reason=f"{name} is not installed: ours holds", exc_type=ImportError
        )


def fails(peer, failed):
    """What a peer should still be doing wrong, or else the test is skipped from here."""
    if not failed:
        pytest.skip(f"{peer.__name__} {getattr(peer, '__version__', '')}: mended there; ours holds")


def keras_step(opt, variables):
    """A step of Keras on JAX, by the only method that works there."""
    opt.build(variables)
    pure = jax.jit(opt.stateless_apply)

    def step(*grads):
        new = pure([v.value for v in opt.variables], list(grads), [v.value for v in variables])
        for kept, values in zip((variables, opt.variables), new, strict=True):
            for variable, value in zip(kept, values, strict=True):
                variable.assign(value)

    return step


def test_h1_the_eager_apply_does_not_work_on_jax():
    """Keras's `LossScaleOptimizer.apply` fails on JAX; ours does what `stateless_apply` does."""
    var = gs.Variable([1.0, 2.0])
    opt = gs.LossScaleOptimizer(gs.SGD(0.5), initial_scale=4.0)
    opt.build([var])
    grads, state = [jnp.array([4.0, 8.0])], [v.value() for v in opt.variables]
    (weights,), state = opt.stateless_apply(state, grads, [var.value()])
    opt.apply(grads, [var])
    assert var.numpy().tolist() == weights.tolist() == [0.5, 1.0]
    assert [float(v) for v in opt.variables] == [float(s) for s in state]

    with live("keras") as keras:
        theirs = keras.Variable([1.0, 2.0])
        peer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
        try:
            peer.apply(grads, [theirs])
            works = np.asarray(theirs.value).tolist() == [0.5, 1.0]
        except jax.errors.UnexpectedTracerError:
            works = False
        fails(keras, not works)


def test_h2_a_scale_of_zero_writes_inf_into_the_weights():
    """After 200 overflows Keras's scale is 0 and a finite step gives -inf; ours goes on."""
    var = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.5))
    for _ in range(200):
        opt.apply([jnp.inf], [var])
    opt.minimize(lambda: var * 1.0, [var])
    assert float(var) == 0.5

    with live("keras") as keras:
        theirs = keras.Variable(1.0)
        peer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        step = keras_step(peer, [theirs])
        for _ in range(200):
            step(jnp.float32(jnp.inf))
        step(jnp.float32(1.0))
        fails(keras, not np.isfinite(float(theirs.value)))


def test_h2_a_scale_of_inf_never_recovers():
    """After 112 doublings Keras's scale is inf for ever; ours stays finite and comes down."""
    var = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.0), dynamic_growth_steps=1)
    for _ in range(120):
        opt.apply([0.0], [var])
    assert float(opt.loss_scale) == 2.0**126
    opt.apply([jnp.inf], [var])
    assert float(opt.loss_scale) == 2.0**125

    with live("keras") as keras:
        inner = keras.optimizers.SGD(0.0)
        peer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=1)
        step = keras_step(peer, [keras.Variable(1.0)])
        for gradient in [0.0] * 120 + [np.inf] * 10:
            step(jnp.float32(gradient))
        fails(keras, float(peer.dynamic_scale.value) == np.inf)


def test_h3_a_static_scale_applies_nan():
    """A plain optimizer with Keras's static factor applies a NaN; ours checks and skips."""
    var = gs.Variable(1.0)
    opt = gs.SGD(0.5, loss_scale_factor=128.0)
    opt.apply([jnp.nan], [var])
    assert (float(var), int(opt.iterations)) == (1.0, 0)
    assert float(opt.scale_loss(1.0)) == 128.0
    opt.apply([128.0], [var])
    assert (float(var), int(opt.iterations)) == (0.5, 1)

    with live("keras") as keras:
        theirs = keras.Variable(1.0)
        peer = keras.optimizers.SGD(0.5, loss_scale_factor=128.0)
        peer.apply([jnp.float32(jnp.nan)], [theirs])
        fails(keras, np.isnan(float(theirs.value)))


def test_h3_a_static_scale_is_divided_by_in_half_precision():
    """Keras divides a float16 gradient by 2**15 in float16 and gets 0; ours keeps it."""
    var = gs.Variable(jnp.zeros((), jnp.float16))
    opt = gs.SGD(2.0**15, loss_scale_factor=2.0**15)
    opt.apply([jnp.float16(2.0**-10)], [var])
    assert float(var) == -(2.0**-10)

    with live("keras") as keras:
        theirs = keras.Variable(np.float16(0), dtype="float16")
        peer = keras.optimizers.SGD(2.0**15, loss_scale_factor=2.0**15)
        peer.apply([jnp.float16(2.0**-10)], [theirs])
        fails(keras, float(theirs.value) == 0)


def test_h4_accumulation_crashes_with_float16_variables():
    """Keras crashes on accumulation with float16 variables; ours accumulates in float32."""
    var = gs.Variable(jnp.zeros(2, jnp.float16))
    opt = gs.LossScaleOptimizer(gs.SGD(1.0, gradient_accumulation_steps=2), 2.0)
    grads = [jnp.array([2, 4], jnp.float16), jnp.array([6, 4], jnp.float16)]
    for gradient in grads:
        opt.apply([gradient], [var])
    assert var.numpy().tolist() == [-2, -2]

    with live("keras") as keras:
        theirs = keras.Variable(np.zeros(2), dtype="float16")
        inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        step = keras_step(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0), [theirs])
        try:
            for gradient in grads:
                step(gradient)
            crashed = False
        except TypeError:
            crashed = True
        fails(keras, crashed)


@pytest.mark.parametrize(
    "arguments",
    [{"initial_scale": v} for v in (-1, 0, np.nan)]
    + [{"dynamic_growth_steps": v} for v in (0, -5)],
    ids=str,
)
def test_h5_scales_that_cannot_work_are_accepted(arguments):
    """Keras takes a scale of -1, 0 or nan and growth periods of 0 or -5; ours refuses them."""
    with pytest.raises(ValueError, match="Expected"):
        gs.LossScaleOptimizer(gs.SGD(), **arguments)

    with live("keras") as keras:
        try:
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **arguments)
            refused = False
        except (TypeError, ValueError):
            refused = True
        fails(keras, not refused)


def test_h5_it_wraps_twice_and_wipes_the_inner_factor():
    """Keras nests wrappers and erases the inner factor; ours refuses and keeps it in force."""
    inner = gs.SGD(0.5, loss_scale_factor=8.0)
    opt = gs.LossScaleOptimizer(inner, initial_scale=2.0)
    assert (inner.loss_scale_factor, float(opt.loss_scale)) == (8.0, 16.0)
    var = gs.Variable(1.0)
    opt.apply([16.0], [var])
    assert float(var) == 0.5
    with pytest.raises(TypeError, match="not wrapped"):
        gs.LossScaleOptimizer(opt)

    with live("keras") as keras:
        inner = keras.optimizers.SGD(0.5, loss_scale_factor=8.0)
        wrapped = keras.optimizers.LossScaleOptimizer(inner)
        try:
            keras.optimizers.LossScaleOptimizer(wrapped)
            refused = False
        except (TypeError, ValueError):
            refused = True
        fails(keras, inner.loss_scale_factor is None or not refused)


def test_h5_from_config_changes_its_argument():
    """Keras's `from_config` takes the inner optimizer out of the caller's dictionary."""
    config = gs.LossScaleOptimizer(gs.SGD(gs.schedules.ExponentialDecay(0.1, 5, 0.5))).get_config()
    before = copy.deepcopy(config)
    gs.LossScaleOptimizer.from_config(config)
    assert config == before

    with live("keras") as keras:
        config = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).get_config()
        keras.optimizers.LossScaleOptimizer.from_config(config)
        fails(keras, "inner_optimizer" not in config)


def test_h5_options_and_exclusions_of_the_wrapper_do_nothing():
    """On Keras's wrapper a `clipnorm` set later and an exclusion from decay have no effect."""
    w, b = gs.Variable(0.0, name="w"), gs.Variable(1.0, name="b")
    opt = gs.LossScaleOptimizer(gs.SGD(1.0, weight_decay=0.5), initial_scale=1.0)
    opt.exclude_from_weight_decay(var_names=["b"])
    opt.clipnorm = 1.0
    opt.apply([-100.0, 0.0], [w, b])
    assert (float(w), float(b)) == (1.0, 1.0)

    with live("keras") as keras:
        theirs = [keras.Variable(0.0, name="w"), keras.Variable(1.0, name="b")]
        inner = keras.optimizers.SGD(1.0, weight_decay=0.5)
        peer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
        peer.exclude_from_weight_decay(var_names=["b"])
        peer.clipnorm = 1.0
        keras_step(peer, theirs)(jnp.float32(-100.0), jnp.float32(0.0))
        fails(keras, [float(v.value) for v in theirs] != [1.0, 1.0])


def test_h6_the_floor_is_lost_under_jit():
    """jmp's floor goes back to 1 when the scale crosses jit; ours is part of the rule."""
    rule = gs.DynamicLossScale(1.0, min_scale=2.0**-4)
    state = jax.tree.map(lambda x: x, rule.init())
    update = jax.jit(rule.update)
    for _ in range(10):
        state = update(state, False)
    assert float(state.scale) == 2.0**-4

    with live("jmp") as jmp:
        scale = jmp.DynamicLossScale(jnp.float32(1.0), min_loss_scale=jnp.float32(2.0**-4))
        adjust = jax.jit(lambda scale, finite: scale.adjust(finite))
        for _ in range(10):
            scale = adjust(scale, jnp.array(False))
        fails(jmp, float(scale.loss_scale) != 2.0**-4)


def test_h7_gradients_are_divided_by_the_new_scale():
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

    with live("mpx") as mpx:
        scaling = mpx.DynamicLossScaling(jnp.float32(8.0), jnp.float32(1.0), period=1)
        loss, _, _, grads = mpx.filter_value_and_grad(lambda w: 2 * w, scaling)(jnp.float32(1.0))
        fails(mpx, (float(loss), float(grads)) != (2.0, 2.0))


def test_h8_the_first_step_is_lost_and_the_second_compiled_again():
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

    with live("flax.training.dynamic_scale") as flax:
        scale, traces, finite, losses = flax.DynamicScale(), [], [], []

        @jax.jit
        def their_step(scale, params):
            traces.append(1)
            return scale.value_and_grad(lambda p: p["w"].mean())(params)

        for _ in range(2):
            scale, ok, loss, _ = their_step(scale, {"w": jnp.ones(4, jnp.float16)})
            finite.append(bool(ok))
            losses.append(float(loss))
        fails(flax, len(traces) > 1 or not finite[0] or not np.isfinite(losses[0]))


def test_h8_float64_is_cut_to_float32():
    """flax hands out float64 gradients cut to float32; ours keep all their digits."""
    with jax.enable_x64(True):
        params = jnp.float64(1 / 3)
        state = gs.loss_scaled(optax.sgd(0.1)).init(params)
        loss, grads = gs.value_and_grad(lambda w: w * w, state)(params)
        assert (float(loss), float(grads)) == (float(params * params), float(2 * params))

        with live("flax.training.dynamic_scale") as flax:
            scale = flax.DynamicScale(scale=1024.0)
            _, _, _, grads = scale.value_and_grad(lambda w: w * w)(params)
            fails(flax, float(grads) != float(2 * params))


def test_h8_the_scale_grows_one_step_late():
    """flax's interval of 3 grows after 4 finite steps; ours after 3."""
    rule = gs.DynamicLossScale(2.0, increment_period=3)
    state, scales = rule.init(), []
    for _ in range(7):
        state = rule.update(state, True)
        scales.append(float(state.scale))
    assert scales == [2, 2, 4, 4, 4, 8, 8]

    with live("flax.training.dynamic_scale") as flax:
        peer, theirs = flax.DynamicScale(scale=2.0, growth_interval=3), []
        for _ in range(7):
            peer = peer.value_and_grad(lambda w: w * w)(jnp.float32(1.0))[0]
            theirs.append(float(peer.scale))
        fails(flax, theirs != scales)


def test_h8_each_device_has_a_scale_of_its_own():
    """Under `shard_map` flax's devices drift apart after an inf on one; ours agree."""
    mesh, spec = jax.make_mesh((8,), ("data",)), PartitionSpec("data")
    params, data = jnp.float32(1.0), jnp.ones(8).at[1].set(jnp.inf)
    tx = gs.loss_scaled(optax.sgd(0.5), gs.DynamicLossScale(1024.0))

    def ours(x):
        state = tx.init(params)
        _, grads = gs.value_and_grad(lambda w: (w * x).sum(), state)(params)
        return tx.update(grads, state, params)[1].loss_scale.scale[None]

    def everywhere(fn):
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return mapped(jax.device_put(data, NamedSharding(mesh, spec))).tolist()

    assert everywhere(ours) == [512.0] * 8

    with live("flax.training.dynamic_scale") as flax:

        def theirs(x):
            peer = flax.DynamicScale(scale=1024.0)
            return peer.value_and_grad(lambda w: (w * x).sum())(params)[0].scale[None]

        fails(flax, len(set(everywhere(theirs))) > 1)


def test_h9_the_scale_has_no_floor():
    """NaNs drive jaxamp's scale to 0, a bad step being repeated up to ten times; ours has one."""
    rule = gs.DynamicLossScale()
    state, update = rule.init(), jax.jit(rule.update)
    for _ in range(240):
        state = update(state, False)
    assert float(state.scale) == 2.0**-24

    with live("jaxamp") as jaxamp:
        fn = jaxamp.dynamic_scale_value_and_grad(lambda w: w * jnp.nan, redo_on_nan=20)
        state = jaxamp.DynamicScalerState()
        for _ in range(12):
            state, _ = fn(jnp.float32(1.0), dynamic_scaler_state=state)
        fails(jaxamp, float(state.scaler) == 0)


def test_h10_nan_is_applied_after_enough_bad_steps():
    """optax's `apply_if_finite` in the end applies the NaN; ours never does."""
    params = jnp.float32(1.0)
    tx = gs.loss_scaled(optax.adam(0.1))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(300):
        updates, state = update(jnp.float32(jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params), float(state.loss_scale.scale)) == (1.0, 1.0)

    peer = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=5)
    state, update = peer.init(params), jax.jit(peer.update)
    for _ in range(10):
        updates, state = update(jnp.float32(jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    fails(optax, np.isnan(float(params)))


@pytest.mark.parametrize(("gradient", "step"), [(0.0, 0.0), (1e-3, 0.125)])
def test_h10_adam_divides_by_zero_in_float16(gradient, step):
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

    peer, params = optax.adam(0.125), jnp.ones(3, jnp.float16)
    updates, _ = peer.update(grads, peer.init(params), params)
    fails(optax, not np.isfinite(updates).all())


def test_h10_float16_gradients_are_clipped_to_zero():
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

    peer = optax.clip_by_global_norm(1.0)
    updates, _ = peer.update(grads, peer.init(params), params)
    fails(optax, not np.asarray(updates).any())


def test_deepspeed_and_fairseq_take_large_gradients_for_inf():
    """They look at the sum or norm of the gradients, which overflows; ours at the gradients."""
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


def test_keras_does_not_train_on_after_a_storm_of_bad_batches():
    """45 NaN batches leave Keras at a scale of 2**-30; ours goes on as float32 would."""
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

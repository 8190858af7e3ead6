"""Keras models on the JAX backend, with our loss scale: `fit`, loops, meshes, files."""

import warnings
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs

keras = pytest.importorskip("keras")

from gainstage.interop.keras import (
    LogLossScale,
    LossScaleOptimizer,
    compile,
)

# Keras itself, where it saves a model or sets a rate with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ORIGINAL, SGD = keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD


def data(poisoned=(), batches=8, size=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batches * size, 4)).astype(np.float32)
    y = (x @ np.array([[1.0], [-2.0], [0.5], [0.0]])).astype(np.float32)
    for batch in poisoned:
        x[batch * size, 0] = np.inf
    return x, y


def model_of(policy="mixed_float16"):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, activation="tanh", dtype=policy),
        keras.layers.Dense(1, dtype=policy),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    return model


def fitted(optimizer, poisoned=(), epochs=3, policy="mixed_float16", **options):
    model = model_of(policy)
    model.compile(optimizer, "mse", **options)
    x, y = data(poisoned)
    return model, model.fit(x, y, 16, epochs, verbose=0, shuffle=False).history


def weights_of(model):
    return [np.asarray(v.value) for v in model.trainable_variables]


INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.02, clipnorm=1.0),
    "accumulating": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize(
    "poisoned",
    [pytest.param((), id="clean", marks=pytest.mark.thorough), pytest.param((2, 5), id="poisoned")],
)
@pytest.mark.parametrize("kind", INNER)
def test_fit_does_as_keras_where_keras_works(kind, poisoned):
    """The same weights and decisions as Keras's own wrapper, with and without poisoned batches."""
    ours, _ = fitted(LossScaleOptimizer(INNER[kind](), 2.0**10, 5), poisoned)
    theirs, _ = fitted(ORIGINAL(INNER[kind](), 2.0**10, 5), poisoned)
    assert type(ours.optimizer) is LossScaleOptimizer
    for one, other in zip(weights_of(ours), weights_of(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for name in ("dynamic_scale", "step_counter"):
        assert float(getattr(ours.optimizer, name).value) == float(
            getattr(theirs.optimizer, name).value
        )
    assert int(ours.optimizer.inner_optimizer._iterations.value) == 24 - 3 * len(poisoned)


def test_the_log_tells_scale_and_skips():
    """`LogLossScale` counts skipped steps, several to a call too."""
    for per_call in (1, 3):
        model = model_of()
        model.compile(
            LossScaleOptimizer(keras.optimizers.SGD(0.05), 2.0**10),
            "mse",
            steps_per_execution=per_call,
        )
        x, y = data((1, 6))
        fit = model.fit(x, y, 16, 2, verbose=0, shuffle=False, callbacks=[LogLossScale()])
        assert fit.history["skipped_steps"] == [2, 4]
        assert fit.history["loss_scale"] == [2.0**8, 2.0**6]
        again = model.fit(x, y, 16, 1, verbose=0, shuffle=False, callbacks=[LogLossScale()])
        assert again.history["skipped_steps"] == [2]  # those of this fit


def test_the_log_warns_of_an_epoch_by_the_scale_at_its_start():
    """What the scale did in earlier epochs is none of an epoch's skips."""

    def batches():
        for n in range(40):
            yield np.full((2, 2), 1.0 if n < 20 else np.nan, "float32"), np.ones((2, 1), "float32")

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    scaled = LossScaleOptimizer(keras.optimizers.SGD(0.01), 2.0**8, dynamic_growth_steps=5)
    model.compile(scaled, "mse")
    told = r"20 of the 20 steps of epoch 2 were skipped; the loss scale went from 2\^12 to"
    with pytest.warns(UserWarning, match=told):
        model.fit(
            batches(),
            steps_per_epoch=20, epochs=2, verbose=0, shuffle=False, callbacks=[LogLossScale()],
        )  # fmt: skip


def test_the_log_warns_of_single_bad_steps_that_go_on():
    """One bad step of eight in each epoch is told once it is more than eight in all, with the rule
    that keeps the scale through it."""
    x, y = np.ones((16, 2), "float32"), np.ones((16, 1), "float32")
    x[3] = np.nan
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
    how = {"batch_size": 2, "verbose": 0, "shuffle": False, "callbacks": [LogLossScale()]}
    model.fit(x, y, epochs=8, **how)
    told = r"9 of the 72 steps so far were skipped; .*loss_scale=gs.DynamicLossScale\(hyst.* keeps"
    with pytest.warns(UserWarning, match=told):
        model.fit(x, y, epochs=9, **how)


def test_a_log_of_an_optimizer_without_a_scale_is_refused():
    """The error names the optimizer, and how to compile the model."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    with pytest.raises(TypeError, match=r"got SGD\. Write model.compile\(gainstage.interop.keras"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=[LogLossScale()])


def test_an_optimizer_of_keras_is_no_state_of_optax():
    """Asked for the telemetry of Keras's optimizer, the error names what Keras's users read."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01))
    with pytest.raises(ValueError, match=r"optimizer of Keras: read its loss_scale, .* to fit"):
        gs.diagnostics.telemetry(optimizer)


def test_averages_replace_the_weights_once_there_are_some():
    """At the end of `fit`; if every step was skipped the weights stay what they were."""
    averaged, _ = fitted(LossScaleOptimizer(SGD(0.05, use_ema=True, ema_momentum=0.5)), epochs=1)
    theirs, _ = fitted(
        ORIGINAL(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)), epochs=1
    )
    for one, other in zip(weights_of(averaged), weights_of(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    before = weights_of(model_of())
    skipped, _ = fitted(LossScaleOptimizer(SGD(0.05, use_ema=True)), range(8), 1)
    for one, other in zip(weights_of(skipped), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_name_is_excluded_from_decay_and_not_a_path():
    """`var_names` are looked for in the name of a variable, not in that of its layer."""
    layer = keras.layers.Dense(1, name="debias")
    layer.build((1, 1))
    layer.kernel.assign([[1.0]])
    layer.bias.assign([1.0])
    opt = LossScaleOptimizer(SGD(1.0, weight_decay=0.5))
    opt.exclude_from_weight_decay(var_names=["bias"])
    opt.apply([jnp.zeros((1, 1)), jnp.zeros(1)], layer.trainable_variables)
    assert (float(layer.kernel.value[0, 0]), float(layer.bias.value[0])) == (0.5, 1.0)


def test_one_of_two_variables_of_a_name_is_excluded_from_decay():
    """`var_list` is compared by identity."""
    a, b = keras.Variable(1.0, name="w"), keras.Variable(1.0, name="w")
    opt = LossScaleOptimizer(SGD(1.0, weight_decay=0.5))
    opt.exclude_from_weight_decay(var_list=[a])
    opt.apply([jnp.float32(0)] * 2, [a, b])
    assert (float(a.value), float(b.value)) == (1.0, 0.5)


def test_a_loss_scale_factor_that_is_set_later_is_refused():
    """The wrapper multiplies the loss by its own scale only, so a factor would divide twice."""
    opt, w = LossScaleOptimizer(SGD(0.5)), keras.Variable(1.0)
    opt.inner_optimizer.loss_scale_factor = 8.0
    for use in (lambda: opt.scale_loss(1.0), lambda: opt.apply([jnp.float32(1.0)], [w])):
        with pytest.raises(ValueError, match=r"without loss_scale_factor.*got 8.0"):
            use()
    assert float(w.value) == 1.0


def test_an_option_that_is_set_on_the_wrapper_is_refused():
    """It would have no effect there; the error says where to set it."""
    opt = LossScaleOptimizer(SGD(0.5))
    with pytest.raises(AttributeError, match=r"optimizer.inner_optimizer.clipnorm = 1.0"):
        opt.clipnorm = 1.0
    opt.inner_optimizer.clipnorm = 1.0


# Asked for in keras#19244 (JAX loops).
def test_a_loop_of_ones_own():
    """The eager `apply`, which crashes in Keras, takes steps, skips, and builds by itself."""
    w = keras.Variable(np.ones(3, np.float32), name="w")
    frozen = keras.Variable(np.ones(3, np.float32), name="frozen")
    opt = LossScaleOptimizer(SGD(0.5), 8.0)
    opt.build([w, frozen])
    opt.apply([jnp.full(3, 8.0)], [w])
    np.testing.assert_array_equal(w.value, [0.5] * 3)
    np.testing.assert_array_equal(frozen.value, [1] * 3)
    opt.apply_gradients([(jnp.full(3, np.nan), w), (jnp.ones(3), frozen)])
    np.testing.assert_array_equal(w.value, [0.5] * 3)
    np.testing.assert_array_equal(frozen.value, [1] * 3)
    assert float(opt.dynamic_scale.value) == 4.0
    assert float(opt.scale_loss(jnp.float16(20000))) == 80000
    assert int(opt.iterations.value) == 1
    theirs = ORIGINAL(keras.optimizers.SGD(0.5), 8.0)
    variable = keras.Variable(np.ones(3, np.float32))
    with pytest.raises(jax.errors.UnexpectedTracerError):  # the reason for all this
        theirs.apply([jnp.full(3, 8.0)], [variable])


def test_another_rule():
    """Any rule moves the scale, its own counts among the optimizer's variables."""
    rule = gs.DynamicLossScale(2.0**10, 100, hysteresis=2, min_scale=2.0**9)
    model, _ = fitted(LossScaleOptimizer(keras.optimizers.SGD(0.05), loss_scale=rule), (2, 3, 6), 1)
    assert float(model.optimizer.dynamic_scale.value) == 2.0**9
    fixed, _ = fitted(
        LossScaleOptimizer(keras.optimizers.SGD(0.05), loss_scale=gs.FixedLossScale(64.0)), (2,), 1
    )
    assert float(fixed.optimizer.dynamic_scale.value) == 64
    with pytest.raises(TypeError, match="a rule for loss_scale"):
        LossScaleOptimizer(keras.optimizers.SGD(0.05), loss_scale="3")


def test_what_a_wrapper_cannot_take_is_named():
    """An argument that a rule replaces, and an optimizer that is none, are errors with a remedy."""
    sgd, rule = keras.optimizers.SGD, gs.DynamicLossScale()
    with pytest.raises(ValueError, match="`loss_scale` cannot be combined with `initial_scale`"):
        LossScaleOptimizer(sgd(), 8.0, loss_scale=rule)
    with pytest.raises(ValueError, match=r"`loss_scale` cannot be .* with `dynamic_growth_steps`"):
        LossScaleOptimizer(sgd(), dynamic_growth_steps=3, loss_scale=rule)
    with pytest.raises(TypeError, match=r"such as keras\.optimizers\..*got gainstage's SGD"):
        LossScaleOptimizer(gs.optimizers.SGD())
    with pytest.raises(TypeError, match=r"got 'adam'\. Use keras\.optimizers\.get"):
        LossScaleOptimizer("adam")
    with pytest.raises(TypeError, match=r"Use gainstage\.interop\.keras\.LossScaleOptimizer"):
        gs.optimizers.LossScaleOptimizer(sgd())
    config = LossScaleOptimizer(sgd(), loss_scale=gs.DynamicLossScale(8.0)).get_config()
    assert float(LossScaleOptimizer.from_config(config).loss_scale) == 8.0


def test_the_learning_rate_can_be_set_and_scheduled():
    """By assignment, which Keras's callbacks do, and by a callback."""
    model, _ = fitted(LossScaleOptimizer(SGD(0.05)), epochs=1)
    model.optimizer.learning_rate = 0.0
    before = weights_of(model)
    x, y = data()
    model.fit(x, y, 16, 1, verbose=0)
    for one, other in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(one, other)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.125)
    model.fit(x, y, 16, 1, verbose=0, callbacks=[schedule])
    assert float(model.optimizer.learning_rate.value) == 0.125


def test_a_model_on_a_mesh():
    """Under `ModelParallel` all state lies on the mesh; weights are those of one device."""
    float32 = "float32"  # sums over devices in float16 would round
    alone, _ = fitted(LossScaleOptimizer(keras.optimizers.Adam(0.02), 2.0**10), (2,), 2, float32)
    mesh = keras.distribution.DeviceMesh((4, 2), ["batch", "model"])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*dense.*kernel"] = (None, None)
    layouts[".*dense/kernel"] = (None, "model")
    distribution = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)
    try:
        adam = LossScaleOptimizer(keras.optimizers.Adam(0.02), 2.0**10)
        spread, _ = fitted(adam, (2,), 2, float32)
        for one, other in zip(weights_of(alone), weights_of(spread), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert float(spread.optimizer.dynamic_scale.value) == 2.0**8
        for variable in spread.optimizer.variables:
            assert len(variable.value.sharding.device_set) == 8
    finally:
        keras.distribution.set_distribution(None)


def test_a_model_whose_batches_are_divided():
    """Under `DataParallel`, and without compilation, training is that of one device."""
    options = {"epochs": 1, "policy": "float32"}
    alone, _ = fitted(LossScaleOptimizer(keras.optimizers.Adam(0.02), 2.0**10), (2,), **options)
    eagerly, _ = fitted(
        LossScaleOptimizer(keras.optimizers.Adam(0.02), 2.0**10), (2,), run_eagerly=True, **options
    )
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        spread, _ = fitted(
            LossScaleOptimizer(keras.optimizers.Adam(0.02), 2.0**10), (2,), **options
        )
    finally:
        keras.distribution.set_distribution(None)
    for other in (eagerly, spread):
        for one, two in zip(weights_of(alone), weights_of(other), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
        assert float(other.optimizer.dynamic_scale.value) == 2.0**9


def test_what_quantized_layers_measure_is_no_gradient():
    """A rule that measures gradients leaves out what is kept in the place of one."""
    w, amax = keras.Variable([1.0]), keras.Variable([1.0])
    amax.overwrite_with_gradient = True
    opt = LossScaleOptimizer(SGD(0.0), loss_scale=gs.AdaptiveLossScale(1024.0))
    opt.apply([jnp.float32([1.0]), jnp.float32([448.0])], [w, amax])
    assert float(opt.dynamic_scale.value) == 2.0**24
    assert np.asarray(amax.value).tolist() == [448.0]


def test_fit_goes_on_after_averages_replaced_the_weights():
    """With `use_ema` a model can be fitted again."""
    model, _ = fitted(LossScaleOptimizer(SGD(0.05, use_ema=True)), epochs=1)
    x, y = data()
    averages = weights_of(model)
    model.fit(x, y, 16, 1, verbose=0)
    assert not np.array_equal(weights_of(model)[0], averages[0])
    assert model.optimizer.built


@pytest.mark.parametrize("steps", [None, 2])
def test_measured_values_replace_their_variable_at_the_end_of_a_window(steps):
    """What quantized layers measure takes the place of its variable when, and as, it does in
    Keras: the largest of a window at its end, beside trained variables and without any."""
    options = {"gradient_accumulation_steps": steps}
    runs = []
    for opt in (LossScaleOptimizer(SGD(1.0, **options), 1.0), SGD(1.0, **options)):
        w, amax = keras.Variable([4.0]), keras.Variable([1.0])
        amax.overwrite_with_gradient = True
        trace = []
        for value in (7.0, 5.0, 3.0, 2.0, 9.0):
            opt.apply([jnp.float32([1.0]), jnp.float32([value])], [w, amax])
            trace.append((float(w.value[0]), float(amax.value[0])))
        runs.append(trace)
    assert runs[0] == runs[1]
    alone = LossScaleOptimizer(SGD(1.0, use_ema=True, ema_overwrite_frequency=1), 1.0)
    alone.apply([jnp.float32([6.0])], [amax])
    alone.finalize_variable_values([amax])
    assert float(amax.value[0]) == 6.0


def test_freezing_a_layer_without_compiling_again_says_what_to_do():
    """A model that has fewer trainable variables than its optimizer cannot be fitted."""
    model, _ = fitted(LossScaleOptimizer(SGD(0.05)), epochs=1, policy="float32")
    model.layers[0].trainable = False
    x, y = data()
    with pytest.raises(ValueError, match=r"built with 4 trainable variables; got 2.*compile"):
        model.fit(x, y, 16, 1, verbose=0)
    with pytest.raises(ValueError, match="to be built"):
        LossScaleOptimizer(SGD(0.05)).stateless_apply([], [], [])


def test_a_missing_gradient_is_a_warning():
    """Variables without a gradient are named and left alone, in `fit` and in a loop; variables
    that a call does not mention are not."""
    a, b = (keras.Variable([1.0], name=name) for name in "ab")
    opt = LossScaleOptimizer(SGD(0.5), loss_scale=gs.FixedLossScale(1.0))
    opt.build([a, b])
    opt.apply([jnp.float32([1.0])], [a])
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['b'\]"):
        opt.apply([jnp.float32([1.0]), None], [a, b])
    values = [[v.value for v in variables] for variables in (opt.variables, [a, b])]
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['a'\]"):
        opt.stateless_apply(values[0], [None, jnp.float32([1.0])], values[1])
    assert [float(a.value[0]), float(b.value[0])] == [0.0, 1.0]
    with pytest.raises(ValueError, match="No gradients provided"):
        opt.apply([None], [a])
    with pytest.raises(ValueError, match=r"one for each of \['a', 'b'\]; got 1"):
        opt.apply([jnp.float32([1.0])])


def test_the_scale_can_be_asked_for():
    """`loss_scale` is the scale in force, before `build`, after steps, and in a callback."""
    opt = LossScaleOptimizer(SGD(0.5), 8.0)
    assert opt.loss_scale.dtype == jnp.float32
    assert float(opt.loss_scale) == 8.0
    opt.apply([jnp.float32([np.inf])], [keras.Variable([1.0])])
    assert float(opt.loss_scale) == 4.0
    seen, model = [], model_of()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05), 2.0**10), "mse")

    def note(batch, logs):
        model.jax_state_sync()
        seen.append(float(model.optimizer.loss_scale))

    x, y = data(poisoned=[1], batches=3)
    notes = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    model.fit(x, y, 16, verbose=0, shuffle=False, callbacks=notes)
    assert seen == [2.0**10, 2.0**9, 2.0**9]


def test_a_configuration_without_a_rule_is_one_of_keras():
    """Keras's own wrapper takes the configuration, unless a rule of ours was given."""
    opt = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0, 3)
    config = opt.get_config()
    theirs = ORIGINAL.from_config(opt.get_config())
    assert (theirs.initial_scale, theirs.dynamic_growth_steps) == (8.0, 3)
    assert LossScaleOptimizer.from_config(config).rule == gs.DynamicLossScale(
        8.0, 3, min_scale=2.0**-24
    )
    rule = gs.DynamicLossScale(8.0, 3, min_scale=1.0)
    config = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=rule).get_config()
    assert LossScaleOptimizer.from_config(config).rule == rule


def test_the_arguments_of_the_scale_can_be_set(tmp_path):
    """As in Keras, `fit` and `apply` use them, and a configuration and a saved model have them."""
    seen = []
    for kind in (ORIGINAL, LossScaleOptimizer):
        opt = kind(keras.optimizers.SGD(0.05), 2.0**10, 2000)
        opt.initial_scale, opt.dynamic_growth_steps = 8.0, 2
        model, _ = fitted(opt, epochs=1)
        seen.append(float(opt.dynamic_scale.value))
        assert kind.from_config(opt.get_config()).get_config() == opt.get_config()
        assert "rule" not in opt.get_config()
    assert seen == [8.0 * 2**4] * 2
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert (loaded.initial_scale, loaded.dynamic_growth_steps) == (8.0, 2)
    opt.dynamic_growth_steps = 1
    opt.scale_loss(1.0)
    opt.apply([jnp.zeros(v.shape) for v in model.trainable_variables])
    assert float(opt.dynamic_scale.value) == 8.0 * 2**5
    with pytest.raises(ValueError, match="for dynamic_growth_steps; got 0"):
        opt.dynamic_growth_steps = 0
    assert opt.dynamic_growth_steps == 1


def test_arguments_of_the_scale_are_not_set_beside_a_rule():
    """A rule that the user has written has these numbers, and the error says so."""
    rule = gs.AdaptiveLossScale()
    opt = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=rule)
    with pytest.raises(AttributeError, match=r"no `loss_scale`.*got 2.*Pass loss_scale="):
        opt.dynamic_growth_steps = 2
    assert opt.rule == rule


def test_growth_steps_that_a_compiled_fit_does_not_see_are_told_once():
    """Keras compiles the step of `fit` once, and goes on with the old number."""
    opt = LossScaleOptimizer(keras.optimizers.SGD(0.05), 8.0, 2000)
    model, _ = fitted(opt, epochs=1)
    x, y = data()
    opt.dynamic_growth_steps = 2
    with pytest.warns(UserWarning, match=r"=2 after fit had.*with 2000.*Write model\.compile"):
        model.fit(x, y, 16, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y, 16, verbose=0)
        model.compile(opt, "mse")
        opt.dynamic_growth_steps = 4
        model.fit(x, y, 16, verbose=0)
    assert float(opt.dynamic_scale.value) == 32.0


# Asked for in keras-core#571.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
def test_the_loss_that_is_shown_is_the_true_one():
    """The history of Keras's `fit` does not show the loss times the scale."""
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), 2.0**10), "mse")
    history = model.fit(np.ones((4, 2)), np.zeros((4, 1)), verbose=0).history
    assert history["loss"] == [4.0]


# Asked for in keras#19534.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
def test_what_fp8_layers_measure_is_kept():
    """A variable that its gradient overwrites is not unscaled, averaged, clipped or decayed."""
    keras = pytest.importorskip("keras", reason="keras is not installed")
    from gainstage.interop.keras import LossScaleOptimizer

    options = {"weight_decay": 0.5, "clipnorm": 1.0, "gradient_accumulation_steps": 2}
    weight, largest = keras.Variable(1.0), keras.Variable(0.0)
    largest.overwrite_with_gradient = True
    opt = LossScaleOptimizer(SGD(0.5, momentum=0.9, **options), initial_scale=8.0)
    opt.build([weight, largest])
    for measured in (3.0, 5.0):
        opt.apply([jnp.float32(8.0), jnp.float32(measured)], [weight, largest])
    assert float(largest.value) == 5.0
    assert float(weight.value) == 1.0 - 0.25 - 0.5


@pytest.mark.as_users
@pytest.mark.parametrize("kind", ["sgd", "accumulating", "original", "without"])
def test_a_skipped_step_keeps_the_state_of_layers(kind):
    """Compiled by `interop.keras.compile` a skipped step leaves the moving mean and variance of
    BatchNormalization and the seed of Dropout bit for bit; by Keras alone they are no longer
    finite, and our optimizer says so once."""
    inner = INNER.get(kind, INNER["sgd"])
    wrap = ORIGINAL if kind == "original" else LossScaleOptimizer
    norm = keras.layers.BatchNormalization(momentum=0.5)
    layers = [norm, keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    if kind != "without":
        assert compile(model, wrap(inner(), 2.0**10), "mse", dtype=None) is model
    else:
        model.compile(wrap(inner(), 2.0**10), "mse")
    x, y = data(poisoned=(1,), batches=3)
    states = []
    for batch in range(3):
        rows = slice(16 * batch, 16 * batch + 16)
        told = kind == "without" and batch == 0
        with pytest.warns(UserWarning, match="Keras's trainer") if told else nullcontext():
            model.fit(x[rows], y[rows], 16, verbose=0)
        states.append([np.asarray(v.value) for v in model.non_trainable_variables])
    finite = [all(np.isfinite(v).all() for v in state) for state in states]
    if kind == "without":
        assert finite == [True, False, False]
        return
    assert finite == [True] * 3
    for first, skipped, applied in zip(*states, strict=True):
        np.testing.assert_array_equal(first, skipped)
        assert (skipped != applied).any()


def test_a_fit_without_a_step_says_so_once():
    """At the end of a fit that was all skipped, with the scale at its minimum, there is a warning;
    a fit with steps has none."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x, y = np.ones((128, 2), "float32"), np.ones((128, 1), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    with pytest.warns(UserWarning, match="No step since the last fit was applied"):
        model.fit(x * np.nan, y, batch_size=2, verbose=0)
    model.fit(x * np.nan, y, batch_size=2, verbose=0)  # told already


def test_a_fit_of_fifteen_bad_batches_may_be_a_search():
    """A scale that fell by 2**15 may have been too high; by 2**16 it is said that nothing moved."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x, y = np.ones((32, 2), "float32"), np.ones((32, 1), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    model.fit(x[:30] * np.nan, y[:30], batch_size=2, verbose=0)  # warnings are errors
    assert float(model.optimizer.dynamic_scale.value) == 2.0**0
    model.optimizer.dynamic_scale.assign(2.0**15)
    model.fit(x, y, batch_size=2, verbose=0)
    with pytest.warns(UserWarning, match=r"No step since the last fit.*fallen to 2\^-1\."):
        model.fit(x * np.nan, y, batch_size=2, verbose=0)


DEAD = "No step since the last fit was applied, "


def fits(rule, *batches):
    """What is said at the end of fits of a model that all have this rule, one for each number of
    bad batches and number of batches."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), loss_scale=rule), "mse")
    said = []
    for bad, count in batches:
        x, y = np.ones((count, 2), "float32"), np.ones((count, 1), "float32")
        x[:bad] = np.nan
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(x, y, batch_size=1, verbose=0, shuffle=False)
        said.append([str(w.message) for w in found if DEAD in str(w.message)])
    return said


def test_a_fit_that_a_fixed_scale_kills_says_so():
    """A fixed scale is named, once, if it has never let a step pass."""
    ((first,), none) = fits(gs.FixedLossScale(8.0), (3, 3), (3, 3))
    assert "at the fixed loss scale of 2^3" in first
    assert "loss_scale=gainstage.DynamicLossScale()" in first
    assert none == []
    assert fits(gs.FixedLossScale(8.0), (1, 2), (1, 1), (0, 1), (1, 1)) == [[]] * 4


def test_a_fit_that_an_adaptive_scale_cannot_mend_says_so():
    """`AdaptiveLossScale` is told after 50 bad steps in a row; fewer may be its search."""
    assert fits(gs.AdaptiveLossScale(), (40, 40)) == [[]]
    assert "and 60 in a row were skipped" in fits(gs.AdaptiveLossScale(), (60, 60))[0][0]
    assert fits(gs.AdaptiveLossScale(), (60, 61)) == [[]]
    assert fits(gs.DynamicLossScale(), (3, 3)) == [[]]


def test_a_fit_of_no_steps_says_nothing():
    """A fit that runs no step is not dead, though none was applied."""
    x = np.ones((4, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    rule = gs.FixedLossScale(8.0)
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), loss_scale=rule), "mse")
    with warnings.catch_warnings(action="error"):
        model.fit(x, x[:, :1], initial_epoch=1, verbose=0)
        model.fit(x, x[:, :1], verbose=0)
        for _ in range(3):
            model.fit(x, x[:, :1], initial_epoch=1, verbose=0)


NOT_SCALED = "no loss was multiplied by it"


def test_gradients_of_a_loss_that_was_not_scaled_are_told_once():
    """Each wrapper warns once, also if the scale was printed before the first step; the line says
    what to write."""
    for printed in (False, True):
        w, opt = keras.Variable([1.0]), LossScaleOptimizer(SGD(0.5), 8.0)
        if printed:
            print(opt.loss_scale)
            opt.apply([jnp.ones(1)], [w])
        with pytest.warns(UserWarning, match=rf"{NOT_SCALED}.*optimizer.scale_loss\(loss\)"):
            opt.apply([jnp.ones(1)], [w])
        with warnings.catch_warnings(action="error"):
            opt.apply([jnp.ones(1)], [w])


def test_a_scale_that_is_read_outside_of_a_program_counts():
    """Gradients that are multiplied by `loss_scale` outside of a trace are scaled."""
    w, opt = keras.Variable([1.0]), LossScaleOptimizer(keras.optimizers.SGD(0.25), 8.0)
    grads = jax.jit(jax.grad(lambda w, scale: jnp.sum(w * w) * scale))
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            opt.apply([grads(w.value, opt.loss_scale)], [w])
    assert float(w.numpy()[0]) == 0.125


@pytest.mark.parametrize("built", [False, True])
def test_a_scale_that_would_be_frozen_into_a_program_is_refused(built):
    """A compiled function cannot read a scale that changes; an eager gradient, and a function with
    a fixed scale, can."""
    w, opt = keras.Variable([1.0]), LossScaleOptimizer(SGD(0.25), 8.0)
    if built:
        opt.build([w])
    for read in (opt.scale_loss, lambda loss: loss * opt.loss_scale):
        loss = jax.grad(lambda w, read=read: read(jnp.sum(w * w)))
        with pytest.raises(ValueError, match=r"frozen into the program.*StatelessScope"):
            jax.jit(loss)(w.value)
        assert loss(w.value) == 16
    fixed = LossScaleOptimizer(SGD(0.25), loss_scale=gs.FixedLossScale(8.0))
    assert jax.jit(jax.grad(lambda w: fixed.scale_loss(jnp.sum(w * w))))(w.value) == 16


def test_what_fit_has_scaled_says_nothing_of_a_later_loop():
    """True gradients are told after `fit` too, and with a first scale of 1; not with a fixed 1."""
    x, y = data(batches=1)
    for scaling, silent in (
        ({"initial_scale": 8.0}, False),
        ({"initial_scale": 1.0}, False),
        ({"loss_scale": None}, True),
    ):
        model = model_of()
        model.compile(LossScaleOptimizer(SGD(0.05), **scaling), "mse")
        model.fit(x, y, verbose=0)
        grads = [jnp.zeros(v.shape) for v in model.trainable_variables]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.optimizer.apply(grads, model.trainable_variables)
        assert [NOT_SCALED in str(w.message) for w in found] == [True] * (not silent)
        with warnings.catch_warnings(action="error"):
            model.fit(x, y, verbose=0)


class Twice(keras.Sequential):
    """A model that scales its loss, as Keras does once more."""

    def compute_loss(self, *args, **kwargs):
        return self.optimizer.scale_loss(super().compute_loss(*args, **kwargs))


def test_a_loss_that_compute_loss_scales_is_refused():
    """`compute_loss` must not scale the loss, which Keras does after it."""
    x, y = data(batches=1)
    model = Twice([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05)), "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(RuntimeError, match="Leave them out of compute_loss"):
        model.fit(x, y, verbose=0)


class Custom(keras.Model):
    """A model with a training step of its own."""

    def __init__(self, scales):
        super().__init__()
        self.dense, self.scales = keras.layers.Dense(1), scales

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, fixed, optimizer_variables, metrics = state
        x, y = data

        def loss_fn(trainable, fixed):
            predicted, fixed = self.stateless_call(trainable, fixed, x)
            loss = jnp.mean((predicted - y) ** 2)
            pairs = zip(self.optimizer.variables, optimizer_variables, strict=True)
            with keras.StatelessScope(state_mapping=list(pairs)):
                scaled = self.optimizer.scale_loss(loss) if self.scales else loss
            return scaled, (loss, fixed)

        grads, (loss, fixed) = jax.grad(loss_fn, has_aux=True)(trainable, fixed)
        trainable, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        return {"loss": loss}, (trainable, fixed, optimizer_variables, metrics)


def test_a_custom_training_step_is_told_too():
    """`fit` with a `train_step` of one's own warns if it does not scale the loss."""
    x, y = np.ones((16, 2), np.float32), np.ones((16, 1), np.float32)
    for scales in (False, True):
        model = Custom(scales)
        model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05)), "mse")
        model(x)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(x, y, verbose=0)
        told = [str(w.message) for w in found if NOT_SCALED in str(w.message)]
        assert len(told) == (not scales)


def test_a_scale_that_keras_holds_elsewhere_is_named():
    """During `fit`, the scale is read in a scope that knows it; else the error says so."""
    model = model_of()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05)), "mse")

    def read(batch, logs):
        with pytest.raises(RuntimeError, match="jax_state_sync"):
            model.optimizer.scale_loss(1.0)

    x, y = data(batches=3)
    notes = [keras.callbacks.LambdaCallback(on_train_batch_end=read)]
    model.fit(x, y, 16, verbose=0, callbacks=notes)


def test_an_optimizer_that_ends_the_training_in_its_own_way_does_so():
    """`fit` calls `finalize_variable_values` of the inner optimizer's class."""

    class Ended(SGD):
        def finalize_variable_values(self, var_list):
            for variable in var_list:
                variable.assign(jnp.zeros(variable.shape))

    model = model_of("float32")
    model.compile(LossScaleOptimizer(Ended(0.05)), "mse")
    x, y = data(batches=2)
    model.fit(x, y, 16, verbose=0)
    assert all((weight == 0).all() for weight in weights_of(model))

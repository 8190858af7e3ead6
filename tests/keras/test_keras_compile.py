"""`interop.keras.compile`: one call to train in half precision; a skipped step keeps all."""

import pickle
import warnings

import numpy as np
import pytest

import gainstage as gs

keras = pytest.importorskip("keras")

from gainstage.interop.keras import LossScaleOptimizer, compile

# Keras converts its variables as numpy 2 tells of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.sin(X[:, :1])
BAD = np.where(np.arange(4) == 2, np.nan, X).astype("float32")


def model(kind="functional", spectral=True):
    last = keras.layers.Dense(1)
    parts = [
        keras.layers.Dense(8, name="in"),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dropout(0.1, seed=1),
        keras.layers.SpectralNormalization(last, name="out") if spectral else last,
    ]
    if kind == "sequential":
        return keras.Sequential([keras.Input((4,)), *parts])
    x = inputs = keras.Input((4,))
    for part in parts:
        x = part(x)
    return keras.Model(inputs, x)


def contents(net):
    """All state but metrics and the loss scale, as bytes, by path."""
    scale = {id(v) for v in (net.optimizer.dynamic_scale, net.optimizer.step_counter)}
    variables = [*net.variables, *net.optimizer.variables]
    kept = [v for v in variables if id(v) not in scale and "/metric" not in v.path]
    return {f"{v.path} {i}": np.asarray(v.value).tobytes() for i, v in enumerate(kept)}


def fitted(net, x, **options):
    net.fit(x, Y, batch_size=32, verbose=0, **options)
    return net


def saved(net, folder):
    net.save(folder / "net.keras")
    return keras.saving.load_model(folder / "net.keras")


def cloned(net, folder):
    again = keras.models.clone_model(net)
    again.set_weights(net.get_weights())
    again.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
    return again


AGAIN = {
    "itself": lambda net, folder: net,
    "saved and loaded": saved,
    "pickled": lambda net, folder: pickle.loads(pickle.dumps(net)),
    "cloned and compiled": cloned,
}


# Keras clones a Sequential as a Sequential, without its class.
WAYS = [(w, k) for w in AGAIN for k in ("functional", "sequential") if (w, k) != (
    "cloned and compiled", "sequential")]  # fmt: skip


@pytest.mark.parametrize(("way", "kind"), WAYS)
def test_a_skipped_step_of_fit_keeps_all_state(way, kind, tmp_path):
    """After a batch with a NaN weights, slots, moving means, spectral norms and seeds are bit for
    bit what they were, also after saving, loading, pickling and cloning."""
    net = fitted(compile(model(kind), keras.optimizers.Adam(0.01), "mse"), X)
    net = fitted(AGAIN[way](net, tmp_path), X)
    before, scale = contents(net), float(net.optimizer.dynamic_scale.value)
    fitted(net, BAD)
    assert contents(net) == before
    assert float(net.optimizer.dynamic_scale.value) == scale / 2
    assert contents(fitted(net, X)) != before


def test_a_model_computes_and_scales_as_asked():
    """`dtype` is that of the products, `loss_scale` says how a loss is scaled; in bfloat16 it is
    not."""
    net = compile(model(), "adam", "mse", loss_scale=gs.DynamicLossScale(2.0**8))
    assert float(net.optimizer.initial_scale) == 2.0**8
    assert net.get_config()["plan"] == "float16"
    net = compile(model(), "adam", "mse", dtype="bf16", metrics=["mae"])
    assert type(net.optimizer.inner_optimizer) is keras.optimizers.Adam
    assert net.optimizer.loss_scale == 1.0
    assert net.get_config()["plan"] == "bfloat16"
    assert "mae" in fitted(net, X).evaluate(X, Y, verbose=0, return_dict=True)
    own = LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**4)
    assert compile(model(), own, "mse").optimizer is own


def test_mistakes_are_named():
    """Two loss scales, another dtype and what is no model are errors, and change nothing."""
    net, rule = model(), gs.DynamicLossScale()
    kind = type(net)
    with pytest.raises(TypeError, match="Expected an inner_optimizer that does not scale losses"):
        compile(net, LossScaleOptimizer(keras.optimizers.SGD()), "mse", loss_scale=rule)
    with pytest.raises(ValueError, match=r"for dtype; got 'float64'"):
        compile(net, "adam", "mse", dtype="float64")
    with pytest.raises(TypeError, match="Expected a Keras model"):
        compile(keras.layers.Dense(1), "adam", "mse")
    assert type(net) is kind


@pytest.mark.parametrize("again", ["itself", "saved and loaded", "pickled"])
def test_a_model_under_a_policy_of_keras_keeps_all_too(again, tmp_path):
    """With `dtype=None` the layers compute as their policy says; a skipped step keeps all, also
    after saving, loading and pickling, under our optimizer, which the policy asks for."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net = model(spectral=False)  # Keras's spectral norm overflows in float16 by itself
        net = compile(net, keras.optimizers.Adam(0.01), "mse", dtype=None)
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(net.optimizer) is LossScaleOptimizer
    assert net.layers[1].compute_dtype == "float16"
    net = fitted(AGAIN[again](fitted(net, X), tmp_path), X)
    before = contents(net)
    fitted(net, BAD)
    assert contents(net) == before
    assert contents(fitted(net, X)) != before


def test_float32_under_its_own_policy_is_not_scaled():
    """`dtype=None` with layers in float32 scales no loss, whatever the loss scale is."""
    for loss_scale in ("dynamic", gs.DynamicLossScale(), 2.0**8, None):
        net = compile(model(), "adam", "mse", dtype=None, loss_scale=loss_scale)
        assert net.optimizer.loss_scale == 1.0
    with pytest.raises(TypeError, match="Expected a Keras model"):
        compile(keras.layers.Dense(1), "adam", "mse", dtype=None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", None])
def test_a_nan_in_the_data_is_not_taken_for_an_overflow(dtype):
    """A later batch of the first epoch has it: half precision is not named as the cause."""
    net = compile(model(), keras.optimizers.Adam(0.01), "mse", dtype=dtype)
    x = np.concatenate([X, X])
    x[-1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.fit(x, np.concatenate([Y, Y]), len(X), shuffle=False, verbose=0)
    assert all(np.isfinite(np.asarray(v.value)).all() for v in net.trainable_variables)

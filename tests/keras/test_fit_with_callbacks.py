"""What Keras models are trained with beside an optimizer: constraints, weights of samples, several
outputs, callbacks. Our wrapper takes the steps of Keras's own."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from gainstage.interop.keras import LossScaleOptimizer

# Keras itself, where it saves a model or sets a rate with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
KERAS = keras.optimizers.LossScaleOptimizer
WRAPPERS = {
    "keras": lambda inner: KERAS(inner, initial_scale=2.0**10),
    "ours": lambda inner: LossScaleOptimizer(inner, initial_scale=2.0**10),
}


def rows(count=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    y = (x @ np.array([[1.0], [-2.0], [0.5], [0.0]])).astype(np.float32)
    return x, y


def model_of(outputs=1, **options):
    """A network with one output, or two."""
    keras.utils.set_random_seed(0)
    first = keras.Input((4,))
    hidden = keras.layers.Dense(8, "tanh", dtype="mixed_float16", **options)(first)
    last = [keras.layers.Dense(1, dtype="float32", name=f"out{i}")(hidden) for i in range(outputs)]
    return keras.Model(first, last if outputs > 1 else last[0])


def weights_of(model):
    return [np.asarray(v.value) for v in model.trainable_variables]


def assert_equal(ways):
    """The weights of two models are the same; so are the figures of their histories."""
    (theirs, history), (mine, record) = ways["keras"], ways["ours"]
    for a, b in zip(weights_of(theirs), weights_of(mine), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    for name, values in history.items():
        np.testing.assert_allclose(values, record[name], rtol=1e-4, err_msg=name)


def test_constraints_of_layers_hold_after_each_step():
    """A kernel that must not be negative is not, after every batch of a scaled `fit`."""
    ways, lowest = {}, []
    for name, wrap in WRAPPERS.items():
        model = model_of(kernel_constraint=keras.constraints.NonNeg())
        model.compile(wrap(keras.optimizers.SGD(0.5)), "mse")

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                lowest.append(float(np.min(self.model.trainable_variables[0])))

        fit = model.fit(*rows(), 16, 2, verbose=0, shuffle=False, callbacks=[Look()])
        ways[name] = model, fit.history
    assert min(lowest) == 0.0
    assert_equal(ways)


def test_weights_of_samples_and_of_classes_count():
    """Rows of weight zero are as if they were not there, and others count as in Keras."""
    x, y = rows()
    weight = np.where(np.arange(len(x)) % 4 == 3, 0.0, 1.5).astype(np.float32)
    y[weight == 0] = 1e4  # they would be seen
    ways = {}
    for name, wrap in WRAPPERS.items():
        model = model_of()
        model.compile(wrap(keras.optimizers.Adam(0.02)), "mse", weighted_metrics=["mae"])
        fit = model.fit(x, y, 16, 3, sample_weight=weight, verbose=0, shuffle=False)
        ways[name] = model, fit.history
    assert_equal(ways)
    assert ways["ours"][1]["loss"][-1] < 50


def test_several_outputs_with_weights_of_their_losses():
    """One scale serves the sum of all losses, each with its weight."""
    x, y = rows()
    ways = {}
    for name, wrap in WRAPPERS.items():
        model = model_of(outputs=2)
        model.compile(wrap(keras.optimizers.Adam(0.02)), ["mse", "mae"], loss_weights=[1.0, 0.25])
        ways[name] = model, model.fit(x, [y, -y], 16, 3, verbose=0, shuffle=False).history
    assert_equal(ways)
    assert {"out0_loss", "out1_loss"} <= set(ways["ours"][1])


def test_a_rate_that_is_lowered_on_a_plateau_is_used():
    """`ReduceLROnPlateau` sets the rate of the optimizer in the wrapper, as it sets Keras's."""
    ways = {}
    for name, wrap in WRAPPERS.items():
        model = model_of()
        model.compile(wrap(keras.optimizers.SGD(0.05)), "mse")
        plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1.0)
        fit = model.fit(*rows(), 16, 5, verbose=0, shuffle=False, callbacks=[plateau])
        ways[name] = model, fit.history
    assert_equal(ways)
    assert ways["ours"][1]["learning_rate"][-1] < 0.05


def test_a_checkpoint_of_the_best_epoch_goes_on(tmp_path):
    """What `ModelCheckpoint` has saved loads with its scale, and takes the same next steps."""
    model, path = model_of(), tmp_path / "best.keras"
    model.compile(WRAPPERS["ours"](keras.optimizers.Adam(0.02)), "mse")
    best = keras.callbacks.ModelCheckpoint(path, "loss", save_best_only=True)
    model.fit(*rows(), 16, 3, verbose=0, shuffle=False, callbacks=[best])
    loaded = keras.saving.load_model(path)
    assert float(loaded.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale)
    for each in (model, loaded):
        each.fit(*rows(), 16, 1, verbose=0, shuffle=False)
    for a, b in zip(weights_of(model), weights_of(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_that_broke_off_goes_on_from_its_backup(tmp_path):
    """With `BackupAndRestore`, weights, counts and scale end as those of a run without a break."""

    class Breaks(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def fit(*callbacks):
        model = model_of()
        model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.02), 2.0**8, 5), "mse")
        model.fit(*rows(), 16, 4, verbose=0, shuffle=False, callbacks=callbacks)
        return model

    whole = fit()
    with pytest.raises(KeyboardInterrupt):
        fit(keras.callbacks.BackupAndRestore(tmp_path / "backup"), Breaks())
    again = fit(keras.callbacks.BackupAndRestore(tmp_path / "backup"))
    for a, b in zip(whole.variables, again.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=a.path)
    mine, theirs = whole.optimizer, again.optimizer
    assert float(mine.dynamic_scale) == float(theirs.dynamic_scale) > 2.0**8
    assert [float(np.sum(v)) for v in mine.variables] == [float(np.sum(v)) for v in theirs.variables]

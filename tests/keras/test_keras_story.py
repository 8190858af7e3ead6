"""A `fit` in mixed_float16 whose first 45 batches are NaN: Keras never learns, and says nothing."""

import warnings

import numpy as np
import pytest

import gainstage as gs

keras = pytest.importorskip("keras")

from gainstage.diagnostics import Alarm
from gainstage.interop.keras import LogLossScale, LossScaleOptimizer

BATCH, BAD = 32, 45


def fitted(optimizer, bad_batches, *callbacks):
    """The losses of eight epochs on clean data, after so many batches of NaN."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40 * BATCH, 16)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(16, 1)) / 4).astype(np.float32)
    layers = [keras.layers.Dense(64, activation="relu", dtype="mixed_float16") for _ in range(4)]
    model = keras.Sequential(
        [keras.Input((16,)), *layers, keras.layers.Dense(1, dtype="mixed_float16")]
    )
    model.compile(optimizer, "mse")
    spoiled = np.full((bad_batches * BATCH, 16), np.nan, np.float32)
    how = {"verbose": 0, "shuffle": False, "callbacks": list(callbacks)}
    if bad_batches:
        model.fit(spoiled, np.zeros((len(spoiled), 1), np.float32), BATCH, 1, **how)
    return model.fit(x, y, BATCH, 8, **how).history["loss"]


def adaptive():
    return LossScaleOptimizer(keras.optimizers.Adam(1e-3), loss_scale=gs.AdaptiveLossScale())


def test_it_learns_all_the_same_and_says_once_what_happened():
    """The same script with our optimizer ends within 5 % of a run without bad batches, and warns
    once; Keras's own ends far above it without a word."""
    clean = fitted(adaptive(), 0)[-1]
    with pytest.warns(Alarm, match="45 of the 45 steps of epoch 1 were skipped") as caught:
        ours = fitted(adaptive(), BAD, LogLossScale())[-1]
    assert len([w for w in caught if issubclass(w.category, Alarm)]) == 1
    assert "The loss was not finite" in str(caught[0].message)
    assert ours <= 1.05 * clean
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = fitted(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), BAD)[-1]
    assert theirs > 3 * clean


def test_a_fit_without_bad_batches_is_silent():
    """A healthy run warns of nothing, wherever its scale begins."""
    for scale in (2.0**15, 2.0**24):
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=scale)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Alarm)
            fitted(optimizer, 0, LogLossScale())

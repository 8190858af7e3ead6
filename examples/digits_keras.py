"""Keras `fit`: one line is ours.

pip install ".[demo,keras]"
KERAS_BACKEND=jax python examples/digits_keras.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from gainstage.interop.keras import autocast

import digits


class Losses(keras.callbacks.Callback):
    """Keeps the loss of every batch; Keras gives the mean of those so far."""

    def on_train_begin(self, logs=None):
        self.losses, self.sum = [], 0.0

    def on_train_batch_end(self, batch, logs=None):
        total = logs["loss"] * (batch + 1)
        self.losses.append(total - self.sum)
        self.sum = total


def train(dtype, seed):
    model = keras.Sequential([
        keras.layers.Input((64,)),
        keras.layers.Dense(digits.HIDDEN, activation="relu"),
        keras.layers.Dense(digits.CLASSES),
    ])  # fmt: skip
    if dtype != "float32":
        model = autocast(model, dtype)  # ours
    weights = digits.first_weights(seed).values()
    model.set_weights([array for layer in weights for array in (layer["w"], layer["b"])])
    optimizer = keras.optimizers.Adam(digits.RATE, epsilon=digits.EPSILON)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = map(np.concatenate, zip(*digits.batches(seed), strict=True))
    seen = Losses()
    model.fit(x, y, digits.BATCH, shuffle=False, verbose=0, callbacks=[seen])
    return seen.losses, digits.accuracy(model.predict(digits.TEST[0], verbose=0))


if __name__ == "__main__":
    digits.main(train)

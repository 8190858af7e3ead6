"""A language model in float16 with Keras `fit`: a policy, and an optimizer that is wrapped.

    pip install ".[keras]"
    KERAS_BACKEND=jax python examples/language_model_keras.py --quick  # less than a minute
    KERAS_BACKEND=jax python examples/language_model_keras.py          # about 5 minutes

It learns the modules of Python's own standard library, byte by byte. Kill it at any moment: the
same command goes on after the last epoch that has ended.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from keras import layers, ops

import gainstage as gs
from gainstage.interop.keras import LogLossScale, LossScaleOptimizer, compile

BATCH, HEADS = 16, 4
FULL, QUICK = (128, 6, 128, 6, 50), (32, 1, 64, 3, 10)  # width, blocks, context, epochs, steps


class Windows(keras.utils.PyDataset):
    """Microbatches of a text. Epoch and number are the seed, and so the position in the data."""

    def __init__(self, files, context, steps):
        super().__init__()
        text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
        self.text, self.context, self.steps, self.epoch = text[text < 128], context, steps, 0

    def __len__(self):
        return self.steps

    def __getitem__(self, n):
        starts = np.random.default_rng([self.epoch, n])
        starts = starts.integers(len(self.text) - self.context, size=(BATCH, 1))
        windows = self.text[starts + np.arange(self.context + 1)].astype(np.int32)
        return windows[:, :-1], windows[:, 1:]


class Backup(keras.callbacks.Callback):
    """Saves all state after each epoch; Keras 3.15's own backup leaves out the dropout seeds."""

    def __init__(self, path, text):
        super().__init__()
        self.path, self.text = path, text

    def state(self, model):
        """Weights, seeds of dropout, and the optimizer with its slots, averages and scale."""
        weights = model.trainable_variables + model.non_trainable_variables
        return weights + model.optimizer.variables

    def restore(self, model):
        """Loads the backup, if there is one; returns how many epochs have ended."""
        model.optimizer.build(model.trainable_variables)
        if not self.path.exists():
            return 0
        with np.load(self.path) as saved:
            epoch, *values = saved.values()
        for variable, value in zip(self.state(model), values, strict=True):
            variable.assign(value)
        return int(epoch)

    def on_epoch_begin(self, epoch, logs=None):
        self.text.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        part = self.path.with_name("part.npz")
        np.savez(part, epoch + 1, *[v.numpy() for v in self.state(self.model)])
        part.replace(self.path)  # all or nothing, also if the process is killed


def make_model(width, blocks, context):
    """Bytes to the logits of the next byte."""
    tokens = keras.Input((context,), dtype="int32")
    places = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(128, width)(tokens) + layers.Embedding(context, width)(places)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(HEADS, width // HEADS, dropout=0.1)
        x += attention(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dropout(0.1)(layers.Dense(width)(y))
    return keras.Model(tokens, layers.Dense(128, dtype="float32")(layers.LayerNormalization()(x)))


def make_optimizer(steps):
    """AdamW with all that a language model needs, and loss scaling around it."""
    warmup = steps // 10  # the schedule counts microbatches
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=3e-3, warmup_steps=warmup
    )
    window = {"gradient_accumulation_steps": 2, "global_clipnorm": 1.0}
    average = {"use_ema": True, "ema_momentum": 0.5 ** (20 / steps)}  # `fit` ends with averages
    adamw = keras.optimizers.AdamW(rate, weight_decay=0.1, **window, **average)
    return LossScaleOptimizer(adamw, loss_scale=gs.DynamicLossScale(2.0**20, increment_period=100))


def main():
    """Reads the command line, and trains from the last backup."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, less than a minute")
    parser.add_argument("--folder", type=Path, help="for the backup")
    options = parser.parse_args()
    width, blocks, context, epochs, steps = QUICK if options.quick else FULL
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = Windows([f for n, f in enumerate(files) if n % 20], context, steps)
    held_out = Windows(files[::20], context, 8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = make_model(width, blocks, context)
    model = compile(model, make_optimizer(epochs * steps), loss, dtype=None)  # as its policy says
    folder = options.folder or Path(f"runs/language_model_keras_{width}")
    folder.mkdir(parents=True, exist_ok=True)
    backup = Backup(folder / "backup.npz", text)
    if start := backup.restore(model):
        print(f"restored the state after epoch {start}")
    callbacks = [LogLossScale(), backup]
    training = {"validation_data": held_out, "shuffle": False, "callbacks": callbacks, "verbose": 2}
    model.fit(text, epochs=epochs, initial_epoch=start, **training)
    print(f"averaged weights: validation {model.evaluate(held_out, verbose=0):.3f}")


if __name__ == "__main__":
    main()

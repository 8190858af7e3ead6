"""What the examples of the libraries share: the task, the first weights, the table at the end."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

HIDDEN, CLASSES, BATCH, EPOCHS, RATE, EPSILON = 128, 10, 100, 8, 3e-3, 1e-10
TRAIN = 1500  # images; the others are to test

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES, LABELS = np.float32(IMAGES / 16), np.int32(LABELS)
TEST = (IMAGES[TRAIN:], LABELS[TRAIN:])


def batches(seed: int, epochs: int = EPOCHS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All batches of all epochs."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(TRAIN).reshape(-1, BATCH)
        yield from ((IMAGES[places], LABELS[places]) for places in order)


def first_weights(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Layers of `x @ w + b`, in float32: the numbers are the same in every example."""
    rng = np.random.default_rng(1000 + seed)

    def layer(rows: int, columns: int) -> dict[str, np.ndarray]:
        w = rng.normal(size=(rows, columns)) * np.sqrt(2 / rows)
        return {"w": np.float32(w), "b": np.zeros(columns, np.float32)}

    return {"hidden": layer(64, HIDDEN), "output": layer(HIDDEN, CLASSES)}


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    """The mean loss, in float32 whatever the logits are in."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits: jax.Array) -> float:
    """The share of test images that are told right."""
    return float((jnp.argmax(logits, axis=-1) == TEST[1]).mean())


DTYPES = "float32", "bfloat16", "float16"
Losses = list[float]
Train = Callable[[str, int], tuple[Losses, float] | tuple[Losses, float, int]]


def main(train: Train, seeds: int = 3) -> None:
    """Trains in each dtype, and prints how well.

    Args:
        train: `(dtype to compute in, seed) -> (losses, accuracy)`, and the number of
            skipped steps if some are.
        seeds: how many.
    """
    for dtype in DTYPES:
        losses, right, *skipped = zip(*(train(dtype, seed) for seed in range(seeds)), strict=True)
        ends = np.mean([steps[-10:] for steps in losses])
        skips = f", {sum(skipped[0])} steps skipped" if skipped else ""
        right = f"{np.mean(right):.2%} of the test images"
        print(f"{dtype:8}  {right}, loss {ends:.4f} at the end{skips}")

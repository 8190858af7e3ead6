"""The task: tell handwritten digits apart, and draw them again from what was understood."""

# The second part is weighted lightly, as in capsule networks (5e-4), and averaged over all pixels
# of a batch. So the error that reaches a pixel is of the size 2 * 5e-4 / (256 * 64) = 6e-8, about
# the smallest number that float16 knows.

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets
from sklearn.model_selection import train_test_split

from gainstage.demo.task import Array, Evaluation, Task, Weights

RECONSTRUCTION_WEIGHT = 5e-4  # Sabour et al., 2017, arXiv:1710.09829
BATCH = 256
TRUNK, CLASSES, DECODER = (64, 256, 256), (256, 10), (256, 128, 64)


class Digits(NamedTuple):
    """Images of 8 x 8 pixels in [0, 1], one a row, and the digits that they show."""

    images: Array
    labels: Array


def task() -> Task:
    """Tells scikit-learn's digits apart and draws them again."""
    train, test = load_digits()
    return Task(
        title="Digits told apart and drawn again",
        steps=800,
        growth_steps=40,
        optimizer=lambda steps: optax.adam(optax.cosine_decay_schedule(2e-3, steps), eps=1e-7),
        weights=initial_weights,
        batches=lambda seed: draw_batches(train, seed),
        network=forward,
        loss=loss,
        weight=RECONSTRUCTION_WEIGHT,
        elements=BATCH * 64,
        ranks=1,
        other_ranks=(4,),
        test_images=test.images,
        evaluate=lambda outputs: evaluation(outputs, test),
        references={"test image": Evaluation({}, mosaic(test.images, test.labels))},
        rows={
            "test_reconstruction_error": ("Reconstruction error, test", "{:.5f}"),
            "test_accuracy": ("Digits told apart, test", "{:.1%}"),
        },
        error="test_reconstruction_error",
        score="test_reconstruction_error",
        suffers="the drawing",
        spared=spared,
        remark=f"The weight of the drawing in the loss, {RECONSTRUCTION_WEIGHT:g}, is the one "
        "known from capsule networks. A larger weight, or a sum over the pixels in the place of "
        "the mean, would help float16 as well.",
    )


def load_digits() -> tuple[Digits, Digits]:
    """Scikit-learn's digits: 1347 images to train with, 450 to test with."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    split = train_test_split(
        images, labels.astype(np.int32), test_size=450, stratify=labels, random_state=0
    )
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, split)
    return Digits(train_images, train_labels), Digits(test_images, test_labels)


def initial_weights(seed: int) -> list[np.ndarray]:
    """Glorot-uniform matrices and zero offsets, one of each a layer."""
    rng = np.random.default_rng(seed)
    weights = []
    for sizes in (TRUNK, CLASSES, DECODER):
        for fan_in, fan_out in itertools.pairwise(sizes):
            limit = np.sqrt(6 / (fan_in + fan_out))
            matrix = rng.uniform(-limit, limit, (fan_in, fan_out))
            weights += [matrix.astype(np.float32), np.zeros(fan_out, np.float32)]
    return weights


def draw_batches(data: Digits, seed: int) -> Iterator[Digits]:
    """Every image once, in random order, before any comes again."""
    rng = np.random.default_rng(seed)
    images, labels = np.asarray(data.images), np.asarray(data.labels)
    size = len(labels) - len(labels) % BATCH
    while True:
        for chosen in rng.permutation(len(labels))[:size].reshape(-1, BATCH):
            yield Digits(images[chosen], labels[chosen])


def forward(weights: Weights, images: Array) -> tuple[jax.Array, jax.Array]:
    """The logits and the drawings of the network."""
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    understood = images
    for w, b in layers[:2]:
        understood = jax.nn.relu(understood @ w + b)
    (w, b), (w1, b1), (w2, b2) = layers[2:]
    return understood @ w + b, jax.nn.relu(understood @ w1 + b1) @ w2 + b2


def loss(weights: Weights, digits: Digits) -> tuple[jax.Array, jax.Array]:
    """What is minimized, and the reconstruction error in it."""
    logits, drawn = forward(weights, digits.images)
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits.labels)
    error = jnp.square(drawn - digits.images).mean()
    return cross_entropy.mean() + RECONSTRUCTION_WEIGHT * error, error


def evaluation(outputs: tuple[jax.Array, jax.Array], test: Digits) -> Evaluation:
    """How well the digits are told apart and drawn."""
    logits, drawn = outputs
    measures = {
        "test_reconstruction_error": float(jnp.square(drawn - test.images).mean()),
        "test_accuracy": float((logits.argmax(axis=1) == test.labels).mean()),
    }
    return Evaluation(measures, mosaic(drawn, test.labels))


def mosaic(images: Array, labels: Array) -> np.ndarray:
    """Nine digits in three rows, black on white."""
    first = [int(np.flatnonzero(np.asarray(labels) == digit)[0]) for digit in range(9)]
    tiles = 1 - np.clip(images, 0, 1)[first].reshape(3, 3, 8, 8)
    tiles = np.pad(tiles, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=1)
    return tiles.swapaxes(1, 2).reshape(30, 30)


def spared(numbers: dict[str, dict[str, float]]) -> str:
    """How well the digits are told apart, in the modes."""
    accuracies = [measures["test_accuracy"] for measures in numbers.values()]
    return (
        f"telling the digits apart, {min(accuracies):.1%} to {max(accuracies):.1%} in all modes; "
        "those gradients are large enough"
    )

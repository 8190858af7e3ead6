"""A small network that classifies handwritten digits, and draws them again from what it found."""

# The drawing is weighted lightly, as in capsule networks (5e-4), and averaged over all pixels of a
# batch. So the error that reaches a pixel is of the size 2 * 5e-4 / (256 * 64) = 6e-8, about the
# smallest number that float16 knows.

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets
from sklearn.model_selection import train_test_split

import gainstage as gs

RECONSTRUCTION_WEIGHT = 5e-4  # Sabour et al., 2017, arXiv:1710.09829
BATCH = 256
TRUNK, CLASSES, DECODER = (64, 256, 256), (256, 10), (256, 128, 64)
Array = Any  # of JAX or numpy


class Digits(NamedTuple):
    """Images of 8 x 8 pixels in [0, 1], one a row, and the digits that they show."""

    images: Array
    labels: Array


def load_digits() -> tuple[Digits, Digits]:
    """Scikit-learn's digits: 1347 images to train with, 450 to test with."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=450, stratify=labels, random_state=0
    )
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


def forward(weights: list[jax.Array], images: Array) -> tuple[jax.Array, jax.Array]:
    """The logits and the drawings of the network."""
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    understood = images
    for w, b in layers[:2]:
        understood = jax.nn.relu(understood @ w + b)
    (w, b), (w1, b1), (w2, b2) = layers[2:]
    return understood @ w + b, jax.nn.relu(understood @ w1 + b1) @ w2 + b2


def pixel_error(drawn: jax.Array, digits: Digits) -> jax.Array:
    """The squared error of the drawings, a mean over all pixels."""
    return jnp.square(drawn - digits.images).mean()


def loss(weights: list[jax.Array], digits: Digits, dtype: str) -> jax.Array:
    """The loss, computed in `dtype`: the cross entropy, and lightly weighted, the drawing."""

    def in_float32(weights: list[jax.Array], digits: Digits) -> jax.Array:
        logits, drawn = forward(weights, digits.images)
        entropy = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits.labels)
        return entropy.mean() + RECONSTRUCTION_WEIGHT * pixel_error(drawn, digits)

    in_dtype = in_float32 if dtype == "float32" else gs.autocast(in_float32, dtype)
    return in_dtype(weights, digits)

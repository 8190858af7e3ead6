"""The task: tell handwritten digits apart, and draw them again from what was understood.

The second part is weighted lightly, as in capsule networks (5e-4), and averaged over all pixels of
a batch. So the error that reaches a pixel is of the size 2 * 5e-4 / (256 * 64) = 6e-8, about the
smallest number that float16 knows.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from sklearn import datasets
from sklearn.model_selection import train_test_split

RECONSTRUCTION_WEIGHT = 5e-4  # Sabour et al., 2017, arXiv:1710.09829
BATCH = 256
TRUNK, CLASSES, DECODER = (64, 256, 256), (256, 10), (256, 128, 64)

Params = list[jax.Array]


class Digits(NamedTuple):
    """Images of 8 x 8 pixels in [0, 1], one a row, and the digits that they show."""

    images: jax.Array | np.ndarray
    labels: jax.Array | np.ndarray


class Outputs(NamedTuple):
    """What the network makes of some digits, and how far it is off."""

    drawn: jax.Array
    cross_entropy: jax.Array
    reconstruction_error: jax.Array
    accuracy: jax.Array


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


def forward(params: Params, digits: Digits, dtype: DTypeLike) -> Outputs:
    """The network in `dtype`; the errors in float32, from its outputs."""
    pairs = zip(params[::2], params[1::2], strict=True)
    layers = [(w.astype(dtype), b.astype(dtype)) for w, b in pairs]
    understood = digits.images.astype(dtype)
    for w, b in layers[:2]:
        understood = jax.nn.relu(understood @ w + b)
    (w, b), (w1, b1), (w2, b2) = layers[2:]
    logits = (understood @ w + b).astype(jnp.float32)
    drawn = (jax.nn.relu(understood @ w1 + b1) @ w2 + b2).astype(jnp.float32)

    log_probability = jax.nn.log_softmax(logits)
    right = jnp.take_along_axis(log_probability, digits.labels[:, None], axis=1)
    return Outputs(
        drawn=drawn,
        cross_entropy=-right.mean(),
        reconstruction_error=jnp.square(drawn - digits.images).mean(),
        accuracy=(logits.argmax(axis=1) == digits.labels).mean(),
    )


def loss(params: Params, digits: Digits, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """What is minimized, and the reconstruction error in it."""
    outputs = forward(params, digits, dtype)
    error = outputs.reconstruction_error
    return outputs.cross_entropy + RECONSTRUCTION_WEIGHT * error, error

"""The task: remove noise from photographs, with a small residual network without normalisation."""

# The network is a small EDSR (Lim et al., 2017, arXiv:1707.02921), the loss the mean squared error
# of the whole batch. With 64 ranks that is 3,145,728 values, as many as in 64 patches of 128 x 128.
# So an error of a pixel is passed back as 2 / 3,145,728 = 6e-7 of itself.

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

SIZE = 32  # rows and columns of a patch
NOISE = 25 / 255  # standard deviation
CHANNELS = 16
HELD_OUT = slice(288, 416)  # columns to test with: right halves of what is in the pictures
CROP, CROPS = 56, [(228, 4), (100, 56)]  # rows and held-out columns to look at, in each picture

Array = Any  # of JAX or numpy
Batch = tuple[Array, Array]  # images with noise and without, in [0, 1]
Weights = list[jax.Array]


class Task(NamedTuple):
    """How large the training is.

    The process plays one of several data-parallel ranks: its loss is divided by their number,
    because the mean is over the batch of all of them.
    """

    steps: int = 160
    blocks: int = 2  # residual ones, of the network
    patches: int = 16  # in a batch of this process
    ranks: int = 64  # in the comparison of dtypes
    other_ranks: tuple[int, ...] = (1, 4, 16)  # to train unscaled float16 with as well

    @property
    def values(self) -> int:
        """How many values the mean of this process's squared error is over."""
        return self.patches * SIZE * SIZE * 3


class Evaluation(NamedTuple):
    """How good some images are, and a detail of each."""

    measures: dict[str, float]
    image: np.ndarray


@functools.cache
def photographs() -> np.ndarray:
    """The two photographs that come with scikit-learn."""
    return np.stack(datasets.load_sample_images().images).astype(np.float32) / 255


def held_out_images() -> Batch:
    """The columns that no network is trained on."""
    return with_noise(np.random.default_rng(0), photographs()[:, :, HELD_OUT])


def initial_weights(task: Task, seed: int) -> list[np.ndarray]:
    """He-normal kernels: the first, two for each block, the last."""
    rng = np.random.default_rng(seed)
    blocks = [(CHANNELS, CHANNELS, 2.0), (CHANNELS, CHANNELS, 0.1)] * task.blocks
    return [
        rng.normal(0, np.sqrt(gain / (9 * inputs)), (3, 3, inputs, outputs)).astype(np.float32)
        for inputs, outputs, gain in [(3, CHANNELS, 2.0), *blocks, (CHANNELS, 3, 0.01)]
    ]


def denoise(weights: Weights, noisy: Array, shift: Array | None = None) -> jax.Array:
    """The images less the noise that the network finds; `shift` is added to its first features."""
    first, *blocks, last = weights
    hidden = convolve(noisy, first)
    if shift is not None:
        hidden += shift
    for kernel, kernel1 in zip(blocks[::2], blocks[1::2], strict=True):
        hidden += convolve(jax.nn.relu(convolve(hidden, kernel)), kernel1)
    return noisy - convolve(hidden, last)


def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution that keeps the images' size."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)


def loss(weights: Weights, batch: Batch) -> jax.Array:
    """The mean squared error."""
    noisy, clean = batch
    return jnp.square(denoise(weights, noisy) - clean).mean()


def draw_batches(task: Task, seed: int) -> Iterator[Batch]:
    """Random patches from both sides of the held-out columns, with new noise each time."""
    rng = np.random.default_rng(seed)
    sides = [photographs()[:, :, : HELD_OUT.start], photographs()[:, :, HELD_OUT.stop :]]
    while True:
        patches = []
        for _ in range(task.patches):
            image = sides[rng.integers(2)][rng.integers(2)]
            row, column = (rng.integers(length - SIZE) for length in image.shape[:2])
            patches.append(image[row : row + SIZE, column : column + SIZE])
        yield with_noise(rng, np.stack(patches))


def with_noise(rng: np.random.Generator, clean: np.ndarray) -> Batch:
    """The images with Gaussian noise."""
    return clean + rng.normal(0, NOISE, clean.shape).astype(np.float32), clean


def evaluation(images: Array) -> Evaluation:
    """How far the test images are from clean ones."""
    images = np.clip(np.asarray(images), 0, 1)
    error = float(np.square(images - held_out_images()[1]).mean())
    return Evaluation({"test_error": error, "test_psnr": -10 * math.log10(error)}, crops(images))


def crops(images: np.ndarray) -> np.ndarray:
    """A detail of each photograph, one below the other."""
    above, below = (
        image[row : row + CROP, column : column + CROP]
        for image, (row, column) in zip(images, CROPS, strict=True)
    )
    return np.concatenate([above, np.ones((2, CROP, 3), np.float32), below])

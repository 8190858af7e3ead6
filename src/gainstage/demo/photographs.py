"""The task: remove noise from photographs, with a small residual network without normalisation."""

# The network is a small EDSR (Lim et al., 2017, arXiv:1707.02921), the loss the mean squared error
# of the whole batch. With 64 ranks that is 3,145,728 values, as many as in 64 patches of 128 x 128.
# So an error of a pixel is passed back as 2 / 3,145,728 = 6e-7 of itself.

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

from gainstage.demo.task import Array, Evaluation, Task, Weights

PATCHES, SIZE, RANKS = 16, 32, 64
NOISE = 25 / 255  # standard deviation
CHANNELS, BLOCKS = 16, 2
HELD_OUT = slice(288, 416)  # columns to test with: right halves of what is in the pictures
CROP, CROPS = 56, [(228, 4), (100, 56)]  # rows and held-out columns to look at, in each picture


Batch = tuple[Array, Array]  # images with noise and without, in [0, 1]


def task() -> Task:
    """Removes noise from the two photographs that come with scikit-learn."""
    photographs = np.stack(datasets.load_sample_images().images).astype(np.float32) / 255
    clean = photographs[:, :, HELD_OUT]
    noisy, _ = with_noise(np.random.default_rng(0), clean)
    return Task(
        title="Photographs without their noise",
        steps=160,
        growth_steps=8,
        # With so small an epsilon the size of the loss does not matter to float32.
        optimizer=lambda steps: optax.adam(
            optax.cosine_decay_schedule(2e-3, steps, alpha=0.05), eps=1e-12
        ),
        weights=initial_weights,
        batches=lambda seed: draw_batches(photographs, seed),
        network=denoise,
        loss=loss,
        weight=1.0,
        elements=PATCHES * SIZE * SIZE * 3,
        ranks=RANKS,
        other_ranks=(1, 4, 16),
        test_images=noisy,
        evaluate=lambda images: evaluation(images, clean),
        references={"noisy": evaluation(noisy, clean), "original": Evaluation({}, crops(clean))},
        rows={
            "test_error": ("Squared error, test", "{:.5f}"),
            "test_psnr": ("PSNR, test", "{:.2f} dB"),
        },
        error="test_error",
        score="test_psnr",
        suffers="the pictures",
        spared=lambda numbers: (
            f"bfloat16, which ends at {numbers['bfloat16']['test_psnr']:.2f} dB, "
            f"float32 at {numbers['float32']['test_psnr']:.2f} dB"
        ),
        remark=f"This process is one of {RANKS} data-parallel ranks: it trains on its own "
        f"{PATCHES} patches, and divides its loss by the size of the whole batch. The other ranks "
        "are not run. A sum in place of the mean would help float16 as well.",
    )


def initial_weights(seed: int) -> list[np.ndarray]:
    """He-normal kernels: the first, two for each block, the last."""
    rng = np.random.default_rng(seed)
    blocks = [(CHANNELS, CHANNELS, 2.0), (CHANNELS, CHANNELS, 0.1)] * BLOCKS
    return [
        rng.normal(0, np.sqrt(gain / (9 * inputs)), (3, 3, inputs, outputs)).astype(np.float32)
        for inputs, outputs, gain in [(3, CHANNELS, 2.0), *blocks, (CHANNELS, 3, 0.01)]
    ]


def denoise(weights: Weights, noisy: Array) -> jax.Array:
    """The images less the noise that the network finds."""
    first, *blocks, last = weights
    hidden = convolve(noisy, first)
    for kernel, kernel1 in zip(blocks[::2], blocks[1::2], strict=True):
        hidden += convolve(jax.nn.relu(convolve(hidden, kernel)), kernel1)
    return noisy - convolve(hidden, last)


def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution that keeps the images' size."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)


def loss(weights: Weights, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The mean squared error, which is what is minimized."""
    noisy, clean = batch
    error = jnp.square(denoise(weights, noisy) - clean).mean()
    return error, error


def draw_batches(photographs: np.ndarray, seed: int) -> Iterator[Batch]:
    """Random patches from both sides of the held-out columns, with new noise each time."""
    rng = np.random.default_rng(seed)
    sides = [photographs[:, :, : HELD_OUT.start], photographs[:, :, HELD_OUT.stop :]]
    while True:
        patches = []
        for _ in range(PATCHES):
            image = sides[rng.integers(2)][rng.integers(2)]
            row, column = (rng.integers(length - SIZE) for length in image.shape[:2])
            patches.append(image[row : row + SIZE, column : column + SIZE])
        yield with_noise(rng, np.stack(patches))


def with_noise(rng: np.random.Generator, clean: np.ndarray) -> Batch:
    """The images with Gaussian noise."""
    return clean + rng.normal(0, NOISE, clean.shape).astype(np.float32), clean


def evaluation(images: Array, clean: np.ndarray) -> Evaluation:
    """How far the images are from clean ones."""
    images = np.clip(np.asarray(images), 0, 1)
    error = float(np.square(images - clean).mean())
    return Evaluation({"test_error": error, "test_psnr": -10 * math.log10(error)}, crops(images))


def crops(images: np.ndarray) -> np.ndarray:
    """A detail of each photograph, one below the other."""
    above, below = (
        image[row : row + CROP, column : column + CROP]
        for image, (row, column) in zip(images, CROPS, strict=True)
    )
    return np.concatenate([above, np.ones((2, CROP, 3), np.float32), below])

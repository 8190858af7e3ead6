"""The training: a small residual network removes noise from photographs, in each precision."""

# The network is a small EDSR (Lim et al., 2017, arXiv:1707.02921), the loss the mean squared error
# of the whole batch. With 64 ranks that is 3,145,728 values, as many as in 64 patches of 128 x 128.
# So an error of a pixel is passed back as 2 / 3,145,728 = 6e-7 of itself.

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.progress import track
from sklearn import datasets

from gainstage.precision.autocast import autocast
from gainstage.rules import DynamicLossScale, FixedLossScale
from gainstage.training.train_step import train_step
from gainstage.transforms.train_state import TrainState
from gainstage.transforms.with_loss_scale import with_loss_scale

MODES = FLOAT32, BFLOAT16, UNSCALED, SCALED = "float32", "bfloat16", "float16", "float16, scaled"
PERIOD = 8  # good steps after which the scale is doubled: few, to show it
SIZE = 32  # rows and columns of a patch
NOISE = 25 / 255  # standard deviation
CHANNELS = 16
HELD_OUT = slice(288, 416)  # columns to test with: right halves of what is in the pictures

Weights = list[jax.Array]
Batch = tuple[np.ndarray, np.ndarray]  # images with noise and without, in [0, 1]

# By default XLA may keep float16 results in float32 between operations, and so hide the very
# rounding that the demo is about.
jit: functools.partial[Any] = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False}
)


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

    @property
    def probed(self) -> int:
        """The step before which the gradient is compared with that of float32."""
        return self.steps // 4


class Training(NamedTuple):
    """What one training was like, and what came of it."""

    errors: np.ndarray  # the squared error on the batch of each step
    scales: np.ndarray  # the loss scale of each step; 1 without scaling
    skipped: np.ndarray  # whether the step was skipped
    exponents: np.ndarray  # log2 of a gradient on its way through the network, in float32
    images: np.ndarray  # the test images without their noise
    measures: dict[str, Any]  # the numbers, by name


@functools.cache
def photographs() -> np.ndarray:
    """The two photographs that come with scikit-learn."""
    return np.stack(datasets.load_sample_images().images).astype(np.float32) / 255


def with_noise(rng: np.random.Generator, clean: np.ndarray) -> Batch:
    """The images with Gaussian noise."""
    return clean + rng.normal(0, NOISE, clean.shape).astype(np.float32), clean


def held_out() -> Batch:
    """The columns that no network is trained on."""
    return with_noise(np.random.default_rng(0), photographs()[:, :, HELD_OUT])


def patches(task: Task, seed: int) -> Iterator[Batch]:
    """Batches from both sides of the held-out columns, with new noise each time."""
    rng = np.random.default_rng(seed)
    sides = [photographs()[:, :, : HELD_OUT.start], photographs()[:, :, HELD_OUT.stop :]]
    for _ in range(task.steps):
        clean = []
        for _ in range(task.patches):
            image = sides[rng.integers(2)][rng.integers(2)]
            row, column = (rng.integers(length - SIZE) for length in image.shape[:2])
            clean.append(image[row : row + SIZE, column : column + SIZE])
        yield with_noise(rng, np.stack(clean))


def initial_weights(task: Task, seed: int) -> Weights:
    """He-normal kernels: the first, two for each block, the last."""
    rng = np.random.default_rng(seed)
    blocks = [(CHANNELS, CHANNELS, 2.0), (CHANNELS, CHANNELS, 0.1)] * task.blocks
    return [
        jnp.asarray(rng.normal(0, np.sqrt(gain / (9 * inputs)), (3, 3, inputs, outputs)), "float32")
        for inputs, outputs, gain in [(3, CHANNELS, 2.0), *blocks, (CHANNELS, 3, 0.01)]
    ]


def convolve(images: Any, kernel: jax.Array) -> jax.Array:
    """A convolution that keeps the images' size."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)


def denoise(weights: Weights, noisy: Any, shift: Any = 0.0) -> jax.Array:
    """The images less the noise that the network finds; `shift` is added to its first features."""
    first, *blocks, last = weights
    hidden = convolve(noisy, first) + shift
    for kernel, kernel1 in zip(blocks[::2], blocks[1::2], strict=True):
        hidden += convolve(jax.nn.relu(convolve(hidden, kernel)), kernel1)
    return noisy - convolve(hidden, last)


def mean_squared(weights: Weights, batch: Batch, shift: Any = 0.0) -> jax.Array:
    """The loss."""
    noisy, clean = batch
    return jnp.square(denoise(weights, noisy, shift) - clean).mean()


def quality(images: np.ndarray) -> dict[str, Any]:
    """How far the test images are from clean ones."""
    error = float(np.square(np.clip(images, 0, 1) - held_out()[1]).mean())
    return {"test_error": error, "test_psnr": -10 * math.log10(error)}


@functools.partial(jit, static_argnums=0)
def gradient(
    fun: Callable[..., jax.Array], weights: Weights, batch: Batch, factor: Any
) -> jax.Array:
    """All elements of the gradient of a loss times a factor."""
    return ravel_pytree(jax.grad(lambda weights: fun(weights, batch) * factor)(weights))[0]


def probe(
    state: TrainState[Weights], batch: Batch, ranks: int, loss: Callable[..., jax.Array]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Compares the gradient of a batch with that of float32 at the same weights."""
    scale, weights = float(state.loss_scale), state.params
    exact = np.asarray(gradient(mean_squared, weights, batch, 1 / ranks))
    held = np.asarray(gradient(loss, weights, batch, scale / ranks))
    shift = jnp.zeros((*batch[0].shape[:-1], CHANNELS))
    way = np.asarray(jit(jax.grad(mean_squared, argnums=2))(weights, batch, shift)) / ranks
    error = float(np.linalg.norm(held / scale - exact) / np.linalg.norm(exact))
    flushed = float(np.mean(held[exact != 0] == 0))
    return np.log2(np.abs(way[way != 0])), {"gradient_error": error, "flushed_share": flushed}


def train(task: Task, mode: str, seed: int) -> dict[int, Training]:
    """Trains in a mode, which is compiled once, and returns the training with each number of ranks.

    Args:
        task: how large it is.
        mode: one of `MODES`.
        seed: of the weights and the batches.
    """

    def cast(fun: Callable[..., Any]) -> Callable[..., Any]:
        return fun if mode == FLOAT32 else autocast(fun, mode.split(",")[0])

    def of_rank(weights: Weights, batch: Batch, ranks: Any) -> jax.Array:
        return loss(weights, batch) / ranks

    loss, network = cast(mean_squared), jit(cast(denoise))
    step = jit(train_step(of_rank, donate=False), donate_argnums=0)
    # Without scaling the scale is 1, and a step that is not finite is skipped all the same.
    rule = DynamicLossScale(2.0**15, PERIOD) if mode == SCALED else FixedLossScale(1.0)
    # With so small an epsilon the size of the loss does not matter to float32.
    rate = optax.cosine_decay_schedule(2e-3, task.steps, alpha=0.05)
    tx, runs = with_loss_scale(optax.adam(rate, eps=1e-12), rule), {}
    for ranks in (task.ranks, *task.other_ranks) if mode == UNSCALED else (task.ranks,):
        state, history = TrainState.create(initial_weights(task, seed), tx), []
        words, console = f"{mode}, {ranks} rank{'s' * (ranks > 1)}", Console(stderr=True)
        batches = track(patches(task, seed), f"{words:25}", task.steps, console=console)
        start, probed = time.perf_counter(), None
        for number, batch in enumerate(batches):
            if number == task.probed:
                probed = probe(state, batch, ranks, loss)
            scale = float(state.loss_scale)
            state, value = step(state, batch, np.float32(ranks))
            history.append((float(value) * ranks, scale, not state.applied))
        seconds = time.perf_counter() - start
        errors, scales, skipped = map(np.array, zip(*history, strict=True))
        assert probed is not None
        exponents, measures = probed
        images = np.asarray(network(state.params, held_out()[0]))
        counts = {"skipped_steps": int(skipped.sum()), "final_scale": float(scales[-1])}
        measures = {**quality(images), **measures, **counts, "seconds": seconds}
        runs[ranks] = Training(errors, scales, skipped, exponents, images, measures)
    return runs


class Comparison(NamedTuple):
    """The trainings in each mode, and those of unscaled float16 with each number of ranks."""

    task: Task
    by_mode: dict[str, Training]
    by_ranks: dict[int, Training]

    def times(self, run: Training) -> float:
        """A training's test error, as a multiple of that of float32."""
        return run.measures["test_error"] / self.by_mode[FLOAT32].measures["test_error"]


def compare(task: Task, seed: int) -> Comparison:
    """Trains in each mode, with the weights and the batches of a seed."""
    runs = {mode: train(task, mode, seed) for mode in MODES}
    by_mode = {mode: by_ranks[task.ranks] for mode, by_ranks in runs.items()}
    return Comparison(task, by_mode, dict(sorted(runs[UNSCALED].items())))

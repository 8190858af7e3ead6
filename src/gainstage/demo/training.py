"""One network trained in float32, bfloat16, float16, and float16 with loss scaling."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from gainstage._variables.types import P, R
from gainstage.demo.photographs import (
    Batch,
    Evaluation,
    Task,
    Weights,
    denoise,
    draw_batches,
    evaluation,
    held_out_images,
    initial_weights,
    loss,
)
from gainstage.precision.autocast import autocast
from gainstage.rules import DynamicLossScale, FixedLossScale
from gainstage.transforms.loss_scaled import loss_scaled
from gainstage.transforms.train_state import TrainState
from gainstage.transforms.train_step import train_step

# By default XLA may keep float16 results in float32 between operations, and so hide the very
# rounding that the demo is about.
jit: functools.partial[Any] = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False}
)


class Mode(NamedTuple):
    """A way to train: the dtype to compute in, and whether the loss is scaled."""

    name: str
    dtype: str
    scaled: bool

    def cast(self, fun: Callable[P, R]) -> Callable[P, R]:
        """A float32 function with its products in the dtype of this mode."""
        return fun if self.dtype == "float32" else autocast(fun, self.dtype)


FLOAT32 = Mode("float32", "float32", scaled=False)
BFLOAT16 = Mode("bfloat16", "bfloat16", scaled=False)
PERIOD = 8  # good steps after which the scale is doubled: few, to show it
UNSCALED = Mode("float16", "float16", scaled=False)
SCALED = Mode("float16, scaled", "float16", scaled=True)
MODES = (FLOAT32, BFLOAT16, UNSCALED, SCALED)


class Probe(NamedTuple):
    """What happened to the gradients of one batch, at one moment of the training."""

    exponents: np.ndarray  # log2 of the elements on their way through the network, in float32
    scale: float
    error: float  # of the weights' gradients: relative, against those of float32
    flushed: float  # share of their elements that are 0, but not in float32


class Training(NamedTuple):
    """What one training was like, and what came of it."""

    mode: Mode
    ranks: int
    errors: np.ndarray  # the squared error on the batch of each step
    scales: np.ndarray  # the loss scale of each step; 1 without scaling
    skipped: np.ndarray  # whether the step was skipped
    seconds: float
    probe: Probe
    evaluation: Evaluation

    @property
    def measures(self) -> dict[str, Any]:
        """The numbers, by name."""
        return {
            **self.evaluation.measures,
            "gradient_error": self.probe.error,
            "flushed_share": self.probe.flushed,
            "skipped_steps": int(self.skipped.sum()),
            "final_scale": float(self.scales[-1]),
            "seconds": self.seconds,
        }


class Trainer:
    """Trains in one mode; compiled once, for runs from any seed and with any number of ranks."""

    def __init__(self, task: Task, mode: Mode):
        self.task: Task = task
        self.mode: Mode = mode
        self._loss, self._network = mode.cast(loss), jit(mode.cast(denoise))
        # Without scaling the scale is 1, and a step that is not finite is skipped all the same.
        rule = DynamicLossScale(2.0**15, PERIOD) if mode.scaled else FixedLossScale(1.0)
        # With so small an epsilon the size of the loss does not matter to float32.
        rate = optax.cosine_decay_schedule(2e-3, task.steps, alpha=0.05)
        self.tx: optax.GradientTransformationExtraArgs = loss_scaled(
            optax.adam(rate, eps=1e-12), rule
        )
        self._take = train_step(self._of_rank, donate=False)
        self._step = jit(self._taken, donate_argnums=0)

    def _of_rank(self, weights: Weights, batch: Batch, ranks: ArrayLike) -> jax.Array:
        return self._loss(weights, batch) / ranks

    def _taken(
        self, state: TrainState[Weights], batch: Batch, ranks: ArrayLike
    ) -> tuple[TrainState[Weights], tuple[jax.Array, ...]]:
        """One step, and what to record of it."""
        new, value = self._take(state, batch, ranks)
        return new, (value * ranks, state.loss_scale, ~new.applied)

    def run(self, seed: int, ranks: int, advance: Callable[[], None] = lambda: None) -> Training:
        """Trains with the weights and the batches of a seed; `advance` is called each step."""
        weights: Weights = [jnp.asarray(w) for w in initial_weights(self.task, seed)]
        state, parts = TrainState.create(weights, self.tx), np.float32(ranks)
        history, probe, start = [], None, time.perf_counter()
        batches = itertools.islice(draw_batches(self.task, seed), self.task.steps)
        for step, batch in enumerate(batches):
            if step == self.task.steps // 4:
                probe = self._probe(state.params, batch, parts, float(state.loss_scale))
            state, record = self._step(state, batch, parts)
            history.append(record)
            if step % 20 == 0:
                jax.block_until_ready(record)  # so that the bar shows what is done
            advance()
        errors, scales, skipped = map(np.array, zip(*jax.device_get(history), strict=True))
        seconds = time.perf_counter() - start
        assert probe is not None
        denoised = evaluation(self._network(state.params, held_out_images()[0]))
        return Training(self.mode, ranks, errors, scales, skipped, seconds, probe, denoised)

    def _probe(self, weights: Weights, batch: Batch, ranks: np.float32, scale: float) -> Probe:
        """Compares the gradient of a batch with that of float32 at the same weights."""
        exact = np.asarray(gradient(weights, batch, 1 / ranks, loss))
        held = np.asarray(gradient(weights, batch, scale / ranks, self._loss))
        way = np.asarray(gradient_of_features(weights, batch, 1 / ranks))
        return Probe(
            exponents=np.log2(np.abs(way[way != 0])),
            scale=scale,
            error=float(np.linalg.norm(held / scale - exact) / np.linalg.norm(exact)),
            flushed=float(np.mean(held[exact != 0] == 0)),
        )


@functools.partial(jit, static_argnames="loss")
def gradient(
    weights: Weights, batch: Batch, factor: ArrayLike, loss: Callable[..., Any]
) -> jax.Array:
    """All elements of the gradient of a loss times a factor, as they come out of the network."""
    grads = jax.grad(lambda weights: loss(weights, batch) * factor)(weights)
    return jnp.concatenate([jnp.ravel(g) for g in grads])


@jit
def gradient_of_features(weights: Weights, batch: Batch, factor: ArrayLike) -> jax.Array:
    """The gradient of the loss times a factor at the first features of the network."""
    noisy, clean = batch

    def scaled(shift: jax.Array) -> jax.Array:
        return jnp.square(denoise(weights, noisy, shift) - clean).mean() * factor

    return jax.grad(scaled)(jnp.zeros((*noisy.shape[:-1], weights[0].shape[-1])))


class Comparison(NamedTuple):
    """The runs in each mode, and those of float16 without scaling with each number of ranks."""

    task: Task
    by_mode: dict[Mode, Training]
    by_ranks: list[Training]

    def times(self, run: Training) -> float:
        """A run's test error, as a multiple of that of float32."""
        return run.measures["test_error"] / self.by_mode[FLOAT32].measures["test_error"]

    @property
    def factor(self) -> float:
        """What the error of a pixel is multiplied by, as the loss is differentiated."""
        return 2 / (self.task.values * self.task.ranks)

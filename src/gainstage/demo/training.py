"""One network trained three ways: in float32, in float16, and in float16 with loss scaling."""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gainstage._core.bridge import jit
from gainstage._core.variable import Variable
from gainstage.demo.task import BATCH, Digits, Outputs, forward, initial_weights, loss
from gainstage.optimizers import Adam
from gainstage.optimizers.base import Optimizer
from gainstage.optimizers.loss_scale import LossScaleOptimizer

LEARNING_RATE = 2e-3
GROWTH_STEPS = 40
SMALLEST_NORMAL = 2.0**-14  # of float16


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to train: the dtype to compute in, and whether the loss is scaled."""

    name: str
    dtype: str
    scaled: bool

    def optimizer(self, steps: int) -> Optimizer:
        """Adam with a cosine decay, in a `LossScaleOptimizer` if the loss is to be scaled."""
        adam = Adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))
        if not self.scaled:
            return adam
        return LossScaleOptimizer(adam, initial_scale=2.0**15, dynamic_growth_steps=GROWTH_STEPS)


FLOAT32 = Mode("float32", "float32", scaled=False)
UNSCALED = Mode("float16", "float16", scaled=False)
SCALED = Mode("float16, scaled", "float16", scaled=True)
MODES = (FLOAT32, UNSCALED, SCALED)


@dataclasses.dataclass(frozen=True)
class Probe:
    """What happened to the gradients of one batch, at one moment of the training."""

    exponents: np.ndarray  # log2 of the elements that are not 0 in float32
    scale: float
    flushed: float  # share of those that are 0 in the mode's dtype
    subnormal: float  # share of those that float16 keeps with fewer bits than it has


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training was like, and what came of it."""

    mode: Mode
    losses: np.ndarray  # the reconstruction error on the batch of each step
    scales: np.ndarray  # the loss scale of each step; 1 without scaling
    skipped: np.ndarray  # whether the step was skipped
    seconds: float
    probe: Probe
    train: Outputs
    test: Outputs


class Trainer:
    """Trains in one mode; compiled once, for runs from any number of seeds."""

    def __init__(self, mode: Mode, steps: int, data: tuple[Digits, Digits]):
        self.mode, self.steps = mode, steps
        self.train_data, self.test_data = data
        # The master weights stay float32; the network casts them to the dtype it computes in.
        self.weights = [Variable(w, name=f"w{i}") for i, w in enumerate(initial_weights(0))]
        self.optimizer = mode.optimizer(steps)
        self.optimizer.build(self.weights)
        self._fresh = [variable.numpy() for variable in self.optimizer.variables]
        state = (self.weights, self.optimizer.variables)
        self._step = jit(self._train_step, state, donate=True)

    def _train_step(self, digits: Digits) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One step; returns the reconstruction error, the scale, and whether it was skipped."""
        scale, before = self._scale(), self.optimizer.iterations.value()

        def scaled_loss(weights: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            value, error = loss(weights, digits, self.mode.dtype)
            return self.optimizer.scale_loss(value), error

        grads, error = jax.grad(scaled_loss, has_aux=True)([w.value() for w in self.weights])
        self.optimizer.apply(grads)
        return error, scale, self.optimizer.iterations.value() == before

    def _scale(self) -> jax.Array:
        optimizer = self.optimizer
        return getattr(optimizer, "loss_scale", jnp.float32(1))

    def run(self, seed: int, advance: Callable[[], None] = lambda: None) -> Run:
        """Trains from the weights and with the batches of a seed; `advance` is called each step."""
        for variable, value in zip(self.weights, initial_weights(seed), strict=True):
            variable.assign(value)
        self.optimizer.set_weights(self._fresh)
        batches = draw_batches(self.train_data, self.steps, seed)
        history, probe = [], None
        start = time.perf_counter()
        for step in range(self.steps):
            if step == self.steps // 4:
                probe = self._probe(batches(step))
            history.append(self._step(batches(step)))
            if step % 50 == 0:
                jax.block_until_ready(history[-1])  # so that the bar shows what is done
            advance()
        losses, scales, skipped = map(np.array, zip(*jax.device_get(history), strict=True))
        seconds = time.perf_counter() - start
        weights = [w.value() for w in self.weights]
        train, test = (
            evaluate(weights, d, self.mode.dtype) for d in (self.train_data, self.test_data)
        )
        assert probe is not None
        return Run(self.mode, losses, scales, skipped, seconds, probe, train, test)

    def _probe(self, digits: Digits) -> Probe:
        """Compares the gradients of a batch with those of float32, at the same weights."""
        weights, scale = [w.value() for w in self.weights], self._scale()
        exact = gradient_elements(weights, digits, "float32", 1.0)
        held = gradient_elements(weights, digits, self.mode.dtype, scale)[exact != 0]
        exact = exact[exact != 0]
        half = self.mode.dtype == "float16"
        return Probe(
            exponents=np.log2(np.abs(exact)),
            scale=float(scale),
            flushed=float(np.mean(held == 0)),
            subnormal=float(np.mean((held != 0) & (np.abs(held) < SMALLEST_NORMAL))) * half,
        )


def draw_batches(data: Digits, steps: int, seed: int) -> Callable[[int], Digits]:
    """The batch of each step: every image once, in random order, before any comes again."""
    rng = np.random.default_rng(seed)
    size = len(data.labels)
    epochs = -(-steps * BATCH // (size - size % BATCH))
    order = np.concatenate([rng.permutation(size)[: size - size % BATCH] for _ in range(epochs)])
    chosen = order.reshape(-1, BATCH)
    images, labels = np.asarray(data.images), np.asarray(data.labels)
    return lambda step: Digits(images[chosen[step]], labels[chosen[step]])


def gradient_elements(
    weights: list[jax.Array], digits: Digits, dtype: str, scale: object
) -> np.ndarray:
    """All elements of the gradients of the scaled loss, as they come out of the network."""
    return np.concatenate([np.ravel(g) for g in _gradients(weights, digits, dtype, scale)])


@jax.jit(static_argnames="dtype")
def _gradients(
    weights: list[jax.Array], digits: Digits, dtype: str, scale: jax.Array
) -> list[jax.Array]:
    return jax.grad(lambda weights: loss(weights, digits, dtype)[0] * scale)(weights)


evaluate = jax.jit(forward, static_argnames="dtype")

"""Tasks to train in several precisions: a language model, denoising, and others, on data at hand.

The text is the source of Python's standard library, the photographs and digits come with
scikit-learn. Every loss is a float32 scalar, the mean over a batch; the network computes in
`dtype`.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

from benchmarks import models
from benchmarks.models import Params, cast

from .digits import Digits, forward, initial_weights, load_digits, pixel_error
from .digits import loss as digits_loss

RNG = np.random.Generator


class Task(NamedTuple):
    """A network to train, and how well it does.

    `ranks` are numbers of data-parallel processes, of which the measured one is one: its loss is
    divided by the global number of elements, as in every run on several devices. With
    `microbatches` it takes the mean over so many batches of its own.
    """

    init: Callable[[int], Params]  # seed -> float32 parameters
    loss: Callable[[Params, Any, str], jax.Array]  # (parameters, batch, dtype) -> mean loss
    batch: Callable[[RNG], Any]
    score: Callable[[Params], Any]  # on held-out data, in float32
    optimizer: Callable[[int], optax.GradientTransformation]  # of so many steps
    steps: int
    measure: str  # what the score is
    elements: int  # that the loss of one batch is the mean of
    unit: str = "elements"
    higher_is_better: bool = False
    ranks: tuple[int, ...] = (1,)
    microbatches: int = 1


def adam(rate: float, end: float = 1.0) -> Callable[[int], optax.GradientTransformation]:
    """Adam, with a cosine decay to the fraction `end` of the rate."""
    return lambda steps: optax.adam(optax.cosine_decay_schedule(rate, steps, end))


# ── a language model ─────────────────────────────────────────────────────────────────────────


@functools.cache
def source_code() -> tuple[np.ndarray, np.ndarray]:
    """ASCII bytes of the standard library's top-level modules; every 20th module is held out."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_text(encoding="utf-8").encode("ascii", "ignore") for file in files]
    held_out = b"\n".join(texts[::20])
    train = b"\n".join(text for n, text in enumerate(texts) if n % 20)
    return tuple(np.frombuffer(text, np.uint8).astype(np.int32) for text in (train, held_out))


def language_model(
    width: int = 64, blocks: int = 3, length: int = 128, rows: int = 16, steps: int = 200,
    rate: float = 2e-3, **options: Any,
) -> Task:  # fmt: skip
    """The next byte of Python source code, by a transformer; AdamW, clipping, a cosine decay."""

    @functools.cache
    def model(dtype: str) -> models.Model:
        heads, batch = width // 32, (rows, length)
        return models.transformer(
            jnp.dtype(dtype), width, blocks, letters=128, places=length, heads=heads, batch=batch
        )

    def init(seed: int) -> Params:
        rng, params = np.random.default_rng(seed), sorted(model("float32").params.items())
        return {
            name: p if name.startswith("norms") else jnp.asarray(shuffled(rng, p))
            for name, p in params
        }

    def shuffled(rng: RNG, weights: jax.Array) -> np.ndarray:
        return rng.permuted(np.ravel(weights)).reshape(weights.shape)

    def windows(rng: RNG, text: np.ndarray) -> np.ndarray:
        starts = rng.integers(len(text) - length - 1, size=rows)
        return np.stack([text[start : start + length + 1] for start in starts])

    @jax.jit
    def losses(params: Params, batches: jax.Array) -> jax.Array:
        return jax.lax.map(lambda batch: model("float32").loss(params, batch), batches).mean()

    def score(params: Params) -> jax.Array:
        rng = np.random.default_rng(9)
        return losses(params, np.stack([windows(rng, source_code()[1]) for _ in range(32)]))

    def optimizer(steps: int) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps, rate / 10)
        adamw = optax.adamw(schedule, b2=0.98, weight_decay=0.05)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    return Task(
        init=init,
        loss=lambda params, batch, dtype: model(dtype).loss(params, batch),
        batch=lambda rng: windows(rng, source_code()[0]),
        score=score,
        optimizer=optimizer,
        steps=steps,
        measure="validation loss",
        elements=rows * length,
        unit="tokens",
        **options,
    )


# ── denoising photographs ────────────────────────────────────────────────────────────────────


@functools.cache
def photographs() -> list[np.ndarray]:
    """Two photographs of 427 x 640 pixels, in [0, 1]."""
    return [image.astype(np.float32) / 255 for image in datasets.load_sample_images().images]


def convolution(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Of images, with zeros around them."""
    return jax.lax.conv_general_dilated(
        x, weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def kaiming(rng: RNG, *shape: int, gain: float = math.sqrt(2)) -> jax.Array:
    """Normal weights of a layer that is followed by a ReLU."""
    deviation = gain / math.sqrt(math.prod(shape[:-1]))
    return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(deviation))


def denoising(
    width: int = 16, blocks: int = 4, size: int = 16, rows: int = 8, steps: int = 200,
    noise: float = 25 / 255, border: int = 512, **options: Any,
) -> Task:  # fmt: skip
    """Noise of 25/255 off patches of photographs, by a residual network without norms, as EDSR.

    Columns left of `border` are trained on, those right of it held out.
    """

    def init(seed: int) -> Params:
        rng = np.random.default_rng(seed)
        params = {"first": kaiming(rng, 3, 3, 3, width), "last": kaiming(rng, 3, 3, width, 3)}
        params["last"] *= 0.07
        for block in range(blocks):
            params[f"in{block}"] = kaiming(rng, 3, 3, width, width)
            params[f"out{block}"] = kaiming(rng, 3, 3, width, width, gain=0.3)
        return params

    def network(params: Params, noisy: jax.Array, dtype: str) -> jax.Array:
        p, x = cast(params, dtype), noisy.astype(dtype)
        h = convolution(x, p["first"])
        for block in range(blocks):
            inside = jax.nn.relu(convolution(h, p[f"in{block}"]))
            h = h + convolution(inside, p[f"out{block}"])
        return noisy + convolution(h, p["last"]).astype(jnp.float32)

    def patches(rng: RNG, low: int, high: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for _ in range(count):
            image = photographs()[rng.integers(2)]
            top, left = rng.integers(image.shape[0] - size), rng.integers(low, high - size)
            patch = image[top : top + size, left : left + size]
            found.append(patch[:, ::-1] if rng.random() < 0.5 else patch)
        clean = np.stack(found)
        return clean + rng.standard_normal(clean.shape, np.float32) * np.float32(noise), clean

    def loss(params: Params, batch: Any, dtype: str) -> jax.Array:
        noisy, clean = batch
        return jnp.square(network(params, noisy, dtype) - clean).mean()

    @jax.jit
    def psnr(params: Params, noisy: jax.Array, clean: jax.Array) -> jax.Array:
        error = network(params, noisy, "float32").clip(0, 1) - clean
        return -10 * jnp.log10(jnp.square(error).mean())

    return Task(
        init=init,
        loss=loss,
        batch=lambda rng: patches(rng, 0, border, rows),
        score=lambda params: psnr(params, *patches(np.random.default_rng(9), border, 640, 512)),
        optimizer=adam(1e-3, 0.05),
        steps=steps,
        measure="PSNR, dB",
        elements=rows * size * size * 3,
        higher_is_better=True,
        **options,
    )


# ── handwritten digits ───────────────────────────────────────────────────────────────────────


@functools.cache
def digits() -> tuple[Digits, Digits]:
    """Those to train with, and those to test with."""
    return load_digits()


def drawn(rng: RNG, count: int = 256) -> Digits:
    """A batch of digits."""
    chosen = rng.choice(len(digits()[0].labels), count, replace=False)
    return jax.tree.map(lambda x: x[chosen], digits()[0])


def digits_drawn_again(steps: int = 800) -> Task:
    """Digits are told apart, and drawn again with a weight of 5e-4."""
    error = jax.jit(lambda params, held: pixel_error(forward(params, held.images)[1], held))
    return Task(
        init=lambda seed: jax.tree.map(jnp.asarray, initial_weights(seed)),
        loss=digits_loss,
        batch=drawn,
        score=lambda params: error(params, digits()[1]),
        optimizer=adam(2e-3, 0.0),
        steps=steps,
        measure="pixel error",
        elements=256 * 64,
    )


def perceptron(rng: RNG, *sizes: int) -> list[tuple[jax.Array, jax.Array]]:
    """Weights and offsets of layers that are fully connected."""
    return [(kaiming(rng, a, b), jnp.zeros(b)) for a, b in itertools.pairwise(sizes)]


def through(
    layers: Any, x: jax.Array, dtype: str, activation: Callable[..., Any] = jax.nn.relu
) -> jax.Array:
    """What the layers make of `x`, computed in `dtype`."""
    x = x.astype(dtype)
    for n, (weights, offsets) in enumerate(cast(layers, dtype)):
        x = (activation(x) if n else x) @ weights + offsets
    return x


def accuracy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of images whose highest score is that of their label."""
    return (scores.argmax(-1) == labels).mean()


def distillation(steps: int = 300, temperature: float = 4.0) -> Task:
    """A student learns the softened answers of a teacher."""

    @functools.cache
    def teacher() -> Any:
        layers = perceptron(np.random.default_rng(77), 64, 256, 256, 10)
        tx, batch = optax.adam(2e-3), digits()[0]
        state = tx.init(layers)

        def loss(layers: Any) -> jax.Array:
            return models.cross_entropy(through(layers, batch.images, "float32"), batch.labels)

        @jax.jit
        def step(layers: Any, state: Any) -> Any:
            updates, state = tx.update(jax.grad(loss)(layers), state)
            return optax.apply_updates(layers, updates), state

        for _ in range(100):
            layers, state = step(layers, state)
        return layers

    def batch(rng: RNG) -> Any:
        images = drawn(rng).images
        return images, np.asarray(answers(teacher(), images))

    @jax.jit
    def answers(layers: Any, images: jax.Array) -> jax.Array:
        return jax.nn.softmax(through(layers, images, "float32") / temperature)

    def loss(params: Params, batch: Any, dtype: str) -> jax.Array:
        images, wanted = batch
        scores = through(params["student"], images, dtype).astype(jnp.float32) / temperature
        return -(wanted * jax.nn.log_softmax(scores)).sum(-1).mean() * temperature**2

    def score(params: Params) -> jax.Array:
        test = digits()[1]
        return accuracy(through(params["student"], test.images, "float32"), test.labels)

    return Task(
        init=lambda seed: {"student": perceptron(np.random.default_rng(seed), 64, 64, 64, 10)},
        loss=loss,
        batch=batch,
        score=score,
        optimizer=adam(1e-3),
        steps=steps,
        measure="accuracy",
        elements=256,
        higher_is_better=True,
    )


def autoencoder(steps: int = 500) -> Task:
    """A variational autoencoder; its loss is a mean over all pixels."""

    def init(seed: int) -> Params:
        rng = np.random.default_rng(seed)
        encoder, decoder = perceptron(rng, 64, 256, 256, 32), perceptron(rng, 16, 256, 256, 64)
        return {"encoder": encoder, "decoder": decoder}

    def errors(params: Params, images: jax.Array, seed: Any, dtype: str) -> Any:
        code = through(params["encoder"], images, dtype).astype(jnp.float32)
        mean, log_variance = code[:, :16], code[:, 16:].clip(-8, 8)
        noise = jax.random.normal(jax.random.key(seed), mean.shape)
        code = mean + jnp.exp(log_variance / 2) * noise
        image = through(params["decoder"], code, dtype).astype(jnp.float32)
        divergence = jnp.exp(log_variance) + jnp.square(mean) - 1 - log_variance
        return jnp.square(image - images).mean(), divergence.sum(-1).mean() / 2 / 64

    def loss(params: Params, batch: Any, dtype: str) -> jax.Array:
        image, divergence = errors(params, *batch, dtype)
        return image + 0.02 * divergence

    return Task(
        init=init,
        loss=loss,
        batch=lambda rng: (drawn(rng).images, rng.integers(2**31, dtype=np.uint32)),
        score=lambda params: errors(params, digits()[1].images, 0, "float32")[0] * 64,
        optimizer=adam(1e-3),
        steps=steps,
        measure="error of an image",
        elements=256 * 64,
    )


def diffusion(steps: int = 400) -> Task:
    """The noise in a noisy digit, at any level of noise."""

    def error(params: Params, batch: Any, dtype: str) -> jax.Array:
        images, seed = batch
        time_key, noise_key = jax.random.split(jax.random.key(seed))
        time = jax.random.uniform(time_key, (len(images), 1)) * 1.5
        noise = jax.random.normal(noise_key, images.shape)
        noisy = jnp.cos(time) * (2 * images - 1) + jnp.sin(time) * noise
        waves = time * jnp.exp(jnp.linspace(0, 5, 8))
        x = jnp.concatenate([noisy, jnp.sin(waves), jnp.cos(waves)], axis=-1)
        found = through(params["network"], x, dtype, jax.nn.silu).astype(jnp.float32)
        return jnp.square(found - noise).mean()

    @jax.jit
    def score(params: Params) -> jax.Array:
        images = digits()[1].images
        return jnp.stack([error(params, (images, n), "float32") for n in range(16)]).mean()

    def init(seed: int) -> Params:
        return {"network": perceptron(np.random.default_rng(seed), 80, 384, 384, 384, 64)}

    return Task(
        init=init,
        loss=error,
        batch=lambda rng: (drawn(rng).images, rng.integers(2**31, dtype=np.uint32)),
        score=score,
        optimizer=adam(1e-3),
        steps=steps,
        measure="error of the noise",
        elements=256 * 64,
    )


def contrast(steps: int = 300, temperature: float = 0.1) -> Task:
    """SimCLR: two views of a digit are alike; then a linear classifier on the features."""

    def features(params: Params, images: jax.Array, dtype: str) -> jax.Array:
        return through(params["network"], images, dtype).astype(jnp.float32)

    def view(rng: RNG, images: np.ndarray) -> np.ndarray:
        moved = [np.roll(i.reshape(8, 8), rng.integers(-1, 2, 2), (0, 1)) for i in images]
        seen = np.reshape(moved, images.shape) * (rng.random(images.shape) > 0.2)
        return (seen + 0.1 * rng.standard_normal(images.shape)).astype(np.float32)

    def batch(rng: RNG) -> Any:
        images = drawn(rng).images
        return view(rng, images), view(rng, images)

    def loss(params: Params, batch: Any, dtype: str) -> jax.Array:
        z = jnp.concatenate([features(params, images, dtype) for images in batch])
        z = (z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6)).astype(dtype)
        alike = (z @ z.T).astype(jnp.float32) / temperature
        count = len(z) // 2
        others = jnp.where(jnp.eye(2 * count, dtype=bool), -1e9, alike)
        return models.cross_entropy(others, jnp.roll(jnp.arange(2 * count), count))

    def score(params: Params) -> np.ndarray:
        train, test = digits()
        x, held_out = (
            np.c_[features(params, d.images, "float32"), np.ones(len(d.labels))]
            for d in (train, test)
        )
        ridge = x.T @ x + 1e-2 * np.eye(x.shape[1])
        classifier = np.linalg.solve(ridge, x.T @ np.eye(10)[train.labels])
        return accuracy(held_out @ classifier, test.labels)

    return Task(
        init=lambda seed: {"network": perceptron(np.random.default_rng(seed), 64, 256, 256, 64)},
        loss=loss,
        batch=batch,
        score=score,
        optimizer=adam(1e-3),
        steps=steps,
        measure="accuracy of a linear classifier",
        elements=512,
        higher_is_better=True,
    )


def critic(steps: int = 400) -> Task:
    """The critic of a WGAN-GP: digits against blurred ones, with a penalty on its gradient."""

    def values(params: Params, images: jax.Array, dtype: str) -> jax.Array:
        leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.2)
        return through(params["critic"], images, dtype, leaky)[..., 0].astype(jnp.float32)

    def loss(params: Params, batch: Any, dtype: str) -> jax.Array:
        real, blurred, share = batch
        between = share * real + (1 - share) * blurred
        slopes = jax.vmap(jax.grad(lambda image: values(params, image, dtype)))(between)
        penalty = jnp.square(jnp.linalg.norm(slopes, axis=-1) - 1).mean()
        gap = values(params, blurred, dtype).mean() - values(params, real, dtype).mean()
        return gap + 10 * penalty

    def batch(rng: RNG) -> Any:
        images = drawn(rng).images
        noise = rng.standard_normal(images.shape, np.float32)
        blurred = np.float32(0.5) * (np.roll(images, 1, axis=0) + images)
        return images, blurred + np.float32(0.05) * noise, rng.random((256, 1), np.float32)

    held_out = jax.jit(functools.partial(loss, dtype="float32"))
    return Task(
        init=lambda seed: {"critic": perceptron(np.random.default_rng(seed), 64, 256, 256, 1)},
        loss=loss,
        batch=batch,
        score=lambda params: held_out(params, batch(np.random.default_rng(9))),
        optimizer=adam(1e-3),
        steps=steps,
        measure="loss",
        elements=256,
    )


# ── without data ─────────────────────────────────────────────────────────────────────────────


def poisson(steps: int = 1000) -> Task:
    """A physics-informed network: u'' = -pi**2 sin(pi x), and 0 at both ends."""

    def solution(params: Params, x: jax.Array, dtype: str) -> jax.Array:
        return through(params["network"], x[None], dtype, jnp.tanh)[0].astype(jnp.float32)

    def loss(params: Params, points: Any, dtype: str) -> jax.Array:
        def u(x: jax.Array) -> jax.Array:
            return solution(params, x, dtype)

        residual = jax.vmap(jax.grad(jax.grad(u)))(points)
        residual += jnp.pi**2 * jnp.sin(jnp.pi * points)
        ends = u(jnp.float32(-1)) ** 2 + u(jnp.float32(1)) ** 2
        return jnp.square(residual).mean() + 10 * ends

    def score(params: Params) -> jax.Array:
        x = jnp.linspace(-1, 1, 201)
        exact = jnp.sin(jnp.pi * x)
        found = jax.vmap(lambda x: solution(params, x, "float32"))(x)
        return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)

    return Task(
        init=lambda seed: {"network": perceptron(np.random.default_rng(seed), 1, 64, 64, 64, 1)},
        loss=loss,
        batch=lambda rng: rng.uniform(-1, 1, 256).astype(np.float32),
        score=score,
        optimizer=adam(2e-3, 0.01),
        steps=steps,
        measure="relative error",
        elements=256,
    )


def meta_learning(steps: int = 1000, rate: float = 0.01) -> Task:
    """MAML, of second order: a start from which one step of SGD learns any sine."""

    def error(params: Params, x: jax.Array, y: jax.Array, dtype: str) -> jax.Array:
        found = through(params["network"], x, dtype).astype(jnp.float32)
        return jnp.square(found - y).mean()

    def loss(params: Params, batch: Any, dtype: str) -> jax.Array:
        def after_a_step(x: Any, y: Any, new_x: Any, new_y: Any) -> jax.Array:
            grads = jax.grad(error)(params, x, y, dtype)
            adapted = jax.tree.map(lambda w, g: w - rate * g, params, grads)
            return error(adapted, new_x, new_y, dtype)

        return jax.vmap(after_a_step)(*batch).mean()

    def sines(rng: RNG, count: int = 25) -> Any:
        height = rng.uniform(0.1, 5, (count, 1, 1))
        phase = rng.uniform(0, np.pi, (count, 1, 1))
        xs = rng.uniform(-5, 5, (2, count, 10, 1))
        pairs = [(x, height * np.sin(x - phase)) for x in xs]
        return tuple(x.astype(np.float32) for pair in pairs for x in pair)

    def init(seed: int) -> Params:
        *layers, (weights, offsets) = perceptron(np.random.default_rng(seed), 1, 40, 40, 1)
        return {"network": [*layers, (weights * 0.1, offsets)]}

    held_out = jax.jit(functools.partial(loss, dtype="float32"))
    return Task(
        init=init,
        loss=loss,
        batch=sines,
        score=lambda params: held_out(params, sines(np.random.default_rng(9), 500)),
        optimizer=adam(1e-3),
        steps=steps,
        measure="error after a step",
        elements=250,
    )


TASKS: Mapping[str, Callable[[], Task]] = {
    "language model": lambda: language_model(ranks=(1, 16, 64, 256)),
    "denoising": lambda: denoising(ranks=(1, 8, 32, 128)),
    "accumulation": lambda: language_model(
        blocks=2, length=64, rows=64, steps=80, rate=4e-3, microbatches=16
    ),
    "digits drawn again": digits_drawn_again,
    "distillation": distillation,
    "VAE": autoencoder,
    "diffusion": diffusion,
    "SimCLR": contrast,
    "WGAN-GP critic": critic,
    "PINN": poisson,
    "MAML": meta_learning,
}

"""Three models as the examples of Flax and Equinox have them, on data that is drawn."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .autocast_models import Model, cross_entropy, of_linen, of_nnx, pictures


def mislabeled(seed: int, kinds: np.ndarray, count: int) -> jax.Array:
    """Labels of which a fifth are drawn again, so that the loss does not fall to 0."""
    rng = np.random.default_rng(seed + 10**6)
    wrong = rng.uniform(size=kinds.shape) < 0.2
    return jnp.asarray(np.where(wrong, rng.integers(count, size=kinds.shape), kinds))


def digits() -> Model:
    """The convolutional network of Flax's tutorial on MNIST, in NNX."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any):
            same: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
            self.first = nnx.Conv(1, 32, kernel_size=(3, 3), **same)
            self.second = nnx.Conv(32, 64, kernel_size=(3, 3), **same)
            self.hidden, self.out = nnx.Linear(1024, 256, **same), nnx.Linear(256, 10, **same)

        def __call__(self, x: jax.Array) -> jax.Array:
            pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            x = pool(nnx.relu(self.second(pool(nnx.relu(self.first(x))))))
            return self.out(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))

    def loss(model: Any, batch: Any) -> jax.Array:
        images, kinds = batch
        return cross_entropy(model(images), kinds)

    draw = pictures(32, 16, 1)

    def batch(seed: int) -> Any:
        images, kinds = draw(seed)
        return images, mislabeled(seed, np.asarray(kinds), 10)

    wide, params, _ = of_nnx(Net, loss)
    return Model(wide, params, batch)


def autoencoder() -> Model:
    """The variational autoencoder of Flax's examples, in Linen."""
    from flax import linen as nn

    size, latents = 16, 20
    draw = pictures(64, size, 1)

    class Autoencoder(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x: jax.Array, noise: jax.Array) -> Any:
            h = nn.relu(nn.Dense(500, dtype=self.dtype)(x))
            mean, log_variance = (nn.Dense(latents, dtype=self.dtype)(h) for _ in range(2))
            z = mean + noise * jnp.exp(0.5 * log_variance)
            h = nn.relu(nn.Dense(500, dtype=self.dtype)(z))
            return nn.Dense(size * size, dtype=self.dtype)(h), mean, log_variance

    def batch(seed: int) -> Any:
        images = jax.nn.sigmoid(2 * draw(seed)[0]).reshape(64, -1)
        noise = np.random.default_rng(seed + 10**6).standard_normal((64, latents))
        return images, jnp.asarray(noise, jnp.float32)

    def loss(apply: Callable[..., Any], batch: Any) -> jax.Array:
        images, noise = batch
        logits, mean, log_variance = apply(images, noise)
        own, other = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
        off = -jnp.sum(images * own + (1 - images) * other, -1)
        away = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
        return jnp.mean(off + away)

    wide, params, _ = of_linen(Autoencoder, loss, jnp.zeros((1, size**2)), jnp.zeros((1, latents)))
    return Model(wide, params, batch)


def spirals() -> Model:
    """The recurrent classifier of Equinox's examples: which way a spiral turns."""
    import equinox as eqx

    length, count, width = 16, 64, 32

    class Classifier(eqx.Module):
        cell: eqx.nn.GRUCell
        out: eqx.nn.Linear

        def __call__(self, xs: jax.Array) -> jax.Array:
            def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
                return self.cell(x, h), None

            return self.out(jax.lax.scan(step, jnp.zeros(width), xs)[0])[0]

    first, second = jax.random.split(jax.random.key(0))
    model = Classifier(eqx.nn.GRUCell(2, width, key=first), eqx.nn.Linear(width, 1, key=second))
    params, static = eqx.partition(model, eqx.is_array)

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        times = np.linspace(0, 2 * np.pi, length)
        offsets, turns = rng.uniform(0, 2 * np.pi, (count, 1)), rng.integers(2, size=count)
        angles = times * np.where(turns, 1, -1)[:, None] + offsets
        xs = np.stack([np.cos(angles), np.sin(angles)], -1) / (1 + times[:, None])
        xs = xs + 0.1 * rng.standard_normal(xs.shape)
        return jnp.asarray(xs, jnp.float32), mislabeled(seed, turns, 2).astype(jnp.float32)

    def loss(params: Any, batch: Any) -> jax.Array:
        xs, turns = batch
        logits = jax.vmap(eqx.combine(params, static))(xs)
        return jnp.mean(jax.nn.softplus(logits) - turns * logits)

    return Model(loss, params, batch)


EXAMPLES: dict[str, Callable[[], Model]] = {
    "digits (NNX's example)": digits,
    "autoencoder (Linen's example)": autoencoder,
    "spirals (Equinox's example)": spirals,
}

"""A GAN of digits, two models of Flax NNX with BatchNorm, in float32 and in float16.

pip install ".[demo,flax]"
python examples/gan.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gainstage as gs

import digits

NOISE, HIDDEN, BATCH, PENALTY = 32, 128, 100, 0.2


class Generator(nnx.Module):
    """Images of noise."""

    def __init__(self, rngs):
        sizes = (NOISE, HIDDEN), (HIDDEN, HIDDEN)
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])
        self.norms = nnx.List([nnx.BatchNorm(HIDDEN, rngs=rngs) for _ in sizes])
        self.output = nnx.Linear(HIDDEN, 64, rngs=rngs)

    def __call__(self, z):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            z = nnx.relu(norm(layer(z)))
        return nnx.sigmoid(self.output(z))


class Discriminator(nnx.Module):
    """A score of images."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, HIDDEN, rngs=rngs)
        self.middle = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.output = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.leaky_relu(self.hidden(x), 0.2)
        return self.output(nnx.leaky_relu(self.norm(self.middle(x)), 0.2))


def discriminator_loss(discriminator, generator, images, z):
    """The other player is an argument: its weights are those of this step."""
    real, fake = discriminator(images), discriminator(generator(z))
    score = nnx.grad(lambda discriminator, x: discriminator(x).sum(), argnums=1)
    slopes = score(discriminator, images)  # how fast the score changes
    penalty = PENALTY * (slopes**2).sum(-1).mean()
    return nnx.softplus(-real).mean() + nnx.softplus(fake).mean() + penalty


def generator_loss(generator, discriminator, z):
    """Low where the discriminator takes made images for real ones."""
    return nnx.softplus(-discriminator(generator(z))).mean()


def train(dtype, seed, steps=1500):
    """The generator, the losses of both players, and how many steps were skipped."""
    step_d = gs.train_step(gs.autocast(discriminator_loss, dtype))
    step_g = gs.train_step(gs.autocast(generator_loss, dtype))
    tx, rngs = optax.adam(5e-4, b1=0.5), nnx.Rngs(seed)
    d = gs.TrainState.create(Discriminator(rngs), tx, telemetry=True)
    g = gs.TrainState.create(Generator(rngs), tx, telemetry=True)
    rng, losses = np.random.default_rng(seed), []
    for _ in range(steps):
        images = digits.IMAGES[rng.integers(digits.TRAIN, size=BATCH)]
        z = rng.normal(size=(2, BATCH, NOISE)).astype(np.float32)
        d, loss_d = step_d(d, g.params, images, z[0])
        g, loss_g = step_g(g, d.params, z[1])
        losses.append((loss_d, loss_g))
    skipped = int(d.info.skipped_steps), int(g.info.skipped_steps)
    return g.params, np.array(jax.device_get(losses)), skipped


def distance(generator, seed=0):
    """The Fréchet distance of generated images from those that were not trained on, in the twelve
    directions in which digits differ most."""
    images = digits.TEST[0]
    _, _, directions = np.linalg.svd(digits.IMAGES - digits.IMAGES.mean(0), full_matrices=False)
    z = np.random.default_rng(seed).normal(size=(2000, NOISE)).astype(np.float32)
    generator.eval()
    made = np.asarray(generator(jnp.asarray(z)))
    generator.train()
    (m1, c1), (m2, c2) = (
        (x.mean(0), np.cov(x.T)) for x in (x @ directions[:12].T for x in (images, made))
    )
    values, vectors = np.linalg.eigh(c1)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ c2 @ root), 0)).sum()
    return float(((m1 - m2) ** 2).sum() + np.trace(c1) + np.trace(c2) - 2 * cross)


def main(argv=None):
    """Prints a line for each precision."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(argv)
    print("precision  distance (one for each seed)   loss of D, G   skipped")
    for dtype in ("float32", "float16", "bfloat16"):
        runs = [train(dtype, seed, options.steps) for seed in range(options.seeds)]
        distances = [distance(generator) for generator, *_ in runs]
        ends = np.mean([losses[-100:].mean(0) for _, losses, _ in runs], axis=0)
        skipped = np.sum([skips for *_, skips in runs], axis=0)
        each = ", ".join(f"{x:.2f}" for x in distances)
        print(
            f"{dtype:9}  {np.mean(distances):.2f} ({each})   {ends[0]:.3f}, {ends[1]:.3f}   "
            f"{skipped[0]}, {skipped[1]}"
        )


if __name__ == "__main__":
    main()

"""Which precision for a language model? Flax NNX, in float32, on the text of a license.

pip install ".[flax]"
gainstage advise examples.which_precision:decoder
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 256, 2, 4, 128, 16
LICENSE = Path(__file__).parents[1] / "LICENSE"


class Block(nnx.Module):
    """Causal self-attention and a feed-forward network."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
            nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attend(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self, rngs):
        self.letters, self.places = (nnx.Embed(n, WIDTH, rngs=rngs) for n in (128, CONTEXT))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.letters(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.letters.attend(self.norm(x))


def loss_fn(model, tokens):
    """The mean cross-entropy of each next byte, in nats."""
    logits = model(tokens[:, :-1])
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def decoder():
    """The loss, the parameters and four batches of text."""
    text = np.frombuffer(LICENSE.read_bytes(), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - CONTEXT - 1, size=(4, BATCH, 1))
    batches = jnp.asarray(text[starts + np.arange(CONTEXT + 1)], jnp.int32)
    return loss_fn, Decoder(nnx.Rngs(0)), [(batch,) for batch in batches]

"""Models to train: their initial parameters, a batch, and a loss in a given dtype."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


class Model(NamedTuple):
    """All that a train step needs."""

    params: Params  # float32
    batch: Any
    loss: Callable[[Params, Any], jax.Array]


def model(name: str, dtype: str) -> Model:
    """The model of that name, which computes in `dtype`."""
    return {"mlp": mlp, "transformer": transformer, "gpt2": gpt2}[name](jnp.dtype(dtype))


def dense(rng: np.random.Generator, inputs: int, outputs: int) -> jax.Array:
    """A matrix that keeps the size of what it is multiplied with."""
    return jnp.asarray(rng.standard_normal((inputs, outputs), np.float32) / math.sqrt(inputs))


def mlp(dtype: Any) -> Model:
    """Four layers, 2.9 million parameters, and a batch of 128."""
    rng, widths = np.random.default_rng(0), [784, 1024, 1024, 1024, 10]
    params = {}
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        params[f"w{layer}"], params[f"b{layer}"] = dense(rng, inputs, outputs), jnp.zeros(outputs)
    batch = (
        jnp.asarray(rng.standard_normal((128, 784), np.float32)),
        jnp.asarray(rng.integers(10, size=128)),
    )

    def loss(params: Params, batch: Any) -> jax.Array:
        x, labels = batch
        p, x = cast(params, dtype), x.astype(dtype)
        for layer in range(4):
            x = x @ p[f"w{layer}"] + p[f"b{layer}"]
            x = jax.nn.relu(x) if layer < 3 else x
        return cross_entropy(x, labels)

    return Model(params, batch, loss)


def gpt2(dtype: Any, batch: tuple[int, int] = (1, 32)) -> Model:
    """The matrices of GPT-2 small, 124 million parameters, and by default a sequence of 32 tokens.

    The sequence is short: on a CPU Adam takes at least a fifth of the train step.
    """
    return transformer(dtype, 768, 12, letters=50257, places=1024, heads=12, batch=batch)


def transformer(
    dtype: Any,
    width: int = 256,
    blocks: int = 4,
    *,
    letters: int = 256,
    places: int = 64,
    heads: int = 4,
    batch: tuple[int, int] = (16, 64),
) -> Model:
    """Decoder blocks, by default 3.3 million parameters, and 16 sequences of 64 bytes."""
    rng = np.random.default_rng(0)
    params = {"letters": dense(rng, letters, width), "places": dense(rng, places, width)}
    for block in range(blocks):
        params[f"norms{block}"] = jnp.ones((2, width))
        params[f"attention{block}"] = dense(rng, width, 3 * width)
        params[f"project{block}"] = dense(rng, width, width)
        params[f"up{block}"] = dense(rng, width, 4 * width)
        params[f"down{block}"] = dense(rng, 4 * width, width)
    count, length = batch
    tokens = jnp.asarray(rng.integers(letters, size=(count, length + 1)))

    def loss(params: Params, batch: Any) -> jax.Array:
        p, inputs, targets = cast(params, dtype), batch[:, :-1], batch[:, 1:]
        x = p["letters"][inputs] + p["places"][:length]
        for block in range(blocks):
            first, second = p[f"norms{block}"]
            q, k, v = jnp.split(normed(x, first) @ p[f"attention{block}"], 3, axis=-1)
            x = x + attention(q, k, v, heads) @ p[f"project{block}"]
            x = x + jax.nn.gelu(normed(x, second) @ p[f"up{block}"]) @ p[f"down{block}"]
        return cross_entropy(x @ p["letters"].T, targets)

    return Model(params, tokens, loss)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, heads: int) -> jax.Array:
    """Causal attention; the softmax is taken in float32."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(v.dtype)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return y.reshape(*y.shape[:2], -1)


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square normalisation, in float32."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * scale


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss, in float32."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(scores, labels[..., None], axis=-1).mean()


def cast(params: Params, dtype: Any) -> Params:
    """The parameters in the dtype to compute in."""
    return jax.tree.map(lambda p: p.astype(dtype), params)

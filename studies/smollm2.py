"""SmolLM2 in JAX: a full forward pass, and a sampler with a KV cache.

Both take their dtype from the parameters; norms, softmax and log-probabilities are in float32.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NORMS, MATRICES = ("attn_norm", "ffn_norm"), ("attn_q", "attn_k", "attn_v", "attn_output",
                                              "ffn_gate", "ffn_up", "ffn_down")  # fmt: skip
# XLA may leave out casts to half precision and back, which are what is measured.
KEEP_ROUNDINGS = {"xla_allow_excess_precision": False}
Params = dict[str, Any]


class Config(NamedTuple):
    """The sizes of the network."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    theta: float  # of the rotary embedding
    epsilon: float  # of the norms


def normed(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square normalisation."""
    wide = x.astype(jnp.float32)
    root = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon)
    return (wide * root).astype(x.dtype) * weight


def rotated(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """The rotary embedding, on interleaved pairs as GGUF has them."""
    size = x.shape[-1]
    angle = positions[:, None].astype(jnp.float32) * theta ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., ::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape).astype(x.dtype)


def attention(config: Config, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
    """Grouped-query attention, with float32 scores."""
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, config.kv_heads, heads // config.kv_heads, size)
    scores = jnp.einsum("btghd,bsgd->bghts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores / math.sqrt(size), -1e30)).astype(v.dtype)
    return jnp.einsum("bghts,bsgd->btghd", weights, v).reshape(batch, length, heads * size)


def block(
    config: Config, x: jax.Array, layer: Params, cache: Any, positions: Any, mask: Any
) -> tuple[jax.Array, Any]:
    """A layer on the tokens at `positions`, and the keys and values of all so far.

    Args:
        config, x, layer: the sizes, the activations, and the parameters of the layer.
        cache: keys and values of all positions, or None if `x` has all positions.
        positions: of the tokens of `x`.
        mask: which positions each of them attends to.
    """
    y = normed(x, layer["attn_norm"], config.epsilon)
    shape = (*x.shape[:2], -1, config.width // config.heads)
    q, k, v = ((y @ layer[name]).reshape(shape) for name in ("attn_q", "attn_k", "attn_v"))
    q, k = rotated(q, positions, config.theta), rotated(k, positions, config.theta)
    if cache is not None:
        k, v = (
            lax.dynamic_update_slice_in_dim(old, new, positions[0], 1)
            for old, new in zip(cache, (k, v), strict=True)
        )
    x = x + attention(config, q, k, v, mask) @ layer["attn_output"]
    y = normed(x, layer["ffn_norm"], config.epsilon)
    x = x + (jax.nn.silu(y @ layer["ffn_gate"]) * (y @ layer["ffn_up"])) @ layer["ffn_down"]
    return x, (k, v)


def layers(params: Params) -> Params:
    """The stacked parameters, to be scanned."""
    return {name: params[name] for name in (*NORMS, *MATRICES)}


def log_softmax(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """Log-probabilities of the next token."""
    logits = normed(x, params["norm"], config.epsilon) @ params["embedding"].T
    return jax.nn.log_softmax(logits.astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=0, compiler_options=KEEP_ROUNDINGS)
def trainer(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of `tokens[:, 1:]` in one forward pass, as a trainer computes them."""
    positions = jnp.arange(tokens.shape[1])
    mask = positions <= positions[:, None]

    def one(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return block(config, x, layer, None, positions, mask)[0], None

    x, _ = lax.scan(one, params["embedding"][tokens], layers(params))
    found = log_softmax(config, params, x[:, :-1])
    return jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 3), compiler_options=KEEP_ROUNDINGS)
def sampler(
    config: Config, params: Params, prompt: jax.Array, length: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws tokens after a prompt, one by one with a KV cache, up to `length`.

    Returns:
        All tokens, and the log-probabilities of `tokens[:, 1:]`.
    """
    batch, given = prompt.shape
    size = config.width // config.heads
    shape = (config.layers, batch, length, config.kv_heads, size)
    empty = jnp.zeros(shape, params["embedding"].dtype)

    def step(carry: Any, t: jax.Array) -> Any:
        tokens, caches, key = carry
        mask = jnp.arange(length) <= t

        def one(x: jax.Array, each: Any) -> Any:
            layer, cache = each
            return block(config, x, layer, cache, t[None], mask)

        x = params["embedding"][tokens[:, t]][:, None]
        x, caches = lax.scan(one, x, (layers(params), caches))
        found = log_softmax(config, params, x[:, 0])
        key, draw = jax.random.split(key)
        drawn = jax.random.categorical(draw, found)
        token = jnp.where(t + 1 < given, tokens[:, t + 1], drawn)
        logp = jnp.take_along_axis(found, token[:, None], -1)[:, 0]
        return (tokens.at[:, t + 1].set(token), caches, key), logp

    start = jnp.pad(prompt, ((0, 0), (0, length - given)))
    steps = jnp.arange(length - 1)
    (tokens, _, _), logp = lax.scan(step, (start, (empty, empty), key), steps)
    return tokens, logp.T


def cast(params: Params, dtype: Any) -> Params:
    """The parameters in the dtype to compute in."""
    return jax.tree.map(lambda x: x.astype(dtype), params)

"""Small models with a place for a fault behind every layer, and 200 faults to plant there.

A model is written as users of its framework write it, in float16. `plant(place, x)` behind a layer
is where a fault goes; without one it returns `x`.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
from flax import nnx

HALF = jnp.float16
WIDTH, HEADS, LENGTH, WORDS, BATCH, BLOCKS = 16, 2, 8, 32, 2, 4
SIDE, CHANNELS, CLASSES = 8, 8, 10

Fault = Change = Callable[[jax.Array], jax.Array]
_planted: dict[str, Fault] = {}


def plant(place: str, x: jax.Array) -> jax.Array:
    """What a layer returns, with the fault that is planted there."""
    return _planted[place](x) if place in _planted else x


class Model(NamedTuple):
    """A model, a loss of (params, x, y), and how a layer is called in an X-ray of it."""

    name: str
    using: Any
    loss: Callable[..., jax.Array]
    params: Any
    batch: tuple[jax.Array, ...]
    places: dict[str, str]  # place: the words of its layer
    kernels: dict[str, Callable[[Any, Change], Any]]  # place: what changes its kernel


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Of arrays (length, heads, size), with scores in float32."""
    scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / 4
    shares = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("hqk,khd->qhd", shares, v)


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """In float32: the weighted mean."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    each = jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]
    return -(each * weights).sum() / weights.sum()


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
SUBLAYERS = ("qkv", "out", "up", "down")


# ── transformers ─────────────────────────────────────────────────────────────────────────────


class NnxBlock(nnx.Module):
    """A block of the NNX transformer."""

    def __init__(self, rngs: nnx.Rngs, index: int):
        linear = functools.partial(nnx.Linear, dtype=HALF, use_bias=False, rngs=rngs)
        self.index = index
        self.n1 = nnx.LayerNorm(WIDTH, dtype=HALF, rngs=rngs)
        self.n2 = nnx.LayerNorm(WIDTH, dtype=HALF, rngs=rngs)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Of an array (batch, length, width)."""
        i = self.index
        qkv = plant(f"blocks/{i}/qkv", self.qkv(self.n1(x)))
        q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in jnp.split(qkv, 3, -1))
        mixed = jax.vmap(attention, in_axes=(0, 0, 0, None))(q, k, v, CAUSAL).reshape(x.shape)
        x = x + plant(f"blocks/{i}/out", self.out(mixed))
        h = jax.nn.gelu(plant(f"blocks/{i}/up", self.up(self.n2(x))))
        return x + plant(f"blocks/{i}/down", self.down(h))


class NnxTransformer(nnx.Module):
    """Four blocks, an embedding and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.tok = nnx.Embed(WORDS, WIDTH, dtype=HALF, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs, i) for i in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=HALF, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, dtype=HALF, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """The logits of words."""
        x = plant("tok", self.tok(ids))
        for block in self.blocks:
            x = block(x)
        return plant("head", self.head(self.norm(x)))


def nnx_transformer(seed: int) -> Model:
    """With its parameters split from it, as for optax."""
    graph, params = nnx.split(NnxTransformer(nnx.Rngs(seed)), nnx.Param)

    def loss(params: Any, ids: Any, labels: Any, weights: Any) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(ids), labels, weights)

    def kernel(i: int, name: str, params: Any, change: Change) -> Any:
        copy = jax.tree.map(lambda x: x, params)
        variable = copy["blocks"][i][name]["kernel"]
        variable.set_value(change(variable.get_value()))
        return copy

    places = {f"blocks/{i}/{n}": f"blocks/{i}/{n}" for i in range(BLOCKS) for n in SUBLAYERS}
    kernels = {
        f"blocks/{i}/{n}": functools.partial(kernel, i, n) for i in range(BLOCKS) for n in SUBLAYERS
    }
    whole = places | {"tok": "tok", "head": "head"}
    return Model("NNX transformer", jax.value_and_grad, loss, params, words(seed), whole, kernels)


class EqxBlock(eqx.Module):
    """A block of the Equinox transformer."""

    n1: eqx.nn.LayerNorm
    n2: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        sizes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
        linear = functools.partial(eqx.nn.Linear, use_bias=False)
        self.qkv, self.out, self.up, self.down = (
            linear(*size, key=k) for size, k in zip(sizes, keys, strict=True)
        )
        self.n1, self.n2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)

    def __call__(self, i: int, x: jax.Array) -> jax.Array:
        """Of an array (length, width)."""
        qkv = plant(f"blocks/{i}/qkv", jax.vmap(self.qkv)(jax.vmap(self.n1)(x)))
        q, k, v = (a.reshape(len(a), HEADS, -1) for a in jnp.split(qkv, 3, -1))
        mixed = attention(q, k, v, CAUSAL).reshape(x.shape)
        x = x + plant(f"blocks/{i}/out", jax.vmap(self.out)(mixed))
        h = jax.nn.gelu(plant(f"blocks/{i}/up", jax.vmap(self.up)(jax.vmap(self.n2)(x))))
        return x + plant(f"blocks/{i}/down", jax.vmap(self.down)(h))


class EqxTransformer(eqx.Module):
    """Four blocks, an embedding and a head."""

    tok: eqx.nn.Embedding
    blocks: list[EqxBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, BLOCKS + 2)
        self.tok = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
        self.blocks = [EqxBlock(k) for k in keys[2:]]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, WORDS, use_bias=False, key=keys[1])

    def __call__(self, ids: jax.Array) -> jax.Array:
        """The logits of the words of one text."""
        x = plant("tok", jax.vmap(self.tok)(ids))
        for i, block in enumerate(self.blocks):
            x = block(i, x)
        return plant("head", jax.vmap(self.head)(jax.vmap(self.norm)(x)))


def half_only(model: Any) -> Any:
    """An Equinox model that computes in float16, of parameters in float32."""
    return jax.tree.map(lambda x: x.astype(HALF) if eqx.is_inexact_array(x) else x, model)


def eqx_transformer(seed: int) -> Model:
    """The model itself is the first argument."""

    def loss(model: Any, ids: Any, labels: Any, weights: Any) -> jax.Array:
        return cross_entropy(jax.vmap(half_only(model))(ids), labels, weights)

    def kernel(i: int, name: str, model: Any, change: Change) -> Any:
        def of(m: Any) -> Any:
            return getattr(m.blocks[i], name).weight

        return eqx.tree_at(of, model, change(of(model)))

    places = {f"blocks/{i}/{n}": f"blocks/{i}/{n}" for i in range(BLOCKS) for n in SUBLAYERS}
    kernels = {
        f"blocks/{i}/{n}": functools.partial(kernel, i, n) for i in range(BLOCKS) for n in SUBLAYERS
    }
    model = EqxTransformer(jax.random.key(seed))
    whole = places | {"tok": "tok", "head": "head"}
    using = eqx.filter_value_and_grad
    return Model("Equinox transformer", using, loss, model, words(seed), whole, kernels)


def words(seed: int) -> tuple[jax.Array, ...]:
    """Texts, the words behind each of theirs, and weights."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, WORDS, (2, BATCH, LENGTH))
    return jnp.asarray(ids[0]), jnp.asarray(ids[1]), jnp.ones((BATCH, LENGTH))


# ── convolutional networks ───────────────────────────────────────────────────────────────────


class NnxCnn(nnx.Module):
    """Three convolutions and a head."""

    def __init__(self, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), dtype=HALF, rngs=rngs)
        sizes = [(1, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS, 2 * CHANNELS)]
        self.convs = nnx.List([conv(*size) for size in sizes])
        self.head = nnx.Linear(2 * CHANNELS, CLASSES, dtype=HALF, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of images (batch, side, side, 1)."""
        x = x.astype(HALF)
        for i, conv in enumerate(self.convs):
            x = nnx.silu(plant(f"convs/{i}", conv(x)))
        return plant("head", self.head(x.mean((1, 2))))


def nnx_cnn(seed: int) -> Model:
    """With its parameters split from it."""
    graph, params = nnx.split(NnxCnn(nnx.Rngs(seed)), nnx.Param)

    def loss(params: Any, x: Any, labels: Any, weights: Any) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(x), labels, weights)

    def kernel(i: int, params: Any, change: Change) -> Any:
        copy = jax.tree.map(lambda x: x, params)
        variable = copy["convs"][i]["kernel"]
        variable.set_value(change(variable.get_value()))
        return copy

    places = {f"convs/{i}": f"convs/{i}" for i in range(3)} | {"head": "head"}
    kernels = {f"convs/{i}": functools.partial(kernel, i) for i in range(3)}
    return Model("NNX CNN", jax.value_and_grad, loss, params, images(seed), places, kernels)


class EqxCnn(eqx.Module):
    """Three convolutions and a head."""

    convs: list[eqx.nn.Conv2d]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        sizes = [(1, CHANNELS), (CHANNELS, CHANNELS), (CHANNELS, 2 * CHANNELS)]
        self.convs = [
            eqx.nn.Conv2d(*size, 3, padding=1, key=k)
            for size, k in zip(sizes, keys[1:], strict=True)
        ]
        self.head = eqx.nn.Linear(2 * CHANNELS, CLASSES, key=keys[0])

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of one image (1, side, side)."""
        for i, conv in enumerate(self.convs):
            x = jax.nn.silu(plant(f"convs/{i}", conv(x)))
        return plant("head", self.head(x.mean((1, 2))))


def eqx_cnn(seed: int) -> Model:
    """The model itself is the first argument."""

    def loss(model: Any, x: Any, labels: Any, weights: Any) -> jax.Array:
        x = jnp.moveaxis(x.astype(HALF), -1, 1)
        return cross_entropy(jax.vmap(half_only(model))(x), labels, weights)

    def kernel(i: int, model: Any, change: Change) -> Any:
        return eqx.tree_at(lambda m: m.convs[i].weight, model, change(model.convs[i].weight))

    places = {f"convs/{i}": f"convs/{i}" for i in range(3)} | {"head": "head"}
    kernels = {f"convs/{i}": functools.partial(kernel, i) for i in range(3)}
    using, model = eqx.filter_value_and_grad, EqxCnn(jax.random.key(seed))
    return Model("Equinox CNN", using, loss, model, images(seed), places, kernels)


class Plant(keras.layers.Layer):
    """A place for a fault in a Keras model."""

    def __init__(self, place: str):
        super().__init__(name=f"after_{place}", dtype="mixed_float16")
        self.place = place

    def call(self, inputs: Any) -> Any:
        """`plant`."""
        return plant(self.place, inputs)


def keras_cnn(seed: int) -> Model:
    """Called without state: parameters are a list of arrays."""
    keras.utils.set_random_seed(seed)
    policy: dict[str, Any] = {"dtype": "mixed_float16"}
    layers: list[Any] = [keras.Input((SIDE, SIDE, 1))]
    for i, filters in enumerate((CHANNELS, CHANNELS, 2 * CHANNELS)):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", name=f"conv{i}", **policy)]
        layers += [Plant(f"conv{i}"), keras.layers.Activation("silu", **policy)]
    layers += [keras.layers.GlobalAveragePooling2D(**policy)]
    layers += [keras.layers.Dense(CLASSES, name="head", **policy), Plant("head")]
    return of_keras("Keras CNN", keras.Sequential(layers, name="cnn"), images(seed),
                    ["conv0", "conv1", "conv2", "head"])  # fmt: skip


def keras_mlp(seed: int) -> Model:
    """Dense layers with normalisation, as a stack of them."""
    keras.utils.set_random_seed(seed)
    policy: dict[str, Any] = {"dtype": "mixed_float16"}
    layers: list[Any] = [keras.Input((SIDE, SIDE, 1)), keras.layers.Flatten(**policy)]
    for i in range(4):
        layers += [keras.layers.Dense(32, name=f"dense{i}", **policy), Plant(f"dense{i}")]
        layers += [keras.layers.LayerNormalization(name=f"norm{i}", **policy)]
        layers += [keras.layers.Activation("silu", **policy)]
    layers += [keras.layers.Dense(CLASSES, name="head", **policy), Plant("head")]
    names = [*(f"dense{i}" for i in range(4)), "head"]
    return of_keras("Keras MLP", keras.Sequential(layers, name="mlp"), images(seed), names)


def of_keras(name: str, model: Any, batch: tuple[jax.Array, ...], layers: list[str]) -> Model:
    """A Keras model, called without state."""
    values = [v.value for v in model.trainable_variables]
    frozen = [v.value for v in model.non_trainable_variables]

    def loss(params: Any, x: Any, labels: Any, weights: Any) -> jax.Array:
        logits, _ = model.stateless_call(params, frozen, x)
        return cross_entropy(logits, labels, weights)

    def kernel(i: int, params: Any, change: Change) -> Any:
        return [change(p) if n == i else p for n, p in enumerate(params)]

    paths = [v.path for v in model.trainable_variables]
    kernels = {
        layer: functools.partial(kernel, paths.index(f"{model.name}/{layer}/kernel"))
        for layer in layers
        if layer != "head"
    }
    return Model(name, jax.value_and_grad, loss, values, batch, {n: n for n in layers}, kernels)


def images(seed: int) -> tuple[jax.Array, ...]:
    """Images, their classes, and weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4, SIDE, SIDE, 1)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(0, CLASSES, 4)), jnp.ones(4)


MODELS = {
    "NNX transformer": nnx_transformer,
    "Equinox transformer": eqx_transformer,
    "NNX CNN": nnx_cnn,
    "Equinox CNN": eqx_cnn,
    "Keras CNN": keras_cnn,
    "Keras MLP": keras_mlp,
}

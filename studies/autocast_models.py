"""Models written in float32, as users of Flax, Equinox and plain JAX write them.

Each is small: a gradient takes well under a second on a CPU. The large form has the same operations
and the sizes of work for a GPU. Where the library has a `dtype` argument, or a plain function casts
its parameters, the same model is also written by hand in float16.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import attention, cast, dense, normed

HALF = jnp.float16
of_experts = functools.partial(jnp.einsum, "ecd,edh->ech")  # of their tokens and weights
Loss = Callable[[Any, Any], jax.Array]  # `(params, batch) -> the mean loss`


class Model(NamedTuple):
    """All that a gradient needs."""

    loss: Loss
    params: Any  # float32
    batch: Callable[[int], Any]  # of a seed
    by_hand: Loss | None = None  # the same loss, written in float16


def of_nnx(build: Callable[..., Any], loss: Callable[..., jax.Array]) -> tuple[Loss, Any, Loss]:
    """The loss, the parameters, and the loss by hand of a model of Flax NNX.

    Args:
        build: `(rngs, dtype) -> model`.
        loss: `(model, batch) -> loss`.
    """
    from flax import nnx

    def of(dtype: Any) -> tuple[Loss, Any]:
        graph, params, rest = nnx.split(build(nnx.Rngs(0), dtype), nnx.Param, ...)

        def functional(params: Any, batch: Any) -> jax.Array:
            return loss(nnx.merge(graph, params, rest, copy=True), batch)

        return functional, params

    wide, params = of(None)
    return wide, params, of(HALF)[0]


def of_linen(
    build: Callable[..., Any], loss: Callable[..., jax.Array], *inputs: Any
) -> tuple[Loss, Any, Loss]:
    """The same of a model of Flax Linen.

    Args:
        build: `dtype -> module`.
        loss: `(apply, batch) -> loss`.
        *inputs: what the module is called with.
    """
    variables = build(None).init(jax.random.key(0), *inputs)
    rest = {name: part for name, part in variables.items() if name != "params"}

    def of(dtype: Any) -> Loss:
        def functional(params: Any, batch: Any) -> jax.Array:
            def apply(*inputs: Any) -> jax.Array:
                module = build(dtype)
                return module.apply({"params": params, **rest}, *inputs, mutable=list(rest))[0]

            return loss(apply, batch)

        return functional

    return of(None), variables["params"], of(HALF)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss, in float32 also where logits are written in float16."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# ── batches ──────────────────────────────────────────────────────────────────────────────────


def sentences(count: int, length: int, letters: int) -> Callable[[int], jax.Array]:
    """Tokens that mostly follow from the one before: each has four successors."""
    followers = np.random.default_rng(1).integers(letters, size=(letters, 4))

    def batch(seed: int) -> jax.Array:
        rng = np.random.default_rng(seed)
        tokens = [rng.integers(letters, size=count)]
        for _ in range(length):
            tokens.append(followers[tokens[-1], rng.integers(4, size=count)])
        return jnp.asarray(np.stack(tokens, 1))

    return batch


def pictures(count: int, size: int, channels: int = 3) -> Callable[[int], Any]:
    """Noisy pictures of ten kinds of waves, and their kinds."""
    y, x = np.mgrid[:size, :size] / size

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        kinds = rng.integers(10, size=count)
        phases = rng.uniform(0, 2 * np.pi, (count, 1, 1, channels))
        angles = np.pi * kinds / 10
        along = np.cos(angles)[:, None, None] * x + np.sin(angles)[:, None, None] * y
        waves = np.sin(4 * np.pi * along[..., None] + phases)
        noise = 0.5 * rng.standard_normal(waves.shape)
        return jnp.asarray(waves + noise, jnp.float32), jnp.asarray(kinds)

    return batch


# ── models ───────────────────────────────────────────────────────────────────────────────────


def nnx_block(width: int, heads: int, rngs: Any, dtype: Any) -> Any:
    """A block of attention and a network of two layers, in Flax NNX."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self) -> None:
            same: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
            self.first, self.second = (nnx.LayerNorm(width, **same) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **same)
            self.up = nnx.Linear(width, 4 * width, **same)
            self.down = nnx.Linear(4 * width, width, **same)

        def __call__(self, x: jax.Array, mask: Any = None) -> jax.Array:
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    return Block()


def transformer(
    large: bool = False,
    blocks: int = 4,
    width: int = 64,
    change: Callable[[Any], None] = lambda decoder: None,
) -> Model:
    """A decoder in Flax NNX, which `change` may alter."""
    from flax import nnx

    letters, width, count, length = (1024, 512, 16, 512) if large else (256, width, 16, 64)

    class Decoder(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any):
            same: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
            self.letters = nnx.Embed(letters, width, **same)
            self.places = nnx.Embed(length, width, **same)
            self.blocks = nnx.List([nnx_block(width, 4, **same) for _ in range(blocks)])
            self.norm = nnx.LayerNorm(width, **same)
            self.head = nnx.Linear(width, letters, **same)
            change(self)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.letters(tokens) + self.places(jnp.arange(tokens.shape[1]))
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x))

    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    wide, params, by_hand = of_nnx(Decoder, loss)
    return Model(wide, params, sentences(count, length, letters), by_hand)


def transformer_in_a_scan(large: bool = False) -> Model:
    """A decoder in Equinox: gated layers in a scan, and `jax.checkpoint` around each."""
    import equinox as eqx

    letters, width, count, length = (1024, 512, 16, 512) if large else (256, 64, 8, 64)

    class Block(eqx.Module):
        first: Any
        second: Any
        attention: Any
        gate: Any
        up: Any
        down: Any

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key, 4)
            self.first, self.second = eqx.nn.RMSNorm(width), eqx.nn.RMSNorm(width)
            self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
            self.gate = eqx.nn.Linear(width, 2 * width, key=keys[1])
            self.up = eqx.nn.Linear(width, 2 * width, key=keys[2])
            self.down = eqx.nn.Linear(2 * width, width, key=keys[3])

        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.vmap(self.first)(x)
            x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
            y = jax.vmap(self.second)(x)
            y = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
            return x + jax.vmap(self.down)(y)

    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "letters": eqx.nn.Embedding(letters, width, key=keys[0]),
        "blocks": eqx.filter_vmap(Block)(jax.random.split(keys[1], 4)),
        "norm": eqx.nn.RMSNorm(width),
        "head": eqx.nn.Linear(width, letters, key=keys[2]),
    }
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(model: Any, tokens: jax.Array) -> jax.Array:
        arrays, rest = eqx.partition(model["blocks"], eqx.is_array)

        @jax.checkpoint
        def layer(x: jax.Array, arrays: Any) -> tuple[jax.Array, None]:
            return eqx.combine(arrays, rest)(x), None

        x, _ = jax.lax.scan(layer, jax.vmap(model["letters"])(tokens), arrays)
        return jax.vmap(lambda one: model["head"](model["norm"](one)))(x)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = eqx.combine(params, static)
        found = jax.vmap(functools.partial(logits, model))(tokens[:, :-1])
        return cross_entropy(found, tokens[:, 1:])

    return Model(loss, params, sentences(count, length, letters))


def resnet(large: bool = False, activation: str = "relu") -> Model:
    """Three residual blocks with BatchNorm, in Flax Linen."""
    from flax import linen as nn

    width, count = (64, 256) if large else (16, 32)
    activate = getattr(nn, activation)

    class Block(nn.Module):
        channels: int
        stride: int
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
            norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
            strides = (self.stride, self.stride)
            y = activate(norm()(conv(self.channels, (3, 3), strides)(x)))
            y = norm()(conv(self.channels, (3, 3))(y))
            if x.shape != y.shape:
                x = norm()(conv(self.channels, (1, 1), strides)(x))
            return activate(x + y)

    class ResNet(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(width, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = activate(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            for channels, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
                x = Block(channels, stride, self.dtype)(x)
            return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))

    def loss(apply: Any, batch: Any) -> jax.Array:
        images, labels = batch
        return cross_entropy(apply(images), labels)

    batch = pictures(count, 32)
    wide, params, by_hand = of_linen(ResNet, loss, jnp.zeros((1, 32, 32, 3)))
    return Model(wide, params, batch, by_hand)


def diffusion(large: bool = False) -> Model:
    """A U-Net in Flax Linen that predicts the noise of a noisy picture."""
    from flax import linen as nn

    width, count, size = (64, 64, 64) if large else (16, 16, 16)

    class Block(nn.Module):
        channels: int
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
            y = nn.Conv(self.channels, (3, 3), dtype=self.dtype)(x)
            y = y + nn.Dense(self.channels, dtype=self.dtype)(time)[:, None, None]
            return nn.swish(nn.GroupNorm(8, dtype=self.dtype)(y))

    class UNet(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
            waves = time[:, None] * jnp.exp(jnp.linspace(0, 6, 8))
            time = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
            time = nn.swish(nn.Dense(32, dtype=self.dtype)(time))
            one = Block(width, self.dtype)(x, time)
            two = Block(2 * width, self.dtype)(nn.avg_pool(one, (2, 2), (2, 2)), time)
            low = Block(4 * width, self.dtype)(nn.avg_pool(two, (2, 2), (2, 2)), time)
            two = jnp.concatenate([two, low.repeat(2, 1).repeat(2, 2)], -1)
            two = Block(2 * width, self.dtype)(two, time)
            one = jnp.concatenate([one, two.repeat(2, 1).repeat(2, 2)], -1)
            one = Block(width, self.dtype)(one, time)
            return nn.Conv(3, (3, 3), dtype=self.dtype)(one)

    draw = pictures(count, size)

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        images = draw(seed)[0]
        noise = jnp.asarray(rng.standard_normal(images.shape), jnp.float32)
        return images, noise, jnp.asarray(rng.uniform(0.05, 0.95, count), jnp.float32)

    def loss(apply: Any, batch: Any) -> jax.Array:
        images, noise, time = batch
        angle = (np.pi / 2 * time)[:, None, None, None]
        found = apply(jnp.cos(angle) * images + jnp.sin(angle) * noise, time)
        return jnp.mean((found.astype(jnp.float32) - noise) ** 2)

    start = jnp.zeros((1, size, size, 3)), jnp.zeros(1)
    wide, params, by_hand = of_linen(UNet, loss, *start)
    return Model(wide, params, batch, by_hand)


def lstm(large: bool = False) -> Model:
    """A recurrent language model in Flax Linen, over a scan of all tokens."""
    from flax import linen as nn

    letters, width, count, length = (1024, 512, 64, 128) if large else (256, 64, 16, 64)

    class Recurrent(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(letters, width, dtype=self.dtype)(tokens)
            x = nn.RNN(nn.OptimizedLSTMCell(width, dtype=self.dtype))(x)
            return nn.Dense(letters, dtype=self.dtype)(x)

    def loss(apply: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(apply(tokens[:, :-1]), tokens[:, 1:])

    batch = sentences(count, length, letters)
    wide, params, by_hand = of_linen(Recurrent, loss, jnp.zeros((1, 2), int))
    return Model(wide, params, batch, by_hand)


def vit(large: bool = False) -> Model:
    """A vision transformer in Flax NNX, with patches of 4 by 4."""
    from flax import nnx

    width, count = (512, 128) if large else (64, 16)

    class ViT(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any):
            same: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
            self.patches = nnx.Conv(3, width, (4, 4), strides=(4, 4), **same)
            self.places = nnx.Param(0.02 * jax.random.normal(rngs.params(), (64, width)))
            self.blocks = nnx.List([nnx_block(width, 4, **same) for _ in range(3)])
            self.norm, self.head = nnx.LayerNorm(width, **same), nnx.Linear(width, 10, **same)
            self.dtype = dtype

        def __call__(self, images: jax.Array) -> jax.Array:
            x = self.patches(images).reshape(len(images), 64, width)
            x = x + self.places.get_value().astype(x.dtype)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))

    def loss(model: Any, batch: Any) -> jax.Array:
        images, labels = batch
        return cross_entropy(model(images), labels)

    wide, params, by_hand = of_nnx(ViT, loss)
    return Model(wide, params, pictures(count, 32), by_hand)


def mixture_of_experts(large: bool = False, up: Callable[..., jax.Array] = of_experts) -> Model:
    """Tokens that a router sends to one of four experts with a capacity, in plain JAX.

    Args:
        large: its form for a GPU.
        up: the first layer of the experts, of tokens and weights.
    """
    width, tokens, experts = (1024, 8192, 4) if large else (64, 512, 4)
    capacity = tokens // experts * 5 // 4
    rng = np.random.default_rng(0)
    params = {
        "in": dense(rng, 16, width),
        "router": dense(rng, width, experts),
        "up": jnp.stack([dense(rng, width, 4 * width) for _ in range(experts)]),
        "down": jnp.stack([dense(rng, 4 * width, width) for _ in range(experts)]),
        "out": dense(rng, width, 10),
    }
    teacher = rng.standard_normal((16, 10))

    def batch(seed: int) -> Any:
        x = np.random.default_rng(seed).standard_normal((tokens, 16))
        return jnp.asarray(x, jnp.float32), jnp.asarray(np.argmax(np.abs(x @ teacher), 1))

    def loss(params: Any, batch: Any, dtype: Any = jnp.float32) -> jax.Array:
        p, (x, labels) = cast(params, dtype), batch
        x = x.astype(dtype) @ p["in"]
        odds = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
        chosen = jax.nn.one_hot(jnp.argmax(odds, -1), experts)
        place = (jnp.cumsum(chosen, 0) - 1) * chosen
        seats = jax.nn.one_hot(place.sum(-1).astype(int), capacity) * 1.0
        dispatch = (chosen[:, :, None] * seats[:, None]).astype(dtype)
        y = jnp.einsum("tec,td->ecd", dispatch, x)
        y = jax.nn.gelu(up(y, p["up"]))
        y = jnp.einsum("ech,ehd->ecd", y, p["down"])
        gate = jnp.max(odds, -1, keepdims=True).astype(dtype)
        x = x + gate * jnp.einsum("tec,ecd->td", dispatch, y)
        balance = experts * jnp.sum(chosen.mean(0) * odds.mean(0))
        return cross_entropy(x @ p["out"], labels) + 0.01 * balance

    return Model(loss, params, batch, functools.partial(loss, dtype=HALF))


def contrastive(large: bool = False) -> Model:
    """Two encoders in Flax Linen, whose similarities are divided by a learned temperature."""
    from flax import linen as nn

    width, count = (1024, 4096) if large else (64, 128)

    class Encoder(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.gelu(nn.Dense(width, dtype=self.dtype)(x))
            x = nn.LayerNorm(dtype=self.dtype)(x)
            x = nn.Dense(32, dtype=self.dtype)(x)
            return x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)

    class Both(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
            start = nn.initializers.constant(math.log(1 / 0.07))
            temperature = self.param("temperature", start, ())
            a, b = Encoder(self.dtype)(a), Encoder(self.dtype)(b)
            if self.dtype:
                a, b = a.astype(self.dtype), b.astype(self.dtype)
            return (a @ b.T) * jnp.exp(temperature)

    mixing = np.random.default_rng(1).standard_normal((2, 8, 32))

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        both = np.tanh(rng.standard_normal((count, 8)) @ mixing)
        both += 0.3 * rng.standard_normal(both.shape)
        return jnp.asarray(both, jnp.float32)

    def loss(apply: Any, batch: Any) -> jax.Array:
        logits, labels = apply(*batch), jnp.arange(batch.shape[1])
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    wide, params, by_hand = of_linen(Both, loss, jnp.zeros((1, 32)), jnp.zeros((1, 32)))
    return Model(wide, params, batch, by_hand)


def pinn(large: bool = False) -> Model:
    """A network in Equinox that solves Poisson's equation, by its second derivatives."""
    import equinox as eqx

    width, count = (512, 8192) if large else (32, 256)
    network = eqx.nn.MLP(2, "scalar", width, 3, jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        inside, edge = rng.uniform(-1, 1, (2, count, 2))
        edge[:, 0] = np.sign(edge[:, 0])
        return jnp.asarray(inside, jnp.float32), jnp.asarray(edge, jnp.float32)

    def loss(params: Any, batch: Any) -> jax.Array:
        (inside, edge), u = batch, eqx.combine(params, static)

        def residual(x: jax.Array) -> jax.Array:
            source = 2 * np.pi**2 * jnp.prod(jnp.sin(np.pi * x))
            return jnp.trace(jax.hessian(u)(x)) + source

        return jnp.mean(jax.vmap(residual)(inside) ** 2) + jnp.mean(jax.vmap(u)(edge) ** 2)

    return Model(loss, params, batch)


def grpo(large: bool = False) -> Model:
    """A policy gradient of a decoder in plain JAX: clipped ratios, and a KL to a reference."""
    letters, width, count, length = (1024, 512, 32, 256) if large else (128, 64, 16, 48)
    rng, blocks, heads = np.random.default_rng(0), 2, 4
    params = {"letters": dense(rng, letters, width), "places": dense(rng, length, width)}
    for block in range(blocks):
        params |= {
            f"norms{block}": jnp.ones((2, width)),
            f"attention{block}": dense(rng, width, 3 * width),
            f"project{block}": dense(rng, width, width),
            f"up{block}": dense(rng, width, 4 * width),
            f"down{block}": dense(rng, 4 * width, width),
        }

    def log_probs(params: Any, tokens: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        p, inputs = cast(params, dtype), tokens[:, :-1]
        x = p["letters"][inputs] + p["places"]
        for block in range(blocks):
            first, second = p[f"norms{block}"]
            q, k, v = jnp.split(normed(x, first) @ p[f"attention{block}"], 3, axis=-1)
            x = x + attention(q, k, v, heads) @ p[f"project{block}"]
            x = x + jax.nn.gelu(normed(x, second) @ p[f"up{block}"]) @ p[f"down{block}"]
        scores = jax.nn.log_softmax((x @ p["letters"].T).astype(jnp.float32))
        return jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]

    def moved(amount: float) -> Any:
        noise = np.random.default_rng(2)
        return jax.tree.map(
            lambda p: p * (1 + amount * noise.standard_normal(p.shape).astype(np.float32)), params
        )

    def batch(seed: int) -> Any:
        rng, score = np.random.default_rng(seed), jax.jit(log_probs)
        tokens = jnp.asarray(rng.integers(letters, size=(count, length + 1)))
        rewards = rng.standard_normal((count // 4, 4))  # of four answers to each question
        rewards = (rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True)
        advantages = jnp.asarray(rewards.reshape(count, 1), jnp.float32)
        return tokens, advantages, score(moved(0.01), tokens), score(moved(0.05), tokens)

    def loss(params: Any, batch: Any, dtype: Any = jnp.float32) -> jax.Array:
        tokens, advantages, old, reference = batch
        found = log_probs(params, tokens, dtype)
        ratio = jnp.exp(found - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        away = reference - found
        return -jnp.mean(gain - 0.04 * (jnp.exp(away) - away - 1))

    return Model(loss, params, batch, functools.partial(loss, dtype=HALF))


def year_numbers(large: bool = False) -> Model:
    """A regression in Flax NNX on features as they are: years, and areas, with a BatchNorm."""
    from flax import nnx

    width, count = (2048, 8192) if large else (64, 256)

    class Regression(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any):
            same: dict[str, Any] = {"rngs": rngs, "dtype": dtype}
            self.first, self.norm = nnx.Linear(8, width, **same), nnx.BatchNorm(width, **same)
            self.second, self.out = nnx.Linear(width, width, **same), nnx.Linear(width, 1, **same)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.gelu(self.norm(self.first(x)))
            return self.out(nnx.gelu(self.second(x)))[:, 0]

    means = np.array([1990.0, 1975.0, 120.0, 48.0, 3.0, 0.0, 0.0, 0.0])
    widths = np.array([12.0, 20.0, 40.0, 3.0, 1.0, 1.0, 1.0, 1.0])

    def batch(seed: int) -> Any:
        z = np.random.default_rng(seed).standard_normal((count, 8))
        price = np.tanh(z[:, 0] + z[:, 1] * z[:, 2]) + 0.5 * z[:, 3] - 0.3 * z[:, 4]
        return jnp.asarray(means + widths * z, jnp.float32), jnp.asarray(price, jnp.float32)

    def loss(model: Any, batch: Any) -> jax.Array:
        x, price = batch
        return jnp.mean((model(x).astype(jnp.float32) - price) ** 2)

    wide, params, by_hand = of_nnx(Regression, loss)
    return Model(wide, params, batch, by_hand)


MODELS: dict[str, Callable[..., Model]] = {
    "transformer (NNX)": transformer,
    "transformer in a scan (Equinox)": transformer_in_a_scan,
    "ResNet, BatchNorm (Linen)": resnet,
    "ResNet with swish (Linen)": functools.partial(resnet, activation="swish"),
    "diffusion, U-Net (Linen)": diffusion,
    "LSTM (Linen)": lstm,
    "ViT (NNX)": vit,
    "mixture of experts": mixture_of_experts,
    "contrastive (Linen)": contrastive,
    "PINN, second derivatives (Equinox)": pinn,
    "GRPO step": grpo,
    "features with an offset (NNX)": year_numbers,
}

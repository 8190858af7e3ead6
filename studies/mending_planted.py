"""Lines that spoil a layer in half precision, and the models that they are planted in."""

import functools
import math
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, nn

from .autocast_models import Model, mixture_of_experts, of_experts, resnet, transformer

Multiply = Callable[[jax.Array, jax.Array], jax.Array]  # of inputs and weights
Fault = Callable[[Multiply, jax.Array, jax.Array], jax.Array]

# ── faults ───────────────────────────────────────────────────────────────────────────────────────

# Each computes a layer from its product `f`, its inputs and its weights, on lines of its own. In
# float32 all are harmless.
FAULTS: dict[str, Fault] = {
    "an offset of the inputs": lambda f, x, w: f(x + 4096, w) - f(jnp.full_like(x, 4096), w),
    "an offset of the weights": lambda f, x, w: f(x, w + 512) - f(x, jnp.full_like(w, 512)),
    "a large residual": lambda f, x, w: (f(x, w) + 2048) - 2048,
    "a difference over a small step": lambda f, x, w: (
        (jnp.tanh(f(x, w) + 0.002) - jnp.tanh(f(x, w))) / 0.002
    ),
    "a difference of products over a small step": lambda f, x, w: (
        (jnp.tanh(f(x * 1.002, w)) - jnp.tanh(f(x, w))) * 20 * 25
    ),
    "a second difference": lambda f, x, w: sum(
        c * jnp.tanh(f(x, w) + d) for c, d in ((16, -1 / 16), (-32, 0), (16, 1 / 16))
    ) * 16,
    "a difference over its spread": lambda f, x, w: (
        nn.standardize(f(x * 1.002, w) - f(x, w), axis=-1)
    ),
    "a product of near numbers": lambda f, x, w: (
        ((1 + f(x, w) / 32) * (1 - f(x, w) / 32) - 1) * 16 * 16
    ),
    "compound interest": lambda f, x, w: (1 + f(x, w) / 512) ** 512,
    "a high power": lambda f, x, w: (1.5 + 0.5 * jnp.tanh(f(x, w))) ** 16 / 1000,
    "large factors": lambda f, x, w: (
        (f(x, w) * 256) * (nn.sigmoid(f(x, w)) * 512) / 2**17
    ),
    "large operands": lambda f, x, w: f(x * 512, w * 512) / 2**18,
    "small operands": lambda f, x, w: f(x / 4096, w / 4096) * 2**24,
    "a small constant": lambda f, x, w: f(x, w * 1e-8) * 1e8,
    "a large constant": lambda f, x, w: f(x, w * 1e6) * 1e-6,
    "a high frequency": lambda f, x, w: jnp.sin(f(x, w) * 512),
    "a cold softmax": lambda f, x, w: f(x, w) * nn.softmax(f(x, w) * 512),
    "a cold softmax of large operands": lambda f, x, w: 16 * nn.softmax(f(x * 16, w * 32)),
    "a sharp gate": lambda f, x, w: f(x, w) * nn.sigmoid(f(x, w) * 512),
    "a variance by moments": lambda f, x, w: f(x, w) / jnp.sqrt(
        ((f(x, w) + 32) ** 2).mean(-1, keepdims=True)
        - (f(x, w) + 32).mean(-1, keepdims=True) ** 2 + 0.1
    ),
    "a cumulative sum": lambda f, x, w: (
        jnp.diff(lax.associative_scan(jnp.add, f(x, w) + 64, axis=-1), prepend=64, axis=-1) - 64
    ),
    "sums by a product": lambda f, x, w: (
        jnp.diff((f(x, w) + 64) @ jnp.triu(jnp.ones((w.shape[-1],) * 2)), prepend=64) - 64
    ),
    "a sum of 100,000 terms": lambda f, x, w: f(x, w) + (
        jnp.ones((16, 10**5)) @ jnp.tile(1 + w.reshape(-1, w.shape[-1])[:10], (10**4, 1)) / 10**5
    )[0],
    "an offset of the values": lambda f, x, w: (
        nn.softmax(f(x, w) @ f(x, w).swapaxes(-1, -2) / 16) @ (f(x, w) + 512) - 512
    ),
    "a chaotic map": lambda f, x, w: functools.reduce(
        lambda y, _: 3.9 * y * (1 - y), range(10), nn.sigmoid(f(x, w))
    ),
    "a recurrence": lambda f, x, w: functools.reduce(
        lambda pair, _: (pair[1], 2 * jnp.tanh(f(x, w)) * pair[1] - pair[0]),
        range(24), (jnp.ones(()), jnp.tanh(f(x, w))),
    )[1],
    "an alternating series": lambda f, x, w: 50 * sum(
        (-5 - jnp.tanh(f(x, w))) ** n / float(math.factorial(n)) for n in range(1, 25)
    ),
    "an inverse of near rows": lambda f, x, w: jnp.linalg.solve(
        f(x, w) @ f(x, w).swapaxes(-1, -2) + 0.01 * jnp.eye(x.shape[-2]), f(x, w)
    ),
    "a projection": lambda f, x, w: f(x, w) - f(x, w * 1.005) * (
        (f(x, w) * f(x, w * 1.005)).sum(-1, keepdims=True)
        / ((f(x, w * 1.005) ** 2).sum(-1, keepdims=True) + 1e-3)
    ),
}  # fmt: skip


def lines_of(fault: Fault) -> set[int]:
    """The numbers of the lines of a fault."""

    def lines(code: CodeType) -> Iterator[int]:
        yield from (line for *_, line in code.co_lines() if line is not None)
        for constant in code.co_consts:
            yield from lines(constant) if isinstance(constant, CodeType) else ()

    return set(lines(fault.__code__))


# ── models ───────────────────────────────────────────────────────────────────────────────────────


def in_transformer(fault: Fault) -> Model:
    """A decoder of two blocks, with a fault in the second."""
    from flax import nnx

    class Planted(nnx.Module):
        def __init__(self, layer: Any):
            self.layer = layer

        def __call__(self, x: jax.Array) -> jax.Array:
            return fault(jnp.matmul, x, self.layer.kernel.get_value()) + self.layer.bias.get_value()

    def change(decoder: Any) -> None:
        decoder.blocks[1].up = Planted(decoder.blocks[1].up)

    return transformer(blocks=2, change=change)


def in_experts(fault: Fault) -> Model:
    """A mixture of experts, with a fault in the first layer of each."""
    return mixture_of_experts(up=functools.partial(fault, of_experts))


def in_resnet(fault: Fault) -> Model:
    """A ResNet with swish, with a fault in the second convolution of its second block."""
    from flax import linen

    model = resnet(activation="swish")
    convolve = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip

    def put(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.module.path != ("Block_1", "Conv_1"):
            return call(*args, **kwargs)
        return fault(convolve, *args, context.module.get_variable("params", "kernel"))

    def loss(params: Any, batch: Any) -> jax.Array:
        with linen.intercept_methods(put):
            return model.loss(params, batch)

    return model._replace(loss=loss)


HOSTS: dict[str, Callable[[Fault], Model]] = {
    "transformer (NNX)": in_transformer,
    "mixture of experts": in_experts,
    "ResNet with swish (Linen)": in_resnet,
}

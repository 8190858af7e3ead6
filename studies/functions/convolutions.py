"""Convolutions and pooling: images are (batch, channels, height, width)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.ndimage import map_coordinates

from . import function


@function("k 8 3 3 3, w 8 5", "x 4 3 16 16, t 4 <5")
def convolution_and_global_pooling(xp, k, w, x, t):
    h = xp.relu(xp.conv(x, k)).mean((2, 3))
    return -xp.log_softmax(h @ w)[xp.arange(4), t].mean()


@function("k1 8 3 3 3, k2 8 8 3 3, w 128 5", "x 4 3 16 16, t 4 <5")
def two_convolutions_with_max_pooling(xp, k1, k2, w, x, t):
    h = xp.max_pool(xp.relu(xp.conv(x, k1)), 2)
    h = xp.max_pool(xp.relu(xp.conv(h, k2)), 2)
    return -xp.log_softmax(h.reshape(4, 128) @ w)[xp.arange(4), t].mean()


@function("k 8 3 3 3, w 512 4", "x 4 3 16 16, y 4 4")
def average_pooling(xp, k, w, x, y):
    h = xp.avg_pool(xp.tanh(xp.conv(x, k)), 2)
    return xp.mean((h.reshape(4, 512) @ w - y) ** 2)


@function("k 8 3 3 3, g 8 =1, b 8, w 8 5", "x 8 3 16 16, t 8 <5")
def convolution_with_batch_norm(xp, k, g, b, w, x, t):
    h = xp.conv(x, k)
    mean = h.mean((0, 2, 3), keepdims=True)
    var = ((h - mean) ** 2).mean((0, 2, 3), keepdims=True)
    h = (h - mean) / xp.sqrt(var + 1e-5) * g[:, None, None] + b[:, None, None]
    return -xp.log_softmax(xp.silu(h).mean((2, 3)) @ w)[xp.arange(8), t].mean()


@function("k1 8 8 3 3, k2 8 8 3 3", "x 4 8 12 12, y 4 8 12 12")
def residual_block(xp, k1, k2, x, y):
    h = xp.conv(xp.relu(xp.conv(x, k1)), k2)
    return xp.mean((xp.relu(x + h) - y) ** 2)


@function("k 16 3 3 3", "x 4 3 16 16, y 4 16 8 8")
def convolution_of_stride_two(xp, k, x, y):
    return xp.mean((xp.leaky_relu(xp.conv(x, k, 2)) - y) ** 2)


@function("d 8 1 3 3, p 8 8 1 1", "x 4 8 12 12, y 4 8 12 12", "params")
def depthwise_and_pointwise(xp, d, p, x, y):
    h = xp.conv(xp.relu(xp.conv(x, d, groups=8)), p)
    return xp.mean((h - y) ** 2)


@function("k 8 4 5 =0.1, w 8 2", "x 16 4 100, y 16 2")
def convolution_of_a_sequence(xp, k, w, x, y):
    h = xp.gelu(xp.conv(x, k))
    return xp.mean((h.mean(-1) @ w - y) ** 2)


@function("k1 8 8 2, k2 8 8 2, w 8 1", "x 8 8 64, y 8 63", "params")
def causal_convolutions(xp, k1, k2, w, x, y):
    h = xp.tanh(xp.conv(xp.pad(x, ((0, 0), (0, 0), (1, 0))), k1, 1, "VALID"))
    h = xp.tanh(xp.conv(xp.pad(h, ((0, 0), (0, 0), (1, 0))), k2, 1, "VALID"))
    return xp.mean((xp.einsum("bct,cd->bt", h, w)[:, :-1] - y) ** 2)


@function("k 4 2 3 3 3", "x 2 2 8 8 8, y 2 4 8 8 8")
def convolution_of_a_volume(xp, k, x, y):
    return xp.mean((xp.conv(x, k) - y) ** 2)


@function("k1 8 1 3 3, k2 8 8 3 3, k3 1 16 3 3", "x 4 1 16 16, y 4 1 16 16 ?")
def small_u_net(xp, k1, k2, k3, x, y):
    top = xp.relu(xp.conv(x, k1))
    low = xp.relu(xp.conv(xp.avg_pool(top, 2), k2))
    low = xp.repeat(xp.repeat(low, 2, 2), 2, 3)
    z = xp.conv(xp.concatenate([top, low], axis=1), k3)
    return xp.mean(xp.softplus(z) - y * z)


@function("k 8 3 3 3", "x 4 3 16 16")
def gram_matrices_of_style(xp, k, x):
    h = xp.relu(xp.conv(x, k)).reshape(4, 8, 256)
    gram = xp.einsum("bcn,bdn->bcd", h, h) / (8 * 256)
    return ((gram - 0.1) ** 2).sum()


@function("k1 8 3 3 3, k2 16 8 3 3", "x 4 3 16 16, y 4 3 16 16")
def perceptual_loss(xp, k1, k2, x, y):
    def features(z):
        a = xp.relu(xp.conv(z, k1))
        return a, xp.relu(xp.conv(a, k2, 2))

    return sum(((a - b) ** 2).mean() for a, b in zip(features(x), features(y), strict=True))


@function("k 3 3 5 5", "x 4 3 16 16, y 4 3 16 16")
def edges_of_an_image(xp, k, x, y):
    image = xp.conv(x, k)
    dx = image[:, :, :, 1:] - image[:, :, :, :-1]
    want = y[:, :, :, 1:] - y[:, :, :, :-1]
    return xp.mean(xp.sqrt((dx - want) ** 2 + 1e-3**2)) + xp.mean((image - y) ** 2)


@function("k 12 3 3 3", "x 4 3 16 16, y 4 3 32 32")
def super_resolution_by_shuffled_pixels(xp, k, x, y):
    h = xp.conv(x, k).reshape(4, 3, 2, 2, 16, 16)
    h = xp.transpose(h, (0, 1, 4, 2, 5, 3)).reshape(4, 3, 32, 32)
    mse = xp.mean((h - y) ** 2)
    return 10 * xp.log(mse + 1e-8)


@function("w 48 32, c 32, p 16 32, v 32 5", "x 4 16 16 3, t 4 <5")
def patches_of_an_image(xp, w, c, p, v, x, t):
    patches = xp.transpose(x.reshape(4, 4, 4, 4, 4, 3), (0, 1, 3, 2, 4, 5)).reshape(4, 16, 48)
    tokens = patches @ w + c + p
    return -xp.log_softmax(tokens.mean(1) @ v)[xp.arange(4), t].mean()


@function("k 8 3 3 3, w 8", "x 4 3 16 16, y 4 2")
def soft_argmax_of_a_heat_map(xp, k, w, x, y):
    heat = xp.einsum("bcij,c->bij", xp.relu(xp.conv(x, k)), w)
    p = xp.softmax(heat.reshape(4, 256)).reshape(4, 16, 16)
    place = xp.float(xp.arange(16))
    row, column = (p.sum(2) * place).sum(1), (p.sum(1) * place).sum(1)
    return xp.mean((xp.stack([row, column], 1) - 8 - y) ** 2)


@function("k 8 3 3 3, w 8 5, p =3", "x 4 3 16 16, t 4 <5")
def generalized_mean_pooling(xp, k, w, p, x, t):
    h = xp.maximum(xp.conv(x, k), 1e-6)
    pooled = (h**p).mean((2, 3)) ** (1 / p)
    return -xp.log_softmax(pooled @ w)[xp.arange(4), t].mean()


@function("k 8 3 3 3, w 8 5", "x 4 3 16 16, t 4 <5")
def pooling_by_logsumexp(xp, k, w, x, t):
    pooled = xp.logsumexp(xp.conv(x, k).reshape(4, 8, 256), axis=-1)
    return -xp.log_softmax(pooled @ w)[xp.arange(4), t].mean()


@function("k 4 8 4 4 *0.1", "x 4 4 8 8, y 4 8 16 16")
def transposed_convolution(k, x, y):
    up = lax.conv_transpose(x, k, (2, 2), "SAME", dimension_numbers=("NCHW", "IOHW", "NCHW"))
    return jnp.mean((jnp.tanh(up) - y) ** 2)


@function("k 8 4 3 3", "x 4 4 16 16, y 4 8 16 16")
def dilated_convolution(k, x, y):
    h = lax.conv_general_dilated(x, k, (1, 1), "SAME", rhs_dilation=(2, 2))
    return jnp.mean(jnp.abs(h - y))


@function("k 8 3 3 3, w 128 4", "x 4 16 16 3, y 4 4")
def convolution_with_channels_last(k, w, x, y):
    h = lax.conv_general_dilated(
        x, k.transpose(2, 3, 1, 0), (4, 4), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean((jax.nn.relu(h).reshape(4, 128) @ w - y) ** 2)


@function("k 8 3 3 3", "x 4 3 16 16")
def standard_deviation_over_a_window(xp, k, x):
    h = xp.conv(x, k)
    mean = xp.avg_pool(h, 4)
    return xp.sqrt(xp.avg_pool(h**2, 4) - mean**2 + 1e-3).mean()


@function("k 1 1 9 *0.3", "x 8 1 200, y 8 1 192")
def matched_filter(xp, k, x, y):
    out = xp.conv(x, k, 1, "VALID")
    return -xp.mean((out * y).sum(-1) / xp.sqrt((out**2).sum(-1) * (y**2).sum(-1) + 1e-9))


def places(size):
    return jnp.stack(jnp.meshgrid(jnp.arange(size), jnp.arange(size), indexing="ij"), -1) * 1.0


@function("a 2 2 *0.01, t 2 *0.3", "x 4 64 64, y 4 64 64")
def spatial_transformer(a, t, x, y):
    at = places(64) @ (jnp.eye(2) + a) + t
    sample = functools.partial(map_coordinates, coordinates=[at[..., 0], at[..., 1]], order=1)
    return jnp.mean((jax.vmap(sample)(x) - y) ** 2)


@function("a 2 2 *0.01, t 2 *0.3", "x 64 64, y 1024")
def resampling_by_hat_functions(a, t, x, y):
    at = places(32).reshape(-1, 2) @ (jnp.eye(2) + a) * 1.5 + t
    hats = [jax.nn.relu(1 - jnp.abs(at[:, i : i + 1] - jnp.arange(64))) for i in (0, 1)]
    return jnp.mean((jnp.einsum("pi,ij,pj->p", hats[0], x, hats[1]) - y) ** 2)

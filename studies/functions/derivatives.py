"""Own derivatives, quantizers, straight-through estimates, remat, and derivatives inside."""

import functools

import jax
import jax.numpy as jnp

from . import function

TWO = ("w 16 32, v 32 4", "x 64 16, y 64 4")


@function(*TWO)
def straight_through_sign(xp, w, v, x, y):
    h = xp.tanh(x @ w)
    h = h + xp.detach(xp.sign(h) - h)
    return xp.mean((h @ v - y) ** 2)


@function(*TWO)
def straight_through_rounding(xp, w, v, x, y):
    h = xp.sigmoid(x @ w) * 15
    h = h + xp.detach(xp.round(h) - h)
    return xp.mean((h / 15 @ v - y) ** 2)


@function(*TWO)
def weights_of_eight_bits(xp, w, v, x, y):
    step = xp.detach(xp.max(xp.abs(w), axis=(0, 1))) / 127
    q = w + xp.detach(xp.clip(xp.round(w / step), -127.0, 127.0) * step - w)
    return xp.mean((xp.relu(x @ q) @ v - y) ** 2)


@function("w 16 32, v 32 4, s =0.05", "x 64 16, y 64 4")
def learned_step_size(xp, w, v, s, x, y):
    z = xp.clip(w / s, -8.0, 7.0)
    q = (z + xp.detach(xp.round(z) - z)) * s
    return xp.mean((xp.relu(x @ q) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4", "params")
def ternary_weights(xp, w, v, x, y):
    size = xp.abs(w).mean()
    q = xp.clip(xp.round(w / (size + 1e-5)), -1.0, 1.0) * size
    w = w + xp.detach(q - w)
    return xp.mean((xp.tanh(x @ w) @ v - y) ** 2)


@function("w 16 32, v 32 4, a =2", "x 64 16, y 64 4")
def clipped_activations_of_four_bits(xp, w, v, a, x, y):
    h = xp.minimum(xp.relu(x @ w), a)
    step = a / 15
    q = h + xp.detach(xp.round(h / step) * step - h)
    return xp.mean((q @ v - y) ** 2)


@function("w 16 4, c 4 16 8 *1", "x 64 16")
def product_quantization(xp, w, c, x):
    parts = x.reshape(64, 4, 4) * w[:4].T[None]
    d = ((parts[:, :, None, :] - c[None, ..., :4]) ** 2).sum(-1)
    p = xp.softmax(-d)
    soft = xp.einsum("ngk,gkd->ngd", p, c[..., :4])
    return xp.mean((soft - parts) ** 2)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@function(*TWO)
def gradient_clipped_inside(w, v, x, y):
    return jnp.mean((clipped(jnp.tanh(x @ w)) @ v - y) ** 2)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.1 * g,))


@function("w 16 32, v 32 4, d 32 2", "x 64 16, y 64 4, k 64 <2")
def domains_with_a_reversed_gradient(w, v, d, x, y, k):
    h = jax.nn.relu(x @ w)
    logp = jax.nn.log_softmax(reversed_gradient(h) @ d)
    return jnp.mean((h @ v - y) ** 2) - logp[jnp.arange(64), k].mean()


@jax.custom_vjp
def dense(x, w):
    return x @ w


dense.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@function(*TWO)
def product_with_its_own_derivative(w, v, x, y):
    return jnp.mean((dense(jnp.tanh(dense(x, w)), v) - y) ** 2)


@function(*TWO)
def product_with_its_own_derivative_and_another(w, v, x, y):
    return jnp.mean((dense(jax.nn.gelu(x @ w), v) - y) ** 2)


@jax.custom_jvp
def safe_norm(x):
    return jnp.sqrt((x**2).sum(-1))


@safe_norm.defjvp
def safe_norm_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    n = safe_norm(x)
    return n, (x * dx).sum(-1) / jnp.maximum(n, 1e-6)


@function("w 16 8", "x 64 16")
def norm_with_its_own_derivative(w, x):
    return jnp.mean((safe_norm(x @ w) - 1) ** 2)


@jax.custom_jvp
def log1pexp(x):
    return jnp.log1p(jnp.exp(x))


log1pexp.defjvps(lambda dx, _, x: (1 - 1 / (1 + jnp.exp(x))) * dx)


@function("w 16 4", "x 64 16, y 64 4 ?")
def logistic_loss_with_its_own_derivative(w, x, y):
    z = x @ w
    return jnp.mean(log1pexp(jnp.minimum(z, 30.0)) + jnp.maximum(z - 30.0, 0.0) - y * z)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def surrogate_spike(x, slope):
    return (x > 0).astype(x.dtype)


surrogate_spike.defvjp(
    lambda x, slope: (surrogate_spike(x, slope), x),
    lambda slope, x, g: (g / (1 + slope * jnp.abs(x)) ** 2,),
)


@function("w 8 32, v 32 2", "x 20 16 8, y 16 2")
def spiking_neurons(w, v, x, y):
    def step(u, z):
        u = 0.9 * u + z @ w
        s = surrogate_spike(u - 1.0, 10.0)
        return u - s, s

    _, spikes = jax.lax.scan(step, jnp.zeros((16, 32)), x)
    return jnp.mean((spikes.mean(0) @ v - y) ** 2)


@function("w 16 32, u 32 32, v 32 4", "x 64 16, y 64 4")
def layers_that_are_computed_again(w, u, v, x, y):
    @jax.checkpoint
    def block(h):
        return h + jax.nn.gelu(h @ u) * jax.nn.sigmoid(h)

    return jnp.mean((block(block(x @ w)) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4", "params")
def checkpoint_that_keeps_products(w, v, x, y):
    policy = jax.checkpoint_policies.dots_saveable
    block = jax.checkpoint(lambda z: jnp.exp(-((z @ w) ** 2) / 32) @ v, policy=policy)
    return jnp.mean((block(x) - y) ** 2)


@function("w 4 16 8", "x 64 16, y 4 64 8")
def ensemble_under_vmap(w, x, y):
    def member(kernel, target):
        return jnp.mean((jnp.tanh(x @ kernel) - target) ** 2)

    return jax.vmap(member)(w, y).sum()


@function("w 16 8, v 8", "x 32 16, y 32")
def losses_of_single_examples_under_vmap(w, v, x, y):
    def one(row, target):
        return (jnp.tanh(row @ w) @ v - target) ** 2

    return jax.vmap(one)(x, y).mean()


@function("w 16 8, v 8 4", "x 32 16, d 32 16 !")
def tangent_of_a_network(w, v, x, d):
    def f(z):
        return jnp.tanh(z @ w) @ v

    out, tangent = jax.jvp(f, (x,), (d,))
    return jnp.mean(out**2) + jnp.mean(tangent**2)


@function("w 16 8, v 8 4", "x 32 16")
def norm_of_a_jacobian(w, v, x):
    jac = jax.vmap(jax.jacrev(lambda z: jax.nn.silu(z @ w) @ v))(x)
    return jnp.mean(jnp.sum(jac**2, (1, 2)))


@function("w 16 8, v 8", "x 32 16, y 32")
def input_gradient_penalty(xp, w, v, x, y):
    def f(z):
        return xp.softplus(z @ w) @ v

    slope = xp.vmap(xp.grad(f))(x)
    return xp.mean((f(x) - y) ** 2) + 0.1 * xp.mean((slope**2).sum(-1))


@function("w 16 8, v 8 4", "x 32 16, y 32 4, z 32 16, u 32 4")
def step_of_meta_learning(w, v, x, y, z, u):
    def loss(params, a, b):
        return jnp.mean((jnp.tanh(a @ params[0]) @ params[1] - b) ** 2)

    slope = jax.grad(loss)((w, v), x, y)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, (w, v), slope)
    return loss(new, z, u)


@function("w 16 8, v 8", "x 32 16, y 32")
def sharpness_of_the_loss(w, v, x, y):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - y) ** 2)

    slope = jax.grad(loss)((w, v))
    size = jnp.sqrt(sum((g**2).sum() for g in slope)) + 1e-12
    return loss(jax.tree.map(lambda p, g: p + 0.05 * g / size, (w, v), slope))


@function(*TWO)
def function_under_its_own_jit(w, v, x, y):
    @jax.jit
    def net(z):
        return jax.nn.relu(z @ w) @ v

    return jnp.mean((net(x) - y) ** 2)


@function("w 16 32, v 32 16", "x 256 16")
def weight_by_the_ratio_of_two_gradients(w, v, x):
    h = jnp.tanh(x @ w)
    first = lambda v: jnp.mean((h @ v - x) ** 2)  # noqa: E731
    second = lambda v: -jnp.mean(jnp.tanh(h @ v))  # noqa: E731
    norms = [jnp.linalg.norm(jax.grad(part)(v)) for part in (first, second)]
    return first(v) + jax.lax.stop_gradient(norms[0] / norms[1]) * second(v)

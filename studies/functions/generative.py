"""Variational autoencoders, flows, diffusion, adversarial losses and energies."""

import jax
import jax.numpy as jnp

from . import function


def divergence(xp, mu, log_var):
    return -0.5 * (1 + log_var - mu**2 - xp.exp(log_var)).sum(-1)


@function("w 16 32, m 32 4, s 32 4, v 4 32, d 32 16", "x 64 16, e 64 4 !")
def variational_autoencoder(xp, w, m, s, v, d, x, e):
    h = xp.tanh(x @ w)
    mu, log_var = h @ m, h @ s
    z = mu + xp.exp(0.5 * log_var) * e
    fit = ((xp.relu(z @ v) @ d - x) ** 2).sum(-1)
    return xp.mean(fit + divergence(xp, mu, log_var))


@function("w 16 8, v 4 16", "x 64 16 ?, e 64 4 !", "params")
def variational_autoencoder_of_bits(xp, w, v, x, e):
    out = x @ w
    mu, log_var = out[:, :4], out[:, 4:]
    z = mu + xp.exp(xp.clip(0.5 * log_var, -10.0, 5.0)) * e
    p = xp.sigmoid(z @ v)
    fit = -(x * xp.log(p + 1e-7) + (1 - x) * xp.log(1 - p + 1e-7)).sum(-1)
    return xp.mean(fit)


@function("w 16 8, v 4 16", "x 64 16, e 10 64 4 !")
def importance_weighted_bound(xp, w, v, x, e):
    out = 0.3 * x @ w
    mu, log_std = out[:, :4], xp.tanh(out[:, 4:])
    z = mu + xp.exp(log_std) * e
    log_p = -0.5 * (z**2).sum(-1) - 0.5 * ((z @ v - x) ** 2).sum(-1)
    log_q = (-0.5 * e**2 - log_std).sum(-1)
    return -xp.mean(xp.logsumexp(log_p - log_q, axis=0) - 2.303)


@function("w 16 8, c 32 8 *1, v 8 16", "x 64 16")
def vector_quantized_autoencoder(xp, w, c, v, x):
    z = x @ w
    d = (z**2).sum(1, keepdims=True) - 2 * z @ c.T + (c**2).sum(1)
    q = c[xp.argmax(-d, 1)]
    straight = z + xp.detach(q - z)
    commit = ((xp.detach(z) - q) ** 2).mean() + 0.25 * ((z - xp.detach(q)) ** 2).mean()
    return ((straight @ v - x) ** 2).mean() + commit


@function("w 8 32, v 32 16", "x 64 16")
def affine_coupling_flow(xp, w, v, x):
    a, b = x[:, :8], x[:, 8:]
    out = xp.relu(a @ w) @ v
    log_s, t = xp.tanh(out[:, :8]), out[:, 8:]
    z = xp.concatenate([a, b * xp.exp(log_s) + t], axis=1)
    return xp.mean(0.5 * (z**2).sum(-1) - log_s.sum(-1))


@function("w 3 8 16", "x 64 16")
def three_coupling_layers(xp, w, x):
    total = xp.zeros(64)
    for kernel in w:
        out = x[:, :8] @ kernel
        s = xp.sigmoid(out[:, :8] + 2)
        x = xp.concatenate([(x[:, 8:] + out[:, 8:]) * s, x[:, :8]], axis=1)
        total = total + xp.log(s).sum(-1)
    return xp.mean(0.5 * (x**2).sum(-1) - total)


@function("w 8 8", "x 200 8")
def invertible_linear_flow(xp, w, x):
    kernel = xp.eye(8) + 0.3 * w
    z = x @ kernel
    return xp.mean(0.5 * (z**2).sum(-1)) - xp.linalg.slogdet(kernel)[1]


@function("u 8, w 8, b, m 8 8", "x 200 8")
def planar_flow(xp, u, w, b, m, x):
    h = xp.tanh(x @ w + b)
    z = (x + u * h[:, None]) @ m
    slope = (1 - h**2)[:, None] * w
    return xp.mean(0.5 * (z**2).sum(-1) - xp.log(xp.abs(1 + slope @ u) + 1e-8))


@function("w 12 32, m 32 24", "x 64 12")
def masked_autoregressive_flow(xp, w, m, x):
    first = xp.float(xp.arange(32)[None] % 11 >= xp.arange(12)[:, None])
    second = xp.float(xp.arange(12)[None] > xp.arange(32)[:, None] % 11)
    h = xp.relu(x @ (w * first))
    mu, a = h @ (m[:, :12] * second), xp.tanh(h @ (m[:, 12:] * second))
    return xp.mean((0.5 * ((x - mu) * xp.exp(-a)) ** 2 + a).sum(-1))


@function("w 17 64, v 64 16", "x 64 16, e 64 16 !, t 64 1 %")
def diffusion_of_noise(xp, w, v, x, e, t):
    a = xp.cos(t * xp.pi / 2) ** 2
    noisy = xp.sqrt(a) * x + xp.sqrt(1 - a) * e
    pred = xp.silu(xp.concatenate([noisy, t], axis=1) @ w) @ v
    return xp.mean((pred - e) ** 2)


@function("w 17 64, v 64 16", "x 64 16, e 64 16 !, t 64 <1000")
def diffusion_weighted_by_the_signal_to_noise_ratio(xp, w, v, x, e, t):
    beta = xp.linspace(1e-4, 0.02, 1000)
    a = xp.cumprod(1 - beta, axis=0)[t][:, None]
    noisy = a**0.5 * x + (1 - a) ** 0.5 * e
    time = xp.float(t)[:, None] / 1000
    pred = xp.gelu(xp.concatenate([noisy, time], axis=1) @ w) @ v
    weight = xp.minimum(a / (1 - a), 5.0 * xp.ones(()))
    return xp.mean(weight * (pred - x) ** 2)


@function("w 17 64, v 64 16", "x 64 16, e 64 16, t 64 1 %")
def flow_matching(xp, w, v, x, e, t):
    between = (1 - t) * e + t * x
    speed = xp.silu(xp.concatenate([between, t], axis=1) @ w) @ v
    return xp.mean(((speed - (x - e)) ** 2).sum(-1))


@function("w 16 32, v 32 16", "x 64 16, e 64 16 !, u 64 1 %")
def denoising_score_matching(xp, w, v, x, e, u):
    sigma = xp.exp(xp.log(0.01 * xp.ones(())) + u * 5.0)
    score = xp.tanh((x + sigma * e) @ w) @ v / sigma
    return 0.5 * xp.mean((sigma**2 * (score + e / sigma) ** 2).sum(-1))


@function("w 16 64, v 64 16", "x 64 16, e 64 16 !, u 64 1 !")
def preconditioned_denoiser(xp, w, v, x, e, u):
    sigma = xp.exp(1.2 * u - 1.2)
    skip = 0.25 / (sigma**2 + 0.25)
    out = sigma * 0.5 / xp.sqrt(sigma**2 + 0.25)
    noisy = x + sigma * e
    inside = noisy / xp.sqrt(sigma**2 + 0.25)
    denoised = skip * noisy + out * (xp.silu(inside @ w) @ v)
    return xp.mean((sigma**2 + 0.25) / (sigma * 0.5) ** 2 * (denoised - x) ** 2)


@function("w 4 32, v 32", "x 32 4")
def sliced_score_matching(w, v, x):
    def energy(z):
        return jnp.tanh(z @ w) @ v

    score = jax.grad(energy)

    def one(z):
        _, second = jax.jvp(score, (z,), (jnp.ones(4) / 2,))
        return second.sum() / 2 + 0.5 * (score(z) ** 2).sum()

    return jnp.mean(jax.vmap(one)(x))


@function("w 16 32, v 32 1", "x 64 16, z 64 16")
def energy_of_data_and_samples(xp, w, v, x, z):
    a, b = xp.silu(x @ w) @ v, xp.silu(z @ w) @ v
    return a.mean() - b.mean() + 0.1 * (a**2 + b**2).mean()


@function("w 16 32, v 32 1", "x 64 16, z 64 16")
def adversarial_loss(xp, w, v, x, z):
    real = xp.sigmoid(xp.leaky_relu(x @ w) @ v)
    fake = xp.sigmoid(xp.leaky_relu(z @ w) @ v)
    return -xp.mean(xp.log(real + 1e-8)) - xp.mean(xp.log(1 - fake + 1e-8))


@function("w 16 32, v 32", "x 64 16, z 64 16, u 64 1 %")
def wasserstein_critic_with_a_gradient_penalty(xp, w, v, x, z, u):
    def critic(p):
        return xp.tanh(p @ w) @ v

    slope = xp.vmap(xp.grad(critic))(u * x + (1 - u) * z)
    size = xp.sqrt((slope**2).sum(-1) + 1e-12)
    return critic(z).mean() - critic(x).mean() + 10 * ((size - 1) ** 2).mean()


@function("w 16 32, v 32 1", "x 64 16, z 64 16")
def noise_contrastive_estimation(xp, w, v, x, z):
    def ratio(p):
        return (xp.relu(p @ w) @ v)[:, 0] + 0.5 * (p**2).mean(-1)

    return -xp.mean(xp.log_sigmoid(ratio(x))) - xp.mean(xp.log_sigmoid(-ratio(z)))


@function("w 16 8, v 8 16", "x 128 16, m 128 16 ?, z 64 16 !")
def masked_autoencoder(xp, w, v, x, m, z):
    out = xp.relu((x * m) @ w) @ v
    return (((out - x) ** 2) * (1 - m)).sum() / (1 - m).sum()


@function("w 16 20, c 20 10", "x 32 12 16, t 32 12 <10")
def perplexity_of_a_sequence(xp, w, c, x, t):
    logp = xp.log_softmax(xp.tanh(x @ w) @ c)
    nll = -xp.take_along_axis(logp, t[..., None], 2)[..., 0]
    return xp.exp(nll.mean(1)).mean()


@function("w 8 30", "x 100 8, y 100 %")
def discretized_logistic_mixture(xp, w, x, y):
    out = x @ w
    mu, log_s, pi = xp.tanh(out[:, :10]), xp.clip(out[:, 10:20], -4.0, 2.0), out[:, 20:]
    z = (2 * y - 1)[:, None] - mu
    plus, minus = (
        xp.sigmoid((z + 1 / 32) * xp.exp(-log_s)),
        xp.sigmoid((z - 1 / 32) * xp.exp(-log_s)),
    )
    logp = xp.log(xp.maximum(plus - minus, 1e-12))
    return -xp.mean(xp.logsumexp(logp + xp.log_softmax(pi), axis=-1))

"""Losses of reinforcement learning."""

import jax
import jax.numpy as jnp

from . import function

STEPS = "x 128 8, a 128 <5, adv 128"


def chosen(xp, logits, a):
    return xp.take_along_axis(xp.log_softmax(logits), a[:, None], 1)[:, 0]


@function("w 8 5", STEPS)
def policy_gradient(xp, w, x, a, adv):
    return -xp.mean(chosen(xp, x @ w, a) * adv)


@function("w 8 32, v 32 5", "x 128 8, a 128 <5, adv 128 !, old 128 %")
def clipped_ratios(xp, w, v, x, a, adv, old):
    logp = chosen(xp, xp.tanh(x @ w) @ v, a)
    ratio = xp.exp(logp + 1.5 + 0.2 * old)
    clipped = xp.clip(ratio, 0.8, 1.2) * adv
    return -xp.mean(xp.minimum(ratio * adv, clipped))


@function("w 8 5", STEPS)
def policy_gradient_with_entropy(xp, w, x, a, adv):
    logits = x @ w
    p = xp.softmax(logits)
    entropy = -(p * xp.log(p + 1e-8)).sum(-1).mean()
    adv = (adv - adv.mean()) / (xp.std(adv) + 1e-8)
    return -xp.mean(chosen(xp, logits, a) * adv) - 0.01 * entropy


@function("w 8 32, v 32 5", "x 128 8, z 128 8, a 128 <5, r 128, done 128 ?")
def deep_q_learning(xp, w, v, x, z, a, r, done):
    q = xp.take_along_axis(xp.relu(x @ w) @ v, a[:, None], 1)[:, 0]
    following = xp.detach(xp.max(xp.relu(z @ w) @ v, axis=-1))
    error = q - (r + 0.99 * (1 - done) * following)
    return xp.mean(xp.where(xp.abs(error) < 1, 0.5 * error**2, xp.abs(error) - 0.5))


@function("w 8 32, v 32 1", "x 100 8, r 100")
def value_of_discounted_returns(xp, w, v, x, r):
    power = xp.float(xp.arange(100))
    later = xp.tril(xp.ones((100, 100))).T * 0.99 ** xp.abs(power[None] - power[:, None])
    returns = later @ r
    return 0.5 * xp.mean(((xp.tanh(x @ w) @ v)[:, 0] - returns) ** 2)


@function("w 8 32, v 32 1, p 8 5", "x 101 8, r 100, a 100 <5")
def advantages_by_a_scan(xp, w, v, p, x, r, a):
    value = (xp.tanh(x @ w) @ v)[:, 0]
    delta = r + 0.99 * value[1:] - value[:-1]

    def step(total, d):
        total = d + 0.99 * 0.95 * total
        return total, total

    _, adv = xp.scan(step, xp.zeros(()), xp.flip(delta, 0))
    adv = xp.flip(adv, 0)
    target = xp.detach(adv + value[:-1])
    return -xp.mean(chosen(xp, x[:-1] @ p, a) * xp.detach(adv)) + xp.mean(
        (value[:-1] - target) ** 2
    )


@function("w 8 32, m 32 2, s 32 2, q 10 1", "x 128 8, e 128 2 !")
def soft_actor(xp, w, m, s, q, x, e):
    h = xp.relu(x @ w)
    mu, log_std = h @ m, xp.clip(h @ s, -20.0, 2.0)
    u = mu + xp.exp(log_std) * e
    a = xp.tanh(u)
    logp = (-0.5 * e**2 - log_std - 0.919).sum(-1)
    logp = logp - xp.log(1 - a**2 + 1e-6).sum(-1)
    value = (xp.concatenate([x, a], axis=1) @ q)[:, 0]
    return xp.mean(0.2 * logp - value)


@function("w 8 2, s 2", "x 128 8, a 128 2, adv 128 !")
def gaussian_policy(xp, w, s, x, a, adv):
    mu, std = xp.tanh(x @ w), xp.exp(s)
    logp = (-0.5 * ((a - mu) / std) ** 2 - xp.log(std) - 0.919).sum(-1)
    return -xp.mean(logp * adv)


@function("w 8 51", "x 64 8, p 64 51 %", "params")
def categorical_values(xp, w, x, p):
    p = p / p.sum(-1, keepdims=True)
    return -xp.mean((p * xp.log_softmax(x @ w)).sum(-1))


@function("w 8 32, v 32 20", "x 64 8, y 64 20")
def quantile_values(xp, w, v, x, y):
    q = xp.relu(x @ w) @ v
    error = y[:, None, :] - q[:, :, None]
    level = ((xp.float(xp.arange(20)) + 0.5) / 20)[None, :, None]
    huber = xp.where(xp.abs(error) <= 1, 0.5 * error**2, xp.abs(error) - 0.5)
    weight = xp.abs(level - xp.float(error < 0))
    return (weight * huber).mean(2).sum(1).mean()


@function("w 16 50", "x 8 12 16, t 8 12 <50, adv 8 !, old 8 12 %")
def group_relative_policy(xp, w, x, t, adv, old):
    logp = xp.take_along_axis(xp.log_softmax(x @ w), t[..., None], 2)[..., 0]
    before = xp.detach(logp) - 0.1 * old
    ratio = xp.exp(logp - before)
    gain = xp.minimum(ratio * adv[:, None], xp.clip(ratio, 0.8, 1.2) * adv[:, None])
    kl = xp.exp(before - logp) - (before - logp) - 1
    return -xp.mean(gain - 0.04 * kl)


@function("w 16 50, u 16 50", "x 8 12 16, t 8 12 <50, z 8 12 <50")
def direct_preferences(xp, w, u, x, t, z):
    logp, ref = xp.log_softmax(x @ w), xp.detach(xp.log_softmax(x @ u))

    def total(p, ids):
        return xp.take_along_axis(p, ids[..., None], 2).sum((1, 2))

    margin = total(logp, t) - total(ref, t) - total(logp, z) + total(ref, z)
    return -xp.mean(xp.log_sigmoid(0.1 * margin))


@function("w 8 5, u 8 5", "x 128 8")
def trust_region_penalty(xp, w, u, x):
    p, q = xp.softmax(x @ w), xp.detach(xp.softmax(x @ u))
    return xp.mean((q * xp.log(q / (p + 1e-8) + 1e-8)).sum(-1)) ** 2


@function("w 8 16, v 16 1", "x 128 8, y 128")
def expectile_regression(xp, w, v, x, y):
    error = y - (xp.relu(x @ w) @ v)[:, 0]
    weight = xp.where(error > 0, 0.7 * xp.ones(()), 0.3 * xp.ones(()))
    return xp.mean(weight * error**2)


@function("w 8 5, v 8 5", "x 128 8, a 128 <5")
def conservative_values(xp, w, v, x, a):
    q = xp.relu(x @ w) + x @ v
    taken = xp.take_along_axis(q, a[:, None], 1)[:, 0]
    return xp.mean(xp.logsumexp(q, axis=-1) - taken) + 0.5 * xp.mean(taken**2)


@function("w 8 2", "x 128 8, a 128 2, adv 128")
def advantage_weighted_regression(xp, w, x, a, adv):
    weight = xp.minimum(xp.exp(adv / 0.5), 20.0 * xp.ones(()))
    return xp.mean(weight[:, None] * (xp.tanh(x @ w) - a) ** 2)


@function("w 8 4, k 8 4", "x 64 8, z 64 8")
def curiosity_by_random_features(xp, w, k, x, z):
    bonus = ((xp.tanh(x @ w) - xp.detach(xp.tanh(x @ k))) ** 2).sum(-1)
    return xp.mean(bonus / (xp.detach(xp.std(bonus)) + 1e-6))


@function("w 8 5", "x 20 8 8, a 20 8 <5, r 20 8, mu 20 8 %")
def corrected_returns(xp, w, x, a, r, mu):
    logits = x @ w
    logp = xp.take_along_axis(xp.log_softmax(logits), a[..., None], 2)[..., 0]
    rho = xp.minimum(xp.exp(xp.detach(logp) - xp.log(0.1 + mu)), xp.ones(()))

    def step(total, each):
        weight, reward = each
        total = weight * (reward + 0.9 * total)
        return total, total

    _, adv = xp.scan(step, xp.zeros(8), (xp.flip(rho, 0), xp.flip(r, 0)))
    return -xp.mean(logp * xp.flip(adv, 0))


@function("w 8 32, v 32 255", "x 128 8, r 128")
def value_of_exponential_bins(w, v, x, r):
    steps = jnp.linspace(-20.0, 20.0, 255)
    bins = jnp.sign(steps) * jnp.expm1(jnp.abs(steps))
    logits = jnp.tanh(x @ w) @ v - 0.3 * jnp.abs(steps)
    return jnp.mean((jax.nn.softmax(logits) @ bins - r) ** 2)

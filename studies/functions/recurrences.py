"""Recurrences: scans, loops and filters."""

import jax
import jax.numpy as jnp
from jax import lax

from . import function


@function("w 8 16, u 16 16, b 16, v 16 2", "x 20 32 8, y 32 2")
def simple_recurrence(xp, w, u, b, v, x, y):
    def step(h, z):
        return xp.tanh(z @ w + h @ u + b), None

    h, _ = xp.scan(step, xp.zeros((32, 16)), x)
    return xp.mean((h @ v - y) ** 2)


@function("w 8 64, u 16 64, b 64, v 16 4", "x 16 32 8, t 16 32 <4")
def long_short_term_memory(xp, w, u, b, v, x, t):
    def step(carry, z):
        h, c = carry
        gates = z @ w + h @ u + b
        i, f, o = (xp.sigmoid(gates[:, n : n + 16]) for n in (0, 16, 32))
        c = f * c + i * xp.tanh(gates[:, 48:])
        h = o * xp.tanh(c)
        return (h, c), h

    zero = xp.zeros((32, 16))
    _, hs = xp.scan(step, (zero, zero), x)
    logp = xp.log_softmax(hs @ v)
    return -xp.mean(xp.take_along_axis(logp, t[..., None], 2))


@function("w 8 48, u 16 48, v 16 1", "x 16 32 8, y 32")
def gated_recurrent_unit(xp, w, u, v, x, y):
    def step(h, z):
        a, b = z @ w, h @ u
        r, s = xp.sigmoid(a[:, :16] + b[:, :16]), xp.sigmoid(a[:, 16:32] + b[:, 16:32])
        new = xp.tanh(a[:, 32:] + r * b[:, 32:])
        return (1 - s) * new + s * h, None

    h, _ = xp.scan(step, xp.zeros((32, 16)), x)
    return xp.mean(((h @ v)[:, 0] - y) ** 2)


@function("w 8 16, u 16 16, v 16 2", "x 20 32 8, y 20 32 2")
def recurrence_of_relus(xp, w, u, v, x, y):
    def step(h, z):
        h = xp.relu(z @ w + 0.9 * h @ u)
        return h, h @ v

    _, out = xp.scan(step, xp.zeros((32, 16)), x)
    return xp.mean((out - y) ** 2)


@function("w 8 16, a 16, c 16 4", "x 200 4 8, y 200 4 4")
def diagonal_state_space(xp, w, a, c, x, y):
    decay = xp.exp(-xp.exp(a - 2))

    def step(h, z):
        h = decay * h + z @ w
        return h, h @ c

    _, out = xp.scan(step, xp.zeros((4, 16)), x)
    return xp.mean((out - y) ** 2)


@function("w 8 16, d 8 16, a 16, c 16 8", "x 64 4 8")
def selective_state_space(xp, w, d, a, c, x):
    def step(h, z):
        delta = xp.softplus(z @ d)
        h = xp.exp(-delta * xp.exp(a)) * h + delta * (z @ w)
        return h, h @ c

    _, out = xp.scan(step, xp.zeros((4, 16)), x)
    return xp.mean((out * xp.silu(x)) ** 2)


@function("w 8 16, a 16, c 16 4", "x 128 4 8, y 128 4 4")
def state_space_by_an_associative_scan(w, a, c, x, y):
    decay = jnp.broadcast_to(jax.nn.sigmoid(a + 2), (128, 4, 16))

    def both(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, h = lax.associative_scan(both, (decay, x @ w))
    return jnp.mean((h @ c - y) ** 2)


@function("w 8 8", "x 100 8", "params")
def exponential_moving_average(xp, w, x):
    def step(m, z):
        m = 0.95 * m + 0.05 * z
        return m, m

    _, smooth = xp.scan(step, xp.zeros(8), x @ w)
    return xp.mean((smooth[1:] - (x @ w)[:-1]) ** 2)


@function("w 4 4, x0 4", "y 50 4")
def running_sum_in_a_scan(xp, w, x0, y):
    def step(total, z):
        total = total + ((z @ w + x0) ** 2).sum()
        return total, None

    return xp.scan(step, xp.zeros(()), y)[0] / 50


@function("a 4 4, c 4 2, q 4, r 2", "y 40 2")
def kalman_filter(xp, a, c, q, r, y):
    noise, seen = xp.diag(xp.exp(q)), xp.diag(xp.exp(r))

    def step(carry, z):
        mean, cov = carry
        mean, cov = a.T @ mean, a.T @ cov @ a + noise
        inner = c.T @ cov @ c + seen
        error = z - mean @ c
        gain = xp.linalg.solve(inner, (cov @ c).T).T
        nll = 0.5 * (xp.linalg.slogdet(inner)[1] + error @ xp.linalg.solve(inner, error))
        return (mean + gain @ error, cov - gain @ c.T @ cov), nll

    return xp.mean(xp.scan(step, (xp.zeros(4), xp.eye(4)), y)[1])


@function("t 6 6, e 6 12", "x 40 <12", "params")
def hidden_markov_model(xp, t, e, x):
    move, emit = xp.log_softmax(t), xp.log_softmax(e)

    def step(alpha, z):
        return xp.logsumexp(alpha[:, None] + move, axis=0) + emit[:, z], None

    alpha, _ = xp.scan(step, xp.zeros(6), x)
    return -xp.logsumexp(alpha)


@function("t 6 6, e 6 12", "x 40 <12")
def forward_algorithm_of_probabilities(xp, t, e, x):
    move, emit = xp.softmax(t), xp.softmax(e)

    def step(carry, z):
        alpha, total = carry
        alpha = (alpha @ move) * emit[:, z]
        size = alpha.sum()
        return (alpha / size, total + xp.log(size)), None

    (_, total), _ = xp.scan(step, (xp.ones(6) / 6, xp.zeros(())), x)
    return -total / 40


@function("w 8 5, t 5 5", "x 30 8, y 30 <5")
def conditional_random_field(xp, w, t, x, y):
    unary = x @ w

    def step(alpha, z):
        return xp.logsumexp(alpha[:, None] + t, axis=0) + z, None

    alpha, _ = xp.scan(step, unary[0], unary[1:])
    path = unary[xp.arange(30), y].sum() + t[y[:-1], y[1:]].sum()
    return (xp.logsumexp(alpha) - path) / 30


@function("w1 4 16, w2 16 4", "x 32 4, y 32 4")
def fixed_point_of_a_fori_loop(w1, w2, x, y):
    def step(_, z):
        return 0.5 * jnp.tanh(z @ w1) @ w2 + x

    return jnp.mean((lax.fori_loop(0, 12, step, x) - y) ** 2)


@function("w 8 8, v 8", "x 32 8")
def power_iterations_in_a_scan(w, v, x):
    def step(u, _):
        u = w.T @ (w @ u)
        return u / jnp.linalg.norm(u), None

    u, _ = lax.scan(step, v, None, 10)
    return jnp.mean((x @ w @ u) ** 2)


@function("w 8 8", "x 32 8, y 32 8")
def newton_iterations_in_a_while_loop(w, x, y):
    """The loop finds a start; the last step is differentiated."""
    z = x @ w

    def near(carry):
        return (carry[1] < 20) & (jnp.abs(carry[0] ** 3 + carry[0] - z).max() > 1e-4)

    def step(carry):
        h, n = carry
        return h - (h**3 + h - z) / (3 * h**2 + 1), n + 1

    h = lax.stop_gradient(lax.while_loop(near, step, (jnp.zeros_like(z), 0))[0])
    h = h - (h**3 + h - z) / (3 * h**2 + 1)
    return jnp.mean((h - y) ** 2)


@function("w 4 8 8, v 8 1", "x 64 8, y 64 1")
def layers_in_a_scan(w, v, x, y):
    def layer(h, kernel):
        return h + jax.nn.gelu(h @ kernel), None

    return jnp.mean((lax.scan(layer, x, w)[0] @ v - y) ** 2)


@function("w 4 8 8, g 4 8 =1, v 8 1", "x 64 8, y 64 1 !")
def normalized_layers_in_a_checkpointed_scan(w, g, v, x, y):
    @jax.checkpoint
    def layer(h, each):
        kernel, gain = each
        z = h * lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6) * gain
        return h + jax.nn.silu(z @ kernel), None

    return jnp.mean((lax.scan(layer, x, (w, g))[0] @ v - y) ** 2)


@function("w 8 16, u 16 16, v 16 1", "x 20 32 8, n 32 <20, y 32")
def recurrence_that_stops_at_lengths(w, u, v, x, n, y):
    def step(h, each):
        z, turn = each
        new = jnp.tanh(z @ w + h @ u)
        return jnp.where((turn <= n)[:, None], new, h), None

    h, _ = lax.scan(step, jnp.zeros((32, 16)), (x, jnp.arange(20)))
    return jnp.mean(((h @ v)[:, 0] - y) ** 2)


@function("w 8 8", "x 16 8, y 16 8")
def branch_by_the_size_of_a_product(w, x, y):
    h = x @ w
    out = lax.cond(jnp.mean(h**2) > 4.0, lambda z: jnp.tanh(z @ w), lambda z: z @ w, h)
    return jnp.mean((out - y) ** 2)


@function("w 6 8 8", "x 60 8, k 60 <6, y 60 8")
def switch_between_experts(w, x, k, y):
    branches = [lambda z: jnp.tanh(z), lambda z: jax.nn.relu(z), lambda z: z / (1 + jnp.abs(z))]

    def one(row, number):
        return lax.switch(number % 3, branches, row @ w[number])

    return jnp.mean((jax.vmap(one)(x, k) - y) ** 2)


@function("w 3 8, v 8 3", "x 12 3, y 12 3")
def dynamic_time_warping(xp, w, v, x, y):
    p = xp.tanh(x @ w) @ v
    d = ((p[:, None] - y[None]) ** 2).sum(-1)
    row = xp.cumsum(d[0], axis=0)
    for i in range(1, 12):
        cells = [row[0] + d[i, 0]]
        for j in range(1, 12):
            near = xp.stack([row[j], row[j - 1], cells[-1]])
            cells.append(d[i, j] - xp.logsumexp(-near))
        row = xp.stack(cells)
    return row[-1] / 24


@function("w 8 8, u 8 8", "x 30 8 8")
def delta_rule_of_fast_weights(xp, w, u, x):
    def step(memory, z):
        k = xp.softmax(z @ w)
        error = z @ u - k @ memory
        memory = memory + 0.1 * xp.einsum("bk,bv->kv", k, error)
        return memory, (error**2).mean()

    return xp.mean(xp.scan(step, xp.zeros((8, 8)), x)[1])

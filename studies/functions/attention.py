"""Attention in its variants, and softmaxes by hand."""

import jax
import jax.numpy as jnp

from . import function

QKV = "q 32 32, k 32 32, v 32 32"


def causal(xp, n):
    return xp.tril(xp.ones((n, n))) > 0


@function(QKV, "x 4 24 32")
def attention(xp, q, k, v, x):
    scores = xp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 32**0.5
    return xp.mean(xp.einsum("bqk,bkd->bqd", xp.softmax(scores), x @ v) ** 2)


@function(QKV, "x 4 24 32, y 4 24 32")
def causal_attention_with_minus_a_billion(xp, q, k, v, x, y):
    scores = (x @ q) @ xp.swapaxes(x @ k, 1, 2) / 32**0.5
    scores = xp.where(causal(xp, 24), scores, -1e9)
    return xp.mean((xp.softmax(scores) @ (x @ v) - y) ** 2)


@function(QKV, "x 4 24 32, y 4 24 32")
def causal_attention_with_minus_infinity(xp, q, k, v, x, y):
    scores = (x @ q) @ xp.swapaxes(x @ k, 1, 2) / 32**0.5
    scores = xp.where(causal(xp, 24), scores, -xp.inf)
    return xp.mean((xp.softmax(scores) @ (x @ v) - y) ** 2)


@function(QKV, "x 4 24 32, y 4 24 32")
def causal_attention_with_an_added_mask(xp, q, k, v, x, y):
    mask = (1 - xp.float(causal(xp, 24))) * -1e9
    scores = (x @ q) @ xp.swapaxes(x @ k, 1, 2) * 32**-0.5 + mask
    return xp.mean((xp.softmax(scores) @ (x @ v) - y) ** 2)


@function(QKV, "x 4 24 32, y 4 24 32")
def attention_masked_with_the_smallest_float(xp, q, k, v, x, y):
    scores = (x @ q) @ xp.swapaxes(x @ k, 1, 2) * 32**-0.5
    scores = xp.where(causal(xp, 24), scores, xp.finfo(xp.float32).min)
    return xp.mean((xp.softmax(scores) @ (x @ v) - y) ** 2)


@function(QKV, "x 4 24 32, m 4 24 ?")
def attention_with_padding(xp, q, k, v, x, m):
    scores = xp.einsum("bqd,bkd->bqk", x @ q, x @ k) * 32**-0.5
    scores = scores + (1.0 - m)[:, None, :] * -1e4
    out = xp.einsum("bqk,bkd->bqd", xp.softmax(scores), x @ v)
    return (out**2 * m[..., None]).sum() / (m.sum() * 32)


@function("qkv 32 96, o 32 32", "x 4 24 32")
def attention_of_many_heads(xp, qkv, o, x):
    heads = (x @ qkv).reshape(4, 24, 3, 4, 8)
    q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
    scores = xp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    out = xp.einsum("bhqk,bkhd->bqhd", xp.softmax(scores), v).reshape(4, 24, 32) @ o
    return xp.mean((x + out) ** 2)


@function("q 32 32, kv 32 16, o 32 32", "x 4 24 32")
def attention_of_grouped_queries(xp, q, kv, o, x):
    queries = (x @ q).reshape(4, 24, 4, 8)
    k, v = (x @ kv)[..., :8], (x @ kv)[..., 8:]
    p = xp.softmax(xp.einsum("bqhd,bkd->bhqk", queries, k) / 8**0.5)
    return xp.mean((xp.einsum("bhqk,bkd->bqhd", p, v).reshape(4, 24, 32) @ o) ** 2)


@function(QKV, "x 4 24 32")
def attention_normalized_at_the_end(xp, q, k, v, x):
    scores = xp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 32**0.5
    e = xp.exp(scores - xp.detach(xp.max(scores, axis=-1, keepdims=True)))
    out = xp.einsum("bqk,bkd->bqd", e, x @ v) / xp.einsum("bqk->bq", e)[..., None]
    return xp.mean(out**2)


@function(QKV, "x 4 24 32", "params")
def attention_without_a_maximum(xp, q, k, v, x):
    scores = 0.1 * xp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 32**0.5
    e = xp.exp(xp.clip(scores, -30.0, 30.0))
    return xp.mean(((e / e.sum(-1, keepdims=True)) @ (x @ v)) ** 2)


@function(QKV, "x 4 24 32")
def linear_attention(xp, q, k, v, x):
    a, b, c = xp.elu(x @ q) + 1, xp.elu(x @ k) + 1, x @ v
    state = xp.einsum("bkd,bke->bde", b, c)
    over = xp.einsum("bqd,bd->bq", a, b.sum(1))
    return xp.mean((xp.einsum("bqd,bde->bqe", a, state) / over[..., None]) ** 2)


@function(QKV, "x 4 64 32")
def causal_linear_attention_by_cumulative_sums(xp, q, k, v, x):
    a, b, c = xp.relu(x @ q) + 1e-3, xp.relu(x @ k) + 1e-3, x @ v
    state = xp.cumsum(xp.einsum("bkd,bke->bkde", b, c), axis=1)
    over = xp.einsum("bqd,bqd->bq", a, xp.cumsum(b, axis=1))
    return xp.mean((xp.einsum("bqd,bqde->bqe", a, state) / over[..., None]) ** 2)


@function(QKV, "x 4 24 32")
def attention_by_random_features(xp, q, k, v, x):
    def features(z):
        return xp.exp(xp.clip(z - 0.5 * (z**2).sum(-1, keepdims=True), -20.0, 20.0)) + 1e-6

    a, b = features((x @ q) / 32**0.25), features((x @ k) / 32**0.25)
    over = a @ b.sum(1)[..., None]
    return xp.mean((a @ (xp.swapaxes(b, 1, 2) @ (x @ v)) / over) ** 2)


@function("q 32 32, k 32 32, v 32 32, t =10", "x 4 24 32")
def attention_of_unit_vectors(xp, q, k, v, t, x):
    a, b = x @ q, x @ k
    a = a / xp.linalg.norm(a, axis=-1, keepdims=True)
    b = b / xp.linalg.norm(b, axis=-1, keepdims=True)
    p = xp.softmax(t * xp.einsum("bqd,bkd->bqk", a, b))
    return xp.mean((p @ (x @ v)) ** 2)


@function("q 32 32, k 32 32, v 32 32, r 47", "x 4 24 32")
def attention_with_relative_positions(xp, q, k, v, r, x):
    place = xp.arange(24)
    bias = r[place[:, None] - place[None, :] + 23]
    p = xp.softmax(xp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 32**0.5 + bias)
    return xp.mean((p @ (x @ v)) ** 2)


@function(QKV, "x 4 64 32")
def attention_with_linear_biases(xp, q, k, v, x):
    place = xp.float(xp.arange(64))
    bias = -0.25 * xp.abs(place[:, None] - place[None, :])
    p = xp.softmax((x @ q) @ xp.swapaxes(x @ k, 1, 2) / 32**0.5 + bias)
    return xp.mean((p @ (x @ v)) ** 2)


@function(QKV, "x 2 200 32")
def attention_with_rotated_positions(xp, q, k, v, x):
    angle = xp.float(xp.arange(200))[:, None] * 10000.0 ** (-xp.float(xp.arange(16)) / 16)

    def turned(z):
        a, b = z[..., :16], z[..., 16:]
        cos, sin = xp.cos(angle), xp.sin(angle)
        return xp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    scores = xp.einsum("bqd,bkd->bqk", turned(x @ q), turned(x @ k)) / 32**0.5
    return xp.mean((xp.softmax(scores) @ (x @ v)) ** 2)


@function("q 32 32, k 32 32, v 32 32, o 32 32", "x 4 24 32, z 4 10 32")
def attention_across_two_sequences(xp, q, k, v, o, x, z):
    p = xp.softmax((x @ q) @ xp.swapaxes(z @ k, -1, -2) / 32**0.5)
    return xp.mean((x + p @ (z @ v) @ o) ** 2)


@function("w 32 16, u 16", "x 8 40 32, y 8")
def additive_attention(xp, w, u, x, y):
    p = xp.softmax(xp.tanh(x @ w) @ u, axis=1)
    pooled = (p[..., None] * x).sum(1)
    return xp.mean((pooled.mean(-1) - y) ** 2)


@function(QKV, "x 4 24 32")
def attention_with_capped_scores(xp, q, k, v, x):
    scores = xp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 32**0.5
    p = xp.softmax(50.0 * xp.tanh(scores / 50.0))
    return xp.mean((p @ (x @ v)) ** 2)


@function(QKV, "x 4 24 32")
def attention_by_sigmoids(xp, q, k, v, x):
    scores = xp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 32**0.5 - xp.log(24.0 * xp.ones(()))
    return xp.mean((xp.sigmoid(scores) @ (x @ v)) ** 2)


@function("q 32 32, k 32 32, v 32 32, sink", "x 4 24 32")
def attention_with_a_sink(xp, q, k, v, sink, x):
    e = xp.exp(xp.einsum("bqd,bkd->bqk", x @ q, x @ k) / 32**0.5 / 8)
    p = e / (e.sum(-1, keepdims=True) + xp.exp(sink))
    return xp.mean((p @ (x @ v)) ** 2)


@function("w 32 100", "x 64 32, t 64 <100")
def language_model_head_with_z_loss(xp, w, x, t):
    z = x @ w
    total = xp.logsumexp(z, axis=-1)
    return xp.mean(total - z[xp.arange(64), t]) + 1e-4 * xp.mean(total**2)


@function("w 32 100", "x 64 32, t 64 <100")
def logsumexp_by_hand(xp, w, x, t):
    z = x @ w
    top = xp.max(z, axis=-1, keepdims=True)
    total = xp.log(xp.exp(z - top).sum(-1)) + top[:, 0]
    return xp.mean(total - z[xp.arange(64), t])


@function("w 32 100", "x 64 32, t 64 <100", "params")
def softmax_with_a_temperature(xp, w, x, t):
    z = x @ w / 0.07
    p = xp.exp(z - xp.logsumexp(z, axis=-1, keepdims=True))
    return xp.mean((p - xp.one_hot(t, 100)) ** 2)


@function("w 16 8", "x 128 16")
def entropy_of_a_softmax(xp, w, x):
    p = xp.softmax(x @ w)
    return (p * xp.log(p + 1e-9)).sum(-1).mean()


@function("w 16 8", "x 128 16, g 128 8 !")
def gumbel_softmax(xp, w, x, g):
    noise = xp.exp(-xp.exp(-g))
    gumbel = -xp.log(-xp.log(noise + 1e-10) + 1e-10)
    p = xp.softmax((xp.log_softmax(x @ w) + gumbel) / 0.5)
    return xp.mean((p - 1 / 8) ** 2)


@function("w 16 8", "x 128 16, y 128 8 %")
def sparsemax(xp, w, x, y):
    z = x @ w
    ordered = xp.flip(xp.sort(z, axis=-1), 1)
    rank = xp.float(xp.arange(8) + 1)
    total = xp.cumsum(ordered, axis=-1)
    keeps = 1 + rank * ordered > total
    size = xp.float(keeps).sum(-1, keepdims=True)
    tau = ((ordered * keeps).sum(-1, keepdims=True) - 1) / size
    return xp.mean((xp.relu(z - tau) - y) ** 2)


@function("w 16 12", "x 128 16, y 128 12 ?")
def masked_log_softmax(xp, w, x, y):
    z = xp.where(y > 0, x @ w, -1e30)
    return -xp.sum(y * xp.log_softmax(z)) / xp.sum(y)


@function("gate 32 4, up 4 32 16, down 4 16 32", "x 64 32")
def mixture_of_experts(xp, gate, up, down, x):
    p = xp.softmax(x @ gate)
    hidden = xp.gelu(xp.einsum("nd,edh->neh", x, up))
    out = xp.einsum("neh,ehd,ne->nd", hidden, down, p)
    balance = 4 * (p.mean(0) ** 2).sum()
    return xp.mean((out - x) ** 2) + 0.01 * balance


@function("gate 32 4, up 4 32 32", "x 64 32")
def mixture_of_the_two_best_experts(xp, gate, up, x):
    logits = x @ gate
    kept = xp.where(logits >= xp.top(logits, 2)[:, 1:], logits, -xp.inf)
    out = xp.einsum("nd,edh,ne->nh", x, up, xp.softmax(kept))
    return xp.mean((out - x) ** 2)


@function("a 24 24, t =1", "x 24 3, y 24 3")
def sinkhorn_matching(xp, a, t, x, y):
    logits = a / t
    for _ in range(10):
        logits = logits - xp.logsumexp(logits, axis=1, keepdims=True)
        logits = logits - xp.logsumexp(logits, axis=0, keepdims=True)
    return xp.mean((xp.exp(logits) @ x - y) ** 2)


@function(QKV, "x 4 24 32")
def attention_of_jax(q, k, v, x):
    heads = [(x @ w).reshape(4, 24, 4, 8) for w in (q, k, v)]
    return jnp.mean(jax.nn.dot_product_attention(*heads, is_causal=True) ** 2)


@function(QKV, "x 4 64 32")
def attention_over_blocks_of_keys(q, k, v, x):
    """As flash attention: a running maximum and sum over blocks."""
    query = x @ q / 32**0.5
    keys = jnp.moveaxis((x @ k).reshape(4, 4, 16, 32), 1, 0)
    values = jnp.moveaxis((x @ v).reshape(4, 4, 16, 32), 1, 0)

    def block(carry, one):
        top, total, out = carry
        scores = jnp.einsum("bqd,bkd->bqk", query, one[0])
        new = jnp.maximum(top, scores.max(-1))
        fix, e = jnp.exp(top - new), jnp.exp(scores - new[..., None])
        out = out * fix[..., None] + e @ one[1]
        return (new, total * fix + e.sum(-1), out), None

    start = (jnp.full((4, 64), -jnp.inf), jnp.zeros((4, 64)), jnp.zeros((4, 64, 32)))
    (_, total, out), _ = jax.lax.scan(block, start, (keys, values))
    return jnp.mean((out / total[..., None]) ** 2)

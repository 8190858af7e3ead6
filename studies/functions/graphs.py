"""Graphs, sums over segments, embeddings and gathers."""

import jax
import jax.numpy as jnp

from . import function

GRAPH = "x 40 8, s 160 <40, r 160 <40"


@function("w 8 16, v 16 3", "x 40 8, s 160 <40, r 160 <40, t 40 <3")
def graph_convolution(xp, w, v, x, s, r, t):
    h = x @ w
    out = xp.relu(xp.segment_sum(h[s], r, 40)) @ v
    return -xp.log_softmax(out)[xp.arange(40), t].mean()


@function("w 8 16, v 16 3", "x 40 8, s 160 <40, r 160 <40, y 40 3")
def graph_convolution_with_degrees(xp, w, v, x, s, r, y):
    one = xp.ones(160)
    out_of, into = xp.segment_sum(one, s, 40) + 1, xp.segment_sum(one, r, 40) + 1
    h = (x @ w) / xp.sqrt(out_of)[:, None]
    h = xp.segment_sum(h[s], r, 40) / xp.sqrt(into)[:, None]
    return xp.mean((xp.relu(h) @ v - y) ** 2)


@function("w 8 16, v 16 3", "x 40 8, s 160 <40, r 160 <40, y 40 3")
def mean_over_neighbors(xp, w, v, x, s, r, y):
    total = xp.segment_sum(x[s], r, 40)
    count = xp.segment_sum(xp.ones(160), r, 40)
    h = total / xp.maximum(count, 1.0)[:, None]
    return xp.mean((xp.tanh(h @ w) @ v - y) ** 2)


@function("w 8 16, a 16, b 16", GRAPH)
def graph_attention(xp, w, a, b, x, s, r):
    h = x @ w
    e = xp.leaky_relu((h @ a)[s] + (h @ b)[r])
    e = xp.exp(e - xp.segment_max(e, r, 40)[r])
    p = e / (xp.segment_sum(e, r, 40)[r] + 1e-9)
    return xp.mean(xp.segment_sum(p[:, None] * h[s], r, 40) ** 2)


@function("w 17 16, u 24 8", "x 40 8, p 40 3, s 160 <40, r 160 <40, y 40 8")
def messages_with_distances(xp, w, u, x, p, s, r, y):
    d = ((p[s] - p[r]) ** 2).sum(-1, keepdims=True)
    m = xp.silu(xp.concatenate([x[s], x[r], d], axis=1) @ w)
    h = xp.concatenate([x, xp.segment_sum(m, r, 40)], axis=1) @ u
    return xp.mean((x + h - y) ** 2)


@function("w 8 16, v 16 1", "x 300 8, g 300 <10, y 10 1")
def readout_by_sums_of_graphs(xp, w, v, x, g, y):
    pooled = xp.segment_sum(xp.relu(x @ w), g, 10)
    return xp.mean((pooled @ v - y) ** 2)


@function("w 8 16, v 16 1", "x 300 8, g 300 <10, y 10 1")
def readout_by_the_largest(xp, w, v, x, g, y):
    pooled = xp.segment_max(xp.tanh(x @ w), g, 10)
    return xp.mean((pooled @ v - y) ** 2)


@function("w 8 8", "x 40 8, a 40 40 ?")
def laplacian_of_a_dense_graph(xp, w, x, a):
    h = xp.tanh(x @ w)
    near = (a + a.T) / 2
    d = near.sum(1)
    laplacian = xp.eye(40) - near / xp.sqrt(d[:, None] * d[None] + 1e-8)
    return xp.trace(h.T @ laplacian @ h)


@function("w 8 8, b", "x 40 8, s 160 <40, r 160 <40, y 160 ?")
def prediction_of_links(xp, w, b, x, s, r, y):
    z = x @ w
    score = (z[s] * z[r]).sum(-1) + b
    return xp.mean(xp.relu(score) - score * y + xp.log1p(xp.exp(-xp.abs(score))))


@function("c 8 8", "x 40 8, a 40 40 %")
def page_rank_of_features(xp, c, x, a):
    p = a / a.sum(1, keepdims=True)
    rank = xp.softmax((x @ c).mean(1), axis=0)
    start = rank
    for _ in range(20):
        rank = 0.85 * rank @ p + 0.15 * start
    return -xp.log(rank).mean()


@function("e 100 16, w 16 100", "t 64 <100, y 64 <100", "params")
def bigram_language_model(xp, e, w, t, y):
    return -xp.log_softmax(e[t] @ w)[xp.arange(64), y].mean()


@function("e 100 16", "t 32 12 <100, y 32 12 <100", "params")
def tied_embeddings(xp, e, t, y):
    h = 4 * e[t]
    logits = h @ e.T
    return -xp.mean(xp.take_along_axis(xp.log_softmax(logits), y[..., None], 2))


@function("e 200 16, w 16 3", "t 32 20 <200, y 32 <3", "params")
def bag_of_words(xp, e, w, t, y):
    logits = e[t].mean(1) @ w
    return -xp.log_softmax(logits)[xp.arange(32), y].mean()


@function("e 200 16, c 200 16", "t 64 <200, y 64 <200, n 64 5 <200", "params")
def skip_grams_with_negatives(xp, e, c, t, y, n):
    z = e[t]
    near = xp.log_sigmoid((z * c[y]).sum(-1))
    far = xp.log_sigmoid(-xp.einsum("bd,bnd->bn", z, c[n])).sum(-1)
    return -xp.mean(near + far)


@function("u 50 8, v 80 8, bu 50, bv 80", "i 300 <50, j 300 <80, y 300 +", "params")
def matrix_factorization(xp, u, v, bu, bv, i, j, y):
    pred = (u[i] * v[j]).sum(-1) + bu[i] + bv[j]
    return xp.mean((pred - y) ** 2) + 0.01 * (xp.mean(u[i] ** 2) + xp.mean(v[j] ** 2))


@function("u 50 8, v 80 8", "i 300 <50, j 300 <80, n 300 <80", "params")
def personalized_ranking(xp, u, v, i, j, n):
    scores = u @ v.T
    return -xp.mean(xp.log(xp.sigmoid(scores[i, j] - scores[i, n]) + 1e-10))


@function("e 60 8, w, f 60", "i 128 6 <60, y 128 ?", "params")
def factorization_machine(xp, e, w, f, i, y):
    z = e[i]
    pairs = 0.5 * (z.sum(1) ** 2 - (z**2).sum(1)).sum(-1)
    logit = w + f[i].sum(1) + pairs
    return xp.mean(xp.softplus(logit) - y * logit)


@function("e 100 16, w 16 16, p 20 16", "t 8 20 <100", "params")
def sentence_embedding_with_positions(xp, e, w, p, t):
    h = xp.tanh((e[t] + p) @ w)
    z = h.mean(1)
    z = z / xp.sqrt((z**2).sum(-1, keepdims=True) + 1e-8)
    return -xp.mean(xp.diagonal(xp.log_softmax(10 * z @ z.T)))


@function("w 8 16, v 16 8", "x 64 8, order 64 <64, y 64 8")
def rows_in_another_order(xp, w, v, x, order, y):
    h = xp.take(xp.relu(x @ w), order, 0)
    return xp.mean((h @ v - y) ** 2)


@function("w 8 16, v 16 4", "x 40 8, k 40 <20, y 20 4")
def scatter_into_a_buffer(w, v, x, k, y):
    buffer = jnp.zeros((20, 16)).at[k].add(jnp.tanh(x @ w))
    return jnp.mean((buffer @ v - y) ** 2)


@function("e 200 16, w 16 4", "t 16 30 <200, n 16 <30, y 16 <4", "params")
def mean_of_embeddings_up_to_lengths(e, w, t, n, y):
    mask = (jnp.arange(30)[None] <= n[:, None])[..., None]
    pooled = (e[t] * mask).sum(1) / mask.sum(1)
    return -jax.nn.log_softmax(pooled @ w)[jnp.arange(16), y].mean()


@function("w 8 16, v 16 16, u 16", "x 30 25 8, m 30 25 ?, y 30")
def deep_sets_with_masks(xp, w, v, u, x, m, y):
    h = (xp.relu(x @ w) * m[..., None]).sum(1) / (m.sum(1, keepdims=True) + 1e-6)
    return xp.mean((xp.relu(h @ v) @ u - y) ** 2)


@function("w 8 16, c 16 4", "x 64 8, k 64 3 <64, y 64 4")
def nearest_neighbors_that_are_given(xp, w, c, x, k, y):
    edge = xp.max(xp.relu((x[k] - x[:, None]) @ w), axis=1)
    return xp.mean((edge @ c - y) ** 2)

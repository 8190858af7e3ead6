"""Masks, counts, long sums, clips, power laws, and integers beside floats."""

import jax.numpy as jnp

from . import function


@function("w 16 1", "x 3000 16, y 3000 1")
def sum_of_three_thousand_errors(xp, w, x, y):
    return ((x @ w - y) ** 2).sum()


@function("w 16 8", "x 4000 16, m 4000 ?")
def mean_where_a_mask_is_one(xp, w, x, m):
    each = (xp.tanh(x @ w) ** 2).sum(-1)
    return (each * m).sum() / m.sum()


@function("w 16 8", "x 4000 16, m 4000 ?")
def mean_over_a_count_in_float(xp, w, x, m):
    count = m @ xp.ones(4000)
    total = m @ (xp.relu(x @ w) @ xp.ones(8))
    return total / xp.maximum(count, 1.0)


@function("w 16 8", "x 2000 16, t 2000 <8")
def frequencies_of_classes(xp, w, x, t):
    count = xp.one_hot(t, 8).sum(0)
    weight = 2000 / (8 * count)
    logp = xp.log_softmax(x @ w)[xp.arange(2000), t]
    return -(logp * weight[t]).sum() / weight[t].sum()


@function("w 16 8", "x 2000 16, t 2000 <8")
def means_of_classes_by_a_product(xp, w, x, t):
    h, hot = xp.tanh(x @ w), xp.one_hot(t, 8)
    means = hot.T @ h / hot.sum(0)[:, None]
    return ((h - hot @ means) ** 2).sum() / 2000 - (xp.var(means, axis=0)).sum()


@function("w 16 1, b 1", "x 2000 16")
def cumulative_sums(xp, w, b, x):
    path = xp.cumsum((x @ w + b)[:, 0], axis=0)
    return xp.mean(path**2) / 2000


@function("w 16 1", "x 2000 16 , y 2000 +")
def cumulative_distribution(xp, w, x, y):
    p = xp.softmax((x @ w)[:, 0], axis=0)
    q = y / y.sum()
    return ((xp.cumsum(p, axis=0) - xp.cumsum(q, axis=0)) ** 2).mean()


@function("w 16 8", "x 100 16, m 100 8 ?")
def masked_mean_with_where(xp, w, x, m):
    h = xp.where(m > 0, x @ w, 0.0 * xp.ones(()))
    return (h**2).sum() / xp.sum(m)


@function("w 16 8", "x 100 16")
def logarithm_guarded_by_where(xp, w, x):
    h = x @ w
    safe = xp.where(h > 0, h, xp.ones(()))
    return xp.mean(xp.where(h > 0, xp.log(safe), xp.zeros(())))


@function("w 16 8", "x 100 16")
def root_guarded_by_where(xp, w, x):
    h = x @ w
    safe = xp.where(h > 1e-3, h, xp.ones(()))
    return xp.mean(xp.where(h > 1e-3, xp.sqrt(safe), h * 0.1))


@function("w 16 8", "x 100 16, y 100 8")
def clipped_predictions(xp, w, x, y):
    return xp.mean((xp.clip(x @ w, -1.0, 1.0) - y) ** 2)


@function("w 16 8", "x 100 16, y 100 8 +")
def power_laws_of_predictions(xp, w, x, y):
    p = xp.softplus(x @ w) + 1e-6
    return xp.mean((p**0.3 - y**0.3) ** 2) + xp.mean(p**-0.5)


@function("w 16 1", "x 100 16 !, y 100 1 +")
def power_law_by_logarithms(xp, w, x, y):
    return xp.mean((xp.log10(y) - xp.log10(xp.exp(x @ w))) ** 2)


@function("w 16 4", "x 100 16, y 100 4")
def fourth_powers(xp, w, x, y):
    return xp.mean((x @ w - y) ** 4)


@function("w 16 4", "x 100 16, y 100 4")
def fourth_root_of_fourth_powers(xp, w, x, y):
    return xp.mean((x @ w - y) ** 4) ** 0.25


@function("w 16 6", "x 100 16")
def polynomial_features(xp, w, x):
    h = x @ w
    poly = xp.stack([h, h**2, h**3], axis=-1)
    return xp.mean((poly.sum(-1) - 1) ** 2) / 100


@function("w 16 6", "x 100 16")
def product_over_an_axis(xp, w, x):
    return -xp.log(xp.prod(xp.sigmoid(x @ w), axis=-1) + 1e-10).mean()


@function("w 16 6", "x 100 16")
def probability_of_any(xp, w, x):
    none = xp.prod(1 - xp.sigmoid(x @ w), axis=1)
    return -xp.mean(xp.log(1 - none + 1e-7))


@function("w 16 6", "x 100 16")
def difference_of_exponentials(xp, w, x):
    h = xp.clip(x @ w, -8.0, 8.0)
    return xp.mean((xp.exp(h) - xp.exp(-h)) / (xp.exp(h) + xp.exp(-h))) + xp.mean(h**2)


@function("w 16 6", "x 100 16")
def expm1_of_small_products(xp, w, x):
    return xp.mean(xp.expm1(xp.clip(1e-3 * (x @ w), -5.0, 5.0)) ** 2) * 1e6


@function("w 16 6", "x 100 16")
def log1p_of_small_products(xp, w, x):
    return xp.mean(xp.log1p(1e-4 * (x @ w) ** 2)) * 1e4


@function("w 16 6", "x 100 16, y 100 6")
def loss_times_a_million(xp, w, x, y):
    return 1e6 * xp.mean((x @ w - y) ** 2)


@function("w 16 6", "x 100 16, y 100 6")
def loss_over_a_million(xp, w, x, y):
    return 1e-6 * xp.mean((x @ w - y) ** 2)


@function("w 16 6, b 6", "x 100 16, y 100 6")
def offset_of_a_thousand(xp, w, b, x, y):
    return xp.mean(((x @ w + b + 1000.0) - (y + 1000.0)) ** 2)


@function("w 16 6", "x 100 16, year 100 <200, y 100 6")
def years_as_features(xp, w, x, year, y):
    age = (xp.float(year) + 1900.0 - 2000.0) / 100
    z = xp.concatenate([x[:, :15], age[:, None]], axis=1)
    return xp.mean((z @ w - y) ** 2)


@function("w 17 6", "x 100 16, year 100 <200, y 100 6")
def years_as_raw_features(xp, w, x, year, y):
    z = xp.concatenate([x, xp.float(year)[:, None] + 1900.0], axis=1)
    return xp.mean((xp.tanh(z @ w / 1000) - y) ** 2)


@function("w 16 6", "x 100 16, n 100 <7, y 100 6")
def division_by_integers(xp, w, x, n, y):
    return xp.mean(((x @ w) / (n[:, None] + 1) - y) ** 2)


@function("w 16 6", "x 100 16, n 100 <7, y 100 6")
def columns_chosen_by_integers(xp, w, x, n, y):
    h = x @ w
    low, high = n // 2, (n + 1) % 6
    rows = xp.arange(100)
    return xp.mean((h[rows, low] * h[rows, high] - y[:, 0]) ** 2)


@function("w 16 6", "x 100 16, n 100 <30000, y 100 6")
def large_integers_as_factors(xp, w, x, n, y):
    return xp.mean(xp.float(n)[:, None] / 30000 * (x @ w - y) ** 2)


@function("w 16 8", "x 64 16, y 64 8")
def means_minus_the_largest(xp, w, x, y):
    h = x @ w
    return xp.mean(xp.max(h, axis=1) - h.mean(1)) + xp.mean((h - y) ** 2)


@function("w 16 8", "x 64 16, y 64")
def range_of_a_row(xp, w, x, y):
    h = x @ w
    return xp.mean((xp.max(h, axis=-1) - xp.min(h, axis=-1) - y) ** 2)


@function("w 16 8", "x 65 16")
def differences_over_time(xp, w, x):
    h = x @ w
    return xp.mean((h[1:] - h[:-1]) ** 2) + 0.1 * xp.mean(xp.abs(h[2:] - 2 * h[1:-1] + h[:-2]))


@function("w 16 8, v 16 8", "x 64 16")
def ratio_of_two_products(xp, w, v, x):
    return xp.mean((x @ w) ** 2 / ((x @ v) ** 2 + 1.0))


@function("w 16 8", "x 64 16, y 64 8")
def relative_error_in_norms(xp, w, x, y):
    return xp.linalg.norm(x @ w - y) / xp.linalg.norm(y)


@function("a, b", "x 2000, y 2000")
def line_through_points(xp, a, b, x, y):
    return xp.mean((a * x + b - y) ** 2)


@function("c 5", "x 2000, y 2000")
def polynomial_through_points(xp, c, x, y):
    powers = xp.stack([xp.ones(2000), x, x**2, x**3, x**4], axis=1)
    return xp.mean((powers @ c - y) ** 2)


@function("w 16", "x 500 16, y 500")
def vector_times_matrix(xp, w, x, y):
    return ((x @ w - y) ** 2).sum() / 500


@function("w 64, v 64", "x 200 64")
def dot_products_of_vectors(w, v, x):
    return jnp.vdot(w, v) ** 2 + jnp.mean(jnp.dot(x, w) * jnp.dot(x, v))


@function("w 16 8", "x 3000 16")
def histogram_with_soft_bins(xp, w, x):
    h = xp.tanh(x @ w)[:, :1]
    bins = xp.linspace(-1.0, 1.0, 20)
    soft = xp.exp(-((h - bins) ** 2) / 0.02)
    p = soft.sum(0) / soft.sum()
    return (p * xp.log(p * 20 + 1e-12)).sum()


@function("w 16 10", "x 1000 16, t 1000 <10")
def calibration_error(xp, w, x, t):
    p = xp.softmax(x @ w)
    hit = xp.one_hot(t, 10)
    return ((p.mean(0) - hit.mean(0)) ** 2).sum() + ((p - hit) ** 2).sum(-1).mean()


@function("w 16 4", "x 9000 16, i 9000 <3")
def means_by_class_by_products(w, x, i):
    member = (i[:, None] == jnp.arange(3)).astype(jnp.float32)
    count = member.T @ jnp.ones((9000, 1))
    return jnp.sum((member.T @ jnp.square(x @ w) / count) * jnp.arange(1.0, 4.0)[:, None])


@function("w 16 4", "x 3000 16, m 3000 ?")
def weights_by_places_in_a_queue(w, x, m):
    place = jnp.tril(jnp.ones((3000, 3000))) @ m
    return jnp.mean(jnp.exp(-0.01 * place)[:, None] * (x @ w) ** 2)

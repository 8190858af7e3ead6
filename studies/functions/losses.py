"""Losses of regression and classification."""

import jax.numpy as jnp
import optax

from . import function


@function("w 16 4, b 4", "x 128 16, y 128 4")
def mean_squared_error(xp, w, b, x, y):
    return xp.mean((x @ w + b - y) ** 2)


@function("w 16 4, b 4", "x 512 16, y 512 4")
def sum_of_squares_over_a_batch(xp, w, b, x, y):
    return 0.5 * ((xp.matmul(x, w) + b - y) ** 2).sum()


@function("w1 16 32, b1 32, w2 32 1", "x 128 16, y 128 1")
def root_mean_squared_error(xp, w1, b1, w2, x, y):
    pred = xp.tanh(x @ w1 + b1) @ w2
    return xp.sqrt(xp.mean((pred - y) ** 2))


@function("w 16 4, b 4", "x 128 16, y 128 4")
def mean_absolute_error(xp, w, b, x, y):
    return xp.mean(xp.abs(x @ w + b - y))


@function("w1 8 32, w2 32 1", "x 200 8, y 200")
def huber_loss(xp, w1, w2, x, y):
    error = (xp.relu(x @ w1) @ w2)[:, 0] - y
    small = xp.abs(error) <= 1.0
    return xp.mean(xp.where(small, 0.5 * error**2, xp.abs(error) - 0.5))


@function("w 12 3", "x 100 12, y 100 3")
def smooth_l1_by_clipping(xp, w, x, y):
    size = xp.abs(x @ w - y)
    quadratic = xp.clip(size, 0.0, 1.0)
    return xp.mean(0.5 * quadratic**2 + size - quadratic)


@function("w 12 3", "x 100 12, y 100 3 !", "params")
def log_of_cosh(xp, w, x, y):
    return xp.mean(xp.log(xp.cosh(xp.clip(x @ w - y, -50.0, 50.0))))


@function("w 12 3", "x 100 12, y 100 3")
def log_of_cosh_made_stable(xp, w, x, y):
    error = x @ w - y
    return xp.mean(error + xp.softplus(-2.0 * error) - xp.log(xp.ones(()) * 2.0))


@function("w 12 9", "x 100 12, y 100")
def pinball_of_nine_quantiles(xp, w, x, y):
    levels = xp.linspace(0.1, 0.9, 9)
    error = y[:, None] - x @ w
    return xp.mean(xp.maximum(levels * error, (levels - 1) * error))


@function("w 12 3, b 3", "x 100 12, y 100 3 +")
def mean_absolute_percentage_error(xp, w, b, x, y):
    return 100 * xp.mean(xp.abs(x @ w + b - y) / (xp.abs(y) + 1e-6))


@function("w 12 3", "x 100 12, y 100 3 +")
def mean_squared_logarithmic_error(xp, w, x, y):
    pred = xp.softplus(x @ w)
    return xp.mean((xp.log1p(pred) - xp.log1p(y)) ** 2)


@function("w 16 10, b 10", "x 128 16, t 128 <10")
def cross_entropy_by_hand(xp, w, b, x, t):
    z = x @ w + b
    e = xp.exp(z - xp.max(z, axis=-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return -xp.mean((xp.one_hot(t, 10) * xp.log(p + 1e-12)).sum(-1))


@function("w1 16 32, b1 32, w2 32 10", "x 128 16, t 128 <10")
def cross_entropy_of_a_log_softmax(xp, w1, b1, w2, x, t):
    logp = xp.log_softmax(xp.relu(x @ w1 + b1) @ w2, axis=-1)
    return -xp.mean(logp[xp.arange(128), t])


@function("w 16 10", "x 128 16, t 128 <10")
def cross_entropy_with_smooth_labels(xp, w, x, t):
    labels = 0.9 * xp.one_hot(t, 10) + 0.01
    return -xp.mean((labels * xp.log_softmax(x @ w, axis=-1)).sum(-1))


@function("w 16 10", "x 128 16, t 128 <10, c 10 %")
def cross_entropy_with_class_weights(xp, w, x, t, c):
    logp = xp.log(xp.softmax(x @ w, axis=-1))
    each = -logp[xp.arange(128), t] * c[t]
    return each.sum() / c[t].sum()


@function("w 16 10", "x 128 16, t 128 <10")
def focal_loss(xp, w, x, t):
    p = xp.softmax(x @ w, axis=-1)[xp.arange(128), t]
    return -xp.mean((1 - p) ** 2 * xp.log(p + 1e-8))


@function("w1 16 32, w2 32 1", "x 128 16, y 128 ?")
def binary_cross_entropy_of_clipped_probabilities(xp, w1, w2, x, y):
    p = xp.sigmoid(xp.tanh(x @ w1) @ w2)[:, 0]
    p = xp.clip(p, 1e-7, 1 - 1e-7)
    return -xp.mean(y * xp.log(p) + (1 - y) * xp.log(1 - p))


@function("w 16 4", "x 128 16, y 128 4 ?")
def binary_cross_entropy_of_logits(xp, w, x, y):
    z = x @ w
    return xp.mean(xp.maximum(z, 0.0) - z * y + xp.log1p(xp.exp(-xp.abs(z))))


@function("w 16 4", "x 128 16, y 128 4 ?")
def focal_loss_of_two_classes(xp, w, x, y):
    p = 1 / (1 + xp.exp(-(x @ w)))
    pt = y * p + (1 - y) * (1 - p)
    alpha = 0.25 * y + 0.75 * (1 - y)
    return xp.mean(-alpha * (1 - pt) ** 2 * xp.log(xp.clip(pt, 1e-6, 1.0)))


@function("w 16, b", "x 200 16, y 200 ?")
def hinge_loss(xp, w, b, x, y):
    sign = 2 * y - 1
    return xp.mean(xp.relu(1 - sign * (x @ w + b))) + 1e-3 * (w**2).sum()


@function("w 16 8", "x 128 16, t 128 <8")
def squared_hinge_of_many_classes(xp, w, x, t):
    z = x @ w
    right = xp.take_along_axis(z, t[:, None], 1)
    margin = xp.maximum(z - right + 1.0, 0.0) * (1 - xp.one_hot(t, 8))
    return xp.mean((margin**2).sum(1))


@function("k 16 1", "x 8 256 16, y 8 256 ?")
def dice_loss(xp, k, x, y):
    p = xp.sigmoid((x @ k)[..., 0])
    both = (p * y).sum(1)
    return 1 - xp.mean((2 * both + 1.0) / (p.sum(1) + y.sum(1) + 1.0))


@function("k 16 1", "x 8 1024 16, y 8 1024 ?")
def soft_jaccard(xp, k, x, y):
    p = xp.sigmoid(xp.matmul(x, k))[..., 0]
    both = xp.sum(p * y, axis=-1)
    union = xp.sum(p + y - p * y, axis=-1)
    return xp.mean(1 - both / (union + 1e-7))


@function("k 16 4", "x 8 256 16, y 8 256 4 ?")
def tversky_loss(xp, k, x, y):
    p = xp.softmax(x @ k, axis=-1)
    hit, miss, false = (p * y).sum((0, 1)), ((1 - p) * y).sum((0, 1)), (p * (1 - y)).sum((0, 1))
    return xp.mean((1 - hit / (hit + 0.7 * miss + 0.3 * false + 1e-6)) ** 0.75)


@function("w 16 10, v 16 10", "x 128 16")
def divergence_of_two_softmaxes(xp, w, v, x):
    p, q = xp.softmax(x @ w), xp.softmax(x @ v)
    return xp.mean(xp.sum(p * (xp.log(p) - xp.log(q)), axis=-1))


@function("w 16 10, v 16 10", "x 128 16")
def jensen_shannon_divergence(xp, w, v, x):
    p, q = xp.softmax(x @ w), xp.softmax(x @ v)
    m = (p + q) / 2
    left = (p * xp.log((p + 1e-10) / (m + 1e-10))).sum(-1)
    right = (q * xp.log((q + 1e-10) / (m + 1e-10))).sum(-1)
    return 0.5 * xp.mean(left + right)


@function("w 16 10", "x 128 16, z 128 10 !, t 128 <10")
def distillation_at_a_temperature(xp, w, x, z, t):
    logits = x @ w
    soft = xp.softmax(z / 4.0)
    soft_loss = -(soft * xp.log_softmax(logits / 4.0)).sum(-1).mean() * 16.0
    hard = -xp.log_softmax(logits)[xp.arange(128), t].mean()
    return 0.7 * soft_loss + 0.3 * hard


@function("w 16, b", "x 200 16, n 200 <20", "params")
def poisson_regression(xp, w, b, x, n):
    rate = x @ w + b
    return xp.mean(xp.exp(xp.clip(rate, -20.0, 10.0)) - n * rate)


@function("w 16 1", "x 200 16 !, y 200 1 +")
def gamma_deviance(xp, w, x, y):
    mu = xp.exp(x @ w)
    return 2 * xp.mean(-xp.log(y / mu) + (y - mu) / mu)


@function("w 16 1", "x 200 16 !, y 200 1 +")
def tweedie_deviance(xp, w, x, y):
    mu = xp.exp(x @ w)
    return xp.mean(-y * mu ** (1 - 1.5) / (1 - 1.5) + mu ** (2 - 1.5) / (2 - 1.5))


@function("w1 16 32, w2 32 4", "x 128 16, y 128 4")
def charbonnier_loss(xp, w1, w2, x, y):
    return xp.mean(xp.sqrt((xp.gelu(x @ w1) @ w2 - y) ** 2 + 1e-6))


@function("w1 16 32, w2 32 4", "x 128 16, y 128 4", "params")
def squares_with_weight_decay(xp, w1, w2, x, y):
    decay = xp.sum(w1**2) + xp.sum(w2**2)
    return xp.mean((xp.tanh(x @ w1) @ w2 - y) ** 2) + 1e-4 * decay


@function("w 32 1", "x 256 32, y 256 1", "params")
def elastic_net(xp, w, x, y):
    fit = ((x @ w - y) ** 2).mean()
    return fit + 0.01 * xp.abs(w).sum() + 0.005 * (w * w).sum()


@function("w 16 8", "a 64 16, b 64 16, y 64 ?")
def cosine_embedding_loss(xp, w, a, b, y):
    a, b = a @ w, b @ w
    sizes = xp.linalg.norm(a, axis=-1) * xp.linalg.norm(b, axis=-1)
    cos = (a * b).sum(-1) / xp.maximum(sizes, 1e-8)
    return xp.mean(y * (1 - cos) + (1 - y) * xp.relu(cos - 0.2))


@function("w 16", "a 128 16, b 128 16")
def margin_ranking(xp, w, a, b):
    return xp.mean(xp.relu(0.5 - (a @ w - b @ w)))


@function("w 16, v 16", "x 32 10 16, y 32 10 +")
def ranking_of_lists(xp, w, v, x, y):
    scores = xp.tanh(x @ w) + x @ v
    return -xp.mean((xp.softmax(y) * xp.log(xp.softmax(scores) + 1e-10)).sum(-1))


@function("w1 16 32, w2 32", "a 128 16, b 128 16")
def preferences_of_pairs(xp, w1, w2, a, b):
    reward = xp.silu(a @ w1) @ w2 - xp.silu(b @ w1) @ w2
    return -xp.mean(xp.log(xp.sigmoid(reward)))


@function("w 16 10", "x 128 16, t 128 <10")
def polynomial_cross_entropy(xp, w, x, t):
    p = xp.softmax(x @ w)[xp.arange(128), t]
    return xp.mean(-xp.log(p + 1e-9) + 2.0 * (1 - p))


@function("w 16 10", "x 128 16, t 128 <10")
def generalized_cross_entropy(xp, w, x, t):
    p = xp.softmax(x @ w)[xp.arange(128), t]
    return xp.mean((1 - p**0.7) / 0.7)


@function("w 16 10", "x 128 16, t 128 <10")
def symmetric_cross_entropy(xp, w, x, t):
    p, y = xp.softmax(x @ w), xp.one_hot(t, 10)
    forward = -(y * xp.log(xp.clip(p, 1e-7, 1.0))).sum(-1)
    return xp.mean(0.1 * forward - (p * xp.log(xp.clip(y, 1e-4, 1.0))).sum(-1))


@function("w 16 4", "x 128 16, y 128")
def evidential_regression(xp, w, x, y):
    raw = x @ w
    mu, v = raw[:, 0], xp.softplus(raw[:, 1]) + 1e-3
    a, b = xp.softplus(raw[:, 2]) + 1.001, xp.softplus(raw[:, 3]) + 1e-3
    omega = 2 * b * (1 + v)
    nll = 0.5 * xp.log(xp.pi / v) - a * xp.log(omega) + xp.lgamma(a) - xp.lgamma(a + 0.5)
    return xp.mean(nll + (a + 0.5) * xp.log(v * (y - mu) ** 2 + omega))


@function("w 16 3, s 3", "x 128 16, y 128 3")
def tasks_weighted_by_their_uncertainty(xp, w, s, x, y):
    each = ((x @ w - y) ** 2).mean(0)
    return (xp.exp(-s) * each + s).sum()


@function("w 8 8", "x 4 32 32 8, y 4 32 32 8")
def structural_similarity(xp, w, x, y):
    a = x @ w
    ma, mb = a.mean((1, 2)), y.mean((1, 2))
    va, vb = (a**2).mean((1, 2)) - ma**2, (y**2).mean((1, 2)) - mb**2
    both = (a * y).mean((1, 2)) - ma * mb
    c1, c2 = 0.01**2, 0.03**2
    ssim = (2 * ma * mb + c1) * (2 * both + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2))
    return 1 - ssim.mean()


@function("w 8 3", "x 4 32 32 8")
def total_variation(xp, w, x):
    image = x @ w
    down = xp.abs(image[:, 1:] - image[:, :-1]).mean()
    return down + xp.abs(image[:, :, 1:] - image[:, :, :-1]).mean()


@function("w 16 12", "x 4 20 16, t 4 5 <11")
def connectionist_temporal_classification(w, x, t):
    none = jnp.zeros((4, 20))
    return optax.ctc_loss(x @ w, none, t + 1, jnp.zeros((4, 5))).mean()


@function("w 16 10", "x 128 16, t 128 <10")
def cross_entropy_of_optax(w, x, t):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, t).mean()


@function("w 16 10, m 10", "x 128 16, y 128 10 ?")
def sigmoid_cross_entropy_of_optax(w, m, x, y):
    return optax.sigmoid_binary_cross_entropy(x @ w + m, y).sum(-1).mean()


@function("c 10 16", "x 128 16, t 128 <10")
def center_loss(xp, c, x, t):
    return 0.5 * xp.mean(((x - c[t]) ** 2).sum(-1))


@function("w 16 3, v 3 16", "x 128 16")
def reconstruction_of_an_autoencoder(xp, w, v, x):
    code = xp.sigmoid(x @ w)
    sparse = code.mean(0)
    rho = 0.05
    penalty = rho * xp.log(rho / sparse) + (1 - rho) * xp.log((1 - rho) / (1 - sparse))
    return ((code @ v - x) ** 2).sum(1).mean() + 0.1 * penalty.sum()


@function("w 16 32, v 32 4, b 4 *0.1", "x 200 16, y 200 4 *0.3")
def regression_around_a_learned_level(w, v, b, x, y):
    level = 288.0 + b  # in kelvin
    return jnp.mean((jnp.tanh(x @ w) @ v + level - (288.0 + y)) ** 2)


@function("w 16 32, v 32 4, e 10 4 *0.1", "x 200 16, y 200 4 *0.3, i 200 <10")
def prediction_that_is_denormalised(w, v, e, x, y, i):
    station = 1013.0 + e[i]
    return jnp.mean((station + 0.5 * (jnp.tanh(x @ w) @ v) - (1013.0 + 0.5 * y)) ** 2)

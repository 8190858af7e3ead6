"""Log-likelihoods and statistics."""

import jax
import jax.numpy as jnp
from jax.scipy import stats

from . import function


@function("w 16 8", "x 200 16, y 200 4")
def gaussian_with_its_variance(xp, w, x, y):
    out = x @ w
    mu, log_var = out[:, :4], out[:, 4:]
    return 0.5 * xp.mean(log_var + (y - mu) ** 2 / xp.exp(log_var))


@function("w 16 8", "x 200 16, y 200 4")
def gaussian_with_a_clipped_deviation(xp, w, x, y):
    out = x @ w
    log_std = xp.clip(out[:, 4:], -5.0, 2.0)
    z = (y - out[:, :4]) * xp.exp(-log_std)
    return xp.mean(0.5 * z**2 + log_std + 0.5 * xp.log(2 * xp.pi * xp.ones(())))


@function("w 16 8", "x 200 16, y 200 4")
def gaussian_with_a_softplus_deviation(xp, w, x, y):
    out = x @ w
    std = xp.softplus(out[:, 4:]) + 1e-4
    return xp.mean(0.5 * ((y - out[:, :4]) / std) ** 2 + xp.log(std))


@function("w 16 4, s 4 =0.1", "x 200 16, y 200 4")
def laplace_likelihood(xp, w, s, x, y):
    scale = xp.exp(s)
    return xp.mean(xp.abs(x @ w - y) / scale + xp.log(2 * scale))


@function("w 16 4, s =1, nu =3", "x 200 16, y 200 4")
def student_likelihood(xp, w, s, nu, x, y):
    z = (y - x @ w) / s
    norm = xp.lgamma((nu + 1) / 2) - xp.lgamma(nu / 2) - 0.5 * xp.log(nu * xp.pi) - xp.log(s)
    return -xp.mean(norm - (nu + 1) / 2 * xp.log1p(z**2 / nu))


@function("w 16 4, s =0.5", "x 200 16, y 200 4")
def cauchy_likelihood(xp, w, s, x, y):
    return xp.mean(xp.log(1 + ((x @ w - y) / s) ** 2) + xp.log(s))


@function("w 16 2", "x 200 16, y 200 %")
def beta_likelihood(xp, w, x, y):
    ab = xp.softplus(x @ w) + 0.5
    a, b = ab[:, 0], ab[:, 1]
    y = xp.clip(y, 1e-4, 1 - 1e-4)
    norm = xp.lgamma(a) + xp.lgamma(b) - xp.lgamma(a + b)
    return xp.mean(norm - (a - 1) * xp.log(y) - (b - 1) * xp.log(1 - y))


@function("w 16 2", "x 200 16, y 200 +")
def gamma_likelihood(xp, w, x, y):
    out = xp.softplus(x @ w) + 0.1
    a, rate = out[:, 0], out[:, 1]
    return -xp.mean(a * xp.log(rate) + (a - 1) * xp.log(y) - rate * y - xp.lgamma(a))


@function("w 16 2", "x 200 16, n 200 <30")
def negative_binomial_likelihood(xp, w, x, n):
    out = x @ w
    r, p = xp.exp(xp.clip(out[:, 0], -5.0, 5.0)), xp.clip(xp.sigmoid(out[:, 1]), 1e-5, 1 - 1e-5)
    n = xp.float(n)
    ways = xp.lgamma(n + r) - xp.lgamma(n + 1) - xp.lgamma(r)
    return -xp.mean(ways + r * xp.log(1 - p) + n * xp.log(p))


@function("w 16 2", "x 200 16, n 200 <6")
def zero_inflated_poisson(xp, w, x, n):
    out = x @ w
    rate, p = xp.softplus(out[:, 0]) + 1e-3, xp.sigmoid(out[:, 1])
    n = xp.float(n)
    zero = xp.log(p + (1 - p) * xp.exp(-rate) + 1e-10)
    more = xp.log(1 - p + 1e-10) + n * xp.log(rate) - rate - xp.lgamma(n + 1)
    return -xp.mean(xp.where(n == 0, zero, more))


@function("w 16 15", "x 200 16, y 200")
def mixture_density_network(xp, w, x, y):
    out = x @ w
    logit, mu, log_std = out[:, :5], out[:, 5:10], xp.clip(out[:, 10:], -3.0, 3.0)
    z = (y[:, None] - mu) / xp.exp(log_std)
    each = xp.log_softmax(logit) - 0.5 * z**2 - log_std - 0.919
    return -xp.mean(xp.logsumexp(each, axis=-1))


@function("mu 5 8 *1, s 5 8, pi 5", "x 300 8")
def mixture_of_gaussians(xp, mu, s, pi, x):
    z = (x[:, None] - mu) / xp.exp(s)
    each = xp.log_softmax(pi) - (0.5 * z**2 + s + 0.919).sum(-1)
    return -xp.mean(xp.logsumexp(each, axis=1))


@function("mu 5 8 *1, s 5 8", "x 300 8")
def mixture_of_densities_that_are_not_logs(xp, mu, s, x):
    z = (x[:, None] - mu) / xp.exp(s)
    p = xp.exp(-0.5 * (z**2).sum(-1)) / xp.exp(s.sum(-1)) / (2 * xp.pi) ** 4
    return -xp.mean(xp.log(p.mean(1) + 1e-10))


@function("w 8 8, mu 8", "x 300 8")
def gaussian_with_a_full_precision(xp, w, mu, x):
    precision = w @ w.T + 0.5 * xp.eye(8)
    d = x - mu
    square = xp.einsum("ni,ij,nj->n", d, precision, d)
    return 0.5 * xp.mean(square) - 0.5 * xp.linalg.slogdet(precision)[1]


@function("w 8 8", "x 300 8")
def gaussian_by_its_cholesky_factor(xp, w, x):
    lower = xp.linalg.cholesky(w @ w.T + 0.5 * xp.eye(8))
    z = xp.solve_triangular(lower, x.T)
    return 0.5 * (z**2).sum(0).mean() + xp.log(xp.diagonal(lower)).sum()


@function("w 16 4", "x 300 16, y 300 4")
def correlation(xp, w, x, y):
    p = x @ w
    p, y = p - p.mean(0), y - y.mean(0)
    over = xp.sqrt((p**2).sum(0) * (y**2).sum(0)) + 1e-8
    return 1 - ((p * y).sum(0) / over).mean()


@function("w 16 4", "x 300 16, y 300 4")
def concordance_correlation(xp, w, x, y):
    p = x @ w
    both = ((p - p.mean(0)) * (y - y.mean(0))).mean(0)
    over = xp.var(p, axis=0) + xp.var(y, axis=0) + (p.mean(0) - y.mean(0)) ** 2
    return xp.mean(1 - 2 * both / over)


@function("w 16 1, b 1", "x 1000 16, y 1000 1")
def coefficient_of_determination(xp, w, b, x, y):
    rest = ((y - x @ w - b) ** 2).sum()
    return rest / ((y - y.mean()) ** 2).sum()


@function("w 16 8", "x 2000 16")
def skewness_and_kurtosis(xp, w, x):
    h = x @ w
    z = (h - h.mean(0)) / xp.std(h, axis=0)
    return (xp.mean(z**3, axis=0) ** 2 + (xp.mean(z**4, axis=0) - 3) ** 2).sum()


@function("w 16 8", "x 500 16, y 500 8")
def moments_that_match(xp, w, x, y):
    h = xp.tanh(x @ w)
    mean = ((h.mean(0) - y.mean(0)) ** 2).sum()
    a, b = h - h.mean(0), y - y.mean(0)
    return mean + ((a.T @ a / 499 - b.T @ b / 499) ** 2).sum()


@function("w 16 8", "x 500 16")
def covariance_that_is_the_identity(xp, w, x):
    h = x @ w
    h = h - h.mean(0)
    cov = xp.einsum("ni,nj->ij", h, h) / (500 - 1)
    return ((cov - xp.eye(8)) ** 2).sum()


@function("w 16 4", "x 128 16, y 128 4")
def mean_discrepancy_of_kernels(xp, w, x, y):
    h = x @ w

    def kernel(a, b):
        return xp.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / 8)

    return kernel(h, h).mean() + kernel(y, y).mean() - 2 * kernel(h, y).mean()


@function("w 16 4", "x 128 16, y 128 4")
def energy_distance(xp, w, x, y):
    h = x @ w

    def between(a, b):
        return xp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-6).mean()

    return 2 * between(h, y) - between(h, h) - between(y, y)


@function("w 16 8", "x 200 16, time 200 +, seen 200 ?")
def cox_partial_likelihood(xp, w, x, time, seen):
    risk = (xp.tanh(x @ w)).sum(-1)
    later = time[None, :] >= time[:, None]
    total = xp.log((xp.exp(risk)[None, :] * later).sum(1))
    return -(seen * (risk - total)).sum() / (seen.sum() + 1)


@function("w 16 1, k =1.5", "x 200 16 !, time 200 +, seen 200 ?")
def weibull_survival(xp, w, k, x, time, seen):
    scale = xp.exp(x @ w)[:, 0]
    z = (time / scale) ** k
    hazard = xp.log(k) - xp.log(scale) + (k - 1) * (xp.log(time) - xp.log(scale))
    return -xp.mean(seen * hazard - z)


@function("w 16 1, c 4 =1", "x 200 16, t 200 <5")
def ordinal_regression(xp, w, c, x, t):
    cuts = xp.cumsum(xp.softplus(c), axis=0) - 3
    below = xp.sigmoid(cuts - x @ w)
    below = xp.concatenate([xp.zeros((200, 1)), below, xp.ones((200, 1))], axis=1)
    p = (below[:, 1:] - below[:, :-1])[xp.arange(200), t]
    return -xp.mean(xp.log(p + 1e-8))


@function("w 16 1", "x 200 16, y 200 ?")
def probit_regression(xp, w, x, y):
    p = xp.ndtr((x @ w)[:, 0])
    return -xp.mean(y * xp.log(p + 1e-7) + (1 - y) * xp.log(1 - p + 1e-7))


@function("w 16 8", "x 200 16, y 200 8 +")
def dirichlet_likelihood(xp, w, x, y):
    a = xp.exp(xp.clip(x @ w, -4.0, 4.0)) + 0.01
    p = y / y.sum(-1, keepdims=True)
    norm = xp.lgamma(a).sum(-1) - xp.lgamma(a.sum(-1))
    return xp.mean(norm - ((a - 1) * xp.log(p)).sum(-1))


@function("w 16 2", "x 200 16, y 200")
def von_mises_likelihood(xp, w, x, y):
    out = x @ w
    k = xp.softplus(out[:, 1])
    return xp.mean(xp.log(xp.i0e(k)) + k - k * xp.cos(y - out[:, 0]))


@function("w 16 4, s =1", "x 128 16 , z 20 16, y 128")
def gaussian_process_with_inducing_points(xp, w, s, x, z, y):
    def kernel(a, b):
        a, b = a @ w, b @ w
        return xp.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))

    kzz, kzx = kernel(z, z) + 0.1 * xp.eye(20), kernel(z, x)
    mean = kzx.T @ xp.linalg.solve(kzz, kzx @ y / 128)
    return xp.mean((y - s * mean) ** 2)


@function("w 16, b", "x 500 16, y 500 ?")
def logistic_regression_from_scipy(w, b, x, y):
    z = x @ w + b
    return -jnp.mean(stats.bernoulli.logpmf(y.astype(int), jax.nn.sigmoid(z) * 0.98 + 0.01))


@function("w 16 4, s 4 =1", "x 200 16, y 200 4")
def normal_density_from_scipy(w, s, x, y):
    return -stats.norm.logpdf(y, x @ w, s).mean() - 0.01 * stats.t.logpdf(x @ w, 5.0).mean()


@function("w 8 8", "x 200 8")
def multivariate_normal_from_scipy(w, x):
    cov = w @ w.T + jnp.eye(8)
    return -stats.multivariate_normal.logpdf(x, jnp.zeros(8), cov).mean()

"""Linear algebra, Fourier transforms, and einsum in many forms."""

import jax
import jax.numpy as jnp

from . import function


@function("w 8 8", "x 20 8, y 20 8")
def solution_of_a_linear_system(xp, w, x, y):
    a = w @ w.T + xp.eye(8)
    return xp.mean((xp.linalg.solve(a, x.T).T - y) ** 2)


@function("w 16 8", "x 100 16, y 100 4")
def ridge_regression_on_features(xp, w, x, y):
    h = xp.tanh(x @ w)
    beta = xp.linalg.solve(h.T @ h + 1.0 * xp.eye(8), h.T @ y)
    return xp.mean((h @ beta - y) ** 2)


@function("w 16 4", "x 40 16, y 40")
def gaussian_process_likelihood(xp, w, x, y):
    z = 0.3 * x @ w
    d = ((z[:, None] - z[None]) ** 2).sum(-1)
    k = xp.exp(-0.5 * d) + 0.1 * xp.eye(40)
    lower = xp.linalg.cholesky(k)
    a = xp.solve_triangular(lower, y[:, None])
    return 0.5 * (a**2).sum() / 40 + xp.log(xp.diagonal(lower)).sum() / 40


@function("w 8 8", "x 40 8")
def log_determinant_of_a_covariance(xp, w, x):
    h = x @ w
    cov = h.T @ h / 40 + 0.1 * xp.eye(8)
    return xp.trace(cov) - xp.linalg.slogdet(cov)[1]


@function("w 8 8", "x 30 8")
def determinantal_points(xp, w, x):
    z = x @ w
    z = z / xp.sqrt((z**2).sum(1, keepdims=True) + 1e-6)
    return -xp.linalg.slogdet(z @ z.T + 0.2 * xp.eye(30))[1] / 30


@function("w 8 8", "x 40 8, y 40 8")
def inverse_of_a_matrix(xp, w, x, y):
    a = xp.linalg.inv(xp.eye(8) + 0.3 * w)
    return xp.mean((x @ a - y) ** 2)


@function("w 6 6", "x 40 6, y 40 6")
def exponential_of_a_skew_matrix(w, x, y):
    turn = jax.scipy.linalg.expm(w - w.T)
    return jnp.mean((x @ turn - y) ** 2)


@function("w 6 6", "x 40 6, y 40 6")
def rotation_by_cayley(xp, w, x, y):
    skew = w - w.T
    turn = xp.linalg.solve(xp.eye(6) + skew, xp.eye(6) - skew)
    return xp.mean((x @ turn - y) ** 2)


@function("w 8 8", "x 40 8", "params")
def largest_eigenvalue(xp, w, x):
    h = x @ w
    return xp.linalg.eigh(h.T @ h / 40)[0][-1]


@function("w 8 6", "x 40 8")
def nuclear_norm(xp, w, x):
    return xp.linalg.svdvals(x @ w).sum() / 40


@function("w 8 8", "x 40 8, y 40 8")
def whitening_by_a_cholesky_factor(xp, w, x, y):
    h = x @ w
    h = h - h.mean(0)
    lower = xp.linalg.cholesky(h.T @ h / 39 + 1e-2 * xp.eye(8))
    white = xp.solve_triangular(lower, h.T).T
    return xp.mean((white - y) ** 2)


@function("w 8 8", "x 40 8", "params")
def orthogonality_penalty(xp, w, x):
    return xp.mean((x @ w) ** 2) + ((w.T @ w - xp.eye(8)) ** 2).sum()


@function("w 8 8", "x 40 8")
def newton_schulz_iterations(xp, w, x):
    z = w / xp.sqrt((w**2).sum() + 1e-7)
    for _ in range(4):
        a = z @ z.T
        z = 1.5 * z - 0.5 * a @ z
    return xp.mean(xp.abs(x @ z)) + xp.mean((x @ w) ** 2)


@function("w 16 16", "x 16, y 16")
def conjugate_gradients(xp, w, x, y):
    a = w @ w.T / 4 + xp.eye(16)
    z, r = xp.zeros(16), x
    p = r
    for _ in range(5):
        ap = a @ p
        alpha = (r @ r) / (p @ ap + 1e-12)
        z, new = z + alpha * p, r - alpha * ap
        p = new + (new @ new) / (r @ r + 1e-12) * p
        r = new
    return ((z - y) ** 2).mean()


@function("w 8 8", "a 30 8, b 30 8")
def alignment_by_a_quadratic_form(xp, w, a, b):
    return -xp.trace(a @ w @ b.T) / 30 + xp.sum((w @ w.T) ** 2)


@function("w 16 16", "x 40 16")
def spectrum_of_a_product(xp, w, x):
    f = xp.fft.rfft(x @ w)
    power = xp.abs(f) ** 2
    return xp.log(power + 1e-3).mean()


@function("f 8 9, w 16 4", "x 40 8 16, y 40 8 4")
def multiplication_of_frequencies(xp, f, w, x, y):
    h = xp.fft.irfft(xp.fft.rfft(x) * f)
    return xp.mean((xp.relu(h) @ w - y) ** 2)


@function("k 8 64, w 8 4", "x 16 64 8, y 16 64 4")
def long_convolution_by_fft(xp, k, w, x, y):
    size = xp.fft.rfft(xp.swapaxes(x, 1, 2), n=128) * xp.fft.rfft(k, n=128)
    h = xp.swapaxes(xp.fft.irfft(size, n=128)[..., :64], 1, 2)
    return xp.mean((xp.gelu(h) @ w - y) ** 2)


@function("w 8 8", "x 4 16 16 8")
def mixing_of_tokens_by_fft(xp, w, x):
    h = xp.real(xp.fft.fft2(x @ w, None, (1, 2)))
    return xp.mean(h**2) / 256


@function("w 64 64", "x 16 64, y 16 64")
def spectral_distance(xp, w, x, y):
    a, b = xp.abs(xp.fft.rfft(x @ w)), xp.abs(xp.fft.rfft(y))
    return xp.mean(xp.abs(a - b)) + xp.mean(xp.abs(xp.log(a + 1e-5) - xp.log(b + 1e-5)))


@function("w 32 32", "x 100 32, y 100 32")
def spectrogram_distance(xp, w, x, y):
    n = xp.float(xp.arange(32))
    window = 0.5 - 0.5 * xp.cos(2 * xp.pi * n / 32)
    wave = 2 * xp.pi * n[:, None] * n[None, :17] / 32

    def power(z):
        z = z * window
        return (z @ xp.cos(wave)) ** 2 + (z @ xp.sin(wave)) ** 2

    a, b = power(x @ w), power(y)
    return xp.sqrt(((a - b) ** 2).sum()) / xp.sqrt((b**2).sum()) / 10


@function("w 5 6 7", "x 40 5, y 40 6, z 40 7")
def bilinear_form_of_three(xp, w, x, y, z):
    return xp.mean((xp.einsum("na,nb,abc->nc", x, y, w) - z) ** 2)


@function("a 8 4, b 8 4, c 8 4", "x 8 8 8")
def tensor_of_three_factors(xp, a, b, c, x):
    return xp.mean((xp.einsum("ir,jr,kr->ijk", a, b, c) - x) ** 2)


@function("g 3 3 3, a 8 3, b 8 3, c 8 3", "x 8 8 8")
def tucker_decomposition(xp, g, a, b, c, x):
    full = xp.einsum("pqr,ip,jq,kr->ijk", g, a, b, c)
    return ((full - x) ** 2).sum() / (x**2).sum()


@function("w 4 8 16", "x 10 4 8, y 10 4 16")
def batched_einsum(xp, w, x, y):
    return xp.mean((xp.einsum("nhd,hde->nhe", x, w) - y) ** 2)


@function("w 8 8", "x 40 8")
def einsum_with_a_repeated_axis(xp, w, x):
    both = xp.einsum("nd,de,me->nm", x, w, x)
    return xp.mean(both**2) - xp.einsum("nn->", both) / 40


@function("w 16 8", "x 20 16, y 8")
def einsum_to_a_number(xp, w, x, y):
    return xp.einsum("nd,de,e->", x, w, y) ** 2 / 400 + xp.einsum("de,de->", w, w)


@function("w 16 8", "x 20 16")
def einsum_of_squares(xp, w, x):
    h = x @ w
    return xp.sqrt(xp.einsum("ne,ne->n", h, h) + 1e-8).mean()


@function("w 16 8, v 16 8", "x 20 16, y 20 20")
def outer_products_in_a_batch(xp, w, v, x, y):
    both = xp.einsum("ni,nj->nij", x @ w, x @ v)
    return xp.mean((both.sum((1, 2)) - y.sum(1)) ** 2) / 100


@function("w 6 4 5", "x 10 6 4, y 10 5")
def contraction_of_two_axes(xp, w, x, y):
    return xp.mean((xp.tensordot(x, w, 2) - y) ** 2)


@function("a 4 4, b 4 4", "x 20 16, y 20 16")
def kronecker_product(xp, a, b, x, y):
    return xp.mean((x @ xp.kron(a, b) - y) ** 2)


@function("a 4 3 3, b 3 4 3, w 12 2", "x 20 9, y 20 2", "params")
def tensor_train(xp, a, b, w, x, y):
    core = xp.einsum("ipr,rjq->ijpq", a, b).reshape(16, 9)
    return xp.mean(((x @ core.T)[:, :12] @ w - y) ** 2)


@function("w 8 8", "x 50 8")
def subspace_that_keeps_variance(xp, w, x):
    q = xp.linalg.qr(w)[0]
    h = x @ q[:, :3]
    return -xp.mean((h**2).sum(1)) + xp.mean((x @ w) ** 2)


@function("w 8 4, v 8 4", "x 60 8, y 60 8")
def canonical_correlation(xp, w, v, x, y):
    a, b = x @ w, y @ v
    a, b = a - a.mean(0), b - b.mean(0)
    caa, cbb = a.T @ a / 59 + 0.1 * xp.eye(4), b.T @ b / 59 + 0.1 * xp.eye(4)
    cab = a.T @ b / 59
    return -xp.trace(xp.linalg.solve(caa, cab) @ xp.linalg.solve(cbb, cab.T))


@function("w 16 16", "x 30 16", "params")
def matrix_powers(xp, w, x):
    p = 0.5 * w
    return xp.mean((x @ p @ p @ p @ p + x) ** 2)

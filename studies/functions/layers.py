"""Normalizations, gates and activations, by hand."""

from . import function


@function("w 16 32, g 32 =1, b 32", "x 64 16, y 64 32 !")
def layer_norm(xp, w, g, b, x, y):
    h = x @ w
    mean, var = h.mean(-1, keepdims=True), xp.var(h, axis=-1, keepdims=True)
    return xp.mean(((h - mean) / xp.sqrt(var + 1e-5) * g + b - y) ** 2)


@function("w 16 32, g 32 =1, b 32", "x 64 16, y 64 32 !")
def layer_norm_of_squares_minus_mean(xp, w, g, b, x, y):
    h = x @ w
    mean = h.mean(-1, keepdims=True)
    var = (h**2).mean(-1, keepdims=True) - mean**2
    return xp.mean(((h - mean) * xp.rsqrt(var + 1e-6) * g + b - y) ** 2)


@function("w 16 32, g 32 =1, v 32 8", "x 64 16, y 64 8 !")
def rms_norm(xp, w, g, v, x, y):
    h = x @ w
    h = h * xp.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * g
    return xp.mean((h @ v - y) ** 2)


@function("w 16 32, v 32 16", "x 64 16", "params")
def rms_norm_before_and_after(xp, w, v, x):
    def norm(z):
        return z / xp.sqrt(xp.mean(z**2, axis=-1, keepdims=True) + 1e-8)

    return xp.mean((x + norm(xp.silu(norm(x) @ w) @ v)) ** 4)


@function("w 16 32, g 32 =1, b 32, v 32 4", "x 256 16, y 256 4 !")
def batch_norm(xp, w, g, b, v, x, y):
    h = x @ w
    h = (h - h.mean(0)) / xp.sqrt(xp.var(h, axis=0) + 1e-5) * g + b
    return xp.mean((xp.relu(h) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 256 16, mu 32, sigma 32 +, y 256 4 !")
def batch_norm_with_running_statistics(xp, w, v, x, mu, sigma, y):
    h = (x @ w - mu) / xp.sqrt(sigma + 1e-3)
    return xp.mean((xp.relu(h) @ v - y) ** 2)


@function("w 16 32, g 32 =1", "x 8 20 16, y 8 20 32 !")
def group_norm(xp, w, g, x, y):
    h = (x @ w).reshape(8, 20, 4, 8)
    mean = h.mean((1, 3), keepdims=True)
    var = ((h - mean) ** 2).mean((1, 3), keepdims=True)
    return xp.mean((((h - mean) / (var + 1e-5) ** 0.5).reshape(8, 20, 32) * g - y) ** 2)


@function("w 16 32", "x 8 20 16, y 8 20 32 !")
def instance_norm(xp, w, x, y):
    h = x @ w
    h = (h - h.mean(1, keepdims=True)) / (xp.std(h, axis=1, keepdims=True) + 1e-5)
    return xp.mean((h - y) ** 2)


@function("w 16 32, g 32 =1", "x 64 16", "params")
def weight_norm(xp, w, g, x):
    w = g * w / xp.sqrt((w**2).sum(0))
    return xp.mean(xp.tanh(x @ w) ** 2)


@function("w 16 32", "x 64 16, u 32 !", "params")
def spectral_norm_by_power_iteration(xp, w, x, u):
    for _ in range(3):
        v = w @ u
        v = v / (xp.linalg.norm(v) + 1e-12)
        u = v @ w
        u = u / (xp.linalg.norm(u) + 1e-12)
    sigma = v @ w @ u
    return xp.mean(xp.relu(x @ (w / sigma)) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4 !")
def l2_normalized_hidden_layer(xp, w, v, x, y):
    h = xp.relu(x @ w)
    h = h / (xp.sqrt((h**2).sum(-1, keepdims=True)) + 1e-6)
    return xp.mean((h @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4 !")
def standardized_inputs(xp, w, v, x, y):
    z = (x - x.mean(0)) / (xp.std(x, axis=0) + 1e-8)
    return xp.mean((xp.tanh(z @ w) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4 !")
def inputs_between_zero_and_one(xp, w, v, x, y):
    low, high = xp.min(x, axis=0), xp.max(x, axis=0)
    return xp.mean((xp.relu((x - low) / (high - low) @ w) @ v - y) ** 2)


@function("w 16 32", "x 64 16, y 64 32 !")
def weight_standardization(xp, w, x, y):
    w = (w - w.mean(0)) / xp.sqrt(xp.var(w, axis=0) * 16 + 1e-4)
    return xp.mean((x @ w - y) ** 2)


@function("w 8 32", "x 4 30 8")
def local_response_norm(xp, w, x):
    h = x @ w
    wide = xp.pad(h**2, ((0, 0), (0, 0), (2, 2)))
    near = sum(wide[..., i : i + 32] for i in range(5))
    return xp.mean((h / (2.0 + 1e-4 * near) ** 0.75) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def gelu_by_tanh(xp, w, v, x, y):
    h = x @ w
    h = 0.5 * h * (1 + xp.tanh((2 / xp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return xp.mean((h @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def gelu_by_erf(xp, w, v, x, y):
    h = x @ w
    return xp.mean((0.5 * h * (1 + xp.erf(h / 2**0.5)) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def swish_by_hand(xp, w, v, x, y):
    h = x @ w
    return xp.mean(((h / (1 + xp.exp(-xp.clip(h, -60.0, 60.0)))) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def mish(xp, w, v, x, y):
    h = x @ w
    return xp.mean(((h * xp.tanh(xp.softplus(h))) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def elu_by_hand(xp, w, v, x, y):
    h = x @ w
    h = xp.where(h > 0, h, xp.exp(xp.minimum(h, 0.0)) - 1)
    return xp.mean((h @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def selu_by_expm1(xp, w, v, x, y):
    h = x @ w
    h = 1.0507 * xp.where(h > 0, h, 1.67326 * xp.expm1(xp.minimum(h, 0.0)))
    return xp.mean((h @ v - y) ** 2)


@function("w 16 32, v 32 4, a 32 =0.25", "x 64 16, y 64 4")
def parametric_relu(xp, w, v, a, x, y):
    h = x @ w
    return xp.mean((xp.where(h > 0, h, a * h) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def softplus_by_hand(xp, w, v, x, y):
    h = x @ w
    h = xp.log(1 + xp.exp(-xp.abs(h))) + xp.maximum(h, 0.0)
    return xp.mean((h @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def squared_relu(xp, w, v, x, y):
    return xp.mean((xp.relu(x @ w) ** 2 @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def softsign(xp, w, v, x, y):
    h = x @ w
    return xp.mean((h / (1 + xp.abs(h)) @ v - y) ** 2)


@function("w 16 32, v 32 4, a 32 =1", "x 64 16, y 64 4")
def snake_activation(xp, w, v, a, x, y):
    h = 0.1 * x @ w
    return xp.mean(((h + xp.sin(a * h) ** 2 / a) @ v - y) ** 2)


@function("w 16 32, c 32 4", "x 64 16, y 64 4")
def gaussian_activation(xp, w, c, x, y):
    return xp.mean((xp.exp(-((x @ w) ** 2)) @ c - y) ** 2)


@function("w 16 32, c 32 4", "x 64 16, y 64 4")
def inverse_of_one_plus_a_square(xp, w, c, x, y):
    return xp.mean((1 / (1 + (x @ w) ** 2) @ c - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, y 64 4")
def hard_swish(xp, w, v, x, y):
    h = x @ w
    return xp.mean((h * xp.clip(h + 3, 0.0, 6.0) / 6 @ v - y) ** 2)


@function("w 16 64, v 32 4", "x 64 16, y 64 4")
def gated_linear_unit(xp, w, v, x, y):
    h = x @ w
    return xp.mean(((h[:, :32] * xp.sigmoid(h[:, 32:])) @ v - y) ** 2)


@function("w 16 64, u 16 64, v 64 16", "x 64 16", "params")
def gated_swish_unit(xp, w, u, v, x):
    return xp.mean((x + (xp.silu(x @ w) * (x @ u)) @ v) ** 2)


@function("w 16 16, t 16 16, c 16", "x 64 16, y 64 16")
def highway_layer(xp, w, t, c, x, y):
    gate = xp.sigmoid(x @ t + c - 2)
    return xp.mean((gate * xp.relu(x @ w) + (1 - gate) * x - y) ** 2)


@function("w 16 32, v 32 16, s 16 =1e-5", "x 64 16, y 64 16")
def residual_block_with_a_layer_scale(xp, w, v, s, x, y):
    return xp.mean((x + s * (xp.gelu(x @ w) @ v) - y) ** 2)


@function("a 16 2, b 2 16", "x 64 16, w 16 16 !, y 64 16")
def low_rank_adapter(xp, a, b, x, w, y):
    return xp.mean((x @ w / 4 + 16 / 2 * (x @ a) @ b - y) ** 2)


@function("w 16 30, v 10 4", "x 64 16, y 64 4")
def maxout(xp, w, v, x, y):
    h = xp.max((x @ w).reshape(64, 10, 3), axis=-1)
    return xp.mean((h @ v - y) ** 2)


@function("down 32 8, up 8 32", "x 8 50 32")
def squeeze_and_excitation(xp, down, up, x):
    gate = xp.sigmoid(xp.relu(x.mean(1) @ down) @ up)
    return xp.mean((x * gate[:, None]) ** 2)


@function("w 16 24, film 6 48, v 24 4", "x 64 16, c 64 6, y 64 4")
def feature_wise_modulation(xp, w, film, v, x, c, y):
    both = c @ film
    h = (x @ w) * (1 + both[:, :24]) + both[:, 24:]
    return xp.mean((xp.relu(h) @ v - y) ** 2)


@function("w 16 32, v 32 4", "x 64 16, m 64 32 ?, y 64 4")
def dropout(xp, w, v, x, m, y):
    return xp.mean(((xp.relu(x @ w) * m / 0.5) @ v - y) ** 2)


@function("w1 16 64, w2 64 64, w3 64 64, w4 64 1", "x 128 16, y 128 1")
def four_layers_of_sines(xp, w1, w2, w3, w4, x, y):
    h = xp.sin(30 * (0.01 * x @ w1))
    h = xp.sin(h @ w2)
    return xp.mean((xp.sin(h @ w3) @ w4 - y) ** 2)


@function("w1 16 64, b1 64, w2 64 64, b2 64, w3 64 4", "x 128 16, t 128 <4", "params")
def perceptron_of_three_layers(xp, w1, b1, w2, b2, w3, x, t):
    h = xp.relu(x @ w1 + b1)
    z = xp.relu(h @ w2 + b2) @ w3
    return -xp.log_softmax(z)[xp.arange(128), t].mean()

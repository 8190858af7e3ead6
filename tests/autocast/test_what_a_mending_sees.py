"""What no rule of autocast sees is mended at the first audit: examples that float16 or bfloat16
spoils, and float32 does not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast.test_autocast import error
from jax import lax
from jax.scipy.ndimage import map_coordinates

import gainstage as gs


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X = draw(0, 512, 16)
TIMES = jnp.linspace(0, 4, 200)[:, None]


def network(w, t):
    return jnp.tanh(jnp.tanh(t @ w[:1]) @ w) @ w[:, :2]


def central(w, step=0.05):
    """A second derivative by differences, one of them in a compiled function."""
    u = jax.jit(lambda t: network(w, t))
    second = (u(TIMES + step) - 2 * u(TIMES) + u(TIMES - step)) / step**2
    return jnp.mean(second**2)


def acceleration(w):
    return jnp.mean((jnp.diff(network(w, TIMES), n=2, axis=0) / (4 / 199) ** 2) ** 2)


def harmonics(w):
    angles = (2 * jnp.pi * X[:, :1]) @ jnp.arange(1.0, 129)[None]
    return jnp.mean((jnp.cos(angles) @ w + jnp.sin(angles) @ w - X) ** 2)


def rolled_out(w):
    """A linear system whose matrix is one and a small step, in a scan."""
    turned = jnp.eye(16) + 0.01 * w
    last, _ = lax.scan(lambda x, _: (x @ turned, None), X, None, length=50)
    return jnp.mean((last - X[::-1]) ** 2)


def filtered(log_noise):
    """A Kalman filter of a position and a speed."""
    moves, sees, spread, loss = jnp.eye(2) + 0.1 * jnp.eye(2, k=1), jnp.eye(1, 2), 100.0, 0.0
    spread = spread * jnp.eye(2)
    for _ in range(3):
        spread = moves @ spread @ moves.T
        seen = sees @ spread @ sees.T + jnp.exp(log_noise)
        spread = (jnp.eye(2) - (spread @ sees.T / seen) @ sees) @ spread
        loss += jnp.log(seen).sum()
    return loss


GRID = jnp.stack(jnp.meshgrid(jnp.arange(64.0), jnp.arange(64.0), indexing="ij"), -1)
TURN = jnp.eye(2) + jnp.array([[0.01, -0.02], [0.02, -0.01]])


def image():
    kernel = jnp.exp(-(jnp.arange(-8, 9.0) ** 2) / 18)

    def smooth(row):
        return jnp.convolve(row, kernel / kernel.sum(), "same")

    return 3 * jax.vmap(smooth)(jax.vmap(smooth, 1, 1)(draw(4, 64, 64)))


IMAGE = image()


def moved(turn):
    """An image at the coordinates of a grid, which a convolution of one pixel turns."""
    axes = ("NHWC", "HWIO", "NHWC")
    grid = lax.conv_general_dilated(
        GRID[None], turn[None, None], (1, 1), "SAME", dimension_numbers=axes
    )[0]
    return map_coordinates(IMAGE, [grid[..., 0] + 1.5, grid[..., 1] - 2.0], 1, mode="nearest")


TARGET = moved(TURN)


def registered(turn):
    return jnp.mean((moved(turn) - TARGET) ** 2)


# What is computed, at which parameters, and in which dtype the first audit is past a bound.
LOSSES = {
    "central differences of a network": (central, draw(4, 16, 16) / 4, ("float16", "bfloat16")),
    "an acceleration": (acceleration, draw(4, 16, 16) / 4, ("float16", "bfloat16")),
    "many harmonics": (harmonics, draw(4, 128, 16) / 6, ("bfloat16",)),
    "one and a small step": (rolled_out, draw(1, 16, 16), ("bfloat16",)),
    "a filter": (filtered, jnp.float32(-4), ("float16", "bfloat16")),
    "coordinates by a convolution": (registered, TURN + 1e-4, ("float16", "bfloat16")),
}
CASES = [(name, dtype) for name, (_, _, dtypes) in LOSSES.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_first_audit_mends_it(name, dtype):
    """The gradient was off by more than a tenth, and is then within 1 % of that of float32."""
    loss, w, _ = LOSSES[name]
    half = gs.autocast(loss, dtype)
    scales = [2.0**exponent for exponent in range(15, -1, -3)]

    def gradient(fun, scale):
        return jax.jit(jax.grad(lambda w: scale * fun(w)))(w) / scale

    exact = jax.jit(jax.grad(loss))(w)
    scale = next(s for s in scales if np.isfinite(gradient(half, s)).all())
    assert error(gradient(half, scale), exact) > 0.1
    state = gs.TrainState.create(w, optax.sgd(0.0), loss_scale=gs.DynamicLossScale(scale))
    step = gs.train_step(half, audit_every=1000, mend=True, donate=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):  # an error that is not far past its bound is confirmed
            state, _ = step(state)
    assert len([w for w in told if "half precision made" in str(w.message)]) == 1
    mended = gs.autocast(loss, step.plan)
    assert error(gradient(mended, scale), exact) < 0.01


@pytest.mark.parametrize("name", ["many harmonics", "one and a small step"])
def test_what_is_within_the_bounds_is_left_alone(name):
    """In float16 these are off by less than an audit tells, and nothing goes back."""
    loss, w, _ = LOSSES[name]
    half = gs.autocast(loss)
    assert gs.mend(half, w, scale=2.0**9) is half

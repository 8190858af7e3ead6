"""What a rule of `autocast` is for: values that half precision would spoil, by kind.

Each kind has several examples, and each is compared with float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from jax.scipy.ndimage import map_coordinates

import gainstage as gs

SCALE = 2.0**10


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def distance(found, exact):
    """The norm of the difference of two pytrees over the norm of the second, in float64."""
    pairs = [
        [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)] for t in (found, exact)
    ]
    a, b = map(np.concatenate, pairs)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def gradients(fun, *args, dtype="float16"):
    """Those under autocast, with a loss scale that is divided again, and those in float32."""
    half = gs.autocast(fun, dtype)
    scaled = jax.jit(jax.grad(lambda *args: SCALE * half(*args)))
    return jax.tree.map(lambda g: g / SCALE, scaled(*args)), jax.jit(jax.grad(fun))(*args)


X = normal(0, 256, 16)
WEIGHTS = {"in": normal(1, 16, 64) / 4, "out": normal(2, 64, 16) / 8}
HIDDEN = {
    "scale": jnp.full(16, 0.3),
    "offset": jnp.full(16, 288.0),
    "table": normal(3, 16, 16) + 500,
}


def predicted(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


OFFSETS = {
    "a bias": lambda p, x: predicted(p, x) + p["offset"] - 288,
    "a scale and a bias": lambda p, x: predicted(p, x) * p["scale"] + p["offset"] - 288,
    "an embedding": lambda p, x: predicted(p, x) + p["table"][jnp.arange(256) % 16] - 500,
    "a maximum": lambda p, x: jnp.maximum(predicted(p, x) + p["offset"], p["offset"] - 1) - 288,
    "in a scan": lambda p, x: jax.lax.scan(
        lambda c, row: (c, predicted(p, row) + p["offset"] - 288), 0.0, x
    )[1],
    "in a function of jax.jit": lambda p, x: jax.jit(predicted)(p, x) + p["offset"] - 288,
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head", OFFSETS.values(), ids=OFFSETS)
def test_what_meets_a_prediction_on_its_way_out_does_not_round_it(head, dtype):
    """A parameter that is larger than the prediction is added in float32."""
    y = 0.3 * jnp.tanh(X[:, :1])

    def loss(params, x):
        return jnp.mean((head(params, x) - y) ** 2)

    found, exact = gradients(loss, WEIGHTS | HIDDEN, X, dtype=dtype)
    assert distance(found, exact) < (2e-3 if dtype == "float16" else 2e-2)


def test_logits_stay_in_half_precision():
    """Also with a bias: they are the largest array of a language model, and a softmax does not see
    an offset."""

    def loss(params, x):
        return -jax.nn.log_softmax(predicted(params, x) + params["offset"])[:, 0].mean()

    program = jax.make_jaxpr(gs.autocast(loss))(WEIGHTS | HIDDEN, X)
    every = [e for e in equations(program) if e.primitive.name in ("dot_general", "add")]
    assert [str(e.outvars[0].aval.dtype) for e in every] == ["float16"] * 3


def image(seed, size=64):
    kernel = jnp.exp(-(jnp.arange(-8, 9.0) ** 2) / 18)

    def smooth(row):
        return jnp.convolve(row, kernel / kernel.sum(), "same")

    return 3 * jax.vmap(smooth)(jax.vmap(smooth, 1, 1)(normal(seed, size, size)))


GRID = jnp.stack(jnp.meshgrid(jnp.arange(64.0), jnp.arange(64.0), indexing="ij"), -1)
IMAGE = image(4)
TURN = jnp.eye(2) + jnp.array([[0.01, -0.02], [0.02, -0.01]])
SHIFT = jnp.array([1.5, -2.0])


def at(places):
    return map_coordinates(IMAGE, [places[..., 0], places[..., 1]], 1, mode="nearest")


def nearest(places, values):
    """The value of the nearest place, by rounding, which the gradient passes by."""
    index = jnp.clip(jnp.round(places).astype(jnp.int32), 0, 63)
    return values[index[..., 0], index[..., 1]] * (1 + 0.1 * places.sum(-1))


def hashed(places, values):
    """A table at the corners of a cell, with weights of interpolation."""
    cell = jnp.floor(places / 3)
    part, cell = places / 3 - cell, cell.astype(jnp.uint32)
    found = 0.0
    for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
        own = (cell[..., 0] + corner[0]) * 7919 ^ (cell[..., 1] + corner[1]) * 104729
        weight = [part[..., i] if corner[i] else 1 - part[..., i] for i in (0, 1)]
        found += values.ravel()[own % 4096] * weight[0] * weight[1]
    return found


def hats(places, values):
    """Interpolation by products with hat functions, which round nothing."""
    x, y = (jax.nn.relu(1 - jnp.abs(places[..., i : i + 1] - jnp.arange(64))) for i in (0, 1))
    return jnp.einsum("...i,ij,...j->...", x, values, y)


COORDINATES = {
    "a sampling grid": lambda w: at(GRID @ w["turn"] + w["shift"]),
    "clipped": lambda w: at(jnp.clip(GRID @ w["turn"] + w["shift"], 0, 63)),
    "normalised": lambda w: at((GRID / 32 - 1) @ w["turn"] * 32 + 32 + w["shift"]),
    "inside of a picture": lambda w: at(
        jnp.where(GRID > 1, GRID @ w["turn"] + w["shift"], jnp.abs(GRID @ w["turn"]))
    ),
    "by an einsum": lambda w: at(jnp.einsum("...i,ij->...j", GRID, w["turn"]) + w["shift"]),
    "rounded": lambda w: nearest(GRID @ w["turn"] + w["shift"], IMAGE),
    "a hash grid": lambda w: hashed(GRID @ w["turn"] + w["shift"], IMAGE),
    "by hat functions": lambda w: hats(GRID[::5, ::5] @ w["turn"] + w["shift"], IMAGE),
    "two turns": lambda w: at(GRID @ (w["turn"] @ w["turn"].T) + w["shift"]),
}


@pytest.mark.parametrize("sampled", COORDINATES.values(), ids=COORDINATES)
def test_coordinates_are_exact(sampled):
    """A product of a few terms that is rounded to whole numbers, or becomes an index, is one of
    coordinates: near a solution the gradient is that of float32."""
    target = sampled({"turn": TURN, "shift": SHIFT})

    def loss(w):
        return jnp.mean((sampled(w) - target) ** 2)

    near = {"turn": TURN + 1e-4, "shift": SHIFT + 0.05}
    assert distance(*gradients(loss, near)) < 5e-3


def test_a_plan_of_coordinates_is_mended_near_a_solution():
    """One that was measured where the grid is still coarse enough rounds it later; with bounds of a
    fifth of the usual ones, a mending at these weights takes it back."""

    target = at(GRID @ TURN + SHIFT).T

    def loss(w, picture):
        sampled = map_coordinates(picture, list((GRID @ w["turn"] + w["shift"]).T), 1)
        return jnp.mean((sampled - target) ** 2)

    start = {"turn": jnp.eye(2), "shift": jnp.zeros(2)}
    plan = gs.precision.find_plan(loss, start, [(image(i),) for i in (4, 5, 6)], progress=False)
    near = {"turn": TURN + 1e-4, "shift": SHIFT + 0.05}
    planned = gs.autocast(loss, plan, loss_scale=SCALE)
    mended = gs.mend(planned, near, IMAGE, bounds=(0.002, 0.02, 0.1))
    exact = jax.grad(loss)(near, IMAGE)
    assert distance(jax.grad(planned)(near, IMAGE), exact) > 0.02
    assert distance(jax.grad(mended)(near, IMAGE), exact) < 5e-3


IDS = jax.random.randint(jax.random.key(5), (70000,), 0, 5)


def confusion(params, x):
    wanted, own = (jnp.tile(jax.nn.one_hot(i, 16), (300, 1)) for i in (IDS[:256], x.argmax(-1)))
    return wanted.T @ own


COUNTS = {
    "a histogram": lambda p, h: jax.nn.one_hot(IDS, 5).T @ jnp.ones((70000, 1)),
    "a sum by class": lambda p, h: (
        (IDS[:, None] == jnp.arange(5)).astype(jnp.float32).T @ jnp.full((70000, 1), 7.0)
    ),
    "positions": lambda p, h: jnp.tril(jnp.ones((5000, 5000))) @ (IDS[:5000] > 1).astype("float32"),
    "a confusion matrix": confusion,
    "by jnp.where": lambda p, h: (
        jnp.where(IDS[:, None] > jnp.arange(4), 1.0, 0.0).T @ jnp.ones((70000, 1))
    ),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_counts_are_exact(count):
    """A product of what comes from comparisons, integers or booleans has a float32 result."""

    def loss(params, x):
        h = predicted(params, x)
        return jnp.mean(h**2), count(params, h)

    (_, found), (_, exact) = (jax.jit(f)(WEIGHTS, X) for f in (gs.autocast(loss), loss))
    np.testing.assert_array_equal(found, exact)


def test_a_product_without_a_gradient_does_not_overflow():
    """A metric beside the loss has a float32 result, and what has a gradient stays in half."""

    def loss(params, x):
        h = predicted(params, x)
        return jnp.mean(h**2), jax.lax.stop_gradient(30 * x).T @ (30 * x)

    (_, found), (_, exact) = (jax.jit(f)(WEIGHTS, X) for f in (gs.autocast(loss), loss))
    assert float(jnp.abs(exact).max()) > 65504
    assert distance(found, exact) < 1e-3
    program = jax.make_jaxpr(gs.autocast(loss))(WEIGHTS, X)
    every = [e for e in equations(program) if e.primitive.name == "dot_general"]
    kinds = [str(e.outvars[0].aval.dtype) for e in every]
    assert kinds == ["float16", "float16", "float32"]


def symexp(x):
    return jnp.sign(x) * (jnp.exp(jnp.abs(x)) - 1)


BINS = symexp(jnp.linspace(-20.0, 20.0, 255))
SMALL = 1e-9 * normal(6, 16, 16)
CRITIC = {"in": normal(1, 16, 64) / 4, "out": normal(7, 64, 255)}


def value(params, x, bins):
    return jax.nn.softmax(predicted(params, x)) @ bins


CONSTANTS = {
    "bins": (lambda p, x: jnp.mean((1e-8 * value(p, x, BINS)) ** 2), CRITIC),
    "bins in the function": (
        lambda p, x: jnp.mean((1e-8 * value(p, x, symexp(jnp.linspace(-20.0, 20.0, 255)))) ** 2),
        CRITIC,
    ),
    "bins in jax.jit": (lambda p, x: jnp.mean((1e-8 * jax.jit(value)(p, x, BINS)) ** 2), CRITIC),
    "bins in a scan": (
        lambda p, x: jnp.mean(
            jax.lax.scan(lambda c, row: (c, (1e-8 * value(p, row, BINS)) ** 2), 0.0, x)[1]
        ),
        CRITIC,
    ),
    "small units": (lambda p, x: jnp.mean(((x @ SMALL) @ p * 1e9 - 1) ** 2), normal(8, 16, 16)),
    "small units by a factor": (
        lambda p, x: jnp.mean(((x * 1e-9) @ p * 1e9 - 1) ** 2),
        normal(8, 16, 16),
    ),
}


@pytest.mark.parametrize(("loss", "params"), CONSTANTS.values(), ids=CONSTANTS)
def test_a_product_asks_of_a_constant_what_an_operation_on_elements_asks(loss, params):
    """Half precision holds neither bins up to 5e8 nor a matrix near 1e-9: both stay in float32,
    and what is multiplied with their product too."""
    half = gs.autocast(loss)
    assert float(half(params, X)) == pytest.approx(float(loss(params, X)), rel=2e-3)
    found, exact = jax.grad(half)(params, X), jax.grad(loss)(params, X)
    assert distance(found, exact) < 5e-3


def local(part):
    return jax.grad(gs.transforms.locally_scaled(part, 2.0**15))


def weighted(grad, params, x, size):
    """Two losses, the second with the ratio of their gradients as its weight."""
    hidden = jnp.tanh(x @ params["in"])
    parts = (
        lambda last: size * jnp.mean((hidden @ last - x) ** 2),
        lambda last: -size * jnp.mean(jnp.tanh(hidden @ last)),
    )
    first, second = (jnp.linalg.norm(grad(part)(params["out"])) for part in parts)
    weight = jax.lax.stop_gradient(first / second)
    return (parts[0](params["out"]) + weight * parts[1](params["out"])) / size


def adapted(grad, params, x, size):
    """The inner step of MAML, through which the outer one differentiates."""
    inner = grad(lambda p: size * jnp.mean((predicted(p, x[:128]) - 1) ** 2))
    params = jax.tree.map(lambda p, g: p - 0.1 * g / size, params, inner(params))
    return jnp.mean((predicted(params, x[128:]) - 1) ** 2)


def penalised(grad, params, x, size):
    """A penalty on the gradient of each example."""
    slope = grad(lambda row: size * predicted(params, row).sum())
    return jnp.mean((jnp.linalg.norm(jax.vmap(slope)(x) / size, axis=-1) - 1) ** 2)


def forced(grad, params, x, size):
    """Forces as the derivative of an energy, with other parameters than those it is by."""
    energy = grad(lambda x: size * jnp.sum(jnp.tanh(predicted(params, x)) ** 2))
    return jnp.mean((energy(x) / size - jnp.sin(x)) ** 2)


def regularised(grad, params, x, size):
    """A parameter of the inner loss, which is learned through an inner step."""

    def inner(last, weight):
        error = jnp.mean((jnp.tanh(x @ params["in"]) @ last - x) ** 2)
        return size * (error + jnp.mean(weight * last**2))

    weight = jnp.exp(params["out"])
    last = params["out"] - 0.5 * grad(lambda last: inner(last, weight))(params["out"]) / size
    return jnp.mean((jnp.tanh(x @ params["in"]) @ last) ** 2)


def in_a_scan(grad, params, x, size):
    """Descent on the input of an energy."""
    energy = grad(lambda row: size * jnp.mean(jnp.tanh(predicted(params, row)[:, :4]) ** 2))
    turn = lambda row, _: (row - 0.3 * energy(row) / size, None)  # noqa: E731
    return jnp.mean(jax.lax.scan(turn, x, None, length=4)[0] ** 2 * (1 + x**2))


INNER = [weighted, adapted, penalised, forced, regularised, in_a_scan]


@pytest.mark.parametrize("fun", INNER, ids=lambda fun: fun.__name__)
def test_a_gradient_inside_of_a_loss_has_a_scale_of_its_own(fun):
    """With a local scale, small inner gradients and what is differentiated through them are those
    of `jax.grad` in float32."""
    half = gs.autocast(lambda params, x, size: fun(local, params, x, size))
    scaled = jax.jit(jax.grad(lambda *args: SCALE * half(*args)))
    found = jax.tree.map(lambda g: g / SCALE, scaled(WEIGHTS, X, jnp.float32(1e-6)))
    exact = jax.jit(jax.grad(lambda p: fun(jax.grad, p, X, jnp.float32(1))))(WEIGHTS)
    assert distance(found, exact) < 5e-3


def test_constants_of_a_backward_pass_are_arrays_of_jax():
    """What the forward pass of a `jax.custom_vjp` keeps may be indexed by a traced number, whether
    the gradient is compiled or not."""
    table = np.linspace(0.5, 1.5, 8).astype(np.float32)

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    def backward(kept, g):
        return (jax.lax.fori_loop(0, 8, lambda i, total: total + g * kept[i], jnp.zeros_like(g)),)

    doubled.defvjp(lambda x: (2 * x, jnp.asarray(table)), backward)

    def loss(w, x):
        return jnp.mean(doubled(x @ w) ** 2)

    w, x = normal(9, 16, 16), X
    exact = jax.grad(loss)(w, x)
    for found in (jax.grad(gs.autocast(loss))(w, x), jax.jit(jax.grad(gs.autocast(loss)))(w, x)):
        assert distance(found, exact) < 2e-3

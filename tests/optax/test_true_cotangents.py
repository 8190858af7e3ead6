"""Backward passes that users have written get the cotangents of the loss, not of its scale."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.ode import odeint
from jax.sharding import Mesh, PartitionSpec

import gainstage as gs
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable
from gainstage.transforms import current_scale, scale_loss

SCALES = 1.0, 2.0**8, 2.0**15
W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (64, 16))


def passing(backward):
    """The identity, with a backward pass."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return identity


BACKWARD = {
    "a clip": lambda g: jnp.clip(g, -1e-4, 1e-4),
    "a sign": lambda g: 1e-4 * jnp.sign(g),
    "a norm": lambda g: 1e-2 * g / (1e-3 + jnp.linalg.norm(g)),
    "a threshold": lambda g: jnp.where(jnp.abs(g) > 1e-3, g, 0.0),
}


def loss_of(layer):
    """A loss whose cotangents are nowhere near 0, where rounding would change a sign."""
    return lambda w, x: jnp.mean((layer(w, x) - 1.5) ** 2)


def layer_of(identity):
    return lambda w, x: identity(jnp.tanh(x @ w))


def structures(identity):
    """A network that uses a function in each structure that a program may have."""
    layer = layer_of(identity)
    again = lambda w, x, body: jax.lax.scan(lambda c, _: (body(w, c), None), x, None, 3)[0]  # noqa: E731
    return {
        "plain": layer,
        "in a scan": lambda w, x: again(w, x, layer),
        "in remat": lambda w, x: jax.checkpoint(layer)(w, jax.checkpoint(layer)(w, x)),
        "in a scan of remat": lambda w, x: again(w, x, jax.checkpoint(layer)),
        "in vmap": lambda w, x: jax.vmap(lambda row: layer(w, row[None])[0])(x),
        "compiled inside": lambda w, x: jax.jit(layer)(w, x),
        "in a branch": lambda w, x: jax.lax.cond(x[0, 0] > -9, layer, lambda w, x: x, w, x),
    }


def distance(found, exact):
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


def of_train_step(half, scale):
    state = gs.TrainState.create(W, optax.sgd(1.0), loss_scale=gs.FixedLossScale(scale))
    return W - gs.train_step(half, donate=False)(state, X)[0].params


def of_value_and_grad(half, scale):
    state = gs.with_loss_scale(optax.sgd(1.0), gs.FixedLossScale(scale)).init(W)
    return jax.jit(lambda w, s, x: gs.value_and_grad(half, s)(w, x)[1])(W, state, X)


def of_state(half, scale):
    state = gs.TrainState.create(W, optax.sgd(1.0), loss_scale=gs.FixedLossScale(scale))
    return jax.jit(lambda state, x: state.value_and_grad(half)(x)[2])(state, X)


def of_eager(half, scale):
    state = gs.with_loss_scale(optax.sgd(1.0), gs.FixedLossScale(scale)).init(W)
    return gs.value_and_grad(half, state)(W, X)[1]


def of_scale_loss(half, scale):
    state = gs.with_loss_scale(optax.sgd(1.0), gs.FixedLossScale(scale)).init(W)

    @jax.jit
    def grads(w, state, x):
        return jax.grad(scale_loss(lambda w: half(w, x), state))(w) / current_scale(state)

    return grads(W, state, X)


def of_own_scale(half, scale):
    fun = half.__wrapped__
    return jax.jit(jax.grad(gs.autocast(fun, loss_scale=scale)))(W, X)


def of_minimize(half, scale):
    w = Variable(W)
    LossScaleOptimizer(SGD(1.0), initial_scale=scale).minimize(lambda: half(w.value(), X), [w])
    return W - w.value()


def of_optimizer(half, scale):
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=scale)
    optimizer.build([Variable(W)])
    return jax.grad(optimizer.scale_loss(lambda w: half(w, X)))(W) / scale


WAYS = [of_train_step, of_value_and_grad, of_state, of_eager, of_scale_loss, of_own_scale,
        of_minimize, of_optimizer]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("of_"))
def test_each_way_to_scale_a_loss_gives_true_cotangents(way):
    """A clip inside of a backward pass clips what it clips in float32, at each scale."""
    loss = loss_of(layer_of(passing(BACKWARD["a clip"])))
    half, exact = gs.autocast(loss), jax.jit(jax.grad(loss))(W, X)
    assert all(distance(way(half, scale), exact) < 5e-3 for scale in SCALES)


@pytest.mark.parametrize("backward", BACKWARD.values(), ids=BACKWARD)
def test_a_backward_pass_may_be_any_function(backward):
    """It need not be linear: a sign, a norm and a threshold have the gradient of float32."""
    loss = loss_of(layer_of(passing(backward)))
    half, exact = gs.autocast(loss), jax.jit(jax.grad(loss))(W, X)
    assert all(distance(of_value_and_grad(half, scale), exact) < 5e-3 for scale in SCALES)


@pytest.mark.parametrize("name", structures(jnp.tanh))
def test_true_cotangents_reach_each_structure_of_a_program(name):
    """In a loop, a branch, `jax.checkpoint`, `jax.vmap` and what is compiled inside."""
    loss = loss_of(structures(passing(BACKWARD["a clip"]))[name])
    half, exact = gs.autocast(loss), jax.jit(jax.grad(loss))(W, X)
    for way in (of_train_step, of_eager, of_own_scale):
        assert distance(way(half, 2.0**15), exact) < 5e-3


GRID = list(itertools.product(BACKWARD, structures(jnp.tanh), WAYS))


@pytest.mark.thorough
@pytest.mark.parametrize(("backward", "name", "way"), GRID[::3])
def test_all_of_these_together(backward, name, way):
    """A backward pass, a structure and a way at a time."""
    loss = loss_of(structures(passing(BACKWARD[backward]))[name])
    half, exact = gs.autocast(loss), jax.jit(jax.grad(loss))(W, X)
    assert distance(way(half, 2.0**8), exact) < 5e-3


@pytest.mark.parametrize("is_inside", [False, True])
def test_true_cotangents_inside_shard_map(is_inside):
    """On eight devices, with autocast inside of `jax.shard_map` and around it."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    loss = loss_of(layer_of(passing(BACKWARD["a clip"])))

    def sharded(fun):
        specs = PartitionSpec(), PartitionSpec("data")
        mean = lambda w, x: jax.lax.pmean(fun(w, x), "data")  # noqa: E731
        return jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    exact = jax.jit(jax.grad(sharded(loss)))(W, X)
    half = sharded(gs.autocast(loss)) if is_inside else gs.autocast(sharded(loss))
    for way in (of_train_step, of_value_and_grad):
        assert all(distance(way(half, scale), exact) < 5e-3 for scale in SCALES)


def test_true_cotangents_in_a_fit_of_keras():
    """A layer with a backward pass of its own trains in `fit` as it does in float32."""
    keras = pytest.importorskip("keras")
    from gainstage.interop.keras import LossScaleOptimizer, autocast

    class Clip(keras.layers.Layer):
        def call(self, x):
            return passing(BACKWARD["a clip"])(x)

    def steps(scale=None):
        keras.utils.set_random_seed(0)
        x = np.asarray(X)
        dense = functools.partial(keras.layers.Dense, use_bias=False)
        layers = [keras.Input((16,)), dense(32, "tanh"), Clip(), dense(16)]
        model = keras.Sequential(layers)
        before = [np.array(v.value) for v in model.weights]
        optimizer = keras.optimizers.SGD(1.0)
        if scale:
            model = autocast(model)
            optimizer = LossScaleOptimizer(optimizer, loss_scale=gs.FixedLossScale(scale))
        model.compile(optimizer, "mse")
        model.fit(x, x[:, ::-1].copy(), batch_size=64, verbose=0, shuffle=False)
        after = [np.array(v.value) for v in model.weights]
        return np.concatenate([(a - b).ravel() for a, b in zip(after, before, strict=True)])

    exact = steps()
    assert all(distance(steps(scale), exact) < 5e-3 for scale in SCALES)


NO_PRODUCT = pytest.mark.filterwarnings("ignore:autocast has computed no product:UserWarning")


@NO_PRODUCT
def test_a_tolerance_of_a_backward_pass_is_that_of_float32():
    """A fixed point whose backward pass iterates until its steps are small comes to an end, and an
    ordinary differential equation with tolerances has its gradient."""

    def solve(fun, z):
        far = lambda c: jnp.linalg.norm(c[0] - c[1]) > 1e-5  # noqa: E731
        return jax.lax.while_loop(far, lambda c: (c[1], fun(c[1])), (z, fun(z)))[1]

    def step(w, z, x):
        return jnp.tanh(0.3 * z @ w + x)

    @jax.custom_vjp
    def fixed(w, x):
        return solve(lambda z: step(w, z, x), jnp.zeros_like(x))

    def backward(saved, g):
        w, x, z = saved
        back = jax.vjp(lambda z: step(w, z, x), z)[1]
        u = solve(lambda u: back(u)[0] + g, jnp.zeros_like(z))
        return jax.vjp(lambda w, x: step(w, z, x), w, x)[1](u)

    fixed.defvjp(lambda w, x: (z := fixed(w, x), (w, x, z)), backward)
    times = jnp.linspace(0.0, 1.0, 3)
    flow = lambda w, x: odeint(lambda z, t, w: jnp.tanh(z @ w), x, times, w)[-1]  # noqa: E731
    for layer in (fixed, flow):
        loss = loss_of(layer)
        half, exact = gs.autocast(loss), jax.jit(jax.grad(loss))(W, X)
        for way in (of_train_step, of_own_scale):
            assert distance(way(half, 2.0**15), exact) < 1e-3


@NO_PRODUCT
def test_a_backward_pass_in_float16_keeps_the_scale():
    """It needs the scale: without it, what is below 6e-8 would be 0."""

    @jax.custom_vjp
    def product(w, x):
        return x @ w

    def backward(saved, g):
        w, x = saved
        g = g.astype(jnp.float16)
        to_w = x.astype(jnp.float16).T @ g
        return to_w.astype(jnp.float32), (g @ w.astype(jnp.float16).T).astype(jnp.float32)

    product.defvjp(lambda w, x: (x @ w, (w, x)), backward)
    loss = lambda w, x: 1e-6 * jnp.mean((product(w, x) - 1.5) ** 2)  # noqa: E731
    exact = jax.jit(jax.grad(lambda w, x: 1e-6 * jnp.mean((x @ w - 1.5) ** 2)))(W, X)
    assert distance(of_value_and_grad(gs.autocast(loss), 1.0), exact) > 0.5
    assert distance(of_value_and_grad(gs.autocast(loss), 2.0**20), exact) < 5e-3


def test_a_gradient_inside_of_a_loss_has_no_scale_to_be_divided():
    """Autocast under an inner `jax.grad` gives its backward passes the cotangents that they have
    there, whatever the scale of the loss around."""
    clip = passing(BACKWARD["a clip"])
    inner = lambda x, w: jnp.mean((clip(jnp.tanh(x @ w)) - 1.5) ** 2)  # noqa: E731

    def around(part):
        return lambda w, x: jnp.mean((x - 1e3 * jax.grad(part)(x, w)) ** 2)

    exact = jax.jit(jax.grad(around(inner)))(W, X)
    for scale in SCALES[:2]:
        assert distance(of_value_and_grad(around(gs.autocast(inner)), scale), exact) < 1e-2


def test_a_local_scale_around_a_backward_pass_is_spared_too():
    """The cotangents of a part with a scale of its own are true in the backward pass inside."""
    layer = gs.transforms.locally_scaled(layer_of(passing(BACKWARD["a clip"])), 2.0**7)
    half = gs.autocast(loss_of(layer))
    exact = jax.jit(jax.grad(loss_of(layer_of(passing(BACKWARD["a clip"])))))(W, X)
    for way in (of_train_step, of_own_scale):
        assert distance(way(half, 2.0**8), exact) < 5e-3


def test_a_gradient_through_a_step_is_that_of_float32():
    """What is differentiated through a scaled gradient goes through the backward pass too."""
    cube = passing(lambda g: g + 100 * g**3)
    loss = loss_of(layer_of(cube))

    def through(grad):
        return jax.jit(jax.grad(lambda w, x: loss(w - 0.5 * grad(w, x), x), (0, 1)))(W, X)

    state = gs.with_loss_scale(optax.sgd(1.0), gs.FixedLossScale(2.0**10)).init(W)
    found = through(lambda w, x: gs.value_and_grad(gs.autocast(loss), state)(w, x)[1])
    for a, b in zip(found, through(jax.grad(loss)), strict=True):
        assert distance(a, b) < 1e-2


def test_a_loss_that_is_kept_in_float32_has_no_scale_to_be_divided():
    """Inside of `keep_float32` a loss with a scale of its own is scaled by nothing."""
    loss = loss_of(layer_of(passing(BACKWARD["a clip"])))
    with gs.keep_float32():
        found = jax.grad(gs.autocast(loss, loss_scale=2.0**15))(W, X)
    assert distance(found, jax.grad(loss)(W, X)) < 1e-5


def test_a_compiled_function_inside_knows_the_scale_of_each_trace():
    """A function that was compiled before, for another step, has true cotangents in this one."""
    loss = loss_of(layer_of(passing(BACKWARD["a clip"])))
    half, exact = jax.jit(gs.autocast(loss)), jax.jit(jax.grad(loss))(W, X)
    half.__wrapped__ = loss
    for scale in SCALES:
        for way in (of_train_step, of_value_and_grad):
            assert distance(way(half, scale), exact) < 5e-3


def test_a_value_that_a_backward_pass_closes_over_is_not_differentiated_in_silence():
    """JAX refuses the derivative of what a `jax.custom_vjp` closes over, and so do we."""

    def loss(w, x):
        @jax.custom_vjp
        def scaled(x):
            return x * w.sum()

        scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g,))
        return jnp.mean(scaled(x) ** 2)

    with pytest.raises((TypeError, Exception), match="clos"):
        of_value_and_grad(gs.autocast(loss), 2.0)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BACKWARD)
def test_a_model_that_was_compiled_before_gets_true_cotangents(name, half):
    """A compiled model under `autocast` inside of a loss, which was evaluated first: its trace of
    then knows no loss scale. Something else in the loss is in float16."""
    model = jax.jit(gs.autocast(layer_of(passing(BACKWARD[name])), half))

    def loss_fn(w, x):
        small = (w.astype(jnp.float16) * jnp.float16(0)).astype(jnp.float32).sum()
        return jnp.mean((model(w, x) - 1.5) ** 2) + small

    model(W, X)
    state = gs.TrainState.create(W, optax.sgd(1.0))
    new, _ = gs.train_step(loss_fn, donate=False)(state, X)
    assert float(new.loss_scale) == 2.0**15
    true = jax.grad(loss_of(layer_of(passing(BACKWARD[name]))))(W, X)
    np.testing.assert_allclose(W - new.params, true, rtol=0.05, atol=0.02 * np.abs(true).max())

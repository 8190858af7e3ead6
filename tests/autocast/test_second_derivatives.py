"""Second derivatives of functions whose first ones are written by hand in this library."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs

X, SCALE = jax.random.normal(jax.random.key(0), (128, 32)), 16.0
KEYS = jax.random.split(jax.random.key(1), 3)
W = {
    "in": jax.random.normal(KEYS[0], (32, 64)) / 6,
    "factor": 1 + jax.random.normal(KEYS[1], (64,)) / 10,
    "out": jax.random.normal(KEYS[2], (64, 16)) / 8,
}


def distance(found, exact):
    """The norm of the difference of two pytrees over the norm of the second, in float64."""
    a, b = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
        for tree in (found, exact)
    )
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def normalised(h, w):
    """A normalisation with its factor, which is broadcast."""
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1)[:, None] + 1e-5) * w["factor"]


FUNCTIONS = {
    "relu": lambda h, w: jax.nn.relu(h),
    "gelu": lambda h, w: jax.nn.gelu(h),
    "softplus": lambda h, w: jax.nn.softplus(h),
    "selu": lambda h, w: jax.nn.selu(h),
    "hard swish": lambda h, w: jax.nn.hard_swish(h),
    "a square": lambda h, w: 0.3 * h**2,
    "a cube": lambda h, w: 0.1 * h**3,
    "tanh of a power": lambda h, w: jnp.tanh(h + 0.044 * h**3),
    "a sigmoid of a power": lambda h, w: jax.nn.sigmoid(h**2 * w["factor"]),
    "a broadcast factor": lambda h, w: h * w["factor"],
    "a normalisation": normalised,
    "a kernel": lambda h, w: gs.half_only(jnp.tanh)(h),
}


def loss_of(function):
    return lambda w, x: jnp.mean((function(x @ w["in"], w) @ w["out"]) ** 2)


def penalised(loss, scale=1.0):
    """The derivative of the square of a gradient, for the same argument and for another one."""

    def square(w, x):
        grads = jax.grad(lambda w: scale * loss(w, x))(w)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    found = jax.jit(jax.grad(square, (0, 1)))
    return lambda w, x: jax.tree.map(lambda g: g / scale**2, found(w, x))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_second_derivatives_are_those_of_float32(function):
    """What autocast computes by a derivative of its own has the second derivatives of float32, in
    reverse over reverse and in forward over reverse mode."""
    loss = loss_of(function)
    half = gs.autocast(loss)
    assert distance(penalised(half, SCALE)(W, X), penalised(loss)(W, X)) < 0.01

    def curved(fun):
        return jax.jit(lambda w, x: jax.jvp(jax.grad(fun), (w, x), (w, x))[1])(W, X)

    assert distance(curved(half), curved(loss)) < 0.01


def test_a_gradient_of_a_state_is_differentiated_again():
    """`gs.value_and_grad` inside of a loss has the second derivatives of `jax.grad`."""
    loss, tx = loss_of(FUNCTIONS["gelu"]), gs.with_loss_scale(optax.sgd(0.1))
    state = tx.init(W)

    def square(grad):
        grads = lambda w, x: jax.tree.leaves(grad(w, x))  # noqa: E731
        return jax.jit(jax.grad(lambda w, x: sum(jnp.sum(g**2) for g in grads(w, x)), (0, 1)))

    scaled = square(lambda w, x: gs.value_and_grad(loss, state)(w, x)[1])
    assert distance(scaled(W, X), square(jax.grad(loss))(W, X)) < 1e-5


def test_second_derivatives_that_are_not_there_are_refused():
    """A compiled loss with a scale of its own says that it has none; it has the right ones where it
    is not compiled."""
    loss = loss_of(FUNCTIONS["gelu"])
    own = gs.autocast(loss, loss_scale=SCALE)
    with pytest.raises(ValueError, match=r"[Rr]everse-mode|while_loop"):
        penalised(own)(W, X)
    square = lambda fun: lambda w: optax.tree.norm(jax.grad(fun)(w, X), squared=True)  # noqa: E731
    found, exact = jax.grad(square(own))(W), jax.grad(square(loss))(W)
    assert distance(found, exact) < 0.01


def test_marks_are_differentiated_like_the_values():
    """What the library marks in a program for `lint` has the derivatives of the plain value."""
    local = functools.partial(gs.transforms.locally_scaled, scale=2.0)
    twice = lambda fun: jax.jit(jax.grad(jax.grad(fun)))(jnp.float32(0.5))  # noqa: E731
    assert float(twice(local(jnp.sin))) == pytest.approx(-np.sin(0.5), rel=1e-6)

"""The X-ray says which factor of `locally_scaled` fits, and the factor that it names is right."""

import re

import jax
import jax.numpy as jnp
import pytest

import gainstage as gs
from gainstage.transforms import locally_scaled

KEYS = jax.random.split(jax.random.key(0), 3)
W = {
    "up": jax.random.normal(KEYS[0], (32, 64)) / 6,
    "down": jax.random.normal(KEYS[1], (64, 32)) / 8,
}
X = jax.random.normal(KEYS[2], (64, 32))


def inner_loss(w, x, size):
    return size * jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2)


def adapted(grad, turns=2):
    """A loss after steps by gradients inside of it, as in MAML."""

    def loss_fn(w, x, size):
        def turn(w, _):
            slope = grad(inner_loss)(w, x, size)
            return jax.tree.map(lambda w, g: w - g / size, w, slope), None

        return inner_loss(jax.lax.scan(turn, w, None, turns)[0], x, 1.0)

    return loss_fn


def penalised(grad):
    """A loss with a penalty on its slope by the input."""

    def loss_fn(w, x, size):
        slope = grad(lambda x: inner_loss(w, x, size))(x) / size
        return inner_loss(w, x, 1.0) + jnp.mean((64 * slope) ** 2)

    return loss_fn


def weighted(grad):
    """A loss of which each example has a gradient of its own, in a map over them."""

    def loss_fn(w, x, size):
        def one(row):
            slope = grad(inner_loss)(w, row[None], size)["up"] / size
            return inner_loss(w, row[None], 1.0) + jnp.sum(slope**2)

        return jax.vmap(one)(x).mean()

    return loss_fn


def under(factor):
    return lambda part: jax.grad(locally_scaled(part, factor))


def look(loss_fn, size=1.0, scale=1.0):
    half = gs.autocast(loss_fn)
    return gs.xray(half, W, X, jnp.float32(size), scale=scale, compiled=False, prescribe=False)


def error(loss_fn, exact, size=1.0, scale=2.0**8):
    """How far gradients in float16 are off at a loss scale, relative to those of float32."""
    half = gs.autocast(loss_fn)
    found = jax.grad(lambda w: scale * half(w, X, jnp.float32(size)))(W)
    found = jax.tree.map(lambda g: g / scale, found)
    norm = lambda tree: jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))  # noqa: E731
    return float(norm(jax.tree.map(jnp.subtract, found, exact)) / norm(exact))


def advised(x):
    """The factor in the line of code that the X-ray prints."""
    (factor,) = x.factors
    (power,) = re.findall(r"locally_scaled\(part, 2\.0\*\*(-?\d+)\)", str(x))
    assert factor.fits == 2.0 ** int(power)
    return factor.fits


LOSSES = pytest.mark.parametrize("loss_of", [adapted, penalised, weighted])


@LOSSES
def test_a_factor_that_is_too_large_is_replaced(loss_of):
    """The advised factor makes a step right that overflowed under a larger one."""
    x = look(loss_of(under(2.0**30)))
    assert not x.finite
    assert x.factors[0].now == 2.0**30
    assert "the factor 2^30 of the gradient inside of the loss" in str(x)
    assert "is too large" in str(x)
    exact = jax.grad(loss_of(jax.grad))(W, X, 1.0)
    assert error(loss_of(under(advised(x))), exact) < 0.01


@LOSSES
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_gradient_inside_that_is_too_small_gets_a_factor(loss_of, factor):
    """The advised factor makes a step right whose inner gradient float16 has lost."""
    size, before = 1e-7, loss_of(jax.grad if factor == 1 else under(factor))
    x = look(before, size)
    assert x.factors[0].now == factor
    assert "too small" in str(x)
    exact, after = jax.grad(loss_of(jax.grad))(W, X, size), loss_of(under(advised(x)))
    assert not error(before, exact, size) < 0.05
    assert error(after, exact, size) < 0.01
    assert look(after, size, 2.0**8).factors == []


def test_a_gradient_inside_that_is_too_large_gets_a_factor_below_1():
    """The advised factor of an inner loss that overflows float16 is a negative power of two."""
    x = look(adapted(jax.grad), 1e9)
    assert advised(x) < 1
    exact = jax.grad(adapted(jax.grad))(W, X, 1e9)
    assert error(adapted(under(advised(x))), exact, 1e9) < 0.01


def test_the_line_of_the_gradient_is_named():
    """The message names the line that calls the gradient."""
    x = look(adapted(under(2.0**30)))
    line = f"test_factors.py:{adapted.__code__.co_firstlineno + 5}"
    assert x.factors[0].line == line
    assert f"inside of the loss at {line} is too large" in str(x)


def test_two_gradients_get_a_factor_each():
    """Gradients of very different sizes inside of one loss have different factors that fit."""

    def loss_with(first, second):
        def loss_fn(w, x, size):
            slopes = first(inner_loss)(w, x, size), second(inner_loss)(w, -x, size**2)
            each = zip(slopes, (size, size**2), strict=True)
            return inner_loss(w, x, 1.0) + sum(jnp.sum((g["up"] / n) ** 2) for g, n in each)

        return loss_fn

    x, size = look(loss_with(jax.grad, jax.grad), 1e-7), 1e-7
    small, smaller = (factor.fits for factor in x.factors)
    assert 2.0**20 < smaller / small < 2.0**26  # as the sizes, 2**23
    exact = jax.grad(loss_with(jax.grad, jax.grad))(W, X, 1.0)
    assert error(loss_with(under(small), under(smaller)), exact, size) < 0.01


def test_a_factor_may_be_any_number():
    """A factor that is no power of two, or an array, is found with its size."""
    for factor in (3e9, jnp.float32(3e9)):
        x = look(adapted(under(factor)))
        assert x.factors[0].now == pytest.approx(3e9, rel=1e-5)
        exact = jax.grad(adapted(jax.grad))(W, X, 1.0)
        assert error(adapted(under(advised(x))), exact) < 0.01


def test_each_example_may_have_a_factor():
    """Of factors in a map over examples, the largest is shown."""

    def loss_fn(w, x, size):
        def one(row, factor):
            slope = under(factor)(inner_loss)(w, row[None], size)["up"]
            return inner_loss(w, row[None], 1.0) + jnp.sum(slope**2)

        return jax.vmap(one)(x, 2.0 ** jnp.linspace(0, 30, len(x))).mean()

    x = look(loss_fn)
    assert x.factors[0].now == pytest.approx(2.0**30, rel=1e-5)
    assert advised(x) < 2.0**20


@LOSSES
def test_a_factor_that_fits_is_left(loss_of):
    """There is no advice on a step that is right, with a factor or without."""
    for grad in (jax.grad, under(2.0**4)):
        x = look(loss_of(grad), 1.0, 2.0**4)
        assert (x.finite, x.factors) == (True, [])


@pytest.mark.parametrize("factor", [2.0**40, 2.0**-40])
def test_a_part_of_a_network_fits_beside_the_others(factor):
    """The advised factor of a part lets one loss scale suit the part and the rest."""

    def network(factor):
        part = locally_scaled(lambda w, h: jnp.tanh(h @ w), factor)

        def loss_fn(w, x, size):
            h = part(w["up"], jnp.tanh(x @ w["up"]) @ w["down"])
            return size * jnp.mean((h @ w["down"]) ** 2)

        return loss_fn

    x = look(network(factor), 1.0, 2.0**10)
    assert x.factors[0].now == factor
    fits = network(advised(x))
    assert look(fits, 1.0, 2.0**10).factors == []
    assert error(fits, jax.grad(network(1.0))(W, X, 1.0), 1.0, 2.0**10) < 0.01


def test_a_loss_scale_that_is_too_high_leaves_a_factor_as_it_is():
    """A part that overflows at a scale that will be halved needs no other factor."""

    def loss_fn(w, x, size):
        h = locally_scaled(lambda w, h: jnp.tanh(h @ w), 2.0**3)(w["up"], x)
        return size * jnp.mean((h @ w["down"]) ** 2)

    x = look(loss_fn, 1.0, 2.0**30)
    assert (x.finite, x.factors) == (False, [])


def test_a_loss_that_is_computed_again_has_no_gradient_inside():
    """The backward pass of `jax.checkpoint`, and of a loss that scales itself, is none."""
    loss_fn = jax.checkpoint(inner_loss)
    for half in (gs.autocast(loss_fn), gs.autocast(loss_fn, loss_scale=2.0**30)):
        x = gs.xray(half, W, X, jnp.float32(2.0**30), scale=2.0**10, compiled=False)
        assert (x.finite, x.factors) == (False, [])

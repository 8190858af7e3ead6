"""Losses that nobody wrote for half precision: their gradients are those of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast.test_autocast import error
from jax import lax

import gainstage as gs


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, HIT = draw(0, 512, 16), jnp.arange(512) % 3 == 0
MANY = jax.random.randint(jax.random.key(9), (100_000,), 0, 2)


def unit(v):
    return v / jnp.sqrt(jnp.einsum("bi,bi->b", v, v))[:, None]


def entropy(p, y):
    return -jnp.mean(y * jnp.log(p + 1e-8) + (1 - y) * jnp.log(1 - p + 1e-8))


def scanned(w, x):
    def turn(h, row):
        p = jax.nn.sigmoid(row @ w)
        return h + jnp.log(1 - p + 1e-8).sum(), p

    return lax.scan(turn, 0.0, x[:, None])[0] / len(x)


# What is computed, at which parameters: each is infinite, NaN or wrong if all of it is float16.
LOSSES = {
    "a norm by einsum": (lambda w: jnp.mean((unit(X @ w) - unit(X)) ** 2), 100 * draw(1, 16, 16)),
    "a norm by vdot": (lambda w: jnp.vdot(X @ w, X @ w) / X.size, 10 * draw(1, 16, 16)),
    "a product with itself": (
        lambda w: jnp.mean(jnp.sqrt(jnp.einsum("bi,ci->bc", h := X @ w, h) ** 2 + 1.0)),
        20 * draw(1, 16, 16),
    ),
    "counts": (
        lambda w: jnp.mean((X @ w) ** 2) / (jax.nn.one_hot(MANY, 2).T @ jnp.ones(100_000)).sum(),
        draw(1, 16, 4),
    ),
    "log of sigmoid": (lambda w: entropy(jax.nn.sigmoid(X @ w), HIT), 0.8 * draw(2, 16)),
    "log of sigmoid, columns": (
        lambda w: entropy(jax.nn.sigmoid(X @ w), HIT[:, None]),
        0.8 * draw(2, 16, 4),
    ),
    "log of tanh": (
        lambda w: -jnp.mean(jnp.log(1 - jnp.tanh(X @ w) ** 2 + 1e-4)),
        draw(2, 16, 4),
    ),
    "log of sigmoid in a scan": (lambda w: scanned(w, X), 0.8 * draw(2, 16, 4)),
    "log of sigmoid in a branch": (
        lambda w: lax.cond(w[0, 0] > 9, jnp.sum, lambda p: jnp.log(1 - p + 1e-8).sum(),
                           jax.nn.sigmoid(X @ w)) / 512,
        0.8 * draw(2, 16, 4),
    ),
    "a root of a product": (
        lambda w: jnp.mean(jnp.sqrt((9 + jnp.tanh(X @ w)) * 1e-9)) * 1e4, draw(3, 16, 4) / 4
    ),
    "a denominator": (lambda w: jnp.mean(1 / (1e-5 + jax.nn.sigmoid(X @ w))), 4 * draw(3, 16, 4)),
    "gelu of a large number": (lambda w: jnp.mean(jax.nn.gelu(X @ w)), 50 * draw(4, 16, 4)),
    "a cube": (lambda w: jnp.mean((X @ w) ** 3) / 1e4, 15 * draw(4, 16, 4)),
    "a negative power": (lambda w: jnp.mean((0.003 + (X @ w) / 1e4) ** -2) / 1e6, draw(4, 16, 4)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_float32(name, dtype):
    """Within 2 % in float16, and within 10 % in bfloat16, which rounds eight times as coarsely."""
    loss, w = LOSSES[name]
    cast = gs.autocast(loss, dtype)
    scaled = jax.jit(lambda w, scale: jax.grad(lambda w: cast(w) * scale)(w) / scale)
    tried = (scaled(w, 2.0**exponent) for exponent in range(15, -1, -3))  # as loss scaling does
    found = next(grads for grads in tried if bool(jnp.isfinite(grads).all()))
    assert error(found, jax.jit(jax.grad(loss))(w)) < {"float16": 0.02, "bfloat16": 0.1}[dtype]
    np.testing.assert_allclose(cast(w), loss(w), rtol={"float16": 0.01, "bfloat16": 0.05}[dtype])


def test_a_small_factor_of_a_layer_is_not_rounded():
    """A layer scale of 1e-7 would be a subnormal number in float16."""

    def loss(p):
        h = X @ p["w"]
        return jnp.mean((h + p["g"] * (jnp.tanh(h) @ p["v"])) ** 2)

    p = {"w": draw(1, 16, 16), "g": jnp.full(16, 2.7e-7), "v": draw(2, 16, 16)}
    cast = gs.autocast(loss)
    found = jax.grad(lambda p: cast(p) * 2.0**12)(p)
    expected = jax.grad(loss)(p)
    for name in p:
        assert error(found[name] / 2.0**12, expected[name]) < 0.01


def test_what_a_loss_closes_over_is_no_parameter():
    """A mask or a target that is traced is not rounded, unless it is differentiated."""
    w, mask, y = draw(1, 16, 8), jnp.where(jnp.arange(8) < 4, 0.0, -1e9), 1000 + draw(2, 512, 8)

    @jax.jit
    def masked(w, mask):
        return jax.grad(gs.autocast(lambda w: jnp.mean(jax.nn.softmax(X @ w + mask) ** 2)))(w)

    assert bool(jnp.isfinite(masked(w, mask)).all())

    def gradient(w, y, transform):
        return jax.grad(transform(lambda w: jnp.mean((X @ w - y) ** 2)))(w)

    found = jax.jit(lambda w, y: gradient(w, y, gs.autocast))(w, y)
    assert error(found, gradient(w, y, lambda f: f)) < 2e-3
    kinds = []

    def looks(b):
        loss = gs.autocast(lambda w: jnp.tanh(X @ w + b).sum())
        kinds.append([str(e.outvars[0].aval.dtype) for e in jax.make_jaxpr(loss)(w).eqns
                      if e.primitive.name == "tanh"])  # fmt: skip
        return loss(w)

    jax.grad(looks)(jnp.ones(8))
    jax.jit(looks)(jnp.ones(8))
    assert kinds == [["float16"], ["float32"]]


def test_a_product_in_vmap_is_a_matrix_product():
    """Per-example functions have half-precision results, as a batch would have."""
    w = draw(1, 16, 16)
    cast = jax.vmap(gs.autocast(lambda w, x: jnp.sin(x @ w)), (None, 0))
    (product,) = [e for e in jax.make_jaxpr(cast)(w, X).eqns if e.primitive.name == "dot_general"]
    assert str(product.outvars[0].aval.dtype) == "float16"


def test_scopes_with_a_longer_name_are_not_kept():
    """Only `keep_float32` keeps, not a scope of the user that has it in its name."""

    def fun(w):
        with jax.named_scope("my_keep_float32_block"):
            return X @ w

    (product,) = [
        e
        for e in jax.make_jaxpr(gs.autocast(fun))(draw(1, 16, 4)).eqns
        if e.primitive.name == "dot_general"
    ]
    assert str(product.outvars[0].aval.dtype) == "float16"


@jax.custom_vjp
def own(w, x):
    return x @ w


own.defvjp(lambda w, x: (own(w, x), (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))


def in_bfloat16(w):
    return (X.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum()


@pytest.mark.parametrize("loss", [lambda w: own(w, X).sum(), in_bfloat16])
def test_autocast_that_casts_nothing_says_so_once(loss):
    """Products in functions with their own derivatives, and casts of the user, stay as they are."""
    cast, w = gs.autocast(loss), draw(1, 16, 4)
    with pytest.warns(UserWarning, match="autocast has computed no product in float16"):
        cast(w)
    cast(w)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w: (X @ w).sum() + own(w, X).sum(),
        lambda w: w.sum(),
        gs.keep_float32()(lambda w: (X @ w).sum()),
    ],
    ids=["one of two", "no product", "kept"],
)
def test_autocast_that_casts_something_or_need_not_is_silent(loss):
    gs.autocast(loss)(draw(1, 16, 4))

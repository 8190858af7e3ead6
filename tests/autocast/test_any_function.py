"""Losses that nobody wrote for half precision: their gradients are those of float32."""

import warnings

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


def turned(x):
    """Rotary positions, whose angles are an outer product."""
    angles = jnp.einsum("i,j->ij", jnp.arange(0.0, 4096, 8), 1e4 ** (-jnp.arange(8) / 8))
    c, s, (a, b) = jnp.cos(angles), jnp.sin(angles), jnp.split(x, 2, axis=1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], 1)


def network(w, t):
    return jnp.tanh(jnp.tanh(t @ w[:1]) @ w) @ w[:, :2]


def stepped(w, x):
    """How far 40 small steps have led."""
    h = first = x @ w
    for _ in range(40):
        h = h + jnp.tanh(h @ w) * 0.001
    return h - first


TIMES = jnp.linspace(0, 4, 200)[:, None]


def precision_of_processes(w):
    """The likelihood of a Gaussian process, by products of the same numbers."""
    z, y = 4 * X[:100, :3] * w, X[:100, 3]
    squares = (z * z).sum(1)
    kernel = jnp.exp(-(squares[:, None] + squares - 2 * z @ z.T) / 2) + 0.04 * jnp.eye(100)
    root = jnp.linalg.cholesky(kernel)
    return (jax.scipy.linalg.solve_triangular(root, y, lower=True) ** 2).sum() / 1e3


def surprise(w, x):
    """The error of a value by the value that follows, both of which are large."""
    value = lambda x: x @ w["w"] + w["b"]  # noqa: E731
    return value(x) - lax.stop_gradient(0.96 + 0.1 * x[:, :1] + 0.99 * value(x + 0.1 * x[::-1]))


def blur(x):
    rows = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, WINDOW, (1,), "VALID", dimension_numbers=rows)


WINDOW = jnp.ones((11, 1, 1)) / 11
SIGNAL = 0.75 + 0.03 * draw(7, 16, 64, 1)


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
    "a product over an axis": (
        lambda w: -jnp.mean(jnp.log(jnp.prod(jax.nn.sigmoid(X @ w), -1) + 1e-10)),
        8 * draw(3, 16, 4),
    ),
    "a denominator that is a product, and a large factor": (
        lambda w: jnp.mean((X @ w) * 1e4 / (1 + jnp.abs(X @ w) @ jnp.full((4, 4), 9e3))),
        draw(3, 16, 4),
    ),
    "a constant that is added and subtracted": (
        lambda w: jnp.mean(jnp.tanh((X @ w + 1000.0) - 1000.0) ** 2), draw(4, 16, 4)
    ),
    "angles of positions": (
        lambda w: jnp.mean((jax.nn.softmax(turned(X @ w) @ turned(X).T / 4) @ X - X) ** 2),
        draw(4, 16, 16) / 4,
    ),
    "near numbers of all pairs": (
        lambda w: jnp.mean(
            jnp.exp(-((100 + X[:, :4] @ w)[:, None] - (100 + w)[None]) ** 2).sum(-1)
        ), draw(4, 4, 4) / 4
    ),
    "small steps": (lambda w: jnp.mean((stepped(w, X) - 0.01 * X) ** 2), draw(4, 16, 16) / 2),
    "a covariance": (
        lambda w: jnp.log(w @ jnp.cov(100 + 30 * X, rowvar=False) @ w), 1 + jnp.abs(draw(1, 16))
    ),
    "features that should not correlate": (
        lambda w: jnp.mean(((h := jax.nn.relu(X @ w)).T @ h / 512 - jnp.eye(16)) ** 2),
        8 * draw(1, 16, 16),
    ),
    "a Gaussian process": (precision_of_processes, jnp.ones(3)),
    "an error of two large values": (
        lambda w: jnp.mean(surprise(w, X) ** 2),
        {"w": draw(4, 16, 1) / 20, "b": jnp.full((1,), 96.3)},
    ),
    "a local variance": (
        lambda w: jnp.log(jnp.mean(blur((x := SIGNAL + w) * x) - blur(x) ** 2) + 1e-3),
        draw(2, 64, 1) / 100,
    ),
    "one and a part": (
        lambda w: jnp.mean(1 + jnp.sin(5 * jnp.cumsum(1 + 0.05 * jnp.tanh(X @ w), 0))),
        draw(1, 16, 4) / 4,
    ),
    "one less a sigmoid": (
        lambda w: jnp.mean((1 - jax.nn.sigmoid(X @ w + 6)) * X[:, :4] ** 2), draw(1, 16, 4) / 4
    ),
    "a distance that is written out": (
        lambda w: jnp.mean(jax.nn.logsumexp(
            -(jnp.sum((x := 8 + X) ** 2, 1, keepdims=True) - 2 * x @ w.T + jnp.sum(w**2, 1)) / 2,
            axis=1,
        )),
        8 + draw(1, 8, 16),
    ),
    "a negative power": (lambda w: jnp.mean((0.003 + (X @ w) / 1e4) ** -2) / 1e6, draw(4, 16, 4)),
}  # fmt: skip


def flat(tree):
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_float32(name):
    """Within 2 % in float16, and within 10 % in bfloat16, which rounds eight times as coarsely; the
    value within 1 % and 5 %."""
    loss, w = LOSSES[name]
    bounds = {"float16": (0.02, 0.01), "bfloat16": (0.1, 0.05)}

    def scaled_by(cast, w, scale):
        """The value, and the gradient of the scaled loss divided by the scale."""
        grads, value = jax.grad(lambda w: (cast(w) * scale, cast(w)), has_aux=True)(w)
        return value, flat(grads) / scale

    @jax.jit
    def all_of(w, scale):
        cast = {dtype: scaled_by(gs.autocast(loss, dtype), w, scale) for dtype in bounds}
        return cast, scaled_by(loss, w, 1.0)

    tried = [jax.device_get(all_of(w, 2.0**exponent)) for exponent in range(15, -1, -3)]
    value, exact = tried[0][1]
    for dtype, (off, rtol) in bounds.items():  # at a scale that fits, as loss scaling finds it
        found = next(one for cast, _ in tried if np.isfinite((one := cast[dtype])[1]).all())
        assert error(found[1], exact) < off, dtype
        np.testing.assert_allclose(found[0], value, rtol=rtol, err_msg=dtype)


def test_a_long_unrolled_loop_is_read():
    """Sums of many steps, one in the other, and complex factors, are no error."""

    def loss(w, steps=1100):  # more than calls of Python may be in one another
        h = first = X @ w
        for _ in range(steps):
            h = h + 1.1 / steps * w[0]
        return jnp.mean((h - first) ** 2) + jnp.mean(jnp.abs((w @ w) * 1j))

    w = draw(1, 16, 16)
    assert error(jax.grad(gs.autocast(loss))(w), jax.grad(lambda w: loss(w, 1))(w)) < 0.01


def drift(w, x):
    """How much of its energy a spring loses, which no factor shows."""
    forces = w @ w.T + jnp.eye(len(w))
    energy = lambda q, v: (v * v + (q @ forces) * q).sum(-1)  # noqa: E731
    q, v = jnp.split(x, 2, axis=1)
    first = energy(q, v)
    for _ in range(5):
        v = v - 0.05 * (q @ forces)
        q = q + 0.1 * v
        v = v - 0.05 * (q @ forces)
    return jnp.mean((energy(q, v) - first) ** 2)


def jerk(w, x):
    """A third difference, whose scale no factor shows."""
    return jnp.mean(jnp.diff(network(w, TIMES), n=3, axis=0) ** 2)


@pytest.mark.parametrize(("loss", "w"), [(drift, draw(1, 16, 16) / 6), (jerk, draw(4, 16, 16) / 4)])
def test_a_plan_measures_what_default_rules_cannot_see(loss, w):
    """Differences of near numbers that nothing in the program shows are right with a plan."""
    x = draw(0, 512, 32)
    plan = gs.precision.find_plan(loss, w, [(x,)], max_error=0.005)

    @jax.jit
    def gradients(w):
        casts = gs.autocast(loss), gs.autocast(loss, plan)
        each = (jax.grad(lambda w, cast=cast: cast(w, x) * 1024)(w) / 1024 for cast in casts)
        return jax.grad(loss)(w, x), *each

    exact, by_rules, measured = gradients(w)
    assert error(by_rules, exact) > 0.01
    assert error(measured, exact) < 0.005


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: 100.0 * jnp.mean((100 * (x @ w - x)) ** 2),
        lambda w, x: jnp.mean(jax.nn.softplus(((x @ w) - (x[::-1] @ w)) / 0.07)),
        lambda w, x: jnp.mean((x @ w - (x @ w).max(1, keepdims=True)) * 8.0),
        lambda w, x: jnp.mean(jnp.sin(x @ w)),
        lambda w, x: (0.125 * (x @ w) + x @ w).sum(),
        lambda w, x: jnp.mean(jax.nn.leaky_relu(x @ w) ** 2),
        lambda w, x: jnp.mean((x @ w + 0.1 * jnp.tanh(x @ w)) @ w),
        lambda w, x: jax.nn.log_softmax(x @ w)[:, 0].mean(),
        lambda w, x: jnp.mean((x @ w - (x @ w).mean(0)) ** 2),
    ],
    ids=[
        "to a target",
        "of similarities",
        "to the maximum",
        "a sine",
        "a factor",
        "leaky",
        "a scaled branch",
        "log softmax",
        "to the mean",
    ],
)
def test_other_differences_and_angles_stay_in_half_precision(loss):
    """A residual, a similarity over a temperature, or a sine of features is no reason."""
    program = jax.make_jaxpr(gs.autocast(loss))(draw(1, 16, 16), X)
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    assert {str(e.outvars[0].aval.dtype) for e in products} == {"float16"}


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
    w, mask = draw(1, 16, 16), jnp.where(jnp.arange(16) < 8, 0.0, -1e9)
    y = 1000 + draw(2, 512, 16)

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
        loss = gs.autocast(lambda w: (jnp.tanh(X @ w + b) @ w.T).sum())
        kinds.append([str(e.outvars[0].aval.dtype) for e in jax.make_jaxpr(loss)(w).eqns
                      if e.primitive.name == "tanh"])  # fmt: skip
        return loss(w)

    jax.grad(looks)(jnp.ones(16))
    jax.jit(looks)(jnp.ones(16))
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
        for e in jax.make_jaxpr(gs.autocast(fun))(draw(1, 16, 16)).eqns
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
    """Products in functions with their own derivatives, and casts of the user, stay as they are.
    Each line that calls it is told once, as Python tells warnings."""
    cast, w = gs.autocast(loss), draw(1, 16, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            cast(w)
    assert len(told) == 1
    assert "autocast has computed no product in float16" in str(told[0].message)


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


def test_keep_float32_without_parentheses_names_them():
    """As a decorator without parentheses it is refused, with both ways to write it."""
    with pytest.raises(TypeError, match=r"write `with gainstage.keep_float32\(\):`, or `@gains"):

        @gs.keep_float32
        def kept(x):
            return x


def test_what_is_called_inside_of_keep_float32_is_float32():
    """A compiled function under autocast is float32 in the scope, and half precision outside."""
    w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
    fun = lambda w, x: (x @ w).sum(0)  # noqa: E731
    half = jax.jit(gs.autocast(fun))
    outside = half(w, x)
    for kept in (half, gs.autocast(fun), jax.jit(lambda w, x: half(w, x))):
        with gs.keep_float32():
            np.testing.assert_allclose(kept(w, x), fun(w, x), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(half(w, x), outside)
    assert not np.allclose(outside, fun(w, x), rtol=1e-5, atol=1e-5)


def test_a_training_step_inside_of_keep_float32_is_float32():
    """A loss under autocast that is differentiated in the scope is float32 too, on both ways."""
    w, x = jax.random.normal(jax.random.key(0), (2, 8, 8))
    fun = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    with gs.keep_float32():
        program = jax.make_jaxpr(jax.grad(gs.autocast(fun)))(w, x)
    assert "f16" not in str(program)


def test_keep_float32_around_everything_is_no_reason_to_warn():
    """A function that the user keeps whole, in a loop or a compiled call, warns of nothing."""
    w, x = jax.random.normal(jax.random.key(0), (2, 8, 8))

    @gs.autocast
    def fun(w, x):
        with gs.keep_float32():
            x = jax.jit(lambda x: x @ w)(x)
            return jax.lax.scan(lambda x, _: (x @ w, None), x, None, 2)[0].sum()

    assert "f16" not in str(jax.make_jaxpr(fun)(w, x))


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "float16"])
@pytest.mark.parametrize("product", ["ij,j->i", "i,j->ij", "i,i->", "ij,jk->ik"])
def test_products_of_other_dtypes_are_as_written(product, dtype):
    """A product of integers or of half precision of the user's own is not touched."""
    shapes = ([3] * len(part) for part in product.split("->")[0].split(","))
    a, b = (jnp.arange(np.prod(s)).reshape(s).astype(dtype) for s in shapes)
    fun = lambda w, a, b: (w @ w).sum() + jnp.einsum(product, a, b).sum().astype(jnp.float32)  # noqa: E731
    found = gs.autocast(fun)(draw(1, 3, 3), a, b)
    np.testing.assert_allclose(found, fun(draw(1, 3, 3), a, b), rtol=1e-3)


@pytest.mark.parametrize("how", ["argument", "context"])
def test_a_product_of_the_highest_precision_is_float32(how):
    """`precision="highest"` asks for float32, of one product or of all; others are half."""
    w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
    precision = {"argument": "highest", "context": None}[how]

    @gs.autocast
    def fun(w, x):
        precise = jnp.dot(x, w, precision=precision)
        return precise, precise @ jnp.ones((64, 2))

    with jax.default_matmul_precision("highest" if how == "context" else "default"):
        found = fun(w, x)[0]
        program = str(jax.make_jaxpr(fun)(w, x))
    exact = np.asarray(x, np.float64) @ np.asarray(w)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)
    assert ("f16" in program) == (how == "argument")


ALGORITHMS = {
    "F32_F32_F32": True,
    "F64_F64_F64": True,
    "TF32_TF32_F32_X3": True,
    "BF16_BF16_F32_X6": True,
    lax.DotAlgorithm(np.float32, np.float32, np.float32): True,
    lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32, num_primitive_operations=3): True,
    "TF32_TF32_F32": False,
    "F16_F16_F32": False,
    "BF16_BF16_F32": False,
    lax.DotAlgorithm(np.float16, np.float16, np.float32): False,
    "float32": True,
    "high": False,
}


@pytest.mark.parametrize("precision", ALGORITHMS, ids=str)
def test_a_product_with_more_digits_than_half_precision_keeps_them(precision):
    """An algorithm with float32 operands, or that multiplies several times for more digits, is left
    as it is; one with operands of at most TF32 is as fast in half precision."""
    w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
    fun = gs.autocast(lambda w, x: jnp.dot(x, w, precision=precision))
    (eqn,) = [e for e in jax.make_jaxpr(fun)(w, x).eqns if e.primitive.name == "dot_general"]
    assert (eqn.invars[0].aval.dtype == np.float32) == ALGORITHMS[precision]
    known = jax.make_jaxpr(lambda w, x: jnp.dot(x, w, precision=precision))(w, x).eqns[-1]
    if ALGORITHMS[precision]:
        assert eqn.params["precision"] == known.params["precision"]


def test_calls_outside_of_a_compiled_function_are_told_once():
    """A function that is traced at each call says so, once, and which one it is."""

    def similarity(w, x):
        return x @ w

    half = gs.autocast(similarity)
    with warnings.catch_warnings(record=True, action="always") as told:
        for _ in range(40):
            half(jnp.ones((2, 2)), jnp.ones((2, 2)))
    (message,) = (str(each.message) for each in told)
    assert "similarity" in message
    assert "16 times outside of jax.jit" in message


def test_float16_parameters_of_a_loss_with_a_scale_are_told_once():
    """Their gradients are float16, and lose what the scale has kept. Those that are not
    differentiated lose nothing. The line is told once, as Python tells warnings."""
    loss_fn = gs.autocast(
        lambda w, frozen: jnp.mean((w @ frozen) ** 2).astype(jnp.float32), loss_scale=2.0**15
    )
    w, half = jnp.ones((2, 2)), jnp.ones((2, 2), jnp.float16)
    jax.jit(jax.grad(loss_fn))(w, half)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for frozen in (w, half):
            jax.jit(jax.grad(loss_fn))(half, frozen)
    assert len(told) == 1
    assert "float16 parameter, here of shape (2, 2)" in str(told[0].message)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_product_with_a_number_keeps_nothing_for_its_derivative(dtype):
    """It is linear in the array, whether half precision holds the number or not."""

    def kept(factor):
        loss = gs.autocast(lambda w: jnp.sum((((x @ w) * factor) @ v) ** 2), dtype)
        residuals = jax.eval_shape(lambda w: jax.vjp(loss, w)[1], w)
        arrays = [leaf for leaf in jax.tree.leaves(residuals) if leaf.size > 1]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)

    x, w, v = (jnp.ones((64, 64)) for _ in range(3))
    assert kept(0.1) == kept(0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_plan_measures_what_a_rounded_number_costs(dtype):
    """Thirty discounts by a number that half precision does not hold add up: in a plan, as many
    are rounded as its bound allows; with the default rules the number is float32."""
    x, w = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))

    def discounted(w):
        h = x @ w
        for _ in range(30):
            h = 0.99 * h
        return jnp.mean(h**2)

    exact = jax.jit(jax.grad(discounted))(w)
    plan = gs.precision.find_plan(discounted, w, [()], dtype=dtype, max_error=0.005, progress=False)
    found = jax.jit(jax.grad(gs.autocast(discounted, plan)))(w)
    assert jnp.linalg.norm(found - exact) <= 0.006 * jnp.linalg.norm(exact)
    assert any(row.dtype == dtype for row in plan.entries)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_complex_constants_keep_both_parts(dtype):
    """Arrays and numbers that are complex, behind a product, are neither rounded nor cut to their
    real part with a warning."""
    x, w = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))
    turns = np.exp(1j * np.linspace(0, 3, 16)).astype(np.complex64)

    def turned(w):
        waves = jnp.fft.fft(x @ w) * turns + (1 + 2j)
        return jnp.mean(jnp.abs(waves * np.complex64(2j) + waves @ np.outer(turns, turns)))

    loss, exact = jax.jit(jax.value_and_grad(turned))(w)
    found, grads = jax.jit(jax.value_and_grad(gs.autocast(turned, dtype)))(w)
    assert float(found) == pytest.approx(float(loss), rel=0.01)
    assert jnp.linalg.norm(grads - exact) <= 0.02 * jnp.linalg.norm(exact)

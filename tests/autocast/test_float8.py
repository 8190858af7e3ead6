"""A product in float8 has a unit of its own for each tensor, and true gradients."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.precision import Plan, find_plan


def draw(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape), jnp.float32)


def integers(number, *shape):
    """Small whole numbers: products and sums of them are exact in float8 and float16."""
    return np.float32(np.random.default_rng(number).integers(-3, 4, size=shape))


def in_float8(fun, *args):
    """The function with all its products in float8."""
    plan = find_plan(fun, args[0], [args[1:]], max_error=1e9, progress=False)
    rows = [o._replace(dtype="float8") if o.name == "dot_general" else o for o in plan.entries]
    return gs.autocast(fun, Plan(plan.dtype, rows))


def casts(fun, *args):
    """How often a program casts to each float8 dtype."""
    text = str(jax.make_jaxpr(fun)(*args))
    return {
        d: len(re.findall(rf":{d}\[[\d,]+\] = convert", text)) for d in ("f8_e4m3fn", "f8_e5m2")
    }


def error(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    off = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return (off / sum(float((b**2).sum()) for _, b in pairs)) ** 0.5


LAYOUTS = [
    ("ij,jk->ik", (16, 24), (24, 32)),
    ("ji,jk->ik", (24, 16), (24, 32)),
    ("ij,kj->ik", (16, 24), (32, 24)),
    ("ji,kj->ki", (24, 16), (32, 24)),
    ("bij,jk->bik", (2, 16, 24), (24, 32)),
    ("bij,bjk->bik", (2, 16, 24), (2, 24, 32)),
    ("ibj,kjb->bki", (16, 2, 24), (32, 24, 2)),
    ("imn,nmk->ik", (16, 4, 6), (6, 4, 32)),
    ("imn,knm->ki", (16, 4, 6), (32, 6, 4)),
    ("bimn,nbkm->bik", (2, 16, 4, 6), (6, 2, 32, 4)),
]


@pytest.mark.parametrize(("layout", "left", "right"), LAYOUTS, ids=[row[0] for row in LAYOUTS])
def test_gradients_of_every_layout_are_those_of_float64(layout, left, right):
    """Forward and backward products of numbers that float8 holds are exact, axis by axis."""
    w, x = integers(1, *left), integers(2, *right)
    g = integers(3, *np.einsum(layout, w, x).shape)

    def loss(w, x):
        return jnp.sum(jnp.einsum(layout, w, x) * g)

    inputs, output = layout.split("->")
    first, second = inputs.split(",")
    found = jax.jit(jax.grad(in_float8(loss, w, x), (0, 1)))(w, x)
    w64, x64, g64 = (a.astype(np.float64) for a in (w, x, g))
    np.testing.assert_array_equal(found[0], np.einsum(f"{output},{second}->{first}", g64, x64))
    np.testing.assert_array_equal(found[1], np.einsum(f"{first},{output}->{second}", w64, g64))
    assert float(jax.jit(in_float8(loss, w, x))(w, x)) == (np.einsum(layout, w64, x64) * g64).sum()


def test_each_tensor_is_rounded_as_ml_dtypes_rounds_it_times_a_power_of_two():
    """The product is that of tensors whose largest number just fits; so are its derivatives."""
    w, x, g = draw(1, 24, 32) / 9, draw(2, 16, 24) * 50, draw(3, 16, 32) / 5

    def loss(w, x):
        return jnp.sum((x @ w) * g)

    def rounded(a, dtype):
        a = np.asarray(a, np.float64)
        bits = np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / np.abs(a).max()))
        small = np.float32(a * 2.0**bits).astype(dtype).astype(np.float64)
        return small / 2.0**bits

    found = jax.jit(jax.grad(in_float8(loss, w, x), (0, 1)))(w, x)
    w8, x8 = (rounded(a, ml_dtypes.float8_e4m3fn) for a in (w, x))
    g8 = rounded(np.float16(g), ml_dtypes.float8_e5m2)
    for a, b in zip(found, (x8.T @ g8, g8 @ w8.T), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6 * np.abs(b).max())


def wide_network(params, x):
    q, k, v = (x @ params[name] for name in "qkv")
    return jnp.mean(((jnp.tanh(q + k) * v) @ params["o"]) ** 2)


def of_width(width):
    return {name: draw(i, width, width) / width**0.5 for i, name in enumerate("qkvo")}


def test_linear_layers_that_are_wide_enough_are_in_float8():
    """Of one network, the products are in float8 at a width of 4096, in float16 at one of 1024: on
    an H200 a language model took 0.72 of float16's time at the one, and 0.99 at the other."""

    def shapes(width):
        square = jax.ShapeDtypeStruct((width, width), jnp.float32)
        return dict.fromkeys("qkvo", square), jax.ShapeDtypeStruct((4096, width), jnp.float32)

    grad = jax.grad(gs.autocast(wide_network, "float8"))
    assert casts(grad, *shapes(4096)) == {"f8_e4m3fn": 6, "f8_e5m2": 4}
    told = r"\[4096, 1024\] x \[1024, 1024\], gains nothing on an H100"
    with pytest.warns(UserWarning, match=told):
        assert casts(grad, *shapes(1024)) == {"f8_e4m3fn": 0, "f8_e5m2": 0}


def test_the_parameter_may_stand_on_either_side():
    """A layer is in float8 or not by its sizes, whether written `x @ w` or `w @ x`."""
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    for rows, has in ((256, 2), (64, 0)):
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        right = gs.autocast(lambda w, x: jnp.sum(x @ w), "float8")
        left = gs.autocast(lambda w, x: jnp.sum(w @ x.T), "float8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [casts(fun, w, x)["f8_e4m3fn"] for fun in (right, left)]
        assert found == [has, has]


def test_an_ensemble_of_small_layers_stays_in_half():
    """Under `vmap` over parameters each example is a product of its own size."""
    w = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32)
    fun = gs.autocast(lambda w, x: jnp.sum(x @ w), "float8")
    with pytest.warns(UserWarning, match=r"\[256, 256\] x \[256, 256\], gains nothing"):
        assert casts(jax.vmap(fun), w, x) == {"f8_e4m3fn": 0, "f8_e5m2": 0}


def test_a_function_that_is_kept_in_float32_is_not_said_to_be_in_float16(recwarn):
    """`keep_float32` asks for float32: no warning says otherwise."""
    fun = gs.keep_float32()(lambda w, x: jnp.sum(x @ w))
    gs.autocast(fun, "float8")(jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert not recwarn.list


def test_one_cast_serves_all_products_that_read_a_tensor():
    """Query, key and value read one float8 tensor: six tensors are cast for four products."""
    fun = in_float8(wide_network, of_width(16), draw(5, 16, 16))
    assert casts(fun, of_width(16), draw(5, 16, 16)) == {"f8_e4m3fn": 6, "f8_e5m2": 0}


def test_products_of_two_activations_and_small_ones_stay_in_half():
    """The rule takes linear layers alone: not attention's products, not fewer than 16 rows."""

    def attends(w, x):
        return jnp.sum(jax.nn.softmax((x @ w) @ x.T) @ x)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096), (8192, 4096)))
    assert casts(gs.autocast(attends, "float8"), w, x) == {"f8_e4m3fn": 2, "f8_e5m2": 0}
    few = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    with pytest.warns(UserWarning, match="no product in float8"):
        casts(gs.autocast(lambda w, x: jnp.sum(x @ w), "float8"), w, few)


W, X = draw(1, 16, 32) / 4, draw(2, 8, 20, 16)


def squared(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize("layout", ["jk,sj->sk", "sj,jk->sk", "jk,sj->ks"])
def test_examples_of_vmap_are_rows_of_one_product(layout):
    """A batch by `vmap` has the gradient of the batch, and stores no gradient for each example;
    that of each example can be asked for. The parameter may stand on either side."""

    def squared(w, x):
        pair = (w, x) if layout.startswith("jk") else (x, w)
        return jnp.sum(jnp.tanh(jnp.einsum(layout, *pair)) ** 2)

    def whole(w, x):
        return squared(w, x.reshape(-1, x.shape[-1]))

    fun = in_float8(squared, W, X[0])

    def batch(w, x):
        return jnp.sum(jax.vmap(fun, (None, 0))(w, x))

    expected = jax.jit(jax.grad(in_float8(whole, W, X)))(W, X)
    found = jax.jit(jax.grad(batch))(W, X)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    program = str(jax.make_jaxpr(jax.grad(batch))(W, X))
    assert "[8,16,32]" not in program
    assert "[8,32,16]" not in program
    each = jax.jit(jax.vmap(jax.grad(fun), (None, 0)))(W, X)
    assert each.shape == (8, 16, 32)
    assert error(each.sum(0), jax.grad(squared)(W, X.reshape(-1, 16))) < 0.1


@pytest.mark.parametrize("kind", ["scan", "remat", "jit", "remat of scan"])
def test_loops_and_rematerialisation_keep_the_gradient(kind):
    """Three layers in a loop of JAX have the gradient of three calls."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    if "remat" in kind:
        layer = jax.checkpoint(layer)
    elif kind == "jit":
        layer = jax.jit(layer)

    def looped(ws, x):
        if "scan" in kind:
            return jnp.sum(lax.scan(layer, x, ws)[0] ** 2)
        for w in ws:
            x, _ = layer(x, w)
        return jnp.sum(x**2)

    def plain(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    ws, x = draw(1, 3, 16, 16) / 4, draw(2, 24, 16)
    found = jax.jit(jax.grad(in_float8(looped, ws, x)))(ws, x)
    np.testing.assert_allclose(
        found, jax.jit(jax.grad(in_float8(plain, ws, x)))(ws, x), rtol=2e-3, atol=1e-3
    )


@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
def test_on_a_mesh_the_largest_number_is_that_of_all_devices(kind):
    """Eight devices, of which one has the largest numbers, compute the gradient of one device."""
    x = draw(2, 256, 16) * jnp.where(jnp.arange(256) < 32, 100.0, 1.0)[:, None]
    fun = in_float8(squared, W, x)
    alone = jax.jit(jax.grad(fun))(W, x)
    explicit = kind == "explicit"
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=kinds)
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    w, x = jax.device_put(W, whole), jax.device_put(x, rows)
    grad = jax.grad(fun)
    if kind == "shard_map":

        def summed(w, x):
            return lax.psum(fun(w, x), "data")

        specs = (PartitionSpec(), PartitionSpec("data"))
        grad = jax.grad(jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    with jax.set_mesh(mesh):
        found = jax.jit(grad)(w, x)
    np.testing.assert_allclose(found, alone, rtol=1e-3, atol=1e-3 * float(abs(alone).max()))


@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_second_derivative_is_refused(inner):
    """A gradient penalty through a float8 product would be zero in silence; it is an error."""
    x = X[0]
    fun = in_float8(squared, W, x)

    def penalty(w):
        return jnp.sum(inner(jax.grad(fun, 1))(w, x) ** 2)

    with pytest.raises(TypeError, match="float8 product has no second derivative"):
        jax.grad(penalty)(W)


@pytest.mark.parametrize("place", ["w", "x", "g"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(place, bad):
    """An inf or a NaN in an operand or in the cotangent reaches the gradients."""
    w, x, g = (np.array(draw(i, 16, 16)) for i in range(3))
    {"w": w, "x": x, "g": g}[place][3, 4] = bad

    def loss(w, x, g):
        return jnp.sum((x @ w) * g)

    ones = jnp.ones((16, 16))
    grads = jax.jit(jax.grad(in_float8(loss, ones, ones, ones), (0, 1)))(w, x, g)
    assert not all(bool(jnp.isfinite(a).all()) for a in grads)


@pytest.mark.parametrize("library", ["dict", "nnx", "equinox"])
def test_a_model_trains_in_float8_as_in_float32(library):
    """With loss scaling a network reaches the loss of float32, and a bad batch is skipped."""
    x, y = draw(1, 256, 16), jnp.sin(draw(1, 256, 16) @ draw(2, 16, 16) / 3)
    if library == "dict":
        model = {"a": draw(3, 16, 64) / 4, "b": draw(4, 64, 16) / 8}

        def predict(model, x):
            return jnp.tanh(x @ model["a"]) @ model["b"]
    elif library == "nnx":
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            nnx.Linear(16, 64, rngs=rngs), jnp.tanh, nnx.Linear(64, 16, rngs=rngs)
        )

        def predict(model, x):
            return model(x)
    else:
        model = eqx.nn.MLP(16, 16, 64, 1, jnp.tanh, key=jax.random.key(0))

        def predict(model, x):
            return jax.vmap(model)(x)

    def loss(model, x, y):
        return jnp.mean((predict(model, x) - y) ** 2)

    def trained(loss):
        copy = jax.tree.map(lambda a: jnp.array(a) if eqx.is_array(a) else a, model)
        state = gs.TrainState.create(copy, optax.adam(1e-2), telemetry=True)
        step = gs.train_step(loss)
        for n in range(150):
            bad = jnp.where(n == 75, jnp.inf, 1.0)
            state, value = step(state, x * bad, y)
        return float(value), int(state.info.skipped_steps)

    exact, _ = trained(loss)
    found, skipped = trained(in_float8(loss, model, x, y))
    assert found < 1.5 * exact
    assert skipped == 1

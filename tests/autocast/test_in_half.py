"""`in_half`: kernels in half precision under autocast."""

import functools

import cudnn_on_a_cpu as cudnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gainstage as gs
from gainstage._programs import jaxprs
from gainstage.precision import Plan, tune

attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
fused = functools.partial(attention, implementation="cudnn")
attend = gs.in_half(fused, float32=attention)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {name: normal(i, 64, 64) / 8 for i, name in enumerate("qkvo")}
X = normal(9, 2, 32, 64)


def model(attend, params, x, **options):
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 4, 16) for name in "qkv")
    return jnp.mean((attend(q, k, v, **options).reshape(x.shape) @ params["o"] - 1) ** 2)


def error(found, exact):
    both = (optax.tree.norm(jax.tree.map(jnp.subtract, found, exact)), optax.tree.norm(exact))
    return float(both[0] / both[1])


@pytest.fixture(autouse=True)
def _has_cudnn(monkeypatch):
    cudnn.use(monkeypatch)


def kernels_of(fun, *args):
    """The dtypes of the first operands of the kernels in a program."""
    every = jaxprs.equations(jax.make_jaxpr(fun)(*args))
    names = ("pallas_call", "dot_product_attention_fwd_wrapper")
    return [str(jaxprs.array(e.invars[0]).dtype) for e in every if e.primitive.name in names]


def test_float32_code_with_cudnn_names_the_remedy():
    """Autocast traces in float32, where cuDNN refuses."""
    with pytest.raises(NotImplementedError, match="got float32") as caught:
        gs.autocast(functools.partial(model, fused))(PARAMS, X)
    assert any("gainstage.in_half(kernel, float32=another)" in n for n in caught.value.__notes__)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    "options", [{}, {"bias": normal(5, 1, 4, 32, 32)}, {"mask": np.ones((1, 1, 32, 32), bool)}]
)
def test_gradients_are_those_of_float32(dtype, bound, options):
    """Also of a bias, which has to be in the dtype of the others."""
    exact = jax.grad(functools.partial(model, attention, **options))(PARAMS, X)
    loss = functools.partial(model, attend, **options)
    half = gs.autocast(loss, dtype)
    found = jax.jit(jax.grad(gs.autocast(loss, dtype, loss_scale=2.0**10)))(PARAMS, X)
    assert error(found, exact) < bound
    each = jax.tree.leaves(jax.tree.map(lambda g: str(g.dtype), found))
    assert set(each) == {"float32"}
    short = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    calls = cudnn.dtypes_of_calls(jax.grad(half), PARAMS, X)
    assert calls == [[short] * 3, [short] * 3]  # forwards and backwards


def scanned(params, x):
    def turn(total, _):
        return total + jax.checkpoint(functools.partial(model, attend))(params, x), None

    return jax.lax.scan(turn, 0.0, None, 2)[0] / 2


def mapped(params, x):
    return jnp.mean(jax.vmap(lambda row: model(attend, params, row[None]))(x))


def branched(params, x):
    return jax.lax.cond(
        x[0, 0, 0] > -99, functools.partial(model, attend), lambda *_: 0.0, params, x
    )


def stepped(params, x):
    """After a step of gradient descent inside."""
    grads = jax.grad(functools.partial(model, attend))(jax.lax.stop_gradient(params), x)
    return model(attend, jax.tree.map(lambda p, g: p - 0.0 * g, params, grads), x)


@pytest.mark.parametrize(
    "fun",
    [
        scanned,
        mapped,
        branched,
        stepped,
        jax.jit(functools.partial(model, attend)),
        functools.partial(model, jax.jit(attend)),
        functools.partial(model, gs.in_half(fused)),
    ],
)
def test_transformations_inside(fun):
    exact = jax.grad(functools.partial(model, attention))(PARAMS, X)
    half = gs.autocast(fun)
    assert error(jax.grad(half)(PARAMS, X), exact) < 2e-3
    assert set(map(tuple, cudnn.dtypes_of_calls(jax.grad(half), PARAMS, X))) == {("f16",) * 3}


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_inside(check):
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))

    def sharded(params, x):
        return jax.shard_map(
            lambda p, x: jax.lax.pmean(model(attend, p, x), "devices"),
            mesh=mesh, in_specs=(P(), P("devices")), out_specs=P(), check_vma=check,
        )(params, x)  # fmt: skip

    exact = jax.grad(functools.partial(model, attention))(PARAMS, X)
    half = gs.autocast(sharded)
    assert error(jax.jit(jax.grad(half))(PARAMS, X), exact) < 2e-3
    assert kernels_of(half, PARAMS, X) == ["float16"]


def test_it_is_the_function_itself_elsewhere():
    """Without autocast, and in `keep_float32`."""
    exact = model(attention, PARAMS, X)
    assert model(attend, PARAMS, X) == exact
    halves = [x.astype(jnp.float16) for x in normal(1, 3, 2, 32, 4, 16)]
    assert attend(*halves).dtype == jnp.float16  # cast by hand: the kernel, not the reference
    kept = gs.autocast(gs.keep_float32()(functools.partial(model, attend)))
    assert kernels_of(kept, PARAMS, X) == []
    inner = jax.jit(attend)  # compiled once for each
    loss = functools.partial(model, inner)
    assert loss(PARAMS, X) == loss(PARAMS, X) != gs.autocast(loss)(PARAMS, X)
    assert kernels_of(loss, PARAMS, X) == []


def test_no_cast_is_left_over():
    """The program is the one of a kernel between products in half precision."""

    def by_hand(*xs):
        return fused(*(x.astype(jnp.float16) for x in xs))

    counts = []
    for own in (by_hand, attend):
        half = gs.autocast(functools.partial(model, own))
        program = jax.make_jaxpr(jax.grad(half))(PARAMS, X)
        counts.append(sorted(e.primitive.name for e in jaxprs.equations(program)))
    assert counts[0] == counts[1]


def test_a_program_inside_of_a_kernel():
    """A kernel may branch and loop."""

    def kernel(x, w):
        y = jax.lax.cond(x.sum() > 0, lambda y: 2 * y, lambda y: 3 * y, x @ w)
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.where(y > 0, y + 1, y - 1), y)

    own = gs.in_half(kernel)
    w = normal(0, 8, 8) / 3

    def loss(w, x):
        return jnp.mean(own(x @ w, w) @ w)

    for seed in range(3):
        x = normal(seed, 4, 8)
        exact, half = loss(w, x), gs.autocast(loss)(w, x)
        assert abs(half - exact) < 5e-3
        assert gs.autocast(lambda w, x: gs.autocast(loss)(w, x))(w, x) == half


def test_a_pallas_kernel():
    def body(x, y, out):
        out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32).astype(out.dtype)

    @jax.custom_vjp
    def product(x, y):
        shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
        return pl.pallas_call(body, out_shape=shape, interpret=True)(x, y)

    product.defvjp(
        lambda x, y: (product(x, y), (x, y)),
        lambda xy, g: (product(g, xy[1].T), product(xy[0].T, g)),
    )

    def loss(product, w, x):
        return jnp.mean((jnp.tanh(product(x, w)) @ w - 1) ** 2)

    w, x = normal(0, 16, 16) / 4, normal(1, 64, 16)
    exact = jax.grad(functools.partial(loss, product))(w, x)
    plain, half = (gs.autocast(functools.partial(loss, f)) for f in (product, gs.in_half(product)))
    assert kernels_of(plain, w, x) == ["float32"]
    assert kernels_of(half, w, x) == ["float16"]
    assert error(jax.grad(half)(w, x), exact) < 2e-3


def test_a_kernel_is_one_line_of_a_plan():
    """`tune` measures it, and a plan may keep it in float32."""
    loss = functools.partial(model, attend)
    xs = [(normal(20 + i, 2, 32, 64),) for i in range(4)]
    plan = tune(loss, PARAMS, xs, progress=False)
    (row,) = [o for o in plan.operations if o.name == "in_half"]
    assert row.dtype == "float16"
    assert 0 < row.share < 0.01
    assert "test_in_half.py" in row.line
    assert kernels_of(gs.autocast(loss, plan), PARAMS, X) == ["float16"]
    rows = [o._replace(dtype="float32") if o is row else o for o in plan.operations]
    kept = Plan(plan.dtype, rows, plan.predicted, plan.measured, plan.shapes)
    assert kernels_of(gs.autocast(loss, kept), PARAMS, X) == []
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="with in_half as operation"):
        gs.autocast(functools.partial(model, attention), plan)(PARAMS, X)


def test_the_share_is_that_of_the_kernel():
    """The share of its line, computed in float32 on rounded numbers, is the error of the kernel
    alone."""
    loss = functools.partial(model, attend)
    xs = [(normal(20 + i, 2, 32, 64),) for i in range(2)]
    plan = tune(loss, PARAMS, xs, progress=False)
    (row,) = [o for o in plan.operations if o.name == "in_half"]
    rows = [o if o is row else o._replace(dtype="float32") for o in plan.operations]
    alone = Plan(plan.dtype, rows, plan.predicted, plan.measured, plan.shapes)
    exact = jax.grad(functools.partial(model, attention))(PARAMS, *xs[0])
    found = jax.grad(gs.autocast(loss, alone, loss_scale=2.0**10))(PARAMS, *xs[0])
    assert 0.5 < row.share / error(found, exact) < 2


def test_advise_counts_what_a_kernel_keeps():
    xs = [(normal(20 + i, 2, 32, 64),) for i in range(2)]
    kept = []
    for own in (attention, attend):
        advice = gs.advise(functools.partial(model, own), PARAMS, xs, progress=False)
        kept.append(next(c.kept for c in advice.costs if c.name == "float16"))
    assert kept[1] < 0.8 * kept[0]


def test_tune_without_a_reference_names_it():
    xs = [(normal(20 + i, 2, 32, 64),) for i in range(2)]
    with pytest.raises(NotImplementedError) as caught:
        tune(functools.partial(model, gs.in_half(fused)), PARAMS, xs, progress=False)
    assert any("float32=another" in note for note in caught.value.__notes__)


def test_training():
    state = gs.TrainState.create(jax.tree.map(jnp.copy, PARAMS), optax.adam(1e-2))
    step = gs.train_step(gs.autocast(functools.partial(model, attend)))
    for _ in range(30):
        state, loss = step(state, X)
    assert loss < 0.1


def test_what_is_no_function():
    with pytest.raises(TypeError, match="Expected a function for kernel of in_half; got 3"):
        gs.in_half(3)

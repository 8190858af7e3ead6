"""Fused kernels get half precision under autocast, through `half_only`, and float32 elsewhere."""

import functools
from collections import Counter

import cudnn_on_a_cpu as cudnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equations import equations, is_call
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

import gainstage as gs
from gainstage.precision import Plan, find_plan
from gainstage.precision.program_costs import kept

attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
fused = functools.partial(attention, implementation="cudnn")
attend = gs.half_only(fused, float32=attention)
SHORT = {"float16": "f16", "bfloat16": "bf16", "float8": "f16"}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {name: normal(i, 64, 64) / 8 for i, name in enumerate("qkvo")}
X = normal(9, 2, 32, 64)
BATCHES = [(normal(20 + i, 2, 32, 64),) for i in range(4)]


def model(attend, params, x, **options):
    """The loss of a layer of attention between products."""
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 4, 16) for name in "qkv")
    return jnp.mean((attend(q, k, v, **options).reshape(x.shape) @ params["o"] - 1) ** 2)


loss_fn = functools.partial(model, attend)
exact_fn = functools.partial(model, attention)


def error(found, exact):
    """The distance of gradients, relative to the norm of the second."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    both = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    squares = [(np.sum((a - b) ** 2), np.sum(b**2)) for a, b in both]
    return float(np.sqrt(sum(s[0] for s in squares) / sum(s[1] for s in squares)))


@pytest.fixture(autouse=True)
def _has_cudnn(monkeypatch):
    cudnn.use(monkeypatch)


def kernels_of(fun, *args):
    """The dtypes of the first operands of the kernels in a program."""
    every = equations(jax.make_jaxpr(fun)(*args))
    names = ("pallas_call", "dot_product_attention_fwd_wrapper")
    return [str(e.invars[0].aval.dtype) for e in every if e.primitive.name in names]


def multiply(x_ref, y_ref, out_ref):
    """The body of a Pallas kernel."""
    product = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    out_ref[...] = product.astype(out_ref.dtype)


@jax.custom_vjp
def product(x, y):
    """A Pallas kernel with its own derivative."""
    shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(multiply, out_shape=shape, interpret=True)(x, y)


product.defvjp(
    lambda x, y: (product(x, y), (x, y)),
    lambda xy, g: (product(g, xy[1].T), product(xy[0].T, g)),
)


# ── what a kernel gets ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    "options", [{}, {"bias": normal(5, 1, 4, 32, 32)}, {"mask": np.ones((1, 1, 32, 32), bool)}]
)
def test_gradients_are_those_of_float32(dtype, bound, options):
    """Forward and backward calls get half precision, also a bias, and gradients stay near."""
    exact = jax.grad(functools.partial(exact_fn, **options))(PARAMS, X)
    loss = functools.partial(loss_fn, **options)
    found = jax.jit(jax.grad(gs.autocast(loss, dtype, loss_scale=2.0**10)))(PARAMS, X)
    assert error(found, exact) < bound
    assert {str(g.dtype) for g in jax.tree.leaves(found)} == {"float32"}
    calls = cudnn.dtypes_of_calls(jax.grad(gs.autocast(loss, dtype)), PARAMS, X)
    assert calls == [[SHORT[dtype]] * 3] * 2


def test_a_pallas_kernel():
    """A kernel that would be computed in float32 is computed in float16."""

    def loss(product, w, x):
        return jnp.mean((jnp.tanh(product(x, w)) @ w - 1) ** 2)

    w, x = normal(0, 16, 16) / 4, normal(1, 64, 16)
    exact = jax.grad(functools.partial(loss, product))(w, x)
    plain, half = (
        gs.autocast(functools.partial(loss, f)) for f in (product, gs.half_only(product))
    )
    assert kernels_of(plain, w, x) == ["float32"]
    assert kernels_of(half, w, x) == ["float16"]
    assert kernels_of(jax.grad(half), w, x) == ["float16"] * 3
    assert error(jax.grad(half)(w, x), exact) < 2e-3


def test_what_is_cast():
    """Float32 arrays in any pytree are cast, and those of numpy stay concrete; nothing else is."""
    seen = {}

    def kernel(x, rest, *, flag, factor):
        seen.update(x=x, factor=factor, flag=flag, **rest)
        return {"y": x * factor, "n": rest["ids"]}, jnp.float32(2)

    own = gs.half_only(kernel, float32=kernel)
    rest = {
        "ids": jnp.arange(3), "mask": np.ones(3, bool), "table": np.ones(3, np.float32),
        "half": jnp.ones(3, jnp.bfloat16), "key": jax.random.key(0), "wide": np.ones(3),
    }  # fmt: skip
    found = gs.autocast(lambda x: own(x, rest, flag="a", factor=2.0), "float16")(X)
    assert jax.tree.map(lambda x: str(x.dtype), found) == (
        {"y": "float32", "n": "int32"},
        "float32",
    )
    assert {name: str(seen[name].dtype) for name in ("x", *rest)} == {
        "x": "float16", "ids": "int32", "mask": "bool", "table": "float16", "half": "bfloat16",
        "key": "key<fry>", "wide": "float64",
    }  # fmt: skip
    assert isinstance(seen["table"], np.ndarray)
    assert (seen["factor"], seen["flag"]) == (2.0, "a")


def test_half_arrays_pass_as_they_are():
    """Arrays that are all cast by hand go to the kernel, of mixed dtypes too, wherever it is."""
    seen = []

    def kernel(*xs):
        seen.append([str(x.dtype) for x in xs])
        return xs[0]

    def float32(*xs):
        raise AssertionError

    own = gs.half_only(kernel, float32=float32)
    mixed = X.astype("float16"), X.astype("bfloat16")
    for fun in (own, gs.autocast(own), gs.keep_float32()(own), gs.autocast(gs.keep_float32()(own))):
        assert fun(*mixed).dtype == "float16"
    assert seen == [["float16", "bfloat16"]] * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_arrays_beside_float32(dtype):
    """A float32 bias is cast beside arrays that are half already; results have the dtypes that the
    float32 function gives them."""
    q, k, v = (normal(i, 2, 32, 4, 16).astype("bfloat16") for i in range(3))
    bias = normal(5, 1, 4, 32, 32)

    def weighed(bias):
        return attend(q, k, v, bias)

    assert gs.autocast(weighed, "bfloat16")(bias).dtype == attention(q, k, v, bias).dtype
    halved = gs.half_only(lambda x, y: x * y.astype(x.dtype))
    found = gs.autocast(lambda x: halved(x.astype("bfloat16"), x), dtype)(X)
    assert found.dtype == "bfloat16"


def test_it_is_the_function_itself_elsewhere():
    """Without autocast and in `keep_float32` the float32 function is called, compiled or not."""
    exact = exact_fn(PARAMS, X)
    assert loss_fn(PARAMS, X) == exact
    kept_fn = gs.autocast(gs.keep_float32()(loss_fn))
    assert kernels_of(kept_fn, PARAMS, X) == []
    inner = jax.jit(attend)  # compiled once for each
    loss = functools.partial(model, inner)
    assert loss(PARAMS, X) == loss(PARAMS, X) != gs.autocast(loss)(PARAMS, X)
    assert kernels_of(loss, PARAMS, X) == []
    half = gs.autocast(loss_fn)
    with gs.keep_float32():
        assert kernels_of(half, PARAMS, X) == []
    assert kernels_of(half, PARAMS, X) == ["float16"]


def test_a_part_of_a_function_is_kept():
    """Of two calls in a function, that in `keep_float32` is in float32."""

    def both(params, x):
        with gs.keep_float32():
            first = loss_fn(params, x)
        return first + loss_fn(params, x)

    assert kernels_of(gs.autocast(both), PARAMS, X) == ["float16"]
    assert len(cudnn.dtypes_of_calls(jax.grad(gs.autocast(both)), PARAMS, X)) == 2


def test_without_jit():
    """Under `jax.disable_jit`, as in a debugger, a kernel gets half precision too."""
    half = gs.autocast(loss_fn)
    with jax.disable_jit():
        assert kernels_of(half, PARAMS, X) == ["float16"]


def test_a_decorator():
    """Without brackets above a kernel; its name and docstring stay."""

    @gs.half_only
    def kernel(x, w):
        """Multiplies."""
        assert x.dtype == w.dtype
        return x @ w

    assert (kernel.__name__, kernel.__doc__) == ("kernel", "Multiplies.")
    assert gs.autocast(kernel)(X, PARAMS["q"]).dtype == "float32"


def test_a_program_inside_of_a_kernel():
    """A kernel may branch and loop, under one autocast and two."""

    def kernel(x, w):
        y = jax.lax.cond(x.sum() > 0, lambda y: 2 * y, lambda y: 3 * y, x @ w)
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.where(y > 0, y + 1, y - 1), y)

    own, w = gs.half_only(kernel), normal(0, 8, 8) / 3

    def loss(w, x):
        return jnp.mean(own(x @ w, w) @ w)

    for seed in range(3):
        x = normal(seed, 4, 8)
        exact, half = loss(w, x), gs.autocast(loss)(w, x)
        assert abs(half - exact) < 5e-3
        assert gs.autocast(lambda w, x: gs.autocast(loss)(w, x))(w, x) == half


# ── transformations ──────────────────────────────────────────────────────────────────────────────


def scanned(params, x):
    def turn(total, _):
        return total + jax.checkpoint(loss_fn)(params, x), None

    return jax.lax.scan(turn, 0.0, None, 2)[0] / 2


def mapped(params, x):
    return jnp.mean(jax.vmap(lambda row: loss_fn(params, row[None]))(x))


def branched(params, x):
    return jax.lax.cond(x[0, 0, 0] > -99, loss_fn, lambda *_: 0.0, params, x)


def stepped(params, x):
    """After a step of gradient descent inside."""
    grads = jax.grad(loss_fn)(jax.lax.stop_gradient(params), x)
    return loss_fn(jax.tree.map(lambda p, g: p - 0.0 * g, params, grads), x)


def twice(params, x):
    return gs.autocast(loss_fn, "bfloat16")(params, x) * 0 + loss_fn(params, x)


@pytest.mark.parametrize(
    "fun",
    [
        scanned,
        mapped,
        branched,
        stepped,
        jax.checkpoint(loss_fn),
        jax.jit(loss_fn),
        functools.partial(model, jax.jit(attend)),
        functools.partial(model, jax.checkpoint(attend)),
        functools.partial(model, gs.half_only(fused)),
        functools.partial(model, gs.half_only(fused, float32=attend)),
        gs.autocast(loss_fn),
    ],
)
def test_transformations_inside(fun):
    """The gradient is that of float32 within 0.2 %, and all calls of the kernel are in float16."""
    exact = jax.grad(exact_fn)(PARAMS, X)
    half = gs.autocast(fun)
    assert error(jax.grad(half)(PARAMS, X), exact) < 2e-3
    assert set(map(tuple, cudnn.dtypes_of_calls(jax.grad(half), PARAMS, X))) == {("f16",) * 3}


def test_transformations_outside():
    """`vmap`, `remat`, `jit` and `scan` around autocast."""
    half = gs.autocast(loss_fn)
    exact = jax.grad(exact_fn)(PARAMS, X)
    each = jax.vmap(jax.grad(half), (None, 0))(PARAMS, X[:, None])
    assert error(jax.tree.map(lambda g: g.mean(0), each), exact) < 2e-3
    assert error(jax.jit(jax.grad(jax.checkpoint(half)))(PARAMS, X), exact) < 2e-3

    def turn(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(half)(PARAMS, x[None])), None

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    total = jax.lax.scan(turn, zeros, X)[0]
    assert error(jax.tree.map(lambda g: g / 2, total), exact) < 2e-3


def written_out(q, k, v):
    """A kernel that JAX differentiates as often as one likes."""
    assert q.dtype == k.dtype == v.dtype == jnp.float16
    logits = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / 4
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[2:], bool)), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1).astype(q.dtype), v)


def test_tangents_and_second_derivatives():
    """`jvp` and a product with the Hessian, of autocast and inside of it."""
    loss = functools.partial(model, gs.half_only(written_out, float32=attention))
    direction = {name: normal(30 + i, 64, 64) / 8 for i, name in enumerate("qkvo")}

    def tangent(fun, params):
        return jax.jvp(lambda p: fun(p, X), (params,), (direction,))[1]

    def curved(fun, params):
        return jax.jvp(jax.grad(lambda p: fun(p, X)), (params,), (direction,))[1]

    for part in (tangent, curved):
        exact = part(exact_fn, PARAMS)
        assert error(part(gs.autocast(loss), PARAMS), exact) < 4e-3
        assert error(gs.autocast(functools.partial(part, loss))(PARAMS), exact) < 4e-3


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_inside(check):
    """In `jax.shard_map` on two devices, with the check of varying axes and without."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    whole, split = PartitionSpec(), PartitionSpec("devices")

    def sharded(params, x):
        return jax.shard_map(
            lambda p, x: jax.lax.pmean(loss_fn(p, x), "devices"),
            mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=check,
        )(params, x)  # fmt: skip

    exact = jax.grad(exact_fn)(PARAMS, X)
    half = gs.autocast(sharded)
    assert error(jax.jit(jax.grad(half))(PARAMS, X), exact) < 2e-3
    assert kernels_of(half, PARAMS, X) == ["float16"]


def test_a_function_with_its_own_derivative_around():
    """Autocast changes nothing in a `custom_vjp`, so an `half_only` function inside is in float32;
    `half_only` around it is in half precision."""

    @jax.custom_vjp
    def outer(q, k, v):
        return attend(q, k, v)

    outer.defvjp(lambda *xs: (attend(*xs), xs), lambda xs, g: jax.vjp(attend, *xs)[1](g))
    exact = jax.grad(exact_fn)(PARAMS, X)
    inside = gs.autocast(functools.partial(model, outer))
    assert error(jax.grad(inside)(PARAMS, X), exact) < 2e-3
    assert cudnn.dtypes_of_calls(jax.grad(inside), PARAMS, X) == []
    around = gs.autocast(functools.partial(model, gs.half_only(outer)))
    assert error(jax.grad(around)(PARAMS, X), exact) < 2e-3
    calls = cudnn.dtypes_of_calls(jax.grad(around), PARAMS, X)
    assert set(map(tuple, calls)) == {("f16",) * 3}


# ── the program ──────────────────────────────────────────────────────────────────────────────────


def language_model(attend, params, ids):
    """A small language model in float32: two blocks with a normalisation before each part."""

    def normalised(x, scale):
        mean = x.mean(-1, keepdims=True)
        return (
            (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * scale
        )

    def block(x, p):
        h = normalised(x, p["n1"])
        q, k, v = (u.reshape(*x.shape[:2], 4, 16) for u in jnp.split(h @ p["qkv"], 3, -1))
        x = x + attend(q, k, v).reshape(x.shape) @ p["o"]
        return x + jax.nn.gelu(normalised(x, p["n2"]) @ p["up"]) @ p["down"]

    x = params["e"][ids[:, :-1]] + params["p"]
    for p in params["blocks"]:
        x = block(x, p)
    logits = normalised(x, params["n"]) @ params["e"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def language_params(width=64):
    def dense(seed, a, b):
        return normal(seed, a, b) / a**0.5

    blocks = [
        {
            "qkv": dense(4 * i, width, 3 * width), "o": dense(4 * i + 1, width, width),
            "up": dense(4 * i + 2, width, 4 * width), "down": dense(4 * i + 3, 4 * width, width),
            "n1": jnp.ones(width), "n2": jnp.ones(width),
        }
        for i in range(2)
    ]  # fmt: skip
    return {
        "e": dense(90, 96, width),
        "p": dense(91, 32, width),
        "n": jnp.ones(width),
        "blocks": blocks,
    }


IDS = jnp.asarray(np.random.default_rng(0).integers(96, size=(4, 33)))


def by_hand(*xs):
    """A call with q, k and v cast by hand, and the result left in float16."""
    return fused(*(x.astype(jnp.float16) for x in xs))


@pytest.mark.filterwarnings("ignore:autocast has computed no product in float8")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8"])
def test_a_language_model(dtype):
    """In each block cuDNN gets half precision, forward and backward, and the gradient stays near
    that of float32."""
    params = language_params()
    half = gs.autocast(functools.partial(language_model, attend), dtype)
    assert cudnn.dtypes_of_calls(jax.grad(half), params, IDS) == [[SHORT[dtype]] * 3] * 4
    exact = jax.grad(functools.partial(language_model, attention))(params, IDS)
    found = jax.jit(jax.grad(half))(params, IDS)
    assert error(found, exact) < (2e-2 if dtype == "bfloat16" else 2e-3)


def test_no_cast_is_left_over():
    """The program has the operations, and keeps the bytes, of a call that is cast by hand, and
    fewer than attention that is written out."""
    params, counts, bytes_ = language_params(), [], []
    for own in (by_hand, attend, attention):
        half = gs.autocast(functools.partial(language_model, own))
        program = jax.make_jaxpr(jax.grad(half))(params, IDS)
        operations = (e for e in equations(program) if e.primitive.name == "cond" or not is_call(e))
        counts.append(Counter(e.primitive.name for e in operations))
        bytes_.append(kept(half, params, IDS))
    assert counts[0] == counts[1]
    assert bytes_[0] == bytes_[1] < bytes_[2]
    assert "cond" not in counts[1]
    assert counts[1].total() < counts[2].total()


def test_layers_keep_their_names():
    """What a kernel computes has the names of the layers around it."""

    def named(params, x):
        with jax.named_scope("block_1"):
            return model(gs.half_only(written_out, float32=attention), params, x)

    program = jax.make_jaxpr(gs.autocast(named))(PARAMS, X)
    scopes = {
        str(e.source_info.name_stack)
        for e in equations(program)
        if e.primitive.name == "dot_general"
    }
    assert scopes
    assert all("block_1" in scope and "gainstage" not in scope for scope in scopes)


def test_a_kernel_is_a_product():
    """Autocast does not warn that it computed no product in half precision if a kernel did."""

    def only_attention(params, x):
        return jnp.mean(attend(x, x + params, x) ** 2)

    x = normal(0, 2, 32, 4, 16)
    assert kernels_of(gs.autocast(only_attention), jnp.float32(1), x) == ["float16"]


# ── plans ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def plan():
    with pytest.MonkeyPatch.context() as patch:
        cudnn.use(patch)
        return find_plan(loss_fn, PARAMS, BATCHES, progress=False)


def the_row(plan):
    (row,) = [o for o in plan.entries if o.name == "half_only"]
    return row


def test_a_kernel_is_one_line_of_a_plan(plan):
    """`find_plan` measures it, a file keeps it, and it is refused for a function without the
    kernel."""
    row = the_row(plan)
    assert (row.dtype, row.reason, row.layer) == ("float16", "", "")
    assert 0 < row.error < 0.01
    assert "test_half_only.py" in row.line
    assert kernels_of(gs.autocast(loss_fn, plan), PARAMS, X) == ["float16"]
    exact = jax.grad(exact_fn)(PARAMS, X)
    found = jax.jit(jax.grad(gs.autocast(loss_fn, plan, loss_scale=2.0**10)))(PARAMS, X)
    assert error(found, exact) < 2e-3
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match=r"test_half_only\.py:\d+ \(`return .*attend.*lacks"):
        gs.autocast(exact_fn, plan)(PARAMS, X)


def test_a_plan_may_keep_a_kernel_in_float32(plan):
    """Where its row says so, the float32 function runs, with the gradient of that."""
    row = the_row(plan)
    rows = [o._replace(dtype="float32") if o is row else o for o in plan.entries]
    half = gs.autocast(loss_fn, Plan(plan.dtype, rows))
    assert kernels_of(half, PARAMS, X) == []
    assert error(jax.grad(half)(PARAMS, X), jax.grad(exact_fn)(PARAMS, X)) < 2e-3


def test_the_share_is_that_of_the_kernel(plan):
    """The share of its line, which is measured on rounded numbers in float32, is within a factor of
    two of the error of the kernel alone."""
    row = the_row(plan)
    rows = [o if o is row else o._replace(dtype="float32") for o in plan.entries]
    exact = jax.grad(exact_fn)(PARAMS, *BATCHES[0])
    found = jax.grad(gs.autocast(loss_fn, Plan(plan.dtype, rows), loss_scale=2.0**10))(
        PARAMS, *BATCHES[0]
    )
    assert 0.5 < row.error / error(found, exact) < 2


def test_a_plan_keeps_a_kernel_with_large_numbers_in_float32():
    """What float16 does not hold is not given to a kernel in float16."""
    large = {**PARAMS, "v": 3e5 * PARAMS["v"], "o": PARAMS["o"] / 3e5}
    plan = find_plan(loss_fn, large, BATCHES, progress=False)
    assert (the_row(plan).dtype, the_row(plan).reason) == ("float32", "it is too large")
    assert kernels_of(gs.autocast(loss_fn, plan), large, X) == []
    found = jax.grad(gs.autocast(loss_fn, plan))(large, X)
    assert error(found, jax.grad(exact_fn)(large, X)) < 2e-2


def test_a_plan_in_loops_and_layers():
    """The kernel of a block in a scan with `remat` is one line, with the name of its layer."""

    def loss(params, x):
        def turn(h, _):
            with jax.named_scope("block"):
                q, k, v = ((h @ params[name]).reshape(*h.shape[:2], 4, 16) for name in "qkv")
                return h + attend(q, k, v).reshape(h.shape) @ params["o"], None

        return jnp.mean((jax.lax.scan(jax.checkpoint(turn), x, None, 2)[0] - 1) ** 2)

    plan = find_plan(loss, PARAMS, BATCHES[:2], progress=False)
    assert (the_row(plan).dtype, the_row(plan).layer) == ("float16", "block")
    assert kernels_of(gs.autocast(loss, plan), PARAMS, X) == ["float16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_plans_in_other_dtypes(dtype):
    """In a plan with float8 a kernel is in float16, in one with bfloat16 in bfloat16."""
    plan = find_plan(loss_fn, PARAMS, BATCHES, dtype=dtype, max_noise=1, max_bias=1, progress=False)
    own = "bfloat16" if dtype == "bfloat16" else "float16"
    assert the_row(plan).dtype == own
    assert kernels_of(gs.autocast(loss_fn, plan), PARAMS, X) == [own]


def test_advise_counts_what_a_kernel_keeps():
    """The memory of float16 is that with the kernel, which keeps no weights of attention."""
    bytes_ = []
    for own in (attention, attend):
        loss = functools.partial(model, own)
        advice = gs.advise(loss, PARAMS, BATCHES[:2], progress=False)
        bytes_.append(next(c.kept for c in advice.candidates if c.name == "float16"))
    assert bytes_[1] < 0.8 * bytes_[0]


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


def test_float32_code_with_cudnn_names_the_remedy():
    """Autocast traces in float32, which cuDNN refuses; its error says which line to write."""
    with pytest.raises(NotImplementedError, match="got float32") as caught:
        gs.autocast(functools.partial(model, fused))(PARAMS, X)
    (note,) = [note for note in caught.value.__notes__ if "gainstage" in note]
    line = note.partition("for example: ")[2]
    scope = {"gainstage": gs, "functools": functools, "jax": jax}
    exec(line, scope)
    own = functools.partial(scope["attend"], is_causal=True)
    assert kernels_of(gs.autocast(functools.partial(model, own)), PARAMS, X) == ["float16"]


def test_tune_and_calls_without_a_float32_function_name_it():
    """A kernel that refuses float32 has no reference, nor a result without autocast."""
    bare = gs.half_only(fused)
    for call in (
        lambda: find_plan(functools.partial(model, bare), PARAMS, BATCHES, progress=False),
        lambda: model(bare, PARAMS, X),
    ):
        with pytest.raises(NotImplementedError, match="got float32") as caught:
            call()
        assert any("float32=another" in note for note in caught.value.__notes__)


def test_other_errors_get_no_advice_about_kernels():
    """An error that is not about a dtype that a kernel refuses stays as it is."""
    for wrong, kind in (
        (lambda x: x @ x.T @ x[:3] @ x, TypeError),
        (lambda x: jax.lax.add(x, x.astype("float16")), TypeError),
        (lambda x: jax.lax.scan(lambda c, _: (c.astype("float16"), None), x, None, 2), TypeError),
    ):
        with pytest.raises(kind) as caught:
            gs.autocast(wrong)(normal(0, 4, 8))
        assert not any("half_only" in note for note in getattr(caught.value, "__notes__", ()))


def test_a_kernel_that_refuses_half_precision():
    """Its own error says which dtype autocast gave it."""

    def kernel(x):
        if x.dtype != jnp.bfloat16:
            raise ValueError(f"bfloat16 only, not {x.dtype}")
        return x

    own = gs.half_only(kernel, float32=lambda x: x)
    assert gs.autocast(own, "bfloat16")(X).dtype == "float32"
    for each in (own, gs.half_only(kernel)):
        with pytest.raises(ValueError, match="bfloat16 only, not float16") as caught:
            gs.autocast(each)(X)
        assert any("gainstage.half_only passed float16" in n for n in caught.value.__notes__)


def test_functions_with_different_results():
    """A float32 function with results of other shapes is refused, by a sentence with both names."""
    own = gs.half_only(lambda x: x, float32=lambda x: x[:1])
    with pytest.raises(
        TypeError,
        match=r"kernel and float32 of .*got \[\(2, 32, 64\)\] and \[\(1, 32, 64\)\]",
    ):
        gs.autocast(own)(X)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((3,), {}), ((), {"kernel": None}), ((fused,), {"float32": "xla"})]
)
def test_what_is_no_function(args, kwargs):
    """The error names the argument."""
    with pytest.raises(TypeError, match=r"Expected a function for (kernel|float32) of half_only"):
        gs.half_only(*args, **kwargs)


# ── training ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("retries", [0, 3])
def test_training(retries):
    """A train step learns, and one that overflows is skipped, or taken again at a smaller scale."""
    rule = gs.DynamicLossScale(2.0**36)
    state = gs.TrainState.create(jax.tree.map(jnp.copy, PARAMS), optax.adam(1e-2), loss_scale=rule)
    step = gs.train_step(gs.autocast(loss_fn), retries=retries)
    losses = []
    for _ in range(40):
        state, loss = step(state, X)
        losses.append(float(loss))
    assert losses[-1] < 0.1 < losses[0]
    assert float(state.loss_scale) < 2.0**36


def test_the_gradients_of_a_state():
    """`state.value_and_grad` has the gradients of float32 within 0.2 %."""
    state = gs.TrainState.create(PARAMS, optax.sgd(0.1))
    _, _, grads = state.value_and_grad(gs.autocast(loss_fn))(X)
    assert error(grads, jax.grad(exact_fn)(PARAMS, X)) < 2e-3


@pytest.mark.parametrize("own", [attend, gs.half_only(written_out, float32=attention)])
def test_an_audit_compares_a_kernel_with_float32(own):
    """Its reference is the float32 function, also in the audited steps of a run."""
    half = gs.autocast(functools.partial(model, own))
    result = gs.audit(half, PARAMS, X, scale=2.0**10)
    assert result.ok
    exact = np.float64(exact_fn(PARAMS, X))
    assert abs(result.float32_loss - exact) < 1e-6 * exact
    assert 0 < result.gradient_error < 2e-3
    state = gs.TrainState.create(jax.tree.map(jnp.copy, PARAMS), optax.adam(1e-2))
    step = gs.train_step(half, audit_every=2)
    for _ in range(3):
        state, _ = step(state, X)
    assert step.audits.count > 0
    assert step.audits.last.ok


# ── lint ─────────────────────────────────────────────────────────────────────────────────────────


def around(attend):
    """`attend` inside of a function with its own derivative, where `half_only` is left as it is."""

    @jax.custom_vjp
    def outer(*xs):
        return attend(*xs)

    outer.defvjp(lambda *xs: jax.vjp(attend, *xs), lambda pull, g: pull(g))
    return outer


KERNELS = {
    "cudnn": attend,
    "no float32": gs.half_only(fused),
    "cast by hand": by_hand,
    "written out": gs.half_only(written_out, float32=attention),
    "inside": around(attend),
}


@pytest.mark.parametrize("name", KERNELS)
def test_lint_finds_nothing_in_a_right_step(name):
    """A step with a kernel is not accused, whatever is known of its derivative."""
    loss = gs.autocast(functools.partial(language_model, KERNELS[name]))
    tx = gs.with_loss_scale(optax.adam(1e-3))

    def step(params, opt_state, ids):
        value, grads = gs.value_and_grad(loss, opt_state)(params, ids)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = language_params()
    assert gs.lint(step, params, tx.init(params), IDS) == []


@pytest.mark.parametrize("name", KERNELS)
def test_lint_finds_a_loss_that_is_not_scaled(name):
    """A fault is found in a step with a kernel as in one without."""
    loss = gs.autocast(functools.partial(language_model, KERNELS[name]))
    tx = gs.with_loss_scale(optax.adam(1e-3))

    def step(params, opt_state, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = language_params()
    assert [f.kind for f in gs.lint(step, params, tx.init(params), IDS)] == ["not scaled"]

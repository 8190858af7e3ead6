"""A function written in float32 is computed in half precision, and nothing else of it changes."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equations import equations
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.optimizers import SGD, Variable

KEY = jax.random.key(0)


def draw(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape), jnp.float32)


PARAMS = {"a": draw(1, 16, 16) / 4, "b": draw(2, 16), "c": draw(3, 16, 16) / 4}
X = draw(4, 32, 16)


def network(params, x):
    h = jnp.tanh(x @ params["a"] + params["b"])
    return jnp.mean(jax.nn.log_softmax(h @ params["c"])[:, 0] ** 2)


def products(fun, *args):
    """The dtypes of the operands of all products in a program, also inside of others."""
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                found.append({str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)})
            for p in eqn.params.values():
                for q in p if isinstance(p, (tuple, list)) else (p,):
                    inner = getattr(q, "jaxpr", q)
                    if hasattr(inner, "eqns"):
                        look(inner)

    look(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


NAMES = {
    "float16": ("fp16", "f16", "half", jnp.float16, np.float16, np.dtype("float16")),
    "bfloat16": ("bf16", jnp.bfloat16, jnp.dtype("bfloat16")),
}


@pytest.mark.parametrize(("name", "other"), [(n, other) for n in NAMES for other in NAMES[n]])
def test_a_dtype_has_the_names_that_people_know(name, other):
    """`"fp16"`, `"half"`, `jnp.float16` and the like mean `"float16"`, also in decorators."""
    wanted = products(gs.autocast(network, name), PARAMS, X)
    assert wanted == [{name}] * 2
    for cast in (gs.autocast(network, other), gs.autocast(network, dtype=other)):
        assert products(cast, PARAMS, X) == wanted
    for decorator in (gs.autocast(other), gs.autocast(dtype=other)):
        assert products(decorator(network), PARAMS, X) == wanted
    assert products(gs.autocast()(network), PARAMS, X) == [{"float16"}] * 2


def test_another_name_is_refused_where_it_is_written():
    """An unknown dtype is an error of the call that has it; a `with` says what to write."""
    for wrong in ("banana", "float64", jnp.float64, jnp.int8, 3):
        with pytest.raises(ValueError, match=r"Expected one of .*'float16'.* for dtype; got"):
            gs.autocast(network, wrong)
    with pytest.raises(ValueError, match="for dtype; got 'banana'"):
        gs.autocast("banana")
    words = r"it is no context. Write loss_fn = gainstage.autocast"
    with pytest.raises(TypeError, match=words), gs.autocast():
        pass


@pytest.mark.parametrize("dtype", ["float32", jnp.float32, "fp32"])
def test_float32_leaves_a_function_as_it_is(dtype):
    """So one word turns autocast off, in all ways to write it."""
    exact = str(jax.make_jaxpr(network)(PARAMS, X))
    for cast in (gs.autocast(network, dtype), gs.autocast(dtype)(network)):
        assert str(jax.make_jaxpr(cast)(PARAMS, X)) == exact


def error(found, expected):
    """The norm of the difference of two pytrees over that of the second, in float64."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    off = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return (off / sum(float((b**2).sum()) for _, b in pairs)) ** 0.5


def off(fun, *args, scale=2.0**10):
    """The error of the gradient of a function under autocast."""
    cast = gs.autocast(fun)
    grads = jax.jit(jax.grad(lambda p, *rest: cast(p, *rest) * scale))(*args)
    return error(jax.tree.map(lambda g: g / scale, grads), jax.jit(jax.grad(fun))(*args))


@pytest.mark.parametrize(("plan", "limit"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_products_are_in_half_precision(plan, limit):
    """All products have operands and results of the plan's dtype; the loss is almost the same."""
    cast = gs.autocast(network, plan)
    assert products(cast, PARAMS, X) == [{plan}, {plan}]
    assert all(kinds == {plan} for kinds in products(jax.grad(cast), PARAMS, X))
    found, expected = (jax.jit(jax.value_and_grad(f))(PARAMS, X) for f in (cast, network))
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=limit)
    assert error(found[1], expected[1]) < limit


def test_results_and_gradients_keep_their_dtypes():
    """Results and gradients have the dtypes and the structure that the function gives them."""

    def several(params, x):
        h = x @ params["a"]
        return {"h": h, "n": x.shape[0], "none": None, "half": h.astype(jnp.bfloat16)}, (
            h > 0,
            h[0],
        )

    expected = jax.eval_shape(several, PARAMS, X)
    found = jax.eval_shape(gs.autocast(several), PARAMS, X)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    grads = jax.eval_shape(jax.grad(gs.autocast(network)), PARAMS, X)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


def test_what_overflows_stays_in_float32():
    """Sums, exponentials and squares of large float16 numbers are finite."""

    def loss(w, x):
        h = x @ w  # about 1e3
        return (
            jnp.log(jnp.sum(jnp.exp(h / 100))) + jnp.mean(h**2) + jnp.var(h) + jnp.square(h).mean()
        )

    w, x = np.full((8, 4), 100, np.float32), np.ones((512, 8), np.float32)
    assert gs.autocast(loss)(w, x) == pytest.approx(float(jax.jit(loss)(w, x)), rel=1e-3)
    assert off(loss, w, x, scale=1.0) < 1e-3


def dtype_of(name, fun, *args):
    """The dtype of the results of the operation of this name under autocast."""
    eqns = jax.make_jaxpr(gs.autocast(fun))(*args).jaxpr.eqns
    (found,) = {str(eqn.outvars[0].aval.dtype) for eqn in eqns if eqn.primitive.name == name}
    return found


def centered(h):
    return h - h.mean(-1, keepdims=True), h.var(-1, keepdims=True) + 1e-5


NORMALISATIONS = {
    "layer": lambda h, g, b: centered(h)[0] * lax.rsqrt(centered(h)[1]) * g + b,
    "by a quotient": lambda h, g, b: centered(h)[0] / jnp.sqrt(centered(h)[1]) * g + b,
    "the factor first": lambda h, g, b: centered(h)[0] * (lax.rsqrt(centered(h)[1]) * g) + b,
    "without a bias": lambda h, g, b: h * lax.rsqrt((h**2).mean(-1, keepdims=True)) * g,
    "adaptive": lambda h, g, b: (
        centered(h)[0] * lax.rsqrt(centered(h)[1]) * (1 + h @ jnp.tile(g[:, None], 16))
    ),
}


@pytest.mark.parametrize("norm", NORMALISATIONS.values(), ids=NORMALISATIONS)
@pytest.mark.parametrize("each", [False, True])
def test_what_a_normalisation_returns_is_in_half(norm, each):
    """It is computed in float32, and its result rounded where a factor or bias is applied."""
    params = PARAMS | {"g": jnp.ones(16), "next": draw(6, 16, 16)}

    def net(params, x):
        own = functools.partial(norm, g=params["g"], b=params["b"])
        h = jax.vmap(own)(x @ params["a"]) if each else own(x @ params["a"])
        return jnp.sum(jnp.tanh(h) @ params["next"]) / 8

    assert dtype_of("tanh", net, params, X) == "float16"
    assert off(net, params, X) < 4e-3


WIDE = {
    "logarithms of probabilities": lambda p, h: -0.5 * (h[:, None] ** 2).sum(-1) + p["b"][:1],
    "samples": lambda p, h: p["b"] + jnp.sqrt(jnp.exp(h)) * X[:, :1],
    "no factor or bias": lambda p, h: centered(h)[0] * lax.rsqrt(centered(h)[1]),
}


@pytest.mark.parametrize("fun", WIDE.values(), ids=WIDE)
def test_other_float32_results_stay_wide(fun):
    """A parameter that is added to them does not round them."""

    def net(p, x):
        return jnp.sum(jnp.tanh(fun(p, x @ p["a"])))

    assert dtype_of("tanh", net, PARAMS, X) == "float32"


def test_a_bias_of_a_weak_type_is_a_parameter():
    """As `jnp.full(shape, 0.5)` makes it."""
    params = PARAMS | {"b": jnp.full(16, 0.5)}
    assert params["b"].weak_type
    assert dtype_of("tanh", network, params, X) == "float16"


def test_a_sum_of_parameters_may_be_rounded():
    """Letters and places are parameters, so the residual stream is in half precision."""
    params = PARAMS | {
        "letters": draw(11, 20, 16),
        "places": draw(12, 32, 16),
        "d": draw(13, 16, 16),
    }

    def net(params, tokens):
        x = params["letters"][tokens] + params["places"]
        return jnp.sum(jnp.tanh(x + x @ params["d"]) @ params["d"])

    tokens = jnp.arange(32) % 20
    assert dtype_of("tanh", net, params, tokens) == "float16"
    assert off(net, params, tokens) < 2e-3


@pytest.mark.parametrize("use", [jnp.add, jnp.multiply])
@pytest.mark.parametrize("shape", [(), (16,)])
def test_the_gradient_of_a_bias_or_a_factor_is_summed_in_float32(use, shape):
    """The derivative is summed over the batch in float32, and so is a second derivative."""

    def loss(b, x):
        return jnp.mean(jnp.tanh(use(x @ PARAMS["a"], b)) ** 2)

    b, x = jnp.ones(shape) / 2, draw(5, 1024, 16)
    cast = gs.autocast(loss)
    program = jax.make_jaxpr(jax.grad(cast))(b, x)
    assert products(cast, b, x) == [{"float16"}]
    sums = [eqn for eqn in equations(program) if eqn.primitive.name == "reduce_sum"]
    assert {str(v.aval.dtype) for eqn in sums for v in eqn.invars} == {"float32"}
    assert off(loss, b, x) < 1e-3
    first, second = (jax.jit(jax.hessian(lambda b, f=f: 2.0**10 * f(b, x))) for f in (cast, loss))
    assert error(first(b), second(b)) < 0.01


def test_derivatives_of_the_uses_of_a_value_are_added_in_float32():
    """The derivatives of a mean and a variance, which cancel, leave a small sum that is right."""

    def loss(params, x):
        h = x @ params["a"]
        mean = h.mean(0)
        h = (h - mean) / jnp.sqrt(jnp.mean(h**2, 0) - mean**2)
        return jnp.mean(jnp.tanh(h) ** 3 * jnp.arange(16.0))

    offset = 100 + 2 * np.asarray(X)
    assert off(loss, {"a": PARAMS["a"]}, offset) < 0.1


def test_what_is_not_float32_stays():
    """Float64, bfloat16, integers, booleans and keys are computed as without autocast."""
    with jax.enable_x64(True):
        wide = jnp.ones((3, 3), jnp.float64)
        args = wide, wide.astype(jnp.bfloat16), jnp.arange(9).reshape(3, 3), jax.random.key(1)

        def fun(w, b, n, key):
            return w @ w, b @ b, n @ n, n > 4, jax.random.split(key), jax.random.bits(key)

        for found, expected in zip(gs.autocast(fun)(*args), jax.jit(fun)(*args), strict=True):
            assert found.dtype == expected.dtype
            if found.dtype != args[-1].dtype:
                found, expected = map(np.asarray, (found, expected))
            assert bool((found == expected).all())
        assert products(gs.autocast(fun), *args)[0] == {"float64"}


def test_gradients_of_integers_are_float0():
    """A function of integers has float0 gradients, as without autocast."""
    table = jnp.ones((4, 8))
    grads = jax.grad(gs.autocast(lambda n, w: (w[n] @ w.T).sum()), (0, 1), allow_int=True)
    by_index, by_table = grads(jnp.arange(3), table)
    assert by_index.dtype == jax.dtypes.float0
    assert by_table.dtype == jnp.float32


@jax.custom_vjp
def clipped(x):
    return x @ x.T


clipped.defvjp(lambda x: (x @ x.T, x), lambda x, g: (3 * (g @ x),))


@jax.custom_jvp
def odd(x):
    return x


odd.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))


@jax.custom_jvp
def straight_through(h):
    return jnp.maximum(h, 0.0)


straight_through.defjvp(
    lambda h, t: (straight_through(*h), jnp.where(h[0] > 1, 2 * t[0], 0.5 * t[0]))
)


@pytest.mark.parametrize("activation", [jax.nn.relu, straight_through], ids=["relu", "own"])
def test_a_cheap_activation_keeps_its_derivative_in_half(activation):
    """Its result and its derivative are in half precision, and the derivative is its own."""

    def net(params, x):
        return jnp.sum(jnp.tanh(activation(x @ params["a"])))

    assert dtype_of("tanh", net, PARAMS, X) == "float16"
    kept = jax.tree.leaves(jax.vjp(gs.autocast(net), PARAMS, X)[1])
    assert not [leaf for leaf in kept if leaf.shape == (32, 16) and leaf.dtype == jnp.float32]
    assert off(net, PARAMS, X) < 2e-3
    each = jax.jit(jax.vmap(jax.grad(gs.autocast(net)), (None, 0)))(PARAMS, X)
    together = jax.tree.map(lambda g: np.asarray(g).sum(0), each)
    assert error(together, jax.jit(jax.grad(net))(PARAMS, X)) < 2e-3


def test_custom_derivatives_are_kept():
    """A function with its own derivative keeps it, in float32; what follows it is half."""

    def loss(w, x):
        return (clipped(x @ w).sum() + jnp.sum(jax.nn.relu(odd(x @ w)) @ w.T)) / 100

    w = PARAMS["a"]
    assert off(loss, w, X) < 3e-3
    kinds = products(gs.autocast(loss), w, X)
    assert {"float32"} in kinds  # inside of `clipped`
    assert kinds[-1] == {"float16"}


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_is_computed_in_half(reverse):
    """Products in a scan are half; carries keep their dtypes, and mixed ones stay mixed."""

    def loss(params, x):
        def turn(carry, row):
            h, n, kept = carry
            h = jnp.tanh(row @ params["a"] + h @ params["u"])
            return (h, n + 1, kept.astype(jnp.bfloat16)), (h @ params["c"], n)

        start = jnp.zeros((1, 64)), jnp.int32(0), jnp.ones(3, jnp.bfloat16)
        (h, n, _), (ys, ns) = lax.scan(turn, start, x[:, None], reverse=reverse, unroll=2)
        return jnp.mean(ys**2) + jnp.mean(h) + (n + ns.sum()) * 0.0

    params = {name: draw(i, 64, 64) / 8 for i, name in enumerate("acu")}
    rows = draw(4, 32, 64)
    assert off(loss, params, rows) < 3e-3
    assert products(gs.autocast(loss), params, rows) == [{"float16"}] * 3


def test_layers_in_a_scan_under_checkpoint():
    """A scan over stacked layers with remat has all products in half, forward and backward."""

    def loss(params, x):
        def layer(h, w):
            return h + jnp.tanh(h @ w), None

        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    params = draw(6, 3, 16, 16) / 4
    assert off(loss, params, X) < 3e-3
    kinds = products(jax.grad(gs.autocast(loss)), params, X)
    assert len(kinds) >= 3
    assert all(kind == {"float16"} for kind in kinds)


@pytest.mark.parametrize(
    "policy", [None, "everything_saveable", "nothing_saveable", "save_only_these_names"]
)
def test_policies_of_checkpoint_are_kept(policy):
    """`jax.checkpoint` keeps the residuals that its policy says, now in half precision."""
    kind = policy and getattr(jax.checkpoint_policies, policy)
    kind = kind("h") if policy == "save_only_these_names" else kind

    def inner(params, x):
        h = checkpoint_name(jnp.tanh(x @ params["a"]), "h")
        return jnp.sin(h @ params["c"])

    def loss(params, x):
        return jax.checkpoint(inner, policy=kind)(params, x).sum() / 100

    def saved(fun):
        residuals = jax.make_jaxpr(lambda p, x: jax.vjp(fun, p, x)[1])(PARAMS, X).out_avals
        return [x.shape for x in residuals if x.shape]

    assert off(loss, PARAMS, X) < 3e-3
    assert sorted(saved(gs.autocast(loss))) == sorted(saved(loss))


def test_branches_and_loops():
    """Branches and while loops are computed in half, and take the way that they take in float32."""

    def loss(params, x, n):
        h = x @ params["a"]
        h = lax.cond(n > 2, lambda h: h @ params["u"], lambda h: -h, h)
        h = lax.switch(n, [jnp.sin, jnp.cos, lambda h: h @ params["u"], lambda h: h], h)
        return h.sum() / 100

    params = {**PARAMS, "u": draw(5, 16, 16) / 8}
    for n in range(4):
        assert off(loss, params, X, n) < 3e-3

    def power(w, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, w))

    n, found = gs.autocast(power)(params["u"], 3)
    assert n == 3
    assert error(found, power(params["u"], 3)[1]) < 3e-3
    assert {"float16"} in products(gs.autocast(power), params["u"], 3)


def test_it_works_over_and_under_transformations():
    """jit, vmap, grad, jvp and a nested autocast may be inside or outside."""
    w, x = draw(1, 64, 64) / 8, draw(4, 32, 64)
    inner = jax.jit(lambda w, x: jnp.sin(x @ w))
    expected = np.sin(np.asarray(x) @ np.asarray(w))
    for fun in (
        jax.jit(gs.autocast(inner)),
        gs.autocast(jax.vmap(inner, (None, 0))),
        jax.vmap(gs.autocast(inner), (None, 0)),
        gs.autocast(gs.autocast(inner)),
    ):
        assert products(fun, w, x) == [{"float16"}]
        assert error(fun(w, x), expected) < 2e-3
    plain = jax.grad(lambda w: jnp.sin(x @ w).sum())
    assert error(jax.jit(gs.autocast(plain))(w), jax.jit(plain)(w)) < 3e-3
    second = jax.grad(lambda w: jax.grad(lambda w: gs.autocast(inner)(w, x).sum())(w).sum())
    exact = jax.grad(lambda w: jax.grad(lambda w: inner(w, x).sum())(w).sum())
    assert error(jax.jit(second)(w), jax.jit(exact)(w)) < 1e-2
    _, tangent = jax.jvp(functools.partial(gs.autocast(inner), x=x), (w,), (w,))
    product = np.asarray(x) @ np.asarray(w)
    assert error(tangent, np.cos(product) * product) < 3e-3


@pytest.mark.as_users
def test_donated_arguments():
    """A step that donates its parameters reuses their buffers, as the float32 step does."""

    def step(fun):
        def take(params, x):
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(fun)(params, x))

        return jax.jit(take, donate_argnums=0)

    for fun in (network, gs.autocast(network)):
        params = jax.tree.map(lambda p: jnp.asarray(np.array(p)), PARAMS)
        compiled = step(fun).lower(PARAMS, X).compile()
        assert str(compiled.as_text()).count("may-alias") == len(PARAMS)
        new = compiled(params, X)
        assert all(p.is_deleted() for p in params.values())
        assert all(p.dtype == jnp.float32 for p in new.values())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices(kind):
    """On a mesh the result has the sharding that it has in float32."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))

    def forward(params, x):
        return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"]

    found, expected = jax.jit(gs.autocast(forward))(params, x), jax.jit(forward)(params, x)
    assert found.sharding == expected.sharding
    assert error(found, expected) < 2e-3
    grads = jax.jit(jax.grad(gs.autocast(network)))(params, x)
    assert error(grads, jax.jit(jax.grad(network))(PARAMS, X)) < 2e-3


@pytest.mark.as_users
def test_shard_map():
    """Products inside of `jax.shard_map` are half; collectives and their results stay right."""
    x = draw(4, 128, 16)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params, x):
        def local(params, x):
            return lax.pmean(network(params, x), "data")

        specs = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(params, x)

    assert all(kind == {"float16"} for kind in products(gs.autocast(loss), PARAMS, x))
    assert off(jax.jit(loss), PARAMS, x) < 3e-3
    whole = jax.shard_map(
        gs.autocast(lambda p, x: lax.pmean(network(p, x), "data")),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    assert float(jax.jit(whole)(PARAMS, x)) == pytest.approx(
        float(jax.jit(network)(PARAMS, x)), rel=2e-3
    )


def test_callbacks_and_kernels():
    """Callbacks and Pallas kernels get the dtypes that they were written for."""
    seen = []

    def double(ref, out):
        out[...] = ref[...] * 2

    def fun(w, x):
        h = x @ w
        jax.debug.callback(lambda h: seen.append(h.dtype), h)
        h = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
        kernel = pl.pallas_call(double, jax.ShapeDtypeStruct(h.shape, h.dtype), interpret=True)
        return kernel(h)

    found = jax.jit(gs.autocast(fun))(PARAMS["a"], X)
    jax.effects_barrier()
    assert seen == [np.float32]
    assert error(found, 2 * np.sin(np.asarray(X) @ np.asarray(PARAMS["a"]))) < 3e-3


@pytest.fixture
def locations():
    """Programs say where an operation comes from, as they do for users."""
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.mark.usefixtures("locations")
def test_the_users_lines_and_scopes_survive():
    """Profilers and errors name the user's scope and file, as without autocast."""

    def fun(w, x):
        with jax.named_scope("encoder"):
            return jnp.tanh(x @ w).sum()

    text = jax.jit(jax.grad(gs.autocast(fun))).lower(PARAMS["a"], X).as_text(debug_info=True)
    lines = [line for line in text.splitlines() if "dot_general" in line and "loc(" in line]
    assert any("encoder" in line for line in lines)
    assert __file__.rpartition("/")[2] in text


def test_operations_can_be_kept_in_float32():
    """`keep_float32` keeps what is computed inside in float32, also in loops and functions."""

    @gs.keep_float32()
    def exact(h, w):
        return h @ w

    def fun(params, x):
        h = x @ params["a"]
        with gs.keep_float32():
            h, _ = lax.scan(lambda h, w: (h @ w, None), h, draw(7, 2, 16, 16))
        return jax.jit(exact)(h, params["c"]) @ params["c"].T

    assert products(gs.autocast(fun), PARAMS, X) == [
        {"float16"}, {"float32"}, {"float32"}, {"float16"},
    ]  # fmt: skip


def test_arguments_that_are_no_parameters_stay_wide():
    """A mask of -1e9 and targets are not rounded; a bias is."""

    params = PARAMS | {"u": draw(9, 16, 16)}

    def fun(params, x, mask, y):
        h = jnp.tanh(x @ params["a"] + params["b"]) @ params["u"]
        return h, h + mask, h - y

    mask, y = jnp.full((32, 16), -1e9), draw(8, 32, 16)
    assert dtype_of("tanh", fun, params, X, mask, y) == "float16"
    h, masked, rest = gs.autocast(fun)(params, X, mask, y)
    np.testing.assert_array_equal(masked, h + mask)
    np.testing.assert_array_equal(rest, h - y)
    assert bool((h == h.astype(jnp.float16)).all())
    hidden = gs.autocast(lambda w, x: (x @ w) + mask)(PARAMS["a"], X)
    assert bool(jnp.isfinite(hidden).all())


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jax.nn.relu(self.norm(self.up(x)))))


def test_one_keep_float32_may_be_entered_inside_of_itself():
    """It ends where the outer one ends: what is computed after it is in float16 again."""
    keep = gs.keep_float32()

    def loss(w, x):
        with keep:
            with keep:
                h = x @ w
            h = h @ w
        return jnp.mean((h @ w) ** 2)

    w = draw(1, 16, 16) / 4
    program = str(jax.make_jaxpr(gs.autocast(loss))(w, X))
    assert program.count("f32[32,16] = dot_general") == 2
    assert program.count("f16[32,16] = dot_general") == 1


def test_an_nnx_model_is_changed_as_in_float32():
    """Running means, in float32, and counts of random numbers are those after a float32 call."""
    model, plain = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    state = gs.TrainState.create(model, optax.sgd(0.1))
    state, value = gs.train_step(gs.autocast(loss))(state, X)
    model = state.params
    expected, grads = nnx.jit(nnx.value_and_grad(loss))(plain, X)
    assert float(value) == pytest.approx(float(expected), rel=5e-3)
    assert model.norm.mean[...].dtype == jnp.float32
    assert error(model.norm.mean[...], plain.norm.mean[...]) < 3e-3
    assert int(model.drop.rngs.count[...]) == int(plain.drop.rngs.count[...])
    moved = plain.up.kernel[...] - 0.1 * grads["up"]["kernel"][...]
    assert error(model.up.kernel[...], moved) < 1e-3


def test_an_equinox_model():
    """An Equinox model trains, with its static fields."""
    model = eqx.nn.MLP(16, 1, 16, 2, key=KEY)

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(gs.autocast(loss)))(model, X)
    expected, exact = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, X)
    assert float(value) == pytest.approx(float(expected), rel=5e-3)
    assert error(grads, exact) < 5e-3


def test_a_linen_model():
    """Both convolutions of a Linen model are half, with a pool of maxima between them."""
    pool = functools.partial(linen.max_pool, window_shape=(2, 2), strides=(2, 2))
    model = linen.Sequential([linen.Conv(4, (3, 3)), jax.nn.gelu, pool, linen.Conv(2, (3, 3))])
    x = draw(9, 2, 8, 8, 3)
    params = jax.jit(model.init)(KEY, x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    assert products(gs.autocast(loss), params, x) == [{"float16"}] * 2
    assert off(loss, params, x) < 3e-3


def test_minimize_with_variables():
    """A loss over `gs.optimizers.Variable`s trains, and what it assigns is assigned in float32."""
    w, b, mean = Variable(PARAMS["a"]), Variable(PARAMS["b"]), Variable(jnp.zeros(16))

    def loss():
        h = X @ w.value() + b.value()
        mean.assign(0.9 * mean.value() + 0.1 * h.mean(0))
        return jnp.mean(h**2)

    before = w.value(), b.value()
    opt = gs.optimizers.LossScaleOptimizer(SGD(0.1))
    value = opt.minimize(gs.autocast(loss), [w, b])
    h = X @ before[0] + before[1]
    assert float(value) == pytest.approx(float(jnp.mean(h**2)), rel=2e-3)
    assert error(mean.value(), 0.1 * h.mean(0)) < 2e-3
    grads = jax.grad(lambda w, b: jnp.mean((X @ w + b) ** 2), (0, 1))(*before)
    assert (
        error([w.value(), b.value()], [p - 0.1 * g for p, g in zip(before, grads, strict=True)])
        < 1e-3
    )


OPERATIONS = {
    "product": lambda h, w: h @ w,
    "bias": lambda h, w: h + w[0],
    "tanh": lambda h, w: jnp.tanh(h),
    "norm": lambda h, w: (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1),
    "softmax": lambda h, w: jax.nn.softmax(h),
    "gelu": lambda h, w: jax.nn.gelu(h),
    "turn": lambda h, w: h[:, ::-1],
    "gate": lambda h, w: h * jax.nn.sigmoid(h @ w),
    "where": lambda h, w: jnp.where(h > 0, h, -0.1 * h),
    "join": lambda h, w: jnp.concatenate([h[:, 4:], h[:, :4]], 1),
    "scan": lambda h, w: lax.scan(lambda c, _: (jnp.sin(c @ w), None), h, length=2)[0],
    "checkpoint": lambda h, w: jax.checkpoint(lambda h: jnp.cos(h @ w))(h),
    "residual": lambda h, w: h + jnp.exp(-jnp.square(h)),
}


@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_random_programs(names):
    """A random program and its gradient are those of float32, up to float16's rounding."""
    weights = [draw(20 + i, 8, 8) / 3 for i in range(len(names))]

    def loss(weights, x):
        for name, w in zip(names, weights, strict=True):
            x = OPERATIONS[name](x, w)
        return jnp.sum(jnp.sin(x)) / 16

    @jax.jit
    def both(weights, x):
        cast = gs.autocast(loss)
        grads = jax.grad(lambda w: cast(w, x) * 2.0**8)(weights)
        return cast(weights, x), grads, jax.value_and_grad(loss)(weights, x)

    found, grads, (expected, exact) = both(weights, draw(40, 4, 8))
    assert abs(float(found) - float(expected)) <= 0.01 * (1 + abs(float(expected)))
    grads, exact = (np.concatenate(g, dtype=np.float64) for g in (grads, exact))
    norm = np.linalg.norm(exact)
    assert np.linalg.norm(grads / 2.0**8 - exact) <= 0.02 * norm + 1e-3


@pytest.mark.parametrize("plan", ["halves", "float64", None, 16, jnp.float64])
def test_an_unknown_plan_is_refused(plan):
    """The error names the value, and what there is."""
    with pytest.raises(ValueError, match=r"Plan for dtype; got"):
        gs.autocast(network, plan)


def test_only_functions_are_cast():
    """An error names what is no function."""
    with pytest.raises(TypeError, match=r"function for fun; got \{\}"):
        gs.autocast({})


def test_a_loss_that_scales_itself_is_not_cast():
    """Its inside cannot be seen, so it would stay in float32: the error says the right order."""
    scaled = gs.autocast(network, loss_scale=2.0**15)
    with pytest.raises(ValueError, match=r"Write autocast\(loss_fn, dtype, loss_scale="):
        gs.autocast(scaled)
    assert products(gs.autocast(network, loss_scale=2.0**15), PARAMS, X) == [{"float16"}] * 2


def test_models_are_parameters_in_whatever_order_keywords_are_passed():
    """A model that is a keyword may be rounded; another argument beside it may not."""
    model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    x, t = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), np.float32(0.1)

    def loss(t=None, model=None):
        return (jnp.tanh(x @ model.kernel[...]) - t).sum()

    half = gs.autocast(loss)
    assert half(t=t, model=model) == half(model=model, t=t)
    whole = half(t=np.float32(0), model=model)
    np.testing.assert_allclose(half(t=t, model=model), whole - 8 * t, rtol=1e-5)


@pytest.mark.parametrize(
    "bounded",
    [
        jnp.tanh,
        jax.nn.sigmoid,
        jax.nn.gelu,
        lambda y: jnp.tanh(y**2),
        lambda y: jax.nn.sigmoid(y**2),
    ],
    ids=["tanh", "sigmoid", "gelu", "tanh of a power", "sigmoid of a power"],
)
def test_gradients_of_bounded_functions_of_products_are_right(bounded):
    """They come from the result in half precision, and differ from float32 by its rounding."""
    x = np.linspace(-2, 2, 32, dtype=np.float32).reshape(8, 4)
    w = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    def loss(w):
        return jnp.mean(bounded(x @ w) * np.float32(3))

    np.testing.assert_allclose(
        jax.grad(gs.autocast(loss))(w), jax.grad(loss)(w), rtol=2e-2, atol=2e-3
    )


def test_a_constant_that_half_precision_would_round_is_not_rounded():
    """Nor is one of its subnormal numbers, which have fewer digits."""
    x = np.linspace(0.5, 1, 16, dtype=np.float32).reshape(4, 4)
    table = np.float32(1.1e-6) * (1 + np.arange(4, dtype=np.float32) / 7)

    def loss(w):
        return ((x @ w) * table).sum()

    w = np.eye(4, dtype=np.float32)
    exact, half = loss(w), gs.autocast(loss)(w)
    np.testing.assert_allclose(half, exact, rtol=1e-3)

    def scaled(fun):
        return jax.grad(lambda w: fun(w) * 2.0**15)(w)

    np.testing.assert_allclose(scaled(gs.autocast(loss)), scaled(loss), rtol=2e-3)


def test_a_call_outside_of_a_program_reads_variables_through_all_that_is_around_it():
    """A loss with a scale of its own, and autocast within autocast, close over one."""
    v = Variable(np.linspace(-1, 1, 12).reshape(4, 3))
    x = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)

    def loss(x):
        return jnp.mean((x @ v.value()) ** 2)

    for wrapped in (gs.autocast(loss, loss_scale=2.0**15), gs.autocast(gs.autocast(loss))):
        np.testing.assert_allclose(wrapped(x), loss(x), rtol=1e-3)
        v.assign(v * 2)
        np.testing.assert_allclose(wrapped(x), loss(x), rtol=1e-3)

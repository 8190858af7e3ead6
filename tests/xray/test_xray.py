"""The X-ray of a step: which operation is not finite, in which layer, and what helps."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import gainstage as gs
from gainstage import xray

HALF = jnp.float16
PARAMS = {name: {"kernel": jnp.eye(4) + 0.25} for name in ("first", "second", "third")}
X = jnp.linspace(-1, 1, 12).reshape(3, 4)


def network(fault=lambda h: h, **others):
    """A loss of three layers, with a fault behind the second, or others by name."""
    faults = {"second": fault, **others}

    def loss(params, x):
        h = x.astype(HALF)
        for name, layer in params.items():
            h = h @ layer["kernel"].astype(HALF)
            h = jax.nn.silu(faults[name](h) if name in faults else h)
        return (h.astype(jnp.float32) ** 2).mean()

    return loss


def look(loss, *args, **options):
    return xray(loss, *(args or (PARAMS, X)), **{"scale": 2.0**10, "compiled": False} | options)


def too_large(h):
    return (jnp.abs(h) + 2) * HALF(2.0**15) * HALF(2.0**-15)


# ── causes ───────────────────────────────────────────────────────────────────────────────────


def test_a_forward_overflow_is_named():
    """Operation, direction, layer, line, elements, and the value that float32 has."""
    x = look(network(too_large))
    (cause,) = x.causes
    assert (cause.kind, cause.operation, cause.is_backward) == ("overflow", "mul", False)
    assert (cause.layer, cause.dtype, cause.shape) == ("second", "float16", (3, 4))
    assert cause.line == f"test_xray.py:{too_large.__code__.co_firstlineno + 1}"
    assert (cause.elements, cause.of) == (12, 12)
    h = jax.nn.silu(X @ PARAMS["first"]["kernel"])
    largest = np.abs(np.asarray(h) @ np.asarray(PARAMS["second"]["kernel"])).max() + 2
    assert cause.float32 == pytest.approx(largest * 2**15, rel=1e-3)
    assert not x.finite
    assert "NOT finite at scale 2^10" in str(x)
    assert "after second/kernel: 12 of 12 elements overflow" in str(x)


def test_float32_where_it_overflows_is_prescribed():
    """The change has been tried: the step is finite, and as in float32 but for rounding."""
    (remedy,) = look(network(too_large)).remedies
    assert (remedy.kind, remedy.is_finite) == ("float32", True)
    assert remedy.error < 0.01
    assert [place.partition(" ")[2] for place in remedy.places] == ["mul (second)"]


def squares(params, x, keeps=contextlib.nullcontext):
    h = x @ params["up"]
    with keeps():
        h = (h * h + h * h) @ params["down"]
    return (h * 1e-6).sum()


SQUARED = {"up": jnp.full((16, 16), 15.0), "down": jnp.full((16, 16), 1e-3)}, jnp.ones((16, 16))


def test_a_rounding_under_autocast_has_a_line_and_code():
    """A rounding that no user has written is named as such, at the line that needs it. The change
    that helps is also code: around its lines, it makes the step finite."""
    x = look(gs.autocast(squares), *SQUARED, scale=1.0)
    line = f"test_xray.py:{squares.__code__.co_firstlineno + 3}"
    assert str(x.causes[0]).startswith(
        f"forward rounding to float16[16, 16], {line}, after up: 256"
    )
    assert x.causes[0].line == line
    assert f"tried: float32 for {line} rounding to float16 (up)" in str(x)
    assert f"write that as: with gainstage.keep_float32(): around {line}" in str(x).splitlines()
    assert "convert_element_type" not in str(x)
    kept = functools.partial(squares, keeps=gs.keep_float32)
    assert look(gs.autocast(kept), *SQUARED, scale=1.0, prescribe=False).finite
    assert "keep_float32" not in str(look(network(too_large)))  # no autocast


def test_diverged_parameters_are_no_matter_of_precision():
    """Float32 makes a step of diverged parameters finite, not the run: the X-ray says so."""

    def loss(params, x):
        return jnp.square(x.astype(HALF) @ params["up"].astype(HALF)).astype(jnp.float32).mean()

    x = look(loss, {"up": jnp.full((4, 2), 1e4)}, jnp.ones((3, 4)), scale=1.0)
    assert any(remedy.helps for remedy in x.remedies)
    *_, caution = str(x).splitlines()
    assert caution.startswith("The parameters have diverged: up has a root mean square of 1e+04.")
    assert caution.endswith("lower the rate, and restart from a checkpoint before it.")
    assert look(loss, {"up": jnp.eye(4)}, 1e4 * jnp.ones((3, 4))).caution == ""
    assert look(loss, {"up": jnp.full((4, 2), 200.0)}, jnp.ones((3, 4)) / 64, scale=1.0).finite


def test_a_backward_overflow_asks_for_a_lower_scale():
    """A scale in the window of all layers, which makes the step finite."""
    x = look(network(lambda h: h * HALF(2.0**-10) * HALF(2.0**10)), scale=2.0**12)
    assert [(c.operation, c.is_backward, c.layer) for c in x.causes] == [("mul", True, "second")]
    lower, wider = x.remedies
    assert (lower.kind, wider.kind) == ("scale", "float32")
    assert lower.scale == 2.0 ** (x.window().high - 1)
    assert all(remedy.is_finite and remedy.error < 0.01 for remedy in x.remedies)


def test_a_loss_in_float16_to_its_end_bounds_the_scale():
    """The scale itself overflows on its way back: the step is named, and the scales below it."""
    x = look(lambda w: (w.astype(HALF) ** 2).sum(), jnp.linspace(0.25, 0.5, 16), scale=2.0**17)
    (cause,) = x.causes
    assert (cause.kind, cause.is_backward, cause.float32) == ("overflow", True, 2.0**17)
    assert x.window().high == 15
    assert x.remedies[0].scale == 2.0**14
    assert x.remedies[0].error < 0.01


def test_a_step_that_loses_gradients_asks_for_a_higher_scale():
    """Where small gradients are flushed the layer is named, and a scale that fits."""
    x = look(network(lambda h: h * HALF(2.0**12) * HALF(2.0**-12)), scale=2.0**-12)
    assert x.finite
    assert (x.causes[0].kind, x.causes[0].is_backward) == ("underflow", True)
    assert x.causes[0].layer == "second"
    assert max(x.gradient_errors.values()) > 0.05
    assert x.remedies[0].scale > 2.0**-12
    assert x.remedies[0].error < 0.01
    assert "much is lost" in str(x)


def test_an_overflow_that_a_division_swallows_is_named():
    """Where 1 / inf makes a finite step of an overflow, gradients are lost without a sign."""

    def normed(h):
        return h / jnp.sqrt((h * HALF(200) * h * HALF(200)).sum(-1, keepdims=True))

    x = look(network(normed), PARAMS, X + 2)
    assert x.finite
    assert "much is lost" in str(x)
    assert (x.causes[0].kind, x.causes[0].layer, x.causes[0].is_backward) == (
        "overflow", "second", False)  # fmt: skip
    assert x.remedies[0].error < 0.01


def test_a_flushed_divisor_is_an_underflow():
    """What is 0 in float16 and not in float32 is named, and float32 helps."""

    def divided(h):
        small = (jnp.abs(h) + 1) * HALF(2.0**-13)
        return small / (small * small) * HALF(2.0**-13)

    x = look(network(divided))
    assert (x.causes[0].kind, x.causes[0].operation) == ("underflow", "div")
    assert "are 0, but not in float32" in x.causes[0].message
    assert x.remedies[0].is_finite


@pytest.mark.parametrize(
    ("formula", "operation", "hint"),
    [
        (lambda h: jnp.log(h - h), "log", "log(0)"),
        (lambda h: (h - h) / (h - h), "div", "division by 0"),
        (lambda h: jnp.sqrt(h - h), "div (derivative of sqrt)", "derivative of sqrt"),
    ],
    ids=["log", "div", "sqrt"],
)
def test_a_formula_is_no_matter_of_precision(formula, operation, hint):
    """Where float32 is not finite either, the formula is to be mended, and nothing is tried."""
    x = look(network(lambda h: h + formula(h)))
    assert (x.causes[0].kind, x.causes[0].operation) == ("invalid", operation)
    assert hint in x.causes[0].message
    assert x.remedies == []
    assert "fix the data, or the formula" in str(x)


def test_data_and_parameters_are_named():
    """A NaN that came in from outside is called so, with its place."""
    loss = network()
    data = look(loss, PARAMS, X.at[1, 2].set(jnp.nan))
    assert str(data.causes[0]) == "x has 1 element of 12 that is not finite, at [1, 2]"
    bad = PARAMS | {"third": {"kernel": PARAMS["third"]["kernel"].at[0].set(jnp.inf)}}
    parameter = look(loss, bad, X)
    assert str(parameter.causes[0]) == (
        "third/kernel has 4 elements of 16 that are not finite, the first at [0, 0]"
    )
    table = np.full(4, np.nan, np.float32)
    closed_over = look(lambda w: (w * table).sum(), jnp.ones(4))
    assert "an array that the loss closes over has 4 elements" in str(closed_over.causes[0])


def test_an_infinite_parameter_is_the_only_cause():
    """NaN that an infinity from outside becomes is not blamed on a mask of the program."""
    soft = network(jax.nn.softmax)
    kernel = PARAMS["first"]["kernel"].at[1, 2].set(jnp.inf)
    x = look(soft, PARAMS | {"first": {"kernel": kernel}}, jnp.abs(X) + 1)
    assert [cause.layer for cause in x.causes] == ["first"], str(x)
    x = look(soft, PARAMS, X.at[1, 2].set(jnp.inf))
    assert [cause.layer for cause in x.causes] == ["x"], str(x)


def test_a_mask_beside_an_infinite_input_is_named_too():
    """An infinity of the program that becomes NaN on its own is a cause beside the input."""

    def loss(params, x, y):
        hidden = jax.nn.softmax(jnp.where(x == x, -jnp.inf, params["first"]["kernel"][:3] * x))
        return hidden.sum() + (params["second"]["kernel"][:3] * y).sum()

    x = look(loss, PARAMS, X, X.at[1, 2].set(jnp.inf))
    assert [cause.kind for cause in x.causes] == ["argument", "invalid"], str(x)
    assert "mask" in x.causes[1].message


def masked(hidden):
    def mask(h):
        scores = jnp.where(jnp.arange(3)[:, None] < hidden, -jnp.inf, h.astype(jnp.float32))
        return jax.nn.softmax(scores, axis=0).astype(HALF)

    return network(mask)


def test_a_mask_is_a_cause_only_if_it_hides_all():
    """Infinities that stand in a program are no fault; a row of nothing else is."""
    assert look(masked(2)).causes == []
    x = look(masked(3))
    assert x.causes[0].operation == "sub"
    assert "mask" in x.causes[0].message


def test_a_mask_is_not_taken_for_an_overflow_beside_it():
    """Where a mask of infinities meets an overflow, the overflow is the cause."""

    def attention(h):
        scores = jnp.where(jnp.tril(jnp.ones((3, 4), bool)), too_large(h) * 2, -jnp.inf)
        return jax.nn.softmax(scores)

    assert [cause.operation for cause in look(network(attention)).causes] == ["mul"]


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1), ("float32", 1), ("float16", 2**15)])
def test_a_step_is_looked_at_in_the_scale_that_it_takes(dtype, scale):
    """A loss without float16 and float8 has no scale, with a state and without, as in its step."""
    cast = gs.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), dtype)
    state = gs.TrainState.create(jnp.eye(4), optax.sgd(0.1))
    x = xray(cast, state, X, prescribe=False, compiled=False)
    taken, _ = gs.train_step(cast, donate=False)(state, X)
    assert x.scale == float(taken.loss_scale) == scale
    if scale == 1:
        assert xray(cast, state.params, X, prescribe=False, compiled=False).scale == 1
    if dtype == "bfloat16":
        assert gs.audit(cast, state.params, X).ok


def test_a_healthy_step_has_no_cause():
    """Nothing is found where nothing is, and the errors of gradients are those of rounding."""
    x = look(network(), compiled=True)
    assert (x.finite, x.compiled_finite, x.causes, x.remedies) == (True, True, [], [])
    assert 0 < max(x.gradient_errors.values()) < 0.01
    assert x.loss == pytest.approx(float(network()(PARAMS, X)))
    assert str(x).startswith("Finite at scale 2^10")


def normed(params, x, y):
    """Linear, BatchNorm, Linear: the mean removes the first bias."""
    h = x.astype(HALF) @ params["a"]["kernel"].astype(HALF) + params["a"]["bias"].astype(HALF)
    h = h.astype(jnp.float32)
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) * params["norm"]["scale"]
    h = jax.nn.relu(h).astype(HALF) @ params["b"]["kernel"].astype(HALF)
    return ((h.astype(jnp.float32) - y) ** 2).mean()


def attention(params, x, y):
    """One head: the softmax removes what the bias of the keys adds to all scores of a query."""
    h = x.astype(HALF)
    q, k = (h @ params[name]["kernel"].astype(HALF) for name in ("a", "b"))
    k = k + params["b"]["bias"].astype(HALF)
    h = jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(HALF) @ h
    return ((h.astype(jnp.float32).sum(1, keepdims=True) - y) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "bias", "columns"), [(normed, "a", 1), (attention, "b", 8)], ids=["norm", "attention"]
)
def test_a_gradient_that_cancels_is_no_alarm(loss, bias, columns):
    """A gradient that is zero but for rounding is judged beside the whole gradient."""
    rng = np.random.default_rng(0)
    shapes = {"a": (8, 8), "b": (8, columns)}
    params = {n: {"kernel": np.float32(0.3 * rng.normal(size=s))} for n, s in shapes.items()}
    params[bias]["bias"] = np.zeros(8, np.float32)
    params["norm"] = {"scale": np.ones(8, np.float32)}
    x = look(loss, params, *(np.float32(rng.normal(size=(32, c))) for c in (8, 1)))
    assert max(x.gradient_errors.values()) < 0.01
    assert x.summary.startswith("Finite at scale 2^10: loss ")
    assert f"the gradient of {bias}/bias" not in x.summary


# ── programs ─────────────────────────────────────────────────────────────────────────────────


@jax.custom_vjp
def steep(h):
    return too_large(h)


steep.defvjp(lambda h: (too_large(h), None), lambda _, g: (g,))


@jax.custom_jvp
def bent(h):
    return too_large(h)


bent.defjvp(lambda primals, tangents: (bent(*primals), tangents[0]))


def looped(h):
    def body(i, h):
        return lax.cond(i == 2, too_large, lambda h: h, h)

    return lax.stop_gradient(lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, body(*c)),
                                            (0, h))[1])  # fmt: skip


def scanned(h):
    def body(h, i):
        return lax.cond(i == 2, jax.checkpoint(too_large), lambda h: h, h), h

    h, all_of_them = lax.scan(body, h, jnp.arange(4), reverse=True)
    return h + 0 * all_of_them.sum(0)


@pytest.mark.parametrize(
    ("wrapped", "iteration"),
    [(jax.jit(too_large), None), (jax.checkpoint(too_large), None), (jax.vmap(too_large), None),
     (steep, None), (bent, None), (looped, 2), (scanned, 2)],
    ids=["jit", "remat", "vmap", "custom_vjp", "custom_jvp", "while", "scan"],
)  # fmt: skip
def test_it_looks_into_calls_loops_and_branches(wrapped, iteration):
    """The operation, its line and its layer are found inside, and in which turn of a loop."""
    cause = look(network(wrapped), prescribe=False).causes[0]
    assert (cause.operation, cause.layer, cause.iteration) == ("mul", "second", iteration)
    assert cause.line == f"test_xray.py:{too_large.__code__.co_firstlineno + 1}"


def test_layers_of_a_scan_are_turns():
    """Of parameters that are stacked, and scanned over, the layer is the turn of the loop."""
    stacked = {"layers": {"kernel": jnp.stack([jnp.eye(4), jnp.eye(4) * 2.0**15, jnp.eye(4)])}}

    def loss(params, x):
        def layer(h, kernel):
            return jax.nn.silu((h + 2) @ kernel.astype(HALF)), None

        h, _ = lax.scan(layer, x.astype(HALF), params["layers"]["kernel"])
        return h.astype(jnp.float32).mean()

    cause = look(loss, stacked, jnp.abs(X)).causes[0]
    assert (cause.operation, cause.layer, cause.iteration) == ("dot_general", "layers", 1)


def test_it_says_what_it_cannot_see():
    """Inside of shard_map nothing is seen: it is named as a whole."""
    auto, one = (AxisType.Auto,), jax.devices()[:1]
    mesh, spec = jax.make_mesh((1,), ("data",), auto, devices=one), PartitionSpec("data")
    inside = jax.shard_map(too_large, mesh=mesh, in_specs=spec, out_specs=spec)
    x = look(network(inside), prescribe=False)
    assert x.causes[0].operation == "shard_map"
    assert "does not look inside of shard_map" in x.causes[0].message
    assert x.unseen == ["shard_map"]


def test_callbacks_see_the_values_of_the_program_once():
    """A callback is called once a run, with float16 numbers; a print not at all."""
    seen = []

    def back(h):
        seen.append(h.dtype)
        return h

    def called(h):
        jax.debug.print("{}", h)
        return jax.pure_callback(back, jax.ShapeDtypeStruct(h.shape, h.dtype), lax.stop_gradient(h))

    assert look(network(called)).causes == []
    assert seen == [np.float16]


def test_arguments_of_all_kinds_pass():
    """Integers, keys, None, strings, flags and numbers of a batch are taken as they are."""

    def loss(params, batch, key, weight, flag):
        noise = jax.random.normal(key, (3, 4), HALF)
        h = params["table"].astype(HALF)[batch["ids"]] + noise
        h = h * batch["x"].astype(HALF) if flag else h
        assert batch["name"] == "a text"
        return (h.astype(jnp.float32) * weight).mean(), {"aux": jnp.nan}

    batch = {"ids": jnp.arange(3), "x": X, "none": None, "name": "a text"}
    x = look(loss, {"table": jnp.ones((3, 4))}, batch, jax.random.key(0), 0.5, True, has_aux=True)
    assert x.causes == []
    assert list(x.gradient_errors) == ["table"]


def test_the_arguments_to_differentiate_by():
    """With several, gradients are named by argument and path; a bare array by its argument."""

    def loss(a, b, c):
        return (a * b["w"] * c).sum()

    x = look(loss, jnp.ones(2), {"w": jnp.ones(2)}, jnp.ones(2), argnums=(0, 1))
    assert len(x.gradient_errors) == 2
    assert list(look(loss, jnp.ones(2), {"w": jnp.ones(2)}, jnp.ones(2)).gradient_errors) == ["a"]


def test_the_scale_of_a_state_is_taken():
    """A state tells the scale, which shows in what overflows; so does one that is given."""
    loss = network(lambda h: h * HALF(2.0**-10) * HALF(2.0**10))
    state = gs.TrainState.create(PARAMS, optax.sgd(0.1))
    scale = gs.transforms.current_scale(state.opt_state)
    assert not xray(loss, PARAMS, X, scale=scale, compiled=False, prescribe=False).finite
    x = xray(loss, state, X, compiled=False)
    assert (x.scale, x.finite) == (2.0**15, False)
    assert x.remedies[0].scale < 2.0**15


def test_wrong_arguments_are_refused():
    """Neither a state nor a scale, a scale that is none, a loss that is no scalar."""
    with pytest.raises(TypeError, match=r"Expected a TrainState, or a scale; got neither.*scale=1"):
        xray(network(), PARAMS, X)
    with pytest.raises(ValueError, match="scale"):
        xray(network(), PARAMS, X, scale=-1.0)
    with pytest.raises(TypeError, match="scalar loss"):
        xray(lambda w: w, jnp.ones(2), scale=1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_other_dtypes_have_their_own_range(dtype):
    """The largest number is that of the dtype in which it was computed."""

    def loss(w):
        return (w.astype(dtype) * jnp.asarray(2.0**8, dtype)).astype(jnp.float32).sum() * 2.0**-8

    cause = next(iter(look(loss, jnp.full(4, 2.0**9)).causes), None)
    if dtype == "bfloat16":
        assert cause is None
    else:
        assert (cause.kind, cause.dtype) == ("overflow", dtype)
        assert f"ends at {float(jnp.finfo(dtype).max):.5g}" in cause.message


def test_complex_and_double_numbers_pass():
    """They are never of less than 32 bits, and have no reference of their own."""
    with jax.enable_x64(True):
        x = look(lambda w: jnp.abs(w * (1 + 1j)).sum() ** 0.5, jnp.ones(3, jnp.float64))
        assert x.causes == []
        assert x.gradient_errors == {"w": 0.0}


# ── windows ──────────────────────────────────────────────────────────────────────────────────


def test_the_window_ends_where_the_step_does():
    """At its highest scale the step is finite, and at twice that it is not."""
    loss = network(lambda h: h * HALF(2.0**-10) * HALF(2.0**10))
    high = look(loss).window().high
    assert look(loss, scale=2.0**high).finite
    assert not look(loss, scale=2.0 ** (high + 1)).finite


def test_the_window_begins_where_gradients_are_good():
    """At its lowest scale each result is within the error that was asked for; far below, none."""
    loss = network()
    low = look(loss).window(error=0.01).low
    assert max(look(loss, scale=2.0**low).gradient_errors.values()) < 0.02
    assert max(look(loss, scale=2.0 ** (low - 6)).gradient_errors.values()) > 0.2


def test_the_window_does_not_depend_on_the_scale_it_is_looked_at():
    """The backward pass is linear in the scale: any scale tells the same window."""
    each = [look(network(), scale=2.0**n).windows() for n in (0, 6, 12)]
    assert each[0] == each[1] == each[2]
    assert {"first", "second", "third"} <= each[0].keys()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def turned_up(factor, h):
    return h


turned_up.defvjp(
    lambda factor, h: (h, None),
    lambda factor, _, g: ((g.astype(jnp.float32) * factor).astype(g.dtype),),
)


def test_layers_that_differ_too_much_get_scales_of_their_own():
    """Where no scale fits all layers, `locally_scaled` for those that differ helps."""
    up = functools.partial(turned_up, 2.0**18)
    x = look(network(up, first=up))
    assert x.window().is_empty
    assert "no scale fits all layers" in str(x)
    assert "gs.advise(loss_fn, params, batches) says" in str(x)
    (local,) = [remedy for remedy in x.remedies if remedy.kind == "local"]
    assert "locally_scaled(first, " in local.change
    assert local.is_finite
    assert local.error < 0.01


# ── frameworks ───────────────────────────────────────────────────────────────────────────────


def test_flax_linen_and_haiku():
    """Layers have the names of their parameters."""
    linen, haiku = pytest.importorskip("flax.linen"), pytest.importorskip("haiku")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            h = linen.Dense(4, dtype=HALF, name="up")(x)
            return linen.Dense(1, dtype=HALF, name="down")(too_large(h))

    model = Net()
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]

    def loss(params, x):
        return model.apply({"params": params}, x).astype(jnp.float32).mean()

    cause = look(loss, params, X, prescribe=False).causes[0]
    assert (cause.operation, cause.layer) == ("mul", "up")
    assert "in Net" in cause.place

    def forward(x):
        h = haiku.Linear(4, name="up")(x).astype(HALF)
        return haiku.Linear(1, name="down")(too_large(h).astype(jnp.float32)).mean()

    net = haiku.without_apply_rng(haiku.transform(forward))
    params = jax.jit(net.init)(jax.random.key(0), X)
    cause = look(net.apply, params, X, prescribe=False).causes[0]
    assert (cause.operation, cause.layer) == ("mul", "up")


def test_nnx_models_and_equinox():
    """A model may be an argument itself, with what differentiates it."""
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    model = nnx.Linear(4, 4, dtype=HALF, rngs=nnx.Rngs(0))

    def loss(model, x):
        return too_large(model(x)).astype(jnp.float32).mean()

    cause = look(loss, model, X, using=nnx.value_and_grad, prescribe=False).causes[0]
    assert (cause.operation, cause.layer) == ("mul", "bias")
    layer = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))

    def of_rows(model, x):
        return too_large(jax.vmap(model)(x).astype(HALF)).astype(jnp.float32).mean()

    x = look(of_rows, layer, X, using=eqx.filter_value_and_grad, prescribe=False)
    assert (x.causes[0].operation, x.causes[0].layer) == ("mul", "layers/1")


def test_keras_layers_have_their_names():
    """Parameters are a list, so the scopes tell the layers."""
    keras = pytest.importorskip("keras")
    layers = [keras.layers.Dense(4, name=n, dtype="mixed_float16") for n in ("up", "down")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    params = [v.value * 2.0**14 if "down/kernel" in v.path else v.value for v in model.variables]

    def loss(trainable, x):
        return model.stateless_call(trainable, [], x)[0].astype(jnp.float32).mean()

    cause = look(loss, params, X * 64, prescribe=False).causes[0]
    assert (cause.operation, cause.layer) == ("dot_general", "down")


@pytest.mark.parametrize(
    ("loss", "values", "message"),
    [
        (lambda w: (w.astype(HALF) * HALF(2.0**15)).astype(jnp.float32).sum(), [4.0],
         "1 of 1 element overflows"),
        (lambda w: jnp.log(w).sum(), [0.0, 1.0], "1 of 2 elements is not finite, and in float32"),
        (lambda w: jnp.log(w).sum(), [0.0, 0.0], "2 of 2 elements are not finite, and in float32"),
        (lambda w: w.sum(), [jnp.inf, 2.0], "w has 1 element of 2 that is not finite"),
        (lambda w: jax.nn.log_softmax(jnp.where(w == w, -jnp.inf, w)).sum(), [1.0],
         "1 of 1 element is NaN, out of an infinity that stands in the program"),
        (lambda w: (w.astype(HALF) / (w.astype(HALF) * w.astype(HALF))).astype(jnp.float32).sum(),
         [2.0**-13, 1.0], "is not finite, because 1 element of an operand (mul float16) is 0"),
    ],
)  # fmt: skip
def test_one_element_is_and_two_are(loss, values, message):
    """The verb of each cause follows the number of elements."""
    assert message in str(look(loss, jnp.array(values), prescribe=False))


def test_partial_functions_have_no_names_of_arguments():
    """What has no signature still has places."""
    x = look(functools.partial(lambda k, w: (w * k).sum(), jnp.nan), jnp.ones(2))
    assert x.causes[0].kind in ("invalid", "constant")


def test_the_error_of_large_gradients_is_measured():
    """Gradients near 1e20, whose squares overflow float32, are compared too."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)

    def loss(w, x):
        product = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return (product.astype(jnp.float32) ** 2).mean() * 1e20

    found = xray(loss, jnp.ones((8, 4)) / 3, x, scale=1.0)
    assert 1e-4 < max(found.gradient_errors.values()) < 0.1


def test_at_a_scale_of_1_it_says_whether_scaling_is_needed():
    """The X-ray of an unscaled step ends the question: 2^0 fits, or it does not, and what tells the
    costs of each precision; of a step without half precision it says so."""

    def loss_fn(w, count, dtype):
        return jnp.square(jnp.ones((4, 8), dtype) @ w.astype(dtype)).astype("float32").sum() / count

    w = jnp.full((8, 2), 0.1)
    for count, words in ((1.0, "2^0 fits: float16 needs no"), (2.0**30, "2^0 does not fit")):
        x = gs.xray(lambda w, n=count: loss_fn(w, n, "float16"), w, scale=1.0, prescribe=False)
        assert words in str(x)
        assert ("gs.advise(loss_fn, params, batches) says" in str(x)) == (count > 1)
    x = gs.xray(lambda w: loss_fn(w, 1.0, "float32"), w, scale=1.0)
    assert "nothing of this step is in half precision" in str(x)


def test_a_change_that_leaves_gradients_far_off_does_not_help():
    """A remedy with gradients that are more than half off says that it does not help."""
    remedy = gs.diagnostics.Remedy("scale", "a loss scale of 2^5", (), 32.0, True, 1.5, 5.28)
    assert str(remedy) == (
        "a loss scale of 2^5: does not help: finite, loss 1.5, with gradients 528% off"
    )
    assert "with gradients within 0.40% of float32" in str(remedy._replace(error=0.004))


def test_a_train_state_has_the_scale_and_the_extra():
    """`xray(loss_fn, state, *batch)` looks at the step of a state: its parameters, its extra, and
    the scale at which its last step was skipped, or that of the next step."""
    rows = jnp.full((16, 16), 100.0)

    @gs.autocast
    def loss_fn(params, mean, x):
        return jnp.mean((x @ params["w"]) ** 2), 0.9 * mean + x.mean()

    params = {"w": jnp.full((16, 16), 25.0)}
    for telemetry, scale in ((True, 2.0**15), (False, 2.0**14)):
        state = gs.TrainState.create(
            params, optax.sgd(0.1), extra=jnp.float32(0), telemetry=telemetry
        )
        assert xray(loss_fn, state, rows, prescribe=False).scale == 2.0**15
        state, loss = gs.train_step(loss_fn, donate=False)(state, rows)
        assert not state.applied
        x = xray(loss_fn, state, rows, prescribe=False)
        assert (x.scale, x.finite, x.loss) == (scale, False, pytest.approx(float(loss), rel=1e-3))
        assert xray(loss_fn, state, rows, scale=2.0**-10, prescribe=False).finite


def test_a_skipped_step_without_a_record_is_not_called_finite_alone():
    """If the scale of the skipped step is not known, a finite X-ray at the next one says so."""

    def loss_fn(w, x):
        return jnp.sum((x.astype("float16") * w.astype("float16")).astype("float32"))

    x = jnp.full(4, 3.0)
    rule = gs.DynamicLossScale(2.0**15)
    state = gs.TrainState.create(jnp.ones(4), optax.sgd(0.1), loss_scale=rule)
    step = gs.train_step(loss_fn, donate=False)
    skipped, _ = step(state, x)
    assert not skipped.applied
    said = str(gs.xray(loss_fn, skipped, x))
    assert said.startswith("Finite at scale 2^14")
    assert "scale=2**15, or create the state with telemetry=True" in said
    assert gs.xray(loss_fn, skipped, x, scale=2.0**15).finite is False

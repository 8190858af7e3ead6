"""`audit` and `train_step(audit_every=...)`: a run compares itself with float32."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from jax.scipy.ndimage import map_coordinates
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gainstage as gs

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 16), np.float32)
Y = np.tanh(X @ RNG.standard_normal((16, 16), np.float32)) + np.float32(1.0)
PARAMS = {
    "first": {"kernel": RNG.standard_normal((16, 16), np.float32) / 4, "bias": np.zeros(16, "f")},
    "last": RNG.standard_normal((16, 16), np.float32) / 4,
}


def loss_fn(params, x, y):
    first = params["first"]
    return jnp.mean((jnp.tanh(x @ first["kernel"] + first["bias"]) @ params["last"] - y) ** 2)


@jax.custom_vjp
def signed(x):
    """The identity; its backward pass, in float16, returns the sign of the cotangent, as no loss
    scale may."""
    return x


def sign_of(g):
    return jnp.sign(g.astype(jnp.float16)).astype(jnp.float32)


signed.defvjp(lambda x: (x, None), lambda _, g: (sign_of(g) * 1e-3,))


def sign_loss(params, x, y):
    """A loss whose gradient does not grow with the loss scale."""
    hidden = signed(jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"]))
    return jnp.mean((hidden @ params["last"] - y) ** 2)


def later(params, x, y, is_late):
    """A loss that goes wrong."""
    return jnp.where(is_late, sign_loss(params, x, y), loss_fn(params, x, y))


def offset_loss(params, x, y):
    """A regression onto numbers around 288, with a weight for a constant input."""
    return jnp.mean((x @ params["w"] - y) ** 2)


KELVIN = np.concatenate([X[:, :15], np.ones((64, 1), "f")], 1)
WARMTH = 288 + 0.3 * np.tanh(X)
OFFSET = {"w": np.float32([[0.1]] + 14 * [[0.0]] + [[288.1]]).repeat(16, 1)}


def state_of(params=PARAMS, tx=None, **options):
    params = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, params)
    return gs.TrainState.create(params, tx or optax.adam(1e-2), **options)


def trained(step, state, steps, *batch):
    """The state after some steps, and the warnings of the run."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            state, *_ = step(state, *batch)
            jax.block_until_ready(step.audit and step.audit.numbers)
    return state, [str(w.message) for w in told if "Audit" in str(w.message)]


def errors_in_float64(half, fun, params, *batch, scale=2.0**15):
    """The errors of loss, all gradients and the worst tensor, in numpy."""
    loss, grads = jax.jit(jax.value_and_grad(lambda p: half(p, *batch) * scale))(params)
    exact, true = jax.jit(jax.value_and_grad(lambda p: fun(p, *batch)))(params)
    off = [
        (np.asarray(g, "float64") / scale - t, np.asarray(t, "float64"))
        for g, t in zip(*map(jax.tree.leaves, (grads, true)), strict=True)
    ]
    norm = math.hypot(*(np.linalg.norm(t) for _, t in off))
    each = [np.linalg.norm(d) / np.linalg.norm(t) for d, t in off if np.linalg.norm(t) > norm / 1e3]
    whole = math.hypot(*(np.linalg.norm(d) for d, _ in off)) / norm
    return abs(float(loss) / scale - float(exact)) / abs(float(exact)), whole, max(each)


# ── what an audit measures ───────────────────────────────────────────────────────────────────────


@pytest.mark.as_users
@pytest.mark.parametrize("fun", [loss_fn, sign_loss], ids=lambda fun: fun.__name__)
def test_the_errors_are_those_of_numpy(fun):
    """Loss, all gradients and the worst tensor are off as float64 numpy says."""
    half = gs.autocast(fun)
    found = gs.audit(half, state_of(), X, Y)
    wanted = errors_in_float64(half, fun, PARAMS, X, Y)
    np.testing.assert_allclose(
        [found.loss_error, found.gradient_error, found.worst[1]], wanted, rtol=0.02, atol=2e-6
    )
    assert abs(found.loss_difference) == found.loss_error
    np.testing.assert_allclose(found.float32_loss, fun(PARAMS, X, Y), rtol=1e-5)


def test_it_prints_as_one_line():
    """What is printed has all errors, the name of the worst tensor, and whether that is right."""
    found = gs.audit(gs.autocast(loss_fn), state_of(), X, Y)
    assert re.fullmatch(
        r"Audit of step 0: the loss is off by \S+ % from float32, all gradients by \S+ %, the "
        r"worst tensor '\S+' by \S+ %, within the bounds\.",
        str(found),
    )
    assert found.ok
    assert found.worst[0] in ("first/kernel", "first/bias", "last")


@pytest.mark.parametrize(
    ("fun", "params", "batch", "name"),
    [(sign_loss, PARAMS, (X, Y), "first/"), (offset_loss, OFFSET, (KELVIN, WARMTH), "w")],
    ids=["sign in a backward pass", "offset as a weight"],
)
def test_a_fault_is_found_with_its_tensor(fun, params, batch, name):
    """A wrong gradient has the name of its tensor, and what to write."""
    found = gs.audit(gs.autocast(fun), params, *batch, scale=2.0**15)
    assert not found.ok
    assert found.worst[0].startswith(name)
    for advice in ("gs.xray(", "gs.keep_float32()", "gs.mend("):
        assert advice in str(found)
    assert ("jax.custom_vjp" in str(found)) == (fun is sign_loss)


def smooth(n):
    """An image without details of one pixel."""
    image, kernel = RNG.standard_normal((n, n)), np.exp(-(np.arange(-8, 9.0) ** 2) / 18)
    for axis in (0, 1):
        image = np.apply_along_axis(np.convolve, axis, image, kernel / kernel.sum(), "same") * 3
    return image.astype("f")


def sampled(image, at):
    return map_coordinates(image, [at[..., 0], at[..., 1]], 1, mode="nearest")


GRID = np.stack(np.meshgrid(*[np.arange(128.0, dtype="f")] * 2, indexing="ij"), -1)
TURN = np.eye(2, dtype="f") + np.float32([[0.01, -0.02], [0.02, -0.01]])
IMAGE = smooth(128)


def register(params, image, target):
    """The difference of two images, of which one is turned and moved."""
    return jnp.mean((sampled(image, GRID @ params["turn"] + params["move"]) - target) ** 2)


def weighted(params, x, tiny):
    """Two losses, the second with the ratio of their gradients as its weight."""
    hidden = jnp.tanh(x @ params["a"])
    losses = (
        lambda last: jnp.mean((hidden @ last - x) ** 2) * tiny,
        lambda last: -jnp.mean(jnp.tanh(hidden @ last)) * tiny,
    )
    inner = [jnp.linalg.norm(jax.grad(loss)(params["last"])) for loss in losses]
    weight = jax.lax.stop_gradient(inner[0] / (inner[1] + 1e-12))
    return losses[0](params["last"]) + weight * losses[1](params["last"])


NEAR = {"turn": TURN + np.float32(1e-4), "move": np.float32([1.55, -1.95])}
TARGET = np.asarray(sampled(IMAGE, GRID @ TURN + np.float32([1.5, -2.0])))
INNER = {"a": PARAMS["first"]["kernel"], "last": PARAMS["last"]}


@pytest.mark.as_users
@pytest.mark.parametrize(
    ("fun", "params", "batch"),
    [
        (register, NEAR, (IMAGE, TARGET)),
        (weighted, INNER, (X, np.float32(1.0))),
        (weighted, INNER, (X, np.float32(1e-5))),
        (loss_fn, PARAMS, (X, Y)),
    ],
    ids=["sampling grid", "inner gradients", "tiny inner gradients", "a network"],
)
def test_it_finds_what_is_wrong_and_nothing_else(fun, params, batch):
    """An audit is not ok exactly where float64 numpy finds an error past its bound."""
    half = gs.autocast(fun)
    errors = errors_in_float64(half, fun, params, *batch)
    found = gs.audit(half, params, *batch, scale=2.0**15)
    assert found.ok == all(e <= b for e, b in zip(errors, (0.01, 0.1, 0.5), strict=True))


def test_float32_products_are_exact_on_every_device():
    """The float32 side asks for true float32 products; the other side is as in a step."""
    half = gs.autocast(loss_fn)
    text = str(jax.make_jaxpr(lambda p: gs.audit(half, p, X, Y, scale=1.0))(PARAMS))
    products = re.findall(r":(f\d+)\[[^]]*\] = dot_general\[\n(.*?)\n    \]", text, re.S)
    kinds = {(dtype, "HIGHEST" in options) for dtype, options in products}
    assert kinds == {("f32", True), ("f16", False)}


def test_a_part_of_a_loss_under_autocast_is_in_float32_too():
    """What calls autocast inside of the loss is float32 on the float32 side."""
    inner = gs.autocast(lambda w, x: x @ w)
    half = gs.autocast(lambda w, x: jnp.mean((inner(w, x) - 288.0) ** 2))
    text = str(jax.make_jaxpr(lambda w: gs.audit(half, w, KELVIN, scale=1.0))(OFFSET["w"]))
    assert re.search(r"f32\[[^]]*\] = dot_general\[", text)
    np.testing.assert_allclose(
        gs.audit(half, OFFSET["w"], KELVIN, scale=1.0).float32_loss,
        np.mean((KELVIN.astype("float64") @ OFFSET["w"] - 288) ** 2),
        rtol=1e-4,
    )


def test_tensors_with_hardly_any_gradient_do_not_count():
    """A gradient below a thousandth of all is never the worst."""

    @jax.custom_vjp
    def wrong(x):
        return 0.0 * x

    wrong.defvjp(lambda x: (0.0 * x, None), lambda _, g: (sign_of(g) * 1e-6,))

    def tiny(params, x, y):
        return loss_fn(params["net"], x, y) + wrong(params["tiny"]).sum()

    params = {"net": PARAMS, "tiny": np.ones(4, "f")}
    found = gs.audit(gs.autocast(tiny), params, X, Y, scale=2.0**15)
    assert found.ok
    assert found.worst[0].startswith("net/")


def test_a_loss_that_crosses_zero_is_judged_by_what_rounding_explains():
    """A loss of 0 by cancellation, as in policy gradients, is no fault of half precision."""

    def policy(params, x, advantage):
        logits = jnp.tanh(x @ params["first"]["kernel"]) @ params["last"]
        log_p = jax.nn.log_softmax(logits)[:, 0]
        return -jnp.mean(jnp.exp(log_p - jax.lax.stop_gradient(log_p)) * advantage)

    advantage = X[:, 0] - X[:, 0].mean()
    found = gs.audit(gs.autocast(policy), PARAMS, X, advantage, scale=2.0**10)
    assert abs(found.float32_loss) < 1e-6
    assert found.ok


def noisy_line(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def signed_line(w, x, y):
    """`noisy_line`, with a gradient that the loss scale changes."""
    return jnp.mean((signed(x @ w) - y) ** 2)


def test_at_a_minimum_roundings_are_no_fault():
    """Where the gradients of the examples cancel, half precision is far off the little that is
    left, and its loss is right: it is ok, unless no rounding explains it."""
    x = RNG.standard_normal((256, 64))
    y = x @ np.ones(64) + RNG.standard_normal(256)
    w = np.linalg.lstsq(x, y)[0] + 3e-5
    x, y, w = np.float32(x), np.float32(y), np.float32(w)
    found = gs.audit(gs.autocast(noisy_line), w, x, y, scale=1.0)
    assert found.gradient_error > 0.3
    assert found.ok
    assert "no more than roundings of the parameters explain" in str(found)
    assert not gs.audit(gs.autocast(signed_line), w, x, y, scale=2.0**10).ok


def test_bounds_are_those_that_are_given():
    """The same errors are within wide bounds, and past narrow ones."""
    half = gs.autocast(loss_fn)
    assert gs.audit(half, state_of(), X, Y, bounds=(math.inf, 1.0, 1.0)).ok
    for bounds in ((1e-12, 1, 1), (1, 1e-6, 1), (1, 1, 1e-6)):
        audit = gs.audit(half, state_of(), X, Y, bounds=bounds)
        assert audit.ok == (bounds[0] < 1 and bool(audit.measured.is_rounding))
    wide = gs.audit(gs.autocast(sign_loss), state_of(), X, Y, bounds=(0.01, 9.0, 9.0))
    assert wide.ok


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8"])
def test_every_precision_is_audited(dtype):
    """A healthy network is within the bounds in each precision that autocast knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these layers are too small for float8
        assert gs.audit(gs.autocast(loss_fn, dtype), state_of(), X, Y).ok


# ── losses, states and models ────────────────────────────────────────────────────────────────────


def test_it_takes_what_the_step_takes():
    """A state with an extra, aux, a partial loss, a compiled loss, or parameters and a scale."""

    def with_all(params, extra, x, y, power=2):
        return loss_fn(params, x, y) ** power, extra + 1, {"mean": x.mean()}

    half = functools.partial(gs.autocast(with_all), power=1)
    state = state_of(extra=jnp.float32(3.0))
    whole = gs.audit(half, state, X, Y, has_aux=True)
    other = gs.audit(gs.autocast(loss_fn), PARAMS, X, Y, scale=state.loss_scale)
    compiled = gs.audit(jax.jit(gs.autocast(loss_fn)), PARAMS, X, Y, scale=2.0**15)
    for found in (other, compiled):
        np.testing.assert_allclose(found.gradient_error, whole.gradient_error, rtol=0.05)
    assert float(state.extra) == 3
    assert str(other).startswith("Audit:")


def test_a_loss_with_its_own_scale_needs_none():
    """For a trainer that differentiates by itself, the loss is given as the trainer gets it."""
    trainer_loss = gs.autocast(loss_fn, loss_scale=2.0**12)
    found = gs.audit(trainer_loss, PARAMS, X, Y)
    assert found.ok
    assert 0 < found.gradient_error < 0.01
    assert not gs.audit(gs.autocast(sign_loss, loss_scale=2.0**12), PARAMS, X, Y).ok


def test_a_compiled_step_may_return_it():
    """Inside of a user's own compiled step an audit is a pytree that the step returns."""
    half = gs.autocast(loss_fn)

    @jax.jit
    def step(state, x, y):
        found = gs.audit(half, state, x, y)
        loss, extra, grads = state.value_and_grad(half)(x, y)
        return state.apply_gradients(grads, extra), loss, found

    _, _, found = step(state_of(), X, Y)
    assert found.ok
    assert str(found).startswith("Audit of step 0: ")


def test_one_loss_is_compiled_once():
    """A second audit of the same function compiles nothing."""
    half, state = gs.autocast(loss_fn), state_of()
    gs.audit(half, state, X, Y).ok  # noqa: B018
    with compilations() as compiled:
        assert gs.audit(half, state, X + 1, Y).ok
    assert compiled == []


# ── in a run ─────────────────────────────────────────────────────────────────────────────────────


def test_a_healthy_run_is_silent():
    """Two hundred steps, audited each twenty and three times before that, warn of nothing."""
    step = gs.train_step(gs.autocast(loss_fn), audit_every=20)
    _, told = trained(step, state_of(), 201, X, Y)
    assert told == []
    found = step.audits
    assert found.count == 11 + 3
    assert abs(found.bias) < 0.01
    assert 0 <= found.spread < 0.01
    assert int(found.last.step) == 200
    assert step.audit is not None
    assert int(step.audit.step) == 200


def test_audits_come_early_and_then_more_rarely():
    """They are after 0, 1, 3, 10 and 30 steps, and then each that many."""
    step, state, found = gs.train_step(gs.autocast(loss_fn), audit_every=40), state_of(), []
    for number in range(125):
        state, _ = step(state, X, Y)
        found += [] if step.audit is None else [number]
    assert found == [0, 1, 3, 10, 30, 40, 80, 120]


def test_bias_and_spread_are_those_of_the_differences():
    """Over several audits the mean difference of the loss and its deviation are kept."""
    step = gs.train_step(gs.autocast(loss_fn), audit_every=2)
    state, found = state_of(), []
    for _ in range(9):
        state, _ = step(state, X, Y)
        found += [] if step.audit is None else [step.audit.loss_difference]
    assert len(found) == 6
    known = step.audits
    assert known.count == 6
    np.testing.assert_allclose(
        (known.bias, known.spread), (np.mean(found), np.std(found)), rtol=1e-6
    )


def test_a_fault_is_told_once_with_its_step():
    """A run that goes wrong later is warned of at the next audit, and only then."""
    step, state = gs.train_step(gs.autocast(later), audit_every=4), state_of()
    state, told = trained(step, state, 6, X, Y, False)
    assert told == []
    state, told = trained(step, state, 12, X, Y, True)
    assert len(told) == 1
    assert told[0].startswith("Audit of step 8: ")
    assert "'first/" in told[0]


turned = gs.half_only(lambda grid, turn: grid @ turn)
shifted = gs.half_only(lambda x, offset: x + offset)


def registered(params, is_late, image, target):
    """`register`, whose grid a user has put into half precision from some step on."""
    grid = jnp.where(is_late, turned(GRID, params["turn"]), GRID @ params["turn"])
    return jnp.mean((sampled(image, grid + params["move"]) - target) ** 2)


def smaller(params, is_late, x):
    """`weighted`, with losses that become small."""
    return weighted(params, x, jnp.where(is_late, 1e-5, 1.0))


def signed_late(params, is_late, x, y):
    return later(params, x, y, is_late)


def warm(params, is_late, x, y):
    """A regression whose offset a user has put into half precision from some step on."""
    predicted = 0.3 * jnp.tanh(x @ params["w"])
    offset = params["offset"]
    shift = jnp.where(is_late, shifted(predicted, offset), predicted + offset)
    return jnp.mean((shift - y) ** 2)


WARM = {"w": np.eye(16, dtype="f"), "offset": np.full(16, 288.06, "f")}
WARM["w"][[1, 15]] += np.float32([[0.1], [0.2]])
FAULTS = {
    "a sampling grid": (registered, NEAR, (IMAGE, TARGET), "turn|move"),
    "inner gradients": (smaller, INNER, (X,), "a|last"),
    "a sign in a backward pass": (signed_late, PARAMS, (X, Y), "first/.*"),
    "an offset": (warm, WARM, (KELVIN, WARMTH), "w|offset"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_goes_wrong_is_told_at_the_next_audit(fault):
    """Each kind of fault is found within one audit of its beginning, by step and tensor."""
    fun, params, batch, names = FAULTS[fault]
    step = gs.train_step(gs.autocast(fun), audit_every=4)
    state = state_of(params, optax.sgd(1e-6), loss_scale=gs.DynamicLossScale(2.0**8))
    state, told = trained(step, state, 6, jnp.array(False), *batch)
    assert told == []
    assert step.audits.last.ok
    _, told = trained(step, state, 6, jnp.array(True), *batch)
    assert len(told) == 1
    assert told[0].startswith("Audit of step 8: ")
    assert re.search(rf"the worst tensor '({names})'", told[0])


def test_the_line_of_the_user_is_named():
    """The warning points to the loop, and may be made an error: the run goes on."""
    step, state = gs.train_step(gs.autocast(sign_loss), audit_every=1000), state_of()
    for number in range(6):
        jax.block_until_ready(step.audit and step.audit.numbers)
        if number == 3:
            with pytest.warns(UserWarning, match="Audit of step 0") as told:
                state, _ = step(state, X, Y)
            assert told[0].filename == __file__
        else:
            state, _ = step(state, X, Y)
    assert int(state.step) == 6
    trained(step, state, 9, X, Y)
    assert step.audits.count == 5  # of steps 0, 1, 3 and 10, and one that confirms the first


@pytest.mark.parametrize("bounds", [(0.01, 0.3, 0.5), (0.01, 0.1, 0.5)], ids=["wide", "usual"])
def test_one_batch_that_is_off_by_chance_is_not_told(bounds):
    """An error past a bound that the next steps do not have is no warning, but no audit is lost."""
    step = gs.train_step(gs.autocast(later), audit_every=4, audit_bounds=bounds)
    state = state_of()
    for number in range(20):
        state, told = trained(step, state, 1, X, Y, number in (4, 12))
        assert told == []
    # Those of steps 0, 1, 3, 4, 8, 12 and 16, and of the steps after the two.
    assert step.audits.count == 9


def test_a_clear_fault_needs_one_audit():
    """An error of more than three times its bound is told at once, if the loss is off too."""
    step = gs.train_step(gs.autocast(offset_loss), audit_every=1000)
    _, told = trained(step, state_of(OFFSET, optax.sgd(1e-6)), 2, KELVIN, WARMTH)
    assert step.audits.last.gradient_error > 0.3
    assert len(told) == 1


def test_a_result_that_is_not_ready_is_not_waited_for(monkeypatch):
    """While the device has not finished an audit, steps go on and nothing is read."""
    kind = type(jnp.ones(()))
    ready = kind.is_ready
    monkeypatch.setattr(kind, "is_ready", lambda _: False)
    step = gs.train_step(gs.autocast(sign_loss), audit_every=5)
    with jax.transfer_guard_device_to_host("disallow"):
        state, told = trained(step, state_of(), 10, X, Y)
    assert (told, step.audits.count) == ([], 0)
    monkeypatch.setattr(kind, "is_ready", ready)
    _, told = trained(step, state, 3, X, Y)
    assert len(told) == 1
    assert "Audit of step 0: " in told[0]


def test_an_audit_compiles_one_more_program_once():
    """Its comparison is compiled at the first audit, and later steps and audits compile nothing."""
    audited, state = gs.train_step(gs.autocast(loss_fn), audit_every=3), state_of()
    with compilations() as compiled:
        trained(audited, state, 1, X, Y)
    assert len([name for name in compiled if "compare" in name]) == 1
    state = state_of()
    state, _ = trained(audited, state, 2, X, Y)
    with compilations() as compiled:
        trained(audited, state, 9, X, Y)
    assert compiled == []


def nnx_case():
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(16, 16, rngs=rngs),
        nnx.BatchNorm(16, rngs=rngs),
        nnx.Dropout(0.1, rngs=rngs),
        nnx.Linear(16, 16, rngs=rngs),
    )
    return model, lambda model, x, y: jnp.mean((model(x) - y) ** 2), (X, Y)


def nnx_stream_case():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def loss(model, x, y, rngs):
        return jnp.mean((model(x * rngs.dropout.bernoulli(0.9, x.shape)) - y) ** 2)

    return model, loss, (X, Y, nnx.Rngs(dropout=3))


def equinox_case():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))
    return model, lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2), (X, Y)


CASES = {
    "pytree": (lambda: (PARAMS, loss_fn, (X, Y)), {}, {}),
    "not donated": (lambda: (PARAMS, loss_fn, (X, Y)), {}, {"donate": False}),
    "retries": (lambda: (PARAMS, loss_fn, (X, Y)), {"scale": 2.0**60}, {"retries": 50}),
    "microbatches": (lambda: (PARAMS, loss_fn, (X, Y)), {"every_k": 4}, {}),
    "NNX": (nnx_case, {}, {}),
    "NNX, streams in the batch": (nnx_stream_case, {}, {}),
    "Equinox": (equinox_case, {}, {}),
}


@pytest.mark.as_users
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_with_audits(case):
    """Parameters, statistics, streams and losses are the same bits with audits and without."""
    make, how, options = CASES[case]
    results, audits = [], []
    for every in (None, 2):
        params, fun, batch = make()
        tx = optax.sgd(0.1)
        tx = optax.MultiSteps(tx, how["every_k"]) if "every_k" in how else tx
        rule = gs.DynamicLossScale(how.get("scale", 2.0**10))
        state = state_of(tx=tx, params=params, loss_scale=rule, telemetry=True)
        step = gs.train_step(gs.autocast(fun), audit_every=every, **options)
        losses = []
        for _ in range(6):
            state, loss = step(state, *batch)
            losses.append(loss)
            audits += [step.audit] if step.audit is not None else []
        leaves = jax.tree.leaves((state, losses, batch))
        arrays = [x for x in leaves if isinstance(x, (jax.Array, np.ndarray))]
        results.append([np.asarray(jax.device_get(x)).tobytes() for x in map(numbers, arrays)])
    assert results[0] == results[1]
    assert len(audits) >= 3
    assert any(found.ok for found in audits)
    assert not any(found.is_off for found in audits)


@pytest.mark.parametrize("case", CASES)
def test_the_program_of_a_step_is_the_same_text(case):
    """With audits a step is compiled to what it is without, and needs no more memory."""
    make, how, options = CASES[case]
    params, fun, batch = make()
    tx = optax.sgd(0.1)
    tx = optax.MultiSteps(tx, how["every_k"]) if "every_k" in how else tx
    half, state = gs.autocast(fun), state_of(params, tx, telemetry=True)
    plain, audited = (
        gs.train_step(half, **options, **more).lower(state, *batch)
        for more in ({}, {"audit_every": 1})
    )
    assert plain.as_text() == audited.as_text()
    sizes = (each.compile().memory_analysis() for each in (plain, audited))
    one, other = ((s.temp_size_in_bytes, s.alias_size_in_bytes) for s in sizes)
    assert one == other


def numbers(x):
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def test_dropout_has_one_mask_on_both_sides():
    """An error in a model with dropout is that of rounding, and no difference of masks."""
    model, fun, batch = nnx_case()
    found = gs.audit(gs.autocast(fun), state_of(params=model), *batch)
    assert found.gradient_error < 0.01
    model, fun, batch = nnx_stream_case()
    found = gs.audit(gs.autocast(fun), state_of(params=model), *batch)
    assert found.gradient_error < 0.01
    assert int(batch[2].dropout.count[...]) == 0


def test_an_overflow_is_no_fault_and_audited_again_soon():
    """A scale that is too high for the gradients skips steps; the audit is taken again soon."""
    state = state_of(loss_scale=gs.DynamicLossScale(2.0**40))
    step = gs.train_step(gs.autocast(loss_fn), audit_every=1000)
    state, told = trained(step, state, 1, X, Y)
    first = step.audit
    assert first.overflows
    assert "overflows at the loss scale 2^40" in str(first)
    assert not first.ok
    _, told = trained(step, state, 80, X, Y)
    assert told == []
    assert step.audits.count == 2


def test_a_loss_that_overflows_is_a_fault():
    """A loss that is finite in float32 alone is told at any loss scale."""

    def large(params, x, y):
        hidden = x @ params["first"]["kernel"] * 4e4
        return jnp.mean((hidden @ params["last"] * 4e-5 - y) ** 2)

    plan_free = gs.autocast(large)
    step = gs.train_step(plan_free, audit_every=1)
    found = gs.audit(plan_free, state_of(), X, Y)
    if math.isfinite(found.loss):
        pytest.skip("autocast keeps this in float32")
    _, told = trained(step, state_of(), 3, X, Y)
    assert len(told) == 1
    assert "overflows before the backward pass" in told[0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh_it_is_the_audit_of_one_device(kind):
    """With a batch in eight shards, errors and steps are those of one device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    batch = [jax.device_put(v, NamedSharding(mesh, P("data"))) for v in (X, Y)]
    alone = gs.audit(gs.autocast(loss_fn), state_of(), X, Y)
    step = gs.train_step(gs.autocast(lambda p, x, y: loss_fn(p, x, y)), audit_every=2)
    with jax.set_mesh(mesh):
        _, told = trained(step, state_of(), 5, *batch)
        found = gs.audit(gs.autocast(lambda p, x, y: loss_fn(p, x, y)), state_of(), *batch)
    assert told == []
    assert step.audits.count == 4
    assert step.audit.numbers.sharding.is_fully_replicated
    assert alone.ok
    assert 0 < found.gradient_error < 0.002
    np.testing.assert_allclose(found.float32_loss, alone.float32_loss, rtol=1e-5)


def test_a_loss_in_shard_map_is_audited():
    """A loss whose parts run on each device of a mesh is compared as any other."""
    mesh = jax.make_mesh((8,), ("data",))

    def parts(params, x, y):
        return jax.lax.pmean(loss_fn(params, x, y), "data")

    whole = jax.shard_map(parts, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    batch = [jax.device_put(v.repeat(2, 0), NamedSharding(mesh, P("data"))) for v in (X, Y)]
    step = gs.train_step(gs.autocast(lambda p, x, y: whole(p, x, y)), audit_every=2)
    _, told = trained(step, state_of(), 5, *batch)
    assert told == []
    assert step.audit.ok
    assert 0 < step.audit.gradient_error < 0.01


def test_a_step_inside_of_a_program_is_told_to_audit_nothing():
    """A step that is traced has no audits, and its program is that without them; it says so."""
    half = gs.autocast(loss_fn)
    step = gs.train_step(half, audit_every=1)
    with pytest.warns(UserWarning, match="audits nothing inside of jax.jit"):
        state, _ = jax.jit(step)(state_of(), X, Y)
    assert step.audit is None
    assert int(state.step) == 1


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("every", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, ValueError), (True, TypeError), ("9", TypeError)],
)
def test_audit_every_is_an_integer(every, error):
    """Anything but an integer of at least 1 is refused at construction."""
    with pytest.raises(error, match=r"audit_every; got"):
        gs.train_step(gs.autocast(loss_fn), audit_every=every)


@pytest.mark.parametrize(
    ("bounds", "error"),
    [
        ((0.0, 0.1, 0.5), ValueError),
        ((0.01, -0.1, 0.5), ValueError),
        ((0.01, 0.1, math.nan), ValueError),
        ((0.01, 0.1), TypeError),
        (0.1, TypeError),
        (("a", 0.1, 0.5), TypeError),
    ],
)
def test_bounds_are_three_numbers(bounds, error):
    """Bounds out of range are refused at construction, by step and audit."""
    with pytest.raises(error, match="audit_bounds"):
        gs.train_step(gs.autocast(loss_fn), audit_every=1, audit_bounds=bounds)
    with pytest.raises(error, match="bounds"):
        gs.audit(gs.autocast(loss_fn), state_of(), X, Y, bounds=bounds)


def test_a_loss_without_autocast_is_refused():
    """There is nothing to compare such a loss with, which is said at construction."""
    with pytest.raises(ValueError, match=r"a loss that gainstage.autocast returned for loss_fn"):
        gs.train_step(loss_fn, audit_every=1)
    with pytest.raises(ValueError, match=r"a loss that gainstage.autocast returned for fun"):
        gs.audit(loss_fn, state_of(), X, Y)
    with pytest.raises(TypeError, match="Expected a function for fun"):
        gs.audit(PARAMS, X, Y, scale=1.0)


def test_parameters_need_a_scale():
    """Without a state and a scale, the error says what to write."""
    with pytest.raises(TypeError, match="parameters and a scale"):
        gs.audit(gs.autocast(loss_fn), PARAMS, X, Y)
    with pytest.raises(ValueError, match="scale"):
        gs.audit(gs.autocast(loss_fn), PARAMS, X, Y, scale=0.0)


def test_a_loss_that_differs_from_call_to_call_is_named_as_such():
    """Random numbers of numpy make two losses of one batch, which is no fault of precision."""
    generator = np.random.default_rng(0)

    def random(params, x, y):
        return loss_fn(params, x * generator.uniform(0.5, 1.5), y)

    step = gs.train_step(gs.autocast(random), audit_every=1)
    _, told = trained(step, state_of(), 4, X, Y)
    assert len(told) == 1
    assert "two float32 calls of the loss with the same batch return different losses" in told[0]
    assert "xray" not in told[0]
    assert step.audits.count == 0


def test_a_nan_in_the_data_is_no_fault_of_precision():
    """The audit says that float32 is not finite either, and nothing else."""
    step = gs.train_step(gs.autocast(loss_fn), audit_every=1)
    _, told = trained(step, state_of(), 4, X * np.nan, Y)
    assert len(told) == 1
    assert "not finite in float32 either" in told[0]
    assert "xray" not in told[0]
    found = gs.audit(gs.autocast(loss_fn), state_of(), X * np.nan, Y)
    assert not found.ok
    assert not found.is_off


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def scarce(largest):
    """A loss whose float32 side has memory for so many rows; the other side for all."""

    def loss(params, x, y):
        if jax.config.jax_default_matmul_precision == "highest" and len(x) > largest:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return loss_fn(params, x, y)

    return gs.autocast(loss)


@pytest.mark.parametrize("rows", [32, 16, 8])
def test_a_float32_side_that_does_not_fit_takes_a_part_of_the_batch(rows):
    """Half, a quarter or an eighth of the batch is compared, without a word."""
    step = gs.train_step(scarce(rows), audit_every=2)
    _, told = trained(step, state_of(), 5, X, Y)
    assert told == []
    assert step.audits.count == 4
    wanted = gs.audit(gs.autocast(loss_fn), state_of(), X[:rows], Y[:rows])
    found = gs.audit(scarce(rows), state_of(), X, Y)
    np.testing.assert_allclose(found.float32_loss, wanted.float32_loss, rtol=1e-5)
    assert f"on 1/{64 // rows} of the batch" in str(found)


def test_audits_that_do_not_fit_are_left_out_with_a_sentence():
    """Where not even an eighth fits, or there is no axis to divide, the run goes on without."""
    for fun, batch, why in (
        (scarce(4), (X, Y), "nor does an audit of 1/8"),
        (scarce(32), (X, Y[:32].repeat(2, 0)[:63]), "no leading axis in common"),
    ):
        half = fun
        if len(batch[1]) == 63:

            def uneven(params, x, y, half=fun):
                return half(params, x, jnp.concatenate([y, y[:1]]))

            half = gs.autocast(uneven)
        step = gs.train_step(half, audit_every=1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state = state_of()
            for _ in range(3):
                state, _ = step(state, *batch)
        said = [str(w.message) for w in told if "left out" in str(w.message)]
        assert len(said) == 1
        assert why in said[0]
        assert step.audit is None
        assert int(state.step) == 3
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        gs.audit(scarce(4), state_of(), X, Y)


def test_another_error_of_the_loss_is_its_own():
    """An error that the step would raise too is raised as by the step."""
    step = gs.train_step(gs.autocast(loss_fn), audit_every=1)
    with pytest.raises(TypeError, match="dot_general"):
        step(state_of(), X[:, :3], Y)

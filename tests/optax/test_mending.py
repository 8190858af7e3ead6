"""`mend` and `train_step(mend=True)`: lines that spoil a step go back to float32."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gainstage as gs
from gainstage.precision import Plan

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 32), np.float32)
Y = np.tanh(X @ RNG.standard_normal((32, 32), np.float32) / 6)
PARAMS = {name: RNG.standard_normal((32, 32), np.float32) / 6 for name in ("a", "b", "c")}
OFFSET = 2.0**11


def network(params, x, y):
    h = jnp.tanh(x @ params["a"])
    h = jnp.tanh(h @ params["b"])
    return jnp.mean((h @ params["c"] - y) ** 2)


def spoiled(params, x, y, offset=OFFSET):
    """The same network, with an offset that is subtracted after the second product."""
    h = jnp.tanh(x @ params["a"])
    h = (h + offset) @ params["b"]
    h = jnp.tanh(h - offset * params["b"].sum(0))
    return jnp.mean((h @ params["c"] - y) ** 2)


def quiet(params, x, y):
    """A loss whose gradient overflows in float16 at any loss scale: a logarithm of what is 0."""
    h = x @ params["a"]
    energy = (1e-6 * h) ** 2 @ jnp.abs(params["b"])
    return jnp.mean((jnp.log(energy + 1e-14) - y) ** 2)


def state_of(params=PARAMS, tx=None, **options):
    options = {"loss_scale": gs.DynamicLossScale(2.0**8), **options}
    return gs.TrainState.create(
        jax.tree.map(jnp.asarray, params), tx or optax.adam(1e-3), **options
    )


def trained(step, state, steps, *batch):
    """The state and the loss after some steps, and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            state, loss = step(state, *batch)
    return state, float(loss), [str(w.message) for w in told]


def texts(plan):
    return {operation.text for operation in plan.entries}


def error_of(fun, params, *batch, scale=2.0**8):
    """The relative error of the gradient of `spoiled` under autocast."""
    exact = jax.tree.leaves(jax.jit(jax.grad(spoiled))(params, *batch))
    found = jax.tree.leaves(jax.jit(jax.grad(lambda p: scale * fun(p, *batch)))(params))
    off = [np.asarray(f, "d") / scale - e for f, e in zip(found, exact, strict=True)]
    return math.hypot(*map(np.linalg.norm, off)) / math.hypot(*map(np.linalg.norm, exact))


# ── a function ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.as_users
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_line_that_spoils_a_step_goes_back_to_float32(dtype):
    """Of three products, the one with an offset is in float32, and the gradient is right."""
    half = gs.autocast(spoiled, dtype)
    mended = gs.mend(half, PARAMS, X, Y, scale=2.0**8)
    assert texts(mended.plan) == {'h = (h + offset) @ params["b"]'}
    assert error_of(half, PARAMS, X, Y) > 0.1
    assert error_of(mended, PARAMS, X, Y) < 0.05
    assert 0.3 < mended.plan.left < 1
    text = str(jax.make_jaxpr(mended)(PARAMS, X, Y))
    short = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    assert text.count(f"{short}[64,32] = dot_general") == 2


def test_a_function_that_is_right_is_returned_as_it_is():
    """Within the bounds there is nothing to mend; its plan has no rows."""
    half = gs.autocast(network)
    assert gs.mend(half, PARAMS, X, Y, scale=2.0**8) is half
    assert half.plan == Plan("float16")


def test_nearly_right_is_mended_to_narrower_bounds():
    """With bounds of a thousandth, more goes back, and the gradient is nearer to float32."""
    half, bounds = gs.autocast(network, "bfloat16"), (1e-3, 1e-3, 1e-2)
    mended = gs.mend(half, PARAMS, X, Y, scale=1.0, bounds=bounds)
    before, after = (gs.audit(f, PARAMS, X, Y, scale=1.0) for f in (half, mended))
    assert before.gradient_error > 1e-3 > after.gradient_error


def test_the_result_of_a_product_goes_before_its_operands():
    """Where the rounding of a result spoils it, the operands stay in half precision."""

    def differences(params, x, y):
        h = x @ params["a"]
        h = (h + 64.0)[1:] - (h + 64.0)[:-1]
        return jnp.mean((jnp.tanh(16 * h) @ params["c"] - y[1:]) ** 2)

    def near(params, x, y):
        h = x @ (params["a"] + 4.0)
        return jnp.mean((jnp.tanh(32 * (h[1:] - h[:-1])) @ params["c"] - y[1:]) ** 2)

    x = np.repeat(X[:1], 64, 0) + np.float32(2**-7) * np.round(X)
    x = np.float32(np.float16(np.round(x * 128) / 128))
    params = {**PARAMS, "a": np.float32(np.float16(PARAMS["a"]))}
    mended = gs.mend(gs.autocast(near, "bfloat16"), params, x, Y, scale=1.0)
    dtypes = {o.text: o.dtype for o in mended.plan.entries if o.name == "dot_general"}
    assert set(dtypes.values()) <= {"float32", "float32 result"}
    half = gs.mend(gs.autocast(differences), PARAMS, X, Y, scale=2.0**8)
    assert gs.audit(half, PARAMS, X, Y, scale=2.0**8).ok


def test_its_plan_prints_and_is_kept_in_a_file(tmp_path):
    """A plan names the line and its code; loaded, it gives the same program."""
    mended = gs.mend(gs.autocast(spoiled), PARAMS, X, Y, scale=2.0**8)
    mended.plan.save(tmp_path / "plan.json")
    again = gs.autocast(spoiled, Plan.load(tmp_path / "plan.json"))
    programs = (jax.jit(f).lower(PARAMS, X, Y).as_text() for f in (mended, again))
    assert len(set(programs)) == 1
    shown = str(mended.plan)
    assert "with gainstage.keep_float32(): around test_mending.py:" in shown
    assert 'h = (h + offset) @ params["b"]' in shown
    assert "of what they have in half precision is left" in shown


def test_a_mended_function_is_mended_again():
    """A second batch may take more lines, and those of the first stay."""
    half = gs.autocast(functools.partial(spoiled, offset=2.0**11))
    first = gs.mend(half, PARAMS, X, Y, scale=2.0**8)
    tight = gs.mend(first, PARAMS, X, Y, scale=2.0**8, bounds=(1e-5, 1e-5, 1e-5))
    assert texts(first.plan) < texts(tight.plan)
    assert gs.audit(tight, PARAMS, X, Y, scale=2.0**8).gradient_error < 1e-5


WRAPS = {
    "partial": lambda half: functools.partial(half, offset=OFFSET),
    "jit": jax.jit,
    "wraps": lambda half: functools.wraps(half)(lambda *args: half(*args)),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_is_made_of_a_function_is_mended_too(wrap):
    """A `functools.partial`, `jax.jit` or wrapper of what autocast returned."""
    mended = gs.mend(WRAPS[wrap](gs.autocast(spoiled)), PARAMS, X, Y, scale=2.0**8)
    assert texts(mended.plan) == {'h = (h + offset) @ params["b"]'}
    assert gs.audit(mended, PARAMS, X, Y, scale=2.0**8).ok


def test_a_part_under_autocast_is_mended():
    """What calls autocast inside of the loss is measured and mended there."""
    inner = gs.autocast(lambda params, h: (h + OFFSET) @ params["b"])

    @gs.autocast
    def whole(params, x, y):
        h = inner(params, jnp.tanh(x @ params["a"])) - OFFSET * params["b"].sum(0)
        return jnp.mean((jnp.tanh(h) @ params["c"] - y) ** 2)

    mended = gs.mend(whole, PARAMS, X, Y, scale=2.0**8)
    assert gs.audit(mended, PARAMS, X, Y, scale=2.0**8).ok
    assert mended.plan.entries


def test_a_loss_with_its_own_scale_is_mended_between_epochs():
    """For a trainer that differentiates by itself; what it returns keeps its scale."""
    mended = gs.mend(gs.autocast(spoiled, loss_scale=2.0**8), PARAMS, X, Y)
    assert texts(mended.plan) == {'h = (h + offset) @ params["b"]'}
    tx = optax.adam(1e-2)
    params, opt_state = PARAMS, tx.init(PARAMS)
    losses = []
    for _ in range(20):
        loss, grads = jax.jit(jax.value_and_grad(mended))(params, X, Y)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_float8_goes_back_to_half_precision_first():
    """A layer that float8 spoils is in float16, not in float32."""

    def residual(params, x, y):
        return jnp.mean((x @ params["a"] - y) ** 2)

    y = X @ (PARAMS["a"] + np.float32(0.01))
    budget = {"dtype": "float8", "card": None, "max_noise": 100.0, "max_bias": 100.0}
    plan = gs.precision.find_plan(residual, PARAMS, [(X[:32], y[:32]), (X[32:], y[32:])], **budget)
    assert [o.dtype for o in plan.entries if o.name == "dot_general"] == ["float8"]
    mended = gs.mend(gs.autocast(residual, plan), PARAMS, X, y, scale=2.0**8)
    assert [o.dtype for o in mended.plan.entries if o.name == "dot_general"] == ["float16"]
    assert gs.audit(mended, PARAMS, X, y, scale=2.0**8).ok


# ── a run ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.as_users
def test_a_run_mends_itself_at_the_first_audit():
    """One warning says what is in float32, and why; the run ends as in float32."""
    step = gs.train_step(gs.autocast(spoiled), audit_every=20, mend=True)
    assert step.plan == Plan("float16")
    state, loss, told = trained(step, state_of(), 60, X, Y)
    assert len(told) == 1
    assert told[0].startswith("step 0: half precision made the loss ")
    assert "test_mending.py" in told[0]
    assert "step.plan" in told[0]
    assert texts(step.plan) == {'h = (h + offset) @ params["b"]'}
    exact = gs.train_step(spoiled)
    wanted, right, _ = trained(exact, state_of(loss_scale=gs.FixedLossScale(1.0)), 60, X, Y)
    assert loss == pytest.approx(right, rel=0.01)
    assert int(state.step) == int(wanted.step) == 60
    assert step.audits.last.ok


def late(params, x, y, is_late):
    """`spoiled` from some step on."""
    return spoiled(params, x, y, jnp.where(is_late, OFFSET, 0.0))


def test_a_run_that_goes_wrong_later_is_mended_at_the_next_audit():
    """Before that nothing is said, and the program is the one without audits."""
    step = gs.train_step(gs.autocast(late), audit_every=4, mend=True)
    plain = gs.train_step(gs.autocast(late))
    state, _, told = trained(step, state_of(), 6, X, Y, jnp.array(False))
    assert told == []
    lowered = [s.lower(state, X, Y, jnp.array(True)).as_text() for s in (step, plain)]
    assert lowered[0] == lowered[1]
    state, _, told = trained(step, state, 6, X, Y, jnp.array(True))
    assert len(told) == 1
    assert told[0].startswith("step 8: ")
    assert step.plan.entries
    assert lowered[0] != step.lower(state, X, Y, jnp.array(True)).as_text()


def test_a_healthy_run_is_left_alone():
    """Nothing is mended or said in two hundred steps, and the weights are those without audits."""
    results = []
    for options in ({}, {"audit_every": 20, "mend": True}):
        step = gs.train_step(gs.autocast(network), **options)
        state, _, told = trained(step, state_of(), 200, X, Y)
        assert told == []
        results.append(np.asarray(state.params["a"]).tobytes())
    assert step.plan == Plan("float16")
    assert results[0] == results[1]


def test_a_step_that_no_scale_helps_is_mended_at_once():
    """No step is lost to a gradient that overflows at the lowest scale too."""
    step = gs.train_step(gs.autocast(quiet), audit_every=1000, mend=True)
    state, loss, told = trained(step, state_of(), 30, X, Y)
    assert "a gradient not finite at any loss scale" in told[0]
    assert len(told) == 1
    assert int(state.step) == 30
    assert math.isfinite(loss)


def tiny(params, x, y):
    """A loss with gradients that float16 loses without a loss scale."""
    return 1e-7 * network(params, x, y)


def test_a_scale_that_is_too_low_is_no_reason_for_float32():
    """The warning names the scale at which the gradients are right; nothing goes back."""
    step = gs.train_step(gs.autocast(tiny), audit_every=1000, mend=True)
    _, _, told = trained(step, state_of(loss_scale=gs.FixedLossScale(1.0)), 20, X, Y)
    said = [message for message in told if "loses small gradients" in message]
    assert len(said) == 1
    assert "loss_scale=gainstage.DynamicLossScale(2.0**" in said[0]
    assert step.plan == Plan("float16")
    half = gs.autocast(tiny)
    with pytest.warns(UserWarning, match="nothing goes back to float32"):
        assert gs.mend(half, PARAMS, X, Y, scale=1.0) is half
    scale = 2.0 ** int(said[0].split("DynamicLossScale(2.0**")[1].split(")")[0])
    assert gs.audit(half, PARAMS, X, Y, scale=scale).ok


def test_a_scale_that_is_too_high_at_first_mends_nothing():
    """The rule lowers it, as ever; no line goes back to float32."""
    step = gs.train_step(gs.autocast(network), audit_every=1000, mend=True)
    state, _, told = trained(step, state_of(loss_scale=gs.DynamicLossScale(2.0**40)), 80, X, Y)
    assert told == []
    assert step.plan == Plan("float16")
    assert int(state.step) > 40


def test_a_run_that_dies_is_mended_without_waiting_for_an_audit():
    """Steps that are skipped, one after the other, are reason enough."""

    def dying(params, x, y, is_late):
        return jnp.where(is_late, quiet(params, x, y), network(params, x, y))

    step = gs.train_step(gs.autocast(dying), audit_every=10**6, mend=True)
    state, _, told = trained(step, state_of(), 40, X, Y, jnp.array(False))
    assert told == []
    state, loss, told = trained(step, state, 260, X, Y, jnp.array(True))
    assert any("half precision made" in message for message in told)
    assert step.plan.entries
    assert math.isfinite(loss)
    assert int(state.step) > 100


def test_the_state_stays_as_it_is():
    """A mending changes no weight and no scale: the step is that of the mended function."""
    step = gs.train_step(gs.autocast(spoiled), audit_every=20, mend=True, donate=False)
    rule = gs.DynamicLossScale(2.0**4)
    mended = gs.mend(gs.autocast(spoiled), state_of(loss_scale=rule), X, Y)
    state, loss, _ = trained(step, state_of(loss_scale=rule), 1, X, Y)
    other, same, _ = trained(gs.train_step(mended), state_of(loss_scale=rule), 1, X, Y)
    assert loss == same
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_resumed_run_starts_mended():
    """With the plan of the step the next run has its program from the start, and says nothing."""
    step = gs.train_step(gs.autocast(spoiled), audit_every=20, mend=True)
    state, _, _ = trained(step, state_of(), 5, X, Y)
    plan = Plan.from_json(step.plan.to_json())
    resumed = gs.train_step(gs.autocast(spoiled, plan), audit_every=20, mend=True)
    assert resumed.lower(state, X, Y).as_text() == step.lower(state, X, Y).as_text()
    _, _, told = trained(resumed, state, 25, X, Y)
    assert told == []
    assert resumed.plan == plan


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(32, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.last = nnx.Linear(32, 32, rngs=rngs)

        def __call__(self, x):
            h = jnp.tanh(self.norm(self.first(x + OFFSET)))
            return self.last(h)

    return Model(nnx.Rngs(0)), lambda model, x, y: jnp.mean((model(x) - y) ** 2)


def equinox_model():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        first: eqx.nn.Linear
        last: eqx.nn.Linear

        def __call__(self, x):
            h = self.first(x + OFFSET) - OFFSET * self.first.weight.sum(1)
            return self.last(jnp.tanh(h))

    one, two = jax.random.split(jax.random.key(0))
    model = Model(eqx.nn.Linear(32, 32, key=one), eqx.nn.Linear(32, 32, key=two))
    return model, lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)


def with_extra():
    def loss(params, count, x, y):
        return spoiled(params, x, y), count + 1

    return PARAMS, loss


@pytest.mark.parametrize("make", [nnx_model, equinox_model, with_extra])
def test_models_and_extras(make):
    """A model of NNX or Equinox, and a state with an extra, are mended in a run."""
    params, loss = make()
    options = {"extra": jnp.int32(0)} if make is with_extra else {}
    state = gs.TrainState.create(
        jax.tree.map(jnp.asarray, params) if make is with_extra else params,
        optax.adam(1e-3), **options,
    )  # fmt: skip
    step = gs.train_step(gs.autocast(loss, "bfloat16"), audit_every=10, mend=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(12):
            state, *_ = step(state, X, Y)
    assert len([w for w in told if "half precision made" in str(w.message)]) == 1
    assert step.plan.entries
    assert step.audits.last.ok
    if make is with_extra:
        assert int(state.extra) == 12


# ── devices and memory ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh_the_plan_is_that_of_one_device(kind):
    """With a batch in eight shards, and sharded weights, the same lines go back."""
    alone = gs.mend(gs.autocast(spoiled), state_of(), X, Y).plan
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    batch = [jax.device_put(v, NamedSharding(mesh, P("data"))) for v in (X, Y)]
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
        step = gs.train_step(gs.autocast(spoiled), audit_every=20, mend=True)
        _, _, told = trained(step, gs.TrainState.create(params, optax.adam(1e-3)), 3, *batch)
    assert len(told) == 1
    assert [(o.key, o.dtype) for o in step.plan.entries] == [
        (o.key, o.dtype) for o in alone.entries
    ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_weights_in_shards_are_mended(kind):
    """Each device has an eighth of the weights, also of some that are too many to be compared one
    by one."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("data"))
    params = {**PARAMS, "c": np.concatenate([PARAMS["c"]] * 16, 1) / 4}

    def wide(params, x, y):
        return spoiled({**params, "c": params["c"].reshape(32, 16, 32).sum(1)}, x, y)

    with jax.set_mesh(mesh):
        params, batch = jax.device_put(params, rows), jax.device_put((X, Y), rows)
        mended = gs.mend(gs.autocast(wide), params, *batch, scale=2.0**8)
    assert texts(mended.plan) == {'h = (h + offset) @ params["b"]'}


def test_a_float32_side_that_does_not_fit_is_mended_on_a_part_of_the_batch():
    """Where float32 has memory for a quarter of the rows, these say which lines to take."""

    def scarce(params, x, y):
        if jax.config.jax_default_matmul_precision == "highest" and len(x) > 16:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return spoiled(params, x, y)

    step = gs.train_step(gs.autocast(scarce), audit_every=20, mend=True)
    _, _, told = trained(step, state_of(), 3, X, Y)
    assert len(told) == 1
    assert texts(step.plan) == {'h = (h + offset) @ params["b"]'}


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


def test_mend_needs_audits():
    """Without `audit_every` nothing would be found; the error has the line to write."""
    with pytest.raises(ValueError, match=r"audit_every=1000, mend=True"):
        gs.train_step(gs.autocast(network), mend=True)
    with pytest.raises(TypeError, match="mend; got 1"):
        gs.train_step(gs.autocast(network), audit_every=9, mend=1)


def test_a_function_without_autocast_is_refused():
    """It has no half precision to take back."""
    with pytest.raises(ValueError, match=r"a loss that gainstage.autocast returned for fun"):
        gs.mend(network, PARAMS, X, Y, scale=1.0)
    with pytest.raises(ValueError, match=r"a loss that gainstage.autocast returned for loss_fn"):
        gs.train_step(network, audit_every=9, mend=True)
    with pytest.raises(TypeError, match="parameters and a scale"):
        gs.mend(gs.autocast(network), PARAMS, X, Y)


def test_inside_of_a_program_it_says_that_it_mends_nothing():
    """As audits, which it needs."""
    step = gs.train_step(gs.autocast(spoiled), audit_every=1, mend=True)
    with pytest.warns(UserWarning, match="audits nothing inside of jax.jit"):
        jax.jit(step)(state_of(), X, Y)
    assert step.plan == Plan("float16")


def test_what_float32_does_not_help_is_said_once():
    """A batch with a NaN is left to the skip; a second one is not told again."""
    step = gs.train_step(gs.autocast(network), audit_every=1, mend=True)
    state, _, told = trained(step, state_of(), 5, X * np.nan, Y)
    assert len(told) == 1
    assert "not finite in float32 either" in told[0]
    assert int(state.step) == 0
    assert step.plan == Plan("float16")


@jax.custom_vjp
def signed(x):
    """The identity; its backward pass, in float16, returns the sign of the cotangent."""
    return x


signed.defvjp(
    lambda x: (x, None),
    lambda _, g: (jnp.sign(g.astype(jnp.float16)).astype(jnp.float32) * 1e-3,),
)


def test_what_no_line_mends_is_said_as_by_an_audit():
    """A backward pass of the user's that no scale may multiply: nothing goes back to float32."""

    def sign_loss(params, x, y):
        return jnp.mean((signed(jnp.tanh(x @ params["a"])) @ params["c"] - y) ** 2)

    step = gs.train_step(gs.autocast(sign_loss), audit_every=1, mend=True)
    state, _, told = trained(step, state_of(), 6, X, Y)
    assert len(told) == 1
    assert told[0].startswith("Audit of step 0: ")
    assert step.plan == Plan("float16")
    with compilations() as compiled:  # it is not measured again at each audit
        trained(step, state, 1, X, Y)
    assert compiled == []

"""Parameters carry the loss scale, so that it adapts in trainers that differentiate themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs

from networks import normalised

P = PartitionSpec
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (2**12, 16))
TRUE = jax.random.normal(KEYS[1], (16, 16))
Y = X @ TRUE
FACTOR = 2.0**-12  # without a scale, float16 loses these gradients
RULE = gs.DynamicLossScale(2.0**40, min_scale=1.0)


def loss_fn(params, x, y):
    out = (x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean((out - y) ** 2) * FACTOR


def fresh(scale=2.0**15):
    return gs.with_loss_scale({"w": jnp.zeros((16, 16))}, scale)


def error(params):
    return float(jnp.abs(params["w"] - TRUE).mean())


def trained(tx, params, steps=150, wrapped=None, cast=lambda params: params, **names):
    """Parameters and state, after steps that any trainer could take."""
    wrapped = wrapped or gs.self_scaled(loss_fn)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(wrapped)(params, X, Y)
        updates, state = tx.update(grads, state, params, **names)
        return cast(optax.apply_updates(params, updates)), state, loss

    state = tx.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state)
    return params, state


def test_the_scale_adapts_in_a_foreign_loop():
    """From 2**40 every step is taken, and the scale is halved until none is retried."""
    for rule, scale in ((None, 2.0**40), (RULE, 2.0**15)):
        tx = gs.loss_scaled(optax.adam(0.1), rule, telemetry=True)
        params, state = trained(tx, fresh(scale))
        assert error(params.params) < 1e-2
        assert params.loss_scale == gs.loss_scale(state)
        assert 2.0**15 <= params.loss_scale <= 2.0**30
        assert gs.telemetry(state).skipped_steps == 0
        assert state.inner[0].count == 150
        assert gs.diagnostics.report(state, params).names == ("w",)
    plain, _ = trained(optax.adam(0.1), {"w": jnp.zeros((16, 16))}, wrapped=loss_fn)
    assert error(plain) > 5e-2


def test_a_retried_step_is_applied_and_lowers_the_scale():
    """The update is that of a step without a retry; the rule then counts a non-finite step."""
    tx, wrapped = gs.loss_scaled(optax.sgd(1.0)), gs.self_scaled(loss_fn)
    found = {}
    for power in (20, 40):
        params = fresh(2.0**power)
        state = tx.init(params)
        assert gs.loss_scale(state) == 2.0**power
        grads = jax.grad(wrapped)(params, X, Y)
        updates, state = tx.update(grads, state, params)
        assert state.applied
        found[power] = updates.params["w"], gs.loss_scale(state), grads.loss_scale
    assert (found[20][1], found[40][1]) == (2.0**20, 2.0**39)
    assert found[20][2] == 0
    assert found[40][2] * 2.0**100 in (-3, -4)  # from 2**40 to 2**28 or 2**24
    np.testing.assert_allclose(found[20][0], found[40][0], rtol=1e-2, atol=1e-6)


def test_a_loss_that_is_maximized_carries_its_scale_too():
    """The sign of what multiplies the loss turns the gradients, and says nothing of retries."""
    wrapped = gs.self_scaled(loss_fn)
    for power in (20, 40):
        up, down = (
            jax.grad(lambda p, sign=sign: sign * wrapped(p, X, Y))(fresh(2.0**power))
            for sign in (-1, 1)
        )
        np.testing.assert_array_equal(up.params["w"], -down.params["w"])
        assert float(up.loss_scale) == float(down.loss_scale)


def test_of_two_carried_scales_that_of_the_trained_parameters_counts():
    """A teacher beside a student may carry a scale too; the student's decides and reports."""

    def loss(teacher, student, x):
        return loss_fn(student, x, x @ teacher["w"])

    alone = jax.grad(gs.self_scaled(lambda student, x: loss({"w": TRUE}, student, x)))
    expected = alone(fresh(2.0**40), X)
    teacher = gs.with_loss_scale({"w": TRUE}, 2.0**15)
    grads = jax.grad(gs.self_scaled(loss), argnums=1)(teacher, fresh(2.0**40), X)
    assert float(grads.loss_scale) == float(expected.loss_scale)
    assert float(grads.loss_scale) != float(alone(fresh(), X).loss_scale)
    np.testing.assert_allclose(grads.params["w"], expected.params["w"], rtol=1e-5)


def test_the_scale_grows():
    """After a run of finite steps it doubles, in the state and among the parameters."""
    tx = gs.loss_scaled(optax.adam(0.1), gs.DynamicLossScale(8.0, 2))
    params, state = trained(tx, fresh(8.0), 6)
    assert params.loss_scale == gs.loss_scale(state) == 64.0


def test_bad_data_is_skipped_and_the_scale_stays_true():
    """After the last retry a step with NaN data changes no parameter, and lowers the scale."""
    tx = gs.loss_scaled(optax.adam(0.1))
    params = fresh()
    state = tx.init(params)
    grads = jax.grad(gs.self_scaled(loss_fn, retries=2))(params, X.at[0].set(jnp.nan), Y)
    updates, state = tx.update(grads, state, params)
    assert not state.applied
    for apply_updates in (optax.apply_updates, lambda p, u: gs.apply_updates(p, u, state)):
        new = apply_updates(params, updates)
        np.testing.assert_array_equal(new.params["w"], params.params["w"])
        assert new.loss_scale == gs.loss_scale(state) == 2.0**14


@pytest.mark.parametrize(
    ("make", "cast"),
    [
        (lambda tx: optax.chain(optax.clip_by_global_norm(1e-4), tx), None),
        (lambda tx: optax.chain(tx, optax.add_decayed_weights(-1e-4)), None),
        (lambda tx: optax.chain(optax.add_decayed_weights(1e-6), tx), None),
        (lambda tx: optax.MultiSteps(tx, 2), None),
        (lambda tx: tx, lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)),
        (lambda tx: tx, lambda p: p._replace(loss_scale=p.loss_scale * 0.9)),
    ],
    ids=["clip", "decay after", "decay before", "MultiSteps", "bfloat16", "average"],
)
def test_what_a_trainer_does_around_it(make, cast):
    """Clipping, weight decay, accumulation and casts leave the scale what the rule makes it."""
    tx = make(gs.loss_scaled(optax.adam(0.1)))
    params, state = trained(tx, fresh(2.0**30), 200, cast=cast or (lambda p: p))
    assert error(params.params) < (0.05 if cast else 0.03)
    assert 2.0**15 <= gs.loss_scale(state) <= 2.0**30
    assert float(params.loss_scale) == pytest.approx(float(gs.loss_scale(state)), rel=0.11)


def test_an_unusable_scale_is_ignored():
    """A step with a scale of NaN, 0 or infinity starts at the constant; an update repairs 0."""
    tx, wrapped = gs.loss_scaled(optax.sgd(1.0)), gs.self_scaled(loss_fn)
    params = fresh()
    state = tx.init(params)
    exact = np.asarray(jax.grad(wrapped)(params, X, Y).params["w"])
    for bad in (jnp.nan, 0.0, -3.0, jnp.inf):
        other = params._replace(loss_scale=jnp.float32(bad))
        grads = jax.grad(wrapped)(other, X, Y)
        np.testing.assert_array_equal(grads.params["w"], exact)
        updates, after = tx.update(grads, state, other)
        if np.isfinite(bad):
            assert optax.apply_updates(other, updates).loss_scale == gs.loss_scale(after)


@pytest.mark.filterwarnings("ignore:The gradient of a float16 parameter")
def test_in_float16_the_scale_stays_finite():
    """Parameters in float16 carry at most 2**15, though the rule's scale is larger."""
    params = jax.tree.map(lambda x: x.astype(jnp.float16), fresh())
    tx = gs.loss_scaled(optax.adam(0.1), gs.DynamicLossScale(2.0**20))
    halve = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float16))
    params, state = trained(tx, params, 3, cast=halve)
    assert params.loss_scale == 2.0**15
    assert gs.loss_scale(state) == 2.0**20


def test_update_without_params():
    """Trainers that pass gradients and state alone move the scale too."""
    tx, wrapped = gs.loss_scaled(optax.adam(0.1)), gs.self_scaled(loss_fn)
    params = fresh(2.0**40)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.grad(wrapped)(params, X, Y), state)
        params = optax.apply_updates(params, updates)
    assert params.loss_scale == gs.loss_scale(state) == 2.0**37


def test_train_state():
    """Flax's `TrainState` needs the three wrappers alone."""
    train_state = pytest.importorskip("flax.training.train_state")
    tx = gs.loss_scaled(optax.adam(0.1))
    state = train_state.TrainState.create(apply_fn=None, params=fresh(2.0**40), tx=tx)

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(gs.self_scaled(loss_fn))(state.params, X, Y))

    for _ in range(150):
        state = step(state)
    assert error(state.params.params) < 1e-2
    assert state.params.loss_scale == gs.loss_scale(state.opt_state) < 2.0**30


def of_model(model, x, y):
    return jnp.mean((model(x) - y) ** 2) * FACTOR


def test_a_flax_nnx_optimizer():
    """A model of NNX has the scale as a parameter, which its optimizer updates."""
    nnx = pytest.importorskip("flax.nnx")
    model = normalised(nnx)
    assert gs.with_loss_scale(model, 2.0**40) is model
    tx = gs.loss_scaled(optax.adam(0.03), telemetry=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    wrapped = gs.self_scaled(of_model)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(wrapped)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X, Y)) for _ in range(100)]
    assert losses[-1] < 0.01 * losses[0]
    scale = model.loss_scale[...]
    assert scale == gs.loss_scale(optimizer.opt_state) < 2.0**30
    assert gs.telemetry(optimizer.opt_state).skipped_steps == 0
    assert gs.diagnostics.report(optimizer.opt_state, model) is not None
    assert abs(model.norm.mean[...]).max() > 0


def test_the_state_of_an_nnx_model():
    """A loss of the split model has the scale in the state; a skipped step lowers it."""
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(16, 16, dtype=jnp.float16, rngs=nnx.Rngs(0))
    graph, params = nnx.split(gs.with_loss_scale(layer))

    def of_state(params, x):
        return of_model(nnx.merge(graph, params), x, Y)

    tx = gs.loss_scaled(optax.sgd(0.1))
    state = tx.init(params)
    grads = jax.jit(jax.grad(gs.self_scaled(of_state, retries=0)))(params, X * jnp.nan)
    updates, state = tx.update(grads, state, params)
    assert gs.loss_scale(state) == 2.0**14
    assert optax.apply_updates(params, updates)["loss_scale"].get_value() == 2.0**14
    model = nnx.merge(graph, params)
    gs.apply_updates(model, updates, state)
    assert model.loss_scale.get_value() == 2.0**14


def test_an_equinox_model():
    """A model is evaluated as `.params`, partitioned and updated by Equinox."""
    eqx = pytest.importorskip("equinox")

    def of_mlp(model, x, y):
        half = jax.tree.map(lambda a: a.astype("float16") if eqx.is_inexact_array(a) else a, model)
        return jnp.mean((jax.vmap(half)(x.astype("float16")).astype("float32") - y) ** 2) * FACTOR

    model = gs.with_loss_scale(eqx.nn.MLP(16, 16, 64, 1, key=KEYS[2]), 2.0**40)
    assert isinstance(model, eqx.Module)  # some trainers take nothing else
    tx = gs.loss_scaled(optax.adam(0.01))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        loss, grads = eqx.filter_value_and_grad(gs.self_scaled(of_mlp))(model, X, Y)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for _ in range(60):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    assert model.loss_scale == gs.loss_scale(state) < 2.0**40
    jax.vmap(model.params)(X)
    step, before = gs.train_step(of_mlp, tx), float(of_mlp(model.params, X, Y))
    model, state, loss = step(model, state, X, Y)
    assert loss == pytest.approx(before, rel=1e-3)
    assert of_mlp(model.params, X, Y) < before


def test_under_scan_and_vmap():
    """Steps in a scan, for several models at once, each with its own scale."""
    tx, wrapped = gs.loss_scaled(optax.adam(0.1)), gs.self_scaled(loss_fn)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(wrapped)(params, X, Y), state, params)
        return (optax.apply_updates(params, updates), state), params.loss_scale

    @jax.jit
    @jax.vmap
    def run(scale):
        params = gs.with_loss_scale({"w": jnp.zeros((16, 16))})._replace(loss_scale=scale)
        return lax.scan(step, (params, tx.init(params)), length=100)

    (params, state), scales = run(jnp.float32([2.0**20, 2.0**40]))
    assert (state.loss_scale.scale == params.loss_scale).all()
    assert (scales[0] == 2.0**20).all()
    assert scales[1, 0] == 2.0**40
    assert scales[1, -1] < 2.0**30
    for i in range(2):
        assert error({"w": params.params["w"][i]}) < 0.05


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    """Eight devices share the batch, and one scale."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x, y = (jax.device_put(v, NamedSharding(mesh, P("data"))) for v in (X, Y))
    weights = {"w": jax.device_put(jnp.zeros((16, 16)), NamedSharding(mesh, P()))}
    params = gs.with_loss_scale(weights, 2.0**40)
    assert params.loss_scale.sharding == NamedSharding(mesh, P())
    tx = gs.loss_scaled(optax.adam(0.1), shard_state_over="data")

    @jax.jit
    def step(params, state, x, y):
        grads = jax.grad(gs.self_scaled(loss_fn))(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state, x, y)
    one, _ = trained(gs.loss_scaled(optax.adam(0.1)), fresh(2.0**40), 3)
    assert params.loss_scale == gs.loss_scale(state) == 2.0**37
    np.testing.assert_allclose(params.params["w"], one.params["w"], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """One device overflows: all retry, and all lower the same scale."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = gs.loss_scaled(optax.sgd(1.0))

    def local(params, state, x, y):
        def mean(params):
            return lax.pmean(loss_fn(params, x, y), "data")

        grads = jax.grad(gs.self_scaled(mean))(params)
        grads = grads if check_vma else lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P(),
            check_vma=check_vma,
        )
    )  # fmt: skip
    params = fresh(2.0**33)
    state = tx.init(params)
    params, state = step(params, state, X, Y.at[:512].multiply(2.0**6))
    assert params.loss_scale == gs.loss_scale(state) == 2.0**32
    assert state.applied


def test_inside_pmap():
    """The mean over devices of their gradients has the report of a retry."""
    tx, wrapped = gs.loss_scaled(optax.sgd(1.0)), gs.self_scaled(loss_fn)

    def local(params, state, x, y):
        grads = lax.pmean(jax.grad(wrapped)(params, x, y), "data")
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    params = fresh(2.0**40)
    params, state = jax.tree.map(lambda v: jnp.stack([v] * 8), (params, tx.init(params)))
    x, y = (v.reshape(8, -1, 16) for v in (X, Y))
    params, state = jax.pmap(local, "data")(params, state, x, y)
    assert (params.loss_scale == 2.0**39).all()
    assert (state.loss_scale.scale == 2.0**39).all()


def test_a_checkpoint_of_orbax(tmp_path):
    """Parameters and state come back as they were, and training goes on."""
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = gs.loss_scaled(optax.adam(0.1))
    both = trained(tx, fresh(2.0**40), 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "both", both)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "both", jax.tree.map(jnp.zeros_like, both))
    assert jax.tree.structure(back) == jax.tree.structure(both)
    for one, other in zip(*map(jax.tree.leaves, (both, back)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert back[0].loss_scale == gs.loss_scale(back[1]) == 2.0**37


def test_in_a_loop_of_our_own():
    """`train_step` and `value_and_grad` scale by the state, and the parameters follow."""
    tx = gs.loss_scaled(optax.adam(0.1))
    params = fresh(2.0**20)
    step, state = gs.train_step(loss_fn, tx), tx.init(params)
    for _ in range(150):
        params, state, _ = step(params, state, X, Y)
    assert error(params.params) < 1e-2
    assert params.loss_scale == gs.loss_scale(state)
    _, grads = gs.value_and_grad(loss_fn, state)(params, X, Y)
    exact = jax.grad(gs.self_scaled(loss_fn))(params, X, Y)
    np.testing.assert_allclose(grads.params["w"], exact.params["w"], rtol=0.05, atol=1e-8)
    with pytest.raises(ValueError, match=r"gainstage\.loss_scaled"):
        gs.train_step(loss_fn, optax.sgd(1.0))(params, optax.sgd(1.0).init(params), X, Y)


def test_names_and_frozen_copies():
    """Parameters by name, and a second set that is not differentiated, such as a target network."""

    def distance(*, params, target, x):
        return loss_fn(params, x, x @ target["w"])

    params, target = fresh(2.0**40), gs.with_loss_scale({"w": TRUE}, 2.0**3)
    wrapped = gs.self_scaled(distance)
    grads = jax.grad(lambda params: -wrapped(params=params, target=target, x=X))(params)
    assert grads.loss_scale < 0
    expected = jax.grad(gs.self_scaled(loss_fn))(params, X, Y)
    np.testing.assert_allclose(-grads.params["w"], expected.params["w"], rtol=1e-3)
    frozen = jax.grad(
        lambda scale: wrapped(params=params._replace(loss_scale=scale), target=target, x=X)
    )
    assert frozen(params.loss_scale) == 0  # without parameters nothing overflows
    with pytest.raises(ValueError, match="one loss scale among the arguments"):
        jax.grad(lambda both: wrapped(params=both[0], target=both[1], x=X))((params, target))


def test_bad_input_is_refused():
    """Scales that are none, are there twice, or are missing, before anything changes."""
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="scale"):
            fresh(scale)
    with pytest.raises(TypeError, match="scale"):
        fresh("large")
    params, plain = fresh(), {"w": jnp.zeros((16, 16))}
    for twice in (params, {"a": params}):
        with pytest.raises(ValueError, match="once"):
            gs.with_loss_scale(twice)
    tx = gs.loss_scaled(optax.sgd(1.0))
    for inside in ({"a": params}, [params, fresh()]):
        with pytest.raises(ValueError, match="one loss scale for all params"):
            tx.init(inside)
    state, without = tx.init(params), tx.init(plain)
    with pytest.raises(ValueError, match="the gradients have none"):
        tx.update(plain, state, params)
    with pytest.raises(ValueError, match="the params have none"):
        tx.update(params, state, plain)
    with pytest.raises(ValueError, match="made for parameters without one"):
        tx.update(params, without, params)
    for bad in (jnp.ones(2), jnp.int32(3), 3.0, "x"):
        other = params._replace(loss_scale=bad)
        with pytest.raises(TypeError, match="scalar floating array"):
            gs.self_scaled(loss_fn)(other, X, Y)
        with pytest.raises(TypeError, match="scalar floating array"):
            tx.init(other)
        with pytest.raises(TypeError, match="scalar floating array"):
            tx.update(params, state, other)


def test_bad_models_are_refused():
    """A model of NNX with a scale, or with an attribute of that name."""
    nnx = pytest.importorskip("flax.nnx")
    model = gs.with_loss_scale(normalised(nnx))
    with pytest.raises(ValueError, match="once"):
        gs.with_loss_scale(model)
    other = normalised(nnx)
    other.loss_scale = nnx.Param(jnp.ones(3))
    with pytest.raises(ValueError, match="without the attribute 'loss_scale'"):
        gs.with_loss_scale(other)
    assert jax.tree.leaves(gs.loss_scaled(optax.adam(0.1)).init(other).inner[0].mu["loss_scale"])


def test_a_loss_without_self_scaled_is_told():
    """A loss that reads a parameter or calls the model is told what is missing."""
    said = r"pass them to gainstage.self_scaled\(loss_fn\), or take `.params`"
    params = gs.with_loss_scale({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match=said):
        jax.grad(lambda p: p["w"].sum())(params)
    assert params[1] == params.loss_scale
    eqx = pytest.importorskip("equinox")
    model = gs.with_loss_scale(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    with pytest.raises(TypeError, match=said):
        model(jnp.ones(2))

"""Each importer continues its peer's run: the same scale, the same count, the same weights."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_floats import SMALL

import gainstage as gs
from gainstage.interop import importers
from gainstage.optimizers import LossScaleOptimizer, Variable
from gainstage.transforms import current_scale

# Recorded from `torch.amp.GradScaler` around SGD(0.5) on the loss `w[0] + i * w[1]` of step i,
# times inf where a step is not finite, from w = (1, 1).
TORCH = json.loads((Path(__file__).parents[1] / "goldens/torch_grad_scaler.json").read_text())
FLAGS = np.random.default_rng(0).random(60) < 0.8


def resumed(rule, state, inner=None):
    opt = LossScaleOptimizer(inner or gs.optimizers.SGD(0.5), loss_scale=rule)
    importers.load_into(opt, state)
    return opt


@pytest.mark.parametrize("stop", range(1, len(TORCH["steps"])))
def test_torch(stop):
    """A GradScaler's state, taken after any step, leads to torch's scales, counts and weights."""
    steps = TORCH["steps"]
    opt = resumed(*importers.from_torch(steps[stop - 1]["state"]))
    w = Variable(steps[stop - 1]["weights"])
    for i, step in enumerate(steps[stop:], stop):
        gradient = np.float32([1.0, i]) * np.float32(1.0 if step["finite"] else np.inf)
        opt.apply([gradient * np.float32(opt.loss_scale)], [w])
        assert float(opt.loss_scale) == step["state"]["scale"]
        assert int(opt.step_counter) == step["state"]["_growth_tracker"]
        assert w.numpy().tolist() == step["weights"]


def test_a_scale_from_torch_may_fall_below_1():
    """torch has no lowest scale: what fits a sum over the data may be a scale below 1."""
    state = TORCH["steps"][0]["state"] | {"scale": 1.0, "backoff_factor": 0.5}
    rule, state = importers.from_torch(state)
    for _ in range(3):
        state = rule.update(state, False)
    assert float(state.scale) == 2.0**-3


class Scaler:
    """torch's GradScaler, of which each window of microbatches is one step."""

    def __init__(self, state):
        self.state = dict(state)

    def update(self):
        """What `scaler.update()` does after a finite window."""
        self.state["_growth_tracker"] += 1
        if self.state["_growth_tracker"] == self.state["growth_interval"]:
            self.state["scale"] *= self.state["growth_factor"]
            self.state["_growth_tracker"] = 0


def test_a_scale_of_a_run_that_accumulated():
    """With `microbatches`, each loss is multiplied as torch's divided one was, and the scale grows
    after the same window."""
    windows, k = 7, 4
    start = {"scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.5}
    start |= {"growth_interval": 3, "_growth_tracker": 2}
    torch = Scaler(start)
    rule, state = importers.from_torch(start, microbatches=k)
    run = gs.TrainState.create(jnp.ones(2), optax.MultiSteps(optax.sgd(0.5), k), loss_scale=rule)
    run = run.replace(opt_state=run.opt_state._replace(rule_state=state))
    step = gs.train_step(lambda w, x: SMALL * (w * x).sum())
    for window in range(windows):
        for _ in range(k):
            assert float(run.loss_scale) == torch.state["scale"] / k, window
            run, _ = step(run, 1.0)
        torch.update()
        assert int(run.opt_state.rule_state.good_steps) == torch.state["_growth_tracker"] * k
    assert torch.state["scale"] == 4.0**3 * 1024


@pytest.mark.parametrize("wrong", [0, 1.5, True, "4"])
def test_a_wrong_number_of_microbatches(wrong):
    """What is no integer >= 1 is refused by name."""
    with pytest.raises(
        (TypeError, ValueError), match=r"an integer and >= 1 .* for microbatches; got"
    ):
        importers.from_torch(TORCH["steps"][0]["state"], microbatches=wrong)


def test_an_imported_rule_is_saved_by_its_arguments():
    """`rule.get_config()` is JSON data, from which a resumed run makes the same rule."""
    rule, _ = importers.from_torch(TORCH["steps"][0]["state"])
    assert gs.DynamicLossScale(**json.loads(json.dumps(rule.get_config()))) == rule


@pytest.mark.parametrize("telemetry", [False, True])
def test_an_imported_scale_is_put_into_a_chain(telemetry):
    """`optax.tree.set` replaces the state of the rule, wherever `with_loss_scale` stands."""
    rule, state = importers.from_torch(TORCH["steps"][0]["state"])
    made = gs.with_loss_scale(optax.adam(0.1), gs.DynamicLossScale(8.0), telemetry=telemetry)
    tx = optax.chain(made, optax.scale(2.0))
    before = tx.init(jnp.ones(2))
    after = optax.tree.set(before, rule_state=state)
    assert float(current_scale(after)) == rule.initial_loss_scale
    assert jax.tree.structure(after) == jax.tree.structure(before)


def test_torch_disabled():
    """The empty state of a disabled GradScaler is refused by name."""
    with pytest.raises(ValueError, match="enabled GradScaler"):
        importers.from_torch({})


@pytest.mark.parametrize("stop", [1, 7, 30])
@pytest.mark.parametrize("floor", [None, 2.0**14])
def test_flax(stop, floor):
    """A flax DynamicScale, taken after any step, leads to flax's scales, with its late growth."""
    peer = pytest.importorskip("flax.training.dynamic_scale").DynamicScale(
        growth_interval=3, backoff_factor=0.25, scale=2.0**15
    )
    peer = peer if floor is None else peer.replace(minimum_scale=floor)

    def stepped(peer, finite):
        grad_fn = peer.value_and_grad(lambda w: w * (1.0 if finite else jnp.inf))
        return grad_fn(jnp.float32(1.0))[0]

    for finite in FLAGS[:stop]:
        peer = stepped(peer, finite)
    opt, w = resumed(*importers.from_flax(peer)), Variable(1.0)
    for finite in FLAGS[stop:]:
        peer = stepped(peer, finite)
        opt.apply([1.0 if finite else jnp.inf], [w])
        assert float(opt.loss_scale) == float(peer.scale)
        assert int(opt.step_counter) == int(peer.fin_steps)


@pytest.mark.parametrize("stop", [1, 7, 30])
@pytest.mark.parametrize("floor", [1.0, 2.0**14])
def test_jmp(stop, floor):
    """The numbers of a jmp DynamicLossScale, taken after any step as the page for those who come
    from jmp does, lead to jmp's scales and counts."""
    peer = pytest.importorskip("jmp").DynamicLossScale(
        jnp.float32(2.0**15), period=3, factor=4, min_loss_scale=jnp.float32(floor)
    )
    for finite in FLAGS[:stop]:
        peer = peer.adjust(jnp.asarray(finite))
    period, factor, lowest = peer.period, peer.factor, float(peer.min_loss_scale)
    rule = gs.DynamicLossScale(float(peer.loss_scale), period, factor, min_scale=lowest)
    state = rule.init()._replace(good_steps=peer.counter)
    for finite in FLAGS[stop:]:
        peer, state = peer.adjust(jnp.asarray(finite)), rule.update(state, finite)
        assert (float(state.scale), int(state.good_steps)) == (peer.loss_scale, peer.counter)


@pytest.mark.parametrize("scale", [8.0, 1.0])
def test_a_fixed_scale_is_loaded(scale):
    """`load_into` takes the state of a fixed scale, which has no count."""
    rule = gs.FixedLossScale(scale)
    assert float(resumed(rule, rule.init()).loss_scale) == scale


def test_what_is_no_scale_of_flax():
    """Something else is refused by the name of what is expected."""
    with pytest.raises(TypeError, match="Expected a flax DynamicScale; got"):
        importers.from_flax(LossScaleOptimizer(gs.optimizers.SGD(0.5)))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "kind",
    [
        lambda lib: lib.SGD(0.125, momentum=0.5, use_ema=True),
        lambda lib: lib.Adam(0.125, amsgrad=True, weight_decay=0.1),
        lambda lib: lib.RMSprop(0.125, centered=True, gradient_accumulation_steps=2),
    ],
)
def test_keras(kind, dtype):
    """What Keras's LossScaleOptimizer saved, loaded here, leads to Keras's weights."""
    keras = pytest.importorskip("keras")
    if dtype == "float16" and kind(gs.optimizers).gradient_accumulation_steps:
        pytest.skip("Keras cannot accumulate with float16 variables")
    rng = np.random.default_rng(1)
    start = rng.normal(size=4).astype(dtype)
    peer = keras.optimizers.LossScaleOptimizer(
        kind(keras.optimizers), initial_scale=8.0, dynamic_growth_steps=3
    )
    theirs = keras.Variable(start, dtype=dtype)
    peer.build([theirs])
    grads = [rng.normal(size=4).astype(dtype) for _ in range(24)]
    for i in (5, 13):
        grads[i][1] = np.nan

    compiled = jax.jit(peer.stateless_apply)

    def stepped(grad):
        values = [v.value for v in peer.variables]
        (weights,), values = compiled(values, [grad], [theirs.value])
        theirs.assign(weights)
        for variable, value in zip(peer.variables, values, strict=True):
            variable.assign(value)

    for grad in grads[:8]:
        stepped(grad)
    store = {}
    peer.save_own_variables(store)
    ours = Variable(theirs.numpy())
    opt = LossScaleOptimizer(kind(gs.optimizers), initial_scale=8.0, dynamic_growth_steps=3)
    opt.build([ours])
    importers.load_keras(opt, store)
    assert float(opt.dynamic_scale) == float(peer.dynamic_scale)
    for grad in grads[8:]:
        stepped(grad)
        opt.apply([grad])
        assert float(opt.dynamic_scale) == float(peer.dynamic_scale)
        tolerance = {"rtol": 1e-4, "atol": 2e-6} if dtype == "float32" else {"atol": 4e-3}
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), **tolerance)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "RMSprop", "Adagrad", "Adadelta"])
def test_two_variables_keep_their_own_slots(kind):
    """Each of two variables of one shape continues with the slots that Keras saved of it."""
    keras = pytest.importorskip("keras")
    options = {"SGD": {"momentum": 0.5}, "RMSprop": {"momentum": 0.5, "centered": True}}
    theirs = [keras.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])]
    given = options.get(kind, {})
    inner = getattr(keras.optimizers, kind)(0.1, **given)
    peer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    peer.build(theirs)
    grads = [np.float32([8.0, -16.0]), np.float32([4.0, 400.0])]
    values, weights = [v.value for v in peer.variables], [v.value for v in theirs]
    step = jax.jit(peer.stateless_apply)
    for _ in range(2):
        weights, values = step(values, grads, weights)
    for variable, value in zip(peer.variables, values, strict=True):
        variable.assign(value)
    store = {}
    peer.save_own_variables(store)
    ours = [Variable(weight) for weight in weights]
    opt = LossScaleOptimizer(getattr(gs.optimizers, kind)(0.1, **given), initial_scale=8.0)
    opt.build(ours)
    importers.load_keras(opt, store)
    for _ in range(3):
        weights, values = step(values, grads, weights)
        opt.apply(grads, ours)
    for own, weight in zip(ours, weights, strict=True):
        np.testing.assert_allclose(own.numpy(), weight, rtol=1e-5)


def test_keras_of_another_kind():
    """What Keras saved of another optimizer is refused, and nothing is loaded."""
    opt, w = LossScaleOptimizer(gs.optimizers.SGD(0.5)), Variable([1.0, 2.0])
    opt.build([w])
    before = [v.numpy() for v in opt.variables]
    with pytest.raises(ValueError, match="weights"):
        importers.load_keras(opt, {str(i): np.float32(0) for i in range(5)})
    for variable, value in zip(opt.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)

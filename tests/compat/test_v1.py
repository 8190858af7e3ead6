"""Traces recorded from the v1 optimizers of TensorFlow 2.15, and what is documented of them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import gainstage as gs
from gainstage.compat import v1

RECORDED = Path(__file__).parents[1] / "goldens" / "tf_v1_mp_loss_scale_optimizer.json"
TRACES = {t["id"]: t for t in json.loads(RECORDED.read_text())["traces"]}


def array(value):
    return None if value is None else np.asarray(value, np.float32)


def build(config):
    if not isinstance(config, dict):
        return config
    arguments = dict(config)
    return getattr(v1, arguments.pop("class_name"))(**arguments)


def close(actual, expected):
    expected = array(expected)
    assert (np.abs(np.asarray(actual) - expected) <= 1e-4 * np.abs(expected) + 2e-6).all()


@pytest.mark.filterwarnings("ignore:No gradient for")
@pytest.mark.parametrize("name", TRACES)
def test_recorded_steps(name):
    """Gradients, weights, slots, scale and `global_step` follow the recorded run.

    Difference: a fixed scale skips what is not finite, where the record applies it and ends.
    """
    trace = TRACES[name]
    opt = v1.MixedPrecisionLossScaleOptimizer(
        build(trace["config"]["opt"]), build(trace["config"]["loss_scale"])
    )
    fixed = name == "mom-fixed"
    variables = [gs.Variable(array(v["initial"]), name=v["name"]) for v in trace["variables"]]
    global_step = gs.Variable(0)
    for step in trace["steps"]:
        true = [array(g) for g in step["true_grads"]]
        true += [None] * (len(variables) - len(true))

        def loss(true=true):
            parts = zip(variables, true, strict=True)
            return sum((v * g).sum() for v, g in parts if g is not None)

        if all(g is None or np.isfinite(g).all() for g in true):
            pairs = opt.compute_gradients(loss, variables)
            for (gradient, _), expected in zip(pairs, true, strict=True):
                assert (gradient is None) == (expected is None)
                if gradient is not None:
                    close(gradient, expected)
        else:
            pairs = list(zip(true, variables, strict=True))
        before = [v.numpy() for v in variables]
        assert opt.apply_gradients(pairs, global_step) is None
        if fixed and not all(np.isfinite(array(v)).all() for v in step["variables"]):
            assert all((v.numpy() == b).all() for v, b in zip(variables, before, strict=True))
            break
        close(opt.loss_scale, step["scale"])
        assert int(global_step) == step["global_step"]
        for variable, expected in zip(variables, step["variables"], strict=True):
            close(variable.numpy(), expected)


def test_slots_and_names():
    """Slots and the name of the inner optimizer are reached through the wrapper."""
    var = gs.Variable(1.0, name="w")
    inner = v1.AdamOptimizer(0.1, use_locking=True, name="mine")
    opt = v1.MixedPrecisionLossScaleOptimizer(inner, 8)
    assert (opt.get_name(), opt.get_slot_names()) == ("mine", [])
    opt.minimize(lambda: var**2, var_list=[var])
    assert opt.get_slot_names() == ["m", "v"]
    assert float(opt.get_slot(var, "m")) == pytest.approx(0.2)
    assert opt.get_slot(var, "x") is None
    assert opt.get_slot(var, "v") in opt.variables()
    named = v1.MixedPrecisionLossScaleOptimizer(v1.AdamOptimizer(), 8, name="other")
    assert named.get_name() == "other"


def test_grad_loss_and_vector_losses():
    """`grad_loss` weights the loss, a vector is summed, and half gradients do not crash."""
    var = gs.Variable([1.0, 2.0])
    for opt in (
        v1.GradientDescentOptimizer(1.0),
        v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(1.0), "dynamic"),
    ):
        ((gradient, _),) = opt.compute_gradients(lambda: var**2, [var])
        assert gradient.tolist() == [2, 4]
        ((gradient, _),) = opt.compute_gradients(lambda: var**2, [var], grad_loss=[3.0, 0.0])
        assert gradient.tolist() == [6, 0]
    half = gs.Variable(jnp.ones(2, jnp.float16))
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), 16)
    opt.minimize(lambda: half.value().sum().astype(jnp.float32), var_list=[half])
    assert half.numpy().tolist() == [0.5, 0.5]


class Every(v1.LossScale):
    """A user's own live scale: it refuses every second step, whatever the gradients are."""

    def __init__(self, value):
        self.value, self.calls = value, 0

    def __call__(self):
        return jnp.float32(self.value)

    def update(self, grads):
        self.calls += 1
        return None, self.calls % 2 == 1

    def get_config(self):
        return {"value": self.value}


def test_a_users_own_scale():
    """A subclass of `LossScale` scales, unscales and decides."""
    var, step, scale = gs.Variable(4.0), gs.Variable(0), Every(32.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(1.0), scale)
    for expected in (3.0, 3.0, 2.0):
        opt.minimize(lambda: var * 1.0, step, [var])
        assert float(var) == expected
    assert (int(step), float(opt.loss_scale), scale.calls) == (2, 32.0, 3)
    assert Every.from_config(scale.get_config()).value == 32.0


def test_a_rule_of_the_core():
    """A rule of the core is taken as it is, its own floor included."""
    rule = gs.DynamicLossScale(1.0, min_scale=0.25)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(1.0), rule)
    var = gs.Variable(1.0)
    for _ in range(4):
        opt.apply_gradients([(jnp.inf, var)])
    assert (float(opt.loss_scale), float(var)) == (0.25, 1.0)


@pytest.mark.parametrize("scale", [None, "fast", 0.5, [8], True, float("inf")])
def test_invalid_scales(scale):
    """Any other `loss_scale` is a ValueError, and leaves `opt` free."""
    opt = v1.GradientDescentOptimizer(1.0)
    with pytest.raises(ValueError, match="Expected"):
        v1.MixedPrecisionLossScaleOptimizer(opt, scale)
    v1.MixedPrecisionLossScaleOptimizer(opt, 8)


def test_documented_errors():
    """Malformed names, what is no v1 optimizer, and missing variables or gradients are errors."""
    for name in ("", None, 3):
        with pytest.raises(ValueError, match="non-empty string for name"):
            v1.GradientDescentOptimizer(0.1, name=name)
    with pytest.raises(ValueError, match="non-empty string for name"):
        v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.1), 8, name="")
    for wrong in (None, gs.SGD(), "sgd"):
        with pytest.raises(ValueError, match="v1 optimizer"):
            v1.MixedPrecisionLossScaleOptimizer(wrong, 8)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.1), "dynamic")
    var = gs.Variable(1.0)
    with pytest.raises(ValueError, match="no collection"):
        opt.minimize(lambda: var * 1.0)
    with pytest.raises(TypeError, match="callable"):
        opt.compute_gradients(var, [var])
    with pytest.raises(ValueError, match="at least one"):
        opt.apply_gradients([])
    with pytest.raises(ValueError, match="None for all"):
        opt.apply_gradients([(None, var)])
    assert float(opt.loss_scale) == 2.0**15


def test_a_gradient_that_differs_between_devices_is_refused():
    """Inside `shard_map` a gradient must be reduced before it is applied."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    var, opt = gs.Variable(1.0, name="w"), v1.GradientDescentOptimizer(0.5)
    opt._optimizer.build([var])
    state = ([var], opt.variables())
    values = jax.tree.map(lambda v: v.numpy(), state)

    def run(reduce):
        def local(gradient):
            step = gs.functional(lambda g: opt.apply_gradients([(reduce(g[0]), var)]), state)
            return step(values, gradient)[1][0][0]

        specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
        return jax.shard_map(local, mesh=mesh, **specs)(np.ones(8, np.float32))

    with pytest.raises(RuntimeError, match="'w' varies over a mesh axis"):
        run(lambda g: g)
    assert float(run(lambda g: jax.lax.pmean(g, "x"))) == 0.5


INF, NAN = float("inf"), float("nan")


def test_a_live_scale_of_version_1_is_one_object():
    """The scale that was handed over moves with the optimizer, and starts where it was."""
    w, live = gs.Variable(1.0), v1.DynamicLossScale(16.0)
    live.update([INF])
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), live)
    assert float(opt.loss_scale) == 8.0
    opt.apply_gradients([(INF, w)])
    assert float(live()) == float(opt.loss_scale) == 4.0
    assert not any(v.trainable for v in [*live.variables, *opt.variables()])


def test_a_subclass_of_a_live_scale_decides():
    """What a user's subclass overrides is called."""

    class Mine(v1.DynamicLossScale):
        def update(self, grads):
            super().update(grads)
            return None, False

    w = gs.Variable(1.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), Mine(16.0))
    opt.apply_gradients([(1.0, w)])
    assert float(w) == 1.0


@pytest.mark.parametrize("step", [0, jnp.int32(0)])
def test_a_step_that_cannot_be_counted_is_not_taken(step):
    """`global_step` is asked before anything moves."""
    w = gs.Variable(1.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), "dynamic")
    with pytest.raises(TypeError, match=r"Expected a gainstage\.Variable for global_step"):
        opt.apply_gradients([(1.0, w)], global_step=step)
    assert float(w) == 1.0


def test_a_users_scale_does_not_move_for_gradients_that_do_not_fit():
    """Gradients are checked before a scale of one's own hears of them."""

    class Mine(v1.DynamicLossScale):
        pass

    w, live = gs.Variable([1.0, 2.0]), Mine(16.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), live)
    with pytest.raises(ValueError, match="Expected"):
        opt.apply_gradients([(np.array([INF]), w)])
    assert float(live()) == 16.0

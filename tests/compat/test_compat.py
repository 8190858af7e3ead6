"""Traces recorded from TensorFlow 2.15, with each deliberate difference named in its test."""

import json
import pickle
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations

import gainstage as gs
from gainstage.compat import experimental, tf2, v1
from gainstage.optimizers import SGD, Variable

GOLDENS = Path(__file__).parents[1] / "goldens"


def recorded(name):
    return {t["id"]: t for t in json.loads((GOLDENS / f"{name}.json").read_text())["traces"]}


def array(value):
    return None if value is None else np.asarray(value, np.float32)


def close(actual, expected):
    expected = array(expected)
    assert (np.abs(np.asarray(actual) - expected) <= 1e-4 * np.abs(expected) + 2e-6).all()


SCALES = recorded("tf_v1_loss_scale")
DYNAMIC = [name for name, trace in SCALES.items() if trace["kind"] == "DynamicLossScale"]


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_loss_scale(name):
    """The live scale follows the recorded one, up to where that is 2**127 and ours stays 2**126."""
    trace = SCALES[name]
    scale = experimental.DynamicLossScale(**trace["config"])
    for step in trace["steps"]:
        none, should_apply = scale.update([array(g) for g in step["grads"]])
        assert none is None
        assert bool(should_apply) == step["should_apply"]
        close(scale(), min(float(step["scale"]), 2.0**126))
        if float(step["scale"]) > 2.0**126:
            break
        assert int(scale.variables[1]) == step["good_steps"]


@pytest.mark.parametrize("name", [name for name in SCALES if name not in DYNAMIC])
def test_fixed_loss_scale(name):
    """The live fixed scale has the recorded value, text and answer to an overflow."""
    trace = SCALES[name]
    scale = experimental.FixedLossScale(**trace["config"])
    assert scale.update([np.inf]) == (None, trace["should_apply_after_inf"])
    assert float(scale()) == trace["scale_after"]
    assert repr(scale) == trace["repr"]


OPTIMIZERS = recorded("tf215_keras_loss_scale_optimizer")
LIVE = {
    "FixedLossScale": experimental.FixedLossScale,
    "DynamicLossScale": experimental.DynamicLossScale,
}


def make(trace):
    config = trace["config"]
    variables = [Variable(array(v["initial"]), name=v["name"]) for v in trace["variables"]]
    inner = getattr(gs.optimizers, config["inner_class"])(**config["inner"])
    inner.exclude_from_weight_decay(var_names=config["exclude_var_names"])
    wrapper = dict(config["wrapper"])
    if trace["family"] != "experimental":
        return tf2.LossScaleOptimizer(inner, **wrapper), variables
    scale = wrapper["loss_scale"]
    if isinstance(scale, dict):
        scale = LIVE[scale["class_name"]](**{k: v for k, v in scale.items() if k != "class_name"})
    return experimental.LossScaleOptimizer(inner, scale), variables


@pytest.mark.filterwarnings("ignore:No gradient for")
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "new-overflow"])
def test_loss_scale_optimizer(name):
    """Scale, counter, iterations and weights follow the recorded run.

    Differences: a fixed scale skips the NaN that is applied in the record, which ends there; moving
    averages start as in Keras 3, so where they overwrite the weights only scale and counts count.
    """
    trace = OPTIMIZERS[name]
    opt, variables = make(trace)
    overwrites = trace["config"]["inner"].get("ema_overwrite_frequency") is not None
    for step in trace["steps"]:
        grads = opt.get_unscaled_gradients([array(g) for g in step["scaled_grads"]])
        for ours, theirs in zip(grads, step["unscaled_grads"], strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None and np.isfinite(array(theirs)).all():
                close(ours, theirs)
        opt.get_scaled_loss(1.0)
        before = [v.numpy() for v in variables]
        opt.apply_gradients(zip(grads, variables, strict=True))
        assert float(opt.loss_scale) == pytest.approx(step["scale"], rel=1e-6)
        assert int(opt.iterations) == step["iterations"]
        if opt.dynamic:
            assert int(opt.dynamic_counter) == step["dynamic_counter"]
        if not opt.dynamic and not opt.check_finite(grads):
            assert all((v.numpy() == old).all() for v, old in zip(variables, before, strict=True))
            assert step is trace["steps"][-1]
            break
        for variable, expected in zip(variables, step["variables"], strict=True):
            if not overwrites:
                close(variable.numpy(), expected)


VERSION_1 = recorded("tf_v1_mp_loss_scale_optimizer")


def build(config):
    if not isinstance(config, dict):
        return config
    arguments = dict(config)
    return getattr(v1, arguments.pop("class_name"))(**arguments)


@pytest.mark.filterwarnings("ignore:No gradient for")
@pytest.mark.parametrize("name", VERSION_1)
def test_loss_scale_optimizer_of_version_1(name):
    """Gradients, weights, slots, scale and `global_step` follow the recorded run.

    Difference: a fixed scale skips what is not finite, where the record applies it and ends.
    """
    trace = VERSION_1[name]
    opt = v1.MixedPrecisionLossScaleOptimizer(
        build(trace["config"]["opt"]), build(trace["config"]["loss_scale"])
    )
    fixed = name == "mom-fixed"
    variables = [Variable(array(v["initial"]), name=v["name"]) for v in trace["variables"]]
    global_step = Variable(0)
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


def test_a_scale_without_reciprocal_is_refused():
    """Difference: TensorFlow takes a scale of 2**127, with which every update is 0."""
    with pytest.raises(ValueError, match="for initial_scale"):
        make(OPTIMIZERS["new-overflow"])


def test_custom_optimizers_are_serialized():
    """A class of the user's own comes back where it is among the custom objects."""

    class Mine(SGD):
        """SGD by another name."""

    opt = tf2.LossScaleOptimizer(Mine(0.5), initial_scale=4.0)
    again = tf2.LossScaleOptimizer.from_config(opt.get_config(), {"Mine": Mine})
    assert (type(again.inner_optimizer), float(again.loss_scale)) == (Mine, 4.0)


@pytest.mark.parametrize("start", ["skipped", "later"])
@pytest.mark.filterwarnings("ignore:Expected get_")
def test_averages_of_tf2_start_with_the_weights(start):
    """A first step that is skipped counts there; the averages then are not taken to be 0."""
    w = Variable(1.0)
    opt = tf2.LossScaleOptimizer(SGD(0.5, use_ema=True, ema_momentum=0.75))
    if start == "later":
        opt.iterations = 5
    opt.apply_gradients([(np.inf if start == "skipped" else 0.0, w)])
    opt.finalize_variable_values([w])
    assert float(w) == 1.0
    opt.apply_gradients([(1.0, w)])
    opt.finalize_variable_values([w])
    assert float(w) == 0.75 * 1.0 + 0.25 * 0.5


def test_the_old_name_of_the_rate_compiles_nothing():
    """`opt.lr = x`, every step, keeps the program."""
    w, opt = Variable(1.0), tf2.LossScaleOptimizer(SGD(0.5))
    opt.minimize(lambda: w * 1.0, [w])
    opt.lr = 0.5
    opt.minimize(lambda: w * 0.0, [w])
    with compilations() as compiled:
        opt.lr = 0.25
        opt.minimize(lambda: w * 1.0, [w])
    assert [name for name in compiled if "program" in name] == []
    assert float(w) == 0.25


def test_a_pickled_scale_keeps_its_state():
    """A copy of a live scale goes on from the scale and count of the original."""
    scale = experimental.DynamicLossScale(8.0, 2)
    for gradient in (np.inf, 1.0):
        scale.update([gradient])
    again = pickle.loads(pickle.dumps(scale))
    again.update([1.0])
    assert [float(each()) for each in (scale, again)] == [4.0, 8.0]


def test_the_live_object_and_the_rule_know_each_other():
    """`update` with the other's arguments says where the other is. Where a rule is expected, the
    error asks for that of the live object, whose state would not be shared."""
    live, rule = experimental.DynamicLossScale(8.0), gs.DynamicLossScale(8.0)
    with pytest.raises(TypeError, match=r"gainstage.compat.experimental"):
        rule.update([jnp.ones(2)])
    with pytest.raises(TypeError, match=r"gainstage.DynamicLossScale"):
        live.update(rule.init(), True)
    takers = [
        lambda rule: gs.optimizers.LossScaleOptimizer(SGD(), loss_scale=rule),
        lambda rule: gs.with_loss_scale(optax.sgd(0.1), rule),
    ]
    for take in takers:
        with pytest.raises(TypeError, match=r"not be shared. Write loss_scale=scale.rule"):
            take(live)
        take(live.rule)
    opt = experimental.LossScaleOptimizer(SGD(), rule)
    assert (opt.initial_scale, opt.dynamic_growth_steps) == (8.0, 2000)

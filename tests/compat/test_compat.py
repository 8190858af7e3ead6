"""Traces recorded from TensorFlow 2.15, with each deliberate difference named in its test."""

import json
import pickle
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.compat import experimental, tf2, v1

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
    variables = [gs.Variable(array(v["initial"]), name=v["name"]) for v in trace["variables"]]
    inner = getattr(gs, config["inner_class"])(**config["inner"])
    inner.exclude_from_weight_decay(var_names=config["exclude_var_names"])
    wrapper = dict(config["wrapper"])
    if trace["family"] != "experimental":
        return tf2.LossScaleOptimizer(inner, **wrapper), variables
    scale = wrapper["loss_scale"]
    if isinstance(scale, dict):
        scale = LIVE[scale["class_name"]](**{k: v for k, v in scale.items() if k != "class_name"})
    return experimental.LossScaleOptimizer(inner, scale), variables


def test_a_skipped_microbatch_of_tf2_leaves_its_window_alone():
    """With accumulation `iterations` are what windows are counted by, so there no skip counts."""
    w = gs.Variable([0.0])
    opt = tf2.LossScaleOptimizer(gs.SGD(1.0, gradient_accumulation_steps=2), dynamic=True)
    for gradient in (1.0, np.inf, 1.0):
        scaled = opt.get_scaled_loss(jnp.float32(gradient))
        opt.apply_gradients(zip(opt.get_unscaled_gradients([scaled[None]]), [w], strict=True))
    assert (float(w.value()[0]), int(opt.iterations)) == (-1.0, 1)


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


def test_a_scale_without_reciprocal_is_refused():
    """Difference: TensorFlow takes a scale of 2**127, with which every update is 0."""
    with pytest.raises(ValueError, match="for initial_scale"):
        make(OPTIMIZERS["new-overflow"])


def test_documented_equalities():
    """The page's three pairs have equal configurations; the experimental class is a subclass."""

    def config(cls, *args, **kwargs):
        return cls(gs.SGD(), *args, **kwargs).get_config()

    old, new = experimental.LossScaleOptimizer, tf2.LossScaleOptimizer
    assert config(old, "dynamic") == config(new)
    assert config(old, 123) == config(new, dynamic=False, initial_scale=123)
    scale = experimental.DynamicLossScale(2048, 500)
    assert config(old, scale) == config(new, initial_scale=2048, dynamic_growth_steps=500)
    assert isinstance(old(gs.SGD(), "dynamic"), new)
    assert not isinstance(new(gs.SGD()), old)


@pytest.mark.parametrize("scale", [None, "fast", [1.0], True, 0, -2.0, float("nan")])
def test_invalid_loss_scales(scale):
    """Every other `loss_scale` is a ValueError, also a dynamic one whose multiplier is not 2."""
    with pytest.raises(ValueError, match="Expected"):
        experimental.LossScaleOptimizer(gs.SGD(), scale)
    with pytest.raises(ValueError, match="multiplier of 2"):
        experimental.LossScaleOptimizer(gs.SGD(), experimental.DynamicLossScale(multiplier=4))


@pytest.mark.parametrize("lost", [{"hysteresis": 2}, {"max_scale": 2.0**20}, {"min_scale": 0.5}])
def test_settings_that_would_be_lost_are_refused(lost):
    """A rule's first scale and period are kept; one with other settings is a ValueError."""
    opt = experimental.LossScaleOptimizer(gs.SGD(), gs.DynamicLossScale(8.0, 5))
    assert (opt.initial_scale, opt.dynamic_growth_steps) == (8.0, 5)
    with pytest.raises(ValueError, match="nothing else but a first scale and a period"):
        experimental.LossScaleOptimizer(gs.SGD(), gs.DynamicLossScale(8.0, 5, **lost))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dynamic": "dynamic"}, TypeError),
        ({"dynamic": 1}, TypeError),
        ({"dynamic": False}, ValueError),
        ({"dynamic": False, "initial_scale": 1.0, "dynamic_growth_steps": 2}, ValueError),
        ({"dynamic_growth_steps": 1.5}, ValueError),
    ],
)
def test_invalid_arguments(arguments, error):
    """Arguments that do not fit are errors, and leave the inner optimizer free."""
    inner = gs.SGD()
    with pytest.raises(error, match="Expected"):
        tf2.LossScaleOptimizer(inner, **arguments)
    wrapped = tf2.LossScaleOptimizer(inner)
    with pytest.raises(TypeError, match="not wrapped"):
        tf2.LossScaleOptimizer(wrapped)
    with pytest.raises(ValueError, match="already wrapped"):
        tf2.LossScaleOptimizer(inner)
    for wrong in (None, "sgd"):
        with pytest.raises(TypeError, match="Expected an optimizer"):
            experimental.LossScaleOptimizer(wrong, "dynamic")


def test_attributes():
    """Attributes of both classes, fixed and dynamic; rates and iterations can be set."""
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5), initial_scale=4, dynamic_growth_steps=3)
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (True, 4.0, 3)
    assert (float(opt.loss_scale), int(opt.dynamic_counter), float(opt.lr)) == (4.0, 0, 0.5)
    opt.lr = 0.25
    opt.iterations = 7
    assert (float(opt.learning_rate), int(opt.iterations)) == (0.25, 7)
    var = gs.Variable(1.0)
    opt.minimize(lambda: var * 1.0, [var])
    assert (float(var), int(opt.iterations)) == (0.75, 8)
    with pytest.raises(RuntimeError, match="before the optimizer is built"):
        opt.iterations = 0

    fixed = experimental.LossScaleOptimizer(gs.SGD(), 0.5)
    assert (fixed.dynamic, fixed.dynamic_counter, fixed.dynamic_growth_steps) == (False, None, None)


# Asked for in nerfacc#307 (not unscaled).
def test_forgotten_calls_are_noticed():
    """Gradients applied without scaling and unscaling give one warning; with both there is none."""
    var = gs.Variable(1.0)
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5))
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients"):
        opt.apply_gradients([(1.0, var)])
    opt.apply_gradients([(1.0, var)])
    careful = tf2.LossScaleOptimizer(gs.SGD(0.5))
    careful.get_scaled_loss(lambda: 1.0)
    careful.get_unscaled_gradients((None, 1.0))
    careful.apply_gradients([(1.0, var)])
    with pytest.raises(ValueError, match="at least one"):
        careful.apply_gradients([])


def test_gradients_are_unscaled_in_float32():
    """Difference: TensorFlow unscales a float16 gradient in float16, where 2**-14 becomes 0."""
    opt = tf2.LossScaleOptimizer(gs.SGD())
    (gradient,) = opt.get_unscaled_gradients([np.float16(2.0**-14)])
    assert float(gradient) == 2.0**-29
    assert float(opt.get_scaled_loss(np.float16(4.0))) == 2.0**17


@pytest.mark.parametrize("cls", [tf2.LossScaleOptimizer, experimental.LossScaleOptimizer])
def test_configurations(cls):
    """Configurations round-trip in both forms, a scale below 1 too, and are not changed."""
    old = {
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.5}},
        "loss_scale": {"class_name": "FixedLossScale", "config": {"loss_scale_value": 2.0}},
    }
    kept = json.dumps(old)
    opt = cls.from_config(old)
    assert type(opt) is cls
    assert json.dumps(old) == kept
    assert (opt.dynamic, opt.initial_scale, float(opt.lr)) == (False, 2.0, 0.5)
    assert cls.from_config(opt.get_config()).get_config() == opt.get_config()
    below = cls.from_config({**opt.get_config(), "initial_scale": 0.5})
    assert cls.from_config(below.get_config()).initial_scale == 0.5
    old["loss_scale"] = {"class_name": "DynamicLossScale", "config": {"multiplier": 4}}
    with pytest.raises(ValueError, match="multiplier of 2"):
        cls.from_config(old)


def test_live_scales_are_described_pickled_and_subclassed():
    """Text, configuration and pickle of the live objects; the base is abstract."""
    scale = experimental.DynamicLossScale(8.0, 3, 4.0)
    scale.update({"w": [np.inf], "b": None})
    text = (
        "DynamicLossScale(current_loss_scale=2.0, num_good_steps=0, "
        "initial_loss_scale=8.0, increment_period=3, multiplier=4.0)"
    )
    assert repr(scale) == repr(pickle.loads(pickle.dumps(scale))) == text
    fresh = experimental.DynamicLossScale.from_config(scale.get_config())
    assert float(fresh()) == 8.0
    with pytest.raises(AttributeError):
        scale.multiplier = 3
    with pytest.raises(TypeError, match="abstract"):
        experimental.LossScale()
    with pytest.raises(TypeError, match="floating"):
        scale.update([1, 2])
    for wrong in (None, "8", True, 0.5, np.inf):
        with pytest.raises(ValueError, match="loss_scale_value"):
            experimental.FixedLossScale(wrong)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("start", ["skipped", "later"])
@pytest.mark.filterwarnings("ignore:Expected get_")
def test_averages_of_tf2_start_with_the_weights(start):
    """A first step that is skipped counts there; the averages then are not taken to be 0."""
    w = gs.Variable(1.0)
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5, use_ema=True, ema_momentum=0.75))
    if start == "later":
        opt.iterations = 5
    opt.apply_gradients([(INF if start == "skipped" else 0.0, w)])
    opt.finalize_variable_values([w])
    assert float(w) == 1.0
    opt.apply_gradients([(1.0, w)])
    opt.finalize_variable_values([w])
    assert float(w) == 0.75 * 1.0 + 0.25 * 0.5


def test_the_old_name_of_the_rate_compiles_nothing():
    """`opt.lr = x`, every step, keeps the program."""
    w, opt = gs.Variable(1.0), tf2.LossScaleOptimizer(gs.SGD(0.5))
    opt.minimize(lambda: w * 1.0, [w])
    program = opt._runner.program
    opt.lr = 0.25
    opt.minimize(lambda: w * 1.0, [w])
    assert opt._runner.program is program
    assert float(w) == 0.25


def test_what_tensorflow_wrote_is_read():
    """A configuration of TensorFlow 2.3, with a `decay` of 0; another decay is refused."""
    inner = {"name": "SGD", "learning_rate": 0.01, "decay": 0.0, "momentum": 0.5, "nesterov": False}
    scale = {"initial_loss_scale": 64.0, "increment_period": 2000, "multiplier": 2.0}
    config = {
        "optimizer": {"class_name": "SGD", "config": inner},
        "loss_scale": {"class_name": "DynamicLossScale", "config": scale},
    }
    opt = tf2.LossScaleOptimizer.from_config(config)
    assert (opt.inner_optimizer.momentum, opt.initial_scale) == (0.5, 64.0)
    inner["decay"] = 0.1
    with pytest.raises(ValueError, match=r"Expected an optimizer without decay; got 0\.1"):
        tf2.LossScaleOptimizer.from_config(config)


def test_options_that_were_set_later_are_described():
    """An option set on the wrapper of TensorFlow 2 acts, and is in its configuration."""
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5, weight_decay=0.5))
    opt.clipnorm, opt.weight_decay = 1.0, None
    again = tf2.LossScaleOptimizer.from_config(opt.get_config())
    assert (again.clipnorm, again.weight_decay) == (1.0, None)


def test_the_live_object_and_the_rule_know_each_other():
    """`update` with the other's arguments says where the other is; either is taken for a rule."""
    live, rule = experimental.DynamicLossScale(8.0), gs.DynamicLossScale(8.0)
    with pytest.raises(TypeError, match=r"gainstage.compat.experimental"):
        rule.update([jnp.ones(2)])
    with pytest.raises(TypeError, match=r"gainstage.DynamicLossScale"):
        live.update(rule.init(), True)
    assert gs.LossScaleOptimizer(gs.SGD(), rule=live).rule == live.rule
    opt = experimental.LossScaleOptimizer(gs.SGD(), rule)
    assert (opt.initial_scale, opt.dynamic_growth_steps) == (8.0, 2000)


def test_errors_name_the_argument_of_the_document():
    """A wrong `loss_scale` or period is refused under its own name, in the documents' bounds."""
    with pytest.raises(ValueError, match=r">= 1, 'dynamic' or a LossScale for loss_scale"):
        v1.MixedPrecisionLossScaleOptimizer(v1.AdamOptimizer(), "fast")
    with pytest.raises(TypeError, match="increment_period"):
        experimental.DynamicLossScale(8.0, None)
    with pytest.raises(TypeError, match="jit_compile"):
        gs.SGD(jit_compile="yes")
    assert v1.AdamOptimizer.GATE_OP == 1

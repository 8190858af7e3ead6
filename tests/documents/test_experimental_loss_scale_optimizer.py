"""`tf.keras.mixed_precision.experimental.LossScaleOptimizer` (TensorFlow 2.4 to 2.8).

And the class without *experimental* (2.4 to 2.15), on whose page the first one builds, with the
methods of `tf.keras.optimizers.Optimizer` that it delegates. One test is one sentence.
"""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.compat import experimental, tf2, v1
from gainstage.optimizers import Adadelta, Adam, RMSprop, Variable, schedules

from rows import row

INF, NAN = float("inf"), float("nan")
FIXED = {"dynamic": False, "initial_scale": 8}
BOTH = {
    "tf2": tf2.LossScaleOptimizer,
    "experimental": lambda inner: experimental.LossScaleOptimizer(inner, "dynamic"),
}
each_class = pytest.mark.parametrize("cls", BOTH.values(), ids=BOTH)


def wrapped(inner=None, **arguments):
    """A wrapper around gradient descent with a rate of 0.5."""
    return tf2.LossScaleOptimizer(gs.optimizers.SGD(0.5) if inner is None else inner, **arguments)


def older(loss_scale, inner=None):
    return experimental.LossScaleOptimizer(
        gs.optimizers.SGD(0.5) if inner is None else inner, loss_scale
    )


def apply(opt, gradient, variable):
    """A step of a loop that scales the loss and unscales its gradient, which is `gradient`."""
    scaled = opt.get_scaled_loss(1.0) * jnp.float32(gradient)
    opt.apply_gradients(zip(opt.get_unscaled_gradients([scaled]), [variable], strict=True))


def after_each(opt, gradients, *read):
    """What is read of an optimizer after each step on one of these gradients."""
    w, seen = Variable(3.0), []
    for gradient in gradients:
        apply(opt, gradient, w)
        seen.append(tuple(float(each(opt)) for each in read) if read else float(w))
    return [values[0] for values in seen] if len(read) == 1 else seen


def scale(opt):
    return opt.loss_scale


def counter(opt):
    return opt.dynamic_counter


def two_weights_after_a_step(opt):
    """The weights 3 and 4 after a step on gradients 3 and 4; by plain descent 1.5 and 2."""
    a, b = Variable(3.0), Variable(4.0)
    opt.minimize(lambda: a * 3.0 + b * 4.0, [a, b])
    return pytest.approx([float(a), float(b)], rel=1e-6)


# ── experimental: summary and examples ───────────────────────────────────────────────────────


def test_the_newer_class_takes_no_loss_scale_object():
    """The class without *experimental* does not accept a `LossScale`."""
    with pytest.raises(TypeError, match="dynamic"):
        tf2.LossScaleOptimizer(gs.optimizers.SGD(), experimental.DynamicLossScale())


@pytest.mark.parametrize(
    ("loss_scale", "arguments"),
    [
        ("dynamic", {}),
        (123, {"dynamic": False, "initial_scale": 123}),
        (
            experimental.DynamicLossScale(initial_loss_scale=2048, increment_period=500),
            {"initial_scale": 2048, "dynamic_growth_steps": 500},
        ),
    ],
    ids=["dynamic", "fixed", "object"],
)
def test_the_three_pairs_of_the_page_are_identical(loss_scale, arguments):
    """The optimizers that the page calls identical have equal configurations."""
    opt1 = experimental.LossScaleOptimizer(gs.optimizers.SGD(), loss_scale=loss_scale)
    opt2 = tf2.LossScaleOptimizer(gs.optimizers.SGD(), **arguments)
    assert opt1.get_config() == opt2.get_config()


@row(4, "isinstance")
def test_the_older_class_is_a_subclass_of_the_newer():
    """An older optimizer is an instance of the newer class, and not the other way round."""
    assert isinstance(older("dynamic"), tf2.LossScaleOptimizer)
    assert not isinstance(wrapped(), experimental.LossScaleOptimizer)


# ── experimental: arguments ──────────────────────────────────────────────────────────────────


@row(4, "optimizer")
def test_the_optimizer_is_the_one_to_wrap():
    """`optimizer` takes the steps, and is the `inner_optimizer`."""
    inner = gs.optimizers.SGD(0.5)
    opt = experimental.LossScaleOptimizer(optimizer=inner, loss_scale=8)
    assert opt.inner_optimizer is inner
    assert two_weights_after_a_step(opt) == [1.5, 2.0]


@row(4, "loss_scale")
@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        (8, (8.0, False, None)),
        (0.5, (0.5, False, None)),
        (np.float32(8), (8.0, False, None)),
        (experimental.FixedLossScale(8), (8.0, False, None)),
        (gs.FixedLossScale(8.0), (8.0, False, None)),
        ("dynamic", (2.0**15, True, 2000)),
        (experimental.DynamicLossScale(), (2.0**15, True, 2000)),
        (experimental.DynamicLossScale(64.0, 7), (64.0, True, 7)),
        (gs.DynamicLossScale(16.0, 3), (16.0, True, 3)),
        ({"class_name": "FixedLossScale", "config": {"loss_scale_value": 8}}, (8.0, False, None)),
    ],
)
def test_the_loss_scale_is_a_number_or_dynamic_or_an_object(loss_scale, expected):
    """A number is a `FixedLossScale`, "dynamic" a `DynamicLossScale()`; a rule also works."""
    opt = older(loss_scale)
    assert (float(opt.loss_scale), opt.dynamic, opt.dynamic_growth_steps) == expected


def test_an_object_gives_its_arguments_and_not_its_state():
    """The optimizer starts at the first scale of a live object, which it does not change."""
    live = experimental.DynamicLossScale(64.0, 7)
    live.update([INF])
    opt = older(live)
    assert float(opt.loss_scale) == 64.0
    assert after_each(opt, [INF, INF], scale) == [32.0, 16.0]
    assert float(live()) == 32.0


@row(4, "ValueError: a multiplier other than 2")
def test_the_multiplier_must_be_2():
    """A `DynamicLossScale` with another multiplier is a ValueError, also in a configuration."""
    with pytest.raises(ValueError, match="multiplier of 2"):
        older(experimental.DynamicLossScale(multiplier=4))
    config = {
        "optimizer": {"class_name": "SGD", "config": {}},
        "loss_scale": {"class_name": "DynamicLossScale", "config": {"multiplier": 4}},
    }
    for cls in (tf2.LossScaleOptimizer, experimental.LossScaleOptimizer):
        with pytest.raises(ValueError, match="multiplier of 2"):
            cls.from_config(config)


@pytest.mark.parametrize("lost", [{"hysteresis": 2}, {"max_scale": 2.0**20}, {"min_scale": 0.5}])
def test_a_rule_with_settings_that_would_be_lost_is_refused(lost):
    """Difference: a rule with settings other than a first scale and a period is a ValueError."""
    with pytest.raises(ValueError, match="nothing else but a first scale and a period"):
        older(gs.DynamicLossScale(8.0, 5, **lost))


@row(4, "clipnorm", "clipvalue", "global_clipnorm")
@pytest.mark.parametrize(
    ("name", "value", "weights"),
    [
        ("clipvalue", 2.0, [3 - 0.5 * 2, 4 - 0.5 * 2]),
        ("clipnorm", 1.0, [3 - 0.5 * 1, 4 - 0.5 * 1]),
        ("global_clipnorm", 1.0, [3 - 0.5 * 3 / 5, 4 - 0.5 * 4 / 5]),
    ],
)
def test_clipping_is_an_argument_of_the_inner_optimizer(name, value, weights):
    """The true gradients are clipped: each element, each gradient, or all together."""
    opt = wrapped(gs.optimizers.SGD(0.5, **{name: value}))
    assert getattr(opt, name) == value
    assert two_weights_after_a_step(opt) == weights


@row(4, "clipnorm", "clipvalue", "global_clipnorm")
def test_an_option_can_be_set_later():
    """An option set on the wrapper is set on the inner optimizer, and acts from then on."""
    w, opt = Variable(3.0), wrapped(gs.optimizers.SGD(0.5, weight_decay=0.5))
    opt.weight_decay, opt.use_ema = None, True
    opt.minimize(lambda: w * 4.0, [w])
    opt.clipvalue = 1.0
    opt.minimize(lambda: w * 4.0, [w])
    assert float(w) == 3.0 - 0.5 * 4.0 - 0.5 * 1.0
    again = tf2.LossScaleOptimizer.from_config(opt.get_config())
    for each in (opt.inner_optimizer, again):
        assert (each.weight_decay, each.use_ema, each.clipvalue) == (None, True, 1.0)


def test_the_name_is_used_for_the_slots_of_the_inner_optimizer():
    """The name of the inner optimizer is the prefix of the names of its slots."""
    opt = wrapped(gs.optimizers.SGD(0.5, momentum=0.5, name="mine"))
    opt.build([Variable(1.0, name="w")])
    assert opt.variables[-1].name == "mine/w_momentum"


# ── experimental: raises ─────────────────────────────────────────────────────────────────────


class Mine(experimental.LossScale):
    """A loss scale of the user's own."""

    def __call__(self):
        return jnp.float32(2.0)

    def update(self, grads):
        return None, True

    def get_config(self):
        return {}


@row(4, "ValueError: another thing for loss_scale")
@row(4, "TypeError: a LossScale of another class")
@pytest.mark.parametrize("wrong", [None, "fast", [8.0], True, 0, -2.0, NAN, INF, Mine()])
def test_another_loss_scale_is_refused(wrong):
    """Any other `loss_scale` is a ValueError that names it, and leaves the optimizer free."""
    inner = gs.optimizers.SGD(0.5)
    with pytest.raises(ValueError, match=r"Expected.*loss_scale"):
        experimental.LossScaleOptimizer(inner, wrong)
    experimental.LossScaleOptimizer(inner, 8)


@row(4, "TypeError: no optimizer is wrapped")
@row(4, "TypeError: a wrapper is wrapped")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda: None,
        lambda: "sgd",
        lambda: gs.optimizers.SGD,
        lambda: v1.GradientDescentOptimizer(0.1),
        wrapped,
        lambda: older(8),
    ],
    ids=["None", "text", "class", "v1", "tf2", "experimental"],
)
def test_an_optimizer_that_cannot_be_wrapped_is_refused(wrong):
    """What is no optimizer, or a wrapper, is a TypeError; of the older class also a ValueError."""
    with pytest.raises(TypeError, match="inner_optimizer"):
        tf2.LossScaleOptimizer(wrong())
    with pytest.raises(ValueError, match=r"\boptimizer") as caught:
        experimental.LossScaleOptimizer(wrong(), "dynamic")
    assert isinstance(caught.value, TypeError)


@each_class
@row(4, "ValueError: one optimizer in two wrappers")
def test_an_optimizer_belongs_to_one_wrapper(cls):
    """An optimizer that is already wrapped is a ValueError that names the wrapper."""
    inner = gs.optimizers.SGD()
    first = cls(inner)
    with pytest.raises(ValueError, match=f"already wrapped by {first.name!r}"):
        cls(inner)


@each_class
@row(4, "no error: the inner class overrides apply_gradients")
def test_an_override_that_would_not_be_called_is_refused(cls):
    """Difference: an inner class that overrides `apply_gradients` is a TypeError."""

    class Halving(gs.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(g / 2, v) for g, v in grads_and_vars])

    with pytest.raises(TypeError, match=r"Halving overrides apply_gradients.*update_step"):
        cls(Halving(0.5))


# ── experimental: attributes ─────────────────────────────────────────────────────────────────


@row(4, "dynamic")
def test_dynamic_tells_whether_the_scale_adapts():
    """`dynamic` is a bool: only if it is True, an overflow lowers the scale."""
    for dynamic, after in ((True, 4.0), (False, 8.0)):
        opt = wrapped(dynamic=dynamic, initial_scale=8)
        assert after_each(opt, [INF], scale) == [after]
        assert opt.dynamic is dynamic


@row(4, "dynamic_counter")
def test_the_counter_is_that_of_steps_since_the_scale_changed():
    """The counter grows every step, and is 0 again when the scale was doubled or halved."""
    opt = wrapped(initial_scale=4, dynamic_growth_steps=3)
    assert int(opt.dynamic_counter) == 0
    seen = after_each(opt, [1.0, 1.0, 1.0, 1.0, NAN, 1.0], counter, scale)
    assert seen == [(1, 4), (2, 4), (0, 8), (1, 8), (0, 4), (1, 4)]
    assert isinstance(opt.dynamic_counter, Variable)


def test_a_fixed_scale_has_neither_counter_nor_growth_steps():
    """`dynamic_counter` and `dynamic_growth_steps` are None if `dynamic` is False."""
    for opt in (wrapped(**FIXED), older(8)):
        assert (opt.dynamic, opt.dynamic_counter, opt.dynamic_growth_steps) == (False, None, None)


@row(4, "dynamic_growth_steps")
def test_every_so_many_finite_steps_the_scale_is_increased():
    """After each `dynamic_growth_steps` consecutive finite steps the scale is doubled."""
    opt = wrapped(initial_scale=8, dynamic_growth_steps=2)
    assert after_each(opt, [1.0, 1.0, 1.0, 1.0], scale) == [8.0, 16.0, 16.0, 32.0]
    assert (type(opt.dynamic_growth_steps), opt.dynamic_growth_steps) == (int, 2)


@row(4, "initial_scale")
def test_the_initial_scale_is_where_the_scale_starts():
    """`initial_scale` stays when the scale changes; a fixed scale is that same number."""
    opt, fixed = wrapped(initial_scale=8), wrapped(**FIXED)
    assert after_each(opt, [INF], scale) == [4.0]
    assert after_each(fixed, [INF], scale) == [8.0]
    assert [(type(each.initial_scale), each.initial_scale) for each in (opt, fixed)] == [
        (float, 8.0)
    ] * 2


@row(4, "inner_optimizer")
def test_the_inner_optimizer_is_the_one_that_is_wrapped():
    """`inner_optimizer` is the optimizer itself, which other code may go on to use."""
    inner = gs.optimizers.SGD(0.5)
    assert tf2.LossScaleOptimizer(inner_optimizer=inner).inner_optimizer is inner


@row(4, "loss_scale")
@each_class
def test_the_current_scale_is_a_float32_scalar(cls):
    """`loss_scale` is the current scale, a scalar in float32, which cannot be set."""
    opt = cls(gs.optimizers.SGD(0.5))
    assert (opt.loss_scale.dtype, opt.loss_scale.shape) == (jnp.float32, ())
    assert after_each(opt, [1.0, INF], scale) == [2.0**15, 2.0**14]
    with pytest.raises(AttributeError):
        opt.loss_scale = 2.0


@each_class
@row(4, "learning_rate", "lr")
def test_the_rate_is_that_of_the_inner_optimizer(cls):
    """`learning_rate`, by its old name `lr`, is the inner optimizer's, and can be set."""
    w, opt = Variable(3.0), cls(gs.optimizers.SGD(0.5))
    for name, rate in (("learning_rate", 0.25), ("lr", 0.125)):
        setattr(opt, name, rate)
        assert [float(x) for x in (opt.learning_rate, opt.lr)] == [rate] * 2
        assert float(opt.inner_optimizer.learning_rate) == rate
        opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == 3.0 - 0.25 - 0.125


# ── experimental: methods ────────────────────────────────────────────────────────────────────


@row(4, "get_scaled_loss")
@pytest.mark.parametrize("loss", [4.0, np.float16(4.0), jnp.float16(4.0), jnp.float32(4.0)])
def test_the_loss_is_multiplied_by_the_scale(loss):
    """The result is the loss times the scale. Difference: also of a Python float, in float32."""
    scaled = wrapped().get_scaled_loss(loss)
    assert (float(scaled), scaled.dtype, scaled.shape) == (2.0**17, jnp.float32, ())


def test_a_callable_loss_gives_a_callable():
    """A callable that returns the loss gives a callable that returns the scaled loss."""
    calls, opt = [], wrapped(initial_scale=4)
    scaled = opt.get_scaled_loss(lambda: calls.append(1) or jnp.array([1.0, 2.0]))
    assert not calls
    assert (scaled().tolist(), len(calls)) == ([4.0, 8.0], 1)


def test_a_large_integer_loss_does_not_wrap_around():
    """An integer loss is multiplied in float32, so 70000 times `2**15` does not overflow."""
    assert float(wrapped().get_scaled_loss(70000)) == 70000 * 2.0**15


@pytest.mark.parametrize("loss", [3, np.int32(3), jnp.int32(3)])
def test_an_integer_loss_is_scaled_by_a_fraction(loss):
    """An integer loss times a scale that is no integer is not rounded to one."""
    opt = wrapped(initial_scale=1.5)
    assert float(opt.get_scaled_loss(loss)) == 1.5 * 3
    assert float(opt.get_scaled_loss(lambda: loss)()) == 1.5 * 3


@row(4, "get_unscaled_gradients")
@pytest.mark.parametrize("given", [list, tuple, iter])
def test_gradients_are_divided_by_the_scale(given):
    """The result is a new list of the same size, divided by the scale; None is ignored."""
    grads = [jnp.array([4.0, 8.0]), None, 1.0]
    back = wrapped(initial_scale=2).get_unscaled_gradients(given(grads))
    assert isinstance(back, list)
    assert back is not grads
    assert (back[0].tolist(), back[1], float(back[2])) == ([2.0, 4.0], None, 0.5)
    with pytest.raises(TypeError, match="list of gradients for grads"):
        wrapped().get_unscaled_gradients(jnp.ones(2))


@row(4, "get_unscaled_gradients")
def test_float16_gradients_are_unscaled_in_float32():
    """Difference: a float16 gradient comes out in float32, where `2**-14` does not become 0."""
    (gradient,) = wrapped().get_unscaled_gradients([np.float16(2.0**-14)])
    assert (float(gradient), gradient.dtype) == (2.0**-29, jnp.float32)


@row(4, "get_config")
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: wrapped(initial_scale=8), (True, 8.0, 2000)),
        (lambda: wrapped(**FIXED), (False, 8.0, None)),
        (lambda: older(8), (False, 8.0, None)),
        (lambda: older("dynamic"), (True, 2.0**15, 2000)),
    ],
)
def test_the_configuration_has_four_entries(make, settings):
    """`get_config` of both classes returns the arguments of the newer class."""
    config = make().get_config()
    assert config.pop("inner_optimizer")["config"] == gs.optimizers.SGD(0.5).get_config()
    names = ("dynamic", "initial_scale", "dynamic_growth_steps")
    assert config == dict(zip(names, settings, strict=True))


INNER = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
LIVE = {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 2.0}


@row(4, "from_config")
@pytest.mark.parametrize("cls", [tf2.LossScaleOptimizer, experimental.LossScaleOptimizer])
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (
            {"optimizer": INNER, "loss_scale": {"class_name": "DynamicLossScale", "config": LIVE}},
            (True, 8.0, 3),
        ),
        (
            {
                "optimizer": INNER,
                "loss_scale": {"class_name": "FixedLossScale", "config": {"loss_scale_value": 8.0}},
            },
            (False, 8.0, None),
        ),
        ({"inner_optimizer": INNER, "dynamic_growth_steps": 3}, (True, 2.0**15, 3)),
        ({"inner_optimizer": INNER, **FIXED}, (False, 8.0, None)),
    ],
    ids=["2.3 dynamic", "2.3 fixed", "2.4 dynamic", "2.4 fixed"],
)
def test_both_classes_are_made_from_both_forms(cls, config, settings):
    """`from_config` also reads the form of TensorFlow 2.3. Difference: it changes no dictionary."""
    before = copy.deepcopy(config)
    opt = cls.from_config(config)
    assert (config, type(opt), float(opt.lr)) == (before, cls, 0.5)
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == settings
    again = cls.from_config(json.loads(json.dumps(opt.get_config())))
    assert again.get_config() == opt.get_config()


def test_another_loss_scale_cannot_be_read():
    """A configuration of 2.3 whose scale is neither fixed nor dynamic is a ValueError."""
    config = {"optimizer": INNER, "loss_scale": {"class_name": "MyLossScale", "config": {}}}
    with pytest.raises(ValueError, match="MyLossScale"):
        tf2.LossScaleOptimizer.from_config(config)


@pytest.mark.parametrize("cls", [tf2.LossScaleOptimizer, experimental.LossScaleOptimizer])
@row(4, "from_config")
def test_a_fixed_scale_below_1_has_a_configuration_that_can_be_read(cls):
    """Difference: the configuration of a fixed scale of 0.5 can be read again."""
    opt = wrapped(dynamic=False, initial_scale=0.5)
    again = cls.from_config(opt.get_config())
    assert (type(again), again.dynamic, float(again.loss_scale)) == (cls, False, 0.5)


def test_a_configuration_with_entries_of_tensorflow_is_read():
    """Entries that only TensorFlow has are ignored; a `decay` is a ValueError that says more."""
    inner = {"name": "SGD", "learning_rate": 0.5, "decay": 0.0, "is_legacy_optimizer": True}
    config = {"inner_optimizer": {"class_name": "SGD", "config": inner}}
    assert float(tf2.LossScaleOptimizer.from_config(config).lr) == 0.5
    inner["decay"] = 0.1
    with pytest.raises(ValueError, match=r"0\.1.*InverseTimeDecay"):
        tf2.LossScaleOptimizer.from_config(config)


# ── without experimental: summary and examples ───────────────────────────────────────────────


@each_class
@row(4, "minimize")
def test_minimize_scales_and_unscales_by_itself(cls):
    """The first example: `minimize` is all that is needed. Difference: it returns the loss."""
    opt = cls(gs.optimizers.SGD(0.25))
    var = Variable(1.0)
    assert float(opt.minimize(lambda: var**2, var_list=var)) == 1.0
    assert float(var) == 0.5
    assert float(opt.minimize(lambda: var**2, var_list=[var])) == 0.25
    assert float(var) == 0.25


@row(4, "apply_gradients")
def test_a_loop_of_your_own_scales_and_unscales():
    """The second example, without a tape: scale the loss, unscale its gradient, apply it."""
    opt, var = wrapped(gs.optimizers.SGD(0.25)), Variable(0.5)
    scaled_grad = jax.grad(lambda x: opt.get_scaled_loss(x**2))(var.value())
    assert float(scaled_grad) == 1.0 * 2.0**15
    (grad,) = opt.get_unscaled_gradients([scaled_grad])
    opt.apply_gradients([(grad, var)])
    assert (float(var), int(opt.dynamic_counter)) == (0.25, 1)


def test_small_gradients_do_not_underflow():
    """A gradient that float16 rounds to 0 reaches the variable if the loss is scaled."""
    w = Variable(0.0)

    def loss():
        return (w.value().astype("float16") * np.float16(2.0**-24)).astype("float32") / 64

    for opt, after in (
        (gs.optimizers.SGD(1.0), 0.0),
        (wrapped(gs.optimizers.SGD(1.0)), -(2.0**-30)),
    ):
        opt.minimize(loss, [w])
        assert float(w) == after


@row(4, "warning: gradients applied that were never unscaled")
@pytest.mark.parametrize(
    ("called", "missing"),
    [
        ([], "get_scaled_loss and get_unscaled_gradients"),
        (["get_scaled_loss"], "get_unscaled_gradients"),
        (["get_unscaled_gradients"], "get_scaled_loss"),
    ],
)
def test_a_forgotten_call_gives_one_warning(called, missing):
    """A step without scaling, unscaling or both warns once, and names what was not called."""
    w, opt = Variable(3.0), wrapped(**FIXED)
    for name in called:
        getattr(opt, name)([1.0] if "gradients" in name else 1.0)
    with pytest.warns(UserWarning, match=f"Expected {missing} to be called"):
        opt.apply_gradients([(1.0, w)])
    opt.apply_gradients([(1.0, w)])
    assert float(w) == 2.0


# ── without experimental: arguments ──────────────────────────────────────────────────────────


def test_the_scale_is_dynamic_by_default():
    """By default `dynamic` is True, `initial_scale` `2**15` and `dynamic_growth_steps` 2000."""
    opt = tf2.LossScaleOptimizer(gs.optimizers.SGD())
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (True, 2.0**15, 2000)
    assert (float(opt.loss_scale), int(opt.dynamic_counter)) == (2.0**15, 0)


def test_a_fixed_scale_does_not_change():
    """With `dynamic=False` `initial_scale` is the only scale there is."""
    assert after_each(wrapped(**FIXED), [1.0, INF, 1.0], scale) == [8.0] * 3


def test_a_skipped_step_halves_the_scale_and_moves_nothing():
    """A non-finite gradient resets the count, halves the scale, and skips all gradients."""
    a, b, opt = Variable(1.0), Variable(1.0), wrapped(initial_scale=4)
    opt.get_scaled_loss(1.0)
    opt.get_unscaled_gradients([1.0])
    for first, second, weights, state in (
        (1.0, 1.0, (0.5, 0.5), (4.0, 1)),
        (1.0, NAN, (0.5, 0.5), (2.0, 0)),
        (-INF, 1.0, (0.5, 0.5), (1.0, 0)),
        (INF, 1.0, (0.5, 0.5), (1.0, 0)),  # never below 1
        (1.0, 1.0, (0.0, 0.0), (1.0, 1)),
    ):
        opt.apply_gradients([(first, a), (second, b)])
        assert (float(a), float(b)) == weights
        assert (float(opt.loss_scale), int(opt.dynamic_counter)) == state


@row(4, "TypeError: dynamic is no bool")
@pytest.mark.parametrize("wrong", [1, "dynamic", None, 8.0])
def test_dynamic_must_be_a_bool(wrong):
    """Anything but a bool for `dynamic` is a TypeError, which leaves the optimizer free."""
    inner = gs.optimizers.SGD()
    with pytest.raises(TypeError, match="Expected a bool for dynamic"):
        tf2.LossScaleOptimizer(inner, wrong)
    tf2.LossScaleOptimizer(inner)


@row(4, "ValueError: dynamic=False without initial_scale")
@row(4, "dynamic_growth_steps")
def test_growth_steps_of_0_double_the_scale_in_each_finite_step():
    """`dynamic_growth_steps=0` means 1, as for the live `DynamicLossScale`."""
    opt = wrapped(initial_scale=8, dynamic_growth_steps=0)
    assert after_each(opt, [1.0, 1.0, INF, 1.0], scale) == [16.0, 32.0, 16.0, 32.0]
    assert tf2.LossScaleOptimizer.from_config(opt.get_config()).dynamic_growth_steps == 1
    with pytest.raises(ValueError, match="dynamic_growth_steps"):
        wrapped(**FIXED, dynamic_growth_steps=0)


@row(4, "TypeError: setting a number where a schedule is")
@each_class
def test_a_number_does_not_replace_a_schedule(cls):
    """A number cannot be set where a schedule is, as from 2.11 on; another schedule can be."""
    opt = cls(gs.optimizers.SGD(schedules.ExponentialDecay(0.5, 1, 0.5)))
    for name in ("learning_rate", "lr"):
        with pytest.raises(TypeError, match="Expected a schedule or callable"):
            setattr(opt, name, 0.25)
    opt.learning_rate = schedules.ExponentialDecay(2.0, 1, 0.5)
    assert float(opt.learning_rate) == 2.0


@row(4, "ValueError: dynamic=False with dynamic_growth_steps")
def test_a_fixed_scale_needs_its_value_and_no_growth_steps():
    """Without `dynamic`, `initial_scale` is required, and `dynamic_growth_steps` an error."""
    with pytest.raises(ValueError, match="initial_scale"):
        tf2.LossScaleOptimizer(gs.optimizers.SGD(), False)
    with pytest.raises(ValueError, match="dynamic_growth_steps"):
        tf2.LossScaleOptimizer(gs.optimizers.SGD(), False, 8.0, 2)


@pytest.mark.parametrize(
    "wrong",
    [{"initial_scale": wrong} for wrong in (0, -1.0, INF, NAN, 2.0**127)]
    + [{"dynamic_growth_steps": wrong} for wrong in (-1, 1.5)],
)
def test_scales_and_steps_out_of_range_are_refused(wrong):
    """Difference: a scale that has no reciprocal, or a count that is never reached, is refused."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tf2.LossScaleOptimizer(gs.optimizers.SGD(), **wrong)


def test_only_the_first_steps_and_then_few_are_skipped():
    """The scale falls at once to where float16 holds the gradients; then 1 of n + 1 is skipped."""
    w, opt, n = Variable(0.0), wrapped(gs.optimizers.SGD(0.0), dynamic_growth_steps=4), 4

    def loss():  # float16 overflows where the scale is above 2**10
        return (w.value().astype("float16") * np.float16(2.0**5)).astype("float32")

    scales = []
    for _ in range(5 + 2 * (n + 1)):
        opt.minimize(loss, [w])
        scales.append(float(opt.loss_scale))
    falling = [2.0**14, 2.0**13, 2.0**12, 2.0**11, 2.0**10]
    assert scales == falling + 2 * [2.0**10, 2.0**10, 2.0**10, 2.0**11, 2.0**10]


# ── without experimental: hyperparameters ────────────────────────────────────────────────────


@row(4, "beta_1, momentum and so on")
def test_hyperparameters_are_those_of_the_inner_optimizer():
    """The example of the page: `beta_1` is read and set through the wrapper."""
    opt = wrapped(Adam(beta_1=0.8, epsilon=1e-5))
    assert opt.beta_1 == 0.8
    opt.beta_1 = 0.7
    assert opt.beta_1 == opt.inner_optimizer.beta_1 == 0.7


@row(4, "beta_1, momentum and so on")
def test_epsilon_is_delegated_too():
    """Difference: `epsilon` is read and set through the wrapper, too, and takes effect."""
    w, opt = Variable(3.0), wrapped(Adam(0.5, beta_1=0.0, beta_2=0.0, epsilon=1.0))
    assert opt.epsilon == 1.0
    opt.minimize(lambda: w * 1.0, [w])
    opt.epsilon = 3.0
    assert opt.inner_optimizer.epsilon == 3.0
    opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == pytest.approx(3.0 - 0.5 / (1 + 1) - 0.5 / (1 + 3))


def test_hyperparameters_are_checked_where_they_are_set():
    """New: a value that the constructor refuses is refused with the same message."""
    with pytest.raises(ValueError, match="momentum") as refused:
        gs.optimizers.SGD(0.5, momentum=5.0)
    opt = wrapped(gs.optimizers.SGD(0.5, momentum=0.5))
    with pytest.raises(ValueError, match="momentum") as caught:
        opt.momentum = 5.0
    assert (str(caught.value), opt.momentum) == (str(refused.value), 0.5)


def test_an_attribute_that_the_inner_optimizer_lacks_is_no_attribute():
    """What neither of the two has is an AttributeError; what both have is listed by `dir`."""
    opt = wrapped(Adam())
    for name in ("nesterov", "unknown"):
        with pytest.raises(AttributeError, match=name):
            getattr(opt, name)
    assert {"learning_rate", "lr", "minimize", "loss_scale", "get_scaled_loss"} <= set(dir(opt))
    assert {"beta_1", "beta_2", "epsilon", "amsgrad", "clipnorm"} <= set(dir(opt))
    assert "nesterov" not in dir(opt)


def test_a_variable_as_the_rate_stays_live():
    """A variable as the rate of the inner optimizer is read in every step."""
    rate, w = Variable(0.5), Variable(3.0)
    opt = wrapped(gs.optimizers.SGD(rate))
    assert opt.learning_rate is rate
    for value, after in ((0.5, 2.5), (0.25, 2.25)):
        rate.assign(value)
        opt.minimize(lambda: w * 1.0, [w])
        assert float(w) == after


@row(4, "clipnorm")
def test_one_clip_option_is_used():
    """Difference: `clipnorm` with `clipvalue` is an error."""
    with pytest.raises(ValueError, match="at most one of clipnorm"):
        gs.optimizers.SGD(clipnorm=1.0, clipvalue=1.0)


@row(4, "learning_rate")
def test_the_rate_with_a_schedule_is_a_number():
    """With a schedule, `learning_rate` is the rate of the last step, as from 2.11 on. Difference:
    the last step may be a skipped one; and `inner_optimizer` has the rate of the next step."""
    opt = wrapped(gs.optimizers.SGD(schedules.ExponentialDecay(0.5, 1, 0.5)))
    assert float(opt.learning_rate) == float(opt.lr) == 0.5
    rates = after_each(
        opt,
        [1.0, 1.0, INF, 1.0],
        lambda opt: opt.learning_rate,
        lambda opt: opt.inner_optimizer.learning_rate,
    )
    assert rates == [(0.5, 0.25), (0.25, 0.125), (0.125, 0.0625), (0.0625, 0.03125)]


# ── Optimizer: methods that are delegated ────────────────────────────────────────────────────


@row(4, "iterations")
@pytest.mark.parametrize("arguments", [{}, FIXED], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("start", [int, Variable])
def test_iterations_count_all_steps(arguments, start):
    """`iterations` can be set before the first step, and every step adds 1, also a skipped one."""
    opt = wrapped(**arguments)
    opt.iterations = start(7)
    counts = after_each(opt, [1.0, NAN, 1.0], lambda opt: opt.iterations)
    assert counts == [8, 9, 10]
    assert int(opt.inner_optimizer.iterations) == 10


def test_the_wrapper_has_the_counter():
    """`iterations` is set on the wrapper; the inner optimizer, which shares it, cannot set it."""
    with pytest.raises(AttributeError):
        wrapped().inner_optimizer.iterations = Variable(5)


@row(4, "exclude_from_weight_decay")
def test_exclusion_from_decay_reaches_the_inner_optimizer():
    """The excluded variable does not decay; in TensorFlow it does."""
    w, opt = Variable(1.0), tf2.LossScaleOptimizer(gs.optimizers.SGD(0.5, weight_decay=0.5))
    opt.exclude_from_weight_decay([w])
    opt.minimize(lambda: w * 0.0, [w])
    assert float(w) == 1.0


@row(4, "beta_1, momentum and so on")
def test_a_momentum_that_is_set_before_the_first_step_is_used():
    """Difference: TensorFlow ignores it. After `build` it would need state, and is an error."""
    w, opt = Variable(1.0), tf2.LossScaleOptimizer(gs.optimizers.SGD(1.0))
    opt.momentum = 0.5
    for _ in range(2):
        opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == 1.0 - 1.0 - 1.5
    opt = tf2.LossScaleOptimizer(gs.optimizers.SGD(1.0))
    opt.minimize(lambda: w * 1.0, [w])
    with pytest.raises(ValueError, match="momentum to be set before"):
        opt.momentum = 0.5


def test_with_accumulation_iterations_count_no_skipped_step():
    """Difference: with accumulation a skipped microbatch is left out, and does not count."""
    w, opt = Variable(3.0), wrapped(gs.optimizers.SGD(0.5, gradient_accumulation_steps=2))
    for gradient in (1.0, INF, 3.0):
        apply(opt, gradient, w)
    assert (float(w), int(opt.iterations)) == (3.0 - 0.5 * (1.0 + 3.0) / 2, 1)


@row(4, "decay")
def test_decay_is_a_schedule():
    """Difference: there is no attribute `decay`; a schedule has the rate of each step."""
    assert not hasattr(wrapped(), "decay")
    w, opt = Variable(3.0), wrapped(gs.optimizers.SGD(schedules.InverseTimeDecay(1.0, 1, 1.0)))
    for _ in range(2):
        apply(opt, 1.0, w)
    assert float(w) == 3.0 - 1.0 - 0.5


@row(4, "RuntimeError: iterations set after build")
def test_iterations_cannot_be_set_once_the_optimizer_is_built():
    """Setting `iterations` after the variables of the optimizer exist is a RuntimeError."""
    opt = wrapped()
    opt.build([Variable(1.0)])
    with pytest.raises(RuntimeError, match="before the optimizer is built"):
        opt.iterations = 1


@row(4, "apply_gradients")
@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "step"},
        {"experimental_aggregate_gradients": False},
        {"skip_gradients_aggregation": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_apply_gradients_takes_the_settings_of_a_strategy(arguments):
    """The name and the settings of aggregation are accepted. Difference: without effect."""
    w, opt = Variable(3.0), wrapped(**FIXED)
    opt.get_scaled_loss(1.0)
    opt.get_unscaled_gradients([1.0])
    opt.apply_gradients(zip([2.0], [w], strict=True), **arguments)
    assert (float(w), int(opt.iterations)) == (2.0, 1)


@row(4, "aggregate_gradients")
def test_aggregate_gradients_returns_pairs():
    """In one process `aggregate_gradients` (2.11 to 2.15) returns the pairs unchanged."""
    w = Variable(3.0)
    assert wrapped().aggregate_gradients([(1.0, w)]) == [(1.0, w)]


def test_malformed_pairs_are_refused():
    """`grads_and_vars` that are not pairs are a TypeError, and no weight moves."""
    w, opt = Variable(3.0), wrapped()
    opt.get_scaled_loss(1.0)
    opt.get_unscaled_gradients([1.0])
    for malformed in ([(1.0, w, "w")], [w], [("text", w)], [(1.0, 2.0)]):
        with pytest.raises(TypeError):
            opt.apply_gradients(malformed)
    assert float(w) == 3.0


@row(4, "ValueError: no gradients")
@row(4, "ValueError: all gradients are None")
@pytest.mark.parametrize(
    ("pairs", "match"), [(lambda w: [], "at least one"), (lambda w: [(None, w)], "None for all")]
)
def test_at_least_one_variable_must_have_a_gradient(pairs, match):
    """No gradients at all, or only None, is a ValueError, and the state stays as it was."""
    w, opt = Variable(3.0), wrapped()
    apply(opt, 1.0, w)
    before = [v.numpy() for v in opt.variables]
    with pytest.raises(ValueError, match=match):
        opt.apply_gradients(pairs(w))
    assert [v.numpy() for v in opt.variables] == before


def test_a_gradient_of_none_is_left_out():
    """A variable without a gradient stays, with a warning, and the others are updated."""
    a, b = Variable(3.0), Variable(3.0)
    with pytest.warns(UserWarning, match="No gradient for"):
        wrapped().minimize(lambda: a * 2.0, [a, b])
    assert (float(a), float(b)) == (2.0, 3.0)


@row(4, "minimize")
def test_minimize_sums_a_loss_that_is_no_scalar():
    """A loss that is not a scalar is summed, and `minimize` returns the sum."""
    v = Variable([1.0, 2.0])
    assert float(wrapped(gs.optimizers.SGD(0.25)).minimize(lambda: v**2, [v])) == 5.0
    assert v.numpy().tolist() == [0.5, 1.0]


def test_minimize_takes_a_callable_var_list():
    """With a callable, variables that the first call of the loss creates are trained at once."""
    made = []

    def loss():
        if not made:
            made.append(Variable(2.0))
        return made[0] ** 2

    wrapped(gs.optimizers.SGD(0.25)).minimize(loss, lambda: made)
    assert float(made[0]) == 1.0


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        ({"name": "step"}, [3.0 - 0.5 * 1.0, 3.0 - 0.5 * 1.0]),
        ({"grad_loss": [2.0, 0.5]}, [3.0 - 0.5 * 2.0, 3.0 - 0.5 * 0.5]),
    ],
    ids=["name", "grad_loss"],
)
def test_minimize_takes_the_arguments_of_older_versions(arguments, after):
    """`minimize` takes a name, and the gradient of the loss's elements (2.4 to 2.10)."""
    w = Variable([3.0, 3.0])
    wrapped().minimize(lambda: w * 1.0, [w], **arguments)
    assert w.numpy().tolist() == after


@row(4, "minimize")
def test_there_are_no_tapes():
    """Difference: passing a tape, or a loss that is not callable, is an error."""
    w = Variable(1.0)
    with pytest.raises(ValueError, match="no tape"):
        wrapped().minimize(lambda: w**2, [w], tape=object())
    with pytest.raises(TypeError, match="callable"):
        wrapped().minimize(w**2, [w])


@row(4, "compute_gradients")
def test_compute_gradients_returns_unscaled_gradients():
    """`compute_gradients` (2.11 to 2.15) unscales the gradients, and accepts `tape=None`."""
    w = Variable(3.0)
    ((gradient, variable),) = wrapped().compute_gradients(lambda: w * 2.0, [w], tape=None)
    assert (float(gradient), variable) == (2.0, w)


def test_var_list_must_hold_variables():
    """Anything but variables in `var_list` is a ValueError."""
    w = Variable(3.0)
    with pytest.raises(ValueError, match="var_list"):
        wrapped().minimize(lambda: w * 1.0, ["w"])


@row(4, "get_slot")
@row(4, "get_slot_names")
def test_slots_are_those_of_the_inner_optimizer():
    """Slots are found by name after the first step. Difference: by the names of this library."""
    w, opt = Variable(1.0), wrapped(Adam(0.5, beta_1=0.75, beta_2=0.5))
    assert opt.get_slot_names() == []
    opt.minimize(lambda: w * 2.0, [w])
    assert opt.get_slot_names() == ["momentum", "velocity"]
    assert float(opt.get_slot(w, "momentum")) == 0.25 * 2.0
    assert float(opt.get_slot(w, "velocity")) == 0.5 * 4.0
    with pytest.raises(ValueError, match="no slot 'm'"):
        opt.get_slot(w, "m")
    opt = wrapped(RMSprop(0.5, momentum=0.5, centered=True))
    opt.minimize(lambda: w * 2.0, [w])
    assert opt.get_slot_names() == ["velocity", "momentum", "average_gradient"]


@row(4, "get_gradients", "get_updates")
def test_gradients_and_updates_of_a_loss():
    """`get_gradients` returns unscaled gradients; `get_updates` takes a step."""
    w, opt = Variable(3.0), wrapped()
    (gradient,) = opt.get_gradients(lambda: w * 2.0, [w])
    assert float(gradient) == 2.0
    (count,) = opt.get_updates(lambda: w * 2.0, [w])
    assert (float(w), int(count)) == (2.0, 1)


@row(4, "add_slot", "add_weight")
def test_state_is_added_by_name():
    """`add_slot` returns the slot of a variable, always the same; `add_weight` adds a variable."""
    w, opt = Variable([3.0, 4.0], name="w"), wrapped()
    slot = opt.add_slot(w, "mine", initializer="ones")
    assert (slot.numpy().tolist(), opt.add_slot(w, "mine")) == ([1.0, 1.0], slot)
    assert opt.get_slot(w, "mine") is slot
    weight = opt.add_weight("count", (2,), "int32")
    assert (weight.shape, weight.dtype.name, weight.numpy().tolist()) == ((2,), "int32", [0, 0])
    assert slot in opt.variables
    assert weight in opt.variables


@row(4, "weights", "get_weights")
def test_weights_are_the_variables():
    """`weights` is the count of steps and the slots; `get_weights` returns their values."""
    opt, w = wrapped(gs.optimizers.SGD(0.5, momentum=0.5), initial_scale=8), Variable(3.0)
    for gradient in (INF, 2.0):
        apply(opt, gradient, w)
    assert opt.weights == [opt.iterations, opt.get_slot(w, "momentum")]
    assert [x.tolist() for x in opt.get_weights()] == [2, -0.5 * 2.0]


@pytest.mark.parametrize(
    ("inner", "order"),
    [
        (lambda: Adam(0.1), ["momentum", "velocity"]),
        (lambda: Adam(0.1, amsgrad=True), ["momentum", "velocity", "velocity_hat"]),
        (lambda: RMSprop(0.1, momentum=0.5), ["velocity", "momentum"]),
        (lambda: Adadelta(0.1), ["accumulated_grad", "accumulated_delta_var"]),
    ],
)
def test_weights_are_in_the_order_of_tensorflow(inner, order):
    """Each slot of all variables, then the next; weights that were added come last."""
    opt, variables = wrapped(inner()), [Variable(1.0, name=name) for name in "ab"]
    opt.build(variables)
    opt.add_weight("mine")
    slots = [opt.get_slot(v, slot) for slot in order for v in variables]
    assert opt.weights[1 : 1 + len(slots)] == slots
    assert opt.weights[-1].name.endswith("mine")
    opt.set_weights([7, *range(1, len(slots) + 1), 0])
    assert [float(slot) for slot in slots] == [*range(1, len(slots) + 1)]


@each_class
@row(4, "ValueError: get_gradients of what the loss ignores")
def test_a_gradient_that_cannot_be_computed_is_an_error(cls):
    """`get_gradients` and `get_updates` raise for a variable that the loss ignores, and no step is
    taken; `compute_gradients` returns None."""
    v, u = Variable(1.0, name="v"), Variable(2.0, name="u")
    opt = cls(gs.optimizers.SGD(0.25))
    for call in (opt.get_gradients, opt.get_updates):
        with pytest.raises(ValueError, match=r"no gradient for \['u'\]"):
            call(lambda: v**2, [v, u])
    assert (float(v), int(opt.iterations)) == (1.0, 0)
    assert [g is None for g, _ in opt.compute_gradients(lambda: v**2, [v, u])] == [False, True]


class Noted(tf2.LossScaleOptimizer):
    """A user's subclass, with one more argument."""

    def __init__(self, inner_optimizer, *args, note="", **kwargs):
        super().__init__(inner_optimizer, *args, **kwargs)
        self.note = note

    def get_config(self):
        return {**super().get_config(), "note": self.note}


class NotedOlder(experimental.LossScaleOptimizer):
    """The same, of the experimental class."""

    def __init__(self, optimizer, loss_scale, note=""):
        super().__init__(optimizer, loss_scale)
        self.note = note

    def get_config(self):
        return {**super().get_config(), "note": self.note}


@pytest.mark.parametrize(
    "opt",
    [
        lambda: Noted(gs.optimizers.SGD(), note="mine"),
        lambda: Noted(gs.optimizers.SGD(), dynamic=False, initial_scale=8, note="mine"),
        lambda: NotedOlder(gs.optimizers.SGD(), "dynamic", note="mine"),
        lambda: NotedOlder(gs.optimizers.SGD(), 0.5, note="mine"),
        lambda: NotedOlder(gs.optimizers.SGD(), experimental.DynamicLossScale(8, 3), note="mine"),
    ],
)
def test_from_config_creates_a_subclass_by_its_constructor(opt):
    """`from_config` of a class derived from the wrapper calls its constructor with its config."""
    opt = opt()
    again = type(opt).from_config(opt.get_config())
    assert (type(again), again.note) == (type(opt), "mine")
    assert again.get_config() == opt.get_config()


def test_set_weights_takes_the_count_and_the_slots():
    """`set_weights` takes what `get_weights` returned, and keeps scale and learning rate."""
    opt, w = wrapped(gs.optimizers.SGD(0.5, momentum=0.5), initial_scale=8), Variable(3.0)
    apply(opt, 2.0, w)
    other = tf2.LossScaleOptimizer(gs.optimizers.SGD(0.25, momentum=0.5), initial_scale=16)
    other.build([w])
    other.set_weights(opt.get_weights())
    assert (int(other.iterations), float(other.get_slot(w, "momentum"))) == (1, -1.0)
    assert (float(other.learning_rate), float(other.loss_scale)) == (0.25, 16.0)
    with pytest.raises(ValueError, match="Expected 5 weights"):
        other.set_weights([1, 2, 3])


@pytest.mark.parametrize("wrong", [1.5, -3, "x", None, Variable([1, 2]), Variable(1.0)])
def test_iterations_are_a_whole_number(wrong):
    """`iterations` takes a number >= 0 or an integer variable, which becomes the counter."""
    opt = wrapped()
    with pytest.raises((TypeError, ValueError), match="iterations"):
        opt.iterations = wrong
    count, w = Variable(3), Variable(1.0)
    opt.iterations = count
    apply(opt, 1.0, w)
    assert (int(count), opt.iterations) == (4, count)


def test_every_value_is_unscaled():
    """Python numbers and integers among the gradients are divided, too."""
    opt = wrapped(dynamic=False, initial_scale=8)
    values = opt.get_unscaled_gradients([16, 16.0, np.array([16])])
    assert [np.asarray(v).tolist() for v in values] == [2.0, 2.0, [2.0]]


@pytest.mark.parametrize("weights", [np.ones(3), np.ones((2, 1)), 1.0])
def test_grad_loss_has_the_shape_of_the_loss(weights):
    """`grad_loss` is the gradient of each element, so another shape is an error."""
    w = Variable([3.0, 3.0])
    with pytest.raises(ValueError, match=r"grad_loss of the loss's shape, \(2,\)"):
        wrapped().minimize(lambda: w * 1.0, [w], grad_loss=weights)
    assert w.numpy().tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda opt, w: opt.apply_gradients([("x", w)]), "gradient of 'w'; got 'x'"),
        (lambda opt, w: opt.minimize(lambda: None, [w]), r"loss\(\) to be one number; got None"),
        (lambda opt, w: opt.minimize(lambda: {"x": w * 1}, [w]), "one number; got a dict of 1"),
        (lambda opt, w: opt.minimize(lambda: w * 1, []), "at least one variable in var_list"),
        (lambda opt, w: opt.get_unscaled_gradients({"w": 1.0}), "list of gradients for grads"),
        (lambda opt, w: opt.get_gradients(lambda: w * 1, [3.0]), "in params; got 3.0"),
        (lambda opt, w: opt.set_weights(None), "list of arrays for weights; got None"),
        (
            lambda opt, w: opt.get_slot("w", "momentum"),
            "gainstage.optimizers.Variable for var; got 'w'",
        ),
        (lambda opt, w: opt.add_weight("w", 3), "integers >= 0 for shape; got 3"),
        (
            lambda opt, w: tf2.LossScaleOptimizer(v1.GradientDescentOptimizer(0.1)),
            "Use gainstage.compat.v1.MixedPrecisionLossScaleOptimizer",
        ),
    ],
)
def test_wrong_arguments_are_named(call, match):
    """An error names the argument, what was passed, and what to write."""
    w, opt = Variable(3.0, name="w"), wrapped()
    opt.build([w])
    opt.get_unscaled_gradients([opt.get_scaled_loss(1.0)])
    with pytest.raises((TypeError, ValueError), match=match):
        call(opt, w)
    assert float(w) == 3.0


@row(4, "variables")
def test_variables_are_all_state():
    """`variables` lists the state of the inner optimizer. Difference: and count and scale."""
    opt = wrapped(gs.optimizers.SGD(0.5, momentum=0.5), initial_scale=8)
    after_each(opt, [2.0])
    assert [float(v) for v in opt.variables] == [1.0, 8.0, 1.0, 0.5, -0.5 * 2.0]


@row(4, "set_weights")
def test_the_weights_of_one_optimizer_can_be_set_in_another():
    """The values of `variables`, set in another optimizer, let it go on from there."""
    runs = []
    for _ in range(2):
        w, opt = Variable(3.0), wrapped(gs.optimizers.SGD(0.5, momentum=0.5), initial_scale=8)
        opt.build([w])
        runs.append((w, opt))
    (w, opt), (other_w, other) = runs
    for gradient in (2.0, INF, 1.0):
        apply(opt, gradient, w)
    other_w.assign(w)
    other.set_weights([v.numpy() for v in opt.variables])
    for each, variable in ((opt, w), (other, other_w)):
        apply(each, 2.0, variable)
    m1, m2 = 2.0, 0.5 * 2.0 + 1.0
    assert float(w) == float(other_w) == 3.0 - 0.5 * (m1 + m2 + 0.5 * m2 + 2.0)
    assert (float(other.loss_scale), int(other.dynamic_counter), int(other.iterations)) == (4, 2, 4)


@pytest.mark.filterwarnings("ignore:No gradient for")
@each_class
def test_the_constraint_of_a_variable_without_a_gradient_waits(cls):
    """A variable that a step does not train is not projected, as there."""
    a, b = Variable(3.0, constraint=lambda x: jnp.clip(x, 0.0, 1.0)), Variable(1.0)
    opt = cls(gs.optimizers.SGD(0.5))
    opt.minimize(lambda: b * 1.0, [a, b])
    opt.minimize(lambda: b * 1.0, [b])
    assert (float(a), float(b)) == (3.0, 0.0)


@row(4, "set_weights")
@each_class
def test_what_the_inner_class_overrides_for_itself_is_not_called(cls):
    """Difference up to 2.10: `set_weights` and `add_weight` of the wrapper do their work without
    the `set_weights` and `add_variable` of the inner optimizer's class, as from 2.11 on."""

    class Own(gs.optimizers.SGD):
        def set_weights(self, weights):
            raise AssertionError

        def add_variable(self, *args, **kwargs):
            raise AssertionError

    opt, w = cls(Own(0.5, momentum=0.5)), Variable(3.0)
    opt.build([w])
    opt.set_weights([7, 2.0])
    assert (int(opt.iterations), float(opt.get_slot(w, "momentum"))) == (7, 2.0)
    assert opt.add_weight("more") in opt.weights

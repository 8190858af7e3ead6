"""`tf.mixed_precision.experimental`: `LossScale`, `FixedLossScale`, `DynamicLossScale` (2.4, 2.7).

The names are also those of `tf.compat.v1.mixed_precision` (2.15). One test is one sentence.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.compat import experimental, v1
from gainstage.compat.experimental import DynamicLossScale, FixedLossScale, LossScale
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable

from rows import row

INF, NAN = float("inf"), float("nan")
ARGUMENTS = ["initial_loss_scale", "increment_period", "multiplier"]


class EveryOther(LossScale):
    """A user's own scale: it refuses every second step, whatever the gradients are."""

    def __init__(self, value):
        super().__init__()
        self.value, self.updates = value, 0

    def __call__(self):
        return jnp.float32(self.value)

    def update(self, grads):
        self.updates += 1
        return None, self.updates % 2 == 1

    def get_config(self):
        return {"value": self.value}


def scales_after(scale, gradients):
    """The scale after each update with one of these gradients."""
    seen = []
    for gradient in gradients:
        scale.update([gradient])
        seen.append(float(scale()))
    return seen


# ── LossScale: summary ───────────────────────────────────────────────────────────────────────


@row(5, "TypeError: LossScale itself is made")
def test_the_base_class_cannot_be_instantiated():
    """`LossScale` is abstract, and so is a subclass that lacks one of its three methods."""

    class Half(LossScale):
        def __call__(self):
            return jnp.float32(1.0)

    for abstract in (LossScale, Half):
        with pytest.raises(TypeError, match="abstract"):
            abstract()


def test_the_concrete_classes_are_those_of_version_1():
    """`compat.v1` has the same classes, and both concrete ones are subclasses of `LossScale`."""
    assert (v1.LossScale, v1.FixedLossScale, v1.DynamicLossScale) == (
        LossScale,
        FixedLossScale,
        DynamicLossScale,
    )
    assert isinstance(FixedLossScale(2), LossScale)
    assert isinstance(DynamicLossScale(), LossScale)


def test_multiplying_the_loss_and_dividing_the_gradients_has_no_effect():
    """The pseudocode of the page: a scaled loss and unscaled gradients give the true gradients."""
    scale = DynamicLossScale(1024)
    gradient = jax.grad(lambda w: w**2 * scale())(jnp.float32(3.0)) / scale()
    assert float(gradient) == 6.0


@pytest.mark.parametrize("make", [lambda: FixedLossScale(8), lambda: DynamicLossScale(8)])
@row(5, "FixedLossScale.__call__", "DynamicLossScale.__call__")
def test_calling_a_scale_returns_a_float32_scalar(make):
    """A call returns the current scale, a scalar array in float32."""
    value = make()()
    assert (value.dtype, value.shape, float(value)) == (jnp.float32, (), 8.0)


@row(5, "LossScale.__call__", "LossScale.update")
def test_an_optimizer_uses_the_scale_of_a_subclass():
    """An optimizer scales by what a subclass returns, and applies gradients if `update` says so."""
    w, step, scale = Variable(4.0), Variable(0), EveryOther(32.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(1.0), scale)
    weights = []
    for _ in range(3):
        opt.minimize(lambda: w * 1.0, step, [w])
        weights.append(float(w))
    assert weights == [3.0, 3.0, 2.0]
    assert (float(opt.loss_scale), scale.updates, int(step)) == (32.0, 3, 2)


def test_a_compiled_step_keeps_the_state_of_a_subclass_in_a_variable():
    """A number that `update` sets would be set once, when the step is compiled: it is refused, and
    unchanged. A `gs.optimizers.Variable` works."""

    class Halved(EveryOther):
        def update(self, grads):
            if isinstance(self.value, Variable):
                self.value.assign(self.value.value() / 2)
            else:
                self.value = self.value / 2
            return None, True

        def __call__(self):
            return jnp.asarray(self.value, jnp.float32)

    for value in (64.0, Variable(64.0, trainable=False)):
        w, scale = Variable(4.0), Halved(value)
        opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(1.0), scale)
        opt.build([w])
        state = [w, *opt.variables()]
        step = gs.optimizers.jit(
            lambda opt=opt, w=w: opt.minimize(lambda: w * 1.0, var_list=[w]), state
        )
        if isinstance(value, Variable):
            step()
            step()
            assert (float(scale()), float(w)) == (16.0, 2.0)
        else:
            with pytest.raises(
                ValueError, match=r"Write self.value = gainstage.optimizers.Variable"
            ):
                step()
            assert scale.value == 64.0


def test_a_subclass_of_a_concrete_class_decides():
    """An optimizer calls the `update` that a subclass of `DynamicLossScale` overrides."""

    class Never(DynamicLossScale):
        def update(self, grads):
            super().update(grads)
            return None, False

    w, scale = Variable(1.0), Never(16.0, 1)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), scale)
    opt.apply_gradients([(1.0, w)])
    assert (float(w), float(scale())) == (1.0, 32.0)


def test_where_a_scale_is_expected_a_number_or_dynamic_may_stand():
    """A number makes a fixed scale, and "dynamic" a `DynamicLossScale()`."""
    for make in (
        lambda scale: v1.MixedPrecisionLossScaleOptimizer(v1.AdamOptimizer(), scale),
        lambda scale: experimental.LossScaleOptimizer(SGD(), scale),
    ):
        assert float(make(8).loss_scale) == float(FixedLossScale(8)()) == 8.0
        assert float(make("dynamic").loss_scale) == float(DynamicLossScale()()) == 2.0**15


# ── LossScale: methods ───────────────────────────────────────────────────────────────────────


@row(5, "LossScale.get_config", "LossScale.from_config")
def test_a_subclass_is_made_from_its_configuration():
    """`from_config` passes the configuration of a subclass to its constructor."""
    scale = EveryOther(3.0)
    scale.update([])
    again = EveryOther.from_config(scale.get_config())
    assert (type(again), again.value, again.updates) == (EveryOther, 3.0, 0)


def test_from_config_names_what_does_not_fit():
    """A key that the constructor lacks is an error that names the class and the configuration."""
    with pytest.raises(TypeError, match=r"configuration of DynamicLossScale; got .'init': 2"):
        DynamicLossScale.from_config({"init": 2})


def test_the_scale_changes_only_when_update_is_called():
    """Reading a scale changes nothing, and after `update` a call returns the new scale."""
    scale = DynamicLossScale(8.0, 1)
    assert [float(scale()) for _ in range(2)] == [8.0, 8.0]
    scale.update([1.0])
    assert [float(scale()) for _ in range(2)] == [16.0, 16.0]


def test_a_compiled_update_changes_the_scale():
    """Inside `gs.optimizers.jit` the update takes effect whenever the compiled function runs."""
    scale = DynamicLossScale(8.0, 2)
    update = gs.optimizers.jit(lambda gradient: scale.update([gradient])[1], state=scale.variables)
    applied, after = [], []
    for gradient in (1.0, 1.0, INF):
        applied.append(bool(update(gradient)))
        after.append(float(scale()))
    assert (applied, after) == ([True, True, False], [8.0, 16.0, 8.0])


@row(5, "DynamicLossScale.update")
@pytest.mark.parametrize(
    ("gradients", "finite"),
    [
        ([], True),
        ([None], True),
        (2.0, True),
        ({"a": np.float32([1.0]), "b": [jnp.ones(2, jnp.float16), (None, 1.0)]}, True),
        ({"a": np.float32([1.0]), "b": [jnp.ones(2, jnp.float16), (None, NAN)]}, False),
        ([np.float32([1.0, -INF]), 1.0], False),
        ([np.float16([INF]), None], False),
        ({"a": 1.0, "b": INF}.values(), False),
        (iter([None, 1.0]), True),
    ],
)
def test_gradients_may_be_nested_and_none(gradients, finite):
    """`update` takes any nested structure, ignores None, and one non-finite element decides."""
    scale = DynamicLossScale(4.0, 1)
    update_op, should_apply = scale.update(gradients)
    assert update_op is None
    assert (should_apply.dtype, should_apply.shape) == (bool, ())
    assert bool(should_apply) == finite
    assert float(scale()) == (8.0 if finite else 2.0)


# ── FixedLossScale ───────────────────────────────────────────────────────────────────────────


def test_a_fixed_scale_never_changes():
    """A fixed scale returns one number for its whole life, whatever the gradients are."""
    assert scales_after(FixedLossScale(5.0), [1.0, INF, NAN]) == [5.0] * 3


@row(5, "FixedLossScale.update")
def test_a_fixed_scale_always_says_to_apply():
    """`update` of a fixed scale returns `(None, True)`, because it cannot adjust itself."""
    assert FixedLossScale(8).update([INF]) == (None, True)
    assert FixedLossScale(8).update({}) == (None, True)


@pytest.mark.parametrize("value", [7, 7.0, np.int64(7), np.float32(7)])
@row(5, "FixedLossScale(loss_scale_value)")
def test_the_value_is_a_number(value):
    """`loss_scale_value` is a float or another real number, and is stored as a float."""
    scale = FixedLossScale(loss_scale_value=value)
    assert scale.get_config() == {"loss_scale_value": 7.0}
    assert type(scale.get_config()["loss_scale_value"]) is float


def test_a_fixed_scale_works_with_an_optimizer_of_this_library():
    """`gs.optimizers.LossScaleOptimizer` takes a live fixed scale as its rule."""
    opt, w = LossScaleOptimizer(SGD(0.5), loss_scale=FixedLossScale(7)), Variable(3.0)
    assert float(opt.minimize(lambda: w * 2.0, [w])) == 6.0
    assert (float(w), float(opt.loss_scale)) == (2.0, 7.0)


@pytest.mark.parametrize("value", [0.5, 0, -8])
@row(5, "ValueError: loss_scale_value below 1")
def test_a_value_below_1_is_refused(value):
    """`loss_scale_value` below 1 is a ValueError."""
    with pytest.raises(ValueError, match="loss_scale_value"):
        FixedLossScale(value)


@pytest.mark.parametrize("value", [None, "8", True, [8.0]])
@row(5, "ValueError: loss_scale_value is no number")
def test_a_value_that_is_no_number_is_refused(value):
    """Anything but an int or a float is a ValueError. Difference: a bool also is."""
    with pytest.raises(ValueError, match="loss_scale_value"):
        FixedLossScale(value)


@pytest.mark.parametrize("value", [INF, NAN])
@row(5, "FixedLossScale(loss_scale_value)")
def test_a_value_that_is_not_finite_is_refused(value):
    """Difference: a fixed scale of inf or NaN is a ValueError. TensorFlow accepts it."""
    with pytest.raises(ValueError, match="loss_scale_value"):
        FixedLossScale(value)


@row(5, "FixedLossScale.get_config", "FixedLossScale.from_config")
def test_a_fixed_scale_is_made_from_its_configuration():
    """`get_config` names the value, and `from_config` makes an equal scale."""
    config = FixedLossScale(8).get_config()
    assert config == {"loss_scale_value": 8.0}
    assert float(FixedLossScale.from_config(config)()) == 8.0


# ── DynamicLossScale: summary ────────────────────────────────────────────────────────────────


def test_the_scale_starts_at_its_initial_value():
    """Before the first update the scale is `initial_loss_scale`."""
    assert float(DynamicLossScale(initial_loss_scale=64)()) == 64.0


def test_the_scale_rises_after_finite_steps():
    """After every `increment_period` finite steps the scale is multiplied."""
    assert scales_after(DynamicLossScale(1, 2), [1.0] * 6) == [1, 2, 2, 4, 4, 8]


def test_a_non_finite_gradient_lowers_the_scale():
    """A NaN or an inf divides the scale by the same factor; gradients are not to be applied."""
    scale = DynamicLossScale(64.0, multiplier=4)
    for gradient, after in ((NAN, 16.0), (INF, 4.0), (-INF, 1.0)):
        _, should_apply = scale.update([1.0, gradient])
        assert (bool(should_apply), float(scale())) == (False, after)


def test_an_optimizer_does_not_apply_the_gradients_of_such_a_step():
    """A step with a non-finite gradient moves no weight, and the live scale itself falls."""
    w, scale = Variable(1.0), DynamicLossScale(16.0)
    scale.update([INF])
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), scale)
    assert float(opt.loss_scale) == 8.0
    opt.apply_gradients([(INF, w)])
    assert (float(w), float(scale()), float(opt.loss_scale)) == (1.0, 4.0, 4.0)


def test_the_scale_stays_at_least_1():
    """An overflow never lowers the scale below 1."""
    assert scales_after(DynamicLossScale(4), [INF] * 4) == [2.0, 1.0, 1.0, 1.0]
    assert scales_after(DynamicLossScale(3), [INF] * 2) == [1.5, 1.0]


def test_the_scale_stays_finite():
    """A growth that float32 cannot hold is left out, so the scale is never infinite."""
    scale = DynamicLossScale(2.0**126, 1)
    assert scales_after(scale, [1.0, 1.0, NAN]) == [2.0**126, 2.0**126, 2.0**125]


# ── DynamicLossScale: arguments ──────────────────────────────────────────────────────────────


@row(5, "DynamicLossScale(initial_loss_scale)")
def test_the_default_initial_scale_is_2_to_the_15():
    """`initial_loss_scale` is `2**15` by default, about half of the largest float16 value."""
    assert DynamicLossScale().initial_loss_scale == 2.0**15
    assert float(jnp.finfo(jnp.float16).max) / 2 == pytest.approx(2.0**15, rel=0.001)
    assert float(DynamicLossScale(2.0**126)()) == 2.0**126


def test_a_high_scale_falls_faster_than_a_low_one_rises():
    """From far above and far below, the same scale is reached much sooner from above."""
    above, below = DynamicLossScale(2.0**20, 10), DynamicLossScale(1.0, 10)
    assert scales_after(above, [INF] * 10)[-1] == 2.0**10
    assert scales_after(below, [1.0] * 10)[-1] == 2.0


@row(5, "DynamicLossScale(increment_period)")
@pytest.mark.parametrize(
    ("period", "scales"), [(3, [8, 8, 16, 16]), (1, [16, 32, 64, 128]), (0, [16, 32, 64, 128])]
)
def test_the_period_counts_finite_steps(period, scales):
    """The scale rises in each `increment_period`-th finite step; 0 means 1, as in TensorFlow."""
    assert scales_after(DynamicLossScale(8, increment_period=period), [1.0] * 4) == scales
    assert DynamicLossScale(8, period).increment_period == max(period, 1)
    with pytest.raises(ValueError, match=r"an integer .*for increment_period; got 2.5"):
        DynamicLossScale(8, 2.5)


def test_a_non_finite_gradient_resets_the_count():
    """The count of consecutive finite steps begins again at 0 after a non-finite gradient."""
    scales = scales_after(DynamicLossScale(2, 3), [1.0, 1.0, NAN, 1.0, 1.0, 1.0])
    assert scales == [2, 2, 1, 1, 1, 2]


@row(5, "DynamicLossScale(multiplier)")
@pytest.mark.parametrize("multiplier", [1.5, 2, 4, 1, 0.5])
def test_the_multiplier_raises_and_lowers(multiplier):
    """The scale is multiplied by `multiplier` when it rises, and divided when it falls."""
    up, down = scales_after(DynamicLossScale(64, 1, multiplier=multiplier), [1.0, INF])
    assert (up, down) == (64.0 * multiplier, 64.0)


def test_the_defaults_of_period_and_multiplier():
    """By default the period is 2000 steps and the multiplier is 2."""
    scale = DynamicLossScale()
    assert (scale.increment_period, scale.multiplier) == (2000, 2.0)


@pytest.mark.parametrize("name", ARGUMENTS)
@row(5, "TypeError: an argument is None")
@row(5, "ValueError: an argument of DynamicLossScale is text")
def test_an_argument_that_is_no_number_is_refused(name):
    """None is a TypeError. Difference: so is text, also "16", which TensorFlow converts."""
    for wrong in (None, "16", "high"):
        with pytest.raises(TypeError, match=name):
            DynamicLossScale(**{name: wrong})


@row(5, "no error: DynamicLossScale out of range")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("initial_loss_scale", wrong) for wrong in (0, -8.0, INF, NAN, 2.0**127)),
        *(("increment_period", wrong) for wrong in (-1, 1.5, INF)),
        *(("multiplier", wrong) for wrong in (0, -2.0, INF, NAN)),
    ],
)
def test_an_argument_out_of_range_is_refused(name, wrong):
    """Difference: an argument with which no step could succeed is a ValueError."""
    with pytest.raises(ValueError, match=name):
        DynamicLossScale(**{name: wrong})


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: FixedLossScale(0), ValueError, ">= 1 .*for loss_scale_value; got 0"),
        (lambda: FixedLossScale(0.5), ValueError, ">= 1 .*for loss_scale_value; got 0.5"),
        (lambda: DynamicLossScale(8, None), TypeError, "an integer .*increment_period; got None"),
        (lambda: DynamicLossScale(8, 2.5), ValueError, "an integer .*increment_period; got 2.5"),
        (lambda: DynamicLossScale().update(["x"]), TypeError, "numbers in grads; got 'x'"),
    ],
)
def test_what_is_expected_is_said_at_once(call, error, match):
    """The first error names the whole condition of an argument."""
    with pytest.raises(error, match=match):
        call()


# ── DynamicLossScale: attributes ─────────────────────────────────────────────────────────────


def test_the_arguments_are_attributes():
    """`initial_loss_scale`, `increment_period` and `multiplier` stay what was passed."""
    scale = DynamicLossScale(8, 3, 4)
    scale.update([INF])
    assert [getattr(scale, name) for name in ARGUMENTS] == [8.0, 3, 4.0]
    assert [type(getattr(scale, name)) for name in ARGUMENTS] == [float, int, float]


@pytest.mark.parametrize("name", ARGUMENTS)
@row(5, "AttributeError: multiplier is set")
def test_the_attributes_cannot_be_set(name):
    """The three attributes are read-only."""
    with pytest.raises(AttributeError):
        setattr(DynamicLossScale(8.0, 3, 4.0), name, 2)


def test_the_state_is_two_variables_that_are_not_trained():
    """The state is the current scale and the number of finite steps, both not trainable."""
    scale = DynamicLossScale(8.0, 3)
    scale.update([1.0])
    assert [(v.name, float(v), v.trainable) for v in scale.variables] == [
        ("current_loss_scale", 8.0, False),
        ("good_steps", 1.0, False),
    ]


# ── DynamicLossScale: methods ────────────────────────────────────────────────────────────────


@row(5, "DynamicLossScale.get_config", "DynamicLossScale.from_config")
def test_a_dynamic_scale_is_made_from_its_configuration():
    """`get_config` names the three arguments; `from_config` starts again at the first scale."""
    scale = DynamicLossScale(8, 3, 4)
    scale.update([INF])
    config = scale.get_config()
    assert config == {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 4.0}
    again = DynamicLossScale.from_config(config)
    assert (float(again()), again.get_config()) == (8.0, config)


@row(5, "InvalidArgumentError: gradients of an integer dtype")
@pytest.mark.parametrize("gradient", [1, jnp.ones(2, jnp.int32), 1j])
def test_gradients_are_floating(gradient):
    """Gradients of an integer or complex dtype are a TypeError, and the scale stays."""
    scale = DynamicLossScale(8.0, 1)
    with pytest.raises(TypeError, match="floating"):
        scale.update([gradient])
    assert float(scale()) == 8.0


@row(5, "repr")
def test_the_text_shows_arguments_and_state():
    """`repr` shows the value of a fixed scale, and arguments and state of a dynamic one."""
    assert repr(FixedLossScale(8)) == "FixedLossScale(8.0)"
    scale = DynamicLossScale(8.0, 3, 4.0)
    scale.update([1.0])
    assert repr(scale) == (
        "DynamicLossScale(current_loss_scale=8.0, num_good_steps=1, "
        "initial_loss_scale=8.0, increment_period=3, multiplier=4.0)"
    )


@row(5, "DynamicLossScale.update")
def test_a_live_scale_rises_to_the_largest_scale():
    """Difference: a rise ends at `2**126`, whatever the multiplier."""
    for first, multiplier in ((2.0**125, 8.0), (2.0**125, 2.0), (2.0**126, 2.0)):
        scale = experimental.DynamicLossScale(first, 1, multiplier)
        for _ in range(2):
            scale.update([1.0])
            assert float(scale()) == 2.0**126

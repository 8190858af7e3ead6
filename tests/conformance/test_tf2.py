"""What the loss-scale classes of TensorFlow 2.15 and Keras 2.15 promise, on those of `compat`."""

import copy
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.compat import experimental, tf2, v1

INF, NAN = float("inf"), float("nan")


def new(inner, scale=2.0**15, period=2000):
    return tf2.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=period)


def new_fixed(inner, scale):
    return tf2.LossScaleOptimizer(inner, dynamic=False, initial_scale=scale)


def old(inner, scale=2.0**15, period=2000):
    return experimental.LossScaleOptimizer(inner, experimental.DynamicLossScale(scale, period))


def old_fixed(inner, scale):
    return experimental.LossScaleOptimizer(inner, scale)


def apply(opt, gradient, variable):
    """A step of a loop that scales the loss and unscales its gradient, which is `gradient`."""
    scaled = opt.get_scaled_loss(jnp.float32(1.0)) * jnp.asarray(gradient, jnp.float32)
    opt.apply_gradients(zip(opt.get_unscaled_gradients([scaled]), [variable], strict=True))


# Dynamic and fixed scales: tensorflow/python/training/experimental/loss_scale_test.


@pytest.mark.parametrize(
    ("start", "period", "multiplier", "steps", "scales"),
    [
        (1, 2, 2, "yyyyyy", [1, 2, 2, 4, 4, 8]),
        (1, 2, 2, "nnn", [1, 1, 1]),  # never below 1
        (8, 2, 2, "nnn", [4, 2, 1]),
        (1, 2, 2, "yynyy", [1, 2, 1, 1, 2]),
        (2, 3, 2, "yynyyy", [2, 2, 1, 1, 1, 2]),  # an overflow begins the count again
        (1, 1, 2, "yyyny", [2, 4, 8, 4, 8]),
        (1, 2, 3, "yyyynn", [1, 3, 3, 9, 3, 1]),
        (3, 2, 2, "nnyy", [1.5, 1, 1, 2]),
        (100, 2, 1.5, "yyn", [100, 150, 100]),
        (2.0**126, 1, 2, "yyn", [2.0**126, 2.0**126, 2.0**125]),  # does not become infinite
    ],
)
def test_dynamic_loss_scale(start, period, multiplier, steps, scales):
    """It is multiplied after so many finite steps in a row, and divided by every other step."""
    scale = experimental.DynamicLossScale(start, period, multiplier)
    assert float(scale()) == start
    for step, expected in zip(steps, scales, strict=True):
        gradient = np.float32([1.0, 2.0]) if step == "y" else np.float32([1.0, NAN])
        _, should_apply = scale.update([gradient])
        assert bool(should_apply) == (step == "y")
        assert float(scale()) == pytest.approx(expected, rel=1e-6)
        assert scale().dtype == np.float32


def test_loss_scale_takes_nested_gradients():
    """Gradients may be nested and None; one element anywhere decides for all."""
    scale = experimental.DynamicLossScale(4.0, 1)
    good, bad = np.float32([1.0]), np.float16([INF, 1.0])
    for grads, finite in (
        ([], True),
        ([None], True),
        ({"a": good, "b": [good, (None, good)]}, True),
        ({"a": good, "b": [good, (None, bad)]}, False),
        ([good, -np.float32(INF)], False),
    ):
        before = float(scale())
        _, should_apply = scale.update(grads)
        assert bool(should_apply) == finite
        assert float(scale()) == (before * 2 if finite else before / 2)


def test_fixed_loss_scale():
    """It stays, and always says to apply."""
    scale = experimental.FixedLossScale(5.0)
    assert (float(scale()), str(scale)) == (5.0, "FixedLossScale(5.0)")
    for gradient in (1.0, INF, NAN):
        assert scale.update([gradient])[1]
    assert float(scale()) == 5.0
    with pytest.raises(ValueError, match="loss_scale_value >= 1"):
        experimental.FixedLossScale(0.5)


def test_loss_scales_are_serialized():
    """A configuration names every argument; what is made of it is at its start."""
    fixed = experimental.FixedLossScale(7)
    dynamic = experimental.DynamicLossScale(8.0, 3, 4.0)
    dynamic.update([1.0])
    dynamic.update([INF])
    config = {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 4.0}
    assert fixed.get_config() == {"loss_scale_value": 7.0}
    assert dynamic.get_config() == config
    assert (dynamic.initial_loss_scale, dynamic.increment_period, dynamic.multiplier) == (8, 3, 4)
    assert float(experimental.DynamicLossScale.from_config(config)()) == 8.0
    assert float(experimental.FixedLossScale.from_config(fixed.get_config())()) == 7.0
    assert float(pickle.loads(pickle.dumps(dynamic))()) == 2.0  # a copy keeps the live state


# The optimizers: keras/mixed_precision/loss_scale_optimizer_test.


@pytest.mark.parametrize("make", [new_fixed, old_fixed])
def test_fixed_scale_with_minimize(make):
    """The loss is differentiated times the scale, and the step is that of the true gradient."""
    seen, var = [], gs.Variable(5.0)
    opt = make(gs.SGD(2.0, jit_compile=False), 10.0)
    assert (opt.dynamic, opt.dynamic_counter, opt.dynamic_growth_steps) == (False, None, None)
    scaled = opt.get_scaled_loss(lambda: seen.append(1) or var * 1.0)
    assert (float(scaled()), len(seen)) == (50.0, 1)
    assert float(opt.minimize(lambda: var * 1.0, [var])) == 5.0
    assert (float(var), float(opt.loss_scale), opt.initial_scale) == (3.0, 10.0, 10.0)


@pytest.mark.parametrize("make", [new, old])
def test_dynamic_scale_with_minimize(make):
    """Each finite step moves the weight by the true gradient, whatever the scale has become."""
    var, opt = gs.Variable(5.0), make(gs.SGD(2.0), 2.0, 1)
    for weight, scale in ((3.0, 4.0), (1.0, 8.0), (-1.0, 16.0)):
        opt.minimize(lambda: var * 1.0, [var])
        assert (float(var), float(opt.loss_scale)) == (weight, scale)
    opt.minimize(lambda: var * INF, [var])
    assert (float(var), float(opt.loss_scale), int(opt.iterations)) == (-1.0, 8.0, 4)


@pytest.mark.parametrize("make", [new, old])
def test_dynamic_update(make):
    """A finite step is applied, and raises the scale; an inf or NaN is not, and halves it."""
    var, opt = gs.Variable(1.0), make(gs.SGD(1.0), 4.0, 2)
    counts, scales, weights = [], [], []
    for gradient in (1.0, 1.0, INF, 1.0, NAN, 1.0, 1.0):
        apply(opt, gradient, var)
        counts.append(int(opt.dynamic_counter))
        scales.append(float(opt.loss_scale))
        weights.append(float(var))
    assert counts == [1, 0, 0, 1, 0, 1, 0]
    assert scales == [4, 8, 4, 4, 2, 2, 4]
    assert weights == [0, -1, -1, -2, -2, -3, -4]
    assert int(opt.iterations) == 7  # skipped steps count


def test_a_step_with_one_bad_gradient_of_several_is_skipped():
    """No variable moves if any of the gradients is not finite, and a None is left out."""
    first, second, third = (gs.Variable(1.0) for _ in range(3))
    opt = new(gs.SGD(1.0), 4.0, 1)
    opt.get_scaled_loss(1.0)
    opt.get_unscaled_gradients([1.0])
    opt.apply_gradients([(1.0, first), (NAN, second)])
    assert (float(first), float(second), float(opt.loss_scale)) == (1.0, 1.0, 2.0)
    opt = new(gs.SGD(1.0), 4.0, 1)
    opt.get_scaled_loss(1.0)
    opt.get_unscaled_gradients([1.0])
    with pytest.warns(UserWarning, match="No gradient for"):
        opt.apply_gradients([(1.0, first), (None, third)])
    assert (float(first), float(third), float(opt.loss_scale)) == (0.0, 1.0, 8.0)
    with pytest.raises(ValueError, match=r"Expected .*None"):
        opt.apply_gradients([(None, first)])


def test_scaled_losses():
    """A number, an array and a callable are scaled. Difference: half precision in float32."""
    opt = new(gs.SGD(), 2.0)
    for dtype in ("float16", "float32"):
        loss = jnp.asarray(5.0, dtype)
        assert float(opt.get_scaled_loss(loss)) == 10.0
        assert float(opt.get_scaled_loss(lambda loss=loss: loss)()) == 10.0
        assert opt.get_scaled_loss(loss).dtype == np.float32
    assert float(opt.get_scaled_loss(5.0)) == 10.0


@pytest.mark.parametrize("make", [new, new_fixed, old, old_fixed])
def test_unscaled_gradients(make):
    """A list comes back, of any iterable, with None in its place."""
    opt = make(gs.SGD(), 2.0)
    grads = (np.float32([4.0, 8.0]), None, np.float32(1.0))
    for given in (grads, list(grads), iter(grads)):
        back = opt.get_unscaled_gradients(given)
        assert isinstance(back, list)
        assert (back[0].tolist(), back[1], float(back[2])) == ([2.0, 4.0], None, 0.5)


@pytest.mark.parametrize("make", [new, old])
def test_float16_loss(make):
    """A float16 loss whose scaled value float16 could not hold still gives the true step."""
    var, opt = gs.Variable(jnp.float16(5.0)), make(gs.SGD(2.0), 2.0**15, 1)
    opt.minimize(lambda: var * jnp.float16(1.0), [var])
    assert (float(var), float(opt.loss_scale)) == (3.0, 2.0**16)


@pytest.mark.parametrize("make", [new, old])
def test_slots(make):
    """Momentum goes on over the steps, and a skipped one leaves it."""
    var, opt = gs.Variable([1.0, 2.0]), make(gs.SGD(1.0, momentum=1.0), 2.0, 1)
    for expected, factor in (([0, 1], 1.0), ([0, 1], INF), ([-2, -1], 1.0)):
        opt.minimize(lambda factor=factor: (var * factor).sum(), [var])
        assert var.numpy().tolist() == expected
    assert int(opt.iterations) == 3
    assert [v.numpy().tolist() for v in opt.inner_optimizer.variables if v.shape] == [[-2, -2]]


def test_iterations_are_those_of_the_inner_optimizer():
    """They are read and set through the wrapper, before it is built, and both count each step."""
    inner, var = gs.SGD(1.0), gs.Variable(1.0)
    opt = new(inner, 2.0, 1)
    opt.iterations = 7
    assert int(opt.iterations) == int(inner.iterations) == 7
    for gradient in (1.0, NAN):
        apply(opt, gradient, var)
    assert int(opt.iterations) == int(inner.iterations) == 9
    with pytest.raises(RuntimeError, match="iterations"):
        opt.iterations = 2


@pytest.mark.parametrize("make", [new, old])
def test_learning_rate_and_unknown_attributes(make):
    """The rate is that of the inner optimizer, by both names; what nobody has is no attribute."""
    inner = gs.Adam(1.0, beta_1=0.5)
    opt = make(inner)
    for name, value in (("learning_rate", 0.5), ("lr", 0.25)):
        setattr(opt, name, value)
        assert [float(x) for x in (opt.learning_rate, opt.lr, inner.learning_rate)] == [value] * 3
    with pytest.raises(AttributeError, match="unknown"):
        _ = opt.unknown
    assert {"learning_rate", "lr", "minimize", "loss_scale", "get_scaled_loss"} <= set(dir(opt))
    with pytest.raises(AttributeError):
        opt.loss_scale = 2.0


def test_the_inner_schedule_and_clipping_are_applied():
    """A schedule counts the steps, and clipping sees the true gradient."""
    var = gs.Variable(5.0)
    schedule = gs.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
    opt = new(gs.SGD(schedule, clipvalue=2.0), 1024.0)
    for gradient, weight in ((1.0, 4.0), (1.0, 3.0), (8.0, 2.0)):
        apply(opt, gradient, var)
        assert float(var) == weight


def test_defaults():
    """A dynamic scale begins at 2^15 and grows after 2000 steps; numbers are floats and ints."""
    opt = tf2.LossScaleOptimizer(gs.SGD())
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (True, 2.0**15, 2000)
    assert (float(opt.loss_scale), int(opt.dynamic_counter)) == (2.0**15, 0)
    opt = tf2.LossScaleOptimizer(gs.SGD(), initial_scale=4, dynamic_growth_steps=3)
    assert (type(opt.initial_scale), type(opt.dynamic_growth_steps)) == (float, int)
    assert isinstance(opt.inner_optimizer, gs.SGD)


def test_invalid_arguments():
    """Arguments that contradict each other are a ValueError, those of another kind a TypeError."""
    for arguments, error in (
        ({"dynamic": "dynamic"}, TypeError),
        ({"dynamic": experimental.DynamicLossScale()}, TypeError),
        ({"dynamic": False}, ValueError),
        ({"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}, ValueError),
    ):
        with pytest.raises(error, match="Expected"):
            tf2.LossScaleOptimizer(gs.SGD(), **arguments)
    for wrong in ("sgd", None, gs.Adam, new(gs.SGD()), old(gs.SGD())):
        with pytest.raises(TypeError, match="Expected"):
            tf2.LossScaleOptimizer(wrong)
    inner = gs.SGD()
    first = new(inner)
    with pytest.raises(ValueError, match=f"already wrapped by {first.name!r}"):
        new(inner)
    with pytest.raises(TypeError):
        tf2.LossScaleOptimizer(gs.SGD(), clipnorm=1.0)


def test_loss_scale_of_the_experimental_class():
    """A number, "dynamic" or a scale with a multiplier of 2; of a live scale the first value."""
    make = experimental.LossScaleOptimizer
    live = experimental.DynamicLossScale(16.0, 3)
    live.update([NAN])
    assert float(make(gs.SGD(), live).loss_scale) == 16.0
    assert float(live()) == 8.0
    opt = make(gs.SGD(), "dynamic")
    assert (float(opt.loss_scale), opt.dynamic_growth_steps) == (2.0**15, 2000)
    for scale in (4, 4.0, experimental.FixedLossScale(4)):
        assert (make(gs.SGD(), scale).initial_scale, make(gs.SGD(), scale).dynamic) == (4.0, False)
    for wrong in (experimental.DynamicLossScale(multiplier=4), "other", None):
        with pytest.raises(ValueError, match="Expected"):
            make(gs.SGD(), wrong)
    with pytest.raises(TypeError):
        make(gs.SGD())


@pytest.mark.parametrize("make", [new, new_fixed, old, old_fixed])
def test_configuration(make):
    """The configuration has exactly four entries, and makes an equal optimizer."""
    opt = make(gs.SGD(2.0, momentum=0.5), 2.0, *([5] * (make in (new, old))))
    config = opt.get_config()
    assert set(config) == {"inner_optimizer", "dynamic", "initial_scale", "dynamic_growth_steps"}
    kept = copy.deepcopy(config)
    again = type(opt).from_config(config)
    assert (config, type(again)) == (kept, type(opt))
    assert again.get_config() == config
    assert float(again.inner_optimizer.momentum) == 0.5
    assert (float(again.lr), float(again.loss_scale)) == (2.0, 2.0)
    assert again.dynamic_growth_steps == (5 if opt.dynamic else None)


def test_configuration_of_tensorflow_2_3():
    """The older form with `optimizer` and `loss_scale` is read, dynamic and fixed."""
    inner = {"class_name": "SGD", "config": {"learning_rate": 0.5, "momentum": 0.25}}
    settings = {"initial_loss_scale": 4.0, "increment_period": 3, "multiplier": 2.0}
    for scale, expected in (
        ({"class_name": "DynamicLossScale", "config": settings}, (True, 4.0, 3)),
        ({"class_name": "FixedLossScale", "config": {"loss_scale_value": 9}}, (False, 9.0, None)),
    ):
        opt = tf2.LossScaleOptimizer.from_config({"optimizer": inner, "loss_scale": scale})
        assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == expected
        assert float(opt.inner_optimizer.momentum) == 0.25
    for wrong in (
        {"class_name": "DynamicLossScale", "config": settings | {"multiplier": 4.0}},
        {"class_name": "MyLossScale", "config": {}},
    ):
        with pytest.raises(ValueError, match="Expected"):
            tf2.LossScaleOptimizer.from_config({"optimizer": inner, "loss_scale": wrong})


def test_custom_optimizers_are_serialized():
    """A class of the user's own comes back where it is among the custom objects."""

    class Mine(gs.SGD):
        """SGD by another name."""

    opt = new(Mine(0.5), 4.0)
    again = tf2.LossScaleOptimizer.from_config(opt.get_config(), {"Mine": Mine})
    assert (type(again.inner_optimizer), float(again.loss_scale)) == (Mine, 4.0)


def test_checkpoint():
    """A saved state brings scale, count, slots and steps back into another optimizer."""

    def trained(gradients):
        var, opt = gs.Variable(1.0), new(gs.SGD(1.0, momentum=0.5), 4.0, 3)
        for gradient in gradients:
            apply(opt, gradient, var)
        return var, opt

    var, opt = trained([1.0, INF, 1.0, 1.0])
    store = {}
    opt.save_own_variables(store)
    other, copied = trained([1.0])
    copied.load_own_variables(store)
    other.assign(var.value())
    assert (float(copied.loss_scale), int(copied.dynamic_counter)) == (2.0, 2)
    assert int(copied.iterations) == 4
    for o, v in ((opt, var), (copied, other)):
        apply(o, 1.0, v)
    assert float(other) == float(var)
    assert float(copied.loss_scale) == float(opt.loss_scale) == 4.0


def test_forgotten_scaling_is_noticed_once():
    """A loop that calls neither of the two methods gets one warning, and its step."""
    var, opt = gs.Variable(1.0), new(gs.SGD(1.0))
    with pytest.warns(UserWarning, match="get_scaled_loss and get_unscaled_gradients"):
        opt.apply_gradients([(1.0, var)])
    opt.apply_gradients([(1.0, var)])
    assert float(var) == -1.0
    opt = new(gs.SGD(1.0))
    opt.get_scaled_loss(1.0)
    with pytest.warns(UserWarning, match="Expected get_unscaled_gradients to be called"):
        opt.apply_gradients([(1.0, var)])


# Version 1: tensorflow/python/training/experimental/loss_scale_optimizer_test.


@pytest.mark.parametrize("scale", [10.0, "dynamic", experimental.DynamicLossScale(2.0, 1)])
def test_v1_minimize(scale):
    """The gradient is the true one, and the inner optimizer takes the step."""
    var, step = gs.Variable(5.0), gs.Variable(0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(2.0), scale)
    ((gradient, _),) = opt.compute_gradients(lambda: var * 3.0, [var])
    assert float(gradient) == 3.0
    opt.minimize(lambda: var * 1.0, step, [var])
    assert (float(var), int(step)) == (3.0, 1)


def test_v1_dynamic_update():
    """A bad step halves the scale, moves no weight and does not count in `global_step`."""
    var, step = gs.Variable(1.0), gs.Variable(0)
    scale = experimental.DynamicLossScale(4.0, 2)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(1.0), scale)
    states = []
    for gradient in (1.0, 1.0, INF, NAN, 1.0):
        opt.apply_gradients([(gradient, var)], step)
        states.append((float(var), float(opt.loss_scale), int(step)))
    assert states == [(0, 4, 1), (-1, 8, 2), (-1, 4, 2), (-1, 2, 2), (-2, 2, 3)]
    assert float(scale()) == 2.0  # a live scale is shared


def test_v1_slots_and_nesting():
    """Slots are kept over skipped steps; what is no v1 optimizer is a ValueError.

    Difference: so is a wrapper, which TensorFlow wraps again.
    """
    var = gs.Variable([1.0, 2.0])
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.MomentumOptimizer(1.0, 1.0), 2.0)
    for expected, factor in (([0, 1], 1.0), ([0, 1], INF), ([-2, -1], 1.0)):
        opt.minimize(lambda factor=factor: (var * factor).sum(), var_list=[var])
        assert var.numpy().tolist() == expected
    for wrong in (gs.SGD(), None, "sgd", opt):
        with pytest.raises(ValueError, match="Expected"):
            v1.MixedPrecisionLossScaleOptimizer(wrong, "dynamic")

"""Numbers of a rule and options that are set on an optimizer: checked, and obeyed by every step."""

import functools

import jax.numpy as jnp
import pytest

import gainstage as gs
from gainstage.compat import dtensor, tf2
from gainstage.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    LossScaleOptimizer,
    RMSprop,
    Variable,
    schedules,
)

# Of each rule, its settings: a value that is taken, and one that is not.
SETTINGS = [
    (SGD, "momentum", 0.5, 5.0),
    (SGD, "nesterov", True, 1),
    (Adam, "beta_1", 0.5, 1.0),
    (Adam, "beta_2", 0.5, -0.1),
    (Adam, "epsilon", 1e-3, "small"),
    (Adam, "amsgrad", True, "yes"),
    (AdamW, "beta_1", 0.5, None),
    (RMSprop, "rho", 0.5, 1.5),
    (RMSprop, "momentum", 0.5, -1.0),
    (RMSprop, "epsilon", 1e-3, -1e-3),
    (RMSprop, "centered", True, 0),
    (Adagrad, "initial_accumulator_value", 0.5, -0.5),
    (Adagrad, "epsilon", 1e-3, True),
    (Adadelta, "rho", 0.5, 2),
    (Adadelta, "epsilon", 1e-3, float("nan")),
    (SGD, "name", "mine", ""),
    (SGD, "jit_compile", False, "no"),
    (SGD, "clipnorm", 1.0, -1.0),
    (dtensor.SGD, "amsgrad", False, True),
]
IDS = [f"{cls.__name__}.{name}" for cls, name, *_ in SETTINGS]


@pytest.mark.parametrize(("cls", "name", "good", "bad"), SETTINGS, ids=IDS)
def test_a_setting_is_checked_where_it_is_set(cls, name, good, bad):
    """What the constructor refuses is refused later too, with the same error, and not set."""
    with pytest.raises((TypeError, ValueError)) as first:
        cls(**{name: bad})
    opt = cls()
    setattr(opt, name, good)
    with pytest.raises(first.type) as later:
        setattr(opt, name, bad)
    assert str(later.value) == str(first.value)
    assert getattr(opt, name) == good
    assert opt.get_config().get(name, good) == good


NEED_STATE = [
    (SGD, "momentum", 0.5),
    (RMSprop, "momentum", 0.5),
    (RMSprop, "centered", True),
    (Adam, "amsgrad", True),
    (Adagrad, "initial_accumulator_value", 0.5),
    (Adagrad, "initial_accumulator_value", 0.0),
]


@pytest.mark.parametrize(("cls", "name", "value"), NEED_STATE)
def test_a_setting_that_needs_state_is_set_before_build(cls, name, value):
    """After `build` the error says so, and the next step is as before; before, it works."""
    w, v = Variable(1.0), Variable(1.0)
    opt, twin = cls(0.1), cls(0.1)
    for each, variable in ((opt, w), (twin, v)):
        each.apply([1.0], [variable])
    with pytest.raises(ValueError, match=f"{name} to be set before '.*' is built"):
        setattr(opt, name, value)
    for each in (opt, twin):
        each.apply([1.0])
    assert float(w) == float(v)
    late, early = cls(0.1), cls(0.1, **{name: value})
    setattr(late, name, value)
    weights = [Variable(1.0), Variable(1.0)]
    for each, variable in zip((late, early), weights, strict=True):
        each.apply([1.0], [variable])
        each.apply([2.0])
    assert float(weights[0]) == float(weights[1])


def test_a_setting_may_be_changed_to_one_that_needs_less_state():
    """Momentum can be lowered and turned off after `build`; its slots stay."""
    w, opt = Variable(0.0), SGD(1.0, momentum=0.5)
    opt.apply([1.0], [w])
    opt.momentum = 0.0
    opt.apply([1.0])
    assert float(w) == -2.0
    opt.momentum = 0
    assert len(opt.momentums) == 1


def compiled(opt, weight, **options):
    return gs.optimizers.jit(
        lambda: opt.minimize(lambda: weight * 4.0, [weight]),
        state=([weight], opt.variables),
        **options,
    )


def change_clip(opt):
    opt.clipvalue = 1.0


def change_decay(opt):
    opt.weight_decay = 0.5


def change_schedule(opt):
    opt.learning_rate = schedules.ExponentialDecay(0.25, 1, 0.5)


def change_inner(opt):
    getattr(opt, "inner_optimizer", opt).nesterov = True


CHANGES = [change_clip, change_decay, change_schedule, change_inner]
MAKE = {
    "plain": functools.partial(SGD, 0.5, momentum=0.5),
    "scaled": lambda: LossScaleOptimizer(SGD(0.5, momentum=0.5)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_compiled_step_obeys_what_is_changed_later(make, change):
    """After a change, a step of `gs.optimizers.jit` gives what an eager step gives."""
    weights = [Variable(3.0), Variable(3.0)]
    eager, opt = make(), make()
    for each, weight in zip((eager, opt), weights, strict=True):
        each.build([weight])
    step = compiled(opt, weights[1], donate=True)
    unchanged = []
    for _ in range(2):
        eager.minimize(lambda: weights[0] * 4.0, [weights[0]])
        step()
        assert float(weights[1]) == float(weights[0])
    unchanged = float(weights[0])
    for each in (eager, opt):
        change(each)
    eager.minimize(lambda: weights[0] * 4.0, [weights[0]])
    step()
    assert float(weights[1]) == pytest.approx(float(weights[0]), rel=1e-6)
    assert float(weights[1]) != unchanged


def test_a_compiled_step_is_compiled_again_only_after_a_change():
    """A new learning rate needs no compilation, a changed option one, and the next step none."""
    traces = []

    class Counting(SGD):
        def update_step(self, gradient, variable, learning_rate):
            traces.append(0)
            super().update_step(gradient, variable, learning_rate)

    weight, opt = Variable(3.0), Counting(0.5)
    opt.build([weight])
    step = compiled(opt, weight)
    counts = []
    for change in (None, {"learning_rate": 0.25}, {"clipvalue": 1.0}, None, {"clipvalue": 2.0}):
        for name, value in (change or {}).items():
            setattr(opt, name, value)
        step()
        counts.append(len(traces))
    assert counts == [1, 1, 2, 2, 3]
    assert float(weight) == 3.0 - 0.5 * 4 - 0.25 * 4 - 0.25 - 0.25 - 0.25 * 2


def test_a_learning_rate_is_a_number_that_float32_holds():
    """The largest one is taken, a larger one is a ValueError."""
    largest = float(jnp.finfo(jnp.float32).max)
    assert float(SGD(largest).learning_rate) == largest
    with pytest.raises(ValueError, match=r"that float32 holds for learning_rate; got 3\.5e"):
        SGD(3.5e38)


def test_a_variable_as_learning_rate_is_read_in_each_step():
    """Two optimizers can share one rate; assigning it changes both, eagerly and compiled."""
    rate = Variable(0.5, name="rate")
    a, b = Variable(0.0), Variable(0.0)
    opts = SGD(rate), LossScaleOptimizer(SGD(rate))
    for opt, weight in zip(opts, (a, b), strict=True):
        opt.build([weight])
        assert opt.learning_rate is rate
        assert rate not in opt.variables
    step = gs.optimizers.jit(
        lambda: [opts[0].minimize(lambda: a * 1.0, [a]), opts[1].minimize(lambda: b * 1.0, [b])],
        state=([a, b], opts[0].variables, opts[1].variables, rate),
    )
    step()
    rate.assign(0.25)
    step()
    opts[0].learning_rate = 0.125
    assert float(rate) == 0.125
    for opt, weight in zip(opts, (a, b), strict=True):
        opt.minimize(lambda weight=weight: weight * 1.0, [weight])
    assert (float(a), float(b)) == (-0.875, -0.875)
    assert opts[0].get_config()["learning_rate"] == 0.125


def test_a_variable_as_learning_rate_must_be_in_the_state_and_a_floating_scalar():
    """A compiled step that would freeze the rate, and a rate of another kind, are errors."""
    rate, weight = Variable(0.5, name="rate"), Variable(0.0)
    opt = SGD(rate)
    opt.build([weight])
    with pytest.raises(ValueError, match="in its state; got 'rate'"):
        compiled(opt, weight)()
    for wrong in (Variable([0.5, 0.5]), Variable(1)):
        with pytest.raises(TypeError, match="Expected a floating scalar for learning_rate"):
            SGD(wrong)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lr", "learning_rate"),
        ("learning_rte", "learning_rate"),
        ("clip_norm", "clipnorm"),
        ("weight_dacay", "weight_decay"),
        ("ema_momentun", "ema_momentum"),
    ],
)
@pytest.mark.parametrize("make", [SGD, dtensor.SGD, lambda r: LossScaleOptimizer(SGD(r))])
def test_a_misspelled_setting_is_an_error_that_names_the_right_one(make, written, meant):
    """`opt.lr = 0.5` would otherwise make an attribute that nothing reads."""
    opt = make(0.1)
    with pytest.raises(AttributeError, match=f"no attribute '{written}'. Set `{meant}`"):
        setattr(opt, written, 0.5)
    assert not hasattr(opt, written)


def test_attributes_of_ones_own_may_be_set():
    """Only what looks like an argument is refused, and only of our own classes."""

    class Mine(SGD):
        pass

    mine, ours = Mine(0.1), SGD(0.1)
    mine.lr, ours.note = 0.5, "first run"
    assert (mine.lr, ours.note) == (0.5, "first run")


class Line(schedules.LearningRateSchedule):
    """A schedule that is not frozen, and counts its calls."""

    def __init__(self, rate):
        self.rate, self.calls = rate, 0

    def __call__(self, step):
        self.calls += 1
        return self.rate * (step + 1.0)


@pytest.mark.parametrize("wrap", [lambda opt: opt, LossScaleOptimizer, tf2.LossScaleOptimizer])
def test_a_schedule_that_is_changed_between_steps_is_obeyed(wrap):
    """As in TensorFlow and Keras, an eager step uses the attributes of a schedule that are set now,
    those that `learning_rate` tells; without a change nothing is compiled again."""
    schedule = Line(0.5)
    opt, w = wrap(SGD(schedule)), Variable(0.0)
    for _ in range(3):
        opt.minimize(lambda: -w, [w])
    assert (float(w), schedule.calls) == (0.5 + 1.0 + 1.5, 1)
    schedule.rate = 2.0
    assert float(getattr(opt, "inner_optimizer", opt).learning_rate) == 2.0 * 4
    opt.minimize(lambda: -w, [w])
    opt.minimize(lambda: -w, [w])
    assert (float(w), schedule.calls) == (3.0 + 8.0 + 10.0, 3)


def test_an_optimizer_that_gets_no_options_has_those_that_are_documented():
    """Steps are compiled, nothing decays, is clipped, averaged or accumulated, no copy is kept."""
    opt = SGD()
    off = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "ema_overwrite_frequency")
    off += ("loss_scale_factor", "gradient_accumulation_steps", "mesh")
    assert [getattr(opt, name) for name in off] == [None] * len(off)
    on = (opt.jit_compile, opt.use_ema, opt.master_weights, opt.ema_momentum)
    assert on == (True, False, False, 0.99)
    assert (opt.momentum, opt.nesterov) == (0.0, False)
    assert opt.get_config()["learning_rate"] == 0.01

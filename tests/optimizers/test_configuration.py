"""Every class can be described, made again, pickled and copied."""

import copy
import dataclasses
import gc
import inspect
import json
import pickle

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.compat import dtensor, experimental, tf2, v1
from gainstage.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    LossScaleOptimizer,
    RMSprop,
    Variable,
    from_optax,
)

from peers import fails, live

CORE = [SGD, Adam, gs.optimizers.AdamW, RMSprop, Adagrad, Adadelta]
MESH = [dtensor.SGD, dtensor.Adam, dtensor.AdamW, dtensor.RMSprop, dtensor.Adagrad]
# A value for each option that is not its default; what else a constructor takes is below.
OPTIONS = {
    "telemetry": True,
    "learning_rate": gs.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5),
    "weight_decay": 0.125,
    "clipnorm": 2.0,
    "clipvalue": 2.0,
    "global_clipnorm": 2.0,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3,
    "loss_scale_factor": 4.0,
    "gradient_accumulation_steps": 2,
    "name": "mine",
    "momentum": 0.5,
    "nesterov": True,
    "beta_1": 0.5,
    "beta_2": 0.5,
    "epsilon": 0.5,
    "amsgrad": True,
    "master_weights": True,
    "rho": 0.5,
    "centered": True,
    "initial_accumulator_value": 0.5,
    "gradients_clip_option": dtensor.GradientsClipOption(clipvalue=2.0),
    "ema_option": dtensor.EMAOption(True, 0.5, 2),
    "initial_scale": 2.0**9,
    "dynamic_growth_steps": 7,
    "loss_scale": gs.DynamicLossScale(hysteresis=2),
}
NOT_OPTIONAL = {
    "underflow_every",  # only with telemetry
    "jit_compile",
    "mesh",
    "shard_state_over",
    "inner_optimizer",
    "optimizer",
    "dynamic",
    "options",
}


def wrapped(**options):
    return LossScaleOptimizer(SGD(0.1), **options)


def wrapped_fixed(**options):
    return LossScaleOptimizer(SGD(0.1), 2.0, dynamic=False, **options)


def cases():
    for cls in [*CORE, *MESH, LossScaleOptimizer]:
        for name in inspect.signature(cls).parameters:
            only_false = cls is dtensor.SGD and name == "amsgrad"
            if name not in NOT_OPTIONAL and not only_false:
                yield pytest.param(cls, name, id=f"{cls.__module__}.{cls.__name__}-{name}")


@pytest.mark.parametrize(("cls", "name"), [*cases()])
def test_every_option_survives_a_round_trip(cls, name):
    """`from_config(get_config())` describes itself alike, and the option has kept its value."""
    make = wrapped if cls is LossScaleOptimizer else cls
    opt = make(**{name: OPTIONS[name]})
    config = opt.get_config()
    assert config != {**make().get_config(), "name": config["name"]} or name == "name"
    twin = cls.from_config(config)
    assert type(twin) is cls
    assert twin.get_config() == config


class OfAUser(SGD):
    pass


STAIRS = gs.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True)


@pytest.mark.parametrize(
    "make",
    [
        wrapped_fixed,
        lambda: SGD(0.1, momentum=0.9, clipnorm=1.0, name="mine"),
        lambda: LossScaleOptimizer(Adam(0.1, epsilon=1e-5), 8.0, 3, clipvalue=0.5),
        lambda: LossScaleOptimizer(OfAUser(0.1, clipnorm=2.0), name="outer"),
        lambda: LossScaleOptimizer(SGD(), loss_scale=gs.DynamicLossScale(4.0, hysteresis=2)),
        lambda: Adam(STAIRS, use_ema=True),
        lambda: experimental.LossScaleOptimizer(Adam(0.5), "dynamic"),
        lambda: experimental.LossScaleOptimizer(Adam(0.5), 8),
        lambda: tf2.LossScaleOptimizer(SGD(0.5), False, 8.0),
        lambda: tf2.LossScaleOptimizer(SGD(0.5), True, 8.0, 3),
        lambda: experimental.FixedLossScale(4),
        lambda: experimental.DynamicLossScale(4, 3, 4),
        lambda: gs.FixedLossScale(4.0),
        lambda: gs.DynamicLossScale(4.0, 3, 4.0, backoff_factor=0.5, hysteresis=2),
    ],
)
def test_every_class_survives_a_round_trip(make):
    """What has `get_config` is made again by `from_config`, described alike, through JSON too, and
    without a change of the configuration."""
    thing = make()
    config = thing.get_config()
    kept = json.dumps(config)
    for written in (json.loads(kept), config):
        assert type(thing).from_config(written).get_config() == config
    assert json.dumps(config) == kept


def by_pair(opt, w):
    opt.apply_gradients([(jnp.ones(2), w)])


def by_loss(opt, w):
    opt.minimize(lambda: (w * w).sum(), var_list=[w])


@pytest.mark.filterwarnings("ignore:Expected get_scaled_loss:UserWarning")
@pytest.mark.parametrize(
    ("make", "step"),
    [
        *((lambda cls=cls: cls(0.1), by_pair) for cls in [*CORE, *MESH]),
        (wrapped, by_pair),
        (lambda: SGD(OPTIONS["learning_rate"]), by_pair),
        (lambda: experimental.LossScaleOptimizer(SGD(0.1), "dynamic"), by_pair),
        (lambda: tf2.LossScaleOptimizer(SGD(0.1)), by_pair),
        (lambda: v1.GradientDescentOptimizer(0.1), by_loss),
        (lambda: v1.MomentumOptimizer(0.1, 0.9), by_loss),
        (lambda: v1.AdamOptimizer(0.1), by_loss),
        (
            lambda: v1.MixedPrecisionLossScaleOptimizer(v1.AdamOptimizer(0.1), "dynamic"),
            by_loss,
        ),
    ],
)
def test_every_optimizer_pickles_and_copies(make, step):
    """A pickle and a deep copy of weights and optimizer, taken mid-run, continue it alike."""
    opt, w = make(), Variable([1.0, 2.0])
    step(opt, w)
    twins = [pickle.loads(pickle.dumps((opt, w))), copy.deepcopy((opt, w))]
    for pair in [(opt, w), *twins]:
        for _ in range(3):
            step(*pair)
    for _, twin in twins:
        assert twin.numpy().tolist() == w.numpy().tolist()


def test_an_optax_chain_is_copied():
    """`Optax` is deep-copied; it cannot be pickled, as optax's functions cannot."""
    opt, w = from_optax(optax.adam(0.1)), Variable([1.0, 2.0])
    by_pair(opt, w)
    twin, other = copy.deepcopy((opt, w))
    by_pair(opt, w)
    by_pair(twin, other)
    assert other.numpy().tolist() == w.numpy().tolist()
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        pickle.dumps(opt)


def test_the_options_of_an_optax_chain():
    """What `from_optax` returns describes its options, and refuses those that would do nothing."""
    assert from_optax(optax.adam(0.1), master_weights=True).get_config()["master_weights"] is True
    with pytest.raises(TypeError, match="Expected no shard_state_over for from_optax; got"):
        from_optax(optax.adam(0.1), shard_state_over="data")


def test_state_by_name():
    """`state` and `load_state` carry all variables by names that stay, or change nothing."""

    def make(*names):
        variables = [Variable(np.ones(2, np.float32), name=name) for name in names]
        opt = LossScaleOptimizer(Adam(0.1), 8.0)
        opt.build(variables)
        return opt

    first, second = make("w", "w", "b"), make("w", "w", "b")
    first.apply([np.float32([1, 2]), np.float32([3, np.pi]), np.float32([5, 6])])
    state = first.state()
    assert [name for name in state if "#" in name] == ["adam/w_momentum#2", "adam/w_velocity#2"]
    second.load_state(dict(reversed(state.items())))
    for one, other in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    other = make("w", "v", "b")
    before = other.state()
    for wrong in (state, before | {"more": 1.0}, {**before, "adam/b_momentum": np.ones(3)}):
        with pytest.raises(ValueError, match="Expected"):
            other.load_state(wrong)
        for name, value in other.state().items():
            np.testing.assert_array_equal(value, before[name])


def test_optimizers_by_name_and_configuration():
    """`get` takes a name, a configuration or an optimizer; `serialize` and `deserialize` are
    inverse, with wrappers, schedules and classes of the user."""
    for cls in CORE:
        assert (
            type(gs.optimizers.get(cls.__name__))
            is type(gs.optimizers.get(cls.__name__.lower()))
            is cls
        )
    opt = LossScaleOptimizer(
        OfAUser(gs.optimizers.schedules.CosineDecayRestarts(0.5, 2)), clipnorm=1.0
    )
    config = json.loads(json.dumps(gs.optimizers.serialize(opt)))
    before = copy.deepcopy(config)
    for made in (gs.optimizers.deserialize(config), gs.optimizers.get(config)):
        assert config == before
        assert type(made.inner_optimizer) is OfAUser
        assert gs.optimizers.serialize(made) == before
    other = {"class_name": "Other", "config": {"learning_rate": 0.25}}
    assert type(gs.optimizers.deserialize(other, {"Other": OfAUser})) is OfAUser
    assert (
        gs.optimizers.get({"class_name": "adamw", "config": {"weight_decay": 0.5}}).weight_decay
        == 0.5
    )
    assert gs.optimizers.get(opt) is opt
    assert gs.optimizers.get(None) is None


def test_what_is_no_optimizer_is_refused_by_name():
    """An unknown name, and what is neither name, configuration nor optimizer, say what to give."""
    with pytest.raises(ValueError, match=r"'Adam'.* got 'typo'"):
        gs.optimizers.get("typo")
    with pytest.raises(ValueError, match="class_name and config"):
        gs.optimizers.deserialize({})
    for function, wrong in [
        (gs.optimizers.get, 3),
        (gs.optimizers.serialize, gs.FixedLossScale(8.0)),
    ]:
        with pytest.raises(TypeError, match="optimizer"):
            function(wrong)
    with pytest.raises(ValueError, match="Expected the name of an optimizer"):
        gs.optimizers.get(5)  # as Keras documents


def test_schedules_by_configuration():
    """`serialize` and `deserialize` of `schedules` are inverse, also for what Keras wrote and for
    classes of the user; a schedule is no optimizer, and the error says what to call."""

    @dataclasses.dataclass(frozen=True)
    class Mine(gs.optimizers.schedules.LearningRateSchedule):
        rate: float = 0.5

        def __call__(self, step):
            return self.rate / (1 + step)

    of_schedules = gs.optimizers.schedules
    for schedule in (of_schedules.CosineDecay(0.5, 3), Mine(0.25)):
        config = json.loads(json.dumps(of_schedules.serialize(schedule)))
        assert of_schedules.deserialize(config) == schedule
    written = {"cycle": False, "decay_steps": 4, "end_learning_rate": 0.0, "power": 1.0}
    written = {"class_name": "PolynomialDecay", "config": {"initial_learning_rate": 1.0, **written}}
    assert float(of_schedules.deserialize(written)(2)) == 0.5
    other = {"class_name": "Other", "config": {"rate": 0.25}}
    assert of_schedules.deserialize(other, {"Other": Mine}) == Mine(0.25)
    with pytest.raises(ValueError, match=r"Write gainstage\.optimizers\.schedules\.deserialize"):
        gs.optimizers.deserialize(written)
    with pytest.raises(ValueError, match="'CosineDecay'"):
        of_schedules.deserialize({"class_name": "Adam", "config": {}})
    with pytest.raises(TypeError, match="Expected a schedule"):
        of_schedules.serialize(SGD())


def test_decay_that_was_taken_away_stays_away():
    """An AdamW whose decay is off is described so, by itself and inside of a wrapper."""
    adamw = gs.optimizers.AdamW()
    adamw.weight_decay = None
    assert gs.optimizers.AdamW.from_config(adamw.get_config()).weight_decay == 0
    opt = LossScaleOptimizer(gs.optimizers.AdamW())
    opt.weight_decay = None
    again = LossScaleOptimizer.from_config(opt.get_config())
    assert again.weight_decay == 0
    w = Variable(1.0)
    again.apply([0.0], [w])
    assert float(w) == 1.0


class Steady(gs.FixedLossScale):
    """A fixed scale of a user's own."""


def test_a_fixed_scale_of_ones_own_is_described_as_such():
    """A subclass of `FixedLossScale` comes back as that subclass."""
    opt = LossScaleOptimizer(SGD(), loss_scale=Steady(8.0))
    again = LossScaleOptimizer.from_config(opt.get_config(), {"Steady": Steady})
    assert again.rule == Steady(8.0)


def test_from_config_leaves_its_argument_alone():
    """Keras's `from_config` takes the inner optimizer out of the caller's dictionary."""
    config = LossScaleOptimizer(
        SGD(gs.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5))
    ).get_config()
    before = copy.deepcopy(config)
    LossScaleOptimizer.from_config(config)
    assert config == before

    with live("keras") as keras:
        config = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).get_config()
        keras.optimizers.LossScaleOptimizer.from_config(config)
        fails(keras, "inner_optimizer" not in config)


@pytest.mark.parametrize("module", [None, "keras.optimizers", "tf_keras.optimizers"])
def test_a_configuration_of_keras_is_of_our_class(module):
    """Also where a class of the user, which Keras has not registered, has the same name."""

    class Adagrad(gs.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign(variable, variable)

    written = {"class_name": "Adagrad", "module": module, "config": {"learning_rate": 0.5}}
    made = gs.optimizers.deserialize(written)
    assert type(made) is gs.optimizers.Adagrad is not Adagrad
    assert float(made.learning_rate.value()) == 0.5
    del Adagrad
    gc.collect()  # other tests look among all subclasses

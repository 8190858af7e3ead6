import dataclasses
import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_floats import SMALL

import gainstage as gs
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable, from_optax
from gainstage.transforms import current_scale

from oracles import scale_automaton
from peers import fails, keras_step, live


def run(rule, finite_steps):
    """The states of a rule after each step, from one compiled scan."""

    def step(state, finite):
        state = rule.update(state, finite)
        return state, state

    return jax.jit(lambda f: jax.lax.scan(step, rule.init(), f)[1])(jnp.asarray(finite_steps))


@pytest.mark.parametrize("multiplier", [1.5, 3.0])
def test_other_multipliers(multiplier):
    """A multiplier that is no power of two moves the scale by it, up to float32 rounding."""
    rule = gs.DynamicLossScale(100.0, 2, multiplier)
    finite_steps = [True, True, False, True, True, True, True, False, False, True]
    expected = [scale for scale, _ in scale_automaton(rule, finite_steps)]
    np.testing.assert_allclose(run(rule, finite_steps).scale, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("count", "after"), [(10, (16.0, 0)), (2**31 - 1, (16.0, 0)), (-(2**31), (8.0, 1))]
)
def test_a_counter_beyond_the_period_still_grows(count, after):
    """A restored counter above the period, however large, grows at the next finite step, where
    Keras never does, and does not wrap around; one below 0 is 0."""
    rule = gs.DynamicLossScale(8.0, increment_period=3)
    state = rule.init()._replace(good_steps=jnp.int32(count))
    state = rule.update(state, jnp.array(True))
    assert (float(state.scale), int(state.good_steps)) == after


def test_a_state_without_hysteresis_is_two_scalars():
    """What a rule does not count takes no leaf: one for a fixed, two for a dynamic scale."""
    leaves = [len(jax.tree.leaves(rule.init())) for rule in (
        gs.FixedLossScale(2), gs.DynamicLossScale(), gs.DynamicLossScale(hysteresis=2)
    )]  # fmt: skip
    assert leaves == [1, 2, 3]
    state = jax.tree.map(lambda x: x, jax.jit(lambda s: s)(gs.DynamicLossScale().init()))
    assert [x.dtype for x in state[:2]] == [jnp.float32, jnp.int32]


NO_NUMBERS = (True, np.True_, "8", 1j, [8.0])
OUTSIDE = {
    "initial_loss_scale": (0, -1.0, math.nan, math.inf, 2.0**127, 1e-46),
    "increment_period": (0, -5, 1.5, math.nan, math.inf, 2**31),
    "multiplier": (0.0, -2.0, math.nan, math.inf),
    "backoff_factor": (0.0, 1.0, 1.5, -0.5, math.nan),
    "min_scale": (0.0, -1.0, math.nan, 2.0**127, 1e-45),
    "max_scale": (0.0, -1.0, math.nan, math.inf, 2.0**127),
    "hysteresis": (0, -1, 1.5, math.nan, 2**31),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_arguments_are_checked(name):
    """A wrong argument of the dynamic rule is an error that names it and the value."""
    no_numbers = NO_NUMBERS if name in ("backoff_factor", "min_scale") else (*NO_NUMBERS, None)
    for error, values in ((TypeError, no_numbers), (ValueError, OUTSIDE[name])):
        for value in values:
            with pytest.raises(error, match=rf"Expected .* for {name}; got "):
                gs.DynamicLossScale(**{name: value})


def test_a_fixed_scale_is_checked():
    """A fixed scale is a positive number that float32 and its reciprocal can hold."""
    for error, values in (
        (TypeError, (*NO_NUMBERS, None)),
        (ValueError, OUTSIDE["initial_loss_scale"]),
    ):
        for value in values:
            with pytest.raises(error, match=r"Expected .* for loss_scale_value; got "):
                gs.FixedLossScale(value)


def test_bounds_must_enclose():
    """The floor may not lie above the ceiling, nor the first scale."""
    with pytest.raises(ValueError, match="min_scale"):
        gs.DynamicLossScale(min_scale=8.0, max_scale=4.0)
    with pytest.raises(ValueError, match="initial_loss_scale"):
        gs.DynamicLossScale(16.0, max_scale=8.0)


# Asked for in pytorch#157436 (scale of 5e-23).
def test_legal_edges():
    """Numbers of any kind, multipliers up to 1, and a first scale below the floor are legal."""
    rule = gs.DynamicLossScale(jnp.float32(8), np.int64(3), np.float16(0.5), min_scale=np.int32(16))
    assert dataclasses.astuple(rule)[:3] == (8.0, 3, 0.5)
    assert gs.DynamicLossScale(multiplier=1).multiplier == 1.0
    assert gs.FixedLossScale(np.float32(0.5)).loss_scale_value == 0.5


@pytest.mark.parametrize(
    "rule", [gs.FixedLossScale(3), gs.DynamicLossScale(4, 5, 3, backoff_factor=0.25, hysteresis=2)]
)
def test_rules_are_values(rule):
    """A rule is immutable, hashable, equal to its like, and made again by its configuration."""
    twin = type(rule).from_config(rule.get_config())
    assert twin == rule
    assert hash(twin) == hash(rule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.multiplier = 3.0


def test_the_interface_is_abstract():
    """`LossScale` itself cannot be made: a rule says `init` and `update`."""
    with pytest.raises(TypeError, match="abstract"):
        gs.LossScale()


class Told(NamedTuple):
    """A state that keeps what its rule was told; -1 stands for nothing."""

    scale: jax.Array
    max_abs: jax.Array
    any_nan: jax.Array
    any_inf: jax.Array
    loss: jax.Array


def asking(*names):
    """A rule that measures `names`, and keeps them in its state."""

    class Asking(gs.LossScale):
        measures = names

        def init(self):
            return Told(jnp.float32(4.0), *[jnp.float32(-1.0)] * 4)

        def update(self, state, finite, **measured):
            return state._replace(**{k: v.astype(jnp.float32) for k, v in measured.items()})

    return Asking()


@pytest.mark.parametrize(
    ("gradient", "largest", "nan", "inf"),
    [
        ([-3.0, 2.0], 3, 0, 0),
        ([math.nan, 2.0], 2, 1, 0),
        ([-math.inf, -2.0], 2, 0, 1),
        ([math.nan, math.inf], 0, 1, 1),
    ],
)
def test_a_rule_is_told_what_it_measures(gradient, largest, nan, inf):
    """Measures are those of the true gradients; the loss is nan unless it was given."""
    rule, gradient = asking("max_abs", "any_nan", "any_inf", "loss"), jnp.float32(gradient)
    opt = LossScaleOptimizer(SGD(), loss_scale=rule)
    opt.apply([4 * gradient], [Variable([0.0, 0.0])])
    told = [float(v) for v in opt.variables[:5]]
    np.testing.assert_equal(told, [4, largest, nan, inf, np.nan])

    tx = gs.with_loss_scale(optax.sgd(0.1), rule)
    _, state = jax.jit(tx.update)(gradient, tx.init(gradient), value=jnp.float16(2.5))
    assert state.rule_state == (4, largest, nan, inf, 2.5)


@pytest.mark.parametrize(("names", "any_nan"), [((), -1), (("any_nan",), 0)])
def test_a_rule_is_told_nothing_else(names, any_nan):
    """What a rule does not name in `measures` is not handed to it."""
    tx = gs.with_loss_scale(optax.sgd(0.1), asking(*names))
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=2.5)
    assert state.rule_state == (4, -1, any_nan, -1, -1)
    opt = LossScaleOptimizer(SGD(), loss_scale=asking(*names))
    opt.apply([jnp.ones(2)], [Variable([0.0, 0.0])])
    assert [float(v) for v in opt.variables[:5]] == [4, -1, any_nan, -1, -1]


def test_an_unknown_measure_is_refused():
    """A rule that asks for something unknown is told what there is."""
    with pytest.raises(ValueError, match=r"max_abs.*got 'median'"):
        LossScaleOptimizer(SGD(), loss_scale=asking("median")).apply([1.0], [Variable(1.0)])


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**126])
def test_gradients_are_recovered_at_the_bounds(scale):
    """At both ends of the scale a true gradient comes back exactly, compiled or not."""
    for compiled in (True, False):
        var = Variable([0.0, 0.0])
        opt = LossScaleOptimizer(SGD(1.0), scale, jit_compile=compiled)
        opt.apply([np.float32([1.0, 2.0**-100]) * np.float32(scale)], [var])
        assert var.numpy().tolist() == [-1.0, -(2.0**-100)]


def test_a_rule_names_what_its_update_needs():
    """`update` of a rule refuses what is no bool scalar, and says which measures are missing."""
    rule = gs.DynamicLossScale()
    for wrong in (jnp.ones([1], bool), 1, "False", None):
        with pytest.raises(TypeError, match="Expected a bool scalar for finite"):
            rule.update(rule.init(), wrong)
    adaptive = gs.AdaptiveLossScale()
    with pytest.raises(TypeError, match=r"needs max_abs, any_nan, loss .* got no any_nan, loss"):
        adaptive.update(adaptive.init(), True, max_abs=1.0)


def test_a_loss_is_one_array_and_gradients_are_any_tree():
    """`scale_loss` refuses several losses by name; `check_finite` takes trees and iterables."""
    opt, tx = LossScaleOptimizer(SGD()), gs.with_loss_scale(optax.sgd(0.1))
    state = tx.init(jnp.ones(2))
    for scale in (opt.scale_loss, lambda loss: gs.transforms.scale_loss(loss, state)):
        with pytest.raises(
            TypeError, match=r"Expected one loss, an array; got .* Sum several losses"
        ):
            scale((jnp.ones(()), jnp.ones(())))
    good, bad = {"a": [jnp.ones(2), None]}, {"a": jnp.array([1.0, np.nan])}
    for grads, finite in [(good, True), (bad, False), (bad.values(), False), (iter([1.0]), True)]:
        assert bool(opt.check_finite(grads)) is finite


def test_a_scale_within_a_scale_is_refused():
    """`LossScaleOptimizer` around a transformation that scales is an error, and builds nothing."""
    weight, inner = Variable(1.0), from_optax(optax.chain(gs.with_loss_scale(optax.sgd(0.1))))
    opt = LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="a scale within a scale"):
        opt.minimize(lambda: weight * weight, [weight])
    assert not inner.built


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_rule_of_ones_own_cannot_break_the_scale(scale):
    """Whatever a rule returns, the scale stays finite and positive, in float32."""

    class Broken(gs.FixedLossScale):
        def init(self):
            return gs.typing.ScaleState(8)

        def update(self, state, finite):
            return gs.typing.ScaleState(jnp.float32(scale))

    w = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.5), loss_scale=Broken(8.0))
    opt.minimize(lambda: w * 1.0, [w])
    assert opt.loss_scale.dtype == jnp.float32
    assert 0 < float(opt.loss_scale) <= 2.0**126


def test_a_number_beyond_every_float_is_out_of_range():
    """An integer that no float holds is a ValueError like any other number out of range."""
    with pytest.raises(ValueError, match="initial_loss_scale"):
        gs.DynamicLossScale(10**400)


def scaled_sgd():
    w = Variable([1.0, 2.0], name="w")
    return w, LossScaleOptimizer(SGD(0.5), initial_scale=2.0)


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, 0.0, -1.0])
def test_a_spoiled_scale_heals(spoiled):
    """Whatever was put into the scale, it is finite and positive after the next step."""
    w, opt = scaled_sgd()
    opt.apply([jnp.ones(2)], [w])
    opt.dynamic_scale.assign(spoiled)
    opt.apply([jnp.full(2, np.inf)], [w])
    assert 0 < float(opt.loss_scale) <= 2.0**126
    rule = gs.DynamicLossScale()
    tx = gs.with_loss_scale(optax.sgd(0.5), rule)
    params = jnp.ones(2)
    state = tx.init(params)
    scale = state.rule_state._replace(scale=jnp.float32(spoiled))
    state = tx.update(jnp.full(2, jnp.inf), state._replace(rule_state=scale), params)[1]
    assert 0 < float(state.rule_state.scale) <= 2.0**126


def test_the_default_rule_is_one():
    """`with_loss_scale` without a rule has the rule that `DynamicLossScale()` is: from 1 upwards,
    or
    from a first scale that is lower."""
    params = jnp.ones(3)
    for initial, lowest in ((2.0**15, 1.0), (1.0, 1.0), (2.0**-30, 2.0**-30)):
        assert gs.DynamicLossScale(initial).min_scale == lowest
    without, given = (
        gs.with_loss_scale(optax.sgd(0.1), *r) for r in ((), (gs.DynamicLossScale(),))
    )
    states = without.init(params), given.init(params)
    for _ in range(20):
        states = [tx.update(params * jnp.nan, state, params)[1]
                  for tx, state in zip((without, given), states, strict=True)]  # fmt: skip
    assert [float(current_scale(state)) for state in states] == [1.0, 1.0]


LOADED = [
    (gs.FixedLossScale(2.0**20), gs.FixedLossScale(64.0), 2.0**6),
    (gs.DynamicLossScale(2.0**20), gs.FixedLossScale(1.0), 1.0),
    (gs.DynamicLossScale(2.0**20), gs.DynamicLossScale(2.0**8, max_scale=2.0**12), 2.0**12),
    (gs.DynamicLossScale(2.0**-10), gs.DynamicLossScale(min_scale=1.0), 1.0),
    (gs.DynamicLossScale(2.0**-10), gs.DynamicLossScale(2.0**-12, min_scale=1.0), 2.0**-10),
    (gs.DynamicLossScale(0.25), gs.DynamicLossScale(0.5), 0.5),  # its floor is its first scale
]


@pytest.mark.parametrize(("saved", "rule", "expected"), LOADED, ids=str)
def test_the_rule_in_force_decides(saved, rule, expected):
    """A state of another rule has, after a step, the scale of a fixed rule, or one within the
    bounds; a rule that starts below its minimum keeps what it loads."""
    old, state = (
        gs.TrainState.create(jnp.ones(3), optax.sgd(0.1), loss_scale=each) for each in (saved, rule)
    )
    step = gs.train_step(lambda w: SMALL * (w**2).sum())
    state, _ = step(state.replace(opt_state=old.opt_state))
    assert state.applied
    assert state.loss_scale == expected


# Asked for in apex#777 (division by a scale of 0).
def test_after_200_overflows_a_finite_step_is_finite():
    """After 200 overflows Keras's scale is 0 and a finite step gives -inf; ours goes on."""
    var = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.5))
    opt.scale_loss(1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* steps in a row were skipped")
        for _ in range(200):
            opt.apply([jnp.inf], [var])
    opt.minimize(lambda: var * 1.0, [var])
    assert float(var) == 0.5

    with live("keras") as keras:
        theirs = keras.Variable(1.0)
        peer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        step = keras_step(peer, [theirs])
        for _ in range(200):
            step(jnp.float32(jnp.inf))
        step(jnp.float32(1.0))
        fails(keras, not np.isfinite(float(theirs.value)))


# Asked for in flax#2547 (infinite scale).
def test_after_120_doublings_the_scale_comes_down():
    """After 112 doublings Keras's scale is inf for ever; ours stays finite and comes down."""
    var = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.0), dynamic_growth_steps=1)
    for _ in range(120):
        opt.apply([0.0], [var])
    assert float(opt.loss_scale) == 2.0**126
    opt.apply([jnp.inf], [var])
    assert float(opt.loss_scale) == 2.0**125

    with live("keras") as keras:
        inner = keras.optimizers.SGD(0.0)
        peer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=1)
        step = keras_step(peer, [keras.Variable(1.0)])
        for gradient in [0.0] * 120 + [np.inf] * 10:
            step(jnp.float32(gradient))
        fails(keras, float(peer.dynamic_scale.value) == np.inf)


def test_a_plain_factor_skips_nan():
    """A plain optimizer with Keras's static factor applies a NaN; ours checks and skips."""
    var = Variable(1.0)
    opt = SGD(0.5, loss_scale_factor=128.0)
    opt.apply([jnp.nan], [var])
    assert (float(var), int(opt.iterations)) == (1.0, 0)
    assert float(opt.scale_loss(1.0)) == 128.0
    opt.apply([128.0], [var])
    assert (float(var), int(opt.iterations)) == (0.5, 1)

    with live("keras") as keras:
        theirs = keras.Variable(1.0)
        peer = keras.optimizers.SGD(0.5, loss_scale_factor=128.0)
        peer.apply([jnp.float32(jnp.nan)], [theirs])
        fails(keras, np.isnan(float(theirs.value)))


# Asked for in jmp#44 (a floor lost).
def test_the_floor_survives_jit():
    """jmp's floor goes back to 1 when the scale crosses jit; ours is part of the rule."""
    rule = gs.DynamicLossScale(1.0, min_scale=2.0**-4)
    state = jax.tree.map(lambda x: x, rule.init())
    update = jax.jit(rule.update)
    for _ in range(10):
        state = update(state, False)
    assert float(state.scale) == 2.0**-4

    with live("jmp") as jmp:
        scale = jmp.DynamicLossScale(jnp.float32(1.0), min_loss_scale=jnp.float32(2.0**-4))
        adjust = jax.jit(lambda scale, finite: scale.adjust(finite))
        for _ in range(10):
            scale = adjust(scale, jnp.array(False))
        fails(jmp, float(scale.loss_scale) != 2.0**-4)


def test_the_scale_grows_after_its_period():
    """flax's interval of 3 grows after 4 finite steps; ours after 3."""
    rule = gs.DynamicLossScale(2.0, increment_period=3)
    state, scales = rule.init(), []
    for _ in range(7):
        state = rule.update(state, True)
        scales.append(float(state.scale))
    assert scales == [2, 2, 4, 4, 4, 8, 8]

    with live("flax.training.dynamic_scale") as flax:
        peer, theirs = flax.DynamicScale(scale=2.0, growth_interval=3), []
        for _ in range(7):
            peer = peer.value_and_grad(lambda w: w * w)(jnp.float32(1.0))[0]
            theirs.append(float(peer.scale))
        fails(flax, theirs != scales)


def test_the_default_scale_has_a_floor():
    """NaNs drive jaxamp's scale to 0, a bad step being repeated up to ten times; ours has one."""
    for rule, floor in (
        (gs.DynamicLossScale(), 1.0),
        (LossScaleOptimizer(SGD()).rule, 2.0**-24),
    ):
        state, update = rule.init(), jax.jit(rule.update)
        for _ in range(240):
            state = update(state, False)
        assert float(state.scale) == floor

    with live("jaxamp") as jaxamp:
        fn = jaxamp.dynamic_scale_value_and_grad(lambda w: w * jnp.nan, redo_on_nan=20)
        state = jaxamp.DynamicScalerState()
        for _ in range(12):
            state, _ = fn(jnp.float32(1.0), dynamic_scaler_state=state)
        fails(jaxamp, float(state.scaler) == 0)


# Asked for in pytorch#40497 (NaN for ever).
def test_training_goes_on_after_a_storm_of_bad_batches():
    """45 NaN batches leave Keras at a scale of 2**-30; ours goes on as float32 would."""
    runs = []
    for storm in (0, 45):
        var = Variable([1.0, -1.0])
        opt = LossScaleOptimizer(Adam(0.1))
        for _ in range(storm):
            opt.apply([[jnp.nan, 1.0]], [var])
        for _ in range(20):
            opt.minimize(lambda var=var: ((var - 0.5) ** 2).sum(), [var])
        runs.append(var.numpy())
    np.testing.assert_array_equal(*runs)
    assert float(opt.loss_scale) == 2.0**-24


@dataclasses.dataclass(frozen=True)
class WithoutAScale(gs.LossScale):
    """A rule whose state is a NamedTuple of something else."""

    def init(self):
        return NamedTuple("Count", [("steps", jax.Array)])(jnp.int32(0))

    def update(self, state, finite):
        return state


def test_a_rule_without_a_scale_is_refused():
    """The first state of a rule has a `scale`, or both faces say what they expect."""
    for make in (
        lambda: LossScaleOptimizer(SGD(0.1), loss_scale=WithoutAScale()),
        lambda: gs.with_loss_scale(optax.sgd(0.1), WithoutAScale()).init(jnp.ones(2)),
    ):
        with pytest.raises(TypeError, match="scale"):
            make()


@pytest.mark.parametrize("rule", [gs.DynamicLossScale, gs.FixedLossScale, gs.AdaptiveLossScale])
def test_the_help_of_a_constructor_leads_to_its_defaults(rule):
    """`help` of `__init__`, which shows `min_scale = None`, says where defaults are explained."""
    assert f"help({rule.__name__})" in rule.__init__.__doc__
    assert all(field.name in rule.__doc__ for field in dataclasses.fields(rule))


@pytest.mark.parametrize(("before", "after"), [(2.0**15, 2.0**-4), (2.0**-5, 2.0**10)])
def test_a_rule_with_another_first_scale_has_the_floor_of_that(before, after):
    """`dataclasses.replace` makes the rule that the constructor makes: an overflow does not raise
    a first scale below 1, and one from above falls to 1."""
    rule = dataclasses.replace(gs.DynamicLossScale(before), initial_loss_scale=after)
    assert rule == gs.DynamicLossScale(after)
    assert rule.min_scale == min(1.0, after)
    assert float(rule.update(rule.init(), False).scale) == max(after / 2, min(1.0, after))
    given = dataclasses.replace(gs.DynamicLossScale(min_scale=0.5), initial_loss_scale=2.0)
    assert given.min_scale == 0.5

"""Each rule in every state that it can reach, against a state machine in plain Python: where all
steps agree, so do all runs."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.compat import experimental, tf2, v1
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable

from oracles import AdaptiveAutomaton, dynamic_step, keras_step, reachable, tensorflow_step

NAN, INF = float("nan"), float("inf")
BOUNDS = {  # the first scale, the lowest and the highest one
    "between": (1.0, 2.0**-3, 2.0**4),
    "below": (2.0**-3, 1.0, 2.0**4),
    "highest": (2.0**4, 2.0**-1, 2.0**4),
    "alone": (8.0, 8.0, 8.0),
}
FACTORS = [(2.0, None), (4.0, 0.5), (2.0, 0.25), (1.0, None), (0.5, None)]


def columns(states, *dtypes):
    """An array of each field of the states."""
    return [np.array(*each) for each in zip(zip(*states, strict=True), dtypes, strict=True)]


def dynamic_rules(bounds):
    """`DynamicLossScale` with small periods, each hysteresis up to 3, and several factors."""
    start, low, high = BOUNDS[bounds]
    for period, patience, (up, down) in itertools.product((1, 3), (1, 2, 3), FACTORS):
        options = {"backoff_factor": down, "hysteresis": patience}
        yield gs.DynamicLossScale(start, period, up, **options, min_scale=low, max_scale=high)


def every_step(rule, states):
    """The states after a bad and after a good step from each of the states."""
    update = jax.vmap(rule.update, (None, 0))
    return jax.vmap(update, (0, None))(states, jnp.array([False, True]))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_dynamic_rule_is_its_description_in_every_state(bounds):
    """30 rules, after each step from each state: periods, bounds, backoff, hysteresis and all. An
    overflow never raises the scale, but a first one that is below the lowest."""
    tables = {}
    for rule in dynamic_rules(bounds):
        start, step = (rule.initial_loss_scale, 0, 0), functools.partial(dynamic_step, rule)
        tables[rule] = reachable(start, [False, True], step)

    def all_steps(states):
        return [every_step(rule, each) for rule, each in zip(tables, states, strict=True)]

    states = []
    for rule, table in tables.items():
        scale, good, bad = columns(table, np.float32, np.int32, np.int32)
        states.append(gs.typing.ScaleState(scale, good, bad if rule.hysteresis > 1 else None))
    found = jax.jit(all_steps)(states)
    for old, new, (rule, table) in zip(states, found, tables.items(), strict=True):
        for field, expected in zip(new, np.moveaxis([*table.values()], -1, 0), strict=True):
            assert field is None or (field == expected).all(), rule
        assert (new.scale >= min(rule.min_scale, rule.initial_loss_scale)).all()
        assert (new.scale <= rule.max_scale).all()
        assert bounds == "below" or rule.multiplier < 1 or (new.scale[:, 0] <= old.scale).all()


def of_optimizer(opt, weight, apply):
    """The step of an optimizer as a function of scale, count and a true gradient."""
    variables = [weight, *(opt.variables() if callable(opt.variables) else opt.variables)]
    names = [v.name.rpartition("/")[2] for v in variables]
    scale = next(i for i, n in enumerate(names) if n in ("dynamic_scale", "current_loss_scale"))
    good = next(i for i, n in enumerate(names) if n in ("step_counter", "good_steps"))
    pure, values = gs.optimizers.functionalize(apply, variables), [v.value() for v in variables]

    def step(state, gradient):
        before = list(values)
        before[scale], before[good] = state
        _, after = pure(before, gradient)
        return after[scale], after[good], after[0]

    return step


def in_with_loss_scale(start, period, multiplier):
    """`with_loss_scale(...).update`, with TensorFlow's lowest scale."""
    rule = gs.DynamicLossScale(start, period, multiplier, min_scale=1.0)
    tx, params = gs.with_loss_scale(optax.sgd(0.5), rule), jnp.float32(1.0)

    def step(state, gradient):
        before = tx.init(params)._replace(rule_state=gs.typing.ScaleState(*state))
        updates, after = tx.update(gradient, before, params)
        return *after.rule_state[:2], gs.transforms.apply_updates(params, updates, after)

    return step


def in_loss_scale_optimizer(start, period, multiplier):
    """`LossScaleOptimizer.apply` with TensorFlow's lowest scale."""
    rule = gs.DynamicLossScale(start, period, multiplier, min_scale=1.0)
    weight, opt = Variable(1.0), LossScaleOptimizer(SGD(0.5), loss_scale=rule)
    opt.build([weight])
    return of_optimizer(opt, weight, lambda g: opt.apply([g * opt.loss_scale]))


def in_experimental_scale(start, period, multiplier):
    """`compat.experimental.DynamicLossScale.update`, in a loop that asks it what to apply."""
    weight, scale = Variable(1.0), experimental.DynamicLossScale(start, period, multiplier)

    def apply(gradient):
        _, should_apply = scale.update([gradient])
        weight.assign(jnp.where(should_apply, weight.value() - 0.5, weight.value()))

    return of_optimizer(scale, weight, apply)


def in_its_loop(opt, weight, gradient):
    """A step that scales the loss and unscales its gradient."""
    grads = opt.get_unscaled_gradients([opt.get_scaled_loss(gradient)])
    opt.apply_gradients(zip(grads, [weight], strict=True))


def in_experimental_optimizer(start, period, multiplier):
    """`compat.experimental.LossScaleOptimizer`, which wants a multiplier of 2."""
    weight, scale = Variable(1.0), experimental.DynamicLossScale(start, period, multiplier)
    opt = experimental.LossScaleOptimizer(SGD(0.5), scale)
    opt.build([weight])
    return of_optimizer(opt, weight, functools.partial(in_its_loop, opt, weight))


def in_tf2(start, period, multiplier):
    """`compat.tf2.LossScaleOptimizer`, whose multiplier is 2."""
    weight, opt = Variable(1.0), tf2.LossScaleOptimizer(SGD(0.5), True, start, period)
    opt.build([weight])
    return of_optimizer(opt, weight, functools.partial(in_its_loop, opt, weight))


def in_v1(start, period, multiplier):
    """`compat.v1.MixedPrecisionLossScaleOptimizer`."""
    weight, scale = Variable(1.0), experimental.DynamicLossScale(start, period, multiplier)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), scale)
    opt.build([weight])
    return of_optimizer(opt, weight, lambda g: opt.apply_gradients([(g, weight)]))


def in_keras(start, period, multiplier):
    """`LossScaleOptimizer` with Keras's arguments."""
    weight = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.5), initial_scale=start, dynamic_growth_steps=period)
    opt.build([weight])
    return of_optimizer(opt, weight, lambda g: opt.apply([g * opt.loss_scale]))


PERIODS = (1, 3)
OF_TENSORFLOW = [
    *itertools.product([in_with_loss_scale, in_loss_scale_optimizer, in_v1], [4.0]),
    *itertools.product([in_experimental_scale], [2.0, 4.0]),
    *itertools.product([in_experimental_optimizer, in_tf2], [2.0]),
]


def check_every_step(step, machine, start):
    """From each state, a skipped step leaves the weight, and scale and count are the machine's."""
    gradients = [1.0, INF, -INF, NAN]
    table = reachable((start, 0), gradients, lambda s, g: machine(s, math.isfinite(g)))
    states = tuple(columns(table, np.float32, np.int32))
    every = jax.jit(jax.vmap(jax.vmap(step, (None, 0)), (0, None)))
    scale, good, weight = every(states, jnp.float32(gradients))
    expected = np.moveaxis([*table.values()], -1, 0)
    np.testing.assert_array_equal([scale, good], expected)
    np.testing.assert_array_equal(weight, [[0.5, 1.0, 1.0, 1.0]] * len(table))


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("start", [2.0**-3, 2.0**15])
@pytest.mark.parametrize(("face", "multiplier"), OF_TENSORFLOW)
def test_the_rule_of_tensorflow_is_the_original_in_every_state(face, multiplier, start, period):
    """Through each face, for a good gradient, infinities and NaN."""
    machine = functools.partial(tensorflow_step, period, multiplier)
    check_every_step(face(start, period, multiplier), machine, start)


# Asked for in jmp#18 (a floor below 1); pytorch#99640 (scale < 1); pytorch#98828 (infinite
# scale).
@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("start", [2.0**-30, 2.0**-3, 2.0**15])
def test_the_rule_of_keras_is_the_original_in_every_state(start, period):
    """For a good gradient, infinities and NaN; but the scale stays within 2**126 and the smallest
    number of float16, 2**-24, or its start if that is lower. A step works at both ends."""
    machine = functools.partial(keras_step, period, lowest=min(start, 2.0**-24))
    check_every_step(in_keras(start, period, 2.0), machine, start)


MEASURED = {
    "small": (gs.AdaptiveLossScale(
        1.0, 2, memory=2**31 - 1, min_scale=2.0**-2, max_scale=2.0**2, largest_number=4.0
    ), (0.0, 1.0, 8.0)),
    "without margin": (gs.AdaptiveLossScale(
        1.0, 1, margin=0, memory=2**31 - 1, min_scale=2.0**-1, max_scale=2.0**3, largest_number=4.0
    ), (0.0, 1.0, 8.0)),
    "deep": (gs.AdaptiveLossScale(
        2.0**3, 1, memory=2**31 - 1, max_scale=2.0**3, largest_number=4.0
    ), (1.0,)),
}  # fmt: skip


def folded(state):
    """What decides on the next steps: after ten retries only the rest of the count, and after a
    good step nothing of the last run of bad ones."""
    scale, good, bad, ceiling, before, first, largest = state
    before, first = (before, first) if bad else (0.0, 0.0)
    return scale, good, bad if bad <= 640 else 640 + bad % 64, ceiling, before, first, largest


@pytest.mark.as_users
@pytest.mark.parametrize("name", MEASURED)
def test_the_measuring_rule_is_its_description_in_every_state(name):
    """Thousands of states, after gradients of each size and overflows with each kind of loss: bits
    agree, and the scale is a power of two within the bounds."""
    rule, largest = MEASURED[name]
    bad = [(False, 0.0, False, 1.0), (False, 0.0, True, NAN), (False, 0.0, False, NAN)]
    inputs = [*((True, m, False, 1.0) for m in largest), *bad, (False, 0.0, True, INF)]
    machine, top = AdaptiveAutomaton(rule), rule.max_scale
    start = (rule.initial_loss_scale, 0, 0, top, 0.0, 0.0, np.float32(0))
    table = reachable(start, inputs, machine.step_from, folded)
    assert len(table) > 5000

    def step(state, seen):
        finite, max_abs, any_nan, loss = seen
        return rule.update(state, finite, max_abs=max_abs, any_nan=any_nan, loss=loss)

    kinds = [np.float32, np.int32, np.int32, *[np.float32] * 4]
    state = type(rule.init())(*columns(table, *kinds))
    seen = columns(inputs, bool, np.float32, bool, np.float32)
    found = jax.jit(jax.vmap(jax.vmap(step, (None, 0)), (0, None)))(state, seen)
    np.testing.assert_array_equal(found, np.moveaxis([*table.values()], -1, 0))
    assert (np.frexp(found.scale)[0] == 0.5).all()
    assert ((found.scale >= rule.min_scale) & (found.scale <= rule.max_scale)).all()

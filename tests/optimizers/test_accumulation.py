"""Accumulation windows: what becomes of one in which a microbatch overflowed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable
from gainstage.transforms import step_was_applied

from oracles import window
from peers import fails, keras_step, live

STEPS, RATE, INITIAL, PERIOD = 4, 0.25, 2.0**10, 2


def test_no_average_is_given_before_there_is_one():
    """After bad microbatches alone `finalize_variable_values` leaves the variables as they are."""
    options = {"gradient_accumulation_steps": 2, "use_ema": True}
    w, opt = Variable([3.0]), LossScaleOptimizer(SGD(1.0, **options))
    opt.apply([[np.inf]], [w])
    opt.finalize_variable_values([w])
    assert float(w.value()[0]) == 3.0


def made(on="inner", inner=SGD, steps=STEPS, **options):
    """A variable and its optimizer, with the option given to the inner one or to the wrapper."""
    accumulate = {"gradient_accumulation_steps": steps}
    w = Variable(np.zeros(3, np.float32))
    given = (accumulate, {}) if on == "inner" else ({}, accumulate)
    rule = gs.DynamicLossScale(INITIAL, increment_period=PERIOD, min_scale=2.0**-24)
    opt = LossScaleOptimizer(inner(RATE, **given[0], **options), loss_scale=rule, **given[1])
    opt.build([w])
    return w, opt


def in_optimizer(on, steps):
    """The step of an optimizer as a function of its state, and its first state."""
    w, opt = made(on, steps=steps)

    def apply(true, accepted):
        opt.apply([jnp.full(3, true) * opt.loss_scale], apply_if=accepted)
        return w.value()[0], opt.iterations.value(), opt.dynamic_scale.value()

    pure = gs.optimizers.functionalize(apply, variables := [w, *opt.variables])
    return lambda values, *each: pure(values, *each)[::-1], [v.value() for v in variables]


def in_optax(on, steps):
    """The same of `optax.MultiSteps`, which extends its windows."""
    rule = gs.DynamicLossScale(INITIAL, increment_period=PERIOD, min_scale=2.0**-24)
    tx = gs.with_loss_scale(optax.MultiSteps(optax.sgd(RATE), steps), rule)
    params = jnp.zeros(3)

    def step(state, true, accepted):
        params, before = state
        updates, after = tx.update(jnp.full(3, true), before, params, apply_if=accepted)
        params = gs.transforms.apply_updates(params, updates, after)
        return (params, after), (
            params[0],
            after.inner.gradient_step,
            gs.transforms.current_scale(after),
        )

    return step, (params, tx.init(params))


KINDS = [1.0, np.inf, np.nan, None]  # a finite microbatch, bad ones, and one that is turned down
WINDOWS = [(in_optimizer, "inner"), (in_optimizer, "wrapper"), (in_optax, "MultiSteps")]


# Asked for in prime-rl#1961.
@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize(("make", "on"), WINDOWS)
def test_windows_are_those_of_the_description(make, on, steps):
    """In all 4,096 runs of six microbatches, finite, inf, NaN or turned down by `apply_if`: weight,
    updates and scale after each are those of a plain state machine."""
    runs = list(itertools.product(KINDS, repeat=6))
    sizes = [1.0, -2.0, 4.0, 8.0, -16.0, 32.0]  # so that each sum says what is in it
    true = np.array(
        [[s * (kind or 1.0) for s, kind in zip(sizes, run, strict=True)] for run in runs]
    )
    accepted = np.array([[kind is not None for kind in run] for run in runs])
    step, first = make(on, steps)

    def run(*microbatches):
        return jax.lax.scan(lambda state, each: step(state, *each), first, microbatches)[1]

    found = jax.jit(jax.vmap(run))(true.astype(np.float32), accepted)
    expected = [
        [*window(steps, PERIOD, RATE, INITIAL, np.where(takes, grads, None))]
        for grads, takes in zip(true, accepted, strict=True)
    ]
    np.testing.assert_allclose(found, np.moveaxis(expected, -1, 0), rtol=1e-6)


@pytest.mark.as_users
def test_a_window_goes_on_from_a_checkpoint(rng):
    """State that is saved within a window continues to the same bits."""
    grads = rng.normal(size=(12, 3)).astype(np.float32)
    grads[5] = np.nan
    runs = []
    for split in (None, 6):
        w, opt = made(inner=Adam)
        for i, gradient in enumerate(grads):
            if i == split:
                (value, state), (w, opt) = (w.numpy(), opt.state()), made(inner=Adam)
                w.assign(value)
                opt.load_state(state)
            opt.apply([jnp.asarray(gradient) * opt.loss_scale])
        runs.append([np.asarray(v) for v in (w, *opt.variables)])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_accumulated_gradients_cannot_overflow_into_the_weights():
    """Two finite gradients whose sum is infinite: the second step is skipped."""
    w = Variable(1.0)
    opt = LossScaleOptimizer(SGD(2.0**-100, gradient_accumulation_steps=2), 1.0)
    opt.apply([np.float32(3e38)], [w])
    state = [v.numpy() for v in opt.inner_optimizer.variables]
    opt.apply([np.float32(3e38)])
    assert float(w) == 1.0
    assert float(opt.loss_scale) == 0.5
    for variable, before in zip(opt.inner_optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(variable.numpy(), before)


@pytest.mark.parametrize("clip", ["global_clipnorm", "clipnorm"])
def test_a_mean_whose_norm_overflows_does_not_reach_the_weights(clip):
    """Accumulated elements may be finite and their norm not: the microbatch that makes it so is
    skipped like any that is not finite, and the window goes on."""
    w = Variable([1.0] * 9)
    inner = SGD(1.5, momentum=0.9, gradient_accumulation_steps=2, **{clip: 1.0})
    opt = LossScaleOptimizer(inner, initial_scale=1.0, telemetry=True)
    opt.apply([[1e38] * 9], [w])
    before = [v.numpy().tobytes() for v in inner.variables]
    opt.apply([[1e38] * 9])
    assert [v.numpy().tobytes() for v in inner.variables] == before
    assert (int(opt.iterations), float(opt.loss_scale)) == (0, 0.5)
    opt.apply([[3.0] * 9])
    np.testing.assert_allclose(w.numpy(), [0.5] * 9, rtol=1e-6)
    info = gs.diagnostics.telemetry(opt)
    assert (int(opt.iterations), int(info.applied_steps), int(info.skipped_steps)) == (1, 2, 1)


def test_a_shared_decision_does_not_hide_an_overflow_from_its_own_scale():
    """Where `apply_if` is false because of these very gradients, the scale falls, as without it."""
    w = Variable([0.0])
    inner = SGD(1.0, gradient_accumulation_steps=2)
    opt = LossScaleOptimizer(inner, 4.0)
    for _ in range(4):
        grads = [jnp.float32([np.inf])]
        opt.apply(grads, [w], apply_if=opt.check_finite(grads) & True)
    assert float(opt.loss_scale) == 0.25
    assert (float(w.value()[0]), int(opt.iterations)) == (0.0, 0)


# Asked for in keras#14829 (accumulation).
def test_float16_variables_accumulate_in_float32():
    """Keras crashes on accumulation with float16 variables; ours accumulates in float32."""
    var = Variable(jnp.zeros(2, jnp.float16))
    opt = LossScaleOptimizer(SGD(1.0, gradient_accumulation_steps=2), 2.0)
    grads = [jnp.array([2, 4], jnp.float16), jnp.array([6, 4], jnp.float16)]
    for gradient in grads:
        opt.apply([gradient], [var])
    assert var.numpy().tolist() == [-2, -2]

    with live("keras") as keras:
        theirs = keras.Variable(np.zeros(2), dtype="float16")
        inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        step = keras_step(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0), [theirs])
        try:
            for gradient in grads:
                step(gradient)
            crashed = False
        except TypeError:
            crashed = True
        fails(keras, crashed)


@pytest.mark.parametrize("large", [1e30, -1e37])
def test_large_sums_are_clipped_not_skipped(large):
    """A window whose sum is finite, although its square is not, is an update of the norm that clips
    it; one whose sum overflows is skipped."""
    w = Variable([1.0, 1.0])
    inner = SGD(1.0, gradient_accumulation_steps=2, global_clipnorm=1.0)
    opt = LossScaleOptimizer(inner, loss_scale=gs.FixedLossScale(1.0), telemetry=True)
    for _ in range(2):
        opt.apply([np.array([large, 0.0], np.float32)], [w])
        assert bool(step_was_applied(opt))
    np.testing.assert_allclose(w.numpy(), [1 - np.sign(large), 1.0], rtol=1e-6)
    for _ in range(2):
        opt.apply([np.array([3e38, 0.0], np.float32)], [w])
    assert not bool(step_was_applied(opt))

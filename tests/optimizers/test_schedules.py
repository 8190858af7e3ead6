"""Learning-rate schedules against their formulas in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Variable, schedules


def restarted_cosine(step, rate, first, t_mul, m_mul, alpha):
    """Loshchilov and Hutter's schedule in Python, one period after the other."""
    length, peak = float(first), 1.0
    while step >= length:
        step, length, peak = step - length, length * t_mul, peak * m_mul
    return rate * ((1 - alpha) * peak * 0.5 * (1 + np.cos(np.pi * step / length)) + alpha)


@pytest.mark.parametrize(
    ("first", "t_mul", "m_mul", "alpha"),
    [
        (1, 2.0, 0.9, 0.1),
        (10, 2.0, 1.0, 0.0),
        (7, 3.0, 0.5, 0.2),
        (7, 1.0, 0.9, 0.1),
        (4, 1.5, 1, 0),
    ],
)
def test_cosine_with_restarts(first, t_mul, m_mul, alpha):
    """`CosineDecayRestarts` has the rate of its paper at each of 5,000 steps, restarts included."""
    schedule = gs.optimizers.schedules.CosineDecayRestarts(0.3, first, t_mul, m_mul, alpha)
    rates = jax.jit(jax.vmap(schedule))(np.arange(5000))
    expected = [restarted_cosine(n, 0.3, first, t_mul, m_mul, alpha) for n in range(5000)]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def test_periods_that_get_shorter_are_refused():
    """They would end at a last step, after which Keras's rate is NaN."""
    with pytest.raises(ValueError, match="t_mul"):
        gs.optimizers.schedules.CosineDecayRestarts(0.3, 10, t_mul=0.5)
    with pytest.raises(ValueError, match="first_decay_steps"):
        gs.optimizers.schedules.CosineDecayRestarts(0.3, 0)


def test_a_schedule_may_start_at_the_rate_of_an_optimizer():
    """`opt.learning_rate` is taken for a number, and may be replaced by the schedule."""
    opt, w = SGD(0.5), Variable(0.0)
    opt.learning_rate = gs.optimizers.schedules.PolynomialDecay(opt.learning_rate, 2, 0.0)
    assert len(opt.variables) == 1
    for _ in range(2):
        opt.apply([1.0], [w])
    assert float(w) == -0.75


@pytest.mark.parametrize("never", [2**31 - 1, 1e10, 1e300])
def test_a_boundary_that_is_never_reached(never):
    """A boundary beyond all steps changes nothing, and one before all is passed from the start."""
    rate = schedules.PiecewiseConstantDecay([-never, 1, never], [8.0, 0.5, 0.25, 4.0])
    w = Variable(0.0)
    opt = SGD(rate)
    for expected in (-0.5, -1.0, -1.25):
        opt.apply([1.0], [w])
        assert float(w) == expected


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.ExponentialDecay(np.float32(0.5), np.int64(100), jnp.float32(0.5), np.True_),
        schedules.PolynomialDecay(jnp.float32(0.5), jnp.int32(100), cycle=np.False_),
        schedules.CosineDecay(np.float64(0.5), 100, warmup_target=1.0, warmup_steps=np.int32(3)),
        schedules.PiecewiseConstantDecay(jnp.array([10, 20]), np.array([1.0, 0.5, 0.25])),
    ],
)
def test_schedules_keep_numbers_of_python(schedule):
    """Whatever kind of number a schedule was made with, it is hashed, written as JSON and read."""
    config = json.loads(json.dumps(SGD(schedule).get_config()))
    again = type(schedule).from_config(config["learning_rate"]["config"])
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert all(type(n) in (bool, int, float, str, list, type(None))
               for n in schedule.get_config().values())  # fmt: skip


def test_boundaries_between_steps():
    """A boundary at 2.5 separates step 2 from step 3, as in Keras."""
    schedule = gs.optimizers.schedules.PiecewiseConstantDecay([2.5], [1.0, 0.25])
    assert [float(schedule(jnp.int32(step))) for step in range(5)] == [1, 1, 1, 0.25, 0.25]


@pytest.mark.parametrize("steps", [2**31 - 1, 2**31, 2**40])
def test_a_schedule_may_be_longer_than_int32_counts(steps):
    """A decay over that many steps has hardly begun at any step that can be counted."""
    schedule = gs.optimizers.schedules.ExponentialDecay(0.5, decay_steps=steps, decay_rate=0.5)
    assert float(schedule(jnp.int32(0))) == 0.5
    assert 0.49 < float(jax.jit(schedule)(jnp.int32(10_000))) <= 0.5


# Asked for in pytorch#67590.
def test_a_skipped_step_does_not_move_the_schedule():
    """After two skipped steps of five, the rates were those of three steps."""
    rate = gs.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    grads = [1.0, np.inf, 1.0, np.nan, 1.0]
    w, params = Variable(0.0), jnp.float32(0.0)
    opt = gs.optimizers.LossScaleOptimizer(SGD(rate), initial_scale=1.0, telemetry=True)
    tx = gs.with_loss_scale(optax.sgd(rate))
    state = tx.init(params)
    for gradient in grads:
        opt.apply([gradient * opt.loss_scale], [w])
        updates, state = tx.update(jnp.float32(gradient), state, params)
        params = optax.apply_updates(params, updates)
    assert float(w) == float(params) == -1.75
    assert (int(opt.iterations), float(opt.learning_rate)) == (3, 0.125)
    info = gs.diagnostics.telemetry(opt)
    assert (int(info.applied_steps), int(info.skipped_steps)) == (3, 2)

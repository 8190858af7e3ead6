"""Counts of steps stay at the largest int32, where they would wrap around to -2**31."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable

MOST = 2**31 - 1


def at_most(tree):
    """A state all of whose int32 numbers, which are counts and steps, are the largest."""
    return jax.tree.map(lambda x: jnp.full_like(x, MOST) if x.dtype == jnp.int32 else x, tree)


@pytest.mark.parametrize("x", [1.0, np.inf], ids=["applied", "skipped"])
@pytest.mark.parametrize("retries", [0, 2])
def test_a_train_state_counts_no_further_than_the_largest_integer(x, retries):
    """Steps, skipped and applied steps, retries, and the skipped steps of each gradient."""
    state = gs.TrainState.create(
        {"w": jnp.ones(2)},
        optax.sgd(0.1),
        loss_scale=gs.DynamicLossScale(hysteresis=2),
        telemetry=True,
    )
    step = gs.train_step(lambda p, x: (p["w"] * x).sum(), retries=retries)
    state = at_most(state)
    for _ in range(3):
        state, _ = step(state, jnp.full(2, x))
        assert int(state.step) == MOST
        assert (state.info.skipped_steps >= MOST - 1) & (state.info.applied_steps == MOST)
        counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
        assert all((count >= 0).all() for count in counts)


def test_the_updates_of_an_optimizer_stay_at_the_largest_integer():
    """So the bias correction of Adam does not divide by the power of a negative number."""
    w = Variable([1.0, 2.0])
    opt = LossScaleOptimizer(Adam(0.5), telemetry=True)
    opt.build([w])
    opt.iterations.assign(MOST)
    for _ in range(2):
        opt.minimize(lambda: (w.value() ** 2).sum(), [w])
    assert int(opt.iterations) == MOST
    assert np.isfinite(w.numpy()).all()


@pytest.mark.parametrize("window", [3, 4])
def test_windows_go_on_beyond_the_largest_integer(window):
    """Each window still ends after as many steps with an update of their mean."""
    w = Variable([0.0])
    opt = SGD(1.0, gradient_accumulation_steps=window)
    opt.build([w])
    steps = opt.variables[0]
    steps.assign(MOST // window * window - window)
    for n in range(1, 4 * window + 1):
        opt.apply([[1.0]], [w])
        assert float(w.numpy()[0]) == -(n // window)
        assert 0 < int(steps.value()) <= MOST

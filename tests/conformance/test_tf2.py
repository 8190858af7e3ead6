"""Cases of Keras 2.15's own tests that no sentence of its documents says.

From keras/mixed_precision/loss_scale_optimizer_test; the documents are in tests/documents.
"""

import jax.numpy as jnp
import pytest

import gainstage as gs
from gainstage.compat import experimental, tf2
from gainstage.optimizers import SGD, schedules

INF = float("inf")


def new(inner, scale=2.0**15, period=2000):
    return tf2.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=period)


def old(inner, scale=2.0**15, period=2000):
    return experimental.LossScaleOptimizer(inner, experimental.DynamicLossScale(scale, period))


def apply(opt, gradient, variable):
    """A step of a loop that scales the loss and unscales its gradient, which is `gradient`."""
    scaled = opt.get_scaled_loss(jnp.float32(1.0)) * jnp.asarray(gradient, jnp.float32)
    opt.apply_gradients(zip(opt.get_unscaled_gradients([scaled]), [variable], strict=True))


@pytest.mark.parametrize("make", [new, old])
def test_float16_loss(make):
    """A float16 loss whose scaled value float16 could not hold still gives the true step."""
    var, opt = gs.Variable(jnp.float16(5.0)), make(SGD(2.0), 2.0**15, 1)
    opt.minimize(lambda: var * jnp.float16(1.0), [var])
    assert (float(var), float(opt.loss_scale)) == (3.0, 2.0**16)


@pytest.mark.parametrize("make", [new, old])
def test_slots(make):
    """Momentum goes on over the steps, and a skipped one leaves it."""
    var, opt = gs.Variable([1.0, 2.0]), make(SGD(1.0, momentum=1.0), 2.0, 1)
    for expected, factor in (([0, 1], 1.0), ([0, 1], INF), ([-2, -1], 1.0)):
        opt.minimize(lambda factor=factor: (var * factor).sum(), [var])
        assert var.numpy().tolist() == expected
    assert int(opt.iterations) == 3
    assert [v.numpy().tolist() for v in opt.inner_optimizer.variables if v.shape] == [[-2, -2]]


def test_the_inner_schedule_and_clipping_are_applied():
    """A schedule counts the steps, and clipping sees the true gradient."""
    var = gs.Variable(5.0)
    schedule = schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
    opt = new(SGD(schedule, clipvalue=2.0), 1024.0)
    for gradient, weight in ((1.0, 4.0), (1.0, 3.0), (8.0, 2.0)):
        apply(opt, gradient, var)
        assert float(var) == weight


def test_custom_optimizers_are_serialized():
    """A class of the user's own comes back where it is among the custom objects."""

    class Mine(SGD):
        """SGD by another name."""

    opt = new(Mine(0.5), 4.0)
    again = tf2.LossScaleOptimizer.from_config(opt.get_config(), {"Mine": Mine})
    assert (type(again.inner_optimizer), float(again.loss_scale)) == (Mine, 4.0)


def test_checkpoint():
    """A saved state brings scale, count, slots and steps back into another optimizer."""

    def trained(gradients):
        var, opt = gs.Variable(1.0), new(SGD(1.0, momentum=0.5), 4.0, 3)
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

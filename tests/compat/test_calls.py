"""One table of calls: each row holds for every optimizer of `compat` that can take it."""

import itertools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest
from transfers import through_a_store

from gainstage.compat import dtensor, experimental, tf2, v1
from gainstage.optimizers import SGD, Variable, schedules

INF, NAN = float("inf"), float("nan")


class Row(NamedTuple):
    """A gradient for each call, and what there is after it."""

    gradients: list
    weights: list
    scales: list
    counts: list  # finite steps since the scale was updated
    start: Any = 1.0
    options: Any = None
    scale: float = 4.0
    period: int = 2


ROWS = {
    "the scale doubles and halves": Row(
        [1.0, 1.0, INF, 1.0, NAN], [0, -1, -1, -2, -2], [4, 8, 4, 4, 2], [1, 0, 0, 1, 0]
    ),
    "two overflows in a row": Row(
        [1.0, 1.0, INF, NAN, 1.0], [0, -1, -1, -1, -2], [4, 8, 4, 2, 2], [1, 0, 0, 0, 1]
    ),
    "a period of three": Row(
        [1.0, 1.0, 1.0, 1.0, NAN, 1.0], [0, -1, -2, -3, -3, -4], [4, 4, 8, 8, 4, 4],
        [1, 2, 0, 1, 0, 1], period=3,
    ),
    "a period of one": Row(
        [1.0, 1.0, INF], [3, 1, 1], [4, 8, 4], [0, 0, 0], start=5.0,
        options={"learning_rate": 2.0}, scale=2.0, period=1,
    ),
    "the scale stays at least 1": Row(
        [-INF, INF, NAN, 1.0], [1, 1, 1, 0], [2, 1, 1, 1], [0, 0, 0, 1]
    ),
    "a skipped step leaves the momentum": Row(
        [1.0, INF, 1.0], [0, 0, -2], [4, 2, 4], [0, 0, 0],
        options={"momentum": 1.0}, scale=2.0, period=1,
    ),
    "a vector": Row(
        [1.0, INF, 1.0], [[0, 1], [0, 1], [-2, -1]], [4, 2, 4], [0, 0, 0], start=[1.0, 2.0],
        options={"momentum": 1.0}, scale=2.0, period=1,
    ),
    "momentum": Row(
        [1.0, 1.0, 2.0], [0.0, -1.5, -4.25], [4, 8, 8], [1, 0, 1],
        options={"momentum": 0.5},
    ),
    "float16": Row(
        [0.0, 1.0], [5, 3], [2.0**15, 2.0**16], [0, 0], start=jnp.float16(5.0),
        options={"learning_rate": 2.0}, scale=2.0**14, period=1,
    ),
    "a schedule and a clip": Row(
        [1.0, 1.0, 8.0], [4, 3, 2], [1024, 1024, 1024], [1, 2, 3], start=5.0, scale=1024.0,
        period=4,
        options={
            "learning_rate": schedules.PiecewiseConstantDecay([1], [1.0, 0.5]), "clipvalue": 2.0
        },
    ),
}  # fmt: skip


def options(row):
    return {"learning_rate": 1.0} | (row.options or {})


def of_tf2(row):
    """With two arguments for the scale."""
    inner = SGD(**options(row))
    return tf2.LossScaleOptimizer(inner, initial_scale=row.scale, dynamic_growth_steps=row.period)


def of_experimental(row):
    """With an object for the scale."""
    inner = SGD(**options(row))
    scale = experimental.DynamicLossScale(row.scale, row.period)
    return experimental.LossScaleOptimizer(inner, scale)


def of_v1(row):
    """With an object for the scale, which is updated itself."""
    make = v1.MomentumOptimizer if "momentum" in options(row) else v1.GradientDescentOptimizer
    scale = v1.DynamicLossScale(row.scale, row.period)
    return v1.MixedPrecisionLossScaleOptimizer(make(**options(row)), scale)


def of_dtensor(row):
    """Without a scale."""
    return dtensor.SGD(**options(row))


def can_take(make, row):
    """Whether a class has what a row needs."""
    if make is of_v1:
        return "clipvalue" not in options(row)
    return make is not of_dtensor or all(map(math.isfinite, row.gradients))


CASES = [
    pytest.param(make, row, id=f"{make.__name__[3:]}: {name}")
    for make, (name, row) in itertools.product(
        [of_tf2, of_experimental, of_v1, of_dtensor], ROWS.items()
    )
    if can_take(make, row)
]


def apply(opt, gradient, variable, **counted):
    """A step of a loop that scales the loss and unscales its gradient."""
    true = jnp.full(variable.shape, gradient, jnp.float32)
    if isinstance(opt, tf2.LossScaleOptimizer):
        (true,) = opt.get_unscaled_gradients([opt.get_scaled_loss(1.0) * true])
    opt.apply_gradients([(true, variable)], **counted)


def minimize(opt, gradient, variable, **counted):
    """A step that does both by itself, on a loss in the dtype of the variable."""
    factor = variable.dtype.type(gradient)
    opt.minimize(lambda: (variable * factor).sum(), var_list=[variable], **counted)


def state(opt):
    return opt.variables() if callable(opt.variables) else opt.variables


def check(opt, row, step, variable, calls):
    """Makes some calls of a row, and compares what there is after each."""
    steps = Variable(sum(map(math.isfinite, row.gradients[: calls.start])))
    counted = {"global_step": steps} if isinstance(opt, v1.Optimizer) else {}
    for i in calls:
        step(opt, row.gradients[i], variable, **counted)
        assert variable.numpy().tolist() == row.weights[i]
        if isinstance(opt, v1.Optimizer):  # which count no skipped step
            assert int(steps) == sum(map(math.isfinite, row.gradients[: i + 1]))
        else:
            assert int(opt.iterations) == i + 1
        if not isinstance(opt, dtensor.SGD):
            assert (opt.loss_scale.dtype, float(opt.loss_scale)) == (jnp.float32, row.scales[i])
            (count,) = [v for v in state(opt) if v.name.endswith(("good_steps", "step_counter"))]
            assert int(count) == row.counts[i]


@pytest.mark.parametrize("step", [apply, minimize])
@pytest.mark.parametrize(("make", "row"), CASES)
def test_calls_have_the_effects_of_their_row(make, row, step):
    """Weight, scale, count and steps after each call are those of the table. A non-finite gradient
    skips the step; steps that are skipped count, but not in version 1."""
    check(make(row), row, step, Variable(row.start), range(len(row.gradients)))


def through(opt, other):
    """Hands the state over: by Keras's methods where there are any."""
    if isinstance(opt, v1.Optimizer):
        other.set_weights([v.numpy() for v in state(opt)])
    else:
        through_a_store(opt, other)


@pytest.mark.parametrize(("make", "row"), CASES)
def test_a_row_goes_on_in_another_optimizer(make, row):
    """One that is made alike and gets the state before the last call makes that call alike."""
    variable, opt, other = Variable(row.start), make(row), make(row)
    last = len(row.gradients) - 1
    check(opt, row, apply, variable, range(last))
    other.build([variable])
    through(opt, other)
    check(other, row, apply, variable, range(last, last + 1))

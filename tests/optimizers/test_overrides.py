"""What a user's subclass overrides: each face uses it, or says that it does not."""

import jax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable


class Doubled(SGD):
    def apply(self, grads, trainable_variables=None, **more):
        super().apply([2 * g for g in grads], trainable_variables, **more)


class HalfRate(SGD):
    @property
    def learning_rate(self):
        return super().learning_rate * 0.5

    @learning_rate.setter
    def learning_rate(self, rate):
        SGD.learning_rate.fset(self, rate)


class Python(SGD):
    number = 0.5

    @property
    def learning_rate(self):
        return self.number


class Counted(SGD):
    @property
    def learning_rate(self):
        return 2.0**-self.iterations


@pytest.mark.parametrize("compiled", [True, False])
def test_the_pure_step_calls_an_override_of_apply(compiled):
    """`stateless_apply` takes the step that `apply` takes."""
    w = Variable(1.0)
    opt = Doubled(0.25)
    opt.build([w])
    step = jax.jit(opt.stateless_apply) if compiled else opt.stateless_apply
    (new,), state = step([v.value() for v in opt.variables], [1.0], [1.0])
    opt.apply([1.0])
    assert (float(new), int(state[0])) == (float(w), int(opt.iterations)) == (0.5, 1)


@pytest.mark.parametrize("wrap", [lambda opt: opt, LossScaleOptimizer], ids=["alone", "wrapped"])
@pytest.mark.parametrize(
    ("kind", "steps", "expected"), [(HalfRate, 2, 0.75), (Python, 2, 0.0), (Counted, 3, -0.75)]
)
@pytest.mark.parametrize("how", ["eager", "uncompiled", "jit", "pure"])
def test_a_step_uses_the_learning_rate_of_a_subclass(kind, steps, expected, wrap, how):
    """The rate of each step is the property of the class, alone and in a wrapper, as in Keras."""
    w = Variable(1.0)
    opt = wrap(kind(0.25, jit_compile=how != "uncompiled"))
    opt.build([w])

    def step():
        opt.minimize(lambda: w * 1.0, [w])

    if how == "jit":
        step = gs.optimizers.jit(step, ([w], opt.variables))
    for _ in range(steps):
        if how == "pure":
            scale = float(opt.scale_loss(1.0)) if isinstance(opt, LossScaleOptimizer) else 1.0
            values, state = opt.stateless_apply(
                [v.value() for v in opt.variables], [scale], [w.value()]
            )
            opt.set_weights(state)
            w.assign(values[0])
        else:
            step()
    assert float(w) == expected


def test_the_wrapper_reads_and_sets_the_learning_rate_of_a_subclass():
    """A new number in an attribute of the class counts in the next step. That is compiled again,
    once: the step may read the attribute anywhere."""
    traces = []

    class Traced(Python):
        def update_step(self, gradient, variable, learning_rate):
            traces.append(variable.name)
            super().update_step(gradient, variable, learning_rate)

    w, inner = Variable(1.0), Traced(0.25)
    opt = LossScaleOptimizer(inner)
    opt.minimize(lambda: w * 1.0, [w])
    inner.number = 0.25
    opt.minimize(lambda: w * 1.0, [w])
    assert (float(w), opt.learning_rate, len(traces)) == (0.25, 0.25, 2)
    opt.minimize(lambda: w * 1.0, [w])
    assert (float(w), len(traces)) == (0.0, 2)
    half = LossScaleOptimizer(HalfRate(0.25))
    half.learning_rate = 1.0
    assert float(half.learning_rate) == 0.5

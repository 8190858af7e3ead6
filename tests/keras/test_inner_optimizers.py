"""Keras's wrapper around any optimizer: it trains the rule, and reads the options, of that one."""

import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs

keras = pytest.importorskip("keras")

from gainstage.interop.keras import LossScaleOptimizer

RULES = ["SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "Adafactor", "Ftrl", "Lion",
         "Nadam", "RMSprop", "Lamb", "Muon"]  # fmt: skip


def trained(optimizer, steps=5):
    """A weight after some steps of one constant gradient."""
    weight = keras.Variable(np.ones((3, 4), "float32"))
    optimizer.build([weight])
    for _ in range(steps):
        optimizer.apply([optimizer.scale_loss(np.full((3, 4), 0.25, np.float32))], [weight])
    return np.asarray(weight.value)


class Counting(keras.optimizers.SGD):
    """Halves each step, by a count that its `build` assigns as an attribute."""

    def build(self, variables):
        super().build(variables)
        self.factor = keras.Variable(1.0)
        self.lists = {"more": [keras.Variable(0.0)]}

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.factor, variable, learning_rate)
        self.factor.assign(self.factor / 2)
        self.lists["more"][0].assign_add(1.0)


@pytest.mark.parametrize("name", [*RULES, "Counting"])
def test_each_optimizer_of_keras_keeps_its_rule(name):
    """Under the wrapper five steps are those of the optimizer alone, also where `build` assigns a
    variable as a plain attribute: all of its variables are variables of the wrapper."""
    kind = Counting if name == "Counting" else getattr(keras.optimizers, name)
    alone, wrapped = kind(0.1), LossScaleOptimizer(kind(0.1))
    np.testing.assert_allclose(trained(wrapped), trained(alone), rtol=3e-6)
    assert [v.shape for v in wrapped.variables[4:]] == [v.shape for v in alone.variables]
    assert len({id(v) for v in wrapped.variables}) == len(wrapped.variables)
    if name == "Counting":
        assert float(wrapped.inner_optimizer.lists["more"][0].value) == 5


def test_a_sum_of_microbatches_that_overflows_is_skipped():
    """Two finite gradients whose sum is infinite do not make an update or an infinite sum."""
    inner = keras.optimizers.SGD(1e-30, gradient_accumulation_steps=2)
    optimizer = LossScaleOptimizer(inner, loss_scale=gs.FixedLossScale(1.0))
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer.build([weight])
    for _ in range(4):
        optimizer.apply([jnp.full(3, 3e38)], [weight])
    assert int(optimizer.inner_optimizer.iterations) == 0
    assert weight.value.tolist() == [1, 1, 1]
    assert all(np.isfinite(v.value).all() for v in optimizer.variables)
    optimizer.apply([jnp.full(3, -1e30)], [weight])
    assert int(optimizer.inner_optimizer.iterations) == 1


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0),
    ],
    ids=["ours", "Keras's"],
)
def test_a_scale_within_a_scale_is_refused(wrapped):
    """A wrapper around a wrapper would divide twice, so it is an error that says what to pass."""
    with pytest.raises(TypeError, match=r"does not scale losses; got .*Pass its `inner"):
        LossScaleOptimizer(wrapped(), 16.0)


def test_one_variable_is_updated_by_hand():
    """`update_step` is the inner optimizer's, with an unscaled gradient and a rate."""
    weight = keras.Variable(np.ones((2,), "float32"))
    opt = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    opt.build([weight])
    for expected in (0.5, -0.25):  # the second step has half of the first one's momentum
        opt.update_step(np.full(2, 2.0, np.float32), weight, np.float32(0.25))
        np.testing.assert_allclose(weight.value, expected)


class Multiplied(keras.optimizers.Optimizer):
    """A rule of a user, with a number of its own."""

    factor = 1.0

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient * self.factor)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "momentum", (0.9, 0.0, 0.5)),
        (lambda: keras.optimizers.Adam(0.1), "beta_1", (0.5, 0.1, 0.9)),
        (lambda: keras.optimizers.SGD(0.1), "clipnorm", (None, 0.5, 1.0)),
        (lambda: Multiplied(0.1), "factor", (1.0, 10.0, 100.0)),
    ],
    ids=["SGD", "Adam", "clipnorm", "own"],
)
def test_a_number_that_is_set_between_steps_is_obeyed(make, name, values):
    """An eager step uses the inner optimizer's numbers of now, as in Keras."""
    found = []
    for optimizer in (make(), LossScaleOptimizer(make(), initial_scale=1.0)):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        weight = keras.Variable([1.0, 2.0])
        optimizer.build([weight])
        for value in values:
            setattr(inner, name, value)
            assert getattr(inner, name) == value
            optimizer.apply([jnp.array([3.0, 2.0])], [weight])
        found.append(weight.value)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_a_callable_rate_is_called_in_each_step():
    """A rate without arguments gives the rate of each eager step, as in Keras."""
    rates = {"now": 0.5}
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(lambda: rates["now"]), initial_scale=1.0)
    weight = keras.Variable([1.0])
    for rate in (0.5, 0.25, 0.125):
        rates["now"] = rate
        optimizer.apply([jnp.array([1.0])], [weight])
    assert weight.value.tolist() == [0.125]


class Line(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule with an attribute that is set later."""

    rate = 0.5

    def __call__(self, step):
        return keras.ops.multiply(self.rate, keras.ops.cast(step, "float32") + 1.0)


def test_a_schedule_that_is_changed_between_steps_is_obeyed():
    """An eager step uses the attributes of a schedule that are set now, as in Keras."""
    schedule, weight = Line(), keras.Variable([0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(schedule), initial_scale=1.0)
    optimizer.scale_loss(1.0)
    optimizer.apply([jnp.array([-1.0])], [weight])
    schedule.rate = 2.0
    optimizer.apply([jnp.array([-1.0])], [weight])
    assert weight.value.tolist() == [0.5 + 4.0]


def test_the_state_of_a_nadam_that_keras_has_saved():
    """Keras's wrapper leaves out the product of a Nadam's momenta. It is computed from the number
    of updates, with a warning, and the run goes on as ours does."""

    def trained(cls, steps, state=None):
        w = keras.Variable([1.0, 2.0], name="w")
        opt = cls(keras.optimizers.Nadam(0.1, gradient_accumulation_steps=2), initial_scale=8.0)
        opt.build([w])
        if state is not None:
            opt.load_own_variables(state)
        weights, values = [w.value], [v.value for v in opt.variables]
        for _ in range(steps):
            weights, values = opt.stateless_apply(values, [jnp.array([8.0, 16.0])], weights)
        return opt, weights, values

    _, _, saved = trained(keras.optimizers.LossScaleOptimizer, 6)
    whole, _, expected = trained(LossScaleOptimizer, 6)
    with pytest.warns(UserWarning, match="does not save the product"):
        opt, _, _ = trained(LossScaleOptimizer, 0, {str(i): v for i, v in enumerate(saved)})
    product = float(opt.inner_optimizer._u_product.value)
    place = [v is whole.inner_optimizer._u_product for v in whole.variables].index(True)
    assert product == pytest.approx(float(expected[place]))
    assert int(opt.iterations) == 3

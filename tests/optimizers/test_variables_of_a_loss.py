"""A callable `var_list`: the loss comes first, and may create the variables that are trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.compat import dtensor, experimental, tf2, v1
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable

OPTIMIZERS = {
    "SGD": lambda: SGD(0.25),
    "LossScaleOptimizer": lambda: LossScaleOptimizer(SGD(0.25)),
    "dtensor": lambda: dtensor.SGD(0.25),
    "tf2": lambda: tf2.LossScaleOptimizer(SGD(0.25)),
    "experimental": lambda: experimental.LossScaleOptimizer(SGD(0.25), "dynamic"),
    "v1": lambda: v1.GradientDescentOptimizer(0.25),
    "v1 scaled": lambda: v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.25), 8),
}
every_class = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Lazy:
    """A model that creates its weight when it is called for the first time."""

    def __init__(self, **earlier):
        self.variables, self.calls = list(earlier.values()), []

    def loss(self):
        self.calls.append("loss")
        if "late" not in [v.name for v in self.variables]:
            self.variables.append(Variable(jnp.full(2, 2.0), name="late"))
        return sum((v**2).sum() for v in self.variables)

    def var_list(self):
        self.calls.append("var_list")
        return self.variables


@every_class
def test_a_variable_that_the_loss_creates_is_trained_from_the_first_step_on(make):
    """The loss is called once, before `var_list`, and what it creates takes part in that step."""
    model, opt = Lazy(), make()
    opt.minimize(model.loss, var_list=model.var_list)
    assert model.calls == ["loss", "var_list"]
    assert model.variables[0].numpy().tolist() == [1.0, 1.0]
    opt.minimize(model.loss, var_list=model.var_list)
    assert model.variables[0].numpy().tolist() == [0.5, 0.5]
    assert len(model.variables) == 1


@every_class
def test_gradients_of_variables_that_the_loss_creates(make):
    """`compute_gradients` has a pair for each variable, also if the loss creates it."""
    early = Variable(4.0, name="early")
    model, opt = Lazy(early=early), make()
    pairs = opt.compute_gradients(model.loss, model.var_list)
    assert [variable.name for _, variable in pairs] == ["early", "late"]
    scale = 2.0**15 if type(opt) is LossScaleOptimizer else 1.0
    assert [float(g.sum()) / scale for g, _ in pairs] == [8.0, 8.0]


def test_the_optimizer_is_built_for_early_and_late_variables():
    """Slots exist for all variables; one that appears in a later step is an error."""
    model = Lazy(early=Variable(4.0, name="early"))
    opt = SGD(0.25, momentum=0.5)
    opt.minimize(model.loss, model.var_list)
    assert [v.name for v in opt.trainable_variables] == ["early", "late"]
    assert [v.shape for v in opt.momentums] == [(), (2,)]
    model.variables.append(Variable(1.0, name="later"))
    before = [v.numpy() for v in (*model.variables, *opt.variables)]
    with pytest.raises(ValueError, match=r"built with, \['early', 'late'\]; got 'later'"):
        opt.minimize(model.loss, model.var_list)
    for variable, value in zip((*model.variables, *opt.variables), before, strict=True):
        assert (variable.numpy() == value).all()


def test_inside_a_compiled_function_a_loss_creates_no_variable():
    """The error says to create variables outside of the traced function."""
    w = Variable(1.0)
    opt = SGD(0.25)
    opt.build([w])

    def loss():
        return (Variable(2.0) * w) ** 2

    step = gs.optimizers.jit(lambda: opt.minimize(loss, lambda: [w]), state=([w], opt.variables))
    with pytest.raises(ValueError, match=r"Create variables .* outside of the traced function"):
        step()
    assert float(w) == 1.0


def test_a_compiled_step_takes_a_callable_var_list():
    """In `gs.optimizers.jit` a callable `var_list` gives the same steps as the list."""
    results = []

    def run(choose):
        w, b = Variable([1.0, 2.0], name="w"), Variable(3.0, name="b")
        opt = LossScaleOptimizer(Adam(0.1))
        opt.build([w, b])
        chosen = choose([w, b])
        step = gs.optimizers.jit(
            lambda: opt.minimize(lambda: ((w * b) ** 2).sum(), chosen),
            state=([w, b], opt.variables),
        )
        results.append([float(step()), float(step()), *w.numpy(), float(b)])

    run(lambda variables: variables)
    run(lambda variables: lambda: variables)
    assert results[0] == results[1]


def test_reads_in_loops_and_compiled_functions_count():
    """The gradients are those of JAX, wherever in the loss a variable is read first."""
    w, b = Variable([1.0, 2.0], name="w"), Variable([2.0, 2.0], name="b")
    unused = Variable(1.0, name="unused")

    def pure(w, b):
        def body(carry, x):
            return carry * w.sum() + x * b.sum(), None

        carry, _ = jax.lax.scan(body, 1.0, jnp.array([1.0, 0.5]))
        return carry + jax.jit(jnp.dot)(w, b)

    def loss():
        def body(carry, x):
            return carry * w.value().sum() + x * b.value().sum(), None

        carry, _ = jax.lax.scan(body, 1.0, jnp.array([1.0, 0.5]))
        return carry + jax.jit(jnp.dot)(w.value(), b.value())

    pairs = SGD().compute_gradients(loss, lambda: [b, unused, w])
    expected = jax.grad(pure, argnums=(1, 0))(w.value(), b.value())
    assert pairs[1] == (None, unused)
    np.testing.assert_allclose(pairs[0][0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(pairs[2][0], expected[1], rtol=1e-6)


def test_a_derivative_inside_of_the_loss():
    """A penalty on `jax.grad` of a function that reads variables has the right gradient."""
    w, x = Variable(3.0), Variable(2.0)
    penalty = lambda: jax.grad(lambda x: w.value() ** 2 * x**2)(x.value())  # noqa: E731
    ((of_w, _), (of_x, _)) = SGD().compute_gradients(penalty, lambda: [w, x])
    assert (float(of_w), float(of_x)) == (4 * 3.0 * 2.0, 2 * 9.0)  # of 2 w**2 x


@pytest.mark.parametrize("inner", [lambda v: v, lambda v: lambda: v], ids=["list", "callable"])
def test_gradients_of_gradients(inner):
    """A loss of `compute_gradients`, with a list or a callable, is differentiated itself."""
    w, b = Variable([1.0, 2.0]), Variable(3.0)

    def loss():
        ((gradient, _),) = SGD().compute_gradients(lambda: (w**3).sum() * b, inner([w]))
        return gradient.sum()  # of 3 w**2 b

    (of_w, _), (of_b, _) = SGD().compute_gradients(loss, lambda: [w, b])
    assert of_w.tolist() == [6 * 1.0 * 3.0, 6 * 2.0 * 3.0]
    assert float(of_b) == 3 * 1.0 + 3 * 4.0


def test_variables_that_are_not_trained_are_not_differentiated():
    """In later steps a loss may pass a variable that is not trained to a callback."""
    w, rate = Variable(2.0), Variable(0.5)
    opt = SGD(0.25)
    opt.build([w])

    def loss():
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return w * jax.pure_callback(np.float32, shape, rate.value())

    assert float(opt.minimize(loss, lambda: [w])) == 1.0
    assert float(w) == 2.0 - 0.25 * 0.5


def test_what_such_a_loss_assigns_is_kept_if_the_step_is_applied():
    """A running mean that the loss reads and assigns changes with the step, and not with a skipped
    one."""
    w, mean = Variable(2.0), Variable(0.0)
    opt = LossScaleOptimizer(SGD(0.25))

    def loss(x):
        mean.assign(0.5 * mean + 0.5 * x)
        return w * x

    opt.minimize(lambda: loss(4.0), lambda: [w])
    assert (float(w), float(mean)) == (1.0, 2.0)
    opt.minimize(lambda: loss(np.nan), lambda: [w])
    assert (float(w), float(mean)) == (1.0, 2.0)
    with pytest.raises(ValueError, match="does not assign what it trains"):
        opt.minimize(lambda: loss(4.0), lambda: [w, mean])
    with pytest.raises(ValueError, match="does not assign"):
        opt.compute_gradients(lambda: loss(4.0), lambda: [w])
    assert (float(w), float(mean)) == (1.0, 2.0)


def test_retries_and_accumulation_of_variables_that_the_loss_creates():
    """A first step that overflows is retried for a created variable, and microbatches are added."""
    made = []

    def loss():
        if not made:
            made.append(Variable(1.0))
        return 4 * made[0] ** 2

    opt = LossScaleOptimizer(SGD(1 / 16), initial_scale=2.0**126)
    opt.minimize(loss, lambda: made, retries=8)
    assert (float(made[0]), float(opt.loss_scale)) == (0.5, 2.0**124)

    model, opt = Lazy(), SGD(0.25, gradient_accumulation_steps=2)
    for expected in (2.0, 1.0):
        opt.minimize(model.loss, model.var_list)
        assert model.variables[0].numpy().tolist() == [expected] * 2


def test_half_precision_and_frozen_variables():
    """A half-precision variable that the loss creates gets its gradient; others that it reads
    change nothing."""
    frozen, counter = Variable(3.0, trainable=False), Variable(0, trainable=False)
    made = []

    def loss():
        if not made:
            made.append(Variable(jnp.ones(2, jnp.float16)))
        counter.assign_add(1)
        return (made[0].astype("float32") * frozen).sum()

    opt = LossScaleOptimizer(SGD(0.25), initial_scale=8.0)
    assert float(opt.minimize(loss, lambda: made)) == 6.0
    assert made[0].numpy().tolist() == [0.25, 0.25]
    assert (float(frozen), int(counter)) == (3.0, 1)


def test_an_interrupted_loss_leaves_all_variables_readable():
    """A loss that raises after it has read variables leaves them as they were."""
    w = Variable(2.0)

    def loss():
        raise KeyError(float(jnp.shape(w.value() * 2) == ()))

    with pytest.raises(KeyError):
        SGD().minimize(loss, lambda: [w])
    assert float(w * 2) == 4.0
    opt = SGD(0.25)
    opt.minimize(lambda: w**2, lambda: [w])
    assert float(w) == 1.0

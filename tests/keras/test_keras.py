"""Every optimizer, schedule and option against the live Keras 3, on its JAX backend."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable, from_optax, schedules

keras = pytest.importorskip("keras")

STEPS = 50
SHAPES = [(4, 3), (5,)]
RULES = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{}, {"amsgrad": True, "beta_1": 0.8}],
    "AdamW": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True, "momentum": 0.5}],
    "Adagrad": [{}],
    "Adadelta": [{}, {"rho": 0.5}],
}
# EMA frequency 0 is left out: Keras's JAX backend overwrites at the wrong steps.
OPTIONS = [
    {},
    {"weight_decay": 0.05, "clipnorm": 0.5},
    {"clipvalue": 0.3, "use_ema": True, "ema_momentum": 0.8},
    {"global_clipnorm": 0.7, "use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    {"gradient_accumulation_steps": 2, "clipnorm": 0.4},
    {"gradient_accumulation_steps": 3, "use_ema": True, "ema_overwrite_frequency": 2},
]


def cases():
    """Every rule without options, and Adam with each; the first rule of the others is thorough."""
    for name, rules in RULES.items():
        for (i, rule), options in itertools.product(enumerate(rules), OPTIONS):
            seldom = pytest.mark.slow if i else pytest.mark.thorough
            often = not options or (name == "Adam" and i == 0)
            yield pytest.param(name, rule, options, marks=[] if often else [seldom])


def close(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (np.abs(actual - expected) <= 1e-4 * np.abs(expected) + 2e-6).all()


def steps(optimizer, weights, grads):
    """The weights after each step of a pure optimizer, from one compiled scan."""

    def step(carry, grads):
        carry = optimizer.stateless_apply(carry[1], list(grads), carry[0])
        return carry, carry[0]

    variables = [v.value if hasattr(v, "path") else v.value() for v in optimizer.variables]
    return jax.jit(lambda w, s, g: jax.lax.scan(step, (w, s), g)[1])(weights, variables, grads)


@pytest.mark.parametrize(("name", "rule", "options"), list(cases()))
def test_fifty_steps_are_those_of_keras(name, rule, options):
    """Fifty random steps end, and stay on the way, where Keras's own implementation is."""
    rate = 0.01 if name != "Adadelta" else 1.0
    arguments = {"learning_rate": rate, **rule, **options}
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=s).astype(np.float32) for s in SHAPES]
    grads = [rng.normal(size=(STEPS, *s)).astype(np.float32) for s in SHAPES]

    ours = getattr(gs.optimizers, name)(**arguments)
    ours.build([Variable(w, name=f"v{i}") for i, w in enumerate(weights)])
    theirs = getattr(keras.optimizers, name)(**arguments)
    theirs.build([keras.Variable(w) for w in weights])
    for a, b in zip(steps(ours, weights, grads), steps(theirs, weights, grads), strict=True):
        close(a, b)


SCHEDULES = [
    ("ExponentialDecay", (0.1, 5, 0.5), {}),
    ("ExponentialDecay", (0.1, 5, 0.5), {"staircase": True}),
    ("InverseTimeDecay", (0.1, 5, 0.5), {}),
    ("InverseTimeDecay", (0.1, 5, 0.5), {"staircase": True}),
    ("PolynomialDecay", (0.1, 10), {"power": 2.0}),
    ("PolynomialDecay", (0.1, 10, 0.01), {"power": 0.5, "cycle": True}),
    ("CosineDecay", (0.1, 20), {"alpha": 0.1}),
    ("CosineDecay", (0.0, 10), {"warmup_target": 0.1, "warmup_steps": 5}),
    ("CosineDecay", (0.3, 10), {"warmup_target": 0.1, "warmup_steps": 0}),
    ("CosineDecayRestarts", (0.1, 4), {"alpha": 0.1}),
    ("CosineDecayRestarts", (0.1, 7), {"t_mul": 1.0, "m_mul": 0.5}),
    ("CosineDecayRestarts", (0.1, 3), {"t_mul": 1.5, "m_mul": 0.9}),
    ("PiecewiseConstantDecay", ([3, 7], [1.0, 0.5, 0.25]), {}),
]


@pytest.mark.parametrize(("name", "arguments", "options"), SCHEDULES)
def test_schedules_are_those_of_keras(name, arguments, options):
    """Every schedule has Keras's rate at every step, under jit, and reads Keras's configuration."""
    ours = getattr(schedules, name)(*arguments, **options)
    theirs = getattr(keras.optimizers.schedules, name)(*arguments, **options)
    compiled, original = jax.jit(ours), jax.jit(lambda step: theirs(step))
    for step in range(25):
        close(compiled(step), original(step))
    assert ours.get_config() == {**theirs.get_config()}
    opt = SGD(ours)
    twin = SGD.from_config(opt.get_config())
    assert twin.get_config() == opt.get_config()
    close(twin.learning_rate, ours(0))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", RULES)
def test_configurations_of_keras_are_readable(name):
    """A configuration that Keras wrote makes the same optimizer here, and ours round-trips."""
    options = {"ema_momentum": 0.5, "use_ema": True, "clipnorm": 2.0}
    theirs = getattr(keras.optimizers, name)(0.5, **options).get_config()
    ours = getattr(gs.optimizers, name).from_config(theirs)
    for key, value in theirs.items():
        assert ours.get_config()[key] == value or key == "name"
    wrapped = LossScaleOptimizer(ours).get_config()
    assert LossScaleOptimizer.from_config(wrapped).get_config() == wrapped


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_state_that_a_class_adds_before_build_stands_where_keras_has_it():
    """Variables stand as they were created, so what Keras has saved is loaded into its places."""

    def counting(base):
        class Counting(base):
            def __init__(self, *args, **options):
                super().__init__(*args, **options)
                self.count = self.add_variable((), "ones", name="count")

        return Counting(0.5, use_ema=True, gradient_accumulation_steps=2)

    theirs, variable = counting(keras.optimizers.SGD), keras.Variable(5.0)
    theirs.apply_gradients([(jnp.float32(1.0), variable)])
    ours, store = counting(SGD), {}
    ours.build([Variable(0.0)])
    theirs.save_own_variables(store)
    ours.load_own_variables(store)
    assert [float(v) for v in ours.variables] == [1.0, 0.5, 1.0, 5.0, 1.0]
    assert ours.variables[2] is ours.count


def test_optax_with_every_option():
    """Scaling, skipping, clipping, averaging and accumulation apply to an optax transformation."""
    options = {"clipnorm": 0.5, "use_ema": True, "gradient_accumulation_steps": 2}
    runs = []
    for inner in (from_optax(optax.sgd(0.1, momentum=0.9), **options), SGD(0.1, 0.9, **options)):
        var = Variable([1.0, 2.0])
        opt = LossScaleOptimizer(inner, initial_scale=8.0)
        for g in (1.0, np.nan, 2.0, 3.0, 4.0):
            opt.apply([np.float32([8 * g, -g])], [var])
        runs.append((var.numpy(), float(opt.loss_scale), int(opt.iterations)))
        names = [v.name for v in opt.variables]
        assert len(set(names)) == len(names)
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-6)
    assert runs[0][1:] == runs[1][1:] == (4.0, 2)
    with pytest.raises(TypeError, match="GradientTransformation for tx"):
        from_optax(0.1)


def test_optax_leaves_variables_without_gradient_alone():
    """A variable without a gradient is not moved by the transformation's decay."""
    w, b = Variable(1.0, name="w"), Variable(1.0, name="b")
    opt = from_optax(optax.adamw(0.1, weight_decay=0.5))
    opt.build([w, b])
    opt.apply([1.0], [w])
    assert float(b) == 1.0
    assert float(w) < 1.0
    opt.build([w, b])
    assert len(opt.variables) == 7
    opt.learning_rate = 0.0
    before = float(w)
    opt.apply([1.0], [w])
    assert float(w) == before

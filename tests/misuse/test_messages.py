"""What a user reads: representations, warnings, and errors that say what to do."""

import importlib
import sys
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import gainstage as gs
from gainstage.compat import experimental, tf2, v1
from gainstage.optimizers import LossScaleOptimizer, Variable, from_optax, functionalize, schedules
from gainstage.transforms import current_scale


def test_an_optimizer_shows_its_rate_its_scale_and_whether_it_is_built():
    """`repr` has the class, the name, the rate, the scale, the rule, and what it was built for."""
    weight, inner = Variable(1.0), gs.optimizers.Adam(0.001)
    assert repr(inner) == "<Adam 'adam': learning rate 0.001, not built>"
    opt = LossScaleOptimizer(inner, 2.0**20)
    opt.build([weight])
    assert repr(opt) == (
        "<LossScaleOptimizer 'loss_scale_optimizer': scale 1048576, rule DynamicLossScale, around "
        "<Adam 'adam': learning rate 0.001, built for 1 variable>>"
    )
    scheduled = gs.optimizers.SGD(schedules.ExponentialDecay(0.1, 10, 0.9))
    assert "learning rate ExponentialDecay(" in repr(scheduled)


def test_a_representation_needs_no_value():
    """`repr` works where there is nothing to read: while tracing, and for what is only planned."""
    opt = LossScaleOptimizer(gs.optimizers.SGD(0.5))
    opt.build([Variable(jax.ShapeDtypeStruct((2,), jnp.float32))])
    said = []
    jax.jit(functionalize(lambda: said.append(repr(opt)), opt.variables))(
        [v.value() for v in opt.variables]
    )
    assert "scale unknown" in said[0]
    assert "learning rate unknown" in said[0]


def test_a_compiled_function_shows_its_name_and_its_state():
    """`repr` of a compiled function has its name, the number of variables, and `donate`."""
    step = gs.optimizers.jit(lambda: None, [Variable(1.0)], donate=True)
    assert repr(step) == "<gainstage.optimizers.jit of <lambda>: 1 variables, donate=True>"


@pytest.mark.parametrize(
    "use",
    [
        lambda opt, w: opt.minimize(lambda: w * w, [w]),
        lambda opt, w: opt.apply([jax.grad(lambda x: opt.scale_loss(x * x))(w.value())], [w]),
        lambda opt, w: opt.apply([jax.grad(lambda x: x * x * opt.loss_scale)(w.value())], [w]),
        lambda opt, w: opt.apply([jax.grad(lambda x: x * x * opt.dynamic_scale)(w.value())], [w]),
        lambda opt, w: opt.apply_gradients(opt.compute_gradients(lambda: w * w, [w])),
    ],
    ids=["minimize", "scale_loss", "loss_scale", "dynamic_scale", "compute_gradients"],
)
def test_gradients_of_a_scaled_loss_are_not_warned_of(use):
    """Every way to multiply a loss by the scale counts as scaling."""
    weight, opt = Variable(1.0), LossScaleOptimizer(gs.optimizers.SGD(0.25))
    with warnings.catch_warnings(action="error"):
        use(opt, weight)
    assert float(weight) == 0.5


@pytest.mark.parametrize("read", ["loss_scale", "dynamic_scale"])
def test_a_print_of_the_scale_silences_nothing(read):
    """Gradients of a loss that was not scaled are warned of, once, though the scale was read
    before the first step."""
    weight, opt = Variable(1.0), LossScaleOptimizer(gs.optimizers.SGD(0.25))
    print(getattr(opt, read))
    opt.apply([2.0], [weight])
    with pytest.warns(UserWarning, match="no loss was multiplied by it"):
        opt.apply([2.0], [weight])
    opt.apply([2.0], [weight])


def test_a_cell_that_is_run_again_is_told_what_to_do():
    """Wrapping an optimizer again, or training a new variable of an old name, names the remedy."""
    weight, inner = Variable(1.0, name="w"), gs.optimizers.SGD(0.5)
    opt = LossScaleOptimizer(inner)
    with pytest.raises(
        ValueError, match=r"already wrapped by 'loss_scale_optimizer'.*Create a new"
    ):
        LossScaleOptimizer(inner)
    opt.minimize(lambda: weight * weight, [weight])
    again = Variable(1.0, name="w")
    with pytest.raises(ValueError, match=r"another variable of that name.*create a new optimizer"):
        opt.minimize(lambda: again * again, [again])


def test_an_extra_that_is_missing_is_named(monkeypatch):
    """The error names the package, and the command that installs the extra with it."""
    monkeypatch.delitem(sys.modules, "gainstage.interop.tensorboard", raising=False)
    imported = [name for name in sys.modules if name.startswith("tensorboardX.")]
    for name in ("tensorboardX", *imported):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("gainstage.interop.tensorboard")
    assert str(error.value) == (
        "Expected tensorboardX to be installed; run in a clone of gainstage: "
        'pip install ".[tensorboard]"'
    )


def test_a_mesh_that_is_missing_is_named():
    """`shard_state_over` with variables on one device says how to put them on a mesh."""
    with pytest.raises(ValueError, match="Put the variables on a mesh first"):
        gs.optimizers.SGD(shard_state_over="data").build([Variable(1.0)])


NAMES = [f"blocks/{i}/attention/kernel" for i in range(200)]


def large(tx=None):
    """A pytree of 200 leaves, and the same as variables."""
    return {name: jnp.ones(2) for name in NAMES}, [Variable([1.0], name=n) for n in NAMES]


def built(**options):
    opt = LossScaleOptimizer(gs.optimizers.Adam(0.1, **options))
    opt.build(large()[1])
    return opt


def loss_fn(params):
    return sum(leaf.sum() for leaf in params.values())


def changed_structure():
    tx = gs.with_loss_scale(
        optax.GradientTransformation(lambda p: (p,), lambda u, s, p=None: (u, (s, s)))
    )
    params, _ = large()
    jax.eval_shape(tx.update, params, tx.init(params), params)


def other_parameters():
    tx = gs.with_loss_scale(optax.adam(0.1))
    tx.update({"a": jnp.ones(2)}, tx.init(large()[0]))


def donated():
    state = gs.TrainState.create(large()[0], optax.sgd(0.1))
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # as a step that was given it does
    gs.train_step(loss_fn)(state)


def plain_state():
    params, tx = large()[0], optax.adam(0.1)
    gs.train_step(loss_fn)(gs.TrainState.create(params, tx).replace(opt_state=tx.init(params)))


def two_scales():
    tx = gs.with_loss_scale(optax.adam(0.1))
    state = tx.init(large()[0])
    current_scale([state, state])


LONG = {
    "plain state": plain_state,
    "value_and_grad": lambda: gs.value_and_grad(loss_fn, optax.adam(0.1).init(large()[0])),
    "loss_scale": lambda: current_scale(optax.adam(0.1).init(large()[0])),
    "two scales": two_scales,
    "telemetry": lambda: gs.diagnostics.telemetry(optax.adam(0.1).init(large()[0])),
    "loss": lambda: gs.value_and_grad(
        lambda p: p, gs.with_loss_scale(optax.adam(0.1)).init(large()[0])
    )(large()[0]),
    "structure": changed_structure,
    "other parameters": other_parameters,
    "donated": donated,
    "functional": lambda: functionalize(lambda: None, large()[1])(large()[0]),
    "build twice": lambda: built().build(large()[1]),
    "unknown variable": lambda: built().apply([1.0], [Variable(1.0)]),
    "too few": lambda: built().apply([1.0]),
    "all None": lambda: built().apply([None] * 200),
    "set_weights": lambda: built().set_weights([1.0]),
    "load_state": lambda: built().load_state({}),
    "load_state, unknown": lambda: built().load_state({n: 1.0 for n in NAMES}),
    "stateless_apply": lambda: built().stateless_apply([1.0], [1.0], [1.0]),
    "load_own_variables": lambda: built().load_own_variables(
        {str(i): 1.0 for i in range(900, 999)}
    ),
    "masks": lambda: from_optax(optax.masked(optax.sgd(0.1), dict.fromkeys(NAMES, True))).build(
        large()[1]
    ),
    "select_if_applied": lambda: gs.transforms.select_if_applied(
        large()[0], {"a": 1.0}, gs.with_loss_scale(optax.sgd(0.1)).init(large()[0])
    ),
    "has_aux": lambda: gs.optimizers.SGD(0.1).minimize(
        lambda: large()[0], large()[1], has_aux=True
    ),
    "report": lambda: gs.diagnostics.report(
        gs.with_loss_scale(optax.sgd(0.1), telemetry=True).init(large()[0]), {"a": jnp.ones(1)}
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_errors_about_a_large_model_are_short(name):
    """An error about a model of 200 leaves has at most 600 characters."""
    with pytest.raises((TypeError, ValueError)) as error:
        LONG[name]()
    assert len(str(error.value)) <= 600


w = Variable(1.0, name="w")


class Own(experimental.LossScale):
    """A live scale of a user."""

    def __call__(self):
        return jnp.float32(2.0)

    def update(self, grads):
        return None, True

    def get_config(self):
        return {}


def update_before_build():
    opt = gs.optimizers.SGD(0.1, momentum=0.5)
    opt.update_step(jnp.float32(1.0), w, 0.1)


# What somebody writes, the class of the error, and what it names: argument, value, remedy.
BASE = "UnscaledLossScaleOptimizer"  # of optimizers of `compat`, and no one's own
HELPFUL = {
    "swapped pair": (
        lambda: gs.optimizers.SGD().apply_gradients([(w, 1.0)]),
        TypeError,
        r"in grads_and_vars; got \(Variable.*The variable comes second",
    ),
    "no pair": (
        lambda: gs.optimizers.SGD().apply_gradients([1.0]),
        TypeError,
        r"grads_and_vars; got \(1\.0,",
    ),
    "no list": (lambda: gs.optimizers.SGD().apply_gradients(3), TypeError, "grads_and_vars; got"),
    "v1 pairs": (
        lambda: v1.GradientDescentOptimizer(0.1).apply_gradients([(w, 1.0)]),
        TypeError,
        "grads_and_vars.*comes second",
    ),
    "tf2 pairs": (
        lambda: tf2.LossScaleOptimizer(gs.optimizers.SGD()).apply_gradients([(w, 1.0)]),
        TypeError,
        "grads_and_vars.*comes second",
    ),
    "arrays in build": (
        lambda: gs.optimizers.SGD().build([jnp.ones(2)]),
        TypeError,
        "in var_list; got Array",
    ),
    "names in var_list": (
        lambda: gs.optimizers.SGD().minimize(lambda: w**2, ["w"]),
        TypeError,
        r"gainstage\.optimizers\.Variable objects in var_list; got 'w'",
    ),
    "no var_list": (
        lambda: gs.optimizers.SGD().minimize(lambda: w**2, None),
        TypeError,
        "var_list; got None",
    ),
    "twice": (
        lambda: gs.optimizers.SGD().minimize(lambda: w**2, [w, w]),
        ValueError,
        "once in var_list; got 'w' twice",
    ),
    "callable var_list": (
        lambda: gs.optimizers.SGD().minimize(lambda: w**2, lambda: [w, w]),
        ValueError,
        "once in var_list; got 'w' twice",
    ),
    "optimizer": (
        lambda: experimental.LossScaleOptimizer("sgd", 8),
        ValueError,
        r"for optimizer; got 'sgd'\. Use gainstage\.optimizers\.get\('sgd'\)",
    ),
    "a class": (
        lambda: LossScaleOptimizer(gs.optimizers.SGD),
        TypeError,
        r"Create one: SGD\(\.\.\.\)",
    ),
    "own loss scale": (
        lambda: experimental.LossScaleOptimizer(gs.optimizers.SGD(), Own()),
        ValueError,
        "FixedLossScale or DynamicLossScale for loss_scale; got a Own.*compat.v1",
    ),
    "text as loss": (
        lambda: LossScaleOptimizer(gs.optimizers.SGD()).scale_loss("x"),
        TypeError,
        "got 'x'",
    ),
    "no loss": (
        lambda: gs.optimizers.SGD().minimize(lambda: None, [w]),
        TypeError,
        r"loss\(\) to be one number; got None",
    ),
    "loss and aux": (
        lambda: gs.optimizers.SGD().minimize(lambda: (w * 1, 2), [w]),
        TypeError,
        "got a tuple of 2.*has_aux=True",
    ),
    "reference": (
        lambda: gs.optimizers.SGD().add_variable_from_reference(jnp.ones(2), "m"),
        TypeError,
        "reference of slot 'm'; got Array",
    ),
    "shape": (
        lambda: gs.optimizers.SGD().add_variable(3),
        TypeError,
        r"integers >= 0 for shape; got 3",
    ),
    "initializer": (
        lambda: gs.optimizers.SGD().add_variable((2,), "one"),
        ValueError,
        "Expected one of zeros, ones, .*random_normal.* for initializer; got 'one'",
    ),
    "a gradient": (
        lambda: tf2.LossScaleOptimizer(gs.optimizers.SGD()).get_unscaled_gradients(1.0),
        TypeError,
        r"list of gradients for grads; got 1\.0",
    ),
    "assign": (
        lambda: gs.optimizers.SGD().assign(jnp.ones(2), 1.0),
        TypeError,
        "variable to assign to; got",
    ),
    "update_step": (
        update_before_build,
        AttributeError,
        r"'momentums'\. If `build\(variables\)` creates it",
    ),
    "get": (lambda: gs.optimizers.get("adm"), ValueError, "among .*'Adam', 'AdamW'.*got 'adm'"),
    "class_name": (
        lambda: gs.optimizers.deserialize({"class_name": BASE, "config": {}}),
        ValueError,
        f"got '{BASE}'",
    ),
    "argument": (
        lambda: gs.optimizers.Adam(beta1=0.9),
        TypeError,
        "Adam: got an unexpected keyword argument 'beta1'. Its arguments are .*beta_1, beta_2",
    ),
    "live scale": (
        lambda: experimental.DynamicLossScale(init_scale=8),
        TypeError,
        "no argument 'init_scale'. Write initial_loss_scale. Its arguments are initial_loss_scale",
    ),
    "rule": (
        lambda: gs.DynamicLossScale(init_scale=8),
        TypeError,
        "no argument 'init_scale'. Write initial_loss_scale. Its arguments are initial_loss_scale",
    ),
}


@pytest.mark.parametrize("name", HELPFUL)
def test_an_error_names_the_argument_the_value_and_the_remedy(name):
    """Each error names what the user has written, in at most 600 characters."""
    mistake, cls, match = HELPFUL[name]
    before = w.numpy()
    with pytest.raises(cls, match=match) as error:
        mistake()
    assert len(str(error.value)) <= 600
    assert f"{BASE}'," not in str(error.value)
    assert "_Momentum" not in str(error.value)
    assert w.numpy() == before

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    LossScaleOptimizer,
    RMSprop,
    Variable,
    schedules,
)

from peers import fails


class Momentum(gs.optimizers.Optimizer):
    """A user's optimizer, in the style of the documents."""

    def __init__(self, learning_rate=0.1, beta=0.9, name="momentum", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta = beta

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.velocities = [
            self.add_variable_from_reference(reference_variable=v, name="velocity")
            for v in variables
        ]
        self.count = self.add_variable(shape=(), initializer="ones", dtype="int32", name="count")

    def update_step(self, gradient, variable, learning_rate):
        velocity = self.velocities[self._get_variable_index(variable)]
        self.assign(velocity, self.beta * velocity + gradient)
        self.assign_sub(variable, learning_rate * velocity)
        self.assign_add(self.count, 1)


def pair():
    return [Variable([1.0, 2.0], name="w"), Variable(3.0, name="b")]


def snapshot(*groups):
    return [v.numpy().tobytes() for group in groups for v in group]


def test_a_users_subclass_is_compiled_without_knowing_it():
    """An imperative `build` and `update_step` run inside one program, wrapped or not."""
    reference, scaled = pair(), pair()
    plain, wrapped = Momentum(), LossScaleOptimizer(Momentum(), initial_scale=4.0)
    for step in range(3):
        gradient = np.float32(step + 1)
        plain.apply([[gradient, 0.0], gradient], reference)
        wrapped.apply([[4 * gradient, 0.0], 4 * gradient], scaled)
    v, w = 0.0, 3.0
    for g in (1, 2, 3):
        v = 0.9 * v + g
        w -= 0.1 * v
    assert float(reference[1]) == pytest.approx(w, rel=1e-6)
    assert snapshot(reference) == snapshot(scaled)
    assert int(plain.count) == 7
    names = ["iteration", "learning_rate", "w_velocity", "b_velocity", "count"]
    assert [v.name for v in plain.variables] == [f"momentum/{name}" for name in names]


def test_a_slot_is_found_by_its_name():
    """`get_slot` returns what `build` has added, of an optimizer and through its wrapper."""
    variables, inner = pair(), Momentum()
    opt = LossScaleOptimizer(inner)
    assert opt.get_slot_names() == []
    opt.build(variables)
    assert opt.get_slot_names() == inner.get_slot_names() == ["velocity"]
    for variable, velocity in zip(variables, inner.velocities, strict=True):
        assert opt.get_slot(variable, "velocity") is velocity
        assert inner.get_slot(variable, "velocity") is velocity
    with pytest.raises(ValueError, match=r"'momentum' has no slot 'm' for 'w'; .*\['velocity'\]"):
        opt.get_slot(variables[0], "m")


# ── documents ───────────────────────────────────────────────────────────────────────────────────


def test_slots_exist_only_with_momentum():
    """SGD without momentum keeps no slot; with it one per variable."""
    plain, heavy = SGD(), SGD(momentum=0.5)
    plain.build(pair())
    heavy.build(pair())
    assert [v.name for v in plain.variables] == ["SGD/iteration", "SGD/learning_rate"]
    assert [v.name for v in heavy.variables[2:]] == ["SGD/w_momentum", "SGD/b_momentum"]


# ── gradients ───────────────────────────────────────────────────────────────────────────────────


def test_compute_gradients_knows_what_the_loss_depends_on():
    """A gradient is None exactly where nothing flows, as through `stop_gradient`; zero stays 0."""
    used, zero, unused, stopped = (Variable(2.0, name=n) for n in ("a", "b", "c", "d"))

    def loss():
        return used**2 + 0 * zero + jax.lax.stop_gradient(stopped.value())

    pairs = SGD().compute_gradients(loss, lambda: [used, zero, unused, stopped])
    assert [v for _, v in pairs] == [used, zero, unused, stopped]
    assert [None if g is None else float(g) for g, _ in pairs] == [4.0, 0.0, None, None]


def test_a_subset_in_any_order():
    """`apply` takes some of the built variables in any order."""
    w, b = pair()
    opt = SGD(1.0)
    opt.build([w, b])
    opt.apply([1.0, [1.0, 1.0]], [b, w])
    assert (w.numpy().tolist(), float(b)) == ([0, 1], 2)
    with pytest.warns(UserWarning, match="'w'"):
        opt.apply([None, 1.0], [w, b])
    assert (w.numpy().tolist(), float(b)) == ([0, 1], 1)


def test_an_empty_step_changes_nothing():
    """An empty list of gradients is no step, for any optimizer."""
    variables = pair()
    for opt in (SGD(), LossScaleOptimizer(SGD())):
        opt.build(variables)
        before = snapshot(variables, opt.variables)
        opt.apply([])
        opt.apply([], [])
        opt.apply_gradients([])
        assert snapshot(variables, opt.variables) == before


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, np.float64])
def test_gradients_of_another_precision_are_welcome(dtype):
    """A floating gradient need not have its variable's dtype; the variable keeps its own."""
    var = Variable([1.0, 2.0])
    SGD(0.5).apply([np.array([1, 2], dtype)], [var])
    assert var.numpy().tolist() == [0.5, 1.0]
    assert var.dtype == jnp.float32


BAD_STEPS = [
    ("too few", lambda o, w, b: o.apply([[1.0, 1.0]], [w, b]), ValueError, "2 gradients"),
    ("too many", lambda o, w, b: o.apply([[1.0, 1.0], 1.0, 1.0]), ValueError, "got 3"),
    ("shape", lambda o, w, b: o.apply([[1.0, 1.0], [1.0]], [w, b]), ValueError, "'b'"),
    ("integer", lambda o, w, b: o.apply([[1.0, 1.0], 1], [w, b]), TypeError, "'b'.*int32"),
    ("bool", lambda o, w, b: o.apply([[1.0, 1.0], True], [w, b]), TypeError, "bool"),
    ("complex", lambda o, w, b: o.apply([[1.0, 1.0], 1j], [w, b]), TypeError, "complex64"),
    ("all None", lambda o, w, b: o.apply([None, None], [w, b]), ValueError, "None for all"),
    ("unknown", lambda o, w, b: o.apply([1.0], [Variable(1.0, name="x")]), ValueError, "'x'"),
    ("twice", lambda o, w, b: o.apply([1.0, 1.0], [b, b]), ValueError, "'b' twice"),
    ("no variable", lambda o, w, b: o.apply([1.0], [1.0]), TypeError, r"Variable objects in"),
    ("rebuild", lambda o, w, b: o.build([w]), ValueError, "built with"),
    ("weights", lambda o, w, b: o.set_weights([1]), ValueError, "weights"),
    (
        "weight shape",
        lambda o, w, b: o.set_weights([*(v.numpy() for v in o.variables[:-1]), np.ones((7, 7))]),
        ValueError,
        "b_",
    ),
    (
        "weight kind",
        lambda o, w, b: o.set_weights(["x", *(v.numpy() for v in o.variables[1:])]),
        ValueError,
        "Expected an array",
    ),
    ("store", lambda o, w, b: o.load_own_variables({"0": 1}), ValueError, "keys"),
    ("decay", lambda o, w, b: o.exclude_from_weight_decay([w]), ValueError, "before build"),
    ("use_ema", lambda o, w, b: setattr(o, "use_ema", True), ValueError, "before the optimizer"),
    ("clip", lambda o, w, b: setattr(o, "clipnorm", -1.0), ValueError, "clipnorm"),
    ("no loss", lambda o, w, b: o.minimize(w, [w, b]), TypeError, "callable"),
    ("vector loss", lambda o, w, b: o.minimize(lambda: w * 2, [w, b]), ValueError, "scalar"),
    ("integer loss", lambda o, w, b: o.minimize(lambda: jnp.int32(3), [w]), TypeError, "floating"),
    ("rate", lambda o, w, b: setattr(o, "learning_rate", "fast"), TypeError, "learning_rate"),
    (
        "stateless lengths",
        lambda o, w, b: o.stateless_apply([1], [[1.0, 1.0], 1.0], [w.value(), b.value()]),
        ValueError,
        "optimizer_variables",
    ),
    (
        "stateless gradients",
        lambda o, w, b: o.stateless_apply(
            [v.value() for v in o.variables], [1.0], [w.value(), b.value()]
        ),
        ValueError,
        "gradients",
    ),
    (
        "stateless weights",
        lambda o, w, b: o.stateless_apply(
            [v.value() for v in o.variables], [[1.0, 1.0], 1.0], [w.value()]
        ),
        ValueError,
        "trainable_variables",
    ),
    (
        "stateless shape",
        lambda o, w, b: o.stateless_apply(
            [v.value() for v in o.variables], [[1.0, 1.0], 1.0], [b.value(), b.value()]
        ),
        ValueError,
        "'w'",
    ),
]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    ("act", "error", "message"), [case[1:] for case in BAD_STEPS], ids=[c[0] for c in BAD_STEPS]
)
def test_bad_input_is_a_clear_error_and_changes_nothing(act, error, message, scaled):
    """Wrong arguments raise an error that names what is wrong; all state stays as it was."""
    w, b = pair()
    opt = (
        gs.optimizers.Adam(0.1, clipvalue=1e9) if message != "clipnorm" else gs.optimizers.Adam(0.1)
    )
    opt = LossScaleOptimizer(opt) if scaled else opt
    opt.build([w, b])
    before = snapshot([w, b], opt.variables)
    with pytest.raises(error, match=message):
        act(opt, w, b)
    assert snapshot([w, b], opt.variables) == before
    assert opt.get_config() == type(opt).from_config(opt.get_config()).get_config()


@pytest.mark.parametrize("make", [SGD, lambda: LossScaleOptimizer(SGD())])
def test_bad_input_before_build_builds_nothing(make):
    """A first step that fails leaves the optimizer unbuilt, so that a right one can follow."""
    w, b = pair()
    opt = make()
    with pytest.raises(ValueError, match="built before apply"):
        opt.apply([1.0])
    with pytest.raises(ValueError, match="built before stateless_apply"):
        opt.stateless_apply([], [], [])
    with pytest.raises(ValueError, match="built before set_weights"):
        opt.set_weights([])
    for grads in ([1.0], [[1.0], 1.0], [None, None]):
        with pytest.raises(ValueError, match="Expected"):
            opt.apply(grads, [w, b])
        assert not opt.built
    with pytest.raises(ValueError, match="scalar"):
        opt.minimize(lambda: w * 1, [w, b])
    assert not opt.built
    opt.apply([[1.0, 1.0], 1.0], [w, b])


@pytest.mark.parametrize("value", [1, True, 1j])
def test_only_floating_variables_are_trained(value):
    """Integer, boolean and complex variables are a TypeError that names them."""
    n = Variable(value, name="n")
    for train in (lambda: SGD().build([n]), lambda: SGD().minimize(lambda: n * 1.0, [n])):
        with pytest.raises(TypeError, match=f"floating dtype; got 'n' of dtype {n.dtype}"):
            train()


# ── options ─────────────────────────────────────────────────────────────────────────────────────

BAD_OPTIONS = [
    ("clipnorm", 0), ("clipnorm", -1.0), ("clipvalue", float("inf")), ("global_clipnorm", "1"),
    ("global_clipnorm", True), ("weight_decay", -0.1), ("weight_decay", float("nan")),
    ("use_ema", 1), ("use_ema", None), ("ema_momentum", 1.5), ("ema_momentum", -0.1),
    ("ema_overwrite_frequency", 0), ("ema_overwrite_frequency", 2.5),
    ("loss_scale_factor", 0), ("loss_scale_factor", -2), ("gradient_accumulation_steps", 1),
    ("gradient_accumulation_steps", -2), ("gradient_accumulation_steps", 2.5),
    ("learning_rate", None), ("learning_rate", True), ("learning_rate", float("nan")),
    ("learning_rate", lambda a, b: a), ("name", ""), ("name", 3), ("mesh", "mesh"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS)
@pytest.mark.parametrize("cls", [SGD, gs.optimizers.Adam])
def test_options_are_checked(cls, option, value):
    """An option out of range, or of the wrong kind, is an error that names it and the value."""
    with pytest.raises((ValueError, TypeError), match=rf"Expected .*{option}.*; got "):
        cls(**{option: value})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SGD(momentum=1.5), "momentum"),
        (lambda: SGD(momentum=True), "momentum"),
        (lambda: SGD(nesterov=1), "nesterov"),
        (lambda: gs.optimizers.Adam(beta_1=1.0), "beta_1"),
        (lambda: gs.optimizers.Adam(beta_2=-0.1), "beta_2"),
        (lambda: gs.optimizers.Adam(epsilon=-1), "epsilon"),
        (lambda: SGD(clipnorm=1.0, clipvalue=1.0), "clipnorm"),
        (lambda: gs.optimizers.Adam(clipvalue=1.0, global_clipnorm=2.0), "global_clipnorm"),
        (lambda: schedules.ExponentialDecay("0.1", 1, 0.5), "initial_learning_rate"),
        (lambda: schedules.ExponentialDecay(0.1, 0, 0.5), "decay_steps"),
    ],
)
def test_arguments_of_rules_are_checked(make, name):
    """A rule's own arguments out of range, and two clip options, are errors that name them."""
    with pytest.raises((ValueError, TypeError), match=rf"Expected .*{name}"):
        make()


def test_real_numbers_of_any_kind_are_welcome():
    """Python, numpy and jax scalars are taken wherever a float is documented."""
    for number in (1, np.float32(1), np.int64(1), jnp.float16(1), jnp.ones(())):
        opt = SGD(learning_rate=number, momentum=number, clipnorm=number)
        assert (float(opt.learning_rate), opt.momentum, opt.clipnorm) == (1.0, 1.0, 1.0)


def test_arguments_stand_in_the_order_of_keras():
    """Arguments by position mean what they mean in Keras 3, the common options included."""
    opt = SGD(0.1, 0.9, True, 0.01, None, 0.5, None, True, 0.8, 3, None, 2, "mine")
    config = opt.get_config()
    assert (config["momentum"], config["nesterov"], config["weight_decay"]) == (0.9, True, 0.01)
    assert (config["clipvalue"], config["ema_momentum"], config["name"]) == (0.5, 0.8, "mine")
    assert gs.optimizers.Adam(0.1, 0.8, 0.9, 1e-3, True, 0.01).weight_decay == 0.01


def test_weight_decay_exclusions():
    """Variables are excluded by identity or by a pattern in their name; a new call replaces."""
    w, b, c = Variable(1.0, name="w"), Variable(1.0, name="bias"), Variable(1.0, name="c")
    opt = SGD(1.0, weight_decay=0.5)
    opt.exclude_from_weight_decay(var_list=[c])
    opt.exclude_from_weight_decay(var_list=[w], var_names=["^b.a"])
    opt.apply([0.0, 0.0, 0.0], [w, b, c])
    assert (float(w), float(b), float(c)) == (1.0, 1.0, 0.5)
    opt = SGD(1.0, weight_decay=0.5)
    opt.exclude_from_weight_decay(var_names=["w", "(?i)BIAS"])
    opt.apply([0.0, 0.0, 0.0], [w, b, c])
    assert (float(w), float(b), float(c)) == (1.0, 1.0, 0.25)
    w, b = Variable(1.0, name="layers[0]/w"), Variable(1.0, name="layers0/w")
    opt = gs.optimizers.SGD(1.0, weight_decay=0.5)
    opt.exclude_from_weight_decay(var_names=["layers[0]/w"])  # a name counts as it is written, too
    opt.apply([0.0, 0.0], [w, b])
    assert float(w) == 1.0
    with pytest.raises(ValueError, match="regular expressions"):
        SGD().exclude_from_weight_decay(var_names=["["])


def test_constraints_come_last():
    """A variable's constraint is applied after the update and the average."""
    var = Variable(1.0, constraint=lambda value: jnp.maximum(value, 0))
    opt = SGD(1.0, use_ema=True, ema_momentum=0.5)
    opt.apply([5.0], [var])
    assert (float(var), float(opt.variables[2])) == (0.0, -4.0)


def test_a_constraint_holds_for_the_copy_in_float32_too():
    """The next step of a half-precision variable goes on from the constrained value."""
    var = Variable(0.5, dtype="float16", constraint=lambda value: jnp.minimum(value, 1))
    opt = SGD(1.0, master_weights=True)
    opt.apply([-0.5002], [var])  # 1.0002 would be 1 in float16
    assert float(var) == 1.0
    opt.apply([0.00025], [var])
    assert float(var) == 1 - 2.0**-11  # 0.99975 rounds to it, and 0.99995 to 1


# ── learning rate ───────────────────────────────────────────────────────────────────────────────


def test_a_schedule_sees_the_steps_taken():
    """A schedule, or any callable of the step, is evaluated at the number of steps before."""
    for rate in (schedules.ExponentialDecay(0.4, 1, 0.5), lambda step: 0.4 * 0.5**step):
        var = Variable(0.0)
        opt = SGD(rate)
        assert float(opt.learning_rate) == pytest.approx(0.4)
        for _ in range(3):
            opt.apply([-1.0], [var])
        assert float(var) == pytest.approx(0.7)
        assert float(opt.learning_rate) == pytest.approx(0.05)


def test_a_callable_of_nothing_is_called_once_per_step():
    """Python calls it for each eager step, and its value enters the same compiled program; nobody
    else does, as it may count."""
    calls = []

    def rate():
        calls.append(len(calls))
        return float(len(calls))

    var = Variable(0.0)
    opt = LossScaleOptimizer(SGD(rate), initial_scale=1.0)
    for _ in range(3):
        opt.apply([-1.0], [var])
        opt.get_config()
    assert (float(var), calls) == (6.0, [0, 1, 2])


def test_setting_the_learning_rate():
    """A number replaces a number, a schedule replaces anything, a number no schedule."""
    var = Variable(0.0)
    opt = SGD(1.0)
    opt.apply([-1.0], [var])
    opt.learning_rate = 0.5
    opt.apply([-1.0], [var])
    opt.learning_rate = lambda step: 2.0
    opt.apply([-1.0], [var])
    assert float(var) == 3.5
    assert len(opt.variables) == 1
    with pytest.raises(TypeError, match="schedule or callable for learning_rate"):
        opt.learning_rate = 0.1


# ── saving ──────────────────────────────────────────────────────────────────────────────────────


def trained(steps=3):
    variables = pair()
    inner = gs.optimizers.Adam(
        schedules.ExponentialDecay(0.1, 5, 0.5), use_ema=True, weight_decay=0.01
    )
    opt = LossScaleOptimizer(inner, dynamic_growth_steps=2, gradient_accumulation_steps=2)
    for step in range(steps):
        opt.apply([[1.0 * step, 2.0], 3.0], variables)
    return variables, opt


def test_a_scale_that_is_none_cannot_be_loaded():
    """A stored scale of 0, inf or nan is a ValueError, and nothing is loaded."""
    variables, opt = trained()
    weights = [v.numpy() for v in opt.variables]
    before = snapshot(variables, opt.variables)
    for scale in (0.0, np.inf, np.nan, -1.0):
        with pytest.raises(ValueError, match="dynamic_scale"):
            opt.set_weights([weights[0] + 5, scale, *weights[2:]])
        assert snapshot(variables, opt.variables) == before


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_configurations_of_keras_are_readable():
    """A configuration written by Keras 3 makes the optimizer it describes here."""
    keras = pytest.importorskip("keras")
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    theirs = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(rate, beta_1=0.8, weight_decay=0.01, global_clipnorm=1.0),
        initial_scale=64.0,
        dynamic_growth_steps=7,
    )
    ours = LossScaleOptimizer.from_config(theirs.get_config())
    assert (ours.initial_scale, ours.dynamic_growth_steps) == (64.0, 7)
    inner = ours.inner_optimizer
    assert (inner.beta_1, inner.weight_decay, inner.global_clipnorm) == (0.8, 0.01, 1.0)
    assert float(ours.learning_rate) == pytest.approx(0.1)
    sgd = SGD.from_config(keras.optimizers.SGD(0.5, momentum=0.25, nesterov=True).get_config())
    assert (sgd.momentum, sgd.nesterov, float(sgd.learning_rate)) == (0.25, True, 0.5)


def test_unknown_classes_in_a_configuration():
    """A class that is not known is a ValueError."""
    config = LossScaleOptimizer(SGD()).get_config()
    config["inner_optimizer"] = {**config["inner_optimizer"], "class_name": "NoSuchOptimizer"}
    with pytest.raises(ValueError, match="got 'NoSuchOptimizer'"):
        LossScaleOptimizer.from_config(config)


def test_a_clip_option_that_is_none_leaves_the_inner_ones_in_force():
    """None switches off the one option that it is assigned to."""
    w, opt = Variable([3.0]), LossScaleOptimizer(SGD(1.0, global_clipnorm=1.0), 1.0)
    opt.clipvalue = None
    opt.apply([[2.0]], [w])
    assert float(w.value()[0]) == 2.0
    opt.global_clipnorm = None
    opt.apply([[2.0]])
    assert float(w.value()[0]) == 0.0


def test_what_decides_the_state_is_not_assigned_later():
    """Settings of the constructor that decide which state there is cannot be assigned."""
    opt = LossScaleOptimizer(SGD())
    for name in ("telemetry", "underflow_every", "mesh"):
        with pytest.raises(AttributeError, match=f"`{name}` can be set only in the constr"):
            setattr(opt, name, None)
    for name in ("master_weights", "shard_state_over"):
        with pytest.raises(AttributeError, match=f"`{name}` can be set only in the constr"):
            setattr(opt.inner_optimizer, name, True)


# ── surroundings ────────────────────────────────────────────────────────────────────────────────


def test_assign_takes_anything_that_can_be_assigned():
    """`assign*` work on Keras variables and other objects with `assign`."""
    keras = pytest.importorskip("keras")
    var, opt = keras.Variable(1.0), SGD()
    opt.assign_add(var, 2.0)
    opt.assign_sub(var, 1.0)
    opt.assign(var, var.value * 10)
    assert float(var.value) == 20.0


def test_a_known_kind_of_gradients_is_still_looked_at():
    """After a step as before, another order, shape, dtype, or a gradient less is noticed."""
    a, b = Variable([1.0, 1.0]), Variable([2.0, 2.0])
    opt = SGD(1.0)
    one, two = jnp.array([1.0, 1.0]), jnp.array([2.0, 2.0])
    for _ in range(3):
        opt.apply([one, two], [a, b])
    opt.apply([one, two], [b, a])
    np.testing.assert_array_equal([a.numpy(), b.numpy()], [[-4.0, -4.0], [-5.0, -5.0]])
    opt.apply([one.astype(jnp.float16), two], [a, b])
    np.testing.assert_array_equal([a.numpy(), b.numpy()], [[-5.0, -5.0], [-7.0, -7.0]])
    for wrong in ([one], [one, jnp.ones(3)], [one, jnp.ones(2, int)]):
        opt.apply([one, two], [a, b])
        with pytest.raises((ValueError, TypeError), match="Expected"):
            opt.apply(wrong, [a, b])
    np.testing.assert_array_equal([a.numpy(), b.numpy()], [[-8.0, -8.0], [-13.0, -13.0]])


def test_one_gradient_for_two_variables_does_not_hide_their_order():
    """The same array for both, in the other order, says nothing of the next two."""
    a, b = Variable([0.0]), Variable([0.0])
    opt, g, h = SGD(1.0), jnp.array([1.0]), jnp.array([2.0])
    opt.build([a, b])
    opt.apply([g, g], [b, a])
    opt.apply([g, h], [b, a])
    assert (float(a[0]), float(b[0])) == (-3.0, -2.0)


def test_a_configuration_means_the_same_whatever_is_imported():
    """A class of another module's name is the plain one, not a subclass from `compat`."""
    from gainstage.compat import dtensor

    config = {"class_name": "SGD", "module": "keras.optimizers", "config": {"learning_rate": 0.5}}
    wrapper = {"inner_optimizer": config, "initial_scale": 8.0}
    assert dtensor.SGD.__name__ == "SGD"
    assert type(LossScaleOptimizer.from_config(wrapper).inner_optimizer) is SGD


@pytest.mark.parametrize("scaled", [False, True], ids=["alone", "scaled"])
def test_iterations_and_rate_read_alike_whatever_the_options(scaled):
    """`iterations` and `learning_rate` are variables, with accumulation and a schedule too; what is
    computed from others cannot be assigned, and says what to do."""
    for options, rate in ({}, 0.5), ({"gradient_accumulation_steps": 2}, lambda n: 0.5 + 0 * n):
        weight, opt = Variable(1.0), SGD(rate, **options)
        opt = LossScaleOptimizer(opt, 1.0) if scaled else opt
        assert opt.iterations == 0
        for _ in range(2):
            opt.apply([1.0], [weight])
        assert opt.iterations.value() == (1 if options else 2)
        assert (opt.iterations.dtype, opt.iterations.shape) == (np.int32, ())
        assert (float(opt.learning_rate), opt.learning_rate.value() * 2) == (0.5, 1.0)
        for variable in (opt.iterations, opt.learning_rate) if options else ():
            assert isinstance(variable, Variable)
            with pytest.raises(TypeError, match="is computed and cannot be assigned"):
                variable.assign(1)


RULES = [
    (gs.optimizers.Adam, {}),
    (gs.optimizers.Adam, {"amsgrad": True}),
    (RMSprop, {"centered": True}),
]


@pytest.mark.parametrize(
    ("rule", "options"), [*RULES, (RMSprop, {}), (Adadelta, {}), (Adagrad, {})]
)
def test_a_gradient_whose_square_overflows_leaves_a_finite_state(rule, options):
    """After a finite gradient of 1e20 weights and slots are finite, and no step was a large one."""
    w, opt = Variable([0.0]), rule(0.1, **options)
    for gradient in (1.0, 1e20, 1.0, 1.0):
        opt.apply([jnp.float32([gradient])], [w])
    assert all(np.isfinite(v.numpy()).all() for v in [w, *opt.variables])
    assert abs(float(w[0])) < 3


def test_a_centered_variance_is_never_negative():
    """RMSprop on gradients that hardly change: v - a**2 rounds below 0, and no weight is NaN."""
    g = np.float32(3.3 * (1 + 1e-4 * np.random.default_rng(0).normal(size=(8, 4096))))
    w, opt = Variable(np.zeros(4096, np.float32)), RMSprop(1e-3, centered=True)
    for i in range(160):
        opt.apply([g[i % 8]], [w])
    assert np.isfinite(w.numpy()).all()


@pytest.mark.parametrize("base", [SGD, LossScaleOptimizer])
def test_building_again_adds_no_variable(base):
    """`add_variable` inside of `build` makes its variables once; elsewhere each call makes one."""

    class Counting(base):
        def build(self, var_list):
            super().build(var_list)
            self.counts = [self.add_variable((), name="count") for _ in range(2)]

    w, opt = Variable(1.0), Counting(*([SGD(0.5)] if base is LossScaleOptimizer else []))
    before = opt.add_variable((), name="count")
    opt.build([w])
    first, variables = opt.counts, opt.variables
    opt.build([w])
    assert opt.counts == first
    assert opt.variables == variables
    assert len({*first, before, opt.add_variable((), name="count")}) == 4


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("transform", [jax.grad, jax.vmap])
def test_a_step_under_a_transformation_is_an_error_that_changes_nothing(transform):
    """`apply` in a function that is differentiated or mapped raises, and all state is as before."""
    w = Variable(jnp.ones(3), name="w")
    opt = SGD(0.5, momentum=0.5)
    opt.build([w])
    opt.apply([jnp.ones(3)])
    before = [v.numpy() for v in [w, *opt.variables]]

    def loss(x):
        opt.apply([x * jnp.ones(3)], [w])
        return x

    with pytest.raises(ValueError, match="Expected variable"):
        transform(loss)(1.0 if transform is jax.grad else jnp.ones(2))
    jax.tree.map(np.testing.assert_array_equal, [v.numpy() for v in [w, *opt.variables]], before)
    opt.apply([jnp.ones(3)])
    assert int(opt.iterations) == 2


def test_one_variable_is_excluded_from_decay():
    """A variable that is 0 counts as one all the same, and so does a vector."""
    for value in (0.0, [1.0, 2.0]):
        w, opt = Variable(value), SGD(0.1, weight_decay=0.1)
        opt.exclude_from_weight_decay(w)
        opt.apply([jnp.zeros(w.shape)], [w])
        np.testing.assert_array_equal(w.numpy(), value)


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
@pytest.mark.parametrize(("limit", "gradient"), [(1e39, 1.0), (1e-60, 0.0)])
def test_limits_that_float32_does_not_hold_clip_as_far_as_it_goes(clip, limit, gradient):
    """A norm's limit above all numbers of float32 clips nothing, one below all does no harm."""
    w = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.5, **{clip: limit}), initial_scale=4.0)
    opt.apply([4 * gradient], [w])
    assert float(w) == 1 - 0.5 * gradient


def scaled_sgd():
    w = Variable([1.0, 2.0], name="w")
    return w, LossScaleOptimizer(SGD(0.5), initial_scale=2.0)


def test_a_jit_inside_of_a_loss_is_explained():
    """A compiled function that reads variables by itself fails with a note on what to do."""
    w, opt = scaled_sgd()
    loss = jax.jit(lambda: (w * w).sum())
    opt.minimize(loss, [w])
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        opt.minimize(loss, [w])
    notes = " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "pass it `variable.value()` as an argument" in notes


def test_exclusions_take_lists_of_the_right_kind():
    """A string is no list of names, and a name is no variable."""
    with pytest.raises(TypeError, match="list of strings for var_names"):
        SGD().exclude_from_weight_decay(var_names="bias")
    with pytest.raises(TypeError, match=r"gainstage\.optimizers\.Variable objects in"):
        SGD().exclude_from_weight_decay(["bias"])


def test_an_update_step_that_returns_is_told_to_assign():
    """Returning the new value, as in optax, is an error and changes nothing."""

    class Returning(gs.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            return variable - learning_rate * gradient

    w = Variable(1.0)
    with pytest.raises(TypeError, match="update_step to assign"):
        Returning(0.1).apply([1.0], [w])
    assert float(w) == 1.0


def test_a_float32_gradient_does_not_narrow_a_float64_step():
    """Adam corrects its bias in the variable's precision, whatever the gradient's."""
    with jax.enable_x64(True):
        weights = []
        for dtype in (jnp.float32, jnp.float64):
            w = Variable(1.0, dtype=jnp.float64)
            gs.optimizers.Adam(0.125).apply([jnp.ones((), dtype)], [w])
            weights.append(float(w))
    assert weights[0] == weights[1]


def test_a_build_that_forgets_its_base_is_named():
    """A subclass whose `build` does not call the base's is told so at the first step."""

    class Forgetful(SGD):
        def build(self, var_list):
            pass

    with pytest.raises(ValueError, match=r"super\(\).build"):
        Forgetful(0.1).apply([1.0], [Variable(1.0)])


def test_an_optimizer_adds_lists():
    """`optimizer.assign_add` and `assign_sub` take whatever a variable's own methods take."""
    w, opt = scaled_sgd()
    opt.assign_add(w, [0.5, 0.5])
    opt.assign_sub(w, [0.25, 0.0])
    assert w.numpy().tolist() == [1.25, 2.5]


@pytest.mark.parametrize("of", [iter, lambda vs: {"w": vs[0]}, lambda vs: vs[0]])
def test_build_wants_a_list(of):
    """What cannot be gone through twice as a list of variables is refused, and nothing is built."""
    w, opt = Variable([1.0, 2.0]), gs.optimizers.Adam(0.5)
    with pytest.raises(TypeError, match="Expected a list of variables for var_list; got"):
        opt.build(of([w]))
    assert not opt.built
    opt.build([w])
    opt.apply([jnp.ones(2)])


def test_a_shallow_copy_survives_a_step():
    """`copy.copy` of a variable keeps its value, though a step reuses the original's memory."""
    w = Variable([1.0, 2.0])
    best = copy.copy(w)
    SGD(0.5).minimize(lambda: (w.value() ** 2).sum(), [w])
    assert (best.numpy().tolist(), w.numpy().tolist()) == ([1, 2], [0, 0])


@pytest.mark.parametrize(("gradient", "step"), [(0.0, 0.0), (1e-3, 0.125)])
def test_adam_steps_for_tiny_float16_gradients(gradient, step):
    """optax's Adam on float16 weights gives -inf or NaN for tiny and zero gradients; ours steps."""
    grads, params = jnp.full(3, gradient, jnp.float16), jnp.ones(3, jnp.float16)
    var, opt = Variable(params), gs.optimizers.Adam(0.125)
    tx = gs.with_loss_scale(optax.adam(0.125))
    state = tx.init(params)
    for i in range(1, 4):
        opt.apply([grads], [var])
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(var.numpy(), 1 - i * step, atol=2e-3)
        np.testing.assert_allclose(params, 1 - i * step, atol=2e-3)

    peer, params = optax.adam(0.125), jnp.ones(3, jnp.float16)
    updates, _ = peer.update(grads, peer.init(params), params)
    fails(optax, not np.isfinite(updates).all())


def test_float16_gradients_are_clipped_by_a_float32_norm():
    """The norm of float16 gradients overflows in optax, so that all become 0; ours are clipped."""
    params, grads = jnp.zeros(1000, jnp.float16), jnp.full(1000, 300.0, jnp.float16)
    expected = np.full(1000, -1 / np.sqrt(1000))
    tx = gs.with_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates, expected, rtol=1e-3)
    for clip in ("clipnorm", "global_clipnorm"):
        var = Variable(params)
        SGD(1.0, **{clip: 1.0}).apply([grads], [var])
        np.testing.assert_allclose(var.numpy(), expected, rtol=1e-3)

    peer = optax.clip_by_global_norm(1.0)
    updates, _ = peer.update(grads, peer.init(params), params)
    fails(optax, not np.asarray(updates).any())


def test_a_master_copy_starts_as_its_weight():
    """After `build` the float32 copy of a half-precision weight is that weight, to look at and to
    save."""
    w = Variable(np.array([3.0, -0.5], np.float16))
    opt = SGD(0.5, master_weights=True)
    opt.build([w])
    (master,) = [v for v in opt.variables if v.name.endswith("_master")]
    assert (master.numpy().tolist(), master.dtype) == ([3.0, -0.5], np.float32)


@pytest.mark.parametrize("grads", [np.ones(2, np.float32), "ab", {"w": 1.0}, Variable([1.0, 2.0])])
def test_gradients_that_are_no_list_are_refused(grads):
    """One array, a string, a dictionary or a variable is not taken for a list of gradients."""
    variables = [Variable(1.0), Variable(1.0)]
    with pytest.raises(TypeError, match="Expected a list of arrays for grads"):
        SGD(0.5).apply(grads, variables)
    assert [float(v) for v in variables] == [1.0, 1.0]


def test_slots_of_a_random_initializer_are_all_different():
    """Each variable's slot has random numbers of its own, the third one's too."""
    variables, opt = [Variable(np.ones(8)) for _ in range(3)], SGD(0.1)
    opt.build(variables)
    slots = opt.add_optimizer_variables(variables, "noise", "random_normal")
    assert len({slot.numpy().tobytes() for slot in slots}) == 3

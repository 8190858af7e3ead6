"""`tf.keras.dtensor.experimental.optimizers.SGD` of TensorFlow 2.9 to 2.12.

In the order of that page: its summary, its table of arguments with the options of the parent class,
and the methods as the page of the parent `Optimizer` describes them. `@row` names the rows of
docs/migrating.md that a test holds.
"""

import copy
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transfers import through_a_store, through_arrays

import gainstage as gs
from gainstage.compat import dtensor, tf2
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable, schedules

from rows import row

WEIGHTS = GRADIENTS = np.array([3.0, 4.0])
AVERAGED = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}


def run(opt, gradients, start=3.0):
    """The weight after each of these gradients."""
    w, weights = Variable(start), []
    for gradient in gradients:
        opt.apply_gradients([(gradient, w)])
        weights.append(float(w))
    return weights


def one_step(opt):
    """The weights 3 and 4 after a step on the gradients 3 and 4."""
    a, b = Variable(3.0), Variable(4.0)
    opt.minimize(lambda: a * 3.0 + b * 4.0, [a, b])
    return pytest.approx([float(a), float(b)], rel=1e-6)


def numbers(variables):
    return [np.asarray(v).tolist() for v in variables]


def mesh_of_all():
    return jax.make_mesh((jax.device_count(),), ("x",))


def on(mesh, *names):
    return NamedSharding(mesh, PartitionSpec(*names))


def sharded(mesh):
    """A variable of ones, two on each device."""
    ones = jnp.ones(2 * jax.device_count())
    return Variable(jax.device_put(ones, on(mesh, "x")), name="w")


def failing(error, match, call, *args, **kwargs):
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


# ── summary ──────────────────────────────────────────────────────────────────────────────────


def test_state_has_the_layout_of_its_variable():
    """Slots have the sharding of their variable; scalars are replicated on the mesh."""
    mesh = mesh_of_all()
    w, opt = sharded(mesh), dtensor.SGD(0.5, momentum=0.5, use_ema=True, mesh=mesh)
    opt.apply_gradients([(np.ones(w.shape, np.float32), w)])
    for state in opt.variables:
        assert state.value().sharding == (w.sharding if state.shape else on(mesh))
    assert w.value().sharding == on(mesh, "x")


def test_update_without_momentum():
    """Without momentum, a step subtracts learning rate times gradient."""
    assert run(dtensor.SGD(0.5), [2.0, -1.0]) == [3.0 - 0.5 * 2.0, 2.0 + 0.5 * 1.0]


def descended(gradients, momentum, nesterov):
    """The weights that the document's formulas give for rate 0.5."""
    w, velocity, weights = 3.0, 0.0, []
    for g in gradients:
        velocity = momentum * velocity - 0.5 * g
        w = w + momentum * velocity - 0.5 * g if nesterov else w + velocity
        weights.append(w)
    return weights


@row(3, "momentum")
def test_update_with_momentum():
    """With momentum, the weight moves by a velocity that decays by `momentum`."""
    grads = [2.0, -1.0, 4.0]
    assert run(dtensor.SGD(0.5, momentum=0.5), grads) == descended(grads, 0.5, False)
    assert run(dtensor.SGD(0.5, 1), grads) == descended(grads, 1.0, False)


@row(3, "nesterov")
def test_update_with_nesterov():
    """With `nesterov`, the step looks ahead along the new velocity."""
    grads = [2.0, -1.0, 4.0]
    opt = dtensor.SGD(0.5, momentum=0.5, nesterov=True)
    assert run(opt, grads) == descended(grads, 0.5, True)


# ── arguments ────────────────────────────────────────────────────────────────────────────────


def test_arguments_come_in_the_documented_order():
    """All nine arguments can be passed by position and have the documented defaults."""
    mesh, clip, average = mesh_of_all(), dtensor.GradientsClipOption(1.0), dtensor.EMAOption(True)
    opt = dtensor.SGD(0.5, 0.25, True, False, clip, average, True, "mine", mesh)
    given = (opt.momentum, opt.nesterov, opt.amsgrad, opt.jit_compile, opt.name)
    assert given == (0.25, True, False, True, "mine")
    assert (float(opt.learning_rate), opt.clipnorm, opt.use_ema, opt.mesh) == (0.5, 1, True, mesh)
    opt = dtensor.SGD()
    given = (opt.momentum, opt.nesterov, opt.amsgrad, opt.jit_compile, opt.name)
    assert given == (0.0, False, False, False, "SGD")
    assert (opt.clipnorm, opt.use_ema, opt.mesh) == (None, False, None)


@row(3, "learning_rate")
@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.5, [2.5, 2.0]),
        (1, [2.0, 1.0]),
        (schedules.ExponentialDecay(0.5, 1, 0.5), [2.5, 2.25]),
        (lambda: 0.25, [2.75, 2.5]),
    ],
    ids=["float", "int", "schedule", "callable"],
)
def test_learning_rate_may_be(rate, expected):
    """The learning rate can be a number, a schedule or, unlike in TensorFlow, a callable."""
    assert run(dtensor.SGD(rate), [1.0, 1.0]) == expected


def test_the_old_name_of_the_learning_rate_is_refused():
    """`lr`, which has no effect as an argument of TensorFlow's, is an error that names others."""
    with pytest.raises(TypeError, match=r"argument 'lr'\. Its arguments are learning_rate"):
        dtensor.SGD(lr=0.5)
    with pytest.raises(AttributeError, match="Set `learning_rate`"):
        dtensor.SGD().lr = 0.5


def test_learning_rate_may_be_an_array():
    """The learning rate can be a scalar array."""
    assert run(dtensor.SGD(jnp.float32(0.25)), [1.0, 1.0]) == [2.75, 2.5]


def test_a_callable_rate_is_called_once_in_a_step():
    """Each step calls a callable learning rate once and uses its value."""
    values = [0.25, 0.5, 1.0]
    assert run(dtensor.SGD(values.pop), [1.0, 1.0, 1.0]) == [2.0, 1.5, 1.25]
    assert values == []


def test_a_variable_as_learning_rate_is_live():
    """A variable as learning rate is read in every step and set through the optimizer."""
    rate, w = Variable(0.5), Variable(3.0)
    opt = dtensor.SGD(rate)
    opt.apply_gradients([(1.0, w)])
    rate.assign(0.25)
    opt.apply_gradients([(1.0, w)])
    assert float(w) == 2.25
    opt.learning_rate = 2.0
    opt.apply_gradients([(1.0, w)])
    assert (float(w), float(rate)) == (0.25, 2.0)


def test_the_learning_rate_is_0_01_by_default():
    """The default is 0.01, as in the signature of the page; its text says 0.001."""
    assert float(dtensor.SGD().learning_rate) == np.float32(0.01)


@row(3, "ValueError: momentum outside of [0, 1]")
@pytest.mark.parametrize("wrong", [-0.1, 1.5])
def test_momentum_is_a_fraction(wrong):
    """`momentum` must be in [0, 1], in the constructor and when set."""
    failing(ValueError, "momentum", dtensor.SGD, momentum=wrong)
    opt = dtensor.SGD(momentum=0.5)
    with pytest.raises(ValueError, match="momentum"):
        opt.momentum = wrong


@row(3, "amsgrad")
def test_amsgrad_has_no_meaning():
    """`amsgrad=True` is a ValueError; TensorFlow ignores it."""
    assert run(dtensor.SGD(0.5, amsgrad=False), [1.0]) == [2.5]
    failing(ValueError, "amsgrad=False", dtensor.SGD, amsgrad=True)


CLIPS = [
    ("clipnorm", 3.5, WEIGHTS - 0.5 * np.array([3.0, 3.5])),
    ("clipvalue", 3.25, WEIGHTS - 0.5 * np.array([3.0, 3.25])),
    ("global_clipnorm", 1.0, WEIGHTS - 0.5 * GRADIENTS / np.hypot(3.0, 4.0)),
]


@row(3, "gradients_clip_option")
@pytest.mark.parametrize(("name", "value", "expected"), CLIPS)
def test_gradients_clip_option_clips(name, value, expected):
    """An object or mapping as `gradients_clip_option` clips; TensorFlow ignores it."""
    clip = dtensor.GradientsClipOption(**{name: value})
    assert clip.get_config()[name] == value
    opt = dtensor.SGD(0.5, gradients_clip_option=clip)
    assert one_step(opt) == expected
    for same in ({"gradients_clip_option": {name: value}}, {name: value}):
        assert dtensor.SGD(0.5, **same).get_config() == opt.get_config()


@row(3, "ema_option")
def test_ema_option_averages():
    """An object or mapping as `ema_option` averages; TensorFlow ignores it."""
    average = dtensor.EMAOption(**AVERAGED)
    assert average.get_config() == AVERAGED
    opt = dtensor.SGD(1.0, ema_option=average)
    assert run(opt, [1.0, 1.0]) == [2.0, 0.5 * 2.0 + 0.5 * 1.0]
    for same in ({"ema_option": AVERAGED}, AVERAGED):
        assert dtensor.SGD(1.0, **same).get_config() == opt.get_config()


@row(3, "jit_compile")
def test_jit_compile_compiles_the_update():
    """`jit_compile` compiles the update; the default is False."""
    traced = []

    class Watching(dtensor.SGD):
        def update_step(self, gradient, variable):
            traced.append(isinstance(gradient, jax.core.Tracer))
            super().update_step(gradient, variable)

    for compiled in ({}, {"jit_compile": True}):
        assert run(Watching(0.5, **compiled), [1.0, 1.0]) == [2.5, 2.0]
    assert traced == [False, False, True]


@row(3, "name")
def test_name_appears_in_the_names_of_state():
    """The optimizer's name appears in the names of its variables."""
    opt = dtensor.SGD(momentum=0.5, name="mine")
    opt.build([Variable(1.0)])
    assert all("mine" in v.name for v in opt.variables)


@row(3, "mesh")
def test_mesh_is_where_global_variables_are():
    """`mesh` is optional and replicates iterations and rate; the default is the variables' mesh."""
    mesh = mesh_of_all()
    given, found = dtensor.SGD(mesh=mesh), dtensor.SGD()
    given.build([Variable(jax.device_put(1.0, on(mesh)))])
    found.build([sharded(mesh)])
    for opt in (given, found):
        assert opt.iterations.sharding == opt.learning_rate.sharding == on(mesh)
    assert run(dtensor.SGD(0.5), [1.0]) == [2.5]


# ── options of the parent class ──────────────────────────────────────────────────────────────


@row(3, "weight_decay")
def test_weight_decay_decays():
    """`weight_decay` decays the weights; TensorFlow documents these options but refuses them."""
    opt = dtensor.SGD(0.5, weight_decay=0.5)
    assert one_step(opt) == WEIGHTS - 0.5 * 0.5 * WEIGHTS - 0.5 * GRADIENTS


@row(3, "clipnorm", "clipvalue", "global_clipnorm")
@pytest.mark.parametrize(("name", "value", "expected"), CLIPS)
def test_clipping(name, value, expected):
    """The clip options limit each norm, each element, or the norm of all gradients."""
    assert one_step(dtensor.SGD(0.5, **{name: value})) == expected


@row(3, "use_ema")
def test_use_ema_averages_and_overwrites():
    """`use_ema` averages the weights after each step and periodically overwrites them."""
    assert run(dtensor.SGD(1.0, **AVERAGED), [1.0, 1.0]) == [2.0, 0.5 * 2.0 + 0.5 * 1.0]
    without = {**AVERAGED, "use_ema": False}
    assert run(dtensor.SGD(1.0, **without), [1.0, 1.0]) == [2.0, 1.0]


@row(3, "use_ema")
def test_averages_on_a_mesh_are_updated():
    """Averages of sharded weights are updated; in TensorFlow 2.15 they never change."""
    mesh = mesh_of_all()
    w, opt = sharded(mesh), dtensor.SGD(1.0, use_ema=True, ema_momentum=0.5, mesh=mesh)
    for _ in range(2):
        opt.minimize(lambda: w.value().sum(), [w])
    assert numbers([w]) == [[-1.0] * w.size]
    opt.finalize_variable_values([w])
    assert numbers([w]) == [[0.5 * 0.0 + 0.5 * -1.0] * w.size]
    assert w.value().sharding == on(mesh, "x")


@row(3, "ema_momentum")
def test_ema_momentum_is_the_weight_of_the_old_average():
    """The average is `ema_momentum` * average + (1 - `ema_momentum`) * weight."""
    w, average = Variable(3.0), None
    opt = dtensor.SGD(1.0, use_ema=True, ema_momentum=0.75)
    for gradient in (1.0, 4.0, -2.0):
        opt.apply_gradients([(gradient, w)])
        average = float(w) if average is None else 0.75 * average + 0.25 * float(w)
    opt.finalize_variable_values([w])
    assert float(w) == average
    assert dtensor.SGD().ema_momentum == 0.99


@row(3, "ema_overwrite_frequency")
def test_ema_overwrite_frequency_is_the_number_of_steps():
    """Averages overwrite the weights every `ema_overwrite_frequency` steps, by default never."""
    weights = run(dtensor.SGD(1.0, **AVERAGED), [1.0] * 4)
    assert weights == [2.0, 1.5, 0.5, 0.5 * (0.5 * 1.5 + 0.5 * 0.5) + 0.5 * -0.5]
    never = dtensor.SGD(1.0, use_ema=True, ema_momentum=0.5)
    assert run(never, [1.0] * 4) == [2.0, 1.0, 0.0, -1.0]


@row(3, "decay")
@pytest.mark.parametrize("cls", [dtensor.SGD, dtensor.Adam, dtensor.AdamW])
def test_decay_is_not_an_argument(cls):
    """`decay` is a TypeError, as in 2.9 and 2.12, and a ValueError, as in 2.15."""
    for decay in (None, 0.0, 0.5):
        for error in (TypeError, ValueError):
            failing(error, "InverseTimeDecay", cls, 0.5, decay=decay)


# ── options that are new here ────────────────────────────────────────────────────────────────


@row(3, "new: loss_scale_factor")
def test_loss_scale_factor_is_a_fixed_loss_scale():
    """New: `loss_scale_factor` is a fixed loss scale that skips NaN gradients."""
    opt, w = dtensor.SGD(0.5, loss_scale_factor=8.0), Variable(3.0)
    assert float(opt.scale_loss(1.0)) == 8.0
    opt.minimize(lambda: w * 1.0, [w])
    opt.apply_gradients([(np.nan, w)])
    assert (float(w), int(opt.iterations)) == (2.5, 1)


@row(3, "new: gradient_accumulation_steps")
def test_gradient_accumulation_steps_averages():
    """New: the average of `gradient_accumulation_steps` gradients makes one update."""
    assert run(dtensor.SGD(0.5, gradient_accumulation_steps=2), [1.0, 3.0]) == [3.0, 2.0]


@row(3, "new: master_weights")
def test_master_weights_keep_small_updates():
    """New: a float32 copy accumulates updates that are too small for float16."""
    opt = dtensor.SGD(2.0**-14, master_weights=True)
    w = Variable(jnp.float16(1.0))
    for _ in range(64):
        opt.apply_gradients([(jnp.float16(1.0), w)])
    assert float(w) == 1.0 - 2.0**-8


@row(3, "new: shard_state_over")
def test_shard_state_over_shards_slots():
    """New: slots can be sharded over an axis of the mesh."""
    mesh = mesh_of_all()
    w = Variable(jax.device_put(np.ones((64, 32), np.float32), on(mesh)))
    opt = dtensor.SGD(0.5, 0.9, shard_state_over=mesh.axis_names)
    opt.apply_gradients([(w.value(), w)])
    part = opt.momentums[0].value().addressable_shards[0].data
    assert part.size * jax.device_count() == w.size
    assert (w.numpy() == 0.5).all()


# ── attributes ───────────────────────────────────────────────────────────────────────────────


@row(3, "iterations")
def test_iterations_counts_steps():
    """Each `apply_gradients` adds 1 to `iterations`, an int32 replicated on the mesh."""
    mesh = mesh_of_all()
    w, opt = sharded(mesh), dtensor.SGD(mesh=mesh)
    for expected in (1, 2):
        opt.apply_gradients([(np.ones(w.shape, np.float32), w)])
        assert int(opt.iterations) == expected
    assert (opt.iterations.dtype, opt.iterations.sharding) == (jnp.int32, on(mesh))


@row(3, "learning_rate")
def test_learning_rate_can_be_read_and_set():
    """`learning_rate` is the current rate and can be set."""
    opt = dtensor.SGD(0.5)
    opt.learning_rate = 2.0
    assert float(opt.learning_rate) == 2.0
    assert run(opt, [1.0]) == [1.0]
    scheduled = dtensor.SGD(schedules.ExponentialDecay(0.5, 1, 0.5))
    run(scheduled, [1.0, 1.0])
    assert float(scheduled.learning_rate) == 0.25


@row(3, "TypeError: setting a number where a schedule is")
def test_a_schedule_is_not_replaced_by_a_number():
    """A number cannot replace a schedule, but a schedule can replace a number."""
    opt = dtensor.SGD(schedules.ExponentialDecay(0.5, 1, 0.5))
    with pytest.raises(TypeError, match="Expected a schedule or callable"):
        opt.learning_rate = 0.5
    opt = dtensor.SGD(0.5)
    opt.learning_rate = schedules.ExponentialDecay(0.25, 1, 0.5)
    assert float(opt.learning_rate) == 0.25


@row(3, "momentums")
def test_momentums_are_the_velocities():
    """Each variable has a momentum of its sharding, unless `momentum` is 0."""
    w = sharded(mesh_of_all())
    opt, without = dtensor.SGD(0.5, momentum=0.5), dtensor.SGD(0.5)
    opt.apply_gradients([(np.ones(w.shape, np.float32), w)])
    (m,) = opt.momentums
    assert (numbers([m]), m.sharding) == ([[-0.5] * w.size], w.sharding)
    without.build([w])
    assert len(without.variables) == 2


@row(3, "variables")
def test_variables_are_all_state():
    """`variables` is all state; TensorFlow leaves out iterations and learning rate."""
    opt = dtensor.SGD(0.5, momentum=0.9)
    opt.build([Variable(1.0, name="w")])
    names = ["SGD/iteration", "SGD/learning_rate", "SGD/momentum/w"]
    assert [v.name for v in opt.variables] == names


def test_iterations_can_be_set_before_build():
    """A number is where counting starts, and a variable becomes the counter."""
    count, w = Variable(3), Variable(1.0)
    opt = dtensor.SGD(0.5)
    opt.iterations = 2
    assert int(opt.iterations) == 2
    opt.iterations = count
    opt.apply_gradients([(0.0, w)])
    assert (int(count), opt.iterations) == (4, count)
    with pytest.raises(RuntimeError, match="before the optimizer is built"):
        opt.iterations = 0


def test_iterations_are_not_set_where_they_are_computed():
    """With accumulation a count cannot be set, neither before the option nor after it."""
    opt = dtensor.SGD(0.5, gradient_accumulation_steps=4)
    for count in (8, Variable(8)):
        with pytest.raises(ValueError, match="iterations not to be set"):
            opt.iterations = count
    assert run(opt, [-1.0] * 4) == [3.0, 3.0, 3.0, 3.5]
    late, w = dtensor.SGD(0.5), Variable(1.0)
    late.iterations = 8
    late.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match="iterations not to be set"):
        late.build([w])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_variable_on_one_device_moves_to_the_mesh(kind, compiled):
    """`build` replicates it on `mesh`. Steps, averages and assignments are those of one device."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(kind,))
    found = []
    for where in (None, mesh):
        x, y = Variable(3.0), Variable(1.0)
        opt = dtensor.SGD(0.25, 0.5, use_ema=True, jit_compile=compiled, mesh=where)
        opt.build([x, y])
        assert where is None or x.value().sharding == on(mesh)
        for weights in ([x], [x, y], [x, y]):
            opt.minimize(lambda x=x, y=y: x**2 + y**2, weights)
        x.assign(x.value() + 1)
        opt.finalize_variable_values([x, y])
        opt.set_weights([v.numpy() for v in opt.variables])
        found.append(numbers([x, y, *opt.variables]))
    assert found[0] == found[1]


@pytest.mark.parametrize("place", ["inner", "wrapper", "both"])
def test_a_scaled_optimizer_moves_a_variable_to_its_mesh(place):
    """`mesh` may be that of the wrapper, of the inner optimizer, or of both."""
    mesh, w = mesh_of_all(), Variable(3.0)
    inner = dtensor.SGD(0.25, mesh=None if place == "wrapper" else mesh)
    opt = LossScaleOptimizer(inner, mesh=None if place == "inner" else mesh)
    for _ in range(2):
        opt.minimize(lambda: w**2, [w])
    assert float(w) == 0.75
    assert w.value().sharding == on(mesh)


def test_the_mesh_has_the_global_variables_from_the_start():
    """Iterations and rate are replicated on a given mesh before the first step."""
    mesh = mesh_of_all()
    opt = dtensor.SGD(mesh=mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    assert opt.iterations.sharding == opt.learning_rate.sharding == everywhere
    scaled = LossScaleOptimizer(SGD(), mesh=mesh)
    assert scaled.dynamic_scale.sharding == scaled.step_counter.sharding == everywhere


@row(3, "learning_rate")
def test_the_rate_of_a_schedule_is_that_of_the_last_step():
    """With a schedule, `learning_rate` is the rate of the last step, before any that of the first;
    so it is with a callable of the step."""
    w = Variable(1.0)
    for rate in (schedules.ExponentialDecay(1.0, 1, 0.5), lambda step: 0.5**step):
        opt, seen = dtensor.SGD(rate), []
        for _ in range(4):
            seen.append(float(opt.learning_rate))
            opt.apply_gradients([(0.0, w)])
        assert seen == [1.0, 1.0, 0.5, 0.25]
    count, opt = Variable(2), dtensor.SGD(schedules.ExponentialDecay(1.0, 1, 0.5))
    opt.iterations = count
    step = gs.optimizers.jit(lambda: opt.apply_gradients([(0.0, w)]), state=([w], opt.variables))
    opt.build([w])
    step()
    assert (int(count), float(opt.learning_rate)) == (3, 0.25)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("around", [lambda opt: opt, LossScaleOptimizer, tf2.LossScaleOptimizer])
def test_a_rate_of_a_subclass_multiplies_that_of_the_step(around, compiled):
    """A subclass that overrides `learning_rate` has its rate in each step, once."""

    class Half(dtensor.SGD):
        @property
        def learning_rate(self):
            return super().learning_rate * 0.5

    class Own(Half):
        def update_step(self, gradient, variable):
            variable.assign_sub(self.learning_rate * gradient)

    rates = (1.0, schedules.ExponentialDecay(1.0, 1, 0.5), lambda step: 0.5**step)
    for rate, total in zip(rates, (1.0, 0.75, 0.75), strict=True):
        for cls in (Half, Own):
            w, opt = Variable(0.0), around(cls(rate, jit_compile=compiled))
            for _ in range(2):
                opt.minimize(lambda w=w: -w, [w])
            assert float(w) == total


def test_a_mapping_of_averages_has_the_documented_frequency():
    """A mapping without a frequency never overwrites; an `EMAOption` does every 100 updates."""
    assert dtensor.SGD(ema_option={"use_ema": True}).ema_overwrite_frequency is None
    option = dtensor.EMAOption(use_ema=True)
    assert dtensor.SGD(ema_option=option).ema_overwrite_frequency == 100


# ── methods ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("add_variable", "shape dtype initializer name"),
        ("add_variable_from_reference", "model_variable variable_name initial_value shape"),
        (
            "apply_gradients",
            "grads_and_vars name skip_gradients_aggregation experimental_aggregate_gradients",
        ),
        ("build", "var_list"),
        ("compute_gradients", "loss var_list tape"),
        ("exclude_from_weight_decay", "var_list var_names"),
        ("finalize_variable_values", "var_list"),
        ("from_config", "config"),
        ("get_config", ""),
        ("load_own_variables", "store"),
        ("minimize", "loss var_list tape"),
        ("save_own_variables", "store"),
        ("set_weights", "weights"),
        ("update_step", "gradient variable"),
    ],
)
def test_methods_take_the_documented_arguments(method, arguments):
    """Each method takes the documented arguments in the documented order."""
    signature = inspect.signature(getattr(dtensor.SGD(), method))
    names = arguments.split()
    assert [*signature.parameters][: len(names)] == names


# ── add_variable, add_variable_from_reference ────────────────────────────────────────────────


@row(3, "add_variable")
def test_add_variable_creates_an_optimizer_variable():
    """`add_variable` takes shape, dtype, initializer and name, and adds to the state."""
    opt = dtensor.SGD()
    new = opt.add_variable((2,), "int32", "ones", "x")
    assert (numbers([new]), new.dtype, new.name) == ([[1, 1]], jnp.int32, "SGD/x")
    assert new in opt.variables
    filled = opt.add_variable((2,), initializer=lambda shape, dtype: jnp.full(shape, 3, dtype))
    assert numbers([filled]) == [[3.0, 3.0]]


@pytest.mark.parametrize("kind", [list, tuple, np.array, jnp.array])
def test_the_shape_of_a_variable_may_be(kind):
    """`shape` can be a list, a tuple or an array of integers."""
    assert dtensor.SGD().add_variable(kind([2, 3])).shape == (2, 3)


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_a_variable_is_a_scalar_of_float32_by_default(arguments):
    """The default variable is a float32 scalar of 0."""
    new = dtensor.SGD().add_variable(*arguments)
    assert (new.shape, new.dtype, float(new)) == ((), jnp.float32, 0.0)


def test_an_initializer_may_be_a_name():
    """`initializer` can be the name of an initializer of Keras."""
    assert numbers([dtensor.SGD().add_variable((2, 2), initializer="identity")]) == [
        [[1.0, 0.0], [0.0, 1.0]]
    ]


def test_added_variables_are_on_the_mesh():
    """Added variables are replicated on the mesh, before, in and after `build`."""

    class Counted(dtensor.SGD):
        def build(self, var_list):
            super().build(var_list)
            self.count = self.add_variable()

    mesh = mesh_of_all()
    given, found = Counted(mesh=mesh), Counted()
    early = given.add_variable()
    for opt in (given, found):
        opt.build([sharded(mesh)])
        assert opt.count.sharding == opt.add_variable().sharding == on(mesh)
    assert early.sharding == on(mesh)


@row(3, "add_variable_from_reference")
def test_add_variable_from_reference_takes_shape_dtype_and_sharding():
    """A slot has its variable's shape, dtype and sharding; for half precision, float32."""
    opt, reference = dtensor.SGD(), sharded(mesh_of_all())
    slot = opt.add_variable_from_reference(model_variable=reference, variable_name="slot")
    assert (slot.shape, slot.dtype, slot.sharding) == (
        reference.shape, jnp.float32, reference.sharding,
    )  # fmt: skip
    assert opt.add_variable_from_reference(Variable(jnp.float16(1)), "m").dtype == jnp.float32


def test_the_name_of_a_slot():
    """The name of a slot is `variable_name`, a slash and the variable's name."""
    slot = dtensor.SGD().add_variable_from_reference(Variable(1.0, name="dense_1"), "momentum")
    assert slot.name.endswith("momentum/dense_1")


def test_the_initial_value_of_a_slot():
    """A slot starts with `initial_value`, by default 0."""
    opt, var = dtensor.SGD(), Variable([1.0, 2.0])
    for value, expected in ((None, [0.0, 0.0]), ([3.0, 4.0], [3.0, 4.0]), (var, [1.0, 2.0])):
        assert numbers([opt.add_variable_from_reference(var, "m", value)]) == [expected]


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, Variable])
def test_the_initial_value_of_a_sharded_slot(kind):
    """The initial value of a sharded slot can be an array or a variable."""
    var = sharded(mesh_of_all())
    slot = dtensor.SGD().add_variable_from_reference(var, "m", kind(var.value()))
    assert (numbers([slot]), slot.sharding) == ([[1.0] * var.size], var.sharding)


# ── aggregate_gradients ──────────────────────────────────────────────────────────────────────


@row(3, "aggregate_gradients")
def test_gradients_are_those_of_the_whole_mesh():
    """Gradients are those of the whole mesh; a step does not sum them over devices."""
    w = sharded(mesh_of_all())
    dtensor.SGD(0.5).apply_gradients([(np.ones(w.shape, np.float32), w)])
    assert numbers([w]) == [[0.5] * w.size]


# ── apply, apply_gradients ───────────────────────────────────────────────────────────────────


@row(3, "apply")
def test_apply_takes_gradients_and_variables():
    """`apply` takes gradients and variables; after `build`, gradients alone."""
    w, opt = Variable(3.0), dtensor.SGD(0.5)
    opt.apply([1.0], [w])
    opt.apply([1.0])
    assert float(w) == 2.0


@row(3, "apply_gradients")
def test_apply_gradients_takes_pairs_and_returns_none():
    """`apply_gradients` takes pairs and returns None; an empty list changes nothing."""
    w, opt = Variable(3.0), dtensor.SGD(0.5)
    assert opt.apply_gradients(zip([1.0], [w], strict=True)) is None
    assert opt.apply_gradients([]) is None
    assert (float(w), int(opt.iterations)) == (2.5, 1)


@pytest.mark.parametrize(
    "malformed",
    [None, 1.0, [1.0], [(1.0,)], [(1.0, 2.0, 3.0)], [(1.0, "w")]],
    ids=["none", "number", "no pairs", "one", "three", "no variable"],
)
def test_malformed_pairs(malformed):
    """Anything but a list of (gradient, variable) pairs is a TypeError."""
    with pytest.raises(TypeError):
        dtensor.SGD().apply_gradients(malformed)


@row(3, "ValueError: all gradients are None")
def test_some_gradient_is_needed():
    """A step without any gradient is a ValueError and changes nothing."""
    w, opt = Variable(1.0), dtensor.SGD()
    opt.build([w])
    failing(ValueError, "None for all of", opt.apply_gradients, [(None, w)])
    assert (float(w), int(opt.iterations)) == (1.0, 0)


@row(3, "KeyError: a variable not built with")
def test_a_variable_has_to_be_known():
    """An unknown variable is a ValueError; in TensorFlow, a KeyError."""
    opt, new = dtensor.SGD(), Variable(1.0, name="new")
    opt.build([Variable(1.0)])
    failing(ValueError, "built with.*got 'new'", opt.apply_gradients, [(1.0, new)])


# ── assign, assign_add, assign_sub ───────────────────────────────────────────────────────────


@row(3, "assign", "assign_add", "assign_sub")
@pytest.mark.parametrize(
    ("method", "expected"),
    [("assign", [0.5, 0.25]), ("assign_add", [1.5, 2.25]), ("assign_sub", [0.5, 1.75])],
)
def test_assignments(method, expected):
    """These methods set, add to, and subtract from a variable."""
    variable = Variable([1.0, 2.0])
    getattr(dtensor.SGD(), method)(variable, jnp.array([0.5, 0.25]))
    assert numbers([variable]) == [expected]


# ── build ────────────────────────────────────────────────────────────────────────────────────


@row(3, "build")
def test_build_makes_a_momentum_for_each_variable():
    """`build` creates one momentum per variable; a second call does nothing."""
    v, w, opt = Variable(1.0), Variable([1.0, 2.0]), dtensor.SGD(0.5, momentum=0.5)
    for _ in range(2):
        opt.build([v, w])
        assert [m.shape for m in opt.momentums] == [(), (2,)]
    opt.apply([1.0, [1.0, 1.0]])
    assert numbers([v, w]) == [0.5, [0.5, 1.5]]


# ── compute_gradients ────────────────────────────────────────────────────────────────────────


@row(3, "compute_gradients")
def test_compute_gradients_returns_pairs():
    """`compute_gradients` returns (gradient, variable) pairs; a gradient can be None."""
    a, b, opt = Variable(3.0), Variable(1.0), dtensor.SGD()
    for var_list in ([a, b], (a, b)):
        pairs = opt.compute_gradients(lambda: a * a, var_list, tape=None)
        assert [(g if g is None else float(g), v) for g, v in pairs] == [(6.0, a), (None, b)]


@pytest.mark.parametrize("method", ["compute_gradients", "minimize"])
def test_there_are_no_tapes(method):
    """Passing a tape is a ValueError: Gainstage has none."""
    w = Variable(1.0)
    failing(ValueError, "no tape", getattr(dtensor.SGD(), method), lambda: w * w, [w], object())


@row(3, "ValueError: the loss is not callable")
@pytest.mark.parametrize("method", ["compute_gradients", "minimize"])
def test_a_loss_is_a_callable(method):
    """A loss that is not callable is a TypeError; in TensorFlow, a ValueError."""
    w = Variable(1.0)
    failing(TypeError, "Expected a callable", getattr(dtensor.SGD(), method), w**2, [w])


def test_compute_gradients_calls_the_loss_before_var_list():
    """A callable `var_list` can return variables that the loss creates."""
    made = []

    def loss():
        if not made:
            made.append(Variable(2.0))
        return made[0] ** 2

    ((gradient, variable),) = dtensor.SGD().compute_gradients(loss, lambda: made)
    assert (float(gradient), variable) == (4.0, made[0])


# ── exclude_from_weight_decay ────────────────────────────────────────────────────────────────


@row(3, "exclude_from_weight_decay")
@pytest.mark.parametrize("names", [None, ["bias"], ["ia"], ["other", "^b"]])
def test_exclude_from_weight_decay(names):
    """Variables in `var_list`, or with a word of `var_names` in their name, do not decay."""
    bias, kernel = Variable(1.0, name="bias"), Variable(1.0, name="kernel")
    opt = dtensor.SGD(0.5, weight_decay=0.5)
    opt.exclude_from_weight_decay(None if names else [bias], names)
    opt.apply_gradients([(0.0, bias), (0.0, kernel)])
    assert (float(bias), float(kernel)) == (1.0, 1.0 - 0.5 * 0.5)


def test_exclusion_comes_before_build():
    """Excluding after `build` is a ValueError."""
    opt, w = dtensor.SGD(), Variable(1.0)
    opt.build([w])
    failing(ValueError, "before build", opt.exclude_from_weight_decay, [w])


# ── finalize_variable_values ─────────────────────────────────────────────────────────────────


@row(3, "finalize_variable_values")
def test_finalize_variable_values_sets_the_averages():
    """`finalize_variable_values` sets variables to their averages."""
    w, opt = Variable(3.0), dtensor.SGD(1.0, use_ema=True, ema_momentum=0.5)
    for _ in range(2):
        opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == 1.0
    opt.finalize_variable_values([w])
    assert float(w) == 0.5 * 2.0 + 0.5 * 1.0


# ── from_config, get_config ──────────────────────────────────────────────────────────────────


@row(3, "from_config")
def test_from_config_is_the_reverse_of_get_config():
    """`from_config` makes the same optimizer without state; in TensorFlow it fails."""
    opt = dtensor.SGD(0.5, 0.5, nesterov=True, ema_option=AVERAGED, clipnorm=1.0, name="mine")
    weights = run(opt, [1.0, 2.0])
    again = dtensor.SGD.from_config(opt.get_config())
    assert (type(again), again.name, int(again.iterations)) == (dtensor.SGD, "mine", 0)
    assert run(again, [1.0, 2.0]) == weights


def test_from_config_reads_a_schedule():
    """A schedule survives `get_config`, JSON and `from_config`."""
    opt = dtensor.SGD(schedules.ExponentialDecay(0.5, 1, 0.5))
    again = dtensor.SGD.from_config(json.loads(json.dumps(opt.get_config())))
    assert run(again, [1.0, 1.0]) == run(opt, [1.0, 1.0]) == [2.5, 2.25]


@pytest.mark.parametrize(
    "written",
    [
        {"learning_rate": 0.5, "momentum": 0.5, "jit_compile": True},
        {"learning_rate": 0.5, "momentum": 0.5, "is_legacy_optimizer": False},
        {"learning_rate": 0.5, "momentum": 0.5, "decay": 0.0},
    ],
    ids=lambda config: [*config][-1],
)
def test_from_config_reads_what_tensorflow_wrote(written):
    """`from_config` ignores keys without effect that TensorFlow wrote."""
    given = copy.deepcopy(written)
    opt = dtensor.SGD.from_config(given)
    assert given == written
    assert (float(opt.learning_rate), opt.momentum) == (0.5, 0.5)


def test_from_config_refuses_a_decay():
    """A configuration with a decay, which would have an effect, names the schedule to use."""
    written = {"learning_rate": 0.5, "decay": 0.1}
    failing(ValueError, "InverseTimeDecay", dtensor.SGD.from_config, written)


@row(3, "get_config")
def test_get_config_is_a_serializable_dictionary():
    """`get_config` survives JSON and has every hyperparameter, but not the mesh."""
    opt = dtensor.SGD(0.1, 0.5, True, ema_option=AVERAGED, mesh=mesh_of_all(), jit_compile=True)
    config = json.loads(json.dumps(opt.get_config()))
    expected = {"learning_rate": 0.1, "momentum": 0.5, "nesterov": True, "name": "SGD", **AVERAGED}
    assert {name: config[name] for name in expected} == expected
    assert config["ema_option"] is config["gradients_clip_option"] is None
    assert not {"mesh", "jit_compile"} & set(config)


# ── minimize ─────────────────────────────────────────────────────────────────────────────────


@row(3, "minimize")
def test_minimize_computes_and_applies_gradients():
    """`minimize` computes and applies gradients, and returns None."""
    a, b = Variable(3.0), Variable(3.0)
    opt, by_hand = dtensor.SGD(0.25), dtensor.SGD(0.25)
    assert opt.minimize(lambda: a * a, (a,), tape=None) is None
    by_hand.apply_gradients(by_hand.compute_gradients(lambda: b * b, [b]))
    assert float(a) == float(b) == 3.0 - 0.25 * 6.0


def test_minimize_trains_variables_that_the_loss_makes():
    """`minimize` trains variables that the loss creates in the first step."""
    first, made = Variable(1.0), []

    def loss():
        if not made:
            made.append(Variable(2.0))
        return first + made[0] ** 2

    opt = dtensor.SGD(0.25)
    for expected in ([0.75, 1.0], [0.5, 0.5]):
        opt.minimize(loss, lambda: [first, *made])
        assert numbers([first, *made]) == expected


def test_a_loss_of_several_elements_is_summed():
    """`minimize` sums a loss that is not a scalar."""
    w = Variable([1.0, 2.0])
    dtensor.SGD(0.5).minimize(lambda: w * w, [w])
    assert numbers([w]) == [[1.0 - 0.5 * 2.0, 2.0 - 0.5 * 4.0]]


# ── load_own_variables, save_own_variables, set_weights ──────────────────────────────────────


def through_variables(opt, other):
    other.set_weights(opt.variables)


@row(3, "load_own_variables", "save_own_variables", "set_weights")
@pytest.mark.parametrize("way", [through_a_store, through_arrays, through_variables])
def test_state_moves_to_another_optimizer(way):
    """Training continues from state that was saved, or set from arrays or variables."""
    mesh = mesh_of_all()
    runs = [(sharded(mesh), dtensor.SGD(0.5, momentum=0.5)) for _ in range(2)]
    for w, opt in runs:
        opt.build([w])
    (w, opt), (other_w, other) = runs
    opt.apply([np.ones(w.shape, np.float32)])
    opt.learning_rate = 0.25
    other_w.assign(w)
    way(opt, other)
    assert numbers(other.variables) == numbers(opt.variables) == [1, 0.25, [-0.5] * w.size]
    assert other.momentums[0].value().sharding == w.sharding
    other.apply([np.ones(w.shape, np.float32)])
    assert numbers([other_w]) == [[0.5 - (0.5 * 0.5 + 0.25)] * w.size]


@row(3, "ValueError: set_weights before build")
def test_set_weights_needs_build():
    """`set_weights` before `build` is a ValueError."""
    opt = dtensor.SGD()
    failing(ValueError, "built before set_weights", opt.set_weights, numbers(opt.variables))


# ── scale_loss, stateless_apply ──────────────────────────────────────────────────────────────


@row(3, "scale_loss")
def test_scale_loss_multiplies_by_the_factor():
    """`scale_loss` returns the loss itself, unless `loss_scale_factor` is set."""
    assert dtensor.SGD().scale_loss(3.0) == 3.0
    assert float(dtensor.SGD(loss_scale_factor=2.0).scale_loss(3.0)) == 6.0


@row(3, "stateless_apply")
def test_stateless_apply_is_pure():
    """`stateless_apply` returns new arrays and changes no variable."""
    w, opt = Variable(3.0), dtensor.SGD(0.5)
    opt.build([w])
    state = [v.value() for v in opt.variables]
    (new,), state = jax.jit(opt.stateless_apply)(state, [1.0], [w.value()])
    assert (float(new), int(state[0]), float(w), int(opt.iterations)) == (2.5, 1, 3.0, 0)


# ── update_step ──────────────────────────────────────────────────────────────────────────────


@row(3, "update_step")
def test_update_step_updates_one_variable():
    """`update_step` updates one variable with the optimizer's learning rate."""
    w, opt = Variable(3.0), dtensor.SGD(0.5)
    opt.build([w])
    opt.update_step(jnp.float32(1.0), w)
    assert float(w) == 2.5


class Sign(dtensor.SGD):
    """Written as the page of the parent class says."""

    def __init__(self, learning_rate=0.5, rest=0.0, **options):
        super().__init__(learning_rate, **options)
        self.rest = rest

    def build(self, var_list):
        super().build(var_list)
        self.counts = {v: self.add_variable_from_reference(v, "count") for v in var_list}

    def update_step(self, gradient, variable):
        self.assign_add(self.counts[variable], 1.0)
        self.assign_sub(variable, self.learning_rate * jnp.sign(gradient) + self.rest)

    def get_config(self):
        return {**super().get_config(), "rest": self.rest}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "rate", [0.5, lambda: 0.5, schedules.ExponentialDecay(0.5, 1, 1.0)], ids=type
)
def test_a_customized_optimizer(rate, compiled):
    """A subclass can override `build` and an `update_step` of two arguments."""
    a, b = Variable(3.0), Variable(4.0)
    opt = Sign(rate, jit_compile=compiled)
    opt.apply_gradients([(7.0, a), (-0.1, b)])
    assert numbers([a, b, *opt.counts.values()]) == [2.5, 4.5, 1.0, 1.0]
    assert float(opt.learning_rate) == 0.5


def test_a_customized_optimizer_in_a_wrapper():
    """A subclass with an `update_step` of two arguments works in a `LossScaleOptimizer`."""
    w, opt = Variable(3.0), LossScaleOptimizer(Sign(0.5), 8.0)
    opt.minimize(lambda: w * 7.0, [w])
    opt.update_step(jnp.float32(7.0), w, jnp.float32(0.25))
    assert numbers([w]) == [3.0 - 0.5 - 0.25]


def test_a_customized_optimizer_has_a_configuration():
    """`from_config` passes what a subclass adds in `get_config` to its constructor."""
    again = Sign.from_config(Sign(0.25, rest=1.0).get_config())
    assert (type(again), again.rest, float(again.learning_rate)) == (Sign, 1.0, 0.25)


def test_a_customized_optimizer_needs_update_step():
    """A step of a subclass without `update_step` is a NotImplementedError."""

    class Empty(gs.optimizers.Optimizer):
        pass

    failing(NotImplementedError, "must define", Empty(0.5).apply, [1.0], [Variable(1.0)])


# ── raises ───────────────────────────────────────────────────────────────────────────────────


@row(3, "ValueError: mesh is no mesh")
def test_mesh_is_a_mesh():
    """A `mesh` of another type is a ValueError."""
    failing(ValueError, r"Expected a jax.sharding.Mesh", dtensor.SGD, mesh="mesh")


@row(3, "TypeError: learning_rate is a string")
def test_learning_rate_is_no_string():
    """A string as learning rate is a TypeError."""
    failing(TypeError, "learning_rate", dtensor.SGD, "fast")


@row(3, "TypeError: an unknown keyword")
def test_an_unknown_keyword():
    """An unknown keyword is a TypeError that names it."""
    failing(TypeError, "clip", dtensor.SGD, clip=1.0)


@row(3, "no error: anything for an option object")
@pytest.mark.parametrize(
    ("option", "value", "cls"),
    [
        ("gradients_clip_option", 1.0, "GradientsClipOption"),
        ("gradients_clip_option", {"norm": 1.0}, "GradientsClipOption"),
        ("ema_option", True, "EMAOption"),
        ("ema_option", {"momentum": 0.9}, "EMAOption"),
    ],
)
def test_an_option_object_is_of_its_class(option, value, cls):
    """A wrong option object, which TensorFlow ignores, is a TypeError that names its class."""
    failing(TypeError, cls, dtensor.SGD, **{option: value})


@row(3, "no error: anything for an option object")
def test_an_option_is_given_once():
    """An option passed twice, by itself and in its object, is a ValueError."""
    clip = {"gradients_clip_option": {"clipnorm": 1.0}}
    failing(ValueError, "twice", dtensor.SGD, **clip, clipnorm=1.0)
    inner = dtensor.SGD(**clip)
    failing(ValueError, "clipnorm on 'SGD'", LossScaleOptimizer, inner, clipvalue=0.5)


@row(3, "ValueError: two clip options")
def test_there_is_one_clip_option():
    """Any two clip options are a ValueError."""
    for make in (dtensor.SGD, dtensor.GradientsClipOption):
        failing(ValueError, "at most one", make, clipnorm=1.0, global_clipnorm=1.0)
    failing(ValueError, "at most one", dtensor.SGD, clipnorm=1.0, clipvalue=1.0)


@row(3, "ValueError: ema_momentum outside of [0, 1]")
@pytest.mark.parametrize("make", [dtensor.SGD, dtensor.EMAOption])
@pytest.mark.parametrize("wrong", [-0.1, 1.5])
def test_ema_momentum_is_a_fraction(make, wrong):
    """`ema_momentum` must be in [0, 1], even without `use_ema`."""
    failing(ValueError, "ema_momentum", make, ema_momentum=wrong)
    failing(ValueError, "ema_momentum", make, use_ema=True, ema_momentum=wrong)


# ── examples ─────────────────────────────────────────────────────────────────────────────────


def test_example_of_a_step():
    """A step on `var**2 / 2` with rate 0.1 takes 1 to 0.9."""
    opt = dtensor.SGD(learning_rate=0.1)
    var = Variable(1.0)
    opt.minimize(lambda: (var**2) / 2.0, [var])
    assert var.numpy() == np.float32(0.9)


def test_example_of_momentum():
    """With momentum 0.9 the first step is 0.1 and the second 0.18."""
    opt = dtensor.SGD(learning_rate=0.1, momentum=0.9)
    var = Variable(1.0)
    val0 = var.value()
    opt.minimize(lambda: (var**2) / 2.0, [var])
    val1 = var.value()
    opt.minimize(lambda: (var**2) / 2.0, [var])
    val2 = var.value()
    assert [val0 - val1, val1 - val2] == pytest.approx([0.1, 0.18], abs=1e-6)


def test_example_of_several_variables():
    """`minimize` updates all variables of a list."""
    opt = dtensor.SGD(learning_rate=0.1)
    var1, var2 = Variable(1.0), Variable(2.0)
    opt.minimize(lambda: 3 * var1 * var1 + 2 * var2 * var2, var_list=[var1, var2])
    assert numbers([var1, var2]) == pytest.approx([1.0 - 0.1 * 6.0, 2.0 - 0.1 * 8.0])


def test_example_of_processed_gradients():
    """Gradients may be changed between computing and applying them."""
    opt = dtensor.SGD(learning_rate=0.1)
    var1, var2 = Variable(1.0), Variable(2.0)
    grads = jax.grad(lambda a, b: 3 * a * a + 2 * b * b, (0, 1))(var1.value(), var2.value())
    opt.apply_gradients(zip([grads[0] + 1, grads[1]], [var1, var2], strict=True))
    assert numbers([var1, var2]) == pytest.approx([1.0 - 0.1 * 7.0, 2.0 - 0.1 * 8.0])


def test_example_of_a_schedule():
    """A schedule changes the learning rate, for a loss of shape (1,)."""
    var = Variable(np.array([1.0]))
    rate = schedules.ExponentialDecay(initial_learning_rate=0.01, decay_steps=20, decay_rate=0.1)
    opt = dtensor.SGD(learning_rate=rate)
    for _ in range(2):
        opt.minimize(lambda: 3 * var, var_list=[var])
    assert numbers([var])[0] == pytest.approx([1.0 - 3 * 0.01 * (1 + 0.1 ** (1 / 20))])


def test_example_of_clipping():
    """With `clipvalue=1`, gradients of 2 move the weights by 1."""
    opt = dtensor.SGD(learning_rate=1, clipvalue=1)
    var1, var2 = Variable(2.0), Variable(2.0)
    opt.minimize(lambda: 2 * var1 + 2 * var2, [var1, var2])
    assert numbers([var1, var2]) == [1.0, 1.0]


def averaged(momentum):
    opt = dtensor.SGD(1, use_ema=True, ema_momentum=momentum, ema_overwrite_frequency=3)
    return run(opt, [1.0] * 3, start=2.0)


@row("differences", "moving averages")
def test_example_of_averages():
    """The third step overwrites with -0.25; TensorFlow, which averages the start, with -0.125."""
    assert averaged(0.5) == [1.0, 0.0, 0.5 * (0.5 * 1.0 + 0.5 * 0.0) + 0.5 * -1.0]


def test_averages_of_momentum_0_and_1():
    """Momentum 0 means no averaging; momentum 1 keeps the first step's result."""
    assert averaged(0) == [1.0, 0.0, -1.0]
    assert averaged(1) == [1.0, 0.0, 1.0]


# ── the other classes of the module ──────────────────────────────────────────────────────────


@row(3, "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta")
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"])
def test_the_other_classes(name):
    """The other classes take the same keywords and step as those of `gainstage`."""
    clip = dtensor.GradientsClipOption(clipvalue=0.5)
    opt = getattr(dtensor, name)(0.25, gradients_clip_option=clip, mesh=mesh_of_all())
    assert not opt.jit_compile
    assert one_step(opt) == one_step(getattr(gs.optimizers, name)(0.25, clipvalue=0.5)).expected


def test_the_other_classes_have_their_own_arguments():
    """The other classes take their own arguments first and put them in their configuration."""
    opt = dtensor.Adam(0.1, 0.5, 0.75, 1e-3, True)
    again = dtensor.Adam.from_config(opt.get_config())
    assert (again.beta_1, again.beta_2, again.epsilon, again.amsgrad) == (0.5, 0.75, 1e-3, True)
    inner = dtensor.Adam(clipnorm=1.0)
    failing(ValueError, "clipnorm", LossScaleOptimizer, inner, clipnorm=2.0)
    assert LossScaleOptimizer(inner, weight_decay=0.1).inner_optimizer is inner


@pytest.mark.filterwarnings("ignore:No gradient for")
def test_the_constraint_of_a_variable_without_a_gradient_waits():
    """A variable that a step does not train is not projected, as there."""
    a, b = Variable(3.0, constraint=lambda x: jnp.clip(x, 0.0, 1.0)), Variable(1.0)
    opt = dtensor.SGD(0.5)
    opt.minimize(lambda: b * 1.0, [a, b])
    opt.minimize(lambda: b * 1.0, [b])
    assert (float(a), float(b)) == (3.0, 0.0)


NAMES = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_an_optimizer_is_that_of_its_class(name):
    """By default `name` is "SGD", "Adam", "AdamW" and so on, also of a subclass; a name that is
    given is kept."""
    cls = getattr(dtensor, name)
    mine = type("Mine", (cls,), {})
    assert (cls().name, mine().name, cls(name="mine").name) == (name, name, "mine")
    assert cls.from_config(cls().get_config()).name == name


@row(3, "apply_gradients")
def test_apply_gradients_takes_the_keywords_of_later_versions():
    """The keywords that 2.13 to 2.15 added to `apply_gradients` change nothing."""
    w, opt = Variable(3.0), dtensor.SGD(0.5)
    opt.apply_gradients([(1.0, w)], "step", True)
    opt.apply_gradients([(1.0, w)], name="step", skip_gradients_aggregation=False)
    opt.apply_gradients([(1.0, w)], experimental_aggregate_gradients=False)
    assert float(w) == 1.5


@row(3, "add_variable_from_reference")
def test_a_slot_may_have_another_shape():
    """`shape` of 2.13 to 2.15 is the shape of a slot of zeros, float32 or wider, which a second
    build reuses; with an `initial_value` it has no effect."""

    class Rows(dtensor.SGD):
        def build(self, var_list):
            super().build(var_list)
            self.sums = [self.add_variable_from_reference(v, "sum", shape=[3]) for v in var_list]

    w = Variable(jnp.ones((3, 2), jnp.float16), name="w")
    opt = Rows(0.5, master_weights=True)
    opt.build([w])
    (first,) = opt.sums
    opt.build([w])
    assert opt.sums == [first]
    assert (first.name, first.shape, first.dtype) == ("SGD/sum/w", (3,), jnp.float32)
    assert any(first is v for v in opt.variables)
    same = opt.add_variable_from_reference(w, "same", shape=(3, 2))
    given = opt.add_variable_from_reference(w, "given", jnp.ones((3, 2)), shape=[3])
    assert (same.shape, given.shape, float(given[0, 0])) == ((3, 2), (3, 2), 1.0)

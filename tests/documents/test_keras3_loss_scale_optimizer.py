"""`tf.keras.mixed_precision.LossScaleOptimizer` of Keras 3 (TensorFlow 2.16 and later, keras.io).

In the order of that page. `@row` names the rows of docs/migrating.md that a test holds.
"""

import collections
import copy
import inspect
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import NamedSharding, PartitionSpec
from transfers import through_a_store, through_arrays

import gainstage as gs
from gainstage.compat import dtensor, experimental, tf2, v1
from gainstage.diagnostics import telemetry
from gainstage.optimizers import Adam, AdamW, RMSprop, Variable, from_optax

from rows import row

WEIGHTS = GRADIENTS = np.array([3.0, 4.0])


def wrapped(inner=None, scale=8.0, growth=2, **options):
    return gs.optimizers.LossScaleOptimizer(
        inner or gs.optimizers.SGD(0.5), scale, growth, **options
    )


def run(opt, gradients, start=3.0):
    """The weight after each of these scaled gradients."""
    w, weights = Variable(start), []
    for gradient in gradients:
        opt.apply([gradient], [w])
        weights.append(float(w))
    return weights


def scales(opt, gradients):
    """The loss scale after each of these gradients."""
    w, seen = Variable(1.0), []
    for gradient in gradients:
        opt.apply([gradient], [w])
        seen.append(float(opt.loss_scale))
    return seen


def one_step(opt):
    """The weights 3 and 4 after a step on the true gradients 3 and 4."""
    a, b = Variable(3.0), Variable(4.0)
    opt.minimize(lambda: a * 3.0 + b * 4.0, [a, b])
    return pytest.approx([float(a), float(b)], rel=1e-6)


def both(**options):
    """Two wrappers: one with these options, and one whose inner optimizer has them."""
    return wrapped(**options), wrapped(gs.optimizers.SGD(0.5, **options))


counts = collections.Counter()


def numbers(variables):
    return [np.asarray(v).tolist() for v in variables]


def mesh_of_all():
    return jax.make_mesh((jax.device_count(),), ("x",))


def sharded(mesh):
    """A variable of ones, two on each device."""
    ones = jnp.ones(2 * jax.device_count())
    return Variable(jax.device_put(ones, NamedSharding(mesh, PartitionSpec("x"))), name="w")


def failing(error, match, call, *args, **kwargs):
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


class Counting(gs.optimizers.SGD):
    """Counts how often its update is called: once for each trace, or for each step."""

    def update_step(self, gradient, variable, learning_rate):
        counts[self] += 1
        super().update_step(gradient, variable, learning_rate)

    @property
    def calls(self):
        return counts[self]


# ── summary ──────────────────────────────────────────────────────────────────────────────────


def test_scaling_keeps_small_intermediate_gradients():
    """A gradient that underflows in float16 survives with loss scaling."""

    def trained(opt):
        w = Variable(0.0)

        def loss():
            half = w.value().astype(jnp.float16)
            return half * jnp.float16(2.0**-13) * jnp.float16(2.0**-13)

        opt.minimize(loss, [w])
        return float(w)

    assert trained(gs.optimizers.SGD(2.0**26)) == 0.0
    assert trained(gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(2.0**26))) == -1.0


def test_it_is_an_optimizer():
    """The class inherits from `Optimizer`."""
    assert isinstance(wrapped(), gs.optimizers.Optimizer)


def test_the_loss_is_multiplied_by_the_scale():
    """`scale_loss` multiplies the loss by the loss scale."""
    assert float(wrapped(scale=8.0).scale_loss(3.0)) == 24.0


def test_gradients_are_divided_by_the_scale():
    """The step divides the gradients by the loss scale."""
    assert run(wrapped(scale=8.0), [8.0 * 2.0]) == [3.0 - 0.5 * 2.0]


def test_a_nonfinite_gradient_halves_the_scale_and_skips_the_step():
    """A step with an inf or NaN gradient halves the scale and changes nothing else."""
    opt = wrapped(gs.optimizers.SGD(0.5, momentum=0.5), scale=8.0)
    w, others = Variable([3.0, 4.0]), Variable(5.0)
    opt.apply([[8.0, 8.0], 8.0], [w, others])
    before = numbers([w, others, *opt.inner_optimizer.variables])
    for bad, scale in ((np.inf, 4.0), (-np.inf, 2.0), (np.nan, 1.0)):
        opt.apply([[8.0, bad], 8.0])
        assert float(opt.loss_scale) == scale
    assert numbers([w, others, *opt.inner_optimizer.variables]) == before


def test_finite_steps_since_the_last_change_double_the_scale():
    """The scale doubles after `dynamic_growth_steps` finite steps in a row."""
    opt = wrapped(scale=8.0, growth=3)
    grads = [1.0, 1.0, np.inf, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert scales(opt, grads) == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


# ── arguments ────────────────────────────────────────────────────────────────────────────────


@row(1, "inner_optimizer")
def test_inner_optimizer_takes_the_steps():
    """The wrapped optimizer takes the steps and cannot be replaced."""
    inner = gs.optimizers.SGD(0.25)
    opt = wrapped(inner)
    assert opt.inner_optimizer is inner
    assert run(opt, [8.0], start=1.0) == [0.75]
    assert int(inner.iterations) == 1
    with pytest.raises(AttributeError):
        opt.inner_optimizer = gs.optimizers.SGD()


@row(1, "initial_scale")
def test_initial_scale_is_the_first_scale():
    """The initial scale is a real number from 2**-126 to 2**126; the default is 2**15."""
    assert float(gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()).loss_scale) == 2.0**15
    for scale in (0.1, np.int64(16), 2.0**-126, 2.0**126):
        opt = wrapped(scale=scale)
        assert np.float32(opt.initial_scale) == opt.loss_scale == np.float32(scale)
    failing(ValueError, "initial_scale", wrapped, scale=2.0**127)


def test_the_scale_is_updated_and_its_first_value_kept():
    """Training changes the scale; `initial_scale` keeps its first value."""
    opt = wrapped(scale=8.0)
    assert scales(opt, [np.inf]) == [4.0]
    assert opt.initial_scale == 8.0


def test_a_scale_too_high_is_left_faster_than_one_too_low():
    """A scale falls in one step, but needs `dynamic_growth_steps` steps to rise."""
    opt = wrapped(scale=2.0**20, growth=5)
    assert scales(opt, [np.inf] * 3)[-1] == 2.0**17
    assert scales(opt.from_config(opt.get_config()), [1.0] * 15)[-1] == 2.0**23


@row(1, "dynamic_growth_steps")
def test_dynamic_growth_steps_is_the_period():
    """The scale doubles every `dynamic_growth_steps` finite steps; the default is 2000."""
    assert scales(wrapped(growth=2), [1.0] * 4) == [8.0, 16.0, 16.0, 32.0]
    assert scales(wrapped(growth=1), [1.0] * 2) == [16.0, 32.0]
    assert gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()).dynamic_growth_steps == 2000


def test_growth_steps_can_be_set():
    """As in Keras, they can be set at any time, also of a compiled step; the scale is a variable
    to be assigned."""
    opt = wrapped(scale=16.0, growth=2000)
    with pytest.raises(AttributeError, match=r"constructor\. Write dynamic_scale\.assign"):
        opt.initial_scale = 8.0
    opt.dynamic_scale.assign(8.0)
    assert scales(opt, [1.0] * 2) == [8.0, 8.0]
    opt.dynamic_growth_steps = 1
    w = opt.trainable_variables[0]
    opt.apply([1.0])
    assert float(opt.loss_scale) == 16.0
    step = gs.optimizers.jit(lambda: opt.apply([1.0]), state=([w], opt.variables))
    step()
    opt.dynamic_growth_steps = 3
    for _ in range(3):
        step()
    assert float(opt.loss_scale) == 64.0
    again = opt.from_config(opt.get_config())
    assert (again.initial_scale, again.dynamic_growth_steps) == (16.0, 3)
    with pytest.raises(ValueError, match=r">= 1 .*for dynamic_growth_steps; got 0"):
        opt.dynamic_growth_steps = 0
    with pytest.raises(AttributeError, match=r"no `loss_scale`.*got 2.*Pass loss_scale="):
        gs.optimizers.LossScaleOptimizer(
            gs.optimizers.SGD(), 8.0, dynamic=False
        ).dynamic_growth_steps = 2
    assert (opt.initial_scale, opt.dynamic_growth_steps, opt.rule) == (16.0, 3, again.rule)


@row(1, "name")
def test_name_is_the_prefix_of_state():
    """`name` is the prefix of state variables; unlike in Keras, it need not be unique."""
    opt = wrapped(gs.optimizers.SGD(0.5, 0.5, name="inner"), name="mine")
    opt.build([Variable(1.0, name="w")])
    names = [v.name for v in opt.variables]
    assert names[0] == "mine/step_counter"
    assert names[-1] == "inner/w_momentum"
    assert wrapped().name == wrapped().name == "loss_scale_optimizer"


def test_name_is_the_fourth_argument():
    """All arguments of the signature, also `name`, can be passed by position."""
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(), 8.0, 3, "mine")
    assert (opt.initial_scale, opt.dynamic_growth_steps, opt.name) == (8.0, 3, "mine")


# Asked for in apex#183 (fixed or dynamic).
@row(1, "dynamic")
def test_dynamic_false_is_a_fixed_scale():
    """`dynamic=False`, which Keras refuses, means a fixed scale that skips overflows."""
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.5), initial_scale=8.0, dynamic=False)
    assert run(opt, [8.0, np.inf, 8.0]) == [2.5, 2.5, 2.0]
    assert (float(opt.loss_scale), opt.rule) == (8.0, gs.FixedLossScale(8.0))
    assert (opt.dynamic, opt.dynamic_growth_steps, wrapped().dynamic) == (False, None, True)
    assert opt.variables[0].name == "loss_scale_optimizer/dynamic_scale"


@row(1, "weight_decay")
def test_weight_decay_on_the_wrapper_decays():
    """`weight_decay` decays the weights; unlike in Keras, also when set on the wrapper."""
    decayed = WEIGHTS - WEIGHTS * 0.5 * 0.5
    for opt in both(weight_decay=0.5):
        assert one_step(opt) == decayed - 0.5 * GRADIENTS


@row(1, "clipnorm")
def test_clipnorm_limits_each_norm():
    """`clipnorm` limits the norm of each variable's unscaled gradient."""
    assert one_step(wrapped(clipnorm=3.5)) == WEIGHTS - 0.5 * np.array([3.0, 3.5])


@row(1, "clipvalue")
def test_clipvalue_limits_each_element():
    """`clipvalue` limits each element of the unscaled gradients."""
    w = Variable([0.0, 0.0, 0.0])
    wrapped(gs.optimizers.SGD(1.0), clipvalue=2.0).apply([[8.0 * 5, 8.0 * -5, 8.0 * 1]], [w])
    assert numbers([w]) == [[-2.0, 2.0, -1.0]]


@row(1, "global_clipnorm")
def test_global_clipnorm_limits_the_norm_of_all():
    """`global_clipnorm` limits the norm of all unscaled gradients together."""
    opt = wrapped(global_clipnorm=1.0)
    assert one_step(opt) == WEIGHTS - 0.5 * GRADIENTS / np.hypot(3.0, 4.0)


@row(1, "use_ema")
def test_use_ema_averages_the_weights_after_each_step():
    """`use_ema` averages the weights after each step and periodically overwrites them."""
    average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    assert run(wrapped(gs.optimizers.SGD(1.0), **average), [8.0, 8.0]) == [
        2.0,
        0.5 * 2.0 + 0.5 * 1.0,
    ]
    assert run(wrapped(gs.optimizers.SGD(1.0), ema_overwrite_frequency=2), [8.0, 8.0]) == [2.0, 1.0]


@row(1, "ema_momentum")
def test_ema_momentum_is_the_weight_of_the_old_average():
    """The average is `ema_momentum` * average + (1 - `ema_momentum`) * weight."""
    opt, w, average = wrapped(use_ema=True, ema_momentum=0.75), Variable(3.0), None
    for gradient in (1.0, 4.0, -2.0):
        opt.apply([gradient], [w])
        average = float(w) if average is None else 0.75 * average + 0.25 * float(w)
    opt.finalize_variable_values([w])
    assert float(w) == average
    assert wrapped().ema_momentum == 0.99


@row(1, "ema_overwrite_frequency")
def test_ema_overwrite_frequency_counts_updates():
    """Every `ema_overwrite_frequency` updates, skips excluded, averages overwrite the weights."""
    options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    weights = run(
        wrapped(gs.optimizers.SGD(1.0), growth=9, **options), [8.0, np.nan, 4.0, 4.0, 4.0]
    )
    assert weights == [2.0, 2.0, 1.5, 0.5, 0.5 * (0.5 * 1.5 + 0.5 * 0.5) + 0.5 * -0.5]


def test_without_a_frequency_finalizing_overwrites():
    """By default only `finalize_variable_values` overwrites the weights with averages."""
    opt, w = wrapped(gs.optimizers.SGD(1.0), use_ema=True, ema_momentum=0.5), Variable(3.0)
    assert opt.ema_overwrite_frequency is None
    for _ in range(2):
        opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == 1.0
    opt.finalize_variable_values([w])
    assert float(w) == 1.5


@row(1, "loss_scale_factor")
def test_loss_scale_factor_multiplies_the_loss_and_divides_the_gradients():
    """`loss_scale_factor` multiplies the loss and divides gradients, beside the dynamic scale."""
    plain = gs.optimizers.SGD(0.5, loss_scale_factor=4.0)
    assert float(plain.scale_loss(3.0)) == 12.0
    assert run(plain, [4.0]) == [2.5]
    for opt in both(loss_scale_factor=4.0):
        assert float(opt.loss_scale) == float(opt.scale_loss(1.0)) == 8.0 * 4.0
        assert one_step(opt) == WEIGHTS - 0.5 * GRADIENTS
        assert float(opt.dynamic_scale) == 8.0


@row(1, "gradient_accumulation_steps")
def test_gradient_accumulation_updates_with_the_average():
    """Each window of finite microbatches makes one update with their average gradient."""
    opt = wrapped(gradient_accumulation_steps=2)
    weights = run(opt, [8.0, np.nan, 24.0])
    assert weights == [3.0, 3.0, 3.0 - 0.5 * (8.0 / 8 + 24.0 / 4) / 2]
    assert int(opt.iterations) == 1


def test_accumulation_and_the_frequency_of_averages():
    """The overwrite frequency counts updates; every microbatch of such an update overwrites."""
    averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    inner = gs.optimizers.SGD(1.0, gradient_accumulation_steps=2, **averages)
    w, average, expected = 3.0, 0.0, []
    for step in range(8):
        w -= step % 2  # the average gradient is 1
        momentum = 0.5 if step // 2 else 0.0
        average = momentum * average + (1 - momentum) * w
        w = average if (step // 2 + 1) % 2 == 0 else w
        expected.append(w)
    assert run(wrapped(inner, growth=99), [8.0] * 8) == expected


def test_accumulation_and_schedules():
    """With accumulation, learning-rate schedules count microbatches."""
    rate = gs.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    opt = wrapped(gs.optimizers.SGD(rate, gradient_accumulation_steps=2), growth=99)
    assert run(opt, [8.0] * 4) == [3.0, 3.0 - 0.5**1, 2.5, 2.5 - 0.5**3]


@row(1, "new: loss_scale=")
def test_rule_replaces_the_scale_arguments():
    """New: `rule` replaces the scale arguments, with bounds, backoff and hysteresis."""
    rule = gs.DynamicLossScale(8.0, min_scale=4.0, backoff_factor=0.25, hysteresis=2)
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.5), loss_scale=rule)
    assert (opt.rule, wrapped().rule) == (rule, gs.DynamicLossScale(8.0, 2, min_scale=2.0**-24))
    assert scales(opt, [np.inf, np.inf]) == [8.0, 4.0]
    failing(
        ValueError,
        "cannot be combined",
        gs.optimizers.LossScaleOptimizer,
        gs.optimizers.SGD(),
        8.0,
        loss_scale=rule,
    )


@row(1, "new: telemetry")
def test_telemetry_records_the_steps():
    """New: `telemetry` records statistics of the steps in additional state."""
    plain, opt = wrapped(), wrapped(telemetry=True)
    plain.build([Variable(1.0)])
    run(opt, [np.nan])
    assert len(opt.variables) == len(plain.variables) + 9
    assert "variable: NaN in 1 of 1 skipped step" in str(gs.diagnostics.report(opt))
    assert (bool(telemetry(opt).finite), int(telemetry(opt).skipped_steps)) == (False, 1)


@row(1, "new: underflow_every")
def test_underflow_every_counts_what_float16_loses():
    """New: `underflow_every` makes the report count gradients that underflow in float16."""
    opt = wrapped(telemetry=True, underflow_every=10)
    run(opt, [2.0**-26])
    assert gs.diagnostics.report(opt).underflow.flushed == [1.0]


@row(1, "new: jit_compile")
def test_jit_compile_changes_only_how_a_step_runs():
    """New: `jit_compile`, by default the inner optimizer's, does not change the result."""
    assert not wrapped(gs.optimizers.SGD(0.5, jit_compile=False)).jit_compile
    for compiled, calls in ((True, 1), (False, 3)):
        opt = wrapped(Counting(0.5), jit_compile=compiled, growth=9)
        assert run(opt, [8.0, np.inf, 4.0]) == [2.5, 2.5, 2.0]
        assert opt.inner_optimizer.calls == calls


@row(1, "new: mesh")
def test_mesh_replicates_scalars():
    """New: scalars are replicated on `mesh`, by default the mesh of the variables."""
    mesh = mesh_of_all()
    everywhere = NamedSharding(mesh, PartitionSpec())
    given, found = wrapped(mesh=mesh), wrapped()
    given.build([Variable(jax.device_put(1.0, everywhere))])
    found.build([sharded(mesh)])
    assert given.dynamic_scale.sharding == found.dynamic_scale.sharding == everywhere


# ── attributes ───────────────────────────────────────────────────────────────────────────────


@row(1, "iterations")
def test_iterations_is_the_inner_optimizers():
    """`iterations` is the inner optimizer's; skipped steps do not count."""
    opt, w = wrapped(), Variable(1.0)
    counts = [int(opt.iterations)]
    for gradient in (1.0, np.nan, 1.0):
        opt.apply([gradient], [w])
        counts.append(int(opt.iterations))
    assert counts == [0, 1, 1, 2]
    assert opt.iterations is opt.inner_optimizer.iterations


@row(1, "learning_rate")
def test_learning_rate_is_the_inner_optimizers():
    """`learning_rate` is the inner optimizer's; setting it does not recompile the step."""
    opt, w = wrapped(Counting(0.5), growth=9), Variable(3.0)
    opt.apply([8.0], [w])
    opt.learning_rate = 0.25
    opt.apply([8.0], [w])
    inner = opt.inner_optimizer
    assert (float(w), float(inner.learning_rate), inner.calls) == (2.25, 0.25, 1)


@row(1, "variables")
def test_variables_are_the_wrappers_and_the_inner_optimizers():
    """`variables` is all state; Keras adds an unused iteration and learning rate."""
    opt = wrapped(gs.optimizers.SGD(0.5, momentum=0.9), name="lso")
    state = ["lso/step_counter", "lso/dynamic_scale", "SGD/iteration", "SGD/learning_rate"]
    assert [v.name for v in opt.variables] == state
    opt.build([Variable(1.0, name="w")])
    assert [v.name for v in opt.variables] == [*state, "SGD/w_momentum"]
    opt.add_variable((), name="mine")
    assert [v.name for v in opt.variables][:3] == [*state[:2], "lso/mine"]


@row(1, "dynamic_scale")
def test_dynamic_scale_is_the_current_scale():
    """`dynamic_scale` is a float32 variable; unlike in Keras, it exists before `build`."""
    opt = wrapped()
    assert (float(opt.dynamic_scale), opt.dynamic_scale.dtype) == (8.0, jnp.float32)
    run(opt, [np.inf])
    assert float(opt.dynamic_scale) == 4.0


@row(1, "step_counter", "new: dynamic_counter")
def test_step_counter_counts_finite_steps():
    """`step_counter` counts finite steps in a row; it is None for a fixed scale."""
    opt, w = wrapped(growth=3), Variable(1.0)
    counts = [int(opt.step_counter)]
    for gradient in (1.0, 1.0, np.nan, 1.0):
        opt.apply([gradient], [w])
        counts.append(int(opt.dynamic_counter))
    assert counts == [0, 1, 2, 0, 1]
    assert opt.dynamic_counter is opt.step_counter
    assert (
        gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(), 8.0, dynamic=False).step_counter
        is None
    )


@row(1, "new: trainable_variables")
def test_trainable_variables_are_those_of_build():
    """New: the variables that it trains are a list, in the order of `build`."""
    a, b = Variable(1.0), Variable(2.0)
    opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.5))
    assert opt.trainable_variables == []
    opt.build([b, a])
    assert opt.trainable_variables == [b, a]
    assert opt.inner_optimizer.trainable_variables == [b, a]


@row(1, "built")
def test_built_says_whether_there_is_state():
    """`built` is False before `build` and True after it."""
    opt = wrapped()
    assert not opt.built
    opt.build([Variable(1.0)])
    assert opt.built


@row(1, "new: loss_scale")
def test_loss_scale_is_the_factor_of_the_loss():
    """New: `loss_scale` is `dynamic_scale` times `loss_scale_factor`."""
    opt = wrapped(loss_scale_factor=4.0)
    assert (float(opt.loss_scale), opt.loss_scale.dtype) == (32.0, jnp.float32)
    assert scales(opt, [np.inf]) == [16.0]


# ── methods ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("add_variable", "shape initializer dtype aggregation name"),
        ("add_variable_from_reference", "reference_variable name initializer"),
        ("apply", "grads trainable_variables"),
        ("apply_gradients", "grads_and_vars"),
        ("assign", "variable value"),
        ("assign_add", "variable value"),
        ("assign_sub", "variable value"),
        ("build", "var_list"),
        ("check_finite", "grads"),
        ("exclude_from_weight_decay", "var_list var_names"),
        ("finalize_variable_values", "var_list"),
        ("from_config", "config custom_objects"),
        ("get_config", ""),
        ("load_own_variables", "store"),
        ("save_own_variables", "store"),
        ("scale_loss", "loss"),
        ("set_weights", "weights"),
        ("stateless_apply", "optimizer_variables grads trainable_variables"),
        ("update_step", "gradient variable learning_rate"),
    ],
)
def test_methods_take_the_documented_arguments(method, arguments):
    """Each method takes the documented arguments in the documented order."""
    signature = inspect.signature(getattr(wrapped(), method))
    names = arguments.split()
    assert [*signature.parameters][: len(names)] == names


# ── add_variable, add_variable_from_reference ────────────────────────────────────────────────


@row(1, "add_variable")
def test_add_variable_adds_state():
    """`add_variable` adds a variable to the state, by default of float32 zeros."""
    opt = wrapped()
    new = opt.add_variable((2,), initializer="ones", dtype="int32", aggregation="sum", name="x")
    assert (numbers([new]), new.dtype, new.name) == ([[1, 1]], jnp.int32, f"{opt.name}/x")
    assert new in opt.variables
    zero = opt.add_variable(())
    assert (float(zero), zero.dtype, zero.trainable) == (0.0, jnp.float32, False)
    filled = opt.add_variable((2,), lambda shape, dtype: jnp.full(shape, 3, dtype))
    assert numbers([filled]) == [[3, 3]]


@pytest.mark.parametrize("name", ["random_normal", "glorot_uniform", "HeNormal", "orthogonal"])
def test_add_variable_knows_initializers_by_name(name):
    """`initializer` can be the name of an initializer of Keras."""
    new = wrapped().add_variable((8, 4), initializer=name)
    assert new.shape == (8, 4)
    assert len(np.unique(new.numpy())) > 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_initializers_take_any_shape(shape):
    """An initializer of Keras also makes scalars and vectors."""
    new = wrapped().add_variable(shape, initializer="glorot_uniform")
    assert new.shape == shape
    assert (abs(new.numpy()) <= np.sqrt(6 / 2)).all()


def test_identity_is_an_initializer():
    """The initializer `identity` makes an identity matrix."""
    assert numbers([wrapped().add_variable((2, 2), "identity")]) == [[[1, 0], [0, 1]]]


def test_an_unknown_initializer_is_an_error():
    """An unknown initializer name is a ValueError that lists the known names."""
    failing(ValueError, "glorot_uniform", wrapped().add_variable, (2,), initializer="zeroes")


@row(1, "add_variable_from_reference")
def test_add_variable_from_reference_makes_a_slot():
    """A slot has its reference's shape and sharding, and is zero by default."""
    opt, reference = wrapped(), sharded(mesh_of_all())
    slot = opt.add_variable_from_reference(reference)
    assert (slot.sharding, numbers([slot])) == (reference.sharding, [[0.0] * reference.size])
    named = opt.add_variable_from_reference(reference, name="slot", initializer="ones")
    assert (named.name, numbers([named])) == (f"{opt.name}/w_slot", numbers([reference]))


@row("differences", "slots of float16 variables")
def test_slots_are_float32_or_wider():
    """A slot has its reference's dtype; unlike in Keras, float32 for half precision."""
    half = Variable(jnp.ones(2, jnp.float16))
    assert wrapped().add_variable_from_reference(half).dtype == jnp.float32
    opt = wrapped(Adam(0.5), use_ema=True, gradient_accumulation_steps=2)
    opt.build([half])
    assert [v.dtype for v in opt.variables if v.shape == (2,)] == [jnp.float32] * 4
    assert half.dtype == jnp.float16


@row(1, "add_optimizer_variables")
def test_add_optimizer_variables_adds_a_slot_for_each_variable():
    """One name gives a list, several a tuple of lists; there may be as many initializers."""
    a, b = Variable(1.0, name="a"), Variable([1.0, 2.0], name="b")
    opt = wrapped()
    slots = opt.add_optimizer_variables([a, b], "m", "ones")
    assert numbers(slots) == [1.0, [1.0, 1.0]]
    firsts, seconds = opt.add_optimizer_variables([a, b], ["u", "v"], ["zeros", "ones"])
    assert (numbers(firsts), numbers(seconds)) == ([0.0, [0.0, 0.0]], [1.0, [1.0, 1.0]])
    assert [v.name.rpartition("_")[2] for v in (*firsts, *seconds)] == ["u", "u", "v", "v"]
    # All slots of a variable, then those of the next: the order in which Keras stores them.
    both = [*firsts, *seconds]
    assert [v.name[-3:] for v in opt.variables if v in both] == ["a_u", "a_v", "b_u", "b_v"]
    ones, others = opt.add_optimizer_variables([a], ["p", "q"], "ones")
    assert numbers([*ones, *others]) == [1.0, 1.0]


def test_a_variable_has_the_layout_that_is_given():
    """`layout` places a variable; by default it is replicated on the optimizer's mesh."""
    mesh = mesh_of_all()
    layout = NamedSharding(mesh, PartitionSpec("x"))
    opt = wrapped(mesh=mesh)
    size = jax.device_count()
    assert opt.add_variable((size,), layout=layout, name="own").sharding == layout
    assert opt.add_variable((size,)).sharding == NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize(
    ("initializer", "error"),
    [(lambda shape, dtype: jnp.ones(3, dtype), "from initializer"), (jnp.ones(3), "for init")],
)
def test_a_variable_has_the_shape_that_is_given(initializer, error):
    """An initializer of another shape is an error, also for a slot."""
    opt, w = wrapped(), Variable([1.0, 2.0])
    for call in (
        lambda: opt.add_variable((2,), initializer),
        lambda: opt.add_variable_from_reference(w, "m", initializer),
    ):
        with pytest.raises(ValueError, match=rf"shape \(2,\).*{error}.*shape \(3,\)"):
            call()
    assert opt.add_variable((2,), jax.nn.initializers.normal()).shape == (2,)


# ── apply, apply_gradients ───────────────────────────────────────────────────────────────────


@row(1, "apply")
def test_apply_updates_the_variables():
    """`apply` takes scaled gradients; unlike Keras's on JAX, it works eagerly and compiled."""
    w, opt = Variable(3.0), wrapped()
    opt.apply([8.0], [w])
    assert float(w) == 2.5
    step = gs.optimizers.jit(lambda g: opt.apply([g], [w]), state=([w], opt.variables))
    step(8.0)
    step(jnp.inf)
    assert (float(w), float(opt.loss_scale)) == (2.0, 8.0)  # doubled, then halved


def test_apply_matches_gradients_and_variables_in_order():
    """`apply` pairs gradients with the variables of `build`, in order."""
    a, b, opt = Variable(1.0), Variable([1.0, 1.0]), wrapped()
    opt.build([a, b])
    opt.apply([8.0, [0.0, 16.0]])
    assert numbers([a, b]) == [0.5, [1.0, 0.0]]


def test_the_first_apply_builds():
    """The first `apply` builds the optimizer for its `trainable_variables`."""
    opt = wrapped()
    assert run(opt, [8.0]) == [2.5]
    assert opt.built


@row(1, "apply_gradients")
def test_apply_gradients_takes_pairs():
    """`apply_gradients` takes pairs and returns `iterations`; Keras's always returns 0."""
    w, opt = Variable(3.0), wrapped()
    counts = [int(opt.apply_gradients(zip([8.0], [w], strict=True))) for _ in range(2)]
    assert (counts, float(w)) == ([1, 2], 2.0)
    accumulating = gs.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    assert [int(accumulating.apply_gradients([(8.0, w)])) for _ in range(4)] == [0, 1, 1, 2]


# ── assign, assign_add, assign_sub ───────────────────────────────────────────────────────────


@row(1, "assign", "assign_add", "assign_sub")
@pytest.mark.parametrize(
    ("method", "expected"),
    [("assign", [0.5, 0.25]), ("assign_add", [1.5, 2.25]), ("assign_sub", [0.5, 1.75])],
)
def test_assignments(method, expected):
    """These methods set, add to, and subtract from a model or optimizer variable."""
    opt = wrapped()
    for variable in (Variable([1.0, 2.0]), opt.add_variable((2,), lambda *_: [1.0, 2.0])):
        getattr(opt, method)(variable, jnp.array([0.5, 0.25]))
        assert numbers([variable]) == [expected]


# ── build ────────────────────────────────────────────────────────────────────────────────────


@row(1, "build")
def test_build_creates_the_state():
    """`build` creates the state; unlike in Keras, a second call does nothing."""
    w, opt = Variable([1.0, 2.0]), wrapped(gs.optimizers.SGD(0.5, momentum=0.9))
    assert len(opt.variables) == 4
    opt.build([w])
    before = list(opt.variables)
    assert [v.shape for v in before] == [(), (), (), (), (2,)]
    opt.build([w])
    assert all(a is b for a, b in zip(opt.variables, before, strict=True))
    failing(ValueError, "built with", opt.build, [Variable(1.0)])


# ── check_finite ─────────────────────────────────────────────────────────────────────────────


@row(1, "check_finite")
def test_check_finite():
    """`check_finite` is False if any element is inf or NaN; None counts as finite."""
    opt = wrapped()
    assert bool(opt.check_finite([jnp.ones(2), None, np.float16(1)]))
    assert bool(opt.check_finite([]))
    assert not bool(opt.check_finite([jnp.ones(2), jnp.array([1.0, jnp.nan])]))
    assert not bool(opt.check_finite([jnp.inf]))


# ── exclude_from_weight_decay ────────────────────────────────────────────────────────────────


@row(1, "exclude_from_weight_decay")
@pytest.mark.parametrize("names", [None, ["bias"], ["ia"], ["^b", "other"]])
def test_exclude_from_weight_decay(names):
    """Variables in `var_list`, or with a word of `var_names` in their name, do not decay."""
    opt = wrapped(gs.optimizers.SGD(0.5, weight_decay=0.5))
    bias, kernel = Variable(1.0, name="bias"), Variable(1.0, name="kernel")
    opt.exclude_from_weight_decay(None if names else [bias], names)
    opt.apply([0.0, 0.0], [bias, kernel])
    assert (float(bias), float(kernel)) == (1.0, 1.0 - 0.5 * 0.5)


def test_a_word_may_have_any_characters():
    """A word of `var_names` matches literally, even with special characters."""
    w, opt = Variable(1.0, name="w+b"), wrapped(weight_decay=0.5)
    opt.exclude_from_weight_decay(var_names=["w+b"])
    opt.apply([0.0], [w])
    assert float(w) == 1.0


@row(1, "no error: exclude_from_weight_decay after build")
def test_exclusion_comes_before_build():
    """Excluding after `build` is a ValueError, as Keras's document says; Keras accepts it."""
    opt, w = wrapped(), Variable(1.0)
    opt.build([w])
    failing(ValueError, "before build", opt.exclude_from_weight_decay, [w])


# ── finalize_variable_values ─────────────────────────────────────────────────────────────────


@row(1, "finalize_variable_values")
def test_finalize_variable_values_sets_the_averages():
    """`finalize_variable_values` sets variables to their averages; without EMA it does nothing."""
    opt = wrapped(gs.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    w, v = Variable(3.0), Variable(1.0)
    for _ in range(2):
        opt.minimize(lambda: w * 1.0 + v * 2.0, [w, v])
    opt.finalize_variable_values([w, v])
    assert (float(w), float(v)) == (0.5 * 2.0 + 0.5 * 1.0, 0.5 * -1.0 + 0.5 * -3.0)
    wrapped().finalize_variable_values([w])
    assert float(w) == 1.5


def test_finalize_variable_values_of_some_variables_or_before_a_step():
    """Some variables may be set to their averages; where there is none yet, nothing changes."""
    w, v, opt = Variable(3.0), Variable(1.0), wrapped(gs.optimizers.SGD(1.0, use_ema=True))
    opt.build([w, v])
    opt.finalize_variable_values([w])
    assert float(w) == 3.0
    opt.minimize(lambda: w * 1.0 + v * 2.0, [w, v])
    w.assign(7.0)
    opt.finalize_variable_values([w])
    assert (float(w), float(v)) == (2.0, -1.0)


@row(1, "ValueError: finalize_variable_values of other variables")
def test_finalize_takes_variables_that_were_trained():
    """`finalize_variable_values` raises ValueError for unknown variables."""
    opt = wrapped(use_ema=True)
    opt.build([Variable(1.0)])
    failing(ValueError, "built with", opt.finalize_variable_values, [Variable(1.0)])


# ── from_config, get_config ──────────────────────────────────────────────────────────────────

WRITTEN_BY_KERAS = {
    "name": "mine",
    "inner_optimizer": {
        "module": "keras.optimizers",
        "class_name": "SGD",
        "config": {"name": "SGD", "learning_rate": 0.5, "momentum": 0.0, "nesterov": False},
        "registered_name": None,
    },
    "initial_scale": 16.0,
    "dynamic_growth_steps": 3,
}


@row(1, "from_config")
def test_from_config_creates_the_optimizer():
    """`from_config` reads a configuration, also Keras's, without changing it."""
    config = copy.deepcopy(WRITTEN_BY_KERAS)
    opt = gs.optimizers.LossScaleOptimizer.from_config(config)
    assert config == WRITTEN_BY_KERAS  # there it loses a key
    assert (opt.name, opt.initial_scale, opt.dynamic_growth_steps) == ("mine", 16.0, 3)
    assert one_step(opt) == WEIGHTS - 0.5 * GRADIENTS


def test_from_config_reads_what_older_keras_wrote():
    """`from_config` ignores wrapper options at their defaults, which older Keras wrote."""
    unset = {"weight_decay": None, "clipnorm": None, "use_ema": False, "ema_momentum": 0.99}
    opt = gs.optimizers.LossScaleOptimizer.from_config({**WRITTEN_BY_KERAS, **unset})
    assert (opt.weight_decay, opt.use_ema) == (None, False)


def test_from_config_takes_custom_objects():
    """`custom_objects` maps names to user-defined optimizers and schedules."""

    class Mine(gs.optimizers.SGD):
        pass

    class Falling(gs.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 / (step + 1)

    config = copy.deepcopy(WRITTEN_BY_KERAS)
    config["inner_optimizer"]["class_name"] = "Other"
    falling = {"class_name": "Falling", "config": {}}
    config["inner_optimizer"]["config"]["learning_rate"] = falling
    custom = {"Other": Mine, "Falling": Falling}
    opt = gs.optimizers.LossScaleOptimizer.from_config(config, custom_objects=custom)
    assert type(opt.inner_optimizer) is Mine
    assert run(opt, [16.0, 16.0]) == [2.5, 2.25]


def test_from_config_takes_a_rate_that_is_a_function_of_custom_objects():
    """Keras writes the name of a function; `custom_objects` has the function."""
    config = copy.deepcopy(WRITTEN_BY_KERAS)
    config["inner_optimizer"]["config"]["learning_rate"] = {
        "module": "builtins",
        "class_name": "function",
        "config": "rate",
        "registered_name": "function",
    }
    opt = gs.optimizers.LossScaleOptimizer.from_config(config, custom_objects={"rate": lambda: 0.5})
    assert one_step(opt) == WEIGHTS - 0.5 * GRADIENTS
    with pytest.raises(ValueError, match="the function 'rate' in custom_objects"):
        gs.optimizers.LossScaleOptimizer.from_config(config)


def test_from_config_takes_the_class_of_the_module_that_is_written():
    """What Keras wrote of its own class is no class of the user with the same name."""

    class SGD(gs.optimizers.Optimizer):
        pass

    class CosineDecay(gs.optimizers.schedules.LearningRateSchedule):
        pass

    assert SGD in gs.optimizers.Optimizer.__subclasses__()
    opt = gs.optimizers.LossScaleOptimizer.from_config(WRITTEN_BY_KERAS)
    assert type(opt.inner_optimizer) is gs.optimizers.SGD
    rate = {
        "module": "keras.optimizers.schedules",
        "class_name": "CosineDecay",
        "config": {"initial_learning_rate": 0.5, "decay_steps": 10},
    }
    written = gs.optimizers.SGD.from_config({"learning_rate": rate}).get_config()["learning_rate"]
    assert written["module"] == "gainstage.optimizers.schedules" != CosineDecay.__module__


@row(1, "get_config")
def test_get_config_is_a_serializable_dictionary():
    """`get_config` survives JSON and has each option once, where it was passed."""
    opt = wrapped(gs.optimizers.SGD(0.1, weight_decay=0.5), clipnorm=2.0)
    config = opt.get_config()
    expected = {"name": opt.name, "initial_scale": 8, "dynamic_growth_steps": 2, "clipnorm": 2}
    assert {key: config[key] for key in expected} == expected
    inner = config["inner_optimizer"]["config"]
    assert (inner["weight_decay"], "clipnorm" in inner, "weight_decay" in config) == (0.5, 0, 0)
    assert (
        gs.optimizers.LossScaleOptimizer.from_config(json.loads(json.dumps(config))).get_config()
        == config
    )


def test_a_configuration_has_no_state():
    """A configuration has no state: the new optimizer starts from the beginning."""
    opt = wrapped(scale=8.0)
    run(opt, [8.0, np.inf])
    again = gs.optimizers.LossScaleOptimizer.from_config(opt.get_config())
    assert (float(again.loss_scale), int(again.iterations), again.built) == (8.0, 0, False)


def test_a_subclass_adds_hyperparameters_to_get_config():
    """`from_config` passes what a subclass adds in `get_config` to its constructor."""

    class Mine(gs.optimizers.LossScaleOptimizer):
        def __init__(self, *args, patience=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.patience = patience

        def get_config(self):
            return {**super().get_config(), "patience": self.patience}

    again = Mine.from_config(Mine(gs.optimizers.SGD(), 4.0, patience=3).get_config())
    assert (type(again), again.patience, again.initial_scale) == (Mine, 3, 4.0)


# ── load_own_variables, save_own_variables, set_weights ──────────────────────────────────────


@row(1, "load_own_variables", "save_own_variables", "set_weights")
@pytest.mark.parametrize("way", [through_a_store, through_arrays])
def test_state_moves_to_another_optimizer(way):
    """Training continues from saved or set weights; Keras's `set_weights` forgets inner state."""
    (w, opt), (other_w, other) = runs = [
        (Variable(3.0), wrapped(gs.optimizers.SGD(0.5, momentum=0.9))) for _ in range(2)
    ]
    for variable, each in runs:
        each.build([variable])
    for gradient in (8.0, np.nan, 8.0):
        opt.apply([gradient])
    opt.learning_rate = 0.125
    other_w.assign(w)
    way(opt, other)
    assert numbers(other.variables) == numbers(opt.variables)
    for _, each in runs:
        each.apply([16.0])
    assert float(w) == float(other_w) < 3.0


@row(1, "warning: load_own_variables of another length")
def test_load_own_variables_loads_all_or_nothing():
    """A store of another length is a ValueError and loads nothing; Keras only warns."""
    opt, store = wrapped(gs.optimizers.SGD(0.5, momentum=0.9)), {}
    opt.build([Variable(1.0)])
    opt.save_own_variables(store)
    before = numbers(opt.variables)
    changed = {key: array + 1 for key, array in store.items()}
    less = {key: changed[key] for key in list(changed)[:-1]}
    failing(ValueError, "'0' to '4'", opt.load_own_variables, less)
    failing(ValueError, "Expected 5 weights", opt.load_own_variables, {**changed, "5": 1.0})
    assert numbers(opt.variables) == before


@row(1, "ValueError: set_weights before build")
def test_set_weights_needs_build():
    """`set_weights` before `build` is a ValueError."""
    opt = wrapped()
    failing(ValueError, "built before set_weights", opt.set_weights, numbers(opt.variables))


@row(1, "ValueError: set_weights of another shape")
def test_set_weights_checks_shapes():
    """A wrong shape or too short a list is a ValueError and sets nothing."""
    opt = wrapped(gs.optimizers.SGD(0.5, momentum=0.9))
    opt.build([Variable([1.0, 2.0])])
    before = numbers(opt.variables)
    failing(ValueError, r"shape \(2,\)", opt.set_weights, [1, 2.0, 3, 4.0, [1.0, 2.0, 3.0]])
    failing(ValueError, "Expected 5 weights", opt.set_weights, [1, 2.0, 3, 4.0])
    assert numbers(opt.variables) == before


WHOLE = [np.array(7.0), np.float16(7.0), 7.0, jnp.float32(7.0), jnp.bfloat16(7.0), np.int64(7)]


@pytest.mark.parametrize("count", WHOLE, ids=lambda x: f"{type(x).__name__}-{np.asarray(x).dtype}")
@pytest.mark.parametrize(
    "make", [gs.optimizers.SGD, dtensor.SGD, lambda: tf2.LossScaleOptimizer(gs.optimizers.SGD())]
)
def test_a_whole_number_of_any_dtype_is_a_count(make, count):
    """`set_weights` takes a count that is saved as a floating number; nothing is set by a fraction
    or by what the integers do not hold."""
    opt = make()
    opt.build([Variable(1.0)])
    weights = numbers(opt.variables)
    place = next(i for i, v in enumerate(opt.variables) if v.name.endswith("iteration"))
    opt.set_weights([*weights[:place], count, *weights[place + 1 :]])
    assert int(opt.iterations) == 7
    for wrong in (7.5, jnp.float32(7.5), np.nan, -np.inf, 2.0**31, 7j):
        changed = [*weights[:place], wrong, *weights[place + 1 :]]
        failing(ValueError, "of numbers that int32 holds", opt.set_weights, changed)
    assert int(opt.iterations) == 7


# ── scale_loss ───────────────────────────────────────────────────────────────────────────────


@row(1, "scale_loss")
@row("differences", "a loss in float16")
def test_scale_loss_scales_in_float32():
    """`scale_loss` works before and after `build`, in float32 or wider."""
    opt, w = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()), Variable(1.0)
    for _ in range(2):
        scaled = opt.scale_loss(jnp.float16(4.0))
        assert (scaled.dtype, float(scaled)) == (jnp.float32, 2.0**17)
        assert float(opt.scale_loss(0.5)) == 2.0**14
        opt.build([w])
    with jax.enable_x64(True):
        assert opt.scale_loss(jnp.float64(1.0)).dtype == jnp.float64


@pytest.mark.parametrize("loss", [70000, True, np.int32(70000)])
def test_scale_loss_of_an_integer(loss):
    """`scale_loss` scales integers and bools in float32."""
    scaled = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()).scale_loss(loss)
    assert (scaled.dtype, float(scaled)) == (jnp.float32, int(loss) * 2.0**15)


def test_scale_loss_comes_before_the_gradients():
    """Gradients of `scale_loss(loss)` are what `apply` expects."""
    w, opt = Variable(3.0), wrapped()
    gradient = jax.grad(lambda x: opt.scale_loss(x**2))(w.value())
    assert float(gradient) == 8.0 * 6.0
    opt.apply([gradient], [w])
    assert float(w) == 3.0 - 0.5 * 6.0


def test_a_callable_is_scaled_where_it_is_called():
    """For a function that returns a loss, `scale_loss` returns one of the same arguments."""
    opt = wrapped()
    scaled = opt.scale_loss(lambda x, by: by * x)
    assert float(scaled(2.0, by=3.0)) == 8.0 * 6.0
    assert float(jax.grad(scaled)(2.0, by=3.0)) == 8.0 * 3.0


# ── stateless_apply ──────────────────────────────────────────────────────────────────────────


@row(1, "stateless_apply")
def test_stateless_apply_is_pure():
    """`stateless_apply` returns new arrays, also in `jax.jit` and `jax.vmap`."""
    w, opt = Variable(3.0), wrapped()
    opt.build([w])
    state = [v.value() for v in opt.variables]
    step = jax.jit(opt.stateless_apply)
    (new,), state = step(state, [8.0], [w.value()])
    assert (float(new), float(w), int(opt.iterations), int(state[2])) == (2.5, 3.0, 0, 1)
    (skipped,), state = step(state, [jnp.nan], [new])
    assert (float(skipped), float(state[1]), int(state[2])) == (2.5, 4.0, 1)
    many = jax.vmap(lambda g: opt.stateless_apply(state, [g], [new])[0][0])(jnp.array([4.0, 8.0]))
    assert many.tolist() == [2.0, 1.5]


@row(1, "ValueError: stateless_apply before build")
def test_stateless_apply_needs_build():
    """`stateless_apply` before `build` is a ValueError."""
    failing(ValueError, "built before stateless_apply", wrapped().stateless_apply, [], [], [])


@row(1, "TypeError: too few optimizer_variables")
def test_stateless_apply_counts_its_lists():
    """A list of the wrong length is a ValueError that names the list."""
    opt = wrapped()
    opt.build([Variable(1.0)])
    state = [v.value() for v in opt.variables]
    failing(ValueError, "optimizer_variables", opt.stateless_apply, state[:-1], [1.0], [1.0])
    failing(ValueError, "optimizer_variables", opt.stateless_apply, [*state, 1], [1.0], [1.0])
    failing(ValueError, "gradients", opt.stateless_apply, state, [1.0, 1.0], [1.0])
    failing(ValueError, "trainable_variables", opt.stateless_apply, state, [1.0], [])


# ── update_step ──────────────────────────────────────────────────────────────────────────────


@row(1, "update_step")
def test_update_step_is_the_inner_optimizers():
    """`update_step` applies the inner optimizer's update with an unscaled gradient."""
    w, opt = Variable(3.0), wrapped(gs.optimizers.SGD(0.5, momentum=0.5))
    opt.build([w])
    for expected in (2.5, 1.75):
        opt.update_step(jnp.float32(2.0), w, jnp.float32(0.25))
        assert float(w) == expected


@row(1, "NotImplementedError: no update_step")
def test_update_step_has_to_be_defined():
    """A step without `update_step` is a NotImplementedError and changes nothing."""

    class Empty(gs.optimizers.Optimizer):
        pass

    w = Variable(1.0)
    failing(NotImplementedError, "Empty must define", wrapped(Empty(0.5)).apply, [1.0], [w])
    assert float(w) == 1.0


# ── methods that are new here ────────────────────────────────────────────────────────────────


@row(1, "new: minimize")
@row("differences", "minimize")
def test_minimize_returns_the_true_loss():
    """New: `minimize` returns the unscaled float32 loss; in v1 and dtensor, None."""
    w = Variable(jnp.float16(3.0))
    value = wrapped().minimize(lambda: w * w, [w])
    assert (float(value), value.dtype, float(w)) == (9.0, jnp.float32, 0.0)
    w = Variable(3.0)
    assert float(tf2.LossScaleOptimizer(gs.optimizers.SGD()).minimize(lambda: w * w, [w])) == 9.0
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), 8)
    assert opt.minimize(lambda: w * w, var_list=[w]) is None
    assert dtensor.SGD().minimize(lambda: w * w, [w]) is None


@row(1, "new: compute_gradients")
def test_compute_gradients_returns_scaled_pairs():
    """New: `compute_gradients` returns scaled pairs, with None for an unused variable."""
    a, b = Variable(3.0), Variable(4.0)
    pairs = wrapped().compute_gradients(lambda: a * a, [a, b])
    assert [(g if g is None else float(g), v) for g, v in pairs] == [(8.0 * 6.0, a), (None, b)]


# ── raises ───────────────────────────────────────────────────────────────────────────────────


@row(1, "ValueError: decay")
@pytest.mark.parametrize("make", [gs.optimizers.SGD, Adam, AdamW, gs.optimizers.LossScaleOptimizer])
def test_decay_is_ignored_with_a_warning(make):
    """`decay` has no effect: a number is a warning that says what to write, None is silent. Other
    arguments still count as given."""
    first = gs.optimizers.SGD(0.5) if make is gs.optimizers.LossScaleOptimizer else 0.5
    with pytest.warns(UserWarning, match="`decay` has no effect.*InverseTimeDecay") as caught:
        opt = make(first, clipnorm=1.0, decay=0.5)
    assert (len(caught), caught[0].filename) == (1, __file__)
    assert (
        make(
            gs.optimizers.SGD(0.5) if make is gs.optimizers.LossScaleOptimizer else 0.5, decay=None
        ).clipnorm
        is None
    )
    assert (opt.clipnorm, opt.get_config()["clipnorm"]) == (1.0, 1.0)


@row(1, "ValueError: an unknown keyword")
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_unknown_keyword(error):
    """An unknown keyword is a ValueError, as in Keras, and also a TypeError."""
    failing(error, "clipnorm.*got 'clip'", wrapped, clip=1.0)
    failing(error, "got 'learning_rate'", wrapped, learning_rate=0.1)


@row(1, "ValueError: dynamic=False")
def test_a_fixed_scale_has_to_be_given():
    """`dynamic=False` needs `initial_scale` and refuses `dynamic_growth_steps`."""
    failing(
        ValueError,
        "initial_scale",
        gs.optimizers.LossScaleOptimizer,
        gs.optimizers.SGD(),
        dynamic=False,
    )
    arguments = {"initial_scale": 8.0, "dynamic_growth_steps": 2, "dynamic": False}
    failing(
        ValueError,
        "no dynamic_growth_steps",
        gs.optimizers.LossScaleOptimizer,
        gs.optimizers.SGD(),
        **arguments,
    )


@row(1, "AttributeError: no optimizer is wrapped")
@pytest.mark.parametrize("wrong", ["sgd", None, gs.optimizers.SGD])
def test_only_an_optimizer_is_wrapped(wrong):
    """Wrapping something other than an optimizer is a TypeError; in Keras, AttributeError."""
    failing(TypeError, "Expected an optimizer", gs.optimizers.LossScaleOptimizer, wrong)


@row(1, "no error: a wrapper is wrapped")
def test_a_wrapper_is_not_wrapped():
    """Wrapping a wrapper, which Keras accepts, is a TypeError."""
    failing(TypeError, "not wrapped", wrapped, wrapped())


@row(1, "no error: one optimizer in two wrappers")
def test_an_optimizer_has_one_wrapper():
    """Wrapping an optimizer twice, which Keras accepts, is a ValueError that names both."""
    inner = gs.optimizers.SGD(name="shared")
    first = wrapped(inner, name="first")
    failing(ValueError, f"'shared' is already wrapped by '{first.name}'", wrapped, inner)


@row(1, "ValueError: an option on the wrapper")
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"weight_decay": 0.2}, {"weight_decay": 0.1}),
        ({"clipnorm": 1.0}, {"clipnorm": 1.0}),
        ({"clipnorm": 1.0}, {"clipvalue": 1.0}),
        ({"use_ema": True}, {"use_ema": True}),
        ({"loss_scale_factor": 2.0}, {"loss_scale_factor": 2.0}),
    ],
)
def test_an_option_is_given_once(outer, inner):
    """An option on both the wrapper and the inner optimizer is a ValueError."""
    (here,), (there,) = outer, inner
    twice = f"{here} here and {there} on 'SGD'"
    failing(ValueError, twice, wrapped, gs.optimizers.SGD(**inner), **outer)


@row(1, "ValueError: two clip options")
def test_there_is_one_clip_option():
    """Two clip options are a ValueError."""
    failing(ValueError, "at most one of clipnorm", wrapped, clipnorm=1.0, clipvalue=1.0)
    failing(
        ValueError, "at most one of clipnorm", gs.optimizers.SGD, clipnorm=1.0, global_clipnorm=1.0
    )
    failing(
        ValueError, "at most one of", setattr, gs.optimizers.SGD(clipnorm=1.0), "clipvalue", 1.0
    )


@row(1, "ValueError: gradient_accumulation_steps of 1")
@pytest.mark.parametrize("wrong", [1, -2, 2.5])
def test_accumulation_takes_two_steps_at_least(wrong):
    """`gradient_accumulation_steps` must be an integer of at least 2."""
    failing(ValueError, "gradient_accum", wrapped, gradient_accumulation_steps=wrong)


@row(1, "ValueError: ema_momentum outside of [0, 1]")
@pytest.mark.parametrize("wrong", [-0.1, 1.5])
def test_ema_momentum_is_a_fraction(wrong):
    """`ema_momentum` must be in [0, 1], even without `use_ema`."""
    failing(ValueError, "ema_momentum", wrapped, ema_momentum=wrong)
    failing(ValueError, "ema_momentum", wrapped, use_ema=True, ema_momentum=wrong)


@row(1, "ValueError: ema_overwrite_frequency below 0")
@pytest.mark.parametrize("wrong", [-1, 0, 1.5])
def test_ema_overwrite_frequency_is_positive(wrong):
    """`ema_overwrite_frequency` must be an integer of at least 1; Keras accepts 0."""
    failing(ValueError, "ema_over", wrapped, use_ema=True, ema_overwrite_frequency=wrong)


@row(1, "no error: scale arguments out of range")
def test_scale_arguments_are_checked():
    """Wrong scale arguments, which Keras accepts, raise and leave the inner optimizer free."""
    inner = gs.optimizers.SGD(0.5)
    for wrong in (0.0, -8.0, np.inf, np.nan):
        failing(ValueError, "initial_scale", wrapped, inner, wrong)
    for wrong in (0, -1, 1.5, np.nan):
        failing(ValueError, "dynamic_growth_steps", wrapped, inner, growth=wrong)
    for wrong in (True, "8"):
        failing(TypeError, r"Expected .* for initial_scale; got ", wrapped, inner, wrong)
        failing(TypeError, r"for dynamic_growth_steps; got ", wrapped, inner, growth=wrong)
    failing(TypeError, "bool for dynamic", wrapped, inner, dynamic=1)
    failing(
        TypeError, "a rule for loss_scale", gs.optimizers.LossScaleOptimizer, inner, loss_scale=[1]
    )
    failing(ValueError, "clipnorm", wrapped, inner, clipnorm=-1.0)
    assert run(wrapped(inner), [8.0]) == [2.5]  # which is still free


@row(1, "ValueError: all gradients are None")
def test_some_gradient_is_needed():
    """A step without any gradient is a ValueError and changes nothing."""
    opt, w = wrapped(), Variable(1.0)
    opt.build([w])
    before = numbers(opt.variables)
    failing(ValueError, "None for all of", opt.apply_gradients, [(None, w)])
    assert numbers(opt.variables) == before


@row(1, "warning: some gradients are None")
def test_variables_without_a_gradient_stay():
    """A variable with gradient None keeps its value and slots, with a warning."""
    a, b = Variable(3.0, name="a"), Variable(4.0, name="b")
    opt = wrapped(gs.optimizers.SGD(0.5, momentum=0.5, weight_decay=0.1))
    opt.apply([8.0, 8.0], [a, b])
    before = [float(b), float(opt.inner_optimizer.momentums[1])]
    with pytest.warns(UserWarning, match=r"No gradient for \['b'\]"):
        opt.apply([8.0, None], [a, b])
    assert [float(b), float(opt.inner_optimizer.momentums[1])] == before


@pytest.mark.parametrize(
    "make", [wrapped, lambda: gs.optimizers.SGD(0.5)], ids=["wrapped", "plain"]
)
def test_a_pure_step_warns_of_missing_gradients_too(make):
    """`stateless_apply` warns as `apply` does, at the caller's line."""
    a, b = Variable(3.0, name="a"), Variable(4.0, name="b")
    opt = make()
    opt.build([a, b])
    state, weights = ([v.value() for v in variables] for variables in (opt.variables, [a, b]))
    with pytest.warns(UserWarning, match=r"No gradient for \['b'\]") as told:
        new, _ = opt.stateless_apply(state, [opt.scale_loss(1.0), None], weights)
    assert [warning.filename for warning in told] == [__file__]
    assert [float(x) for x in new] == [2.5, 4.0]


@row(1, "ValueError: a variable not built with")
def test_a_variable_has_to_be_known():
    """A variable that the optimizer was not built with is a ValueError."""
    opt = wrapped()
    opt.build([Variable(1.0)])
    failing(ValueError, "built with.*got 'new'", opt.apply, [1.0], [Variable(1.0, name="new")])


@row(1, "ValueError: apply without variables before build")
def test_apply_without_variables_needs_build():
    """`apply` without variables before `build` is a ValueError."""
    failing(ValueError, "built before apply without", wrapped().apply, [1.0])


@row(1, "ValueError: a wrong number of gradients")
def test_there_is_a_gradient_for_each_variable():
    """A wrong number of gradients is a ValueError."""
    opt, w = wrapped(), Variable(1.0)
    failing(ValueError, "Expected 1 gradients", opt.apply, [1.0, 2.0], [w])
    opt.build([w])
    failing(ValueError, "Expected 1 gradients", opt.apply, [1.0, 2.0])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: gs.optimizers.SGD("a"), "learning_rate; got 'a'"),
        (lambda: gs.optimizers.SGD(None), "learning_rate; got None"),
        (lambda: setattr(wrapped(), "learning_rate", "a"), "learning_rate; got 'a'"),
        (lambda: gs.optimizers.SGD.from_config({"foo": 1}), "unexpected keyword argument 'foo'"),
        (lambda: wrapped().add_variable(2), "for shape; got 2"),
        (lambda: wrapped().add_variable((None,)), "for shape; got"),
    ],
)
def test_what_keras_refuses_with_a_value_error_is_one_here(call, match):
    """A wrong type is an error that is `ValueError`, as in Keras, and `TypeError`."""
    for error in (ValueError, TypeError):
        failing(error, match, call)


def test_names_of_slots_need_as_many_initializers():
    """As in Keras, another number of initializers is a ValueError, which names both."""
    opt, w = gs.optimizers.SGD(), Variable(1.0)
    failing(
        ValueError,
        r"initializer for each of \['a', 'b'\]; got 1",
        opt.add_optimizer_variables,
        [w],
        ["a", "b"],
        ["zeros"],
    )
    assert opt.get_slot_names() == []


@row(1, "TypeError: setting a number where a schedule is")
def test_a_schedule_is_not_replaced_by_a_number():
    """A number cannot replace a schedule, but a schedule can replace a number."""
    opt = wrapped(gs.optimizers.SGD(gs.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)))
    with pytest.raises(TypeError, match="Expected a schedule or callable"):
        opt.learning_rate = 0.5
    opt = wrapped(gs.optimizers.SGD(0.5))
    opt.learning_rate = gs.optimizers.schedules.ExponentialDecay(0.25, 1, 0.5)
    assert float(opt.learning_rate) == 0.25


# ── differences on purpose, in every class ───────────────────────────────────────────────────


def tf2_scaled(inner, **scale):
    """A wrapper of TensorFlow 2 that is given unscaled gradients without a warning."""
    opt = tf2.LossScaleOptimizer(inner, **scale)
    opt.get_scaled_loss(1.0)
    opt.get_unscaled_gradients([])
    return opt


def v1_scaled(scale):
    return v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), scale)


@row("differences", "the scale's range")
@pytest.mark.parametrize(
    ("make", "low"),
    [
        (
            lambda scale: gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.0), scale, 1),
            2.0**-24,
        ),
        (
            lambda s: tf2_scaled(gs.optimizers.SGD(0.0), initial_scale=s, dynamic_growth_steps=1),
            1.0,
        ),
        (lambda scale: v1_scaled(v1.DynamicLossScale(scale, 1)), 1.0),
    ],
    ids=["keras3", "tf2", "v1"],
)
def test_the_scale_stays_finite_and_positive(make, low):
    """The scale stays between a positive bound and 2**126; Keras's becomes inf or 0."""
    w, up, down = Variable(1.0), make(2.0**125), make(4 * low)
    for _ in range(4):
        up.apply_gradients([(1.0, w)])
        down.apply_gradients([(np.inf, w)])
    assert (float(up.loss_scale), float(down.loss_scale)) == (2.0**126, low)
    up.apply_gradients([(np.inf, w)])
    assert float(up.loss_scale) == 2.0**125


@row("differences", "a fixed scale and an overflow")
@pytest.mark.filterwarnings("ignore:Expected get_scaled_loss and:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.5), 8.0, dynamic=False),
        lambda: gs.optimizers.SGD(0.5, loss_scale_factor=8.0),
        lambda: tf2_scaled(gs.optimizers.SGD(0.5), dynamic=False, initial_scale=8),
        lambda: experimental.LossScaleOptimizer(
            gs.optimizers.SGD(0.5), experimental.FixedLossScale(8)
        ),
        lambda: v1_scaled(8),
    ],
    ids=["keras3", "factor", "tf2", "experimental", "v1"],
)
def test_a_fixed_scale_skips_nonfinite_steps(make):
    """Every class skips NaN gradients with a fixed scale; the originals apply them."""
    w, opt = Variable(3.0), make()
    opt.minimize(lambda: w * 1.0, var_list=[w])
    opt.apply_gradients([(np.nan, w)])
    assert float(w) == 2.5


# Asked for in pytorch#96755 (overflow in unscaling).
@row("differences", "a gradient that overflows when unscaled")
@pytest.mark.as_users
def test_an_overflow_in_unscaling_is_skipped():
    """A gradient that overflows when unscaled is skipped; Keras applies it."""
    opt = wrapped(scale=2.0**-10)
    assert run(opt, [np.float32(2.0**127)]) == [3.0]
    assert (int(opt.iterations), float(opt.loss_scale)) == (0, 2.0**-11)


@row("differences", "the learning rate in a configuration")
def test_a_configuration_has_the_rate_as_it_was_written():
    """A configuration has the learning rate as written; Keras writes its float32 value."""
    assert gs.optimizers.SGD(0.1).get_config()["learning_rate"] == 0.1


@row("differences", "a schedule after a skipped step")
@pytest.mark.parametrize(
    ("wrap", "rate"),
    [
        (wrapped, 0.5),
        (tf2_scaled, 0.25),
        (lambda inner: experimental.LossScaleOptimizer(inner, "dynamic"), 0.25),
    ],
    ids=["keras3", "tf2", "experimental"],
)
@pytest.mark.filterwarnings("ignore:.*unscaled")
def test_a_schedule_waits_while_steps_are_skipped(wrap, rate):
    """A skipped step does not advance a schedule, except in the TensorFlow 2 classes."""
    opt = wrap(gs.optimizers.SGD(gs.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)))
    opt.apply_gradients([(np.nan, Variable(1.0))])
    assert float(opt.inner_optimizer.learning_rate) == rate


@row("differences", "moving averages")
@pytest.mark.parametrize(
    "make",
    [
        lambda **average: wrapped(gs.optimizers.SGD(1.0, **average)),
        lambda **average: dtensor.SGD(1.0, **average),
        lambda **average: tf2.LossScaleOptimizer(gs.optimizers.SGD(1.0, **average)),
    ],
    ids=["keras3", "dtensor", "tf2"],
)
def test_averages_start_with_the_first_result(make):
    """Averages start with the first step's result; TensorFlow 2 includes the initial weights."""
    w, opt = Variable(3.0), make(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    for _ in range(2):
        opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == 0.5 * 2.0 + 0.5 * 1.0


@row("differences", "moving averages")
def test_averages_of_a_skipped_first_step_are_the_weights():
    """If the first step is skipped, the average is that of the weights."""
    w, opt = Variable(3.0), wrapped(use_ema=True)
    opt.apply([np.nan], [w])
    opt.finalize_variable_values([w])
    assert float(w) == 3.0


@row("differences", "a callable rate in a configuration")
def test_a_configuration_has_a_callable_rate_as_it_is():
    """Difference: a callable is in the configuration itself, and is not called for it."""
    rate = lambda: 1 / 0  # noqa: E731
    for opt in (
        gs.optimizers.SGD(rate),
        tf2.LossScaleOptimizer(gs.optimizers.SGD(rate)).inner_optimizer,
    ):
        assert opt.get_config()["learning_rate"] is rate


OF_EVERY_KIND = {
    "Keras 3": lambda: wrapped(gs.optimizers.SGD(0.5)),
    "tf2": lambda: tf2.LossScaleOptimizer(gs.optimizers.SGD(0.5)),
    "v1": lambda: v1.GradientDescentOptimizer(0.5),
    "dtensor": lambda: dtensor.SGD(0.5),
}
every_kind = pytest.mark.parametrize("make", OF_EVERY_KIND.values(), ids=OF_EVERY_KIND)


@row("differences", "other variables in a later step")
@every_kind
def test_the_variables_are_those_of_build(make):
    """Difference: a later step cannot add a variable; `build` with all variables helps."""
    a, b = Variable(1.0, name="a"), Variable(1.0, name="b")
    opt = make()
    opt.minimize(lambda: a**2, var_list=[a])
    with pytest.raises(ValueError, match=r"\['a'\]; got 'b'\. Call `build` with all variables"):
        opt.minimize(lambda: b**2, var_list=[b])
    opt = make()
    opt.build([a, b])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one variable has no gradient
        opt.minimize(lambda: a**2, var_list=[a])
        opt.minimize(lambda: b**2, var_list=[b])
    assert (float(a), float(b)) == (0.0, 0.0)


@row("differences", "a variable twice in the pairs")
@every_kind
def test_a_variable_is_in_the_pairs_once(make):
    """Difference: two gradients of one variable are an error that says to add them."""
    w = Variable(1.0, name="w")
    with pytest.raises(ValueError, match=r"once in grads_and_vars; got 'w' twice\. Add its grad"):
        make().apply_gradients([(1.0, w), (1.0, w)])
    assert float(w) == 1.0


# ── differences on purpose, from Keras 3 ─────────────────────────────────────────────────────


@row(1, "dynamic_growth_steps")
def test_a_count_beyond_the_period_leads_to_growth():
    """A loaded step count above the period leads to growth; in Keras it prevents it."""
    opt = wrapped(growth=2)
    opt.build([Variable(1.0)])
    opt.set_weights([7, 8.0, 0, 0.5])
    opt.apply([1.0])
    assert (float(opt.loss_scale), int(opt.step_counter)) == (16.0, 0)


@row(1, "ema_overwrite_frequency")
def test_overwriting_keeps_infinite_weights():
    """Overwriting with averages keeps a weight of inf; in Keras it becomes NaN."""
    w = Variable([np.inf, 1.0])
    opt = gs.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    for _ in range(2):
        opt.apply([[0.0, 0.0]], [w])
        assert numbers([w]) == [[np.inf, 1.0]]


@row(1, "warning: some gradients are None")
@pytest.mark.filterwarnings("ignore:No gradient for")
def test_accumulation_keeps_the_sum_of_a_variable_without_gradient():
    """A variable without a gradient keeps its accumulated sum for the next update."""
    a, b = Variable(3.0), Variable(3.0)
    opt = gs.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    for grads in ([1.0, 1.0], [1.0, None], [1.0, 1.0], [1.0, 2.0]):
        opt.apply(grads, [a, b])
    assert (float(a), float(b)) == (2.0, 3.0 - 0.5 * (1.0 + 1.0 + 2.0) / 2)


@row("differences", "integers for floats")
def test_integers_are_numbers():
    """Learning rate and momentum can be integers, which Keras refuses."""
    assert run(gs.optimizers.SGD(1, momentum=0), [1.0, 1.0]) == [2.0, 1.0]
    assert run(gs.optimizers.SGD(np.float32(1), momentum=np.int32(1)), [1.0, 1.0]) == [2.0, 0.0]


@row("differences", "default names")
def test_default_names_are_those_of_the_class():
    """Difference: the default name of an optimizer, to which nothing is appended."""
    assert [each().name for each in (gs.optimizers.SGD, gs.optimizers.SGD, RMSprop)] == [
        "SGD",
        "SGD",
        "rmsprop",
    ]


@row(1, "no error: gradients of integers or bools")
@pytest.mark.parametrize("gradient", [jnp.int32(2), jnp.bool_(True)])
def test_gradients_are_floating(gradient):
    """Difference: an integer or a bool is no gradient, which Keras accepts."""
    failing(TypeError, "floating dtype", gs.optimizers.SGD(0.5).apply, [gradient], [Variable(1.0)])


@row("differences", "sparse gradients (BCOO)")
def test_sparse_gradients_are_named():
    """Difference: a sparse gradient is an error that says how to make it dense, also in Keras."""
    sparse = BCOO.fromdense(jnp.array([8.0, 0.0]))
    for opt in (gs.optimizers.SGD(0.5), wrapped()):
        failing(TypeError, r"todense\(\)", opt.apply, [sparse], [Variable([1.0, 1.0])])
    keras = pytest.importorskip("keras")
    from gainstage.interop.keras import LossScaleOptimizer

    opt, w = LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0), keras.Variable([1.0, 1.0])
    failing(TypeError, r"gradient of 'variable.*todense\(\)", opt.apply, [sparse], [w])
    assert w.value.tolist() == [1.0, 1.0]


@row("differences", "Nadam in the wrapper, with interop.keras")
def test_a_wrapped_nadam_steps_as_one_alone():
    """Difference: the wrapper keeps the product of momenta, which Keras's does not track."""
    keras = pytest.importorskip("keras")
    from gainstage.interop.keras import LossScaleOptimizer

    seen = []
    for wrap in (lambda opt: opt, lambda opt: LossScaleOptimizer(opt, 1.0)):
        opt, w = wrap(keras.optimizers.Nadam(0.5)), keras.Variable(3.0)
        opt.scale_loss(1.0)
        for gradient in (1.0, 2.0, -1.0):
            opt.apply([jnp.float32(gradient)], [w])
        seen.append(float(w.value))
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)


@row(1, "no error: build with an integer variable, or with none")
def test_variables_are_floating_and_some():
    """Difference: an integer variable, or no variable, cannot be trained."""
    failing(TypeError, "got 'step' of dtype int32", wrapped().build, [Variable(1, name="step")])
    failing(ValueError, "at least one variable", wrapped().build, [])


@row(1, "no error: use_ema or gradient_accumulation_steps set after build")
@pytest.mark.parametrize(
    ("name", "before", "after"), [("use_ema", True, False), ("gradient_accumulation_steps", 2, 3)]
)
def test_what_decides_on_state_is_set_before_build(name, before, after):
    """Difference: Keras accepts a change of these, also where averages or a window are lost."""
    opt = gs.optimizers.SGD(0.5, **{name: before})
    opt.build([Variable(1.0)])
    failing(ValueError, f"{name} to be set before", setattr, opt, name, after)
    assert getattr(opt, name) == before


@row(1, "no error: other numbers out of range, such as weight_decay=-1")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (gs.optimizers.SGD, {"weight_decay": -1.0}),
        (gs.optimizers.SGD, {"clipnorm": -1.0}),
        (gs.optimizers.SGD, {"loss_scale_factor": -1.0}),
        (Adam, {"beta_1": 1.5}),
        (Adam, {"epsilon": -1.0}),
        (RMSprop, {"rho": 2.0}),
    ],
)
def test_numbers_are_within_their_range(make, options):
    """Difference: a number that no method can have is an error, where Keras trains with it."""
    failing(ValueError, f"for {next(iter(options))}; got", make, **options)


@row("differences", "Python numbers that update_step changes")
def test_a_number_of_python_is_a_constant_of_a_compiled_step():
    """Difference: a compiled step has it as a constant; an uncompiled one obeys it."""

    class Growing(gs.optimizers.SGD):
        count = 0

        def update_step(self, gradient, variable, learning_rate):
            self.count += 1
            super().update_step(gradient * self.count, variable, learning_rate)

    assert run(Growing(0.5), [1.0, 1.0, 1.0]) == [2.5, 2.0, 1.5]
    assert run(Growing(0.5, jit_compile=False), [1.0, 1.0]) == [2.5, 1.5]


@row(1, "no error: a clip option of 0")
def test_a_clip_option_is_above_0():
    """Difference: a clip option of 0 is an error, where Keras does not clip."""
    failing(ValueError, "> 0 for clipnorm; got 0", gs.optimizers.SGD, clipnorm=0.0)


@row("differences", "overwrite_with_gradient of a variable")
def test_a_variable_that_is_overwritten_is_refused():
    """Difference: `overwrite_with_gradient` is an error that names the module for Keras."""
    w, opt = Variable(1.0, name="w"), wrapped()
    w.overwrite_with_gradient = True
    failing(ValueError, r"'w' has overwrite_with_gradient.*interop\.keras", opt.build, [w])
    assert not opt.built


# ── differences on purpose, from torch and optax ─────────────────────────────────────────────


@row("differences", "several losses in a tuple or list")
def test_several_losses_are_summed_by_the_user():
    """A tuple or list of losses is a TypeError that says to sum them."""
    failing(TypeError, "Sum several losses", wrapped().scale_loss, (1.0, 2.0))
    w = jnp.float32(3.0)
    state = gs.with_loss_scale(optax.sgd(0.5), gs.FixedLossScale(8.0)).init(w)
    for losses in (lambda w: (w, 2 * w), lambda w: [w, 2 * w]):
        failing(TypeError, "Expected a scalar loss", gs.value_and_grad(losses, state), w)
    loss, gradient = gs.value_and_grad(lambda w: w + 2 * w, state)(w)
    assert (float(loss), float(gradient)) == (9.0, 3.0)


@row("differences", "optax.contrib.schedule_free_eval_params(state, params)")
def test_schedule_free_parameters_are_in_the_inner_state():
    """optax functions that take a transformation's state take `state.inner`."""

    def trained(tx, value_and_grad):
        params = jnp.array([1.0, 2.0])
        state = tx.init(params)
        for _ in range(3):
            _, grads = value_and_grad(lambda p: (p**2).sum(), state)(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    tx = optax.contrib.schedule_free_sgd(0.25)
    averaged = optax.contrib.schedule_free_eval_params
    params, state = trained(tx, lambda loss, _: jax.value_and_grad(loss))
    scaled_params, scaled_state = trained(gs.with_loss_scale(tx), gs.value_and_grad)
    assert averaged(scaled_state.inner, scaled_params).tolist() == averaged(state, params).tolist()
    assert averaged(state, params).tolist() != params.tolist()


class Rounded(gs.optimizers.SGD):
    """A user's optimizer that ends with whole numbers."""

    def finalize_variable_values(self, var_list):
        super().finalize_variable_values(var_list)
        for variable in var_list:
            variable.assign(jnp.round(variable.value()))


def test_the_inner_optimizer_ends_the_training():
    """`finalize_variable_values` and the names of slots are those of the inner class."""

    class Named(Rounded):
        def get_slot_names(self):
            return ["mine"]

    w, opt = Variable(3.0), gs.optimizers.LossScaleOptimizer(Named(0.1))
    opt.minimize(lambda: w**2, [w])
    opt.finalize_variable_values([w])
    assert (float(w), opt.get_slot_names()) == (2.0, ["mine"])


@row(1, "no error: the inner class overrides apply")
def test_an_inner_class_that_takes_its_own_step_is_refused():
    """A step of the wrapper does not call it. Difference: it is an error, with what to write."""

    class Half(gs.optimizers.SGD):
        def apply(self, grads, trainable_variables=None, **_):
            super().apply([g * 0.5 for g in grads], trainable_variables)

    failing(TypeError, "Half overrides apply", gs.optimizers.LossScaleOptimizer, Half(0.1))


AVERAGED = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
ONE_OF_TWO = {
    "alone": lambda a, b, **options: gs.optimizers.SGD(0.5, **options),
    "Adam": lambda a, b, **options: Adam(0.5, **options),
    "wrapped": lambda a, b, **options: wrapped(**options),
    "several": lambda a, b, **options: wrapped(
        from_optax(optax.multi_transform({"a": optax.sgd(0.5), "b": optax.adam(0.5)}, ["a", "b"])),
        **options,
    ),
}


def waits():
    """Every optimizer without options, and the wrapped one with each."""
    for name, make in ONE_OF_TWO.items():
        for options in ({}, AVERAGED, {"gradient_accumulation_steps": 2}):
            marks = [pytest.mark.thorough] * (bool(options) and name != "wrapped")
            yield pytest.param(make, options, id=f"{name}-{options}", marks=marks)


@pytest.mark.filterwarnings("ignore:No gradient for")
@pytest.mark.parametrize(("make", "options"), list(waits()))
def test_the_constraint_of_a_variable_without_a_gradient_waits(make, options):
    """Only variables with a gradient are projected, in every way to take a step; the others, which
    may not fulfill their constraint yet, do not change."""
    a = Variable([3.0, 4.0], constraint=lambda x: x / jnp.linalg.norm(x))
    b = Variable(4.0, constraint=lambda x: jnp.minimum(x, 2.0))
    opt = make(a, b, **options)
    opt.build([a, b])
    opt.minimize(lambda: b * 1.0, [a, b])
    assert float(b) == 2.0
    opt.apply([opt.scale_loss(1.0)], [b])
    opt.apply([None, opt.scale_loss(1.0)])
    assert a.tolist() == [3.0, 4.0]
    state = [v.value() for v in opt.variables]
    new, _ = opt.stateless_apply(state, [None, opt.scale_loss(1.0)], [a.value(), b.value()])
    assert new[0].tolist() == [3.0, 4.0]
    step = gs.optimizers.jit(
        lambda: opt.minimize(lambda: b * 1.0, [a, b]), state=([a, b], opt.variables)
    )
    step()
    assert a.tolist() == [3.0, 4.0]
    opt.minimize(lambda: a.sum() * 0.0, [a, b])
    assert a.tolist() == pytest.approx([0.6, 0.8])

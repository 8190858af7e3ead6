"""`tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer` (TensorFlow 2.13).

With what it inherits from `tf.compat.v1.train.Optimizer`, and the optimizers of that module that
`compat.v1` has. One test is one sentence of these pages, in their order.
"""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from jax.sharding import AxisType, PartitionSpec

import gainstage as gs
from gainstage.compat import v1
from gainstage.optimizers import SGD, Variable

from rows import row

INF, NAN = float("inf"), float("nan")


def wrapped(loss_scale=8, inner=None):
    """A wrapper around gradient descent with a rate of 0.5."""
    inner = v1.GradientDescentOptimizer(0.5) if inner is None else inner
    return v1.MixedPrecisionLossScaleOptimizer(inner, loss_scale)


def stepped(opt):
    """The weight 3 after a first step on the gradient 2; with plain descent at 0.5 it is 2."""
    w = Variable(3.0)
    opt.minimize(lambda: w * 2.0, var_list=[w])
    return float(w)


def weights_after(opt, gradients):
    """The weight 3 after each step on one of these gradients."""
    w, seen = Variable(3.0), []
    for gradient in gradients:
        opt.apply_gradients([(gradient, w)])
        seen.append(float(w))
    return seen


def pairs_of(pairs):
    return [(None if g is None else float(g), v) for g, v in pairs]


# ── MixedPrecisionLossScaleOptimizer: summary ────────────────────────────────────────────────


passed = []


@jax.custom_vjp
def probe(x):
    """The identity, which notes in `passed` the gradients that pass through it."""
    return x


def note(_, gradient):
    jax.debug.callback(passed.append, gradient)
    return (gradient,)


probe.defvjp(lambda x: (x, None), note)


def test_each_intermediate_gradient_is_multiplied_by_the_scale():
    """Between loss and weights every gradient is the scale times the true gradient."""
    w = Variable(1.0)
    passed.clear()
    ((gradient, _),) = wrapped(8).compute_gradients(lambda: probe(w * 2.0) * 3.0, [w])
    jax.effects_barrier()
    assert ([float(each) for each in passed], float(gradient)) == ([8 * 3.0], 2.0 * 3.0)


def test_loss_scaling_has_no_mathematical_effect():
    """With any scale the steps are those of the inner optimizer alone."""
    alone = weights_after(v1.MomentumOptimizer(0.5, 0.5), [1.0, 2.0])
    assert alone == [3.0 - 0.5 * 1.0, 3.0 - 0.5 * 1.0 - 0.5 * (0.5 * 1.0 + 2.0)]
    for scale in (1, 1024, "dynamic"):
        assert weights_after(wrapped(scale, v1.MomentumOptimizer(0.5, 0.5)), [1.0, 2.0]) == alone


@row(5, "LossScale.update")
def test_update_of_every_scale_of_ones_own_is_called():
    """Difference: a subclass of `FixedLossScale` decides too; TensorFlow does not call it."""

    class Never(v1.FixedLossScale):
        def update(self, grads):
            return None, False

    w, opt = Variable(3.0), v1.GradientDescentOptimizer(0.5)
    v1.MixedPrecisionLossScaleOptimizer(opt, Never(8)).apply_gradients([(1.0, w)])
    assert float(w) == 3.0


@row(2, "compute_gradients")
def test_small_gradients_do_not_underflow_in_float16():
    """A gradient that float16 rounds to 0 comes out right if the loss is scaled."""
    w = Variable(3.0)

    def loss():
        return (w.value().astype("float16") * np.float16(2.0**-24)).astype("float32") / 64

    for opt, expected in ((v1.GradientDescentOptimizer(0.5), 0.0), (wrapped(2**15), 2.0**-30)):
        ((gradient, _),) = opt.compute_gradients(loss, [w])
        assert (float(gradient), gradient.dtype) == (expected, jnp.float32)


@row(2, "apply_gradients")
def test_the_scale_is_a_constant_or_dynamic():
    """A number stays. A dynamic scale adapts: here it falls. Difference: both skip the NaN."""
    for scale, after in ((8, 8.0), ("dynamic", 2.0**14)):
        opt = wrapped(scale)
        assert weights_after(opt, [2.0, NAN, 2.0]) == [2.0, 2.0, 1.0]
        assert float(opt.loss_scale) == after


@row(2, "opt")
def test_it_wraps_another_optimizer():
    """Loss scaling is applied to the steps of `opt`, an optimizer of `compat.v1`."""
    opt = v1.MixedPrecisionLossScaleOptimizer(opt=v1.GradientDescentOptimizer(0.25), loss_scale=8)
    assert isinstance(opt, v1.Optimizer)
    assert stepped(opt) == 2.5


@row(2, "no error: one optimizer in two wrappers")
def test_an_optimizer_has_one_scale():
    """Difference: a second wrapper around one optimizer is an error that names the first."""
    inner = v1.GradientDescentOptimizer(0.25)
    first = wrapped(8, inner)
    with pytest.raises(ValueError, match=f"already wrapped by {first.get_name()!r}"):
        wrapped(8, inner)


# ── MixedPrecisionLossScaleOptimizer: arguments ──────────────────────────────────────────────


@row(2, "loss_scale")
@pytest.mark.parametrize(
    ("scale", "before", "after"),
    [
        (8, 8.0, 8.0),
        (10.5, 10.5, 10.5),
        ("dynamic", 2.0**15, 2.0**14),
        (v1.FixedLossScale(4), 4.0, 4.0),
        (v1.DynamicLossScale(16.0, multiplier=4), 16.0, 4.0),
        (gs.DynamicLossScale(1.0, min_scale=0.25), 1.0, 0.5),
    ],
)
def test_the_loss_scale_may_be_a_number_or_dynamic_or_an_object(scale, before, after):
    """`loss_scale` is a number, "dynamic" or an object. Difference: it may also be a rule."""
    opt = wrapped(scale)
    assert (float(opt.loss_scale), opt.loss_scale.dtype) == (before, jnp.float32)
    assert weights_after(opt, [INF]) == [3.0]
    assert float(opt.loss_scale) == after


def test_a_scale_of_your_own_sees_only_gradients_that_fit():
    """Your own `LossScale` is not updated by gradients that do not fit their variables."""

    class Mine(v1.DynamicLossScale):
        pass

    w, scale = Variable([1.0, 2.0]), Mine(16.0)
    with pytest.raises(ValueError, match="Expected"):
        wrapped(scale).apply_gradients([(np.array([INF]), w)])
    assert float(scale()) == 16.0


@row(2, "use_locking")
@pytest.mark.parametrize("locked", [True, False])
def test_use_locking_is_taken_from_the_inner_optimizer_or_passed(locked):
    """`use_locking` is an argument of every class. Difference: it has no effect."""
    outside = v1.GradientDescentOptimizer(0.5)
    outside = v1.MixedPrecisionLossScaleOptimizer(outside, 8, use_locking=locked)
    for opt in (wrapped(8, v1.GradientDescentOptimizer(0.5, use_locking=locked)), outside):
        assert stepped(opt) == 2.0


@row(2, "name")
def test_the_name_is_that_of_the_inner_optimizer_or_passed():
    """Without a `name` of its own the wrapper has the name of `opt`."""
    inner = v1.GradientDescentOptimizer(0.5, name="inner")
    assert wrapped(8, inner).get_name() == "inner"
    other = v1.GradientDescentOptimizer(0.5)
    assert v1.MixedPrecisionLossScaleOptimizer(other, 8, name="outer").get_name() == "outer"


@row(2, "name")
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda **name: v1.MomentumOptimizer(0.5, 0.5, **name), ["w/{}"]),
        (lambda **name: v1.AdamOptimizer(0.5, **name), ["w/{}", "w/{}_1"]),
    ],
    ids=["Momentum", "Adam"],
)
def test_the_name_is_used_for_the_accumulators(make, names):
    """The accumulators are called after the variable and the optimizer's name."""
    for arguments in ({}, {"name": "acc"}):
        inner = make(**arguments)
        opt, w = wrapped(8, inner), Variable(3.0, name="w")
        opt.apply_gradients([(1.0, w)])
        slots = [opt.get_slot(w, slot).name for slot in opt.get_slot_names()]
        assert slots == [name.format(inner.get_name()) for name in names]


# ── MixedPrecisionLossScaleOptimizer: raises ─────────────────────────────────────────────────


@row(2, "ValueError: a malformed name")
@pytest.mark.parametrize("name", ["", 3])
def test_a_malformed_name_is_refused(name):
    """A name that is empty is a ValueError. Difference: so is one that is not a string."""
    with pytest.raises(ValueError, match="non-empty string for name"):
        v1.GradientDescentOptimizer(0.1, name=name)
    with pytest.raises(ValueError, match="non-empty string for name"):
        v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.1), 8, name=name)


def test_the_name_of_an_optimizer_is_not_none():
    """None as the name of an optimizer is a ValueError."""
    with pytest.raises(ValueError, match="non-empty string for name"):
        v1.GradientDescentOptimizer(0.1, name=None)


@row(2, "ValueError: opt is no v1 optimizer")
@pytest.mark.parametrize("wrong", [None, "sgd", SGD(), v1.GradientDescentOptimizer])
def test_only_a_v1_optimizer_can_be_wrapped(wrong):
    """`opt` that is not an optimizer of version 1 is a ValueError."""
    with pytest.raises(ValueError, match="Expected a v1 optimizer"):
        v1.MixedPrecisionLossScaleOptimizer(wrong, 8)


@row(2, "no error: a wrapper is wrapped")
def test_a_wrapper_cannot_be_wrapped():
    """Difference: a wrapper around a wrapper is a ValueError. TensorFlow uses both scales."""
    with pytest.raises(ValueError, match="not wrapped"):
        v1.MixedPrecisionLossScaleOptimizer(wrapped(8), 2)


@row(2, "ValueError: loss_scale is None")
@row(2, "ValueError: another string for loss_scale")
@row(2, "ValueError: loss_scale below 1")
@pytest.mark.parametrize("scale", [None, "fast", 0.5, 0, -2.0, [8], True, INF, NAN])
def test_another_loss_scale_is_refused(scale):
    """Any other `loss_scale` is a ValueError that names it, and leaves `opt` free."""
    inner = v1.GradientDescentOptimizer(0.5)
    with pytest.raises(ValueError, match=r"Expected a.* number.*loss_scale"):
        v1.MixedPrecisionLossScaleOptimizer(inner, scale)
    assert float(v1.MixedPrecisionLossScaleOptimizer(inner, 8).loss_scale) == 8.0


# ── MixedPrecisionLossScaleOptimizer: apply_gradients ────────────────────────────────────────


def test_gradients_are_applied_if_all_are_finite():
    """One non-finite value in one gradient keeps every variable as it is."""
    a, b = Variable([1.0, 1.0]), Variable(1.0)
    opt = wrapped("dynamic")
    for first, second, after in (
        ([1.0, 1.0], NAN, [[1.0, 1.0], 1.0]),
        ([1.0, -INF], 1.0, [[1.0, 1.0], 1.0]),
        ([1.0, 1.0], 1.0, [[0.5, 0.5], 0.5]),
    ):
        opt.apply_gradients([(jnp.array(first), a), (second, b)])
        assert [a.numpy().tolist(), float(b)] == after


@row(2, "apply_gradients(global_step)")
@pytest.mark.parametrize("scale", [8, "dynamic"])
def test_a_skipped_step_does_not_increment_global_step(scale):
    """`global_step` grows by one after an update, and not in a skipped step."""
    w, opt, step = Variable(3.0), wrapped(scale), Variable(5)
    counts = []
    for gradient in (1.0, INF, 1.0):
        opt.apply_gradients([(gradient, w)], global_step=step)
        counts.append(int(step))
    assert counts == [6, 6, 7]


@pytest.mark.parametrize("step", [0, jnp.int32(0)])
def test_global_step_is_a_variable(step):
    """A `global_step` that cannot be incremented is a TypeError, and no step is taken."""
    w = Variable(1.0)
    with pytest.raises(TypeError, match=r"optimizers\.Variable for global_step"):
        wrapped().apply_gradients([(1.0, w)], global_step=step)
    assert float(w) == 1.0


@row(2, "apply_gradients(grads_and_vars)")
def test_pairs_are_those_of_compute_gradients():
    """`grads_and_vars` are unscaled (gradient, variable) pairs, also from an iterator."""
    a, b = Variable(3.0), Variable(3.0)
    opt = wrapped()
    opt.apply_gradients(opt.compute_gradients(lambda: a * 2.0 + b, [a, b]))
    opt.apply_gradients(grads_and_vars=zip([2.0, 1.0], [a, b], strict=True))
    assert (float(a), float(b)) == (3.0 - 0.5 * 4.0, 3.0 - 0.5 * 2.0)


@row(2, "apply_gradients(name)")
def test_the_name_of_the_operation_is_optional():
    """`name` is that of an operation. Difference: there is none, so it has no effect."""
    w, opt = Variable(3.0), wrapped()
    opt.apply_gradients([(2.0, w)], None, "step")
    assert (float(w), opt.get_name()) == (2.0, "GradientDescent")


@row(2, "apply_gradients")
def test_apply_gradients_returns_nothing():
    """Difference: there is no operation to return, so the result is None, as in eager mode."""
    assert wrapped().apply_gradients([(1.0, Variable(1.0))]) is None


@row(2, "RuntimeError: the distributed form must be used")
def test_gradients_that_differ_between_devices_are_refused():
    """Gradients that were not reduced over the devices of a `shard_map` are a RuntimeError."""
    w, opt = Variable(1.0, name="w"), wrapped()
    opt.apply_gradients([(0.0, w)])
    state = ([w], opt.variables())
    values = jax.tree.map(lambda v: v.numpy(), state)
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))

    def run(reduce):
        def local(gradient):
            step = gs.optimizers.functionalize(
                lambda: opt.apply_gradients([(reduce(gradient[0]), w)]), state
            )
            return step(values)[1][0][0]

        specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
        gradients = np.arange(jax.device_count(), dtype=np.float32)
        return jax.jit(jax.shard_map(local, mesh=mesh, **specs))(gradients)

    with pytest.raises(RuntimeError, match="'w' varies over a mesh axis"):
        run(lambda g: g)
    mean = sum(range(jax.device_count())) / jax.device_count()
    assert float(run(lambda g: jax.lax.pmean(g, "x"))) == 1.0 - 0.5 * mean


# ── MixedPrecisionLossScaleOptimizer: compute_gradients ──────────────────────────────────────


@row(2, "compute_gradients(loss)")
def test_the_loss_is_a_callable_without_arguments():
    """`loss` is called without arguments; the elements of a loss that is no scalar are summed."""
    w = Variable([1.0, 2.0])
    for opt in (v1.GradientDescentOptimizer(0.5), wrapped()):
        ((gradient, _),) = opt.compute_gradients(lambda: w**2, [w])
        assert gradient.tolist() == [2.0, 4.0]


@row(2, "compute_gradients(var_list)")
@pytest.mark.parametrize("variables", [list, tuple, iter, lambda pair: lambda: pair])
def test_var_list_is_a_list_or_a_tuple(variables):
    """`var_list` is a list or tuple of variables; here also a callable that returns one."""
    a, b = Variable(1.0), Variable(3.0)
    pairs = wrapped().compute_gradients(lambda: a * b, var_list=variables([a, b]))
    assert pairs_of(pairs) == [(3.0, a), (1.0, b)]


@row(2, "compute_gradients(var_list)")
@pytest.mark.parametrize("make", [wrapped, lambda: v1.GradientDescentOptimizer(0.5)])
def test_without_var_list_all_trainable_variables_that_the_loss_reads_are_taken(make):
    """The default is every trainable floating variable that the loss reads, in the order in which
    they were created."""
    a, b, count = Variable(1.0), Variable(3.0), Variable(4)
    frozen = Variable(2.0, trainable=False)
    pairs = make().compute_gradients(lambda: b * frozen + a * count)
    assert pairs_of(pairs) == [(4.0, a), (2.0, b)]


def test_a_copy_of_a_variable_is_created_after_it():
    """A copy, or an unpickled variable, stands where it was made in the order of creation."""
    w = Variable(1.0)
    copies = [copy.deepcopy(w), copy.copy(w), pickle.loads(pickle.dumps(w)), Variable(1.0)]
    pairs = wrapped().compute_gradients(lambda: sum(v * 2.0 for v in [*copies, w][::-1]))
    assert [v for _, v in pairs] == [w, *copies]


@row(2, "compute_gradients(gate_gradients)")
@pytest.mark.parametrize("gate", ["GATE_NONE", "GATE_OP", "GATE_GRAPH"])
def test_gate_gradients_takes_the_three_constants(gate):
    """`gate_gradients` takes the constants of the class. It has no effect, as in eager mode."""
    w, opt = Variable(3.0), wrapped()
    gate = getattr(opt, gate)
    assert pairs_of(opt.compute_gradients(lambda: w * 2.0, [w], gate)) == [(2.0, w)]
    opt.minimize(lambda: w * 2.0, var_list=[w], gate_gradients=gate)
    assert float(w) == 2.0


@row(2, "compute_gradients(aggregation_method)")
@row(2, "compute_gradients(colocate_gradients_with_ops)")
@pytest.mark.parametrize(
    "arguments", [{"aggregation_method": 2}, {"colocate_gradients_with_ops": True}]
)
def test_other_settings_of_the_graph_have_no_effect(arguments):
    """The two other settings of a graph are accepted and ignored, as in eager mode."""
    w, opt = Variable(3.0), wrapped()
    assert pairs_of(opt.compute_gradients(lambda: w * 2.0, [w], **arguments)) == [(2.0, w)]
    opt.minimize(lambda: w * 2.0, var_list=[w], **arguments)
    assert float(w) == 2.0


@row(2, "compute_gradients(grad_loss)")
def test_grad_loss_is_the_gradient_of_the_loss():
    """`grad_loss` multiplies the gradient of each element of the loss."""
    w = Variable([1.0, 2.0])
    for opt in (v1.GradientDescentOptimizer(0.5), wrapped()):
        ((gradient, _),) = opt.compute_gradients(lambda: w**2, [w], grad_loss=[3.0, 0.5])
        assert gradient.tolist() == [3.0 * 2.0, 0.5 * 4.0]
        with pytest.raises(ValueError, match=r"broadcast_to\(grad_loss, \(2,\)\)"):
            opt.compute_gradients(lambda: w**2, [w], grad_loss=2.0)


@row(2, "compute_gradients")
def test_the_variable_is_present_and_the_gradient_can_be_none():
    """The result is a list of pairs; None is the gradient of a variable that the loss ignores."""
    w, other = Variable(3.0), Variable(1.0)
    pairs = wrapped().compute_gradients(lambda: w * 2.0, [w, other])
    assert isinstance(pairs, list)
    assert pairs_of(pairs) == [(2.0, w), (None, other)]


@row(2, "compute_gradients")
def test_float16_gradients_are_unscaled_in_float32():
    """Difference: float16 gradients work, and come out in float32."""
    w, opt = Variable(jnp.ones(2, jnp.float16)), wrapped(2**15)
    ((gradient, _),) = opt.compute_gradients(lambda: w.value().astype("float32") * 2.0**-12, [w])
    assert (gradient.dtype, gradient.tolist()) == (jnp.float32, [2.0**-12] * 2)
    opt.apply_gradients([(jnp.ones(2, jnp.float16), w)])
    assert (w.dtype, w.numpy().tolist()) == (jnp.float16, [0.5, 0.5])


# ── MixedPrecisionLossScaleOptimizer: other methods ──────────────────────────────────────────


@row(2, "get_name")
def test_get_name_returns_the_name():
    """`get_name` returns the name, which by default is that of the class."""
    assert v1.GradientDescentOptimizer(0.5).get_name() == "GradientDescent"
    assert wrapped(8, v1.MomentumOptimizer(0.5, 0.5)).get_name() == "Momentum"
    assert wrapped(8, v1.AdamOptimizer(0.5)).get_name() == "Adam"


@row(2, "get_slot")
def test_get_slot_returns_the_variable_of_a_slot():
    """A slot is a variable, or None. Difference: the wrapper returns the slots of `opt`."""
    w, inner = Variable(3.0), v1.MomentumOptimizer(0.5, 0.5)
    opt = wrapped("dynamic", inner)
    assert opt.get_slot(w, "momentum") is None
    opt.apply_gradients([(2.0, w)])
    slot = opt.get_slot(w, "momentum")
    assert isinstance(slot, Variable)
    assert float(slot) == 2.0
    assert slot is inner.get_slot(w, "momentum")
    assert opt.get_slot(w, "other") is None
    assert opt.get_slot(Variable(3.0), "momentum") is None


def test_the_slots_of_adam_are_its_moments():
    """The slots `m` and `v` of Adam are the first and the second moment of the gradients."""
    w, opt = Variable(3.0), wrapped(8, v1.AdamOptimizer(0.5, beta1=0.75, beta2=0.5))
    opt.apply_gradients([(2.0, w)])
    assert float(opt.get_slot(w, "m")) == 0.25 * 2.0
    assert float(opt.get_slot(w, "v")) == 0.5 * 2.0**2


@row(2, "get_slot_names")
def test_get_slot_names_returns_the_names_of_the_slots():
    """The names are known after the first step; gradient descent has no slots."""
    for inner, names in (
        (v1.GradientDescentOptimizer(0.5), []),
        (v1.MomentumOptimizer(0.5, 0.0), ["momentum"]),
        (v1.AdamOptimizer(0.5), ["m", "v"]),
    ):
        opt = wrapped(8, inner)
        assert opt.get_slot_names() == []
        stepped(opt)
        assert opt.get_slot_names() == names


@row(2, "minimize")
def test_minimize_combines_the_two_methods():
    """`minimize` takes the arguments of both methods, and does what they do. It returns None."""
    w, step, opt = Variable([1.0, 2.0]), Variable(0), wrapped()
    rest = (opt.GATE_OP, None, True, "step", [1.0, 0.5])
    assert opt.minimize(lambda: w**2, step, [w], *rest) is None
    assert (w.numpy().tolist(), int(step)) == ([1.0 - 0.5 * 2.0, 2.0 - 0.5 * 0.5 * 4.0], 1)


def test_minimize_skips_variables_without_a_gradient():
    """A variable that the loss ignores stays, with a warning, and the others are updated."""
    w, other = Variable(3.0), Variable(1.0)
    with pytest.warns(UserWarning, match="No gradient for"):
        wrapped().minimize(lambda: w * 2.0, var_list=[w, other])
    assert (float(w), float(other)) == (2.0, 1.0)


@pytest.mark.parametrize("var_list", [None, lambda made: lambda: made], ids=["None", "callable"])
def test_minimize_trains_variables_that_the_loss_creates(var_list):
    """Variables that the loss creates in its first call are trained from the first step on."""
    made = []

    def loss():
        if not made:
            made.append(Variable(2.0))
        return made[0] ** 2

    opt = wrapped()
    for after in (2.0 - 0.5 * 4.0, 0.0):
        opt.minimize(loss, var_list=var_list and var_list(made))
        assert float(made[0]) == after


@row(2, "variables")
def test_variables_encode_the_current_state():
    """`variables()` lists scale, count, rate, iterations and slots, none of them trainable."""
    w, opt = Variable(3.0, name="w"), wrapped("dynamic", v1.MomentumOptimizer(0.5, 0.5))
    opt.apply_gradients([(2.0, w)])
    assert {v.name: float(v) for v in opt.variables()} == {
        "current_loss_scale": 2.0**15,
        "good_steps": 1.0,
        "Momentum/iteration": 1.0,
        "Momentum/learning_rate": 0.5,
        "w/Momentum": 2.0,
    }
    assert not any(v.trainable for v in opt.variables())
    assert opt.get_slot(w, "momentum") in opt.variables()


@row(2, "new: set_weights")
def test_the_state_can_be_restored():
    """New: `build` and `set_weights` bring the values of `variables()` into a new optimizer."""
    weights = []
    v, old = Variable(3.0), wrapped("dynamic", v1.MomentumOptimizer(0.5, 0.5))
    for gradient in (2.0, INF):
        old.apply_gradients([(gradient, v)])
    w, new = Variable(v), wrapped("dynamic", v1.MomentumOptimizer(0.25, 0.5))
    new.build([w])
    new.set_weights([x.numpy() for x in old.variables()])
    for variable, opt in ((v, old), (w, new)):
        opt.apply_gradients([(2.0, variable)])
        weights.append((float(variable), float(opt.loss_scale)))
    assert weights == [(3.0 - 0.5 * 2.0 - 0.5 * 3.0, 2.0**14)] * 2


@row(2, "new: build")
def test_a_step_can_be_compiled():
    """It works as in a `tf.function`: after `build` the whole first step is compiled."""
    w, count, opt = Variable(1.0), Variable(0), wrapped("dynamic")
    opt.build([w])
    step = gs.optimizers.jit(
        lambda: opt.minimize(lambda: w**2, count, [w]), state=([w, count], opt.variables())
    )
    step()
    assert (float(w), int(count)) == (0.0, 1)


# ── Optimizer: class variables and summary ───────────────────────────────────────────────────


def test_the_three_values_of_gate_gradients():
    """`GATE_NONE`, `GATE_OP` and `GATE_GRAPH` are 0, 1 and 2, on every class."""
    for cls in (v1.Optimizer, v1.AdamOptimizer, v1.MixedPrecisionLossScaleOptimizer):
        assert (cls.GATE_NONE, cls.GATE_OP, cls.GATE_GRAPH) == (0, 1, 2)


@row(2, "compute_gradients(gate_gradients)")
def test_gate_gradients_takes_no_other_value():
    """Difference: another value is a ValueError, as in a graph there."""
    w, opt = Variable(1.0), wrapped()
    for take in (opt.compute_gradients, opt.minimize):
        with pytest.raises(ValueError, match="Expected GATE_NONE, GATE_OP or GATE_GRAPH"):
            take(lambda: w * 2.0, var_list=[w], gate_gradients=7)
    assert float(w) == 1.0


def test_gradients_can_be_processed_before_they_are_applied():
    """In three steps: compute gradients, cap them as you wish, apply the capped ones."""
    a, b = Variable(1.0), Variable(1.0)
    opt = wrapped()
    pairs = opt.compute_gradients(lambda: a * 5.0 + b * 0.5, [a, b])
    opt.apply_gradients([(jnp.minimum(gradient, 1.0), variable) for gradient, variable in pairs])
    assert (float(a), float(b)) == (1.0 - 0.5 * 1.0, 1.0 - 0.5 * 0.5)


def test_the_example_of_the_page():
    """Gradient descent with a rate of 3 on `5 * var0 + 3 * var1` gives the printed values."""
    for opt in (v1.GradientDescentOptimizer(3.0), wrapped(8, v1.GradientDescentOptimizer(3.0))):
        var0, var1 = Variable([1.0, 2.0]), Variable([3.0, 4.0])
        step = Variable(0)
        opt.minimize(lambda a=var0, b=var1: 5 * a + 3 * b, step, [var0, var1])
        assert var0.numpy().tolist() == [-14.0, -13.0]
        assert (var1.numpy().tolist(), int(step)) == ([-6.0, -5.0], 1)


# ── Optimizer: raises ────────────────────────────────────────────────────────────────────────


@row(2, "RuntimeError: the loss is not callable")
@row(2, "compute_gradients(loss)")
@pytest.mark.parametrize("make", [wrapped, lambda: v1.GradientDescentOptimizer(0.5)])
def test_the_loss_must_be_callable(make):
    """A loss that is not callable is a RuntimeError. Difference: it is a TypeError, too."""
    w, opt = Variable(1.0), make()
    for call in (opt.compute_gradients, opt.minimize):
        with pytest.raises(RuntimeError, match="Expected a callable") as caught:
            call(w**2, var_list=[w])
        assert isinstance(caught.value, TypeError)


@row(2, "TypeError: var_list has something else")
@pytest.mark.parametrize("wrong", [["w"], [1.0], [jnp.ones(2)]], ids=["text", "number", "array"])
def test_var_list_must_hold_variables(wrong):
    """Anything but variables in `var_list` is an error: a TypeError and a ValueError."""
    w, opt = Variable(1.0), wrapped()
    for call in (opt.compute_gradients, opt.minimize):
        with pytest.raises(TypeError, match="var_list") as caught:
            call(lambda: w**2, var_list=wrong)
        assert isinstance(caught.value, ValueError)


@row(2, "TypeError: malformed grads_and_vars")
@pytest.mark.parametrize(
    "malformed",
    [
        lambda w: [(1.0, w, "w")],
        lambda w: [(1.0,)],
        lambda w: [w],
        lambda w: None,
        lambda w: [("text", w)],
        lambda w: [(object(), w)],
        lambda w: [(1.0, 2.0)],
        lambda w: [(w, 1.0)],
    ],
)
def test_malformed_pairs_are_refused(malformed):
    """`grads_and_vars` that are not pairs of a gradient and a variable are a TypeError."""
    w = Variable(1.0)
    with pytest.raises(TypeError):
        wrapped().apply_gradients(malformed(w))
    assert float(w) == 1.0


@row(2, "ValueError: no variables")
def test_no_variables_are_refused():
    """No pair at all, or an empty `var_list`, is a ValueError."""
    with pytest.raises(ValueError, match="at least one"):
        wrapped().apply_gradients([])
    with pytest.raises(ValueError, match="Expected"):
        wrapped().minimize(lambda: jnp.float32(1.0), var_list=[])


@row(2, "ValueError: all gradients are None")
def test_gradients_that_are_all_none_are_refused():
    """If no variable has a gradient it is a ValueError. Difference: the count does not advance."""
    w, opt = Variable(1.0), wrapped("dynamic")
    opt.apply_gradients([(1.0, w)])
    before = [v.numpy() for v in opt.variables()]
    with pytest.raises(ValueError, match="None for all of"):
        opt.apply_gradients([(None, w)])
    with pytest.raises(ValueError, match="None for all of"):
        opt.minimize(lambda: jnp.float32(1.0), var_list=[w])
    assert [v.numpy() for v in opt.variables()] == before


@row(2, "get_slot")
def test_a_variable_without_a_gradient_has_a_slot():
    """Difference: it gets a slot of 0, and there is a warning."""
    a, b = Variable(1.0), Variable(1.0)
    opt = wrapped(8, v1.MomentumOptimizer(0.5, 0.5))
    with pytest.warns(UserWarning, match="No gradient for"):
        opt.apply_gradients([(1.0, a), (None, b)])
    assert (float(opt.get_slot(b, "momentum")), float(b)) == (0.0, 1.0)


@row(2, "no error: hooks of a subclass, such as _apply_dense")
@pytest.mark.parametrize("hook", ["_apply_dense", "_prepare", "_create_slots", "_finish"])
def test_hooks_of_a_subclass_are_refused(hook):
    """Difference: a subclass that defines one is an error that says how to write a rule."""
    hooks = {hook: lambda self, *args: None}
    subclass = type("Mine", (v1.GradientDescentOptimizer,), hooks)
    with pytest.raises(TypeError, match=f"Mine defines {hook}, .*`update_step`"):
        subclass(0.5)


def test_a_rule_of_your_own_is_an_optimizer_with_update_step():
    """What the error says works: `Optimizer` takes an optimizer of this library."""

    class Sign(gs.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, learning_rate * jnp.sign(gradient))

    w = Variable(3.0)
    opt = wrapped(8, v1.Optimizer(Sign(0.5), False, "Sign"))
    opt.minimize(lambda: w**2, var_list=[w])
    assert (float(w), opt.get_name()) == (2.5, "Sign")
    with pytest.raises(TypeError, match="Expected an optimizer of gainstage for optimizer"):
        v1.Optimizer(False, False, "Sign")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda opt, w: opt.apply_gradients([("x", w)]), "gradient of 'w'; got 'x'"),
        (lambda opt, w: opt.minimize(lambda: None, None, [w]), "one number; got None"),
        (lambda opt, w: opt.minimize(lambda: "x", None, [w]), "one number; got a str of 1"),
        (
            lambda opt, w: opt.get_slot(jnp.ones(1), "momentum"),
            "gainstage.optimizers.Variable for var",
        ),
        (lambda opt, w: opt.compute_gradients(lambda: w * 1, grad_loss=jnp.ones(3)), "grad_loss"),
        (lambda opt, w: opt.set_weights(3), "list of arrays for weights; got 3"),
    ],
)
def test_wrong_arguments_are_named(call, match):
    """An error names the argument, what was passed, and what to write."""
    w, opt = Variable(3.0, name="w"), wrapped()
    opt.build([w])
    with pytest.raises((TypeError, ValueError), match=match):
        call(opt, w)
    assert float(w) == 3.0
    assert "GradientDescentOptimizer" in repr(v1.GradientDescentOptimizer(0.5))


def test_a_scale_of_your_own_returns_a_pair():
    """A `LossScale` whose `update` returns something else is named, and nothing is changed."""

    class Wrong(v1.LossScale):
        def __call__(self):
            return 4.0

        def update(self, grads):
            return True

        def get_config(self):
            return {}

    w = Variable(1.0)
    with pytest.raises(TypeError, match=r"\(None, whether to apply\) from Wrong.update; got True"):
        wrapped(Wrong()).minimize(lambda: w**2, var_list=[w])
    assert float(w) == 1.0


@row(2, "no error: the class of opt overrides compute_gradients")
def test_a_class_with_its_own_gradients_is_refused():
    """The wrapper does not call it. Difference: it is an error, with what to write."""

    class Clipped(v1.GradientDescentOptimizer):
        def compute_gradients(self, *args, **kwargs):
            pairs = super().compute_gradients(*args, **kwargs)
            return [(jnp.clip(g, -1, 1), v) for g, v in pairs]

    with pytest.raises(TypeError, match="between the two calls"):
        v1.MixedPrecisionLossScaleOptimizer(Clipped(0.1), "dynamic")


class Doubling(v1.LossScale):
    """A scale of your own, whose state is a variable."""

    def __init__(self):
        self.scale = Variable(16.0, name="doubling", trainable=False)

    def __call__(self):
        return self.scale.value()

    def update(self, grads):
        self.scale.assign(self.scale * 2)
        return None, True

    def get_config(self):
        return {}


@pytest.mark.parametrize("compiled", [False, True])
def test_the_variables_of_a_scale_of_your_own_are_state(compiled):
    """`variables()` has them too, so a compiled step and a restored run go on with the scale."""
    w, opt, restored = Variable(1.0), wrapped(Doubling()), wrapped(Doubling())
    opt.build([w])
    step = lambda: opt.minimize(lambda: w**2, var_list=[w])  # noqa: E731
    (gs.optimizers.jit(step, state=[w, *opt.variables()]) if compiled else step)()
    restored.build([w])
    restored.set_weights([v.numpy() for v in opt.variables()])
    assert (float(opt.loss_scale), float(restored.loss_scale)) == (32.0, 32.0)
    with pytest.raises(ValueError, match="weights"):
        restored.set_weights([1.0])


# ── GradientDescentOptimizer, MomentumOptimizer, AdamOptimizer ───────────────────────────────


@row(2, "tf.compat.v1.train.GradientDescentOptimizer")
def test_gradient_descent():
    """The variable loses the rate times the gradient."""
    opt = v1.GradientDescentOptimizer(0.5, True, "descent")
    assert weights_after(opt, [1.0, 2.0]) == [3.0 - 0.5, 3.0 - 0.5 - 0.5 * 2.0]


@row(2, "tf.compat.v1.train.MomentumOptimizer")
def test_momentum():
    """Momentum accumulates gradients, not steps; Nesterov's form looks one step ahead."""
    m1, m2 = 1.0, 0.5 * 1.0 + 2.0
    plain = v1.MomentumOptimizer(learning_rate=0.25, momentum=0.5)
    assert weights_after(plain, [1.0, 2.0]) == [3.0 - 0.25 * m1, 3.0 - 0.25 * (m1 + m2)]
    ahead1, ahead2 = 1.0 + 0.5 * m1, 2.0 + 0.5 * m2
    nesterov = v1.MomentumOptimizer(0.25, 0.5, False, "name", True)
    after = [3.0 - 0.25 * ahead1, 3.0 - 0.25 * (ahead1 + ahead2)]
    assert weights_after(nesterov, [1.0, 2.0]) == after


@pytest.mark.parametrize("momentum", [1.5, -0.5, 2])
def test_momentum_is_any_number(momentum):
    """`momentum` may be above 1 or below 0, also as a callable."""
    expected = [3.0 - 0.5, 3.0 - 0.5 - 0.5 * (momentum + 1.0)]
    for given in (momentum, lambda: momentum):
        assert weights_after(v1.MomentumOptimizer(0.5, given), [1.0, 1.0]) == expected


@row(2, "tf.compat.v1.train.MomentumOptimizer")
@row(2, "tf.compat.v1.train.AdamOptimizer")
@pytest.mark.parametrize(
    "make",
    [
        lambda: v1.MomentumOptimizer(0.5, NAN),
        lambda: v1.MomentumOptimizer(0.5, INF),
        lambda: v1.AdamOptimizer(0.5, 1.0),
        lambda: v1.AdamOptimizer(0.5, 0.9, -0.5),
        lambda: v1.AdamOptimizer(0.5, epsilon=-1.0),
    ],
)
def test_numbers_with_which_weights_become_nan_are_refused(make):
    """Difference: such numbers are a ValueError where they are given."""
    with pytest.raises(ValueError, match="Expected a finite number"):
        make()


def test_momentum_is_applied_whatever_the_gradient_is():
    """Also with a gradient of 0 the accumulator decays and moves the variable."""
    weights = weights_after(v1.MomentumOptimizer(0.5, 0.5), [2.0, 0.0, 0.0])
    assert weights == [2.0, 2.0 - 0.5 * 1.0, 2.0 - 0.5 * 1.0 - 0.5 * 0.5]


def test_the_example_of_momentum():
    """The first step of the page's example is the rate times the gradient."""
    x, gradient = Variable([1.0, 2.0, 3.0]), jnp.array([0.1, 0.2, 0.3])
    opt = v1.MomentumOptimizer(learning_rate=0.001, momentum=0.9, use_nesterov=False)
    opt.apply_gradients(zip([gradient], [x], strict=True))
    np.testing.assert_allclose(x.numpy(), [0.9999, 1.9998, 2.9997], rtol=1e-6)


def adam(gradients, rate, beta1, beta2, epsilon):
    """The weight 3 after steps of Adam with "epsilon hat", in plain arithmetic."""
    w, m, v = 3.0, 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w -= rate * (1 - beta2**t) ** 0.5 / (1 - beta1**t) * m / (v**0.5 + epsilon)
    return w


@row(2, "tf.compat.v1.train.AdamOptimizer")
@pytest.mark.parametrize(
    "arguments",
    [
        {},  # the default epsilon matters for a gradient as small as this
        {"learning_rate": 0.25, "beta1": 0.5, "beta2": 0.75, "epsilon": 0.125},
        {"learning_rate": 0.1, "epsilon": 1.0, "use_locking": True, "name": "other"},
    ],
)
def test_adam(arguments):
    """Adam follows the formula of the page, in which epsilon is outside of the correction."""
    defaults = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    rate, beta1, beta2, epsilon = ({**defaults, **arguments}[name] for name in defaults)
    gradients = [1.0, 2.0, -0.5] if arguments else [1e-7, 2e-7]
    expected = adam(gradients, rate, beta1, beta2, epsilon)
    after = weights_after(v1.AdamOptimizer(**arguments), gradients)[-1]
    assert after - 3.0 == pytest.approx(expected - 3.0, rel=1e-3)


def test_hyperparameters_may_be_arrays():
    """The rate and the other hyperparameters may be arrays as well as floats."""
    half = jnp.float32(0.5)
    assert weights_after(v1.GradientDescentOptimizer(half), [2.0]) == [2.0]
    assert weights_after(v1.MomentumOptimizer(half, half), [2.0, 0.0]) == [2.0, 1.5]
    after = weights_after(v1.AdamOptimizer(half, half, half, half), [2.0])
    assert after == pytest.approx([adam([2.0], 0.5, 0.5, 0.5, 0.5)])


OPTIMIZERS = {
    "descent": v1.GradientDescentOptimizer,
    "momentum": lambda rate: v1.MomentumOptimizer(rate, 0.0),
    "adam": lambda rate: v1.AdamOptimizer(rate, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_rate_may_be_a_callable(make):
    """A callable without arguments gives the rate of each step, and may return another one."""
    rates = [0.5]
    w, opt = Variable(3.0), make(lambda: rates[0])
    for rate, after in ((0.5, 2.5), (0.25, 2.25)):
        rates[0] = rate
        opt.apply_gradients([(1.0, w)])
        assert float(w) == after


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_rate_may_be_a_variable(make):
    """A variable as the rate is read in every step, so a decayed rate takes effect."""
    rate, w = Variable(0.5), Variable(3.0)
    opt = wrapped(8, make(rate))
    for value, after in ((0.5, 2.5), (0.25, 2.25)):
        rate.assign(value)
        opt.apply_gradients([(1.0, w)])
        assert float(w) == after
    assert not any(v is rate for v in opt.variables())


def test_momentum_may_be_a_callable():
    """A callable without arguments gives the momentum of each step."""
    momenta = [0.5]
    w, opt = Variable(3.0), v1.MomentumOptimizer(0.5, lambda: momenta[0])
    opt.apply_gradients([(2.0, w)])
    momenta[0] = 0.25
    opt.apply_gradients([(0.0, w)])
    assert float(w) == 3.0 - 0.5 * 2.0 - 0.5 * (0.25 * 2.0)


def test_a_callable_number_is_read_in_eager_steps_only():
    """Difference: in a compiled step, which would keep the first number, it is an error."""
    w, opt = Variable(3.0), v1.MomentumOptimizer(0.5, lambda: 0.5)
    opt.build([w])
    step = gs.optimizers.jit(lambda: opt.apply_gradients([(2.0, w)]), state=([w], opt.variables()))
    with pytest.raises(ValueError, match="Expected a number for momentum in a traced function"):
        step()
    with pytest.raises(ValueError, match="for momentum; got nan"):
        v1.MomentumOptimizer(0.5, lambda: NAN).apply_gradients([(2.0, w)])
    assert float(w) == 3.0


@pytest.mark.parametrize("name", ["beta1", "beta2", "epsilon"])
def test_the_hyperparameters_of_adam_may_be_callables(name):
    """A callable without arguments gives `beta1`, `beta2` or `epsilon`."""
    arguments = {"learning_rate": 0.5, "beta1": 0.5, "beta2": 0.5, "epsilon": 0.5}
    after = weights_after(v1.AdamOptimizer(**{**arguments, name: lambda: 0.25}), [1.0, 2.0])[-1]
    expected = {**arguments, name: 0.25}
    assert after == pytest.approx(adam([1.0, 2.0], *expected.values()))


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_beta_may_change_between_steps(name):
    """The bias is corrected by the product of the betas that were used, as TensorFlow does."""
    given = {"beta1": 0.75, "beta2": 0.5}
    numbers = {**given, name: lambda: given[name]}
    w, opt = Variable(1.0), wrapped(8, v1.AdamOptimizer(0.5, **numbers))
    m = v = 0.0
    expected, powers = 1.0, [given["beta1"], given["beta2"]]
    for beta in (given[name], 0.25, 0.9):
        given[name] = beta
        opt.minimize(lambda: w**2, var_list=[w])
        g, b1, b2 = 2 * expected, given["beta1"], given["beta2"]
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        rate = 0.5 * (1 - powers[1]) ** 0.5 / (1 - powers[0])
        expected -= rate * m / (v**0.5 + 1e-8)
        powers = [powers[0] * b1, powers[1] * b2]
        assert float(w) == pytest.approx(expected, rel=1e-5)


def test_a_skipped_step_leaves_the_products_of_changing_betas():
    """The products are state of the rule: an overflow does not change them."""
    w, opt = Variable(1.0), wrapped(8, v1.AdamOptimizer(0.5, lambda: 0.75))
    opt.apply_gradients([(1.0, w)])
    before = [float(x) for x in opt.variables() if "power" in x.name]
    assert before == pytest.approx([0.75**2, 0.999**2])
    opt.apply_gradients([(float("inf"), w)])
    assert [float(x) for x in opt.variables() if "power" in x.name] == before


def test_the_constraint_of_a_variable_holds_after_a_step():
    """A variable with a constraint is projected after its update, as there."""
    w = Variable(1.0, constraint=lambda x: jnp.clip(x, 0.75, 2.0))
    wrapped().minimize(lambda: w * 1.0, var_list=[w])
    assert float(w) == 0.75


@pytest.mark.filterwarnings("ignore:No gradient for")
def test_the_constraint_of_a_variable_without_a_gradient_waits():
    """A variable that a step does not train is not projected, as there."""
    a, b = Variable(3.0, constraint=lambda x: jnp.clip(x, 0.0, 1.0)), Variable(1.0)
    for opt in (v1.GradientDescentOptimizer(0.5), wrapped()):
        opt.minimize(lambda: b * 1.0, var_list=[a, b])
        opt.apply_gradients([(1.0, b)])
    assert (float(a), float(b)) == (3.0, -1.0)


def test_numbers_that_are_functions_compile_nothing():
    """A momentum that is a function is read in each step; while it returns the same, no step is
    compiled again."""
    w, opt = Variable(3.0), v1.MomentumOptimizer(0.5, lambda: 0.5)
    for _ in range(2):
        opt.apply_gradients([(1.0, w)])
    with compilations() as compiled:
        opt.apply_gradients([(1.0, w)])
    assert compiled == []
    assert float(w) == 3.0 - 0.5 * (1.0 + 1.5 + 1.75)

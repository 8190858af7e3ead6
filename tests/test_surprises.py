"""Habits and mistakes of a first-time user: each works, or is told what to do."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.compat import experimental, tf2, v1


def pair():
    w = gs.Variable([1.0, 2.0], name="w")
    return w, gs.LossScaleOptimizer(gs.SGD(0.5), initial_scale=2.0)


@pytest.mark.parametrize(
    "trace",
    [
        lambda w: jax.jit(lambda x: (w * x).sum())(1.0),
        lambda w: jax.lax.scan(lambda c, x: (c + (w * x).sum(), 0), 0.0, jnp.ones(2)),
        lambda w: jax.make_jaxpr(lambda: w.value())(),
    ],
)
def test_plain_tracing_does_not_freeze_a_variable(trace):
    """Under `jax.jit` or `lax.scan` a variable that is not lent raises: it would go stale."""
    with pytest.raises(ValueError, match="'w', whose value would be frozen"):
        trace(pair()[0])


def test_transformations_that_do_not_compile_may_read_variables():
    """`jax.grad` and `jax.vmap` read a variable like any function that runs now."""
    w, _ = pair()
    assert jax.vmap(lambda x: w[0] * x)(jnp.arange(3.0)).tolist() == [0, 1, 2]
    assert float(jax.grad(lambda x: (w * x).sum())(1.0)) == 3.0


def test_a_jit_inside_of_a_loss_is_explained():
    """A compiled function that reads variables by itself fails with a note on what to do."""
    w, opt = pair()
    loss = jax.jit(lambda: (w * w).sum())
    opt.minimize(loss, [w])
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        opt.minimize(loss, [w])
    notes = " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "pass it `variable.value()` as an argument" in notes


def test_finalizing_before_the_first_step_keeps_the_weights():
    """As long as every step was skipped there is no average, and nothing to finalize."""
    w = gs.Variable(5.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), use_ema=True)
    opt.apply([jnp.inf], [w])
    opt.finalize_variable_values([w])
    assert float(w) == 5.0


def test_exclusions_take_lists_of_the_right_kind():
    """A string is no list of names, and a name is no variable."""
    with pytest.raises(TypeError, match="list of strings for var_names"):
        gs.SGD().exclude_from_weight_decay(var_names="bias")
    with pytest.raises(TypeError, match="made of Variables"):
        gs.SGD().exclude_from_weight_decay(["bias"])


def test_one_variable_or_a_dictionary_is_a_list_of_variables():
    """`var_list` may be one variable, a dictionary of them, or an iterator."""
    w, opt = pair()
    for var_list in (w, {"w": w}, iter([w]), lambda: w):
        opt.minimize(lambda: (w**2).sum(), var_list)
    assert w.numpy().tolist() == [0.0, 0.0]


def test_read_only_parts_of_a_wrapper():
    """Rule, inner optimizer and first scale are settled, and an inner argument is set inside."""
    _, opt = pair()
    for name in ("rule", "inner_optimizer", "initial_scale"):
        with pytest.raises(AttributeError):
            setattr(opt, name, None)
    with pytest.raises(AttributeError, match="momentum to be set on the inner optimizer"):
        opt.momentum = 0.9
    opt.remark = "free"
    assert opt.remark == "free"


def test_an_option_taken_back_is_no_longer_given():
    """An option of the inner optimizer set to None may be given to the wrapper."""
    sgd = gs.SGD(1.0, clipnorm=1.0)
    sgd.clipnorm = None
    assert gs.LossScaleOptimizer(sgd, clipvalue=3.0).clipvalue == 3.0


def test_jit_of_jit_keeps_its_own_state():
    """Compiling a compiled function again donates what the outer one was told to donate."""
    w, _ = pair()
    step = gs.jit(gs.jit(lambda: w.assign(w * 2), [w]), [w], donate=True)
    step()
    pointer = w._value.unsafe_buffer_pointer()
    step()
    assert w._value.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_rule_of_ones_own_cannot_break_the_scale(scale):
    """Whatever a rule returns, the scale stays finite and positive, in float32."""

    class Broken(gs.FixedLossScale):
        def init(self):
            return gs.ScaleState(8)

        def update(self, state, finite):
            return gs.ScaleState(jnp.float32(scale))

    w = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.5), rule=Broken(8.0))
    opt.minimize(lambda: w * 1.0, [w])
    assert opt.loss_scale.dtype == jnp.float32
    assert 0 < float(opt.loss_scale) <= 2.0**126


def test_an_update_step_that_returns_is_told_to_assign():
    """Returning the new value, as in optax, is an error and changes nothing."""

    class Returning(gs.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            return variable - learning_rate * gradient

    w = gs.Variable(1.0)
    with pytest.raises(TypeError, match="update_step to assign"):
        Returning(0.1).apply([1.0], [w])
    assert float(w) == 1.0


def test_augmented_assignment_is_refused():
    """`w += 1` would put an array in the variable's place; the error names what to call."""
    w, _ = pair()
    with pytest.raises(TypeError, match=r"assign_add.*'w'"):
        w += 1


def test_integer_variables_in_minimize():
    """An integer variable is named before JAX complains about tangents."""
    n = gs.Variable(1, name="n")
    with pytest.raises(TypeError, match="'n' of dtype int32"):
        gs.SGD().minimize(lambda: n * 1.0, [n])


def test_the_live_object_and_the_rule_know_each_other():
    """`update` with the other's arguments says where the other is; either is taken for a rule."""
    live, rule = experimental.DynamicLossScale(8.0), gs.DynamicLossScale(8.0)
    with pytest.raises(TypeError, match=r"gainstage.compat.experimental"):
        rule.update([jnp.ones(2)])
    with pytest.raises(TypeError, match=r"gainstage.DynamicLossScale"):
        live.update(rule.init(), True)
    assert gs.LossScaleOptimizer(gs.SGD(), rule=live).rule == live.rule
    opt = experimental.LossScaleOptimizer(gs.SGD(), rule)
    assert (opt.initial_scale, opt.dynamic_growth_steps) == (8.0, 2000)


def test_accumulated_gradients_cannot_overflow_into_the_weights():
    """Two finite gradients whose sum is infinite: the second step is skipped."""
    w = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(2.0**-100, gradient_accumulation_steps=2), 1.0)
    opt.apply([np.float32(3e38)], [w])
    state = [v.numpy() for v in opt.inner_optimizer.variables]
    opt.apply([np.float32(3e38)])
    assert float(w) == 1.0
    assert float(opt.loss_scale) == 0.5
    for variable, before in zip(opt.inner_optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(variable.numpy(), before)


def test_a_number_beyond_every_float_is_out_of_range():
    """An integer that no float holds is a ValueError like any other number out of range."""
    with pytest.raises(ValueError, match="initial_loss_scale"):
        gs.DynamicLossScale(10**400)


@pytest.mark.parametrize("count", [2**31 - 1, -(2**31)])
def test_a_stored_count_cannot_overflow(count):
    """A loaded count of good steps, however large, leads to growth and not to a wrapped count."""
    rule = gs.DynamicLossScale(8.0, increment_period=2)
    state = rule.init()._replace(good_steps=jnp.int32(count))
    state = rule.update(state, finite=True)
    assert int(state.good_steps) in (0, 1)


def test_a_float32_gradient_does_not_narrow_a_float64_step():
    """Adam corrects its bias in the variable's precision, whatever the gradient's."""
    with jax.enable_x64(True):
        weights = []
        for dtype in (jnp.float32, jnp.float64):
            w = gs.Variable(1.0, jnp.float64)
            gs.Adam(0.125).apply([jnp.ones((), dtype)], [w])
            weights.append(float(w))
    assert weights[0] == weights[1]


def test_a_forgotten_has_aux_is_named():
    """A function that returns (loss, aux) without has_aux=True is told about it."""
    state = gs.loss_scaled(optax.sgd(0.1)).init(jnp.float32(1.0))
    with pytest.raises(TypeError, match="has_aux=True"):
        gs.value_and_grad(lambda w: (w**2, 0), state)(jnp.float32(1.0))


def test_a_plain_optax_state_is_told_how_to_make_one():
    """`value_and_grad` on a state without loss scaling names `loss_scaled(tx).init(params)`."""
    with pytest.raises(ValueError, match=r"loss_scaled\(tx\)\.init\(params\)"):
        gs.value_and_grad(lambda w: w**2, optax.sgd(0.1).init(jnp.float32(1.0)))


def test_a_build_that_forgets_its_base_is_named():
    """A subclass whose `build` does not call the base's is told so at the first step."""

    class Forgetful(gs.SGD):
        def build(self, var_list):
            pass

    with pytest.raises(ValueError, match=r"super\(\).build"):
        Forgetful(0.1).apply([1.0], [gs.Variable(1.0)])


def test_values_of_another_structure_are_named():
    """A pure function called with too few values says which it expects."""
    w = gs.Variable(1.0, name="w")
    with pytest.raises(ValueError, match="one for each of"):
        gs.functional(lambda: None, [w])([])


def test_an_optimizer_adds_lists():
    """`optimizer.assign_add` and `assign_sub` take whatever a variable's own methods take."""
    w, opt = pair()
    opt.assign_add(w, [0.5, 0.5])
    opt.assign_sub(w, [0.25, 0.0])
    assert w.numpy().tolist() == [1.25, 2.5]


def test_computed_gradients_are_known_to_be_unscaled():
    """`tf2` gradients from `compute_gradients` need no reminder to unscale them."""
    w = gs.Variable(1.0)
    opt = tf2.LossScaleOptimizer(gs.SGD(0.25))
    opt.apply_gradients(opt.compute_gradients(lambda: w**2, [w]))
    assert float(w) == 0.5


def test_errors_name_the_argument_of_the_document():
    """A wrong `loss_scale` or period is refused under its own name, in the documents' bounds."""
    with pytest.raises(ValueError, match=r">= 1, 'dynamic' or a LossScale for loss_scale"):
        v1.MixedPrecisionLossScaleOptimizer(v1.AdamOptimizer(), "fast")
    with pytest.raises(TypeError, match="increment_period"):
        experimental.DynamicLossScale(8.0, None)
    with pytest.raises(TypeError, match="jit_compile"):
        gs.SGD(jit_compile="yes")
    assert v1.AdamOptimizer.GATE_OP == 1


@pytest.mark.parametrize("clip", ["global_clipnorm", "clipnorm"])
def test_a_mean_whose_norm_overflows_does_not_reach_the_weights(clip):
    """Accumulated elements may be finite and their norm not: the microbatch that makes it so is
    skipped like any that is not finite, and the window goes on."""
    w = gs.Variable([1.0] * 9)
    inner = gs.SGD(1.5, momentum=0.9, gradient_accumulation_steps=2, **{clip: 1.0})
    opt = gs.LossScaleOptimizer(inner, initial_scale=1.0, telemetry=True)
    opt.apply([[1e38] * 9], [w])
    before = [v.numpy().tobytes() for v in inner.variables]
    opt.apply([[1e38] * 9])
    assert [v.numpy().tobytes() for v in inner.variables] == before
    assert (int(opt.iterations), float(opt.loss_scale)) == (0, 0.5)
    opt.apply([[3.0] * 9])
    np.testing.assert_allclose(w.numpy(), [0.5] * 9, rtol=1e-6)
    info = gs.telemetry(opt)
    assert (int(opt.iterations), int(info.applied_steps), int(info.skipped_steps)) == (1, 2, 1)


class TwoAverages(gs.SGD):
    """A rule whose slots have no names of their own, and one that SGD has too."""

    def build(self, var_list):
        super().build(var_list)
        self.firsts = [self.add_variable_from_reference(v) for v in var_list]
        self.seconds = [self.add_variable_from_reference(v) for v in var_list]
        self.own = self.add_optimizer_variables(var_list, "momentum", "ones")


@pytest.mark.parametrize("group_small", [False, True])
def test_slots_of_one_name_are_several(group_small):
    """Each request makes a slot, as in Keras; a second `build` gets those of the first."""
    variables = pair()[0], gs.Variable([3.0, 4.0], name="b")
    opt = TwoAverages(0.5, momentum=0.5, group_small=group_small)
    for _ in range(2):
        opt.build(variables)
        slots = [opt.momentums[0], opt.firsts[0], opt.seconds[0], opt.own[0]]
        assert len(set(slots)) == 4
        assert len(opt.variables) == 2 + 4 * (1 if group_small else 2)
    assert [float(slots[0][0]) for slots in (opt.own, opt.momentums)] == [1, 0]


@pytest.mark.parametrize("of", [iter, lambda vs: {"w": vs[0]}, lambda vs: vs[0]])
def test_build_wants_a_list(of):
    """What cannot be gone through twice as a list of variables is refused, and nothing is built."""
    w, opt = gs.Variable([1.0, 2.0]), gs.Adam(0.5)
    with pytest.raises(TypeError, match="Expected a list of variables for var_list; got"):
        opt.build(of([w]))
    assert not opt.built
    opt.build([w])
    opt.apply([jnp.ones(2)])


def test_a_shallow_copy_survives_a_step():
    """`copy.copy` of a variable keeps its value, though a step reuses the original's memory."""
    w = gs.Variable([1.0, 2.0])
    best = copy.copy(w)
    gs.SGD(0.5).minimize(lambda: (w.value() ** 2).sum(), [w])
    assert (best.numpy().tolist(), w.numpy().tolist()) == ([1, 2], [0, 0])


def test_variables_compare_with_numbers():
    """`opt.iterations == 1` asks for the value; two variables are equal if they are one."""
    w, opt = gs.Variable([1.0, 2.0]), gs.SGD(0.5)
    opt.apply([jnp.ones(2)], [w])  # to 0.5 and 1.5
    assert opt.iterations == 1
    assert (w == np.array([0.5, 1.5])).tolist() == [True, True]
    assert (w != np.array([0.5, 7.0])).tolist() == [False, True]
    assert w != gs.Variable(w)
    assert w in [gs.Variable(w), None, w]
    assert w not in [gs.Variable(w), None]


@pytest.mark.parametrize("keep", ["assign", "apply"])
def test_memory_of_numpy_stays_the_callers(keep):
    """A buffer that is filled anew changes neither a variable nor a step that was handed it."""
    memory = np.zeros(2**12 + 16, np.float32)
    start = (-memory.ctypes.data // 4) % 16  # where JAX could go on using it
    buffer = memory[start : start + 2**12]
    w = gs.Variable(np.ones(2**12, np.float32))
    buffer[:] = 3.0
    if keep == "assign":
        w.assign(buffer)
        kept = w.value()
    else:
        kept = gs.SGD()._checked([buffer], [w])[0]
    buffer[:] = 0.0
    assert kept[0] == 3


def test_a_pure_function_has_its_own_signature():
    """`functional` takes values first: donating and static arguments count from there."""
    w = gs.Variable([1.0, 2.0])
    double = jax.jit(gs.functional(lambda: w.assign(w * 2), [w]), donate_argnums=0)
    assert double([jnp.ones(2)])[1][0].tolist() == [2, 2]
    add = gs.functional(lambda x, twice=False: w.assign(w + x * (2 if twice else 1)), [w])
    _, (new,) = jax.jit(add, static_argnames="twice")([w.value()], 1.0, twice=True)
    assert new.tolist() == [3, 4]


def test_a_local_scale_bears_complex_numbers():
    """Gradients of what is complex are the same with a scale of its own; one that float32 cannot
    hold is refused."""
    for fun, x in [
        (lambda z: jnp.abs(z) ** 2, jnp.complex64(1 + 2j)),
        (lambda x: jnp.abs(x * (1 + 1j)) ** 2, jnp.float32(3)),
    ]:
        local = gs.locally_scaled(fun, 2.0**10)
        np.testing.assert_allclose(jax.grad(local)(x), jax.grad(fun)(x), rtol=1e-6)
    for scale in (1e39, 1e-40):
        with pytest.raises(ValueError, match="scale"):
            gs.locally_scaled(jnp.sin, scale)


def test_exponents_of_missing_gradients_in_x64():
    """`underflow_every` counts nothing for a variable without gradient, in x64 too."""
    with jax.enable_x64(True):
        w, b = gs.Variable(1.0, jnp.float32), gs.Variable(2.0, jnp.float64)
        opt = gs.LossScaleOptimizer(gs.SGD(0.5), telemetry=True, underflow_every=1)
        with pytest.warns(UserWarning, match="No gradient for"):
            opt.apply([jnp.float32(2.0**15), None], [w, b])
        assert (float(w), float(b)) == (0.5, 2.0)


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, 0.0, -1.0])
def test_a_spoiled_scale_heals(spoiled):
    """Whatever was put into the scale, it is finite and positive after the next step."""
    w, opt = pair()
    opt.apply([jnp.ones(2)], [w])
    opt.dynamic_scale.assign(spoiled)
    opt.apply([jnp.full(2, np.inf)], [w])
    assert 0 < float(opt.loss_scale) <= 2.0**126
    rule = gs.DynamicLossScale()
    tx = gs.loss_scaled(optax.sgd(0.5), rule)
    params = jnp.ones(2)
    state = tx.init(params)
    scale = state.loss_scale._replace(scale=jnp.float32(spoiled))
    state = tx.update(jnp.full(2, jnp.inf), state._replace(loss_scale=scale), params)[1]
    assert 0 < float(state.loss_scale.scale) <= 2.0**126


def test_a_state_keeps_its_types_whatever_a_rule_returns():
    """A rule that returns weakly typed or wider numbers does not change the type of the state."""

    class Careless(gs.DynamicLossScale):
        def update(self, state, finite, **measured):
            return state._replace(scale=jnp.where(finite, 2.0, 1.0), good_steps=3.0)

    tx = gs.loss_scaled(optax.sgd(0.5), Careless())
    params = jnp.ones(2)
    with jax.enable_x64(True):
        state = tx.init(params)
        new = tx.update(jnp.ones(2), state, params)[1]
        types = [jax.tree.map(jnp.result_type, s.loss_scale) for s in (state, new)]
    assert types[0] == types[1]
    assert not any(jnp.asarray(x).weak_type for x in new.loss_scale if x is not None)


def test_a_wrapper_that_fails_leaves_the_inner_optimizer_free():
    """A wrong mesh is refused before anything has changed: another wrapper may be made."""
    meshes = [jax.make_mesh((8,), ("data",)), jax.make_mesh((4,), ("data",))]
    layout = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec("data"))
    inner, w = gs.SGD(0.5), gs.Variable(jax.device_put(np.ones(8, np.float32), layout))
    inner.build([w])
    with pytest.raises(ValueError, match="Expected variables on the mesh"):
        gs.LossScaleOptimizer(inner, mesh=meshes[1])
    with pytest.raises(ValueError, match=r"Expected a jax.sharding.Mesh for mesh; got 3"):
        gs.LossScaleOptimizer(inner, mesh=3)
    gs.LossScaleOptimizer(inner).apply([jnp.full(8, 2.0**15)], [w])
    assert w.numpy().tolist() == [0.5] * 8


def test_boundaries_between_steps():
    """A boundary at 2.5 separates step 2 from step 3, as in Keras."""
    schedule = gs.schedules.PiecewiseConstantDecay([2.5], [1.0, 0.25])
    assert [float(schedule(jnp.int32(step))) for step in range(5)] == [1, 1, 1, 0.25, 0.25]

"""What the compiled step promises: one program, no host, memory in place."""

import gc
import os
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations

import gainstage as gs
from gainstage.optimizers import Adam, LossScaleOptimizer, Variable, functionalize, schedules
from gainstage.optimizers._step.optimizer_step import StepInputs

from peers import fails, live


def model(**options):
    variables = [Variable(np.ones((256, 128)), name="w"), Variable(np.ones(128), name="b")]
    optimizer = LossScaleOptimizer(Adam(1e-3, **options), dynamic_growth_steps=2)
    optimizer.build(variables)
    return variables, optimizer


def gradients(value=1.0):
    return [jnp.full((256, 128), value), jnp.full((128,), value)]


class Counting(gs.optimizers.SGD):
    """An SGD that counts how often its rule is traced."""

    traces = 0

    def update_step(self, gradient, variable, learning_rate):
        type(self).traces += 1
        super().update_step(gradient, variable, learning_rate)


def test_twenty_steps_compile_once():
    """Steps with changing learning rates and scales, one of them skipped, trace the rule once."""
    Counting.traces = 0
    var = Variable(np.ones(8))
    optimizer = LossScaleOptimizer(Counting(0.1, momentum=0.9), dynamic_growth_steps=2)
    grads = [jnp.ones(8), jnp.full(8, jnp.nan, jnp.float32)]
    optimizer.learning_rate = 0.2
    optimizer.apply([grads[0]], [var])
    with compilations() as compiled:
        for step in range(20):
            optimizer.learning_rate = 0.1 / (step + 1)
            optimizer.apply([grads[step == 7]], [var])
    assert Counting.traces == 1
    assert compiled == []
    assert float(optimizer.loss_scale) != 2.0**15


def uncompiled(form):
    """A function of a bool that takes an eager step, on NaN where it does not hold."""
    values = [jnp.ones((64, 64), jnp.float16), jnp.ones(3)]  # rows of the first are read in a loop
    bad = [values[0] * jnp.nan, values[1]]
    if form == "with_loss_scale":
        tx = gs.with_loss_scale(optax.adam(0.1), telemetry=True)
        state = [tx.init(values)]

        def step(good):
            state[0] = tx.update(values if good else bad, state[0], values)[1]

        return step
    variables, adam = [Variable(value) for value in values], Adam(0.1, clipnorm=1.0)
    if form == "apply":
        adam.gradient_accumulation_steps = 2
        opt = LossScaleOptimizer(adam, jit_compile=False)
        return lambda good: opt.apply(values if good else bad, variables)
    opt = LossScaleOptimizer(adam)
    opt.build(variables)
    both = [values, [variable.value() for variable in opt.variables]]

    def step(good):
        both[:] = opt.stateless_apply(both[1], values if good else bad, both[0])

    return step


UNCOMPILED = ["with_loss_scale", "apply", "stateless_apply"]


@pytest.mark.parametrize("form", UNCOMPILED)
def test_uncompiled_steps_compile_nothing_new(form):
    """After the first steps, a skipped one among them, an eager step compiles no program."""
    step = uncompiled(form)
    for good in (True, False, True, True):
        step(good)
    with compilations() as compiled:
        for i in range(12):
            step(i % 5 != 3)
    assert compiled == []


@pytest.mark.slow
@pytest.mark.parametrize("form", UNCOMPILED)
def test_uncompiled_steps_keep_no_memory(form):
    """2,000 eager steps that are not compiled take less than 20 MB of memory for themselves."""
    step = uncompiled(form)
    for i in range(50):
        step(i % 5 != 3)
    before = resident()
    for i in range(2000):
        step(i % 5 != 3)
    assert resident() - before < 20 * 2**20


def resident():
    """The bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_weakly_typed_gradient_is_no_other_program():
    """Gradients such as `jnp.full(shape, 0.0)`, of a weak type, do not trace the rule again."""
    Counting.traces = 0
    var, optimizer = Variable(np.ones(8)), Counting(0.1)
    for gradient in (jnp.ones(8), jnp.full(8, 0.5), np.ones(8, np.float32)):
        optimizer.apply([gradient], [var])
    assert Counting.traces == 1


def test_every_attempt_to_change_a_hyperparameter_is_honoured():
    """A Python hyperparameter changed between steps takes effect, at the price of a compilation."""
    var = Variable(0.0)
    optimizer = LossScaleOptimizer(gs.optimizers.SGD(1.0, momentum=0.5), initial_scale=1.0)
    optimizer.apply([1.0], [var])
    optimizer.inner_optimizer.momentum = 0.0
    optimizer.clipnorm = 0.25
    optimizer.apply([1.0], [var])
    assert float(var) == -1.25


# Asked for in accelerate#1714 (transfers).
@pytest.mark.as_users
def test_nothing_is_transferred_after_the_first_step():
    """A step on device arrays runs while transfers between host and device are forbidden."""
    variables, optimizer = model(use_ema=True, gradient_accumulation_steps=2, clipnorm=1.0)
    good, bad = gradients(), gradients(jnp.inf)
    optimizer.apply(good, variables)
    with jax.transfer_guard("disallow"):
        for grads in (good, bad, good):
            optimizer.apply(grads, variables)
    assert float(optimizer.loss_scale) == 2.0**15  # doubled once, halved once


@pytest.mark.parametrize("rate", [0.1, schedules.ExponentialDecay(0.1, 10, 0.5)])
def test_the_whole_eager_step_traces(rate):
    """`apply` reads nothing back: all of it traces into a jaxpr, with no callback in it."""
    var = Variable(np.ones(4))
    optimizer = LossScaleOptimizer(gs.optimizers.SGD(rate, momentum=0.9, global_clipnorm=1.0))
    optimizer.build([var])
    state = ([var], optimizer.variables)
    pure = functionalize(lambda grads: optimizer.apply(grads, [var]), state)
    values = jax.tree.map(lambda v: v.value(), state)
    jaxpr = str(jax.make_jaxpr(pure)(values, [jnp.ones(4)]))
    assert "cond" in jaxpr
    assert "callback" not in jaxpr


# Asked for in pytorch#120814 (breaks).
@pytest.mark.as_users
@pytest.mark.parametrize("rate", [0.1, lambda: 0.1])
def test_compiled_step_has_no_host_callback(rate):
    """The program of a step contains no custom call to the host, no infeed and no outfeed."""
    var = Variable(np.ones(4))
    optimizer = LossScaleOptimizer(Adam(rate, clipnorm=1.0, use_ema=True))
    optimizer.build([var])
    optimizer.apply([jnp.ones(4)])
    inputs = StepInputs([jnp.ones(4)], optimizer._store.rate.now())
    program = optimizer._kept.program.lower(inputs).compile().as_text()
    called = re.findall(r'custom_call_target="([^"]*)"', program)
    assert not [target for target in called if "callback" in target or "host" in target.lower()]
    assert not re.search(r"= .*(infeed|outfeed|send|recv)\(", program)


def aliased(step, *args):
    """Bytes that a compiled program updates in place, and those that it takes."""
    memory = step.lower(*args).compile().memory_analysis()
    return memory.alias_size_in_bytes, memory.argument_size_in_bytes


def copies(compiled):
    """The copies of arrays, scalars left out, that a program makes."""
    return re.findall(r"= \S+\[\d[^\]]*\]\S* copy\(.*", compiled.as_text())


@pytest.mark.as_users
def test_a_donating_loop_updates_in_place():
    """`jit(..., donate=True)` aliases every byte of the state, each value in its own place."""
    variables, optimizer = model()

    def train_step(grads):
        optimizer.apply(grads, variables)
        return grads[0] * 2  # of the shape of a weight, but none of its memory

    step = gs.optimizers.jit(train_step, (variables, optimizer.variables), donate=True)
    state = sum(v.size * v.dtype.itemsize for v in [*variables, *optimizer.variables])
    grads = gradients()
    assert aliased(step, grads)[0] == state
    assert not copies(step.lower(grads).compile())
    pointers = {v.name: v._value.unsafe_buffer_pointer() for v in optimizer.variables}
    for _ in range(3):
        step(grads)
    assert pointers == {v.name: v._value.unsafe_buffer_pointer() for v in optimizer.variables}


@pytest.mark.as_users
def test_slots_are_updated_in_place_by_the_eager_step():
    """`apply` donates what nobody else holds: every slot stays where it is in memory."""
    variables, optimizer = model(use_ema=True)
    optimizer.apply(gradients(), variables)
    slots = [v for v in optimizer.variables if v.size > 1]
    pointers = [v._value.unsafe_buffer_pointer() for v in slots]
    for _ in range(3):
        optimizer.apply(gradients(), variables)
    assert pointers == [v._value.unsafe_buffer_pointer() for v in slots]


@pytest.mark.as_users
def test_handed_out_arrays_survive_donation():
    """An array that `value()` handed out stays readable after a donating step."""
    var = Variable(np.ones(1000))
    held, assigned = var.value(), jnp.full(1000, 5.0)
    step = gs.optimizers.jit(lambda: var.assign(var * 2), [var], donate=True)
    step()
    assert (np.asarray(held) == 1).all()
    var.assign(assigned)
    step()
    assert (np.asarray(assigned) == 5).all()
    assert (var.numpy() == 10).all()


@pytest.mark.as_users
def test_numbers_that_are_read_cost_the_next_step_no_copy():
    """A checkpoint in numpy holds copies already: the step after it updates all in place."""
    variables, optimizer = model()
    state = [*variables, *optimizer.variables]
    step = gs.optimizers.jit(lambda g: optimizer.apply(g, variables), state, donate=True)
    step(gradients())
    saved = {}
    optimizer.save_own_variables(saved)
    weights = [np.asarray(v) for v in variables]
    assert int(optimizer.iterations) == 1
    assert f"{optimizer.iterations:d}" == "1"
    before = {key: value.copy() for key, value in saved.items()}, [w.copy() for w in weights]
    pointers = [v._value.unsafe_buffer_pointer() for v in state]
    step(gradients())
    assert [v._value.unsafe_buffer_pointer() for v in state] == pointers
    jax.tree.map(np.testing.assert_array_equal, (saved, weights), before)


@pytest.mark.as_users
def test_stateless_apply_recipe_aliases_weights_and_slots():
    """The documented recipe for donating through `stateless_apply` updates all in place."""
    variables, optimizer = model()
    recipe = jax.jit(lambda w, s, g: optimizer.stateless_apply(s, g, w), donate_argnums=(0, 1))
    weights, state = [v.value() for v in variables], [v.value() for v in optimizer.variables]
    compiled = recipe.lower(weights, state, gradients()).compile()
    size = sum(x.size * x.dtype.itemsize for x in [*weights, *state])
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert not copies(compiled)


@pytest.mark.parametrize("wrap", [lambda opt: opt, LossScaleOptimizer], ids=["alone", "scaled"])
def test_a_dropped_optimizer_frees_its_arrays_at_once(wrap):
    """Nothing keeps an optimizer, its wrapper, or a compiled function that nobody uses any more."""
    weight = Variable(jnp.ones(3))
    gc.collect()
    gc.disable()
    try:
        opt = wrap(Adam(0.1))
        opt.minimize(lambda: (weight * weight).sum(), [weight])
        step = gs.optimizers.jit(lambda opt=opt: opt.loss_scale_factor, [weight], donate=True)
        step()
        kept = [weakref.ref(thing) for thing in (opt, *opt.variables, step)]
        del opt, step
        assert [reference() for reference in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_a_rate_that_a_compiled_function_could_not_follow_is_refused():
    """A callable of no argument is called once per eager step; where a program would keep its first
    value it is an error that says what to use."""
    rates = iter([0.5, 0.25, 0.125, 1.0])
    w, opt = Variable(0.0), LossScaleOptimizer(gs.optimizers.SGD(lambda: next(rates)), 1.0)
    for expected in (-0.5, -0.75):
        opt.apply([1.0], [w])
        assert float(w) == expected
    values = [w.value()], [v.value() for v in opt.variables]
    assert opt.stateless_apply(values[1], [1.0], values[0])[0] == [-0.875]
    for compiled in (
        lambda: gs.optimizers.jit(opt.apply, ([w], opt.variables))([1.0]),
        lambda: jax.jit(lambda w, s: opt.stateless_apply(s, [1.0], w))(*values),
    ):
        with pytest.raises(ValueError, match=r"a callable of no argument.* Use a schedule"):
            compiled()
    assert float(w) == -0.75


@pytest.mark.as_users
def test_a_pure_function_does_not_eat_its_arguments():
    """`functionalize` of a step that donates leaves the arrays that it was given."""
    w = Variable(jnp.zeros(1000))
    held = []
    step = gs.optimizers.jit(lambda: w.assign(w * 2), [w], donate=True)

    def twice():
        step()
        held.append(w.value())
        step()

    x = jnp.ones(1000)
    _, (new,) = functionalize(twice, [w])([x])
    assert (new == 4).all()
    assert (x == 1).all()
    assert (held[0] == 2).all()
    assert (w.value() == 0).all()


def test_arrays_on_a_chosen_device_compile_no_more():
    """Weights made by `jax.device_put`: one program, for another rate and other weights too."""
    x = jax.device_put(np.ones(8, np.float32), jax.devices()[0])
    w = Variable(x)
    opt = LossScaleOptimizer(Adam(0.1, use_ema=True), telemetry=True)
    opt.apply([x], [w])
    with compilations() as compiled:
        for rate in (0.1, 0.2):
            opt.learning_rate = rate
            opt.apply([x], [w])
    w.assign(np.zeros(8))
    with compilations() as later:
        opt.apply([x], [w])
    assert [name for name in compiled + later if "copies" not in name] == []


def scaled_sgd():
    w = Variable([1.0, 2.0], name="w")
    return w, LossScaleOptimizer(gs.optimizers.SGD(0.5), initial_scale=2.0)


def test_one_variable_or_a_dictionary_is_a_list_of_variables():
    """`var_list` may be one variable, a dictionary of them, or an iterator."""
    w, opt = scaled_sgd()
    for var_list in (w, {"w": w}, iter([w]), lambda: w):
        opt.minimize(lambda: (w**2).sum(), var_list)
    assert w.numpy().tolist() == [0.0, 0.0]


@pytest.mark.as_users
def test_jit_of_jit_keeps_its_own_state():
    """Compiling a compiled function again donates what the outer one was told to donate."""
    w, _ = scaled_sgd()
    step = gs.optimizers.jit(gs.optimizers.jit(lambda: w.assign(w * 2), [w]), [w], donate=True)
    step()
    pointer = w._value.unsafe_buffer_pointer()
    step()
    assert w._value.unsafe_buffer_pointer() == pointer


def test_values_of_another_structure_are_named():
    """A pure function called with too few values says which it expects."""
    w = Variable(1.0, name="w")
    with pytest.raises(ValueError, match="one for each of"):
        functionalize(lambda: None, [w])([])


def test_a_pure_function_has_its_own_signature():
    """`functionalize` takes values first: donating and static arguments count from there."""
    w = Variable([1.0, 2.0])
    double = jax.jit(functionalize(lambda: w.assign(w * 2), [w]), donate_argnums=0)
    assert double([jnp.ones(2)])[1][0].tolist() == [2, 2]
    add = functionalize(lambda x, twice=False: w.assign(w + x * (2 if twice else 1)), [w])
    _, (new,) = jax.jit(add, static_argnames="twice")([w.value()], 1.0, twice=True)
    assert new.tolist() == [3, 4]


def test_the_first_step_counts_and_compiles_the_only_program():
    """flax starts above float16's largest number and with a weak type; ours with neither."""
    traces = []
    params = {"w": jnp.ones(4, jnp.float16)}
    tx = gs.with_loss_scale(optax.sgd(0.25))
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        traces.append(1)
        loss, grads = gs.value_and_grad(lambda p: p["w"].mean(), state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, loss = step(params, state)
        assert (loss.dtype, bool(jnp.isfinite(loss))) == (jnp.float32, True)
    assert (len(traces), int(state.rule_state.good_steps)) == (1, 3)
    assert params["w"].tolist() == [0.8125] * 4

    with live("flax.training.dynamic_scale") as flax:
        scale, traces, finite, losses = flax.DynamicScale(), [], [], []

        @jax.jit
        def their_step(scale, params):
            traces.append(1)
            return scale.value_and_grad(lambda p: p["w"].mean())(params)

        for _ in range(2):
            scale, ok, loss, _ = their_step(scale, {"w": jnp.ones(4, jnp.float16)})
            finite.append(bool(ok))
            losses.append(float(loss))
        fails(flax, len(traces) > 1 or not finite[0] or not np.isfinite(losses[0]))


@pytest.mark.parametrize("ordered", [False, True])
def test_a_print_that_raises_leaves_the_variables(ordered):
    """`jax.debug.print` runs Python code too: if its format fails, each variable has its value."""
    v = Variable(jnp.ones(1000))

    def fn():
        v.assign_add(1.0)
        jax.debug.print("{x:d}", x=v.value().sum(), ordered=ordered)

    with pytest.raises(Exception, match="Unknown format code"):
        gs.optimizers.jit(fn, [v], donate=True)()
    assert v.value().tolist() == [1] * 1000


def test_a_lowered_program_has_the_options_in_force():
    """What `lower` returns is the program of the next call, also after an option was changed."""
    w = Variable(np.ones(3))
    opt = gs.optimizers.SGD(0.5)
    opt.build([w])
    step = gs.optimizers.jit(lambda gradient: opt.apply([gradient], [w]), ([w], opt.variables))
    gradient = np.ones(3, np.float32)
    before = step.lower(gradient).as_text()
    opt.clipvalue = 0.25
    after = step.lower(gradient).as_text()
    assert before != after
    step(gradient)
    assert step.lower(gradient).as_text() == after

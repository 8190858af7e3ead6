import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable, functionalize


def test_variable_holds_what_it_was_given():
    """Value, shape, dtype, name and flags are those of the constructor; the value is a copy."""
    source = np.array([1.0, 2.0], np.float16)
    var = Variable(source, name="w", trainable=False)
    source[0] = 9
    assert (var.numpy() == [1, 2]).all()
    assert (var.shape, var.ndim, var.size, var.dtype) == ((2,), 1, 2, jnp.float16)
    assert (var.name, var.trainable, len(var)) == ("w", False, 2)
    assert "name='w'" in repr(var)


def test_arguments_are_those_of_tensorflow_and_keras():
    """`initial_value` has TensorFlow's name, and `trainable` is the second argument, as there."""
    assert float(Variable(initial_value=2.0)) == 2.0
    assert Variable(1.0).trainable
    assert not Variable(1.0, False).trainable
    with pytest.raises(TypeError, match=r"bool for trainable; got .*float16.*`dtype=`"):
        Variable(1.0, jnp.float16)
    with pytest.raises(TypeError, match="positional"):
        Variable(1.0, True, jnp.float16)


METHODS = [
    ("sum", (), {}),
    ("sum", (), {"axis": 0}),
    ("mean", (), {}),
    ("max", (), {}),
    ("min", (1,), {}),
    ("prod", (), {}),
    ("std", (), {}),
    ("var", (), {}),
    ("any", (), {}),
    ("all", (), {}),
    ("argmax", (), {}),
    ("argmin", (), {}),
    ("argsort", (), {}),
    ("astype", ("float16",), {}),
    ("clip", (0, 2), {}),
    ("conj", (), {}),
    ("cumsum", (), {}),
    ("cumprod", (), {}),
    ("diagonal", (), {}),
    ("flatten", (), {}),
    ("ravel", (), {}),
    ("repeat", (2,), {}),
    ("reshape", (4, 1), {}),
    ("round", (), {}),
    ("sort", (), {}),
    ("squeeze", (), {}),
    ("swapaxes", (0, 1), {}),
    ("take", (0,), {}),
    ("trace", (), {}),
    ("transpose", (), {}),
    ("tolist", (), {}),
    ("copy", (), {}),
    ("dot", (np.ones(2, np.float32),), {}),
]


@pytest.mark.parametrize(("name", "args", "options"), METHODS)
def test_methods_of_arrays_work(name, args, options):
    """A variable has the methods of its array, with the same results."""
    array = jnp.array([[3.0, -1.0], [0.5, 2.0]])
    var = Variable(array)
    result, expected = (getattr(x, name)(*args, **options) for x in (var, array))
    np.testing.assert_array_equal(result, expected)
    assert getattr(result, "dtype", None) == getattr(expected, "dtype", None)


def test_attributes_of_arrays_work():
    """So do `T`, `mT`, `real`, `imag`, `nbytes`, `item()` and `at`, also with a variable."""
    for array in (jnp.array([[3.0, -1.0]]), jnp.arange(24.0).reshape(2, 3, 4)):
        for name in ("T", "mT", "real", "imag", "nbytes"):
            found = getattr(Variable(array), name)
            np.testing.assert_array_equal(found, getattr(array, name))
    var = Variable([[3.0, -1.0]])
    assert Variable(3.0).item() == 3.0
    assert var.at[0, 0].set(5.0).tolist() == [[5.0, -1.0]]
    assert var.numpy().tolist() == [[3.0, -1.0]]
    assert var.dot(Variable([1.0, 2.0])).tolist() == [1.0]


def test_methods_are_differentiated():
    """The gradient of a loss that uses them is that of the array's."""
    w = Variable([1.0, 2.0])
    ((gradient, _),) = SGD().compute_gradients(lambda: (w.astype("float16") * w).sum(), [w])
    assert gradient.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "function",
    [
        jnp.sum,
        jnp.exp,
        jax.nn.relu,
        jax.lax.exp,
        lambda v: jnp.dot(jnp.ones(2), v),
        lambda v: jnp.add(v, 1),
        lambda v: jnp.where(True, v, 0),
        jax.jit(lambda x: x),
        jax.vmap(lambda x: x),
        jax.grad(jnp.sum),
        lambda v: jax.jit(lambda tree: tree["w"])({"w": v}),
    ],
)
def test_a_function_of_jax_says_to_pass_the_value(function):
    """A compiled function of JAX takes arrays only; the error names the variable and `value()`."""
    var = Variable([1.0, 2.0], name="weight")
    with pytest.raises(ValueError, match=r"'weight'.*`jnp\.sum\(weight\.value\(\)\)`"):
        function(var)


@pytest.mark.parametrize(
    "function", [jnp.asarray, jnp.array, np.asarray, jnp.zeros_like, lambda v: jnp.stack([v, v])]
)
def test_functions_of_jax_that_are_not_compiled_take_variables(function):
    """They convert a variable to its array."""
    var = Variable([1.0, 2.0])
    np.testing.assert_array_equal(function(var), function(var.value()))


def test_variable_is_never_weakly_typed():
    """A Python number becomes a strong type: a weak one would compile twice."""
    var = Variable(1.0)
    var.assign(2.0)
    assert not var.value().weak_type
    assert Variable(jnp.float32(1), dtype=jnp.float16).dtype == jnp.float16


def test_assignments():
    """`assign`, `assign_add` and `assign_sub` take numbers, arrays and variables, in our dtype."""
    var, other = Variable([1.0, 2.0]), Variable([10.0, 20.0])
    var.assign(other)
    var.assign_add(np.float64(1))
    var.assign_sub(other)
    assert (var.numpy() == [1, 1]).all()
    assert var.dtype == jnp.float32


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda v: v + 1, [3, 5]),
        (lambda v: 1 - v, [-1, -3]),
        (lambda v: v * v, [4, 16]),
        (lambda v: np.array([2.0, 2.0], np.float32) * v, [4, 8]),
        (lambda v: np.float32(2) / v, [1, 0.5]),
        (lambda v: jnp.ones(2) + v, [3, 5]),
        (lambda v: v**2, [4, 16]),
        (lambda v: 2**v, [4, 16]),
        (lambda v: v % 3, [2, 1]),
        (lambda v: v // 3, [0, 1]),
        (lambda v: -v, [-2, -4]),
        (lambda v: abs(-v), [2, 4]),
        (lambda v: v[1], 4),
        (lambda v: v[:1], [2]),
        (lambda v: v @ v, 20),
        (lambda v: v > 3, [False, True]),
        (lambda v: jnp.asarray(v), [2, 4]),
        (lambda v: jnp.stack(list(v)), [2, 4]),
    ],
)
def test_operators_act_on_the_value(operation, expected):
    """Every operator gives a `jax.Array` with the result for the value in the box."""
    result = operation(Variable([2.0, 4.0]))
    assert isinstance(result, jax.Array)
    assert (np.asarray(result) == expected).all()


def test_conversions():
    """`int`, `float`, `bool`, indexing, formatting and numpy see the value."""
    var = Variable(3.0)
    assert (int(var), float(var), bool(var), f"{var:.2f}") == (3, 3.0, True, "3.00")
    assert [10, 20, 30][Variable(1)] == 20
    array = np.asarray(var)
    array[...] = 7  # a copy
    assert float(var) == 3


def test_variable_is_a_leaf_of_every_pytree():
    """`jax.tree` sees a variable as one leaf, so states are plain lists and dictionaries."""
    var = Variable([1.0, 2.0])
    assert jax.tree.leaves({"a": [var]}) == [var]
    assert len({var, Variable([1.0, 2.0])}) == 2


def test_variable_copies_and_pickles():
    """A deep copy and a pickle hold the same value in a box of their own."""
    var = Variable([1.0, 2.0], name="w")
    for twin in (copy.deepcopy(var), pickle.loads(pickle.dumps(var))):
        twin.assign_add(1)
        assert (twin.name, twin.numpy().tolist(), var.numpy().tolist()) == ("w", [2, 3], [1, 2])


def test_variable_keeps_its_sharding():
    """A value spread over a mesh stays so through eager and compiled assignments."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    layout = NamedSharding(mesh, PartitionSpec("x", "y"))
    var = Variable(jax.device_put(np.ones((8, 4)), layout))
    var.assign(np.zeros((8, 4)))
    gs.optimizers.jit(lambda: var.assign_add(1), [var])()
    assert var.value().sharding.is_equivalent_to(layout, 2)
    assert (var.numpy() == 1).all()


def test_wrong_shape_names_the_variable_and_changes_nothing():
    """Assigning another shape is a ValueError that names the variable and both shapes."""
    var = Variable([1.0, 2.0], name="w")
    with pytest.raises(ValueError, match=r"shape \(2,\) for variable 'w'; got shape \(3,\)"):
        var.assign([1.0, 2.0, 3.0])
    assert (var.numpy() == [1, 2]).all()


def test_a_complex_value_is_refused():
    """A real variable takes no complex value, whose imaginary part would be lost."""
    var = Variable(2.0, name="w")
    for assign in (var.assign, var.assign_add, var.assign_sub):
        for value in (1j, np.complex64(1j), jnp.array(1j)):
            with pytest.raises(TypeError, match="Expected a real value for variable 'w'; got"):
                assign(value)
    assert float(var) == 2.0
    number = Variable(1j)
    number.assign_add(1.0)
    assert complex(number.numpy()) == 1 + 1j


def test_name_must_be_a_string():
    """A name that is no string is a TypeError."""
    with pytest.raises(TypeError, match="string for name; got 3"):
        Variable(1.0, name=3)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_a_traced_value_cannot_leak(transform):
    """Assigning a traced value outside of a state is a ValueError; the old value stays."""
    var = Variable(1.0, name="count")

    def leak(x):
        var.assign(x * 2)
        return x

    with pytest.raises(ValueError, match="'count' to be in the state"):
        transform(leak)(jnp.ones(3) if transform is jax.vmap else 1.0)
    assert float(var) == 1


def test_a_traced_value_cannot_leak_out_of_an_inner_transformation():
    """A variable of an outer state refuses values of a gradient inside, which would leak."""
    seen = Variable(0.0, name="seen")

    def step(x):
        def loss(x):
            seen.assign(x)
            return x**2

        return jax.grad(loss)(x)

    with pytest.raises(ValueError, match="'seen' to be in the state"):
        gs.optimizers.jit(step, [seen])(3.0)
    assert float(seen) == 0.0


def test_a_variable_cannot_be_created_inside_a_trace():
    """Creating a variable under `jit` is a ValueError that says to create it outside."""
    with pytest.raises(ValueError, match="outside of the traced function"):
        jax.jit(lambda x: Variable(x, name="inner") + 1)(1.0)


def test_functionalize_is_pure():
    """It returns what was assigned and changes nothing, also if the function raises."""
    a, b = Variable(1.0), Variable([1.0, 2.0])

    def swap(factor):
        a.assign(b[0] * factor)
        b.assign_add(a)
        return a.value()

    result, new = functionalize(swap, {"a": a, "b": b})({"a": 5.0, "b": np.array([2, 3])}, 10)
    assert (float(result), float(new["a"]), new["b"].tolist()) == (20, 20, [22, 23])
    assert (float(a), b.numpy().tolist()) == (1, [1, 2])

    def fail():
        a.assign(7.0)
        raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        functionalize(fail, [a])([0.0])
    assert float(a) == 1


def test_functional_composes_with_transformations():
    """Its result goes through `grad`, `vmap` and `scan` like any pure function."""
    w = Variable(2.0)
    pure = functionalize(lambda x: w * w * x, [w])
    grad = jax.grad(lambda w: pure([w], 3.0)[0])
    assert float(grad(jnp.float32(2))) == 12
    assert jax.vmap(grad)(jnp.arange(3.0)).tolist() == [0, 6, 12]

    double = functionalize(lambda: w.assign(w * 2), [w])
    (final,), _ = jax.lax.scan(lambda c, _: (double(c)[1], None), [w.value()], length=5)
    assert float(final) == 64


def test_functional_checks_the_values():
    """Values of another shape are a ValueError that names the variable."""
    var = Variable([1.0, 2.0], name="w")
    with pytest.raises(ValueError, match="'w'"):
        functionalize(lambda: None, [var])([np.ones(3)])


@pytest.mark.parametrize("bridge", [functionalize, gs.optimizers.jit])
def test_a_state_holds_variables_once(bridge):
    """A state with another leaf, or the same variable twice, is an error that names it."""
    var = Variable(1.0, name="w")
    with pytest.raises(TypeError, match=r"gainstage\.optimizers\.Variable objects in"):
        bridge(lambda: None, [var, 1.0])
    with pytest.raises(ValueError, match="'w' twice"):
        bridge(lambda: None, [var, {"again": var}])


def test_jit_runs_assignments_in_one_program():
    """`jit` compiles once, returns the result, and changes the variables of its state."""
    total, traces = Variable(0.0), []

    def add(x, *, twice=False):
        traces.append(x)
        total.assign_add(x * (2 if twice else 1))
        return {"half": total / 2}

    step = gs.optimizers.jit(add, [total])
    assert float(step(2.0)["half"]) == 1
    assert float(step(4.0)["half"]) == 3
    assert (float(total), len(traces)) == (6, 1)


def test_jit_refuses_a_variable_outside_of_its_state():
    """Using a variable that is not in the state is a ValueError: its value would be frozen."""
    weight, temperature = Variable(1.0), Variable(0.5, name="temperature")
    step = gs.optimizers.jit(lambda: weight * temperature, [weight])
    with pytest.raises(ValueError, match="'temperature', whose value would be frozen"):
        step()
    with pytest.raises(ValueError, match="'temperature' to be in the state"):
        gs.optimizers.jit(lambda: temperature.assign(jnp.ones(()) * 2), [weight])()
    assert float(temperature) == 0.5


def test_jit_leaves_variables_alone_when_the_function_raises():
    """An error while tracing changes no variable, donated or not."""
    var = Variable(1.0)

    def fail():
        var.assign(2.0)
        raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        gs.optimizers.jit(fail, [var], donate=True)()
    assert float(var) == 1


def test_jit_inside_jit():
    """A compiled function may call another one on variables of its own state."""
    var = Variable(1.0)
    inner = gs.optimizers.jit(lambda: var.assign(var * 3), [var])
    outer = gs.optimizers.jit(lambda: (inner(), inner()), [var])
    outer()
    assert float(var) == 9


def test_results_survive_the_next_donating_step():
    """A result that equals a variable's value is an array of its own, readable later."""
    var = Variable(np.zeros(100))

    def step():
        var.assign_add(1)
        return var.value()

    compiled = gs.optimizers.jit(step, [var], donate=True)
    results = [compiled() for _ in range(3)]
    assert [float(r[0]) for r in results] == [1, 2, 3]


def test_threads_compile_by_themselves():
    """A thread may read a variable while another one traces a program without it."""
    var, other, seen = Variable(1.0), Variable(2.0), []

    def step():
        thread = threading.Thread(target=lambda: seen.append(float(other)))
        thread.start()
        thread.join()
        return var + 1

    gs.optimizers.jit(step, [var])()
    assert seen == [2.0]


def test_a_planned_variable_has_everything_but_a_value():
    """Made of a `jax.ShapeDtypeStruct` it has shape and dtype, is refused where a value is wanted,
    and gets one by `assign`."""
    plan = Variable(jax.ShapeDtypeStruct((2, 3), jnp.float32), dtype=jnp.float16, name="w")
    assert (plan.shape, plan.dtype, plan.ndim, plan.size) == ((2, 3), jnp.float16, 2, 6)
    for use in (plan.value, plan.numpy, lambda: plan + 1, lambda: SGD(0.1).apply([1.0], [plan])):
        with pytest.raises(ValueError, match="'w'"):
            use()
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        plan.assign(jnp.ones(3))
    plan.assign(jnp.ones((2, 3)))
    assert plan.value().dtype == jnp.float16


@pytest.mark.as_users
def test_an_optimizer_can_be_built_and_compiled_for_a_plan():
    """Its slots are planned too, its scalars are there, and its step is that of the real thing."""

    def program(value):
        w = Variable(value, name="w")
        opt = LossScaleOptimizer(Adam(0.1, use_ema=True, master_weights=True))
        opt.build([w])
        step = gs.optimizers.jit(opt.apply, ([w], opt.variables), donate=True)
        names = [v.name for v in opt.variables]
        return names, opt, step.lower([jax.ShapeDtypeStruct(w.shape, w.dtype)]).compile().as_text()

    plan = jax.ShapeDtypeStruct((64, 8), jnp.float16)
    names, opt, text = program(plan)
    real_names, _, real_text = program(jnp.ones((64, 8), jnp.float16))
    assert names == real_names
    assert text.count(" fusion(") == real_text.count(" fusion(")
    assert float(opt.loss_scale) == 2.0**15
    with pytest.raises(ValueError, match="only planned"):
        opt.state()


def test_a_variable_stays_on_its_device():
    """`assign` and `load_state` of arrays from another device do not move anything."""
    here, there = (jax.device_put(jnp.ones(4), d) for d in jax.devices()[:2])
    w, other = Variable(there), Variable(here)
    one, two = SGD(0.5, momentum=0.5), SGD(0.5, momentum=0.5)
    one.apply([there], [w])
    two.apply([here], [other])
    w.assign(other)
    one.load_state(two.state())
    one.apply([there], [w])
    assert {v.value().device for v in [w, *one.variables]} == {jax.devices()[1]}


def test_a_compiled_function_does_not_freeze_a_variable_that_is_lent():
    """A `jax.jit` inside of an uncompiled function on variables is told, whatever these hold."""
    w = Variable(1.0, name="w")
    predict = jax.jit(lambda x: w * x)
    pure = functionalize(predict, [w])
    with pytest.raises(ValueError, match="'w', whose value would be frozen"):
        pure([2.0], 10.0)
    assert float(jax.jit(pure)([2.0], 10.0)[0]) == 20.0
    assert float(jax.jit(lambda x: functionalize(lambda: w * x, [w])([3.0])[0])(10.0)) == 30.0


def scaled_sgd():
    w = Variable([1.0, 2.0], name="w")
    return w, LossScaleOptimizer(SGD(0.5), initial_scale=2.0)


@pytest.mark.parametrize(
    "trace",
    [
        lambda w: jax.jit(lambda x: (w * x).sum())(1.0),
        lambda w: jax.lax.scan(lambda c, x: (c + (w * x).sum(), 0), 0.0, jnp.ones(2)),
        lambda w: jax.make_jaxpr(lambda: w.value())(),
    ],
)
def test_plain_tracing_does_not_freeze_a_variable(trace):
    """Under `jax.jit` or `lax.scan` a variable that is not bound raises: it would go stale."""
    with pytest.raises(ValueError, match="'w', whose value would be frozen"):
        trace(scaled_sgd()[0])


def test_transformations_that_do_not_compile_may_read_variables():
    """`jax.grad` and `jax.vmap` read a variable like any function that runs now."""
    w, _ = scaled_sgd()
    assert jax.vmap(lambda x: w[0] * x)(jnp.arange(3.0)).tolist() == [0, 1, 2]
    assert float(jax.grad(lambda x: (w * x).sum())(1.0)) == 3.0


def test_augmented_assignment_is_refused():
    """`w += 1` would put an array in the variable's place; the error names what to call."""
    w, _ = scaled_sgd()
    with pytest.raises(TypeError, match=r"assign_add.*'w'"):
        w += 1


def test_variables_compare_with_numbers():
    """`opt.iterations == 1` asks for the value; two variables are equal if they are one."""
    w, opt = Variable([1.0, 2.0]), SGD(0.5)
    opt.apply([jnp.ones(2)], [w])  # to 0.5 and 1.5
    assert opt.iterations == 1
    assert (w == np.array([0.5, 1.5])).tolist() == [True, True]
    assert (w != np.array([0.5, 7.0])).tolist() == [False, True]
    assert w != Variable(w)
    assert w in [Variable(w), None, w]
    assert w not in [Variable(w), None]


@pytest.mark.parametrize("keep", ["assign", "apply"])
def test_memory_of_numpy_stays_the_callers(keep):
    """A buffer that is filled anew changes neither a variable nor a step that was handed it."""
    memory = np.zeros(2**12 + 16, np.float32)
    start = (-memory.ctypes.data // 4) % 16  # where JAX could go on using it
    buffer = memory[start : start + 2**12]
    w = Variable(np.ones(2**12, np.float32))
    buffer[:] = 3.0
    if keep == "assign":
        w.assign(buffer)
        kept = w.value()
    else:
        kept = SGD()._checked([buffer], [w])[0]
    buffer[:] = 0.0
    assert kept[0] == 3


def test_another_thread_reads_the_own_value_of_a_bound_variable():
    """While one thread traces a function of a variable, another one reads the array in it."""
    var, read = Variable([1.0, 2.0], name="w"), []

    def assigns():
        var.assign(var * 2)
        thread = threading.Thread(target=lambda: read.append(var.value()))
        thread.start()
        thread.join()
        return var.value()

    np.testing.assert_array_equal(gs.optimizers.jit(assigns, [var])(), [2.0, 4.0])
    np.testing.assert_array_equal(read[-1], [1.0, 2.0])
    np.testing.assert_array_equal(var.value(), [2.0, 4.0])

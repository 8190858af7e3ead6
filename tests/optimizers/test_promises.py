"""What every optimizer promises, whatever its rule: each of the table meets each promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs

import grid
from table import OPTIMIZERS

SHAPES = [(4, 3), (5,), ()]
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
WITH_OPTIONS = {"amsgrad": "all", "nesterov": "overwrite"}  # rules of the grid, and constraints


def made(name, dtype=np.float32, **options):
    """Variables, and a wrapped optimizer for them."""
    if name in WITH_OPTIONS:
        return grid.make(name, WITH_OPTIONS[name], dtype, initial_scale=8.0, **options)
    rng = np.random.default_rng(1)
    variables = [
        gs.optimizers.Variable(rng.normal(size=s), dtype=dtype, name=f"v{i}")
        for i, s in enumerate(SHAPES)
    ]
    opt = gs.optimizers.LossScaleOptimizer(OPTIMIZERS[name](**options), initial_scale=8.0)
    opt.build(variables)
    return variables, opt


@functools.cache
def first(name):
    """An optimizer that several tests step, so that it is compiled once, and its first values."""
    variables, opt = made(name)
    return variables, opt, [v.numpy() for v in [*variables, *opt.variables]]


def anew(name):
    """The same with its first values."""
    variables, opt, values = first(name)
    for variable, value in zip([*variables, *opt.variables], values, strict=True):
        variable.assign(value)
    return variables, opt


def gradients(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [np.asarray(8 * rng.normal(size=s), dtype) for s in SHAPES]


def bits(*trees):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


def arrays(*groups):
    return [[v.value() for v in group] for group in groups]


def with_an_overflow():
    """Five gradients, the third of which is infinite."""
    return [[g * np.float32(np.inf if i == 2 else 1) for g in gradients(i)] for i in range(5)]


def often(*names):
    """Every optimizer, and two with options; those that are not named are thorough."""
    return [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in names))
        for name in [*OPTIMIZERS, *WITH_OPTIONS]
    ]


@pytest.mark.as_users
@pytest.mark.parametrize("name", often("adam", "adagrad", "optax", "amsgrad"))
def test_pure_and_compiled_steps_agree(name):
    """A jitted `stateless_apply` that donates is `apply` bit for bit, a skipped step included."""
    variables, opt = anew(name)
    weights, state = jax.tree.map(jnp.copy, arrays(variables, opt.variables))
    # Without donation XLA rounds a step of Adagrad otherwise, by the last bit.
    step = jax.jit(lambda w, s, g: opt.stateless_apply(s, g, w), donate_argnums=(0, 1))
    for grads in with_an_overflow():
        weights, state = step(weights, state, grads)
        opt.apply(grads)
    assert bits(weights, state) == bits(*arrays(variables, opt.variables))


# Asked for in pytorch#97415 (fused and not).
@pytest.mark.parametrize("name", often(*OPTIMIZERS, "amsgrad"))
def test_compiled_and_uncompiled_steps_agree(name):
    """Within rounding, a skipped step included."""
    variables, opt = anew(name)
    others, uncompiled = made(name)
    uncompiled.jit_compile = False
    for grads in with_an_overflow():
        opt.apply(grads)
        uncompiled.apply(grads)
    for one, other in zip(variables, others, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.as_users
@every_optimizer
def test_a_skipped_step_changes_the_scale_alone(name):
    """After a non-finite gradient all else is bit for bit as it was, and training goes on."""
    variables, opt = anew(name)
    opt.apply(gradients(0))
    before = bits(*arrays(variables, opt.inner_optimizer.variables))
    for bad, scale in ((np.nan, 4.0), (np.inf, 2.0)):
        grads = gradients(1)
        grads[1][2] = bad
        opt.apply(grads)
        assert bits(*arrays(variables, opt.inner_optimizer.variables)) == before
        assert (float(opt.loss_scale), int(opt.iterations)) == (scale, 1)
    opt.apply(gradients(2))
    assert int(opt.iterations) == 2
    assert bits(*arrays(variables)) != before[: len(variables)]


@pytest.mark.as_users
@every_optimizer
def test_a_run_goes_on_from_its_state(name):
    """One made alike that loads `state`, or `save_own_variables`, takes the same steps."""
    variables, opt = anew(name)
    opt.apply(gradients(0))
    (others, other), saved = made(name), {}
    opt.save_own_variables(saved)
    state, weights = opt.state(), [v.numpy() for v in variables]
    opt.apply(gradients(1))
    for load, stored in ((other.load_state, state), (other.load_own_variables, saved)):
        for variable, value in zip(others, weights, strict=True):
            variable.assign(value)
        load(stored)
        other.apply(gradients(1))
        assert bits(*arrays(others, other.variables)) == bits(*arrays(variables, opt.variables))


@pytest.mark.as_users
@every_optimizer
@pytest.mark.filterwarnings("ignore:No gradient for")
def test_a_variable_without_gradient_is_left_alone(name):
    """Where a gradient is None the variable and its slots stay as they were, bit for bit."""
    variables, opt = anew(name)
    opt.apply(gradients(0))
    slots = [v for v in opt.variables if v.shape == variables[1].shape]
    assert slots
    own = [variables[1], *slots]
    before, first = bits(*arrays(own)), variables[0].numpy()
    one, _, other = gradients(1)
    opt.apply([one, None, other])
    assert bits(*arrays(own)) == before
    assert (variables[0].numpy() != first).all()


@every_optimizer
def test_float16_variables_are_float32_ones_rounded(name):
    """The step is taken in float32 and rounded once; slots are float32."""
    variables, opt = made(name, np.float16)
    others, exact = anew(name)
    for variable, other in zip(variables, others, strict=True):
        other.assign(variable.numpy().astype(np.float32))
    grads = gradients(0, np.float16)
    opt.apply(grads)
    exact.apply([g.astype(np.float32) for g in grads])
    for half, full in zip(variables, others, strict=True):
        spacing = np.spacing(np.abs(half.numpy())).astype(np.float32)
        assert (np.abs(half.numpy() - full.numpy()) <= spacing / 2 + 1e-6).all()
    assert {v.dtype for v in opt.variables if v.size > 1} == {np.dtype(np.float32)}

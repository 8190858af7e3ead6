"""Promises that hold for every optimizer and option."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gainstage as gs

from grid import GRID, OPTIMIZERS, OPTIONS, RATE, make, random_gradients, values

SCALES = {
    "dynamic": {"initial_scale": 8.0},
    "not dynamic": {"dynamic": False, "initial_scale": 8.0},
    "fixed rule": {"loss_scale": gs.FixedLossScale(8.0)},
    "factor": {},
}
CASES = [  # each is compiled, so not every pair
    ("dynamic", np.float32),
    ("fixed rule", np.float16),
    ("factor", np.float32),
    ("dynamic", np.float16),
    ("not dynamic", np.float32),
]


def same_bytes(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return [np.asarray(x).tobytes() for x in a] == [np.asarray(x).tobytes() for x in b]


@functools.cache
def everything(kind, dtype):
    """An optimizer with all options at once, its compiled pure step, and its first values."""
    variables, opt = make("amsgrad", "all", dtype, **SCALES[kind])
    if kind == "factor":
        opt.loss_scale_factor = 8.0
    return variables, opt, jax.jit(opt.stateless_apply), values(variables, opt.variables)


def skips(cases):
    return given(
        case=st.sampled_from(cases),
        seed=st.integers(0, 2**16),
        leaf=st.integers(0, 2),
        bad=st.sampled_from([np.nan, np.inf, -np.inf]),
        steps_before=st.integers(0, 3),
    )


def check_skip(case, seed, leaf, bad, steps_before):
    """Takes some steps and then a bad one; compares everything before and after it."""
    kind, dtype = case
    variables, opt, step, (weights, state) = everything(kind, dtype)
    rng = np.random.default_rng(seed)
    for _ in range(steps_before):
        weights, state = step(state, random_gradients(rng, 8.0, dtype), weights)
    delicate = np.array([-0.0, np.finfo(dtype).smallest_subnormal, 1, 2, 3], dtype)
    weights = [weights[0], delicate, weights[2]]
    grads = random_gradients(rng, 8.0, dtype)
    grads[leaf].reshape(-1)[rng.integers(grads[leaf].size)] = bad

    for variable, value in zip([*variables, *opt.variables], [*weights, *state], strict=True):
        variable.assign(value)
    opt.apply(grads, variables)
    moved = 2 if kind == "dynamic" else 0
    for after in (values(variables, opt.variables), step(state, grads, weights)):
        assert same_bytes((after[0], after[1][moved:]), (weights, state[moved:]))
        if moved:
            assert (int(after[1][0]), float(after[1][1])) == (0, float(state[1]) / 2)


@pytest.mark.as_users
@settings(deadline=None, max_examples=60, derandomize=True)
@skips(CASES[:2])
def test_a_skipped_step_changes_nothing_but_the_scale(case, seed, leaf, bad, steps_before):
    """Pure or not, with a dynamic or a fixed scale, all else stays bit for bit as it was."""
    check_skip(case, seed, leaf, bad, steps_before)


@pytest.mark.thorough
@pytest.mark.as_users
@settings(deadline=None, max_examples=60, derandomize=True)
@skips(CASES[2:])
def test_other_skipped_steps_change_nothing_but_the_scale(case, seed, leaf, bad, steps_before):
    """The same with a factor, with a dynamic scale and float16, and with none that is dynamic."""
    check_skip(case, seed, leaf, bad, steps_before)


@pytest.mark.slow
@pytest.mark.as_users
@settings(deadline=None, max_examples=2000)
@skips(CASES)
def test_many_skipped_steps_change_nothing_but_the_scale(case, seed, leaf, bad, steps_before):
    """The same 2,000 times, with other numbers in each run."""
    check_skip(case, seed, leaf, bad, steps_before)


def some():
    """Both rules with all of their slots and all options at once, and with both other clips."""
    for optimizer, option in GRID:
        is_adam = optimizer == "adam"
        often = option == "all" and optimizer in ("nesterov", "amsgrad")
        often = often or (is_adam and option in ("clipnorm", "clipvalue"))
        seldom = is_adam or option in ("plain", "all")
        seldom = pytest.mark.thorough if seldom else pytest.mark.slow
        yield pytest.param(optimizer, option, marks=[] if often else [seldom])


def after_four_steps(variables, opt, scales):
    """For each scale, the weights after four steps and what else there is to an optimizer."""
    step = jax.jit(opt.stateless_apply)
    for scale in scales:
        rng = np.random.default_rng(2)
        weights, state = values(variables, opt.variables)
        state[1] = jnp.float32(scale)
        for _ in range(4):
            weights, state = step(state, random_gradients(rng, scale), weights)
        yield weights, state[2:]


# Asked for in Lightning#9330 (clipping).
@pytest.mark.as_users
@pytest.mark.parametrize(("optimizer", "option"), list(some()))
def test_powers_of_two_change_nothing(optimizer, option):
    """With a power-of-two scale a step is bit for bit that of scale 1."""
    made = make(optimizer, option, initial_scale=1.0)
    first, *others = after_four_steps(*made, (1.0, 2.0**-20, 2.0**15, 2.0**100))
    assert all(same_bytes(other, first) for other in others)


@pytest.mark.parametrize(("optimizer", "option"), list(some()))
def test_a_scaled_step_is_close_to_an_unscaled_one(optimizer, option):
    """With scale 1, and so with every power of two, only by rounding it is another."""
    ((weights, _),) = after_four_steps(*make(optimizer, option, initial_scale=1.0), [1.0])
    variables, plain = make(optimizer, option)
    rng = np.random.default_rng(2)
    for _ in range(4):
        plain.apply(random_gradients(rng), variables)
    for ours, theirs in zip(weights, variables, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-6)


# What is in "all" is tested alone once more.
ONCE_MORE = {"decay", "global_clipnorm", "ema", "overwrite", "accumulation"}
WRAPPED = [
    pytest.param(option, marks=[pytest.mark.thorough] * (option in ONCE_MORE))
    for option in [*OPTIONS, "factor"]
    if option != "plain"
]


# Asked for in keras#17225 (use_ema).
@pytest.mark.as_users
@pytest.mark.parametrize("option", WRAPPED)
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("momentum", marks=pytest.mark.slow)])
def test_wrapper_options_are_inner_options(optimizer, option):
    """The same options on the wrapper give the same bits, skipped step included, and stand in the
    configuration where they were given."""
    cls, arguments = OPTIMIZERS[optimizer]
    options = OPTIONS.get(option, {"loss_scale_factor": 4.0})
    runs = []
    for inner, outer in [(options, {}), ({}, options)]:
        variables, _ = make(optimizer)
        opt = gs.optimizers.LossScaleOptimizer(cls(RATE, **arguments, **inner), 8.0, 3, **outer)
        assert float(opt.loss_scale) == (32.0 if option == "factor" else 8.0)
        rng = np.random.default_rng(5)
        for i in range(6):
            opt.apply(random_gradients(rng, 8.0 if i != 3 else np.nan), variables)
        opt.finalize_variable_values(variables)
        runs.append(values(variables, opt.variables))
        config = opt.get_config()
        for name in options:
            places = [name in config, config["inner_optimizer"]["config"].get(name) is not None]
            assert places == [bool(outer), bool(inner)]
    assert same_bytes(*runs)


def test_vmap_and_scan():
    """A pure step maps over learning rates and runs in a scan, as a Python loop would."""
    variables, opt = make("momentum", "plain", initial_scale=2.0)
    weights, state = values(variables, opt.variables)
    rng = np.random.default_rng(8)
    steps = [random_gradients(rng) for _ in range(5)]

    def start(rate):
        return weights, [*state[:3], rate, *state[4:]]

    def train(rate):
        def step(carry, grads):
            return opt.stateless_apply(carry[1], grads, carry[0]), None

        return jax.lax.scan(step, start(rate), jax.tree.map(lambda *g: jnp.stack(g), *steps))[0]

    rates = jnp.float32([0.1, 0.01])
    many = jax.jit(jax.vmap(train))(rates)
    one = jax.jit(opt.stateless_apply)
    for lane, rate in enumerate(rates):
        w, s = start(rate)
        for grads in steps:
            w, s = one(s, grads, w)
        for a, b in zip(jax.tree.leaves(many), jax.tree.leaves((w, s)), strict=True):
            np.testing.assert_allclose(a[lane], b, rtol=1e-6, atol=1e-7)

"""Promises that hold for every optimizer and option."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gainstage as gs

from oracles import Oracle

pytestmark = pytest.mark.as_users

OPTIMIZERS = {
    "sgd": (gs.SGD, {}),
    "momentum": (gs.SGD, {"momentum": 0.9}),
    "nesterov": (gs.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (gs.Adam, {}),
    "amsgrad": (gs.Adam, {"amsgrad": True}),
}
RATE = 1 / 64
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.3},
    "global_clipnorm": {"global_clipnorm": 0.7},
    "ema": {"use_ema": True, "ema_momentum": 0.8},
    "overwrite": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "all": {
        "weight_decay": 0.1,
        "global_clipnorm": 0.7,
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": 3,
        "gradient_accumulation_steps": 2,
    },
}
GRID = list(itertools.product(OPTIMIZERS, OPTIONS))
SHAPES = [(4, 3), (5,), ()]


SCALES = {
    "dynamic": {"initial_scale": 8.0},
    "not dynamic": {"dynamic": False, "initial_scale": 8.0},
    "fixed rule": {"rule": gs.FixedLossScale(8.0)},
    "factor": {},
}
CASES = [  # each is compiled, so not every pair
    ("dynamic", np.float32),
    ("dynamic", np.float16),
    ("not dynamic", np.float32),
    ("fixed rule", np.float16),
    ("factor", np.float32),
]


def bound(value):
    """A constraint that changes some of the initial weights."""
    return value.clip(-1, 1)


def make(optimizer, option="plain", dtype=np.float32, constraint=bound, **scale):
    """Variables, and the optimizer for them, wrapped if a scale is given."""
    cls, arguments = OPTIMIZERS[optimizer]
    rng = np.random.default_rng(1)
    variables = [
        gs.Variable(rng.normal(size=s), dtype, f"v{i}", constraint=constraint)
        for i, s in enumerate(SHAPES)
    ]
    opt = cls(RATE, **arguments, **OPTIONS[option])
    opt = gs.LossScaleOptimizer(opt, **scale) if scale else opt
    opt.build(variables)
    return variables, opt


def oracle_for(variables, optimizer, option):
    """The same in float64 numpy."""
    cls, arguments = OPTIMIZERS[optimizer]
    options = {**arguments, **OPTIONS[option], "constraint": bound}
    return Oracle([v.numpy() for v in variables], cls.__name__, RATE, **options)


def random_gradients(rng, scale=1.0, dtype=np.float32):
    return [np.array(dtype(scale) * np.asarray(rng.normal(size=s), dtype)) for s in SHAPES]


def values(*groups):
    return [[v.value() for v in group] for group in groups]


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


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**16),
    leaf=st.integers(0, 2),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
    steps_before=st.integers(0, 3),
)
def test_a_skipped_step_changes_nothing_but_the_scale(case, seed, leaf, bad, steps_before):
    """Pure or not, with a dynamic or a fixed scale, all else stays bit for bit as it was."""
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


def some():
    for optimizer, option in GRID:
        seldom = optimizer not in ("momentum", "adam") and option not in ("plain", "all")
        yield pytest.param(optimizer, option, marks=[pytest.mark.slow] if seldom else [])


# Asked for in Lightning#9330 (clipping).
@pytest.mark.parametrize(("optimizer", "option"), list(some()))
def test_powers_of_two_change_nothing(optimizer, option):
    """With a power-of-two scale a step is bit for bit that of scale 1, and close to no scaling."""
    variables, opt = make(optimizer, option, initial_scale=1.0)
    plain_variables, plain = make(optimizer, option)
    step = jax.jit(opt.stateless_apply)
    runs = {}
    for scale in (1.0, 2.0**-20, 2.0**15, 2.0**100):
        rng = np.random.default_rng(2)
        weights, state = values(variables, opt.variables)
        state[1] = jnp.float32(scale)
        for _ in range(4):
            weights, state = step(state, random_gradients(rng, scale), weights)
        runs[scale] = weights, state[2:]
    assert all(same_bytes(run, runs[1.0]) for run in runs.values())

    rng = np.random.default_rng(2)
    for _ in range(4):
        plain.apply(random_gradients(rng), plain_variables)
    for ours, theirs in zip(runs[1.0][0], plain_variables, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "option"), GRID)
def test_ten_steps_are_those_of_the_formulas(optimizer, option):
    """Every optimizer with every option follows float64 numpy, through scale and skipped steps."""
    variables, opt = make(optimizer, option, initial_scale=4.0, dynamic_growth_steps=3)
    oracle = oracle_for(variables, optimizer, option)
    rng = np.random.default_rng(3)
    for i in range(12):
        grads = random_gradients(rng)
        scaled = [np.float32(opt.loss_scale) * g for g in grads]
        if i in (4, 9):
            scaled[1][2] = np.inf
        else:
            oracle.step(grads)
        opt.apply(scaled, variables)
        for variable, expected in zip(variables, oracle.w, strict=True):
            error = np.abs(variable.numpy() - expected)
            assert (error <= 1e-4 * np.abs(expected) + 2e-6).all()


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("optimizer", ["momentum", "amsgrad"])
def test_float64_variables(optimizer, option):
    """Float64 weights follow the formulas to float64 rounding."""
    with jax.enable_x64(True):
        variables, opt = make(optimizer, option, np.float64, initial_scale=8.0)
        oracle = oracle_for(variables, optimizer, option)
        rng = np.random.default_rng(3)
        for _ in range(6):
            grads = random_gradients(rng, dtype=np.float64)
            oracle.step(grads)
            opt.apply([8 * g for g in grads], variables)
        for variable, expected in zip(variables, oracle.w, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-14)


# Asked for in pytorch#97415 (fused and not).
@pytest.mark.parametrize(("optimizer", "option"), [("adam", "all"), ("nesterov", "overwrite")])
def test_pure_compiled_and_uncompiled_steps_agree(optimizer, option):
    """`apply` is `stateless_apply` bit for bit, and the uncompiled step within rounding."""
    rng = np.random.default_rng(4)
    runs = [make(optimizer, option, initial_scale=8.0) for _ in range(2)]
    (pure_variables, pure), (variables, opt) = runs
    eager_variables, eager = make(optimizer, option, initial_scale=8.0, jit_compile=False)
    weights, state = values(pure_variables, pure.variables)
    step = jax.jit(pure.stateless_apply)
    for i in range(5):
        grads = random_gradients(rng, 8.0 if i != 2 else np.inf)
        weights, state = step(state, grads, weights)
        opt.apply(grads, variables)
        eager.apply(grads, eager_variables)
    assert same_bytes((weights, state), values(variables, opt.variables))
    for a, b in zip(variables, eager_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "plain"] + ["factor"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_wrapper_options_are_inner_options(optimizer, option):
    """The same options on the wrapper give the same bits, skipped step included."""
    cls, arguments = OPTIMIZERS[optimizer]
    options = OPTIONS.get(option, {"loss_scale_factor": 4.0})
    runs = []
    for inner, outer in [(options, {}), ({}, options)]:
        variables, _ = make(optimizer)
        opt = gs.LossScaleOptimizer(cls(RATE, **arguments, **inner), 8.0, 3, **outer)
        assert float(opt.loss_scale) == (32.0 if option == "factor" else 8.0)
        rng = np.random.default_rng(5)
        for i in range(6):
            opt.apply(random_gradients(rng, 8.0 if i != 3 else np.nan), variables)
        opt.finalize_variable_values(variables)
        runs.append(values(variables, opt.variables))
    assert same_bytes(*runs)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_float16_variables(optimizer, option):
    """A float16 weight is the float64 formula's, rounded once; every slot is float32."""
    variables, opt = make(optimizer, option, np.float16, initial_scale=64.0)
    oracle = oracle_for(variables, optimizer, option)
    rng = np.random.default_rng(6)
    for i in range(6):
        grads = random_gradients(rng, np.float32(opt.loss_scale), np.float16)
        if i == 3:
            grads[0][0, 0] = np.inf
        else:
            oracle.step([g.astype(np.float64) / float(opt.loss_scale) for g in grads])
        opt.apply(grads, variables)
        for variable, expected in zip(variables, oracle.w, strict=True):
            half_a_step = np.spacing(np.abs(variable.numpy())).astype(np.float64) / 2
            assert (np.abs(variable.numpy() - expected) <= half_a_step + 1e-6).all()
        oracle.w = [v.numpy().astype(np.float64) for v in variables]
    assert {v.dtype for v in variables} == {np.dtype(np.float16)}
    assert {v.dtype for v in opt.variables if v.size > 1} == {np.dtype(np.float32)}


TWINS = {
    "sgd": lambda: (gs.SGD(0.1), optax.sgd(0.1)),
    "momentum": lambda: (gs.SGD(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    "nesterov": lambda: (gs.SGD(0.1, 0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True)),
    # Keras adds epsilon outside of the bias correction, optax inside: a tiny one is the same.
    "adam": lambda: (gs.Adam(0.1, epsilon=1e-16), optax.adam(0.1, eps=1e-16)),
    "clip": lambda: (
        gs.SGD(0.1, global_clipnorm=0.5),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins_in_optax(name):
    """Twenty steps agree with the same optimizer in optax."""
    ours, theirs = TWINS[name]()
    variables, _ = make("sgd", constraint=None)
    params = [v.value() for v in variables]
    state = theirs.init(params)
    rng = np.random.default_rng(7)
    for _ in range(20):
        grads = random_gradients(rng)
        ours.apply(grads, variables)
        updates, state = theirs.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for a, b in zip(variables, params, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=2e-6)


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
    many = jax.vmap(train)(rates)
    for lane, rate in enumerate(rates):
        w, s = start(rate)
        for grads in steps:
            w, s = opt.stateless_apply(s, grads, w)
        for a, b in zip(jax.tree.leaves(many), jax.tree.leaves((w, s)), strict=True):
            np.testing.assert_allclose(a[lane], b, rtol=1e-6, atol=1e-7)

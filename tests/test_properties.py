"""Promises that hold for every optimizer and option."""

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


def make(optimizer, option="plain", dtype=np.float32, **scale):
    """Variables, and the optimizer for them, wrapped if a scale is given."""
    cls, arguments = OPTIMIZERS[optimizer]
    rng = np.random.default_rng(1)
    variables = [
        gs.Variable(rng.normal(size=s), dtype, f"v{i}", constraint=lambda v: jnp.clip(v, -3, 3))
        for i, s in enumerate(SHAPES)
    ]
    opt = cls(RATE, **arguments, **OPTIONS[option])
    opt = gs.LossScaleOptimizer(opt, **scale) if scale else opt
    opt.build(variables)
    return variables, opt


def random_gradients(rng, scale=1.0):
    return [np.array(np.float32(scale) * np.float32(rng.normal(size=s))) for s in SHAPES]


def values(*groups):
    return [[v.value() for v in group] for group in groups]


def same_bytes(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return [np.asarray(x).tobytes() for x in a] == [np.asarray(x).tobytes() for x in b]


@pytest.fixture(scope="module")
def everything():
    """Steps with all options at once, for float32 and float16 variables, compiled once each."""
    made = {}
    for dtype in (np.float32, np.float16):
        variables, opt = make("amsgrad", "all", dtype, initial_scale=8.0)
        made[dtype] = variables, opt, jax.jit(opt.stateless_apply)
    return made


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    dtype=st.sampled_from([np.float32, np.float16]),
    seed=st.integers(0, 2**16),
    leaf=st.integers(0, 2),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
    steps_before=st.integers(0, 3),
)
def test_a_skipped_step_changes_nothing_but_the_scale(
    everything, dtype, seed, leaf, bad, steps_before
):
    """Weights, slots, averages, accumulators and iterations stay bit for bit as they were."""
    variables, opt, step = everything[dtype]
    rng = np.random.default_rng(seed)
    weights, state = values(variables, opt.variables)
    for _ in range(steps_before):
        weights, state = step(state, random_gradients(rng, 8.0), weights)
    grads = random_gradients(rng)
    grads[leaf].reshape(-1)[rng.integers(grads[leaf].size)] = bad
    new_weights, new_state = step(state, grads, weights)
    assert same_bytes(new_weights, weights)
    assert same_bytes(new_state[2:], state[2:])
    assert (int(new_state[0]), float(new_state[1])) == (0, float(state[1]) / 2)


@pytest.mark.parametrize(("optimizer", "option"), GRID)
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
    for variable in variables:
        variable.constraint = None
    cls, arguments = OPTIMIZERS[optimizer]
    oracle = Oracle(
        [v.numpy() for v in variables], cls.__name__, RATE, **arguments, **OPTIONS[option]
    )
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


@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "plain"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_wrapper_options_are_inner_options(optimizer, option):
    """The same options on the wrapper give the same bits, skipped step included."""
    cls, arguments = OPTIMIZERS[optimizer]
    runs = []
    for inner, outer in [(OPTIONS[option], {}), ({}, OPTIONS[option])]:
        variables, _ = make(optimizer)
        opt = gs.LossScaleOptimizer(cls(RATE, **arguments, **inner), 8.0, 3, **outer)
        rng = np.random.default_rng(5)
        for i in range(6):
            opt.apply(random_gradients(rng, 8.0 if i != 3 else np.nan), variables)
        runs.append(values(variables, opt.variables))
    assert same_bytes(*runs)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_float16_variables(optimizer, option):
    """Float16 weights follow the formulas to float16 rounding, with every slot in float32."""
    variables, opt = make(optimizer, option, np.float16, initial_scale=64.0)
    for variable in variables:
        variable.constraint = None
    cls, arguments = OPTIMIZERS[optimizer]
    oracle = Oracle(
        [v.numpy() for v in variables], cls.__name__, RATE, **arguments, **OPTIONS[option]
    )
    rng = np.random.default_rng(6)
    for i in range(6):
        grads = [g.astype(np.float16) for g in random_gradients(rng)]
        scaled = [g * np.float16(64) for g in grads]
        if i == 3:
            scaled[0][0, 0] = np.inf
            opt.apply(scaled, variables)
            opt.set_weights([opt.step_counter, 64.0, *opt.variables[2:]])
            continue
        oracle.step([g.astype(np.float64) for g in grads])
        opt.apply(scaled, variables)
        assert {v.dtype for v in variables} == {np.dtype(np.float16)}
        for variable, expected in zip(variables, oracle.w, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=5e-3, atol=5e-3)
    assert {v.dtype for v in opt.variables if v.ndim} == {np.dtype(np.float32)}


TWINS = [
    (gs.SGD(0.1), optax.sgd(0.1)),
    (gs.SGD(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    (gs.SGD(0.1, momentum=0.9, nesterov=True), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    # Keras adds epsilon outside of the bias correction, optax inside: a tiny one is the same.
    (gs.Adam(0.1, epsilon=1e-16), optax.adam(0.1, eps=1e-16)),
    (
        gs.SGD(0.1, global_clipnorm=0.5),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), TWINS, ids=range(len(TWINS)))
def test_twins_in_optax(ours, theirs):
    """Twenty steps agree with the same optimizer in optax."""
    rng = np.random.default_rng(7)
    variables, _ = make("sgd")
    params = [v.value() for v in variables]
    state = theirs.init(params)
    for variable in variables:
        variable.constraint = None
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
    grads = [jnp.stack(g) for g in zip(*(random_gradients(np.random.default_rng(i)) for i in range(5)), strict=True)]  # fmt: skip  # noqa: E501

    def train(rate):
        def step(carry, grads):
            return opt.stateless_apply(carry[1], grads, carry[0]), None

        start = (weights, [*state[:3], rate, *state[4:]])
        return jax.lax.scan(step, start, grads)[0]

    many = jax.vmap(train)(jnp.float32([0.1, 0.01]))
    for lane, rate in enumerate((0.1, 0.01)):
        w, s = weights, [*state[:3], jnp.float32(rate), *state[4:]]
        for i in range(5):
            w, s = opt.stateless_apply(s, [g[i] for g in grads], w)
        for a, b in zip(jax.tree.leaves(many), jax.tree.leaves((w, s)), strict=True):
            np.testing.assert_allclose(a[lane], b, rtol=1e-6, atol=1e-7)

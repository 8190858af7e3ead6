"""Every optimizer with every option follows its formulas."""

import itertools

import jax
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop, from_optax

from grid import GRID, OPTIONS, make, oracle_for, random_gradients


def some():
    """Every rule without options and with all, and one rule with each; the others are thorough."""
    for optimizer, option in GRID:
        often = optimizer == "amsgrad" or option in ("plain", "all")
        yield pytest.param(optimizer, option, marks=[pytest.mark.thorough] * (not often))


@pytest.mark.parametrize(("optimizer", "option"), list(some()))
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


@pytest.mark.parametrize(
    ("optimizer", "option"),
    [
        ("momentum", "all"),
        ("amsgrad", "all"),
        pytest.param("momentum", "plain", marks=pytest.mark.thorough),
        pytest.param("amsgrad", "plain", marks=pytest.mark.thorough),
    ],
)
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


def in_float16():
    """One rule without options, with all, and with those that keep what they have added up."""
    for optimizer, option in itertools.product(["momentum", "adam"], OPTIONS):
        often = option == "all" or (
            optimizer == "adam" and option in ("plain", "ema", "accumulation")
        )
        yield pytest.param(optimizer, option, marks=[pytest.mark.thorough] * (not often))


@pytest.mark.parametrize(("optimizer", "option"), list(in_float16()))
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
    "sgd": lambda: (SGD(0.1), optax.sgd(0.1)),
    "momentum": lambda: (SGD(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    "nesterov": lambda: (SGD(0.1, 0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True)),
    # Keras adds epsilon outside of the bias correction, optax inside: a tiny one is the same.
    "adam": lambda: (Adam(0.1, epsilon=1e-16), optax.adam(0.1, eps=1e-16)),
    "clip": lambda: (
        SGD(0.1, global_clipnorm=0.5),
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    ),
    "adamw": lambda: (
        AdamW(0.1, 0.2, epsilon=1e-16),
        optax.adamw(0.1, weight_decay=0.2, eps=1e-16),
    ),
    "rmsprop": lambda: (RMSprop(0.1), optax.rmsprop(0.1, 0.9, eps=1e-7)),
    "rmsprop with momentum": lambda: (
        RMSprop(0.1, 0.9, 0.5),
        optax.rmsprop(0.1, 0.9, eps=1e-7, momentum=0.5),
    ),
    "adagrad": lambda: (Adagrad(0.1), optax.adagrad(0.1, 0.1, eps=1e-7)),
    "adadelta": lambda: (Adadelta(1.0), optax.adadelta(1.0, rho=0.95, eps=1e-7)),
    "optax": lambda: (from_optax(optax.adamw(0.1)), optax.adamw(0.1)),
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adam(0.1, epsilon=0.0),
        lambda: RMSprop(0.1, epsilon=0.0),
        lambda: Adagrad(0.1, initial_accumulator_value=0.0, epsilon=0.0),
    ],
    ids=["Adam", "RMSprop", "Adagrad"],
)
def test_a_large_gradient_counts_in_full(make):
    """Gradients of 2**40, whose squares are finite in float32, are not clipped: the steps are those
    of the same gradients divided by 2**40."""
    moved = []
    for scale in (1.0, 2.0**40):
        w, opt = gs.optimizers.Variable([0.0]), make()
        for gradient in (1.0, 2.0**-10, -0.5):
            opt.apply([np.array([gradient * scale], np.float32)], [w])
        moved.append(w.numpy())
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-5)

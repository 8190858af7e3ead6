"""What stands around `with_loss_scale`: it must see every gradient first."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_floats import SMALL

import gainstage as gs

WEIGHTS = {"a": jnp.ones(2), "b": jnp.ones(2)}
LABELS = {"a": "a", "b": "b"}


def loss_fn(w, x):
    return SMALL * ((w["a"] * x).sum() + w["b"].sum())


def scaled():
    return gs.with_loss_scale(optax.sgd(1.0), gs.DynamicLossScale(8.0))


REFUSED = {
    "clip": (lambda: optax.chain(optax.clip(1.0), scaled()), "number 2"),
    "global norm": (lambda: optax.chain(optax.clip_by_global_norm(1.0), scaled()), "number 2"),
    "zero_nans": (lambda: optax.chain(optax.zero_nans(), scaled()), "number 2"),
    "sign": (lambda: optax.chain(optax.scale_by_sign(), scaled()), "number 2"),
    "centralize": (lambda: optax.chain(optax.centralize(), scaled()), "number 2"),
    "masked clip": (
        lambda: optax.chain(optax.masked(optax.clip(1.0), {"a": True, "b": False}), scaled()),
        "number 2",
    ),
    "two before": (lambda: optax.chain(optax.identity(), optax.clip(1.0), scaled()), "number 3"),
    "chain in a chain": (
        lambda: optax.chain(optax.chain(optax.clip(1.0), scaled()), optax.scale(1.0)),
        "number 2",
    ),
    "named chain": (
        lambda: optax.named_chain(("clip", optax.clip(1.0)), ("scaled", scaled())),
        "number 2",
    ),
    "masked": (lambda: optax.masked(scaled(), {"a": True, "b": False}), "masked"),
    "multi_transform": (
        lambda: optax.multi_transform({"a": optax.sgd(1.0), "b": scaled()}, LABELS),
        "multi_transform",
    ),
    "partition": (
        lambda: optax.partition({"a": optax.sgd(1.0), "b": scaled()}, LABELS),
        "multi_transform",
    ),
    "MultiSteps": (lambda: optax.MultiSteps(scaled(), 2), r"optax\.MultiSteps\(tx, k\)"),
    "apply_if_finite": (lambda: optax.apply_if_finite(scaled(), 3), r"with_loss_scale\(tx\)"),
    "sam": (lambda: optax.contrib.sam(scaled(), optax.sgd(0.1)), r"contrib\.sam"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_hide_an_overflow_is_refused_with_the_line_to_write(name):
    """`train_step` and `value_and_grad` refuse it at their first call, before anything is done."""
    make, match = REFUSED[name]
    state = gs.TrainState.create(WEIGHTS, make())
    for call in (
        lambda: gs.train_step(loss_fn)(state, 1.0),
        lambda: gs.value_and_grad(loss_fn, state.opt_state),
        lambda: jax.jit(lambda s: gs.value_and_grad(loss_fn, s)(WEIGHTS, 1.0))(state.opt_state),
    ):
        with pytest.raises(ValueError, match=rf"(?s){match}.*gainstage\.with_loss_scale\(|{match}"):
            call()
    assert float(WEIGHTS["a"][0]) == 1.0


ALLOWED = {
    "alone": scaled,
    "first": lambda: optax.chain(scaled(), optax.scale(1.0)),
    "first in a chain in a chain": lambda: optax.chain(
        optax.chain(scaled(), optax.scale(1.0)), optax.scale(1.0)
    ),
    "first in a named chain": lambda: optax.named_chain(
        ("scaled", scaled()), ("rest", optax.scale(1.0))
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(
        lambda factor: optax.chain(scaled(), optax.scale(factor))
    )(factor=1.0),
    "around a chain": lambda: gs.with_loss_scale(
        optax.chain(optax.clip(100.0), optax.sgd(1.0)), gs.DynamicLossScale(8.0)
    ),
    "around groups": lambda: gs.with_loss_scale(
        optax.multi_transform({"a": optax.sgd(1.0), "b": optax.sgd(1.0)}, LABELS),
        gs.DynamicLossScale(8.0),
    ),
}


@pytest.mark.parametrize("bad", [np.inf, np.nan, 2.0**127], ids=["inf", "nan", "overflow"])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_sees_every_overflow(name, bad):
    """An infinite or NaN gradient, or one that only the scale makes so, changes no weight."""
    tx = ALLOWED[name]()
    state = gs.TrainState.create(WEIGHTS, tx)
    new, _ = gs.train_step(loss_fn, donate=False)(state, jnp.float32(bad))
    _, grads = gs.value_and_grad(loss_fn, state.opt_state)(WEIGHTS, jnp.float32(bad))
    updates, own = tx.update(grads, state.opt_state, WEIGHTS)
    by_bricks = gs.transforms.apply_updates(WEIGHTS, updates, own), own
    for weights, opt_state in ((new.params, new.opt_state), by_bricks):
        for key, before in WEIGHTS.items():
            np.testing.assert_array_equal(weights[key], before)
        assert float(gs.transforms.current_scale(opt_state)) == 4.0


def test_accumulation_outside_is_what_a_step_around_all_does_right():
    """The line that the error for `MultiSteps` names trains on after a NaN microbatch."""
    tx = gs.with_loss_scale(optax.MultiSteps(optax.sgd(0.5), 2), gs.DynamicLossScale(8.0))
    step, state = gs.train_step(loss_fn, donate=False), gs.TrainState.create(WEIGHTS, tx)
    for x in (1.0, np.nan, 3.0):
        state, _ = step(state, jnp.float32(x))
    assert state.params["a"].tolist() == [1.0 - 0.5 * 2.0] * 2


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: __import__("functools").partial(f, x=1.0)])
def test_a_loss_that_scales_itself_is_refused(wrap):
    """A scaled loss inside `train_step` or `value_and_grad` would scale twice."""
    loss = wrap(gs.autocast(lambda w, x=1.0: loss_fn(w, x), loss_scale=2.0**4))
    with pytest.raises(TypeError, match="without a loss_scale of its own for train_step"):
        gs.train_step(loss)
    with pytest.raises(TypeError, match="without a loss_scale of its own for value_and_grad"):
        gs.value_and_grad(loss, scaled().init(WEIGHTS))

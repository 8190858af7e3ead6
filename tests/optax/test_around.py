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


@pytest.mark.parametrize(
    "make",
    [lambda: optax.chain(optax.clip(1.0), scaled()), lambda: optax.MultiSteps(scaled(), 2)],
    ids=["clip before it", "MultiSteps around it"],
)
def test_what_can_hide_an_overflow_is_refused_in_a_compiled_function_too(make):
    """`value_and_grad` refuses it while `jax.jit` traces its state."""
    step = jax.jit(lambda state: gs.value_and_grad(loss_fn, state)(WEIGHTS, 1.0))
    with pytest.raises(ValueError, match="Expected with_loss_scale around"):
        step(make().init(WEIGHTS))


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

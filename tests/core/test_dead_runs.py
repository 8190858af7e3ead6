"""A run whose steps are all skipped says so once, without waiting for the device."""

import gc
import re
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_floats import SMALL

import gainstage as gs
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable

DEAD = "steps in a row were skipped"


def loss_fn(w, x):
    return SMALL * jnp.sum(w * x)


def trained(transformation, donate=True):
    """A function that takes one `train_step`."""
    tx = gs.with_loss_scale(optax.sgd(0.1))
    tx = tx if transformation is None else optax.chain(tx, transformation)
    state, step = gs.TrainState.create(jnp.ones(3), tx), gs.train_step(loss_fn, donate=donate)

    def take(x):
        nonlocal state
        state, _ = step(state, x)

    return take


def minimized():
    """A function that calls `minimize`."""
    w, opt = Variable(np.ones(3, np.float32)), LossScaleOptimizer(SGD(0.1))
    return lambda x: opt.minimize(lambda: loss_fn(w.value(), x), [w])


def applied(inner=SGD):
    """A function that calls `apply`."""
    w, opt = Variable(np.ones(3, np.float32)), LossScaleOptimizer(inner(0.1))
    opt.scale_loss(1.0)
    return lambda x: opt.apply([np.full(3, x, np.float32)], [w])


LOOPS = {
    "train_step": lambda: trained(None),
    "a chain": lambda: trained(optax.scale(1.0)),
    "not donated": lambda: trained(None, donate=False),
    "minimize": minimized,
    "apply": applied,
}


EACH = [
    pytest.param(loop, id=name, marks=[pytest.mark.thorough] * (name in ("a chain", "not donated")))
    for name, loop in LOOPS.items()
]


def told(take, *batches):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x in batches:
            take(x)
    return [str(w.message) for w in found if DEAD in str(w.message)]


def repeated(take, x):
    for _ in range(200):
        take(x)


@pytest.mark.parametrize("loop", EACH)
def test_a_dead_run_says_so_once(loop):
    """After 50 skipped steps in a row, one warning tells how many, and the scale; each object warns
    for itself."""
    for _ in range(2):
        (text,) = told(loop(), *[1.0] * 10, *[np.nan] * 150)
        assert text.startswith("The last 54 steps in a row were skipped")
        assert re.search(r"xray\(loss_fn, params, \*batch, scale=2\.0\*\*-?\d+\) names", text)
        assert "the loss scale is 2^" in text


@pytest.mark.parametrize("rule", ["dynamic", gs.DynamicLossScale(2.0**4, min_scale=2.0)], ids=repr)
def test_a_scale_that_fell_to_its_lowest_is_told_once(rule):
    """If each third step is skipped until the scale is at its lowest, `train_step` says so once."""
    state = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1), loss_scale=rule)
    step, lowest = gs.train_step(loss_fn), "2^0" if rule == "dynamic" else "2^1"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for n in range(300):
            state, loss = step(state, jnp.float32(np.nan if n % 3 == 2 else 0.0))
            loss.block_until_ready()
    (warning,) = (w for w in found if "lowered the loss scale to its lowest" in str(w.message))
    assert f"its lowest, {lowest}. gainstage.xray" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "rule", [gs.FixedLossScale(1.0), gs.DynamicLossScale(1.0), gs.AdaptiveLossScale()], ids=repr
)
def test_a_scale_that_cannot_fall_is_not_told(rule):
    """A scale that starts at its lowest, or that bad data does not lower, has no such warning."""
    state = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1), loss_scale=rule)
    step = gs.train_step(loss_fn)
    for n in range(200):  # a warning is an error here
        state, loss = step(state, jnp.float32(np.nan if n % 3 == 2 else 0.0))
        loss.block_until_ready()


@pytest.mark.parametrize("loop", EACH)
def test_a_run_that_goes_on_is_silent(loop):
    """Bad batches here and there, and 49 in a row, are no dead run."""
    batches = [np.inf, 1.0, 1.0] * 30 + [np.nan] * 49 + [1.0] * 80
    assert told(loop(), *batches) == []


def test_the_warning_tells_whether_the_loss_was_finite():
    """A loss that is not finite is told from a gradient that is not."""
    (bad,) = told(minimized(), *[np.nan] * 65)
    assert "The loss is not finite" in bad
    w, opt = Variable(0.0), LossScaleOptimizer(SGD(0.1))
    (good,) = told(lambda _: opt.minimize(lambda: jnp.sqrt(w.value()), [w]), *range(65))
    assert "The loss is finite" in good
    (unknown,) = told(applied(), *[np.nan] * 65)
    assert "loss is" not in unknown.replace("the loss scale is", "")


def test_it_is_a_warning_like_any_other():
    """A filter silences it; as an error it comes between two steps, and the run can go on."""
    take = trained(None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{DEAD}")
        repeated(take, np.nan)
    take = trained(None)
    with pytest.raises(UserWarning, match=DEAD):
        repeated(take, np.nan)
    for _ in range(3):
        take(1.0)


def test_it_names_the_line_of_the_user():
    """The warning points at the call of the step, not into the library."""
    take = minimized()
    with pytest.warns(UserWarning, match=DEAD) as found:
        repeated(take, np.nan)
    assert found[0].filename == __file__


def test_steps_that_the_user_skips_do_not_count():
    """`apply_if=False` is no sign of a dead run."""
    w, opt = Variable(1.0), LossScaleOptimizer(SGD(0.1))
    opt.scale_loss(1.0)
    assert told(lambda off: opt.apply([1.0], [w], apply_if=off), *[False] * 200) == []


def test_nothing_large_is_kept_alive():
    """Between two looks, the arrays of earlier steps are freed; only scalars are kept."""
    state = gs.TrainState.create(jnp.ones(1000), optax.sgd(0.1, momentum=0.9))
    step, earlier = gs.train_step(loss_fn, donate=False), []
    for _ in range(5):
        state, _ = step(state, 1.0)
        earlier += [weakref.ref(x) for x in jax.tree.leaves(state) if x.size > 1]
    del state, _
    gc.collect()
    assert [x() for x in earlier] == [None] * len(earlier)


@pytest.mark.parametrize("every", [1, 3, 64])
def test_a_state_that_is_donated_elsewhere_is_no_error(every):
    """A compiled function of the user may donate the state between two steps; the flags of the
    steps before are then gone, and the run goes on."""
    state, step = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1)), gs.train_step(loss_fn)
    own = jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)
    for n in range(200):
        state, _ = step(state, np.nan if n % 20 == 19 else 1.0)
        state = own(state) if n % every == every - 1 else state
    assert state.step == 190


def test_a_flag_that_is_not_ready_is_not_waited_for(monkeypatch):
    """Steps that the device has not finished are looked at later."""
    kind = type(jnp.ones(()))
    take, ready = minimized(), kind.is_ready
    monkeypatch.setattr(kind, "is_ready", lambda _: False)
    assert told(take, *[np.nan] * 100) == []
    monkeypatch.setattr(kind, "is_ready", ready)
    assert len(told(take, *[np.nan] * 100)) == 1

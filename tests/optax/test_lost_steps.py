"""Steps of one kind that are lost each time they come are told once; a healthy run is silent."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_floats import SMALL

import gainstage as gs

SAID = "What they should teach is lost."
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (512, 16))
Y = jnp.sin(X[:, :1] * 2) + X[:, 1:2] * X[:, 2:3]
PARAMS = {
    "up": jax.random.normal(KEYS[1], (16, 64)) / 4,
    "down": jax.random.normal(KEYS[2], (64, 1)) / 8,
}


def penalty(params, x):
    return jnp.mean((x @ params["up"] @ params["up"].T) ** 2)


def lazily_regularized(params, x, y, weight):
    """A loss with a penalty whose weight is 0 in most steps."""
    error = jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)
    return error + weight * penalty(params, x)


def lazy_batches(count=400):
    """Batches, of which each 16th has the penalty, with a large weight."""
    for n in range(count):
        i = n % 8 * 64
        yield X[i : i + 64], Y[i : i + 64], jnp.float32(0.0 if n % 16 else 3e3)


def amplified(w, x, factor=None):
    """A loss of float16 with a cotangent that is multiplied by `factor`, and divided by it."""
    h = (w * x).astype(jnp.float16)
    h = h if factor is None else h / factor.astype(jnp.float16) * factor.astype(jnp.float16)
    return jnp.mean(h.astype(jnp.float32))


def trained(fun, batches, params=None, rule="dynamic", retries=0):
    """The state, whether each step was applied, and what was said of lost steps."""
    params = jnp.ones(8) if params is None else jax.tree.map(jnp.copy, params)
    state = gs.TrainState.create(params, optax.adam(3e-3), loss_scale=rule, telemetry=True)
    step, applied = gs.train_step(fun, retries=retries), []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches:
            state, _ = step(state, *batch)
            applied.append(bool(state.applied))
    said = [warning for warning in found if SAID in str(warning.message)]
    assert all(warning.filename == __file__ for warning in said)
    return state, applied, [str(warning.message) for warning in said]


RULES = {
    "default": gs.DynamicLossScale(),
    "grows fast": gs.DynamicLossScale(increment_period=15),
    "adaptive": gs.AdaptiveLossScale(),
    "adaptive, grows fast": gs.AdaptiveLossScale(increment_period=15),
}


@pytest.mark.parametrize(
    ("rule", "retries", "lost"),
    [
        ("default", 0, 11),
        ("grows fast", 0, 25),
        ("grows fast", 8, 25),
        ("adaptive", 0, 11),
        ("adaptive, grows fast", 0, 25),
    ],
)
def test_a_lazy_penalty_that_is_lost_is_told_once(rule, retries, lost):
    """If most of the steps with a penalty overflow, one warning says how many, and what helps."""
    half = gs.autocast(lazily_regularized)
    _, applied, said = trained(half, lazy_batches(), PARAMS, RULES[rule], retries)
    assert [n for n in range(400) if not applied[n]] == [16 * n for n in range(lost)]
    (text,) = said
    found = "4 times in the last 64 steps all retries failed" if retries else "7 of the last 7"
    assert text.startswith(found)
    assert retries or "whose loss was far larger than that of the steps around them" in text
    assert "gainstage.train_step(loss_fn, retries=True)" in text


@pytest.fixture(scope="module")
def of_float32():
    """The penalty after training in float32."""

    @jax.jit
    def step(params, opt_state, *batch):
        grads = jax.grad(lazily_regularized)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    tx, params = optax.adam(3e-3), PARAMS
    opt_state = tx.init(params)
    for batch in lazy_batches():
        params, opt_state = step(params, opt_state, *batch)
    return penalty(params, X)


@pytest.mark.parametrize("rule", RULES)
def test_with_retries_no_lazy_penalty_is_lost(rule, of_float32):
    """With `retries=True` each step is applied, nothing is said, and the penalty ends as in
    float32."""
    half = gs.autocast(lazily_regularized)
    state, applied, said = trained(half, lazy_batches(), PARAMS, RULES[rule], retries=True)
    assert all(applied)
    assert said == []
    np.testing.assert_allclose(penalty(state.params, X), of_float32, rtol=0.03)


def each(distance, count=320, usual=1.0, other=2.0**12):
    """Batches with the same loss, of which some have far larger gradients inside."""
    x = jnp.ones(8)
    for n in range(count):
        yield x, jnp.float32(usual if (n + 1) % distance else other)


def test_steps_that_are_lost_at_a_regular_distance_are_told():
    """Their loss is like any other; the scale comes down a little with each of them."""
    _, applied, (text,) = trained(amplified, each(16))
    assert text.startswith("The last 8 skipped steps are at a regular distance of 16 steps, though")
    assert [n for n in range(320) if not applied[n]][:8] == [15 + 16 * n for n in range(8)]


def test_steps_whose_batch_has_another_structure_are_told():
    """A step with one more array in its batch overflows each time it comes."""
    batches = ((x, None if f == 1 else f) for x, f in each(16))
    _, applied, (text,) = trained(amplified, batches, rule=RULES["grows fast"])
    assert applied.count(False) == 20
    assert text.startswith("4 of the last 4 steps whose batch has another structure than other")


def test_steps_that_no_scale_saves_are_told_what_else_helps():
    """If retries until the step fits fail again and again, the X-ray and a local scale are
    named."""

    def fun(w, x, is_bad):
        return SMALL * jnp.sum(jnp.sqrt(w * x * (1 - is_bad)))  # of 0, its derivative is infinite

    batches = [(jnp.ones(8), jnp.float32(n % 20 == 19)) for n in range(200)]
    _, applied, (text,) = trained(fun, batches, retries=True)
    assert applied.count(False) == 10
    assert "all retries failed" in text
    assert "gainstage.xray(loss_fn, state, *batch)" in text
    assert "gainstage.transforms.locally_scaled" in text
    assert "retries=True" not in text


@pytest.mark.parametrize(
    ("rule", "retries", "advice"),
    [
        (gs.FixedLossScale(2.0**15), 0, "needs a lower loss_scale than the fixed one"),
        (gs.DynamicLossScale(hysteresis=2), 0, "a rule with hysteresis=1"),
        (gs.DynamicLossScale(hysteresis=2), True, "a rule with hysteresis=1"),
    ],
    ids=repr,
)
def test_the_advice_is_for_the_rule_of_the_run(rule, retries, advice):
    """A fixed scale must be lower, and retries need a rule that lowers its scale at once."""
    _, _, (text,) = trained(amplified, each(16), rule=rule, retries=retries)
    assert advice in text
    assert "No scale" not in text


def rare(n):
    """A loss that is a hundred times too large in some steps."""
    return 100.0 if np.random.default_rng(n).random() < 0.05 else 1.0


HEALTHY = {
    # The scale is raised above its limit after each fifth step.
    "probing often": (gs.DynamicLossScale(2.0**15, 5), lambda n: (1.0, 2.0**5)),
    "probing with hysteresis": (
        gs.DynamicLossScale(2.0**15, 15, hysteresis=2),
        lambda n: (1.0, 2.0**5),
    ),
    "probing, with one batch of eight that overflows first": (
        gs.DynamicLossScale(2.0**12, 20),
        lambda n: (1.0, 2.0**6 if n % 8 == 3 else 2.0**4),
    ),
    # The first scale is far too high, while the loss falls.
    "a first descent": (gs.DynamicLossScale(2.0**60), lambda n: (1e3 / (n + 1) ** 2, 2.0**3)),
    # Each skip of the first steps has a larger loss than any later step.
    "a loss that falls from skip to skip": (
        gs.DynamicLossScale(2.0**12, 8),
        lambda n: (2.0 ** (14 - n / 4) if n < 72 else 2.0**-4, 2.0**4),
    ),
    "a first descent of an adaptive rule": (gs.AdaptiveLossScale(2.0**60), lambda n: (1.0, 8.0)),
    "outliers that are not lost": (gs.DynamicLossScale(2.0**10, 15), lambda n: (rare(n), 2.0)),
    "outliers of which a third is lost": (
        gs.DynamicLossScale(2.0**10, 15, max_scale=2.0**12),
        lambda n: (1.0 if n % 16 else 100.0, 1.0 if n % 48 else 2.0**14),
    ),
    "bad data": (gs.AdaptiveLossScale(), lambda n: (1.0 if n % 10 else np.nan, 1.0)),
    "bad data that lower the scale": (
        gs.DynamicLossScale(),
        lambda n: (1.0 if n % 10 else np.inf, 1.0),
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_silent(name):
    """Skipped steps that cost a run nothing, or are bad data, are not told as lost."""
    rule, batch_of = HEALTHY[name]
    batches = [tuple(map(jnp.float32, batch_of(n))) for n in range(640)]
    _, applied, said = trained(amplified, batches, rule=rule)
    assert applied.count(False) >= 4
    assert said == []


def test_no_step_is_waited_for(monkeypatch):
    """Steps that the device has not finished are looked at later."""
    kind = type(jnp.ones(()))
    ready, asked = kind.is_ready, []
    state = gs.TrainState.create(jnp.ones(8), optax.sgd(0.1), loss_scale=RULES["grows fast"])
    step, batches = gs.train_step(amplified), list(each(16, 160, other=2.0**14))

    def repeated():
        nonlocal state
        for x, factor in batches:
            state, _ = step(state, x, None if factor == 1 else factor)
        jax.block_until_ready(state)

    monkeypatch.setattr(kind, "is_ready", lambda x: asked.append(x))
    repeated()
    assert asked
    monkeypatch.setattr(kind, "is_ready", ready)
    with pytest.warns(UserWarning, match=SAID):
        repeated()

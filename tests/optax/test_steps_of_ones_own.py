"""Steps of one's own: skips by another rule, by two states together, and what optax asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs

X = jax.random.normal(jax.random.key(0), (256, 64))
Y = jnp.sin(X[:, :16])
LARGEST = 3.0  # norm of a gradient


def params(seed=1):
    w, b = jax.random.normal(jax.random.key(seed), (2, 64, 64)) / 8
    return {"a": w, "b": b[:, :16]}


def loss_fn(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)


def batches(count=100):
    """Every tenth has targets that are thirty times too large."""
    for i in range(count):
        j = 32 * i % 256
        yield X[j : j + 32], Y[j : j + 32] * (30 if i % 10 == 7 else 1)


HALF = gs.autocast(loss_fn)
TX = optax.adam(optax.linear_schedule(1e-2, 1e-3, 50))


def by_norm(state, x, y):
    loss, extra, grads = state.value_and_grad(HALF)(x, y)
    small = optax.tree.norm(grads) < LARGEST
    return state.apply_gradients(grads, extra, loss=loss, apply_if=small), loss


def test_a_rule_of_ones_own_skips_as_a_select_in_plain_optax():
    """Steps whose gradient is too large are left out, weights and schedule are those of a loop in
    float32 that selects, and the scale comes down from one that is too high."""

    @jax.jit
    def plain(p, o, x, y):
        grads = jax.grad(loss_fn)(p, x, y)
        updates, new = TX.update(grads, o)
        pairs = (optax.apply_updates(p, updates), new), (p, o)
        small = optax.tree.norm(grads) < LARGEST
        return *jax.tree.map(lambda a, b: jnp.where(small, a, b), *pairs), small

    rule = gs.DynamicLossScale(2.0**20)
    state = gs.TrainState.create(params(), TX, loss_scale=rule, telemetry=True)
    p, o, step = params(), TX.init(params()), jax.jit(by_norm)
    kinds = []
    for x, y in batches():
        state, _ = step(state, x, y)
        kinds.append((bool(state.info.finite), bool(state.applied)))
        if state.info.finite:  # a step that overflows is no step
            p, o, small = plain(p, o, x, y)
            assert state.applied == small
    too_large, overflowed = kinds.count((True, False)), kinds.count((False, False))
    assert too_large >= 3
    assert 0 < overflowed < 10
    assert state.info.skipped_steps == too_large + overflowed
    assert state.step == state.info.applied_steps == kinds.count((True, True))
    assert state.loss_scale == 2.0 ** (20 - overflowed)
    off = jax.tree.map(jnp.subtract, state.params, p)
    assert optax.tree.norm(off) < 0.01 * optax.tree.norm(p)
    assert gs.lint(by_norm, state, X, Y) == []


def test_two_states_are_skipped_together():
    """A NaN in the batch of one of two states skips both, and lowers the scale of one alone."""

    @jax.jit
    def step(one, other, x, y, z):
        _, extra, grads = one.value_and_grad(HALF)(x, y)
        _, more, others = other.value_and_grad(HALF)(z, y)
        fine = jnp.isfinite(optax.tree.norm((grads, others)))
        one = one.apply_gradients(grads, extra, apply_if=fine)
        return one, other.apply_gradients(others, more, apply_if=fine)

    states = [gs.TrainState.create(params(i), TX) for i in range(2)]
    states = step(*states, X, Y, X)
    before = jax.device_get([(s.params, s.opt_state.inner, s.step) for s in states])
    states = step(*states, X.at[0].set(jnp.nan), Y, X)
    after = jax.device_get([(s.params, s.opt_state.inner, s.step) for s in states])
    for found, expected in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert [float(s.loss_scale) for s in states] == [2.0**14, 2.0**15]
    assert all(step(*states, X, Y, X)[i].applied for i in range(2))


@pytest.mark.parametrize("wrong", [1.0, jnp.ones(2, bool), "no"])
def test_a_condition_is_a_bool_scalar(wrong):
    """Anything else for `apply_if` is an error with its name."""
    state = gs.TrainState.create(params(), TX)
    with pytest.raises((TypeError, ValueError), match="Expected a bool scalar for apply_if; got"):
        state.apply_gradients(params(), apply_if=wrong)


def searched(state, x, y):
    """A line search along the way of L-BFGS."""
    loss, extra, grads = state.value_and_grad(HALF)(x, y)
    value = lambda p: HALF(p, x, y)  # noqa: E731
    return state.apply_gradients(grads, extra, loss=loss, value_fn=value), loss


@pytest.mark.parametrize("is_ours", [True, False])
def test_lbfgs_goes_as_far_as_in_float32(is_ours):
    """Thirty steps of `optax.lbfgs` in float16 end where those of plain optax in float32 end, and
    one with a NaN changes nothing."""
    tx = optax.lbfgs()

    @jax.jit
    def plain(p, o):
        loss, grads = jax.value_and_grad(loss_fn)(p, X, Y)
        value = lambda p: loss_fn(p, X, Y)  # noqa: E731
        updates, o = tx.update(grads, o, p, value=loss, grad=grads, value_fn=value)
        return optax.apply_updates(p, updates), o, loss

    p, o = params(), tx.init(params())
    state = gs.TrainState.create(params(), tx)
    step = gs.train_step(HALF) if is_ours else jax.jit(searched)
    for _ in range(30):
        p, o, expected = plain(p, o)
        state, loss = step(state, X, Y)
    assert loss == pytest.approx(float(expected), rel=0.1)
    assert loss < 0.5 * float(loss_fn(params(), X, Y))
    before = jax.device_get((state.params, state.opt_state.inner))
    state, _ = step(state, X.at[0, 0].set(jnp.nan), Y)
    assert not state.applied
    for found, old in zip(
        jax.tree.leaves((state.params, state.opt_state.inner)), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(found, old)


def test_a_line_search_keeps_small_gradients():
    """A `value_fn` whose float16 gradients would all underflow is differentiated with the loss
    scale: the first step of L-BFGS is that of float32, and there is none without a scale."""
    tiny = lambda p, x, y: 1e-9 * loss_fn(p, x, y)  # noqa: E731
    half = gs.autocast(tiny)

    def stepped(loss_fn, **options):
        zero = jax.tree.map(jnp.zeros_like, params()) | {"a": params()["a"]}
        state = gs.TrainState.create(zero, optax.lbfgs(), **options)
        state, _ = gs.train_step(loss_fn)(state, X, Y)
        return np.asarray(state.params["b"])

    exact = stepped(tiny, loss_scale=gs.FixedLossScale(1.0))
    found = stepped(half, loss_scale=gs.FixedLossScale(2.0**30))
    assert np.abs(exact).max() > 0
    np.testing.assert_allclose(found, exact, atol=0.05 * np.abs(exact).max())
    np.testing.assert_array_equal(stepped(half, loss_scale=gs.FixedLossScale(2.0**0)), 0)


def opaque_sam():
    way = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.adam(1e-2), way, sync_period=2, opaque_mode=True)


def test_sam_in_one_step_is_sam_by_hand():
    """`optax.contrib.sam` with `opaque_mode` in `train_step`, and two passes of one's own, train as
    the same two passes in float32."""

    def adversary(p, grads):
        norm = optax.tree.norm(grads)
        return jax.tree.map(lambda w, g: w + 0.05 * g / norm, p, grads)

    @jax.jit
    def plain(p, o):
        way = jax.grad(loss_fn)(p, X, Y)
        updates, o = optax.adam(1e-2).update(jax.grad(loss_fn)(adversary(p, way), X, Y), o)
        return optax.apply_updates(p, updates), o

    @jax.jit
    def by_hand(state):
        _, _, way = state.value_and_grad(HALF)(X, Y)
        there = state.replace(params=adversary(state.params, way))
        _, extra, grads = there.value_and_grad(HALF)(X, Y)
        return state.apply_gradients(grads, extra)

    p, o = params(), optax.adam(1e-2).init(params())
    own = gs.TrainState.create(params(), optax.adam(1e-2))
    ours, step = gs.TrainState.create(params(), opaque_sam()), gs.train_step(HALF)
    for _ in range(40):
        p, o = plain(p, o)
        own, (ours, _) = by_hand(own), step(ours, X, Y)
    expected = float(loss_fn(p, X, Y))
    assert expected < 0.8 * float(loss_fn(params(), X, Y))
    for state in (own, ours):
        assert float(loss_fn(state.params, X, Y)) == pytest.approx(expected, rel=0.02)
    assert gs.lint(by_hand, own) == []


ASKS = {
    "lbfgs": (optax.lbfgs, {}, "value and value_fn.*loss=loss, value_fn=lambda params: loss_fn"),
    "lbfgs with the loss": (optax.lbfgs, {"loss": 1.0}, "value_fn.*value_fn=lambda params"),
    "polyak": (optax.polyak_sgd, {}, "value for .*loss=loss"),
    "sam": (opaque_sam, {}, r"grad_fn.*state\.replace\(params=params\)\.value_and_grad\(loss_fn\)"),
}


@pytest.mark.parametrize("case", ASKS)
def test_an_optimizer_that_asks_for_more_is_given_the_line(case):
    """An update without what its transformation asks for says what to write."""
    make, given, text = ASKS[case]
    state = gs.TrainState.create(params(), make())
    with pytest.raises(TypeError, match=text):
        state.apply_gradients(params(), **given)


def test_an_error_of_a_function_that_was_given_is_its_own():
    """A mistake in `value_fn` itself is shown as it is, and not as a missing argument."""
    state = gs.TrainState.create(params(), optax.lbfgs())

    def wrong(p):
        raise ValueError("value_fn has no data today")

    with pytest.raises(ValueError, match="value_fn has no data today"):
        state.apply_gradients(params(), loss=1.0, value_fn=wrong)


def test_a_learning_rate_of_optax_is_set_in_a_state():
    """Another rate of `optax.inject_hyperparams` in a state is a new number, and no new program."""
    traces, programs = [], 0

    def traced(p, x, y):
        traces.append(1)
        return loss_fn(p, x, y)

    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
    state, step = gs.TrainState.create(params(), tx), gs.train_step(traced)
    for rate in (0.0, 0.5, 0.25):
        opt_state = optax.tree.set(state.opt_state, learning_rate=jnp.float32(rate))
        state = state.replace(opt_state=opt_state)
        before = np.asarray(state.params["b"])
        grads = np.asarray(jax.grad(loss_fn)(state.params, X, Y)["b"])
        state, _ = step(state, X, Y)
        np.testing.assert_allclose(state.params["b"], before - rate * grads, atol=1e-6)
        programs = programs or len(traces)  # of the first step
    assert len(traces) == programs

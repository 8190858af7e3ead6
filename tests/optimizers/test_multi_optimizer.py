"""Several optimizers for one loss: `MultiOptimizer`, with one scale and one skip decision."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import AdamW, MultiOptimizer, from_optax

RULE = gs.DynamicLossScale(2.0**10, 20, min_scale=1.0)


def noise(step):
    return np.random.default_rng(step).normal(size=(2, 8)).astype(np.float32)


def loss_of(body, head, x):
    """Of a small model whose gradients are float16, and overflow when the scale is too high."""
    half = ((body * x[0] - head + x[1]) / 8).astype(jnp.float16)
    return (half * half).sum()


def by_multi_transform(steps):
    """The weights, the scale and the number of skipped steps of the same run in optax."""
    labels = {"body": "adam", "head": "sgd"}
    groups = {"adam": optax.adam(0.01, eps=0.0), "sgd": optax.sgd(0.05, momentum=0.9)}
    tx = gs.loss_scaled(optax.multi_transform(groups, labels), RULE)
    params = {"body": jnp.ones(8), "head": jnp.ones(8)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        _, grads = gs.value_and_grad(lambda p: loss_of(p["body"], p["head"], x), state)(params)
        updates, state = tx.update(grads, state, params)
        return gs.apply_updates(params, updates, state), state

    for i in range(steps):
        params, state = step(params, state, noise(i))
        yield params["body"], params["head"], gs.loss_scale(state), gs.step_was_applied(state)


def by_multi_optimizer(steps, of_optax):
    body, head = gs.Variable(jnp.ones(8)), gs.Variable(jnp.ones(8))
    pairs = [
        (gs.optimizers.Adam(0.01, epsilon=0.0), [body]),
        (gs.optimizers.SGD(0.05, momentum=0.9), [head]),
    ]
    if of_optax:
        pairs[0] = (from_optax(optax.adam(0.01, eps=0.0)), [body])
    inner = MultiOptimizer(pairs)
    opt = gs.LossScaleOptimizer(inner, rule=RULE, telemetry=True)
    opt.build([head, body])

    def step(x):
        opt.minimize(lambda: loss_of(body.value(), head.value(), x), [body, head])
        return gs.step_was_applied(opt)

    step = gs.jit(step, [body, head, opt.variables], donate=True)
    for i in range(steps):
        applied = step(noise(i))
        yield body.numpy(), head.numpy(), opt.loss_scale, applied
    assert int(pairs[1][0].iterations) == int(pairs[0][0].iterations) == int(opt.iterations)


@pytest.mark.parametrize("of_optax", [False, True])
def test_two_optimizers_are_one_multi_transform(of_optax):
    """Over 1,000 steps with overflows Adam and SGD on one loss skip the steps that one
    `optax.multi_transform` under one scale skips, and stay within rounding of its weights."""
    skipped = 0
    runs = zip(by_multi_transform(1000), by_multi_optimizer(1000, of_optax), strict=True)
    for (*theirs, scale, applied), (*ours, our_scale, our_applied) in runs:
        assert (float(scale), bool(applied)) == (float(our_scale), bool(our_applied))
        skipped += not applied
        for one, other in zip(theirs, ours, strict=True):
            # A weight off by its last bit can round a float16 gradient to its neighbour, which
            # moves a weight by 2**-11 of a learning rate of 0.05.
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)
    assert skipped >= 20


def two(**options):
    a, b = gs.Variable([1.0, 2.0], name="a"), gs.Variable(3.0, name="b")
    parts = [AdamW(0.1, weight_decay=0.5), gs.optimizers.SGD(0.5, momentum=0.9)]
    opt = gs.LossScaleOptimizer(MultiOptimizer([(parts[0], [a]), (parts[1], [b])]), **options)
    return a, b, parts, opt


@pytest.mark.as_users
@pytest.mark.parametrize("which", [0, 1])
def test_if_one_overflows_none_takes_the_step(which):
    """An overflow of either skips both, bit for bit, and lowers the scale once."""
    a, b, parts, opt = two(initial_scale=8.0)
    grads = [jnp.ones(2), jnp.ones(())]
    opt.apply(grads, [a, b])
    before = [np.asarray(v) for v in (a, b, *opt.inner_optimizer.variables)]
    grads[which] = grads[which] * jnp.inf
    opt.apply(grads)
    for old, new in zip(before, (a, b, *opt.inner_optimizer.variables), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(opt.loss_scale) == 4.0
    assert [int(part.iterations) for part in parts] == [1, 1]


def test_each_keeps_its_rate_and_decay():
    """Both take the steps that they take alone: weight decay is that of each, a learning rate
    can be changed between steps, and that of the whole multiplies both."""
    a, b, parts, opt = two(initial_scale=8.0)
    alone = [gs.Variable(a), gs.Variable(b)]
    single = [AdamW(0.1, weight_decay=0.5), gs.optimizers.SGD(0.5, momentum=0.9)]
    for step in range(4):
        if step == 2:
            parts[1].learning_rate = single[1].learning_rate = 0.25
            parts[0].beta_1 = single[0].beta_1 = 0.5
        if step == 3:
            opt.learning_rate = 0.5
            single[0].learning_rate, single[1].learning_rate = 0.05, 0.125
        grads = [jnp.array([1.0, -2.0]) * step, jnp.float32(step - 1.5)]
        opt.apply([8 * g for g in grads], [a, b])
        for optimizer, gradient, variable in zip(single, grads, alone, strict=True):
            optimizer.apply([gradient], [variable])
        np.testing.assert_allclose(a, alone[0], rtol=1e-6)
        np.testing.assert_allclose(b, alone[1], rtol=1e-6)


def test_clipping_acts_on_all_together():
    """A `global_clipnorm` of the wrapper is that of all gradients."""
    a, b = gs.Variable([0.0]), gs.Variable([0.0])
    inner = MultiOptimizer([(gs.optimizers.SGD(1.0), [a]), (gs.optimizers.SGD(2.0), [b])])
    opt = gs.LossScaleOptimizer(inner, 1.0, global_clipnorm=1.0)
    opt.apply([[3.0], [4.0]], [a, b])
    np.testing.assert_allclose([float(a[0]), float(b[0])], [-0.6, -1.6], rtol=1e-6)


@pytest.mark.as_users
def test_its_state_is_saved_and_copied():
    """A run goes on bit for bit from a saved state, and in a deep copy."""
    a, b, _, opt = two(initial_scale=8.0)
    grads = [jnp.ones(2), jnp.ones(())]
    opt.apply(grads, [a, b])
    c, d, _, other = two(initial_scale=8.0)
    c.assign(a)
    d.assign(b)
    other.build([c, d])
    other.load_state(opt.state())
    (e, f), copied = copy.deepcopy(([a, b], opt))
    opt.apply(grads, [a, b])
    other.apply(grads, [c, d])
    copied.apply(grads, [e, f])
    for x, *others in ((a, c, e), (b, d, f)):
        for y in others:
            np.testing.assert_array_equal(x, y)


def test_wrong_combinations_are_errors():
    """An optimizer with a scale of its own, one that is used twice, built, or has options that act
    on all; a variable in two pairs, and steps of one alone: each error says what to do."""
    a, b, parts, opt = two()
    w = gs.Variable(1.0, name="w")

    def multi(optimizer, **options):
        return MultiOptimizer([(optimizer, [w])], **options)

    scaled = gs.optimizers.SGD(0.1)
    wrapper = gs.LossScaleOptimizer(scaled)
    built = gs.optimizers.SGD(0.1)
    built.build([w])
    with pytest.raises(ValueError, match=r"already wrapped by 'loss_scale_optimizer'\. Put one"):
        multi(scaled)
    with pytest.raises(TypeError, match="without a loss scale in each pair; got <LossScale"):
        multi(wrapper)
    with pytest.raises(ValueError, match="already wrapped by 'multi_optimizer'"):
        multi(parts[0])
    with pytest.raises(ValueError, match="already wrapped by 'multi_optimizer'"):
        gs.LossScaleOptimizer(parts[0])
    with pytest.raises(ValueError, match="not to be built before"):
        multi(built)
    with pytest.raises(ValueError, match="Expected clipnorm on the MultiOptimizer"):
        multi(gs.optimizers.SGD(0.1, clipnorm=1.0))
    with pytest.raises(ValueError, match="Expected master_weights on the MultiOptimizer"):
        multi(gs.optimizers.SGD(0.1, master_weights=True))
    with pytest.raises(ValueError, match="callable of no argument"):
        multi(gs.optimizers.SGD(lambda: 0.1))
    with pytest.raises(TypeError, match="without a loss scale in each pair"):
        multi(optax.sgd(0.1))
    with pytest.raises(ValueError, match="at least one pair"):
        MultiOptimizer([])
    with pytest.raises(ValueError, match=r"each variable once in .*; got 'w' twice"):
        MultiOptimizer([(gs.optimizers.SGD(0.1), [w]), (gs.optimizers.Adam(0.1), [w])])
    with pytest.raises(ValueError, match="weight_decay on an optimizer"):
        multi(gs.optimizers.SGD(0.1), weight_decay=0.1).apply([1.0], [w])
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    with pytest.raises(ValueError, match="mesh"):
        multi(gs.optimizers.SGD(0.1, mesh=mesh)).build([w])
    with pytest.raises(ValueError, match="one loss has one scale"):
        multi(from_optax(gs.loss_scaled(optax.sgd(0.1)))).build([w])
    with pytest.raises(
        ValueError, match=r"Expected the variables of all optimizers .*\['a', 'b'\]"
    ):
        opt.build([a])
    opt.build([a, b])
    with pytest.raises(ValueError, match="which takes their steps together"):
        parts[1].apply([1.0], [b])
    with pytest.raises(ValueError, match="Expected clipnorm to be set on 'multi_optimizer'"):
        parts[1].clipnorm = 1.0
    assert float(w) == 1.0


def test_one_part_that_needs_the_loss_gets_it():
    """`minimize` passes the true loss to an optax transformation beside optimizers without one."""
    a, b = gs.Variable(2.0), gs.Variable(2.0)
    opt = MultiOptimizer([(gs.optimizers.SGD(0.25), [a]), (from_optax(optax.polyak_sgd()), [b])])
    opt.minimize(lambda: a**2 + b**2, [a, b])
    assert float(a) == 1.0
    # The step of Polyak: value / norm of the gradient, whose scale is at most 1.
    assert float(b) == pytest.approx(2.0 - min(1.0, 8.0 / 16.0) * 4.0)

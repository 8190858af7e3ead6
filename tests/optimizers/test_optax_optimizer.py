"""Any optax transformation as an optimizer: `Optax`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import LossScaleOptimizer, Variable, from_optax
from gainstage.transforms import step_was_applied


@pytest.mark.as_users
@pytest.mark.parametrize("compiled", [True, False])
def test_no_gradient_leaves_the_state_of_a_variable_alone(compiled):
    """A variable without a gradient keeps its moments bit for bit; the others take their step."""
    masked = optax.masked(optax.trace(0.9), [True, False, True])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1), masked)
    variables = [Variable([1.0, 2.0], name=name) for name in "abc"]
    opt = LossScaleOptimizer(from_optax(tx, jit_compile=compiled), 8.0)
    opt.apply([jnp.full(2, 8.0)] * 3, variables)

    def part(of):
        of = variables.index(of)
        return {k: np.asarray(v).tobytes() for k, v in opt.state().items() if f"[{of}]" in k[-3:]}

    a, b, _ = variables
    before, others = {**part(b), "": b.numpy().tobytes()}, part(a)
    with pytest.warns(UserWarning, match="No gradient for"):
        opt.apply([jnp.full(2, 8.0), None, jnp.full(2, 8.0)], variables)
    assert {**part(b), "": b.numpy().tobytes()} == before
    assert len(before) == 3
    assert all(part(a)[key] != value for key, value in others.items())


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_in_the_state_are_saved(impl):
    """A transformation with a typed key trains as in optax, and its state is saved and loaded."""
    key = jax.random.key(3, impl=impl)
    gradient, tx = jnp.ones(2), optax.noisy_sgd(0.1, key=key)
    theirs, state = jnp.ones(2), tx.init(jnp.ones(2))
    runs = []
    for _ in range(2):
        w, opt = Variable([1.0, 1.0]), LossScaleOptimizer(from_optax(tx), 1.0)
        opt.build([w])
        runs.append((w, opt))
    (w, opt), (other, copy) = runs
    for _ in range(2):
        opt.apply([gradient], [w])
        updates, state = tx.update(gradient, state)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(w.numpy(), theirs, rtol=1e-6)
    store = {}
    opt.save_own_variables(store)
    copy.load_own_variables(store)
    copy.load_state(opt.state())
    other.assign(w)
    values = [v.value() for v in copy.variables]
    (pure,), _ = copy.stateless_apply(values, [gradient], [other.value()])
    for variable, optimizer in runs:
        optimizer.apply([gradient], [variable])
    assert w.numpy().tolist() == other.numpy().tolist()
    np.testing.assert_allclose(w.numpy(), pure, rtol=1e-6)


def test_a_save_that_fails_stores_nothing():
    """A state with a value that is only planned is not saved in part."""
    planned, store = Variable(jax.ShapeDtypeStruct((2,), jnp.float32), name="w"), {}
    opt = from_optax(optax.noisy_sgd(0.1, key=3))
    opt.build([planned])
    with pytest.raises(ValueError, match="only planned"):
        opt.save_own_variables(store)
    assert store == {}


@pytest.mark.parametrize("scaled", [False, True])
def test_the_loss_is_passed_on_as_value(scaled):
    """`minimize` and `apply(..., loss=)` give the true loss to a transformation that needs it."""
    tx = optax.polyak_sgd()
    theirs, state = jnp.float32(4.0), tx.init(jnp.float32(4.0))
    w, opt = Variable(4.0), from_optax(tx)
    opt = LossScaleOptimizer(opt, 8.0) if scaled else opt
    for step in range(4):
        loss, gradient = jax.value_and_grad(lambda w: w**2)(theirs)
        updates, state = tx.update(gradient, state, theirs, value=loss)
        theirs = optax.apply_updates(theirs, updates)
        if step % 2:
            opt.apply([opt.scale_loss(2 * w.value())], [w], loss=w.value() ** 2)
        else:
            opt.minimize(lambda: w**2, [w])
    np.testing.assert_allclose(float(w), theirs, rtol=1e-6)
    with pytest.raises(TypeError, match=r"needs the loss, as 'value'; call minimize, or apply"):
        opt.apply([1.0], [w])


def test_what_a_transformation_cannot_get_is_named():
    """Extra arguments that `Optax` does not pass on, and masks by name, are errors that say so."""
    w = Variable(4.0, name="w")
    for tx, needs in (
        (
            optax.lbfgs(),
            "needs 'grad' and 'value_fn'; from_optax passes only the loss",
        ),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "needs grad_fn;"),
    ):
        with pytest.raises(TypeError, match=needs):
            from_optax(tx).minimize(lambda: w**2, [w])
    for tx in (
        optax.adamw(0.1, mask={"w": True}),
        optax.multi_transform({"slow": optax.sgd(0.1)}, {"w": "slow"}),
    ):
        with pytest.raises(ValueError, match=r"gets the variables as a list, \['w'\]: write its"):
            from_optax(tx).minimize(lambda: w**2, [w])
    from_optax(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))).minimize(lambda: w**2, [w])
    assert float(w) != 4.0


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
    tx = gs.with_loss_scale(optax.multi_transform(groups, labels), RULE)
    params = {"body": jnp.ones(8), "head": jnp.ones(8)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        _, grads = gs.value_and_grad(lambda p: loss_of(p["body"], p["head"], x), state)(params)
        updates, state = tx.update(grads, state, params)
        return gs.transforms.apply_updates(params, updates, state), state

    for i in range(steps):
        params, state = step(params, state, noise(i))
        yield (
            params["body"],
            params["head"],
            gs.transforms.current_scale(state),
            step_was_applied(state),
        )


def by_from_optax(steps):
    """The same of variables, whose labels are a list in their order."""
    body, head = Variable(jnp.ones(8)), Variable(jnp.ones(8))
    groups = {"adam": optax.adam(0.01, eps=0.0), "sgd": optax.sgd(0.05, momentum=0.9)}
    inner = from_optax(optax.multi_transform(groups, ["adam", "sgd"]))
    opt = LossScaleOptimizer(inner, loss_scale=RULE, telemetry=True)
    opt.build([body, head])

    def step(x):
        opt.minimize(lambda: loss_of(body.value(), head.value(), x), [body, head])
        return step_was_applied(opt)

    step = gs.optimizers.jit(step, [body, head, opt.variables], donate=True)
    for i in range(steps):
        applied = step(noise(i))
        yield body.numpy(), head.numpy(), opt.loss_scale, applied


def test_two_optimizers_of_one_loss_are_one_multi_transform():
    """Over 1,000 steps with overflows Adam and SGD on one loss, of which an overflow skips both,
    are an `optax.multi_transform` under one scale, as in an optax loop."""
    skipped = 0
    runs = zip(by_multi_transform(1000), by_from_optax(1000), strict=True)
    for (*theirs, scale, applied), (*ours, our_scale, our_applied) in runs:
        assert (float(scale), bool(applied)) == (float(our_scale), bool(our_applied))
        skipped += not applied
        for one, other in zip(theirs, ours, strict=True):
            # A weight off by its last bit can round a float16 gradient to its neighbour, which
            # moves a weight by 2**-11 of a learning rate of 0.05.
            np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)
    assert skipped >= 20


def test_update_step_of_a_wrapper_updates_one_variable():
    """`update_step` of a `LossScaleOptimizer` gives the transformation one gradient, and leaves the
    other variables and their moments alone."""
    a, b = Variable([1.0, 2.0]), Variable([3.0])
    opt = LossScaleOptimizer(from_optax(optax.trace(0.5)), 8.0)
    opt.build([a, b])
    for expected in ([2.0, 3.0], [3.5, 4.5]):
        opt.update_step(jnp.ones(2), a, jnp.float32(1.0))
        assert a.tolist() == expected
    assert b.tolist() == [3.0]
    with pytest.raises(ValueError, match="Expected variables that"):
        opt.update_step(jnp.ones(1), Variable([0.0]), jnp.float32(1.0))

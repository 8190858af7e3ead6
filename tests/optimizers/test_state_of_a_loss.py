"""What a loss returns and assigns beside the loss: auxiliary results, running means, counters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable
from gainstage.transforms import select_if_applied, step_was_applied


def normalised():
    """A weight, and a loss that keeps a running mean and a count of its calls."""
    w, mean = Variable([1.0, 2.0], name="w"), Variable([0.0, 0.0], name="mean")
    calls = Variable(0, name="calls")

    def loss(x):
        mean.assign(0.9 * mean + 0.1 * x * w.value())
        calls.assign_add(1)
        return (w.value() * x).sum(), {"x": x}

    return w, mean, calls, loss


BATCHES = [jnp.ones(2), jnp.array([1.0, jnp.inf]), 2 * jnp.ones(2), jnp.full(2, jnp.nan)]


@pytest.mark.as_users
@pytest.mark.parametrize("compiled", ["eagerly", "uncompiled", "in gs.optimizers.jit"])
def test_a_skipped_step_changes_nothing_but_the_scale(compiled):
    """Variables that a loss assigns keep their values on a skipped step, bit for bit, and get the
    new ones on an applied step; (loss, aux) comes back from both."""
    w, mean, calls, loss = normalised()
    opt = LossScaleOptimizer(Adam(0.1), 8.0, jit_compile=compiled != "uncompiled")
    opt.build([w])

    def step(x):
        return opt.minimize(lambda: loss(x), [w], has_aux=True)

    if compiled == "in gs.optimizers.jit":
        step = gs.optimizers.jit(step, [w, mean, calls, opt.variables], donate=True)
    expected = np.zeros(2, np.float32)
    for x in BATCHES:
        held = [np.asarray(v).copy() for v in (w, mean, calls, *opt.inner_optimizer.variables)]
        value, aux = step(x)
        np.testing.assert_array_equal(aux["x"], x)
        np.testing.assert_allclose(value, (held[0] * np.asarray(x)).sum())
        if np.isfinite(x).all():
            expected = 0.9 * expected + 0.1 * np.asarray(x) * held[0]
            np.testing.assert_allclose(mean, expected, rtol=1e-6)
        else:
            state = (w, mean, calls, *opt.inner_optimizer.variables)
            for before, after in zip(held, state, strict=True):
                np.testing.assert_array_equal(before, after)
    assert int(calls) == 2
    assert float(opt.loss_scale) == 2.0


def test_a_bad_microbatch_leaves_them_alone():
    """With gradient accumulation each finite microbatch counts, and none of the others."""
    w, mean, calls, loss = normalised()
    opt = SGD(0.1, loss_scale_factor=4.0, gradient_accumulation_steps=2)
    for x in BATCHES:
        opt.minimize(lambda x=x: loss(x)[0], [w])
    assert int(calls) == 2
    assert np.isfinite(mean.numpy()).all()
    assert int(opt.iterations) == 1


def test_without_a_scale_all_is_kept():
    """An optimizer that skips nothing keeps what the loss assigned, whatever it is."""
    w, mean, calls, loss = normalised()
    opt = SGD(0.1)
    for x in BATCHES:
        assert jnp.shape(opt.minimize(lambda x=x: loss(x)[0], [w])) == ()
    assert int(calls) == 4
    assert np.isnan(mean.numpy()).all()


def test_an_override_of_apply_gradients_skips_them_too():
    """A class that makes new pairs in `apply_gradients` keeps the promise."""

    class Halved(SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(g / 2, v) for g, v in grads_and_vars])

    w, _, calls, loss = normalised()
    opt = Halved(1.0, loss_scale_factor=4.0)
    for x in BATCHES[:2]:
        opt.minimize(lambda x=x: loss(x)[0], [w])
    np.testing.assert_array_equal(w, [0.5, 1.5])
    assert int(calls) == 1


def test_a_failed_loss_leaves_variables_alone():
    """An error in the loss, or of its result, changes no variable, and binds none."""
    w, mean, calls, loss = normalised()
    opt = LossScaleOptimizer(SGD(0.1))

    def failing():
        loss(jnp.ones(2))
        raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        opt.minimize(failing, [w])
    with pytest.raises(TypeError, match=r"Expected \(loss, aux\) from loss\(\) with has_aux"):
        opt.minimize(lambda: loss(jnp.ones(2))[0], [w], has_aux=True)
    with pytest.raises(TypeError, match="Expected a bool for has_aux"):
        opt.minimize(lambda: loss(jnp.ones(2)), [w], has_aux=1)
    assert (int(calls), mean.numpy().tolist()) == (0, [0.0, 0.0])
    opt.minimize(lambda: loss(jnp.ones(2))[0], [w])
    assert int(calls) == 1


def test_a_loss_must_not_assign_what_it_trains():
    """It would be overwritten by the step: an error that names the variable."""
    w = Variable(1.0, name="w")
    with pytest.raises(ValueError, match=r"does not assign what it trains; got \['w'\]"):
        SGD(0.1).minimize(lambda: (w.assign(2.0), w * w)[1], [w])
    assert float(w) == 1.0


def test_a_variable_may_keep_the_weights_themselves():
    """What is assigned, or returned, may be the array of a weight: it outlives the step."""
    w, before = Variable([1.0, 2.0]), Variable([0.0, 0.0])
    opt = SGD(0.5)
    for _ in range(2):
        expected = w.numpy()
        _, aux = opt.minimize(
            lambda: (before.assign(w), ((w * w).sum(), w.value()))[1], [w], has_aux=True
        )
        np.testing.assert_array_equal(before, expected)
        np.testing.assert_array_equal(aux, expected)


@pytest.mark.parametrize("jitted", [False, True])
def test_select_if_applied_selects_a_pytree(jitted):
    """In an optax loop what else a step changes stays as it was on a skipped step, in its dtypes:
    arrays, random keys and integers."""
    tx = gs.with_loss_scale(optax.adam(0.1))
    params = jnp.ones(2)
    opt_state = tx.init(params)
    old = {"mean": jnp.zeros(2, jnp.bfloat16), "key": jax.random.key(0), "count": 0, "none": None}

    def step(grads, opt_state, state):
        _, opt_state = tx.update(grads, opt_state, params)
        new = {
            "mean": state["mean"] + grads,
            "key": jax.random.split(state["key"])[0],
            "count": state["count"] + 1,
            "none": None,
        }
        return opt_state, select_if_applied(new, state, opt_state)

    step = jax.jit(step) if jitted else step
    opt_state, kept = step(jnp.array([jnp.nan, 1.0]), opt_state, old)
    assert jnp.all(kept["mean"] == 0)
    assert (int(kept["count"]), kept["key"] == old["key"]) == (0, True)
    opt_state, kept = step(jnp.ones(2), opt_state, kept)
    assert kept["mean"].dtype == jnp.bfloat16
    assert (kept["mean"].tolist(), int(kept["count"])) == ([1.0, 1.0], 1)
    assert kept["key"] != old["key"]


def test_select_if_applied_takes_an_optimizer():
    """A hand-written loop asks a `LossScaleOptimizer` with telemetry; others are refused by an
    error that says what to do."""
    w, mean = Variable([1.0, 2.0]), Variable([0.0, 0.0])
    opt = LossScaleOptimizer(SGD(0.1), telemetry=True)
    assert step_was_applied(opt)
    opt.build([w])

    def step(x):
        grads = jax.grad(lambda w: opt.scale_loss((w * x).sum()))(w.value())
        opt.apply([grads], [w])
        mean.assign(select_if_applied(0.5 * x, mean.value(), opt))
        return step_was_applied(opt)

    compiled = gs.optimizers.jit(step, [w, mean, opt.variables])
    for each in (step, compiled):
        assert each(2 * jnp.ones(2))
        assert not each(jnp.full(2, jnp.nan))
        np.testing.assert_array_equal(mean, [1.0, 1.0])
    with pytest.raises(ValueError, match="Expected telemetry=True for the LossScaleOptimizer"):
        select_if_applied(1.0, 0.0, LossScaleOptimizer(SGD(0.1)))
    with pytest.raises(TypeError, match="Expected a LossScaleOptimizer or a state"):
        select_if_applied(1.0, 0.0, SGD(0.1))
    with pytest.raises(ValueError, match="Expected old to be a copy"):
        select_if_applied([mean], [mean], opt)


def test_batch_normalisation_of_nnx_survives_a_skipped_step():
    """The running mean of NNX's BatchNorm and the counts of its random state are as before, in a
    loop with `select_if_applied`; states that are not copied are refused."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.linear = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.linear(self.dropout(self.norm(x)))

    model = Model(nnx.Rngs(0))
    opt = nnx.Optimizer(model, gs.with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
    rest = nnx.Not(nnx.Param)

    @nnx.jit
    def step(model, opt, x):
        old = jax.tree.map(jnp.copy, nnx.state(model, rest))
        differentiate = gs.value_and_grad(
            lambda m, x: (m(x) ** 2).mean(), opt.opt_state, using=nnx.value_and_grad
        )
        _, grads = differentiate(model, x)
        opt.update(model, grads)
        new = nnx.state(model, rest)
        nnx.update(model, select_if_applied(new, old, opt.opt_state))

    x = jnp.arange(12.0).reshape(4, 3)
    step(model, opt, x)
    held = jax.tree.map(np.asarray, nnx.state(model, nnx.BatchStat))
    step(model, opt, x.at[0, 0].set(jnp.inf))
    assert not step_was_applied(opt.opt_state)
    jax.tree.map(np.testing.assert_array_equal, held, nnx.state(model, nnx.BatchStat))
    step(model, opt, x)
    assert jnp.isfinite(model.norm.mean[...]).all()
    assert int(model.dropout.rngs.count[...]) == 2
    with pytest.raises(ValueError, match="got the same variables as in new"):
        select_if_applied(nnx.state(model, rest), nnx.state(model, rest), opt.opt_state)

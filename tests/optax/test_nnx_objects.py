"""Objects of Flax NNX: what a loss changes of them is kept, and what they share stays shared."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gainstage as gs

X = jax.random.normal(jax.random.key(5), (8, 4))
DROPOUT = nnx.Dropout(0.5)


def dropped(model, rngs, x):
    """A loss whose value depends on a random state that is an argument of its own."""
    return jnp.mean((DROPOUT(model(x), rngs=rngs) - 1) ** 2)


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


class Tied(nnx.Module):
    """Two layers with one weight."""

    def __init__(self):
        self.first, self.second = linear(), nnx.Linear(4, 4, rngs=nnx.Rngs(1))
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class OfRngs(nnx.Module):
    """A layer with noise from a random state that others may hold too."""

    def __init__(self, rngs):
        self.linear, self.rngs = linear(), rngs

    def __call__(self, x):
        return self.linear(x) + jax.random.normal(self.rngs(), (4,))


def losses_in_nnx(loss=dropped, model=linear):
    """What plain NNX returns for four calls."""
    m, rngs = model(), nnx.Rngs(1)
    step = nnx.jit(lambda m, r: nnx.value_and_grad(loss)(m, r, X)[0])
    return [float(step(m, rngs)) for _ in range(4)]


@pytest.mark.parametrize("transform", [gs.autocast, gs.autocast(loss_scale=2.0**15)])
def test_a_random_state_of_its_own_advances(transform):
    """`nnx.Rngs` beside the model gives another dropout mask in each call, as in plain NNX."""
    found = losses_in_nnx(transform(dropped))
    assert len(set(found)) == 4
    np.testing.assert_allclose(found, losses_in_nnx(), rtol=2e-3)


@pytest.mark.parametrize("wrap", [lambda f: f, gs.autocast])
@pytest.mark.parametrize("retries", [0, 2])
def test_train_step_advances_a_random_state_in_the_batch(wrap, retries):
    """The step changes the object that it was given, as plain NNX does."""
    rngs = nnx.Rngs(1)
    state = gs.TrainState.create(linear(), optax.sgd(0.0), loss_scale=gs.DynamicLossScale(8.0))
    step, found = gs.train_step(wrap(dropped), retries=retries), []
    for _ in range(4):
        state, loss = step(state, rngs, X)
        found.append(float(loss))
    np.testing.assert_allclose(found, losses_in_nnx(), rtol=2e-3)
    assert int(rngs.default.count[...]) == 4


def test_value_and_grad_advances_it_beside_plain_parameters():
    """Also where what is differentiated is no model of NNX."""
    w, rngs, tx = jnp.eye(4), nnx.Rngs(1), gs.with_loss_scale(optax.sgd(0.0))
    loss = lambda w, r, x: dropped(lambda x: x @ w, r, x)  # noqa: E731
    grad_fn = gs.value_and_grad(loss, tx.init(w))
    assert len({float(grad_fn(w, rngs, X)[0]) for _ in range(3)}) == 3


def test_a_part_with_its_own_scale_advances_it():
    part = gs.transforms.locally_scaled(lambda m, r, x: DROPOUT(m(x), rngs=r), 8.0)
    model, rngs = linear(), nnx.Rngs(1)
    assert len({float(part(model, rngs, X).sum()) for _ in range(3)}) == 3


def test_a_skipped_step_leaves_objects_in_the_batch_as_they_were():
    """Running means and single variables change in applied steps only."""

    def loss(model, others, x):
        others["counts"][0][...] += 1
        return jnp.mean(others["norm"](model(x)) ** 2)

    others = {"norm": nnx.BatchNorm(4, rngs=nnx.Rngs(0)), "counts": [nnx.BatchStat(jnp.zeros(()))]}
    step, state = gs.train_step(loss), gs.TrainState.create(linear(), optax.sgd(0.1))
    state, _ = step(state, others, X)
    mean = np.array(others["norm"].mean[...])
    assert np.any(mean)
    state, _ = step(state, others, X * jnp.nan)
    np.testing.assert_array_equal(others["norm"].mean[...], mean)
    assert float(others["counts"][0][...]) == 1
    state, _ = step(state, others, X)
    assert float(others["counts"][0][...]) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wrap", [nnx.jit, lambda step: step], ids=["jit", "eager"])
def test_an_optimizer_of_nnx_keeps_statistics_of_a_skipped_step(wrap, dtype):
    """In a loop with `nnx.Optimizer` a batch with a NaN leaves weights and running means as they
    were, counts of random numbers go on, and the next batch changes all of them."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(linear(), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    optimizer = nnx.Optimizer(model, gs.with_loss_scale(optax.adam(0.1)), wrt=nnx.Param)
    fun = gs.autocast(lambda model, x: jnp.mean((model(x) - 1) ** 2), dtype)

    @wrap
    def step(model, optimizer, x):
        loss, grads = gs.value_and_grad(fun, optimizer.opt_state)(model, x)
        optimizer.update(model, grads)
        return loss

    def arrays():
        return [np.array(x) for x in jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat)))]

    def count():
        return int(nnx.state(model, nnx.RngCount)["layers"][2]["rngs"]["count"][...])

    step(model, optimizer, X)
    before, drawn = arrays(), count()
    assert np.isnan(step(model, optimizer, X.at[3].set(jnp.nan)))
    for new, old in zip(arrays(), before, strict=True):
        np.testing.assert_array_equal(new, old)
    assert count() > drawn
    step(model, optimizer, X)
    assert all((new != old).any() for new, old in zip(arrays(), before, strict=True))


@pytest.mark.parametrize("donate", [True, False])
def test_shared_weights_stay_shared(donate):
    """`train_step` trains tied weights as plain NNX does; the model of the new state shares."""
    loss = lambda m, x: jnp.mean((m(x) - 1) ** 2)  # noqa: E731
    plain, state = Tied(), gs.TrainState.create(Tied(), optax.adam(0.1))
    own = nnx.Optimizer(plain, optax.adam(0.1), wrt=nnx.Param)
    step = gs.train_step(loss, donate=donate)
    for _ in range(3):
        own.update(plain, nnx.grad(loss)(plain, X))
        state, _ = step(state, X)
    model = state.params
    assert model.first.kernel is model.second.kernel
    np.testing.assert_allclose(model.first.kernel[...], plain.first.kernel[...], rtol=1e-5)


def test_an_object_that_two_arguments_share_is_one():
    """A random state in the model and beside it advances as one, under `autocast`."""

    def loss(model, rngs, x):
        return jnp.mean((model(x) - jax.random.normal(rngs(), (4,))) ** 2)

    found = []
    for fun in (loss, gs.autocast(loss)):
        rngs = nnx.Rngs(0)
        model, call = OfRngs(rngs), nnx.jit(fun)
        found.append([float(call(model, rngs, X)) for _ in range(3)])
        assert model.rngs is rngs
        assert int(rngs.default.count[...]) == 6
    np.testing.assert_allclose(found[1], found[0], rtol=2e-3)


def test_variables_that_a_step_creates_in_the_batch_are_refused():
    def loss(model, others, x):
        others.new = nnx.BatchStat(x)
        return jnp.mean(model(x) ** 2)

    state = gs.TrainState.create(linear(), optax.sgd(0.1))
    with pytest.raises(ValueError, match="creates variables there"):
        gs.train_step(loss)(state, nnx.Dict(), X)


@pytest.mark.parametrize("bad", [False, True])
def test_statistics_go_on_from_microbatch_to_microbatch(bad):
    """In a scan over microbatches a model's means and dropout counts are those of one after the
    other, and its gradients the mean; a bad one leaves all as it was before the first."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.up, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.drop, self.down = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))

    def loss_fn(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    @jax.jit
    def step(state, xs):
        _, extra, total = state.value_and_grad(loss_fn)(xs[0])

        def add(carry, x):
            extra, total = carry
            _, extra, grads = state.replace(extra=extra).value_and_grad(loss_fn)(x)
            return (extra, jax.tree.map(jnp.add, total, grads)), None

        (extra, total), _ = jax.lax.scan(add, (extra, total), xs[1:])
        return state.apply_gradients(jax.tree.map(lambda g: g / len(xs), total), extra)

    xs = jax.random.normal(jax.random.key(0), (3, 16, 4))
    plain, grads = Net(), []
    for x in xs:
        grads.append(nnx.grad(loss_fn)(plain, x))
    mean = jax.tree.map(lambda *each: sum(each) / len(xs), *grads)
    start = gs.TrainState.create(Net(), optax.sgd(1.0), loss_scale=gs.DynamicLossScale(2.0**4))
    state = step(start, xs.at[1, 0, 0].set(jnp.nan) if bad else xs)
    assert bool(state.applied) != bad
    expected = start.params if bad else plain
    for of in (lambda m: m.norm.mean, lambda m: m.norm.var, lambda m: m.drop.rngs.count):
        np.testing.assert_allclose(of(state.params)[...], of(expected)[...], rtol=1e-6)
    kernel = start.params.up.kernel[...] - (0.0 if bad else mean["up"]["kernel"][...])
    np.testing.assert_allclose(state.params.up.kernel[...], kernel, rtol=1e-5, atol=1e-6)

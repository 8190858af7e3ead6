"""Several models in one training: each as a state of its own, and as an argument of the others."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs

X = jax.random.normal(jax.random.key(2), (64, 4))
Z = jax.random.normal(jax.random.key(3), (64, 8))


def nnx_generator():
    r = nnx.Rngs(0)
    drop, norm = nnx.Dropout(0.5, rngs=r), nnx.BatchNorm(16, rngs=r)
    return nnx.Sequential(nnx.Linear(8, 16, rngs=r), norm, drop, nnx.Linear(16, 4, rngs=r))


def nnx_discriminator():
    r = nnx.Rngs(1)
    norm = nnx.BatchNorm(16, rngs=r)
    return nnx.Sequential(nnx.Linear(4, 16, rngs=r), norm, nnx.Linear(16, 1, rngs=r))


def equinox_generator():
    return eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))


def equinox_discriminator():
    return eqx.nn.MLP(4, 1, 16, 1, activation=jax.nn.leaky_relu, key=jax.random.key(1))


GENERATORS = nnx_generator, equinox_generator
DISCRIMINATORS = nnx_discriminator, equinox_discriminator


def called(model, x):
    return jax.vmap(model)(x) if isinstance(model, eqx.Module) else model(x)


def of_discriminator(discriminator, generator, x, z):
    fake, real = called(discriminator, called(generator, z)), called(discriminator, x)
    return (jax.nn.softplus(-real) + jax.nn.softplus(fake)).mean()


def of_generator(generator, discriminator, z):
    return jax.nn.softplus(-called(discriminator, called(generator, z))).mean()


def steps_of_ours():
    """A step of both players, each by a `train_step`."""
    of_d = gs.train_step(gs.autocast(of_discriminator))
    of_g = gs.train_step(gs.autocast(of_generator))

    def step(g, d, x, z):
        d, _ = of_d(d, g.params, x, z)
        g, loss = of_g(g, d.params, z)
        return g, d, loss

    return step


def step_of_ones_own():
    """A step of both players in one compiled function."""
    half_d, half_g = gs.autocast(of_discriminator), gs.autocast(of_generator)

    @jax.jit
    def step(g, d, x, z):
        _, extra, grads = d.value_and_grad(half_d)(g.params, x, z)
        d = d.apply_gradients(grads, extra)
        loss, extra, grads = g.value_and_grad(half_g)(d.params, z)
        return g.apply_gradients(grads, extra), d, loss

    return step


def bits(*states):
    """All that a skipped step must keep."""
    kept = [(s.params, s.opt_state.inner, s.extra, s.step) for s in states]
    arrays = [x for x in jax.tree.leaves(kept) if isinstance(x, jax.Array)]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    data = [jax.random.key_data(x) if is_key(x) else x for x in arrays]
    return [np.asarray(x).tobytes() for x in data]


def both(generator, discriminator):
    return [gs.TrainState.create(m(), optax.adam(1e-2)) for m in (generator, discriminator)]


def placed(devices, *arrays):
    """The arrays over these devices."""
    if devices == 1:
        return arrays
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("data")))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("make_step", [steps_of_ours, step_of_ones_own])
@pytest.mark.parametrize("discriminator", DISCRIMINATORS)
@pytest.mark.parametrize("generator", GENERATORS)
def test_two_models_keep_all_of_a_step_that_is_not_finite(
    generator, discriminator, make_step, devices
):
    """After a NaN in the batch of both players, and of one, nothing of a skipped one changes."""
    step, (x, z) = make_step(), placed(devices, X, Z)
    g, d = both(generator, discriminator)
    for _ in range(2):
        g, d, _ = step(g, d, x, z)
    before = bits(g, d)
    g, d, _ = step(g, d, x.at[0].set(jnp.nan), z.at[0].set(jnp.nan))
    assert not g.applied
    assert not d.applied
    assert bits(g, d) == before

    own = bits(d)
    g, d, _ = step(g, d, x.at[0].set(jnp.nan), z)
    assert g.applied
    assert not d.applied
    if isinstance(d.params, eqx.Module):  # the means of the other are the generator's to change
        assert bits(d) == own
    g, d, loss = step(g, d, x, z)
    assert g.applied
    assert d.applied
    assert np.isfinite(loss)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((g, d)) if hasattr(x, "dtype")
               and jnp.issubdtype(x.dtype, jnp.floating))  # fmt: skip


@pytest.mark.parametrize("discriminator", DISCRIMINATORS)
@pytest.mark.parametrize("generator", GENERATORS)
def test_the_two_forms_of_a_step_are_one(generator, discriminator):
    """Two players are trained alike by `train_step` and by a step of one's own."""
    found = []
    for make_step in (steps_of_ours, step_of_ones_own):
        step, (g, d) = make_step(), both(generator, discriminator)
        for _ in range(4):
            g, d, loss = step(g, d, X, Z)
        found.append(float(loss))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_other_player_is_the_one_that_is_trained():
    """A discriminator of Equinox in the batch is that of the last step: the losses are those of a
    training in float32 with optax."""
    generator, discriminator = equinox_generator(), equinox_discriminator()
    tx, pair = optax.adam(1e-2), [generator, discriminator]
    inner = [tx.init(eqx.filter(m, eqx.is_inexact_array)) for m in pair]
    expected, found = [], []
    for _ in range(20):
        _, grads = eqx.filter_value_and_grad(of_discriminator)(pair[1], pair[0], X, Z)
        updates, inner[1] = tx.update(grads, inner[1])
        pair[1] = eqx.apply_updates(pair[1], updates)
        loss, grads = eqx.filter_value_and_grad(of_generator)(pair[0], pair[1], Z)
        updates, inner[0] = tx.update(grads, inner[0])
        pair[0] = eqx.apply_updates(pair[0], updates)
        expected.append(float(loss))
    step, (g, d) = steps_of_ours(), both(equinox_generator, equinox_discriminator)
    for _ in range(20):
        g, d, loss = step(g, d, X, Z)
        found.append(float(loss))
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert expected[-1] != pytest.approx(expected[0], rel=0.05)


def test_a_model_in_the_batch_is_compiled_once():
    """New weights of a model in the batch need no other program; another function in it does."""
    traces = []

    def loss(params, model, x):
        traces.append(1)
        return jnp.mean((params["w"] * jax.vmap(model)(x)) ** 2)

    step = gs.train_step(loss)
    state = gs.TrainState.create({"w": jnp.ones(1)}, optax.sgd(0.1))
    model = equinox_discriminator()
    for factor in (1.0, 2.0, 3.0):
        other = jax.tree.map(lambda x: x * factor if eqx.is_array(x) else x, model)  # noqa: B023
        state, _ = step(state, other, X)
    count = len(traces)
    state, of_relu = step(state, eqx.tree_at(lambda m: m.activation, model, jax.nn.relu), X)
    assert count < len(traces)
    state, of_leaky_relu = step(state, model, X)
    assert of_relu != of_leaky_relu


@pytest.mark.parametrize("discriminator", DISCRIMINATORS)
def test_all_that_reads_a_step_takes_a_model_in_the_batch(discriminator):
    """`audit`, `xray`, `mend`, `lint`, `advise`, `lower` and `value_and_grad` take a model where a
    step takes one, and do not change it."""
    g, d = both(nnx_generator, discriminator)
    half, before = gs.autocast(of_generator), bits(d)
    step = gs.train_step(half)
    batch = d.params, Z
    assert "func" in step.lower(g, *batch).as_text()
    assert gs.audit(half, g, *batch).loss_error < 0.01
    assert gs.xray(half, g, *batch) is not None
    gs.mend(half, g, *batch)
    assert gs.lint(step, g, *batch) == []
    assert gs.lint(lambda g, *batch: g.value_and_grad(half)(*batch)[0], g, *batch) == []
    plain = lambda params, model, z: jnp.mean(called(model, z @ params) ** 2)  # noqa: E731
    assert len(gs.advise(plain, jnp.ones((8, 4)), [batch, (d.params, 2 * Z)]).candidates) > 1
    assert bits(d) == before


def test_statistics_of_a_model_in_the_batch_go_where_its_step_goes():
    """The running means of a model in the batch change if the step that called it is applied, as in
    plain NNX, in both forms of a step."""
    plain, z = nnx_generator(), Z
    plain(z)
    expected = np.asarray(plain.layers[1].mean[...])
    for is_ours in (True, False):
        (g, _), d = both(nnx_generator, nnx_discriminator), None
        d = gs.TrainState.create(nnx_discriminator(), optax.sgd(0.0))
        loss = lambda disc, gen, z: disc(gen(z)).mean()  # noqa: E731
        if is_ours:
            gs.train_step(loss)(d, g.params, z)
        else:
            _, extra, grads = d.value_and_grad(loss)(g.params, z)
            np.testing.assert_array_equal(g.params.layers[1].mean[...], 0)
            d.apply_gradients(grads, extra)
        np.testing.assert_allclose(g.params.layers[1].mean[...], expected, rtol=1e-6)


def test_random_numbers_of_the_batch_go_on_in_a_step_of_ones_own():
    """Two calls of `state.value_and_grad` with one `nnx.Rngs` in the batch draw other numbers."""
    state, rngs = gs.TrainState.create(jnp.ones(4), optax.sgd(0.1)), nnx.Rngs(0)
    noisy = lambda w, rngs: (w * jax.random.normal(rngs(), (4,))).sum()  # noqa: E731
    losses = [float(state.value_and_grad(noisy)(rngs)[0]) for _ in range(3)]
    assert len(set(losses)) == 3


def test_what_is_no_model_in_the_batch_is_named():
    """A function that belongs to no model is named, beside a model that has functions too."""
    step = gs.train_step(lambda w, model, fun: (w * fun(1.0)).sum())
    state = gs.TrainState.create(jnp.ones(1), optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"got .*partial.* for `batch\[1\]`. If it is the same"):
        step(state, equinox_generator(), functools.partial(jnp.sin))

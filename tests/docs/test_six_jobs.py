"""What people come to do, in the lines that they would write, with a model of each library."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stateful_losses
from stateful_losses import squared

import gainstage as gs

X = jax.random.normal(jax.random.key(0), (32, 4))
Y = jnp.sin(X.sum(1, keepdims=True))
BAD = X.at[0, 0].set(jnp.nan)
GOOD_BATCHES = [(X, Y)] * 60
BATCHES = [*GOOD_BATCHES[:30], (BAD, Y), *GOOD_BATCHES[30:]]


# ── the same small network in each library: (parameters, extra, loss) ────────────────────────────


def arrays():
    """Plain arrays, with a running mean of the inputs."""
    keys = jax.random.split(jax.random.key(1))
    params = {
        n: 0.5 * jax.random.normal(k, s)
        for n, k, s in zip("ab", keys, [(4, 16), (16, 1)], strict=True)
    }

    def loss_fn(params, mean, x, y):
        out = jnp.tanh((x - mean) @ params["a"]) @ params["b"]
        return squared(out, y), 0.9 * mean + 0.1 * x.mean(0)

    return params, jnp.zeros(4), loss_fn


def nnx():
    """A model of Flax NNX with a BatchNorm, whose statistics are part of it."""
    nnx = pytest.importorskip("flax.nnx")
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(4, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs), jnp.tanh
    model = nnx.Sequential(*layers, nnx.Linear(16, 1, rngs=rngs))
    return model, None, lambda model, x, y: squared(model(x), y)


def equinox():
    """A model of Equinox with a BatchNorm, and its `State`."""
    eqx = pytest.importorskip("equinox")
    first, second = jax.random.split(jax.random.key(1))
    layers = eqx.nn.Linear(4, 16, key=first), eqx.nn.BatchNorm(16, "batch", mode="batch")
    layers = [*layers, eqx.nn.Lambda(jnp.tanh), eqx.nn.Linear(16, 1, key=second)]
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)(layers)

    def loss_fn(model, state, x, y):
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = batched(x, state)
        return squared(out, y), state

    return model, state, loss_fn


def linen():
    """A module of Flax Linen with a BatchNorm, and its `batch_stats`."""
    linen = pytest.importorskip("flax.linen")
    norm = linen.BatchNorm(use_running_average=False)
    model = linen.Sequential([linen.Dense(16), norm, jnp.tanh, linen.Dense(1)])
    variables = model.init(jax.random.key(0), X)

    return variables["params"], variables["batch_stats"], stateful_losses.of_linen(model)


def haiku():
    """A function of Haiku with a BatchNorm, and its state."""
    hk = pytest.importorskip("haiku")

    @hk.transform_with_state
    def forward(x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), is_training=True)
        return hk.Linear(1)(jnp.tanh(x))

    return *forward.init(jax.random.key(0), X), stateful_losses.of_haiku(forward)


LIBRARIES = pytest.mark.parametrize("library", [arrays, nnx, equinox, linen, haiku])


def content(tree):
    """The bytes of all leaves."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# ── the jobs ─────────────────────────────────────────────────────────────────────────────────────


@LIBRARIES
def test_a_step_of_my_own(library):
    """The library's step trains the model in float16, and a bad batch changes nothing."""
    params, extra, loss_fn = library()

    state = gs.TrainState.create(params, optax.adam(0.02), extra=extra)
    step = gs.train_step(gs.autocast(loss_fn))
    losses = []
    for x, y in BATCHES:
        state, loss = step(state, x, y)
        losses.append(loss)

    assert (int(state.step), float(state.loss_scale)) == (60, 2.0**14)
    assert losses[-1] < 0.2 * losses[0]
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


@LIBRARIES
def test_the_gradients_pass_through_my_hands(library):
    """They are true, so they are clipped as ever; statistics go back into the state."""
    params, extra, loss_fn = library()
    loss_fn = gs.autocast(loss_fn)

    @jax.jit
    def step(state, x, y):
        loss, extra, grads = state.value_and_grad(loss_fn)(x, y)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)
        return state.apply_gradients(grads, extra), loss, norm

    state = gs.TrainState.create(params, optax.adam(0.02), extra=extra)
    first = None
    for x, y in BATCHES:
        state, loss, norm = step(state, x, y)
        first = loss if first is None else first
        assert jnp.isfinite(norm) == jnp.isfinite(x).all()

    assert (int(state.step), float(state.loss_scale)) == (60, 2.0**14)
    assert loss < 0.2 * first
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_trainer_that_differentiates_by_itself():
    """Its gradients are true from a scaled backward pass, and its transformation skips."""

    def trainer(loss_fn, tx, params, batches):  # of another library
        opt_state = tx.init(params)

        @jax.jit
        def step(params, opt_state, *batch):
            grads = jax.grad(loss_fn)(params, *batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        for batch in batches:
            params, opt_state = step(params, opt_state, *batch)
        return params

    def loss_fn(params, x, y):
        return squared(jnp.tanh(x @ params["a"]) @ params["b"], y)

    params, _, _ = arrays()
    half = gs.autocast(loss_fn, loss_scale=2.0**15)
    tx = gs.with_loss_scale(optax.adam(0.02), gs.FixedLossScale(1.0))
    trained = trainer(half, tx, params, BATCHES)
    assert loss_fn(trained, X, Y) < 0.2 * loss_fn(params, X, Y)


def test_a_model_of_keras():
    """One call compiles a model for float16, and `fit` keeps its statistics."""
    keras = pytest.importorskip("keras")
    from gainstage.interop.keras import compile as compile_in_half

    layers = keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dense(1)
    model = compile_in_half(keras.Sequential(layers), keras.optimizers.Adam(0.02), "mse")
    history = model.fit(np.asarray(X), np.asarray(Y), epochs=20, verbose=0).history["loss"]
    before, scale = content([v.value for v in model.variables]), model.optimizer.dynamic_scale * 1
    model.fit(np.asarray(BAD), np.asarray(Y), batch_size=32, verbose=0)

    assert history[-1] < history[0]
    assert content([v.value for v in model.variables]) == before
    assert float(model.optimizer.dynamic_scale) == float(scale) / 2


@LIBRARIES
def test_accumulation_with_clipping(library):
    """Four microbatches make an update, which is clipped; a bad one does not count."""
    params, extra, loss_fn = library()

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.02))
    state = gs.TrainState.create(params, optax.MultiSteps(tx, 4), extra=extra)
    step = gs.train_step(gs.autocast(loss_fn))
    for x, y in 2 * BATCHES:
        state, loss = step(state, x, y)

    sums = state.opt_state.inner
    assert (int(sums.gradient_step), int(sums.mini_step)) == (30, 0)
    assert jnp.isfinite(loss)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


@LIBRARIES
def test_what_happened_and_going_on_tomorrow(library, tmp_path):
    """The state says what its last step did, and is saved and loaded whole."""
    params, extra, loss_fn = library()

    state = gs.TrainState.create(params, optax.adam(0.02), extra=extra, telemetry=True)
    step = gs.train_step(gs.autocast(loss_fn), donate=False)
    for x, y in BATCHES[:31]:
        state, loss = step(state, x, y)
    print(state.applied, state.info.loss_scale, state.info.skipped_steps, state.loss_scale)

    (tmp_path / "state").write_bytes(pickle.dumps(jax.device_get(jax.tree.leaves(state))))
    fresh = gs.TrainState.create(params, optax.adam(0.02), extra=extra, telemetry=True)
    saved = pickle.loads((tmp_path / "state").read_bytes())
    again = jax.tree.unflatten(jax.tree.structure(fresh), saved)

    assert (bool(state.applied), int(state.info.skipped_steps)) == (False, 1)
    assert (float(state.info.loss_scale), float(state.loss_scale)) == (2.0**15, 2.0**14)
    assert not jnp.isfinite(loss)
    assert content(step(again, X, Y)) == content(step(state, X, Y))

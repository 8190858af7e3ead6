"""A train state: a skipped step keeps all of it, in each way to train, and it is saved whole."""

import concurrent.futures
import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stateful_losses
from jax.sharding import NamedSharding, PartitionSpec
from small_floats import SMALL
from stateful_losses import squared

import gainstage as gs

X = jax.random.normal(jax.random.key(0), (16, 4))
Y = jnp.sin(X[:, :1])
BAD = X.at[3, 2].set(jnp.nan)


def leaves(tree):
    """The names of all leaves with their bytes."""

    def content(x):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.asarray(x).tobytes()

    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): content(x) for path, x in named}


# ── what a loss can change ───────────────────────────────────────────────────────────────────────


def of_arrays():
    """A moving average of the parameters, a running mean and a key of one's own."""
    params = {"w": jnp.ones((4, 1)), "b": jnp.zeros(1)}
    extra = {"average": params, "mean": jnp.zeros(4), "key": jax.random.key(1)}

    def loss_fn(params, extra, x, y):
        key, now = jax.random.split(extra["key"])
        kept = jax.random.bernoulli(now, 0.9, x.shape)
        out = (x * kept - extra["mean"]) @ params["w"] + params["b"]
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, extra["average"], params)
        mean = 0.9 * extra["mean"] + 0.1 * x.mean(0)
        return squared(out, y), {"average": average, "mean": mean, "key": key}

    return params, extra, loss_fn


def of_nnx():
    """The statistics of a BatchNorm and of a spectral norm, and the counts of a Dropout."""
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.spectral = nnx.SpectralNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            x = self.spectral(self.first(x), update_stats=True)
            return self.last(self.dropout(jax.nn.relu(self.norm(x))))

    return Model(nnx.Rngs(0)), None, lambda model, x, y: squared(model(x), y)


def of_rngs():
    """An `nnx.Rngs` beside parameters that are arrays."""
    nnx = pytest.importorskip("flax.nnx")

    def loss_fn(w, rngs, x, y):
        return squared((x + 0.1 * jax.random.normal(rngs.noise(), x.shape)) @ w, y), rngs

    return jnp.full((4, 1), 0.1), nnx.Rngs(noise=3), loss_fn


def of_linen():
    """The `batch_stats` of a BatchNorm and of a SpectralNorm."""
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.SpectralNorm(linen.Dense(8))(x, update_stats=True)
            x = linen.BatchNorm(use_running_average=False)(x)
            return linen.Dense(1)(x)

    model = Model()
    variables = model.init(jax.random.key(0), X)

    return variables["params"], variables["batch_stats"], stateful_losses.of_linen(model)


def of_equinox():
    """The `State` of a BatchNorm, beside leaves of the model that are no arrays."""
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        dropout: eqx.nn.Dropout
        last: eqx.nn.Linear
        activation: object

        def __init__(self, key):
            self.first, self.last = eqx.nn.Linear(4, 8, key=key), eqx.nn.Linear(8, 1, key=key)
            self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
            self.dropout, self.activation = eqx.nn.Dropout(0.1), jax.nn.relu

        def __call__(self, x, state, key):
            x, state = self.norm(self.first(x), state)
            return self.last(self.dropout(self.activation(x), key=key)), state

    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))

    def loss_fn(model, extra, x, y):
        state, key = extra
        key, now = jax.random.split(key)
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
        out, state = batched(x, state, now)
        return squared(out, y), (state, key)

    return model, (state, jax.random.key(1)), loss_fn


def of_haiku():
    """The state of a BatchNorm."""
    hk = pytest.importorskip("haiku")

    def forward(x):
        return hk.Linear(1)(hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training=True))

    model = hk.transform_with_state(forward)
    return *model.init(jax.random.key(0), X), stateful_losses.of_haiku(model)


MODELS = {fun.__name__: fun for fun in (of_arrays, of_nnx, of_rngs, of_linen, of_equinox, of_haiku)}


# ── ways to train ────────────────────────────────────────────────────────────────────────────────


def by_train_step(loss_fn):
    return gs.train_step(loss_fn)


def with_retries(loss_fn):
    return gs.train_step(loss_fn, retries=2)


def by_hand(loss_fn):
    """The gradients pass through the user's hands, who clips them."""

    @jax.jit
    def step(state, x, y):
        loss, extra, grads = state.value_and_grad(loss_fn)(x, y)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)
        return state.apply_gradients(grads, extra), loss

    return step


def by_scan(loss_fn):
    """One step of a `jax.lax.scan`, whose carry the state is."""

    def body(state, batch):
        loss, extra, grads = state.value_and_grad(loss_fn)(*batch)
        return state.apply_gradients(grads, extra), loss

    @jax.jit
    def steps(state, x, y):
        state, losses = jax.lax.scan(body, state, (x[None], y[None]))
        return state, losses[0]

    return steps


WAYS = {fun.__name__: fun for fun in (by_train_step, with_retries, by_hand, by_scan)}
SCALE = ("rule_state", ".applied", ".observed")  # what a skipped step changes


def changed(before, after):
    """The names of the leaves that differ, but for the loss scale and what describes the step."""
    assert before.keys() == after.keys()
    different = [name for name, content in before.items() if after[name] != content]
    return [name for name in different if not any(word in name for word in SCALE)]


def first_state(model, tx=None, **options):
    params, extra, loss_fn = MODELS[model]()
    tx = optax.adam(0.01) if tx is None else tx
    return gs.TrainState.create(params, tx, extra=extra, **options), gs.autocast(loss_fn)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_skipped_step_keeps_all_that_a_loss_changes(model, way):
    """After a batch with a NaN parameters, optimizer state, statistics, averages, keys and the
    count are bit for bit what they were; a good batch changes them."""
    state, loss_fn = first_state(model, telemetry=True)
    step = WAYS[way](loss_fn)
    state, _ = step(state, X, Y)
    before = leaves(state)
    state, loss = step(state, BAD, Y)
    assert not np.isfinite(loss)
    assert changed(before, leaves(state)) == []
    assert (int(state.step), bool(state.applied)) == (1, False)
    assert (float(state.loss_scale), int(state.info.skipped_steps)) == (2.0**14, 1)
    state, loss = step(state, X, Y)
    assert np.isfinite(loss)
    assert len(changed(before, leaves(state))) >= (5 if model == "of_rngs" else 8)
    assert (int(state.step), bool(state.applied)) == (2, True)


@pytest.mark.parametrize("model", MODELS)
def test_a_skipped_microbatch_keeps_all_too(model):
    """With `optax.MultiSteps` a batch with a NaN changes neither sums nor statistics."""
    tx = optax.MultiSteps(optax.adam(0.01), 2)
    state, loss_fn = first_state(model, tx)
    step = gs.train_step(loss_fn)
    state, _ = step(state, X, Y)
    before = leaves(state)
    state, _ = step(state, BAD, Y)
    assert changed(before, leaves(state)) == []
    state, _ = step(state, X, Y)
    assert int(state.opt_state.inner.gradient_step) == 1


@pytest.mark.parametrize("model", MODELS)
def test_a_skipped_step_keeps_all_on_a_mesh(model):
    """With the batch sharded over eight devices all of them keep all, where it lies."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x, bad, y = (jax.device_put(x, sharding) for x in (X, BAD, Y))
    state, loss_fn = first_state(model)
    step = gs.train_step(loss_fn)
    state, _ = step(state, x, y)
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(state))
    before = leaves(state)
    state, _ = step(state, bad, y)
    assert changed(before, leaves(state)) == []


# ── the same as the bricks ───────────────────────────────────────────────────────────────────────


@pytest.mark.as_users
def test_it_takes_the_steps_of_the_bricks():
    """Losses, parameters and scales are those of a loop over `value_and_grad`, `update` and
    `apply_updates`, bit for bit, also of a transformation that is wrapped already."""
    params, loss_fn = jnp.ones((4, 1)), gs.autocast(lambda w, x, y: squared(x @ w, y))
    tx = gs.with_loss_scale(optax.adam(0.1), gs.DynamicLossScale(2.0**30, increment_period=2))

    @jax.jit
    def by_bricks(params, opt_state, x):
        loss, grads = gs.value_and_grad(loss_fn, opt_state)(params, x, Y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return gs.transforms.apply_updates(params, updates, opt_state), opt_state, loss

    @jax.jit
    def by_state(state, x):
        loss, extra, grads = state.value_and_grad(loss_fn)(x, Y)
        return state.apply_gradients(grads, extra), loss

    opt_state, state = tx.init(params), gs.TrainState.create(params, tx)
    compiled, of_step = gs.train_step(loss_fn, donate=False), state
    for x in (X, BAD, X, X):
        params, opt_state, loss = by_bricks(params, opt_state, x)
        state, found = by_state(state, x)
        of_step, by_step = compiled(of_step, x, Y)
        assert leaves((state.params, state.opt_state, found)) == leaves((params, opt_state, loss))
        np.testing.assert_allclose(of_step.params, params, rtol=1e-6)
        np.testing.assert_allclose(by_step, loss, rtol=1e-6)
        assert float(of_step.loss_scale) == float(gs.transforms.current_scale(opt_state))


def test_each_state_of_an_ensemble_has_its_own_scale():
    """Under `jax.vmap` one member skips its step, and the others take theirs."""
    tx = gs.with_loss_scale(optax.sgd(0.1))
    state = jax.vmap(lambda w: gs.TrainState.create(w, tx))(jnp.ones((3, 4, 1)))

    def step(state, x):
        loss, _, grads = state.value_and_grad(lambda w, x: squared(x @ w, Y))(x)
        return state.apply_gradients(grads), loss

    state, _ = jax.jit(jax.vmap(step))(state, jnp.stack([X, BAD, X]))
    assert state.step.tolist() == [1, 0, 1]
    assert state.loss_scale.tolist() == [2.0**15, 2.0**14, 2.0**15]
    assert state.params[1].tolist() == [[1.0]] * 4


def test_aux_comes_back_beside_the_loss():
    """With `has_aux` the last result of the loss is returned, with `extra` and without."""
    state = gs.TrainState.create(jnp.ones(4), optax.sgd(0.1), extra=jnp.zeros(4))
    loss_fn = lambda w, mean, x: ((x @ w).mean(), mean + x[0], {"first": x[0, 0]})  # noqa: E731
    state, _, aux = gs.train_step(loss_fn, has_aux=True, donate=False)(state, X)
    assert aux["first"] == X[0, 0]
    assert state.extra.tolist() == X[0].tolist()
    _, extra, _, aux = state.value_and_grad(loss_fn, has_aux=True)(X)
    assert aux["first"] == X[0, 0]
    assert extra.tolist() == (2 * X[0]).tolist()
    plain = gs.TrainState.create(jnp.ones(4), optax.sgd(0.1))
    *_, aux = gs.train_step(lambda w, x: ((x @ w).mean(), 7), has_aux=True)(plain, X)
    assert aux == 7


def test_gradients_and_losses_are_true():
    """What `value_and_grad` returns is what JAX returns without a scale; the model of the state is
    not changed by it."""
    state, loss_fn = first_state("of_nnx")
    before = leaves(state)
    loss, _, grads = state.value_and_grad(loss_fn)(X, Y)
    assert changed(before, leaves(state)) == []
    params, extra, loss_fn = of_arrays()
    state = gs.TrainState.create(params, optax.sgd(0.1), extra=extra)
    loss, new, grads = state.value_and_grad(loss_fn)(X, Y)
    (true, wanted), plain = jax.value_and_grad(loss_fn, has_aux=True)(params, extra, X, Y)
    assert float(loss) == float(true)
    assert leaves(new) == leaves(wanted)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ── saved and loaded ─────────────────────────────────────────────────────────────────────────────


def by_numpy(state, folder):
    np.savez(folder / "state.npz", *jax.tree.leaves(state))
    with np.load(folder / "state.npz") as file:
        return jax.tree.unflatten(jax.tree.structure(state), file.values())


def by_pickle(state, folder):
    (folder / "state").write_bytes(pickle.dumps(jax.device_get(state)))
    return pickle.loads((folder / "state").read_bytes()).replace(tx=state.tx)


def by_orbax(state, folder):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", state)


@pytest.mark.parametrize("save", [by_numpy, by_pickle, by_orbax])
def test_what_was_saved_goes_on_bit_for_bit(save, tmp_path):
    """A state is one thing to save, and its next step is that of the state that goes on."""
    params, _, _ = of_arrays()
    extra = jax.tree.map(jnp.zeros_like, params)

    def loss_fn(params, average, x, y):
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return squared(x @ params["w"] + params["b"], y), average

    step = gs.train_step(gs.autocast(loss_fn), donate=False)
    state = gs.TrainState.create(params, optax.adam(0.1), extra=extra, telemetry=True)
    state, _ = step(state, X, Y)
    state, _ = step(state, BAD, Y)
    again = save(state, tmp_path)
    assert leaves(again) == leaves(state)
    assert leaves(step(again, X, Y)) == leaves(step(state, X, Y))


@pytest.mark.parametrize("model", MODELS)
def test_a_copy_goes_on_by_itself(model):
    """A deep copy has arrays of its own, and both have the transformation."""
    state, loss_fn = first_state(model)
    step, before = gs.train_step(loss_fn), leaves(state)
    deep, shallow = copy.deepcopy(state), copy.copy(state)
    assert leaves(shallow) == before
    step(state, X, Y)
    assert leaves(deep) == before
    assert int(step(deep, X, Y)[0].step) <= 1


@pytest.mark.parametrize("save", [by_numpy, by_orbax])
def test_a_model_with_functions_as_leaves_is_saved(save, tmp_path):
    """The functions of an Equinox model are static, whatever its arrays are mapped to."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(1))
    state = gs.TrainState.create(model, optax.adam(0.1))
    again = save(state, tmp_path)
    assert leaves(again) == leaves(state)
    assert again.params.activation is model.activation
    names = jax.tree.map(lambda x: str(x.shape), state)
    assert jax.tree.structure(names) == jax.tree.structure(state)
    assert names.params.layers[0].weight == "(8, 4)"


@pytest.mark.parametrize(
    "rule", [gs.FixedLossScale(8.0), gs.DynamicLossScale(2.0**20, increment_period=3)]
)
def test_a_loaded_state_goes_on_with_another_rule(rule):
    """Of the same kind of state the rule is that of the new transformation; another kind of rule
    takes over from the moments."""
    step = gs.train_step(lambda w, x, y: SMALL * squared(x @ w, y), donate=False)
    tx = optax.adam(0.1)
    old, _ = step(gs.TrainState.create(jnp.ones((4, 1)), tx), X, Y)
    state, _ = step(old.replace(tx=gs.TrainState.create(old.params, tx, loss_scale=rule).tx), X, Y)
    plain, _ = step(old, X, Y)
    np.testing.assert_allclose(state.params, plain.params, rtol=1e-6)
    assert state.loss_scale == (8.0 if isinstance(rule, gs.FixedLossScale) else 2.0**15)
    new = gs.TrainState.create(old.params, tx, loss_scale=gs.AdaptiveLossScale(2.0**10))
    with pytest.raises(ValueError, match=r"The rule of tx is AdaptiveLossScale"):
        step(old.replace(tx=new.tx), X, Y)
    opt_state = new.opt_state._replace(inner=old.opt_state.inner)
    state, _ = step(new.replace(opt_state=opt_state, step=old.step), X, Y)
    np.testing.assert_allclose(state.params, plain.params, rtol=1e-6)
    assert int(state.step) == 2


# ── what somebody may write by mistake ───────────────────────────────────────────────────────────

W = jnp.ones(4)
PLAIN = gs.TrainState.create(W, optax.sgd(0.1))
KEEPING = gs.TrainState.create(W, optax.sgd(0.1), extra=jnp.zeros(4))
STEP = gs.train_step(lambda w, x: (x @ w).mean(), donate=False)


def without(extra):
    return lambda w, mean, x: ((x @ w).mean(), extra(mean))


MISTAKES = {
    "no transformation": (lambda: gs.TrainState.create(W, "adam"), "GradientTransformation for tx"),
    "no call": (lambda: gs.TrainState.create(W, optax.adam), "GradientTransformation for tx"),
    "no array": (lambda: gs.TrainState.create({"w": "a"}, optax.sgd(0.1)), r"`params\['w'\]`"),
    "no array beside": (
        lambda: gs.TrainState.create(W, optax.sgd(0.1), extra={"mean": "a"}),
        r"arrays in extra; got .* `extra\['mean'\]`",
    ),
    "a rule of two": (
        lambda: gs.TrainState.create(
            W, gs.with_loss_scale(optax.sgd(0.1)), loss_scale=gs.FixedLossScale(8.0)
        ),
        "Expected no loss_scale, as tx has a loss scale",
    ),
    "another model": (
        lambda: PLAIN.apply_gradients({"w": W}),
        r"grads in the structure of state.params; got shape .* of `grads",
    ),
    "another shape": (lambda: PLAIN.apply_gradients(jnp.ones(3)), r"got shape \(3,\) of `grads`"),
    "extra forgotten": (
        lambda: KEEPING.apply_gradients(W),
        r"extra that value_and_grad .* Write loss, extra, grads",
    ),
    "extra of another": (
        lambda: KEEPING.apply_gradients(W, jnp.zeros(3)),
        r"extra in the structure of state.extra; got shape \(3,\)",
    ),
    "extra not returned": (
        lambda: KEEPING.value_and_grad(lambda w, mean, x: (x @ w).mean())(X),
        r"Expected \(loss, extra\) from loss_fn",
    ),
    "extra that grows": (
        lambda: gs.train_step(without(lambda mean: jnp.zeros(5)), donate=False)(KEEPING, X),
        r"got shape \(5,\) of `extra` for shape \(4,\)",
    ),
    "extra that was no part": (
        lambda: STEP(PLAIN.replace(extra=None), X, X),
        r"of \(params, \*batch\), which is called with 3 .*create\(params, tx, extra=extra\)",
    ),
    "an argument too few": (
        lambda: gs.train_step(lambda w, mean, x: (x @ w).mean(), donate=False)(PLAIN, X),
        r"missing a required argument: 'x'.*TrainState\.create\(params, tx, extra=extra\)",
    ),
    "an extra that is not taken": (
        lambda: gs.train_step(lambda w, x: (x @ w).mean(), donate=False)(KEEPING, X),
        r"loss_fn of \(params, extra, \*batch\).* as the second argument",
    ),
    "a dtype to differentiate with": (
        lambda: gs.train_step(lambda w, x: (x @ w).mean(), using="float16"),
        "a function such as jax.value_and_grad for using; got float16",
    ),
    "a scale that is none": (lambda: PLAIN.replace(loss_scale=0.0), "loss_scale"),
    "no transformation left to apply gradients with": (
        lambda: pickle.loads(pickle.dumps(jax.device_get(PLAIN))).apply_gradients(PLAIN.params),
        r"Write state = state.replace\(tx=other.tx\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_with_the_line_to_write(mistake):
    """Each mistake is an error that names the argument, before anything changes."""
    run, words = MISTAKES[mistake]
    before = leaves((PLAIN, KEEPING))
    with pytest.raises((TypeError, ValueError), match=words):
        run()
    assert leaves((PLAIN, KEEPING)) == before


def test_the_scale_can_be_set():
    """`replace(loss_scale=...)` sets it, and the rule goes on from there."""
    state = gs.TrainState.create(W, optax.adam(0.1)).replace(loss_scale=8)
    assert (state.loss_scale.dtype, float(state.loss_scale)) == (jnp.float32, 8.0)
    step = gs.train_step(lambda w, x: SMALL * (x @ w).mean(), donate=False)
    assert [float(step(state, x)[0].loss_scale) for x in (X, BAD)] == [8.0, 4.0]
    half = jax.jit(lambda state: state.replace(loss_scale=state.loss_scale / 2))(state)
    assert float(half.loss_scale) == 4.0


def test_an_nnx_model_wants_what_its_loss_has_changed():
    """Without the statistics that `value_and_grad` returned a step of an NNX model is refused."""
    state, loss_fn = first_state("of_nnx")
    _, _, grads = state.value_and_grad(loss_fn)(X, Y)
    with pytest.raises(TypeError, match=r"Write loss, extra, grads = state.value_and_grad"):
        state.apply_gradients(grads)


@pytest.mark.parametrize("where", ["aux", "extra"])
def test_an_applied_step_with_an_infinite_result_beside_its_loss_is_told_once(where):
    """A gradient may be finite where a count or a metric is not; the name of it is said."""

    def loss_fn(params, *rest):
        x = rest[-1]
        count = jnp.float32(3e38) * jnp.where(x[0, 0] > 5, 10.0, 1.0)
        beside = {"count": count, "mask": jnp.full(3, -jnp.inf), "best": jnp.float32(1)}
        return jnp.mean((x @ params) ** 2), beside

    extra = {"count": jnp.float32(0), "mask": jnp.full(3, -jnp.inf), "best": jnp.float32(jnp.inf)}
    state = gs.TrainState.create(
        jnp.ones(4),
        optax.sgd(1e-3),
        loss_scale=gs.FixedLossScale(2.0),
        extra=extra if where == "extra" else None,
    )
    step = gs.train_step(loss_fn, has_aux=where == "aux")

    def run(state):
        for number in range(3 * 64 + 1):
            state, *_ = step(state, jnp.full((2, 4), 6.0 if number == 40 else 1.0))

    with pytest.warns(UserWarning, match="beside its value") as told:
        run(state)
    (said,) = [str(w.message) for w in told]
    assert f"'{where}/count', which the loss returns beside its value, has an inf or NaN" in said
    assert "gainstage.keep_float32()" in said


def with_sums(w, batch):
    """A loss whose aux has the names of the batch, and the sum of each array in it."""
    return (w**2).sum(), {name: (w * x).sum() for name, x in batch.items()}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("threads", [1, 2])
def test_of_batches_of_two_kinds_the_right_array_is_named(first, threads):
    """Batches with other names of aux, in either order and in two threads: the warning names the
    array of the kind in which it is not finite."""
    bad = {"mean": jnp.float32(1.0), "scale": jnp.float32(2.0), "total": jnp.float32(jnp.inf)}
    kinds = [bad, {"count": jnp.float32(1.0)}]
    kinds = kinds[first:] + kinds[:first]
    step = gs.train_step(with_sums, has_aux=True, donate=False)
    start = gs.TrainState.create(jnp.ones(2), optax.sgd(0.0))

    def run(offset):
        state = start
        for i in range(65):
            state, *_ = step(state, kinds[(i + offset) % 2])
        return state

    def run_all():
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            jax.block_until_ready(list(pool.map(run, range(threads))))
        for _ in range(3):  # no step waits for the numbers of an earlier one: a later one tells
            jax.block_until_ready(run(0))

    with pytest.warns(UserWarning, match="beside its value") as told:
        run_all()
    names = {str(warning.message).partition(",")[0] for warning in told}
    assert names == {"'aux/total'"}


def test_nothing_is_said_of_results_that_are_infinite_on_purpose():
    """A mask of -inf, and a smallest loss that starts at inf in the extra, are right."""

    def loss_fn(params, extra, x):
        loss = jnp.mean((x @ params) ** 2)
        best = jnp.where(x[0, 0] > 5, jnp.minimum(extra["best"], loss), extra["best"])
        return loss, {"best": best}, jnp.full(3, -jnp.inf)

    extra = {"best": jnp.float32(jnp.inf)}
    state = gs.TrainState.create(
        jnp.ones(4), optax.sgd(1e-3), loss_scale=gs.FixedLossScale(2.0), extra=extra
    )
    step = gs.train_step(loss_fn, has_aux=True)
    for _ in range(2 * 64 + 1):
        state, *_ = step(state, jnp.ones((2, 4)))

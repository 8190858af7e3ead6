"""Microbatches: the loss and gradients of a whole batch, with the memory of a part of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs

X = jax.random.normal(jax.random.key(0), (64, 32))
Y = jnp.sin(X[:, :4])
MASK = (jax.random.uniform(jax.random.key(5), (64, 1)) < 0.3).astype(jnp.float32)
MASK = MASK.at[::8].set(0)  # one of eight parts has no token
PLAIN = gs.FixedLossScale(1.0)


def params(hidden=128):
    keys = jax.random.split(jax.random.key(1))
    a, b = (
        jax.random.normal(k, (n, m)) / n**0.5
        for k, (n, m) in zip(keys, [(32, hidden), (hidden, 4)], strict=True)
    )
    return {"a": a, "b": b}


def loss_fn(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2)


def of_tokens(p, x, y, mask):
    """The mean over the tokens that a mask leaves."""
    return (mask * (jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2).sum() / mask.sum()


def tokens(x, y, mask):
    return mask.sum()


def difference(a, b):
    """The norm of a difference, of that of the second."""
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)) / optax.tree.norm(b))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_loss_and_gradients_are_those_of_the_whole_batch(count, half):
    """With `n` microbatches the loss and the update are those of the whole batch in float32."""
    tx, fun = optax.sgd(1.0), gs.autocast(loss_fn) if half else loss_fn
    state = gs.TrainState.create(params(), tx, loss_scale="dynamic" if half else PLAIN)
    state, loss = gs.train_step(fun, microbatches=count)(state, X, Y)
    expected, grads = jax.value_and_grad(loss_fn)(params(), X, Y)
    assert loss == pytest.approx(float(expected), rel=1e-3 if half else 1e-6)
    update = jax.tree.map(jnp.subtract, params(), state.params)
    assert difference(update, grads) < (3e-3 if half else 1e-5)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_parts_of_unequal_length_count_by_their_weight(count):
    """With the number of tokens as weight, loss and gradients are those of the whole batch, though
    one part has no token and a loss of NaN."""
    state = gs.TrainState.create(params(), optax.sgd(1.0))
    step = gs.train_step(gs.autocast(of_tokens), microbatches=count, weight=tokens)
    state, loss = step(state, X, Y, MASK)
    expected, grads = jax.value_and_grad(of_tokens)(params(), X, Y, MASK)
    assert loss == pytest.approx(float(expected), rel=1e-3)
    assert difference(jax.tree.map(jnp.subtract, params(), state.params), grads) < 3e-3


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("rule", [gs.DynamicLossScale(8.0, 2), gs.AdaptiveLossScale(8.0)])
@pytest.mark.parametrize("of", [of_tokens, lambda *args: jnp.nan_to_num(of_tokens(*args))])
def test_a_batch_that_counts_nothing_is_skipped(count, rule, of):
    """If no part has a token, the step is skipped, and neither the loss scale nor its counts change
    for it, whether the loss is NaN then or 0."""
    state = gs.TrainState.create(params(), optax.sgd(1.0), loss_scale=rule)
    step = gs.train_step(gs.autocast(of), microbatches=count, weight=tokens, donate=False)
    new = state
    for _ in range(4):
        new, loss = step(new, X, Y, 0 * MASK)
        assert not new.applied
        assert np.isnan(loss)
    assert new.opt_state.rule_state == state.opt_state.rule_state
    assert int(new.step) == 0
    np.testing.assert_array_equal(new.params["a"], state.params["a"])
    assert step(new, X, Y, MASK)[0].applied


def test_a_part_that_counts_nothing_changes_nothing():
    """Padding of NaN in a part of weight 0 leaves the running means of the model finite: they are
    those of the other parts."""

    def loss(model, x, y, mask):
        return (mask * (model(x) - y) ** 2).sum() / mask.sum()

    mask = jnp.ones((64, 1)).at[1::4].set(0)
    state = gs.TrainState.create(normed(), optax.sgd(0.1), loss_scale=PLAIN)
    step = gs.train_step(loss, microbatches=4, weight=tokens)
    state, _ = step(state, X.at[1::4].set(jnp.nan), Y, mask)
    assert state.applied
    model = normed()
    for i in (0, 2, 3):
        model(X[i::4])
    np.testing.assert_allclose(
        state.params.layers[1].mean[...], model.layers[1].mean[...], rtol=1e-5
    )


def test_one_part_that_overflows_skips_the_step_and_all_its_changes():
    """A NaN in one of four parts changes nothing, of the statistics of the parts before it too."""
    model, tx = normed(), optax.sgd(0.1)
    state, step = (
        gs.TrainState.create(model, tx),
        gs.train_step(gs.autocast(of_model), microbatches=4),
    )
    state, _ = step(state, X, Y)
    before = data(nnx.state(state.params))
    state, _ = step(state, X.at[3].set(jnp.nan), Y)  # of the last part
    assert not state.applied
    for old, new in zip(before, data(nnx.state(state.params)), strict=True):
        np.testing.assert_array_equal(new, old)


def data(tree):
    """The numbers of all arrays and keys of a pytree."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def normed():
    """Layers with running means and random numbers."""
    r = nnx.Rngs(0)
    norm = nnx.BatchNorm(64, momentum=0.9, rngs=r)
    return nnx.Sequential(
        nnx.Linear(32, 64, rngs=r), norm, nnx.Dropout(0.5, rngs=r), nnx.Linear(64, 4, rngs=r)
    )


def of_model(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def test_statistics_and_masks_go_on_from_part_to_part():
    """Running means and dropout masks of an NNX model are those of the same four parts one after
    the other in float32, and so are loss and gradients."""
    state = gs.TrainState.create(normed(), optax.sgd(1.0), loss_scale=PLAIN)
    state, loss = gs.train_step(of_model, microbatches=4)(state, X, Y)
    model, losses, total = normed(), [], None
    for i in range(4):
        each, grads = nnx.value_and_grad(of_model)(model, X[i::4], Y[i::4])
        losses.append(float(each))
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    assert loss == pytest.approx(np.mean(losses), rel=1e-6)
    found, expected = (dict(nnx.to_flat_state(nnx.state(m))) for m in (state.params, model))
    for path, variable in expected.items():
        if not isinstance(variable, nnx.Param):
            for new, old in zip(data(found[path]), data(variable), strict=True):
                np.testing.assert_allclose(new, old, atol=1e-6)
    before = nnx.state(normed(), nnx.Param)
    update = jax.tree.map(jnp.subtract, before, nnx.state(state.params, nnx.Param))
    assert difference(update, jax.tree.map(lambda g: g / 4, total)) < 1e-5


def test_the_extra_of_a_state_goes_on_from_part_to_part():
    """A mean and a key of one's own are those of the parts one after the other, and aux has an axis
    of the parts."""

    def loss(p, extra, x, y):
        key, now = jax.random.split(extra["key"])
        kept = jax.random.bernoulli(now, 0.5, x.shape)
        extra = {"key": key, "mean": 0.9 * extra["mean"] + 0.1 * x.mean(0)}
        return loss_fn(p, kept * x, y), extra, {"first": x[0, 0]}

    extra = {"key": jax.random.key(7), "mean": jnp.zeros(32)}
    copy = jax.tree.map(jnp.copy, extra)
    state = gs.TrainState.create(params(), optax.sgd(1.0), extra=copy, loss_scale=PLAIN)
    step = gs.train_step(loss, has_aux=True, microbatches=4)
    state, found, aux = step(state, X, Y)
    losses, more = [], extra
    for i in range(4):
        each, more, _ = loss(params(), more, X[i::4], Y[i::4])
        losses.append(float(each))
    assert found == pytest.approx(np.mean(losses), rel=1e-6)
    np.testing.assert_allclose(state.extra["mean"], more["mean"], rtol=1e-6)
    assert (jax.random.key_data(state.extra["key"]) == jax.random.key_data(more["key"])).all()
    np.testing.assert_array_equal(aux["first"], X[:4, 0])


def test_keys_models_and_numbers_of_a_batch():
    """A key is split for the parts; a number, and a model of Equinox or NNX, goes to each of them
    whole, and the means of that model go on from part to part."""
    other = nnx.BatchNorm(32, momentum=0.5, rngs=nnx.Rngs(0))
    net = eqx.nn.Linear(32, 32, key=jax.random.key(0))

    def loss(p, x, key, factor, norm, net):
        noise = jax.random.normal(key, (4,))
        x = jax.vmap(net)(norm(x))
        return factor * jnp.mean((x @ p["a"] @ p["b"] - noise) ** 2), noise

    state = gs.TrainState.create(params(), optax.sgd(0.1), loss_scale=PLAIN)
    step = gs.train_step(loss, has_aux=True, microbatches=4)
    key = jax.random.key(3)
    _, found, noise = step(state, X, key, 2.0, other, net)
    norm, losses = nnx.BatchNorm(32, momentum=0.5, rngs=nnx.Rngs(0)), []
    for i, own in enumerate(jax.random.split(key, 4)):
        losses.append(float(loss(params(), X[i::4], own, 2.0, norm, net)[0]))
    assert found == pytest.approx(np.mean(losses), rel=1e-5)
    assert len(np.unique(noise)) == 16
    np.testing.assert_allclose(other.mean[...], norm.mean[...], rtol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_each_device_keeps_its_examples(kind):
    """Over eight devices the step is that of one, and no example moves to another device."""
    step, tx = gs.train_step(gs.autocast(loss_fn), microbatches=4), optax.sgd(1.0)
    expected, loss = step(gs.TrainState.create(params(), tx), X, Y)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    places = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        batch = jax.device_put((X, Y), places[0])
        state = gs.TrainState.create(jax.device_put(params(), places[1]), tx)
        program = step.lower(state, *batch).compile().as_text()
        state, found = step(state, *batch)
    assert found == pytest.approx(float(loss), rel=1e-5)
    for new, old in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
        np.testing.assert_allclose(np.asarray(new), np.asarray(old), atol=1e-4)
    assert "all-gather(" not in program
    assert "all-to-all(" not in program


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_memory_is_that_of_a_part(count):
    """The temporaries of the compiled step are at most 1.1 of those of a step with one part, and
    one copy of the gradients."""
    state = gs.TrainState.create(params(1024), optax.adam(1e-3))
    half, size = gs.autocast(loss_fn), 4096

    def temporaries(examples, microbatches):
        batch = [jax.ShapeDtypeStruct((examples, n), jnp.float32) for n in (32, 4)]
        lowered = gs.train_step(half, microbatches=microbatches).lower(state, *batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    gradients = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert temporaries(size, count) <= 1.1 * temporaries(size // count, 1) + gradients
    assert temporaries(size, count) < 0.8 * temporaries(size, 1)


def test_what_half_precision_spoils_is_found_in_a_part():
    """An audit of a step with microbatches compares the first part, and so does a mending."""

    def spoiled(p, x, y):
        h = (jnp.tanh(x @ p["a"]) + 2048.0) @ p["b"]
        return jnp.mean((h - 2048.0 * p["b"].sum(0) - y) ** 2)

    state = gs.TrainState.create(params(), optax.sgd(1e-3), loss_scale=gs.DynamicLossScale(2.0**4))
    step = gs.train_step(gs.autocast(spoiled), microbatches=4, audit_every=100, mend=True)
    with pytest.warns(UserWarning, match="float32"):
        state, _ = step(state, X, Y)
    assert step.plan.entries


def test_an_optimizer_that_searches_gets_the_whole_batch():
    """`optax.lbfgs` with four microbatches goes as far as with the whole batch."""
    losses = []
    for count in (1, 4):
        state = gs.TrainState.create(params(), optax.lbfgs())
        step = gs.train_step(gs.autocast(loss_fn), microbatches=count)
        for _ in range(5):
            state, loss = step(state, X, Y)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] < 0.5 * float(loss_fn(params(), X, Y))


REFUSED = {
    "three": ({"microbatches": 3}, (X, Y), r"=3 divides; got 64 examples in `batch\[0\]`"),
    "two lengths": (
        {"microbatches": 2}, (X, Y[:3]),
        r"one length .* got 64 of `batch\[0\]` and 3 of `batch\[1\]`. Pass what belongs",
    ),
    "a number alone": ({"microbatches": 2}, (1.0, 2.0), "arrays with a leading axis .*; got none"),
    "none": ({"microbatches": 0}, (X, Y), "Expected .*microbatches.* got 0"),
    "a weight that is none": (
        {"microbatches": 2, "weight": 1.0}, (X, Y), "Expected a function of a microbatch for weight"
    ),
    "weights of examples": (
        {"microbatches": 2, "weight": lambda x, y: x[:, 0]}, (X, Y), r"scalar from weight.*\(32,\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_without_such_parts_is_refused(case):
    """The error names the array and its length, and the state can be stepped afterwards."""
    options, batch, text = REFUSED[case]
    state = gs.TrainState.create(params(), optax.sgd(0.1), loss_scale=PLAIN)
    with pytest.raises((TypeError, ValueError), match=text):
        gs.train_step(loss_fn, **options)(state, *batch)
    state, _ = gs.train_step(loss_fn)(state, X, Y)
    assert state.applied


# ── a loop of one's own ──────────────────────────────────────────────────────────────────────────


def mean_of(grads):
    return jax.tree.map(lambda *each: sum(each) / len(each), *grads)


def dropping(state, *parts):
    grads = []
    for part in parts:
        loss, extra, own = state.value_and_grad(of_model)(*part)
        grads.append(own)
    return state.apply_gradients(mean_of(grads), extra), loss


def threading(state, *parts):
    grads, part = [], state
    for each in parts:
        loss, extra, own = part.value_and_grad(of_model)(*each)
        part = part.replace(extra=extra)
        grads.append(own)
    return state.apply_gradients(mean_of(grads), extra), loss


def averaging(state, *parts):
    """The statistics of all parts, which the user averages."""
    found = [state.value_and_grad(of_model)(*part) for part in parts]
    extras = [extra for _, extra, _ in found]
    extra = jax.tree.map(
        lambda x, *others: (x + sum(others)) / len(parts) if x.dtype == jnp.float32 else x, *extras
    )
    return state.apply_gradients(mean_of([grads for *_, grads in found]), extra)


def two_losses(state, part, _):
    """Two gradients of one batch, of which one has the statistics."""
    _, extra, one = state.value_and_grad(of_model)(*part)
    _, _, other = state.value_and_grad(lambda m, x, y: (m(x) ** 2).mean())(*part)
    return state.apply_gradients(mean_of([one, other]), extra)


PARTS = [(X[i::2], Y[i::2]) for i in range(2)]


def test_lint_finds_an_extra_that_is_dropped_between_parts():
    """A loop that starts each part from the same keys and statistics is named, with a line that is
    right: the statistics are then those of `train_step` with microbatches."""
    state = gs.TrainState.create(normed(), optax.sgd(0.1), loss_scale=PLAIN)
    (fault,) = gs.lint(dropping, state, *PARTS)
    assert fault.kind == "extra dropped"
    assert fault.line.startswith("test_microbatches.py:")
    assert "microbatches=n" in fault.text
    assert "part = part.replace(extra=extra)" in fault.text
    followed, _ = jax.jit(threading)(state, *PARTS)
    ours, _ = gs.train_step(of_model, microbatches=2)(state, X, Y)
    for found, expected in zip(*map(data, (followed.params, ours.params)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("step", [threading, averaging, two_losses, jax.jit(threading)])
def test_lint_says_nothing_of_an_extra_that_goes_on(step):
    """Neither of a loop that hands the extra on, nor of statistics that are averaged, nor of two
    losses of one batch."""
    state = gs.TrainState.create(normed(), optax.sgd(0.1), loss_scale=PLAIN)
    assert gs.lint(step, state, *PARTS) == []

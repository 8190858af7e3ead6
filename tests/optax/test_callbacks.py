"""What callbacks do between steps: keep the best state, unfreeze, grow, and look at the loss."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gainstage as gs

X = jax.random.normal(jax.random.key(0), (64, 32))
Y = jnp.sin(X[:, :4])
BAD = X.at[0, 0].set(jnp.nan)


def params():
    keys = jax.random.split(jax.random.key(1))
    shapes = {"body": (32, 64), "head": (64, 4)}
    return {
        name: {"w": jax.random.normal(key, shape) / shape[0] ** 0.5, "b": jnp.zeros(shape[1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_fn(p, x, y):
    h = jnp.tanh(x @ p["body"]["w"] + p["body"]["b"])
    return jnp.mean((h @ p["head"]["w"] + p["head"]["b"] - y) ** 2)


HALF = gs.autocast(loss_fn)


def of_head(head, body, x, y):
    return loss_fn({"body": body, "head": head}, x, y)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


# ── the best state ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("copied", [gs.TrainState.copy, copy.copy, copy.deepcopy])
def test_the_best_state_is_kept_and_goes_on(copied):
    """A copy is as it was after the steps of the original, and can be stepped itself."""
    step, state = gs.train_step(HALF), gs.TrainState.create(params(), optax.adam(1e-2))
    state, _ = step(state, X, Y)
    best = copied(state)
    before = bits(best)
    for _ in range(3):
        state, _ = step(state, X, Y)
    assert bits(best) == before
    again, loss = step(best, X, Y)
    for _ in range(2):
        again, loss = step(again, X, Y)
    assert bits(again) == bits(state)
    assert np.isfinite(loss)


def models():
    yield "arrays", params(), lambda p, x, y: loss_fn(p, x, y)
    model = eqx.nn.MLP(32, 4, 16, 1, key=jax.random.key(0))
    yield "equinox", model, lambda m, x, y: jnp.mean((jax.vmap(m)(x) - y) ** 2)
    model = nnx.Linear(32, 4, rngs=nnx.Rngs(0))
    yield "nnx", model, lambda m, x, y: jnp.mean((m(x) - y) ** 2)


USES = {
    "params": lambda state, half: state.params,
    "value_and_grad": lambda state, half: state.value_and_grad(half)(X, Y),
    "apply_gradients": lambda state, half: state.apply_gradients({}),
    "xray": lambda state, half: gs.xray(half, state, X, Y),
    "audit": lambda state, half: gs.audit(half, state, X, Y),
    "mend": lambda state, half: gs.mend(half, state, X, Y),
    "train_step": lambda state, half: gs.train_step(half)(state, X, Y),
    "lint": lambda state, half: gs.lint(gs.train_step(half), state, X, Y),
    "a copy": lambda state, half: state.copy(),
    "another pytree": lambda state, half: jax.tree.map(jnp.copy, {"state": state}),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_state_that_was_donated_says_what_to_do(kind, use):
    """Each use of a state that a step has deleted names it, and the line that keeps one."""
    _, model, loss = list(models())[kind]
    half = gs.autocast(loss)
    old = gs.TrainState.create(model, optax.sgd(0.1))
    gs.train_step(half)(old, X, Y)
    with pytest.raises(ValueError, match=r"`state\.params` was donated .*best = state\.copy\(\)"):
        USES[use](old, half)
    assert "donated" in repr(old)
    assert float(old.loss_scale) == 2.0**15


# ── other parameters ─────────────────────────────────────────────────────────────────────────────


def test_unfreezing_goes_on_as_in_plain_optax():
    """The head alone, then all: the weights are those of plain optax with the moments of the head
    kept and new ones for the body; scale, steps and telemetry go on."""
    tx, first = optax.adam(1e-2), params()
    state = gs.TrainState.create({"head": first["head"]}, tx, telemetry=True)
    frozen = gs.train_step(
        gs.autocast(lambda p, body, x, y: of_head(p["head"], body, x, y)), donate=False
    )
    step = gs.train_step(HALF)
    p, inner = {"head": params()["head"]}, tx.init({"head": params()["head"]})
    for i in range(10):
        state, _ = frozen(state, first["body"], BAD if i == 3 else X, Y)
        if i != 3:
            grads = jax.grad(lambda p: of_head(p["head"], first["body"], X, Y))(p)
            updates, inner = tx.update(grads, inner)
            p = optax.apply_updates(p, updates)
    state = state.with_params({**state.params, "body": first["body"]})
    assert float(state.loss_scale) == 2.0**14
    assert int(state.step) == 9
    assert int(state.info.skipped_steps) == 1
    p = {**p, "body": params()["body"]}
    whole = tx.init(p)
    mu, nu = ({**getattr(whole[0], n), **getattr(inner[0], n)} for n in ("mu", "nu"))
    inner = (inner[0]._replace(mu=mu, nu=nu), *inner[1:])
    for _ in range(10):
        state, _ = step(state, X, Y)
        updates, inner = tx.update(jax.grad(loss_fn)(p, X, Y), inner)
        p = optax.apply_updates(p, updates)
    off = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, p))
    assert off < 2e-3 * optax.tree.norm(p)


CHANGES = {
    "the same under another name": lambda p: {"x": p["body"], "head": p["head"]},
    "fewer": lambda p: {"head": p["head"]},
    "more": lambda p: {**p, "other": jnp.ones(3)},
    "a wider head": lambda p: {**p, "head": {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}},
    "new arrays of the same names": lambda p: jax.tree.map(lambda x: 2 * x, p),
}
OTHERS = {
    "the same": None,
    "with a clip before": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "one of another kind": lambda: optax.sgd(0.1, momentum=0.9),
    "in MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


def moments(state, field):
    """The moments of each parameter by path, None if the optimizer has none."""
    names = [p for p, _ in jax.tree_util.tree_flatten_with_path(state.params)[0]]
    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]:
        for name in names:
            at = path[: len(path) - len(name)]
            if path[len(at) :] == name and getattr(at[-1], "name", "") == field:
                found[jax.tree_util.keystr(name)] = np.asarray(x)
    return found


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_keeps_its_name_keeps_its_moments(change, other):
    """Moments of a parameter with the same name and shape, or of the same array, are kept, also by
    another chain; all others are 0. The state can be stepped."""
    state = gs.TrainState.create(
        params(), optax.adam(1e-2), loss_scale=gs.DynamicLossScale(2.0**10)
    )
    for _ in range(3):
        state, _ = gs.train_step(HALF)(state, X, Y)
    before, old = moments(state, "mu"), state.params
    tx = None if OTHERS[other] is None else OTHERS[other]()
    new = state.with_params(CHANGES[change](old), tx)
    assert float(new.loss_scale) == 2.0**10
    assert int(new.step) == 3
    names = {"['x']['w']": "['body']['w']", "['x']['b']": "['body']['b']"}
    for name, found in moments(new, "mu").items():
        known = before.get(names.get(name, name), np.zeros(0))
        expected = known if known.shape == found.shape else np.zeros_like(found)
        np.testing.assert_array_equal(found, expected)
    assert bool(moments(new, "mu")) == (other != "one of another kind")
    stepped, _ = gs.train_step(lambda p: sum((x**2).sum() for x in jax.tree.leaves(p)))(
        new.replace(loss_scale=1.0)
    )
    assert stepped.step == 4


@pytest.mark.parametrize("kind", [1, 2])
def test_a_grown_model_of_a_library_keeps_its_moments(kind):
    """A layer that is added to a model of Equinox or NNX begins without moments, and the others
    keep theirs."""
    if kind == 1:
        keys = jax.random.split(jax.random.key(0), 3)
        layers = [eqx.nn.Linear(32, 32, key=key) for key in keys]
        model, grown = (eqx.nn.Sequential(layers[:n]) for n in (2, 3))
        loss = lambda m, x: jnp.mean((jax.vmap(m)(x)) ** 2)  # noqa: E731
    else:
        layers = [nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(3)]
        model, grown = (nnx.Sequential(*layers[:n]) for n in (2, 3))
        loss = lambda m, x: jnp.mean(m(x) ** 2)  # noqa: E731
    state = gs.TrainState.create(model, optax.adam(1e-3))
    step = gs.train_step(loss, donate=False)
    state, _ = step(state.replace(loss_scale=1.0), X)
    new = state.with_params(grown)
    old = jax.tree.leaves(state.opt_state.inner[0].mu)
    found = jax.tree.leaves(new.opt_state.inner[0].mu)
    assert [x.any() for x in map(np.asarray, found)] == [True] * 4 + [False] * 2
    for a, b in zip(old, found[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    assert step(new, X)[0].applied


def test_another_chain_keeps_the_count_of_its_optimizer():
    """With a clip in front, or without one, the count of Adam goes on, so that its bias correction
    does, and a bare array keeps its moments too."""
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    for first, other in ((optax.adam(1e-2), clip), (clip, optax.adam(1e-2))):
        state = gs.TrainState.create(jnp.ones(3), first)
        step = gs.train_step(lambda w: (w**2).sum())
        for _ in range(4):
            state, _ = step(state)
        new = state.with_params(state.params, other)
        assert optax.tree.get(new.opt_state, "count") == 4
        for name in ("mu", "nu"):
            old, found = (optax.tree.get(s.opt_state, name) for s in (state, new))
            np.testing.assert_array_equal(found, old)


def test_a_layer_in_front_of_a_list_is_new():
    """A layer that takes the place of another one has no moments if the other one moves on."""
    state = gs.TrainState.create([jnp.ones((4, 4)), 2 * jnp.ones((4, 4))], optax.adam(1e-2))
    state, _ = gs.train_step(lambda p: jnp.mean((p[0] @ p[1]) ** 2), donate=False)(state)
    layers = [jnp.zeros((4, 4)), *state.params]
    mu = optax.tree.get(state.opt_state, "mu")
    found = optax.tree.get(state.with_params(layers).opt_state, "mu")
    for new, old in zip(found, [jnp.zeros((4, 4)), *mu], strict=True):
        np.testing.assert_array_equal(new, old)


# ── numbers of an epoch ──────────────────────────────────────────────────────────────────────────


def test_the_mean_loss_of_an_epoch_leaves_skipped_steps_out():
    """A sum over applied steps is finite with a NaN batch, and waits for no step."""
    state, step = gs.TrainState.create(params(), optax.adam(1e-3)), gs.train_step(HALF)
    total, count, finite = jnp.float32(0), jnp.int32(0), []
    for x in (X, BAD, X):
        state, loss = step(state, x, Y)
        total += jnp.where(state.applied, loss, 0.0)
        count += state.applied
        finite.append(float(loss))
    assert float(total / count) == pytest.approx(np.nanmean(finite))

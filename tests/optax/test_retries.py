"""With retries, an overflow costs a step some time, and no batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage import diagnostics

from networks import normalised

P = PartitionSpec
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (256, 16))
Y = X @ jax.random.normal(KEYS[1], (16, 16))
W = jnp.zeros((16, 16))
NO_COUNTS = {"skipped_steps": 0, "retried_steps": 0}


def loss_fn(w, x, y, factor=1.0):
    out = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean((out - y) ** 2) * factor


def single(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def trained(retries, *batches, start=2.0**40, rule="dynamic", fun=loss_fn):
    """The state, and whether each step was applied."""
    w = jnp.array(W)
    rule = gs.DynamicLossScale(start) if rule == "dynamic" else rule
    state = gs.TrainState.create(w, optax.adam(0.1), loss_scale=rule, telemetry=True)
    step, applied = gs.train_step(fun, retries=retries), []
    for batch in batches:
        state, _ = step(state, *batch)
        applied.append(bool(state.applied))
    return state, applied


def counts(state):
    """How many steps were skipped, and how many retried."""
    return int(state.info.skipped_steps), int(state.info.retried_steps)


def test_from_a_scale_far_too_large_every_step_is_taken():
    """Twenty steps from 2**40 are twenty float32 steps, within one percent."""
    state, applied = trained(40, *[(X, Y)] * 20)
    exact, tx = jnp.array(W), optax.adam(0.1)
    opt_state = tx.init(exact)
    for _ in range(20):
        updates, opt_state = tx.update(jax.grad(single)(exact, X, Y), opt_state)
        exact = optax.apply_updates(exact, updates)
    assert all(applied)
    assert state.opt_state.inner[0].count == state.step == 20
    assert np.linalg.norm(state.params - exact) < 0.01 * np.linalg.norm(exact)


@pytest.mark.as_users
def test_a_retry_is_a_skipped_step_with_the_same_batch():
    """Parameters, slots, scale and norms are those of as many skipped steps, bit for bit."""
    retried, _ = trained(40, (X, Y), (X + 1, Y))
    lost = int(retried.info.retried_steps)
    skipped, applied = trained(0, *[(X, Y)] * (lost + 1), (X + 1, Y))
    assert applied == [False] * lost + [True, True]
    assert lost > 10
    assert counts(retried) == (0, lost)
    assert counts(skipped) == (lost, 0)
    results = [
        (s.params, s.opt_state.inner, s.opt_state.rule_state, s.info._replace(**NO_COUNTS))
        for s in (retried, skipped)
    ]
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(one, other)


def test_injected_overflows_lose_no_batch():
    """Every tenth loss is 2**30 times too large: without retries its batches are lost."""
    batches = [(X, Y, 2.0**30 if i % 10 == 9 else 1.0) for i in range(40)]
    rule = gs.DynamicLossScale(2.0**15, min_scale=2.0**-24)
    lost = {n: trained(n, *batches, rule=rule)[1].count(False) for n in (0, 40)}
    assert lost == {0: 4, 40: 0}


def language_model(params, tokens, factor):
    """The loss of a transformer block in float16, which predicts the next token. A cotangent in it
    is multiplied by `factor`, and divided by it again."""
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)

    def norm(x):
        x = x.astype(jnp.float32)
        return (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)).astype(jnp.float16)

    x = half["embedding"][tokens[:, :-1]] + half["positions"]
    q, k, v = (norm(x) @ half[name] for name in ("query", "key", "value"))
    scores = (q @ k.mT).astype(jnp.float32) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    x = x + jax.nn.softmax(scores).astype(jnp.float16) @ v @ half["out"]
    x = x + jax.nn.gelu(norm(x) @ half["up"]) @ half["down"]
    logits = (norm(x) / factor * factor @ half["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def test_a_language_model_loses_no_batch():
    """Every tenth step overflows: of 40 batches, 4 are lost without retries and none with four."""
    shapes = {"embedding": (64, 32), "positions": (16, 32), "up": (32, 64), "down": (64, 32)}
    shapes |= dict.fromkeys(("query", "key", "value", "out"), (32, 32))
    keys = jax.random.split(jax.random.key(1), len(shapes))
    first = {
        n: jax.random.normal(key, s) * 0.1 for key, (n, s) in zip(keys, shapes.items(), strict=True)
    }
    text = (jnp.arange(17) * 5 + jnp.arange(64)[:, None] ** 2) % 64  # the next token is 5 more
    rule = gs.DynamicLossScale(2.0**17, 2, max_scale=2.0**17)
    lost, last = {}, {}
    for retries in (0, 4):
        step = gs.train_step(language_model, retries=retries)
        params = jax.tree.map(jnp.copy, first)
        state = gs.TrainState.create(params, optax.adam(0.003), loss_scale=rule)
        lost[retries] = 0
        for i in range(40):
            factor = jnp.float16(2.0**9 if i % 10 == 9 else 1)
            state, loss = step(state, text[i % 4 :: 4], factor)
            lost[retries] += not state.applied
        last[retries] = loss
    assert lost == {0: 4, 4: 0}
    assert last[4] < last[0] < 2.0


@pytest.mark.parametrize("retries", [0, 8, 30, True])
def test_bad_data_costs_the_scale_one_step(retries):
    """NaN in the data is one skipped step, however many retries are allowed."""
    state, applied = trained(retries, (X.at[0].set(jnp.nan), Y), start=2.0**15)
    assert applied == [False]
    np.testing.assert_array_equal(state.params, W)
    assert state.loss_scale == 2.0**14
    assert counts(state) == (1, 0)


def test_retries_are_told_as_retries(tmp_path):
    """The report, the records of a run and the alarms know a retry from a lost batch."""
    rule, w = gs.DynamicLossScale(2.0**40, 1), jnp.array(W)
    state = gs.TrainState.create(w, optax.adam(0.1), loss_scale=rule, telemetry=True)
    step, alarms = gs.train_step(loss_fn, retries=40), []
    with (
        diagnostics.JsonLines(tmp_path / "run.jsonl", every=1) as log,
        diagnostics.Alarms(rule, alarms.append, every=1) as watch,
    ):
        for i in range(40):
            state, loss = step(state, X, Y)
            for writer in (log, watch):
                writer.write(i, state.info, loss=loss)
    skipped, retried = counts(state)
    assert skipped == 0 < retried
    text = str(gs.diagnostics.report(state, state.params))
    assert text.startswith(f"0 of 40 steps were skipped; {retried} tries were repeated")
    assert diagnostics.read_run(tmp_path / "run.jsonl").get("retried_steps")[-1] == retried
    assert [alarm.kind for alarm in alarms] == ["retries"]
    assert "start from a lower one" in alarms[0].message


def test_retries_without_a_number_go_on_until_the_step_fits():
    """From 2**120 the first step is taken with `retries=True`; with False it is skipped."""
    state, applied = trained(True, (X, Y), start=2.0**120)
    assert applied == [True]
    assert counts(state)[1] > 100
    state, applied = trained(False, (X, Y), start=2.0**120)
    assert applied == [False]
    assert counts(state) == (1, 0)


@dataclasses.dataclass(frozen=True)
class Restless(gs.LossScale):
    """A rule that moves the scale up and down for ever, whatever it is told."""

    def init(self):
        return gs.typing.ScaleState(jnp.float32(2.0**40))

    def update(self, state, finite):
        moved = jnp.where(state.scale > 2.0**39, 2.0**39, 2.0**40)
        return state._replace(scale=jnp.float32(moved))


@pytest.mark.parametrize(
    ("rule", "tries"), [(gs.DynamicLossScale(2.0**40, min_scale=2.0**35), 5), (Restless(), 1)]
)
def test_retries_without_a_number_end(rule, tries):
    """A step that fits no scale of the rule is one skipped step, also where the scale rises."""
    state, applied = trained(True, (X, Y), rule=rule)
    assert applied == [False]
    assert state.loss_scale == 2.0**39
    assert counts(state) == (1, tries)


def test_if_no_retry_is_applied_the_scale_is_lowered_once():
    """Three retries from 2**40 all overflow; the next step starts from half of the scale."""
    state, applied = trained(3, (X, Y))
    assert applied == [False]
    assert state.loss_scale == 2.0**39
    assert counts(state) == (1, 3)


@pytest.mark.filterwarnings("ignore:Retries have no effect")
@pytest.mark.parametrize(
    "rule", [gs.FixedLossScale(2.0**40), gs.DynamicLossScale(2.0**40, min_scale=2.0**40)]
)
def test_nothing_is_tried_again_at_the_same_scale(rule):
    """A rule that keeps its scale has no retry."""
    state, applied = trained(8, (X, Y), rule=rule)
    assert applied == [False]
    assert counts(state) == (1, 0)


def test_a_model_changes_in_the_try_that_counts():
    """Running means of batch normalisation move once in a step with retries."""
    nnx = pytest.importorskip("flax.nnx")
    means = []
    for power, retries in ((15, 0), (40, 40)):
        rule = gs.DynamicLossScale(2.0**power)
        state = gs.TrainState.create(normalised(nnx), optax.sgd(0.1), loss_scale=rule)
        step = gs.train_step(lambda m, x, y: jnp.mean((m(x) - y) ** 2), retries=retries)
        state, _ = step(state, X + 1, Y)
        assert state.applied
        means.append(np.asarray(state.params.norm.mean[...]))
    np.testing.assert_array_equal(*means)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_retry_together(kind):
    """One device overflows, and the step of all is that of one device; it compiles once."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x, y = (jax.device_put(v, NamedSharding(mesh, P("data"))) for v in (X, Y * 8))
    tx = gs.with_loss_scale(optax.sgd(0.1), gs.DynamicLossScale(2.0**30))
    step = gs.train_step(lambda w, x, y: loss_fn(w, x, y), retries=40)
    params = jax.device_put(np.zeros_like(W), NamedSharding(mesh, P()))
    state, one = gs.TrainState.create(params, tx), gs.TrainState.create(jnp.array(W), tx)
    with jax.set_mesh(mesh):
        for _ in range(3):
            state, _ = step(state, x, y)
    for _ in range(3):
        one, _ = step(one, X, Y * 8)
    np.testing.assert_allclose(state.params, one.params, rtol=1e-2, atol=1e-4)
    assert state.loss_scale == one.loss_scale < 2.0**30
    assert state.params.sharding.spec == P()


def test_bad_retries_are_refused():
    """The error names the argument and the value."""
    for retries in (-1, 0.5):
        with pytest.raises(ValueError, match="for retries; got"):
            gs.train_step(loss_fn, retries=retries)
    with pytest.raises(TypeError, match="retries; got 'all'"):
        gs.train_step(loss_fn, retries="all")

import functools
import itertools
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_floats import SMALL, with_small

import gainstage as gs
from gainstage.diagnostics import telemetry
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable
from gainstage.transforms import apply_updates, current_scale, scale_loss, step_was_applied

from peers import fails

AXES = [AxisType.Auto, AxisType.Explicit]


def loss_fn(params, x):
    return jnp.sum((params["w"].astype(jnp.float32) * x) ** 2)


def make(tx, dtype=jnp.float32, rule="dynamic", size=4):
    params = {"w": jnp.ones(size, dtype), "b": jnp.full((), -0.0, dtype)}
    tx = gs.with_loss_scale(tx, rule)
    return params, tx, tx.init(params)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_loss_and_gradients_are_true_and_float32(dtype):
    """`value_and_grad` returns the unscaled loss and gradients in float32, for half inputs too."""
    params, _, state = make(optax.sgd(0.1), dtype)

    def half_loss(params, x):
        return (params["w"] * x.astype(dtype)).sum(), {"aux": x}

    (loss, aux), grads = gs.value_and_grad(half_loss, state, has_aux=True)(params, jnp.ones(4))
    assert (loss.dtype, float(loss), aux["aux"].shape) == (jnp.float32, 4.0, (4,))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert grads["w"].tolist() == [1, 1, 1, 1]


# Asked for in levanter#122 (scaling for float16).
@pytest.mark.as_users
def test_small_gradients_survive_and_large_ones_are_seen():
    """A float16 gradient of 1e-9 is not lost, and one that overflowed comes back non-finite."""
    params, _, state = make(optax.sgd(0.1), jnp.float16)

    def loss(params, factor):
        return (params["w"].astype(jnp.float32) * factor).sum()

    unscaled = jax.grad(loss)(params, 1e-9)["w"]
    assert unscaled.tolist() == [0] * 4
    _, grads = gs.value_and_grad(loss, state)(params, 1e-9)
    np.testing.assert_allclose(grads["w"], 1e-9, rtol=1e-2)
    _, grads = gs.value_and_grad(loss, state)(params, 10.0)
    assert not jnp.isfinite(grads["w"]).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_integers_among_the_parameters_have_no_gradient(compiled):
    """float0 gradients, of `allow_int=True`, pass through; the others are scaled and checked."""
    params = {"w": jnp.ones(2), "table": jnp.arange(4).reshape(2, 2)}
    base = optax.masked(optax.sgd(0.5), {"w": True, "table": False})
    tx, using = (
        gs.with_loss_scale(base, gs.AdaptiveLossScale(), telemetry=True),
        partial(jax.value_and_grad, allow_int=True),
    )

    def step(params, state, factor):
        def loss(params):
            return (params["w"] * params["table"][1] * factor).sum()

        loss_value, grads = gs.value_and_grad(loss, state, using=using)(params)
        updates, state = tx.update(grads, state, params, value=loss_value)
        return loss_value, grads, updates, state

    step, state = jax.jit(step) if compiled else step, tx.init(params)
    loss, grads, updates, state = step(params, state, 1.0)
    assert (float(loss), grads["w"].tolist(), updates["w"].tolist()) == (5, [2, 3], [-1, -1.5])
    for tree in (grads, updates):
        assert (tree["table"].dtype, tree["table"].shape) == (jax.dtypes.float0, (2, 2))
    _, _, updates, state = step(params, state, jnp.nan)
    assert updates["w"].tolist() == [0, 0]
    assert (int(telemetry(state).skipped_steps), len(gs.diagnostics.report(state).counts)) == (
        1,
        2,
    )


def test_argnums():
    """Several arguments are differentiated as `jax.value_and_grad` does it."""
    _, _, state = make(optax.sgd(0.1))
    value_and_grad = gs.value_and_grad(lambda a, b: a * b, state, argnums=(0, 1))
    loss, grads = value_and_grad(jnp.float32(2), jnp.float32(5))
    assert (float(loss), [float(g) for g in grads]) == (10, [5, 2])


def test_keyword_arguments_of_an_nnx_loss():
    """`nnx.value_and_grad` gets the loss's own signature, so its arguments can have names."""
    nnx = pytest.importorskip("flax.nnx")
    _, _, state = make(optax.sgd(0.1))

    def loss(model, x, factor):
        return (model(x) * factor).mean()

    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    value_and_grad = gs.value_and_grad(loss, state, using=nnx.value_and_grad)
    _, grads = value_and_grad(model, factor=3.0, x=jnp.ones((1, 2)))
    np.testing.assert_array_equal(grads.kernel[...], 3.0)


def test_complex_gradients_are_read_in_both_parts():
    """A NaN in the imaginary part alone is a skipped step."""
    tx, params = gs.with_loss_scale(optax.sgd(0.5), telemetry=True), jnp.ones(2, jnp.complex64)
    state = tx.init(params)
    updates, state = tx.update(jnp.array([complex(1, np.nan), 1]), state, params)
    np.testing.assert_array_equal(updates, 0)
    assert not step_was_applied(state)
    updates, state = tx.update(jnp.array([3 + 4j, 0], jnp.complex64), state, params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates), [-0.5 - 2j, 1])
    assert float(telemetry(state).grad_norm) == 5.0


@pytest.mark.as_users
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_skipped_step_changes_nothing_but_the_scale(dtype, compiled):
    """Updates are -0.0, weights stay bit for bit (-0.0 too), and so does the inner state."""
    params, tx, state = make(optax.adamw(0.1, weight_decay=0.1), dtype)
    update = jax.jit(tx.update) if compiled else tx.update
    _, state = update({"w": jnp.ones(4), "b": jnp.float32(1)}, state, params)
    for bad in (np.nan, np.inf, -np.inf):
        grads = {"w": np.float32([1, bad, 1, 1]), "b": jnp.float32(1)}
        updates, new = update(grads, state, params)
        for leaf in jax.tree.leaves(updates):
            assert (leaf == 0).all()
            assert np.signbit(np.asarray(leaf)).all()
        applied = optax.apply_updates(params, updates)
        for a, b in zip(jax.tree.leaves(applied), jax.tree.leaves(params), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(new.inner), jax.tree.leaves(state.inner), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert (float(new.rule_state.scale), int(new.rule_state.good_steps)) == (2.0**14, 0)


@pytest.mark.as_users
@pytest.mark.parametrize("compiled", [False, True])
def test_apply_updates_leaves_the_weights_of_a_skipped_step_alone(compiled):
    """Bit for bit, subnormal ones and those that a transformation behind would move included."""
    tx = optax.chain(gs.with_loss_scale(optax.sgd(0.5)), optax.add_decayed_weights(-0.5))
    params = {
        "w": jnp.array([1e-40, -0.0, 1.0]),
        "half": jnp.array([6e-8, -1.0], jnp.float16),
        "fixed": jnp.arange(2),
        "none": None,
    }

    def step(params, grads, state):
        weights = {"w": params["w"], "half": params["half"]}
        updates, state = tx.update(grads, state, weights)
        updates |= {"fixed": np.zeros(2, jax.dtypes.float0), "none": None}
        return apply_updates(params, updates, state)

    step = jax.jit(step) if compiled else step
    grads = {"w": jnp.ones(3), "half": jnp.ones(2)}
    state = tx.init({"w": params["w"], "half": params["half"]})
    new = step(params, grads, state)
    np.testing.assert_array_equal(new["w"], [-0.5, -0.5, 0.0])
    assert (new["half"].dtype, new["half"].tolist()) == (jnp.float16, [-0.5, -1.0])
    kept = step(params, {**grads, "w": grads["w"] * jnp.nan}, state)
    for name in ("w", "half", "fixed"):
        assert np.asarray(kept[name]).tobytes() == np.asarray(params[name]).tobytes()
    assert kept["none"] is None


# Asked for in BMTrain#39.
def test_one_loss_has_one_scale():
    """A state with a scale for each group is refused; one scale around the groups skips both."""
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    groups = {"a": optax.sgd(0.5), "b": optax.adam(0.5)}
    scaled = {name: gs.with_loss_scale(tx) for name, tx in groups.items()}
    state = optax.multi_transform(scaled, {"a": "a", "b": "b"}).init(params)
    with pytest.raises(
        ValueError, match=r"One loss has one scale: with_loss_scale\(optax.multi_tr"
    ):
        gs.value_and_grad(loss_fn, state)
    tx = gs.with_loss_scale(optax.multi_transform(groups, {"a": "a", "b": "b"}))
    state = tx.init(params)
    updates, state = tx.update({"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)}, state, params)
    kept = apply_updates(params, updates, state)
    assert jax.tree.map(lambda x: x.tolist(), kept) == {"a": [1, 1], "b": [1, 1]}
    assert float(current_scale(state)) == 2.0**14
    updates, state = tx.update({"a": jnp.ones(2), "b": jnp.ones(2)}, state, params)
    assert all((update != 0).all() for update in jax.tree.leaves(updates))


def test_training_goes_on_after_a_storm_of_bad_batches(rng):
    """By default a float16 run reaches the same loss after 60 batches of NaN as without them."""
    x = jnp.asarray(rng.normal(size=(64, 8)), jnp.float16)
    params = {"w": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32) / 3, "v": jnp.ones(16) / 4}
    tx = gs.with_loss_scale(optax.adam(0.01))

    def loss(params, bad):
        hidden = jnp.tanh(jnp.where(bad, jnp.nan, x) @ params["w"].astype(jnp.float16))
        predicted = (hidden @ params["v"].astype(jnp.float16)).astype(jnp.float32)
        return jnp.mean((predicted - x[:, 0] * x[:, 1]) ** 2)

    def step(carry, bad):
        params, state = carry
        value, grads = gs.value_and_grad(loss, state)(params, bad)
        updates, state = tx.update(grads, state, params)
        return (apply_updates(params, updates, state), state), value

    @jax.jit
    def losses(storm):
        bad = (jnp.arange(360) >= 20) & (jnp.arange(360) < 20 + storm)
        return jax.lax.scan(step, (params, tx.init(params)), bad)[1]

    calm, stormy = losses(0)[:300], losses(60)
    assert calm[-1] < calm[20] / 4
    np.testing.assert_allclose(stormy[-1], calm[-1], rtol=0.1)


def test_finite_steps_are_those_of_the_wrapped_transformation():
    """Without an overflow the run is that of plain optax, and the scale grows as the rule says."""
    rule = gs.DynamicLossScale(4.0, increment_period=2)
    params, tx, state = make(optax.adam(0.1), rule=rule)
    plain, plain_params = optax.adam(0.1), params
    plain_state = plain.init(params)

    @jax.jit
    def step(params, state, x):
        _, grads = gs.value_and_grad(with_small(loss_fn), state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(6):
        x = np.arange(4, dtype=np.float32) + i
        with compilations() as compiled:
            params, state = step(params, state, x)
        assert i == 0 or compiled == []
        updates, plain_state = plain.update(jax.grad(loss_fn)(plain_params, x), plain_state)
        plain_params = optax.apply_updates(plain_params, updates)
    np.testing.assert_allclose(params["w"], plain_params["w"], rtol=1e-6)
    assert float(state.rule_state.scale) == 32.0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(tx, optax.clip_by_global_norm(1.0)),
        lambda tx: optax.chain(tx, optax.scale(2.0)),
        lambda tx: optax.named_chain(("scaled", tx), ("after", optax.scale(1.0))),
    ],
)
def test_it_composes(wrap):
    """The state is found inside of chains, and a bad step is skipped there too."""
    params = {"w": jnp.ones(3)}
    tx = wrap(gs.with_loss_scale(optax.sgd(0.1)))
    state = tx.init(params)
    for x in (1.0, jnp.inf):
        for _ in range(2):
            before = params
            _, grads = gs.value_and_grad(loss_fn, state)(params, jnp.full(3, x))
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    assert params["w"].tolist() == before["w"].tolist()
    assert jnp.isfinite(params["w"]).all()
    assert (params["w"] < 1).all()


def test_half_precision_state_is_float32():
    """Moments of float16 parameters are kept in float32, where they neither vanish nor overflow."""
    params, tx, state = make(optax.adam(0.1), jnp.float16)
    dtypes = {x.dtype for x in jax.tree.leaves(state.inner) if x.ndim}
    assert dtypes == {jnp.dtype(jnp.float32)}
    grads = {"w": jnp.full(4, 1e-6), "b": jnp.float32(0)}
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], 0.9, rtol=5e-3)
    assert float(params["b"]) == 0


def test_a_rule_gets_the_loss_as_value():
    """`value=` reaches a rule that measures the loss, and a transformation that wants it. Without
    it such a rule warns once, with the line to write."""
    seen = []

    class Watching(gs.FixedLossScale):
        measures = ("loss", "max_abs", "any_nan", "any_inf")

        def update(self, state, finite, **measured):
            seen.append({name: float(value) for name, value in measured.items()})
            return state

    params, tx, state = make(optax.sgd(0.1), rule=Watching(1.0))
    grads = {"w": jnp.array([1, -3, jnp.inf, 0.0]), "b": jnp.float32(2)}
    tx.update(grads, state, params, value=jnp.float16(2.5))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(2):
            tx.update(grads, state, params)
    (warning,) = told
    assert re.search(r"loss, which Watching measures.*params, value=loss\)", str(warning.message))
    assert seen[0] == {"loss": 2.5, "max_abs": 3.0, "any_nan": 0.0, "any_inf": 1.0}
    assert np.isnan(seen[1]["loss"])

    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    params, tx, state = make(plateau)
    tx.update(jax.tree.map(jnp.zeros_like, params), state, params, value=1.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda tx, params: tx,
            r"a transformation\. Pass its state: opt_state = tx.init\(params\)",
        ),
        (
            lambda tx, params: params,
            r"an object of type dict\. It has no state of optax: are the arg",
        ),
        (lambda tx, params: 0, r"got 0 in 0\. It has no state of optax: are the arguments in ano"),
        (lambda tx, params: optax.adam(0.1).init(params), r"Wrap the transformation: tx = gain"),
    ],
    ids=["transformation", "parameters", "number", "plain optax"],
)
def test_what_is_no_state_is_named_with_its_own_remedy(wrong, words):
    """The error says what was passed in place of the state, and what to write."""
    params = {"w": jnp.ones(3)}
    tx = gs.with_loss_scale(optax.adam(0.1))
    with pytest.raises(ValueError, match=words):
        gs.value_and_grad(loss_fn, wrong(tx, params))(params)
    with pytest.raises(ValueError, match=words):
        current_scale(wrong(tx, params))


@pytest.mark.as_users
def test_a_skipped_step_costs_one_temporary_at_most():
    """The compiled update needs no more temporary memory than one copy of the parameters."""
    params, tx, state = make(optax.adam(1e-3), size=1 << 18)
    grads = jax.tree.map(jnp.zeros_like, params)
    compiled = jax.jit(tx.update, donate_argnums=(0, 1)).lower(grads, state, params).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.01 * size + 4096


@pytest.mark.as_users
def test_it_runs_under_vmap_and_scan():
    """States with different scales side by side, and a whole run in one `scan`, decide alone."""
    params, tx, state = make(optax.sgd(0.5))

    def step(carry, x):
        params, state = carry
        loss, grads = gs.value_and_grad(with_small(loss_fn), state)(params, x)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    runs = jnp.array([[0.1, 0.1, 0.1], [0.1, jnp.nan, 0.1]])[:, :, None]
    (params, state), losses = jax.vmap(lambda xs: jax.lax.scan(step, (params, state), xs))(runs)
    assert state.rule_state.scale.tolist() == [2.0**15, 2.0**14]
    assert jnp.isfinite(params["w"]).all()
    assert float(losses[0, 1]) == float(losses[1, 2])


@pytest.mark.as_users
def test_state_that_moves_about_is_kept_leaf_by_leaf():
    """States may swap leaves, hand them on, repeat a value or change its dtype: a step is that of
    the transformation itself, and a skipped one changes no bit."""

    def init(params):
        return {"swapped": (jnp.float32(1), jnp.float32(2)), "same": jnp.int32(7)} | {
            name: jax.tree.map(jnp.zeros_like, params) for name in ("sum", "copy", "last")
        }

    def update(updates, state, params=None):
        total = jax.tree.map(jnp.add, state["sum"], updates)
        doubled = jax.tree.map(lambda t: (t * 2).astype(jnp.float16), total)
        new = {
            "swapped": state["swapped"][::-1],
            "same": state["same"],
            "sum": total,
            "copy": total,
            "last": doubled,
        }
        return jax.tree.map(lambda t, d: t + d, total, doubled), new

    plain = optax.GradientTransformation(init, update)
    params, tx, state = make(plain)
    expected = plain.init(params)
    scaled, step = jax.jit(tx.update), jax.jit(plain.update)
    for factor in (1.0, np.inf, 3.0, np.nan, 0.5):
        grads = jax.tree.map(lambda p, f=factor: jnp.full_like(p, f), params)
        before = state.inner
        updates, state = scaled(grads, state, params)
        if np.isfinite(factor):
            wanted, expected = step(grads, expected, params)
            expected = jax.tree.map(lambda new, old: new.astype(old.dtype), expected, before)
        else:
            wanted = jax.tree.map(lambda p: jnp.full_like(p, -0.0), params)
        for got, want in [(updates, wanted), (state.inner, expected)]:
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert one.dtype == other.dtype
                assert one.tobytes() == other.tobytes()


def test_the_state_can_be_asked_wherever_it_is():
    """Scale, scaled loss and whether the last step was applied, through `chain` and under jit."""
    params = {"w": jnp.ones(3, jnp.float16)}
    tx = optax.chain(optax.clip(1.0), gs.with_loss_scale(optax.sgd(0.5)))
    state = tx.init(params)
    assert bool(step_was_applied(state))
    scaled = scale_loss(jnp.float16(2.0), state)
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 2.0**16)
    update = jax.jit(tx.update)
    for factor, scale in [(np.nan, 2.0**14), (1.0, 2.0**14), (np.inf, 2.0**13)]:
        grads = jax.tree.map(lambda p, f=factor: jnp.full(p.shape, f), params)
        _, state = update(grads, state, params)
        # `clip` in front lets nan through, but makes an inf 1.
        assert bool(step_was_applied(state)) is not np.isnan(factor)
        assert float(current_scale(state)) == (scale if factor != np.inf else 2.0**14)
    for ask in (current_scale, step_was_applied, lambda s: scale_loss(1.0, s)):
        with pytest.raises(ValueError, match=r"exactly one state"):
            ask(optax.sgd(0.1).init(params))


WRAPPED = {
    "multi_transform, in one part": lambda tx: optax.multi_transform(
        {"w": tx, "b": optax.sgd(0.5)}, {"w": "w", "b": "b"}
    ),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda factor: optax.chain(
        tx, optax.scale(factor)))(factor=1.0),
    "named_chain": lambda tx: optax.named_chain(("scaled", tx), ("rest", optax.scale(1.0))),
    "partition": lambda tx: optax.partition({True: tx, False: optax.set_to_zero()},
                                            {"w": True, "b": False}),
}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_it_works_as_a_part(wrap):
    """In a part of a larger transformation the state is found, and its part is skipped alone."""
    tx = wrap(gs.with_loss_scale(optax.sgd(0.5, momentum=0.9), gs.DynamicLossScale(8.0)))
    params = {"w": jnp.ones(2), "b": jnp.ones(())}
    state = tx.init(params)
    update = jax.jit(tx.update)
    bad = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(())}
    updates, after = update(bad, state, params)
    assert np.signbit(np.asarray(updates["w"])).all()
    assert updates["w"].tolist() == [0.0, 0.0]
    assert (float(current_scale(after)), bool(step_was_applied(after))) == (4.0, False)
    good = {"w": jnp.ones(2), "b": jnp.ones(())}
    updates, after = update(good, after, params)
    assert updates["w"].tolist() == [-0.5, -0.5]
    assert bool(step_was_applied(after))


INSIDE = {
    "multi_transform": optax.multi_transform(
        {"w": optax.adam(0.1), "b": optax.sgd(0.5)}, {"w": "w", "b": "b"}
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation(),
    "masked decay": optax.adamw(0.1, weight_decay=0.1, mask={"w": True, "b": False}),
    "a chain with a norm": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.1)),
}


@pytest.mark.parametrize("inner", INSIDE.values(), ids=INSIDE)
def test_it_wraps_larger_ones(inner):
    """Around a larger transformation a bad step leaves all of its state, and the good ones are
    those of the transformation alone."""
    params = {"w": jnp.ones(2), "b": jnp.ones(())}
    tx = gs.with_loss_scale(inner)
    state, alone = tx.init(params), inner.init(params)
    update, update_alone = jax.jit(tx.update), jax.jit(inner.update)
    for step in range(6):
        grads = {"w": jnp.array([1.0 + step, -2.0]), "b": jnp.float32(0.5)}
        if step == 3:
            updates, state = update({**grads, "b": jnp.float32(jnp.inf)}, state, params)
            assert all(x.tolist() == (0 * x).tolist() for x in jax.tree.leaves(updates))
        updates, state = update(grads, state, params)
        wanted, alone = update_alone(grads, alone, params)
        for a, b in zip(jax.tree.leaves((updates, state.inner)), jax.tree.leaves((wanted, alone)),
                        strict=True):  # fmt: skip
            np.testing.assert_allclose(a, b, rtol=1e-6)


# Asked for in fairscale#834 (scales of parts).
def test_several_parts_have_a_scale_each():
    """Two scaled parts in one tree keep their own scale; asked without saying which, an error."""
    parts = {"a": gs.with_loss_scale(optax.sgd(0.1), gs.DynamicLossScale(8.0)),
             "b": gs.with_loss_scale(optax.sgd(0.1), gs.DynamicLossScale(64.0))}  # fmt: skip
    tx = optax.multi_transform(parts, {"w": "a", "v": "b"})
    params = {"w": jnp.ones(2), "v": jnp.ones(2)}
    _, state = tx.update({"w": jnp.full(2, jnp.nan), "v": jnp.ones(2)}, tx.init(params), params)
    scales = {name: float(current_scale(part)) for name, part in state.inner_states.items()}
    assert scales == {"a": 4.0, "b": 64.0}
    with pytest.raises(ValueError, match=r"exactly one state .* got 2"):
        current_scale(state)


def test_none_and_integers_in_the_tree():
    """A parameter that is None stays None; integers are no gradients, and say so as in JAX."""
    tx = gs.with_loss_scale(optax.sgd(0.5))
    params = {"w": jnp.ones(2), "nothing": None}
    state = tx.init(params)
    loss, grads = gs.value_and_grad(lambda p: (p["w"] ** 2).sum(), state)(params)
    updates, _ = tx.update(grads, state, params)
    assert (float(loss), grads["nothing"], updates["nothing"]) == (2.0, None, None)
    with pytest.raises(TypeError, match="int32"):
        gs.value_and_grad(lambda p: (p["w"] ** 2).sum(), state)({"w": jnp.ones(2, jnp.int32)})


def shards():
    """Large parts, on one kind of axes as JAX checks them and on the other unchecked."""
    for size, kind, checked in itertools.product([4, 40_000], AXES, [True, False]):
        often = size == 40_000 and checked == (kind == AxisType.Auto)
        yield pytest.param(kind, checked, size, marks=[pytest.mark.thorough] * (not often))


@pytest.mark.as_users
@pytest.mark.parametrize(("kind", "checked", "size"), list(shards()), ids=str)
def test_all_devices_agree_inside_of_shard_map(kind, checked, size):
    """A NaN in the part of one device skips the step on all, by one all-reduce, with telemetry too;
    the norm is that of all parts, where JAX knows what differs. (flax: each device ends up with
    its own scale.)"""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    tx = gs.with_loss_scale(optax.adam(0.1), telemetry=True)
    params = {"w": put(jnp.ones((8, size)), "data"), "b": put(jnp.ones(size))}
    specs = {"w": PartitionSpec("data"), "b": PartitionSpec()}
    state = tx.init(params)
    held = jax.tree.map(lambda x: x.sharding.spec, state)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, held, specs),
            out_specs=(specs, held),
            check_vma=checked,
        )
    )
    grads = {"w": put(jnp.ones((8, size)), "data"), "b": put(jnp.full(size, 2.0))}
    text = mapped.lower(params, state, grads).compile().as_text()
    text = text[text.index("ENTRY") :]  # branches that are seldom taken read on
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
    moved, after = mapped(params, state, grads)
    assert float(moved["w"].min()) < 1 > float(moved["b"].min())
    norm = np.sqrt(12 * size) if checked else np.nan  # which is not known then
    np.testing.assert_allclose(telemetry(after).grad_norm, norm, rtol=1e-5)
    bad = {**grads, "w": put(jnp.ones((8, size)).at[3, 0].set(jnp.nan), "data")}
    same, after = mapped(params, state, bad)
    assert [float(x.data) for x in after.rule_state.scale.addressable_shards] == [2.0**14] * 8
    for name, old in params.items():
        assert np.asarray(same[name]).tobytes() == np.asarray(old).tobytes()


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_norm_of_unknown_parts_is_refused(clip, wrapped):
    """Inside of `shard_map(check_vma=False)` a clip by a norm is an error that names the remedy,
    for parts of one gradient look like copies of it; with `check_vma=True` it is right."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    inner = SGD(1.0, **{clip: 1.0})
    opt = LossScaleOptimizer(inner, 1.0) if wrapped else inner
    opt.build([Variable(jnp.zeros(2))])
    values = [variable.value() for variable in opt.variables]

    def move(grads, **options):
        def step(grads):
            return opt.stateless_apply(values, [grads], [grads * 0])[0][0]

        spec = PartitionSpec("data")
        mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, **options)
        return jax.jit(mapped)(grads)

    grads = jnp.float32([0.1, 0.1, 0, 0, 30, 40, 0, 0])
    np.testing.assert_allclose(move(grads), -grads / 50, rtol=1e-5)
    with pytest.raises(ValueError, match=f"{clip} needs to know .* Use check_vma=True"):
        move(grads, check_vma=False)


@pytest.mark.parametrize("rule", [gs.DynamicLossScale(4.0), gs.AdaptiveLossScale(4.0)])
@pytest.mark.parametrize("told", [{}, {"telemetry": True}, {"underflow_every": 1}])
def test_a_fresh_state_can_be_donated(rule, told):
    """An optax loop may donate what `init` returned: no two leaves are one array."""
    params = {"w": jnp.ones(4)}
    tx = gs.with_loss_scale(optax.adam(0.1), rule, **{"telemetry": True} | told if told else {})
    state = tx.init(params)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        loss, grads = gs.value_and_grad(lambda p: (p["w"] ** 2).sum(), state)(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = step(params, state)
    assert (params["w"] < 1).all()


def test_a_state_keeps_its_types_whatever_a_rule_returns():
    """A rule that returns weakly typed or wider numbers does not change the type of the state."""

    class Careless(gs.DynamicLossScale):
        def update(self, state, finite, **measured):
            return state._replace(scale=jnp.where(finite, 2.0, 1.0), good_steps=3.0)

    tx = gs.with_loss_scale(optax.sgd(0.5), Careless())
    params = jnp.ones(2)
    with jax.enable_x64(True):
        state = tx.init(params)
        new = tx.update(jnp.ones(2), state, params)[1]
        types = [jax.tree.map(jnp.result_type, s.rule_state) for s in (state, new)]
    assert types[0] == types[1]
    assert not any(jnp.asarray(x).weak_type for x in new.rule_state if x is not None)


def test_nan_is_never_applied():
    """optax's `apply_if_finite` in the end applies the NaN; ours never does."""
    params = jnp.float32(1.0)
    tx = gs.with_loss_scale(optax.adam(0.1))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(300):
        updates, state = update(jnp.float32(jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params), float(state.rule_state.scale)) == (1.0, 1.0)

    peer = optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=5)
    state, update = peer.init(params), jax.jit(peer.update)
    for _ in range(10):
        updates, state = update(jnp.float32(jnp.nan), state, params)
        params = optax.apply_updates(params, updates)
    fails(optax, np.isnan(float(params)))


# Asked for in optax#1754.
@pytest.mark.parametrize(
    "name", ["adam", "adamw", "adan", "amsgrad", "lion", "nadam", "novograd", "radam", "rmsprop",
             "yogi"],
)  # fmt: skip
def test_float16_gradients_of_zero_give_no_nan(name):
    """Whatever optax's rule divides by, it is done in float32, where its epsilon is not 0."""
    tx = gs.with_loss_scale(getattr(optax, name)(0.125))
    params = jnp.ones(3, jnp.float16)
    state, update = tx.init(params), jax.jit(tx.update)
    for gradient in (0.0, 0.0, 6e-8):
        updates, state = update(jnp.full(3, gradient, jnp.float16), state, params)
        assert np.isfinite(updates).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_may_hold_a_python_number(compiled):
    """A learning rate or a scale that is replaced by a number is used."""
    tx = gs.with_loss_scale(optax.inject_hyperparams(optax.sgd)(learning_rate=0.125))
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    update = jax.jit(tx.update) if compiled else tx.update
    state.inner.hyperparams["learning_rate"] = 0.5
    updates, state = update({"w": jnp.ones(3)}, state, params)
    assert updates["w"].tolist() == [-0.5] * 3
    updates, state = update({"w": jnp.ones(3)}, optax.tree.set(state, learning_rate=1), params)
    assert updates["w"].tolist() == [-1] * 3
    state = optax.tree.set(state, scale=1024.0, learning_rate=0.25)
    _, state = update({"w": jnp.full(3, jnp.inf)}, state, params)
    assert (float(current_scale(state)), state.inner.hyperparams["learning_rate"]) == (512, 0.25)


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_an_integer_leaf_is_passed_on(compiled, scale):
    """An int32 gradient, as optax alone takes it, is neither checked nor unscaled."""
    tx = gs.with_loss_scale(optax.masked(optax.sgd(0.5), {"w": True, "n": False}), telemetry=True)
    params = {"w": jnp.ones(3), "n": jnp.arange(3)}
    state = tx.init(params)
    update = jax.jit(tx.update) if compiled else tx.update
    for gradient, applied in ((jnp.ones(3), True), (jnp.full(3, jnp.nan), False)):
        grads = {"w": gradient, "n": jnp.full(3, 4)}
        updates, state = update(grads, state, params, loss_scale=scale)
        assert bool(state.applied) == applied
        assert updates["n"].tolist() == ([4, 4, 4] if applied else [0, 0, 0])
        assert updates["n"].dtype == jnp.int32
    assert bool(gs.value_and_grad(lambda w: w.sum(), state)(jnp.ones(2))[1].all())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mean", [False, True])
def test_a_sum_of_microbatches_that_overflows_is_skipped(mean, sign, nested):
    """Finite gradients whose sum or difference overflows never make an infinite update or sum."""
    tx = optax.MultiSteps(optax.sgd(1e-30), 3, use_grad_mean=mean).gradient_transformation()
    if nested:
        groups = {"a": tx, "b": optax.sgd(1.0)}
        tx = optax.multi_transform(groups, {"w": "a", "b": "b"})
    tx = gs.with_loss_scale(tx)
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    state, applied = tx.init(params), []
    for i in range(5):
        grads = {"w": jnp.full(3, 3e38 * (sign if i % 2 else 1)), "b": jnp.zeros(2)}
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates, state)
        applied.append(bool(state.applied))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, params, state)))
    assert applied == [True, False, False, False, False]
    for _ in range(2):  # the window goes on
        updates, state = tx.update({"w": jnp.full(3, 1e30), "b": jnp.zeros(2)}, state, params)
    assert float(updates["w"][0]) == pytest.approx(-1e8 if mean else -3e8, rel=0.01)


LOOPS = {
    "scaled": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
loss, grads = gs.value_and_grad(loss_fn, state)(w)
tx.update(grads, state, w)
""",
    "train_step": """
gs.train_step(loss_fn)(gs.TrainState.create(w, optax.sgd(0.1)))
""",
    "by hand": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
grads = jax.grad(lambda w: loss_fn(w) * gs.transforms.current_scale(state))(w)
tx.update(grads / gs.transforms.current_scale(state), state, w)
""",
    "scale_loss": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
grads = jax.grad(lambda w: gs.transforms.scale_loss(loss_fn(w), state))(w)
tx.update(grads / gs.transforms.current_scale(state), state, w)
""",
    "unscaled by it": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
tx.update(jax.grad(lambda w: loss_fn(w) * 8)(w), state, w, loss_scale=8.0)
""",
    "local": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
tx.update(jax.grad(gs.transforms.locally_scaled(loss_fn, 8.0))(w), state, w)
""",
    "by itself": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
tx.update(jax.grad(gs.autocast(loss_fn, loss_scale=2.0**15))(w), state, w)
""",
    "no scale": """
tx = gs.with_loss_scale(optax.sgd(0.1), gs.FixedLossScale(1.0)); state = tx.init(w)
tx.update(jax.grad(loss_fn)(w), state, w)
""",
    "restored": """
import pickle
tx = gs.with_loss_scale(optax.sgd(0.1)); state = pickle.loads(pickle.dumps(tx.init(w)))
loss, grads = gs.value_and_grad(loss_fn, state)(w)
jax.jit(tx.update)(grads, state, w)
""",
    "filtered": """
warnings.filterwarnings("ignore", message="No loss was multiplied")
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
tx.update(jax.grad(loss_fn)(w), state, w)
""",
}


def told(code, length=23):
    """The beginnings of the warnings of a loop, where nothing was scaled or told before."""
    names = {"jax": jax, "jnp": jnp, "optax": optax, "gs": gs, "warnings": warnings}
    names |= {"P": jax.sharding.PartitionSpec, "w": jnp.ones(3)}
    names["loss_fn"] = lambda w: SMALL * (w * w).sum()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        exec(code, names)
    return [str(warning.message)[:length] for warning in found]


WRONG = {
    "with the scale as a metric": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
@jax.jit
def step(w, state):
    loss, grads = jax.value_and_grad(loss_fn)(w)
    scale = gs.transforms.current_scale(state)
    return tx.update(grads, state, w)[1], {"loss": loss, "scale": scale}
@jax.jit
def other(w, state):
    metrics = {"scale": gs.transforms.current_scale(state)}
    return tx.update(jax.jit(jax.grad(loss_fn))(w), state, w)[1], metrics
for _ in range(3): state, _ = other(w, state); state, _ = step(w, state)
""",
    "after a loss that scales itself, and a step of another model": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
jax.jit(jax.grad(gs.autocast(loss_fn, loss_scale=2.0**15)))(w)
gs.train_step(loss_fn)(gs.TrainState.create(w + 0, optax.sgd(0.1)))
step = jax.jit(lambda w, state: tx.update(jax.grad(loss_fn)(w), state, w)[1])
for _ in range(3): state = step(w, state)
""",
    "after a look at a gradient": """
tx = gs.with_loss_scale(optax.sgd(0.1)); gs.value_and_grad(loss_fn, tx.init(w))(w)
state = tx.init(w)
step = jax.jit(lambda w, state: tx.update(jax.grad(loss_fn)(w), state, w)[1])
for _ in range(3): state = step(w, state)
""",
    "beside a gradient of another model": """
tx, other = (gs.with_loss_scale(optax.sgd(0.1)) for _ in range(2)); state = tx.init(w)
norm = jax.jit(lambda w, state: jnp.linalg.norm(gs.value_and_grad(loss_fn, state)(w)[1]))
step = jax.jit(lambda w, state: tx.update(jax.grad(loss_fn)(w), state, w)[1])
for _ in range(3): norm(w, other.init(w)); state = step(w, state)
""",
    "beside a loss that scales itself": """
tx = gs.with_loss_scale(optax.sgd(0.1)); one, two = tx.init(w), tx.init(w)
@jax.jit
def step(w, one, two):
    first, second = jax.grad(gs.autocast(loss_fn, loss_scale=2.0**15))(w), jax.grad(loss_fn)(2 * w)
    return tx.update(first, one, w)[1], tx.update(second, two, w)[1]
one, two = step(w, one, two)
""",
}


@pytest.mark.parametrize("loop", WRONG)
def test_a_compiled_step_whose_gradients_have_no_scale_is_told(loop):
    """Whatever has run before, or beside it."""
    assert set(told(WRONG[loop])) == {"No loss was multiplied "}


RIGHT = {
    "a fixed scale": """
tx = gs.with_loss_scale(optax.sgd(0.1), gs.FixedLossScale(8.0)); state = tx.init(w)
grad_fn = gs.value_and_grad(loss_fn, state)
for _ in range(3):
    _, state = tx.update(grad_fn(w)[1], state, w)
""",
    "two models": """
tx = gs.with_loss_scale(optax.sgd(0.1)); one, two = tx.init(w), tx.init(w)
for _ in range(3):
    first, second = (gs.value_and_grad(loss_fn, state)(w)[1] for state in (one, two))
    one, two = tx.update(first, one, w)[1], tx.update(second, two, w)[1]
""",
    "two models, compiled": """
tx = gs.with_loss_scale(optax.sgd(0.1)); one, two = tx.init(w), tx.init(w)
@jax.jit
def step(w, one, two):
    first, second = (gs.value_and_grad(loss_fn, state)(w)[1] for state in (one, two))
    return tx.update(second, two, w)[1], tx.update(first, one, w)[1]
for _ in range(3): one, two = step(w, one, two)
""",
    "in the carry": """
tx = gs.with_loss_scale(optax.sgd(0.1))
def body(carry, _):
    w, state = carry
    updates, state = tx.update(gs.value_and_grad(loss_fn, state)(w)[1], state, w)
    return (optax.apply_updates(w, updates), state), None
jax.lax.scan(body, (w, tx.init(w)), length=3)
""",
    "two compiled functions": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
compute = jax.jit(lambda w, state: gs.value_and_grad(loss_fn, state)(w)[1])
for _ in range(3):
    _, state = tx.update(compute(w, state), state, w)
""",
    "eager gradients, compiled update": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w); update = jax.jit(tx.update)
for _ in range(3):
    _, state = update(gs.value_and_grad(loss_fn, state)(w)[1], state, w)
""",
    "a window of gradients": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
for _ in range(2):
    grads = [gs.value_and_grad(loss_fn, state)(w)[1] for _ in range(3)]
    _, state = tx.update(sum(grads) / 3, state, w)
""",
    "a look at the loss": """
tx = gs.with_loss_scale(optax.sgd(0.1)); chain = optax.chain(tx, optax.scale(1.0))
state, nested = gs.TrainState.create(w, tx), gs.TrainState.create(w + 0, chain)
step = gs.train_step(loss_fn)
for _ in range(3):
    gs.value_and_grad(loss_fn, state.opt_state)(state.params); state.loss_scale
    state, _ = step(state)
    nested, _ = step(nested)
""",
    "scaled by hand": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
for _ in range(3):
    scale = gs.transforms.current_scale(state)
    grads = jax.grad(lambda w: gs.transforms.scale_loss(loss_fn(w), state))(w)
    _, state = tx.update(grads, state, w, loss_scale=scale)
""",
    "scaled by hand, compiled, in all ways": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
by_scale = lambda w, scale: jax.grad(lambda w: loss_fn(w) * scale)(w)
ways = [
    lambda w, scale: by_scale(w, scale) / scale,
    lambda w, scale: jax.jit(by_scale)(w, scale) / scale,
    lambda w, scale: jax.jit(lambda w: by_scale(w, scale))(w) * (1 / scale),
    lambda w, scale: jax.vmap(by_scale, (0, None))(w[None], scale)[0] / scale,
    lambda w, scale: jax.lax.fori_loop(0, 3, lambda _, g: g + by_scale(w, scale), 0 * w) / scale,
    lambda w, scale: jax.lax.cond(scale > 0, by_scale, lambda w, scale: w, w, scale) / scale,
    lambda w, scale: jax.vjp(loss_fn, w)[1](scale)[0] / scale,
    lambda w, scale: jax.grad(jax.checkpoint(lambda w: loss_fn(w) * scale))(w) / scale,
    lambda w, scale: jax.shard_map(by_scale, mesh=jax.make_mesh((1,), "x"), in_specs=(P(), P()),
                                   out_specs=P())(w, scale) / scale,
]
for way in ways:
    @jax.jit
    def step(w, state):
        scale = gs.transforms.current_scale(state)
        return tx.update(way(w, scale), state, w)[1], scale
    for _ in range(2): state, _ = step(w, state)
""",
    "scaled by itself, with the scale as a metric": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
scaled, local = gs.autocast(loss_fn, loss_scale=2.0**15), gs.transforms.locally_scaled(loss_fn, 8.0)
for loss in (scaled, local):
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.checkpoint(jax.grad(loss))):
        @jax.jit
        def step(w, state):
            return tx.update(0.5 * grad(w), state, w)[1], gs.transforms.current_scale(state)
        for _ in range(2): state, _ = step(w, state)
""",
    "two compiled functions with the scale as a metric": """
tx = gs.with_loss_scale(optax.sgd(0.1)); state = tx.init(w)
compute = jax.jit(lambda w, state: gs.value_and_grad(loss_fn, state)(w)[1])
@jax.jit
def update(grads, state, w):
    grads = grads + jax.grad(lambda w: 1e-4 * (w * w).sum())(w)
    return tx.update(grads, state, w)[1], gs.transforms.current_scale(state)
for _ in range(3): state, _ = update(compute(w, state), state, w)
""",
}


@pytest.mark.parametrize("loop", RIGHT)
def test_gradients_that_belong_to_the_state_are_not_told(loop):
    """However the scale of a state comes to its gradients, compiled or not."""
    assert told(RIGHT[loop]) == []


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_scales_its_loss_is_not_told(loop):
    """Somehow, or by a scale of 1."""
    assert told(LOOPS[loop]) == []


EAGER = "restored", "unscaled by it", "filtered"  # from a file, by a number, wrong


@pytest.mark.parametrize("loop", [loop for loop in RIGHT | LOOPS if loop not in EAGER])
def test_lint_finds_nothing_in_a_right_loop(loop):
    """Traced as a whole, none is accused."""
    names = {"jax": jax, "jnp": jnp, "optax": optax, "gs": gs, "warnings": warnings}
    names |= {"P": jax.sharding.PartitionSpec, "loss_fn": lambda w: (w * w).sum()}

    def whole(w):
        exec((RIGHT | LOOPS)[loop], names | {"w": w})

    assert gs.lint(whole, jnp.ones(3)) == []


@pytest.mark.parametrize("how", ["update", "train_step"])
def test_the_state_of_another_rule_names_both(how):
    """A state whose scale belongs to another rule is refused, and both rules are named."""
    rules = [gs.AdaptiveLossScale(), gs.DynamicLossScale(), gs.DynamicLossScale(hysteresis=2)]
    names = ["AdaptiveLossScale", "DynamicLossScale", r"DynamicLossScale\(hysteresis=...\)"]
    params = {"w": jnp.ones(3)}
    others = [gs.with_loss_scale(optax.sgd(0.1), rule) for rule in [*rules, gs.FixedLossScale(8.0)]]
    for rule in rules:
        tx, step = gs.with_loss_scale(optax.sgd(0.1), rule), gs.train_step(lambda p: p["w"].sum())
        for other, name in zip(others, [*names, "FixedLossScale"], strict=True):
            state = gs.TrainState.create(params, tx).replace(opt_state=other.init(params))
            if jax.tree.structure(state.opt_state) == jax.tree.structure(tx.init(params)):
                continue
            own = type(rule).__name__
            if rule == gs.DynamicLossScale(hysteresis=2):  # names what the two differ in
                own += r"\(hysteresis=2\)"
                name += r"\(hysteresis=1\)" * (name == "DynamicLossScale")
            message = rf"The rule of tx is {own}, but opt_state has .* {name}\. Use"
            with pytest.raises(ValueError, match=message):
                step(state) if how == "train_step" else tx.update(params, state.opt_state, params)
    fixed, loaded = others[-1], others[0].init(params)  # a fixed rule takes any state
    after = fixed.update(params, loaded, params)[1]
    assert jax.tree.structure(after) == jax.tree.structure(loaded)
    assert float(current_scale(after)) == 8.0


@pytest.mark.parametrize("make", [optax.sgd, optax.adamw])
@pytest.mark.parametrize("k", [1, 2])
def test_the_rate_of_a_schedule_is_read_by_the_name_of_its_state(make, k):
    """The count of `ScaleByScheduleState` is that of the updates, of Adam too, for which the name
    `count` is ambiguous."""
    schedule = optax.exponential_decay(0.5, transition_steps=1, decay_rate=0.5)
    inside = optax.chain(optax.clip_by_global_norm(1.0), make(schedule))
    state = gs.TrainState.create(jnp.ones(2), inside if k == 1 else optax.MultiSteps(inside, k))
    step = gs.train_step(lambda w, x: (w * x).sum())
    for x in (1.0, jnp.nan, 1.0, 1.0, 1.0):
        state, _ = step(state, x)
    assert schedule(optax.tree.get(state, "ScaleByScheduleState").count) == 0.5 ** (1 + 4 // k)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


@pytest.mark.parametrize("how", ["update", "train_step"])
@pytest.mark.parametrize(
    ("made", "used", "place"),
    [
        pytest.param(optax.sgd(0.1), optax.MultiSteps(optax.sgd(0.1), 2), "gradient_step", id="k"),
        pytest.param(
            optax.MultiSteps(optax.sgd(0.1), 2),
            optax.MultiSteps(optax.adam(0.1), 2),
            r"inner_opt_state\[0\]\.mu",
            id="inside",
        ),
        pytest.param(optax.adam(0.1), CLIPPED, r"\[1\]\[0\]\.mu", id="clip"),
        pytest.param(optax.adam(0.1), optax.sgd(0.1), r"\[0\]\.mu", id="in silence"),
    ],
)
def test_the_state_of_another_chain_is_refused(made, used, place, how):
    """A state of another chain is named as such, also by a chain that would not read it."""
    params = {"w": jnp.ones(3)}
    tx, opt_state = gs.with_loss_scale(used), gs.with_loss_scale(made).init(params)
    state = gs.TrainState.create(params, tx).replace(opt_state=opt_state)
    step = gs.train_step(lambda p: p["w"].sum())
    with pytest.raises(ValueError, match=rf"made by another chain.* differ in .*{place}"):
        step(state) if how == "train_step" else tx.update(params, opt_state, params)


@pytest.mark.parametrize("how", ["update", "train_step"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("inside", [optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 2)])
def test_a_state_of_parameters_of_another_shape_is_refused(inside, size, how):
    """A state for parameters of other shapes is refused, whether or not these broadcast."""
    params = {"w": jnp.ones(3)}
    tx = gs.with_loss_scale(inside)
    state = gs.TrainState.create({"w": jnp.ones(size)}, tx).replace(params=params)
    step = gs.train_step(lambda p: p["w"].sum())
    with pytest.raises(ValueError, match=r"for other parameters: they differ in .*mu\['w'\]"):
        step(state) if how == "train_step" else tx.update(params, state.opt_state, params)


def test_a_chain_whose_state_cannot_be_made_again_takes_any():
    """A transformation whose `init` cannot be traced is not judged by it."""

    def init(params):
        return optax.trace(0.9).init(jax.tree.map(np.asarray, params))

    tx = gs.with_loss_scale(optax.GradientTransformation(init, optax.trace(0.9).update))
    for given in (tx, optax.chain(tx), optax.GradientTransformation(init, optax.trace(0.9).update)):
        state = gs.TrainState.create({"w": jnp.ones(3)}, given)
        assert float(gs.train_step(lambda p: p["w"].sum())(state)[1]) == 3.0


def test_a_donated_argument_says_how_to_keep_it():
    """What an earlier step has donated of a state is named, with the remedy."""
    old = gs.TrainState.create({"w": jnp.ones(3)}, optax.adam(0.1), extra={"m": jnp.zeros(3)})
    step = gs.train_step(lambda p, extra: (p["w"].sum(), {"m": extra["m"] + 1}))
    kept = old.params, old.extra
    new, _ = step(old)
    for name, given in (
        ("params", old),
        ("params", new.replace(params=kept[0])),
        ("opt_state", new.replace(opt_state=old.opt_state)),
        ("extra", new.replace(extra=kept[1])),
    ):
        with pytest.raises(ValueError, match=rf"`state\.{name}.*` was donated .* donate=False"):
            step(given)
    assert np.isfinite(step(new)[1])


def test_the_scalars_of_an_earlier_state_can_be_read():
    """Donation spares the loss scale, the number of steps and the telemetry, also as a number."""
    old = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1), telemetry=True)
    step = gs.train_step(lambda w: (w * w).sum())
    new, _ = step(old)
    assert (int(old.step), float(old.loss_scale), bool(old.applied)) == (0, 2.0**15, True)
    assert int(old.info.skipped_steps) == 0
    assert int(step(new.replace(step=5))[0].step) == 6


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.scale(-0.1),  # of no further arguments
        optax.GradientTransformation(
            lambda _: (), lambda g, s, _=None: (jax.tree.map(lambda g: -0.1 * g, g), s)
        ),
        optax.MultiSteps(optax.sgd(0.1), 2),
    ],
    ids=["sgd", "scale", "by hand", "MultiSteps"],
)
def test_states_of_two_calls_with_one_transformation_are_alike(tx):
    """They are stacked for `jax.vmap`, and one program steps both; another rule is another."""
    traces = []

    def loss_fn(w):
        traces.append(1)
        return SMALL * (w * w).sum()

    one, other = (
        gs.TrainState.create(jnp.full(3, x), tx, loss_scale=gs.DynamicLossScale(2.0**10))
        for x in (1.0, 2.0)
    )
    step = gs.train_step(loss_fn)
    assert float(step(one)[1]) == 3.0
    programs = len(traces)  # of the first
    assert float(step(other)[1]) == 12.0
    assert len(traces) == programs
    pair = [
        gs.TrainState.create(jnp.full(3, x), tx, loss_scale=gs.DynamicLossScale(2.0**10))
        for x in (1.0, 2.0)
    ]
    both = jax.tree.map(lambda *x: jnp.stack(x), *pair)
    assert jax.vmap(step)(both)[1].tolist() == [3.0, 12.0]
    third = gs.TrainState.create(jnp.ones(3), tx, loss_scale=gs.DynamicLossScale(2.0**11))
    assert jax.tree.structure(third) != jax.tree.structure(pair[0])


def test_scale_loss_scales_after_a_step_without_float16():
    """A loss by hand in float16 keeps its small gradients, though the step before was in
    float32 and had no scale."""
    tx = gs.with_loss_scale(optax.sgd(1.0))

    @jax.jit
    def in_float32(w, state):
        _, grads = gs.value_and_grad(lambda w: w * 0.0, state)(w)
        return tx.update(grads, state, w)[1]

    def in_float16(w):
        return (w.astype(jnp.float16) * jnp.float16(1)).astype(jnp.float32) * 1e-8

    w = jnp.float32(1.0)
    for state in (tx.init(w), in_float32(w, tx.init(w))):
        scaled = jax.grad(scale_loss(in_float16, state))(w)
        assert float(scaled / current_scale(state)) == pytest.approx(1e-8, rel=1e-3)


@pytest.mark.parametrize("how", ["call", "lower"])
def test_a_step_takes_a_state_alone(how):
    """Parameters, a pickled state without its transformation and text in `extra` are refused."""
    state = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1))
    step = gs.train_step(lambda w: (w * w).sum())
    taken = step if how == "call" else step.lower
    with pytest.raises(
        TypeError, match=r"Expected a TrainState first.* got .*create\(params, tx\)"
    ):
        taken(state.params)
    with pytest.raises(ValueError, match=r"state\.replace\(tx=other\.tx\)"):
        taken(state.replace(tx=None))
    with pytest.raises(TypeError, match=r"Expected arrays in extra; got 'a'"):
        taken(state.replace(extra={"m": "a"}))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16])
def test_small_parameters_train_under_strict_promotion(dtype):
    """Parameters of a small dtype are updated in float32 and rounded once, without promotion."""
    params, rule = {"w": jnp.ones(4, dtype)}, gs.FixedLossScale(8.0)
    state = gs.TrainState.create(params, optax.sgd(0.25), loss_scale=rule)
    with jax.numpy_dtype_promotion("strict"):
        state, _ = gs.train_step(lambda p: p["w"].astype("float32").sum())(state)
    w = state.params["w"]
    assert (w.dtype, w.tolist()) == (dtype, [0.75] * 4)


def test_integer_parameters_are_added_to():
    """`apply_updates` adds an integer update to an integer parameter, as optax does; a skipped step
    leaves it alone."""
    params = {"w": jnp.ones(2), "count": jnp.array([5, 7])}
    updates = {"w": jnp.ones(2), "count": jnp.array([2, -3])}
    state = gs.with_loss_scale(optax.sgd(0.1)).init({"w": params["w"]})
    new = apply_updates(params, updates, state)
    assert (new["count"].tolist(), new["count"].dtype) == ([7, 4], params["count"].dtype)
    kept = apply_updates(params, updates, state._replace(applied=jnp.array(False)))
    assert kept["count"].tolist() == [5, 7]


@pytest.mark.parametrize("around", [lambda tx: optax.MultiSteps(tx, 4), optax.apply_if_finite])
def test_a_loss_is_not_scaled_by_a_state_inside_of_what_hides_an_overflow(around):
    """`scale_loss` refuses it as `value_and_grad` does: one NaN would stay in the sum for good."""
    tx = around(gs.with_loss_scale(optax.sgd(0.1)), *([] if around.__name__ == "<lambda>" else [9]))
    with pytest.raises(ValueError, match="around"):
        gs.transforms.scale_loss(jnp.float32(1), tx.init(jnp.ones(2)))


def test_multi_steps_inside_passes_the_loss_on():
    """`with_loss_scale(optax.MultiSteps(tx, k))` gives `value=` to a transformation that wants
    it."""
    tx = optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1))
    loss_fn = lambda w, x: ((w * x) ** 2).sum()  # noqa: E731
    plain = optax.MultiSteps(tx, 2)
    state = gs.TrainState.create(jnp.ones(2), optax.MultiSteps(tx, 2))
    step = gs.train_step(loss_fn)
    w, opt_state = jnp.ones(2), plain.init(jnp.ones(2))
    for x in (0.1, 0.2, 0.3, 0.4):
        loss, grads = jax.value_and_grad(loss_fn)(w, x)
        updates, opt_state = plain.update(grads, opt_state, w, value=loss)
        w = optax.apply_updates(w, updates)
        state, _ = step(state, x)
    np.testing.assert_allclose(state.params, w, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fun": 5}, "Expected a function for fun; got 5"),
        ({"using": 5}, "Expected a function such as jax.value_and_grad for using; got 5"),
        ({"has_aux": "no"}, "Expected a bool for has_aux; got 'no'"),
    ],
)
def test_value_and_grad_refuses_what_it_cannot_call(arguments, words):
    """The arguments are refused where they are given, as those of `train_step`."""
    state = gs.with_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))
    given = {"fun": lambda w: w.sum(), "opt_state": state, **arguments}
    with pytest.raises(TypeError, match=words):
        gs.value_and_grad(**given)

"""A plan keeps a budget of noise and bias, also with products in float8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage.precision import Plan, find_plan


def draw(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape), jnp.float32)


PARAMS = {name: draw(i, 32, 32) / 32**0.5 for i, name in enumerate("abcd")}
BATCHES = [(draw(10 + i, 64, 32), draw(20 + i, 64, 32)) for i in range(6)]


def network(params, x, y):
    h = jnp.tanh(x @ params["a"])
    h = h + jnp.tanh(h @ params["b"])
    h = h + jnp.tanh(h @ params["c"])
    return jnp.mean((h @ params["d"] - y) ** 2)


def vector(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def priced(fun, numbers, scale=2.0**8):
    """Noise and bias of a function's gradients on some batches, from their definition."""
    exact = np.stack([vector(jax.jit(jax.grad(network))(PARAMS, *b)) for b in BATCHES])

    def scaled(params, x, y):
        return fun(params, x, y) * scale

    program = jax.jit(jax.grad(scaled))
    off = np.stack([vector(program(PARAMS, *BATCHES[n])) / scale - exact[n] for n in numbers])
    batch, noise = exact.var(0, ddof=1).sum(), off.var(0, ddof=1).sum()
    mean = (exact.mean(0) ** 2).sum() - batch / len(BATCHES)
    bias = max((off.mean(0) ** 2).sum() - noise / len(numbers), 0.0)
    return noise / batch, (bias / mean) ** 0.5


def dtypes(plan):
    return [o.dtype for o in plan.entries if o.name == "dot_general"]


@pytest.fixture(scope="module")
def plan():
    return find_plan(
        network, PARAMS, BATCHES, dtype="float8", max_noise=0.01, max_bias=0.1, card=None
    )


def test_a_plan_with_float8_keeps_its_budget_on_other_batches(plan):
    """Measured by the definition on the batches that the shares are not of, it is what it says."""
    noise, bias = priced(gs.autocast(network, plan), [2, 3, 4, 5])
    assert "float8" in dtypes(plan)
    assert plan.measured.noise == pytest.approx(noise, rel=0.05)
    assert plan.measured.bias == pytest.approx(bias, rel=0.05)
    assert noise <= 0.01
    assert bias <= 0.1


def test_shares_predict_the_plan(plan):
    """The noise is within a factor of 1.5 of the prediction."""
    assert plan.predicted.noise / 1.5 <= plan.measured.noise <= plan.predicted.noise * 1.5
    rows = {o.line: o for o in plan.entries if o.dtype == "float8"}
    assert sum(o.noise for o in rows.values()) == pytest.approx(plan.predicted.noise, rel=0.02)


def test_a_tighter_budget_has_fewer_products_in_float8():
    """With a thousandth of the noise none is left, and float16 serves."""
    tight = find_plan(
        network, PARAMS, BATCHES, dtype="float8", max_noise=1e-5, max_bias=0.02, card=None
    )
    assert set(dtypes(tight)) == {"float16"}
    assert "its share in float8" in str(tight)
    assert tight.measured.fits(1e-5, 0.02)


def large(params, x, y):
    """A product whose numbers float16 does not hold, as of a sum over many years."""
    h = jnp.tanh(x @ params["a"])
    h = jnp.tanh((3e4 * h) @ params["b"] / 3e4)
    return jnp.mean((h @ params["d"] - y) ** 2)


def test_a_product_that_float16_does_not_hold_is_in_bfloat16():
    """It is within the budget there; the others are in float16, and the plan is saved and run."""
    found = find_plan(large, PARAMS, BATCHES)
    assert dtypes(found) == ["float16", "bfloat16", "float16"]
    row = next(o for o in found.entries if o.dtype == "bfloat16")
    assert row.reason == "it is too large"
    assert found.measured.fits(0.01, 0.02)
    assert Plan.from_json(found.to_json()) == found
    text = str(jax.make_jaxpr(gs.autocast(large, found))(PARAMS, *BATCHES[0]))
    assert "bf16[64,32] = dot_general" in text


def test_a_card_without_bfloat16_has_no_product_in_it():
    """On a T4 the product that float16 does not hold stays in float32."""
    assert dtypes(find_plan(large, PARAMS, BATCHES, card="T4")) == ["float16", "float32", "float16"]


def test_a_product_in_bfloat16_counts_for_the_budget():
    """Where bfloat16 is too far off, the product stays in float32."""
    found = find_plan(large, PARAMS, BATCHES, max_noise=1e-5, max_bias=1e-3)
    assert "bfloat16" not in dtypes(found)
    assert dtypes(found)[1] == "float32"


def test_products_that_gain_nothing_on_the_card_stay_in_half():
    """Width 32 is too small for float8 on an H100; an A100 has no float8."""
    for card in ("H100", "A100"):
        found = find_plan(network, PARAMS, BATCHES[:2], dtype="float8", card=card)
        assert set(dtypes(found)) == {"float16"}
        rows = [o for o in found.entries if o.name == "dot_general"]
        assert {o.reason for o in rows} == {"float8 gains nothing"}


def test_a_bound_of_the_error_holds_on_each_batch():
    """Also on a batch whose numbers are harder to hold; equal batches are enough for it."""
    hard = BATCHES[0][0] * 40 + 300, BATCHES[0][1]
    found = find_plan(network, PARAMS, [BATCHES[0], hard, BATCHES[1]], max_error=0.001)
    half = gs.autocast(network, found)
    run = jax.jit(jax.grad(lambda p, x, y: half(p, x, y) * 2**8))
    for batch in (BATCHES[0], hard, BATCHES[1]):
        exact = vector(jax.jit(jax.grad(network))(PARAMS, *batch))
        off = vector(run(PARAMS, *batch)) / 2**8 - exact
        assert np.linalg.norm(off) <= 0.001 * np.linalg.norm(exact)
    assert find_plan(network, PARAMS, [BATCHES[0]] * 2, max_error=0.005).measured.error <= 0.005


def test_a_narrow_layer_of_a_loop_stays_in_half():
    """Of two layers on one line, the one that sums twelve numbers is too narrow for float8."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    ws = [draw(1, 12, 64) / 3, draw(2, 64, 64) / 8]
    xs = [(draw(10 + i, 32, 12),) for i in range(4)]
    found = find_plan(loss, ws, xs, dtype="float8", card=None, max_noise=1.0, max_bias=1.0)
    assert dtypes(found) == ["float8"]
    text = str(jax.make_jaxpr(gs.autocast(loss, found))(ws, *xs[0]))
    assert "f16[32,64] = dot_general" in text  # [32, 12] x [12, 64]
    assert "f8_e4m3fn[64,64]" in text
    assert "f8_e4m3fn[12,64]" not in text


def test_a_file_of_a_plan_is_json_also_where_a_share_is_not_finite(plan, tmp_path):
    """inf and NaN, which JSON has not, are written as text and null, and read again."""
    rows = [o._replace(error=np.inf, noise=np.nan) for o in plan.entries]
    other = Plan(plan.dtype, rows, plan.predicted, plan.measured._replace(bias=np.inf))
    other.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert "Infinity" not in text
    assert "NaN" not in text
    assert Plan.load(tmp_path / "plan.json") == other
    assert hash(Plan.load(tmp_path / "plan.json")) == hash(other)


def test_a_plan_with_float8_is_saved_and_loaded(plan, tmp_path):
    """Each row keeps its dtype and shares; a float8 row of another operation is refused."""
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert str(Plan.load(path)) == str(plan)
    tanh = next(o for o in plan.entries if o.name == "tanh")
    rows = [o._replace(dtype="float8") if o is tanh else o for o in plan.entries]
    Plan(plan.dtype, rows).save(path)
    with pytest.raises(ValueError, match="plan of version 3"):
        Plan.load(path)


def test_a_plan_is_saved_beside_another_that_is_being_saved(plan, tmp_path):
    """Two processes that save to one path do not write into the file of each other."""
    path, others = tmp_path / "plan.json", tmp_path / "plan.json.part"
    others.write_text("half of a plan")
    plan.save(path)
    assert Plan.load(path) == plan
    assert others.read_text() == "half of a plan"
    assert sorted(tmp_path.iterdir()) == [path, others]


def test_a_plan_with_float8_trains(plan):
    """The loss after training is that of float32, within 2 %."""
    import optax

    def trained(loss):
        state = gs.TrainState.create(jax.tree.map(jnp.array, PARAMS), optax.adam(1e-2))
        step = gs.train_step(loss)
        for number in range(60):
            state, value = step(state, *BATCHES[number % 6])
        return float(value)

    assert trained(gs.autocast(network, plan)) == pytest.approx(trained(network), rel=0.02)


def test_a_plan_with_float8_is_mended():
    """On a batch that float8 does not hold, `mend` takes its products back to float16, and leaves
    those in float8 that are within the bounds."""
    hard = BATCHES[0][0] * 40 + 300, BATCHES[0][1]
    loose = {"dtype": "float8", "max_noise": 0.05, "max_bias": 0.3, "card": None}
    half = gs.autocast(network, find_plan(network, PARAMS, BATCHES, **loose))
    assert set(dtypes(half.plan)) == {"float8"}
    assert gs.audit(half, PARAMS, *hard, scale=2.0**8).is_off
    mended = gs.mend(half, PARAMS, *hard, scale=2.0**8)
    assert gs.audit(mended, PARAMS, *hard, scale=2.0**8).ok
    assert set(dtypes(mended.plan)) == {"float8", "float16"}


MISTAKES = {
    "one batch": (([BATCHES[0]],), {}, "at least 2 batches; got 1"),
    "a tuple": ((BATCHES[0],), {}, "list of batches"),
    "no noise": ((BATCHES,), {"max_noise": 0}, "max_noise; got 0"),
    "bias": ((BATCHES,), {"max_bias": -1.0}, "max_bias; got -1"),
    "a card": ((BATCHES,), {"card": "B300"}, "card; got 'B300'"),
    "the same": (([BATCHES[0]] * 3,), {}, "different batches"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_has_no_noise_or_no_bounds_is_an_error(mistake):
    """Batches and bounds are checked where they enter."""
    args, options, words = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=words):
        find_plan(network, PARAMS, *args, **options)


def test_a_model_with_batch_axes_keeps_them_in_half():
    """A product of two activations with batch axes is not one of float8's."""

    def attends(params, x):
        h = (x @ params["a"]).reshape(2, 32, 32)
        return jnp.mean(jnp.einsum("bij,bkj->bik", h, h) ** 2)

    found = find_plan(
        attends, PARAMS, [(x,) for x, _ in BATCHES[:2]], dtype="float8", card=None, max_bias=9.0,
        max_noise=9.0,
    )  # fmt: skip
    assert dtypes(found) == ["float8", "float16"]

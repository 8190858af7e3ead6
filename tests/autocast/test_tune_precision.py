"""A plan says which operations may be in float16, and what that does to the gradient."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import gainstage as gs
from gainstage.precision import Plan, tune


def tuned(fun, params, *batch, max_error=0.005, **options):
    """The plan whose gradient has at most this error on one batch."""
    return tune(fun, params, [batch], max_error=max_error, **options)


def draw(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape), jnp.float32)


X, Y = draw(1, 128, 48), draw(2, 128, 48)
PARAMS = {name: draw(10 + i, 48, 48) / 48**0.5 for i, name in enumerate("abc")}


def offset(params, x, y):
    """Features with a mean of 300, which is subtracted after the first product."""
    h = jnp.tanh(x @ params["a"] - params["mean"])
    return jnp.mean((jax.nn.gelu(h @ params["b"]) @ params["c"] - y) ** 2)


OFFSET = {**PARAMS, "mean": 300 * np.asarray(PARAMS["a"]).sum(0)}


def error(fun, plan, params, *batch, scale=2.0**8):
    """The error of the gradient under autocast, computed from both gradients in float64."""
    cast = gs.autocast(fun, plan)
    found = jax.jit(jax.grad(lambda p: cast(p, *batch) * scale))(params)
    exact = jax.jit(jax.grad(fun))(params, *batch)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    pairs = [(np.asarray(a, np.float64) / scale, np.asarray(b, np.float64)) for a, b in pairs]
    off = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return (off / sum(float((b**2).sum()) for _, b in pairs)) ** 0.5


@pytest.fixture(scope="module")
def plan():
    return tuned(offset, OFFSET, 300 + 0.7 * np.asarray(X), Y)


def test_the_one_product_that_float16_ruins_stays_in_float32(plan):
    """Default rules are 10 % wrong; the plan keeps two operations and is below its bound."""
    batch = 300 + 0.7 * np.asarray(X), Y
    assert error(offset, "float16", OFFSET, *batch) > 0.1
    assert error(offset, plan, OFFSET, *batch) <= 0.005
    products = [o.dtype for o in plan.operations if o.name == "dot_general"]
    assert products == ["float32", "float16", "float16"]


def test_the_prediction_holds_on_another_batch(plan):
    """Predicted, measured and another batch of another size agree within a factor of 1.5."""
    other = 300 + 0.7 * np.asarray(draw(3, 64, 48)), draw(4, 64, 48)
    assert plan.measured.error == pytest.approx(
        error(offset, plan, OFFSET, 300 + 0.7 * np.asarray(X), Y), rel=0.2
    )
    for found in (plan.measured.error, error(offset, plan, OFFSET, *other)):
        assert plan.predicted.error / 1.5 <= found <= plan.predicted.error * 1.5


def test_what_comes_near_the_largest_number_stays_in_float32():
    """A network whose middle reaches 1e5 is right with a plan."""

    def hot(params, x, y):
        h = jnp.tanh(x @ params["a"]) @ params["b"] * 5e4
        return jnp.mean((jnp.tanh(h / 5e4) @ params["c"] - y) ** 2)

    plan = tuned(hot, PARAMS, X, Y)
    assert plan.measured.error <= 0.005
    reasons = [o.reason for o in plan.operations if o.largest > 65504 / 16]
    assert len(reasons) >= 2
    assert all("reaches" in reason or reason == "a sum" for reason in reasons)
    largest = np.abs(5e4 * np.tanh(X @ PARAMS["a"]) @ PARAMS["b"]).max()
    assert max(o.largest for o in plan.operations) == pytest.approx(float(largest), rel=1e-4)


def test_a_plan_of_a_small_batch_holds_for_a_large_one():
    """A sum grows with the batch, and what divides it is in float32: the loss stays finite."""

    def loss(params, x):
        z = jnp.tanh(x @ params["a"]) @ params["b"]
        total = jnp.sum(jnp.square(z - 1)) + jnp.sum(jnp.abs(z)) * 2.0
        return total / z.size

    plan = tuned(loss, PARAMS, X[:16])
    assert {o.dtype for o in plan.operations if o.name == "dot_general"} == {"float16"}
    assert {o.dtype for o in plan.operations if o.largest > 500 or o.name == "div"} == {"float32"}
    large = np.tile(X, (64, 1))
    found, expected = (jax.jit(f)(PARAMS, large) for f in (gs.autocast(loss, plan), loss))
    assert float(found) == pytest.approx(float(expected), rel=1e-3)
    assert error(loss, plan, PARAMS, large) < 0.005


def test_infinities_of_a_mask_are_no_large_numbers():
    """A softmax over a mask of -inf is half but for its sum; float16 has infinities."""

    def loss(params, x):
        scores = jnp.where(x > 0, x @ params["a"], -jnp.inf)
        return jnp.mean(jax.nn.softmax(scores) ** 2)

    plan = tuned(loss, PARAMS, X)
    assert not any("inf" in o.reason for o in plan.operations)
    assert max(o.largest for o in plan.operations) < 1e4


def test_a_tighter_bound_keeps_more():
    """The plan stays below each bound, and a smaller one keeps more operations in float32."""
    counts = []
    for bound in (1e-2, 3e-4, 1e-6):
        plan = tuned(offset, OFFSET, 300 + 0.7 * np.asarray(X), Y, max_error=bound)
        assert plan.measured.error <= bound
        counts.append(sum(o.dtype == "float16" for o in plan.operations))
    assert counts[0] > counts[1] > counts[2] == 0


def test_equal_layers_share_a_measurement():
    """A function of three equal layers, in a loop or a scan, is measured as often as one layer."""

    def stack(layers):
        def loss(params, x):
            for i in range(layers):
                x = x + jnp.tanh(x @ params[i])
            return jnp.mean(x**2)

        return loss

    params = np.stack([PARAMS[name] for name in "abc"])
    plan = tuned(stack(3), params, X)
    assert [o.name for o in plan.operations].count("dot_general") == 3
    assert len({o.share for o in plan.operations if o.name == "dot_general"}) == 1

    def scanned(params, x):
        return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)[0] ** 2)

    plan = tuned(scanned, params, X)
    assert [o.dtype for o in plan.operations if o.name == "dot_general"] == ["float16"]
    assert error(scanned, plan, params, X) <= 0.005


def test_a_plan_is_saved_and_loaded(plan, tmp_path):
    """A loaded plan is the saved one, in every row and in what it says."""
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded != Plan("float16", plan.operations[1:], 0.0, 0.0)
    assert (loaded.predicted, loaded.measured) == (plan.predicted, plan.measured)
    assert str(loaded) == str(plan)
    assert "an error of 0.0" in str(plan)
    assert "test_tune_precision.py:" in str(plan)


def test_a_plan_needs_the_function_without_autocast(plan):
    """`autocast` refuses a plan for what `autocast` returned, and names the function to pass."""
    with pytest.raises(ValueError, match=r"which autocast returned\. Pass .*: fun\.__wrapped__\."):
        gs.autocast(gs.autocast(lambda params, x: (x @ params).mean()), plan)


def test_a_row_of_a_plan_shows_its_largest_number(plan):
    """Operations of one line are one row, with the largest of their numbers, in whatever order."""
    first = plan.operations[0]
    turns = [first._replace(largest=largest, path=(*first.path, 0)) for largest in (10, 777, 10)]
    row = str(Plan("float16", turns, plan.predicted, plan.measured)).splitlines()[-1].split()
    assert (row[1], row[4]) == ("3", "777")


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"gainstage plan": 99}', '{"gainstage plan": 1, "operations": [1]}'],
)
def test_a_file_that_is_no_plan_is_refused(content, tmp_path):
    """The error names the file."""
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"plan of version 2.*other\.json"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "float8"), ("dtype", 3), ("predicted", "small"), ("measured", None), ("shapes", 1)],
)
def test_a_damaged_plan_is_refused_where_it_is_read(plan, field, value, tmp_path):
    """Each field of the file is checked, before anything uses the plan."""
    path = tmp_path / "damaged.json"
    plan.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, field: value}))
    with pytest.raises(ValueError, match=r"plan of version 2.*damaged\.json"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "banana"), ("share", None), ("path", ["a"]), ("largest", "big"), ("reason", 1)],
)
def test_a_damaged_row_of_a_plan_is_refused(plan, field, value, tmp_path):
    """A row that would count as float32, or fail later, is an error of the file."""
    path = tmp_path / "damaged.json"
    plan.save(path)
    content = json.loads(path.read_text())
    content["operations"][1][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"plan of version 2.*damaged\.json"):
        Plan.load(path)


def test_a_plan_for_parameters_of_other_shapes_says_so(tmp_path):
    """It was measured with sums of other lengths: there is one warning, for each plan."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    plan = tuned(loss, jnp.ones((8, 4)) / 8, jnp.ones((2, 8)))
    planned = gs.autocast(loss, plan)
    planned(jnp.ones((8, 4)) / 8, jnp.ones((5, 8)))
    with pytest.warns(UserWarning, match=r"other shapes: \(8, 4\), and now \(16, 4\)"):
        planned(jnp.ones((16, 4)) / 8, jnp.ones((2, 16)))
    planned(jnp.ones((16, 4)) / 8, jnp.ones((2, 16)))


def test_has_aux_without_aux_is_an_error():
    """A function that returns a scalar has no aux; the error says what was expected."""
    with pytest.raises(TypeError, match=r"Expected \(loss, aux\) from loss_fn with has_aux=True"):
        tuned(lambda w: (w * w).sum(), jnp.ones(3), has_aux=True)


def test_the_plan_of_another_function_is_refused(plan):
    """The error says which operation differs, and how to measure again."""

    def other(params, x, y):
        h = jnp.sin(x @ params["a"] - params["mean"])
        return jnp.mean((jax.nn.gelu(h @ params["b"]) @ params["c"] - y) ** 2)

    with pytest.raises(ValueError, match=r"tanh as operation 2 .*got sin.*tune"):
        gs.autocast(other, plan)(OFFSET, X, Y)
    with pytest.raises(ValueError, match="Measure again"):
        gs.autocast(lambda w: w * 2, plan)(X)


def test_models_and_aux():
    """An NNX model with BatchNorm, a loss with aux, and a part that the user keeps."""
    model = nnx.Sequential(
        nnx.Linear(48, 32, rngs=nnx.Rngs(0)), nnx.BatchNorm(32, rngs=nnx.Rngs(0)), nnx.tanh,
        nnx.Linear(32, 1, rngs=nnx.Rngs(1)),
    )  # fmt: skip

    def loss(model, x):
        out = model(x)
        with gs.keep_float32():
            value = jnp.mean(jnp.log1p(out**2))
        return value, {"out": out, "product": x @ x.T}

    mean = model.layers[1].mean[...]
    plan = tuned(loss, model, X, has_aux=True)
    assert plan.measured.error <= 0.005
    assert model.layers[1].mean[...] is mean  # measuring changes nothing
    kept = [o for o in plan.operations if o.name == "log1p"]
    assert [(o.dtype, o.reason) for o in kept] == [("float32", "keep_float32, or unused")]
    state = gs.TrainState.create(model, optax.sgd(0.1))
    _, value, aux = gs.train_step(gs.autocast(loss, plan), has_aux=True)(state, X)
    assert bool(jnp.isfinite(value))
    assert aux["out"].dtype == jnp.float32


def test_a_function_under_autocast_is_refused():
    """Its float32 gradient is unknown; the error says which function to pass."""
    with pytest.raises(ValueError, match=r"under autocast already.*fun\.__wrapped__"):
        tuned(gs.autocast(offset), OFFSET, X, Y)
    tuned(gs.autocast(offset).__wrapped__, OFFSET, X, Y)


def test_a_bound_that_no_plan_keeps_is_a_warning():
    """A function that computes in float16 by itself is wrong whatever the plan says."""

    def half(params, x):
        return jnp.mean((x @ params).astype(jnp.float16).astype(jnp.float32) ** 2)

    with pytest.warns(UserWarning, match="Expected max_error=1e-12; the plan has .* operations in"):
        tuned(half, PARAMS["a"], X, max_error=1e-12)


def test_bad_input_is_refused():
    """Dtypes, bounds, losses that are no scalars, and losses that are not finite in float32."""
    with pytest.raises(ValueError, match="dtype; got 'int8'"):
        tuned(offset, OFFSET, X, Y, dtype="int8")
    with pytest.raises(ValueError, match="max_error; got 0"):
        tuned(offset, OFFSET, X, Y, max_error=0)
    with pytest.raises(TypeError, match="scalar loss"):
        tuned(lambda p, x: x @ p, PARAMS["a"], X)
    with pytest.raises(ValueError, match=r"finite in float32; got a loss of inf.*xray"):
        tuned(lambda p, x: jnp.exp(x @ p * 1e3).sum(), PARAMS["a"], X)


def test_the_file_is_json(plan, tmp_path):
    """Other programs can read the rows."""
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["operations"][0]["name"] == plan.operations[0].name

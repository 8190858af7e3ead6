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
from gainstage.precision import Plan, PlanEntry, find_plan


def tuned(fun, params, *batch, max_error=0.005, **options):
    """The plan whose gradient has at most this error on one batch."""
    return find_plan(fun, params, [batch], max_error=max_error, **options)


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
    """Default rules are 10 % wrong; the plan keeps that line in float32, and is below its bound."""
    batch = 300 + 0.7 * np.asarray(X), Y
    assert error(offset, "float16", OFFSET, *batch) > 0.1
    assert error(offset, plan, OFFSET, *batch) <= 0.005
    products = [o.dtype for o in plan.entries if o.name == "dot_general"]
    assert products == ["float32", "float16"]  # two are on one line


def test_the_prediction_holds_on_another_batch(plan):
    """Predicted, measured and another batch of another size agree within a factor of 1.5."""
    other = 300 + 0.7 * np.asarray(draw(3, 64, 48)), draw(4, 64, 48)
    assert plan.measured.error == pytest.approx(
        error(offset, plan, OFFSET, 300 + 0.7 * np.asarray(X), Y), rel=0.2
    )
    for found in (plan.measured.error, error(offset, plan, OFFSET, *other)):
        assert plan.predicted.error / 1.5 <= found <= plan.predicted.error * 1.5


@pytest.mark.parametrize(("height", "is_near"), [(5e4, True), (5e3, True), (5e2, False)])
def test_what_comes_near_the_largest_number_stays_in_float32(height, is_near):
    """A network whose middle reaches 1e5 is right with a plan, and so is one whose middle may grow
    to that: a sixteenth of the largest number is the limit."""

    def hot(params, x, y):
        h = jnp.tanh(x @ params["a"]) @ params["b"] * height
        return jnp.mean((jnp.tanh(h / height) @ params["c"] - y) ** 2)

    plan = tuned(hot, PARAMS, X, Y)
    assert plan.measured.error <= 0.005
    large = {o.name: o.dtype for o in plan.entries if o.reason == "it is too large"}
    assert large == ({"mul": "float32", "div": "float32"} if is_near else {})


def test_what_overflows_hides_no_small_gradients():
    """Where the middle of a network overflows, and its gradients are so small that they need a
    loss scale, the plan has the same lines in float32 as with larger gradients."""

    def hot(factor):
        def loss(params, x, y):
            h = jnp.tanh(x @ params["a"]) @ params["b"] * 5e4
            return factor * jnp.mean((jnp.tanh(h / 5e4) @ params["c"] - y) ** 2)

        return {o.name: o.dtype for o in tuned(loss, PARAMS, X, Y).entries}

    assert hot(1e-5) == hot(1.0)
    assert hot(1e-5)["sub"] == "float16"


def test_a_plan_of_a_small_batch_holds_for_a_large_one():
    """A sum grows with the batch, and what divides it is in float32: the loss stays finite."""

    def loss(params, x):
        z = jnp.tanh(x @ params["a"]) @ params["b"]
        total = jnp.sum(jnp.square(z - 1)) + jnp.sum(jnp.abs(z)) * 2.0
        return total / z.size

    plan = tuned(loss, PARAMS, X[:16])
    assert {o.dtype for o in plan.entries if o.name == "dot_general"} == {"float16"}
    assert not {"reduce_sum", "div"} & {o.name for o in plan.entries}  # as by the default rules
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
    assert not any(o.reason == "it is too large" for o in plan.entries)


def test_a_tighter_bound_keeps_more():
    """The plan stays below each bound, and a smaller one keeps more operations in float32."""
    counts = []
    for bound in (1e-2, 3e-4, 1e-6):
        plan = tuned(offset, OFFSET, 300 + 0.7 * np.asarray(X), Y, max_error=bound)
        assert plan.measured.error <= bound
        counts.append(sum(o.dtype == "float16" for o in plan.entries))
    assert counts[0] > counts[1] > counts[2] == 0


def test_equal_layers_share_a_measurement():
    """A function of three equal layers has the rows of one, and so has a scan of them."""

    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def scanned(params, x):
        return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)[0] ** 2)

    params = np.stack([PARAMS[name] for name in "abc"])
    rows = [[o.key for o in tuned(loss, params[:n], X).entries] for n in (1, 3)]
    assert rows[0] == rows[1]
    plan = tuned(scanned, params, X)
    assert [o.dtype for o in plan.entries if o.name == "dot_general"] == ["float16"]
    assert error(scanned, plan, params, X) <= 0.005


def test_a_plan_is_saved_and_loaded(plan, tmp_path):
    """A loaded plan is the saved one, in every row and in what it says."""
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded != Plan("float16", plan.entries[1:], plan.predicted, plan.measured)
    assert str(loaded) == str(plan)
    assert "an error of 0.0" in str(plan)
    assert "test_find_plan.py:" in str(plan)


def test_a_plan_needs_the_function_without_autocast(plan):
    """`autocast` refuses a plan for what `autocast` returned, and names the function to pass."""
    with pytest.raises(ValueError, match=r"which autocast returned\. Pass .*: fun\.__wrapped__\."):
        gs.autocast(gs.autocast(lambda params, x: (x @ params).mean()), plan)


def test_a_row_shows_what_is_known_of_its_line(plan):
    """A column that no row has is left out, and lines that are in float32 are named as code."""
    rows = [o._replace(error=np.nan) for o in plan.entries if o.dtype == "float32"]
    head, *table, code = str(Plan("float16", rows)).splitlines()
    assert head == f"float16 by the default rules, with rows in float32 ({len(rows)})."
    assert table[0].split() == ["operation", "dtype", "line", "why"]
    assert table[1].split()[:3] == ["dot_general", "float32", rows[0].line]
    assert code == (
        f"As code: with gainstage.keep_float32(): around {rows[0].line} "
        '(`h = jnp.tanh(x @ params["a"] - params["mean"])`).'
    )
    assert str(Plan("float16")) == "float16 by the default rules."


NO_PLANS = ["", "{}", "[]", '{"gainstage plan": 2}', '{"gainstage plan": 3, "operations": [1]}']


@pytest.mark.parametrize("content", NO_PLANS)
def test_a_file_that_is_no_plan_is_refused(content, tmp_path):
    """The error names the file."""
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"plan of version 3.*other\.json"):
        Plan.load(path)


def refused(plan, path, damage):
    """Asserts that the file of a plan is refused after some damage, with its name."""
    content = json.loads(plan.to_json())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"plan of version 3.*damaged\.json"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "gainstage plan": [2, None], "dtype": ["banana", 3, ["float16"]], "left": ["much", True],
        "predicted": ["small", {}], "measured": [None, {"noise": 1}], "operations": [3, [1]],
    }.items(),
)  # fmt: skip
def test_a_damaged_plan_is_refused_where_it_is_read(plan, field, values, tmp_path):
    """Each field of the file is checked, before anything uses the plan."""
    for value in values:
        refused(
            plan, tmp_path / "damaged.json", lambda content, v=value: content.update({field: v})
        )
    refused(plan, tmp_path / "damaged.json", lambda content: content.pop(field))


@pytest.mark.parametrize("field", PlanEntry._fields)
def test_a_damaged_row_of_a_plan_is_refused(plan, field, tmp_path):
    """A row that would count as float32, or fail later, is an error of the file."""
    is_number = field in ("error", "noise", "bias")
    values = ["big", True, []] if is_number else [1, None, ["a"]]
    values += ["banana", "float8", "float32 result"] if field == "dtype" else []
    number = [o.name for o in plan.entries].index("tanh")  # which is no product
    for value in values:
        refused(
            plan, tmp_path / "damaged.json",
            lambda content, v=value: content["operations"][number].update({field: v}),
        )  # fmt: skip
    if field != "reason":  # which may be left out
        refused(
            plan, tmp_path / "damaged.json", lambda content: content["operations"][0].pop(field)
        )
    refused(plan, tmp_path / "damaged.json", lambda content: content["operations"][0].update(own=1))


def test_has_aux_without_aux_is_an_error():
    """A function that returns a scalar has no aux; the error says what was expected."""
    with pytest.raises(TypeError, match=r"Expected \(loss, aux\) from loss_fn with has_aux=True"):
        tuned(lambda w: (w * w).sum(), jnp.ones(3), has_aux=True)


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
    assert "log1p" not in {o.name for o in plan.entries}  # the user has decided on it
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

    with pytest.warns(UserWarning, match="Expected max_error=1e-12; the plan has .* lines in"):
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
    assert content["operations"][0] == plan.entries[0]._asdict() | {"noise": None, "bias": None}

"""What users of other libraries ask for: every answer does what it says, where its link leads."""

import ast
import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from docs.pages import DOCS
from small_floats import SMALL

import gainstage as gs

pytestmark = pytest.mark.repo

PAGE = (DOCS / "wanted.md").read_text()
LINK = r"\[([\w.-]+#\d+)\]\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/(\d+)\)"
ROWS = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)[1:]  # without the heading
KEYS = [re.findall(LINK, asked)[0][0] for _, asked, _ in ROWS]
WARNS = {"optax#1754": "Half-precision parameters"}
NO = {"jmp#28", "fairscale#879", "TransformerEngine#2337"}


@pytest.fixture(scope="module")
def all_names():
    """The names that the answers use."""

    def loss_fn(params, x, y):
        return jnp.mean((x @ params["w"] - y) ** 2)

    half = gs.autocast(loss_fn)
    x, y = jnp.ones((16, 16)), jnp.ones((16, 16))
    adam = optax.adam(1e-3)
    step = gs.train_step(half, donate=False)
    state, _ = step(gs.TrainState.create({"w": jnp.zeros((16, 16))}, adam), x, y)
    params = state.params
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    sharded = jax.NamedSharding(mesh, jax.P("data"))
    return {**locals(), "jax": jax, "jnp": jnp, "optax": optax, "gs": gs}


@pytest.fixture
def scope(all_names):
    """A copy of these names for one answer, which may assign them."""
    return dict(all_names)


def anchor(heading):
    """The address of a heading in its page."""
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def value_of(code, scope):
    """Runs statements, and returns the value of the last one, an expression."""
    *before, last = ast.parse(code).body
    exec(compile(ast.Module(before, []), "wanted.md", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "wanted.md", "eval"), scope)


def scales(rule, finite, start=None):
    """The scales of a rule after each of some steps."""
    state = rule.init()
    if start is not None:
        state = state._replace(scale=jnp.float32(start))
    for good in finite:
        state = rule.update(state, good)
        yield float(state.scale)


def is_half_with_float32_gradients(value, scope):
    loss, grads = value
    batch = scope["params"], scope["x"], scope["y"]
    assert "f16" in str(jax.make_jaxpr(scope["half"])(*batch))
    exact, exact_grads = jax.value_and_grad(scope["loss_fn"])(*batch)
    assert loss.dtype == grads["w"].dtype == "float32"
    assert loss != exact  # products are rounded to float16
    np.testing.assert_allclose(loss, exact, rtol=1e-2)
    np.testing.assert_allclose(grads["w"], exact_grads["w"], rtol=1e-2)


def is_one_step_of_adam(value, scope):
    np.testing.assert_allclose(value, scope["params"]["w"] + 1e-3, rtol=1e-3)
    assert float(scope["opt"].dynamic_scale.value) == 2.0**15


def is_half_the_float16_scale(value, scope):
    assert value == 2.0**14
    assert value.dtype == "float32"
    assert list(scales(scope["rule"], [True] * 2000))[-1] == 2.0**16  # no float16 holds it


def falls_below_1(rule, scope):
    assert list(scales(rule, [False] * 60))[-1] == 2.0**-24


def is_bounded_and_recovers(rule, scope):
    assert list(scales(rule, [False] * 60))[-1] == 1.0
    assert list(scales(rule, [False] * 60 + [True] * 2000))[-1] == 2.0
    assert list(scales(rule, [True] * 2000, 2.0**24))[-1] == 2.0**24
    assert list(scales(rule, [True], jnp.inf)) == [2.0**24]
    assert 0 < gs.DynamicLossScale().min_scale < gs.DynamicLossScale().max_scale < np.inf


def warns_at_the_floor_or_raises(alarms, scope):
    def write(alarms):
        for n in range(100):
            alarms.write(n, finite=False, applied=False, loss_scale=1.0, loss=1.0)
        alarms.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write(alarms)
    assert "floor" in {alarm.message.kind for alarm in caught}
    with pytest.raises(gs.diagnostics.Alarm):  # warnings are errors
        write(type(alarms)(gs.DynamicLossScale()))


def names_the_product_and_a_scale(xray, scope):
    assert re.search("cause: backward dot_general .* overflow", str(xray))
    assert xray.window()[1] < 20


def clips_true_gradients(state, scope):
    def norm_of_update(size):
        step = gs.train_step(lambda w: size * w.sum(), donate=False)
        return float(jnp.linalg.norm(step(state)[0].params))

    assert norm_of_update(100.0) == pytest.approx(1.0)
    assert norm_of_update(0.25) == pytest.approx(0.5)


def tells_and_schedules_wait(value, scope):
    assert value
    tx = optax.sgd(optax.linear_schedule(1.0, 0.0, 10))
    state = gs.TrainState.create(scope["params"], tx)
    bad, _ = scope["step"](state, jnp.nan * scope["x"], scope["y"])
    assert not bad.applied
    assert optax.tree.get(bad.opt_state, "count") == 0


def has_true_float32_gradients(value, scope):
    half = {"w": scope["w"]}
    exact = jax.grad(scope["loss_fn"])(half, scope["x"], scope["y"])
    _, _, grads = value
    assert grads["w"].dtype == "float32"
    assert exact["w"].dtype == "float16"
    np.testing.assert_allclose(grads["w"], exact["w"], rtol=1e-2)


def are_unchanged(w, scope):
    assert w.dtype == "float16"
    np.testing.assert_array_equal(w, np.ones(8))


def is_an_array_that_jit_reads(value, scope):
    assert isinstance(value, jax.Array)
    assert value == jax.jit(lambda state: state.loss_scale)(scope["state"]) == 2.0**15


def leaves_a_bad_microbatch_out(state, scope):
    step = gs.train_step(lambda w, x: SMALL * (w * x).sum())
    for gradient in (1.0, jnp.nan, 3.0):
        state, _ = step(state, gradient)
    np.testing.assert_array_equal(state.params, [-2.0, -2.0])  # minus the mean of 1 and 3
    assert state.loss_scale == 2.0**14


def have_scales_of_their_own(states, scope):
    nan = jnp.nan * scope["x"]
    states["generator"], _ = scope["step"](states["generator"], nan, scope["y"])
    after = {name: float(state.loss_scale) for name, state in states.items()}
    assert after == {"generator": 2.0**14, "discriminator": 2.0**15}


def is_the_same_bit_for_bit(value, scope):
    assert jax.tree.structure(value) == jax.tree.structure(scope["state"])
    jax.tree.map(np.testing.assert_array_equal, value, scope["state"])
    assert value.loss_scale == 2.0**15


def is_sharded_and_skips_together(value, scope):
    state, _ = value
    assert state.params["w"].sharding == scope["sharded"]
    assert state.applied
    bad = scope["x"].at[0].set(jnp.nan)  # on one device
    after, _ = scope["step"](state, bad, scope["y"])
    assert not after.applied
    np.testing.assert_array_equal(after.params["w"], state.params["w"])


def doubles_after_400_steps(state, scope):
    rule_state = state.opt_state.rule_state._replace(good_steps=jnp.int32(399))
    state = state.replace(opt_state=state.opt_state._replace(rule_state=rule_state))
    assert scope["step"](state, scope["x"], scope["y"])[0].loss_scale == 2.0**16


EXPECTED = {
    "jax#5257": (
        "autocast.md",
        "gs.autocast(",
        "jax.value_and_grad(gs.autocast(loss_fn))(params, x, y)",
        is_half_with_float32_gradients,
    ),
    "keras#19244": (
        "from/keras.md#a-loop-of-your-own",
        "gainstage.interop.keras",
        "import keras; from gainstage.interop.keras import LossScaleOptimizer; "
        "w = keras.Variable(params['w']); opt = LossScaleOptimizer(keras.optimizers.Adam()); "
        "g = jax.grad(lambda w: opt.scale_loss(half({'w': w}, x, y)))(w.value); "
        "opt.apply([g], [w]); w.value",
        is_one_step_of_adam,
    ),
    "jmp#47": (
        "choosing-a-rule.md#settings-of-dynamiclossscale",
        "DynamicLossScale",
        "rule = gs.DynamicLossScale(jnp.float16(2.0**15)); rule.update(rule.init(), False).scale",
        is_half_the_float16_scale,
    ),
    "jmp#18": (
        "choosing-a-rule.md#settings-of-dynamiclossscale",
        "gs.DynamicLossScale(min_scale=2.0**-24)",
        "gs.DynamicLossScale(min_scale=2.0**-24)",
        falls_below_1,
    ),
    "pytorch#40497": (
        "choosing-a-rule.md#settings-of-dynamiclossscale",
        "`min_scale`, `max_scale`",
        "gs.DynamicLossScale(min_scale=1.0, max_scale=2.0**24)",
        is_bounded_and_recovers,
    ),
    "gpt-neox#291": (
        "watching.md#alarms",
        "gs.diagnostics.Alarm)",
        "gs.diagnostics.Alarms(gs.DynamicLossScale())",
        warns_at_the_floor_or_raises,
    ),
    "apex#192": (
        "bad-steps.md",
        "gs.xray(",
        "gs.xray(half, state, x, y, scale=2.0**20)",
        names_the_product_and_a_scale,
    ),
    "pytorch-lightning#9330": (
        "clipping.md",
        "optax.chain(optax.clip_by_global_norm(",
        "tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)); "
        "gs.TrainState.create(jnp.zeros(4), tx)",
        clips_true_gradients,
    ),
    "pytorch#67590": (
        "faq.md#schedules-my-scheduler-advances-on-a-skipped-step",
        "state.applied",
        "state.applied",
        tells_and_schedules_wait,
    ),
    "pytorch#74739": (
        "faq.md#my-weights-are-float16",
        "float16",
        "w = params['w'].astype('float16'); "
        "gs.TrainState.create({'w': w}, adam).value_and_grad(loss_fn)(x, y)",
        has_true_float32_gradients,
    ),
    "optax#1754": (
        "faq.md#my-weights-are-float16",
        "a step computes in float32",
        "state = gs.TrainState.create(jnp.ones(8, 'float16'), adam); "
        "gs.train_step(lambda w: 0 * w.sum())(state)[0].params",
        are_unchanged,
    ),
    "accelerate#1714": (
        "from/torch.md",
        "state.loss_scale",
        "state.loss_scale",
        is_an_array_that_jit_reads,
    ),
    "keras#14829": (
        "accumulation.md#microbatches-that-come-at-different-times",
        "optax.MultiSteps(",
        "gs.TrainState.create(jnp.zeros(2), optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2))",
        leaves_a_bad_microbatch_out,
    ),
    "apex#232": (
        "several-models.md",
        "gs.TrainState.create(",
        "{name: gs.TrainState.create(params, adam) for name in ('generator', 'discriminator')}",
        have_scales_of_their_own,
    ),
    "accelerate#4289": (
        "checkpoints.md",
        "gs.save(path, state)",
        'gs.save("run.safetensors", state); gs.load("run.safetensors", state)',
        is_the_same_bit_for_bit,
    ),
    "torchtitan#1735": (
        "scaling.md#the-parameters-do-not-fit",
        "gs.TrainState.create(",
        "params, x, y = jax.device_put((params, x, y), sharded); "
        "step(gs.TrainState.create(params, adam), x, y)",
        is_sharded_and_skips_together,
    ),
    "OpenRLHF#1155": (
        "choosing-a-rule.md#settings-of-dynamiclossscale",
        "increment_period",
        "gs.TrainState.create(params, adam, loss_scale=gs.DynamicLossScale(increment_period=400))",
        doubles_after_400_steps,
    ),
}
ANSWERS = {key: answer for key, (_, _, answer) in zip(KEYS, ROWS, strict=True) if key not in NO}


@pytest.mark.parametrize("key", EXPECTED)
def test_the_answer_does_what_it_says(key, scope):
    """The code of an answer runs, and its value is as expected."""
    _, _, code, expected = EXPECTED[key]
    if "import keras" in code:
        pytest.importorskip("keras")
    told = pytest.warns(match=WARNS[key]) if key in WARNS else contextlib.nullcontext()
    with told:
        value = value_of(code, scope)
    expected(value, scope)


@pytest.mark.parametrize("key", EXPECTED)
def test_the_answer_is_where_its_link_leads(key):
    """An answer links to a section, or a page, that has what the code uses."""
    home, shown, *_ = EXPECTED[key]
    page, _, heading = home.partition("#")
    text = (DOCS / page).read_text()
    if heading:
        anchors = re.sub(r"^#+ (.*)", lambda found: f"# {anchor(found[1])}", text, flags=re.M)
        (text,) = re.findall(rf"^# {heading}$(.*?)(?=^# |\Z)", anchors, re.M | re.S)
    assert f"]({home})" in ANSWERS[key]
    assert shown in text


def test_there_are_twenty_questions_with_links():
    """Each row has a question, and links whose text has the number of their address."""
    assert len(ROWS) == len(set(KEYS)) == 20
    for question, asked, _ in ROWS:
        links = re.findall(LINK, asked)
        assert len(question.split()) > 3
        assert len(links) == asked.count("](") > 0
        assert all(name.endswith(f"#{number}") for name, number in links)


def test_no_is_said_where_there_is_no_answer():
    """The rows without an answer say No, and are as many as the page counts."""
    without = {key for key, (_, _, answer) in zip(KEYS, ROWS, strict=True) if answer[:3] == "No:"}
    assert without == NO
    assert "Three answers are No." in PAGE
    assert len(NO) == 3


def test_every_answer_is_checked():
    """Each answer that is not No has an expectation, and none is left over."""
    assert EXPECTED.keys() == ANSWERS.keys()


def test_the_page_is_short():
    """The page has at most 900 words."""
    assert len(PAGE.split()) <= 900

"""Underflow: what float16 loses of gradients, counted on the device in one step of many."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.diagnostics import Run
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable
from gainstage.runs.summary import summary

from programs import update_in_shard_map

SCALE = 2.0**10
NORMAL = 2.0**-10 / np.sqrt(12 * 2)  # the rounding error of a number of full precision
SHAPES = [(7,), (64, 40), (), (4, 3, 16)]


def wild(rng, shape, lowest=-60, highest=4):
    """True gradients of all sizes, some of them 0; times the scale they fit into float16."""
    size = rng.uniform(1.0, 1.9, size=shape) * np.exp2(rng.integers(lowest, highest, size=shape))
    signed = size * rng.choice([-1, 1], size=shape)
    return np.float32(np.where(rng.random(shape) < 0.2, 0.0, signed))


def check(underflow, true):
    """The shares, the headroom and the suggestion, from what numpy casts to float16."""
    tops = []
    for row, gradient in enumerate(true):
        scaled = gradient.astype(np.float64) * SCALE
        half, there = scaled.astype(np.float16), scaled != 0
        lost = there & (half == 0)
        poor = there & ~lost & (np.abs(scaled) < 2.0**-14)
        for name, flags in (("zero", ~there), ("flushed", lost), ("subnormal", poor)):
            np.testing.assert_allclose(
                getattr(underflow, name)[row], np.mean(flags), rtol=1e-6, err_msg=name
            )
        top = max(np.floor(np.log2(np.abs(scaled).max())), -40) if there.any() else -np.inf
        assert underflow.headroom[row] == 15 - top
        tops.append(top)
        if top == -40:
            continue  # and below, where nothing more is told
        with np.errstate(over="ignore"):
            doubled = scaled * 2.0 ** underflow.headroom[row] if there.any() else scaled
            assert np.isfinite(np.float16(doubled / 1.001)).all()
            assert not there.any() or np.isinf(np.float16(doubled * 2)).any()
    if np.isfinite(max(tops)):
        assert underflow.suggested_scale == SCALE * 2.0 ** (15 - max(tops) - 1)


# Asked for in chainer#6199 (what was zeroed).
@pytest.mark.parametrize("way", ["optimizer", "optax"])
def test_shares_are_those_of_a_cast(way):
    """Of arrays of all shapes and sizes, the shares are those of numpy's float16."""
    rule, zeros = gs.DynamicLossScale(SCALE), [np.zeros(s, np.float32) for s in SHAPES]
    variables = [Variable(zero) for zero in zeros]
    opt = LossScaleOptimizer(SGD(0.1), loss_scale=rule, telemetry=True, underflow_every=1)
    tx = gs.with_loss_scale(optax.sgd(0.1), rule, telemetry=True, underflow_every=1)
    state, update = tx.init(zeros), jax.jit(tx.update)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        true = [wild(rng, shape) for shape in SHAPES]
        true[seed % 4] = true[seed % 4] * 0
        if way == "optimizer":
            opt.apply([t * np.float32(SCALE) for t in true], variables)
            report = gs.diagnostics.report(opt)
        else:
            _, state = update(true, state, zeros)
            report = gs.diagnostics.report(state, zeros)
        assert (report.underflow.step, report.underflow.scale) == (seed, SCALE)
        check(report.underflow, true)


def test_zeros_of_a_half_precision_backward_pass_are_seen():
    """What float16 has flushed on the way is zero when it arrives, beside subnormal elements."""
    w = Variable(np.float32(2.0) ** -np.arange(40))
    opt = LossScaleOptimizer(SGD(0.0), SCALE, telemetry=True, underflow_every=1)
    opt.minimize(lambda: (w.value().astype("float16").astype("float32") ** 2).sum() / 2, [w])
    found = gs.diagnostics.report(opt).underflow
    assert found.flushed == [0]
    # 2**-k * 2**10, held from 2**-24 on; of the values themselves, none below 2**-24 came so far.
    assert found.zero == [15 / 40]
    assert found.subnormal == [0]


def test_it_is_counted_every_so_many_steps_and_never_on_a_skip():
    """Every third step is counted; if it is skipped, the next that is not."""
    w = Variable([0.0])
    opt = LossScaleOptimizer(SGD(0.1), SCALE, telemetry=True, underflow_every=3)
    opt.build([w])
    assert gs.diagnostics.report(opt).underflow is None
    seen = []
    for step in range(10):
        opt.apply([[np.inf if step in (6,) else 1.0]])
        seen.append(gs.diagnostics.report(opt).underflow.step)
    assert seen == [0, 0, 0, 3, 3, 3, 3, 7, 7, 7]


@pytest.mark.parametrize(
    "kind", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.thorough)], ids=str
)
def test_parts_on_many_devices_are_counted_once(kind):
    """On eight devices the shares are those of the whole, however the array is divided."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    true = [wild(rng, (16, 6)), wild(rng, (8,)), wild(rng, (5, 5))]
    specs = [PartitionSpec("data", "model"), PartitionSpec("model"), PartitionSpec()]
    layouts = [NamedSharding(mesh, spec) for spec in specs]
    grads = [jax.device_put(np.float32(t * SCALE), s) for t, s in zip(true, layouts, strict=True)]
    variables = [Variable(jax.device_put(0 * t, s)) for t, s in zip(true, layouts, strict=True)]
    opt = LossScaleOptimizer(SGD(0.1), SCALE, telemetry=True, underflow_every=1)
    opt.apply(grads, variables)
    check(gs.diagnostics.report(opt).underflow, true)


def test_inside_of_shard_map_parts_are_summed():
    """Each device counts its part; the shares are those of the whole."""
    true = wild(np.random.default_rng(0), (16, 3))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rule = gs.DynamicLossScale(SCALE)
    tx = gs.with_loss_scale(optax.sgd(0.1), rule, telemetry=True, underflow_every=1)
    params = jax.device_put(jnp.zeros((16, 3)), NamedSharding(mesh, PartitionSpec("data")))
    state = update_in_shard_map(tx, params, jnp.asarray(true))
    check(gs.diagnostics.report(state, params).underflow, [true])


@pytest.mark.as_users
def test_it_calls_nothing_on_the_host_and_takes_little_memory():
    """The compiled step has no callback, and stores no copy of a gradient."""
    w = Variable(np.zeros((1024, 1024), np.float32))
    opt = LossScaleOptimizer(SGD(0.1), SCALE, telemetry=True, underflow_every=100)
    opt.build([w])
    program = gs.optimizers.jit(lambda g: opt.apply([g]), ([w], opt.variables), donate=True)
    compiled = program.lower(jnp.ones((1024, 1024))).compile()
    text = compiled.as_text()
    assert "callback" not in text
    assert "infeed" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * w.value().nbytes


def test_tensors_by_name_for_json():
    """`tensors` has every number of each tensor; equal names are told apart."""
    variables = [Variable([0.0], name="w"), Variable([0.0], name="w")]
    opt = LossScaleOptimizer(SGD(0.1), SCALE, telemetry=True, underflow_every=1)
    opt.apply([[1.0], [0.0]], variables)
    opt.apply([[np.inf], [0.0]], variables)
    assert gs.diagnostics.report(opt).tensors() == {
        "w": {"inf": 1, "nan": 0, "first": 1, "last": 1,
              "zero": 0.0, "flushed": 0.0, "subnormal": 0.0, "headroom": 15.0,
              "error": pytest.approx(NORMAL), "unscaled_error": pytest.approx(NORMAL),
              "norm_share": 1.0},
        "w#2": {"inf": 0, "nan": 0, "first": -1, "last": -1,
                  "zero": 1.0, "flushed": 0.0, "subnormal": 0.0, "headroom": np.inf,
                  "error": 0.0, "unscaled_error": 0.0, "norm_share": 0.0},
    }  # fmt: skip


def test_gradients_beyond_float16_say_how_far():
    """A float32 gradient that float16 would not hold has a headroom below 0, and the suggestion is
    a scale at which it does."""
    opt = LossScaleOptimizer(SGD(0.1), SCALE, telemetry=True, underflow_every=1)
    opt.apply([[2.0**20, 1.0]], [Variable([0.0, 0.0])])
    found = gs.diagnostics.report(opt).underflow
    assert (found.headroom, found.suggested_scale) == ([-5], SCALE * 2.0**-6)


def counted(*gradients, scale=SCALE):
    """The report after one step of an optimizer with these true gradients."""
    variables = [Variable(np.zeros(np.shape(g), np.float32), name="w") for g in gradients]
    opt = LossScaleOptimizer(SGD(0.1), scale, telemetry=True, underflow_every=1)
    opt.apply([np.float32(g) * np.float32(scale) for g in gradients], variables)
    return gs.diagnostics.report(opt)


@pytest.fixture(scope="module")
def after_step():
    """What is counted in a step with 5000 true gradients."""
    opt = LossScaleOptimizer(SGD(0.1), SCALE, telemetry=True, underflow_every=1)
    opt.build([Variable(np.zeros(5000, np.float32))])

    def counted(true):
        opt.apply([true * np.float32(SCALE)])
        return gs.diagnostics.report(opt).underflow

    return counted


@pytest.mark.parametrize("size", [2.0**-k for k in (0, 10, 15, 18, 20, 22, 25, 30)])
def test_the_rounding_error_is_that_of_a_cast(size, rng, after_step):
    """Of normally distributed gradients of any size, `error` and `unscaled_error` are the rounding
    errors of numpy's float16 within 15 %, up to gradients of which nothing is left."""
    true = np.float32(rng.normal(size=5000) * size)
    found = after_step(true)
    for error, scale in ((found.error, SCALE), (found.unscaled_error, 1.0)):
        scaled = true.astype(np.float64) * scale
        lost = np.float16(scaled).astype(np.float64) - scaled
        expected = np.sqrt(np.mean(lost**2) / np.mean(scaled**2))
        np.testing.assert_allclose(error, [expected], rtol=0.15)
    grid = 2.0**-24 / np.sqrt(12) / size
    if 2.0**-22 <= size <= 2.0**-18:  # all are below 2**-14, most above 2**-25
        np.testing.assert_allclose(found.unscaled_error, [grid], rtol=0.2)


def test_the_report_says_whether_what_is_lost_matters():
    """A step without small elements, one whose small ones do not matter, and one that needs
    scaling are each said to be so, with and without the scale. Good news is of parameters alone."""
    good = "In gradients of parameters"
    inside = "Numbers inside of the network are smaller, and are"
    healthy = str(counted([1.0, 0.5])).splitlines()
    assert healthy[2] == f"{good} nothing underflows: float16 is at most 0.02% off."
    assert healthy[3] == (
        "Without scaling float16 would be at most 0.02% off in gradients of parameters."
    )
    assert healthy[4] == f"{inside} not measured: see gs.xray."
    harmless = str(counted([1.0, 2.0**-40])).splitlines()
    assert harmless[2] == f"{good} underflow does not matter: float16 is at most 0.02% off."
    small = str(counted([2.0**-22, 2.0**-23], [2.0**-12])).splitlines()
    assert small[2] == healthy[2]
    assert small[3] == (
        "Without scaling float16 would be 6.5% off in w, and by more than 1% in 1 of 2 tensors: "
        "you need it."
    )
    lost = str(counted([2.0**-33], [2.0**-22])).splitlines()
    assert lost[2] == (
        "Underflow: float16 is 10% off in w, and by more than 1% in 1 of 2 tensors. "
        "gs.advise(loss_fn, params, batches) says what each precision costs."
    )
    large = str(counted([2.0**20])).splitlines()
    assert large[2:] == [
        "Overflow: w is beyond the largest number of float16.",
        "w: overflows, 0.0% zero, 0.0% flushed to zero, 0.0% subnormal, -15 bits of headroom",
    ]
    fixed = str(counted([1.0], scale=1.0)).splitlines()
    assert (len(fixed), fixed[3]) == (5, healthy[4])  # nothing on scaling


def test_a_gradient_far_below_the_others_needs_no_scaling():
    """A gradient that may be nothing but rounding, as of a bias before a normalisation, is left out
    of the sentence on scaling, and the report says so."""
    lines = str(counted([2.0**-22, 2.0**-23], [2.0**-5])).splitlines()
    assert lines[3].endswith("float16 would be at most 0.02% off in gradients of parameters.")
    assert lines[5].startswith(
        "Left out: w. Gradients below 0.0001 of all together may be rounding"
    )
    assert lines[-1].startswith("w: 0.02% off, left out, 0.0% zero")
    lost = str(counted([2.0**-33], [1.0])).splitlines()
    assert lost[2].startswith("In gradients of parameters underflow does not matter")
    assert "Left out" not in str(counted([2.0**-10], [1.0]))


def test_a_gradient_far_below_the_others_is_left_out_of_a_recorded_report():
    """The report of a recording leaves it out too; a recording without norms leaves out nothing."""
    tensors = counted([2.0**-22, 2.0**-23], [2.0**-5]).tensors()
    run = Run(np.arange(2), {"finite": np.ones(2), "loss_scale": np.full(2, SCALE)}, tensors)
    lead = summary(run).underflow.lead
    assert not any("you need it" in sentence for sentence in lead)
    assert lead[-1].startswith("Left out: w. Gradients below")
    old = {n: {k: v for k, v in row.items() if k != "norm_share"} for n, row in tensors.items()}
    assert summary(run._replace(tensors=old)).underflow.lead[1].endswith("you need it.")


def test_five_tensors_are_printed():
    """The report has a line for each of the five worst tensors, and one for the rest."""
    lines = str(counted(*([2.0**-k] for k in range(24, 32)))).splitlines()
    assert [line.split(",")[0] for line in lines[4:]] == [
        "w#8: 2.6% off", "w#7: 1.3% off", "w#6: 0.64% off", "w#5: 0.32% off", "w#4: 0.16% off",
        "and 3 more",
    ]  # fmt: skip
    tx = gs.with_loss_scale(optax.sgd(0.1), telemetry=True)
    params = {f"w{n}": np.ones(1, np.float32) for n in range(8)}
    grads = {name: np.full(1, np.inf if name < "w7" else 1.0, np.float32) for name in params}
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    lines = str(gs.diagnostics.report(state, params)).splitlines()
    assert (len(lines), lines[-1]) == (7, "and 2 more; 1 others were finite")


def test_a_scale_that_overflowed_is_not_suggested():
    """The suggested scale is below those that overflowed, until a step is finite at one."""
    opt = LossScaleOptimizer(SGD(0.1), 2.0**12, 4, telemetry=True, underflow_every=1)
    suggested = []
    opt.build([Variable([0.0])])
    for finite in (True, False, False, True, True, True, True, True):
        gradient = 2.0**-8 * float(opt.loss_scale) if finite else np.inf
        opt.apply([np.array([gradient], np.float32)])
        suggested.append(gs.diagnostics.report(opt).underflow.suggested_scale)
    assert suggested == [2.0**22, 2.0**11, *[2.0**10] * 5, 2.0**22]


def test_bad_data_is_no_reason_for_a_scale_below_one():
    """Where steps were skipped at a scale of 1 too, the report suggests none."""
    opt = LossScaleOptimizer(SGD(0.1), 1.0, telemetry=True, underflow_every=1)
    for gradient in (2.0**-18, np.nan):
        opt.apply([np.array([gradient], np.float32)], [Variable([0.0])] if gradient > 0 else None)
    assert "(no scale suggested, as steps were skipped at 2^0 too)" in str(
        gs.diagnostics.report(opt)
    )


def test_a_bare_array_has_a_name():
    """Parameters that are one array are called "params" in the report."""
    tx = gs.with_loss_scale(optax.sgd(0.1), telemetry=True)
    params = jnp.ones(3)
    _, state = tx.update(jnp.full(3, jnp.inf), tx.init(params), params)
    assert (
        str(gs.diagnostics.report(state, params)).splitlines()[1]
        == "params: inf in 1 of 1 skipped step, step 0"
    )


def test_it_needs_telemetry():
    """Counting that nobody could ask for is an error, and so is a period that is none."""
    with pytest.raises(ValueError, match="Expected telemetry=True for underflow_every=5"):
        LossScaleOptimizer(SGD(0.1), underflow_every=5)
    with pytest.raises(ValueError, match="underflow_every"):
        gs.with_loss_scale(optax.sgd(0.1), telemetry=True, underflow_every=0)
    config = LossScaleOptimizer(SGD(0.1), telemetry=True, underflow_every=5).get_config()
    assert LossScaleOptimizer.from_config(config).underflow_every == 5


def test_exponents_of_missing_gradients_in_x64():
    """`underflow_every` counts nothing for a variable without gradient, in x64 too."""
    with jax.enable_x64(True):
        w, b = Variable(1.0, dtype=jnp.float32), Variable(2.0, dtype=jnp.float64)
        opt = LossScaleOptimizer(SGD(0.5), telemetry=True, underflow_every=1)
        with pytest.warns(UserWarning, match="No gradient for"):
            opt.apply([jnp.float32(2.0**15), None], [w, b])
        assert (float(w), float(b)) == (0.5, 2.0)


@pytest.mark.parametrize("compiled", [True, False])
def test_no_parameters_have_no_underflow(compiled):
    """Without a parameter a step counts nothing, and its report names no tensor."""
    tx = gs.with_loss_scale(optax.sgd(0.1), telemetry=True, underflow_every=1)
    state = tx.init({})
    update = jax.jit(tx.update) if compiled else tx.update
    for _ in range(2):
        _, state = update({}, state, {})
    assert gs.diagnostics.telemetry(state).applied_steps == 2
    assert gs.diagnostics.report(state, {}).underflow.zero.shape == (0,)
    assert "0 of 2 steps were skipped" in str(gs.diagnostics.report(state, {}))


@pytest.mark.parametrize("lost", [("a", "b"), ("b",)])
def test_gradients_that_are_all_zero_are_no_good_news(lost):
    """Where nothing of a gradient is left, the report names the tensor, and says where to look."""
    variables = [Variable(np.ones(4, np.float32), name=name) for name in ("a", "b")]
    opt = LossScaleOptimizer(SGD(0.1), telemetry=True, underflow_every=1)
    opt.apply([np.float32(v.name not in lost) * np.ones(4) for v in variables], variables)
    text = str(gs.diagnostics.report(opt))
    which = "every parameter" if len(lost) == 2 else "b"
    assert f"The gradient of {which} is 0 in all elements" in text
    assert ("nothing underflows" in text) == (len(lost) == 1)

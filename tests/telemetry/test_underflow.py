"""Underflow: what float16 loses of gradients, counted on the device in one step of many."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs

from programs import update_in_shard_map

SCALE = 2.0**10
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
@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_a_cast(way, seed):
    """Of arrays of all shapes and sizes, the shares are those of numpy's float16."""
    rng = np.random.default_rng(seed)
    true = [wild(rng, shape) for shape in SHAPES]
    true[seed % 4] = true[seed % 4] * 0
    rule = gs.DynamicLossScale(SCALE)
    if way == "optimizer":
        variables = [gs.Variable(np.zeros(s, np.float32)) for s in SHAPES]
        opt = gs.LossScaleOptimizer(gs.SGD(0.1), rule=rule, telemetry=True, underflow_every=1)
        opt.apply([t * np.float32(SCALE) for t in true], variables)
        report = gs.report(opt)
    else:
        tx = gs.loss_scaled(optax.sgd(0.1), rule, telemetry=True, underflow_every=1)
        params = [jnp.zeros(shape) for shape in SHAPES]
        _, state = jax.jit(tx.update)(true, tx.init(params), params)
        report = gs.report(state, params)
    assert (report.underflow.step, report.underflow.scale) == (0, SCALE)
    check(report.underflow, true)


def test_zeros_of_a_half_precision_backward_pass_are_seen():
    """What float16 has flushed on the way is zero when it arrives, beside subnormal elements."""
    w = gs.Variable(np.float32(2.0) ** -np.arange(40))
    opt = gs.LossScaleOptimizer(gs.SGD(0.0), SCALE, telemetry=True, underflow_every=1)
    opt.minimize(lambda: (w.value().astype("float16").astype("float32") ** 2).sum() / 2, [w])
    found = gs.report(opt).underflow
    assert found.flushed == [0]
    # 2**-k * 2**10, held from 2**-24 on; of the values themselves, none below 2**-24 came so far.
    assert found.zero == [15 / 40]
    assert found.subnormal == [0]


def test_it_is_counted_every_so_many_steps_and_never_on_a_skip():
    """Every third step is counted; if it is skipped, the next that is not."""
    w = gs.Variable([0.0])
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), SCALE, telemetry=True, underflow_every=3)
    opt.build([w])
    assert gs.report(opt).underflow is None
    seen = []
    for step in range(10):
        opt.apply([[np.inf if step in (6,) else 1.0]])
        seen.append(gs.report(opt).underflow.step)
    assert seen == [0, 0, 0, 3, 3, 3, 3, 7, 7, 7]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_parts_on_many_devices_are_counted_once(kind):
    """On eight devices the shares are those of the whole, however the array is divided."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    true = [wild(rng, (16, 6)), wild(rng, (8,)), wild(rng, (5, 5))]
    specs = [PartitionSpec("data", "model"), PartitionSpec("model"), PartitionSpec()]
    layouts = [NamedSharding(mesh, spec) for spec in specs]
    grads = [jax.device_put(t * SCALE, s) for t, s in zip(true, layouts, strict=True)]
    variables = [gs.Variable(g * 0) for g in grads]
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), SCALE, telemetry=True, underflow_every=1)
    opt.apply(grads, variables)
    check(gs.report(opt).underflow, true)


def test_inside_of_shard_map_parts_are_summed():
    """Each device counts its part; the shares are those of the whole."""
    true = wild(np.random.default_rng(0), (16, 3))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rule = gs.DynamicLossScale(SCALE)
    tx = gs.loss_scaled(optax.sgd(0.1), rule, telemetry=True, underflow_every=1)
    params = jax.device_put(jnp.zeros((16, 3)), NamedSharding(mesh, PartitionSpec("data")))
    state = update_in_shard_map(tx, params, jnp.asarray(true))
    check(gs.report(state, params).underflow, [true])


def test_it_calls_nothing_on_the_host_and_takes_little_memory():
    """The compiled step has no callback, and stores no copy of a gradient."""
    w = gs.Variable(np.zeros((1024, 1024), np.float32))
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), SCALE, telemetry=True, underflow_every=100)
    opt.build([w])
    program = gs.jit(lambda g: opt.apply([g]), ([w], opt.variables), donate=True)
    compiled = program.lower(jnp.ones((1024, 1024))).compile()
    text = compiled.as_text()
    assert "callback" not in text
    assert "infeed" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * w.value().nbytes


def test_tensors_by_name_for_json():
    """`tensors` has every number of each tensor; equal names are told apart."""
    variables = [gs.Variable([0.0], name="w"), gs.Variable([0.0], name="w")]
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), SCALE, telemetry=True, underflow_every=1)
    opt.apply([[1.0], [0.0]], variables)
    opt.apply([[np.inf], [0.0]], variables)
    assert gs.report(opt).tensors() == {
        "w": {"inf": 1, "nan": 0, "first": 1, "last": 1,
              "zero": 0.0, "flushed": 0.0, "subnormal": 0.0, "headroom": 15.0},
        "w#2": {"inf": 0, "nan": 0, "first": -1, "last": -1,
                  "zero": 1.0, "flushed": 0.0, "subnormal": 0.0, "headroom": np.inf},
    }  # fmt: skip


def test_gradients_beyond_float16_say_how_far():
    """A float32 gradient that float16 would not hold has a headroom below 0, and the suggestion is
    a scale at which it does."""
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), SCALE, telemetry=True, underflow_every=1)
    opt.apply([[2.0**20, 1.0]], [gs.Variable([0.0, 0.0])])
    found = gs.report(opt).underflow
    assert (found.headroom, found.suggested_scale) == ([-5], SCALE * 2.0**-6)


def test_it_needs_telemetry():
    """Counting that nobody could ask for is an error, and so is a period that is none."""
    with pytest.raises(ValueError, match="Expected telemetry=True for underflow_every=5"):
        gs.LossScaleOptimizer(gs.SGD(0.1), underflow_every=5)
    with pytest.raises(ValueError, match="underflow_every"):
        gs.loss_scaled(optax.sgd(0.1), telemetry=True, underflow_every=0)
    config = gs.LossScaleOptimizer(gs.SGD(0.1), telemetry=True, underflow_every=5).get_config()
    assert gs.LossScaleOptimizer.from_config(config).underflow_every == 5


def test_exponents_of_missing_gradients_in_x64():
    """`underflow_every` counts nothing for a variable without gradient, in x64 too."""
    with jax.enable_x64(True):
        w, b = gs.Variable(1.0, jnp.float32), gs.Variable(2.0, jnp.float64)
        opt = gs.LossScaleOptimizer(gs.SGD(0.5), telemetry=True, underflow_every=1)
        with pytest.warns(UserWarning, match="No gradient for"):
            opt.apply([jnp.float32(2.0**15), None], [w, b])
        assert (float(w), float(b)) == (0.5, 2.0)

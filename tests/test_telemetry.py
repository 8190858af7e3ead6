"""Telemetry: what a step tells of itself, and that telling changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs

SHAPES = [(3,), (40, 30), ()]
OPTIONS = [
    {},
    {"clipnorm": 0.1},
    {"clipvalue": 0.1},
    {"global_clipnorm": 0.1},
    {"gradient_accumulation_steps": 2},
    {"use_ema": True},
]


def steps_of(rng, scale_of, n=12):
    """Gradients of several steps; every fourth has an inf in one place."""
    for step in range(n):
        true = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
        if step % 4 == 2:
            true[step % 2] = true[step % 2] * np.float32(np.inf)
        yield true, [t * np.float32(scale_of()) for t in true]


def expected(true, before, scale):
    """The telemetry of a step, in float64 numpy."""
    finite = all(np.isfinite(t).all() for t in true)
    norm = np.sqrt(sum(np.square(t, dtype=np.float64).sum() for t in true)) if finite else None
    return finite, scale, before + (not finite), norm


def check(info, wanted):
    finite, scale, skipped, norm = wanted
    assert (bool(info.finite), float(info.loss_scale)) == (finite, scale)
    assert int(info.skipped_steps) == skipped
    if norm is not None:
        np.testing.assert_allclose(info.grad_norm, norm, rtol=1e-5)
    else:
        assert not np.isfinite(info.grad_norm)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_optimizer_tells_what_the_step_was_like(options, rng):
    """Finiteness, the scale of the step, all skips so far, the norm before clipping."""
    variables = [gs.Variable(np.ones(shape, np.float32)) for shape in SHAPES]
    opt = gs.LossScaleOptimizer(gs.Adam(0.1, **options), 64.0, 2, telemetry=True)
    assert [float(x) for x in gs.telemetry(opt)] == [1.0, 64.0, 0.0, 0.0]
    skipped = 0
    for true, grads in steps_of(rng, lambda: opt.loss_scale):
        scale = float(opt.loss_scale)
        wanted = expected(true, skipped, scale)
        opt.apply(grads, variables)
        check(gs.telemetry(opt), wanted)
        skipped = wanted[2]
    assert skipped == 3


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_telling_changes_no_decision_and_no_bit(options, rng):
    """With telemetry and without, weights, slots and scale are the same after every step."""
    made = []
    for telemetry in (False, True):
        variables = [gs.Variable(np.ones(shape, np.float32)) for shape in SHAPES]
        inner = gs.SGD(0.1, momentum=0.9, **options)
        made.append((variables, gs.LossScaleOptimizer(inner, 64.0, 2, telemetry=telemetry)))
    opt = made[0][1]
    for step, (_, grads) in enumerate(steps_of(rng, lambda: opt.loss_scale)):
        if step == 5:  # elements are finite, their norm is not
            grads[1] = np.full(SHAPES[1], 3e38, np.float32)
        values = []
        for variables, mine in made:
            mine.apply(grads, variables)
            state = [*variables, mine.dynamic_scale, *mine.inner_optimizer.variables]
            values.append([v.numpy().tobytes() for v in state])
        assert values[0] == values[1]


def test_an_optax_state_tells_the_same(rng):
    """`loss_scaled` with telemetry gives, inside of a chain and under jit, what an optimizer does,
    and updates with the bits that it gives without."""
    plain = optax.chain(gs.loss_scaled(optax.sgd(0.1, 0.9), gs.DynamicLossScale(64.0, 2)))
    tx = optax.chain(
        gs.loss_scaled(optax.sgd(0.1, 0.9), gs.DynamicLossScale(64.0, 2), telemetry=True)
    )
    params = [jnp.ones(shape) for shape in SHAPES]
    state, other = tx.init(params), plain.init(params)
    update, plainly = jax.jit(tx.update), jax.jit(plain.update)
    skipped = 0
    for true, _ in steps_of(rng, lambda: 1.0):
        wanted = expected(true, skipped, float(gs.loss_scale(state)))
        updates, state = update(true, state, params)
        same, other = plainly(true, other, params)
        check(gs.telemetry(state), wanted)
        skipped = wanted[2]
        for a, b in zip(updates, same, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_to_optax_keeps_it():
    """The transformation of an optimizer with telemetry has telemetry."""
    tx = gs.to_optax(gs.LossScaleOptimizer(gs.SGD(0.1), telemetry=True))
    params = jnp.ones(2)
    _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(params), params)
    assert float(gs.telemetry(state).grad_norm) == 5.0


def test_a_compiled_step_returns_it_and_waits_for_nothing():
    """Out of `gs.jit` the numbers of all steps can be read in the end, though it donates; nothing
    is transferred meanwhile."""
    w = gs.Variable(np.ones(3, np.float32))
    opt = gs.LossScaleOptimizer(gs.SGD(0.5), 4.0, telemetry=True)
    opt.build([w])

    def step(grads):
        opt.apply(grads, [w])
        return gs.telemetry(opt)

    program = gs.jit(step, ([w], opt.variables), donate=True)
    grads = [[jnp.array([4.0 * n, 0.0, jnp.inf if n == 2 else 0.0])] for n in range(5)]
    program(grads[0])
    with jax.transfer_guard("disallow"):
        infos = [program(g) for g in grads]
    assert [bool(info.finite) for info in infos] == [True, True, False, True, True]
    assert [int(info.skipped_steps) for info in infos] == [0, 0, 1, 1, 1]
    assert [float(i.grad_norm) for i in infos if i.finite] == [0.0, 1.0, 6.0, 8.0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh_it_is_part_of_the_one_sum(kind, rng):
    """On eight devices the norm is that of all parts, by the one all-reduce there is."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    layout = NamedSharding(mesh, PartitionSpec("data"))
    true = rng.normal(size=(16, 3)).astype(np.float32)
    w = gs.Variable(jax.device_put(np.ones((16, 3), np.float32), layout))
    opt = gs.LossScaleOptimizer(gs.SGD(0.1), 8.0, telemetry=True)
    opt.build([w])
    program = gs.jit(lambda g: opt.apply([g], [w]), ([w], opt.variables))
    grads = jax.device_put(true * 8, layout)
    text = program.lower(grads).compile().as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
    program(grads)
    np.testing.assert_allclose(gs.telemetry(opt).grad_norm, np.linalg.norm(true), rtol=1e-5)


def test_without_it_the_error_says_how():
    """Asked of an optimizer or a state without telemetry: an error that names the option."""
    with pytest.raises(ValueError, match="Expected telemetry=True"):
        gs.telemetry(gs.LossScaleOptimizer(gs.SGD(0.1)))
    with pytest.raises(ValueError, match="Expected telemetry=True"):
        gs.telemetry(gs.loss_scaled(optax.sgd(0.1)).init(jnp.ones(1)))
    with pytest.raises(TypeError, match="Expected a LossScaleOptimizer or a state"):
        gs.telemetry(gs.SGD(0.1))
    with pytest.raises(TypeError, match="Expected a bool for telemetry"):
        gs.loss_scaled(optax.sgd(0.1), telemetry=1)


def test_it_is_part_of_the_configuration_and_of_what_is_saved():
    """A copy from the configuration has telemetry, and takes over what was counted."""
    made = []
    for _ in range(2):
        opt = gs.LossScaleOptimizer(gs.SGD(0.1), telemetry=True) if not made else (
            gs.LossScaleOptimizer.from_config(made[0].get_config())
        )  # fmt: skip
        opt.build([gs.Variable(1.0)])
        made.append(opt)
    made[0].apply([jnp.nan])
    made[1].load_state(made[0].state())
    assert int(gs.telemetry(made[1]).skipped_steps) == 1
    assert "telemetry" not in gs.LossScaleOptimizer(gs.SGD(0.1)).get_config()

"""`AdaptiveLossScale`: what it learns from measured gradients, from overflows, and from NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, LossScaleOptimizer
from gainstage.transforms import current_scale

from oracles import AdaptiveAutomaton

NAN = float("nan")
RULES = [
    gs.AdaptiveLossScale(
        initial_loss_scale=[2.0**15, 2.0**30, 2.0**-3][i % 3],
        increment_period=[1, 3, 2000][i // 3 % 3],
        margin=[0.0, 1.0, 2.5][i // 2 % 3],
        memory=[1, 10, 200][i // 5 % 3],
        min_scale=[2.0**-24, 2.0**-10][i % 2],
        max_scale=[2.0**126, 2.0**31][i // 4 % 2],
    )
    for i in range(10)
]


@pytest.mark.as_users
@pytest.mark.parametrize("number", range(len(RULES)))
def test_it_is_what_its_description_says(number):
    """On 25 random runs with gradients of all sizes, each of 10 compiled rules is the state machine
    in plain Python, bit for bit, and its scale is a power of two within the bounds."""
    rule, rng, shape = RULES[number], np.random.default_rng(number), (25, 80)
    finite = rng.random(shape) < rng.choice([0.1, 0.7, 0.95, 1.0], size=(25, 1))
    largest = np.exp2(rng.uniform(-40, 20, size=shape)).astype(np.float32)
    largest[rng.random(shape) < 0.1] = 0
    any_nan = rng.random(shape) < 0.7
    loss = rng.choice([1.0, NAN, np.inf], size=shape, p=[0.7, 0.2, 0.1]).astype(np.float32)

    def step(state, seen):
        finite, max_abs, any_nan, loss = seen
        state = rule.update(state, finite, max_abs=max_abs, any_nan=any_nan, loss=loss)
        return state, state.scale

    run = jax.jit(jax.vmap(lambda *columns: jax.lax.scan(step, rule.init(), columns)[1]))
    found = np.asarray(run(finite, largest, any_nan, loss))
    for i in range(len(found)):
        machine = AdaptiveAutomaton(rule)
        seen = zip(finite[i], largest[i], any_nan[i], loss[i], strict=True)
        np.testing.assert_array_equal(found[i], [machine.step(*each) for each in seen])
    assert (np.frexp(found)[0] == 0.5).all()
    assert ((found >= rule.min_scale) & (found <= rule.max_scale)).all()


@pytest.mark.parametrize("known", [False, True], ids=["from the start", "after a good step"])
def test_a_long_run_of_overflows_is_what_its_description_says(known):
    """In 900 overflows in a row, each retry looks deeper than the one before, up to its bound."""
    rule = gs.AdaptiveLossScale(initial_loss_scale=2.0**126, min_scale=2.0**-126)
    machine, largest = AdaptiveAutomaton(rule), np.float32(2.0**-120)
    finite = jnp.zeros(900, bool).at[0].set(known)

    def step(state, finite):
        seen = {"max_abs": largest, "any_nan": jnp.array(False), "loss": jnp.float32(1.0)}
        state = rule.update(state, finite, **seen)
        return state, state.scale

    found = np.asarray(jax.lax.scan(step, rule.init(), finite)[1])
    expected = [machine.step(bool(x), largest, False, 1.0) for x in finite]
    np.testing.assert_array_equal(found, np.asarray(expected, np.float32))
    assert len(set(expected)) > 10


def train(rule, factor, steps, spoiled=(), known=True):
    """SGD on a small float16 network, whose gradients are about `factor`; which steps skip."""
    w = gs.optimizers.Variable(np.linspace(0.5, 1.5, 16, dtype=np.float32))
    opt = LossScaleOptimizer(SGD(0.0), loss_scale=rule, telemetry=True)
    opt.build([w])

    def step(x):
        def loss():
            product = w.value().astype("float16") * x.astype("float16")
            return (product.astype("float32") * factor).sum()

        if known:
            opt.minimize(loss, [w])
        else:
            opt.apply_gradients(opt.compute_gradients(loss, [w]))
        return gs.diagnostics.telemetry(opt)

    program = gs.optimizers.jit(step, ([w], opt.variables), donate=True)
    infos = [program(jnp.full(16, NAN if n in spoiled else 1.0)) for n in range(steps)]
    return [not bool(i.finite) for i in infos], [float(i.loss_scale) for i in infos]


def test_a_start_that_is_too_high_costs_one_step():
    """2**10 above what fits: one skipped step, not ten, and from the third on the right scale."""
    skipped, used = train(gs.AdaptiveLossScale(2.0**26), 1.0, 6)
    assert skipped == [True] + [False] * 5
    assert used[2:] == [2.0**14] * 4
    slow, _ = train(gs.DynamicLossScale(2.0**26), 1.0, 20)
    assert sum(slow) >= 10


# Asked for in verl#4036 (growth in short runs).
def test_a_start_that_is_too_low_is_over_after_one_step():
    """Gradients that the first scale flushes are in range from the second step on."""
    skipped, used = train(gs.AdaptiveLossScale(), 2.0**-30, 5)
    assert not any(skipped)
    assert used == [2.0**15] + [2.0**44] * 4


@pytest.mark.parametrize("known", [True, False], ids=["loss", "no loss"])
def test_bad_data_does_not_lower_the_scale(known):
    """45 batches of NaN: with the loss known the scale stays; without, it is back in one step."""
    skipped, used = train(gs.AdaptiveLossScale(), 1.0, 100, range(20, 65), known)
    assert [n for n, skip in enumerate(skipped) if skip] == [*range(20, 65)]
    assert used[66:] == [used[19]] * 34
    assert min(used[20:65]) >= (used[19] if known else used[19] / 8)


def test_a_gradient_that_stays_nan_lowers_it_in_the_end():
    """If the scale was to blame after all, it comes down at the 64th bad step, to the largest at
    which gradients are finite, and training goes on."""
    rule = gs.AdaptiveLossScale(2.0**15)
    update = jax.jit(rule.update)
    state, skipped = update(rule.init(), True, max_abs=1.0, any_nan=False, loss=NAN), []
    for step in range(1000):
        finite = state.scale <= 2.0**6
        skipped += [] if finite else [step]
        state = update(state, finite, max_abs=1.0, any_nan=~finite, loss=NAN)
    assert float(state.scale) == 2.0**6
    assert skipped == [*range(65), 66, 67]


@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("length", [20, 45, 200])
def test_a_storm_of_infinities_teaches_nothing(start, length):
    """Gradients that are infinite at whatever scale, though the loss is finite: when they are over
    the scale is where it was after one finite step, and training did not wait for it."""
    rule, used = gs.AdaptiveLossScale(), []
    state, update = rule.init(), jax.jit(rule.update)
    for n in range(start + length + 50):
        used.append(float(state.scale))
        bad = start <= n < start + length
        state = update(state, not bad, max_abs=1.0, any_nan=jnp.array(False), loss=1.0)
    assert set(used[start + length + 1 :]) == {2.0**14}
    assert used[start + length] >= 2.0**-9


def test_what_overflows_teach_is_kept():
    """Gradients inside of the network are 2**10 above those of its weights: after the scale has
    come down to what fits, there is no skipped step until the ceiling is tried again."""
    rule = gs.AdaptiveLossScale(increment_period=100)
    state, skipped = rule.init(), []
    for _ in range(300):
        finite = float(state.scale) <= 2.0**5
        skipped.append(not finite)
        nan = jnp.array(False)
        state = rule.update(state, finite, max_abs=1.0, any_nan=nan, loss=1.0)
    assert sum(skipped[:20]) <= 10
    assert sum(skipped[20:]) <= 3


def test_a_loss_that_is_no_longer_passed_does_not_stop_the_rule():
    """Overflows without a loss, after a step with one: lower scales are tried now and then."""
    rule = gs.AdaptiveLossScale()
    state = rule.update(rule.init(), True, max_abs=1.0, any_nan=False, loss=1.0)
    first, tried = float(state.scale), set()
    for _ in range(200):
        state = rule.update(state, False, max_abs=1.0, any_nan=False, loss=NAN)
        tried.add(float(state.scale))
    assert max(tried) == first == float(state.scale)
    assert {first * 2.0**-12, first * 2.0**-24, 2.0**-22} <= tried


def test_gradients_that_were_flushed_to_zero_raise_the_scale():
    """After three batches of NaN at the start the scale is so low that all gradients are 0; it
    climbs until there is something to measure."""
    rule = gs.AdaptiveLossScale()
    state, losses = rule.init(), []
    for n in range(30):
        bad, scale = n < 3, float(state.scale)
        seen = 2.0**-8 if scale * 2.0**-8 >= 2.0**-24 else 0.0
        told = {"max_abs": seen, "any_nan": jnp.array(bad), "loss": jnp.float32(NAN)}
        state = rule.update(state, not bad, **told)
        losses.append(not bad and not seen)
    assert sum(losses) <= 3
    assert float(state.scale) == 2.0**14  # the ceiling that three bad steps have taught


def test_a_loss_that_starts_late_loses_three_steps():
    """While all gradients are 0 the scale climbs, but only as far as it can soon come back."""
    rule = gs.AdaptiveLossScale()
    zeros, largest = np.meshgrid([1, 20, 200, 2000], np.float32([1e-3, 1.0, 1e4]))

    def run(zeros, largest):
        def step(state, number):
            true = jnp.where(number < zeros, 0.0, largest)
            finite = state.scale * true <= 65504
            told = {"max_abs": true, "any_nan": jnp.array(False), "loss": jnp.float32(1.0)}
            ended = number >= zeros + 50
            moved = rule.update(state, finite, **told)
            state = jax.tree.map(lambda new, old: jnp.where(ended, old, new), moved, state)
            return state, finite | ended

        state, finite = jax.lax.scan(step, rule.init(), jnp.arange(2050))
        return state.scale, (~finite).sum()

    scale, lost = jax.jit(jax.vmap(run))(zeros.ravel(), largest.ravel())
    assert (lost <= 3).all()
    reached = np.asarray(scale) * largest.ravel()
    assert ((reached >= 2.0**12) & (reached <= 2.0**15)).all()


@pytest.mark.parametrize("bits", [1, 4, 10])
def test_an_overflow_that_shows_as_nan_is_learned_from(bits):
    """Inside of the network numbers overflow first, and inf - inf is NaN; the loss is finite: the
    scale comes down by halves to what fits."""
    rule = gs.AdaptiveLossScale()
    state, skipped = rule.init(), 0
    for n in range(60):
        finite = n == 0 or float(state.scale) <= 2.0 ** (30 - bits)
        skipped += not finite
        nan = jnp.array(not finite)
        state = rule.update(state, finite, max_abs=2.0**-15, any_nan=nan, loss=1.0)
    assert skipped == bits - 1  # 2**29 is what the gradients themselves allow


def test_from_the_lowest_floor_it_comes_back():
    """After overflows at the smallest scale there is, finite steps raise it again."""
    rule = gs.AdaptiveLossScale(2.0**-125, increment_period=1, min_scale=2.0**-126)
    state = rule.update(rule.init(), True, max_abs=1.0, any_nan=False, loss=1.0)
    state = state._replace(scale=jnp.float32(2.0**-126))
    state = rule.update(state, False, max_abs=1.0, any_nan=False, loss=1.0)
    for _ in range(10):
        state = rule.update(state, True, max_abs=1.0, any_nan=False, loss=1.0)
    assert float(state.scale) == 2.0**-116


@pytest.mark.parametrize("tiny", [2.0**-120, 1e-36])
def test_tiny_gradients_get_the_largest_scale(tiny):
    """A quotient that no float32 holds is bounded like any other."""
    rule = gs.AdaptiveLossScale()
    state = rule.update(rule.init(), True, max_abs=jnp.float32(tiny), any_nan=False, loss=1.0)
    assert float(state.scale) == 2.0**126


@pytest.mark.parametrize("checked", [True, False])
def test_devices_measure_together(checked):
    """Inside of `shard_map` all devices measure the largest gradient of all."""
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    tx = gs.with_loss_scale(optax.sgd(0.1), gs.AdaptiveLossScale())
    spec = jax.sharding.PartitionSpec("data")
    params = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, spec))
    state = tx.init(params)
    held = jax.tree.map(lambda x: x.sharding.spec, state)
    grads = jax.device_put(2.0 ** jnp.arange(8.0), params.sharding)
    mapped = jax.shard_map(
        lambda state, grads: tx.update(grads, state, value=grads.sum())[1],
        mesh=mesh, in_specs=(held, spec), out_specs=held, check_vma=checked,
    )  # fmt: skip
    after = jax.jit(mapped)(state, grads)
    scales = [float(x.data) for x in after.rule_state.scale.addressable_shards]
    assert scales == [2.0**7] * 8


def test_devices_share_a_loss_that_is_bad_on_one():
    """Inside of `shard_map` a loss of -inf on one device says on all that the data are bad."""
    mesh = jax.make_mesh((8,), ("data",))
    tx = gs.with_loss_scale(optax.sgd(0.1), gs.AdaptiveLossScale())
    spec = jax.sharding.PartitionSpec("data")
    params = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, spec))
    state = tx.init(params)
    held = jax.tree.map(lambda x: x.sharding.spec, state)
    seen = jax.device_put(
        np.where(np.arange(8) == 3, -np.inf, 1).astype(np.float32), params.sharding
    )

    def update(state, grads, seen):
        return tx.update(grads, state, value=seen.sum())[1]

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(held, spec, spec), out_specs=held)
    good = jax.jit(mapped)(state, params, params)
    bad = jax.jit(mapped)(good, seen, seen)
    assert (bool(good.applied), bool(bad.applied)) == (True, False)
    assert float(current_scale(bad)) == float(current_scale(good))


def test_in_an_optax_loop_the_loss_is_passed_as_value():
    """`value=` tells a NaN in the data from an overflow."""
    tx = gs.with_loss_scale(optax.sgd(0.1), gs.AdaptiveLossScale())
    params = jnp.ones(3)
    state = tx.init(params)
    _, state = tx.update(params, state, params, value=1.0)
    scale = float(current_scale(state))
    for _ in range(10):
        _, state = tx.update(params * NAN, state, params, value=NAN)
    assert float(current_scale(state)) == scale
    _, state = tx.update(params * np.inf, state, params, value=1.0)
    assert float(current_scale(state)) == scale / 2


def test_wrong_settings():
    """Each setting is checked, by name."""
    for name, value in {"margin": -1.0, "memory": 0, "increment_period": 0, "min_scale": 0.0,
                        "largest_number": 0.0, "initial_loss_scale": NAN}.items():  # fmt: skip
        with pytest.raises(ValueError, match=name):
            gs.AdaptiveLossScale(**{name: value})
    rule = gs.AdaptiveLossScale(8.0, margin=2)
    assert gs.AdaptiveLossScale.from_config(rule.get_config()) == rule
    opt = LossScaleOptimizer(SGD(0.1), loss_scale=rule)
    assert LossScaleOptimizer.from_config(opt.get_config()).rule == rule


def test_the_largest_number_may_be_small():
    """A format whose largest number is below 1 is one too: the scale keeps gradients below it."""
    rule = gs.AdaptiveLossScale(largest_number=0.5, initial_loss_scale=1.0)
    assert rule.largest_number == 0.5
    with pytest.raises(ValueError, match="largest_number"):
        gs.AdaptiveLossScale(largest_number=0.0)

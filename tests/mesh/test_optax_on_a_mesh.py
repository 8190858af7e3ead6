"""`train_step` and `with_loss_scale` on a mesh of eight devices: shardings, collectives, ZeRO."""

import collections
import itertools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.transforms import apply_updates

AXES = [AxisType.Auto, AxisType.Explicit]
KINDS = pytest.mark.parametrize("kind", AXES, ids=str)
AUTO_FIRST = pytest.mark.parametrize(
    "kind", [AXES[0], pytest.param(AXES[1], marks=pytest.mark.thorough)], ids=str
)
COLLECTIVE = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
OPTIMIZERS = {
    "adam": lambda: gs.with_loss_scale(optax.adam(0.1)),
    "adaptive": lambda: gs.with_loss_scale(optax.adam(0.1), gs.AdaptiveLossScale(), telemetry=True),
    "accumulating": lambda: gs.with_loss_scale(optax.MultiSteps(optax.adamw(0.1), 2)),
    "factored": lambda: gs.with_loss_scale(optax.adafactor(0.1, min_dim_size_to_factor=8)),
    "inside": lambda: optax.chain(
        gs.with_loss_scale(optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9))),
        optax.scale_by_schedule(lambda count: 1.0),
    ),
}
# Each of them once, on one of the kinds of axes.
FIRST = {
    ("adam", AxisType.Auto),
    ("adaptive", AxisType.Explicit),
    ("accumulating", AxisType.Auto),
    ("factored", AxisType.Explicit),
    ("inside", AxisType.Auto),
}


def on_mesh(kind):
    """The shardings of arrays that every device holds, and of arrays in eight shards."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))


def params_on(sharding, scalar=None):
    params = {"w": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}
    params["b"] = np.zeros(64, np.float16)
    scalar = jnp.float32(1.0) if scalar is None else jax.device_put(np.float32(1.0), scalar)
    return jax.device_put(params, sharding) | {"s": scalar}


def batch_on(sharding):
    return jax.device_put(np.linspace(0, 1, 16 * 64, dtype=np.float32).reshape(16, 64), sharding)


def loss_on(replicated):
    """A loss and its aux; on Explicit axes it gathers sharded weights itself."""

    def loss(params, x):
        if AxisType.Explicit in replicated.mesh.axis_types:
            params = jax.tree.map(lambda p: jax.sharding.reshard(p, replicated), params)
        half = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16)) + params["b"]
        out = half.astype(jnp.float32) * params["s"]
        return jnp.mean(out**2), out.sum()

    return loss


def shardings_in(tree, replicated):
    """The sharding of each array; one device's arrays are replicated from the first step on."""
    found = [x.sharding for x in jax.tree.leaves(tree)]
    return [s if isinstance(s, NamedSharding) else replicated for s in found]


def sharded_slots(opt_state, sharding):
    """A state of an optimizer whose larger arrays a user has sharded."""
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if x.size >= 64 else x, opt_state)


def bytes_on_one(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        pytest.param(
            make,
            kind,
            id=f"{name}-{kind}",
            marks=[pytest.mark.thorough] * ((name, kind) not in FIRST),
        )
        for kind in AXES
        for name, make in OPTIMIZERS.items()
    ],
)
def test_arrays_keep_their_shardings(make, kind):
    """Sharded weights, a scalar on one device and any state come back as they came; all steps run
    one program."""
    replicated, sharded = on_mesh(kind)
    with jax.set_mesh(replicated.mesh):  # the init of adafactor needs it on Explicit axes
        state = gs.TrainState.create(params_on(sharded), make())
    step = gs.train_step(loss_on(replicated), has_aux=True)
    before = shardings_in(state, replicated)
    for number, factor in enumerate((1.0, np.inf, 1.0, 1.0)):
        batch = factor * batch_on(sharded)
        with compilations() as compiled:
            state, _, _ = step(state, batch)
        assert state.applied == np.isfinite(factor)
        assert number == 0 or compiled == []
    assert shardings_in(state, replicated) == before


@KINDS
def test_a_sharded_state_does_not_shard_the_weights(kind):
    """Replicated weights stay so if the user has sharded the optimizer's state."""
    replicated, sharded = on_mesh(kind)
    state = gs.TrainState.create(params_on(replicated), optax.adam(0.1))
    state = state.replace(opt_state=sharded_slots(state.opt_state, sharded))
    step = gs.train_step(loss_on(replicated), has_aux=True)
    batch = batch_on(sharded)
    state, _, _ = step(state, batch)
    with compilations() as compiled:
        for _ in range(2):
            state, _, _ = step(state, batch)
    assert compiled == []
    assert shardings_in(state.params, replicated) == [replicated] * 3
    assert state.opt_state.inner[0].mu["w"].sharding == sharded


def test_params_on_no_device_in_particular_follow_the_batch():
    """A sharded batch puts them on its mesh, replicated, and all steps run one program."""
    replicated, sharded = on_mesh(AxisType.Auto)
    params = jax.tree.map(jnp.asarray, jax.device_get(params_on(replicated)))
    state = gs.TrainState.create(params, optax.adam(0.1))
    step = gs.train_step(loss_on(replicated), has_aux=True)
    batch = batch_on(sharded)
    state, _, _ = step(state, batch)
    with compilations() as compiled:
        for _ in range(2):
            state, _, _ = step(state, batch)
    assert compiled == []
    assert {x.sharding for x in jax.tree.leaves(state)} == {replicated}


@pytest.mark.as_users
@AUTO_FIRST
def test_a_step_in_a_program_takes_the_same_steps(kind):
    """Inside `jax.jit`, where arrays name no sharding, the numbers are the same."""
    replicated, sharded = on_mesh(kind)
    state = gs.TrainState.create(params_on(replicated, replicated), optax.sgd(0.1))
    step, x = gs.train_step(loss_on(replicated), has_aux=True, donate=False), batch_on(sharded)
    inside, outside = jax.jit(step)(state, x), step(state, x)
    for one, other in zip(*map(jax.tree.leaves, (inside, outside)), strict=True):
        np.testing.assert_array_equal(one, other)


def layouts():
    """Weights, slots and axes: each value twice, and the one case where XLA shards more itself."""
    often = {
        ("replicated", "alike", AxisType.Auto),
        ("replicated", "sharded", AxisType.Auto),
        ("sharded", "alike", AxisType.Explicit),
        ("replicated", "sharded", AxisType.Explicit),
    }
    for case in itertools.product(["replicated", "sharded"], ["alike", "sharded"], AXES):
        yield pytest.param(*case, marks=[] if case in often else [pytest.mark.thorough])


@pytest.mark.as_users
@pytest.mark.parametrize(("weights", "slots", "kind"), list(layouts()))
def test_a_step_adds_no_collective(weights, slots, kind):
    """It has at most the collectives of the step written out, with explicit `out_shardings`. Plain
    optax has the same, without the all-reduce of the check: three where XLA shards it."""
    replicated, sharded = on_mesh(kind)
    loss, inner = loss_on(replicated), optax.adam(0.1)
    tx = gs.with_loss_scale(inner)
    params = params_on(sharded if weights == "sharded" else replicated, replicated)
    x = batch_on(sharded)

    def written_out(params, state, x):
        (value, aux), grads = gs.value_and_grad(loss, state, has_aux=True)(params, x)
        updates, state = tx.update(grads, state, params, value=value)
        return apply_updates(params, updates, state), state, value, aux

    def plain(params, state, x):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, aux

    def counted(lowered):
        return collections.Counter(re.findall(COLLECTIVE, lowered.compile().as_text()))

    def by_hand(step, init):
        state = jax.tree.map(
            lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, replicated),
            init(params),
        )
        state = sharded_slots(state, sharded) if slots == "sharded" else state
        out = jax.tree.map(lambda x: x.sharding, (params, state))
        return counted(jax.jit(step, out_shardings=(*out, None, None)).lower(params, state, x))

    state = gs.TrainState.create(params, tx)
    if slots == "sharded":
        state = state.replace(opt_state=sharded_slots(state.opt_state, sharded))
    ours = counted(gs.train_step(loss, has_aux=True).lower(state, x))
    assert ours <= by_hand(written_out, tx.init)
    more = ours - by_hand(plain, inner.init)
    by_xla = (kind, weights, slots) == (AxisType.Auto, "replicated", "sharded")
    assert set(more) <= {"all-reduce"}
    assert more["all-reduce"] <= (3 if by_xla else 1)


@pytest.mark.as_users
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("accumulating", AxisType.Auto),
        ("inside", AxisType.Explicit),
        pytest.param("adam", AxisType.Auto, marks=pytest.mark.thorough),
        pytest.param("adam", AxisType.Explicit, marks=pytest.mark.thorough),
        pytest.param("accumulating", AxisType.Explicit, marks=pytest.mark.thorough),
        pytest.param("inside", AxisType.Auto, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_divided_state_takes_the_same_steps(name, kind):
    """With `shard_state_over`, each of eight devices has an eighth of the state; weights keep their
    shardings and every bit, overflows included; all steps run one program."""
    replicated, sharded = on_mesh(kind)
    transformations = {
        "adam": lambda **over: gs.with_loss_scale(optax.adam(0.1), **over),
        "accumulating": lambda **over: gs.with_loss_scale(
            optax.MultiSteps(optax.adamw(0.1), 2), **over
        ),
        "inside": lambda **over: optax.chain(
            gs.with_loss_scale(optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)), **over),
            optax.scale(1.0),
        ),
    }
    runs = []
    for over in ({}, {"shard_state_over": "data"}):
        state = gs.TrainState.create(params_on(replicated), transformations[name](**over))
        step, losses = gs.train_step(loss_on(replicated), has_aux=True), []
        for i in range(8):
            factor = np.inf if i in (2, 5) else 1.0 / (i + 1)
            batch = factor * batch_on(sharded)
            with compilations() as compiled:
                state, loss, _ = step(state, batch)
            assert i == 0 or compiled == []
            assert state.applied == np.isfinite(factor)
            assert shardings_in(state.params, replicated) == [replicated] * 3
            losses.append(loss)
        runs.append((bytes_on_one(state.opt_state), jax.device_get((state, losses))))
    (whole, expected), (part, got) = runs
    for one, other in zip(*map(jax.tree.leaves, (expected, got)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert part <= whole / 8 + 3 * 4 * 65 + 64  # three slots for `b` and `s` stay whole


@AUTO_FIRST
def test_divided_state_with_a_norm_takes_the_same_steps_but_for_rounding(kind):
    """`optax.clip_by_global_norm` adds sharded gradients up in another order: weights and losses
    differ by no more than the rounding of these sums."""
    replicated, sharded = on_mesh(kind)
    runs = []
    for over in (None, "data"):
        clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
        state = gs.TrainState.create(params_on(replicated), clipped, shard_state_over=over)
        step, losses = gs.train_step(loss_on(replicated), has_aux=True), []
        for i in range(8):
            factor = np.inf if i == 2 else 1.0 / (i + 1)
            state, loss, _ = step(state, factor * batch_on(sharded))
            losses.append(loss)
        runs.append(jax.device_get((state.params, losses)))
    for one, other in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@KINDS
def test_divided_state_is_that_of_its_parameter_with_more_axes(kind):
    """What has a parameter's shape takes the axis beside those of the parameter; small arrays, and
    arrays of other shapes, do not."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)

    def put(shape, *entries):
        return jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*entries)))

    params = {"a": put((64, 32), None, "model"), "b": [put((64, 32)), put((32, 64)), put((8,))]}
    tx = gs.with_loss_scale(optax.chain(optax.trace(0.9), optax.adam(0.1)), shard_state_over="data")
    state = tx.init(params)
    adam = state.inner[1][0]
    for slots in (state.inner[0].trace, adam.mu, adam.nu):
        specs = [tuple(slot.sharding.spec) for slot in (slots["a"], *slots["b"])]
        assert specs == [("data", "model"), ("data", None), (None, "data"), ()]
    assert adam.count.sharding.spec == state.rule_state.scale.sharding.spec == PartitionSpec()


@pytest.mark.as_users
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("host", AxisType.Explicit),
        ("replicated", AxisType.Auto),
        pytest.param("host", AxisType.Auto, marks=pytest.mark.thorough),
        pytest.param("replicated", AxisType.Explicit, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_divided_state_is_divided_again_when_it_is_loaded_whole(place, kind):
    """The state of `shard_state_over` that comes from a file takes an eighth of the memory again,
    in the same step or in a new one, and the run goes on bit for bit."""
    replicated, sharded = on_mesh(kind)
    step = gs.train_step(loss_on(replicated), has_aux=True)
    now = gs.TrainState.create(params_on(replicated), optax.adam(0.1), shard_state_over="data")
    for _ in range(2):
        now, _, _ = step(now, batch_on(sharded))
    size, file = bytes_on_one(now.opt_state), pickle.dumps(jax.device_get(now))
    for _ in range(2):
        now, _, _ = step(now, batch_on(sharded))
    for again in (step, gs.train_step(loss_on(replicated), has_aux=True)):
        back = pickle.loads(file).replace(tx=now.tx)
        back = back if place == "host" else jax.device_put(back, replicated)
        for _ in range(2):
            back, _, _ = again(back, batch_on(sharded))
            assert bytes_on_one(back.opt_state) == size
        for one, other in zip(*map(jax.tree.leaves, (now, back)), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.as_users
@KINDS
def test_divided_state_in_a_loop_written_out(kind):
    """The same weights in your own step, which names its shardings on Auto axes."""
    replicated, sharded = on_mesh(kind)
    weights, loss = [], loss_on(replicated)
    for over in (None, ("data",)):
        tx = gs.with_loss_scale(optax.adam(0.1), shard_state_over=over)
        params = params_on(replicated, replicated)
        state = tx.init(params)
        shardings = [replicated] * 3 if kind is AxisType.Auto else ()

        def step(params, state, x, tx=tx, shardings=shardings):
            (value, _), grads = gs.value_and_grad(loss, state, has_aux=True)(params, x)
            updates, state = tx.update(grads, state, params, value=value, shardings=shardings)
            return apply_updates(params, updates, state), state

        out = jax.tree.map(lambda x: x.sharding, (params, state))
        compiled = jax.jit(step, out_shardings=out)
        with compilations() as programs:
            for _ in range(3):
                params, state = compiled(params, state, batch_on(sharded))
        weights.append(jax.device_get(params))
        assert programs.count("jit(step)") == 1
    for one, other in zip(*map(jax.tree.leaves, weights), strict=True):
        assert one.tobytes() == other.tobytes()
    assert state.inner[0].mu["w"].addressable_shards[0].data.shape == (8, 64)


def test_axes_to_divide_state_over_are_checked():
    """`init` names an axis that the mesh has not, and what to do without a mesh."""
    replicated, _ = on_mesh(AxisType.Auto)
    params = params_on(replicated)
    with pytest.raises(ValueError, match=r"\('data',\), for shard_state_over; got 'model'"):
        gs.with_loss_scale(optax.adam(0.1), shard_state_over="model").init(params)
    with pytest.raises(ValueError, match=r"'data' needs a mesh.*jax.device_put\(value"):
        gs.with_loss_scale(optax.adam(0.1), shard_state_over="data").init(jnp.ones(8))


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit])
def test_all_of_a_train_state_lies_on_the_mesh_of_its_parameters(axis):
    """So each array can be put back where it lay, as a checkpoint does, and training goes on."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis,))
    weights = jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec()))
    state = gs.TrainState.create(weights, optax.adam(0.1), extra={"mean": 0.0}, telemetry=True)
    assert {len(x.devices()) for x in jax.tree.leaves(state)} == {8}
    again = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
    step = gs.train_step(lambda w, extra, x: ((w * x).sum(), {"mean": extra["mean"] + x}))
    state, loss = step(again, 1.0)
    assert (float(loss), int(state.step), float(state.extra["mean"])) == (8.0, 1, 1.0)

"""What is saved after any step of a run of 50 goes on as if nothing had happened, in each format.

The run has all that could be forgotten: accumulation, a moving average that replaces the weights,
clipping, decay, hysteresis, telemetry, and steps that are skipped alone and in a row.
"""

import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.diagnostics import telemetry
from gainstage.optimizers import Adam

pytestmark = pytest.mark.as_users

STEPS = 50
RULE = gs.DynamicLossScale(8.0, 5, hysteresis=2)
SHAPES = {"a": (3,), "b": (2, 2), "c": ()}
SOME = range(0, STEPS, 7)
STOPS = [SOME, pytest.param(range(STEPS), marks=pytest.mark.slow)]
LATER = 13  # steps: one more than until windows and averages, of 3 and of 4, meet again
BAD = {4: np.nan, 11: np.inf, 12: -np.inf, 13: np.nan, 30: np.inf}


def gradients(step):
    rng = np.random.default_rng(step)
    grads = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]
    return [grads[0], grads[1] * np.float32(BAD.get(step, 1.0)), grads[2]]


def inner():
    return Adam(
        0.05,
        weight_decay=0.01,
        global_clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=4,
        gradient_accumulation_steps=3,
    )


def make():
    variables = [
        gs.optimizers.Variable(np.ones(shape, np.float32), name=n) for n, shape in SHAPES.items()
    ]
    opt = gs.optimizers.LossScaleOptimizer(inner(), loss_scale=RULE, telemetry=True)
    opt.build(variables)
    return variables, opt


def bits(*trees):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


def values(variables, opt):
    return [v.numpy() for v in (*variables, *opt.variables)]


def goes_on(variables, opt, start, snapshots):
    """From the restored state after `start` steps, for `LATER` steps that are compared each."""
    assert bits(values(variables, opt)) == snapshots[start]
    for step in range(start, min(start + LATER, STEPS)):
        opt.apply(gradients(step), variables)
        assert bits(values(variables, opt)) == snapshots[step + 1]


def by_state(variables, opt):
    file = io.BytesIO()
    np.savez(file, **{v.name: v.numpy() for v in variables}, **opt.state())
    return file.getvalue()


def load_state(saved, variables, opt):
    with np.load(io.BytesIO(saved)) as file:
        stored = dict(file)
    for variable in variables:
        variable.assign(stored.pop(variable.name))
    opt.load_state(stored)


def by_store(variables, opt):
    store = {}
    opt.save_own_variables(store)
    return [v.numpy() for v in variables], store


def load_store(saved, variables, opt):
    for variable, value in zip(variables, saved[0], strict=True):
        variable.assign(value)
    opt.load_own_variables(saved[1])


# Asked for in composer#1376 (scaler not saved).
@pytest.mark.parametrize(
    ("save", "load"),
    [(by_state, load_state), (by_store, load_store)],
    ids=["state", "own variables"],
)
def test_a_dictionary_of_arrays(save, load):
    """`state` in an .npz file, and `save_own_variables`: from each of the 50 steps on."""
    variables, opt = make()
    snapshots, saved = [bits(values(variables, opt))], [save(variables, opt)]
    for step in range(STEPS):
        opt.apply(gradients(step), variables)
        snapshots.append(bits(values(variables, opt)))
        saved.append(save(variables, opt))
    assert int(telemetry(opt).skipped_steps) == len(BAD)
    twin = make()
    for start, file in enumerate(saved):
        load(file, *twin)
        goes_on(*twin, start, snapshots)


@pytest.mark.parametrize("stops", STOPS, ids=["some", "all"])
def test_a_pickle(stops):
    """A pickle of variables and optimizer, which nobody but the user makes or reads."""
    variables, opt = make()
    snapshots, saved = [], {}
    for step in range(STEPS):
        snapshots.append(bits(values(variables, opt)))
        if step in stops:
            saved[step] = pickle.dumps((variables, opt))
        opt.apply(gradients(step), variables)
    snapshots.append(bits(values(variables, opt)))
    for start, file in saved.items():
        goes_on(*pickle.loads(file), start, snapshots)


# Asked for in accelerate#4289 (scale not saved).
@pytest.mark.parametrize("stops", STOPS, ids=["some", "all"])
def test_orbax(stops, tmp_path):
    """A checkpoint of Orbax, of the weights and `state`."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    variables, opt = make()
    checkpoints, snapshots = ocp.CheckpointManager(tmp_path), []
    for step in range(STEPS):
        snapshots.append(bits(values(variables, opt)))
        if step in stops:
            tree = [v.value() for v in variables], opt.state()
            checkpoints.save(step, args=ocp.args.StandardSave(tree))
        opt.apply(gradients(step), variables)
    snapshots.append(bits(values(variables, opt)))
    variables, opt = make()
    for start in stops:
        tree = [v.value() for v in variables], opt.state()
        weights, state = checkpoints.restore(start, args=ocp.args.StandardRestore(tree))
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)
        opt.load_state(state)
        goes_on(variables, opt, start, snapshots)
    checkpoints.close()


def test_orbax_of_an_optax_state(tmp_path):
    """Orbax saves parameters and state of `with_loss_scale` as they are."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    tx = gs.with_loss_scale(optax.adam(0.1), RULE, telemetry=True)
    params = {"w": jnp.ones(3)}
    state = tx.update({"w": jnp.full(3, 2.0)}, tx.init(params), params)[1]
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "1", (params, state))
        checkpoints.wait_until_finished()
        restored = checkpoints.restore(tmp_path / "1", (params, tx.init(params)))
    assert bits(jax.tree.leaves(restored)) == bits(jax.tree.leaves((params, state)))
    assert jax.tree.structure(restored) == jax.tree.structure((params, state))


def test_msgpack_of_an_optax_state():
    """Parameters and state of `with_loss_scale` in flax's msgpack, from each of the 50 steps."""
    serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")
    several = optax.MultiSteps(optax.adamw(0.05), 3).gradient_transformation()
    chain = optax.chain(optax.clip_by_global_norm(0.5), several, optax.ema(0.5))
    tx = gs.with_loss_scale(chain, RULE, telemetry=True)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(dict(zip(SHAPES, grads, strict=True)), state, params)
        return optax.apply_updates(params, updates), state

    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    fresh = run = (params, tx.init(params))
    snapshots, saved = [], []
    for i in range(STEPS + 1):
        snapshots.append(bits(run))
        saved.append(serialization.to_bytes(run))
        run = step(*run, gradients(i)) if i < STEPS else run
    assert int(telemetry(run).skipped_steps) == len(BAD)
    for start, file in enumerate(saved):
        run = serialization.from_bytes(fresh, file)
        assert bits(run) == snapshots[start]
        for i in range(start, STEPS):
            run = step(*run, gradients(i))
            assert bits(run) == snapshots[i + 1]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
@pytest.mark.parametrize("stops", STOPS, ids=["some", "all"])
def test_a_keras_file(stops, tmp_path):
    """A `.keras` file of a model compiled with our wrapper."""
    keras = pytest.importorskip("keras", reason="keras is not installed")
    from gainstage.interop.keras import LossScaleOptimizer

    options = {"weight_decay": 0.01, "global_clipnorm": 0.5, "use_ema": True}
    options |= {"ema_momentum": 0.5, "ema_overwrite_frequency": 4, "gradient_accumulation_steps": 3}
    optimizer = keras.optimizers.Adam(0.05, **options)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile(LossScaleOptimizer(optimizer, loss_scale=RULE), "mse")
    model.optimizer.build(model.trainable_variables)
    pure = jax.jit(model.optimizer.stateless_apply)

    def read(model):
        weights = [v.value for v in model.trainable_variables]
        return weights, [v.value for v in model.optimizer.variables]

    def step(weights, state, i):
        grads = gradients(i)
        return pure(state, [grads[1], grads[0][:2]], weights)

    run, snapshots = read(model), []
    for i in range(STEPS):
        snapshots.append(bits(*run))
        if i in stops:
            pairs = zip((model.trainable_variables, model.optimizer.variables), run, strict=True)
            for variables, arrays in pairs:
                for variable, array in zip(variables, arrays, strict=True):
                    variable.assign(array)
            model.save(tmp_path / f"{i}.keras")
        run = step(*run, i)
    snapshots.append(bits(*run))
    for start in stops:
        loaded = keras.saving.load_model(tmp_path / f"{start}.keras")
        assert loaded.optimizer.rule == RULE
        run = read(loaded)
        assert bits(*run) == snapshots[start]
        for i in range(start, STEPS):
            run = step(*run, i)
            assert bits(*run) == snapshots[i + 1]

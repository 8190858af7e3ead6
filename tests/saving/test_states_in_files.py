"""`save` and `load`: a state comes back bit for bit, or the file is refused with what differs."""

import os
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage._base import tensor_file

X = jnp.ones((8, 4))


def bits(state):
    """All numbers of a state, by their order."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = map(jnp.asarray, jax.tree.leaves(state))
    return [
        (str(x.dtype), x.shape, np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes())
        for x in leaves
    ]


# ── models, optimizers and rules ─────────────────────────────────────────────────────────────────


def arrays(width=8):
    return {"w": jnp.ones((4, width)) / 3, "b": jnp.zeros(width)}


def of_arrays(p, x):
    return jnp.mean((x @ p["w"] + p["b"] - 1) ** 2)


def equinox_model(width=8):
    return eqx.nn.MLP(4, 1, width, 1, key=jax.random.key(0))


def of_equinox(model, x):
    return jnp.mean((jax.vmap(model)(x) - 1) ** 2)


def nnx_model(width=8):
    r = nnx.Rngs(0)
    norm, drop = nnx.BatchNorm(width, rngs=r), nnx.Dropout(0.5, rngs=r)
    return nnx.Sequential(nnx.Linear(4, width, rngs=r), norm, drop, nnx.Linear(width, 1, rngs=r))


def of_nnx(model, x):
    return jnp.mean((model(x) - 1) ** 2)


MODELS = {"arrays": (arrays, of_arrays), "equinox": (equinox_model, of_equinox),
          "nnx": (nnx_model, of_nnx)}  # fmt: skip
OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "adabelief": lambda: optax.adabelief(0.1),
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "a chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "in microbatches": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "a rate that is set": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "L-BFGS": lambda: optax.lbfgs(),
}
RULES = {
    "default": lambda: "dynamic",
    "fixed": lambda: gs.FixedLossScale(2.0**8),
    "adaptive": lambda: gs.AdaptiveLossScale(),
    "with patience": lambda: gs.DynamicLossScale(hysteresis=2),
}
OPTIONS = {"none": {}, "telemetry": {"telemetry": True},
           "counts": {"telemetry": True, "underflow_every": 2}}  # fmt: skip


def made(model, optimizer, rule="default", options="none", width=8):
    return gs.TrainState.create(
        MODELS[model][0](width),
        OPTIMIZERS[optimizer](),
        loss_scale=RULES[rule](),
        **OPTIONS[options],
    )


@settings(max_examples=12, deadline=None)
@given(
    *map(st.sampled_from, (sorted(MODELS), sorted(OPTIMIZERS), sorted(RULES), sorted(OPTIONS))),
    st.booleans(),
)
def test_a_state_comes_back_and_goes_on(tmp_path_factory, model, optimizer, rule, options, lazy):
    """Any state after a few steps is the same bit for bit, and so is each step after it."""
    path = tmp_path_factory.mktemp("saved") / "run.safetensors"
    state, loss = made(model, optimizer, rule, options), MODELS[model][1]
    step = gs.train_step(loss)
    for x in (X, X * jnp.nan, X):
        state, _ = step(state, x)
    gs.save(path, state)
    like = lambda: made(model, optimizer, rule, options)  # noqa: E731
    found = gs.load(path, like if lazy else like())
    assert bits(found) == bits(state)
    new, old = step(found, X), step(state, X)
    assert bits(new) == bits(old)


leaf = st.sampled_from(
    ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint32",
     "bool", "complex64", "int4", "float8_e4m3b11fnuz"]
)  # fmt: skip
shape = st.lists(st.integers(0, 3), max_size=3).map(tuple)
array = st.tuples(leaf, shape).map(lambda each: jnp.ones(each[1], each[0]))
trees = st.recursive(
    array, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)
)


@settings(max_examples=30, deadline=None)
@given(trees)
def test_a_pytree_of_any_dtypes_and_names_comes_back(tmp_path_factory, tree):
    """Pytrees with any keys, shapes and dtypes come back as they are."""
    path = tmp_path_factory.mktemp("tree") / "tree"
    gs.save(path, tree)
    found = gs.load(path, tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert bits(found) == bits(tree)


@pytest.mark.parametrize("lazy", [False, True])
def test_numbers_of_numpy_keep_their_64_bits(tmp_path, lazy):
    """What counts the examples that were read comes back whole."""
    seen = {"seen": np.array(2**40 + 3), "time": np.float64(1 / 3), "half": np.ones(2, np.float16)}
    none = {"seen": np.array(0), "time": np.float64(0), "half": np.zeros(2, np.float16)}
    gs.save(tmp_path / "numbers", seen)
    found = gs.load(tmp_path / "numbers", (lambda: none) if lazy else none)
    kinds, others = ({name: (type(x), x.dtype) for name, x in d.items()} for d in (found, seen))
    assert kinds == others
    assert {n: x.tobytes() for n, x in found.items()} == {n: x.tobytes() for n, x in seen.items()}


def test_a_number_that_does_not_fit_is_refused(tmp_path):
    """A Python number is one of JAX, of 32 bits."""
    with pytest.raises(ValueError, match=r"Expected a number of 32 bits.*'seen'.*numpy\.int64"):
        gs.save(tmp_path / "state", {"seen": 2**40})


def test_keys_of_each_kind_come_back(tmp_path):
    """Random keys, alone and as an array, draw the same numbers, and one of another kind is
    refused."""
    tree = {"one": jax.random.key(1), "many": jax.random.split(jax.random.key(2, impl="rbg"), 3)}
    gs.save(tmp_path / "keys", tree)
    found = gs.load(tmp_path / "keys", tree)
    assert bits(found) == bits(tree)
    assert jax.random.normal(found["one"]) == jax.random.normal(tree["one"])
    other = tree | {"one": jax.random.key(1, impl="rbg")}
    with pytest.raises(ValueError, match=r"one is key<fry> in the file, and key<rbg> here"):
        gs.load(tmp_path / "keys", other)
    with pytest.raises(ValueError, match=r"one is key<fry> in the file, and no key here"):
        gs.load(tmp_path / "keys", tree | {"one": jnp.zeros(2, jnp.uint32)})


# ── what differs ─────────────────────────────────────────────────────────────────────────────────

DIFFERENT = {
    "a wider layer": (
        lambda: made("arrays", "adam", width=16),
        r"differs in 6: params/b has shape \(8,\) in the file, and \(16,\) here",
    ),
    "another model": (lambda: made("equinox", "adam"), "params/layers/0/bias is missing in the"),
    "another optimizer of the same arrays": (
        lambda: made("arrays", "adabelief"),
        "opt_state/inner/0 is ScaleByAdamState in the file, and ScaleByBeliefState here",
    ),
    "another optimizer": (lambda: made("arrays", "sgd"), "mu/b is in the file alone"),
    "another rule": (
        lambda: made("arrays", "adam", "fixed"),
        "the rule is DynamicLossScale in the file, and FixedLossScale here",
    ),
    "telemetry": (lambda: made("arrays", "adam", options="telemetry"), "observed.* is missing"),
    "another dtype": (
        lambda: gs.TrainState.create(
            jax.tree.map(lambda x: x.astype("float16"), arrays()), optax.adam(0.1)
        ),
        "params/b is float32 in the file, and float16 here",
    ),
    "the parameters alone": (arrays, "opt_state.* is in the file alone"),
    "an extra": (
        lambda: gs.TrainState.create(arrays(), optax.adam(0.1), extra=jnp.zeros(2)),
        "extra is missing in the file",
    ),
}


@pytest.mark.filterwarnings("ignore:Half-precision parameters")
@pytest.mark.parametrize("case", DIFFERENT)
def test_a_state_of_another_kind_is_refused_with_what_differs(case, tmp_path):
    """The error names the arrays, the parts of the optimizer and the rule, as far as ten."""
    make, text = DIFFERENT[case]
    gs.save(tmp_path / "run", made("arrays", "adam"))
    with pytest.raises(ValueError, match=text) as error:
        gs.load(tmp_path / "run", make())
    assert "Nothing was loaded" in str(error.value)


def test_ten_differences_are_named_and_the_others_counted(tmp_path):
    """Of forty arrays with other shapes, ten are named."""
    gs.save(tmp_path / "tree", {f"x{i}": jnp.ones(i + 1) for i in range(40)})
    with pytest.raises(ValueError, match=r"differs in 40: x0 has shape .*x17 .*, and 30 more\."):
        gs.load(tmp_path / "tree", {f"x{i}": jnp.ones(i + 2) for i in range(40)})


def test_a_state_that_a_step_has_deleted_is_not_saved(tmp_path):
    """It says so, and the older file stays."""
    state = made("arrays", "adam")
    gs.save(tmp_path / "run", state)
    before = (tmp_path / "run").read_bytes()
    new, _ = gs.train_step(of_arrays)(state, X)
    with pytest.raises(ValueError, match="donated to an earlier step"):
        gs.save(tmp_path / "run", state)
    assert (tmp_path / "run").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["run"]
    gs.save(tmp_path / "run", new)
    assert (tmp_path / "run").read_bytes() != before


DAMAGED = {
    "empty": lambda data: b"",
    "text": lambda data: b"a text, and not a file of arrays",
    "cut": lambda data: data[:-5],
    "longer": lambda data: data + b"more",
    "a header that is too long": lambda data: b"\xff" * 8 + data[8:],
    "without facts": lambda data: data.replace(b'"gainstage"', b'"gainstagf"'),
    "facts that are none": lambda data: data.replace(b'\\"version\\": 1', b'\\"version\\": ['),
    "a later version": lambda data: data.replace(b'\\"version\\": 1', b'\\"version\\": 7'),
    "another dtype": lambda data: data.replace(b'"dtype":"F32"', b'"dtype":"F16"', 1),
    "another shape": lambda data: data.replace(b'"shape":[8]', b'"shape":[9]', 1),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused(kind, tmp_path):
    """Whatever was changed in a file, it is an error with the path, and nothing is loaded."""
    path = tmp_path / "run"
    gs.save(path, made("arrays", "adam"))
    data = path.read_bytes()
    path.write_bytes(DAMAGED[kind](data))
    assert path.read_bytes() != data
    with pytest.raises(ValueError, match=r"Expected a file .*got .*run"):
        gs.load(path, lambda: made("arrays", "adam"))


def test_the_plan_of_a_mended_step_is_in_the_file(tmp_path):
    """`Plan.load` reads the plan that was saved with a state."""
    plan = gs.precision.Plan("bfloat16")
    gs.save(tmp_path / "run", made("arrays", "adam"), plan=plan)
    found = gs.precision.Plan.load(tmp_path / "run")
    assert found.to_json() == plan.to_json()
    gs.load(tmp_path / "run", lambda: made("arrays", "adam"))


# ── interruptions, memory and meshes ─────────────────────────────────────────────────────────────

WRITER = """
import sys, jax.numpy as jnp, gainstage as gs
tree = {"x": jnp.arange(2_000_000, dtype=jnp.float32), "n": jnp.int32(0)}
gs.save(sys.argv[1], tree)
print("ready", flush=True)
for n in range(1, 100_000):
    gs.save(sys.argv[1], {"x": tree["x"] + n, "n": jnp.int32(n)})
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path):
    """A process is killed at twelve moments of writing: each time the file is whole."""
    path, like = tmp_path / "run", {"x": jnp.zeros(2_000_000), "n": jnp.int32(0)}
    for moment in np.random.default_rng(0).uniform(0.0, 0.3, 12):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(moment)
            writer.send_signal(signal.SIGKILL)
        found = gs.load(path, like)
        np.testing.assert_array_equal(found["x"], np.arange(2_000_000) + int(found["n"]))


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_one(tmp_path, monkeypatch):
    """All that is read is of the old file or of the new one, never some of each."""
    path, real = tmp_path / "run", safetensors.safe_open
    tree = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    gs.save(path, tree)

    def meanwhile(*args, **options):
        monkeypatch.undo()
        gs.save(path, {"a": jnp.ones(3), "b": jnp.ones(3)})
        return real(*args, **options)

    monkeypatch.setattr(tensor_file, "safe_open", meanwhile)
    found = gs.load(path, tree)
    assert found["a"].tolist() == found["b"].tolist() == [1, 1, 1]


def test_a_sharded_state_is_saved_whole_and_placed_as_the_other(tmp_path):
    """Eight devices save a sharded state; it comes back on eight and on one."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    weights = jnp.arange(64.0).reshape(16, 4)
    state = gs.TrainState.create(jax.device_put(weights, sharded), optax.adam(0.1))
    gs.save(tmp_path / "run", state)
    on_eight = gs.load(tmp_path / "run", state)
    assert on_eight.params.sharding == sharded
    on_one = gs.load(tmp_path / "run", gs.TrainState.create(jnp.zeros((16, 4)), optax.adam(0.1)))
    assert len(on_one.params.sharding.device_set) == 1
    assert bits(on_eight) == bits(on_one) == bits(state)


MEASURED = """
import resource, sys, numpy as np, gainstage as gs, jax
big = {f"x{i}": np.ones((4096, 2048), np.float32) for i in range(8)}  # 256 MB
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), big)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
gs.save(sys.argv[1] + "-small", {"x": np.ones(3, np.float32)})
before = peak()
gs.save(sys.argv[1], big)
saved = peak()
del big
gs.load(sys.argv[1], like)
print(before, saved, peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss")
def test_the_memory_of_saving_and_loading_is_that_of_the_file(tmp_path):
    """Beside the arrays, at most 1.1 of the file is in memory."""
    words = [sys.executable, "-c", MEASURED, str(tmp_path / "big")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    before, saved, loaded = map(float, done.stdout.split())
    size = (tmp_path / "big").stat().st_size / 2**20
    assert size > 250
    assert saved - before < 1.1 * size
    assert loaded - before < 1.1 * size

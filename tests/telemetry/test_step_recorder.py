"""What a run keeps of a bad step, and the command that looks into it."""

import contextlib
import errno
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import typing
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import gainstage as gs
from gainstage.__main__ import main
from gainstage._xray import from_file
from gainstage._xray import step_recorder as writer
from gainstage.diagnostics import StepRecorder, read_step, telemetry
from gainstage.optimizers import SGD, Variable

from misuse.test_fuzz import QUICK, damaged, outcome

TRAIN = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp, optax, gainstage as gs

def loss_fn(params, batch):
    return ((batch["x"].astype("float16") @ params["w"].astype("float16")) ** 2).sum()

if __name__ == "__main__":
    if sys.argv[1] == "early":
        Path.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
    params, rule = {"w": jnp.ones(3)}, gs.DynamicLossScale(2.0**4)
    state = gs.TrainState.create(params, optax.sgd(0.01), loss_scale=rule, telemetry=True)
    step = gs.train_step(loss_fn)
    recorder = gs.diagnostics.StepRecorder(sys.argv[2])
    for n in range(5):
        batch = {"x": jnp.full((2, 3), 40.0 if n == 3 else 0.5)}
        state, loss = step(state, batch)
        if recorder.write(n, state.info, state.params, batch):
            os.kill(os.getpid(), signal.SIGKILL)
"""


JSON = [None, True, 0, -1, 7, 2**70, 0.5, float("nan"), "", "a", "float32", [], ["int", "x"], {},
        {"a": 1}, {"leaf": 9}]  # fmt: skip


def info(finite=True, scale=8.0):
    zero = jnp.float32(0)
    return gs.typing.StepInfo(jnp.array(finite), jnp.float32(scale), zero, zero, zero, zero)


@pytest.fixture
def write(tmp_path):
    """Writes a step file of some arguments; returns its path."""

    def write(*args, path=tmp_path / "bad.safetensors"):
        assert StepRecorder(path).write(0, info(False), *args)
        return path

    return write


def test_a_run_that_is_killed_leaves_a_whole_step_file_or_none(tmp_path):
    """Killed right after a bad step it has left what repeats the step; killed before the file has
    its name, nothing that is taken for a step file."""
    (tmp_path / "train.py").write_text(TRAIN)
    paths = {when: tmp_path / f"{when}.safetensors" for when in ("early", "late")}
    words = [sys.executable, str(tmp_path / "train.py")]
    runs = [subprocess.Popen([*words, when, str(path)]) for when, path in paths.items()]
    assert [run.wait(100) for run in runs] == [-signal.SIGKILL] * 2
    bad = read_step(paths["late"])
    assert (bad.step, bad.scale) == (3, 16.0)
    params, batch = bad.args

    def loss(params, scale):
        product = batch["x"].astype("float16") @ params["w"].astype("float16")
        return (product**2).sum() * scale

    grads = {scale: jax.grad(loss)(params, jnp.float16(scale))["w"] for scale in (1.0, bad.scale)}
    assert jnp.isfinite(grads[1.0]).all()
    assert not jnp.isfinite(grads[bad.scale]).all()
    assert [path.suffix for path in tmp_path.glob("*early*")] == [".part"]
    assert len(from_file.commands(tmp_path)) == 1  # of the report: for the other file


def test_two_recorders_of_one_path_never_mix_their_files(tmp_path, monkeypatch):
    """Two jobs that save to one path at once do not write into the file of each other: whatever is
    read is a whole file of one of them."""
    path, replace = tmp_path / "bad.safetensors", Path.replace
    first, second = StepRecorder(path), StepRecorder(path)

    def meanwhile(*paths):  # the first is about to rename what it has written
        if paths[-1] == path:
            monkeypatch.setattr(Path, "replace", replace)
            assert second.save(2, info(), np.full(10, 2.0))
        return replace(*paths)

    monkeypatch.setattr(Path, "replace", meanwhile)
    assert first.save(1, info(), np.full(1000, 1.0))
    bad = read_step(path)
    assert bad.step == 1
    np.testing.assert_array_equal(bad.args[0], np.full(1000, 1.0))
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_step_file_that_is_cut_short_is_an_error(write):
    """Whatever is missing at its end, reading it raises a ValueError that says so."""
    path = write(np.arange(100.0), {"x": jnp.ones((3, 4))})
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 97), len(whole) - 1, len(whole) - 22}:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"Expected a file that .*; got .*bad\.safetensors.*, "
                           "which is another one or was damaged"):  # fmt: skip
            read_step(path)
    path.write_bytes(whole)
    assert read_step(path).step == 0


def test_a_damaged_step_file_is_never_read_as_another(write, rng):
    """One wrong byte is a ValueError, unless it stands where nothing is read from."""
    path = write(np.arange(20.0), {"x": jnp.ones((3, 4))})
    whole = path.read_bytes()
    right, harmless = read_step(path), 0
    for place in rng.choice(len(whole), 200, replace=False):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(ValueError):
            jax.tree.map(np.testing.assert_array_equal, read_step(path), right)
            harmless += 1
    assert harmless < 100


def rewritten(path, change=lambda about: about, replaced=()):
    """Writes a step file again with another description, and checksums that hold."""
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    text = json.dumps(change(json.loads(header["__metadata__"]["gainstage"])))
    text = text.replace(*replaced) if replaced else text
    header["__metadata__"] = {"gainstage": text, "gainstage crc32": str(zlib.crc32(text.encode()))}
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    path.write_bytes(len(new).to_bytes(8, "little") + new + whole[end:])
    return path


def with_leaf(leaf):
    return lambda about: about | {"leaves": {"0": leaf}}


def with_tree(tree):
    return lambda about: about | {"args": [about["args"][0] | {"tree": tree}]}


def without(key):
    return lambda about: {name: value for name, value in about.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("versions"), "None for 'versions'"),
        (without("settings"), "None for 'settings'"),
        (lambda about: about | {"versions": {"jax": 1}}, "{'jax': 1} for 'versions'"),
        (lambda about: about | {"settings": ["x"]}, r"\['x'\] for 'settings'"),
        (lambda about: about | {"gainstage step": True}, "got format True"),
        (with_leaf("tape"), "'tape' in the place of a kind of array"),
        (with_leaf(["jax", "int3"]), "damaged"),
        (with_leaf("key 3fry"), "damaged"),
        (with_tree(""), "damaged"),
        (with_tree("twig"), "damaged"),
        (
            with_tree({"kind": "dict", "of": {"w": {"kind": "leaf"}, "b": {"kind": "leaf"}}}),
            "leaves",
        ),
        (with_tree({"kind": "list", "of": {"0": {"kind": "leaf"}}}), "'list' in the place of a"),
        (with_tree({"kind": "none"}), "damaged"),
        (with_tree({"of": []}), "damaged"),
        (lambda about: about | {"dtypes": {"0": "a"}}, "'0' is of dtype 'a'"),
        (lambda about: about | {"dtypes": {"0": "O"}}, "'0' is of dtype 'O'"),
        (lambda about: about | {"dtypes": []}, "does not say what its arrays are"),
        (lambda about: about | {"checksums": {"0": 1}}, "checksum of '0' differs"),
    ],
)
def test_a_description_that_no_step_file_has_is_one_line(write, command, change, message):
    """A missing or impossible entry is a ValueError that names it, also from the command."""
    path = rewritten(write(7), change)
    with pytest.raises(ValueError, match=f"Expected a .*file .*{message}"):
        read_step(path)
    status, said = command(path, "--loss", "train_it:loss")
    assert (status, said.out, said.err.count("\n")) == (1, "", 1)
    assert re.search(message, said.err)


def test_a_structure_that_is_nested_very_deeply_is_an_error(write):
    """Ten thousand lists, one in the other, end no process."""
    deep = '{"kind":"list","of":[' * 10_000 + '{"kind":"leaf"}' + "]}" * 10_000
    path = rewritten(write(7), with_tree("HERE"), ('"HERE"', deep))
    with pytest.raises(ValueError, match=r"Expected a .*file"):
        read_step(path)


@QUICK
@given(st.data())
def test_a_description_from_anywhere_is_a_clear_error(tmp_path_factory, data):
    """A file whose description has been changed is read as it says, or refused as one that is
    damaged."""
    path = tmp_path_factory.getbasetemp() / "described.safetensors"
    path.unlink(missing_ok=True)
    recorder = StepRecorder(path)
    args = {"w": [jnp.ones(3), np.ones(2, "bfloat16")], "n": (1, None)}, jax.random.key(0)
    assert recorder.write(0, info(False), *args)
    rewritten(path, lambda about: data.draw(damaged(about, JSON)))
    outcome(lambda: read_step(path))


def test_what_is_no_step_file_is_refused(tmp_path, write):
    """Another file is neither read as a step file nor replaced by one."""
    np.savez(tmp_path / "weights.npz", w=np.ones(3))
    (tmp_path / "notes.txt").write_text("important")
    gs.save(tmp_path / "state.safetensors", {"w": jnp.ones(3)})
    older = write(7, path=tmp_path / "older.safetensors")
    rewritten(older, lambda about: about | {"gainstage step": 1, "versions": "9.0"})
    wanted = {"weights.npz": "which is another one", "notes.txt": "which is another one",
              "state.safetensors": "which has no step",
              "older.safetensors": "format 1. Read it with the gainstage that wrote it, "
              "9.0"}  # fmt: skip
    for name, message in wanted.items():
        before = (tmp_path / name).read_bytes()
        for use in (read_step, StepRecorder):
            with pytest.raises(ValueError, match=rf"Expected a .*{name}.*{message}"):
                use(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(FileNotFoundError):
        read_step(tmp_path / "missing.safetensors")
    with pytest.raises(FileNotFoundError):
        StepRecorder(tmp_path / "no folder" / "bad.safetensors")


DTYPES = [*"?bhiqBHIQefdFD", *(np.dtype(getattr(ml_dtypes, name)) for name in (
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu",
    "float4_e2m1fn", "int4", "uint4", "int2"))]  # fmt: skip


def test_arrays_of_every_dtype_come_back(write):
    """JAX's and numpy's arrays keep shape, dtype, bits, kind and weak type."""
    numpy = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES]
    short = [x for x in numpy if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype]
    ours = [*map(jnp.asarray, short), jnp.full((2, 3), 0.1), jnp.asarray(2), jnp.ones((0, 3))]
    others = [
        np.float32(0.1),
        np.array("text"),
        np.ones(2, ">f4"),
        np.ones((4, 4), order="F")[::2],
        np.nan,
    ]
    (found,) = read_step(write([numpy, ours, others])).args
    for old, new in zip(*map(jax.tree.leaves, ([numpy, ours, others], found)), strict=True):
        if isinstance(old, float):
            assert type(new) is type(old)
            continue
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert isinstance(new, jax.Array) == isinstance(old, jax.Array)
        assert getattr(new, "weak_type", None) == getattr(old, "weak_type", None)
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


def test_arguments_of_every_plain_kind_come_back(write):
    """Dictionaries, lists, tuples, None, numbers, strings and Variables are as they were."""
    args = ({"b": [1, 2.5, True, None], "a": {"3": (), "2": {}}}, -np.inf, "mode", 1 + 2j, ([],))
    path = write(*args, Variable(4.0))
    assert read_step(path).args == (*args, jnp.float32(4.0))
    assert read_step(path).versions["jax"] == jax.__version__


def test_safetensors_reads_a_step_file(write):
    """Each leaf is an array with the number of its argument and its path as the name."""
    arrays = load_file(write({"w": jnp.arange(3.0), "b": [1, 2]}, 4.0))
    assert sorted(arrays) == ["0/b/0", "0/b/1", "0/w", "1"]
    assert arrays["0/w"].tolist() == [0.0, 1.0, 2.0]


def test_two_leaves_of_one_name_are_told(tmp_path):
    """A step of which two leaves have one name is not kept, and a warning says so."""
    recorder = StepRecorder(tmp_path / "bad.safetensors")
    with pytest.warns(UserWarning, match="two leaves of argument 0 have the path a/b"):
        assert not recorder.write(0, info(False), {"a": {"b": 1.0}, "a/b": 2.0})


def test_keys_come_back(write):
    """A random key draws the same numbers, of whichever generator it is."""
    keys = [jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), 3)]
    (found,) = read_step(write(keys)).args
    assert [key.dtype for key in found] == [key.dtype for key in keys]
    np.testing.assert_array_equal(*(jax.random.normal(k[0], (5,)) for k in (found, keys)))


def test_sharded_arrays_are_gathered(write):
    """An array on a mesh is kept whole."""
    mesh = Mesh(jax.devices()[:4], ("data",))
    batch = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_array_equal(read_step(write(batch)).args[0], np.arange(8.0))


def test_64_bits_need_the_setting_of_the_run(write):
    """A 64-bit array of JAX is an error where `jax_enable_x64` is off, and not rounded."""
    with jax.enable_x64(True):
        path = write(jnp.ones(3, "float64"))
        found = read_step(path)
        assert (found.args[0].dtype, found.settings["jax_enable_x64"]) == (np.float64, True)
    with pytest.raises(ValueError, match=r"Expected jax_enable_x64.* float64 was made; got False"):
        read_step(path)


def test_a_step_file_keeps_the_settings_that_change_a_loss(write):
    """The kind of random keys, the precision of products and how dtypes are promoted, too."""
    with (
        jax.default_prng_impl("rbg"),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("strict"),
        jax.threefry_partitionable(False),
    ):
        path = write(jnp.ones(3))
    assert read_step(path).settings == {
        "jax_enable_x64": False,
        "jax_default_matmul_precision": "highest",
        "jax_numpy_dtype_promotion": "strict",
        "jax_threefry_partitionable": False,
        "jax_default_prng_impl": "rbg",
    }


class Pair(typing.NamedTuple):
    left: typing.Any
    right: typing.Any


def test_other_structures_are_rebuilt_with_like(write):
    """A NamedTuple comes back in the place of what `like` has, and an error names what differs."""
    path = write(Pair(jnp.ones(2), {"w": jnp.zeros(3)}), 7)
    planned = Pair(jax.ShapeDtypeStruct((2,), "float32"), {"w": jnp.ones(3)})
    for like in (
        planned,
        (planned,),
        (planned, 0),
        lambda: planned,
        functools.partial(Pair, *planned),
    ):
        pair, number = read_step(path, like).args
        assert (type(pair), number, float(pair.right["w"].sum())) == (Pair, 7, 0.0)
    with pytest.raises(ValueError, match=r"Expected like= .* argument 0, a .*Pair with the leaves "
                       r"left, right/w; got none"):  # fmt: skip
        read_step(path)
    with pytest.raises(ValueError, match=r"\['right/w'\] missing and \['right/v'\] unknown"):
        read_step(path, Pair(planned.left, {"v": jnp.ones(3)}))
    with pytest.raises(ValueError, match=r"Expected shape \(2,\) in like for left .*; got \(3,\)"):
        read_step(path, Pair(jnp.ones(3), planned.right))
    with pytest.raises(ValueError, match="at most 2 arguments in like; got 3"):
        read_step(path, (planned, 0, 0))


def test_leaves_that_are_no_arrays_are_those_of_like(write):
    """A function and an array of Python objects are not stored, and `like` stands in for them."""
    objects = np.array([None, print])
    path = write({"activation": max, "objects": objects, "w": jnp.ones(2)})
    (found,) = read_step(path, {"activation": min, "objects": objects, "w": jnp.zeros(2)}).args
    assert found["activation"] is min
    assert found["objects"] is objects
    np.testing.assert_array_equal(found["w"], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"Expected like= .*, a builtins.dict with activation, a "):
        read_step(path)


def test_models_come_back_with_like(write):
    """An NNX and an Equinox model compute the same again; its functions are those of `like`."""
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    x = jnp.arange(3.0)
    made = [
        lambda seed: eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(seed)),
        lambda seed: nnx.Linear(3, 2, rngs=nnx.Rngs(seed)),
    ]
    for make in made:
        model = make(0)
        path = write(model, x)
        for like in (make(1), lambda make=make: make(1)):
            other, _ = read_step(path, like).args
            np.testing.assert_array_equal(other(x), model(x))
    with pytest.raises(ValueError, match=r"Expected like= .* argument 0, a .*Linear with"):
        read_step(path)


def loss_fn(params, x):
    return ((x.astype("float16") @ params["w"].astype("float16")) ** 2).sum().astype("float32")


def trained_by(kind, write):
    """Takes five steps, of which the fourth overflows, and calls `write` after each."""
    rule = gs.DynamicLossScale(2.0**4, increment_period=2)
    if kind == "LossScaleOptimizer":
        w = Variable(jnp.ones(3), name="w")
        opt = gs.optimizers.LossScaleOptimizer(SGD(0.001), loss_scale=rule, telemetry=True)
        opt.build([w])

        def train_step(x):
            return opt.minimize(lambda: loss_fn({"w": w.value()}, x), [w])

        compiled = gs.optimizers.jit(train_step, state=([w], opt.variables), donate=True)

        def step(x):
            compiled(x)
            return telemetry(opt), {"w": w}
    elif kind == "train_step":
        params, compiled = {"w": jnp.ones(3)}, gs.train_step(loss_fn)
        state = gs.TrainState.create(params, optax.sgd(0.001), loss_scale=rule, telemetry=True)

        def step(x):
            nonlocal state
            state, _ = compiled(state, x)
            return state.info, state.params
    else:
        tx = gs.with_loss_scale(optax.sgd(0.001), rule, telemetry=True)
        params = {"w": jnp.ones(3)}
        opt_state = tx.init(params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def compiled(params, opt_state, x):
            loss, grads = gs.value_and_grad(loss_fn, opt_state)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return gs.transforms.apply_updates(params, updates, opt_state), opt_state, loss

        def step(x):
            nonlocal params, opt_state
            params, opt_state, _ = compiled(params, opt_state, x)
            return telemetry(opt_state), params

    for n in range(5):
        x = jnp.full((2, 3), 30.0 if n == 3 else 0.5)
        write(n, *step(x), x)


@pytest.mark.parametrize("kind", ["train_step", "loop", "LossScaleOptimizer"])
def test_a_step_file_repeats_the_bad_step_of_every_kind_of_training(tmp_path, kind):
    """It holds the parameters and the scale of the loss that overflowed, also where the step reuses
    their memory, and changes no step after it."""
    seen = [[], []]
    trained_by(
        kind, lambda n, info, params, x: seen[0].append(jax.device_get((info, +params["w"])))
    )
    recorder = StepRecorder(tmp_path / "bad.safetensors")
    written = []

    def write(n, info, params, x):
        written.append(recorder.write(n, info, params, x))
        seen[1].append(jax.device_get((info, +params["w"])))

    trained_by(kind, write)
    jax.tree.map(np.testing.assert_array_equal, *seen)
    assert written == [False, False, False, True, False]
    bad = read_step(tmp_path / "bad.safetensors")
    assert (bad.step, bad.scale) == (3, 32.0)  # it grew after two finite steps, and has fallen now
    np.testing.assert_array_equal(bad.args[0]["w"], seen[0][2][1])
    gradient = jax.grad(lambda p: loss_fn(p, bad.args[1]) * bad.scale)(bad.args[0])
    assert jnp.isinf(gradient["w"]).all()


def test_a_healthy_run_leaves_nothing_and_keeps_its_memory(tmp_path):
    """No file is written, nothing but a flag is read, and donated memory is used again."""
    params, rule = {"w": jnp.ones(3)}, gs.DynamicLossScale(2.0**4)
    state = gs.TrainState.create(params, optax.sgd(0.001), loss_scale=rule, telemetry=True)
    step, recorder = gs.train_step(loss_fn), StepRecorder(tmp_path / "bad.safetensors")
    x = jnp.ones((2, 3))
    for n in range(3):
        before = state.params["w"]
        state, _ = step(state, x)
        assert not recorder.write(n, state.info, state.params, x)
        assert before.is_deleted()
    assert list(tmp_path.iterdir()) == []


def steps_written(recorder, flags):
    """The numbers of the steps that are written, given which are finite."""
    return [n for n, finite in enumerate(flags) if recorder.write(n, info(finite), jnp.ones(2))]


def test_only_the_first_of_a_few_bad_steps_is_kept(tmp_path):
    """The next step file follows after `healthy` finite steps in a row, and not before."""
    flags = [False, False, True, False, *[True] * 3, False, False, True, True, False]
    assert steps_written(StepRecorder(tmp_path / "a.safetensors", healthy=3), flags) == [0, 7]
    each = StepRecorder(tmp_path / "b.safetensors", healthy=1)
    assert steps_written(each, flags) == [0, 3, 7, 11]
    long = StepRecorder(tmp_path / "c.safetensors")
    assert steps_written(long, [*flags, *[True] * 100, False]) == [0, 112]
    assert read_step(tmp_path / "c.safetensors").step == 112


def test_a_row_of_ten_bad_steps_is_kept(tmp_path):
    """A run that fails for good soon after a bad step is not missed: the tenth step is kept."""
    flags = [False, *[True] * 5, *[False] * 30, True, *[False] * 12]
    assert steps_written(StepRecorder(tmp_path / "bad.safetensors"), flags) == [0, 15, 46]
    assert steps_written(StepRecorder(tmp_path / "bad.safetensors"), [False] * 30) == [0]


def test_the_latest_step_files_are_kept(tmp_path):
    """With `keep=3` there are three files and the first, the newest under the given name."""
    recorder = StepRecorder(tmp_path / "bad.safetensors", keep=3, healthy=1)
    for n in range(5):
        assert recorder.write(2 * n, info(False), n)
        recorder.write(2 * n + 1, info(), n)
    names = ["bad.safetensors", "bad.1.safetensors", "bad.2.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "bad.first.safetensors"}
    assert [read_step(tmp_path / name).step for name in names] == [8, 6, 4]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_first_step_file_of_a_run_is_never_lost(tmp_path, keep):
    """Whatever is kept later, the first stays under a given name; a later run replaces it."""
    path, first = tmp_path / "bad.safetensors", tmp_path / "bad.first.safetensors"
    for run in (100, 200):
        recorder = StepRecorder(path, keep=keep, healthy=1)
        for n in range(6):
            assert recorder.write(run + 2 * n, info(False), n)
            recorder.write(run + 2 * n + 1, info(), n)
            steps = {read_step(file).step for file in tmp_path.iterdir()}
            assert run in steps
            assert read_step(path).step == run + 2 * n
        assert read_step(first).step == run
        assert len(list(tmp_path.iterdir())) == keep + 1


def test_the_first_step_file_outlives_ten_bad_steps_in_a_row(tmp_path):
    """With `keep=1`, the step file of a run that fails for good does not replace the first."""
    flags = [*[True] * 10, False, *[True] * 59, *[False] * 12]
    assert steps_written(StepRecorder(tmp_path / "bad.safetensors"), flags) == [10, 79]
    assert read_step(tmp_path / "bad.first.safetensors").step == 10
    assert read_step(tmp_path / "bad.safetensors").step == 79


def test_arguments_that_are_too_large_are_told_at_the_first_step(tmp_path):
    """A warning says their size; nothing is written, and the run goes on."""
    recorder = StepRecorder(tmp_path / "bad.safetensors", max_bytes=1024)
    with pytest.warns(UserWarning, match=r"have 3.91 KiB, more than max_bytes, 1 KiB; set max_b"):
        assert not recorder.write(0, info(), jnp.ones(1000))
    assert not recorder.write(1, info(False), jnp.ones(1000))
    assert list(tmp_path.iterdir()) == []
    assert recorder.write(2, info(False), jnp.ones(256))


def test_a_donated_batch_is_told_at_the_first_step(tmp_path):
    """A warning names the argument that a bad step could not keep."""
    batch = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(batch)
    recorder = StepRecorder(tmp_path / "bad.safetensors")
    with pytest.warns(UserWarning, match=r"No bad step can be kept: argument 1 \(x\) was donated"):
        recorder.write(0, info(), 1.0, {"x": batch})


def test_a_full_disk_does_not_stop_the_run(tmp_path, monkeypatch):
    """A failed write is one warning, leaves the older step file, and the next bad step is tried."""
    path = tmp_path / "bad.safetensors"
    recorder, fsync = StepRecorder(path, healthy=1), os.fsync
    assert recorder.write(0, info(False), 0)
    assert not recorder.write(1, info(), 1)

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="Step 2 could not be kept: .* No space left"):
        assert not recorder.write(2, info(False), 2)
    assert not recorder.write(3, info(False), 3)
    assert read_step(path).step == 0
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(os, "fsync", fsync)
    assert recorder.write(4, info(False), 4)
    assert read_step(path).step == 4


def test_an_interrupted_write_leaves_the_older_step_file(tmp_path, monkeypatch):
    """Ctrl-C in the middle of a write leaves no other file than before."""
    path = tmp_path / "bad.safetensors"
    recorder = StepRecorder(path, healthy=1)
    assert recorder.write(0, info(False), 0)
    assert not recorder.write(1, info(), 1)
    monkeypatch.setattr(os, "fsync", lambda file: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            recorder.write(2, info(False), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert read_step(path).step == 0
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_telemetry_is_refused(tmp_path):
    """An optax state in the place of the telemetry, and one that is gone, are errors."""
    recorder, given = StepRecorder(tmp_path / "bad.safetensors"), info()
    tx = gs.with_loss_scale(optax.sgd(0.1), telemetry=True)
    with pytest.raises(
        TypeError,
        match=r"Expected gainstage.diagnostics.telemetry\(opt_state\).* for info; got \w+\.$",
    ):
        recorder.write(0, tx.init(1.0), 1.0)
    jax.jit(lambda x: ~x, donate_argnums=0)(given.finite)
    with pytest.raises(ValueError, match="Call write before the next step"):
        recorder.write(0, given, 1.0)
    for wrong in ({"keep": 0}, {"healthy": 0}, {"max_bytes": 0}, {"keep": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StepRecorder(tmp_path / "bad.safetensors", **wrong)


# ── the command ──────────────────────────────────────────────────────────────────────────────


class Seen:
    """In the place of an X-ray."""

    def __init__(self, loss_fn, *args, scale, **options):
        self.finite, self.options = bool(jnp.isfinite(loss_fn(*args) * jnp.float16(scale))), options

    def __str__(self):
        return f"finite: {self.finite}, options: {sorted(self.options)}"


MODULE = """
from collections import namedtuple
Model = namedtuple("Model", "w")
LIMIT = 3
def loss(w, x):
    if isinstance(x, dict):
        raise ArithmeticError("too large")
    return w * x
def model_loss(model, x):
    return model.w * x
def differentiate(fun, has_aux):
    return fun
def model():
    return Model(0.0)
def models():
    return model(), model()
def broken():
    raise ValueError("no model")
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `gainstage xray` in a folder with a module; returns its status and what it said."""
    (tmp_path / "train_it.py").write_text(MODULE)
    (tmp_path / "needs_it.py").write_text("import not_installed")
    (tmp_path / "broken_it.py").write_text("\ndef loss(:")
    (tmp_path / "script.py").write_text("raise SystemExit('which run?')")
    monkeypatch.setattr(from_file, "xray", Seen)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("train_it", "needs_it", "script"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        return main(["xray", *map(str, words)]), capsys.readouterr()

    return run


def test_an_xray_of_a_file_x_rays_the_step_with_the_loss_of_a_module(command, write, tmp_path):
    """It prints what the step file is, that it works, and the X-ray; it writes nothing."""
    path = write(jnp.float16(40000.0), 2)
    before = sorted(tmp_path.iterdir())
    status, said = command(path, "--loss", "train_it:loss", "--has-aux")
    assert (status, said.err) == (0, "")
    first, second, *rest = said.out.splitlines()
    assert first.startswith(f"{path}: step 0 at scale 2^3, of gainstage {gs.__version__}, jax ")
    assert second == "It compiles each operation, which can take a minute."
    assert rest == ["finite: False, options: ['has_aux']"]
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


def test_an_xray_of_a_file_says_what_is_different_here(command, write, monkeypatch):
    """Other versions are named, and a step that is finite here is said to be."""
    of_run = {**writer.versions(), "jax": "0.9.0", "platform": "gpu"}
    with monkeypatch.context() as patch:
        patch.setattr(writer, "versions", lambda: of_run)
        path = write(2.0, 3)
    status, said = command(path, "--loss", "train_it:loss", "--using", "train_it:differentiate")
    assert status == 0
    assert f"Here: jax {jax.__version__}, platform cpu. Rounding may differ." in said.out
    assert "options: ['has_aux', 'using']\nThe step is finite here, and was not" in said.out


@pytest.mark.parametrize("line", ["run.write(0, finite=False)", "recorder.write(0, info, 1.0)"])
def test_an_xray_of_a_file_loses_nothing_of_a_module_that_trains(command, write, tmp_path, line):
    """A module that records a run when it is imported is refused, and its files stay the same."""
    (tmp_path / "trains.py").write_text(
        "import gainstage as gs, jax.numpy as jnp\n"
        "zero = jnp.float32(0)\n"
        "info = gs.typing.StepInfo(jnp.array(False), zero + 8, zero, zero, zero, zero)\n"
        "run = gs.diagnostics.JsonLines('run.jsonl')\n"
        "recorder = gs.diagnostics.StepRecorder('bad.safetensors')\n"
        f"{line}\n"
    )
    path = write(2.0, 3).rename(tmp_path / "bad.safetensors")
    before = path.read_bytes()
    sys.modules.pop("trains", None)
    status, said = command(path, "--loss", "trains:loss")
    assert status == 1
    assert f'trains.py", line 6, in <module>\n    {line}' in said.err
    assert 'Train only under `if __name__ == "__main__":`.' in said.err
    assert path.read_bytes() == before
    assert not (tmp_path / "run.jsonl").read_text()


def test_a_step_that_is_not_bad_can_be_saved(command, tmp_path):
    """`save` keeps a finite step, as of a run that stalls; nothing then says that it was bad."""
    recorder = gs.diagnostics.StepRecorder(tmp_path / "kept.safetensors")
    zero = jnp.float32(0)
    info = gs.typing.StepInfo(jnp.array(True), jnp.float32(8), zero, zero, zero, zero)
    assert recorder.save(5, info, jnp.float32(2.0), jnp.float32(3.0))
    kept = gs.diagnostics.read_step(tmp_path / "kept.safetensors")
    assert (kept.step, kept.scale, kept.finite, *kept.args) == (5, 8.0, True, 2.0, 3.0)
    status, said = command(tmp_path / "kept.safetensors", "--loss", "train_it:loss")
    assert status == 0
    assert "was not in its run" not in said.out


def test_an_xray_of_a_file_rebuilds_a_model_with_like(command, write):
    """`--like` names a function that makes a model like that of the run, and so do its errors."""
    path = write(Pair(2.0, None)._replace(right=()), 3)
    status, said = command(path, "--loss", "train_it:model_loss")
    assert (status, said.out) == (1, "")
    assert "Expected --like for argument 0" in said.err
    assert "pass MODULE:FUNCTION, a function without arguments that returns a model" in said.err
    assert "like=" not in said.err
    status, said = command(path, "--loss", "train_it:model_loss", "--like", "train_it:model")
    assert status == 1
    assert "leaves in --like for argument 0" in said.err
    assert "['left'] missing and ['w'] unknown" in said.err
    path = write("text")
    status, said = command(path, "--loss", "train_it:loss", "--like", "train_it:models")
    assert (status, said.out) == (1, "")
    assert "at most 1 arguments in --like; got 2" in said.err
    module = importlib.import_module("train_it")
    path = write(module.Model(2.0), 3)
    words = ["--loss", "train_it:model_loss", "--like", "train_it:model"]
    assert command(path, *words)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss nowhere:loss", "got nowhere. Run the command in the folder of the module, or add"),
        ("--loss train_it:typo", "got typo. It has Model, loss, model_loss, differentiate, model"),
        (
            "--loss train_it:LIMIT",
            "Expected a function for --loss; got train_it:LIMIT, of type int.",
        ),
        ("--loss train_it:model", r"train_it:model\(\) \(too many .*:\n0: float\n1: w float32"),
        (
            "--loss train_it:loss --using train_it:loss",
            r"these arguments for --using; got (.|\n)*has_aux=True$",
        ),
        ("--loss needs_it:loss", 'needs_it.py", line 1, .*\n.*\nModuleNotFoundError: No module'),
        ("--loss broken_it:loss", 'broken_it.py", line 2\n.*\n.*\nSyntaxError'),
        ("--loss script:loss", 'which run\\?\n.* only under `if __name__ == "__main__":`.'),
        (
            "--loss train_it:loss --like train_it:typo",
            "for --like; got typo. It has Model, loss, model_loss",
        ),
        ("--loss train_it:loss --like train_it:models", "Create it as the run did."),
        (
            "--loss train_it:loss --like train_it:loss",
            "Pass a function without arguments to --like.",
        ),
        (
            "--loss train_it:loss --like train_it:broken",
            "^--like train_it:broken raised\n.*, in broken\n.*\n(.*\n)?ValueError: no model$",
        ),
        (
            "--loss train_it:loss",
            "^train_it:loss raised\n.*, in loss\n.*\n(.*\n)?ArithmeticError: too large\n"
            "Its arguments in .*:\n0: float\n1: w float32.3., x int32..",
        ),
    ],
)
def test_a_mistake_in_an_xray_of_a_file_is_told(command, write, words, message):
    """The status is 1, and one message names the option, the user's own line and the remedy."""
    path = write(2.0, {"x": jnp.asarray(9), "w": jnp.ones(3)})
    status, said = command(path, *words.split())
    assert status == 1
    assert re.search(message, said.err.rstrip())
    assert "Traceback" not in said.err
    assert "from_file.py" not in said.err


def test_a_fault_of_the_x_ray_itself_can_be_reported(command, write, monkeypatch):
    """An error in which no line is the user's has the whole traceback."""

    def fails(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(from_file, "is_library", lambda file: True)
    monkeypatch.setattr(from_file, "xray", fails)
    status, said = command(write(2.0, 3), "--loss", "train_it:loss")
    assert status == 1
    assert said.err.startswith("Traceback")
    assert "train_it:loss raised\nRuntimeError: out of memory\n" in said.err


def test_an_xray_of_another_file_is_told(command, tmp_path):
    """What is missing or something else is named in one line with the remedy; the status is 1."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "run.jsonl").write_text('{"step": 0}')
    (tmp_path / "empty.npz").touch()
    np.savez(tmp_path / "checkpoint.npz", a=np.ones(3))
    messages = {
        "missing.npz": "missing.npz (No such file or directory). Pass the path that StepRecorder",
        "folder": "folder (Is a directory). Pass the path that StepRecorder was given.",
        "text.npz": "gainstage.diagnostics.StepRecorder has written; got 'text.npz', which",
        "run.jsonl": "If it is a recorded run, write: gainstage report run.jsonl",
        "empty.npz": "got 'empty.npz', which is another one or was damaged",
        "checkpoint.npz": "got 'checkpoint.npz', which is another one or was damaged",
    }
    before = sorted(tmp_path.rglob("*"))
    for name, message in messages.items():
        status, said = command(name, "--loss", "train_it:loss")
        assert (status, said.out) == (1, "")
        assert message in said.err
        assert said.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_an_xray_of_a_file_sets_jax_as_in_the_run(command, write):
    """A run with 64-bit numbers is repeated with them."""
    with jax.enable_x64(True):
        path = write(jnp.ones((), "float64"), 2.0)
    try:
        assert command(path, "--loss", "train_it:loss")[0] == 0
        assert jax.config.jax_enable_x64
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("value", ["x", None, "no such precision"])
def test_an_xray_of_a_file_refuses_a_setting_that_jax_does_not_know(command, write, value):
    """A setting of another type or with an unknown value is named in one line."""
    name = "jax_default_matmul_precision" if value == "no such precision" else "jax_enable_x64"
    path = rewritten(write(7), lambda about: about | {"settings": {name: value}})
    status, said = command(path, "--loss", "train_it:loss")
    assert (status, said.out, said.err.count("\n")) == (1, "", 1)
    assert f"takes for the step file's setting {name!r}; got {value!r}" in said.err


def test_an_xray_of_a_file_names_the_operation_of_a_killed_run(tmp_path, monkeypatch, capsys):
    """The line that overflowed in a killed run is found in another process."""
    (tmp_path / "killed.py").write_text(TRAIN)
    words = [sys.executable, str(tmp_path / "killed.py"), "late", str(tmp_path / "bad.safetensors")]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    status = main(["xray", "bad.safetensors", "--loss", "killed:loss_fn"])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert "killed.py:7" in said.out  # the only line of its loss
    assert "The step is finite here" not in said.out


def test_what_a_file_says_is_printed_clean(command, write):
    """Escape sequences in the names and versions of a step file reach no terminal."""
    evil = "\x1b]0;owned\x07\x1b[2J"
    path = rewritten(
        write({"w" + evil: 7, "x": 1}), lambda about: about | {"versions": {evil: evil}}
    )
    for words in (["--loss", "train_it:loss"], ["--loss", "needs_it:loss"]):
        _, said = command(path, *words)
        for text in (said.out, said.err):
            assert "\x1b" not in text
            assert "\x07" not in text

"""Runs of several processes on one machine: the same decision and the same bits everywhere."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs
from gainstage import distributed
from gainstage.distributed import agreement
from gainstage.optimizers import SGD, Adam

import quick
import worker

ROOT = Path(__file__).parents[2]


class Run:
    """The processes of a run, what they printed and what they left."""

    def __init__(self, folder, processes=2, **job):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = quick.environment()
        self.processes = []
        for i in range(processes):
            job = {"devices": 8 // processes} | job | {"process": i, "processes": processes}
            job |= {"coordinator": f"127.0.0.1:{port}", "result": str(self.folder / f"{i}.json")}
            words = [sys.executable, "-u", worker.__file__, json.dumps(job)]
            with (self.folder / f"{i}.txt").open("w") as output:
                self.processes.append(
                    subprocess.Popen(words, stdout=output, stderr=output, env=environment)
                )

    def wait(self, within=100.0):
        """The exit statuses; as a launcher does, it ends all processes if one is killed."""
        deadline, ends = time.monotonic() + within, [None]
        try:
            while None in ends and time.monotonic() < deadline:
                ends = [process.poll() for process in self.processes]
                if -signal.SIGKILL in ends:
                    break
                time.sleep(0.02)
            else:
                assert None not in ends, self.said()
        finally:
            for process in self.processes:
                process.kill()
        return [process.wait() for process in self.processes]

    def said(self, process=None):
        """What a process printed, or all of them."""
        chosen = range(len(self.processes)) if process is None else [process]
        return "\n".join((self.folder / f"{i}.txt").read_text() for i in chosen)

    def results(self):
        """What the processes left, after they have ended well."""
        assert set(self.wait()) == {0}, self.said()
        files = [self.folder / f"{i}.json" for i in range(len(self.processes))]
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of two processes, twenty steps and four checkpoints, with two poisoned batches; then
    four steps that are repeated until they are finite; then ten that are recorded, and a state that
    is saved and loaded."""
    pytest.importorskip("orbax.checkpoint")
    folder = tmp_path_factory.mktemp("run")
    checkpoints = folder / "checkpoints"
    job = {"steps": 20, "poisoned": [3, 12], "checkpoints": str(checkpoints)}
    results = Run(
        folder, retried=4, mended=4, recorded=str(folder), saved=str(folder / "state"), **job
    ).results()
    return results, checkpoints, job


def test_an_inf_on_one_process_skips_on_all(uninterrupted):
    """Two processes take the same decisions and hold the same bits."""
    (first, other), _, job = uninterrupted
    assert [i for i, skipped in enumerate(first["skipped"]) if skipped] == job["poisoned"]
    assert first["scales"][:8] == [2.0**15] * 3 + [2.0**14] * 4 + [2.0**15]
    assert first["same"]
    assert other == first | {"recorded": other["recorded"]}


def test_processes_retry_together(uninterrupted):
    """One device of two processes overflows: both repeat the step, as often as one process does. If
    its data are NaN, one step is skipped and the scale is halved, whatever the retries."""
    (first, after), (other, other_after) = (result["retried"] for result in uninterrupted[0])
    assert first == other
    assert after == other_after == [[2.0**14, 2.0**14, True]] * 3
    assert all(applied and np.isfinite(seen).all() for *seen, applied in first)
    assert first[-1][1] < 2.0**40
    alone, after = worker.retried(worker.mesh_of((8, 1)), 4)
    assert after == [[2.0**14, 2.0**14, True]] * 3
    np.testing.assert_allclose(np.array(first)[:, :3], np.array(alone)[:, :3], rtol=1e-3)


def test_processes_are_mended_alike(uninterrupted):
    """Two processes take the same lines back into float32 as one with all devices does."""
    (rows, losses, told), other = (result["mended"] for result in uninterrupted[0])
    assert [rows, losses] == other[:2]
    assert len(told) == 1
    assert [text for *_, text in rows] == ['h = (x + 2048.0) @ params["first"]']
    alone, expected, _ = worker.mended(worker.mesh_of((8, 1)), 4)
    assert [tuple(row) for row in rows] == alone
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


def test_two_processes_save_one_state_and_load_their_shards(uninterrupted):
    """Sharded weights are gathered into one file, which each process reads back into its shards; a
    process with all devices reads it too, and each goes on with the same step."""
    (first, other), checkpoints, _ = uninterrupted
    assert first["saved"] == other["saved"]
    is_same, loss, again = first["saved"]
    assert is_same
    assert loss == again
    params = {name: jnp.zeros((32, 32)) for name in ("first", "last")}
    like = gs.TrainState.create(params, optax.adam(0.01))
    state = gs.load(checkpoints.parent / "state", like)
    assert state.step == 2
    _, alone, _ = worker.saved(worker.mesh_of((8, 1)), checkpoints.parent / "alone")
    assert alone == pytest.approx(loss, rel=1e-5)
    expected = gs.load(checkpoints.parent / "alone", like)
    for found, wanted in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_two_processes_write_one_record_and_one_step_file(uninterrupted):
    """The first alone writes: each step once, and the bad step whole. A batch of which it holds a
    part is not saved, with a warning, and the run goes on."""
    (first, other), checkpoints, _ = uninterrupted
    (written, told), (elsewhere, silent) = first["recorded"], other["recorded"]
    assert [n for n, (is_saved, _) in enumerate(written) if is_saved] == [6]
    assert not any(is_spread for _, is_spread in written)
    assert not np.any(elsewhere)
    assert silent == []
    assert len(told) == 1
    assert "lies on devices of other processes; gather it first" in told[0]
    folder = checkpoints.parent
    run = gs.diagnostics.read_run(folder / "run.jsonl")
    assert run.steps.tolist() == list(range(10))
    assert run.get("applied").tolist() == [1] * 6 + [0] + [1] * 3
    bad = gs.diagnostics.read_step(folder / "bad.safetensors")
    assert (bad.step, bad.scale) == (6, 2.0**15)
    assert (bad.args[1] == 1e4).all()
    assert {path.name for path in folder.glob("*.safetensors*")} == {"bad.safetensors"}


NOT_ASKED = dict.fromkeys(("retried", "mended", "recorded", "saved"))


@pytest.mark.slow
def test_four_processes_do_what_two_do(uninterrupted, tmp_path):
    """The decisions and bits of a run do not depend on how many processes share its devices."""
    (first, _), _, job = uninterrupted
    four = Run(tmp_path, 4, steps=20, poisoned=job["poisoned"]).results()
    assert all(each == first | NOT_ASKED for each in four)


@pytest.mark.parametrize(
    "devices",
    [
        (4, 2),
        (1, 1),
        pytest.param((2, 2), marks=pytest.mark.thorough),
        pytest.param((2, 1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_checkpoint_moves_to_another_mesh(uninterrupted, devices):
    """What two processes saved is restored bit for bit on 8, 4, 2 and 1 devices, and goes on."""
    _, folder, job = uninterrupted
    training = worker.Training(worker.mesh_of(devices, devices[0] * devices[1]))
    layouts = [v.sharding for v in training.optimizer.variables]
    checkpoints = worker.ocp.CheckpointManager(folder)
    training.restore(checkpoints, 10)
    assert training.digest() == (folder / "digest-10").read_text()
    assert [v.value().sharding for v in training.optimizer.variables] == layouts
    for i in range(10, 20):
        training.step(i, i in job["poisoned"])
    got = training.values()
    end = worker.Training(training.mesh)
    end.restore(checkpoints, 20)
    for name, value in end.values().items():
        if value.shape:
            np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-6, err_msg=name)
        else:
            assert got[name] == value, name


@pytest.mark.thorough
def test_a_checkpoint_moves_to_fewer_devices_of_two_processes(uninterrupted, tmp_path):
    """Two processes with one device each hold the bits that two with four had saved."""
    _, folder, _ = uninterrupted
    fewer = Run(tmp_path, devices=1, mesh=[2, 1], steps=20, checkpoints=str(folder)).results()
    assert [result["start"] for result in fewer] == [20, 20]
    assert {result["digest"] for result in fewer} == {(folder / "digest-20").read_text()}


def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(uninterrupted, tmp_path):
    """Process 1 is killed between two checkpoints, and the other with it: the run that is started
    again is bit for bit the one that was never interrupted."""
    results, _, job = uninterrupted
    job = {**job, "checkpoints": str(tmp_path / "checkpoints")}
    killed = Run(tmp_path, culprit=1, kill_at=12, **job).wait()
    assert killed[1] == -signal.SIGKILL
    assert killed[0] != 0
    resumed = Run(tmp_path, **job).results()
    assert [r["start"] for r in resumed] == [10, 10]
    assert [r["digest"] for r in resumed] == [r["digest"] for r in results]
    assert resumed[0]["scales"] == results[0]["scales"][10:]


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"rate": 0.02}, "inner_optimizer.config.learning_rate"),
        pytest.param({"clipnorm": 1.0}, "inner_optimizer.config.clipnorm", marks=pytest.mark.slow),
    ],
    ids=["rate", "option"],
)
def test_another_configuration_on_one_process_is_an_error(different, message, tmp_path):
    """It is named on every process, before the first step."""
    run = Run(tmp_path, culprit=1, different=different, steps=1)
    assert 0 not in run.wait()
    for i in range(2):
        assert "ValueError: Expected the same" in run.said(i)
        assert message in run.said(i)
        assert "on process 0 and" in run.said(i)


@pytest.mark.slow
def test_the_example_runs():
    """`examples/multi_process.py` trains on two processes, which end with the same weights."""
    pytest.importorskip("orbax.checkpoint")
    words = [sys.executable, ROOT / "examples" / "multi_process.py", "--steps=40", "--devices=2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "each device holds " in done.stdout
    losses = [float(part.split(",")[0]) for part in done.stdout.split("loss ")[1:]]
    assert losses[-1] < losses[0]
    digests = re.findall(r"the weights are ([0-9a-f]{16})", done.stdout)
    assert len(digests) == 2
    assert len(set(digests)) == 1


# ── in one process ───────────────────────────────────────────────────────────────────────────


def everywhere(values, spec=()):
    """An array that should be the same on eight devices, and is what is given for each."""
    mesh = worker.mesh_of()
    layout = NamedSharding(mesh, PartitionSpec(*spec))
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    first, *rest = values[0].shape
    shape = (first * 4 if spec else first, *rest)
    return jax.make_array_from_single_device_arrays(shape, layout, parts)


def test_random_keys_are_compared_too():
    """A state has keys in its extra, which are no numbers."""
    mesh = worker.mesh_of()
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, PartitionSpec()))
    assert distributed.check_replicas({"key": key, "w": everywhere([np.ones((8, 6))] * 8)})
    parts = [
        jax.device_put(jax.random.key(int(i == 3)), d) for i, d in enumerate(mesh.devices.flat)
    ]
    layout = NamedSharding(mesh, PartitionSpec())
    other = jax.make_array_from_single_device_arrays((), layout, parts)
    assert not distributed.check_replicas({"key": other})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "bool"])
@pytest.mark.parametrize("device", range(8))
def test_a_replica_that_differs_in_one_bit_is_found(device, dtype):
    """The last bit, and the sign, of one element on one device only, whatever the others do."""
    good = (np.arange(48) % 2).astype(jax.numpy.dtype(dtype)).reshape(8, 6)
    bits = np.uint8 if dtype in ("int8", "bool") else f"u{good.dtype.itemsize}"
    assert distributed.check_replicas({"w": everywhere([good] * 8)})
    for flip in {1, 1 if dtype == "bool" else 1 << (8 * good.dtype.itemsize - 1)}:
        bad = good.copy()
        bad.view(bits)[3, 3] ^= flip
        values = [bad if i == device else good for i in range(8)]
        assert not distributed.check_replicas([everywhere([good] * 8), everywhere(values)])


def test_arrays_that_changed_places_on_one_device_are_found():
    """As where a process has its variables in another order; opposite changes do not cancel."""
    one, two = np.arange(48.0).reshape(8, 6), np.arange(48.0)[::-1].reshape(8, 6)
    for swapped in ((two, one), (one + 1, two - 1)):
        ones = everywhere([swapped[0] if i == 5 else one for i in range(8)])
        twos = everywhere([swapped[1] if i == 5 else two for i in range(8)])
        assert not distributed.check_replicas([ones, twos])
    count = np.arange(8)
    ones = everywhere([8 + count + (i == 5) * (count == 1) for i in range(8)])
    twos = everywhere([8 + count - (i == 5) * (count == 0) for i in range(8)])
    assert not distributed.check_replicas([ones, twos])


def test_parts_may_differ_where_replicas_may_not():
    """What is divided over one axis is compared over the other alone."""
    parts = [np.full((2, 3), i, np.float32) for i in range(4) for _ in range(2)]
    assert distributed.check_replicas(everywhere(parts, ("data",)))
    parts[5] = parts[5] + 1
    assert not distributed.check_replicas(everywhere(parts, ("data",)))


@pytest.mark.as_users
def test_the_check_of_replicas_is_one_sum_of_8_bytes():
    """However many arrays there are."""
    arrays = [everywhere([np.ones((8, 3), np.float32)] * 8) for _ in range(5)]
    program = agreement.all_same(tuple(a.sharding for a in arrays)).lower(arrays).compile()
    assert re.findall(r"= (\S+) all-reduce\(", program.as_text()) == ["u32[2]{0}"]


def test_a_planned_variable_comes_into_being_by_a_checkpoint(tmp_path):
    """Nothing is allocated twice: what is only planned gets its value by a checkpoint."""
    ocp = pytest.importorskip("orbax.checkpoint")
    saved = worker.Training(worker.mesh_of())
    saved.step(0)
    variables = [*saved.weights, *saved.optimizer.variables]
    with ocp.StandardCheckpointer() as checkpoints:
        checkpoints.save(tmp_path / "1", [v.value() for v in variables])
    plans = [
        gs.optimizers.Variable(
            jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), name=w.name
        )
        for w in saved.weights
    ]
    optimizer = gs.optimizers.LossScaleOptimizer(
        Adam(0.01, shard_state_over="data", use_ema=True), dynamic_growth_steps=4
    )
    optimizer.build(plans)
    with pytest.raises(ValueError, match="'in' to have a value; it is only planned"):
        plans[0].value()
    plans += optimizer.variables
    like = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for v in plans]
    with ocp.StandardCheckpointer() as checkpoints:
        values = checkpoints.restore(tmp_path / "1", like)
    for plan, value, variable in zip(plans, values, variables, strict=True):
        plan.assign(value)
        np.testing.assert_array_equal(plan.numpy(), variable.numpy())
        assert plan.value().sharding.is_equivalent_to(variable.value().sharding, plan.ndim)


def test_a_sum_over_devices_is_taken_in_float32():
    """Eight float16 gradients whose sum is too large for float16 have their mean."""
    mesh = jax.make_mesh((8,), ("data",))
    spec = PartitionSpec("data")

    def mean(grads):
        return distributed.mean_gradients(grads, "data")

    means = jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    grads = jax.device_put(np.full(8, 60000, np.float16), NamedSharding(mesh, spec))
    result = jax.jit(means)(grads)
    assert (result.dtype, result.tolist()) == (np.float32, [60000])


# Asked for in jax#27496 (sums in half precision).
@pytest.mark.as_users
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_sum_that_jax_puts_in_is_taken_in_float32(dtype):
    """On Explicit axes a marked parameter's gradients are products in float16, added in float32."""
    mesh = jax.make_mesh((8,), ("data",))
    put = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in [(), ("data",)]]
    w = jax.device_put(np.ones((4, 2), dtype), put[0])
    x = jax.device_put(np.full((8, 4), 20000, np.float16), put[1])

    def loss(w, x, mark):
        half = (distributed.sum_in_float32(w, "data") if mark else w).astype(np.float16)
        return (x @ half).astype(np.float32).sum() / 8

    def gradient(mark):
        # Of the mean over the devices, times 8: each holds 20000, and the sum is 160000.
        return jax.jit(jax.grad(lambda w, x: 8 * loss(w, x, mark))).lower(w, x).compile()

    for mark, summed_in in [(False, "f16"), (True, "f32")]:
        program = gradient(mark)
        assert re.findall(r"= (f16|f32)\S* all-reduce\(", program.as_text())[-1] == summed_in
        value = np.asarray(program(w, x), np.float32)
        assert (value == (160000 if mark and dtype == np.float32 else np.inf)).all()
    with pytest.raises(ValueError, match="Expected params on a mesh of Explicit axes"):
        distributed.sum_in_float32(np.ones(3), "data")


def test_facts_do_not_name_the_device_of_a_process():
    """An optimizer that is not built is the same on every process: it names no device."""
    assert "evice" not in json.dumps(agreement.facts_of(SGD(0.1)))


def test_replicas_of_complex_arrays_are_compared():
    """Both parts of complex numbers are in the sums."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    z = jax.device_put(jnp.array([1 + 2j, 3]), NamedSharding(mesh, PartitionSpec()))
    assert distributed.check_replicas({"z": z})
    assert (agreement.hashes(z) != agreement.hashes(z.conj())).any()

"""One process of a run of several, as tests start it: `python worker.py JOB.json`.

It trains a small network on a mesh of all devices, and leaves what it saw in a file of its own.
What goes wrong, and when, is part of the job. The tests use the same training in their process.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage import distributed
from gainstage.optimizers import Adam, LossScaleOptimizer, Variable

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError:  # then no job has checkpoints
    ocp = None

SPECS = {"in": (None, "model"), "bias": (), "out": ("model", None)}
SHAPES = {"in": (16, 64), "bias": (64,), "out": (64, 32)}


class Training:
    """The network, its optimizer, and a step."""

    def __init__(self, mesh, rate=0.01, **options):
        rng, self.mesh = np.random.default_rng(0), mesh
        self.weights = []
        for name, shape in SHAPES.items():
            layout = NamedSharding(mesh, PartitionSpec(*SPECS[name]))
            value = rng.normal(size=shape).astype(np.float32) / 4
            value = jax.make_array_from_callback(shape, layout, value.__getitem__)
            self.weights.append(Variable(value, name=name))
        options = {"shard_state_over": "data", "use_ema": True} | options
        self.optimizer = LossScaleOptimizer(Adam(rate, **options), dynamic_growth_steps=4)
        self.optimizer.build(self.weights)
        self.compiled = gs.optimizers.jit(
            self._step, (self.weights, self.optimizer.variables), donate=True
        )

    def _step(self, x):
        def loss():
            first, bias, last = (w.value() for w in self.weights)
            return jnp.mean((jnp.tanh(x @ first + bias) @ last - x[:, :1]) ** 2)

        return self.optimizer.minimize(loss, self.weights)

    def step(self, i, poisoned=False):
        """The step of that number; a poisoned batch has an inf in its last row."""
        x = np.random.default_rng(i).normal(size=(16, 16)).astype(np.float32)
        x[-1, -1] = np.inf if poisoned else x[-1, -1]
        layout = NamedSharding(self.mesh, PartitionSpec("data"))
        return self.compiled(jax.make_array_from_callback(x.shape, layout, x.__getitem__))

    def state(self):
        """What a checkpoint has."""
        weights = {w.name: w.value() for w in self.weights}
        return {"weights": weights, "optimizer": self.optimizer.state()}

    def restore(self, checkpoints, step):
        """Restores what a step has left in a folder of Orbax."""
        saved = checkpoints.restore(step, args=ocp.args.StandardRestore(self.state()))
        for weight in self.weights:
            weight.assign(saved["weights"][weight.name])
        self.optimizer.load_state(saved["optimizer"])

    def values(self):
        """All state by name, whole, in numpy."""
        named = {w.name: w.value() for w in self.weights} | self.optimizer.state()
        gather = multihost_utils.process_allgather
        return {name: np.asarray(gather(value, tiled=True)) for name, value in named.items()}

    def digest(self):
        """What all state comes to, bit for bit."""
        values = self.values()
        return hashlib.sha256(b"".join(values[k].tobytes() for k in sorted(values))).hexdigest()


def retried(mesh, steps):
    """Steps of a float16 loss from scales that are far too large, in both ways that retry; then
    the scales after one batch of NaN data, with more and more retries."""
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

    def on_mesh(value, layout):
        return jax.make_array_from_callback(value.shape, layout, value.__getitem__)

    def loss_fn(w, x):
        out = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
        return jnp.mean((out - x[:, :1]) ** 2)

    step = gs.train_step(loss_fn, retries=40)
    differentiate = jax.jit(jax.value_and_grad(gs.autocast(loss_fn, loss_scale=2.0**40)))
    w = on_mesh(np.zeros((16, 16), np.float32), whole)
    state = gs.TrainState.create(w, optax.adam(0.01), loss_scale=gs.DynamicLossScale(2.0**40))
    seen = []
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(16, 16)).astype(np.float32)
        x[-1] *= 2.0 ** (5 * (i % 2))  # on one device alone
        x = on_mesh(x, rows)
        _, grads = differentiate(state.params, x)
        state, loss = step(state, x)
        numbers = loss, state.loss_scale, jnp.abs(grads).max()
        seen.append([*map(float, numbers), bool(state.applied)])
    bad = np.ones((16, 16), np.float32)
    bad[-1, -1] = np.nan  # on one device alone
    w, bad, after = state.params, on_mesh(bad, rows), []
    for retries in (0, 8, 30):
        state = gs.TrainState.create(w + 0, optax.adam(0.01))
        state, _ = gs.train_step(loss_fn, retries=retries)(state, bad)
        v, opt = Variable(w), LossScaleOptimizer(Adam(0.01))
        opt.minimize(lambda v=v: loss_fn(v.value(), bad), [v], retries=retries)
        kept = bool((state.params == w).all() & (v.value() == w).all())
        after.append([float(state.loss_scale), float(opt.loss_scale), kept])
    return seen, after


def recorded(mesh, folder):
    """Ten steps, the seventh of which overflows, with their records and step files in one folder:
    one whose arguments every process holds, and one whose batch is spread over all of them."""
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    step = gs.train_step(lambda w, x: jnp.mean((x.astype(jnp.float16) @ w) ** 2) * 1.0)
    w = jax.make_array_from_callback((4,), whole, np.full(4, 0.1, np.float16).__getitem__)
    state, written = gs.TrainState.create(w, optax.sgd(0.01), telemetry=True), []
    records = gs.diagnostics.JsonLines(folder / "run.jsonl")
    recorder = gs.diagnostics.StepRecorder(folder / "bad.safetensors")
    spread = gs.diagnostics.StepRecorder(folder / "spread.safetensors")
    with records, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(10):
            x = np.full((16, 4), 1e4 if n == 6 else 0.01, np.float32)
            batch = jax.make_array_from_callback(x.shape, rows, x.__getitem__)
            state, loss = step(state, batch)
            records.write(n, state.info, loss=loss)
            args = n, state.info, state.params
            written.append([recorder.write(*args, x), spread.write(*args, batch)])
    return written, [str(warning.message) for warning in told]


def mended(mesh, steps):
    """Steps of a run that mends itself, with a batch and weights in shards: its plan, and the loss
    of each step."""
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    rng = np.random.default_rng(0)

    def drawn(layout, *shape):
        value = np.float32(rng.normal(size=shape))
        return jax.make_array_from_callback(shape, layout, value.__getitem__)

    def loss_fn(params, x):
        h = (x + 2048.0) @ params["first"]
        return jnp.mean((jnp.tanh(h - 2048.0 * params["first"].sum(0)) @ params["last"]) ** 2)

    params = {"first": drawn(rows, 32, 32), "last": drawn(whole, 32, 32)}
    state = gs.TrainState.create(params, optax.adam(0.01), loss_scale=gs.DynamicLossScale(2.0**4))
    step, losses = gs.train_step(gs.autocast(loss_fn), audit_every=5, mend=True), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(steps):
            state, loss = step(state, drawn(rows, 64, 32))
            losses.append(float(loss))
    rows = [(o.key, o.dtype, o.text) for o in step.plan.entries]
    return rows, losses, [str(warning.message) for warning in told]


def saved(mesh, path):
    """A state with weights in shards, after two steps: saved to a file and loaded again. Returns
    whether it came back in this process, and the loss of the next step of both."""
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

    def drawn(layout, seed, *shape):
        value = np.float32(np.random.default_rng(seed).normal(size=shape))
        return jax.make_array_from_callback(shape, layout, value.__getitem__)

    def new_state():
        params = {"first": drawn(rows, 0, 32, 32), "last": drawn(whole, 1, 32, 32)}
        return gs.TrainState.create(params, optax.adam(0.01))

    step = gs.train_step(
        lambda p, x: jnp.mean((jnp.tanh(x @ p["first"]) @ p["last"]) ** 2), donate=False
    )
    state, x = new_state(), drawn(rows, 2, 64, 32)
    for _ in range(2):
        state, _ = step(state, x)
    gs.save(path, state)
    found = gs.load(path, new_state())
    pairs = zip(*(jax.tree.leaves(s) for s in (state, found)), strict=True)
    shards = [zip(a.addressable_shards, b.addressable_shards, strict=True) for a, b in pairs]
    same = all((a.data == b.data).all() for each in shards for a, b in each)
    is_placed = found.params["first"].sharding == rows
    return bool(same and is_placed), *(float(step(s, x)[1]) for s in (state, found))


def mesh_of(shape=(4, 2), count=None):
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def leave(path, text, process):
    """Writes a file that is there as a whole, or is not there if this process is killed."""
    written = path.with_suffix(f".{process}")
    written.write_text(text)
    written.replace(path)


def work(job):
    """Does the job, and returns what to leave."""
    mine = job["process"] == job.get("culprit")
    options = job["different"] if mine and "different" in job else {}
    jax.config.update("jax_num_cpu_devices", job["devices"])
    jax.distributed.initialize(job["coordinator"], job["processes"], job["process"])
    training = Training(mesh_of(job.get("mesh", (4, 2))), **options)
    distributed.assert_consistent(training.optimizer)
    start, scales, skipped = 0, [], []
    if "checkpoints" in job:
        checkpoints = ocp.CheckpointManager(job["checkpoints"])
        if start := checkpoints.latest_step() or 0:
            training.restore(checkpoints, start)
    for i in range(start, job["steps"]):
        if mine and i == job.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        before = int(training.optimizer.iterations)
        training.step(i, i in job.get("poisoned", ()))
        scales.append(float(training.optimizer.loss_scale))
        skipped.append(int(training.optimizer.iterations) == before)
        if "checkpoints" in job and (i + 1) % 5 == 0:
            leave(Path(job["checkpoints"], f"digest-{i + 1}"), training.digest(), job["process"])
            checkpoints.save(i + 1, args=ocp.args.StandardSave(training.state()))
            checkpoints.wait_until_finished()
    same = bool(distributed.check_replicas([training.weights, training.optimizer.variables]))
    return {
        "start": start,
        "scales": scales,
        "skipped": skipped,
        "digest": training.digest(),
        "same": same,
        "retried": retried(mesh_of((8, 1)), job["retried"]) if "retried" in job else None,
        "mended": mended(mesh_of((8, 1)), job["mended"]) if "mended" in job else None,
        "recorded": recorded(mesh_of((8, 1)), Path(job["recorded"])) if "recorded" in job else None,
        "saved": saved(mesh_of((8, 1)), job["saved"]) if "saved" in job else None,
    }


if __name__ == "__main__":
    faulthandler.dump_traceback_later(120, exit=True)
    job = json.loads(sys.argv[1])
    result = work(job)
    Path(job["result"]).write_text(json.dumps(result))

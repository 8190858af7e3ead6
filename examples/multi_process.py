"""Trains a network in float16 on the devices of several processes, all on this machine.

    pip install . orbax-checkpoint
    python examples/multi_process.py --processes 2 --devices 4 --checkpoints run

Every process holds a part of each batch, and of the optimizer's state; all take the same steps.
Kill one of them while they train: the others end too, and the same command goes on from the last
checkpoint in the folder `run`. On several machines start one process on each, with --coordinator
and --process.
"""

import argparse
import hashlib
import itertools
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs
from gainstage import distributed

WIDTHS, BATCH = [64, 256, 256, 1], 256


def train(options):
    """What every process does."""
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))

    rng = np.random.default_rng(0)  # the same on every process
    weights = []
    for i, (n, m) in enumerate(itertools.pairwise(WIDTHS)):
        value = rng.normal(size=(n, m)).astype(np.float32) / np.sqrt(n)
        weights.append(gs.optimizers.Variable(jax.device_put(value, replicated), name=f"layer{i}"))
    optimizer = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam(1e-3, shard_state_over="data"))
    optimizer.build(weights)
    if options.process == 0:
        held = sum(v.value().addressable_shards[0].data.nbytes for v in optimizer.variables)
        print(f"each device holds {held} bytes of state", flush=True)
    distributed.assert_consistent(optimizer)

    def state():
        """What a checkpoint has."""
        return {"weights": [w.value() for w in weights], "optimizer": optimizer.state()}

    checkpoints = ocp.CheckpointManager(Path(options.checkpoints or "checkpoints").absolute())
    start = checkpoints.latest_step() or 0
    if start:
        saved = checkpoints.restore(start, args=ocp.args.StandardRestore(state()))
        for weight, value in zip(weights, saved["weights"], strict=True):
            weight.assign(value)
        optimizer.load_state(saved["optimizer"])

    def loss(x, y):
        for weight in weights[:-1]:
            x = jnp.tanh(x.astype(jnp.float16) @ weight.value().astype(jnp.float16))
        return jnp.mean((x @ weights[-1].value().astype(jnp.float16) - y) ** 2)

    def step(x, y):
        return optimizer.minimize(lambda: loss(x, y), weights)

    step = gs.optimizers.jit(step, (weights, optimizer.variables), donate=True)
    for i in range(start, options.steps):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(BATCH, WIDTHS[0])).astype(np.float32)
        y = np.tanh(x[:, :1] + x[:, 1:2])
        batch = [jax.make_array_from_callback(a.shape, split, a.__getitem__) for a in (x, y)]
        value = step(*batch)
        if (i + 1) % 20 == 0:
            checkpoints.save(i + 1, args=ocp.args.StandardSave(state()))
            if options.process == 0:
                scale = float(optimizer.loss_scale)
                print(f"step {i + 1}: loss {float(value):.4f}, scale {scale:g}", flush=True)
    checkpoints.close()
    assert distributed.check_replicas(weights)
    mine = b"".join(np.asarray(w.value().addressable_data(0)).tobytes() for w in weights)
    digest = hashlib.sha256(mine).hexdigest()
    print(f"process {options.process}: the weights are {digest[:16]}", flush=True)


def main():
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--devices", type=int, default=4, help="CPU devices of each process; 0 for those it has"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--checkpoints", help="a folder; with --process by default `checkpoints`, else a new one"
    )
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    options = parser.parse_args()
    if options.process is not None:
        return train(options)
    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as folder:
        port = free.getsockname()[1]
        free.close()
        shared = [
            f"--coordinator=127.0.0.1:{port}",
            f"--checkpoints={options.checkpoints or folder}",
        ]
        words = [sys.executable, *sys.argv, *shared]
        started = [subprocess.Popen([*words, f"--process={i}"]) for i in range(options.processes)]
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):  # one has failed, so all end
                for process in started:
                    process.kill()
            time.sleep(0.1)
        sys.exit(any(process.returncode for process in started))


if __name__ == "__main__":
    main()

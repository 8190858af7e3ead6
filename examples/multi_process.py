"""Trains a network in half precision on the devices of several processes, all on this machine.

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
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs
from gainstage import distributed

WIDTHS, BATCH = [64, 256, 256, 1], 256


def loss_fn(params, x, y):
    """The mean squared error, over the batches of all processes."""
    *hidden, last = params.values()
    for w in hidden:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ last - y) ** 2)


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
    params = {}
    for i, (n, m) in enumerate(itertools.pairwise(WIDTHS)):
        value = rng.normal(size=(n, m)).astype(np.float32) / np.sqrt(n)
        params[f"layer{i}"] = jax.device_put(value, replicated)
    state = gs.TrainState.create(params, optax.adam(1e-3), shard_state_over="data")
    step = gs.train_step(gs.autocast(loss_fn, options.dtype))
    if options.process == 0:
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
        print(f"each device holds {held} bytes of state", flush=True)

    checkpoints = ocp.CheckpointManager(Path(options.checkpoints or "checkpoints").absolute())
    start = checkpoints.latest_step() or 0
    if start:
        state = checkpoints.restore(start, args=ocp.args.StandardRestore(state))
    for i in range(start, options.steps):
        rng = np.random.default_rng(i)
        x = rng.normal(size=(BATCH, WIDTHS[0])).astype(np.float32)
        y = np.tanh(x[:, :1] + x[:, 1:2])
        batch = [jax.make_array_from_callback(a.shape, split, a.__getitem__) for a in (x, y)]
        state, loss = step(state, *batch)
        if (i + 1) % 20 == 0:
            checkpoints.save(i + 1, args=ocp.args.StandardSave(state))
            checkpoints.wait_until_finished()  # the next step reuses the memory of this state
            if options.process == 0:
                scale = float(state.loss_scale)
                print(f"step {i + 1}: loss {float(loss):.4f}, scale {scale:g}", flush=True)
    checkpoints.close()
    assert distributed.check_replicas(state.params)
    mine = b"".join(np.asarray(w.addressable_data(0)).tobytes() for w in state.params.values())
    digest = hashlib.sha256(mine).hexdigest()
    print(f"process {options.process}: the weights are {digest[:16]}", flush=True)


def main():
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--devices", type=int, default=4, help="CPU devices of each process; 0 for those it has"
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
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

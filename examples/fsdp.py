"""Fully sharded data parallelism: each device holds a part of every weight, and of Adam's state.

pip install ".[demo]"
python examples/fsdp.py               # on the GPUs that there are, or on 8 virtual CPU devices
python examples/fsdp.py --devices 2

Two lines place the parameters and the batch; the loss and the step are those of one device. XLA
gathers each weight before it is used. `autocast` rounds weights where they are used, so what is
gathered may be in half precision.
"""

import argparse
import itertools

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import gainstage as gs

import digits

WIDTHS = (64, 512, 512, digits.CLASSES)


def first_params(seed):
    """Layers of `x @ w + b`, on no device yet."""
    rng = np.random.default_rng(seed)

    def layer(rows, columns):
        w = rng.normal(size=(rows, columns)) * np.sqrt(2 / rows)
        return {"w": np.float32(w), "b": np.zeros(columns, np.float32)}

    return [layer(*shape) for shape in itertools.pairwise(WIDTHS)]


def loss_fn(params, x, y):
    """The loss of one device."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return digits.cross_entropy(x @ params[-1]["w"] + params[-1]["b"], y)


def sharding(mesh, leaf):
    """The first axis that the devices divide is divided; an array without one is on all devices."""
    divided = [size % mesh.size == 0 for size in leaf.shape]
    spec = [None] * divided.index(True) + ["data"] if any(divided) else []
    return NamedSharding(mesh, Spec(*spec))


def train(dtype, seed, devices):
    """The losses, and the bytes that a device holds of parameters and optimizer state."""
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    params = jax.tree.map(lambda x: jax.device_put(x, sharding(mesh, x)), first_params(seed))
    state = gs.TrainState.create(params, optax.adam(1e-3))
    step = gs.train_step(gs.autocast(loss_fn, dtype))
    losses = []
    for x, y in digits.batches(seed, epochs=4):
        batch = jax.device_put((x[:96], y[:96]), NamedSharding(mesh, Spec("data")))
        state, loss = step(state, *batch)
        losses.append(float(loss))  # virtual devices of one CPU would wait for each other
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    return losses, held


def main(argv=None):
    """Prints a line for each precision, with the same training on one device beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="at most so many")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", options.devices)  # GPUs are as many as there are
    devices = jax.devices()[: options.devices]
    for dtype in digits.DTYPES:
        (alone, all_of_it), (losses, held) = (train(dtype, 0, d) for d in (devices[:1], devices))
        apart = np.max(np.abs(np.subtract(losses, alone)))
        print(
            f"{dtype:8}  loss {np.mean(losses[-10:]):.4f} at the end, {apart:.0e} from that of one "
            f"device; each of {len(devices)} holds {held / all_of_it:.1%}"
        )


if __name__ == "__main__":
    main()

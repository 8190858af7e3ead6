"""Builds and compiles optimizers for a topology: `python planned.py tpu4`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import gainstage as gs
from benchmarks.lowered import DEVICES, GPUS, target
from gainstage.optimizers import SGD, Adam, from_optax


def devices_of(name):
    """Four devices that are not there."""
    if name in GPUS:
        config = (DEVICES / f"{name}.txtpb").read_text()
        described = topologies.get_topology_desc(
            name, platform="cuda", target_config=config, topology="1x1x4"
        )
        return described.devices
    return list(target(name).everywhere.device_set)


def check(inner, sharding, **options):
    """Its step is compiled."""
    half = jax.ShapeDtypeStruct((1024, 512), jnp.float16, sharding=sharding)
    weight = gs.optimizers.Variable(half, name="w")
    optimizer = gs.optimizers.LossScaleOptimizer(inner, **options)
    optimizer.build([weight])

    def step(x):
        return optimizer.minimize(lambda: jnp.sum(weight.value() * x), [weight])

    gs.optimizers.jit(step, ([weight], optimizer.variables), donate=True).lower(half).compile()


def main(name):
    """Every kind of optimizer, on a mesh of either kind of axes and on one device."""
    devices = np.array(devices_of(name)).reshape(2, 2)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(devices, ("data", "model"), axis_types=(kind, kind))
        sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
        check(Adam(1e-3, shard_state_over="data", master_weights=True), sharding)
        check(SGD(1e-3, 0.9, gradient_accumulation_steps=2, global_clipnorm=1.0), sharding)
        check(from_optax(optax.adam(1e-3)), sharding)
        check(Adam(1e-3, use_ema=True), sharding, telemetry=True, underflow_every=10)
    check(Adam(1e-3), SingleDeviceSharding(devices[0, 1]))


if __name__ == "__main__":
    main(sys.argv[1])

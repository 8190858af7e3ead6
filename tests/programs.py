"""The step on meshes of many virtual devices, compiled but not run: `python programs.py 8,64 4 1`.

Prints JSON: for each number of devices, and of tensors, the collectives, the instructions and the
seconds that XLA takes, median of so many. Weights, state and gradients are planned only and take
up no memory.
"""

import json
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.optimizers import Adam

COLLECTIVE = r"= (\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
SPECS = [("data", "model"), (None, "model"), ("data",), ()]


def program(mesh, tensors, **options):
    """The lowered step of so many tensors, spread in four ways, with and without gradients clipped
    by the norm of all."""
    variables = []
    for i in range(tensors):
        layout = NamedSharding(mesh, PartitionSpec(*SPECS[i % len(SPECS)]))
        plan = jax.ShapeDtypeStruct((4096, 8192), jnp.float32, sharding=layout)
        variables.append(gs.optimizers.Variable(plan, name=f"v{i}"))
    optimizer = gs.optimizers.LossScaleOptimizer(Adam(1e-3, **options))
    optimizer.build(variables)
    step = gs.optimizers.jit(optimizer.apply, (variables, optimizer.variables), donate=True)
    return step.lower(
        [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for v in variables]
    )


def update_in_shard_map(tx, params, grads):
    """The new state of a transformation whose update each device computes for its own part."""
    state = tx.init(params)
    layouts = [leaf.sharding for leaf in jax.tree.leaves(params)]
    specs = jax.tree.map(lambda x: x.sharding.spec, (state, params))
    mapped = jax.shard_map(
        lambda state, params, grads: tx.update(grads, state, params)[1],
        mesh=layouts[0].mesh,
        in_specs=(*specs, specs[1]),
        out_specs=specs[0],
    )
    return jax.jit(mapped)(state, params, grads)


def about(devices, count, repeats):
    """What is told of the step of so many tensors on so many devices."""
    grid = np.array(jax.devices()[:devices]).reshape(-1, 4)
    mesh = jax.sharding.Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        compiled = program(mesh, count, global_clipnorm=1.0).compile()
        seconds.append(time.perf_counter() - start)
        jax.clear_caches()
    text = compiled.as_text()
    return {
        "collectives": re.findall(COLLECTIVE, text),
        "instructions": len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", text, re.MULTILINE)),
        "seconds": statistics.median(seconds),
    }


def main(devices, tensors, repeats):
    jax.config.update("jax_num_cpu_devices", max(devices))
    jax.config.update("jax_enable_compilation_cache", False)
    print(json.dumps({d: {count: about(d, count, repeats) for count in tensors} for d in devices}))


def numbers(text):
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main(numbers(sys.argv[1]), numbers(sys.argv[2]), int(sys.argv[3]))

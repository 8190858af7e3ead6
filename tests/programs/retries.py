"""Compiles train steps for an H100, with and without retries: `python retries.py`."""

import json

import jax
import optax

import gainstage as gs
from benchmarks import hlo, models
from benchmarks.lowered import target


def planned(tree):
    """Arrays of one GPU that are not there."""
    everywhere = target("h100").everywhere
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree)


def sizes(lowered):
    """The bytes that a program moves outside of its retries, and its temporaries."""
    executable = lowered.compile()
    computations, entry = hlo.parse(executable.as_text())
    # How often a step is retried is unknown; all other loops know.
    retries = [
        name
        for name, instruction in computations[entry].items()
        if instruction.op == "while" and "known_trip_count" not in instruction.line
    ]
    for name in retries:
        del computations[entry][name]
    found = hlo.counts_of(computations, entry)
    temp = executable.memory_analysis().temp_size_in_bytes
    return {"moved": found.read + found.written, "temp": temp, "retries": len(retries)}


def lowered_for_cuda(fun, *args, donated=()):
    """A function lowered for the GPU that is not there."""
    return jax.jit(fun, donate_argnums=donated).trace(*args).lower(lowering_platforms=("cuda",))


def main():
    """Prints the sizes of each program."""
    params, batch, loss_fn = models.model("transformer", "float16")
    params, batch = planned(params), planned(batch)
    state = planned(jax.eval_shape(lambda p: gs.TrainState.create(p, optax.adam(1e-3)), params))
    found = {"parameters": 4 * sum(x.size for x in jax.tree.leaves(params))}
    for name, retries in (("step", 0), ("step, retries", 8)):
        step = gs.train_step(loss_fn, retries=retries, donate=False)
        found[name] = sizes(lowered_for_cuda(step, state, batch, donated=0))
    losses = {
        "gradient": gs.transforms.locally_scaled(loss_fn, 2.0**15),
        "gradient, retries": gs.autocast(loss_fn, loss_scale=2.0**15),
    }
    for name, fun in losses.items():
        found[name] = sizes(lowered_for_cuda(jax.value_and_grad(fun), params, batch))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

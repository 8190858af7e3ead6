"""Compiles a step of `optax.MultiSteps` for an H100, alone and scaled: `python sums.py`."""

import json

import jax
import jax.numpy as jnp
import optax

import gainstage as gs
from benchmarks.lowered import target
from benchmarks.programs import program

SHAPES = [(1024, 1024)] * 8 + [(1024,)] * 8


def planned(tree, dtype=None):
    """Arrays of one GPU that are not there."""
    everywhere = target("h100").everywhere
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=everywhere), tree
    )


def moved(scaled, dtype):
    """The bytes that a step reads and writes."""
    tx = optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation()
    tx = gs.with_loss_scale(tx) if scaled else tx
    params = planned([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES])
    state = planned(jax.eval_shape(tx.init, params))

    def step(params, state, grads):
        if not scaled:
            updates, state = tx.update([g.astype(jnp.float32) for g in grads], state, params)
            return optax.apply_updates(params, updates), state
        updates, state = tx.update(
            grads, state, params, loss_scale=gs.transforms.current_scale(state)
        )
        return gs.transforms.apply_updates(params, updates, state), state

    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, planned(params, dtype))
    return program(traced.lower(lowering_platforms=("cuda",))).moved


if __name__ == "__main__":
    print(
        json.dumps({str(d): [moved(s, d) for s in (False, True)] for d in ("float32", "float16")})
    )

"""A network that several tests train."""

import jax.numpy as jnp


def normalised(nnx):
    """A model of Flax NNX: a BatchNorm, and a layer in float16."""

    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
            self.out = nnx.Linear(16, 16, dtype=jnp.float16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.out(self.norm(x)).astype(jnp.float32)

    return Net()

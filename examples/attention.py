"""A fused attention kernel, which takes half precision only, in a model that is written in float32.

pip install ".[demo]"
python examples/attention.py

A transformer reads each image of a digit as eight rows. On a GPU its attention is cuDNN's, by one
line: `gs.half_only` gives the kernel half precision, and in a float32 run takes `float32=` instead.
A CPU has no such kernel; `autocast` computes the products of XLA's attention in half precision.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs

import digits

WIDTH, HEADS, LAYERS, ROWS = 64, 4, 2, 8

attend = jax.nn.dot_product_attention
if jax.default_backend() == "gpu":
    attend = gs.half_only(functools.partial(attend, implementation="cudnn"), float32=attend)


def first_params(seed):
    """Embeddings of the rows and their places, blocks, and a last layer."""
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return jnp.float32(rng.normal(size=(rows, columns)) / np.sqrt(rows))

    def block():
        return {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }

    return {
        "rows": matrix(64 // ROWS, WIDTH),
        "places": matrix(ROWS, WIDTH),
        "blocks": [block() for _ in range(LAYERS)],
        "classes": matrix(WIDTH, digits.CLASSES),
    }


def network(params, images):
    """The scores of the classes, from the mean over the rows of an image."""
    x = images.reshape(-1, ROWS, 64 // ROWS) @ params["rows"] + params["places"]
    for block in params["blocks"]:
        heads = (normed(x) @ block["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        x = x + attend(q, k, v).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(normed(x) @ block["up"]) @ block["down"]
    return normed(x).mean(axis=1) @ params["classes"]


def normed(x):
    """Each vector with mean 0 and variance 1."""
    return jax.nn.standardize(x, epsilon=1e-6)


def loss_fn(params, x, y):
    """The mean cross-entropy."""
    return digits.cross_entropy(network(params, x), y)


def train(dtype, seed):
    """The losses, and the accuracy on the test images."""
    state = gs.TrainState.create(first_params(seed), optax.adam(1e-3))
    step = gs.train_step(gs.autocast(loss_fn, dtype))
    losses = []
    for x, y in digits.batches(seed):
        state, loss = step(state, x, y)
        losses.append(loss)
    right = digits.accuracy(network(state.params, digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

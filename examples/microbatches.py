"""A batch too large for the memory, in four parts: one update, with the gradients of the whole.

pip install ".[demo]"
python examples/microbatches.py

`microbatches=4` computes the parts one after the other. The gradients are added up in float32, and
one part that overflows skips the step once.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs

import digits

WIDTHS = (64, 512, 512, 512, digits.CLASSES)
BATCH, STEPS = 1000, 60


def first_params(seed):
    """Matrices, in float32."""
    rng = np.random.default_rng(seed)
    return [
        jnp.float32(rng.normal(size=shape) * np.sqrt(2 / shape[0]))
        for shape in itertools.pairwise(WIDTHS)
    ]


def network(params, x):
    """The scores of the classes."""
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ params[-1]


def loss_fn(params, x, y):
    """The mean cross-entropy."""
    return digits.cross_entropy(network(params, x), y)


def train(dtype, seed, microbatches):
    """The losses, the accuracy, and the bytes that the program needs beside its arguments."""
    state = gs.TrainState.create(first_params(seed), optax.adam(1e-3))
    step = gs.train_step(gs.autocast(loss_fn, dtype), microbatches=microbatches)
    rng, losses = np.random.default_rng(seed), []
    for _ in range(STEPS):
        chosen = rng.choice(digits.TRAIN, BATCH, replace=False)
        batch = digits.IMAGES[chosen], digits.LABELS[chosen]
        state, loss = step(state, *batch)
        losses.append(loss)
    memory = step.lower(state, *batch).compile().memory_analysis().temp_size_in_bytes
    right = digits.accuracy(network(state.params, digits.TEST[0]))
    return np.array(jax.device_get(losses)), right, memory


def main(seed=0):
    """Prints a line for each precision, in one part and in four."""
    for dtype in digits.DTYPES:
        whole, *_ = train(dtype, seed, 1)
        for parts in (1, 4):
            losses, right, memory = train(dtype, seed, parts)
            apart = np.max(np.abs(losses - whole) / whole)
            print(
                f"{dtype:8}  in {parts}: {right:.2%} of the test images, losses {apart:.0e} from "
                f"those in 1, {memory / 1e6:.1f} MB"
            )


if __name__ == "__main__":
    main()

"""BatchNorm and a bad batch, in Flax NNX: the statistics are kept as well as the weights.

pip install ".[demo,flax]"
python examples/digits_batch_norm.py

One batch of each training has a NaN in it. Without protection it would be in the weights, in
Adam's moments and in the running means from then on.
"""

import jax
import numpy as np
import optax
from flax import nnx

import gainstage as gs

import digits

BAD = 50  # the batch with a NaN


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, digits.HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(digits.HIDDEN, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.output = nnx.Linear(digits.HIDDEN, digits.CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.output(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def loss_fn(model, x, y):
    return digits.cross_entropy(model(x), y)


def train(dtype, seed):
    state = gs.TrainState.create(Network(nnx.Rngs(seed)), optax.adam(digits.RATE), telemetry=True)
    step = gs.train_step(gs.autocast(loss_fn, dtype))
    losses = []
    for n, (x, y) in enumerate(digits.batches(seed)):
        state, loss = step(state, np.full_like(x, np.nan) if n == BAD else x, y)
        losses.append(loss)
    model = nnx.clone(state.params)
    model.eval()  # predicts with the running means; the state itself stays as it trains
    right = digits.accuracy(model(digits.TEST[0]))
    losses = [float(loss) for loss in jax.device_get(losses) if np.isfinite(loss)]
    return losses, right, int(state.info.skipped_steps)


if __name__ == "__main__":
    digits.main(train)

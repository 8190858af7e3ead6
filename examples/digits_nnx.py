"""Flax NNX: two lines are ours.

pip install ".[demo,flax]"
python examples/digits_nnx.py
"""

import jax
import optax
from flax import nnx

import gainstage as gs

import digits


class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, digits.HIDDEN, rngs=rngs)
        self.output = nnx.Linear(digits.HIDDEN, digits.CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.output(nnx.relu(self.hidden(x)))


def loss_fn(model, x, y):
    return digits.cross_entropy(model(x), y)


def train(dtype, seed):
    model = Network(nnx.Rngs(seed))
    for name, weights in digits.first_weights(seed).items():
        layer = getattr(model, name)
        layer.kernel[...], layer.bias[...] = map(jax.numpy.asarray, (weights["w"], weights["b"]))
    tx = optax.adam(digits.RATE, eps=digits.EPSILON)
    state = gs.TrainState.create(model, tx)  # ours
    step = gs.train_step(gs.autocast(loss_fn, dtype))  # ours
    losses = []
    for x, y in digits.batches(seed):
        state, loss = step(state, x, y)
        losses.append(loss)
    right = digits.accuracy(state.params(digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

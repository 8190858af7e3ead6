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
    def __init__(self, dtype, rngs):
        self.hidden = nnx.Linear(64, digits.HIDDEN, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(digits.HIDDEN, digits.CLASSES, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.output(nnx.relu(self.hidden(x)))


def loss_fn(model, x, y):
    return digits.cross_entropy(model(x), y)


@nnx.jit
def step(model, optimizer, x, y):
    loss, grads = gs.value_and_grad(loss_fn, optimizer.opt_state)(model, x, y)  # ours
    optimizer.update(model, grads)
    return loss


def train(dtype, seed):
    model = Network(dtype, nnx.Rngs(seed))
    for name, weights in digits.first_weights(seed).items():
        layer = getattr(model, name)
        layer.kernel[...], layer.bias[...] = map(jax.numpy.asarray, (weights["w"], weights["b"]))
    tx = gs.loss_scaled(optax.adam(digits.RATE, eps=digits.EPSILON))  # ours
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [step(model, optimizer, x, y) for x, y in digits.batches(seed)]
    return [float(loss) for loss in losses], digits.accuracy(model(digits.TEST[0]))


if __name__ == "__main__":
    digits.main(train)

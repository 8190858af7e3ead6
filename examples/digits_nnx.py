"""Flax NNX: three lines are ours.

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
    tx = gs.with_loss_scale(optax.adam(digits.RATE, eps=digits.EPSILON))  # ours
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    fun = gs.autocast(loss_fn) if dtype == "float16" else loss_fn  # ours

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = gs.value_and_grad(fun, optimizer.opt_state)(model, x, y)  # ours
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, x, y) for x, y in digits.batches(seed)]
    return [float(loss) for loss in losses], digits.accuracy(model(digits.TEST[0]))


if __name__ == "__main__":
    digits.main(train)

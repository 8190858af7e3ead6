"""Flax Linen: two lines are ours.

pip install ".[demo,flax]"
python examples/digits_linen.py
"""

import optax
from flax import linen as nn

import gainstage as gs

import digits


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(digits.HIDDEN, name="hidden")(x))
        return nn.Dense(digits.CLASSES, name="output")(x)


model = Network()


def loss_fn(params, x, y):
    return digits.cross_entropy(model.apply({"params": params}, x), y)


def train(dtype, seed):
    weights = digits.first_weights(seed).items()  # as `model.init` names them
    params = {name: {"kernel": w["w"], "bias": w["b"]} for name, w in weights}
    tx = optax.adam(digits.RATE, eps=digits.EPSILON)
    state = gs.TrainState.create(params, tx)  # ours
    step = gs.train_step(gs.autocast(loss_fn, dtype))  # ours
    losses = []
    for x, y in digits.batches(seed):
        state, loss = step(state, x, y)
        losses.append(loss)
    right = digits.accuracy(model.apply({"params": state.params}, digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

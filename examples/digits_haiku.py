"""Haiku: parameters in dictionaries by the names of modules; two lines are ours.

pip install ".[demo]" dm-haiku
python examples/digits_haiku.py
"""

import haiku as hk
import jax
import optax

import gainstage as gs

import digits


def network(x):
    x = jax.nn.relu(hk.Linear(digits.HIDDEN, name="hidden")(x))
    return hk.Linear(digits.CLASSES, name="output")(x)


model = hk.without_apply_rng(hk.transform(network))


def loss_fn(params, x, y):
    return digits.cross_entropy(model.apply(params, x), y)


def train(dtype, seed):
    params = jax.tree.map(jax.numpy.asarray, digits.first_weights(seed))  # as `model.init` has them
    tx = optax.adam(digits.RATE, eps=digits.EPSILON)
    state = gs.TrainState.create(params, tx)  # ours
    step = gs.train_step(gs.autocast(loss_fn, dtype))  # ours
    losses = []
    for x, y in digits.batches(seed):
        state, loss = step(state, x, y)
        losses.append(loss)
    right = digits.accuracy(model.apply(state.params, digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

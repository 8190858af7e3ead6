"""Parameters in plain dictionaries, and optax: two lines are ours.

pip install ".[demo]"
python examples/digits_optax.py
"""

import jax
import optax

import gainstage as gs

import digits


def network(params, x):
    x = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return x @ params["output"]["w"] + params["output"]["b"]


def loss_fn(params, x, y):
    return digits.cross_entropy(network(params, x), y)


def train(dtype, seed):
    params = jax.tree.map(jax.numpy.asarray, digits.first_weights(seed))
    tx = optax.adam(digits.RATE, eps=digits.EPSILON)
    state = gs.TrainState.create(params, tx)  # ours
    step = gs.train_step(gs.autocast(loss_fn, dtype))  # ours
    losses = []
    for x, y in digits.batches(seed):
        state, loss = step(state, x, y)
        losses.append(loss)
    right = digits.accuracy(network(state.params, digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

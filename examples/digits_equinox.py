"""Equinox: two lines are ours.

pip install ".[demo]" equinox
python examples/digits_equinox.py
"""

import equinox as eqx
import jax
import optax

import gainstage as gs

import digits


class Network(eqx.Module):
    hidden: eqx.nn.Linear
    output: eqx.nn.Linear

    def __init__(self, seed):
        self.hidden, self.output = (
            eqx.tree_at(
                lambda layer: (layer.weight, layer.bias),
                eqx.nn.Linear(*w["w"].shape, key=jax.random.key(0)),
                (jax.numpy.asarray(w["w"].T), jax.numpy.asarray(w["b"])),
            )
            for w in digits.first_weights(seed).values()
        )

    def __call__(self, x):
        return self.output(jax.nn.relu(self.hidden(x)))


def loss_fn(model, x, y):
    return digits.cross_entropy(jax.vmap(model)(x), y)


def train(dtype, seed):
    tx = optax.adam(digits.RATE, eps=digits.EPSILON)
    state = gs.TrainState.create(Network(seed), tx)  # ours
    step = gs.train_step(gs.autocast(loss_fn, dtype))  # ours
    losses = []
    for x, y in digits.batches(seed):
        state, loss = step(state, x, y)
        losses.append(loss)
    right = digits.accuracy(jax.vmap(state.params)(digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

"""Flax Linen and its `TrainState`: three lines are ours.

pip install ".[demo,flax]"
python examples/digits_linen.py
"""

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import gainstage as gs

import digits


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(digits.HIDDEN, name="hidden")(x))
        return nn.Dense(digits.CLASSES, name="output")(x)


def train(dtype, seed):
    model = Network()
    weights = digits.first_weights(seed)  # as `model.init` names them
    params = {n: {"kernel": w["w"], "bias": w["b"]} for n, w in weights.items()}
    tx = gs.with_loss_scale(optax.adam(digits.RATE, eps=digits.EPSILON))  # ours
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, x, y):
        def loss_fn(params):
            return digits.cross_entropy(state.apply_fn({"params": params}, x), y)

        fun = gs.autocast(loss_fn) if dtype == "float16" else loss_fn  # ours
        loss, grads = gs.value_and_grad(fun, state.opt_state)(state.params)  # ours
        return state.apply_gradients(grads=grads), loss

    losses = []
    for x, y in digits.batches(seed):
        state, loss = step(state, x, y)
        losses.append(loss)
    right = digits.accuracy(model.apply({"params": state.params}, digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

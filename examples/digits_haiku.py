"""Haiku: parameters in dictionaries by the names of modules; four lines are ours.

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
    fun = gs.autocast(loss_fn) if dtype == "float16" else loss_fn  # ours
    tx = gs.with_loss_scale(optax.adam(digits.RATE, eps=digits.EPSILON))  # ours
    params = jax.tree.map(jax.numpy.asarray, digits.first_weights(seed))  # as `model.init` has them
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = gs.value_and_grad(fun, opt_state)(params, x, y)  # ours
        updates, opt_state = tx.update(grads, opt_state, params)
        return gs.transforms.apply_updates(params, updates, opt_state), opt_state, loss  # ours

    losses = []
    for x, y in digits.batches(seed):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(loss)
    right = digits.accuracy(model.apply(params, digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

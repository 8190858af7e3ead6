"""optax, and parameters in plain dictionaries: four lines are ours.

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
    fun = gs.autocast(loss_fn) if dtype == "float16" else loss_fn  # ours
    tx = gs.with_loss_scale(optax.adam(digits.RATE, eps=digits.EPSILON))  # ours
    params = jax.tree.map(jax.numpy.asarray, digits.first_weights(seed))
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
    right = digits.accuracy(network(params, digits.TEST[0]))
    return [float(loss) for loss in losses], right


if __name__ == "__main__":
    digits.main(train)

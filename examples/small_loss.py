"""A small loss beside a large one: in float16 its gradients vanish without a loss scale.

pip install ".[demo]"
python examples/small_loss.py

A network tells digits apart, and draws them again as an auxiliary task whose weight is 1e-4, so the
other task does not suffer. Float16 has nothing between 0 and 6e-8: the gradients of the drawing are
below that, and the decoder learns nothing, without an error or a warning. The scale keeps them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs

import digits

WEIGHT, EPOCHS = 1e-4, 30


def first_params(seed):
    """An encoder with two heads: classes, and a decoder of three layers."""
    rng = np.random.default_rng(seed)

    def layer(rows, columns):
        w = rng.normal(size=(rows, columns)) * np.sqrt(2 / rows)
        return {"w": jnp.float32(w), "b": jnp.zeros(columns)}

    decoder = [layer(digits.HIDDEN, 32), layer(32, digits.HIDDEN), layer(digits.HIDDEN, 64)]
    return {
        "encoder": layer(64, digits.HIDDEN),
        "classes": layer(digits.HIDDEN, digits.CLASSES),
        "decoder": decoder,
    }


def dense(layer, x):
    """A layer of `x @ w + b`."""
    return x @ layer["w"] + layer["b"]


def network(params, images):
    """The scores of the classes, and the images drawn again."""
    code = x = jax.nn.relu(dense(params["encoder"], images))
    for layer in params["decoder"][:-1]:
        x = jax.nn.relu(dense(layer, x))
    return dense(params["classes"], code), dense(params["decoder"][-1], x)


def loss_fn(params, images, labels):
    """The loss of the classes, and a little of that of the drawing."""
    scores, drawn = network(params, images)
    return digits.cross_entropy(scores, labels) + WEIGHT * jnp.mean((drawn - images) ** 2)


def train(dtype, seed, loss_scale="dynamic"):
    """The share of test images told apart, and the squared error of those drawn again."""
    tx = optax.adam(2e-3, eps=1e-12)
    state = gs.TrainState.create(first_params(seed), tx, loss_scale=loss_scale)
    step = gs.train_step(gs.autocast(loss_fn, dtype))
    for epoch in range(EPOCHS):
        for images, labels in digits.batches(seed * EPOCHS + epoch, epochs=1):
            state, _ = step(state, images, labels)
    images, _ = digits.TEST
    scores, drawn = network(state.params, images)
    return digits.accuracy(scores), float(jnp.mean((drawn - images) ** 2))


def main(seeds=3):
    """Prints a line for each precision, and one for float16 without a scale."""
    ways = [(dtype, dtype, "dynamic") for dtype in digits.DTYPES]
    for name, dtype, loss_scale in [*ways, ("float16, unscaled", "float16", 1.0)]:
        runs = [train(dtype, seed, loss_scale) for seed in range(seeds)]
        right, error = np.mean(runs, axis=0)
        print(f"{name:17}  {right:.2%} of the test images, squared error {error:.4f} of a drawing")


if __name__ == "__main__":
    main()

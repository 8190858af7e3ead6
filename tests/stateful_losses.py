"""Losses of models whose statistics a step changes: `(params, extra, x, y) -> (loss, extra)`."""

import jax.numpy as jnp


def squared(out, y):
    """The mean squared error."""
    return jnp.mean((out - y) ** 2)


def of_linen(model):
    """That of a module of Flax Linen, whose extra are its `batch_stats`."""

    def loss_fn(params, stats, x, y):
        given = {"params": params, "batch_stats": stats}
        out, new = model.apply(given, x, mutable=["batch_stats"])
        return squared(out, y), new["batch_stats"]

    return loss_fn


def of_haiku(model):
    """That of a function of Haiku, whose extra is its state."""

    def loss_fn(params, state, x, y):
        out, state = model.apply(params, state, None, x)
        return squared(out, y), state

    return loss_fn

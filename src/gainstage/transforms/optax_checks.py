"""What is no optimizer of optax, and what to write in its place."""

from types import FunctionType

import jax

from gainstage._base.checks import brief


def check_transformation(name: str, value: object) -> None:
    """Raises a TypeError if `value` has not the methods of an `optax.GradientTransformation`."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"Expected an optax.GradientTransformation for {name}; got {brief(value)}."
            f"{_what_to_pass(value)}"
        )


def _what_to_pass(value: object) -> str:
    """What to write, after a space, for what users pass instead."""
    if hasattr(value, "tx"):  # as an `nnx.Optimizer` has
        return " Pass its `tx`."
    if isinstance(value, FunctionType):
        return (
            " A loss is for gainstage.train_step(loss_fn); for a trainer that differentiates it, "
            "gainstage.autocast(loss_fn, loss_scale=2.0**15)."
        )
    if type(value).__module__.startswith("keras."):
        return (
            " Use an optimizer of optax; for a Keras model, gainstage.interop.keras.compile(model, "
            "optimizer, loss)."
        )
    if hasattr(value, "stateless_apply"):
        return " Use gainstage.optimizers.LossScaleOptimizer(optimizer), or an optimizer of optax."
    if isinstance(value, tuple) and jax.tree.leaves(value):
        return " A state of optax is made by TrainState.create: pass tx itself."
    return ""

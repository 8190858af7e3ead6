"""What Keras's trainer stores of a skipped step: statistics, such as moving means of a NaN.

The trainer passes its optimizer neither the model nor what the forward pass has assigned, and no
hook of Keras runs between the two in a compiled step. So one frame is read: that of Keras's own
`train_step`, while it is traced.
"""

# Keras is not typed.
# pyright: reportCallIssue=false

import sys

import jax.numpy as jnp

from gainstage._base.warn import warn
from gainstage.interop.keras_backend import keras

STATISTICS = (
    "Keras's trainer stores statistics of skipped steps, so a batch with a NaN ruins {name!r}. "
    "Write model = gainstage.interop.keras.compile(model, optimizer, loss), which keeps them, in "
    "the place of model.compile; with dtype=None for a model under a policy such as mixed_float16. "
    'To silence this warning: warnings.filterwarnings("ignore", message="Keras\'s trainer stores").'
)


def warned_of_statistics() -> bool:
    """Warns if `stateless_apply`, which calls this, is called by Keras's own step of `fit`, whose
    forward pass has changed numbers of the model; returns whether it has."""
    frame = sys._getframe(2)
    if frame.f_code is not keras.Model.train_step.__code__:
        return False
    found = frame.f_locals
    model, new = found["self"], found["non_trainable_variables"]
    if hasattr(type(model), "_plain"):  # under autocast: it keeps them
        return False
    for variable, old, value in zip(
        model.non_trainable_variables, found["state"][1], new, strict=True
    ):
        if value is not old and jnp.issubdtype(value.dtype, jnp.floating):
            warn(STATISTICS.format(name=variable.path))
            return True
    return False

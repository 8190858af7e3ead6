"""The first epoch of Keras's `fit`: whether its loss is finite in float32 alone."""

# Keras is not typed.
# pyright: reportCallIssue=false

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base.warn import warn
from gainstage._variables.types import PyTree
from gainstage.interop.keras_backend import keras

NOT_FINITE = (
    "The loss of this fit is {loss:.4g} in half precision and {exact:.4g} in float32: a number "
    "overflows before the backward pass, which no loss scale helps. Add callbacks=["
    "gainstage.interop.keras.Audit(mend=True)], which takes such lines back into float32. Or keep "
    "the layer in float32 by hand: layer.call = gainstage.keep_float32()(layer.call)."
)


class FirstEpoch(keras.callbacks.Callback):
    """Warns at the end of the first epoch if the loss of its first batch is finite in float32
    alone. A batch that has a NaN itself says nothing of half precision.

    Args:
        loss_of: `(values of the model, batch) -> loss` in float32, without a scale.
        half_loss_of: the same in half precision.
    """

    def __init__(self, loss_of: Callable[..., jax.Array], half_loss_of: Callable[..., jax.Array]):
        super().__init__()
        self._loss_of, self._half_loss_of = loss_of, half_loss_of
        self._batch: PyTree = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Keeps the first batch of the epoch."""
        model: Any = self.model
        plain = model.train_function

        def take(state: PyTree, iterator: Iterator[PyTree]) -> Any:
            data = list(itertools.islice(iterator, 1))
            if data:
                self._batch = data[0]
                model.train_function = plain
            return plain(state, itertools.chain(data, iterator))

        model.train_function = take

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares the loss of that batch, if an epoch ends with one that is not finite."""
        batch, self._batch = self._batch, None
        loss = np.asarray((logs or {}).get("loss", 0.0))
        if batch is None or np.isfinite(loss):
            return
        model: Any = self.model
        groups = model.trainable_variables, model.non_trainable_variables, model.metrics_variables
        values = [[variable.value for variable in group] for group in groups]
        x_y_weight = keras.utils.unpack_x_y_sample_weight(batch)
        given = *values, *jax.tree.map(jnp.asarray, x_y_weight)
        half, exact = (jax.jit(f)(*given) for f in (self._half_loss_of, self._loss_of))
        if np.isfinite(exact) and not np.isfinite(half):
            warn(NOT_FINITE.format(loss=float(half), exact=float(exact)))

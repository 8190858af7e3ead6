"""Loss scaling for Keras 3 models on the JAX backend: for `compile`, `fit` and your own loops.

Needs the extra `keras` and `KERAS_BACKEND=jax`; import it before `keras.saving.load_model`.
"""

from typing import Any

import jax.numpy as jnp

from gainstage._variables.types import PyTree
from gainstage.interop.keras_autocast import autocast
from gainstage.interop.keras_backend import keras
from gainstage.interop.keras_log import LogLossScale
from gainstage.interop.keras_loss_scale import LossScaleOptimizer
from gainstage.interop.keras_measured import advise, tune

__all__ = [
    "LogLossScale",
    "LossScaleOptimizer",
    "advise",
    "autocast",
    "protect_statistics",
    "tune",
]


def protect_statistics(model: Any) -> Any:
    """Makes `fit` keep all state of a model on a skipped step, not only the trained variables.

    Keras's trainer stores what the forward pass assigned, even if the optimizer skips the step. So
    one batch with a NaN or inf corrupts the moving mean and variance of a `BatchNormalization`.
    With this function they change only if the step was applied, and so do the seeds of `Dropout`.
    Metrics, the loss among them, still count every step.

    Args:
        model: a Keras model, compiled or not. Its `train_step` is replaced. Call this function
            again on a model that was loaded or cloned: both lose it.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a Keras model.

    Examples:
        >>> import keras, numpy as np
        >>> from gainstage.interop.keras import LossScaleOptimizer, protect_statistics
        >>> norm = keras.layers.BatchNormalization(momentum=0.5)
        >>> model = protect_statistics(keras.Sequential([norm, keras.layers.Dense(1)]))
        >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
        >>> x = np.ones((2, 1))
        >>> history = model.fit(x, x, verbose=0)
        >>> history = model.fit(x * np.nan, x, verbose=0)
        >>> print(norm.moving_mean.value)
        [0.5]
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a Keras model; got {model!r}.")
    train_step = model.train_step

    def step(state: PyTree, data: PyTree) -> tuple[PyTree, PyTree]:
        _, fixed, optimizer_variables, _ = state
        logs, (trainable, new, after, metrics) = train_step(state, data)
        optimizer = model.optimizer
        count = getattr(optimizer, "inner_optimizer", optimizer)._iterations
        place = next(i for i, v in enumerate(optimizer.variables) if v is count)
        applied = after[place] != optimizer_variables[place]  # only applied steps are counted
        new = [jnp.where(applied, n, o) for n, o in zip(new, fixed, strict=True)]
        return logs, (trainable, new, after, metrics)

    model.train_step = step
    model.train_function = None  # an earlier `fit` compiled the old `train_step`
    return model

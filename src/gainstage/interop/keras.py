"""Loss scaling for Keras 3 models on the JAX backend: for `compile`, `fit` and your own loops.

Needs the extra `keras` and `KERAS_BACKEND=jax`; import it before `keras.saving.load_model`.
"""

from typing import Any

from gainstage._variables.types import PyTree
from gainstage.interop.keras_autocast import autocast, kept_if_skipped, needs_scale
from gainstage.interop.keras_backend import keras
from gainstage.interop.keras_log import LogLossScale
from gainstage.interop.keras_loss_scale import LossScaleOptimizer
from gainstage.interop.keras_measured import advise, tune
from gainstage.precision.autocast import Precision, named
from gainstage.rules.loss_scale import Rule

__all__ = [
    "LogLossScale",
    "LossScaleOptimizer",
    "advise",
    "autocast",
    "compile",
    "protect_statistics",
    "tune",
]


def compile(
    model: Any,
    optimizer: Any = "rmsprop",
    loss: Any = None,
    *,
    dtype: Precision = "float16",
    rule: Rule | None = None,
    **options: Any,
) -> Any:
    """Compiles a float32 model of Keras for training in half precision, with all that it needs.

    It is `model = autocast(model, dtype)` and `model.compile(LossScaleOptimizer(optimizer), loss)`:
    products in half precision, a scaled loss, and steps that keep everything if a gradient
    overflows, moving means and seeds too. What is saved, loaded or pickled has all of it.

    Args:
        model: a Keras model, built or not.
        optimizer: an optimizer of Keras, or its name. One that scales losses is taken as it is.
        loss: as for `model.compile`.
        dtype: as for `autocast`. In bfloat16 no loss is scaled.
        rule: the rule of the loss scale, by default that of `LossScaleOptimizer`.
        **options: as for `model.compile`.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a Keras model, or a `rule` is given and the optimizer scales
            losses already.
        ValueError: a `rule` is given in bfloat16; as `autocast`.

    Examples:
        >>> import keras, numpy as np
        >>> import gainstage.interop.keras
        >>> net = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        >>> net = gainstage.interop.keras.compile(net, keras.optimizers.SGD(0.01), "mse")
        >>> x = np.ones((2, 1))
        >>> for batch in (x, x * np.nan):
        ...     history = net.fit(batch, x, verbose=0)
        >>> print(net.layers[0].moving_mean.value, float(net.optimizer.dynamic_scale.value))
        [0.01] 16384.0

    Source: `keras.Model.compile`.
    """
    plan = named(dtype)
    if rule is not None:
        if not needs_scale(plan):
            raise ValueError(
                f"Expected no rule in bfloat16, where no loss is scaled; got {rule!r}."
            )
        optimizer = LossScaleOptimizer(keras.optimizers.get(optimizer), rule=rule)
    model = autocast(model, plan)
    model.compile(optimizer, loss, **options)  # which wraps an optimizer that scales no losses
    return model


def protect_statistics(model: Any) -> Any:
    """Makes `fit` keep all state of a model on a skipped step, not only the trained variables.

    Keras's trainer stores what the forward pass assigned, even if the optimizer skips the step. So
    one batch with a NaN or inf corrupts the moving mean and variance of a `BatchNormalization`.
    With this function they change only if the step was applied, and so do the seeds of `Dropout`.
    Metrics, the loss among them, still count every step. A model under `autocast` does so by
    itself; this is for one under a policy of Keras's, such as `mixed_float16`.

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
        return kept_if_skipped(model, train_step, state, data)

    model.train_step = step
    model.train_function = None  # an earlier `fit` compiled the old `train_step`
    return model

"""Loss scaling for Keras 3 models on the JAX backend: for `compile`, `fit` and your own loops.

Needs the extra `keras` and `KERAS_BACKEND=jax`; import it before `keras.saving.load_model`.
"""

from typing import Any

from gainstage._base import checks
from gainstage._base.checks import brief
from gainstage.interop.keras_audit import Audit
from gainstage.interop.keras_autocast import autocast, check_model, under
from gainstage.interop.keras_backend import keras
from gainstage.interop.keras_log import LogLossScale
from gainstage.interop.keras_loss_scale import LossScaleOptimizer
from gainstage.interop.keras_measured import advise, find_plan
from gainstage.precision.autocast import Precision, is_no_cast, plan_for
from gainstage.rules.loss_scale import LossScaleLike, is_default

__all__ = [
    "Audit",
    "LogLossScale",
    "LossScaleOptimizer",
    "advise",
    "autocast",
    "compile",
    "find_plan",
]


def __dir__() -> list[str]:
    return __all__


@checks.explains(
    'Write compile(model, optimizer, loss, dtype="bfloat16"), all after the loss by name.'
)
def compile(
    model: Any,
    optimizer: Any = "rmsprop",
    loss: Any = None,
    *,
    dtype: Precision | None = "float16",
    loss_scale: LossScaleLike = "dynamic",
    **options: Any,
) -> Any:
    """Compiles a model of Keras for training in half precision, with all that it needs.

    It is `model = autocast(model, dtype)` and `model.compile(LossScaleOptimizer(optimizer), loss)`:
    products in half precision, a scaled loss where the dtype needs it, and steps that keep
    everything if a gradient is not finite, moving means and the seeds of `Dropout` too. Keras's own
    trainer keeps what the forward pass assigned, so one batch with a NaN ruins a
    `BatchNormalization`. What is saved, loaded or pickled has all of it.

    Args:
        model: a Keras model, built or not.
        optimizer: an optimizer of Keras, or its name. One that scales losses is taken as it is.
        loss: as for `model.compile`.
        dtype: as for `autocast`. In bfloat16 no loss is scaled; steps that are not finite are
            skipped all the same. In "float32" the model computes as it is written. None for a model
            whose layers have a policy of Keras's, such as `mixed_float16`, and compute as that
            says.
        loss_scale: as for `LossScaleOptimizer`: "dynamic", a number, a rule, or None.
        **options: as for `model.compile`.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a Keras model, or a `loss_scale` is given and the optimizer has
            one already.
        ValueError: as `autocast`.

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
    check_model(model)
    plan = None if dtype is None or is_no_cast(dtype) else plan_for(dtype)
    if hasattr(optimizer, "init") or type(optimizer).__module__.startswith("gainstage.optimizers"):
        raise TypeError(
            f"Expected an optimizer of Keras, or its name, for optimizer; got {brief(optimizer)}. "
            f"Write keras.optimizers.Adam(1e-3)."
        )
    optimizer = keras.optimizers.get(optimizer)
    if not is_default(loss_scale) or not (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor
    ):
        optimizer = LossScaleOptimizer(optimizer, loss_scale=loss_scale)
    model = autocast(model, plan) if plan else under(None, model)
    model.compile(optimizer, loss, **options)
    return model

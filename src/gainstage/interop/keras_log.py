"""The loss scale in the logs of Keras's `fit`."""

import math
import warnings
from typing import Any

from gainstage._base.checks import as_power
from gainstage.interop.keras_backend import keras
from gainstage.interop.keras_loss_scale import LossScaleOptimizer
from gainstage.rules.loss_scale import DynamicLossScale
from gainstage.runs.alarms import Alarm
from gainstage.runs.findings import SHARE
from gainstage.runs.skip_causes import SkipCause, cause_of


class LogLossScale(keras.callbacks.Callback):
    """Adds `loss_scale` and `skipped_steps` (since `fit` began) to each epoch's logs and history.

    It warns once if an epoch skips more steps than a search for the scale explains, or if more than
    a tenth of all steps were skipped in three epochs or more.

    Examples:
        >>> import keras, numpy as np
        >>> from gainstage.interop.keras import LogLossScale, LossScaleOptimizer
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01), 2.0**10), "mse")
        >>> history = model.fit(
        ...     np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[LogLossScale()])
        >>> print(history.history["loss_scale"], history.history["skipped_steps"])
        [1024.0] [0]
    """

    _warned = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the count of steps."""
        if not hasattr(self.model.optimizer, "dynamic_scale"):
            raise TypeError(
                f"Expected a model that was compiled with a LossScaleOptimizer for LogLossScale; "
                f"got {type(self.model.optimizer).__name__}. Write model.compile(gainstage.interop."
                f"keras.LossScaleOptimizer(optimizer), ...)."
            )
        self._epochs = 0  # with skipped steps
        self._steps, self._before, self._skipped = 0, self._iterations(), 0
        self._scale = self._loss_scale()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stores the index of the epoch's last step; one call may be for several steps."""
        self._last = min(batch + 1, self.params.get("steps") or batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the scale and the count of steps once per epoch."""
        self._steps += self._last
        skipped = self._steps - (self._iterations() - self._before)
        scale = self._loss_scale()
        loss = float((logs or {}).get("loss", 0.0))
        self._warn(epoch, skipped - self._skipped, scale, loss)
        self._skipped, self._scale = skipped, scale
        if logs is not None:
            logs |= {"skipped_steps": skipped, "loss_scale": scale}

    def _warn(self, epoch: int, skipped: int, scale: float, loss: float) -> None:
        searched = max(0.0, math.log2(self._scale / scale))
        bad = cause_of(loss=loss) is SkipCause.BAD_LOSS
        self._epochs += skipped > 0
        all_skipped = self._skipped + skipped
        often = self._epochs >= 3 and 8 < all_skipped > SHARE * self._steps
        many = skipped > 8 and (bad or skipped - searched > SHARE * self._last)
        if self._warned or not (many or often):
            return
        self._warned = True
        why = "The loss was not finite; no scale helps then. " if bad else ""
        which = f"{skipped} of the {self._last} steps of epoch {epoch + 1}"
        if not many:
            which = f"{all_skipped} of the {self._steps} steps so far"
        optimizer = self.model.optimizer
        moved, rule = f"from {as_power(self._scale)} to {as_power(scale)}", None
        moved = f"; the loss scale went {moved}"
        if isinstance(optimizer, LossScaleOptimizer):  # Keras's own has no rule
            moved, rule = (moved, optimizer.rule) if optimizer._is_needed else ("", None)
        message = f"{which} were skipped{moved}. {why}Look at the data and the learning rate."
        if isinstance(rule, DynamicLossScale) and rule.hysteresis == 1:
            message += (
                " loss_scale=gs.DynamicLossScale(hysteresis=2) keeps the scale through single bad "
                "steps."
            )
        warnings.warn(Alarm("skips", self._steps, message), stacklevel=2)

    def _loss_scale(self) -> float:
        """The scale in use. Keras's own wrapper has no `loss_scale`."""
        optimizer = self.model.optimizer
        is_ours = isinstance(optimizer, LossScaleOptimizer)
        return float(optimizer.loss_scale if is_ours else optimizer.dynamic_scale.value)

    def _iterations(self) -> int:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        # Keras divides `iterations` by `gradient_accumulation_steps`.
        return int(self.model.optimizer.inner_optimizer._iterations.value)

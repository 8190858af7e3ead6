"""The parts of a step, for loops and chains of optax that hold its pieces themselves.

`gainstage.with_loss_scale` and `gainstage.value_and_grad` are the first two; here is what goes with
them. A `TrainState` does all of it. It knows nothing of the optimizers.
"""

from gainstage.transforms.local_scale import locally_scaled
from gainstage.transforms.updates import apply_updates, select_if_applied, step_was_applied
from gainstage.transforms.value_and_grad import current_scale, scale_loss

__all__ = [
    "apply_updates",
    "current_scale",
    "locally_scaled",
    "scale_loss",
    "select_if_applied",
    "step_was_applied",
]


def __dir__() -> list[str]:
    return __all__

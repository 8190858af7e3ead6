"""What older APIs want of an optimizer, where Gainstage itself does something else."""

import dataclasses
from collections.abc import Callable, Mapping


def _slot_name(owner: str, variable: str, slot: str, place: int) -> str:
    return f"{owner}/{variable}_{slot}"


@dataclasses.dataclass(frozen=True)
class Conventions:
    """The conventions of an optimizer. The defaults are those of Gainstage; a class of `compat`
    sets others, which the document of its API has. That is beside each.

    Args:
        slot_name: `(owner, variable, slot, place) -> name` of a slot; `place` is the number of
            slots that the variable already has. Version 1 calls a slot "w/Momentum", and DTensor
            "SGD/m/w".
        passes_rate: whether `update_step` gets the learning rate. DTensor: "update_step(gradient,
            variable)", which reads `self.learning_rate`.
        sums_losses: whether a loss that is not a scalar is summed. Gradients of TensorFlow are
            those of the sum.
        inner_argument: the name of a wrapper's argument for its optimizer. `experimental`:
            "LossScaleOptimizer(optimizer, loss_scale)".
        unscaled: whether the gradients that a wrapper computes, or is given, are divided by the
            scale. Version 1: `compute_gradients` divides before it returns them. TensorFlow 2:
            `apply_gradients` gets what `get_unscaled_gradients` returns.
        lowest_scale: the lowest dynamic scale; None for that of `keras_rule`. TensorFlow 2 halves
            down to 1.
        counts_skipped_steps: whether `iterations` counts a step that is skipped, without a window.
            TensorFlow 2: `iterations` is the number of steps that the optimizer has run.
        averages_start_as_weights: whether the moving averages start as the first weights, and not
            with the first step, as of TensorFlow 2, where that may be a skipped one.
        scale_names: the names of the variables of a rule's public state. Version 1:
            "current_loss_scale".
    """

    slot_name: Callable[[str, str, str, int], str] = _slot_name
    passes_rate: bool = True
    sums_losses: bool = False
    inner_argument: str = "inner_optimizer"
    unscaled: bool = False
    lowest_scale: float | None = None
    counts_skipped_steps: bool = False
    averages_start_as_weights: bool = False
    scale_names: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "scale": "{owner}/dynamic_scale",
            "good_steps": "{owner}/step_counter",
        }
    )

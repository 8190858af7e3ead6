"""Flax NNX models in `gainstage.train_step`: the parameters that have gradients.

Needs the extra `flax`.
"""

from typing import Any

try:
    from flax import nnx
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        'Expected flax to be installed; run: pip install "gainstage[flax]"', name=_error.name
    ) from _error


def chosen(model: Any, grads: Any) -> Any:
    """The state of the model for which `grads` has gradients."""
    wanted = dict(nnx.to_flat_state(grads))
    pairs = [(path, value) for path, value in nnx.to_flat_state(nnx.state(model)) if path in wanted]
    return nnx.from_flat_state(pairs)


def merged(model: Any, new: Any) -> Any:
    """Updates the model with these parameters and returns it."""
    nnx.update(model, new)
    return model

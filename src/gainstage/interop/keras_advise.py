"""What each precision costs a Keras model, on some batches."""

# Keras is not typed.
# pyright: reportCallIssue=false

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._variables.types import PyTree
from gainstage.interop.keras_autocast import (
    Measured,
    loss_of,
    plain_class,
    refuse_mixed,
    seen_as,
    values_of,
)
from gainstage.interop.keras_backend import keras
from gainstage.precision.advice import Advice, measured_advice

TAKEN = 4  # batches of a dataset


def advise(
    model: Any,
    batches: Iterable[PyTree],
    *,
    card: str = "H100",
    progress: bool = True,
) -> Advice:
    """Measures what each precision costs the training of a Keras model, on some batches.

    It is `gainstage.precision.advise` of the loss with which the model was compiled, with its
    regularisation. All batches are computed with `training=True` from the present state of the
    model: dropout has one mask for all. The model stays as it is.

    Args:
        model: a float32 model that is built and compiled, also one under `autocast`.
        batches: a list of `(x, y)` or `(x, y, sample_weight)`, which is used whole. Or anything
            that yields those, such as a `keras.utils.PyDataset`, of which the first four are.
        card, progress: as for `gainstage.precision.advise`.

    Returns:
        An `Advice`; `print` it. Its lines of code are those for `fit`.

    Raises:
        TypeError: `model` is not a Keras model, or `batches` are not batches.
        ValueError: `model` is not built and compiled, has a `train_step` of its own or a policy
            such as `mixed_float16`, or as from `gainstage.precision.advise`.

    Examples:
        >>> import keras, numpy as np
        >>> from gainstage.interop.keras import advise
        >>> keras.utils.set_random_seed(0)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x = np.random.default_rng(0).normal(size=(4, 32, 8))
        >>> advice = advise(model, [(each, np.sin(each[:, :1])) for each in x])
        >>> for line in advice.recommended.code:
        ...     print(line)
        from gainstage.interop.keras import autocast
        model = autocast(model, "bfloat16")
        model.compile(optimizer, ...)
    """
    weights, others, metrics = values_of(model)
    refuse_mixed(model)
    plain = plain_class(model)
    for name in ("train_step", "compute_loss_and_updates"):
        if getattr(plain, name) is not getattr(keras.Model, name):
            raise ValueError(
                f"Expected a model that is trained by Keras's `{name}`; got {model.name!r}, whose "
                f"class {plain.__name__} has its own. Pass its loss, as a function of the weights, "
                f"to gainstage.precision.advise."
            )
    calls = [(others, metrics, *_arrays(batch)) for batch in first(batches)]
    with seen_as(model, Measured):
        return measured_advice(
            loss_of(model), weights, calls, card=card, progress=progress, code=_code
        )


def _code(dtype: str, is_scaled: bool) -> tuple[str, ...]:
    """The lines for `fit` in a precision."""
    if dtype == "float32":
        return ("model.compile(optimizer, ...)",)
    names = "LossScaleOptimizer, autocast" if is_scaled else "autocast"
    optimizer = "LossScaleOptimizer(optimizer)" if is_scaled else "optimizer"
    # Else `compile` wraps the optimizer by itself.
    alone = ", auto_scale_loss=False" if dtype == "float16" and not is_scaled else ""
    return (
        f"from gainstage.interop.keras import {names}",
        f'model = autocast(model, "{dtype}")',
        f"model.compile({optimizer}, ...{alone})",
    )


def first(batches: Any, count: int | None = None) -> list[PyTree]:
    """The first batches: by default all of a list, and `TAKEN` of a dataset."""
    is_dataset = isinstance(batches, keras.utils.PyDataset)  # it may have no end
    is_one = isinstance(batches, (str, tuple, Mapping)) or hasattr(batches, "shape")
    if is_one or not (is_dataset or isinstance(batches, Iterable)):
        raise TypeError(
            f"Expected a list of batches, such as [(x1, y1), (x2, y2)], or a dataset; got "
            f"{checks.brief(batches)}."
        )
    if isinstance(batches, Sequence):
        return list(batches[:count])
    count = count or TAKEN
    if is_dataset:
        dataset: Any = batches
        return [dataset[number] for number in range(min(dataset.num_batches or count, count))]
    return list(itertools.islice(batches, count))


def _arrays(batch: PyTree) -> PyTree:
    """A batch as Keras takes it, `(x, y, sample_weight)`, in arrays of JAX."""
    x_y_weight = keras.utils.unpack_x_y_sample_weight(batch)
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), x_y_weight
    )

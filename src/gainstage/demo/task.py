"""What a task of the demo is made of."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

# By default XLA may keep float16 results in float32 between operations, and so hide the very
# rounding that the demo is about.
jit: functools.partial[Any] = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False}
)

Array = Any  # of JAX or numpy
Weights = list[jax.Array]


class Evaluation(NamedTuple):
    """How good some images are, and a few of them side by side."""

    measures: dict[str, float]
    image: np.ndarray


class Task(NamedTuple):
    """A network to train, and the words for it; trainer, console and picture work with any task.

    The process plays one of several data-parallel ranks: its loss is divided by their number, for
    the mean is over the batch of all of them.
    """

    title: str
    steps: int  # of a training, by default
    growth_steps: int  # finite steps before the loss scale is doubled
    optimizer: Callable[[int], optax.GradientTransformation]  # for so many steps
    weights: Callable[[int], list[np.ndarray]]  # by seed
    batches: Callable[[int], Iterator[Any]]  # by seed, without end
    network: Callable[[Any, Any], Any]  # of (weights, images), in float32
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]]  # of (weights, batch), in float32:
    # what is minimized, and the squared error in it
    weight: float  # of the squared error in the loss
    elements: int  # that the mean of this process's squared error is over
    ranks: int  # in the comparison of dtypes
    other_ranks: tuple[int, ...]  # with which float16 without scaling is trained as well
    test_images: Array  # not trained on
    evaluate: Callable[[Any], Evaluation]  # of what the network makes of the test images
    references: dict[str, Evaluation]  # images that no network has made
    rows: dict[str, tuple[str, str]]  # of the table: the title and the format of each measure
    error: str  # the measure in which modes are compared
    score: str  # the measure under each image
    suffers: str
    spared: Callable[[dict[str, dict[str, float]]], str]  # of the measures by mode
    remark: str

"""The states of float8 casts, and where they and their counts are among parameters and gradients.

The casts themselves are in `precision/float8.py`.
"""

from typing import NamedTuple

import jax

from gainstage._base.arrays import partition
from gainstage._variables.types import PyTree


class Seen(NamedTuple):
    """The counts of a cast; add them to those of other microbatches and devices."""

    sizes: jax.Array  # float32[253]: tensors whose best factor is 2**-126, ..., 2**126
    clamped: jax.Array  # float32: finite elements beyond the range of the dtype
    nonfinite: jax.Array  # float32: elements that are inf or NaN


class Scaling(NamedTuple):
    """The delayed scaling of one tensor, all in float32, because `jax.grad` takes nothing else.

    `dot` returns its counts as the gradient of `seen`; the gradients of the others are 0.
    """

    factor: jax.Array  # the power of two that multiplies the tensor before the cast
    history: jax.Array  # [253]: for each power of two, the steps since it was last the best factor
    clamped: jax.Array  # clamped elements in the last step
    clamped_steps: jax.Array  # steps with clamped elements
    stale: jax.Array  # steps since a tensor last had a usable maximum
    seen: Seen  # zeros


class DotScaling(NamedTuple):
    """The scalings of `dot`: of its two operands, and of the cotangent of its result."""

    x: Scaling
    w: Scaling
    cotangent: Scaling


def place_of_state(tree: PyTree) -> str | None:
    """Where the first float8 state in a pytree is, such as `['hidden'].x`; None without one."""

    def is_leaf(node: PyTree) -> bool:
        return isinstance(node, Scaling | DotScaling)

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return next((jax.tree_util.keystr(path) for path, leaf in leaves if is_leaf(leaf)), None)


def places_of_counts(tree: PyTree) -> set[int]:
    """Which arrays of a pytree are counts of float8 casts, as indices in its `partition`."""
    places: set[int] = set()
    count = 0
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Seen)):
        arrays = partition(node)[0]
        if isinstance(node, Seen):
            places.update(range(count, count + len(arrays)))
        count += len(arrays)
    return places

"""Sums in a program that is measured, and what is computed with them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from gainstage._base._jax import JaxprEqn
from gainstage._programs.jaxprs import Path
from gainstage._programs.operations import PRODUCTS, Trait, names_with
from gainstage.transforms.retrace import Retraced

# Sums stay in float32 in a plan: their error and their size grow with the batch.
SUMS = names_with(Trait.SUM)


class SumFinder:
    """Finds sums, and what is computed with a sum before it is divided or broadcast.

    They grow with the batch, and may overflow on a larger one; and they are small.
    """

    def __init__(self) -> None:
        self.paths: set[Path] = set()
        self._known: dict[int, Any] = {}  # the sums, which stay alive, by `id`

    def follow(
        self, eqn: JaxprEqn, values: Sequence[Retraced], results: Sequence[Retraced], path: Path
    ) -> None:
        """Notes an operation, if it is a sum or computes with one."""
        name = eqn.primitive.name
        known = [jnp.size(value.x) for value in values if id(value.x) in self._known]
        largest = max(jnp.size(result.x) for result in results) if results else 0
        of_sum = bool(known) and name not in PRODUCTS and largest <= max(known)
        if name in SUMS or of_sum or largest == 1:
            self.paths.add(path)
        if name in SUMS or (of_sum and name != "div"):
            self._known |= {id(result.x): result.x for result in results}

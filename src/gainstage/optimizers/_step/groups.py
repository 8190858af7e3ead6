"""Groups of small variables that are updated together, with one buffer per kind of slot."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._scaling.gradients import Gradients, float32_or_wider
from gainstage._scaling.packing import SMALL, join, offsets, part
from gainstage._variables.bridge import bound, read
from gainstage._variables.variable import Variable

MOST = 32  # variables in a group: XLA compiles equal parts of equal groups only once


class Group:
    """Variables whose slots of one kind share one flat buffer, in the variables' order."""

    def __init__(self, name: str, members: Sequence[Variable]):
        self.name, self.members = name, list(members)
        self.shapes = [variable.shape for variable in members]
        self.slots: list[Variable] = []
        self.started: set[tuple[Variable, str, int]] = set()  # the parts that were initialized

    @property
    def table(self) -> list[list[Any]]:
        """The name, shape and first element of each variable's part of a buffer."""
        rows = zip(self.members, self.shapes, offsets(self.shapes), strict=True)
        return [[variable.name, list(shape), start] for variable, shape, start in rows]

    def update(self, grads: Gradients, update_step: Callable[[Any, Variable], Any]) -> None:
        """Calls `update_step` once, with all values bound to the first variable."""
        if all(gradient is None for gradient in grads):
            return
        first, slots = self.members[0], self.slots
        values = [variable.value() for variable in self.members]
        gradient = joined(grads, values)
        old = [join(values), *read(slots)]
        with bound([first], old[:1]):
            update_step(gradient, first)
            new = [first.value(), *read(slots)]
        missing = [g is None for g in grads]
        if any(missing):
            absent = np.repeat(missing, [variable.size for variable in self.members])
            new = [jnp.where(absent, o, n) for o, n in zip(old, new, strict=True)]
        for slot, value in zip(slots, new[1:], strict=True):
            slot.assign(value)
        for variable, value in zip(self.members, part(new[0], self.shapes), strict=True):
            variable.assign(value)


def joined(grads: Gradients, like: Sequence[jax.Array]) -> jax.Array:
    """Gradients as one flat array; operations that all share run after joining."""
    kinds = {g and (g.array.dtype, *map(id, g.factors)) for g in grads}
    first = grads[0]
    if first is not None and len(kinds) == 1:
        return first._replace(array=join(g.array for g in grads if g is not None)).value()
    pairs = zip(grads, like, strict=True)
    values = [jnp.zeros_like(x) if g is None else g.value() for g, x in pairs]
    return join(value.astype(jnp.result_type(*values)) for value in values)


def groups_of(variables: Sequence[Variable]) -> list[Group]:
    """Groups small variables on one device, at least two each, with slots of one dtype."""
    small: dict[Any, list[Variable]] = {}
    for variable in variables:
        if variable.size <= SMALL and variable._sharding is None:
            small.setdefault(float32_or_wider(variable.dtype), []).append(variable)
    parts = [alike[i : i + MOST] for alike in small.values() for i in range(0, len(alike), MOST)]
    several = [members for members in parts if len(members) > 1]
    return [Group(f"group_{i}", members) for i, members in enumerate(several)]

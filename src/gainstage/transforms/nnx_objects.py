"""Objects of Flax NNX in pytrees: what a call changes of them, and variables that they share."""

# JAX copies objects that are leaves or nodes of a pytree, so a change to a copy is lost, and a
# variable that two objects share becomes two. NNX is not imported here: whoever has an object of it
# has imported it.

import dataclasses
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax

from gainstage._base.arrays import ARRAYS, Static, partition
from gainstage._variables.types import PyTree, Tree

At: TypeAlias = tuple[Any, ...]  # a path in the state of NNX objects
Before: TypeAlias = dict[At, list[Any]]


@dataclasses.dataclass(frozen=True)
class Graph:
    """An NNX model with shared variables without its arrays, in the place of a `Static`."""

    definition: Any
    structure: Any

    @property
    def others(self) -> list[Any]:
        """The leaves that are not arrays."""
        return []

    def combine(self, arrays: Iterable[Any]) -> Any:
        """The model with these arrays."""
        return self.built(jax.tree.unflatten(self.structure, self.placed(arrays)))

    def placed(self, arrays: Iterable[Any]) -> list[Any]:
        """The leaves of the state of the model, with these arrays in their places."""
        return list(arrays)

    def built(self, tree: Any) -> Any:
        """The model of a state."""
        return _nnx().merge(self.definition, tree)


def partition_model(
    model: PyTree, kinds: tuple[type, ...] = ARRAYS
) -> tuple[list[Any], Static | Graph]:
    """Splits a model into its arrays, the leaves of these kinds, and the rest. Each variable that
    parts of an NNX model share is there once, and is shared again when it is combined."""
    arrays, static = partition(model, kinds)
    if is_node(model) and len(set(map(id, arrays))) < len(arrays):
        definition, state = _nnx().split(model)
        leaves, structure = jax.tree.flatten(state)
        if len(leaves) < len(arrays):
            return leaves, Graph(definition, structure)
    return arrays, static


def sharing_as(original: PyTree, copy: Tree) -> Tree:
    """A copy of a pytree, whose NNX objects share variables as those of the original do."""
    nodes = nodes_in(original)
    if not nodes:
        return copy
    own = [at for at, _ in _flat(nodes)]
    copies = dict(_flat(nodes_in(copy)))
    if len(own) == len(copies):
        return copy
    state = _nnx().from_flat_state([(at, copies[at]) for at in own])
    merged = iter(_nnx().merge(_nnx().split(nodes)[0], state))
    return jax.tree.map(lambda x: next(merged) if is_node(x) else x, copy, is_leaf=is_node)


def values_in(tree: PyTree) -> Before:
    """The values of all NNX objects in a pytree, before a call that may change them."""
    return {at: jax.tree.leaves(value) for at, value in _flat(nodes_in(tree))}


def changes(tree: PyTree, before: Before) -> PyTree:
    """What a call has changed of the NNX objects in a pytree, as a pytree of arrays."""
    flat = _flat(nodes_in(tree))
    new = [(at, x) for at, x in flat if not _same(jax.tree.leaves(x), before.get(at))]
    return _nnx().from_flat_state(new) if new else {}


def values_of(changed: PyTree, before: Before) -> PyTree:
    """The earlier values of what was changed, in its structure."""
    flat = _nnx().to_flat_state(changed) if changed else []
    if any(at not in before for at, _ in flat):
        raise ValueError(
            "Expected a loss_fn that changes the values of NNX objects in the batch; got one that "
            "creates variables there. Create them before the first step."
        )
    old = [(at, jax.tree.unflatten(jax.tree.structure(new), before[at])) for at, new in flat]
    return _nnx().from_flat_state(old) if old else {}


def change(tree: PyTree, changed: PyTree) -> None:
    """Makes changes, which a call has made to a copy of a pytree, to the pytree itself."""
    if changed:
        _nnx().update(nodes_in(tree), changed)


def explain(error: Exception) -> None:
    """Raises a clearer error if a function changed an object that it closes over."""
    if type(error).__name__ == "TraceContextError":  # of Flax
        raise ValueError(
            "Expected a function that changes NNX objects in its arguments only, such as the "
            "counts of nnx.Rngs or the means of a BatchNorm; got one that changes an object that "
            "it closes over. Pass that object as an argument. If `nnx.merge` made it, write "
            "nnx.merge(..., copy=True)."
        ) from error


def nodes_in(tree: PyTree) -> list[Any]:
    """The objects of NNX in a pytree: models, `nnx.Rngs`, single variables and others."""
    if _nnx() is None:
        return []
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_node) if is_node(leaf)]


def is_node(x: object) -> bool:
    """Whether a value is an object of NNX."""
    nnx = _nnx()
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))


def _flat(nodes: Sequence[Any]) -> list[tuple[At, Any]]:
    return list(_nnx().to_flat_state(_nnx().state(nodes))) if nodes else []


def _same(some: Sequence[Any], others: Sequence[Any] | None) -> bool:
    return others is not None and len(some) == len(others) and all(map(operator.is_, some, others))


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")

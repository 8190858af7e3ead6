"""Models: pytrees of arrays, and those of Flax NNX and Equinox, of which a call may change parts.

Neither library is imported here: whoever has a model has imported it.
"""

import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import treedef_tuple

from gainstage._base.arrays import ARRAYS, Static, partition, separated
from gainstage._variables.types import PyTree, Tree

Model = TypeVar("Model")
At: TypeAlias = tuple[Any, ...]  # a path in the state of NNX objects


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _equinox() -> Any:
    return sys.modules.get("equinox")


# ── the kinds of models ──────────────────────────────────────────────────────────────────────────


class Arrays:
    """A pytree of arrays; of the models of libraries, what differs from it."""

    is_model = False  # of a library, which says what of it is trained

    def trainable(self, model: PyTree) -> PyTree:
        """What is trained, as a pytree of arrays."""
        _refuse_models_in(model)
        return model

    def chosen(self, model: PyTree, grads: PyTree) -> PyTree:
        """The parameters that have gradients, in the structure of `grads`."""
        pick = lambda g, p: None if g is None else p  # noqa: E731
        return jax.tree.map(pick, grads, model, is_leaf=lambda x: x is None)

    def mapped(self, new_value: Callable[..., Any], model: Model, updates: PyTree) -> Model:
        """The model with `new_value(parameter, its update)` in the place of each parameter."""
        new: Any = jax.tree.map(new_value, model, updates, is_leaf=lambda x: x is None)
        return new

    def value_and_grad(self, fun: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
        """`jax.value_and_grad` with respect to what is trained."""
        return jax.value_and_grad(fun, **options)


class Equinox(Arrays):
    """A model of Equinox."""

    is_model = True

    def trainable(self, model: PyTree) -> PyTree:
        """Its floating arrays, with None for all else."""
        return _equinox().filter(model, _equinox().is_inexact_array)

    def value_and_grad(self, fun: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
        """`equinox.filter_value_and_grad`, which has no argnums."""
        argnums = options.pop("argnums", 0)

        def filtered(fun: Callable[..., Any]) -> Callable[..., Any]:
            return _changing_objects(_equinox().filter_value_and_grad, fun, options)

        if argnums == 0:
            return filtered(fun)
        numbers = argnums if isinstance(argnums, Sequence) else (argnums,)

        def differentiate(*args: PyTree, **kwargs: Any) -> tuple[Any, PyTree]:
            def of(chosen: Sequence[Any]) -> Any:
                whole = list(args)
                for n, arg in zip(numbers, chosen, strict=True):
                    whole[n] = arg
                return fun(*whole, **kwargs)

            value, grads = filtered(of)(tuple(args[n] for n in numbers))
            return value, (grads if isinstance(argnums, Sequence) else grads[0])

        return differentiate


class Nnx(Arrays):
    """A model of Flax NNX, or any other object of it."""

    is_model = True

    def trainable(self, model: PyTree) -> PyTree:
        """The state of its `nnx.Param`s."""
        return _nnx().state(model, _nnx().Param)

    def chosen(self, model: PyTree, grads: PyTree) -> PyTree:
        """The state of the parameters that have gradients."""
        if not isinstance(grads, _nnx().State):
            return super().chosen(model, grads)
        wanted = dict(_nnx().to_flat_state(grads))
        pairs = [(at, x) for at, x in _nnx().to_flat_state(_nnx().state(model)) if at in wanted]
        return _nnx().from_flat_state(pairs)

    def mapped(self, new_value: Callable[..., Any], model: Model, updates: PyTree) -> Model:
        """The model itself, whose parameters have changed."""
        if not isinstance(updates, _nnx().State):
            return super().mapped(new_value, model, updates)
        _nnx().update(model, jax.tree.map(new_value, self.chosen(model, updates), updates))
        return model

    def value_and_grad(self, fun: Callable[..., Any], /, **options: Any) -> Callable[..., Any]:
        """`flax.nnx.value_and_grad`."""
        return _nnx().value_and_grad(fun, **options)


_ARRAYS, _EQUINOX, _NNX = Arrays(), Equinox(), Nnx()


def kind_of(*models: Any, beside: PyTree = ()) -> Arrays:
    """What the models among these values are. Any object of NNX beside them counts too, such as
    `nnx.Rngs`, if they are of no other library."""
    for library, kind in (("flax.nnx", _NNX), ("equinox", _EQUINOX)):
        module = getattr(sys.modules.get(library), "Module", ())
        if any(isinstance(model, module) for model in models):
            return kind
    objects = getattr(_nnx(), "Pytree", ())
    nodes = jax.tree.leaves(beside, is_leaf=lambda x: isinstance(x, objects)) if objects else []
    return _NNX if any(isinstance(node, objects) for node in nodes) else _ARRAYS


def _refuse_models_in(params: PyTree) -> None:
    """Raises an error for NNX models in a tuple or dictionary, of which JAX trains copies."""
    module = getattr(_nnx(), "Module", ())
    if not any(isinstance(x, module) for x in nodes_in(params)):
        return
    kind, several = type(params).__name__, "Dict" if isinstance(params, dict) else "List"
    raise TypeError(
        f"Expected one model; got a {kind} of NNX models, whose running means would not change. "
        f"Make it a model: nnx.{several}(params)."
    )


def has_statistics(tree: PyTree) -> bool:
    """Whether there is a `State` of Equinox in a pytree."""
    equinox = _equinox()
    if equinox is None:
        return False
    is_state = lambda x: isinstance(x, equinox.nn.State)  # noqa: E731
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def advice_for(params: PyTree) -> str:
    """What to pass instead of parameters with leaves that are no arrays."""
    equinox = _equinox()
    if equinox is not None and isinstance(params, tuple | list | dict):
        kinds = equinox.Module, equinox.nn.State
        parts = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
        if any(isinstance(part, equinox.nn.State) for part in parts):
            return "Pass the State of Equinox apart: TrainState.create(model, tx, extra=state)."
        if any(isinstance(part, equinox.Module) for part in parts):
            return (
                "Make the models one: an equinox.Module with a field for each. In a chain of your "
                "own, pass equinox.filter(params, equinox.is_inexact_array) to tx.init."
            )
    return "Pass the parameters alone, such as equinox.filter(params, equinox.is_inexact_array)."


# ── a state without its arrays ───────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Graph(Static):
    """An NNX model with shared variables without its arrays: the state of the model, and this."""

    definition: Any = None

    def combine(self, arrays: Iterable[Any]) -> Any:
        """The model with these arrays."""
        return self.built(super().combine(arrays))

    def built(self, tree: Any) -> Any:
        """The model of a state."""
        return _nnx().merge(self.definition, tree)


class Pieces(NamedTuple):
    """Of a state: the model, what else a loss changes, and the rest."""

    params: Any
    extra: Any
    rest: Any


@dataclasses.dataclass(frozen=True)
class Partition:
    """The parts of a state without their arrays, which are one list."""

    params: Static
    extra: Static
    rest: Static

    @property
    def parts(self) -> Pieces:
        """The three of them."""
        return Pieces(self.params, self.extra, self.rest)

    @property
    def count(self) -> int:
        """How many arrays there are."""
        return sum(part.count for part in self.parts)

    @functools.cached_property
    def structure(self) -> Any:
        """The structure of the three, where each model is the state that `leaves` fills."""
        return treedef_tuple([part.structure for part in self.parts])

    @functools.cached_property
    def _is_filled(self) -> bool:
        return bool(self.params.others)

    def leaves(self, arrays: list[Any]) -> list[Any]:
        """The leaves of `structure`, with these arrays and all that is no array."""
        if not self._is_filled:
            return arrays
        return [*self.params.placed(arrays[: self.params.count]), *arrays[self.params.count :]]

    def lists(self, arrays: Iterable[Any]) -> Pieces:
        """The arrays of each part, or what there is for each array."""
        each = iter(arrays)
        return Pieces(*(list(itertools.islice(each, part.count)) for part in self.parts))

    def combine(self, arrays: Iterable[Any]) -> Pieces:
        """The parts with these arrays: new objects at each call."""
        lists = self.lists(arrays)
        return Pieces(*(p.combine(xs) for p, xs in zip(self.parts, lists, strict=True)))


def split(
    params: PyTree, extra: PyTree, rest: PyTree = None, kinds: tuple[type, ...] = ARRAYS
) -> tuple[list[Any], Partition]:
    """Splits a state into its arrays, the leaves of these kinds and all of the rest, and what else
    there is."""
    arrays, model = _split_model(params, kinds)
    more, static = partition(extra, kinds)
    leaves, structure = jax.tree.flatten(rest)
    return [*arrays, *more, *leaves], Partition(model, static, Static.of_arrays(structure))


def _split_model(model: PyTree, kinds: tuple[type, ...] = ARRAYS) -> tuple[list[Any], Static]:
    """Splits a model into its arrays and the rest. Each variable that parts of an NNX model share
    is there once, and is shared again when it is combined."""
    arrays, static = partition(model, kinds)
    if is_node(model) and len(set(map(id, arrays))) < len(arrays):
        definition, state = _nnx().split(model)
        leaves, structure = jax.tree.flatten(state)
        if len(leaves) < len(arrays):
            return leaves, dataclasses.replace(Graph.of_arrays(structure), definition=definition)
    return arrays, static


# ── models among the arguments ───────────────────────────────────────────────────────────────────


def is_model(x: object) -> bool:
    """Whether a value is a model of a library, or another object of Flax NNX."""
    return is_node(x) or isinstance(x, getattr(_equinox(), "Module", ()))


def outside_models(batch: PyTree) -> list[tuple[Any, Any]]:
    """The leaves of a batch that belong to no model, with their paths."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(batch, is_leaf=is_model)
    return [(path, leaf) for path, leaf in pairs if not is_model(leaf)]


def map_outside_models(fun: Callable[[Any], Any], batch: PyTree) -> PyTree:
    """The batch with `fun(leaf)` in the place of each leaf that belongs to no model."""
    return jax.tree.map(lambda x: x if is_model(x) else fun(x), batch, is_leaf=is_model)


def traced_of(
    batch: tuple[PyTree, ...], kinds: tuple[type, ...] = ARRAYS
) -> tuple[Sequence[Any], Static | None]:
    """What a compiled function takes of a batch, and what it is compiled for: all that is no array
    in its Equinox models, such as their functions; None if there is nothing."""
    module = getattr(_equinox(), "Module", ())
    if not module or all(isinstance(leaf, kinds) for leaf in jax.tree.leaves(batch)):
        return batch, None
    nodes = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, module))
    if not any(isinstance(node, module) for node in nodes):
        return batch, None
    traced = [
        isinstance(leaf, kinds) or not isinstance(node, module)
        for node in nodes
        for leaf in jax.tree.leaves(node)
    ]
    arrays, static = separated(batch, traced)
    return [arrays], static


# ── what a call changes ──────────────────────────────────────────────────────────────────────────


class Changeable:
    """A pytree for a call that may change objects of NNX in it: a copy, if there are any.

    JAX copies objects that are leaves or nodes of a pytree, so a change to a copy is lost, and a
    variable that two objects share becomes two: here it is shared again.

    Args:
        original: the pytree.
        copy: a copy that was made already.
    """

    def __init__(self, original: PyTree, copy: PyTree = None) -> None:
        nodes = nodes_in(original)
        self.has_objects: bool = bool(nodes)
        if copy is None:
            copy = jax.tree.map(lambda x: x, original) if nodes else original
        self.tree: Any = _sharing_as(nodes, copy)
        self._before: dict[At, list[Any]] = {
            at: jax.tree.leaves(x) for at, x in _flat_state(nodes_in(self.tree))
        }

    def changes(self) -> PyTree:
        """What a call has changed of the objects, as a pytree of arrays; {} if nothing."""
        new = [
            (at, x)
            for at, x in _flat_state(nodes_in(self.tree))
            if not _same(jax.tree.leaves(x), self._before.get(at))
        ]
        return _nnx().from_flat_state(new) if new else {}

    def before(self, changes: PyTree) -> PyTree:
        """The earlier values of what was changed, in its structure."""
        flat = _nnx().to_flat_state(changes) if changes else []
        if any(at not in self._before for at, _ in flat):
            raise ValueError(
                "Expected a loss_fn that changes the values of NNX objects in the batch; got one "
                "that creates variables there. Create them before the first step."
            )
        old = [(at, jax.tree.unflatten(jax.tree.structure(x), self._before[at])) for at, x in flat]
        return _nnx().from_flat_state(old) if old else {}


def _changing_objects(
    using: Callable[..., Any], fun: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """What differentiates a function, `using(fun, **options)`, though it knows no objects of NNX,
    which only a function that was given them in its own trace may change."""

    def differentiate(*args: PyTree, **kwargs: Any) -> tuple[Any, PyTree]:
        if not nodes_in((args, kwargs)):
            return using(fun, **options)(*args, **kwargs)

        def of_copies(*args: PyTree, **kwargs: Any) -> tuple[Any, Any]:
            objects = Changeable((args, kwargs))
            args, kwargs = objects.tree
            found = fun(*args, **kwargs)
            loss, aux = found if options.get("has_aux") else (found, None)
            return loss, (aux, objects.changes())

        of_all = using(of_copies, **{**options, "has_aux": True})
        (loss, (aux, changes)), grads = of_all(*args, **kwargs)
        apply_changes((args, kwargs), changes)
        return ((loss, aux) if options.get("has_aux") else loss), grads

    return differentiate


def apply_changes(tree: PyTree, changes: PyTree) -> None:
    """Makes changes, which a call has made to a copy of a pytree, to the pytree itself."""
    if changes:
        _nnx().update(nodes_in(tree), changes)


def only_integers(changes: PyTree) -> PyTree:
    """The changes of counts and keys, which no gradient that is not finite can spoil."""
    pairs = [
        (at, x)
        for at, x in (_nnx().to_flat_state(changes) if changes else [])
        if not any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(x))
    ]
    return _nnx().from_flat_state(pairs) if pairs else {}


def explain(error: Exception) -> None:
    """Raises a clearer error if a function changed an object that it closes over, or notes what a
    model without its functions is."""
    if type(error).__name__ == "TraceContextError":  # of Flax
        raise ValueError(
            "Expected a function that changes NNX objects in its arguments only, such as the "
            "counts of nnx.Rngs or the means of a BatchNorm; got one that changes an object that "
            "it closes over. Pass that object as an argument. If `nnx.merge` made it, write "
            "nnx.merge(..., copy=True)."
        ) from error
    if isinstance(error, TypeError) and str(error) == "'NoneType' object is not callable":
        error.add_note(
            "If equinox.filter has made this model, its functions are None. Pass the model itself "
            "to gainstage.TrainState.create(model, tx): its floating arrays are what is trained."
        )


def nodes_in(tree: PyTree) -> list[Any]:
    """The objects of NNX in a pytree: models, `nnx.Rngs`, single variables and others."""
    if _nnx() is None:
        return []
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_node) if is_node(leaf)]


def is_node(x: object) -> bool:
    """Whether a value is an object of NNX."""
    nnx = _nnx()
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))


def _sharing_as(nodes: Sequence[Any], copy: Tree) -> Tree:
    """A copy of a pytree, whose NNX objects share variables as these nodes of the original do."""
    if not nodes:
        return copy
    places = [at for at, _ in _flat_state(nodes)]
    copies = dict(_flat_state(nodes_in(copy)))
    if len(places) == len(copies):
        return copy
    state = _nnx().from_flat_state([(at, copies[at]) for at in places])
    merged = iter(_nnx().merge(_nnx().split(nodes)[0], state))
    return jax.tree.map(lambda x: next(merged) if is_node(x) else x, copy, is_leaf=is_node)


def _flat_state(nodes: Sequence[Any]) -> list[tuple[At, Any]]:
    return list(_nnx().to_flat_state(_nnx().state(nodes))) if nodes else []


def _same(some: Sequence[Any], others: Sequence[Any] | None) -> bool:
    return others is not None and len(some) == len(others) and all(map(operator.is_, some, others))

"""The state of an optimizer for other parameters, with all that still belongs to one of them."""

from typing import Any

import jax

from gainstage._variables.types import OptState, PyTree
from gainstage.transforms.loss_scale_state import LossScaleState
from gainstage.transforms.models import kind_of

Route = tuple[Any, ...]  # the keys of a leaf in a pytree


def with_kept_moments(
    old: OptState, old_params: PyTree, new: OptState, new_params: PyTree
) -> OptState:
    """A new state of an optimizer, in which each array is that of an old state, if it has the same
    place and shape there: the loss scale, counts and numbers of the telemetry, and the moments of a
    parameter of the same name. A parameter that is the same array has the same name.

    Args:
        old, old_params: the state and what it was for.
        new, new_params: the state after `init` for other parameters, perhaps of another chain.
    """
    names, new_names = _trained_by_path(old_params), _trained_by_path(new_params)
    same = {id(x): path for path, x in names.items()}
    moved = {same[id(x)] for x in new_names.values() if id(x) in same}
    before: dict[Route | None, Route | None] = {None: None}
    for path, x in new_names.items():  # a name that an array has left is that of a new one
        before[path] = same.get(id(x), path if path not in moved else (None,))
    places, new_places = _Routes(names).of(old), _Routes(new_names).of(new)
    by_field, of_new = _unique_by_field(places), _unique_by_field(new_places)
    arrays = {key: x for key, (_, x) in places.items()}

    def one(key: tuple[Route, Route | None], x: Any) -> Any:
        around, name = key
        found = arrays.get((around, before[name]))
        if found is None and around and (around[-1], name) in of_new:
            found = by_field.get((around[-1], before[name]))
        return found if _alike(found, x) else x

    chosen = {whole: one(key, x) for key, (whole, x) in new_places.items()}
    state = jax.tree_util.tree_map_with_path(lambda path, _: chosen[path], new)
    return state if names.keys() == new_names.keys() else _without_rows(state, new)


class _Routes:
    """Where the parameters are in a state.

    Args:
        names: the parameters by their paths.
    """

    def __init__(self, names: dict[Route, Any]) -> None:
        self._names = sorted(names, key=len, reverse=True)  # the longest that ends a path is meant

    def of(self, state: OptState) -> dict[tuple[Route, Route | None], tuple[Route, Any]]:
        """The leaves of a state by (the path around a parameter, its name), or (path, None)."""
        found = dict[tuple[Route, Route | None], tuple[Route, Any]]()
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
            ends = (n for n in self._names if n and path[len(path) - len(n) :] == n)
            name = next(ends, None)
            key = (path, None) if name is None else (path[: len(path) - len(name)], name)
            found[key] = path, x
        return found


def _unique_by_field(
    places: dict[tuple[Route, Route | None], tuple[Route, Any]],
) -> dict[tuple[Any, Route | None], Any]:
    """The moments of each parameter, and counts, by the field of a state that has them, such as
    `mu`, as another chain has them in another place; none that two parts of the chain have."""
    found = dict[tuple[Any, Route | None], list[Any]]()
    for (around, name), (_, x) in places.items():
        if around:
            found.setdefault((around[-1], name), []).append(x)
    return {key: xs[0] for key, xs in found.items() if len(xs) == 1}


def _trained_by_path(params: PyTree) -> dict[Route, Any]:
    """What is trained, by path."""
    trainable = kind_of(params).trainable(params)
    return dict(jax.tree_util.tree_flatten_with_path(trainable)[0])


def _alike(found: Any, x: Any) -> bool:
    kinds = ((getattr(y, "shape", None), getattr(y, "dtype", None)) for y in (found, x))
    return found is not None and len(set(kinds)) == 1


def _without_rows(state: OptState, first: OptState) -> OptState:
    """The state with the telemetry of each parameter as at first: its rows are of others."""

    def is_scaled(x: Any) -> bool:
        return isinstance(x, LossScaleState)

    def one(own: Any, new: Any) -> Any:
        if not is_scaled(own) or own.observed is None:
            return own
        return own._replace(observed=new.observed._replace(info=own.observed.info))

    return jax.tree.map(one, state, first, is_leaf=is_scaled)

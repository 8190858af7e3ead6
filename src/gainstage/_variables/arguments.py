"""Variables, and pairs with gradients, as users pass them."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from gainstage._base.arrays import ARRAYS
from gainstage._base.checks import InvalidArgumentError, brief
from gainstage._variables.types import State
from gainstage._variables.variable import Variable


def variables_in(state: State, argument: str = "state") -> list[Variable]:
    """The variables of a state, in order. A state is a variable, a pytree or an iterable of them.

    Args:
        state: the variables.
        argument: the name of the user's argument, for errors.

    Raises:
        InvalidArgumentError: a leaf is not a variable.
        ValueError: a variable occurs twice.
    """
    given: Any = state
    known = isinstance(state, (Variable, Mapping, list, tuple))
    iterable = known or (isinstance(state, Iterable) and not isinstance(state, (str, *ARRAYS)))
    variables = jax.tree.leaves(given if known else list(given)) if iterable else [given]
    for variable in variables:
        if not isinstance(variable, Variable):
            raise InvalidArgumentError(
                f"Expected gainstage.optimizers.Variable objects in {argument}; got "
                f"{brief(repr(variable))}."
            )
    if len(set(variables)) < len(variables):
        twice = next(v for v in variables if variables.count(v) > 1)
        raise ValueError(f"Expected each variable once in {argument}; got {twice.name!r} twice.")
    return variables


def pairs_in(grads_and_vars: Iterable[Any]) -> list[tuple[Any, Variable]]:
    """The (gradient, variable) pairs that a user has passed.

    Raises:
        InvalidArgumentError: an element is not a pair, or its second element not a variable.
    """
    if not isinstance(grads_and_vars, Iterable) or isinstance(grads_and_vars, (str, Variable)):
        grads_and_vars = [grads_and_vars]
    pairs: list[Any] = [tuple(p) if isinstance(p, (tuple, list)) else (p,) for p in grads_and_vars]
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[1], Variable):
            swapped = len(pair) == 2 and isinstance(pair[0], Variable)
            raise InvalidArgumentError(
                f"Expected (gradient, variable) pairs in grads_and_vars; got {brief(pair)}."
                f"{' The variable comes second.' if swapped else ''}"
            )
    variables = [variable for _, variable in pairs]
    if len(set(variables)) < len(variables):
        twice = next(v for v in variables if variables.count(v) > 1)
        raise ValueError(
            f"Expected each variable once in grads_and_vars; got {twice.name!r} twice. Add its "
            f"gradients."
        )
    return pairs

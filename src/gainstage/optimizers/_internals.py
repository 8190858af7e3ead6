"""What other rooms may ask of an optimizer, beside what users may."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from gainstage._variables.variable import Variable
from gainstage.optimizers._step.saving import Checks
from gainstage.optimizers._step.store import Store

if TYPE_CHECKING:
    from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
    from gainstage.optimizers.optimizer import Optimizer


def store_of(optimizer: "Optimizer") -> Store:
    """What its step reads and changes: state, options in force, rate, slots and wrapper."""
    return optimizer._store


def rate_of_step(optimizer: "Optimizer") -> jax.Array | None:
    """The learning rate, if it is computed outside of the step; else None."""
    return optimizer._rate_of_step()


def first_values(
    optimizer: "Optimizer", values: Mapping[Variable, jax.Array]
) -> dict[Variable, jax.Array]:
    """The first values of all of its state, given those of the trainable variables."""
    return optimizer._first_values(values)


def update_one(
    optimizer: "Optimizer", gradient: jax.Array, variable: Variable, rate: jax.Array
) -> None:
    """Its `update_step` of one variable, which has to return None."""
    optimizer._update_one(gradient, variable, rate)


def check_step(optimizer: "Optimizer", grads: list[Any], variables: list[Variable]) -> None:
    """Raises what `apply` would raise for these gradients."""
    optimizer._checked(grads, variables)


def weight_checks(optimizer: "Optimizer") -> Checks:
    """What checks the values that are loaded into its variables."""
    return optimizer._weight_checks


def check_built(optimizer: "Optimizer", caller: str) -> None:
    """Raises a ValueError that names the caller if it is not built."""
    optimizer._built_variables(caller)


def share_scale(optimizer: "LossScaleOptimizer", state: Any) -> None:
    """Makes the variables of another object the state of its rule."""
    optimizer._wrapper.share(state)


def given_options(optimizer: "Optimizer") -> set[str]:
    """The names of the options that its user has set."""
    return optimizer._given

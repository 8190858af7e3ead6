"""Keras variables that mirror the variables of an optimizer of gainstage."""

# Keras is not typed.
# pyright: reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike

from gainstage._variables.sharding import on_mesh
from gainstage._variables.variable import Variable
from gainstage.interop.keras_backend import keras
from gainstage.optimizers._internals import store_of
from gainstage.optimizers.optimizer import Optimizer


class _Updates(keras.Variable):
    """The number of updates of an optimizer that accumulates gradients."""

    def __init__(self, count: Any, optimizer: Optimizer):
        super().__init__(0, dtype="int32", trainable=False, name="iterations")
        self._count, self._optimizer = count, optimizer

    @property
    def value(self) -> jax.Array:
        return store_of(self._optimizer).in_force.updates(self._count.value)

    def assign(self, value: ArrayLike) -> None:
        raise TypeError(
            "`iterations` is computed from the number of microbatches; it cannot be set."
        )

    def __repr__(self) -> str:
        return f"<Variable path={self.path}, shape=(), dtype=int32, value={self.value}>"


def updates_counted(count: Any, optimizer: Optimizer) -> Any:
    """The number of updates, as a Keras variable, by that of the number of microbatches."""
    return _Updates(count, optimizer)


def mirror_of(slot: Variable, value: jax.Array) -> Any:
    """A Keras variable with the value and sharding of one of ours."""
    value = jnp.copy(value)  # Keras donates the arrays of its variables
    name = slot.name.replace("/", "_")
    mirror = keras.Variable(value, dtype=str(slot.dtype), trainable=False, name=name)
    mirror._is_of_gainstage = True
    place_as(mirror, on_mesh(slot))
    return mirror


def is_mirror(variable: Any) -> bool:
    """Whether `mirror_of` has made a Keras variable."""
    return getattr(variable, "_is_of_gainstage", False)


def place_as(mirror: Any, sharding: Sharding | None) -> None:
    """Gives a Keras variable a sharding; Keras has no public API for that."""
    if sharding is not None:
        mirror._layout = sharding
        mirror.assign(jax.device_put(mirror.value, sharding))


def planned_for(variable: Any) -> Variable:
    """A planned variable of ours for a Keras variable."""
    value = variable.value
    sharding = value.sharding if isinstance(value.sharding, NamedSharding) else None
    plan = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    constraint = variable.constraint and (lambda x: jnp.asarray(variable.constraint(x)))
    return Variable(plan, name=variable.path, constraint=constraint)

"""Optimizers from configurations and back: the functions of `keras.optimizers`."""

from collections.abc import Mapping
from typing import Any

from gainstage._base import configurable
from gainstage._base.checks import InvalidArgumentError
from gainstage.optimizers import schedules
from gainstage.optimizers.adadelta import Adadelta
from gainstage.optimizers.adagrad import Adagrad
from gainstage.optimizers.adam import Adam, AdamW
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
from gainstage.optimizers.optimizer import Optimizer
from gainstage.optimizers.rmsprop import RMSprop
from gainstage.optimizers.sgd import SGD

_BUILT_IN = {
    cls.__name__.lower(): cls.__name__
    for cls in (SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop, LossScaleOptimizer)
}


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the configuration of an optimizer, with the name of its class.

    It contains no state (see `save_own_variables` and `state`). It is JSON-serializable unless the
    learning rate is a function.

    Raises:
        TypeError: `optimizer` is not an optimizer.

    Examples:
        >>> import gainstage as gs
        >>> config = gs.optimizers.serialize(gs.optimizers.Adam(0.25))
        >>> print(config["class_name"], gs.optimizers.deserialize(config).learning_rate.value())
        Adam 0.25

    Source: `keras.optimizers.serialize`.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Expected an optimizer of gainstage; got {optimizer!r}.")
    return configurable.description_of(optimizer)


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, type] | None = None
) -> Optimizer:
    """Returns the optimizer that a configuration describes, not built.

    Args:
        config: the result of `serialize`, or of Keras for an optimizer of the same name. It is not
            changed. Names of our own classes may be in lower case.
        custom_objects: your own classes by name: optimizers, schedules, rules. Subclasses of
            `Optimizer` that have been imported are found without it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `config` is not a configuration, its class is unknown, or an argument is out of
            range.

    Source: `keras.optimizers.deserialize`.
    """
    name = config.get("class_name") if isinstance(config, Mapping) else None
    if isinstance(name, str) and name not in (custom_objects or {}):
        config = {**config, "class_name": _BUILT_IN.get(name.lower(), name)}
    if name in schedules.__all__:
        raise ValueError(
            f"Expected a configuration of an optimizer; got that of {name}. Write "
            f"gainstage.optimizers.schedules.deserialize(config)."
        )
    return configurable.object_from(config, Optimizer, custom_objects)


def get(identifier: str | Mapping[str, Any] | Optimizer | None) -> Optimizer | None:
    """Returns the optimizer for a name, a configuration or an optimizer.

    Args:
        identifier: a name such as "adam", for an optimizer with default arguments; a configuration;
            an optimizer, which is returned unchanged; or None, which returns None.

    Raises:
        TypeError: its class has no default arguments.
        ValueError: the name is unknown, or the configuration is malformed. If `identifier` is
            anything else, it is a TypeError too.

    Examples:
        >>> import gainstage as gs
        >>> print(type(gs.optimizers.get("adamw")).__name__)
        AdamW

    Source: `keras.optimizers.get`.
    """
    if identifier is None or isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        return deserialize({"class_name": identifier, "config": {}})
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    raise InvalidArgumentError(
        f"Expected the name of an optimizer, a configuration or an optimizer; got {identifier!r}."
    )

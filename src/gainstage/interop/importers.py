"""Imports the loss-scale state of other libraries, so that a run continues with gainstage.

Pass the rule to `LossScaleOptimizer(loss_scale=...)`, and the state to `load_into`.
"""

# Each function reads plain attributes or keys and needs none of the libraries. In an optax loop,
# its state is put into that of `with_loss_scale` with `_replace`.

import reprlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from gainstage._base import checks
from gainstage._base.checks import SMALLEST
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.saving import check_names, fitted_weight
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
from gainstage.rules.loss_scale import KERAS_FLOOR, DynamicLossScale, ScaleState

__all__ = ["from_flax", "from_torch", "load_into", "load_keras"]


def __dir__() -> list[str]:
    return __all__


Imported = tuple[DynamicLossScale, ScaleState]

_TORCH = {"scale", "_growth_tracker", "growth_interval", "growth_factor", "backoff_factor"}
_FLAX = (
    "scale", "fin_steps", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale"
)  # fmt: skip


def from_torch(state_dict: Mapping[str, Any], microbatches: int = 1) -> Imported:
    """Converts a `torch.amp.GradScaler.state_dict()` to a rule and its state.

    torch has no lowest scale. The rule stops at `2**-24`, not at 1 as `DynamicLossScale()` does.

    Args:
        state_dict: the state of an enabled scaler.
        microbatches: the microbatches of a window, for `optax.MultiSteps` inside of
            `with_loss_scale` where torch divided the loss by their number. The scale is divided by
            it, because here the undivided loss is multiplied. The interval and the count of finite
            steps are multiplied by it, because torch counts updates, and `with_loss_scale`
            microbatches.

    Returns:
        The rule for `with_loss_scale`, and the state for `opt_state._replace(rule_state=state)`.
        The rule is no part of `opt_state`: save `rule.get_config()` too.

    Examples:
        >>> from gainstage.interop import importers
        >>> rule, state = importers.from_torch({
        ...     "scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.25,
        ...     "growth_interval": 3, "_growth_tracker": 2})
        >>> print(rule.update(state, True).scale, rule.update(state, False).scale)
        2048.0 256.0

    Raises:
        TypeError: `state_dict` is not a dictionary, or a value is not a number.
        ValueError: the state is empty (a disabled scaler), or a value is out of range.
    """
    if not isinstance(state_dict, Mapping) or not _TORCH.issubset(state_dict):
        raise (ValueError if isinstance(state_dict, Mapping) else TypeError)(
            f"Expected the state of an enabled GradScaler; got {reprlib.repr(state_dict)}."
        )
    k = checks.integer("microbatches", microbatches, low=1)
    counts = {
        name: k * checks.integer(name, state_dict[name], low=low)
        for name, low in [("_growth_tracker", 0), ("growth_interval", 1)]
    }
    return _imported(
        checks.real("scale", state_dict["scale"]) / k,
        counts["_growth_tracker"],
        period=counts["growth_interval"],
        multiplier=state_dict["growth_factor"],
        backoff=state_dict["backoff_factor"],
    )


def from_flax(dynamic_scale: Any) -> Imported:
    """Converts a `flax.training.dynamic_scale.DynamicScale` to a rule and its state. Up to 0.12.8
    flax grows the scale one step later than its `growth_interval`; so does the rule.

    Raises:
        TypeError: the argument is something else, or a value is not a number.
        ValueError: a value is out of range.
    """
    missing = [name for name in _FLAX if not hasattr(dynamic_scale, name)]
    if missing:
        got = f"{reprlib.repr(dynamic_scale)}, without {missing}"
        raise TypeError(f"Expected a flax DynamicScale; got {got}.")
    interval = checks.integer("growth_interval", dynamic_scale.growth_interval, low=0, high=2**30)
    floor = dynamic_scale.minimum_scale
    return _imported(
        dynamic_scale.scale,
        dynamic_scale.fin_steps,
        period=interval + 1,
        multiplier=dynamic_scale.growth_factor,
        backoff=dynamic_scale.backoff_factor,
        floor=SMALLEST if floor is None else floor,
    )


def load_keras(optimizer: LossScaleOptimizer, store: Mapping[str, Any]) -> None:
    """Loads what Keras 3's `LossScaleOptimizer.save_own_variables` stored.

    Args:
        optimizer: ours, built, around the same kind of optimizer with the same options.
        store: arrays under "0", "1", ...; the first two, which Keras never changes, are skipped.

    Raises:
        TypeError: `store` is not a dictionary.
        ValueError: `optimizer` is not built, or an array does not fit; nothing is loaded then.
    """
    if not optimizer.built:
        raise ValueError(f"Expected {optimizer.name!r} to be built before load_keras.")
    keys = [str(i) for i in range(2 + len(optimizer.variables))]
    check_names("weights of Keras", store, keys)
    optimizer.set_weights([store[key] for key in keys[2:]])


def load_into(optimizer: LossScaleOptimizer, state: ScaleState) -> None:
    """Loads an imported state into an optimizer that has the imported rule.

    Raises:
        TypeError: `optimizer` is something else, such as a state of `with_loss_scale`.
        ValueError: a value cannot be a scale or a count; nothing is changed then.
    """
    if not hasattr(optimizer, "dynamic_scale"):
        raise TypeError(
            f"Expected a LossScaleOptimizer for optimizer; got {checks.brief(optimizer)}. For a "
            f"state of with_loss_scale, also in a chain, write opt_state = "
            f"optax.tree.set(opt_state, rule_state=state)."
        )
    values: dict[Variable, Any] = {optimizer.dynamic_scale: state.scale}
    if optimizer.step_counter is not None:
        values[optimizer.step_counter] = state.good_steps
    checked = {v: fitted_weight(v, x, optimizer._weight_checks) for v, x in values.items()}
    for variable, value in checked.items():
        variable.assign(value)


def _imported(
    scale: object,
    count: object,
    *,
    period: int,
    multiplier: float,
    backoff: float,
    floor: object = KERAS_FLOOR,
) -> Imported:
    count = checks.integer("the count of finite steps", count, low=0)
    rule = DynamicLossScale(
        checks.real("the scale", scale),
        period,
        multiplier,
        backoff_factor=backoff,
        min_scale=max(checks.real("the lowest scale", floor), SMALLEST),
    )
    return rule, ScaleState(jnp.float32(rule.initial_loss_scale), jnp.int32(count))

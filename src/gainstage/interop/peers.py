"""The loss-scale state of other libraries, so that a run continues here where it stopped there.

Each function reads plain attributes or keys, and needs none of the libraries. What has a rule of
its own becomes a pair of our rule and its state: give the rule to `LossScaleOptimizer(rule=...)`
and the state to `resume`, or put the state into that of `loss_scaled` with `_replace`.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from gainstage.loss_scale_optimizer import LossScaleOptimizer
from gainstage.rules import SMALLEST, DynamicLossScale, ScaleState

Imported = tuple[DynamicLossScale, ScaleState]


def from_torch(state_dict: Mapping[str, Any]) -> Imported:
    """The rule and state of a `torch.amp.GradScaler.state_dict()`.

    Examples:
        >>> from gainstage.interop import peers
        >>> rule, state = peers.from_torch({
        ...     "scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.25,
        ...     "growth_interval": 3, "_growth_tracker": 2})
        >>> print(rule.update(state, True).scale, rule.update(state, False).scale)
        2048.0 256.0

    Raises:
        ValueError: a state that is empty, as that of a disabled scaler.
    """
    if "scale" not in state_dict:
        raise ValueError(f"Expected the state of an enabled GradScaler; got {dict(state_dict)!r}.")
    return _imported(
        state_dict["scale"],
        state_dict["_growth_tracker"],
        period=state_dict["growth_interval"],
        multiplier=state_dict["growth_factor"],
        backoff=state_dict["backoff_factor"],
    )


def from_flax(dynamic_scale: Any) -> Imported:
    """The rule and state of a `flax.training.dynamic_scale.DynamicScale` up to flax 0.12.8, which
    grows one step later than its `growth_interval` says."""
    return _imported(
        dynamic_scale.scale,
        dynamic_scale.fin_steps,
        period=dynamic_scale.growth_interval + 1,
        multiplier=dynamic_scale.growth_factor,
        backoff=dynamic_scale.backoff_factor,
        floor=dynamic_scale.minimum_scale,
    )


def from_jmp(loss_scale: Any) -> Imported:
    """The rule and state of a `jmp.DynamicLossScale`; its floor is kept from now on."""
    return _imported(
        loss_scale.loss_scale,
        loss_scale.counter,
        period=loss_scale.period,
        multiplier=loss_scale.factor,
        floor=loss_scale.min_loss_scale,
    )


def load_keras(optimizer: LossScaleOptimizer, store: Mapping[str, Any]) -> None:
    """Loads what Keras 3's `LossScaleOptimizer.save_own_variables` stored into one built alike.

    Args:
        optimizer: ours, built, around the same kind of optimizer with the same options.
        store: arrays under "0", "1", ...; the first two, which never change in Keras, are left out.

    Raises:
        ValueError: not built, or arrays that do not fit; nothing is loaded then.
    """
    optimizer.set_weights([store[str(i)] for i in range(2, len(store.keys()))])


def resume(optimizer: LossScaleOptimizer, state: ScaleState) -> None:
    """Puts an imported state into an optimizer that has the rule it came with."""
    optimizer.dynamic_scale.assign(state.scale)
    if optimizer.step_counter is not None:
        optimizer.step_counter.assign(state.good_steps)


def _imported(
    scale: Any,
    count: Any,
    *,
    period: int,
    multiplier: Any,
    backoff: Any = None,
    floor: Any = DynamicLossScale.min_scale,
) -> Imported:
    rule = DynamicLossScale(
        float(scale),
        period,
        float(multiplier),
        backoff_factor=backoff,
        min_scale=max(float(floor), SMALLEST),
    )
    return rule, ScaleState(jnp.float32(scale), jnp.int32(count))

"""Checks of an optimizer that a `LossScaleOptimizer` is given."""

from collections.abc import Collection, Sequence

import jax

from gainstage._base import checks
from gainstage._base.checks import InvalidArgumentError
from gainstage._variables.bridge import read
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.options import BEFORE_BUILD, CLIPS, OPTIONS
from gainstage.optimizers._step.subclasses import check_verbs
from gainstage.optimizers.optimizer import Optimizer
from gainstage.optimizers.wrapped_optax import Optax
from gainstage.rules.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleLike,
    as_rule,
    is_default,
    keras_rule,
)
from gainstage.transforms.loss_scale_state import states_in


def check_one_scale(inner: Optimizer, variables: Sequence[Variable]) -> None:
    """Raises an error if a transformation has a loss scale too."""
    if isinstance(inner, Optax) and states_in(jax.eval_shape(inner._init, read(list(variables)))):
        raise ValueError(
            f"Expected the transformation of {inner.name!r} without "
            f"gainstage.with_loss_scale in it; got a scale within a scale. "
            "LossScaleOptimizer takes care of the scale."
        )


def chosen_rule(
    initial_scale: float,
    growth_steps: int,
    dynamic: bool,
    loss_scale: LossScaleLike,
    passed: Collection[str],
    lowest: float | None,
) -> LossScale:
    """Returns the rule of a wrapper with these arguments; raises an error if they do not fit.

    Args:
        initial_scale, growth_steps, dynamic, loss_scale: the arguments.
        passed: the names of the arguments that the user has passed.
        lowest: the lowest dynamic scale; None for that of `keras_rule`.
    """
    dynamic = checks.flag("dynamic", dynamic)
    checks.loss_scale("initial_scale", initial_scale)
    checks.integer("dynamic_growth_steps", growth_steps, low=1)
    if not is_default(loss_scale):
        others = {"initial_scale", "dynamic_growth_steps", "dynamic"}
        return as_rule("loss_scale", loss_scale, others.intersection(passed))
    if dynamic:
        if lowest is None:
            return keras_rule(initial_scale, growth_steps)
        return DynamicLossScale(initial_scale, growth_steps, min_scale=lowest)
    if "initial_scale" not in passed:
        raise ValueError("Expected initial_scale for dynamic=False; got none.")
    if "dynamic_growth_steps" in passed:
        raise ValueError(
            f"Expected no dynamic_growth_steps for dynamic=False; got {growth_steps!r}."
        )
    return FixedLossScale(initial_scale)


def check_inner(inner: object, passed: set[str], argument: str) -> None:
    """Raises an error if a wrapper cannot take an optimizer.

    Args:
        inner: the optimizer.
        passed: the names of the wrapper's arguments that the user has passed.
        argument: the name of the wrapper's argument for the optimizer.
    """
    if not isinstance(inner, Optimizer) or hasattr(inner, "inner_optimizer"):
        advice = ""
        if hasattr(inner, "init") and hasattr(inner, "update"):
            advice = " Use gainstage.optimizers.from_optax(tx), or gainstage.with_loss_scale(tx)."
        elif type(inner).__module__.partition(".")[0] == "keras":
            advice = " Use gainstage.interop.keras.LossScaleOptimizer."
        elif type(inner).__module__.startswith("gainstage.compat."):
            advice = " Use gainstage.compat.v1.MixedPrecisionLossScaleOptimizer."
        elif isinstance(inner, str):
            advice = f" Use gainstage.optimizers.get({inner!r})."
        elif isinstance(inner, type):
            advice = f" Create one: {inner.__name__}(...)."
        raise InvalidArgumentError(
            f"Expected an optimizer of gainstage, not wrapped, for {argument}; got "
            f"{inner!r}.{advice}"
        )
    check_verbs(inner, "LossScaleOptimizer")
    if (outer := inner._store.outer) is not None:
        raise ValueError(
            f"{inner.name!r} is already wrapped by {outer.owner!r}. Create a new "
            f"optimizer, or reuse the wrapper."
        )
    for option in sorted(passed & OPTIONS.keys()):
        both = inner._given & (CLIPS if option in CLIPS else {option})
        if both:
            raise ValueError(
                f"Expected {option} on the LossScaleOptimizer or on the inner optimizer; got "
                f"{option} here and {', '.join(sorted(both))} on {inner.name!r}."
            )
    if inner.built and passed & BEFORE_BUILD:
        raise ValueError(
            f"Expected {', '.join(sorted(passed & BEFORE_BUILD))} before the inner optimizer is "
            f"built; {inner.name!r} is built."
        )

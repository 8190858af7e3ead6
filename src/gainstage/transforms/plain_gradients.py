"""The one thing that an update asks unasked: were these gradients computed without a loss scale?"""

from typing import Any

import jax
import numpy as np

from gainstage._base._jax import Literal, Tracer, computed_by, trace_of
from gainstage._programs import jaxprs
from gainstage._programs.scopes import SELF_SCALED
from gainstage._variables.types import PyTree

NOT_SCALED = (
    "No loss was multiplied by the loss scale before this update of gainstage.loss_scaled, so "
    "small gradients are lost as without it. Use gainstage.train_step, or compute gradients with "
    "gainstage.value_and_grad(loss_fn, opt_state). If a trainer differentiates by itself, give it "
    "gainstage.autocast(loss_fn, loss_scale=2.0**15). gainstage.lint(step, *args) shows more. To "
    'silence this warning: warnings.filterwarnings("ignore", message="No loss was multiplied").'
)


def is_plain(grads: PyTree, scale: Any, params: PyTree) -> bool:
    """Whether gradients were computed in this trace, and for sure by no scale."""
    leaves: list[Any] = [g for g in jax.tree.leaves(grads) if np.ndim(g)]
    if not leaves or not all(hasattr(x, "parent") and x.parent for x in leaves):
        return False
    equations, given = computed_by(leaves, jax.tree.leaves(params))
    shapes = {g.shape for g in leaves}  # an array of such a shape may be a gradient too
    if not isinstance(scale, Tracer) or trace_of(scale) is not trace_of(leaves[0]):
        shapes.add(())  # and any number the scale, as the trace of these gradients names it
    for x in given:
        is_array = not isinstance(getattr(x, "val", None), Literal)
        if x is scale or (is_array and np.shape(x) in shapes):
            return False
    if any(equation.effects for equation in equations):
        return False
    within = (part for equation in equations for part in jaxprs.inner(equation))
    each = [*equations, *(equation for part in within for equation in jaxprs.equations(part))]
    names = [str(equation.source_info.name_stack) for equation in each]
    return any("transpose(" in name for name in names) and not any(
        SELF_SCALED in name for name in names
    )

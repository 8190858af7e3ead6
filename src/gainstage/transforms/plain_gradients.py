"""What an update reads unasked: whether its gradients are those of a loss with a loss scale."""

import enum
from typing import Any

import jax
import numpy as np

from gainstage._base._jax import Literal, Tracer, computed_by, trace_of
from gainstage._programs import jaxprs
from gainstage._programs.backward_at import is_small_float
from gainstage._programs.degrees import NO_SCALE, PREFIX
from gainstage._programs.in_dtype import has_small_floats
from gainstage._programs.scopes import SELF_SCALED
from gainstage._variables.types import PyTree

NOT_SCALED = (
    "No loss was multiplied by the loss scale before this update of gainstage.with_loss_scale, so "
    "small gradients are lost as without it. Use gainstage.train_step, or compute gradients with "
    "gainstage.value_and_grad(loss_fn, opt_state). If a trainer differentiates by itself, give it "
    "gainstage.autocast(loss_fn, loss_scale=2.0**15). gainstage.lint(step, *args) shows more. To "
    'silence this warning: warnings.filterwarnings("ignore", message="No loss was multiplied").'
)


class Origin(enum.Enum):
    """How gradients were computed."""

    UNKNOWN = enum.auto()  # by a loss that may have a scale
    UNSCALED = enum.auto()  # without a scale, and without float16 and float8, which need one
    LOST = enum.auto()  # without a scale, in float16 or float8


def origin_of(grads: PyTree, scale: Any, params: PyTree) -> Origin:
    """How gradients were computed, by the program that is traced now; unknown outside of one."""
    leaves: list[Any] = jax.tree.leaves(grads)
    if not leaves or not all(getattr(x, "parent", None) for x in leaves if np.ndim(x)):
        return Origin.UNKNOWN
    equations, given = computed_by(leaves, jax.tree.leaves(params))
    within = [part for equation in equations for part in jaxprs.inner(equation)]
    each = [*equations, *(equation for part in within for equation in jaxprs.equations(part))]
    marks = {str(e.params["name"]) for e in each if e.primitive.name == "name"}
    if PREFIX + NO_SCALE in marks and PREFIX + "scale" not in marks:
        return Origin.UNSCALED
    leaves = [g for g in leaves if np.ndim(g)]
    if not leaves:
        return Origin.UNKNOWN
    shapes = {g.shape for g in leaves}  # an array of such a shape may be a gradient too
    if not isinstance(scale, Tracer) or trace_of(scale) is not trace_of(leaves[0]):
        shapes.add(())  # and any number the scale, as the trace of these gradients names it
    for x in given:
        is_array = not isinstance(getattr(x, "val", None), Literal)
        if x is scale or (is_array and np.shape(x) in shapes):
            return Origin.UNKNOWN
    if any(equation.effects for equation in equations):
        return Origin.UNKNOWN
    names = [str(equation.source_info.name_stack) for equation in each]
    is_derived = any("transpose(" in name for name in names)
    if not is_derived or any(SELF_SCALED in name for name in names):
        return Origin.UNKNOWN
    values = [x for e in equations for x in (*e.in_tracers, *(v.aval for v in e.outvars))]
    dtypes = {getattr(x, "dtype", None) for x in values}
    is_lost = any(map(is_small_float, dtypes)) or any(map(has_small_floats, within))
    return Origin.LOST if is_lost else Origin.UNSCALED

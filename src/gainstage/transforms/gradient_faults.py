"""What `loss_scaled` can know about the gradients that it gets: how their loss was scaled."""

# The loss scale of a state is a new array after each update, and one tracer in a trace. What has
# been done with it tells what the gradients are that come with it to `update`.

import os
import threading
import weakref
from typing import Any

import jax
import numpy as np

from gainstage._base._jax import (
    Literal,
    Tracer,
    computed_by,
    is_around_a_loop,
    is_differentiated,
    trace_ctx,
    trace_of,
)
from gainstage._programs import jaxprs
from gainstage._programs.operations import PRODUCTS
from gainstage._variables.types import PyTree
from gainstage._variables.variable import is_inside

NOT_SCALED = (
    "No loss was multiplied by the loss scale before this update of gainstage.loss_scaled, so "
    "small gradients are lost as without it. Use gainstage.train_step, or compute gradients with "
    "gainstage.value_and_grad(loss_fn, opt_state). If a trainer differentiates by itself, give it "
    "gainstage.autocast(loss_fn, loss_scale=2.0**15). By hand, write "
    "gainstage.transforms.scale_loss(loss, opt_state). To "
    'silence this warning: warnings.filterwarnings("ignore", message="No loss was multiplied").'
)
NOT_DIVIDED = (
    "This update of gainstage.loss_scaled takes true gradients, but scale_loss has multiplied the "
    "loss, and nothing has divided by its scale. Write tx.update(grads, opt_state, params, "
    "loss_scale=gainstage.transforms.loss_scale(opt_state))."
)
TWICE = (
    "This update of gainstage.loss_scaled divides gradients that are true already, as "
    "value_and_grad returns them. Leave loss_scale= out."
)
UNMOVED = (
    "The loss_scale= of this update of gainstage.loss_scaled is a constant of a compiled function, "
    "so the rule changes a scale that no loss is multiplied by. Compute gradients with "
    "gainstage.value_and_grad(loss_fn, opt_state), and leave loss_scale= out. For a fixed scale, "
    "write gainstage.loss_scaled(tx, gainstage.FixedLossScale(scale))."
)
NO_LOSS = (
    "This update of gainstage.loss_scaled does not get the loss, which {rule} measures: without it "
    "a NaN in the data looks like an overflow, and lowers the scale. Write tx.update(grads, "
    "opt_state, params, value=loss), or take gainstage.DynamicLossScale()."
)
NARROW = (
    "This update of gainstage.loss_scaled got true gradients in float16, which has lost the small "
    "ones again. Pass on the gradients in float32, as value_and_grad returns them. To send fewer "
    "bytes, cast them to bfloat16."
)
HIDDEN = (
    "{name} in front of this update of gainstage.loss_scaled makes an overflow a finite number, so "
    "the step is taken, and the loss scale never falls. {remedy}"
)
_INSIDE = "Put it inside, behind the check: gainstage.loss_scaled(optax.chain({inner}, tx))."
_LEAVE_OUT = "Leave it out: update skips such a step."
# What hides an overflow: its primitive, or the name of a function of jax.numpy; and what to do.
_HIDE = {
    "nan_to_num": ("jnp.nan_to_num", _LEAVE_OUT),
    "_where": ("jnp.where(jnp.isfinite(...), ...)", _LEAVE_OUT),
    "select_n": ("jnp.where(jnp.isfinite(...), ...)", _LEAVE_OUT),
    "clip": ("jnp.clip", _INSIDE.format(inner="optax.clip(limit)")),
    "clamp": ("jax.lax.clamp", _INSIDE.format(inner="optax.clip(limit)")),
    "sign": ("jnp.sign", _INSIDE.format(inner="optax.scale_by_sign()")),
    "tanh": ("jnp.tanh", _INSIDE.format(inner="your transformation")),
}
DIVIDED_TWICE = (
    "This update of gainstage.loss_scaled got true gradients that were divided by the loss scale "
    "again. Leave the division out: value_and_grad returns true gradients."
)
PLAIN_GRAD_FN = (
    "The gradients of grad_fn in this update of gainstage.loss_scaled were computed without the "
    "loss scale, so small ones are lost. Write grad_fn=lambda params, i: "
    "gainstage.value_and_grad(loss_fn, opt_state)(params, *batch)[1]."
)
PLAIN_VALUE_FN = (
    "The line search in this update of gainstage.loss_scaled differentiates a float16 value_fn "
    "without a loss scale, so small gradients are lost. Write value_fn=lambda params: "
    "gainstage.autocast(loss_fn, loss_scale=2.0**15)(params, *batch)."
)
STALE = (
    "The gradients of this update of gainstage.loss_scaled were computed with the scale of another "
    "state, which never changes. In each step, compute them with the state that update gets: "
    "gainstage.value_and_grad(loss_fn, opt_state)(params)."
)
NO_USE = (
    "The rule of this gainstage.loss_scaled has no effect: the loss of gainstage.autocast has a "
    "loss_scale of its own. Leave the rule out, and for another scale write "
    "gainstage.autocast(loss_fn, loss_scale=scale)."
)
FROZEN = (
    "The state that this update of gainstage.loss_scaled got is a constant of a compiled function, "
    "so its loss scale never changes. Make it an argument of that function, and one of its "
    "results; in jax.lax.scan, a part of the carry."
)

MULTIPLIED_TWICE = (
    "A loss was multiplied twice by the loss scale before this update of gainstage.loss_scaled: by "
    "scale_loss, and by value_and_grad or train_step, which do it themselves. Leave scale_loss out."
)
MULTIPLIED_ALREADY = (
    "Expected the loss itself from fun; got what scale_loss has multiplied. Leave scale_loss out: "
    "value_and_grad and train_step multiply the loss by the loss scale themselves."
)
READ_ALREADY = (
    "Expected the loss itself from fun; got it times gainstage.transforms.loss_scale(opt_state). "
    "Leave this factor out: value_and_grad and train_step multiply the loss by the loss scale "
    "themselves."
)
SCALED_TWICE = (
    "Expected the loss itself for scale_loss; got what scale_loss has multiplied by the loss scale "
    "already. Multiply once."
)

# By its id, each scale that is alive, with what was done with it:
#   "true": `value_and_grad` or `train_step` has computed true gradients with it
#   "waiting": and no update has come with it since
#   "constant": and it was a constant of a traced function
#   "multiplied": `scale_loss` has multiplied a loss by it
#   "read": `loss_scale` has returned it; "used": inside of a trace, to compute with it
_SCALES: dict[int, tuple[weakref.ref[Any], set[str]]] = {}
# Why an update may be right although nothing is known of its scale: a loss has scaled "itself", or
# a scale was "lost": it was used in one trace, and the update is in another.
_UNKNOWN: set[str] = set()
_OF_SUMS = "add", "sub", "neg", "reduce_sum", "convert_element_type"
# The files whose equations scale a loss by no state.
_SCALE_THEMSELVES = tuple(
    os.path.join("gainstage", "transforms", name) for name in ("self_scaled.py", "local_scale.py")
)
# By its id, the `applied` of each state that is alive and that an update has taken: an old state.
UPDATED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# By its id, each traced true gradient that is alive, as `value_and_grad` has returned it.
TRUE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# By its id, each loss that is alive and that `scale_loss` has returned.
MULTIPLIED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
OLD = (
    "{name} got the state of before the update, which tells whether the step before was applied. "
    "Pass the state that update returned: updates, opt_state = tx.update(grads, opt_state, params)."
)


class _Losses(threading.local):
    """The losses that `value_and_grad` differentiates now, in this thread."""

    def __init__(self) -> None:
        self.running: list[tuple[object, set[str]]] = []  # their traces, with what was done in each


LOSSES = _Losses()


def note_scale(scale: Any, *uses: str, true: PyTree = ()) -> None:
    """Notes, for the whole process, what is done with the loss scale of a state; `true` are
    gradients that were divided by it."""
    TRUE.update({id(x): x for x in jax.tree.leaves(true) if isinstance(x, Tracer)})
    key = id(scale)
    if key not in _SCALES:

        def freed(_: object) -> None:
            if not {"waiting", "used", "multiplied"}.isdisjoint(_SCALES.pop(key, ((), ()))[1]):
                _UNKNOWN.add("lost")

        _SCALES[key] = weakref.ref(scale, freed), set()
    _SCALES[key][1].update(uses)
    for trace, done in LOSSES.running:
        if trace is trace_ctx.trace or "read" in uses:
            done.update(uses)


def note_self_scaled() -> None:
    """Notes, for the whole process, a loss that scales its own gradients, by no state."""
    _UNKNOWN.add("itself")


def fault(
    scale: Any, by: Any, ruled: bool, grads: PyTree, params: PyTree, chosen: bool
) -> str | None:
    """What is wrong with the gradients of an update, as far as can be known.

    Args:
        scale: the loss scale of the state that the update gets.
        by: the loss scale that the update divides the gradients by, or None.
        ruled: whether its user has chosen a rule.
        grads, params: what the update gets.
        chosen: whether its user decides what is applied, by `apply_if`.
    """
    _, uses = _SCALES.get(id(scale), (None, set[str]()))
    uses.discard("waiting")
    if "constant" in uses and is_inside():
        return FROZEN
    of_another_trace = isinstance(scale, Tracer) and trace_of(scale) is not trace_ctx.trace
    if of_another_trace and is_constant_of_a_loop(scale):
        return FROZEN
    if "true" in uses:
        if by is not None:
            return TWICE
        for leaf in jax.tree.leaves(grads):
            x: Any = leaf
            if getattr(x, "dtype", None) == np.float16:
                return NARROW
            if TRUE.get(id(x)) is not x and (wrong := _done_to(x, scale, chosen)):
                return wrong
        return MULTIPLIED_TWICE if "multiplied" in uses and "read" not in uses else None
    if by is not None:
        moves = isinstance(by, Tracer) or not isinstance(scale, Tracer)
        return None if moves else UNMOVED
    if "used" in uses and not is_plain(grads, scale, params):
        return None
    if "multiplied" in uses:
        return None if "read" in uses else NOT_DIVIDED
    scales = list(_SCALES.values())  # a scale that is freed meanwhile leaves the dictionary
    for other, known in scales:
        if "constant" in known or ("waiting" in known and _of_one_trace(scale, other())):
            return STALE
    waiting = any("waiting" in known for _, known in scales)
    if (waiting or _UNKNOWN) and not is_plain(grads, scale, params):
        return NO_USE if ruled and not waiting and {"itself"} == _UNKNOWN else None
    return NOT_SCALED


def _done_to(gradient: Any, scale: Any, chosen: bool) -> str | None:
    """What is wrong with what was done last to a true gradient, in one trace.

    Args:
        gradient: the gradient.
        scale: its loss scale.
        chosen: whether the user decides what is applied.
    """
    while TRUE.get(id(gradient)) is not gradient:
        equation = getattr(gradient, "parent", None)
        if equation is None:
            return None
        name, operands = equation.primitive.name, list(equation.in_tracers)
        function = name if name in _HIDE else equation.params.get("name")
        hides = function in _HIDE and not chosen
        if function == "nan_to_num":
            hides &= len(operands) < 3  # more are numbers of the user for infinities
        elif hides and function in ("_where", "select_n"):
            hides = _of_finite(operands[0]) and any(map(_is_number, operands[1:]))
        if hides:
            called, remedy = _HIDE[function]
            return HIDDEN.format(name=called, remedy=remedy)
        if name in ("mul", "div") and any(_is_of(scale, x) for x in operands):
            return DIVIDED_TWICE
        if name in PRODUCTS or jaxprs.inner(equation):
            return None  # from here on it may be made of other arrays
        gradient = next((x for x in operands if np.shape(x) == np.shape(gradient)), None)
    return None


def _of_finite(condition: Any) -> bool:
    """Whether a condition asks what is finite, or what is not."""
    equation = getattr(condition, "parent", None)
    while equation is not None and equation.primitive.name == "not":
        equation = getattr(equation.in_tracers[0], "parent", None)
    return equation is not None and equation.primitive.name == "is_finite"


def _is_number(x: Any) -> bool:
    """Whether a value is written out, perhaps with another shape."""
    equation = getattr(x, "parent", None)
    if equation is not None and equation.primitive.name == "broadcast_in_dim":
        x = equation.in_tracers[0]
    return isinstance(getattr(x, "val", None), Literal)


def _is_of(scale: Any, x: Any) -> bool:
    """Whether a value is the loss scale or its inverse, perhaps of another dtype and shape."""
    for _ in range(4):
        equation = getattr(x, "parent", None)
        if x is scale or equation is None:
            return x is scale
        inverts = equation.primitive.name == "div" and np.ndim(x) == 0
        if not (inverts or equation.primitive.name in ("convert_element_type", "broadcast_in_dim")):
            return False
        x = equation.in_tracers[-1]
    return False


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
    sources = [equation.source_info for equation in each]
    if not any("transpose(" in str(source.name_stack) for source in sources):
        return False
    return not any(
        source.traceback is None
        or any(frame.file_name.endswith(_SCALE_THEMSELVES) for frame in source.traceback.frames)
        for source in sources
    )


def is_plain_half(loss: Any) -> bool:
    """Whether a loss that is differentiated in this trace has float16 products, and no scale."""
    if not is_differentiated(loss):
        return False
    equations, _ = computed_by([getattr(loss, "primal", loss)], [])
    within = (part for equation in equations for part in jaxprs.inner(equation))
    each = [*equations, *(equation for part in within for equation in jaxprs.equations(part))]
    traces = [equation.source_info.traceback for equation in each]
    frames = (frame for trace in traces if trace is not None for frame in trace.frames)
    if any(frame.file_name.endswith(_SCALE_THEMSELVES) for frame in frames):
        return False
    operands = (getattr(x, "in_tracers", None) or x.invars for x in each if _is_product(x))
    return any(getattr(x.aval, "dtype", None) == np.float16 for xs in operands for x in xs)


def _is_product(equation: Any) -> bool:
    return equation.primitive.name in PRODUCTS


def is_times_a_scale(loss: Any) -> bool:
    """Whether the last that was done to a loss is, up to sums and numbers, a product with a scale
    that `loss_scale` has returned."""
    read = {key for key, (_, uses) in list(_SCALES.items()) if "read" in uses}
    todo, seen = [getattr(loss, "primal", loss)], set[int]()
    while todo:
        equation: Any = getattr(todo.pop(), "parent", None)
        if equation is None or id(equation) in seen:
            continue
        seen.add(id(equation))
        name, operands = equation.primitive.name, list(equation.in_tracers)
        is_number = list(map(_is_number, operands))
        if name == "mul" and not any(is_number) and any(id(x) in read for x in operands):
            return True
        if name in _OF_SUMS or (name == "mul" and any(is_number)):
            todo += operands
        elif name == "div" and is_number[1]:
            todo.append(operands[0])
    return False


def is_constant_of_a_loop(scale: Any) -> bool:
    """Whether a scale is a tracer of the function around a loop whose body is traced now."""
    return isinstance(scale, Tracer) and is_around_a_loop(trace_of(scale))


def _of_one_trace(scale: Any, other: Any) -> bool:
    """Whether both scales are arrays, or tracers of one trace."""
    kinds = isinstance(scale, Tracer), isinstance(other, Tracer)
    return kinds == (False, False) or (all(kinds) and trace_of(scale) is trace_of(other))


def forget_scales() -> None:
    """Forgets all scales, and what was done with them."""
    _SCALES.clear()
    _UNKNOWN.clear()
    UPDATED.clear()
    MULTIPLIED.clear()
    TRUE.clear()

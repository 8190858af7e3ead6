"""What `loss_scaled` can know about the gradients that it gets: how a loss was scaled, if at all.

The loss scale of a state is a new array after each update, and one tracer in a trace. What has been
done with it tells what the gradients are that come with it to `update`.
"""

import weakref
from typing import Any

from gainstage._core._jax import Tracer, is_around_a_loop, trace_ctx, trace_of

NOT_SCALED = (
    "No loss was multiplied by the loss scale before this update of gainstage.loss_scaled, so "
    "small gradients are lost as without it. Use gainstage.train_step, or compute gradients with "
    "gainstage.value_and_grad(loss_fn, opt_state). If a trainer differentiates by itself, give it "
    "gainstage.self_scaled(loss_fn). By hand, write gainstage.scale_loss(loss, opt_state). To "
    'silence this warning: warnings.filterwarnings("ignore", message="No loss was multiplied").'
)
NOT_DIVIDED = (
    "This update of gainstage.loss_scaled takes true gradients, but scale_loss has multiplied the "
    "loss, and nothing has divided by its scale. Write tx.update(grads, opt_state, params, "
    "loss_scale=gainstage.loss_scale(opt_state))."
)
TWICE = (
    "This update of gainstage.loss_scaled divides gradients that are true already, as "
    "value_and_grad returns them. Leave loss_scale= out."
)
STALE = (
    "The gradients of this update of gainstage.loss_scaled were computed with the scale of another "
    "state, which never changes. In each step, compute them with the state that update gets: "
    "gainstage.value_and_grad(loss_fn, opt_state)(params)."
)
NO_USE = (
    "The rule of this gainstage.loss_scaled has no effect: the loss of gainstage.self_scaled keeps "
    "a scale of its own. For a scale that follows the rule, train parameters that carry it: "
    "params = gainstage.with_loss_scale(params). For a fixed one, write "
    "gainstage.self_scaled(loss_fn, scale), and leave the rule out."
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
    "Expected the loss itself from fun; got what scale_loss returned. Leave scale_loss out: "
    "value_and_grad and train_step multiply the loss by the loss scale themselves."
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
# By its id, the `applied` of each state that is alive and that an update has taken: an old state.
UPDATED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# By its id, each loss that is alive and that `scale_loss` has returned.
MULTIPLIED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
OLD = (
    "{name} got the state of before the update, which tells whether the step before was applied. "
    "Pass the state that update returned: updates, opt_state = tx.update(grads, opt_state, params)."
)


def mark(scale: Any, *uses: str) -> None:
    """Notes what is done with the loss scale of a state."""
    key = id(scale)
    if key not in _SCALES:

        def freed(_: object) -> None:
            if not {"waiting", "used", "multiplied"}.isdisjoint(_SCALES.pop(key, ((), ()))[1]):
                _UNKNOWN.add("lost")

        _SCALES[key] = weakref.ref(scale, freed), set()
    _SCALES[key][1].update(uses)


def scales_itself() -> None:
    """Notes a loss that scales its own gradients, by no state."""
    _UNKNOWN.add("itself")


def fault(scale: Any, divides: bool, traced: bool, ruled: bool) -> str | None:
    """What is wrong with the gradients of an update, as far as can be known.

    Args:
        scale: the loss scale of the state that the update gets.
        divides: whether the update divides the gradients by a loss scale.
        traced: whether it is inside of a trace.
        ruled: whether its user has chosen a rule for a scale that no parameters carry.
    """
    _, uses = _SCALES.get(id(scale), (None, set[str]()))
    uses.discard("waiting")
    if "constant" in uses and traced:
        return FROZEN
    of_another_trace = isinstance(scale, Tracer) and trace_of(scale) is not trace_ctx.trace
    if of_another_trace and is_constant_of_a_loop(scale):
        return FROZEN
    if "true" in uses:
        twice = "multiplied" in uses and "read" not in uses
        return TWICE if divides else MULTIPLIED_TWICE if twice else None
    if divides or "used" in uses:
        return None
    if "multiplied" in uses:
        return None if "read" in uses else NOT_DIVIDED
    for other, known in _SCALES.values():
        if "constant" in known or ("waiting" in known and _of_one_trace(scale, other())):
            return STALE
    waiting = any("waiting" in known for _, known in _SCALES.values())
    if ruled and not waiting and {"itself"} == _UNKNOWN:
        return NO_USE
    return None if _UNKNOWN or waiting else NOT_SCALED


def is_constant_of_a_loop(scale: Any) -> bool:
    """Whether a scale is a tracer of the function around a loop whose body is traced now."""
    return isinstance(scale, Tracer) and is_around_a_loop(trace_of(scale))


def _of_one_trace(scale: Any, other: Any) -> bool:
    """Whether both scales are arrays, or tracers of one trace."""
    kinds = isinstance(scale, Tracer), isinstance(other, Tracer)
    return kinds == (False, False) or (all(kinds) and trace_of(scale) is trace_of(other))


def forget() -> None:
    """Forgets all scales, as in a new process."""
    _SCALES.clear()
    _UNKNOWN.clear()
    UPDATED.clear()
    MULTIPLIED.clear()

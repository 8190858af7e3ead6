"""The first half of a step: the loss of a train state, its gradients, and what it has changed."""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from gainstage._variables.types import OptState, PyTree
from gainstage.transforms.models import Changeable, apply_changes, nodes_in, only_integers
from gainstage.transforms.value_and_grad import Backward, LossFunction


class StateParts(NamedTuple):
    """What a step changes of a `TrainState`."""

    params: PyTree
    opt_state: OptState
    extra: PyTree
    step: Any


class Beside(NamedTuple):
    """What a loss has changed of the NNX objects in the batch, as `nnx.State`s."""

    batch: list[Any]
    before: PyTree
    after: PyTree


class NewExtra(NamedTuple):
    """What a loss has changed of an NNX model, of the rest of a state, and of the batch."""

    model: PyTree  # the new values, as an `nnx.State`; {} if there are none
    extra: PyTree
    beside: Beside | None = None


def compute_gradients(
    loss: LossFunction,
    state: StateParts,
    scale: jax.Array,
    batch: Sequence[PyTree],
    named: Mapping[str, Any] | None = None,
) -> Backward:
    """The first half of a step: the loss and its scaled gradients. The model is not changed; what
    the loss has changed of it is in `extra`.

    Args:
        loss: what is differentiated.
        state: the state before the step.
        scale: the loss scale, for a loss that needs one.
        batch, named: what the loss takes beside the state.
    """
    model, loss = Changeable(state.params), loss._replace(has_extra=state.extra is not None)
    # A copy: Equinox refuses a `State` that was used once.
    extra = [jax.tree.map(lambda x: x, state.extra)] if loss.has_extra else []
    arguments = (model.tree, *extra, *batch)
    check_arguments(loss, arguments, named or {})
    backward = loss.backward(scale, arguments, named)
    if loss.has_extra and backward.extra is None:
        raise TypeError(
            "Expected (loss, extra) from the loss_fn of a state with an extra; got None for the "
            "extra. Return what is to be kept, or the extra as it was."
        )
    if not model.has_objects:
        return backward
    return backward._replace(extra=NewExtra(model.changes(), backward.extra))


def compute_gradients_beside(
    loss: LossFunction,
    state: StateParts,
    scale: jax.Array,
    batch: Sequence[PyTree],
    named: Mapping[str, Any],
) -> Backward:
    """`compute_gradients`, whose `extra` has what the loss has changed of NNX objects in the batch
    too: `apply_gradients` changes them if the step is applied. Integers, such as the counts of
    `nnx.Rngs`, are changed at once, so that no two calls have the same random numbers."""
    given = tuple(batch), dict(named)
    objects = Changeable(given)
    args, kwargs = objects.tree
    found = compute_gradients(loss, state, scale, args, kwargs)
    after = objects.changes()
    if not after:
        return found
    apply_changes(given, only_integers(after))
    extra = found.extra if isinstance(found.extra, NewExtra) else NewExtra({}, found.extra)
    beside = Beside(nodes_in(given), objects.before(after), after)
    return found._replace(extra=extra._replace(beside=beside))


def check_arguments(
    loss: LossFunction,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    call: str = "step(state",
) -> None:
    """Raises a TypeError for a loss that takes other arguments than it is given.

    Args:
        loss: what is called.
        args, kwargs: with what.
        call: how the user called this, up to the state.
    """
    try:
        inspect.signature(loss.fun).bind(*args, **kwargs)
    except ValueError:  # it has no signature
        return
    except TypeError as error:
        names = "params, extra, *batch" if loss.has_extra else "params, *batch"
        if len(args) == 2 + loss.has_extra and isinstance(args[-1], tuple | list | dict):
            advice = (
                "Take a batch that is a dict as one argument, loss_fn(params, batch), or pass its "
                f"values: {call}, batch['x'], batch['y'])."
                if isinstance(args[-1], dict)
                else f"Unpack a batch that is a {type(args[-1]).__name__}: {call}, *batch)."
            )
        elif loss.has_extra:
            advice = "Take the extra of the state as the second argument."
        elif len(args) > 1 and _is_like(args[0], args[1]):
            advice = "Leave the parameters out, as the state has them: pass the batch alone."
        else:
            advice = (
                "A loss that takes an extra needs a state that has one: "
                "gainstage.TrainState.create(params, tx, extra=extra)."
            )
        raise TypeError(
            f"Expected a loss_fn of ({names}), which is called with {len(args)} arguments here; "
            f"got one that cannot be: {error}. {advice}"
        ) from error


def _is_like(params: PyTree, other: PyTree) -> bool:
    """Whether a pytree has the structure and the shapes of parameters."""
    shapes, others = (
        jax.tree.map(lambda x: getattr(x, "shape", None), tree) for tree in (params, other)
    )
    return bool(jax.tree.leaves(params)) and shapes == others

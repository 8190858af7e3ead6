"""One step of a train state, as pure functions: scale, differentiate, check, update, select."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gainstage._base.arrays import joined, leaves_and_none, one_more
from gainstage._base.checks import InvalidArgumentError, brief
from gainstage._scaling import gradients
from gainstage._scaling.finite_check import SMALL
from gainstage._scaling.retry_loop import Attempt, may_help, try_again
from gainstage._variables.sharding import summed_over
from gainstage._variables.types import OptState, PyTree, Scalar, Structure
from gainstage.transforms.loss_scale_state import (
    LossScaleState,
    loss_scale_state,
    retried,
    state_to_scale_by,
    with_first_scale_if_skipped,
    with_rule_state_unless,
)
from gainstage.transforms.microbatches import Microbatches, gradients_of_parts
from gainstage.transforms.models import (
    Changeable,
    Nnx,
    Partition,
    apply_changes,
    kind_of,
    split,
)
from gainstage.transforms.optax_checks import MissingArgumentError
from gainstage.transforms.retrace import IS_KEPT
from gainstage.transforms.step_gradients import NewExtra, StateParts
from gainstage.transforms.updates import selected, updated
from gainstage.transforms.value_and_grad import Backward, LossFunction


def apply_gradients(
    tx: optax.GradientTransformationExtraArgs,
    state: StateParts,
    grads: PyTree,
    extra: PyTree,
    loss: Scalar | None = None,
    **options: Any,
) -> StateParts:
    """The second half of a step: the state after an update with these gradients, or a skipped one.

    Args:
        tx: the transformation.
        state: the state before the step.
        grads: the gradients, true ones unless `options` has their scale.
        extra: what `compute_gradients` has returned as `extra`.
        loss: the true loss, for rules and transformations that measure it.
        options: what else the update takes.
    """
    model, changes, beside = Changeable(state.params), dict[Any, Any](), None
    if isinstance(extra, NewExtra):
        changes, extra, beside = extra
    elif model.has_objects:
        raise _no_extra(extra)
    if extra is None and state.extra is not None:
        raise _no_extra(extra)
    kind = kind_of(state.params)
    if not isinstance(kind, Nnx):
        check_like("grads", grads, "params", kind.trainable(state.params))
    trainable = kind.chosen(model.tree, grads)
    check_like("grads", grads, "params", trainable)
    _check_extra(extra, state.extra)
    if loss is not None:
        options["value"] = loss
    updates, opt_state = tx.update(grads, state.opt_state, trainable, **options)
    applies = loss_scale_state(opt_state).applied
    if changes:  # such as running means of batch normalisation
        apply_changes(model.tree, selected(changes, model.before(changes), applies))
    if beside is not None:
        apply_changes(beside.batch, selected(beside.after, beside.before, applies))
    params = updated(model.tree, updates, applies)
    if extra is not None:
        extra = selected(extra, jax.tree.map(lambda x: x, state.extra), applies)
    step = jnp.where(applies, one_more(state.step), state.step)
    return StateParts(params, opt_state, extra, step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step has returned beside the arrays of the new state."""

    loss: jax.Array
    aux: list[Any]  # of one, or none
    changes: PyTree  # of the objects of NNX in the batch
    spoiled: jax.Array | None  # the number in `beside` of what is not finite, or -1
    partition: Partition = dataclasses.field(metadata={"static": True})  # of the new state
    beside: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    is_scaled: bool = dataclasses.field(metadata={"static": True})  # whether there was a loss scale
    summed: str = dataclasses.field(metadata={"static": True})  # the axes of `summed_over`


class Taken(NamedTuple):
    """What a step has returned: the arrays of the new state, and the rest."""

    arrays: list[Any]
    outcome: Outcome

    @property
    def opt_state(self) -> OptState:
        """The new state of the optimizer."""
        return self.outcome.partition.combine(self.arrays).rest[0]

    def with_opt_state(self, opt_state: OptState) -> "Taken":
        """The same with another state of the optimizer."""
        lists = self.outcome.partition.lists(self.arrays)
        _, step = self.outcome.partition.rest.combine(lists.rest)
        rest = jax.tree.leaves((opt_state, step))
        return self._replace(arrays=[*lists.params, *lists.extra, *rest])


class Step(NamedTuple):
    """What is the same in all steps of a run.

    Args:
        loss: what is differentiated.
        tx: the transformation.
        retries: the largest number of retries.
        microbatches: how a batch is divided.
    """

    loss: LossFunction
    tx: optax.GradientTransformationExtraArgs
    retries: int = 0
    microbatches: Microbatches = Microbatches()

    def take(
        self,
        partition: Partition,
        arrays: Sequence[Any],
        batch: Sequence[PyTree],
        shardings: Sequence[Any] = (),
    ) -> Taken:
        """A whole step, with its retries.

        Args:
            partition: the state before it, without its arrays; the rest is (opt_state, step).
            arrays: its arrays.
            batch: what the loss takes beside the state. Its objects of NNX stay as they are.
            shardings: a `NamedSharding` for each array of the model; none if they have none.
        """
        state = _state_of(partition, arrays)
        attempt = functools.partial(self._try, batch=batch, shardings=shardings)
        first = attempt(partition, state)
        if not (self.retries and first.outcome.is_scaled):
            return first

        def tried(taken: Taken, before: OptState) -> Attempt:
            old, new = (loss_scale_state(state) for state in (before, taken.opt_state))
            scales = old.rule_state.scale, new.rule_state.scale
            helps = may_help(new.applied, taken.outcome.loss, *scales, self.retries)
            return Attempt(helps, taken)

        def again(skipped: Taken) -> Attempt:
            before = retried(skipped.opt_state)
            arrays, outcome = skipped.with_opt_state(before)
            partition = outcome.partition
            return tried(attempt(partition, _state_of(partition, arrays)), before)

        _, last = try_again(tried(first, state.opt_state), again, self.retries)
        return last.with_opt_state(with_first_scale_if_skipped(last.opt_state, first.opt_state))

    def _try(
        self,
        partition: Partition,
        state: StateParts,
        batch: Sequence[PyTree],
        shardings: Sequence[Any],
    ) -> Taken:
        """A step without retries."""
        opt_state = state.opt_state
        current = state_to_scale_by(opt_state).rule_state.scale
        backward, changes = gradients_of_parts(self.loss, state, current, batch, self.microbatches)
        backward.tell_if_unused()
        grads, scale, options = backward.grads, backward.scale, dict[str, Any]()
        is_first = isinstance(opt_state, LossScaleState)  # others get the gradients first
        if is_first and shardings:
            options |= _sharding_options(partition, shardings, grads)
        if scale is None:
            options["is_scaled"] = False
        elif is_first:
            options["loss_scale"] = scale
        if scale is None or not is_first:
            grads = gradients.unscale(grads, scale)
        if backward.counts is not None:
            options["apply_if"] = backward.counts
        step = functools.partial(
            apply_gradients, self.tx, state, grads, backward.extra, backward.loss, **options
        )
        try:
            new = step()
        except MissingArgumentError as error:
            functions = self._functions(state, batch)
            new = step(**{name: functions[name] for name in error.names if name in functions})
        if backward.counts is not None:  # nothing may count, which is no good step either
            kept = with_rule_state_unless(backward.counts, new.opt_state, opt_state)
            new = new._replace(opt_state=kept)
        arrays, after = split(new.params, new.extra, (new.opt_state, new.step))
        if after.params != partition.params:
            raise ValueError(
                "Expected a loss_fn that does not change the structure of the model; got one that "
                "does. Create all variables of the model before the first step."
            )
        if after == partition:
            after = partition  # the same object, which `train_step` compares by `is`
        applies = loss_scale_state(new.opt_state).applied
        if changes:
            changes = selected(changes, Changeable(batch).before(changes), applies)
        beside, spoiled = _spoiled(backward, state.extra, applies)
        aux = [backward.aux] if self.loss.has_aux else []
        over = summed_over(backward.loss, grads)
        scaled = scale is not None
        outcome = Outcome(backward.loss, aux, changes, spoiled, after, beside, scaled, over)
        return Taken(arrays, outcome)

    def _functions(
        self, state: StateParts, batch: Sequence[PyTree]
    ) -> dict[str, Callable[..., Any]]:
        """What a transformation may call for more values and gradients on a batch: the loss as it
        is, the loss in float32, for second derivatives, and its true gradients."""
        kind, loss, parts = kind_of(state.params), self.loss, self.microbatches
        scale = state_to_scale_by(state.opt_state).rule_state.scale

        def at(trainable: PyTree) -> StateParts:
            model = Changeable(state.params).tree
            new: Any = kind.mapped(lambda old, new: old if new is None else new, model, trainable)
            return state._replace(params=new)

        def value(trainable: PyTree) -> Any:
            def of_part(number: Any) -> Any:
                extra = [] if state.extra is None else [jax.tree.map(lambda x: x, state.extra)]
                part = Changeable(parts.part(batch, number)).tree
                result = loss.fun(at(trainable).params, *extra, *part)
                return loss._replace(has_extra=bool(extra)).parts(result)[0]

            if parts.count == 1:
                return of_part(0)
            each = jax.lax.map(of_part, jnp.arange(parts.count))
            return (parts.shares(batch) * gradients.upcast(each)).sum()

        def value_in_float32(trainable: PyTree) -> Any:
            with IS_KEPT(True):
                return value(trainable)

        def gradients_at(trainable: PyTree, number: Any) -> PyTree:
            found, _ = gradients_of_parts(loss, at(trainable), scale, batch, parts)
            return found.true_grads()

        return {"value_fn": value, "obj_fn": value_in_float32, "grad_fn": gradients_at}


def _state_of(partition: Partition, arrays: Sequence[Any]) -> StateParts:
    """The state of a partition with these arrays."""
    params, extra, (opt_state, step) = partition.combine(arrays)
    return StateParts(params, opt_state, extra, step)


def _sharding_options(
    partition: Partition, shardings: Sequence[Any], grads: PyTree
) -> dict[str, Any]:
    """What an update takes of the shardings of the arrays of a model."""
    model = partition.params.combine(shardings)
    each = leaves_and_none(kind_of(model).chosen(model, grads))
    if None in each:
        return {}
    is_whole = all(sharding.is_fully_replicated for sharding in shardings)
    return {"param_shardings": each} | ({} if is_whole else {"shardings": each})


def _spoiled(
    backward: Backward, extra: PyTree, applies: jax.Array
) -> tuple[tuple[str, ...], jax.Array | None]:
    """The names of the small arrays beside the loss, which cost next to nothing to look at; and the
    number of the first that has a NaN or an inf after an applied step, and had none before, or -1;
    None if there is no array."""
    new = backward.extra.extra if isinstance(backward.extra, NewExtra) else backward.extra
    after, before = (
        {
            joined(path): _is_spoiled(x)
            for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
            if jnp.issubdtype(jnp.result_type(x), jnp.floating) and jnp.size(x) <= SMALL
        }
        for tree in ({"extra": new, "aux": backward.aux}, {"extra": extra})
    )
    if not after:
        return (), None
    is_new = [x if name not in before else x & ~before[name] for name, x in after.items()]
    each = jnp.stack(is_new)
    return tuple(after), jnp.where(applies & each.any(), jnp.argmax(each), -1)


def _is_spoiled(x: jax.Array) -> jax.Array:
    """Whether an array has a NaN or an inf; a negative one may be that of a mask."""
    return (jnp.isnan(x) | (x == jnp.inf)).any()


# ── what a user can get wrong ────────────────────────────────────────────────────────────────────


def _no_extra(extra: object) -> InvalidArgumentError:
    """The error for something else than what `value_and_grad` has returned."""
    return InvalidArgumentError(
        f"Expected the extra that value_and_grad of this state has returned; got {brief(extra)}. "
        f"Write loss, extra, grads = state.value_and_grad(loss_fn)(*batch), then "
        f"state.apply_gradients(grads, extra)."
    )


def _check_extra(extra: PyTree, before: PyTree) -> None:
    """Raises an error for another structure, or numbers that the old extra cannot hold."""
    if before is None and extra is not None:
        raise TypeError(
            f"Expected the extra that value_and_grad of this state has returned, which is None for "
            f"a state without one; got {brief(extra)}. Write state.apply_gradients(grads, extra), "
            f"and loss= for the loss."
        )
    check_like("extra", extra, "extra", before)
    pairs = [jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (extra, before)]
    names = [{jax.tree_util.keystr(path): x for path, x in each} for each in pairs]
    if names[0].keys() != names[1].keys():
        name = min(names[0].keys() ^ names[1].keys())
        raise ValueError(
            f"Expected the extra that a loss returns in the structure of state.extra; got "
            f"{'one more array' if name in names[0] else 'none'} at `extra{name}`."
        )
    own: Structure = jax.tree.structure(extra)
    expected: Structure = jax.tree.structure(before)
    if own != expected:
        raise ValueError(
            f"Expected the extra that a loss returns in the structure of state.extra, "
            f"{brief(expected)}; got {brief(own)}."
        )
    for name, x in names[0].items():
        new, old = (jnp.result_type(each) for each in (x, names[1][name]))
        if jnp.issubdtype(new, jnp.inexact) and not jnp.issubdtype(old, jnp.inexact):
            raise TypeError(
                f"Expected {old} for `extra{name}`, as in state.extra; got {new} from the loss, "
                f"which would be cut off. Create the state with a floating one, such as extra=0.0."
            )


def check_like(name: str, tree: PyTree, other: str, expected: PyTree) -> None:
    """Raises a ValueError for a pytree of another structure, or arrays of other shapes."""

    def shapes(tree: PyTree) -> dict[str, Any]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
        return {
            jax.tree_util.keystr(path): None if leaf is None else jnp.shape(leaf)
            for path, leaf in leaves
        }

    of_given, of_expected = shapes(tree), shapes(expected)
    for path in of_expected | of_given:
        own, wanted = of_given.get(path, "none"), of_expected.get(path, "none")
        if own != wanted and None not in (own, wanted):
            raise ValueError(
                f"Expected {name} in the structure of state.{other}; got shape {own} of "
                f"`{name}{path}` for shape {wanted} of `state.{other}{path}`."
            )

"""Steps that are taken again with the same loss, at a lower scale, while a gradient overflows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._scaling.retry_loop import Attempt, may_help, try_again
from gainstage._variables.bridge import assign, functionalize, read, write
from gainstage._variables.variable import Variable, is_tracing
from gainstage.optimizers._step.differentiate import Differentiated, new_or_old
from gainstage.optimizers._step.store import LossScaleStore


def take_with_retries(
    take: Callable[[], tuple[Any, Sequence[Any], Differentiated]],
    variables: Callable[[], Iterable[Variable]],
    scale_store: LossScaleStore,
    retries: int,
) -> Any:
    """Takes a step, and again while that may help; returns its result.

    Args:
        take: takes the step; returns its result, the conditions on which it was applied, and what
            differentiating the loss has found.
        variables: returns the variables of the optimizer and its weights, once it is built.
        scale_store: the variables of the loss scale and of its telemetry.
        retries: the largest number of steps after the first.
    """
    rule, changed = scale_store.state.rule_state, list[Variable]()
    scales = jax.tree.leaves(rule)

    def attempt() -> Attempt:
        before = rule.scale.value()
        result, conditions, found = take()
        changed[:] = dict.fromkeys([*variables(), *found.assigned])
        applied = jnp.array(conditions, bool).all()
        helps = may_help(applied, found.loss, before, rule.scale.value(), retries)
        return Attempt(helps, (result, applied))

    def again(_: object) -> Attempt:
        observed = scale_store.state.observed
        if observed is not None:  # the step that was skipped is retried instead
            observed.info.skipped_steps.assign_sub(1)
            observed.info.retried_steps.assign_add(1)
        return attempt()

    first = attempt()
    after_one = [variable.value() for variable in scales]
    if is_tracing():  # the variables are carried through the loop
        carried = [variable for variable in changed if variable._is_bound]
        pure = functionalize(again, carried)

        def once_more(last: tuple[Any, list[Any]]) -> Attempt:
            (helps, taken), values = pure(last[1], None)
            return Attempt(helps, (taken, values))

        start = Attempt(first.helps, (first.result, read(carried)))
        _, ((result, applied), values) = try_again(start, once_more, retries)
        write(carried, values)
        write(scales, new_or_old([applied], read(scales), after_one))
        return result
    count, (result, applied) = try_again(first, again, retries)
    if count:
        assign(scales, new_or_old([applied], read(scales), after_one))
    return result

"""The loop that takes a step again with the same batch, at a lower scale, while it overflows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._variables.sharding import on_all_devices

# By which a retry divides the scale where no rule does. A rule halves it, and the next step goes on
# from there. A loss of `self_scaled` starts at its first scale in each step: few tries must do.
BACKOFF = 16.0
UNTIL_IT_FITS = 2**31 - 1  # retries: as many as lower the scale
NO_RETRY = (
    "Retries have no effect with a fixed loss scale: a step is taken again at the scale that the "
    "rule has lowered. Use gainstage.DynamicLossScale(), or leave `retries` out."
)


class Attempt(NamedTuple):
    """A step that was tried."""

    helps: jax.Array  # a bool scalar: whether it may be applied if it is tried again
    result: Any


def checked_retries(name: str, retries: object) -> int:
    """Returns the largest number of retries, `UNTIL_IT_FITS` for True and 0 for False.

    Args:
        name: the argument's name, for the error.
        retries: what the user has passed.
    """
    if isinstance(retries, bool | np.bool_):
        return UNTIL_IT_FITS if retries else 0
    return checks.integer(name, retries, low=0)


def try_again(
    first: Attempt, again: Callable[[Any], Attempt], retries: int
) -> tuple[jax.Array | int, Any]:
    """Tries a step again while that may help; returns how often, and the last result.

    Inside of a trace it is a loop of the program; else the host reads one bit after each try.

    Args:
        first: the step as it was tried once.
        again: a function of the result of a try that tries once more.
        retries: the largest number of tries after the first.
    """
    if not retries:
        return 0, first.result
    if not isinstance(first.helps, Tracer):
        count, last = 0, first
        while count < retries and last.helps:
            count, last = count + 1, again(last.result)
        return count, last.result
    state = lax.while_loop(
        lambda state: state[1].helps & (state[0] < retries),
        lambda state: (state[0] + 1, again(state[1].result)),
        (jnp.int32(0), first),
    )
    return state[0], state[1].result


def may_help(
    applied: jax.Array,
    loss: jax.Array | None,
    before: jax.Array,
    after: jax.Array,
    retries: int,
) -> jax.Array:
    """Whether a step may be applied if it is taken again with the same batch.

    A non-finite loss is so at any scale; and nothing changes at the same scale. Where the number of
    tries has no limit each must be at a lower scale, so that they end whatever the rule does.

    Args:
        applied: whether the step was applied.
        loss: the unscaled loss.
        before, after: the scale of the step, and of the next.
        retries: the largest number of retries.
    """
    is_finite = True if loss is None else jnp.all(jnp.isfinite(loss))
    moves = after < before if retries == UNTIL_IT_FITS else after != before
    return on_all_devices(~jnp.asarray(applied) & is_finite & moves)

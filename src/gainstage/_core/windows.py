"""What becomes of the state where a step is skipped: each way is a value with two pure functions.

`take` runs an update or skips it, and `decide` says whether the loss scale is updated after that.
Windows of accumulation also close themselves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from gainstage._core.bridge import select
from gainstage._core.variable import is_inside

Update = Callable[..., tuple[Any, Any]]  # (state, mask of the gradients) -> (result, state)


def run_if(keep: jax.Array, update: Update, state: Any, *mask: jax.Array) -> Any:
    """The state after `update` where `keep` holds; elsewhere it does not even run.

    Eagerly it runs, and its results are selected: an eager `lax.cond` is compiled at every call.
    """
    if not is_inside():
        return select(keep, lambda state: update(state, *mask), state)[1]
    return lax.cond(keep, lambda state: update(state, *mask)[1], lambda state: state, state)


class Keep:
    """An update always runs, and its kernels select what they store: for what is mostly applied.

    XLA can then fuse it with what comes before.
    """

    def take(
        self, applies: jax.Array, counts: jax.Array, update: Update, state: Any
    ) -> tuple[Any, Any, jax.Array]:
        """Updates the state, or not.

        Args:
            applies: whether the gradients are finite, and nobody has vetoed the step.
            counts: whether the step counts in its window: not if it was vetoed alone.
            update: takes the state and, where it runs on gradients that are not finite, `applies`.
            state: what it changes.

        Returns:
            The result, the state, and whether the update was applied.
        """
        result, state = select(applies, update, state)
        return result, state, applies

    def decide(
        self, state: Any, finite: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array | None, jax.Array]:
        """Whether the scale is updated after this step, None for always; and whether what it
        reacts to was finite."""
        return None, finite


class Branch(Keep):
    """An update runs behind a conditional."""

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: Any) -> Any:
        return None, run_if(applies, update, state), applies


@dataclasses.dataclass(frozen=True)
class Window(Branch):
    """Steps are microbatches of a window; one that is not finite extends it.

    Args:
        steps: microbatches in a window.
    """

    steps: int
    counter: ClassVar[tuple[str, Any] | None] = None  # name and first value of what is counted

    def ends(self, state: Any) -> jax.Array:
        """Whether this microbatch, if it counts, is the last of its window."""
        return (state.iterations + 1) % self.steps == 0

    def close(self, state: Any) -> tuple[Any, Any, jax.Array | None]:
        """At its end: the state, how many gradients were added up, and whether they are enough for
        an update, None for always."""
        return state, self.steps, None

    def has_started(self, state: Any) -> jax.Array:
        """Whether there has been anything finite yet."""
        return state.iterations > 0


class Fail(Window):
    """Nothing changes from the first microbatch on that is not finite."""

    counter = ("failed", False)

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: Any) -> Any:
        failed = state.window_count | (counts & ~applies)
        applies &= ~failed
        return None, run_if(applies, update, state)._replace(window_count=failed), applies

    def decide(self, state: Any, finite: jax.Array, counts: jax.Array) -> Any:
        return counts & self.ends(state) & finite & ~state.window_count, finite


class Renormalise(Window):
    """One that is not finite counts; the average is that of the finite ones."""

    counter = ("good_microbatches", 0)

    def take(self, applies: jax.Array, counts: jax.Array, update: Update, state: Any) -> Any:
        def counted(state: Any, mask: jax.Array) -> Any:
            more = mask.astype(state.window_count.dtype)
            return update(state._replace(window_count=state.window_count + more), mask)

        runs = applies | (counts & self.ends(state))
        state = run_if(runs, counted, state, applies)
        more = jnp.where(counts & ~runs, 1, 0)
        return None, state._replace(iterations=state.iterations + more), applies

    def decide(self, state: Any, finite: jax.Array, counts: jax.Array) -> Any:
        return counts & self.ends(state), finite & (state.window_count + 1 == self.steps)

    def close(self, state: Any) -> tuple[Any, Any, jax.Array | None]:
        finite = state.window_count
        enough = self.is_enough(finite)
        iterations = state.iterations + jnp.where(enough, 0, -self.steps)
        state = state._replace(window_count=jnp.zeros_like(finite), iterations=iterations)
        return state, jnp.maximum(finite, 1), enough

    def is_enough(self, finite: jax.Array) -> jax.Array:
        """Whether so many finite ones are enough for an update."""
        return finite > 0

    def has_started(self, state: Any) -> jax.Array:
        return (state.iterations >= self.steps) | (state.window_count > 0)


class DropWindow(Renormalise):
    """One that is not finite spoils its window: there is no update at its end."""

    def is_enough(self, finite: jax.Array) -> jax.Array:
        return finite == self.steps

    def close(self, state: Any) -> tuple[Any, Any, jax.Array | None]:
        state, count, enough = super().close(state)
        assert enough is not None
        kept = [jnp.where(enough, total, 0) for total in state.accumulators]
        return state._replace(accumulators=kept), count, enough


WINDOWS = {"extend": Window, "renormalise": Renormalise, "drop_window": DropWindow, "fail": Fail}

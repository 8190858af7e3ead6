"""Windows of accumulation: what becomes of one in which a gradient was not finite."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gainstage._core.bridge import keep_if
from gainstage._core.minimizer import Minimizer
from gainstage._core.variable import Variable


class Windows(Minimizer):
    """An optimizer whose steps may be microbatches; `Step` says what a step does."""

    _iterations: Variable

    @abc.abstractmethod
    def _option(self, name: str) -> Any:
        """The option in force."""

    @abc.abstractmethod
    def _skips(self) -> bool:
        """Whether steps that are not finite are skipped."""

    @property
    @abc.abstractmethod
    def _tally(self) -> Variable | None:
        """The finite microbatches of the window, or whether one was not; None if nobody asks."""

    def _tally_of_window(self) -> Variable | None:
        """What has to be counted for `on_bad_microbatch`."""
        policy = self._option("on_bad_microbatch")
        if policy == "extend":
            return None
        if not self._option("gradient_accumulation_steps") or not self._skips():
            raise ValueError(
                f"Expected gradient_accumulation_steps and a loss scale for "
                f"on_bad_microbatch={policy!r}; got none."
            )
        name, first = ("failed", False) if policy == "fail" else ("good_microbatches", 0)
        return Variable(first, name=f"{self.name}/{name}", trainable=False)

    def _raise_if_failed(self) -> None:
        if self._tally is None or not self._fails() or self._tally._traces:
            return
        if bool(self._tally):
            raise FloatingPointError(
                f"Expected finite gradients, for on_bad_microbatch='fail'; got a microbatch with "
                f"one that is not, after {int(self.iterations)} updates. Nothing has changed since."
            )

    def _fails(self) -> bool:
        return self._option("on_bad_microbatch") == "fail"

    def _ends_window(self) -> jax.Array:
        """Whether this microbatch, if it counts, is the last of its window."""
        return (self._iterations.value() + 1) % self._option("gradient_accumulation_steps") == 0

    def _window(self) -> tuple[jax.Array, jax.Array]:
        """Before a step: whether it ends a window, and the tally so far."""
        assert self._tally is not None
        return self._ends_window(), self._tally.value()

    def _take_microbatch(
        self, update: Callable[..., None], fine: jax.Array, asked: jax.Array
    ) -> jax.Array:
        """Runs `update` on a microbatch, or not, as the policy says.

        Args:
            update: takes the step; given a bool scalar, with zeros where that does not hold.
            fine: whether it is finite and wanted.
            asked: whether it belongs to the window.

        Returns:
            Whether it was taken.
        """
        tally, state = self._tally, (list(self._index), self.variables)
        assert tally is not None
        if self._fails():
            failed = tally.value() | (asked & ~fine)
            fine &= ~failed
            keep_if(fine, update, state, branches=True)
            tally.assign(failed)
            return fine

        def count() -> None:
            tally.assign_add(fine.astype(tally.dtype))
            update(fine)

        counts = fine | (asked & self._ends_window())
        keep_if(counts, count, state, branches=True)
        self._iterations.assign_add(jnp.where(asked & ~counts, 1, 0))
        return fine

    def _close_window(self) -> tuple[Any, jax.Array | None]:
        """At its end: how many gradients were added up, and whether they are enough for an update;
        None if nobody asks."""
        steps, tally = self._option("gradient_accumulation_steps"), self._tally
        if tally is None or self._fails():
            return steps, None
        good = tally.value()
        enough = good == steps if self._option("on_bad_microbatch") == "drop_window" else good > 0
        tally.assign(0)
        self._iterations.assign_add(jnp.where(enough, 0, -steps))
        return jnp.maximum(good, 1), enough

    def _window_after(
        self, before: Any, finite: jax.Array, asked: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Whether a loss scale may move after it, and whether all of the window was finite."""
        ends, tally = before
        if self._fails():
            return asked & ends & finite & ~tally, finite
        good = finite & (tally + 1 == self._option("gradient_accumulation_steps"))
        return asked & ends, good


def is_asked(finite: jax.Array, only_if: jax.Array | None) -> jax.Array:
    """Whether a microbatch belongs to its window: not if `only_if` alone turned it down. Where it
    is not finite itself that may be why."""
    return jnp.ones_like(finite) if only_if is None else only_if | ~finite

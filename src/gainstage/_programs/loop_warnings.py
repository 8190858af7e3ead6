"""What a loop is told: that it goes on from an old state, or compiles the step in each turn."""

import functools
import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gainstage._base.dead_run import Watch
from gainstage._base.warn import library_folders, warn
from gainstage._programs.stale_constants import Captured

REMADE = 10  # steps that are called once each, in a loop


SAME_STATE = (
    "{n} calls of {name} in a row got the same opt_state, so neither the loss scale nor the state "
    "of the optimizer changes. Pass on what each call returns: {name} returns the new opt_state."
)


EAGER_STEPS = 1000  # updates outside of a compiled function, with which a loop is no trial
_EAGER = (
    "{n} updates of gainstage.loss_scaled ran outside of jax.jit, where each operation runs alone, "
    "which takes many times longer. Put gainstage.value_and_grad, tx.update and "
    "gainstage.apply_updates into one function under jax.jit, or use gainstage.train_step."
)


class Eager:
    """Counts the updates of a transformation outside of a compiled function, and warns once."""

    def __init__(self) -> None:
        self._steps = 0

    def note(self) -> None:
        """Notes an update."""
        self._steps += 1
        config: Any = jax.config  # of which type checkers know no flags
        if self._steps == EAGER_STEPS and not config.jax_disable_jit:
            warn(_EAGER.format(n=EAGER_STEPS))


class Repeats:
    """Sees a loop in which each step gets one array, because the new one is not passed on.

    Args:
        message: what is said of {n} such steps in a row.
        **names: what else the message names.
    """

    def __init__(self, message: str, **names: str):
        self._message, self._steps = message.format(n=REMADE, **names), 0
        self._last: weakref.ref[Any] | None = None  # the array of the last step
        self._warned = False

    def note(self, array: Any) -> bool:
        """Notes a step that got this array; returns whether the step before got it too."""
        if self._last is None or self._last() is not array:
            self._last, self._steps = weakref.ref(array), 0
        self._steps += 1
        if self._steps == REMADE and not self._warned:
            self._warned = True
            warn(self._message)
        return self._steps > 1


_SHARED = (
    "{n} calls of gainstage.train_step in a row got the opt_state of the call before, but the "
    "params of the one before that, so two models share one state. Give each its own: "
    "a, state_a, loss = step(a, state_a, x), and b, state_b, loss = step(b, state_b, x)."
)
_RESTARTED = (
    "gainstage.train_step got the params of its last call with a new state of tx.init for the "
    "{n}th time, so the momenta and the loss scale begin again each time. Call tx.init once, "
    "before the loop over epochs."
)
# By its id, the flag of each state that is alive and that `init` has returned.
FRESH: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class SharedStates:
    """Sees a loop that trains two models in turn with one state, or one with new states."""

    def __init__(self) -> None:
        self._restarts = 0
        self._applied: weakref.ref[Any] | None = None  # the flag of the last result
        self._arrays: list[weakref.ref[Any]] = []  # the first array of each of the last two
        self._steps = 0

    def before(self, applied: Any, arrays: Sequence[Any], state: Any) -> None:
        """Notes what a step gets: the flag of its state, the parameters, and the inner state."""
        known = [reference() for reference in self._arrays]
        goes_on = self._applied is not None and self._applied() is applied
        alone = len(known) < 2 or known[0] is known[1] or known[0] is None
        of_before = not alone and bool(arrays) and known[0] is arrays[0]
        self._steps = self._steps + 1 if goes_on and of_before else 0
        if self._steps == REMADE and any(np.ndim(x) for x in jax.tree.leaves(state)):
            warn(_SHARED.format(n=REMADE))
        is_last = bool(known and arrays) and known[-1] is arrays[0]
        if is_last and FRESH.pop(id(applied), None) is applied and not goes_on:
            self._restarts += 1
            if self._restarts == REMADE:
                warn(_RESTARTED.format(n=REMADE))

    def after(self, applied: Any, arrays: Sequence[Any]) -> None:
        """Notes what a step returns."""
        self._applied = weakref.ref(applied)
        self._arrays = [*self._arrays[-1:], *map(weakref.ref, arrays[:1])]


COMPILED = 20  # calls in a row that are compiled, with which shapes or values count as too many
_COMPILED = (
    "{n} calls of gainstage.train_step in a row were compiled, each for another kind of arguments: "
    "{change}. Pad arrays to one shape, or to a few; a number that changes is an array: "
    "jnp.float32(x)."
)


class Compilations:
    """Sees a loop whose arguments are of another kind in each step, so that each is compiled."""

    def __init__(self) -> None:
        self._traces = self._row = 0
        self._kind: dict[str, str] = {}  # of the arguments before

    def note(self, traces: int, arguments: Sequence[Any]) -> None:
        """Notes that a step begins, after so many compilations, with these arguments."""
        config: Any = jax.config  # of which type checkers know no flags
        self._row = self._row + 1 if traces > self._traces else 0
        self._traces = traces
        if self._row == COMPILED - 1:
            self._kind = _kind(arguments)
        elif self._row == COMPILED and not config.jax_disable_jit:
            new = _kind(arguments)
            changed = [name for name in new if new[name] != self._kind.get(name)]
            change = "what is not an array in params or batch has changed"
            if changed:
                name = changed[0]
                change = f"`{name}` is {new[name]}, and was {self._kind.get(name, 'not there')}"
            warn(_COMPILED.format(n=COMPILED, change=change))


def _kind(arguments: Sequence[Any]) -> dict[str, str]:
    """The shapes and dtypes of the arguments of a step, by their names."""
    _, params, _, _, *batch = arguments
    flat = jax.tree_util.tree_flatten_with_path({"params": params, "batch": batch})[0]
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat)
    kinds = (f"{np.shape(x)} of {getattr(x, 'dtype', type(x).__name__)}" for _, x in flat)
    return dict(zip(names, kinds, strict=True))


_TIMES = itertools.count()
# The steps of one code that were called once each, one made after the call of the other: their
# number, the time of the last call, and what that used and returned.
_ONCE: dict[Any, tuple[int, int, list[weakref.ref[Any]]]] = {}


class Calls:
    """Counts the calls of a compiled function, and warns of a loop that creates it in each turn.

    Such a loop is one in which each uses what the last one used or returned. So a sweep that calls
    each step once, or a list of steps that are made before the first call, is none.

    Args:
        fn: what is compiled.
        message: what is said of {n} of them.
    """

    def __init__(self, fn: Callable[..., Any], message: str):
        fn = inspect.unwrap(getattr(fn, "func", fn))
        self._code, self._message = getattr(fn, "__code__", None), message
        is_inside = self._code is not None and self._code.co_filename.startswith(library_folders())
        self._created, self._calls = next(_TIMES), 2 if is_inside else 0

    def note(self, used: Sequence[Any]) -> bool:
        """Notes a call that uses these objects; returns whether it is the first."""
        if self._calls == 2:
            return False
        self._calls += 1
        if self._calls == 2:
            _ONCE.pop(self._code, None)
            return False
        row, when, known = _ONCE.get(self._code, (0, 0, []))
        alike = self._created > when and any(last() is x for last in known for x in used)
        row = row + 1 if alike else 1
        _ONCE[self._code] = row, next(_TIMES), [weakref.ref(x) for x in used]
        if row == REMADE:
            warn(self._message.format(n=REMADE))
        return True

    def gave(self, result: Any) -> None:
        """Notes what the first call returned."""
        if self._code in _ONCE:
            _ONCE[self._code][2].append(weakref.ref(result))


_STEP_REMADE = (
    "{n} steps of gainstage.train_step with the same loss were created and called once each, and "
    "each was compiled. Create the step before the loop: step = gainstage.train_step(loss_fn, tx). "
    "A rate that changes is a schedule of optax, which needs no new tx."
)
_SAME_PARAMS = (
    "{n} calls of gainstage.train_step in a row got the same params, so no step builds on the one "
    "before. Pass on what each call returns: params, opt_state, loss = step(params, opt_state, x)."
)
_CAPTURED = (
    "this step of gainstage.train_step",
    "loss_fn(params, ..., {new}), and step(params, opt_state, ..., {names})",
)
_WATCHES: deque[Watch] = deque(maxlen=16)  # those of the newest steps


class Loop:
    """What a step of `train_step` sees of the loop around it.

    Args:
        loss_fn, update: the loss and the transformation of the step.
        lowest: the scale at which a warning is due; 0 for none.
    """

    def __init__(self, loss_fn: Callable[..., Any], update: Callable[..., Any], lowest: float):
        self._update, self._watch = update, Watch(lowest)
        self._calls = Calls(loss_fn, _STEP_REMADE)
        self._states = Repeats(SAME_STATE, name="gainstage.train_step")
        self._params = Repeats(_SAME_PARAMS)
        self._shared, self._compilations = SharedStates(), Compilations()
        self.captured = Captured(loss_fn, *_CAPTURED)
        self._is_first = self._same_state = False

    def look(self, scale: Callable[[], Any]) -> None:
        """Looks at earlier steps, if it is time; `scale` returns the current loss scale."""
        self._watch.look(scale)

    def goes_on(self, applied: Any) -> bool:
        """Whether this is the flag of the state that the last step returned."""
        return self._watch.ended_with(applied)

    def before(
        self, applied: Any, trace: functools.partial[Any], arrays: Sequence[Any], state: Any
    ) -> None:
        """Notes a step.

        Args:
            applied: the flag of the state that it starts from.
            trace: returns its program, for its arguments.
            arrays, state: the parameters, and the rest of the state.
        """
        self._compilations.note(self.captured.traces, trace.args)
        if self.captured.watched is None:
            self.captured.begin(lambda: trace().jaxpr)
        elif self.captured.watched:
            self.captured.look()
        self._is_first = self._same_state = False
        if not isinstance(applied, jax.Array):  # one of another library, or of the host
            return
        self._is_first = self._calls.note((self._update, applied))
        if self._is_first:
            earlier = next((watch for watch in _WATCHES if watch.ended_with(applied)), None)
            if earlier is None:
                _WATCHES.append(self._watch)
            else:
                self._watch = earlier  # the run of another step goes on
        self._same_state = self._states.note(applied)
        self._shared.before(applied, arrays, state)

    def after(
        self, applied: Any, loss: Any, params: Any, arrays: Sequence[Any], scale: Any
    ) -> None:
        """Notes its result.

        Args:
            applied: whether it was applied.
            loss: its true loss.
            params: the first array of those that it got and did not return, None if unknown.
            arrays: the parameters that it returns.
            scale: the loss scale after it.
        """
        if isinstance(applied, jax.Array):
            self._shared.after(applied, arrays)
            if self._is_first:
                self._calls.gave(applied)
        if isinstance(params, jax.Array) and not self._same_state:
            self._params.note(params)
        self._watch.see(applied, loss, scale=scale)

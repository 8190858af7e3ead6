"""Remedies: changes that make the step right, each tried by running it again."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from gainstage._base.checks import as_power
from gainstage._programs.places import layer_of
from gainstage._xray.causes import Cause, importance, line_of_result, lost_share, operation_name
from gainstage._xray.numbers import whole_error
from gainstage._xray.program import Program
from gainstage._xray.walk import Changes, Ran, Result, walk_through
from gainstage._xray.windows import Window, common_window

GOOD = 0.01  # the relative error of all gradients at which the search ends
USELESS = 0.5  # an error above which a change does not help
SHOWN_LINES = 5  # of the user, in a piece of code
MARGIN = 1  # powers of two below the largest scale that fits


class Remedy(NamedTuple):
    """A change that was tried, and its outcome."""

    kind: str  # "scale", "float32" or "local"
    change: str  # the change, as text
    places: tuple[str, ...]  # the lines or layers that it changes
    scale: float  # the loss scale
    is_finite: bool  # whether loss and gradients were
    loss: float
    # relative to float32: the larger of the loss's and of all gradients' together; nan if they were
    # not finite
    error: float
    code: str = ""  # the code to write for it, if it is known

    @property
    def helps(self) -> bool:
        """Whether it makes the step finite, and gradients at most half off."""
        return self.is_finite and not self.error > USELESS

    def __str__(self) -> str:
        if not self.is_finite:
            return f"{self.change}: still not finite"
        came = f"finite, loss {self.loss:.4g}"
        if not self.helps:
            return f"{self.change}: does not help: {came}, with gradients {self.error:.0%} off"
        return f"{self.change}: {came}, with gradients within {self.error:.2%} of float32"


def remedies_for(
    program: Program,
    ran: Ran,
    scale: float,
    causes: Sequence[Cause],
    windows: Mapping[str, Window],
    tick: Callable[[], Any],
    is_cast: bool = False,
) -> list[Remedy]:
    """Tries changes that might make the step right.

    Args:
        program, ran, scale: the step, and its run at this scale.
        causes: the causes of the problem, if there is one.
        windows: the windows of the layers, as `windows_of` returns them.
        tick: called after each equation.
        is_cast: whether the step is under `autocast`, so that `keep_float32` keeps its operations.
    """
    if not causes or any(c.kind not in ("overflow", "underflow") for c in causes):
        return []
    trial = _Trial(program, ran, scale, tick, is_cast)
    remedies: list[Remedy] = []
    if all(cause.is_backward for cause in causes) and windows:
        fits = common_window(windows)
        if not fits.is_empty:
            best = max(fits.high - MARGIN, fits.low)
            remedies.append(trial.with_scale(2.0**best))
        else:
            remedies.append(trial.with_scale(2.0 ** (fits.high - MARGIN)))
            remedies += trial.with_local_scales(windows)
    return [*remedies, *trial.in_float32(causes)]


class _Trial:
    def __init__(
        self, program: Program, ran: Ran, scale: float, tick: Callable[[], Any], is_cast: bool
    ):
        self._program, self._ran, self._scale, self._tick = program, ran, scale, tick
        self._is_cast = is_cast

    def with_scale(self, scale: float) -> Remedy:
        change = f"a loss scale of {as_power(scale)} instead of {as_power(self._scale)}"
        return self._tried("scale", change, (), Changes(scale=scale))

    def with_local_scales(self, windows: Mapping[str, Window]) -> list[Remedy]:
        """Tries a scale for most layers, and a local scale for each layer that it does not fit."""
        bounds = {layer: w for layer, w in windows.items() if not w.is_empty}
        known = [w for w in bounds.values() if math.isfinite(w.low)]
        if len(bounds) < len(windows) or not known:
            return []
        candidates = sorted({w.high - MARGIN for w in known} | {w.low for w in known})

        def local(s: float) -> dict[str, int]:
            return {
                layer: int(max(w.high - MARGIN, w.low) - s)
                for layer, w in bounds.items()
                if not w.low <= s <= w.high
            }

        best = min(candidates, key=lambda s: (len(local(s)), -s))
        each = local(best)
        if not each or len(each) > len(windows) / 2:
            return []
        scales = ", ".join(
            f"locally_scaled({name}, {as_power(2.0**n)})" for name, n in each.items()
        )
        change = f"{scales} under a loss scale of {as_power(2.0**best)}"
        changes = Changes(scale=2.0**best, local=MappingProxyType(each))
        return [self._tried("local", change, tuple(each), changes)]

    def in_float32(self, causes: Sequence[Cause]) -> list[Remedy]:
        """Tries float32 for results outside the range of their dtype, and for operations that read
        them. If that does not help, adds the results that are lost."""
        outside, lost = _outside(self._ran), _lost_results(self._ran, causes)
        both = outside + [r for r in lost if r not in outside]
        underflows = any(cause.kind == "underflow" for cause in causes)
        found: list[Remedy] = []
        for chosen in [both] if underflows or not outside else [outside, both]:
            lines = (line_of_result(self._ran, r) for r in chosen)
            each = zip(lines, chosen, strict=True)
            names = (
                f"{line} {operation_name(r.op, r.dtype)} ({layer_of(r.place)})".strip()
                for line, r in each
            )
            places = tuple(dict.fromkeys(names))
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            islands = frozenset({r.path for r in chosen} | _readers(self._ran, chosen))
            change = f"float32 for {'; '.join(places[:3])}{more}"
            changes = Changes(self._scale, islands)
            if islands:
                tried = self._tried("float32", change, places, changes)
                found = [tried._replace(code=self._kept(islands) if self._is_cast else "")]
            if found and found[0].error <= GOOD:
                break
        return found

    def _kept(self, islands: frozenset[tuple[int, ...]]) -> str:
        """The code that keeps these operations in float32."""
        kept = (r for r in self._ran.results if r.path in islands and r.is_half)
        lines = [*filter(None, dict.fromkeys(line_of_result(self._ran, r) for r in kept))]
        more = f" and {len(lines) - SHOWN_LINES} more lines" * (len(lines) > SHOWN_LINES)
        where = f" around {', '.join(lines[:SHOWN_LINES])}{more}" * bool(lines)
        return f"with gainstage.keep_float32():{where}"

    def _tried(self, kind: str, change: str, places: tuple[str, ...], changes: Changes) -> Remedy:
        ran = walk_through(self._program, changes, False, self._tick)
        loss_of_reference, *references = self._ran.references
        error = whole_error(ran.gradients, changes.scale, references, self._scale)
        error = max(error, whole_error([ran.loss], 1.0, [loss_of_reference], 1.0))
        loss = float(np.asarray(jax.device_get(ran.loss)))
        return Remedy(kind, change, places, changes.scale, ran.is_finite, loss, error)


def _outside(ran: Ran) -> list[Result]:
    """The results that exceed their dtype."""
    return [r for r in ran.results if r.overflows]


def _lost_results(ran: Ran, causes: Sequence[Cause]) -> list[Result]:
    """The results whose subnormal rounding matters, and those that led to a cause."""
    weights = importance(ran)
    half = (r for r in ran.results if r.is_half)
    ids = {r.id for r in half if lost_share(r) * weights.get(r.id, 0.0) > GOOD}
    todo = [cause.result for cause in causes if cause.kind == "underflow"]
    while todo:  # operands that were already lost
        for i in ran.results[todo.pop()].operands:
            if ran.results[i].flushed and i not in ids:
                ids.add(i)
                todo.append(i)
    return [ran.results[i] for i in sorted(ids)]


def _readers(ran: Ran, chosen: Sequence[Result]) -> set[tuple[int, ...]]:
    ids = {r.id for r in chosen}
    return {r.path for r in ran.results if r.path and ids.intersection(r.operands)}

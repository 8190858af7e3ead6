"""The factors of `locally_scaled` that fit parts of a network, and gradients inside of the loss."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gainstage._base.checks import as_power
from gainstage._programs.jaxprs import Path
from gainstage._xray.causes import Cause, importance, line_of_result
from gainstage._xray.walk import Ran, Result
from gainstage._xray.windows import is_measured, window_of

# Powers of two below the largest factor that fits. A factor stays the same while the numbers in
# training do not, and one that is too large costs each step. So it gets more room than a loss
# scale, which is halved. It gets no more than that, because the cotangents of the whole loss are
# divided by it where they go through the gradient inside.
SPARE_POWERS = 4


class LocalFactor(NamedTuple):
    """A factor for `gainstage.transforms.locally_scaled` that fits, where another is, or none."""

    line: str  # file and line of the user
    now: float  # the factor that is there; 1 if there is none
    fits: float  # the factor that fits, a power of two
    message: str  # what is wrong, and what to write

    def __str__(self) -> str:
        return self.message


def factors_of(ran: Ran, causes: Sequence[Cause], scale: float, error: float) -> list[LocalFactor]:
    """Returns the factors that mend a bad step: of gradients inside of the loss that they do not
    fit, and of parts of the network that no loss scale fits together with the others.

    Args:
        ran: a run with its references.
        causes: why the step is bad.
        scale: the loss scale of that run.
        error: the relative error that rounding one result to subnormal numbers may cause.
    """
    if not any(cause.kind in ("overflow", "underflow") for cause in causes):
        return []
    weights, is_behind = importance(ran), any(cause.is_backward for cause in causes)
    found = []
    for part in _parts_under_factors(ran):
        if not part[0].is_backward:
            found.append(_of_inner_gradient(ran, part, weights, error))
        elif is_behind:
            found.append(_of_network_part(ran, part, weights, math.log2(scale), error))
    return [factor for factor in found if factor is not None]


def _parts_under_factors(ran: Ran) -> Iterator[list[Result]]:
    """The results of each part: those with one factor that depend on each other, in any iteration
    of a loop."""
    results: dict[Path, list[Result]] = defaultdict(list)
    beside: dict[Path, set[Path]] = defaultdict(set)
    for result in ran.results:
        if result.factor is None:
            continue
        results[result.path].append(result)
        for operand in (ran.results[i] for i in result.operands):
            if (operand.factor, operand.is_backward) == (result.factor, result.is_backward):
                beside[result.path].add(operand.path)
                beside[operand.path].add(result.path)
    seen: set[Path] = set()
    for start in results:
        todo, part = [start], list[Result]()
        while todo:
            path = todo.pop()
            if path not in seen:
                seen.add(path)
                part += results[path]
                todo += beside[path]
        if part:
            yield sorted(part, key=lambda result: result.id)


def _of_inner_gradient(
    ran: Ran, part: Sequence[Result], weights: Mapping[int, float], error: float
) -> LocalFactor | None:
    """The factor that fits a gradient inside of the loss, if the present one does not."""
    first, now = part[0], part[0].factor or 0.0
    window = window_of(part, weights, now, error)
    fits = max(window.high - SPARE_POWERS, window.low)
    if window.low <= now <= window.high or window.is_empty or not math.isfinite(fits):
        return None
    halves = [r for r in part if is_measured(r)]
    line = first.place.line if now else line_of_result(ran, halves[0])
    where = "the gradient inside of the loss" + f" at {line}" * bool(line)
    is_too = "too large" if fits < now else "too small"
    if now:
        wrong = f"the factor {as_power(2.0**now)} of {where} is {is_too}"
    else:
        wrong = f"{where} is {is_too} for {halves[0].dtype}, and has no factor of its own"
    return LocalFactor(
        line, 2.0**now, 2.0**fits,
        f"{wrong}: float32 has at most {max(r.ref.max for r in halves):.3g} there. "
        f"{as_power(2.0**fits)} fits: "
        f"jax.grad(gainstage.transforms.locally_scaled(part, 2.0**{fits:.0f}))",
    )  # fmt: skip


def _of_network_part(
    ran: Ran, part: Sequence[Result], weights: Mapping[int, float], at: float, error: float
) -> LocalFactor | None:
    """The factor with which a part overflows at the same loss scale as the others, if no scale of
    at least 1 fits both."""
    first, now, within = part[0], part[0].factor or 0.0, {result.id for result in part}
    others = [r for r in ran.results if r.is_backward and r.id not in within]
    own, rest = (window_of(each, weights, at, error) for each in (part, others))
    change = own.high - rest.high
    fits_both = max(own.low, rest.low, 0.0) <= min(own.high, rest.high)
    if fits_both or not change or not math.isfinite(change):
        return None
    line, fits, is_too = first.place.line, round(now + change), "large" if change < 0 else "small"
    return LocalFactor(
        line, 2.0**now, 2.0**fits,
        f"the factor {as_power(2.0**now)} of the part{f' at {line}' * bool(line)} is too {is_too} "
        f"beside the others. {as_power(2.0**fits)} fits: "
        f"gainstage.transforms.locally_scaled(part, 2.0**{fits})",
    )  # fmt: skip

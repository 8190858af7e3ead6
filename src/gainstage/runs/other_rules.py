"""Replay: what another rule would have done on a recorded run."""

# A record says more than whether its step was skipped. A step that was finite at one scale is
# finite at every lower scale. A step that overflowed overflows at every higher one. Bad data is not
# finite at any scale. So the record decides most steps of another rule, nearby steps decide others,
# and the rest are presumed and counted.

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from gainstage._base.checks import LARGEST, LARGEST_FLOAT16, SMALLEST, as_power
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import DynamicLossScale, FixedLossScale, LossScale, advance, start
from gainstage.runs.header import code_of
from gainstage.runs.largest import LargestGradient
from gainstage.runs.messages import IF_DATA, XRAY
from gainstage.runs.recording import Run
from gainstage.runs.skip_causes import why_skipped

__all__ = ["Outcome", "Replay", "advice", "default_rules", "replay"]

ESTIMATE = "largest gradient"  # `max_abs`, estimated where it was not measured
LOST_BITS = 3  # powers of two that bad data took from the scale, from which on it is said
NEAR = 50  # nearby steps, before and after, that are used for a step that is not decided


class Outcome(NamedTuple):
    """What a rule did, or would have done: arrays with one element per step.

    `bits` is the mean of log2 of the scale over the highest scale that was applied within 50
    steps. It is negative if the scale was lower than it could have been.
    """

    scales: np.ndarray  # float32
    skips: np.ndarray  # bool
    bad: np.ndarray  # bool: the skips that no scale would have avoided
    known: np.ndarray  # bool: whether the step itself decides what happens at this scale
    presumed: np.ndarray  # bool: whether not even nearby steps decide it
    bits: float


class Replay(NamedTuple):
    """The recorded outcome, that of each rule, and why some rules were left out."""

    recorded: Outcome
    outcomes: dict[str, Outcome]
    left_out: dict[str, str]


class _Evidence(NamedTuple):
    """The bounds that each step gives: float32 scales, 0 or inf if nothing is known."""

    fits: np.ndarray  # at this scale and below the step was finite
    over: np.ndarray  # at this scale and above it was not
    near_fits: np.ndarray  # the highest scale that was applied nearby
    near_over: np.ndarray  # from this scale up, nearby steps overflowed
    far_over: np.ndarray  # from this scale up, the whole run suggests an overflow


def replay(run: Run, rules: Mapping[str, LossScale] | None = None) -> Replay:
    """Replays rules on a recorded run, each from its own first scale.

    If a step's own record does not decide, nearby steps do. The step overflows if two steps within
    50 overflowed at this scale or a lower one. It also overflows if one did, unless two within 100
    were finite at this scale or a higher one. Otherwise it is finite if one within 50 was.

    If nearby steps do not decide, the step is presumed finite. The exception: its gradients would
    be larger than any finite ones of the run, and smaller ones overflowed. `max_abs` gives their
    size, or else `grad_norm`. A presumed overflow has infinities and no NaN.

    Args:
        run: a run with `finite` and `loss_scale` of nearly every step. With `max_abs`, a higher
            scale is known to overflow if it takes that beyond float16. This needs a `max_abs` that
            was measured in the step; between measurements it is only estimated from the norm.
        rules: rules by any name; `default_rules(run)` if None. Rules that need what the run did
            not record are left out.

    Raises:
        ValueError: less than nine tenths of the steps were recorded.

    Examples:
        >>> import numpy as np
        >>> import gainstage as gs
        >>> from gainstage.diagnostics import Run, other_rules
        >>> scale = 2.0 ** np.array([18, 17, 16, 15, 15])  # it started too high
        >>> run = Run(np.arange(5), {"loss_scale": scale, "finite": np.array([0, 0, 0, 1, 1])})
        >>> replayed = other_rules.replay(run, {"lower": gs.DynamicLossScale(2.0**17)})
        >>> outcome = replayed.outcomes["lower"]
        >>> print(outcome.scales, outcome.skips.sum())
        [131072.  65536.  32768.  32768.  32768.] 2
    """
    run = _usable(run)
    evidence, skips = _evidence(run), why_skipped(run)
    bad = skips["NaN"] | skips["bad loss"]
    limits = np.maximum(evidence.far_over, _above(evidence.near_fits))
    limits = np.minimum(np.minimum(limits, evidence.near_over), evidence.over)
    limits = np.where(bad, np.float32(0), np.maximum(limits, _above(evidence.fits)))
    measured = _measured(run)
    outcomes, left_out = {}, {}
    for name, rule in (default_rules(run) if rules is None else rules).items():
        if missing := [wanted for wanted in rule.measures if wanted not in measured]:
            left_out[name] = f"needs {' and '.join(missing)}, not recorded"
            continue
        wanted = {each: measured[each] for each in rule.measures}
        scales = np.asarray(_scales(rule, limits, wanted))
        outcomes[name] = _outcome(evidence, scales, scales >= limits, bad)
    scales = run.get("loss_scale").astype(np.float32)
    return Replay(_outcome(evidence, scales, run.skipped, bad), outcomes, left_out)


def default_rules(run: Run) -> dict[str, LossScale]:
    """Returns the rules that `gainstage report` replays, by the code that creates them."""
    scales = run.get("loss_scale")
    first = float(scales[np.isfinite(scales)][0]) if np.isfinite(scales).any() else 0.0
    rules: list[LossScale] = [
        AdaptiveLossScale(),
        DynamicLossScale(),
        DynamicLossScale(increment_period=200),
        DynamicLossScale(hysteresis=2),
        FixedLossScale(2.0**15),
        FixedLossScale(2.0**10),
        FixedLossScale(1.0),
    ]
    if SMALLEST <= first <= LARGEST and first != 2.0**15:
        rules.insert(1, DynamicLossScale(first))
    return {code_of(rule): rule for rule in rules}


def advice(replayed: Replay, in_use: str = "") -> list[str]:
    """Returns one sentence if another rule would have skipped less than half as many steps.

    Its mean scale must not be more than 2 bits lower, because any rule avoids skips that way. At
    most one decision in twenty may be presumed. A fixed scale is never advised: it may not suit
    what comes after the run. Else a sentence says if bad data lowered the scale, and
    `AdaptiveLossScale` holds it.

    Args:
        replayed: the result of `replay`.
        in_use: the code of the run's rule, which is never advised. Nor is `AdaptiveLossScale` if
            the run used it with other arguments.
    """
    if not isinstance(replayed, Replay):
        raise TypeError(
            f"Expected the result of replay for replayed; got {type(replayed).__name__}. Write "
            f"advice(replay(run))."
        )
    recorded = replayed.recorded
    rules = {
        name: (int(other.skips.sum()), -other.bits)
        for name, other in replayed.outcomes.items()
        if not name.startswith("Fixed")
        and name != in_use
        and not name.startswith("Adaptive") & in_use.startswith("Adaptive")
        and other.bits >= min(recorded.bits, 0) - 2
        and other.presumed.mean() <= 0.05
    }
    best = min(rules, key=lambda name: rules[name], default=None)
    now = int(recorded.skips.sum())
    if best is None or 2 * rules[best][0] >= now or now < 5:
        return _held(replayed, in_use)
    count = rules[best][0]
    steps = f"{count} step{'s' * (count != 1)}"
    given = ", given the loss" if best.startswith("Adaptive") else ""
    return [f"{best} would have skipped {steps} instead of {now}: rule=gs.{best}{given}"]


def _held(replayed: Replay, in_use: str) -> list[str]:
    """One sentence if steps that no scale makes finite lowered it, and `AdaptiveLossScale` would
    have held it."""
    recorded, rule = replayed.recorded, "AdaptiveLossScale()"
    held = replayed.outcomes.get(rule)
    if held is None or in_use.startswith("Adaptive") or not _falls_after_bad(recorded):
        return []
    ends = [float(outcome.scales[-1]) for outcome in (recorded, held)]
    if held.skips.sum() > recorded.skips.sum() or ends[1] < 2**LOST_BITS * ends[0]:
        return []
    return [
        f"Steps that no scale makes finite lowered it to {as_power(ends[0])}. They have bad data, "
        f"too high a learning rate, or an overflow in the forward pass. {XRAY}. {IF_DATA}, given "
        f"the loss, holds the scale; it skips the same steps."
    ]


def _falls_after_bad(recorded: Outcome) -> bool:
    """Whether a step that no scale makes finite lowered the scale."""
    return bool((recorded.bad[:-1] & (recorded.scales[1:] < recorded.scales[:-1])).any())


def _usable(run: Run) -> Run:
    """The run without steps whose finiteness or scale is unknown, with an estimate of the largest
    gradient of each remaining step."""
    scale = run.get("loss_scale")
    there = np.isfinite(run.get("finite")) & (scale >= SMALLEST) & (scale <= LARGEST)
    steps = int(run.steps[-1]) - int(run.steps[0]) + 1
    if there.sum() < 0.9 * steps:
        raise ValueError(
            f"Expected finite and loss_scale of nearly every step; got {there.sum()} of {steps}. "
            f"Write `gainstage.telemetry(...)` at every step."
        )
    numbers = {name: values[there] for name, values in run.numbers.items()}
    gaps = {name: gap[there] for name, gap in run.gaps.items()}
    run = run._replace(steps=run.steps[there], numbers=numbers, gaps=gaps)
    max_abs, norm = run.get("max_abs"), run.get("grad_norm")
    measured = np.flatnonzero(~np.isnan(max_abs))
    if len(measured):
        seen = LargestGradient(float(max_abs[measured[0]]), float(norm[measured[0]]))
        pairs = zip(max_abs.tolist(), norm.tolist(), strict=True)
        numbers[ESTIMATE] = np.array([seen.of(*pair) for pair in pairs])
    return run


def _evidence(run: Run) -> _Evidence:
    skipped, scale = run.skipped, run.get("loss_scale").astype(np.float32)
    overflowed = why_skipped(run)["overflow"]
    fits = np.where(skipped, np.float32(0), scale)
    seen = np.where(overflowed, scale, np.float32(np.inf))
    over = np.minimum(seen, _beyond_float16(run))
    over = np.where(skipped & ~overflowed, np.float32(0), over)
    near_over = np.full(len(fits), np.inf, np.float32)
    asked = _windows(seen, np.inf, NEAR).min(axis=1) < np.inf
    lowest = np.partition(_windows(seen, np.inf, NEAR)[asked], 1, axis=1)
    highest = np.partition(_windows(fits, 0, 2 * NEAR)[asked], -2, axis=1)
    one = np.maximum(lowest[:, 0], _above(highest[:, -2]))
    near_over[asked] = np.minimum(lowest[:, 1], one)
    with np.errstate(all="ignore"):
        size = _size(run)
        most = max((seen * size).min(), (fits * size).max() * (1 + 1e-6))
        far_over = (most / size).astype(np.float32)
    return _Evidence(fits, over, _windows(fits, 0, NEAR).max(axis=1), near_over, far_over)


def _size(run: Run) -> np.ndarray:
    """The size of the true gradients; that of skipped steps is interpolated."""
    size = run.get(ESTIMATE if ESTIMATE in run.numbers else "grad_norm")
    places, valid = np.arange(len(size)), ~run.skipped & np.isfinite(size) & (size > 0)
    return np.interp(places, places[valid], size[valid]) if valid.any() else np.ones(len(size))


def _beyond_float16(run: Run) -> np.ndarray:
    """The lowest scale at which the largest gradient of an applied step exceeds float16."""
    largest = np.where(run.skipped, np.nan, run.get("max_abs"))
    with np.errstate(all="ignore"):
        if (largest * run.get("loss_scale") > LARGEST_FLOAT16 * 1.001).any():
            largest = np.full_like(largest, np.nan)  # the gradients have a wider dtype
        limit = np.where(largest > 0, LARGEST_FLOAT16 / largest, np.inf)
        single = limit.astype(np.float32)
        return np.where(single > limit, single, _above(single))


def _windows(values: np.ndarray, fill: float, near: int) -> np.ndarray:
    """Each element with its neighbours: a view with one row per element."""
    padded = np.pad(values, near, constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * near + 1)


def _above(scale: np.ndarray) -> np.ndarray:
    return np.nextafter(scale, np.float32(np.inf))


def _measured(run: Run) -> dict[str, np.ndarray]:
    """The recorded numbers that rules need, as arrays for `update`."""
    with np.errstate(over="ignore"):
        bad = why_skipped(run)["bad loss"]  # which a rule gets as inf: NaN says that it is unknown
        found = {"loss": np.where(bad, np.inf, run.get("loss")).astype(np.float32)}
        if run.has("max_abs").all() and ESTIMATE in run.numbers:
            found["max_abs"] = run.get(ESTIMATE).astype(np.float32)
    if run.has("grad_norm").all():
        found["any_nan"] = np.isnan(run.get("grad_norm"))
    return found


@functools.partial(jax.jit, static_argnames="rule")
def _scales(rule: LossScale, limits: jax.Array, measured: dict[str, jax.Array]) -> jax.Array:
    """The scale of each step; `limits` has the lowest scale that overflows."""

    def step(state: Any, seen: Any) -> Any:
        limit, measured = seen
        finite = state.scale < limit
        known = {k: v & ~finite if k == "any_nan" else v for k, v in measured.items()}
        return advance(rule, state, finite, **known), state.scale

    return lax.scan(step, start(rule), (limits, measured))[1]


def _outcome(
    evidence: _Evidence, scales: np.ndarray, skips: np.ndarray, bad: np.ndarray
) -> Outcome:
    known = (scales <= evidence.fits) | (scales >= evidence.over)
    near = (scales <= evidence.near_fits) | (scales >= evidence.near_over)
    there = evidence.near_fits > 0
    off = np.log2(scales[there]) - np.log2(evidence.near_fits[there])
    bits = float(off.mean()) if off.size else math.nan
    return Outcome(scales, skips, bad, known, ~known & ~near, bits)

"""What can be asked of a run while it goes on, of an optimizer or of an optax state alike."""

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from gainstage._core.saving import unique_names
from gainstage._core.scaled_state import loss_scaled_state
from gainstage._core.stats import (
    DIGITS,
    FLUSHED,
    HIGHEST,
    LOWEST,
    SUBNORMAL,
    TOP,
    Observed,
    StepInfo,
)
from gainstage._core.variable import Variable
from gainstage._transformation import told_by
from gainstage.optimizers.base import Optimizer
from gainstage.optimizers.loss_scale import LossScaleOptimizer
from gainstage.rules.base import as_power

SHOWN = 5  # tensors that are printed
OFF = 0.01  # a rounding error that matters, as a share of the root mean square


def telemetry(opt_or_state: Any) -> StepInfo:
    """What the last step was like: whether its gradients were `finite` and it was `applied`, its
    `loss_scale`, the `skipped_steps` and `applied_steps` so far, and `grad_norm` and `max_abs` of
    the true gradients.

    Return it from a compiled step beside the loss: nothing waits for it until somebody reads it.
    The largest element is looked for in every 17th applied step, in skipped ones and the first
    after, and stays as it was in between, unless the rule measures it in every step. The writers
    of `gainstage.diagnostics` and `gainstage.interop.tensorboard` take all of it as it is.

    Args:
        opt_or_state: a `LossScaleOptimizer(..., telemetry=True)`, or a pytree with exactly one
            state of `loss_scaled(..., telemetry=True)` anywhere inside.

    Raises:
        TypeError: an optimizer that scales no loss.
        ValueError: made without `telemetry=True`; no loss-scale state, or several.

    Examples:
        >>> import gainstage as gs
        >>> w = gs.Variable([3.0, 4.0])
        >>> opt = gs.LossScaleOptimizer(gs.SGD(0.1), telemetry=True)
        >>> loss = opt.minimize(lambda: (w.value() ** 2).sum() / 2, [w])
        >>> info = gs.telemetry(opt)
        >>> print(info.finite, info.loss_scale, info.grad_norm, info.max_abs)
        True 32768.0 5.0 4.0
        >>> opt.apply([[float("nan"), 0.0]])
        >>> info = gs.telemetry(opt)
        >>> print(info.finite, info.applied_steps, info.skipped_steps)
        False 1 1
    """
    return _observed(opt_or_state).info


@dataclasses.dataclass(frozen=True, eq=False)
class Underflow:
    """What of each gradient float16 lost in one step, or would have: part of a `Report`.

    Args:
        step: which step it was.
        scale: its loss scale.
        counts: float array, one row a tensor: how many elements of the scaled gradient were 0, then
            how many had each exponent from -40 (and below) to 40 (and above).
        overflowed: the lowest scale of a skipped step, inf if there was none. A later step that was
            finite at that scale or above resets it.

    In float16 a number below `2**-25` becomes 0, and one below `2**-14` is *subnormal*: it loses
    digits. The share of such elements says little: they may be too small to matter. `error` says
    what matters, the rounding error as a share of the whole gradient.

    Gradients that have been float16 before contain no numbers below `2**-24` any more, but zeros
    in their place. `error` counts all zeros as exact.

    Source: Micikevicius et al., 2018, arXiv:1710.03740, figure 3.
    """

    step: int
    scale: float
    counts: np.ndarray
    overflowed: float = math.inf

    def _share(self, low: int, high: int) -> np.ndarray:
        """Of the elements, those with an exponent of at least `low` and below `high`."""
        return self._shares[:, 1:][:, max(low - LOWEST, 0) : high - LOWEST].sum(axis=1)

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        return self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)

    @property
    def zero(self) -> np.ndarray:
        """The share of each tensor's elements that are 0."""
        return self._shares[:, 0]

    @property
    def flushed(self) -> np.ndarray:
        """The share that float16 makes 0."""
        return self._share(LOWEST, FLUSHED)

    @property
    def subnormal(self) -> np.ndarray:
        """The share that float16 holds with fewer digits."""
        return self._share(FLUSHED, SUBNORMAL)

    @property
    def error(self) -> np.ndarray:
        """The rounding error of float16, as a share of each tensor's root mean square."""
        return self.error_at(self.scale)

    @property
    def unscaled_error(self) -> np.ndarray:
        """What `error` would be without loss scaling, as with `FixedLossScale(1)`."""
        return self.error_at(1.0)

    def error_at(self, scale: float) -> np.ndarray:
        """What `error` would be at another scale: estimated from the exponents.

        Numbers below `2**-14` are rounded to multiples of `2**-24`, which is off by
        `2**-24 / sqrt(12)` in the mean; numbers below `2**-25` are lost.

        Args:
            scale: the loss scale, > 0; one that is no power of two counts as the nearest.

        Returns:
            A float array with one element a tensor: 0 if all its elements are 0, inf if some of
            them would overflow.
        """
        shift = round(math.log2(scale / self.scale))
        exponents = np.arange(LOWEST, HIGHEST + 1, dtype=float) + shift
        squares = 2 * 4.0**exponents  # of a number in the middle of those with this exponent
        spacing = 2.0 ** (np.maximum(exponents, SUBNORMAL) - DIGITS)
        lost = np.where(exponents < FLUSHED, squares, spacing**2 / 12)
        counts = self.counts[:, 1:].astype(float)
        errors = np.sqrt(counts @ lost / np.maximum(counts @ squares, sys.float_info.min))
        return np.where((counts[:, exponents > TOP] > 0).any(axis=1), np.inf, errors)

    @property
    def headroom(self) -> np.ndarray:
        """How often each tensor's scale could be doubled before it overflows, below 0 if it does
        already, which float32 gradients may; inf if all are 0."""
        there = self.counts[:, 1:] > 0
        largest = there.shape[1] - 1 - there[:, ::-1].argmax(axis=1) + LOWEST
        return np.where(there.any(axis=1), TOP - largest, np.inf)

    @property
    def suggested_scale(self) -> float:
        """The scale that puts the largest element of all one bit below the limit, but below every
        scale that is known to overflow, as one inside of the network may."""
        bits = self.headroom.min(initial=np.inf)
        fits = self.scale if np.isinf(bits) else float(self.scale * 2.0 ** (bits - 1))
        return min(fits, self.overflowed / 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """Which tensors made steps be skipped, and what underflows: as `report` returns it; `print`
    shows it in words, with the five worst tensors of each kind.

    Args:
        steps: how many there were, the skipped ones too.
        skipped: how many of them were skipped.
        names: of the tensors, all of them; of equal ones the second has "#2" behind it.
        counts: an integer array with one row a tensor: steps in which it held an inf, steps in
            which it held a NaN, the first of them and the last, -1 if there was none.
        underflow: an `Underflow`, None without `underflow_every`, or before it was first due.

    Source: NVIDIA apex issue 192, which asks for it.
    """

    steps: int
    skipped: int
    names: tuple[str, ...]
    counts: np.ndarray
    underflow: Underflow | None = None

    def tensors(self) -> dict[str, dict[str, float]]:
        """The numbers of each tensor by its name, for JSON: `inf`, `nan`, `first`, `last`, and
        with `underflow` the shares `zero`, `flushed` and `subnormal`, `headroom` in bits, and the
        rounding errors `error` and `unscaled_error`."""
        names = ("inf", "nan", "first", "last")
        rows: list[dict[str, float]] = [
            dict(zip(names, row, strict=True)) for row in self.counts.tolist()
        ]
        if self.underflow is not None:
            for name in ("zero", "flushed", "subnormal", "headroom", "error", "unscaled_error"):
                for row, number in zip(rows, getattr(self.underflow, name).tolist(), strict=True):
                    row[name] = number
        return dict(zip(self.names, rows, strict=True))

    def __str__(self) -> str:
        lines = [f"{self.skipped} of {self.steps} steps were skipped."]
        worst = sorted(zip(self.names, self.counts.tolist(), strict=True), key=_steps, reverse=True)
        hit = [(name, counts) for name, counts in worst if counts[2] >= 0]
        for name, (inf, nan, first, last) in hit[:SHOWN]:
            kinds = "all inf" if not nan else "all NaN" if not inf else f"inf {inf}, NaN {nan}"
            count = f"at least {max(inf, nan)}" if inf and nan else f"{inf + nan}"
            when = f"step {first}" if first == last else f"steps {first} to {last}"
            lines.append(f"{name}: {count} of {self.skipped}, {kinds}, {when}")
        if len(hit) > SHOWN:
            clean = len(worst) - len(hit)
            rest = f"; {clean} others were finite" if clean else ""
            lines.append(f"and {len(hit) - SHOWN} more{rest}")
        return "\n".join([*lines, *self._lost()])

    def _lost(self) -> list[str]:
        """What float16 loses, the most first."""
        if self.underflow is None or not self.names:
            return []
        u = self.underflow
        now, better, high = map(as_power, (u.scale, u.suggested_scale, u.overflowed))
        known = f", as {high} overflowed" if u.suggested_scale * 2 == u.overflowed else ""
        lines = [f"At step {u.step} and scale {now} ({better} suggested{known}):"]
        rows = sorted(
            zip(self.names, u.error, u.zero, u.flushed, u.subnormal, u.headroom, strict=True),
            key=lambda row: (-row[1], -row[3] - row[4]),
        )
        error, unscaled = (
            dict(zip(self.names, errors.tolist(), strict=True))
            for errors in (u.error, u.unscaled_error)
        )
        lines += underflow_summary(
            error, unscaled if u.scale != 1 else {}, bool((u.flushed + u.subnormal).any())
        )
        for name, error, zero, flushed, subnormal, bits in rows[:SHOWN]:
            shares = f"{zero:.1%} zero, {flushed:.1%} flushed to zero, {subnormal:.1%} subnormal"
            lines.append(f"{name}: {off(error)}, {shares}, {bits:g} bits of headroom")
        if len(rows) > SHOWN:
            lines.append(f"and {len(rows) - SHOWN} more, at most {off(rows[SHOWN][1])}")
        return lines


def underflow_summary(
    error: Mapping[str, float], unscaled: Mapping[str, float], underflows: bool
) -> list[str]:
    """Whether what float16 loses matters, with the scale and without, in a sentence each.

    Args:
        error: the rounding error of each tensor, by name, as a share of its root mean square.
        unscaled: the same without scaling; empty if the run does not scale.
        underflows: whether any element is flushed to zero or subnormal.
    """
    if math.isinf(_most(error)):
        beyond = max(error, key=lambda name: error[name])
        return [f"Overflow: {beyond} is beyond the largest number of float16."]
    if _most(error) > OFF:
        first = f"Underflow: float16 is {_worst(error)}."
    elif underflows:
        first = f"Underflow does not matter: float16 is {_worst(error)}."
    else:
        first = f"Nothing underflows: float16 is {_worst(error)}."
    if not unscaled or math.isinf(_most(unscaled)):
        return [first]
    need = "you need it" if _most(unscaled) > OFF else "these gradients do not need it"
    return [first, f"Without scaling float16 would be {_worst(unscaled)}: {need}."]


def _most(error: Mapping[str, float]) -> float:
    return max(error.values(), default=0.0)


def _worst(error: Mapping[str, float]) -> str:
    """How far off the worst tensor is, and how many are by more than 1 %."""
    name = max(error, key=lambda name: error[name])
    count = sum(each > OFF for each in error.values())
    if not count:
        return f"at most {off(error[name])}"
    worst = f"{off(error[name])} in {name}"
    return f"{worst}, and by more than {OFF:.0%} in {count} of {len(error)} tensors"


def off(error: float) -> str:
    """A rounding error in words."""
    if math.isinf(error):
        return "overflows"
    return f"{error:.0%} off" if error >= 0.095 else f"{100 * error:.2g}% off"


def _steps(row: tuple[str, list[int]]) -> int:
    return max(row[1][:2])


def report(opt_or_state: Any, params: Any = None) -> Report:
    """Which tensors overflowed or were NaN, how often and when, and how much of each float16 loses:
    read back from the device.

    Args:
        opt_or_state: as for `telemetry`.
        params: for a state, the parameters, whose paths are the names.

    Raises:
        TypeError, ValueError: as `telemetry`; parameters of another number of leaves.

    Examples:
        >>> import gainstage as gs
        >>> a, b = gs.Variable([1.0, 2.0], name="query"), gs.Variable(3.0, name="key")
        >>> opt = gs.LossScaleOptimizer(gs.SGD(0.1), telemetry=True, underflow_every=100)
        >>> for gradient in (1.0, float("inf"), float("inf")):
        ...     opt.apply([[gradient, 2.0**-26], 1024.0], [a, b])
        >>> print(gs.report(opt))
        2 of 3 steps were skipped.
        query: 2 of 2, all inf, steps 1 to 2
        At step 0 and scale 2^15 (2^13 suggested, as 2^14 overflowed):
        Underflow does not matter: float16 is at most 0.02% off.
        Without scaling float16 would be at most 0.04% off: these gradients do not need it.
        query: 0.02% off, 0.0% zero, 50.0% flushed to zero, 0.0% subnormal, 15 bits of headroom
        key: 0.02% off, 0.0% zero, 0.0% flushed to zero, 0.0% subnormal, 5 bits of headroom
    """
    info, causes, exponents = jax.device_get(_observed(opt_or_state))
    if isinstance(opt_or_state, LossScaleOptimizer):
        names = unique_names(list(opt_or_state._index))
    elif params is None:
        names = [f"gradient {place}" for place in range(len(causes))]
    else:
        leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: x is None)
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path, _ in leaves
        ]
    if len(names) != len(causes):
        raise ValueError(f"Expected params of {len(causes)} leaves; got {len(names)}.")
    lost = None
    if exponents is not None and exponents.step >= 0:
        step, *scales = map(float, (exponents.step, exponents.scale, exponents.overflowed))
        lost = Underflow(int(step), scales[0], exponents.counts, scales[1])
    steps, skipped = int(info.applied_steps + info.skipped_steps), int(info.skipped_steps)
    return Report(steps, skipped, tuple(names), causes, lost)


def _observed(opt_or_state: Any) -> Observed:
    """What telemetry has put into the state, as arrays."""
    if isinstance(opt_or_state, Optimizer):
        told = told_by(opt_or_state)
    elif (told := loss_scaled_state(opt_or_state).observed) is None:
        raise ValueError("Expected telemetry=True for loss_scaled; got one without.")
    return jax.tree.map(lambda x: x.value() if isinstance(x, Variable) else x, told)

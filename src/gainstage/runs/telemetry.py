"""Telemetry of a running training, from an optimizer or an optax state."""

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gainstage._base.arrays import joined
from gainstage._base.checks import as_power
from gainstage._scaling.exponents import DIGITS, FLUSHED, HIGHEST, LOWEST, NEVER, SUBNORMAL, TOP
from gainstage._scaling.step_telemetry import Observed, StepInfo
from gainstage._variables.variable import Variable
from gainstage.optimizers._step.saving import unique_names
from gainstage.optimizers.loss_scale_optimizer import LossScaleOptimizer
from gainstage.transforms.loss_scale_state import observed_in
from gainstage.transforms.models import kind_of
from gainstage.transforms.train_state import TrainState

MEASURED = (
    "zero", "flushed", "subnormal", "headroom", "error", "unscaled_error", "norm_share"
)  # fmt: skip
# Of the norm of all gradients. Below it a gradient may be nothing but rounding, as that of a bias
# before a normalisation is: 1e-7 to 1e-5 under `autocast`, where others have 1e-2 or more.
TINY_SHARE = 1e-4
SHOWN = 5  # tensors that are printed
# A gradient of a weight is a sum, and so larger than the numbers it is made of.
INSIDE = "Numbers inside of the network are smaller, and are not measured: see gs.xray."
LEFT_OUT = (
    "Left out: {which}. Gradients below "
    f"{TINY_SHARE:g} of all together may be rounding errors, as those of a bias before a "
    "normalisation are."
)
ADVISE = "gs.advise(loss_fn, params, batches) says what each precision costs"
NOT_COUNTED = "Underflow was not measured: pass underflow_every=100 beside telemetry=True."
OFF = 0.01  # the smallest rounding error that matters, as a share of the root mean square


def telemetry(opt_or_state: Any) -> StepInfo:
    """Returns the telemetry of the last step: `finite` (all gradients were finite), `applied` (the
    update was taken), `loss_scale`, the `skipped_steps`, `applied_steps` and `retried_steps` so
    far, and `grad_norm` and `max_abs` of the true gradients.

    Return it from a compiled step beside the loss: it stays on the device until you read it.
    `max_abs` is measured every 17th applied step, in skipped steps and in the first step after
    one; in between it is NaN. It is measured in every step if the rule measures it, or under
    `jax_debug_nans`. The writers of `gainstage.diagnostics` and `gainstage.interop.tensorboard`
    take it unchanged.

    Args:
        opt_or_state: a `LossScaleOptimizer(..., telemetry=True)`, or a pytree that contains exactly
            one state of `with_loss_scale(..., telemetry=True)`.

    Raises:
        TypeError: the optimizer has no loss scale.
        ValueError: there is no `telemetry=True`, or not exactly one loss-scale state.

    Examples:
        >>> import gainstage as gs
        >>> w = gs.optimizers.Variable([3.0, 4.0])
        >>> opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1), telemetry=True)
        >>> loss = opt.minimize(lambda: (w.value() ** 2).sum() / 2, [w])
        >>> info = gs.diagnostics.telemetry(opt)
        >>> print(info.finite, info.loss_scale, info.grad_norm, info.max_abs)
        True 32768.0 5.0 4.0
        >>> opt.apply([[float("nan"), 0.0]])
        >>> info = gs.diagnostics.telemetry(opt)
        >>> print(info.finite, info.applied_steps, info.skipped_steps)
        False 1 1
    """
    return _observed(opt_or_state).info


@dataclasses.dataclass(frozen=True, eq=False)
class Underflow:
    """What float16 lost, or would have lost, of each gradient in one step; part of a `Report`.

    Args:
        step: the index of the step.
        scale: its loss scale.
        counts: a float array with one row per tensor. It counts elements of the scaled gradient:
            those that were 0, then those of each exponent from -40 (or less) to 40 (or more).
        overflowed: the lowest scale of a non-finite step, inf if there was none. A later step that
            was finite at that scale or above resets it.

    float16 flushes numbers below `2**-25` to 0. Numbers below `2**-14` are *subnormal*: they have
    fewer digits. The share of such elements says little, because they may be too small to matter.
    `error` says what matters: the rounding error as a share of the whole gradient.

    Gradients that were float16 before contain zeros instead of numbers below `2**-25`. `error`
    counts all zeros as exact.

    Source: Micikevicius et al., 2018, arXiv:1710.03740, figure 3.
    """

    step: int
    scale: float
    counts: np.ndarray
    overflowed: float = math.inf

    def _share(self, low: int, high: int) -> np.ndarray:
        """The share of elements with an exponent >= `low` and < `high`."""
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
        """The share of each tensor's elements that float16 flushes to 0."""
        return self._share(LOWEST, FLUSHED)

    @property
    def subnormal(self) -> np.ndarray:
        """The share of each tensor's elements that are subnormal in float16."""
        return self._share(FLUSHED, SUBNORMAL)

    @property
    def norm_share(self) -> np.ndarray:
        """The norm of each tensor's gradient, as a share of that of all together; estimated from
        the exponents."""
        # Relative to the largest exponent, so that no square overflows.
        squares = self.counts[:, 1:].astype(float) @ 4.0 ** np.arange(LOWEST - HIGHEST, 1.0)
        return np.sqrt(squares / max(squares.sum(), sys.float_info.min))

    @property
    def error(self) -> np.ndarray:
        """The rounding error of float16, as a share of each tensor's root mean square."""
        return self.error_at(self.scale)

    @property
    def unscaled_error(self) -> np.ndarray:
        """The `error` without loss scaling, as with `FixedLossScale(1)`."""
        return self.error_at(1.0)

    def error_at(self, scale: float) -> np.ndarray:
        """Returns the `error` at another scale, estimated from the exponents.

        Numbers below `2**-14` are rounded to multiples of `2**-24`, an rms error of
        `2**-24 / sqrt(12)`; numbers below `2**-25` are lost.

        Args:
            scale: the loss scale, > 0, rounded to the nearest power of two.

        Returns:
            A float array with one element per tensor: 0 if all its elements are 0, inf if some of
            them would overflow.
        """
        shift = round(math.log2(scale / self.scale))
        exponents = np.arange(LOWEST, HIGHEST + 1, dtype=float) + shift
        squares = 2 * 4.0**exponents  # of a number in the middle of this exponent's range
        spacing = 2.0 ** (np.maximum(exponents, SUBNORMAL) - DIGITS)
        lost = np.where(exponents < FLUSHED, squares, spacing**2 / 12)
        counts = self.counts[:, 1:].astype(float)
        errors = np.sqrt(counts @ lost / np.maximum(counts @ squares, sys.float_info.min))
        return np.where((counts[:, exponents > TOP] > 0).any(axis=1), np.inf, errors)

    @property
    def headroom(self) -> np.ndarray:
        """How often each tensor's scale can be doubled before it overflows. It is negative for
        float32 gradients that already exceed float16, and inf if all elements are 0."""
        there = self.counts[:, 1:] > 0
        largest = there.shape[1] - 1 - there[:, ::-1].argmax(axis=1) + LOWEST
        return np.where(there.any(axis=1), TOP - largest, np.inf)

    @property
    def suggested_scale(self) -> float:
        """The scale that puts the largest element one bit below the limit, and that is below every
        scale known to overflow: the network may have larger values inside."""
        bits = self.headroom.min(initial=np.inf)
        fits = self.scale if np.isinf(bits) else float(self.scale * 2.0 ** (bits - 1))
        return min(fits, self.overflowed / 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The tensors that caused skipped steps, and what underflows, as `report` returns it. `print`
    shows it as text, with the five worst tensors of each kind.

    Args:
        steps: the number of steps, skipped ones included.
        skipped: the number of skipped steps.
        names: the names of all tensors; the second of one name gets the suffix "#2".
        counts: an integer array with one row per tensor. Its columns are the number of steps with
            an inf, the number with a NaN, and the first and last such step (-1 if none).
        underflow: an `Underflow`; None without `underflow_every`, or before its first step.
        retried: the number of tries that were repeated at a lower scale: no batch was lost.

    Source: NVIDIA apex issue 192, which requests it.
    """

    steps: int
    skipped: int
    names: tuple[str, ...]
    counts: np.ndarray
    underflow: Underflow | None = None
    retried: int = 0

    def tensors(self) -> dict[str, dict[str, float]]:
        """Returns the numbers of each tensor by name, for JSON: `inf`, `nan`, `first`, `last`. With
        `underflow` also the shares `zero`, `flushed` and `subnormal`, `headroom` in bits, the
        rounding errors `error` and `unscaled_error`, and `norm_share`."""
        names = ("inf", "nan", "first", "last")
        rows: list[dict[str, float]] = [
            dict(zip(names, row, strict=True)) for row in self.counts.tolist()
        ]
        if self.underflow is not None:
            for name in MEASURED:
                for row, number in zip(rows, getattr(self.underflow, name).tolist(), strict=True):
                    row[name] = number
        return dict(zip(self.names, rows, strict=True))

    def __str__(self) -> str:
        lines = [f"{self.skipped} of {self.steps} steps were skipped."]
        if self.retried:
            lines[0] = f"{lines[0][:-1]}; {self.retried} tries were repeated at a lower scale."
        worst = sorted(zip(self.names, self.counts.tolist(), strict=True), key=_steps, reverse=True)
        hit = [(name, counts) for name, counts in worst if counts[2] >= 0]
        for name, (inf, nan, first, last) in hit[:SHOWN]:
            kinds = [f"{kind} in {n}" for kind, n in (("inf", inf), ("NaN", nan)) if n]
            of = self.skipped + self.retried
            tries = "tries" if self.retried else f"skipped step{'s' * (of != 1)}"
            when = f"step {first}" if first == last else f"steps {first} to {last}"
            lines.append(f"{name}: {' and '.join(kinds)} of {of} {tries}, {when}")
        if len(hit) > SHOWN:
            clean = len(worst) - len(hit)
            rest = f"; {clean} others were finite" if clean else ""
            lines.append(f"and {len(hit) - SHOWN} more{rest}")
        counts_none = self.underflow is None and self.skipped < self.steps and self.names
        lines += [NOT_COUNTED] if counts_none else []
        return "\n".join([*lines, *self._lost()])

    def _lost(self) -> list[str]:
        """The lines about underflow, the worst tensor first."""
        if self.underflow is None or not self.names:
            return []
        u = self.underflow
        now, better, high = map(as_power, (u.scale, u.suggested_scale, u.overflowed))
        known = f"{better} suggested"
        if u.suggested_scale * 2 == u.overflowed:
            known += f", as {high} overflowed"
        if u.overflowed <= 1 and u.headroom.min(initial=np.inf) > 1:  # so it is not the scale
            known = f"no scale suggested, as steps were skipped at {high} too"
        lines = [f"At step {u.step} and scale {now} ({known}):"]
        error, unscaled, shares = (
            dict(zip(self.names, numbers.tolist(), strict=True))
            for numbers in (u.error, u.unscaled_error if u.scale != 1 else u.error, u.norm_share)
        )
        aside = left_out(error, unscaled, shares)
        rows = sorted(
            zip(self.names, u.error, u.zero, u.flushed, u.subnormal, u.headroom, strict=True),
            key=lambda row: (row[0] in aside, -row[1], -row[3] - row[4]),
        )
        lines += underflow_summary(
            error,
            unscaled if u.scale != 1 else {},
            bool((u.flushed + u.subnormal).any()),
            [name for name, zero in zip(self.names, u.zero, strict=True) if zero == 1],
            aside,
        )
        for name, error, zero, flushed, subnormal, bits in rows[:SHOWN]:
            parts = f"{zero:.1%} zero, {flushed:.1%} flushed to zero, {subnormal:.1%} subnormal"
            off_by = f"{off(error)}{', left out' * (name in aside)}"
            lines.append(f"{name}: {off_by}, {parts}, {bits:g} bits of headroom")
        if len(rows) > SHOWN:
            most = max(row[1] for row in rows[SHOWN:])
            lines.append(f"and {len(rows) - SHOWN} more, at most {off(most)}")
        return lines


def left_out(
    error: Mapping[str, float], unscaled: Mapping[str, float], shares: Mapping[str, float]
) -> list[str]:
    """Returns the tensors that would need a higher scale, but whose gradients are so far below the
    others that they may be nothing but rounding.

    Args:
        error, unscaled: as for `underflow_summary`.
        shares: the norm of each gradient, as a share of that of all; without those not recorded.
    """
    off_by = {name: max(error[name], unscaled.get(name, 0.0)) for name in error}
    small = [name for name in error if shares.get(name, 1.0) < TINY_SHARE]
    found = [name for name in small if OFF < off_by[name] < math.inf]
    return found if len(found) < len(error) else []


def underflow_summary(
    error: Mapping[str, float],
    unscaled: Mapping[str, float],
    underflows: bool,
    zeros: Sequence[str] = (),
    aside: Sequence[str] = (),
) -> list[str]:
    """Returns sentences: whether float16 loses what matters, with scaling and without.

    Args:
        error: the rounding error of each tensor, by name, as a share of its root mean square.
        unscaled: the same without scaling; empty if the run does not scale.
        underflows: whether any element is flushed to zero or subnormal.
        zeros: the tensors whose gradient is 0 in every element.
        aside: the tensors that do not count, as `left_out` returns them.
    """
    if zeros:
        every = len(zeros) == len(error)
        which = "every parameter" if every else ", ".join(zeros[:SHOWN])
        more = f" and {len(zeros) - SHOWN} more" if not every and len(zeros) > SHOWN else ""
        lost = (
            f"The gradient of {which}{more} is 0 in all elements: the loss does not depend on it, "
            f"or float16 has lost all of it in the backward pass, which gs.xray shows."
        )
        return [lost, *([] if every else underflow_summary(error, unscaled, underflows, (), aside))]
    if aside:
        more = f" and {len(aside) - SHOWN} more" if len(aside) > SHOWN else ""
        which = f"{', '.join(aside[:SHOWN])}{more}"
        error, unscaled = (
            {name: x for name, x in each.items() if name not in aside} for each in (error, unscaled)
        )
        return [*underflow_summary(error, unscaled, underflows), LEFT_OUT.format(which=which)]
    if math.isinf(_most(error)):
        beyond = max(error, key=lambda name: error[name])
        return [f"Overflow: {beyond} is beyond the largest number of float16."]
    if _most(error) > OFF:
        first, inside = f"Underflow: float16 is {_worst(error)}. {ADVISE}.", []
    else:
        what = "underflow does not matter" if underflows else "nothing underflows"
        first, inside = f"In gradients of parameters {what}: float16 is {_worst(error)}.", [INSIDE]
    if not unscaled or math.isinf(_most(unscaled)):
        return [first, *inside]
    if _most(unscaled) > OFF and _most(unscaled) <= _most(error):
        return [first, *inside]  # the scale in force is 1 or less
    need = ": you need it" if _most(unscaled) > OFF else " in gradients of parameters"
    return [first, f"Without scaling float16 would be {_worst(unscaled)}{need}.", *inside]


def _most(error: Mapping[str, float]) -> float:
    return max(error.values(), default=0.0)


def _worst(error: Mapping[str, float]) -> str:
    """The error of the worst tensor, and the number of tensors with more than 1 %."""
    name = max(error, key=lambda name: error[name])
    count = sum(each > OFF for each in error.values())
    if not count:
        return f"at most {off(error[name])}"
    worst = f"{off(error[name])} in {name}"
    return f"{worst}, and by more than {OFF:.0%} in {count} of {len(error)} tensors"


def off(error: float) -> str:
    """Formats a rounding error."""
    if math.isinf(error):
        return "overflows"
    return f"{error:.0%} off" if error >= 0.095 else f"{100 * error:.2g}% off"


def _steps(row: tuple[str, list[int]]) -> int:
    return max(row[1][:2])


def report(opt_or_state: Any, params: Any = None) -> Report:
    """Returns which tensors overflowed or were NaN, how often and when, and what float16 loses of
    each. Reads from the device.

    Args:
        opt_or_state: as for `telemetry`.
        params: for a state of optax, the parameters or the model; their paths are the names. A
            `TrainState` has its own.

    Raises:
        TypeError, ValueError: as `telemetry`; or `params` has another number of leaves.

    Examples:
        >>> import gainstage as gs
        >>> from gainstage.optimizers import SGD, LossScaleOptimizer, Variable
        >>> a, b = Variable([1.0, 2.0], name="query"), Variable(3.0, name="key")
        >>> opt = LossScaleOptimizer(SGD(0.1), telemetry=True, underflow_every=100)
        >>> for gradient in (1.0, float("inf"), float("inf")):
        ...     opt.apply([[gradient, 2.0**-26], 1024.0], [a, b])
        >>> print(gs.diagnostics.report(opt))
        2 of 3 steps were skipped.
        query: inf in 2 of 2 skipped steps, steps 1 to 2
        At step 0 and scale 2^15 (2^13 suggested, as 2^14 overflowed):
        In gradients of parameters underflow does not matter: float16 is at most 0.02% off.
        Without scaling float16 would be at most 0.04% off in gradients of parameters.
        Numbers inside of the network are smaller, and are not measured: see gs.xray.
        query: 0.02% off, 0.0% zero, 50.0% flushed to zero, 0.0% subnormal, 15 bits of headroom
        key: 0.02% off, 0.0% zero, 0.0% flushed to zero, 0.0% subnormal, 5 bits of headroom
    """
    info, causes, exponents = jax.device_get(_observed(opt_or_state))
    if isinstance(opt_or_state, TrainState) and params is None:
        params = opt_or_state.params
    if isinstance(opt_or_state, LossScaleOptimizer):
        names = unique_names(opt_or_state.trainable_variables)
    elif params is None:
        names = [f"gradient {place}" for place in range(len(causes))]
    else:
        params = kind_of(params).trainable(params)
        leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: x is None)
        names = [joined(path) or "params" for path, _ in leaves]
    if len(names) != len(causes):
        raise ValueError(f"Expected params of {len(causes)} leaves; got {len(names)}.")
    lost = None
    if exponents is not None and exponents.step >= 0:
        step, scale, lowest = map(float, (exponents.step, exponents.scale, exponents.overflowed))
        lowest = math.inf if lowest >= NEVER else lowest
        lost = Underflow(int(step), scale, exponents.counts, lowest)
    steps, skipped = int(info.applied_steps + info.skipped_steps), int(info.skipped_steps)
    retried = int(info.retried_steps)
    return Report(steps, skipped, tuple(names), causes, lost, retried)


def _observed(opt_or_state: Any) -> Observed:
    """The telemetry in the state, as arrays."""
    observed = observed_in(opt_or_state)
    return jax.tree.map(lambda x: x.value() if isinstance(x, Variable) else x, observed)

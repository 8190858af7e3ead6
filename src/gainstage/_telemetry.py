"""What can be asked of a run while it goes on, of an optimizer or of an optax state alike."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from gainstage._core.saving import unique_names
from gainstage._core.scaled_state import loss_scaled_state
from gainstage._core.stats import (
    FLUSHED,
    LOWEST,
    SUBNORMAL,
    TOP,
    Observed,
    StepInfo,
    at_first,
)
from gainstage._core.variable import Variable
from gainstage.optimizers.base import Optimizer
from gainstage.optimizers.loss_scale import LossScaleOptimizer
from gainstage.rules.base import as_power


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

    In float16 a number below `2**-25` becomes 0, and one below `2**-14` is *subnormal*: it loses
    digits. Gradients that have been float16 before contain no such small numbers any more, but
    zeros in their place.

    Source: Micikevicius et al., 2018, arXiv:1710.03740, figure 3.
    """

    step: int
    scale: float
    counts: np.ndarray

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
    def headroom(self) -> np.ndarray:
        """How often each tensor's scale could be doubled before it overflows, below 0 if it does
        already, which float32 gradients may; inf if all are 0."""
        there = self.counts[:, 1:] > 0
        largest = there.shape[1] - 1 - there[:, ::-1].argmax(axis=1) + LOWEST
        return np.where(there.any(axis=1), TOP - largest, np.inf)

    @property
    def suggested_scale(self) -> float:
        """The scale that puts the largest element of all one bit below the limit."""
        bits = self.headroom.min(initial=np.inf)
        return self.scale if np.isinf(bits) else float(self.scale * 2.0 ** (bits - 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """Which tensors made steps be skipped, and what underflows: as `report` returns it; `print`
    shows it in words.

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
        with `underflow` the shares `zero`, `flushed` and `subnormal`, and `headroom` in bits."""
        names = ("inf", "nan", "first", "last")
        rows: list[dict[str, float]] = [
            dict(zip(names, row, strict=True)) for row in self.counts.tolist()
        ]
        if self.underflow is not None:
            for name in ("zero", "flushed", "subnormal", "headroom"):
                for row, number in zip(rows, getattr(self.underflow, name).tolist(), strict=True):
                    row[name] = number
        return dict(zip(self.names, rows, strict=True))

    def __str__(self) -> str:
        lines = [f"{self.skipped} of {self.steps} steps were skipped."]
        worst = sorted(zip(self.names, self.counts.tolist(), strict=True), key=_steps, reverse=True)
        for name, (inf, nan, first, last) in worst:
            if first < 0:
                continue
            kinds = "all inf" if not nan else "all NaN" if not inf else f"inf {inf}, NaN {nan}"
            count = f"at least {max(inf, nan)}" if inf and nan else f"{inf + nan}"
            when = f"step {first}" if first == last else f"steps {first} to {last}"
            lines.append(f"{name}: {count} of {self.skipped}, {kinds}, {when}")
        return "\n".join([*lines, *self._lost()])

    def _lost(self) -> list[str]:
        """What float16 loses, the most first."""
        if self.underflow is None:
            return []
        u = self.underflow
        now, better = as_power(u.scale), as_power(u.suggested_scale)
        lines = [f"At step {u.step} and scale {now}, {better} suggested:"]
        rows = zip(self.names, u.zero, u.flushed, u.subnormal, u.headroom, strict=True)
        for name, zero, flushed, subnormal, bits in sorted(rows, key=lambda r: -r[2] - r[3]):
            shares = f"{zero:.1%} zero, {flushed:.1%} flushed to zero, {subnormal:.1%} subnormal"
            lines.append(f"{name}: {shares}, {bits:g} bits of headroom")
        return lines


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
        At step 0 and scale 2^15, 2^19 suggested:
        query: 0.0% zero, 50.0% flushed to zero, 0.0% subnormal, 15 bits of headroom
        key: 0.0% zero, 0.0% flushed to zero, 0.0% subnormal, 5 bits of headroom
    """
    info, causes, exponents = jax.device_get(_observed(opt_or_state))
    if isinstance(opt_or_state, LossScaleOptimizer):
        names = unique_names(list(opt_or_state._index))
    elif params is None:
        names = [f"gradient {place}" for place in range(len(causes))]
    else:
        leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: x is None)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if len(names) != len(causes):
        raise ValueError(f"Expected params of {len(causes)} leaves; got {len(names)}.")
    lost = None
    if exponents is not None and exponents.step >= 0:
        lost = Underflow(int(exponents.step), float(exponents.scale), exponents.counts)
    steps, skipped = int(info.applied_steps + info.skipped_steps), int(info.skipped_steps)
    return Report(steps, skipped, tuple(names), causes, lost)


def _observed(opt_or_state: Any) -> Observed:
    """What telemetry has put into the state, as arrays."""
    if isinstance(opt_or_state, LossScaleOptimizer):
        told = opt_or_state._guard.state.observed
        if told is None and opt_or_state.telemetry:  # not built yet
            told = at_first(opt_or_state.loss_scale, 0, None)
    elif isinstance(opt_or_state, Optimizer):
        raise TypeError(
            f"Expected a LossScaleOptimizer or a state of loss_scaled; got {opt_or_state!r}."
        )
    else:
        told = loss_scaled_state(opt_or_state).observed
    if told is None:
        raise ValueError(
            "Expected telemetry=True for the LossScaleOptimizer, or for loss_scaled; got one "
            "without."
        )
    return jax.tree.map(lambda x: x.value() if isinstance(x, Variable) else x, told)

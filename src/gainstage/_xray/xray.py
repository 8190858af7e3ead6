"""X-ray of a step: which operation is not finite, in which layer, and how to fix it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base.checks import as_power
from gainstage._base.progress_bar import counted
from gainstage._programs import jaxprs
from gainstage._programs.jaxprs import OPAQUE
from gainstage._variables.types import PyTree, Scalar, Using
from gainstage._xray.causes import LOST, NEGLIGIBLE, Cause, causes_of, losses_of
from gainstage._xray.factors import LocalFactor, factors_of
from gainstage._xray.numbers import whole_error
from gainstage._xray.program import Program, program_of
from gainstage._xray.remedies import Remedy, remedies_for
from gainstage._xray.walk import Changes, Ran, walk_through
from gainstage._xray.windows import Window, common_window, windows_of
from gainstage.precision.autocast import plan_of
from gainstage.runs.telemetry import ADVISE
from gainstage.transforms.loss_scale_state import loss_scale_state
from gainstage.transforms.needs_scale import needs_scale
from gainstage.transforms.step_gradients import check_arguments
from gainstage.transforms.train_state import TrainState
from gainstage.transforms.value_and_grad import LossFunction

__all__ = ["Cause", "LocalFactor", "Remedy", "Window", "Xray", "xray"]

SHOWN_CAUSES = 3  # causes that are printed
ROUNDED = 0.01  # the relative error that rounding one result to subnormal numbers may cause
DIVERGED = 100.0  # a root mean square that the parameters of a network that learns do not have
NEEDED = "2^0 does not fit: float16 needs loss scaling at these weights"
NOT_NEEDED = "2^0 fits: float16 needs no loss scaling at these weights"
SKIPPED = (
    "The last step was skipped at another scale, which this state does not record. Pass it, such "
    "as scale={scale}, or create the state with telemetry=True."
)


def xray(
    loss_fn: Callable[..., Any],
    *args: PyTree,
    scale: Scalar | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    using: Using | None = None,
    prescribe: bool = True,
    compiled: bool = True,
    progress: bool = True,
) -> "Xray":
    """Runs one step operation by operation, with a float32 reference of every result.

    It finds the operations where non-finite numbers or flushed zeros start, computes which loss
    scales fit, and tries changes. If `gainstage.autocast` returned `loss_fn`, a change that helps
    comes with the lines to put into `gainstage.keep_float32`. On two CPU cores, a step of a small
    network takes seconds and one of 10 million parameters a minute, most of it to compile each
    operation.

    Args:
        loss_fn: a function that returns a scalar loss, or (loss, aux).
        *args: its arguments in the bad step. A skipped step does not change the parameters, so you
            still have them. A `TrainState` in the place of the parameters has the scale, and the
            `extra` if the loss takes one.
        scale: the loss scale of the step, > 0. By default it is 1.0 if nothing in the loss is in
            float16 or float8, and else that of the `TrainState`, without which it is needed. After
            a skipped step a state has a lower scale already: with telemetry, the scale of the step
            is taken from that.
        argnums: the arguments to differentiate with respect to.
        has_aux: whether `loss_fn` returns (loss, aux).
        using: the function that differentiates, by default as for `gainstage.value_and_grad`.
        prescribe: whether to try changes; each runs the step again.
        compiled: whether to compile the step too, and report differences.
        progress: whether to show a progress bar, in a terminal.

    Returns:
        An `Xray`; `print` it.

    Raises:
        TypeError, ValueError: the loss is not a scalar, there is neither a state nor a scale, or
            the scale is invalid.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gainstage import xray
        >>> def loss_fn(params, x):
        ...     h = x.astype(jnp.float16) @ params["up"].astype(jnp.float16)
        ...     return (h * h).astype(jnp.float32).mean()
        >>> x = xray(loss_fn, {"up": jnp.full((4, 2), 100.0)}, jnp.ones((3, 4)), scale=1.0)
        >>> print(x.finite, x.causes[0].operation, x.causes[0].float32)
        False mul 160000.0

    Source: `jax.debug_nans` and `jax.experimental.checkify` for the question.
    """
    if isinstance(loss_fn, TrainState):
        raise TypeError(
            "Expected the loss first; got a TrainState. Write gainstage.xray(loss_fn, state, "
            "*batch)."
        )
    is_cast, is_next, state = plan_of(loss_fn) is not None, False, None
    if args and isinstance(args[0], TrainState):
        state, *batch = args
        args = (state.params, *([] if state.extra is None else [state.extra]), *batch)
    if scale is None and not needs_scale(loss_fn, args):
        scale = 1.0
    elif scale is None and state is not None:
        scale, is_next = _scale_of_last_step(state)
    if scale is None:
        raise TypeError(
            "Expected a TrainState, or a scale; got neither. Write gainstage.xray(loss_fn, state, "
            "*batch); or scale=gainstage.transforms.current_scale(opt_state), or scale=1.0 for a "
            "step without loss scaling."
        )
    value = checks.loss_scale("scale", float(np.asarray(scale)))
    loss = LossFunction(loss_fn, has_aux, using, state is not None and state.extra is not None)
    check_arguments(loss, args, call="gainstage.xray(loss_fn, state")
    program = program_of(loss, args, argnums)
    steps = jaxprs.count(program.jaxpr)
    with counted(steps, "X-ray", "trying change", every=16, shows=progress) as tick:
        return Xray(program, float(value), tick, prescribe, compiled, is_cast, is_next)


def _scale_of_last_step(state: TrainState[Any]) -> tuple[jax.Array, bool]:
    """The loss scale of the last step of a state, and whether it is that of the next, because the
    last was skipped at one that was not recorded."""
    observed = loss_scale_state(state.opt_state).observed
    if state.applied or observed is None:
        return state.loss_scale, not state.applied
    return observed.info.loss_scale, False


class Xray:
    """The result of `xray`; `print` it.

    Attributes:
        finite: whether loss and gradients are finite, run operation by operation.
        compiled_finite: whether they are finite in the compiled program, which may keep more digits
            where XLA fuses operations. None if it was not compiled.
        loss: the true loss.
        scale: the loss scale.
        causes: why the step is not finite, or what it loses: a list of `Cause`, or empty.
        gradient_errors: the error of each gradient relative to float32, the worst first; NaN if the
            gradient is not finite. If the gradient is below 1e-5 of all gradients together, the
            error is relative to all of them.
        factors: factors of `gainstage.transforms.locally_scaled` that fit where the present one, or
            none, does not: a list of `LocalFactor`.
        remedies: changes that were tried, a list of `Remedy`.
        unseen: operations that the X-ray cannot look into, such as `shard_map` and Pallas kernels.
    """

    def __init__(
        self,
        program: Program,
        scale: float,
        tick: Callable[[], Any],
        prescribe: bool = True,
        compiled: bool = True,
        is_cast: bool = False,
        is_next: bool = False,
    ):
        self.scale = scale
        self._is_next = is_next
        self.compiled_finite: bool | None = None
        if compiled:
            self.compiled_finite = bool(program.is_finite(jnp.float32(scale), program.arguments))
        self._ran = ran = walk_through(program, Changes(scale=scale), True, tick)
        self.finite: bool = ran.is_finite
        self.loss: float = float(np.asarray(jax.device_get(ran.loss)))
        self.causes: list[Cause] = losses_of(ran) if self.finite else causes_of(ran)
        self.factors: list[LocalFactor] = factors_of(ran, self.causes, scale, ROUNDED)
        self.gradient_errors: dict[str, float] = _errors(program, ran)
        self.unseen: list[str] = sorted({r.op for r in ran.results} & OPAQUE)
        self.remedies: list[Remedy] = []
        if prescribe:
            windows = self.windows()
            self.remedies = remedies_for(program, ran, scale, self.causes, windows, tick, is_cast)

    def windows(self, error: float = ROUNDED) -> dict[str, Window]:
        """Returns the scales that fit each layer; empty if a float32 reference is not finite.

        Args:
            error: the relative error that rounding one result to subnormal numbers may cause.
        """
        if not all(bool(np.isfinite(np.asarray(jax.device_get(r))).all()) for r in
                   self._ran.references):  # fmt: skip
            return {}
        return windows_of(self._ran, self.scale, error)

    def window(self, error: float = ROUNDED) -> Window:
        """Returns the scales that fit all layers."""
        return common_window(self.windows(error))

    @property
    def summary(self) -> str:
        """The first sentence: what is wrong, if anything."""
        at = f"at scale {as_power(self.scale)}"
        errors = self.gradient_errors
        if self.finite:
            worst = next(iter(errors.items()), None)
            off = f"; the gradient of {worst[0]} is off by {worst[1]:.2%}" if worst else ""
            off_all = whole_error(
                self._ran.gradients, self.scale, self._ran.references[1:], self.scale
            )
            lost = "Finite, but much is lost" if self.causes or off_all > LOST else "Finite"
            return f"{lost} {at}: loss {self.loss:.4g}{off}."
        bad = sum(map(math.isnan, errors.values()))
        gradients = f"{bad} of {len(errors)} gradients"
        if math.isfinite(self.loss):
            return f"NOT finite {at}: {gradients}. The loss is {self.loss:.4g}."
        return f"NOT finite {at}: the loss, and {gradients}."

    @property
    def comparison(self) -> str:
        """How the compiled step differs, as text; empty if it does not."""
        if self.compiled_finite in (None, self.finite):
            return ""
        if self.compiled_finite:
            return "The compiled step is finite: where XLA fuses operations it keeps more digits."
        return "The compiled step is not finite: it rounds differently."

    @property
    def caution(self) -> str:
        """Says that the parameters of a non-finite step have diverged; empty if they have not."""
        sizes = {r.place.near: r.numbers.rms for r in self._ran.results if r.op == "argument"}
        own = {name: size for name, size in sizes.items() if name in self.gradient_errors}
        worst = max(own, key=lambda name: own[name], default="")
        if self.finite or not own or own[worst] <= DIVERGED:
            return ""
        return (
            f"The parameters have diverged: {worst} has a root mean square of {own[worst]:.3g}. "
            f"Probably the learning rate was too high. A change of precision or scale mends this "
            f"step, not the run: lower the rate, and restart from a checkpoint before it."
        )

    @property
    def conclusion(self) -> str:
        """Says that no scale and no precision can help; empty if one may."""
        hopeless = any(cause.kind in ("argument", "constant", "invalid") for cause in self.causes)
        helps_not = "No scale and no precision helps: fix the data, or the formula."
        return helps_not if hopeless else ""

    def __str__(self) -> str:
        lines = [self.summary]
        if self.finite and self._is_next:
            lines.append(SKIPPED.format(scale=as_power(2 * self.scale).replace("^", "**")))
        lines += [self.comparison] if self.comparison else []
        lines += [f"cause: {cause}" for cause in self.causes[:SHOWN_CAUSES]]
        if len(self.causes) > SHOWN_CAUSES:
            more = len(self.causes) - SHOWN_CAUSES
            lines.append(f"and {more} more cause{'s' * (more > 1)}")
        lines += [f"factor: {factor}" for factor in self.factors]
        window = self.window()
        if math.isfinite(window.low) and math.isfinite(window.high):
            lines.append(_described(window))
            needed = not window.low <= 0 <= window.high
            if self.scale == 1 and not window.is_empty:
                lines.append(NEEDED if needed else NOT_NEEDED)
            if window.is_empty or (self.scale == 1 and needed):
                lines.append(ADVISE)
        elif not any(result.is_half for result in self._ran.results):
            lines.append("nothing of this step is in half precision")
        for remedy in self.remedies:
            lines.append(f"tried: {remedy}")
            lines += [f"write that as: {remedy.code}"] if remedy.code and remedy.helps else []
        lines += [said for said in (self.caution, self.conclusion) if said]
        if self.unseen:
            lines.append(f"It does not look inside of {', '.join(self.unseen)}.")
        return "\n".join(lines)


def _described(window: Window) -> str:
    low, high = (as_power(2.0**n) for n in (window.low, window.high))
    if window.is_empty:
        return (
            f"no scale fits all layers: {window.lowest} needs at least {low}, {window.highest} "
            f"overflows above {high}"
        )
    return f"scales that fit the backward pass: {low} to {high} (above, {window.highest} overflows)"


def _errors(program: Program, ran: Ran) -> dict[str, float]:
    named = zip(program.gradients, ran.origins[1:], strict=True)
    results = {name: ran.results[origin] for name, origin in named if origin is not None}
    norms = {name: r.ref.rms * r.ref.size**0.5 for name, r in results.items()}
    whole = math.hypot(*norms.values())
    errors = {}
    for name, result in results.items():
        # A gradient that is zero but for rounding, such as that of a bias before a normalisation.
        share = norms[name] / whole if norms[name] < NEGLIGIBLE * whole else 1.0
        errors[name] = math.nan if result.numbers.bad else result.error * share
    return dict(sorted(errors.items(), key=lambda item: (not math.isnan(item[1]), -item[1])))

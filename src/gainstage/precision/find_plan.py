"""Measures, line by line, what half precision does to a function's gradient."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gainstage._base import checks
from gainstage._base.progress_bar import counted
from gainstage._base.warn import warn
from gainstage._programs.jaxprs import Path
from gainstage._programs.operations import PRODUCTS
from gainstage._variables.types import PyTree, Using
from gainstage.precision.autocast import Caster, autocast, plan_of, under_plan
from gainstage.precision.calls import Call
from gainstage.precision.cards import ANY, Card, known_card
from gainstage.precision.emulated import Collected, by_rules
from gainstage.precision.float8_rule import float8_sizes, pays
from gainstage.precision.noise_and_bias import (
    MAX_BIAS,
    MAX_NOISE,
    GradientAccuracy,
    Parts,
    Reference,
    error_of,
)
from gainstage.precision.plan import DTYPES, FLOAT8, WIDE, Plan, PlanEntry
from gainstage.precision.policy import Level, may_round
from gainstage.precision.program_costs import bytes_in_half
from gainstage.precision.samples import MIN_BATCHES, Samples, largest_exponent, samples_of
from gainstage.precision.shares import Emulation, Levels, chosen
from gainstage.transforms.retrace import Retraced
from gainstage.transforms.value_and_grad import LossFunction

__all__ = ["find_plan"]

ROOM = 2.0**4  # between the largest number and that of the dtype: activations grow in training
SHARED = 2  # batches on which shares are measured


def find_plan(
    fun: Callable[..., Any],
    params: PyTree,
    batches: Sequence[Any],
    *,
    dtype: str = "float16",
    max_noise: float = MAX_NOISE,
    max_bias: float = MAX_BIAS,
    max_error: float | None = None,
    card: str | None = "H100",
    has_aux: bool = False,
    using: Using | None = None,
    progress: bool = True,
) -> Plan:
    """Measures which operations of a float32 function may be in half precision or float8.

    One program has a switch for each line of the code, and so one for what is the same in all
    layers. With a single switch on, the difference of the gradients from those in float32 is the
    share of that line: its noise, and its bias. Both add up over lines, so the shares predict each
    choice. They are measured on two batches, and the plan on the others, if those are two or more.
    The time does not grow with depth: about two gradients for each line of the model and dtype.

    Args:
        fun: a float32 function `(params, *batch)` that returns a scalar loss, or (loss, aux),
            before `autocast`.
        params: its first argument, trained or as at the start.
        batches: a list of two batches or more, of usual size. Each is the tuple of what `fun` takes
            after the parameters, such as `(x, y)`, or `(x,)`.
        dtype: "float16", "bfloat16", or "float8": float8 in products, float16 in the rest. Beside
            float16, a product may be in bfloat16, if float16 does not hold its numbers.
        max_noise: the largest variance of rounding errors over that of the batches, above 0.
        max_bias: the largest norm of the mean error over that of the mean gradient, above 0.
        max_error: instead of both, the largest relative error of the gradient of a batch, above 0.
            One batch is then enough. A warning says if the plan cannot keep its bounds.
        card: a card, as for `gainstage.advise`: products are in float8 where it gains by that, and
            in bfloat16 if it has products of that. None for all products that keep the bounds.
        has_aux: whether `fun` returns (loss, aux).
        using: the function that differentiates, by default as for `gainstage.value_and_grad`.
        progress: whether to show a progress bar, in a terminal.

    Returns:
        A `Plan` for `gainstage.autocast`; `print` it.

    Raises:
        TypeError, ValueError: an argument is invalid, the batches differ in structure or shapes,
            the loss is not a scalar, the loss or a gradient is not finite in float32, or all
            gradients are 0.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> from gainstage.precision import find_plan
        >>> def loss_fn(w, x):  # features with an offset, which is subtracted again
        ...     return jnp.mean(jnp.tanh(x @ w - 300 * w.sum(0)) ** 2)
        >>> w = jax.random.normal(jax.random.key(0), (16, 16)) / 4
        >>> xs = 300 + jax.random.normal(jax.random.key(1), (4, 64, 16))
        >>> plan = find_plan(loss_fn, w, [(x,) for x in xs])
        >>> print([o.name for o in plan.entries if o.dtype == "float32"][0])
        dot_general
        >>> step = jax.grad(gs.autocast(loss_fn, plan))

    Source: precision tuning as in Precimonious (Rubio-Gonzalez et al., 2013), with a prediction
    instead of a search.
    """
    if dtype not in (*DTYPES, FLOAT8):
        raise ValueError(f"Expected one of {sorted([*DTYPES, FLOAT8])} for dtype; got {dtype!r}.")
    cast = autocast(fun, "float16" if dtype == FLOAT8 else dtype) if callable(fun) else fun
    return measured_plan(
        LossFunction(fun, has_aux, using), cast, params, batches,
        dtype=dtype, max_noise=max_noise, max_bias=max_bias, max_error=max_error,
        card=card, progress=progress,
    )  # fmt: skip


def measured_plan(
    loss: LossFunction,
    cast: Callable[..., Any],
    params: PyTree,
    batches: Sequence[Any],
    *,
    dtype: str,
    max_noise: float,
    max_bias: float,
    max_error: float | None,
    card: str | None,
    progress: bool = True,
) -> Plan:
    """What `find_plan` returns, of a function in which autocast is called anywhere.

    Args:
        loss: the function before autocast, and how it is differentiated.
        cast: the same function with autocast.
        params, batches, dtype, max_noise, max_bias, max_error, card, progress: as for `find_plan`.
    """
    budget = _budget(max_noise, max_bias, max_error)
    fewest = MIN_BATCHES if max_error is None else 1
    samples = samples_of(loss, params, batches, fewest).of(cast)
    own = ANY if card is None else known_card(card)
    levels_of = _Levels(
        own if dtype == FLOAT8 else None,
        has_bfloat16=dtype != "bfloat16" and own.multiplies("bfloat16"),
    )
    emulation = Emulation(samples, Collected(levels_of.of), ROOM)
    tuner = _Tuner(samples, emulation, dtype, of_noise=max_error is None)
    with counted(tuner.pieces, "find_plan", shows=progress) as tick:
        tuner.measure(tick)
    plan = tuner.plan(budget)
    if not budget.keeps(plan.measured):
        warn(
            f"Expected {budget}; the plan has {plan.measured.told()}, with "
            f"{sum(o.dtype != WIDE for o in plan.entries)} lines in half precision or less. "
            f"Some of it may come from what the function itself computes in half precision."
        )
    return plan


class _Budget(NamedTuple):
    """The bounds of a plan; inf for none."""

    noise: float = math.inf
    bias: float = math.inf
    error: float = math.inf

    def keeps(self, price: GradientAccuracy) -> bool:
        """Whether a measured price is within the bounds."""
        return self.used_by(price) <= 1

    def used_by(self, price: GradientAccuracy) -> float:
        """The largest part of a bound that a price takes; NaN does not count."""
        pairs = zip((price.noise, price.bias, price.error), self, strict=True)
        return max(0.0, *(found / bound for found, bound in pairs if bound < math.inf))

    def __str__(self) -> str:
        each = zip(("max_noise", "max_bias", "max_error"), self, strict=True)
        return " and ".join(f"{name}={bound:g}" for name, bound in each if bound < math.inf)


def _budget(max_noise: float, max_bias: float, max_error: float | None) -> _Budget:
    """The bounds that the user asks for."""
    if max_error is not None:
        return _Budget(error=checks.real("max_error", max_error, above=0.0))
    noise = checks.real("max_noise", max_noise, above=0.0)
    return _Budget(noise, checks.real("max_bias", max_bias, above=0.0))


def mended_plan(samples: Samples) -> Plan:
    """The default rules of a function under autocast, with the lines in float32 that keep the
    bounds of `advise`."""
    plan = plan_of(samples.fun)
    assert plan is not None
    tuner = _Tuner(samples, Emulation(samples, Collected(by_rules)), plan.dtype, of_noise=True)
    tuner.measure(lambda: None)
    found = tuner.plan(_Budget(MAX_NOISE, MAX_BIAS))
    rows = [o for o in found.entries if o.reason]
    short = Plan(plan.dtype, rows, found.predicted, found.measured)
    left = bytes_in_half(samples, under_plan(samples.fun, short))
    left /= bytes_in_half(samples, samples.fun) or 1.0
    return Plan(plan.dtype, rows, found.predicted, found.measured, left)


class _Levels(NamedTuple):
    """At which levels an operation may be in a plan.

    Args:
        card: where products may be in float8, if the card gains by it; None for none.
        has_bfloat16: whether products may be in bfloat16, beside another dtype.
    """

    card: Card | None
    has_bfloat16: bool

    def of(
        self, caster: Caster, call: Call, results: Sequence[Retraced], path: Path
    ) -> tuple[tuple[Level, ...], bool]:
        """The levels of an operation, and that its operands are rounded."""
        if not may_round(call):
            return (), True
        if call.name not in PRODUCTS:
            return (Level.HALF,), True
        sizes = float8_sizes(call.eqn, call.values, only_linear=False)
        gains = self.card is not None and sizes is not None and pays(sizes, self.card)
        levels = (Level.FLOAT8,) * gains + (Level.HALF,)
        return (*levels, *(Level.BFLOAT16,) * self.has_bfloat16, Level.RESULT), True


class _Tuner:
    """The measurements of one function.

    Args:
        samples: the function and its batches.
        emulation: the function with its lines at any level.
        dtype: as for `find_plan`.
        of_noise: whether noise is bounded, for which batches must differ.
    """

    def __init__(self, samples: Samples, emulation: Emulation, dtype: str, of_noise: bool):
        self._samples, self._emulation = samples, emulation
        self._dtype = "float16" if dtype == FLOAT8 else dtype
        self._asks_float8, self._of_noise = dtype == FLOAT8, of_noise
        self._shared = min(SHARED, len(samples))
        self.pieces: int = emulation.pieces * self._shared

    def measure(self, tick: Callable[[], Any]) -> None:
        """Measures the shares."""
        emulation = self._emulation
        self._gradients = [results[1:] for results in self._samples.exact()]
        self._reference = self._reference_of(self._gradients)
        widest = (emulation.run(emulation.widest, 1.0, n) for n in range(len(self._samples)))
        sketches = [results.gradients for results in widest]
        reference = self._reference and self._reference_of(sketches)
        levels = emulation.narrowest()
        if not self._is_finite(levels):  # at no loss scale: what overflows by itself is left out
            levels = emulation.narrowest(lambda *at: self._is_finite(emulation.at(*at)))
        self._scale = 2.0 ** largest_exponent(lambda n: self._is_finite(levels, 2.0**n))
        self._shares: dict[tuple[int, Level], GradientAccuracy] = {}
        for key, each in emulation.of_each_line(self._scale, self._shared, tick).items():
            gradients = [results.gradients for results in each]
            self._shares[key] = _price_of(reference, gradients, sketches, range(self._shared))

    def _is_finite(self, levels: Levels, scale: float = 1.0) -> bool:
        """Whether loss and gradients are finite on all batches at some levels."""
        runs = (self._emulation.run(levels, scale, n) for n in range(len(self._samples)))
        return all(results.is_finite for results in runs)

    def _reference_of(self, gradients: Sequence[Parts]) -> Reference | None:
        """The gradients in float32, if their noise is known."""
        reference = Reference(gradients) if len(gradients) > 1 else None
        if reference is None or reference.variance:
            return reference
        if self._of_noise:
            raise ValueError("Expected different batches; all of them have the same gradient.")
        return None

    def plan(self, budget: _Budget) -> Plan:
        """The first plan that keeps the bounds, as measured."""
        # Sometimes the shares add up to more than predicted.
        tried = (self._verified(budget, part) for part in (1.0, 1 / 3, 1 / 10))
        fits = (plan for plan in tried if budget.keeps(plan.measured))
        return next(fits, None) or self._verified(budget, 0.0)

    def _verified(self, budget: _Budget, part: float) -> Plan:
        """Chooses by the shares, and measures the choice on the batches that they are not of."""
        # What overflows goes out first.
        first = self._emulation.narrowest(lambda *at: math.isfinite(self._share(*at).error))
        lines = self._emulation.lines
        levels = chosen(lines, first, lambda at: budget.used_by(self._predicted(at)), part)
        rows = [self._row(n, Level(level)) for n, level in enumerate(levels)]
        plan = Plan(self._dtype, rows)
        others = range(self._shared, len(self._samples))
        numbers = others if len(others) > 1 else range(len(self._samples))
        run = self._samples.compiled(under_plan(self._samples.fun, plan))
        found = [run(number, self._scale)[1:] for number in numbers]
        measured = _price_of(self._reference, found, self._gradients, numbers)
        return Plan(self._dtype, rows, self._predicted(levels), measured)

    def _share(self, number: int, level: Level) -> GradientAccuracy:
        return self._shares.get((number, level), GradientAccuracy(0.0, 0.0, error=0.0))

    def _predicted(self, levels: Levels) -> GradientAccuracy:
        """What lines cost together: noise adds up, and the squares of bias and error."""
        each = [self._share(number, Level(level)) for number, level in enumerate(levels)]
        noise = sum(share.noise for share in each)
        bias, error = (
            math.sqrt(sum(x**2 for x in some))
            for some in ([share.bias for share in each], [share.error for share in each])
        )
        return GradientAccuracy(noise, bias, error=error)

    def _row(self, number: int, level: Level) -> PlanEntry:
        """The row of a line; of what is in float32 the numbers are those in half precision."""
        line = self._emulation.lines[number]
        half = next(at for at in line.levels if at >= Level.HALF)
        at = level if level < Level.RESULT else half
        share, reason = self._share(number, at), ""
        if level > line.levels[0]:
            narrower = self._share(number, line.levels[0])
            reason = f"its share in {line.name_at(line.levels[0], self._dtype)}"
            reason = reason if math.isfinite(narrower.error) else "it is too large"
        elif self._asks_float8 and level > Level.FLOAT8 and line.places[0].is_product:
            reason = "float8 gains nothing"
        error, noise, bias = (float(x) for x in (share.error, share.noise, share.bias))
        return line.operation(
            level, self._dtype, error=error, noise=noise, bias=bias, reason=reason
        )


def _price_of(
    reference: Reference | None, found: Sequence[Parts], exact: Sequence[Parts], numbers: Any
) -> GradientAccuracy:
    """What gradients of some batches cost."""
    if reference is None:
        errors = [error_of(own, exact[n]) for own, n in zip(found, numbers, strict=True)]
        return GradientAccuracy(math.nan, math.nan, error=max(errors))
    return reference.price(found, numbers)

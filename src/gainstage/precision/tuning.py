"""Measures, operation by operation, what half precision does to a function's gradient."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base._jax import JaxprEqn
from gainstage._base.progress_bar import counted
from gainstage._programs import jaxprs
from gainstage._programs.in_dtype import is_float32
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage._programs.operations import PRODUCTS
from gainstage._programs.places import frames_of, line_of, scope_of
from gainstage._variables.types import PyTree, Using
from gainstage.precision.autocast import autocast
from gainstage.precision.cards import ANY, Card, known_card
from gainstage.precision.float8_rule import Float8Decision, decide
from gainstage.precision.needs import Need, needs_of
from gainstage.precision.noise_and_bias import MAX_BIAS, MAX_NOISE, Price, Reference, error_of
from gainstage.precision.plan import DTYPES, FLOAT8, Operation, Plan, operations_of
from gainstage.precision.samples import (
    MIN_BATCHES,
    Samples,
    exact_products,
    is_finite,
    largest_exponent,
    samples_of,
)
from gainstage.precision.switches import Switch, switched
from gainstage.precision.tune_sums import SumFinder
from gainstage.transforms.retrace import Replay, Retraced, as_written, replayed

__all__ = ["tune"]

ROOM = 2.0**4  # between the largest number and that of the dtype: activations grow in training
WEIGHT = 16  # how much more a product saves than another operation of its size
SHARED = 2  # batches on which shares are measured
HALVES = Switch.HALF, Switch.BFLOAT16


def tune(
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

    One program has a switch for each operation, and one for those that are the same in all layers.
    With a single switch on, the difference of the gradients from those in float32 is the share of
    that operation: its noise, and its bias. Both add up over operations, so the shares predict each
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
        >>> from gainstage.precision import tune
        >>> def loss_fn(w, x):  # features with an offset, which is subtracted again
        ...     return jnp.mean(jnp.tanh(x @ w - 300 * w.sum(0)) ** 2)
        >>> w = jax.random.normal(jax.random.key(0), (16, 4)) / 4
        >>> xs = 300 + jax.random.normal(jax.random.key(1), (4, 64, 16))
        >>> plan = tune(loss_fn, w, [(x,) for x in xs])
        >>> print([o.name for o in plan.operations if o.dtype == "float32"][0])
        dot_general
        >>> step = jax.grad(gs.autocast(loss_fn, plan))

    Source: precision tuning as in Precimonious (Rubio-Gonzalez et al., 2013), with a prediction
    instead of a search.
    """
    if dtype not in (*DTYPES, FLOAT8):
        raise ValueError(f"Expected one of {sorted([*DTYPES, FLOAT8])} for dtype; got {dtype!r}.")
    budget = _budget(max_noise, max_bias, max_error)
    fewest = MIN_BATCHES if max_error is None else 1
    samples = samples_of(fun, params, batches, has_aux, using, fewest)
    known = ANY if card is None else known_card(card)
    tuner = _Tuner(
        samples,
        DTYPES.get(dtype, DTYPES["float16"]),
        card=known if dtype == FLOAT8 else None,
        has_bfloat16=dtype != "bfloat16" and known.multiplies("bfloat16"),
        of_noise=max_error is None,
    )
    with counted(tuner.pieces, "tune", shows=progress) as tick:
        tuner.measure(tick)
    plan = tuner.plan(budget)
    if not budget.keeps(plan.measured):
        warnings.warn(
            f"Expected {budget}; the plan has {plan.measured.told()}, with "
            f"{sum(o.dtype != 'float32' for o in plan.operations)} operations in half or less. "
            f"Some of it may come from what the function itself computes in half precision.",
            stacklevel=2,
        )
    return plan


class _Budget(NamedTuple):
    """The bounds of a plan; inf for none."""

    noise: float = math.inf
    bias: float = math.inf
    error: float = math.inf

    def keeps(self, price: Price) -> bool:
        """Whether a measured price is within the bounds."""
        pairs = zip((price.noise, price.bias, price.error), self, strict=True)
        return all(found <= bound for found, bound in pairs if bound < math.inf)

    def limits(self, part: float) -> np.ndarray:
        """A part of the bounds, as what adds up: noise, and the squares of bias and error."""
        return np.array([self.noise, self.bias**2, self.error**2]) * [part, part**2, part**2]

    def __str__(self) -> str:
        each = zip(("max_noise", "max_bias", "max_error"), self, strict=True)
        return " and ".join(f"{name}={bound:g}" for name, bound in each if bound < math.inf)


def _budget(max_noise: float, max_bias: float, max_error: float | None) -> _Budget:
    """The bounds that the user asks for."""
    if max_error is not None:
        return _Budget(error=checks.real("max_error", max_error, above=0.0))
    noise = checks.real("max_noise", max_noise, above=0.0)
    return _Budget(noise, checks.real("max_bias", max_bias, above=0.0))


class _Tuner:
    """The measurements of one function.

    Args:
        samples: the function and its batches.
        dtype: the half-precision dtype.
        card: where products may be in float8, if the card gains by it; None for none.
        has_bfloat16: whether products may be in bfloat16, beside another dtype.
        of_noise: whether noise is bounded, for which batches must differ.
    """

    def __init__(
        self,
        samples: Samples,
        dtype: np.dtype,
        card: Card | None,
        has_bfloat16: bool,
        of_noise: bool,
    ):
        self._samples, self._dtype, self._of_noise = samples, dtype, of_noise
        self._has_float8 = card is None or bool(card.float8)
        self._names = {
            Switch.FLOAT32: "float32", Switch.HALF: dtype.name, Switch.BFLOAT16: "bfloat16",
            Switch.FLOAT8: FLOAT8,
        }  # fmt: skip
        programs: list[Any] = []
        visited, sums, decisions = set(), SumFinder(), dict[Path, Float8Decision]()

        def visit(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
            visited.add(path)
            if card is not None:
                decisions[path] = decide(eqn, values, card, only_linear=False)
            results = as_written(eqn, values)
            sums.follow(eqn, values, results, path)
            return results

        def begin(program: AnyJaxpr) -> Replay:
            programs.append(program)
            return Replay(visit)

        traced = replayed(samples.fun, begin, half=dtype.name)
        one, first = jnp.float32(1), samples.arrays[0]
        jax.eval_shape(lambda arrays: samples.gradients_of(traced, one, arrays), first)
        arguments = jaxprs.open_jaxpr(programs[0]).invars
        self._shapes = [jaxprs.array(v).shape for v in arguments[: samples.parameters]]
        self._equations = dict(operations_of(programs[0]))
        self._kept = self._equations.keys() - visited
        self._of_sums = self._equations.keys() & sums.paths
        needs = needs_of(programs[0], dtype)
        self._coordinates = {path for path, need in needs.items() if Need.COORDINATE in need}
        keys = {path: _key(eqn) for path, eqn in self._equations.items()}
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys.values()))}
        self._group = {path: numbers[key] for path, key in keys.items()}
        self._groups = len(numbers)
        # Products that may be in float8, and those that are too small for the card.
        known = [(path, decisions.get(path)) for path in self._equations]
        self._may_be_float8 = {
            path for path, decision in known if decision is Float8Decision.FLOAT8
        }
        self._too_small = {path for path, decision in known if decision is Float8Decision.TOO_SMALL}
        self._choices = {(group, Switch.HALF) for group in range(self._groups)}
        self._choices |= {(self._group[path], Switch.FLOAT8) for path in self._may_be_float8}
        if has_bfloat16:
            products = (p for p, eqn in self._equations.items() if eqn.primitive.name in PRODUCTS)
            self._choices |= {(self._group[path], Switch.BFLOAT16) for path in products}
        self._largest = dict.fromkeys(self._equations, 0.0)
        self._shared = min(SHARED, len(samples))
        self.pieces = len(self._choices) * self._shared

    def measure(self, tick: Callable[[], Any]) -> None:
        """Measures the ranges and the shares."""
        limit = float(jnp.finfo(self._dtype).max) / ROOM
        self._measure_ranges()
        self._hot = {path for path, size in self._largest.items() if not size <= limit}
        # Near a solution coordinates need digits that no measurement at the start asks for.
        self._wide = self._kept | self._of_sums | self._coordinates
        self._exact = self._samples.exact()
        gradients = [results[1:] for results in self._exact]
        self._reference = Reference(gradients) if len(gradients) > 1 else None
        if self._reference is not None and not self._reference.variance:
            if self._of_noise:
                raise ValueError("Expected different batches; all of them have the same gradient.")
            self._reference = None
        switched = self._switched()
        every = np.full(self._groups, Switch.HALF)
        numbers = range(len(self._samples))

        def fits(exponent: int) -> bool:
            scale = jnp.float32(2.0**exponent)
            return all(is_finite(switched(every, scale, number)) for number in numbers)

        self._scale = jnp.float32(2.0 ** largest_exponent(fits))
        self._shares: dict[tuple[int, Switch], Price] = {}
        for group, choice in sorted(self._choices):
            switches = np.where(np.arange(self._groups) == group, choice, Switch.FLOAT32)
            found = []
            for number in range(self._shared):
                found.append(switched(switches, self._scale, number)[1:])
                tick()
            self._shares[group, choice] = self._price(found, range(self._shared))

    def _price(self, found: Sequence[Any], numbers: Sequence[int]) -> Price:
        """What gradients of some batches cost."""
        if self._reference is None:
            return Price(math.nan, math.nan, error=error_of(found[0], self._exact[0][1:]))
        return self._reference.price(found, numbers)

    def plan(self, budget: _Budget) -> Plan:
        """The first plan that keeps the bounds, as measured."""
        # Sometimes the shares add up to more than predicted.
        tried = (self._verified(budget.limits(part)) for part in (1.0, 1 / 3, 1 / 10))
        fits = (plan for plan in tried if budget.keeps(plan.measured))
        return next(fits, None) or self._verified(np.zeros(3))

    def _verified(self, limits: np.ndarray) -> Plan:
        """Chooses by the shares, and measures the choice on the batches that they are not of."""
        chosen, predicted = self._chosen(limits)
        plan = self._table(chosen, predicted, predicted)
        others = range(self._shared, len(self._samples))
        numbers = others if len(others) > 1 else range(len(self._samples))
        run = self._samples.compiled(autocast(self._samples.fun, plan))
        found = [run(number, float(self._scale))[1:] for number in numbers]
        return self._table(chosen, predicted, self._price(found, numbers))

    def _measure_ranges(self) -> None:
        """Measures the largest number at each operation, in float32."""
        paths = list(self._equations)

        def note(number: int, size: SupportsFloat) -> None:
            self._largest[paths[number]] = max(self._largest[paths[number]], float(size))

        numbers = {path: n for n, path in enumerate(paths)}

        def compute(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
            results = as_written(eqn, values)
            if path in numbers:
                both = (*values, *results), (*eqn.invars, *eqn.outvars)
                known = zip(*both, strict=True)
                sizes = [_largest_in(v.x) for v, var in known if is_float32(var)]
                size = functools.reduce(jnp.maximum, sizes)
                jax.debug.callback(functools.partial(note, numbers[path]), size)
            return results

        measured = replayed(
            self._samples.fun, lambda program: Replay(compute), half=self._dtype.name
        )

        def ranges(arrays: Sequence[Any]) -> None:
            measured(*self._samples.args(arrays))

        program = jax.jit(ranges)
        with exact_products():
            for arrays in self._samples.arrays:
                program(arrays)
        jax.effects_barrier()

    def _switched(self) -> Callable[..., list[Any]]:
        """The compiled gradients of the function with switches: `(switches, scale, batch)`."""
        options = {path: (group, self._options(path)) for path, group in self._group.items()}

        def compiled(switches: jax.Array, scale: jax.Array, arrays: Sequence[Any]) -> list[Any]:
            fun = switched(self._samples.fun, options, switches, self._dtype.name)
            return self._samples.gradients_of(fun, scale, arrays)

        program = jax.jit(compiled)

        def run(switches: np.ndarray, scale: jax.Array, number: int) -> list[Any]:
            with exact_products():
                return jax.device_get(program(switches, scale, self._samples.arrays[number]))

        return run

    def _options(self, path: Path) -> dict[Switch, np.dtype]:
        """The half-precision dtype of an operation at each switch; at others it is in float32."""
        if path in self._wide:
            return {}
        options: dict[Switch, np.dtype] = {}
        if path not in self._hot:
            options[Switch.HALF] = self._dtype
            if path in self._may_be_float8:
                options[Switch.FLOAT8] = self._dtype
        if (self._group[path], Switch.BFLOAT16) in self._choices:
            options[Switch.BFLOAT16] = DTYPES["bfloat16"]
        return options

    def _switch_at(self, path: Path, switch: Switch) -> Switch:
        """What a switch does at an operation: float8 leaves some of its group in half precision."""
        options = self._options(path)
        if switch not in options and switch is Switch.FLOAT8:
            switch = Switch.HALF
        return switch if switch in options else Switch.FLOAT32

    def _gain(self, group: int, switch: Switch) -> int:
        """What a switch saves: the elements of its operations that it rounds, weighted."""
        gain = 0
        for path, eqn in self._equations.items():
            if self._group[path] == group and self._switch_at(path, switch):
                is_product = eqn.primitive.name in PRODUCTS or jaxprs.is_kernel(eqn)
                weight = WEIGHT if is_product else 1
                each = (jaxprs.array(v) for v in (*eqn.invars, *eqn.outvars) if is_float32(v))
                gain += weight * sum(x.size for x in each)
        return gain

    def _chosen(self, limits: np.ndarray) -> tuple[dict[int, Switch], Price]:
        """What groups are in, so that all fit together, and what they cost by their shares."""
        costs = {key: _adds_up(share) for key, share in self._shares.items()}
        gains = {(group, switch): self._gain(group, switch) for group, switch in costs}
        chosen, total = dict[int, Switch](), np.zeros(3)
        # Half precision first: float8 is for what is left of the bounds.
        for choices in (HALVES, (Switch.FLOAT8,)):

            def more(key: tuple[int, Switch]) -> np.ndarray:
                group = key[0]
                return costs[key] - (costs[group, chosen[group]] if group in chosen else 0)

            def worth(key: tuple[int, Switch]) -> float:
                with np.errstate(all="ignore"):
                    part = np.nan_to_num(more(key) / limits, nan=0.0, posinf=np.inf).max()
                return part / max(gains[key], 1)

            for group, switch in sorted((k for k in costs if k[1] in choices), key=worth):
                old = chosen.get(group)
                if old is Switch.BFLOAT16 and switch is Switch.FLOAT8:
                    continue  # float8 has the range of float16
                gains_more = old is None or gains[group, switch] > gains[group, old]
                is_better = gains_more or switch is Switch.FLOAT8
                if is_better and (total + more((group, switch)) <= limits).all():
                    total += more((group, switch))
                    chosen[group] = switch
        known = self._reference is not None
        noise, bias = (total[0], math.sqrt(max(total[1], 0.0))) if known else (math.nan, math.nan)
        return chosen, Price(float(noise), bias, error=math.sqrt(max(total[2], 0.0)))

    def _table(self, chosen: dict[int, Switch], predicted: Price, measured: Price) -> Plan:
        rows = []
        for path, eqn in self._equations.items():
            group = self._group[path]
            switch = self._switch_at(path, chosen.get(group, Switch.FLOAT32))
            share = self._shares[group, switch or Switch.HALF]  # of float32, that of half precision
            own = self._names[switch]
            place = line_of(eqn), scope_of(eqn)
            rows.append(
                Operation(
                    path, jaxprs.name_of(eqn), own, *place, float(share.error), float(share.noise),
                    float(share.bias), self._largest[path], self._reason(path, own),
                )
            )  # fmt: skip
        return Plan(self._names[Switch.HALF], rows, predicted, measured, self._shapes)

    def _reason(self, path: Path, dtype: str) -> str:
        """Why an operation is not in a smaller dtype, or in which float16 would be closer."""
        if dtype == FLOAT8:
            return ""
        if dtype == "bfloat16" and self._names[Switch.HALF] != dtype:
            reaches = f"it reaches {self._largest[path]:.3g}"
            return reaches if path in self._hot else "float16 is further off"
        if dtype != "float32":
            narrow = "too small for float8" if self._has_float8 else "no float8 on this card"
            narrow *= path in self._too_small
            return "its share in float8" if path in self._may_be_float8 else narrow
        if path in self._kept:
            return "keep_float32, or unused"
        if path in self._of_sums:
            return "a sum"
        if path in self._coordinates:
            return "coordinates"
        if path in self._hot:
            return f"it reaches {self._largest[path]:.3g}"
        return "its share"


def _adds_up(share: Price) -> np.ndarray:
    """What of a share adds up over operations: noise, and the squares of bias and error."""
    each = np.array([share.noise, share.bias**2, share.error**2])
    return np.where(np.isnan(each), 0.0, each)


def _largest_in(x: ArrayLike) -> jax.Array:
    """The largest absolute number; half precision holds infinities, such as those of a mask."""
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)


def _key(eqn: JaxprEqn) -> tuple[Any, ...]:
    """What operations of equal layers have in common."""
    return eqn.primitive.name, frames_of(eqn), tuple(v.aval.str_short() for v in eqn.outvars)

"""Measures, operation by operation, what half precision does to a function's gradient."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gainstage._base import checks
from gainstage._base._jax import JaxprEqn, Literal, Var
from gainstage._base.arrays import partition
from gainstage._base.progress_bar import counted
from gainstage._programs import jaxprs
from gainstage._programs.in_dtype import is_float32
from gainstage._programs.jaxprs import Path
from gainstage._programs.operations import PRODUCTS
from gainstage._programs.places import frames_of, line_of, scope_of
from gainstage._scaling import gradients
from gainstage._variables.types import PyTree, Using
from gainstage.precision.autocast import autocast, plan_of
from gainstage.precision.plan import DTYPES, Operation, Plan, operations_of
from gainstage.precision.tune_sums import SumFinder
from gainstage.transforms.retrace import SINGLE, Retraced, as_written, replayed
from gainstage.transforms.value_and_grad import scaled_value_and_grad

__all__ = ["tune"]

ROOM = 2.0**4  # between the largest number and that of the dtype: activations grow in training
MAX_ERROR = 0.005  # the default of `precision.tune`
TRIES = 6  # lower loss scales, each a sixteenth of the one before
WEIGHT = 16  # how much more a product saves than another operation of its size


def tune(
    fun: Callable[..., Any],
    *args: PyTree,
    dtype: str = "float16",
    max_error: float = MAX_ERROR,
    has_aux: bool = False,
    using: Using | None = None,
    progress: bool = True,
) -> Plan:
    """Measures which operations of a float32 function may be in half precision.

    One program has a switch for each operation. With a single switch on, the difference of the
    gradient is the share of that operation. Rounding errors add like independent ones, so the
    shares predict the error of each choice. Operations that are the same in all layers have one
    switch, so the time does not grow with depth: about one gradient for each line of the model.

    Args:
        fun: a float32 function `(params, *batch)` that returns a scalar loss, or (loss, aux),
            before `autocast`.
        *args: its arguments. Use trained parameters or those of the start, and a usual batch.
        dtype: "float16" or "bfloat16".
        max_error: the largest relative error of the gradient, > 0: the norm of the difference
            over the norm. A warning says if the plan cannot keep it.
        has_aux: whether `fun` returns (loss, aux).
        using: the function that differentiates, by default as for `gainstage.value_and_grad`.
        progress: whether to show a progress bar, in a terminal.

    Returns:
        A `Plan` for `gainstage.autocast`; `print` it.

    Raises:
        TypeError, ValueError: an argument is invalid, the loss is not a scalar, or the loss or a
            gradient is not finite in float32.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> from gainstage.precision import tune
        >>> def loss_fn(w, x):  # features with an offset, which is subtracted again
        ...     return jnp.mean(jnp.tanh(x @ w - 300 * w.sum(0)) ** 2)
        >>> w = jax.random.normal(jax.random.key(0), (16, 4)) / 4
        >>> x = 300 + jax.random.normal(jax.random.key(1), (64, 16))
        >>> plan = tune(loss_fn, w, x)
        >>> print([o.name for o in plan.operations if o.dtype == "float32"][0])
        dot_general
        >>> step = jax.grad(gs.autocast(loss_fn, plan))

    Source: precision tuning as in Precimonious (Rubio-Gonzalez et al., 2013), with a prediction
    instead of a search.
    """
    if dtype not in DTYPES:
        raise ValueError(f"Expected one of {sorted(DTYPES)} for dtype; got {dtype!r}.")
    max_error = checks.real("max_error", max_error, above=0.0)
    if plan_of(fun) is not None:
        raise ValueError(
            f"Expected a float32 function for fun; got {fun!r}, which is under autocast already. "
            f"Pass the function that autocast was given: fun.__wrapped__."
        )
    tuner = _Tuner(fun, args, DTYPES[dtype], has_aux, using)
    with counted(tuner.groups, "tune", shows=progress) as tick:
        tuner.measure(tick)
    plan = tuner.plan(dtype, max_error)
    if not plan.measured <= max_error:
        warnings.warn(
            f"Expected max_error={max_error:g}; the plan has {plan.measured:.2g}, with "
            f"{sum(o.dtype == dtype for o in plan.operations)} operations in {dtype}. Some of the "
            f"error may come from what the function itself computes in half precision.",
            stacklevel=2,
        )
    return plan


class PlanTrial(NamedTuple):
    """A plan that was measured on the arguments of a bad step, and its outcome there."""

    plan: Plan
    lines: tuple[str, ...]  # of the operations whose numbers come near the largest one
    scale: float  # that of the step, or a lower one at which all is finite
    is_finite: bool
    loss: float
    error: float  # of the gradients, relative to float32


def try_plan(
    fun: Callable[..., Any],
    args: Sequence[Any],
    scale: float,
    has_aux: bool,
    using: Using | None,
    progress: bool,
) -> PlanTrial:
    """Measures a plan on the arguments of a bad step, and tries it.

    Args:
        fun: a function under `autocast`. What its own plan keeps in float32 stays so.
        args, has_aux, using, progress: as for `precision.tune`.
        scale: the loss scale of the step.
    """
    before: Any = plan_of(fun)
    known = isinstance(before, Plan)
    dtype = before.dtype if known else before
    written: Any = inspect.unwrap(fun, stop=lambda f: plan_of(f) is None)
    tuner = _Tuner(written, args, DTYPES[dtype], has_aux, using, before if known else None)
    with counted(tuner.groups, "tune", shows=progress) as tick:
        tuner.measure(tick)
    plan = tuner.plan(dtype, MAX_ERROR)
    hot = (o.line for o in plan.operations if o.dtype != dtype and o.path in tuner.hot)
    fits, found = scale, tuner.run(plan, jnp.float32(scale))
    while not _finite(found) and fits > scale / 16.0**TRIES:
        fits /= 16.0
        found = tuner.run(plan, jnp.float32(fits))
    outcome = _finite(found), float(found[0]), tuner.error(found)
    return PlanTrial(plan, tuple(dict.fromkeys(hot)), fits, *outcome)


class _Tuner:
    """The measurements of one function."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        dtype: np.dtype,
        has_aux: bool,
        using: Using | None,
        before: Plan | None = None,
    ):
        self._fun, self._dtype, self._has_aux, self._using = fun, dtype, has_aux, using
        self._arrays, self._static = partition(tuple(args))
        self._shapes = [np.shape(x) for x in partition(args[0])[0]] if args else []
        programs: list[Any] = []
        visited = set()

        sums = SumFinder()

        def visit(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
            visited.add(path)
            results = as_written(eqn, values)
            sums.follow(eqn, values, results, path)
            return results

        traced = replayed(fun, visit, check=programs.append)
        one = jnp.float32(1)
        jax.eval_shape(lambda arrays: self._gradients_of(traced, one, arrays), self._arrays)
        self._equations = dict(operations_of(programs[0]))
        self._kept = self._equations.keys() - visited
        self._of_sums = self._equations.keys() & sums.paths
        earlier: set[Path] = set()
        if before is not None:
            before.check(programs[0])
            earlier = {o.path for o in before.operations if o.dtype != before.dtype}
        self._earlier = earlier - self._kept
        keys = {path: _key(eqn) for path, eqn in self._equations.items()}
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys.values()))}
        self._group = {path: numbers[key] for path, key in keys.items()}
        self.groups = len(numbers)
        self._largest = dict.fromkeys(self._equations, 0.0)

    def measure(self, tick: Callable[[], Any]) -> None:
        """Measures the ranges and the shares."""
        limit = float(jnp.finfo(self._dtype).max) / ROOM
        self._measure_ranges()
        self.hot = {path for path, size in self._largest.items() if not size <= limit}
        self._wide = self.hot | self._kept | self._earlier
        self._wide |= self._of_sums
        switched, self._exact = self._switched()
        self._scale = _largest_scale(lambda s: switched(jnp.ones(self.groups, bool), s))
        self._shares: list[float] = []
        for group in range(self.groups):
            found = switched(jnp.arange(self.groups) == group, self._scale)
            self._shares.append(self.error(found))
            tick()

    def error(self, found: Sequence[Any]) -> float:
        """The error of the gradients, which stand behind the loss."""
        return whole_error(found[1:], 1.0, self._exact[1:], 1.0)

    def plan(self, dtype: str, max_error: float) -> Plan:
        """The first plan whose error is below the bound, as measured."""
        # Sometimes the shares add up to more than predicted.
        tried = (self._verified(dtype, max_error / part) for part in (1, 3, 10))
        fits = (plan for plan in tried if plan.measured <= max_error)
        return next(fits, None) or self._verified(dtype, 0.0)

    def _verified(self, dtype: str, bound: float) -> Plan:
        """Chooses by the shares, and measures the choice."""
        chosen, predicted = self._chosen(bound)
        halves = {path for path, group in self._group.items() if group in chosen} - self._wide
        plan = self._table(dtype, halves, predicted, 0.0)
        measured = self.error(self.run(plan, self._scale))
        return self._table(dtype, halves, predicted, measured)

    def run(self, plan: Plan, scale: jax.Array) -> list[jax.Array]:
        """The loss and the gradients with a plan, at a loss scale."""
        program = jax.jit(functools.partial(self._gradients_of, autocast(self._fun, plan)))
        return program(scale, self._arrays)

    def _gradients_of(
        self, fun: Callable[..., Any], scale: jax.Array, arrays: Sequence[Any]
    ) -> list[jax.Array]:
        """The loss and the gradients of a function, in float32."""
        args = self._static.combine(arrays)
        differentiate = scaled_value_and_grad(fun, scale, self._has_aux, self._using, args)
        (_, (loss, _)), grads = differentiate(*args)
        true = gradients.unscale(grads, scale)
        return [loss, *(g for g in jax.tree.leaves(true) if jnp.issubdtype(g.dtype, jnp.floating))]

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

        measured = replayed(self._fun, compute)

        def ranges(arrays: Sequence[Any]) -> None:
            measured(*self._static.combine(arrays))

        jax.jit(ranges)(self._arrays)
        jax.effects_barrier()

    def _switched(self) -> tuple[Callable[..., Any], list[Any]]:
        """The compiled gradients of the function with switches, and those in float32."""

        def compiled(
            switches: jax.Array, scale: jax.Array, arrays: Sequence[jax.Array]
        ) -> list[jax.Array]:
            def compute(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
                if path not in self._group or path in self._wide:
                    return as_written(eqn, values)
                is_on = switches[self._group[path]]

                def rounded(x: ArrayLike, variable: Var | Literal) -> ArrayLike:
                    if not is_float32(variable):
                        return x
                    return jnp.where(is_on, jnp.asarray(x, self._dtype).astype(SINGLE), x)

                xs = [rounded(v.x, var) for v, var in zip(values, eqn.invars, strict=True)]
                found = zip(jaxprs.bind(eqn, xs), eqn.outvars, strict=True)
                return [Retraced(rounded(x, var)) for x, var in found]

            return self._gradients_of(replayed(self._fun, compute), scale, arrays)

        program = functools.partial(jax.jit(compiled), arrays=self._arrays)
        exact = jax.device_get(program(jnp.zeros(self.groups, bool), jnp.float32(1)))
        if not all(np.isfinite(x).all() for x in exact):
            raise ValueError(
                f"Expected a function whose loss and gradients are finite in float32; got a loss "
                f"of {float(exact[0])}. Look for the cause: gainstage.diagnostics.xray(fun, *args)."
            )
        return program, exact

    def _chosen(self, bound: float) -> tuple[set[int], float]:
        """The groups that fit together below the bound, and the error that they predict."""
        gains = [0.0] * self.groups
        for path, eqn in self._equations.items():
            weight = WEIGHT if eqn.primitive.name in PRODUCTS else 1
            size = sum(jaxprs.array(v).size for v in (*eqn.invars, *eqn.outvars) if is_float32(v))
            gains[self._group[path]] += weight * size
        costs = [share**2 if np.isfinite(share) else np.inf for share in self._shares]
        chosen, total = set(), 0.0
        for group in sorted(range(self.groups), key=lambda n: costs[n] / max(gains[n], 1)):
            if total + costs[group] <= bound**2:
                total += costs[group]
                chosen.add(group)
        return chosen, total**0.5

    def _table(self, dtype: str, halves: set[Any], predicted: float, measured: float) -> Plan:
        rows = []
        for path, eqn in self._equations.items():
            largest, share = self._largest[path], self._shares[self._group[path]]
            reason = "" if path in halves else "its share"
            reason = "an earlier plan" if path in self._earlier else reason
            reason = f"it reaches {largest:.3g}" if path in self.hot else reason
            reason = "a sum" if path in self._of_sums else reason
            reason = "keep_float32, or unused" if path in self._kept else reason
            own = dtype if path in halves else "float32"
            place = line_of(eqn), scope_of(eqn)
            rows.append(
                Operation(path, eqn.primitive.name, own, *place, float(share), largest, reason)
            )
        return Plan(dtype, rows, predicted, measured, self._shapes)


def _largest_scale(gradients: Callable[[jax.Array], Any]) -> jax.Array:
    """The largest loss scale, at most `2**15`, at which a function's results are finite, or 1."""
    scales = (jnp.float32(2.0**exponent) for exponent in range(15, 0, -3))
    fits = (s for s in scales if _finite(gradients(s)))
    return next(fits, jnp.float32(1))


def _largest_in(x: ArrayLike) -> jax.Array:
    """The largest absolute number; half precision holds infinities, such as those of a mask."""
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)


def _finite(arrays: Sequence[jax.Array]) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in arrays)


def _key(eqn: JaxprEqn) -> tuple[Any, ...]:
    """What operations of equal layers have in common."""
    return eqn.primitive.name, frames_of(eqn), tuple(v.aval.str_short() for v in eqn.outvars)


def whole_error(
    gradients: Sequence[Any], scale: float, references: Sequence[Any], scale_of_references: float
) -> float:
    """The norm of the difference of all gradients, relative to that of the references."""
    difference = norm = 0.0
    for gradient, reference in zip(gradients, references, strict=True):
        if not hasattr(gradient, "dtype") or gradient.dtype.kind not in "fVc":
            continue
        wide = np.complex128 if np.iscomplexobj(gradient) else np.float64
        g, r = (np.asarray(jax.device_get(x)).astype(wide) for x in (gradient, reference))
        r = r / scale_of_references
        with np.errstate(all="ignore"):
            difference += float(np.square(np.abs(g / scale - r)).sum())
        norm += float(np.square(np.abs(r)).sum())
    return math.sqrt(difference / norm) if norm else math.nan if difference else 0.0

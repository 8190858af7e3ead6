"""Whether `train_step(..., mend=True)` mends what half precision spoils, and nothing else.

`reports` trains what users have reported; `models` the small models of `autocast_models.py`, which
have nothing to mend; `planted` has one line that spoils a model, in many ways.

Results are written after each row; a row that is there is not repeated, so the command goes on
where it was stopped.
"""

import argparse
import functools
import itertools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
import optax

import gainstage as gs
from benchmarks.harness import file_to_write

from . import DOCS, RESULTS, mending_planted
from . import mending_page as page
from .autocast_keeps_the_gradient import Results
from .autocast_models import MODELS, Model
from .mending_planted import FAULTS, HOSTS, lines_of
from .mending_reports import REPORTS, Run, prices_in_keras

OUTPUT = RESULTS / "mending.json"
LAST = 20  # steps whose losses are averaged, as what a run reports
TESTS = range(1000, 1004)  # the batches of the true loss
DTYPES = "float16", "bfloat16"
SCALES = tuple(2.0**exponent for exponent in range(15, -16, -3))
UNTIL = 40  # steps within which a fault must be mended
OTHERS = 20  # batches
FILE = Path(mending_planted.__file__).name
NOT_A_MODEL = "features with an offset (NNX)"  # which is a report here


class Trained(NamedTuple):
    """The end of a run."""

    true: float  # the float32 loss of the weights on batches of their own
    reported: float  # the mean loss of the last steps
    applied: int  # steps
    mended: list[list[Any]]  # the number of each step before which it was mended, and the rows
    errors: list[list[float]]  # of each audit: the number of the step, of loss and gradients
    told: list[str]  # warnings
    step: Any  # that of `train_step`
    program: str  # the step at its end
    seconds: float

    @property
    def facts(self) -> dict[str, Any]:
        """What the results have of it."""
        names = "true", "reported", "applied", "seconds"
        return {name: getattr(self, name) for name in names}


def new_state(run: Run, is_scaled: bool) -> gs.TrainState[Any]:
    """The state at the start of a run."""
    rule = None if is_scaled else gs.FixedLossScale(1.0)
    params = jax.tree.map(jax.numpy.copy, run.params)
    return gs.TrainState.create(params, run.optimizer, loss_scale=rule)


def trained(run: Run, loss: Callable[..., Any], is_scaled: bool, **options: Any) -> Trained:
    """Trains a loss on the batches of a run.

    Args:
        run: what is trained.
        loss: its loss, in any precision.
        is_scaled: whether it needs a loss scale.
        **options: as for `train_step`.
    """
    begin, batches = time.perf_counter(), [run.batch(seed) for seed in range(run.count)]
    state = new_state(run, is_scaled)
    step, losses, mended, errors = gs.train_step(loss, **options), [], [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(run.steps):
            before = rows_of(step.plan)
            state, found = step(state, *batches[number % len(batches)])
            losses.append(found)
            if step.audit is not None:
                errors.append([number, step.audit.loss_error, step.audit.gradient_error])
            if rows_of(step.plan) != before:
                mended.append([number, rows_of(step.plan)])
    exact, tests = jax.jit(run.loss), TESTS if run.count > 1 else range(1)
    true = np.mean([float(exact(state.params, *run.batch(seed))) for seed in tests])
    texts = [str(each.message) for each in told if issubclass(each.category, UserWarning)]
    reported = float(np.mean(jax.device_get(losses[-LAST:])))
    program = step.lower(state, *batches[0]).as_text()
    seconds = round(time.perf_counter() - begin, 1)
    return Trained(
        float(true), reported, int(state.step), mended, errors, texts, step, program, seconds
    )


def rows_of(plan: Any) -> list[list[str]]:
    """The operations, dtypes and lines of the rows of a plan."""
    rows = [] if plan is None else plan.entries
    return [[row.name, row.dtype, row.line] for row in rows]


def compared(run: Run, **options: Any) -> dict[str, Any]:
    """A run in float32, under autocast, and with mending.

    Args:
        run: what is trained.
        **options: of the audits.
    """
    half, is_scaled = gs.autocast(run.loss, run.dtype), run.dtype == "float16"
    arms = {
        "float32": trained(run, run.loss, is_scaled=False),
        "autocast": trained(run, half, is_scaled),
        "mended": trained(run, half, is_scaled, mend=True, **options),
    }
    mended = arms["mended"]
    plan = mended.step.plan
    return {
        "dtype": run.dtype,
        "steps": run.steps,
        **{name: arm.facts for name, arm in arms.items()},
        "when": [when for when, _ in mended.mended],
        "rows": rows_of(plan),
        "left": plan.left if plan.entries else 1.0,
        "told": mended.told,
        "errors": mended.errors,
        "same program": mended.program == arms["autocast"].program,
        "plan": plan.to_json() if plan.entries else None,
    }


def rounded(run: Run) -> dict[str, Any]:
    """A run in float32 from weights that are rounded once, as chance moves such a run."""
    dtype = jax.numpy.dtype(run.dtype)
    params = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), run.params)
    return trained(run._replace(params=params), run.loss, is_scaled=False).facts


def run_of(model: Model, dtype: str, steps: int) -> Run:
    """The training of a model."""

    def batch(seed: int) -> tuple[Any, ...]:
        return (model.batch(100 + seed),)

    return Run(model.loss, model.params, batch, optax.adam(1e-3), steps, dtype, 30)


# ── planted faults, and other batches ────────────────────────────────────────────────────────


def audit(loss: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> Any:
    """The audit of a batch at the largest loss scale at which its gradients are finite."""
    for scale in SCALES:
        found = gs.audit(loss, params, *batch, scale=scale)
        if not found.overflows:
            break
    return found


class Mending(NamedTuple):
    """The first mending of a run."""

    number: int  # of the step before which it was mended
    plan: Any
    told: list[str]


def first_mending(run: Run, audit_every: int = 100) -> Mending | None:
    """Trains until the run is mended; None if it never is."""
    batches = [run.batch(seed) for seed in range(run.count)]
    state = new_state(run, is_scaled=run.dtype == "float16")
    step = gs.train_step(gs.autocast(run.loss, run.dtype), audit_every=audit_every, mend=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(run.steps):
            state, _ = step(state, *batches[number % len(batches)])
            if step.plan.entries:
                return Mending(number, step.plan, [str(each.message) for each in told])
    return None


def mended_fault(fault: str, host: str, dtype: str) -> dict[str, Any]:
    """A model with a fault: whether half precision spoils it, and what is mended."""
    model, lines = HOSTS[host](FAULTS[fault]), lines_of(FAULTS[fault])
    run = run_of(model, dtype, UNTIL)
    before = audit(gs.autocast(run.loss, dtype), run.params, run.batch(0))
    found: dict[str, Any] = {"before": numbers_of(before), "off": before.is_off or before.overflows}
    if not found["off"]:
        return found
    mending = first_mending(run)
    if mending is None:
        return found | {"when": None}
    own = {f"{FILE}:{line}" for line in lines}
    rows = rows_of(mending.plan)
    after = audit(gs.autocast(run.loss, mending.plan), run.params, run.batch(0))
    return found | {
        "when": mending.number,
        "after": numbers_of(after),
        "rows": rows,
        "other": [row for row in rows if row[2] not in own],
        "left": mending.plan.left,
        "told": mending.told,
        "plan": mending.plan.to_json(),
    }


def on_other_batches(run: Run, plan: str, when: int, count: int = OTHERS) -> dict[str, Any]:
    """The errors of the gradients on other batches, by default and mended.

    Args:
        run: what is trained.
        plan: what it was mended to, as text.
        when: the number of steps before that.
        count: the number of batches.
    """
    half = gs.autocast(run.loss, run.dtype)
    step, batches = gs.train_step(half), [run.batch(seed) for seed in range(run.count)]
    state = new_state(run, is_scaled=run.dtype == "float16")
    for number in range(when):
        state, _ = step(state, *batches[number % len(batches)])
    losses, errors = (half, gs.autocast(run.loss, gs.precision.Plan.from_json(plan))), []
    for seed in range(2000, 2000 + count):
        batch = run.batch(seed)
        errors.append([numbers_of(audit(loss, state.params, batch))[1] for loss in losses])
    return {"errors": errors}


def numbers_of(audit: Any) -> list[float | None]:
    """The errors of the loss, of all gradients and of the worst tensor; None if not finite."""
    numbers = audit.loss_error, audit.gradient_error, audit.worst[1]
    return [x if np.isfinite(x) and np.isfinite(numbers[1]) else None for x in numbers]


# ── the run ──────────────────────────────────────────────────────────────────────────────────


Rows = dict[str, Callable[[], dict[str, Any]]]


def reports(is_quick: bool, found: Any) -> Rows:
    """The reports of users."""

    def row(make: Callable[[], Run]) -> dict[str, Any]:
        run = make()
        run = run._replace(steps=60) if is_quick else run
        return compared(run, audit_every=20)

    rows: Rows = {name: functools.partial(row, make) for name, make in REPORTS.items()}
    epochs = 2 if is_quick else 20
    return rows | {
        f"{page.PRICES}, seed {seed}": functools.partial(prices_in_keras, seed, epochs)
        for seed in range(3)
    }


def models(is_quick: bool, found: Any) -> Rows:
    """Models that have nothing to mend."""

    def row(name: str, dtype: str) -> dict[str, Any]:
        run = run_of(MODELS[name](), dtype, 30 if is_quick else 300)
        return compared(run, audit_every=100) | {"rounded": rounded(run)}

    names = [name for name in MODELS if name != NOT_A_MODEL][:: 4 if is_quick else 1]
    return {f"{n}, {d}": functools.partial(row, n, d) for n in names for d in DTYPES}


def planted(is_quick: bool, found: Any) -> Rows:
    """Each fault in one of the models, in both dtypes."""
    each = zip(FAULTS, itertools.cycle(HOSTS), strict=False)
    rows = [(fault, host, dtype) for fault, host in each for dtype in DTYPES]
    chosen = rows[:: 15 if is_quick else 1]
    return {", ".join(row): functools.partial(mended_fault, *row) for row in chosen}


def batches(is_quick: bool, found: Any) -> Rows:
    """What was mended in the other parts, on batches that the mending has not seen."""

    def mended(make: Callable[[], Run], options: dict[str, Any]) -> dict[str, Any]:
        run = make()
        mending = first_mending(run, **options)
        return on_other_batches(run, mending.plan.to_json(), mending.number)

    def fault(name: str, host: str, dtype: str) -> Run:
        return run_of(HOSTS[host](FAULTS[name]), dtype, UNTIL)

    rows: Rows = {}
    for name, row in found["reports"].items():
        if row["plan"] and name in REPORTS:
            options = {"audit_every": 20}
            rows[f"{name}, {row['dtype']}"] = functools.partial(mended, REPORTS[name], options)
    for name, row in found["planted"].items():
        if row.get("plan"):
            make = functools.partial(fault, *name.split(", "))
            rows[name] = functools.partial(mended, make, {})
    return dict(itertools.islice(rows.items(), 0, None, 15 if is_quick else 1))


PARTS: dict[str, Callable[[bool, Any], Rows]] = {
    "reports": reports, "models": models, "planted": planted, "batches": batches,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is missing in the results, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps")
    parser.add_argument("--output", type=file_to_write, default=OUTPUT)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args(argv)
    results = Results(options.output)
    asked = PARTS if "all" in options.parts else options.parts
    for part in [] if options.report else asked:
        for name, measure in PARTS[part](options.quick, results.found).items():
            results.add(part, name, measure)
            jax.clear_caches()
    if not options.quick and all(part in results.found for part in PARTS):
        page.write(results.found, options.docs)


if __name__ == "__main__":
    main()

"""Where float16 needs loss scaling: the same runs in float32, bfloat16, and float16 in three ways.

A language model and a denoiser are trained as one rank of many, from a global batch of 2,000 tokens
or 6,000 elements to one of 524,000 or 786,000: the loss of a rank is its own sum over the global
count. The other tasks are trained once. All arms see the same weights and batches, and are scored
in float32. XLA keeps every rounding to half precision (`xla_allow_excess_precision=False`).

At the end of each run under the adaptive rule, the gradients of 16 microbatches are compared with
those of float32 at the same weights. Results are written after each run; a run that is there is not
repeated, so the command goes on where it was stopped.

The arm `chance` is float32 from weights that were rounded to float16 once, at the start: what
differs there is chance.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import gainstage as gs
from benchmarks.harness import environment, file_to_write
from gainstage import xray

from . import DOCS, RESULTS
from . import needs_scaling_page as page
from .tasks import TASKS, Task

KEEP_ROUNDINGS = {"xla_allow_excess_precision": False}  # XLA may leave out casts to half and back
SUMMED = 16  # microbatches whose gradients are compared


class Arm(NamedTuple):
    """What a network computes in, and the rule of its loss scale."""

    dtype: str
    rule: gs.LossScale
    start: str = "float32"  # the dtype that the first weights are rounded to


ARMS = {
    "float32": Arm("float32", gs.FixedLossScale(1.0)),
    "chance": Arm("float32", gs.FixedLossScale(1.0), start="float16"),
    "bfloat16": Arm("bfloat16", gs.FixedLossScale(1.0)),
    "unscaled": Arm("float16", gs.FixedLossScale(1.0)),
    "dynamic": Arm("float16", gs.DynamicLossScale()),
    "adaptive": Arm("float16", gs.AdaptiveLossScale()),
}


class Trial(NamedTuple):
    """One run."""

    task: str
    seed: int
    ranks: int
    arm: str


class Trainer:
    """A task in one arm; compiled once for all seeds and numbers of ranks."""

    def __init__(self, task: Task, arm: Arm):
        self.task, self.dtype, self.start = task, arm.dtype, arm.start
        self.tx = gs.with_loss_scale(task.optimizer(task.steps), arm.rule, telemetry=True)
        self.step = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=KEEP_ROUNDINGS)

    def _step(self, params: Any, state: Any, batches: Any, share: Any) -> Any:
        """A step on the sum of the microbatches' gradients, each loss times `share`."""

        def loss(params: Any, batch: Any) -> jax.Array:
            return self.task.loss(params, batch, self.dtype) * share

        def add(total: Any, batch: Any) -> Any:
            found = gs.value_and_grad(loss, state)(params, batch)
            return jax.tree.map(jnp.add, total, found), None

        nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        (value, grads), _ = jax.lax.scan(add, nothing, batches)
        updates, state = self.tx.update(grads, state, params, value=value)
        return (
            gs.transforms.apply_updates(params, updates, state),
            state,
            gs.diagnostics.telemetry(state),
        )

    def run(self, seed: int, ranks: int) -> tuple[Any, dict[str, Any]]:
        """Trains; returns the parameters, and what the run was like."""
        task, rng, seen = self.task, np.random.default_rng(1000 + seed), []
        params = jax.tree.map(
            lambda p: jnp.copy(p.astype(self.start)).astype(p.dtype), task.init(seed)
        )
        state, share = self.tx.init(params), np.float32(1 / (ranks * task.microbatches))
        for _ in range(task.steps):
            batches = stacked([task.batch(rng) for _ in range(task.microbatches)])
            params, state, info = self.step(params, state, batches, share)
            seen.append((info.finite, info.loss_scale))
        finite, scales = np.array(jax.device_get(seen)).T
        found = {"score": float(task.score(params)), "skipped": int((finite == 0).sum())}
        return params, found | {"scale": float(scales[-1])}


def stacked(batches: list[Any]) -> Any:
    """Batches as one, with a new first axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


class Gradients:
    """Those of a task, compared with float32."""

    def __init__(self, task: Task):
        self.task = task
        self.elements = jax.jit(
            self._elements, static_argnames="dtype", compiler_options=KEEP_ROUNDINGS
        )

    def _elements(self, params: Any, batch: Any, share: Any, scale: Any, dtype: str) -> jax.Array:
        """All elements of the true gradient, from a backward pass at this scale."""
        grads = jax.grad(lambda p: self.task.loss(p, batch, dtype) * share * scale)(params)
        return jnp.concatenate([jnp.ravel(g) / scale for g in jax.tree.leaves(grads)])

    def errors(self, params: Any, ranks: int, scale: float) -> dict[str, dict[str, float]]:
        """How far each way to compute is from float32, for one microbatch and for their sum."""
        rng, share = np.random.default_rng(5), np.float32(1 / (ranks * self.task.microbatches))
        batches = [self.task.batch(rng) for _ in range(SUMMED)]

        def each(dtype: str, scale: float) -> np.ndarray:
            s = np.float32(scale)
            return np.stack([self.elements(params, b, share, s, dtype=dtype) for b in batches])

        exact = each("float32", 1.0)
        scaled = each("float16", scale)
        while not np.isfinite(scaled).all():  # in a batch that the rule has not seen
            scale /= 2
            scaled = each("float16", scale)
        ways = {"unscaled": each("float16", 1.0), "scaled": scaled, "bfloat16": each("bfloat16", 1)}
        found = {name: differences(found, exact) for name, found in ways.items()}
        return found | {"estimate": {"one": estimate(exact, params)}}


def estimate(exact: np.ndarray, params: Any) -> float:
    """The error of float16 as `gainstage.diagnostics.report` estimates it, from the gradients of
    the weights.

    It is that of the worst tensor: the rounding error of subnormal numbers over the root mean
    square.
    """
    ends = np.cumsum([leaf.size for leaf in jax.tree.leaves(params)])[:-1]
    sizes = [np.sqrt(np.square(tensor).mean()) for tensor in np.split(exact, ends, axis=1)]
    return float(2.0**-24 / 12**0.5 / min(size for size in sizes if size > 0))


def differences(found: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Of the gradients of several microbatches: relative errors, cosine, and lost elements."""
    total, true = found.sum(0, dtype=np.float64), exact.sum(0, dtype=np.float64)
    one = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    length, true_length = np.linalg.norm(total), np.linalg.norm(true)
    return {
        "one": float(one.mean()),
        "sum": float(np.linalg.norm(total - true) / true_length),
        "cosine": float(total @ true / (length * true_length)) if length else 0.0,
        "flushed": float(((found == 0) & (exact != 0)).sum() / (exact != 0).sum()),
    }


def lowest_scale(task: Task, params: Any, ranks: int) -> float:
    """The lowest scale that fits, by an X-ray: no operation loses more than 1 % below it."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return task.loss(params, batch, "float16") / ranks

    batch = task.batch(np.random.default_rng(5))
    found = xray(loss, params, batch, scale=1.0, prescribe=False, compiled=False, progress=False)
    return float(2.0 ** found.window().low)


class Bench:
    """Tasks, and what was compiled for them."""

    def __init__(self, tasks: dict[str, Callable[[], Task]]):
        self.tasks = {name: make() for name, make in tasks.items()}
        self.trainers: dict[tuple[str, str], Trainer] = {}
        self.gradients = {name: Gradients(task) for name, task in self.tasks.items()}

    def trials(self, arms: Sequence[str], seeds: int) -> list[Trial]:
        """All runs, a seed of a task after the other."""
        return [
            Trial(name, seed, ranks, arm)
            for name, task in self.tasks.items()
            for seed in range(seeds)
            for ranks in task.ranks
            for arm in arms
        ]

    def run(self, trial: Trial) -> dict[str, Any]:
        """Trains once; what it was like, and how long it took."""
        start, task = time.perf_counter(), self.tasks[trial.task]
        key = trial.task, trial.arm
        if key not in self.trainers:
            self.trainers[key] = Trainer(task, ARMS[trial.arm])
        params, found = self.trainers[key].run(trial.seed, trial.ranks)
        if trial.arm == "adaptive":
            gradients = self.gradients[trial.task]
            found["errors"] = gradients.errors(params, trial.ranks, found["scale"])
            if len(task.ranks) > 1 and trial.seed == 0:
                found["lowest_scale"] = lowest_scale(task, params, trial.ranks)
        found["batch"] = task.elements * trial.ranks * task.microbatches
        return found | {"seconds": round(time.perf_counter() - start, 1)}


# ── results ──────────────────────────────────────────────────────────────────────────────────


class Results:
    """The file that has every finished run."""

    def __init__(self, path: Path):
        self.path = path
        self.runs: dict[Trial, dict[str, Any]] = {}
        if path.exists():
            rows = json.loads(path.read_text())["runs"]
            self.runs = {Trial(*(row[key] for key in Trial._fields)): row for row in rows}

    def add(self, trial: Trial, found: dict[str, Any]) -> None:
        """Writes the file with one more run; a file that is there is whole at any moment."""
        self.runs[trial] = trial._asdict() | found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"environment": made_with(), "runs": list(self.runs.values())}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n")
        os.replace(part, self.path)

    def seconds(self, trials: Sequence[Trial]) -> float:
        """How long these will take, by what such runs have taken; NaN if there was none."""
        return sum(self._expected(trial) for trial in trials)

    def _expected(self, trial: Trial) -> float:
        for keys in (("task", "arm"), ("task",), ()):
            alike = [
                run["seconds"]
                for done, run in self.runs.items()
                if all(getattr(done, key) == getattr(trial, key) for key in keys)
            ]
            if alike:
                return float(np.median(alike))
        return np.nan


def made_with() -> dict[str, Any]:
    """Versions, among them that of Python: its library is the text of the language model."""
    return environment() | {"python": platform.python_version()}


def main(argv: Sequence[str] | None = None, tasks: dict[str, Callable[[], Task]] = TASKS) -> None:
    """Trains what is missing in the results, then writes the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=tasks, metavar="TASK",
                        help=f"some of: {', '.join(tasks)}")  # fmt: skip
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM",
                        help=f"some of: {', '.join(ARMS)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1")
    parser.add_argument("--output", type=file_to_write, default=RESULTS / "scaling" / "cpu.json")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page and picture")
    parser.add_argument("--report", action="store_true", help="train nothing, write the page")
    options = parser.parse_args(argv)
    results, console = Results(options.output), Console()
    if not options.report:
        bench = Bench({name: tasks[name] for name in options.tasks})
        train(bench, bench.trials(options.arms, options.seeds), results, console)
    made = {name: make() for name, make in tasks.items()}
    page.write(list(results.runs.values()), made, options.docs)


def train(bench: Bench, trials: Sequence[Trial], results: Results, console: Console) -> None:
    """Runs the trials that are not in the results, and says how long it will take."""
    missing = [trial for trial in trials if trial not in results.runs]
    console.print(f"{len(trials) - len(missing)} of {len(trials)} runs are done.")
    for n, trial in enumerate(missing, 1):
        found = bench.run(trial)
        results.add(trial, found)
        minutes = results.seconds(missing[n:]) / 60
        name = f"{trial.task}, batch {found['batch']:,}, {trial.arm}, seed {trial.seed}"
        console.print(
            f"{n}/{len(missing)} {name}: {found['score']:.5g}, {found['seconds']:.0f} s; "
            f"about {minutes:.0f} minutes left",
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()

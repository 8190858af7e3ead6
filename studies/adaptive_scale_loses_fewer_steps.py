"""Steps that a rule loses: skipped, or with more than 1 % of the gradient's elements flushed to 0.

Two tasks in float16: digits drawn again, and a small transformer on English text, that of
Python's own help pages. Each is trained by both rules from a start that is 2**10 too high, through
a storm of 45 batches of NaN (which count for neither), in 400 steps from the defaults, and in a
long healthy run. Losses in the end are held against float32 without bad batches.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gainstage as gs
from benchmarks import models
from benchmarks.harness import between_marks, file_to_write
from gainstage.optimizers import Adam

from . import DOCS, RESULTS, digits

STORM = range(100, 145)
COLUMNS = ("run", "rule", "lost", "skipped", "flushed", "share", "loss", "float32")
RULES = {
    "dynamic": partial(gs.DynamicLossScale, min_scale=2.0**-24),
    "adaptive": gs.AdaptiveLossScale,
}
Batches = Callable[[int, int], Iterator[Any]]


class Task(NamedTuple):
    """A network to train: `loss(weights, batch, dtype)`, and its batches by seed."""

    weights: Callable[[int], list[np.ndarray]]
    loss: Callable[[list[jax.Array], Any, str], jax.Array]
    batches: Batches
    rate: float


def digits_task() -> Task:
    """Digits are told apart and drawn again."""
    train, _ = digits.load_digits()

    def batches(seed: int, steps: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = rng.choice(len(train.labels), digits.BATCH, replace=False)
            yield digits.Digits(train.images[chosen], train.labels[chosen])

    return Task(digits.initial_weights, digits.loss, batches, 2e-3)


def text_task() -> Task:
    """The next byte of English text, by two decoder blocks of width 64."""
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8).astype(np.int32)
    losses = {
        d: models.transformer(jnp.dtype(d), width=64, blocks=2) for d in ("float16", "float32")
    }
    flat, structure = jax.tree.flatten(losses["float32"].params)

    def weights(seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [np.asarray(w) * np.float32(rng.choice([-1, 1], size=w.shape)) if w.ndim > 1 and
                w.shape[0] > 2 else np.asarray(w) for w in flat]  # fmt: skip

    def loss(weights: list[jax.Array], batch: Any, dtype: str) -> jax.Array:
        tokens, factor = batch
        return losses[dtype].loss(structure.unflatten(weights), tokens) * factor

    def batches(seed: int, steps: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            starts = rng.integers(len(text) - 65, size=16)
            yield np.stack([text[start : start + 65] for start in starts]), np.float32(1)

    return Task(weights, loss, batches, 1e-3)


# How each is made, how often it is run, and for how many steps in a long run.
TASKS = {"digits": (digits_task, 3, 2000), "text": (text_task, 2, 1000)}


def spoiled(batch: Any) -> Any:
    """The batch with NaN in the place of its floating numbers."""
    return jax.tree.map(lambda x: x * np.float32(np.nan) if x.dtype == np.float32 else x, batch)


class Trainer:
    """A task under a rule; compiled once. Without a rule in float32, unscaled."""

    def __init__(self, task: Task, rule: gs.LossScale | None):
        self.task, self.dtype = task, "float16" if rule else "float32"
        self.weights = [
            gs.optimizers.Variable(w, name=f"w{i}") for i, w in enumerate(task.weights(0))
        ]
        self.optimizer = gs.optimizers.LossScaleOptimizer(
            Adam(task.rate), loss_scale=rule or gs.FixedLossScale(1.0), telemetry=True
        )
        self.optimizer.build(self.weights)
        self.fresh = [variable.numpy() for variable in self.optimizer.variables]
        self.step = gs.optimizers.jit(
            self._step, (self.weights, self.optimizer.variables), donate=True
        )

    def _step(self, batch: Any) -> Any:
        values = [w.value() for w in self.weights]

        def gradient(dtype: str, scale: Any) -> tuple[jax.Array, list[jax.Array]]:
            def scaled(weights: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
                loss = self.task.loss(weights, batch, dtype).astype(jnp.float32)
                return loss * scale, loss

            (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(values)
            return loss, grads

        loss, grads = gradient(self.dtype, self.optimizer.loss_scale)
        flushed = jnp.float32(0)
        if self.dtype == "float16":
            pairs = list(zip(gradient("float32", 1.0)[1], grads, strict=True))
            lost = sum(jnp.sum((exact != 0) & (held == 0)) for exact, held in pairs)
            flushed = lost / jnp.maximum(sum(jnp.sum(exact != 0) for exact, _ in pairs), 1)
        self.optimizer.apply(grads, self.weights, loss=loss)
        return loss, gs.diagnostics.telemetry(self.optimizer), flushed

    def run(
        self, seed: int, steps: int, bad: Sequence[int] = (), scale: float | None = None
    ) -> Any:
        """What was lost, and the loss over the last twentieth of the run."""
        for variable, value in zip(self.weights, self.task.weights(seed), strict=True):
            variable.assign(value)
        self.optimizer.set_weights(self.fresh)
        if scale is not None:
            self.optimizer.dynamic_scale.assign(scale)
        seen = []
        for n, batch in enumerate(self.task.batches(seed, steps)):
            seen.append(self.step(spoiled(batch) if n in bad else batch))
        loss, info, flushed = jax.tree.map(lambda *xs: np.array(xs), *jax.device_get(seen))
        good = np.array([n not in bad for n in range(steps)])
        skipped = ~info.finite & good
        low = (flushed > 0.01) & good & ~skipped
        end = loss[good & info.finite][-steps // 20 :]
        return {
            "skipped": int(skipped.sum()),
            "flushed": int(low.sum()),
            "lost": int((skipped | low).sum()),
            "share_flushed": float(flushed[good & ~skipped].mean()) if end.size else math.nan,
            "loss": float(end.mean()) if end.size else math.nan,
        }


def highest(trainer: Trainer, seed: int) -> float:
    """The largest power of two at which the first step is finite."""
    for bits in range(40, -40, -1):
        if not trainer.run(seed, 1, scale=2.0**bits)["skipped"]:
            return 2.0**bits
    raise RuntimeError("no scale is finite")


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table, and writes `results/rules/float16.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=file_to_write, default=RESULTS / "rules" / "float16.json")
    parser.add_argument("--page", type=Path, default=DOCS / "adaptive-scale.md")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for name, (make_task, seeds, long) in TASKS.items():
        task = make_task()
        exact = Trainer(task, None)
        for rule, make in RULES.items():
            trainer = Trainer(task, make())
            for seed in track(range(seeds), f"{name}, {rule}"):
                top = highest(trainer, seed)
                cases = {
                    "2**10 too high": (400, {"scale": top * 2.0**10}),
                    "storm of 45": (400, {"bad": STORM}),
                    "400 steps": (400, {}),
                    "healthy": (long, {}),
                }
                for case, (steps, how) in cases.items():
                    found = trainer.run(seed, steps, **how)
                    if rule == "dynamic":
                        found["float32"] = exact.run(seed, steps)["loss"]
                    results.setdefault(name, {}).setdefault(case, {}).setdefault(rule, []).append(
                        found
                    )
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(table(results))
    if options.page.exists():
        options.page.write_text(between_marks(options.page.read_text(), markdown(results)))


def rows(results: dict[str, Any]) -> list[list[str]]:
    """What the tables show: sums over the seeds, and means of losses."""
    found = []
    for name, cases in results.items():
        for case, rules in cases.items():
            exact = np.mean([run["float32"] for run in rules["dynamic"]])
            for rule, runs in rules.items():
                lost = [str(sum(r[key] for r in runs)) for key in ("lost", "skipped", "flushed")]
                share, loss = (np.mean([r[key] for r in runs]) for key in ("share_flushed", "loss"))
                numbers = [f"{share:.3%}", f"{loss:.4f}", f"{exact:.4f}"]
                found.append([f"{name}, {case}", rule, *lost, *numbers])
    return found


def markdown(results: dict[str, Any]) -> str:
    """The table of the page."""
    marks = ["---", "---", *["---:"] * 6]
    lines = [f"| {' | '.join(line)} |" for line in (COLUMNS, marks, *rows(results))]
    seeds = {name: len(cases["healthy"]["dynamic"]) for name, cases in results.items()}
    said = ", ".join(f"{count} of {name}" for name, count in seeds.items())
    powers_as_code = re.sub(r"2\*\*\d+", r"`\g<0>`", "\n".join(lines))
    return powers_as_code + f"\n\nSums over the seeds ({said}); shares and losses are means."


def table(results: dict[str, Any]) -> Table:
    """The same, for a terminal of 80 columns."""
    shown = Table(padding=(0, 0))
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in rows(results):
        shown.add_row(*row)
    return shown


if __name__ == "__main__":
    main()

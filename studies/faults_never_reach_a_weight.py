"""A gradient that is not finite never reaches a weight or a slot, and training recovers from it.

A small network learns digits, again and again, and each time something else goes wrong. What does,
where and when is data for the one compiled step of a configuration. After every step the program
itself compares all weights and all state with those before, bit for bit; around the first bad step
of a run the host does so too. In the end the accuracy is held against that of a run without faults.
"""

import argparse
import faulthandler
import functools
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from benchmarks.harness import between_marks, environment, file_to_write
from gainstage import distributed
from gainstage.optimizers import Variable, schedules

from . import DOCS, RESULTS
from .digits import load_digits

if TYPE_CHECKING:
    from rich.console import Console

STEPS, START, BATCH = 120, 20, 64  # good steps in all, those before a fault, images in a step
PATIENCE = 4000  # steps after which a run that does not come to its good ones is given up
POINTS = 1.0  # of accuracy that a run which has recovered may lack, in per cent
RATES = {"SGD": 0.2, "Adam": 0.01}
COMPUTES_IN = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float16"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 4},
    "EMA": {"use_ema": True, "ema_momentum": 0.9},
    "clipping": {"global_clipnorm": 0.5},
    "ZeRO": {"shard_state_over": "data"},
}
RULES: dict[str, gs.LossScale] = {
    "DynamicLossScale(min_scale=2**-24)": gs.DynamicLossScale(min_scale=2.0**-24),
    "DynamicLossScale()": gs.DynamicLossScale(),
    "AdaptiveLossScale()": gs.AdaptiveLossScale(),
}
DEFAULT = "DynamicLossScale()"
VALUES = {"inf": np.inf, "-inf": -np.inf, "NaN": np.nan}
STORMS, EVERY = (1, 10, 45, 200, 2000), (2, 3, 10, 100)
ROOT = Path(__file__).parents[1]

ALL, NONE = (0, 2**30), (0, 0)


class Fault(NamedTuple):
    """What goes wrong; ranges exclude their end."""

    row: str  # of the table
    value: float = np.nan  # what takes the place of a scaled gradient
    leaves: tuple[int, int] = NONE
    elements: tuple[int, int] = ALL
    devices: tuple[int, int] = ALL
    images: tuple[int, int] = NONE  # of the batch: those that are NaN
    steps: range = range(START, START + 1)

    @property
    def where(self) -> np.ndarray:
        """The ranges, as the compiled step takes them."""
        return np.array([self.leaves, self.elements, self.devices, self.images], np.int32)


NOTHING = Fault("nothing", steps=range(-1, -1))


class Configuration(NamedTuple):
    """How it is trained."""

    optimizer: str
    dtype: str  # of the variables
    option: str
    rule: str


class Outcome(NamedTuple):
    """What became of a run."""

    configuration: Configuration
    row: str
    safe: bool  # nothing but the scale has changed on a bad step, and all is finite
    recovered: bool
    gap: float  # points of accuracy below the run without faults, after as many good steps
    raw_gap: float  # the same after as many steps, the bad ones counted
    scale: float  # in the end

    @property
    def survived(self) -> bool:
        """All that is asked of it."""
        return self.safe and self.recovered


# ── training ─────────────────────────────────────────────────────────────────────────────────


class FaultyOptimizer(gs.optimizers.LossScaleOptimizer):
    """One whose scaled gradients are spoiled between the backward pass and the step."""

    _spoil: Callable[[list[jax.Array]], list[jax.Array]]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Takes a step on what is left of the gradients."""
        super().apply(self._spoil(list(grads)), trainable_variables)


def inside(place: Any, bounds: jax.Array) -> Any:
    """Whether a place is within bounds."""
    return (place >= bounds[0]) & (place < bounds[1])


def spoiled(grads: list[jax.Array], value: Any, where: Any, device: Any = 0) -> list[jax.Array]:
    """Gradients with `value` where the fault says."""

    def one(leaf: int, gradient: jax.Array) -> jax.Array:
        places = jnp.arange(gradient.size).reshape(gradient.shape)
        hit = inside(leaf, where[0]) & inside(places, where[1]) & inside(device, where[2])
        return jnp.where(hit, value.astype(gradient.dtype), gradient)

    return [one(leaf, gradient) for leaf, gradient in enumerate(grads)]


def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether two arrays are equal, also in the sign of a zero and the kind of a NaN."""
    bits = f"uint{8 * a.dtype.itemsize}"
    a, b = (lax.bitcast_convert_type(x, bits) for x in (a, b))
    return (a == b).all()


def finite(x: jax.Array) -> jax.Array:
    """Whether no element is inf or NaN."""
    return jnp.isfinite(x.astype(jnp.float32)).all()


def stored(variables: Sequence[Variable]) -> list[bytes]:
    """What the memory of every device of this process holds."""
    shards = [shard for v in variables for shard in v.value().addressable_shards]
    return [np.asarray(shard.data).tobytes() for shard in shards]


@functools.cache
def data() -> tuple[np.ndarray, ...]:
    """Images and labels to train with and to test with, and the order of the first."""
    train, test = load_digits()
    rng, count = np.random.default_rng(0), len(train.labels) // BATCH * BATCH
    order = np.concatenate([rng.permutation(len(train.labels))[:count] for _ in range(40)])
    return *map(np.asarray, (*train, *test)), order.reshape(-1, BATCH)


def logits(weights: Sequence[jax.Array], images: jax.Array, dtype: str) -> jax.Array:
    """The network in a dtype; what comes out is float32."""
    w1, b1, w2, b2 = (w.astype(dtype) for w in weights)
    return (jnp.tanh(images.astype(dtype) @ w1 + b1) @ w2 + b2).astype(jnp.float32)


class Training:
    """The network and its optimizer, on one device or on all of a mesh."""

    def __init__(self, configuration: Configuration):
        self.configuration, self.data = configuration, data()
        optimizer, dtype, option, rule = configuration
        self.mesh: Any = None
        if option == "ZeRO":
            self.mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
        rng = np.random.default_rng(0)
        first, last = rng.normal(size=(64, 32)) / 8, rng.normal(size=(32, 10)) / 6
        values = {"w1": first, "b1": np.zeros(32), "w2": last, "b2": np.zeros(10)}
        self.weights = [
            Variable(self._put(np.asarray(x, jnp.dtype(dtype))), name=name)
            for name, x in values.items()
        ]
        options = {**OPTIONS[option], "master_weights": dtype != "float32"}
        rate = schedules.CosineDecay(RATES[optimizer], STEPS)
        momentum = {"momentum": 0.9} if optimizer == "SGD" else {}
        inner = getattr(gs.optimizers, optimizer)(rate, **momentum, **options)
        self.optimizer = FaultyOptimizer(inner, loss_scale=RULES[rule])
        self.optimizer.build(self.weights)
        self.inner = inner.variables  # the number of good steps, then all slots
        # Steps that let something not finite in, changed what they skipped, took what was spoiled,
        # skipped what was not, or left no scale.
        self.counts = Variable(self._put(np.zeros(5, np.int32)), name="counts")
        self.state = [*self.weights, *self.optimizer.variables, self.counts]
        self.compiled = gs.optimizers.jit(self._step, self.state, donate=True)
        self.accuracy_of = jax.jit(self._accuracy_of)
        self.fresh = self.values()

    def _put(self, x: np.ndarray) -> Any:
        if self.mesh is None:
            return x
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.make_array_from_callback(x.shape, everywhere, x.__getitem__)

    def values(self) -> list[jax.Array]:
        """All state, to go back to."""
        return [variable.value() for variable in self.state]

    def restore(self, values: Sequence[jax.Array]) -> None:
        """Goes back."""
        for variable, value in zip(self.state, values, strict=True):
            variable.assign(value)

    def step(self, number: int, fault: Fault) -> None:
        """The step of that number, with what goes wrong in it."""
        self.compiled(np.int32(number), np.float32(fault.value), fault.where)
        if self.mesh is not None:
            # Devices of a CPU share its threads: of steps that wait for each other too many would
            # leave none to run.
            jax.block_until_ready(self.counts.value())

    def _step(self, number: jax.Array, value: jax.Array, where: jax.Array) -> None:
        images, labels, _, _, order = map(jnp.asarray, self.data)
        chosen = order[number % len(order)]
        x, y = images[chosen], labels[chosen]
        x = jnp.where(inside(jnp.arange(BATCH), where[3])[:, None], jnp.nan, x)
        if self.mesh is not None:
            parts = NamedSharding(self.mesh, PartitionSpec("data"))
            x, y = (lax.with_sharding_constraint(a, parts) for a in (x, y))

        def loss() -> jax.Array:
            dtype = COMPUTES_IN[self.configuration.dtype]
            out = jax.nn.log_softmax(logits([w.value() for w in self.weights], x, dtype))
            return -jnp.take_along_axis(out, y[:, None], axis=1).mean()

        watched = [*self.weights, *self.inner]
        before = [variable.value() for variable in watched]
        self.optimizer._spoil = functools.partial(self._spoiled, value=value, where=where)
        self.optimizer.minimize(loss, self.weights)
        after = [variable.value() for variable in watched]

        kept = jnp.stack([same_bits(a, b) for a, b in zip(before, after, strict=True)]).all()
        is_finite = jnp.stack([finite(x) for x in after]).all()
        applied = after[len(self.weights)] != before[len(self.weights)]
        hit = (where[0, 1] > where[0, 0]) | (where[3, 1] > where[3, 0])
        scale = self.optimizer.loss_scale
        found = [~is_finite, ~applied & ~kept, hit & applied, ~hit & ~applied]
        found.append(~(jnp.isfinite(scale) & (scale > 0)))
        self.counts.assign_add(jnp.stack(found).astype(jnp.int32))

    def _spoiled(self, grads: list[jax.Array], value: Any, where: Any) -> list[jax.Array]:
        if self.mesh is None:
            return spoiled(grads, value, where)

        def part(grads: list[jax.Array], value: Any, where: Any) -> list[jax.Array]:
            return spoiled(grads, value, where, lax.axis_index("data"))

        whole = PartitionSpec()
        everywhere: Any = jax.shard_map(
            part, mesh=self.mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
        return everywhere(grads, value, where)

    def _accuracy_of(self, weights: list[jax.Array]) -> jax.Array:
        _, _, images, labels, _ = map(jnp.asarray, self.data)
        return 100 * (logits(weights, images, "float32").argmax(axis=1) == labels).mean()

    def accuracy(self) -> float:
        """Of the averages, where there are any, in per cent of the images to test with."""
        held = self.values()
        self.optimizer.finalize_variable_values(self.weights)
        result = float(self.accuracy_of([weight.value() for weight in self.weights]))
        self.restore(held)
        return result

    @property
    def good_steps(self) -> int:
        """How many have been taken."""
        return int(self.inner[0])

    def run(self, fault: Fault, start: int = 0) -> tuple[bool, float, float]:
        """Trains until there were `STEPS` good ones.

        Returns:
            Whether the host saw the first bad step change nothing, the accuracy after so many
            steps, and that after so many good ones.
        """
        kept, raw, number = True, np.nan, start
        while (missing := STEPS - self.good_steps) > 0 and number < PATIENCE:
            for n in range(number, number + missing):
                if n != fault.steps.start:
                    self.step(n, fault if n in fault.steps else NOTHING)
                    continue
                watched = [*self.weights, *self.inner]
                before = stored(watched)
                self.step(n, fault)
                kept = stored(watched) == before
            number += missing
            raw = self.accuracy() if number == STEPS else raw
        return kept, raw, raw if number == STEPS else self.accuracy()

    def outcomes(self, faults: Sequence[Fault]) -> tuple[float, list[Outcome]]:
        """Trains without a fault, then with each; returns the first one's accuracy, and all."""
        self.restore(self.fresh)
        for n in range(START):
            self.step(n, NOTHING)
        begun = self.values()
        _, _, clean = self.run(NOTHING, START)
        outcomes = []
        for fault in faults:
            early = fault.steps.start < START
            self.restore(self.fresh if early else begun)
            kept, raw, accuracy = self.run(fault, 0 if early else START)
            counts = [np.asarray(s.data) for s in self.counts.value().addressable_shards]
            let_in, changed, taken, _, no_scale = np.max(counts, axis=0)
            safe = kept and not (let_in or changed or taken or no_scale)
            if self.mesh is not None:
                safe &= bool(distributed.check_replicas(self.state))
            recovered = self.good_steps >= STEPS and clean - accuracy <= POINTS
            gaps, scale = (clean - accuracy, clean - raw), float(self.optimizer.loss_scale)
            outcomes.append(Outcome(self.configuration, fault.row, safe, recovered, *gaps, scale))
        return clean, outcomes


# ── faults ───────────────────────────────────────────────────────────────────────────────────


def single_faults(training: Training) -> Iterator[Fault]:
    """One bad step: in every leaf an element, or all of it; a microbatch; each of the devices."""
    leaves = range(len(training.weights))
    for turn, (name, value) in enumerate(VALUES.items()):
        for leaf in leaves:
            size = training.weights[leaf].size
            place = (0, size // 2, size - 1)[(leaf + turn) % 3]
            row = f"{name} in one element"
            yield Fault(row, value, (leaf, leaf + 1), (place, place + 1))
    for value in VALUES.values():
        for leaf in leaves:
            yield Fault("one leaf", value, (leaf, leaf + 1))
    quarter = BATCH // 4
    for part in range(4):
        if training.configuration.option == "accumulation":  # where it is a step of its own
            step = START + part
            yield Fault("one microbatch", images=(0, BATCH), steps=range(step, step + 1))
        else:
            yield Fault("one microbatch", images=(quarter * part, quarter * (part + 1)))
    if training.mesh is not None:
        for device in range(len(training.mesh.devices)):
            yield list(faults_of("one device", training, device, 1))[device % 3]


def faults_of(row: str, training: Training, first: int, count: int) -> Iterator[Fault]:
    """A part of a divided gradient, a copy of one that is not, and images, on some devices only."""
    devices, images = (first, first + count), BATCH // len(training.mesh.devices)
    slot = next(v for v in training.inner if v.shape == training.weights[0].shape)
    device = training.mesh.devices.flat[first]
    corner = [part.start or 0 for part in slot.sharding.devices_indices_map(slot.shape)[device]]
    place = int(np.ravel_multi_index(corner, slot.shape))
    yield Fault(row, np.inf, (0, 1), (place, place + 1), devices)
    yield Fault(row, np.nan, (1, 2), devices=devices)
    yield Fault(row, images=(images * first, images * (first + count)))


def storm(kind: str, length: int) -> str:
    """The row of a storm."""
    return f"{kind} for {length} step{'s' * (length > 1)}"


def repeated_faults() -> Iterator[Fault]:
    """Storms of gradients that overflow, and of bad data; bad data now and then."""
    for length in STORMS:
        steps = range(START, START + length)
        yield Fault(storm("inf", length), np.inf, (0, 1), steps=steps)
        yield Fault(storm("NaN data", length), images=(0, 1), steps=steps)
    for k in EVERY:
        yield Fault(f"NaN data every {k} steps", images=(0, 1), steps=range(k - 1, PATIENCE, k))


def configurations(quick: bool = False) -> list[Configuration]:
    """All that are tried; on a mesh, where steps are slow, without the second rule."""
    optimizers, dtypes = (["Adam"], ["float16"]) if quick else (RATES, COMPUTES_IN)
    four = itertools.product(optimizers, dtypes, OPTIONS, RULES)
    every = [Configuration(*names) for names in four]
    return [c for c in every if c.option != "ZeRO" or c.rule != DEFAULT]


def use_eight_devices() -> None:
    """Before anything is computed in a process."""
    jax.config.update("jax_num_cpu_devices", 8)


def examine(configuration: Configuration) -> tuple[float, list[Outcome]]:
    """All faults in one configuration."""
    training = Training(configuration)
    single = [] if configuration.rule == DEFAULT else single_faults(training)
    found = training.outcomes([*single, *repeated_faults()])
    jax.clear_caches()
    return found


# ── several processes ────────────────────────────────────────────────────────────────────────


def work(job: dict[str, Any]) -> None:
    """In one of two processes: what goes wrong happens on the devices of one of them only."""
    faulthandler.dump_traceback_later(240, exit=True)
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(job["coordinator"], 2, job["process"])
    training = Training(Configuration(*job["configuration"]))
    distributed.assert_consistent(training.optimizer)
    faults = [f for first in (0, 4) for f in faults_of("one process", training, first, 4)]
    clean, outcomes = training.outcomes(faults)
    Path(job["result"]).write_text(json.dumps([clean, outcomes]))


def examine_processes(optimizer: str) -> tuple[float, list[Outcome]]:
    """Starts two processes on this machine; survived is what did so on both, alike."""
    configuration = Configuration(optimizer, "float16", "ZeRO", next(iter(RULES)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    with tempfile.TemporaryDirectory() as folder:
        running, files = [], [Path(folder, f"{process}.json") for process in range(2)]
        for process, file in enumerate(files):
            job = {"coordinator": coordinator, "process": process, "result": str(file)}
            words = [
                sys.executable,
                "-m",
                "studies.faults_never_reach_a_weight",
                "--job",
                json.dumps(job | {"configuration": configuration}),
            ]
            with file.with_suffix(".txt").open("w") as output:
                running.append(
                    subprocess.Popen(words, stdout=output, stderr=output, env=alone, cwd=ROOT)
                )
        try:
            statuses = [process.wait(300) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(statuses):
            said = "\n".join(file.with_suffix(".txt").read_text() for file in files)
            raise RuntimeError(f"The processes have ended with {statuses}:\n{said}")
        one, other = (json.loads(file.read_text()) for file in files)
    alike = one == other
    outcomes = [Outcome(Configuration(*o[0]), *o[1:]) for o in one[1]]
    return one[0], [o._replace(safe=o.safe and alike) for o in outcomes]


# ── the table ────────────────────────────────────────────────────────────────────────────────


def summary(found: Sequence[tuple[float, list[Outcome]]]) -> dict[str, Any]:
    """What is kept: for each row, option, dtype and rule, how many were tried, safe, survived."""
    cells: dict[tuple[str, ...], list[Outcome]] = {}
    for _, outcomes in found:
        for o in outcomes:
            key = (o.row, o.configuration.option, o.configuration.dtype, o.configuration.rule)
            cells.setdefault(key, []).append(o)
    order = {row: place for place, row in enumerate(rows_in_order())}
    return {
        "environment": environment(),
        "clean": [round(pick(clean for clean, _ in found), 2) for pick in (min, max)],
        "columns": ["fault", "option", "dtype", "rule", "tried", "safe", "survived",
                    "worst gap", "worst raw gap"],
        "cells": [
            [*key, len(runs), sum(o.safe for o in runs), sum(o.survived for o in runs),
             round(max(o.gap for o in runs), 2), round(max(o.raw_gap for o in runs), 2)]
            for key, runs in sorted(cells.items(), key=lambda item: order[item[0][0]])
        ],
    }  # fmt: skip


def rows_in_order() -> list[str]:
    """Of the table."""
    single = [f"{name} in one element" for name in VALUES]
    single += ["one leaf", "one microbatch", "one device", "one process"]
    storms = [storm(kind, length) for kind in ("inf", "NaN data") for length in STORMS]
    return [*single, *storms, *(f"NaN data every {k} steps" for k in EVERY)]


def counted(cells: Sequence[Any], **wanted: Any) -> str:
    """Survived of tried, over the cells that are wanted; nothing where none was tried."""
    places = {"row": 0, "option": 1, "dtype": 2, "rule": 3}
    chosen = [c for c in cells if all(c[places[k]] in v for k, v in wanted.items())]
    tried, survived = (sum(c[place] for c in chosen) for place in (4, 6))
    return f"{survived}/{tried}" if tried else ""


def gap(cells: Sequence[Any], row: str) -> str:
    """The largest gaps of a row, where all have survived."""
    gaps = [cell[7:9] for cell in cells if cell[0] == row and cell[4] == cell[6]]
    least, raw = (max(column, default=np.nan) for column in zip(*gaps, strict=True))
    return f"{least:.1f} ({raw:.1f})"


def tables(results: dict[str, Any]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """The two tables: headings and rows, by title."""
    cells = results["cells"]
    rows = list(dict.fromkeys(cell[0] for cell in cells))
    options = [option for option in OPTIONS if counted(cells, option=[option])]
    every = [[row, *(counted(cells, row=[row], option=[o]) for o in options)] for row in rows]
    every.append(["all", *(counted(cells, option=[o]) for o in options)])
    half = [d for d in COMPUTES_IN if COMPUTES_IN[d] == "float16"]
    rules = [rule for rule in RULES if counted(cells, rule=[rule])]
    by_rule = [
        [row, *(counted(cells, row=[row], rule=[r], dtype=half) for r in rules),
         counted(cells, row=[row], dtype=["bfloat16"]), gap(cells, row)]
        for row in rows if " step" in row
    ]  # fmt: skip
    return {
        "Survived, by fault and option": (["fault", *options], every),
        "Storms, by rule (float16) and in bfloat16": (
            ["fault", *rules, "bfloat16", "gap (raw)"],
            by_rule,
        ),
    }


def words(results: dict[str, Any]) -> str:
    """What it comes to, in a paragraph."""
    tried, safe, survived = (sum(c[place] for c in results["cells"]) for place in (4, 5, 6))
    clean = results["clean"]
    return (
        f"In {safe} of {tried} runs with faults no non-finite value reached a weight or a slot, "
        f"and no bad step changed anything but the scale. {survived} runs came to within "
        f"{POINTS:g} point of the accuracy without faults, which is {clean[0]:.1f} % to "
        f"{clean[1]:.1f} %, depending on the configuration."
    )


def markdown(results: dict[str, Any]) -> str:
    """The part of the page that the results make."""
    parts = [words(results)]
    for title, (headings, rows) in tables(results).items():
        headings = [f"`{heading}`" if "(m" in heading else heading for heading in headings]
        lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
        parts.append(f"### {title}")
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    about = results["environment"]
    parts.append(
        f"Measured on {about['device']} with gainstage {about['gainstage']}, jax {about['jax']}."
    )
    return "\n\n".join(parts)


def print_tables(results: dict[str, Any], console: "Console") -> None:
    """The same for a terminal of 80 columns."""
    from rich.table import Table

    for title, (headings, rows) in tables(results).items():
        table = Table(title=title, padding=(0, 0))
        for place, heading in enumerate(headings):
            short = heading.replace("DynamicLossScale(min_scale=2**-24)", "min_scale=2**-24")
            short = short.removesuffix("LossScale()")
            table.add_column(short, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(words(results))


def main(argv: Sequence[str] | None = None) -> None:
    """Tries all faults, prints the tables, and writes the results and their page."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="Adam on float16 variables alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--output", type=file_to_write, default=RESULTS / "faults" / "cpu.json")
    parser.add_argument("--page", type=Path, default=DOCS / "faults.md", help="to write them into")
    parser.add_argument("--only-page", action="store_true", help="make the page of old results")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.job:
        work(json.loads(options.job))
        return
    if options.quick:
        print_tables(summary(tried(options)), Console())
        return
    if not options.only_page:
        results = summary(tried(options))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        # One cell a line.
        cells = ",\n".join(f"  {json.dumps(cell)}" for cell in results["cells"])
        text = json.dumps({**results, "cells": []}, indent=1)
        options.output.write_text(text.replace('"cells": []', f'"cells": [\n{cells}\n ]') + "\n")
    results = json.loads(options.output.read_text())
    print_tables(results, Console())
    if options.page.exists():
        text = options.page.read_text()
        options.page.write_text(between_marks(text, markdown(results)))


def tried(options: argparse.Namespace) -> list[tuple[float, list[Outcome]]]:
    """All configurations, several at a time; then the processes."""
    from rich.console import Console
    from rich.progress import track

    chosen = configurations(options.quick)
    optimizers = dict.fromkeys(configuration.optimizer for configuration in chosen)
    spawn = multiprocessing.get_context("spawn")
    total, found = len(chosen) + len(optimizers), []
    with ProcessPoolExecutor(options.jobs, spawn, use_eight_devices) as pool:
        futures: list[Future[Any]] = [pool.submit(examine, c) for c in chosen]
        futures += [pool.submit(examine_processes, optimizer) for optimizer in optimizers]
        for future in track(as_completed(futures), "faults", total, console=Console(stderr=True)):
            found.append(future.result())
    return found


if __name__ == "__main__":
    main()

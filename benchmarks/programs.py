"""The programs of GPUs and TPUs, compiled without one: what a step moves, starts and waits for.

XLA compiles for a device that is not there. The optimized program then says how many bytes it reads
and writes, how many kernels it starts, and whether it waits for a conditional: facts without noise.
Only what needs the device is left out: the seconds, and the choice among the kernels of a product.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugins of the devices are only for compiling
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import gainstage as gs
from gainstage._core.gradients import unscale

from . import harness, hlo, models, parameters

DEVICES = Path(__file__).parent / "devices"
RATE, MOMENTUM, EPSILON, SCALE = 1e-3, 0.9, 1e-7, 2.0**10
OPTAX, CHECKED = "optax", "optax.apply_if_finite"


class Program(NamedTuple):
    """What the optimized program of a step does, and takes up."""

    mb: float  # read and written
    read_mb: float
    written_mb: float
    kernels: int
    conditionals: int
    copies: int
    temp_mb: float
    aliased_mb: float  # arguments whose memory the results reuse
    collectives: list[int]  # the bytes of each
    compile_s: float


def compiled(lowered: Any, text: Path | None = None) -> Program:
    """Compiles a step and reads its program; writes that into a file, where one is given."""
    start = time.perf_counter()
    executable = lowered.compile()
    seconds = time.perf_counter() - start
    found = hlo.counts(executable.as_text())
    if text is not None:
        text.write_text(executable.as_text())
    memory = executable.memory_analysis()
    return Program(
        (found.read + found.written) / 1e6,
        found.read / 1e6,
        found.written / 1e6,
        found.kernels,
        found.conditionals,
        found.copies,
        memory.temp_size_in_bytes / 1e6,
        memory.alias_size_in_bytes / 1e6,
        list(found.collectives),
        round(seconds, 1),
    )


def target(name: str) -> Sharding:
    """A device that is not there: one of `devices/`."""
    config = (DEVICES / f"{name}.txtpb").read_text()
    found = topologies.get_topology_desc(
        "programs", platform="cuda", target_config=config, topology="1x1x1"
    )
    return SingleDeviceSharding(found.devices[0])


def planned(tree: Any, place: Sharding) -> Any:
    """A pytree of arrays that only have shape, dtype and place."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.tree.map(one, tree)


def lowered(step: Callable[..., Any], place: Sharding, *args: Any) -> Any:
    """A step `(weights, state, rest)` that gives away its first two arguments."""
    program = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    return program.lower(*planned(args, place))


# ── optimizer steps, gradients given ─────────────────────────────────────────────────────────


def transformation(kind: str) -> Any:
    """SGD with momentum, or Adam, in optax."""
    return optax.sgd(RATE, MOMENTUM) if kind == "sgd" else optax.adam(RATE, eps=EPSILON)


def optimizer_of(kind: str, variables: list[gs.Variable]) -> gs.LossScaleOptimizer:
    """The same, of ours, with loss scaling."""
    inner = gs.SGD(RATE, MOMENTUM) if kind == "sgd" else gs.Adam(RATE, epsilon=EPSILON)
    optimizer = gs.LossScaleOptimizer(inner, initial_scale=SCALE)
    optimizer.build(variables)
    return optimizer


def scaled(kind: str) -> Any:
    """The same, in optax with our loss scaling."""
    return gs.loss_scaled(transformation(kind), gs.DynamicLossScale(SCALE))


def in_optax(tx: Any, place: Sharding, weights: Any, grads: Any) -> Any:
    """A transformation of optax that scales nothing."""

    def step(weights: Any, state: Any, grads: Any) -> Any:
        grads = [g.astype(jnp.float32) for g in grads]
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return lowered(step, place, weights, jax.eval_shape(tx.init, weights), grads)


def stateless(kind: str, place: Sharding, weights: Any, grads: Any) -> Any:
    """`LossScaleOptimizer.stateless_apply`."""
    optimizer = optimizer_of(kind, [gs.Variable(weight) for weight in weights])
    state = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in optimizer.variables]

    def step(weights: Any, state: Any, grads: Any) -> Any:
        return optimizer.stateless_apply(state, grads, weights)

    return lowered(step, place, weights, state, grads)


def optax_loop(kind: str, place: Sharding, weights: Any, grads: Any) -> Any:
    """The two calls of an optax loop: the gradients are divided as by `gs.value_and_grad`."""
    tx = scaled(kind)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        grads = unscale(grads, state.loss_scale.scale)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    return lowered(step, place, weights, jax.eval_shape(tx.init, weights), grads)


def divided_later(kind: str, place: Sharding, weights: Any, grads: Any) -> Any:
    """What `gs.train_step` does behind the backward pass."""
    tx = scaled(kind)

    def step(weights: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, weights, loss_scale=state.loss_scale.scale)
        return gs.apply_updates(weights, updates, state), state

    return lowered(step, place, weights, jax.eval_shape(tx.init, weights), grads)


OPTIMIZER_STEPS = {
    OPTAX: lambda kind, *rest: in_optax(transformation(kind), *rest),
    CHECKED: lambda kind, *rest: in_optax(optax.apply_if_finite(transformation(kind), 1000), *rest),
    "ours, stateless_apply": stateless,
    "ours, optax loop": optax_loop,
    "ours, train_step": divided_later,
}


def optimizer_step(variant: str, device: str, tensors: str, kind: str, dtype: str) -> Any:
    """The lowered step of a variant."""
    shapes = parameters.shapes(tensors)
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    return OPTIMIZER_STEPS[variant](kind, target(device), weights, grads)


# ── whole train steps ────────────────────────────────────────────────────────────────────────


def train_in_optax(tx: Any, place: Sharding, model: models.Model) -> Any:
    """A transformation of optax that scales nothing."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return lowered(step, place, model.params, tx.init(model.params), model.batch)


def train_in_loop(tx: Any, place: Sharding, model: models.Model) -> Any:
    """The two calls of an optax loop."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = gs.value_and_grad(model.loss, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return lowered(step, place, model.params, tx.init(model.params), model.batch)


def train_in_one_call(tx: Any, place: Sharding, model: models.Model) -> Any:
    """`gs.train_step`."""
    args = planned((model.params, tx.init(model.params), model.batch), place)
    return gs.train_step(model.loss, tx).lower(*args)


def minimize(kind: str, place: Sharding, model: models.Model) -> Any:
    """`LossScaleOptimizer.minimize`."""
    params = jax.tree.map(gs.Variable, model.params)
    variables = jax.tree.leaves(params)
    optimizer = optimizer_of(kind, variables)

    def run(batch: Any) -> jax.Array:
        def loss() -> jax.Array:
            return model.loss(jax.tree.map(lambda v: v.value(), params), batch)

        return optimizer.minimize(loss, variables)

    pure = gs.functional(run, (variables, list(optimizer.variables)))

    def step(weights: Any, state: Any, batch: Any) -> Any:
        loss, (weights, state) = pure((weights, state), batch)
        return weights, state, loss

    arrays = [[v.value() for v in each] for each in (variables, optimizer.variables)]
    return lowered(step, place, *arrays, model.batch)


TRAIN_STEPS = {
    OPTAX: lambda kind, *rest: train_in_optax(transformation(kind), *rest),
    CHECKED: lambda kind, *rest: train_in_optax(
        optax.apply_if_finite(transformation(kind), 1000), *rest
    ),
    "ours, minimize": minimize,
    "ours, optax loop": lambda kind, *rest: train_in_loop(scaled(kind), *rest),
    "ours, train_step": lambda kind, *rest: train_in_one_call(scaled(kind), *rest),
}


def train_step(variant: str, device: str, model: str, kind: str, dtype: str) -> Any:
    """The lowered step of a variant."""
    return TRAIN_STEPS[variant](kind, target(device), models.model(model, dtype))


# ── the command ──────────────────────────────────────────────────────────────────────────────


class Case(NamedTuple):
    """The variants of a step, to be held against each other."""

    title: str
    steps: dict[str, Callable[[], Any]]  # each gives a lowered program


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Those that were chosen."""
    for device, tensors, kind, dtype in product(
        options.devices, options.sets, options.optimizers, options.dtypes
    ):
        title = f"{device}, {tensors}, {kind}, {dtype} gradients"
        cell = (device, tensors, kind, dtype)
        steps = {name: partial(optimizer_step, name, *cell) for name in OPTIMIZER_STEPS}
        yield Case(title, steps)
    for device, model, dtype in product(options.devices, options.models, options.computes):
        title = f"{device}, {model} train step, adam, {dtype}"
        cell = (device, model, "adam", dtype)
        yield Case(title, {name: partial(train_step, name, *cell) for name in TRAIN_STEPS})


def table(title: str, programs: dict[str, Program]) -> Table:
    """One row a variant, with the ratio of its bytes to those of optax."""
    result = Table(title=title)
    result.add_column("", no_wrap=True)
    headings = ["MB", "/ optax", "kernels", "/ optax", "cond.", "copies", "temp MB", "reused MB",
                "collectives", "compiled in s"]  # fmt: skip
    for heading in headings:
        result.add_column(heading, justify="right")
    base = programs.get(OPTAX)
    for name, p in programs.items():
        ratios = [f"{p.mb / base.mb:.3f}", f"{p.kernels / base.kernels:.2f}"] if base else ["", ""]
        sent = f"{len(p.collectives)} of {sum(p.collectives):,} B" if p.collectives else "-"
        result.add_row(
            name, f"{p.mb:.1f}", ratios[0], str(p.kernels), ratios[1], str(p.conditionals),
            str(p.copies), f"{p.temp_mb:.2f}", f"{p.aliased_mb:.1f}", sent, f"{p.compile_s:.1f}",
        )  # fmt: skip
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles the chosen steps, prints a table of each, and keeps the numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    choices = {
        "devices": "t4 v100 a100 h100",
        "sets": "one resnet50 gpt2",
        "optimizers": "sgd adam",
        "dtypes": "float32 float16",
        "models": "mlp transformer",
        "computes": "float16",
    }
    for name, default in choices.items():
        parser.add_argument(
            f"--{name}", nargs="*", metavar="NAME", default=default.split(), help=default
        )
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="parts of their names")
    parser.add_argument("--output", default=harness.RESULTS, type=Path, metavar="DIR")
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder for the programs' texts")
    options = parser.parse_args(argv)
    console = Console()
    printer = console if console.is_terminal else Console(width=140)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        chosen = list(cases(options))
        task = progress.add_task("", total=sum(len(case.steps) for case in chosen))
        for case in chosen:
            programs = {}
            for name, step in case.steps.items():
                wanted = not options.variants or any(part in name for part in options.variants)
                if wanted or name == OPTAX:
                    progress.update(task, description=f"{case.title}: {name}")
                    file = re.sub(r"\W+", "_", f"{case.title} {name}") + ".txt"
                    programs[name] = compiled(step(), options.text and options.text / file)
                progress.advance(task)
            printer.print(table(case.title, programs))
            if not options.variants:
                store(options.output, case.title, programs)


def store(folder: Path, title: str, programs: dict[str, Program]) -> None:
    """Puts a case among the results."""
    place = folder / "programs.json"
    results = json.loads(place.read_text()) if place.exists() else {}
    results[title] = {name: program._asdict() for name, program in programs.items()}
    place.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

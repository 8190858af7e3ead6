"""How long saving and loading a state takes beside `np.savez` and Orbax.

The state is that of Adam with few and with many arrays. All write to the same disk, one after the
other in each round. `gs.save` waits until the disk has the file, so numpy is measured with such a
wait too. `gs.load` and numpy compare checksums.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs

from .harness import between_marks, environment, file_to_write

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "checkpoints.md"
SIZES = {"12 arrays, 200 MB": (4, 4_200_000), "1,500 arrays, 60 MB": (500, 10_000)}
ROUNDS = 15
NAMES = "gs.save", "np.savez", "np.savez and fsync", "Orbax"


def state_of(count: int, size: int) -> gs.TrainState:
    """A state of Adam with so many parameters of this size."""
    keys = jax.random.split(jax.random.key(0), count)
    params = {f"w{n}": jax.random.normal(key, (size,)) for n, key in enumerate(keys)}
    return gs.TrainState.create(params, optax.adam(1e-3))


def ways(state: gs.TrainState) -> dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]]:
    """How a state is saved and loaded, by name."""
    import orbax.checkpoint as ocp

    leaves, structure = jax.tree.flatten(state)
    named = {str(n): x for n, x in enumerate(leaves)}

    def savez(path: Path, flush: bool = False) -> None:
        np.savez(path.with_suffix(".npz"), **{n: np.asarray(x) for n, x in named.items()})
        if flush:
            with path.with_suffix(".npz").open("rb+") as file:
                os.fsync(file.fileno())

    def loadz(path: Path) -> Any:
        with np.load(path.with_suffix(".npz")) as file:
            return jax.tree.unflatten(structure, [jnp.asarray(file[n]) for n in named])

    def save_by_orbax(path: Path) -> None:
        with ocp.StandardCheckpointer() as checkpoints:
            checkpoints.save(path, named, force=True)

    def load_by_orbax(path: Path) -> Any:
        with ocp.StandardCheckpointer() as checkpoints:
            return checkpoints.restore(path, named)

    return {
        "gs.save": ((lambda path: gs.save(path, state)), (lambda path: gs.load(path, state))),
        "np.savez": (savez, loadz),
        "np.savez and fsync": ((lambda path: savez(path, True)), loadz),
        "Orbax": (save_by_orbax, load_by_orbax),
    }


def measured(count: int, size: int) -> dict[str, dict[str, list[float]]]:
    """The seconds of saving and of loading in each round, by name."""
    state = jax.block_until_ready(state_of(count, size))
    found: dict[str, dict[str, list[float]]] = {n: {"save": [], "load": []} for n in NAMES}
    for number in range(ROUNDS + 1):
        for name, (save, load) in ways(state).items():
            folder = Path(tempfile.mkdtemp())
            began = time.perf_counter()
            save(folder / "state")
            between = time.perf_counter()
            jax.block_until_ready(load(folder / "state"))
            ended = time.perf_counter()
            shutil.rmtree(folder)
            if number:  # the first round compiles
                found[name]["save"].append(between - began)
                found[name]["load"].append(ended - between)
            print(f"\rround {number} of {ROUNDS}: {name}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def ratios(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """The time of each way beside that of `gs.save`: median, smallest and largest of the rounds."""
    table: dict[str, dict[str, list[float]]] = {}
    for name in NAMES[1:]:
        table[name] = {}
        for what in ("save", "load"):
            pairs = zip(found[name][what], found[NAMES[0]][what], strict=True)
            each = [theirs / ours for theirs, ours in pairs]
            table[name][what] = [round(f(each), 2) for f in (statistics.median, min, max)]
    return table


def markdown(results: dict[str, Any]) -> str:
    """The table of the page."""
    rows = ["| state | beside | saving | loading |", "|---|---|---|---|"]
    for size, table in results["sizes"].items():
        for name, each in table.items():
            cells = ["{} ({} to {})".format(*each[what]) for what in ("save", "load")]
            rows.append(f"| {size} | {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes the results and the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    output = HERE / "results" / "saving" / "cpu.json"
    parser.add_argument("--output", type=file_to_write, default=output)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(argv)
    sizes = {name: ratios(measured(*size)) for name, size in SIZES.items()}
    results = {"environment": environment(), "rounds": ROUNDS, "sizes": sizes}
    print(markdown(results))
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.page.exists():
        text = options.page.read_text()
        options.page.write_text(between_marks(text, markdown(results), "times"))


if __name__ == "__main__":
    main()

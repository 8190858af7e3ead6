"""`gainstage demo`: float16 with and without loss scaling, on a task where it matters."""

import functools
import json
from pathlib import Path
from typing import Any

import jax

from gainstage.demo.task import load_digits
from gainstage.demo.training import MODES, Run, Trainer


def main(output: Path, steps: int, seed: int, as_json: bool) -> None:
    """Trains in the three modes, then prints the numbers and draws the picture.

    Args:
        output: the picture's file.
        steps: steps of training, >= 1.
        seed: of the weights and the order of the batches.
        as_json: whether to print one JSON object in the place of the table.
    """
    from gainstage.demo import picture, report  # which need more than the task does

    train, test = load_digits()
    runs: list[Run] = []
    with report.progress() as progress:
        tasks = [progress.add_task(mode.name, total=steps) for mode in MODES]
        for mode, task in zip(MODES, tasks, strict=True):
            advance = functools.partial(progress.advance, task)
            runs.append(Trainer(mode, steps, (train, test)).run(seed, advance))
    picture.save(runs, test, output)
    if as_json:
        print(json.dumps(summary(runs, output, steps, seed)))
    else:
        report.show(runs, str(output))


def summary(runs: list[Run], output: Path, steps: int, seed: int) -> dict[str, Any]:
    """The numbers of the table and how they came about."""
    from gainstage.demo import report

    return {
        "steps": steps,
        "seed": seed,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "picture": str(output),
        "modes": {run.mode.name: report.measures(run) for run in runs},
    }

"""The language models of the examples learn, leave a record, and survive a kill."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from docs import linting
from gainstage.diagnostics import read_run

import quick

pytestmark = pytest.mark.repo

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, folder, devices=1, kill_at=None, words=()):
    """What a quick run printed, of steps that `lint` does not accuse; it gets SIGKILL once it has
    printed `kill_at`."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = quick.environment(flags, KERAS_BACKEND="jax", PYTHONUNBUFFERED="1")
    command = [sys.executable, linting.__file__, EXAMPLES / script, "--quick", "--folder", folder]
    command += words
    errors, printed = Path(f"{folder}.txt"), ""
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    with errors.open("w") as file, subprocess.Popen(command, stderr=file, **pipes) as process:
        for line in process.stdout:
            printed += line
            if kill_at is not None and kill_at in line:
                process.kill()
        status = process.wait()
    assert status == (0 if kill_at is None else -9), errors.read_text()
    return printed


def states(printed):
    """The checksum of the state by step, and that of the one restored."""
    lines = re.findall(r"^(restored step \d+|step \d+):.* state (\w+)$", printed, re.MULTILINE)
    return dict(lines)


def saved(folder):
    """Every array of the saved state by name."""
    return load_file(folder / "state.safetensors")


def test_the_language_model_learns_and_leaves_a_record(tmp_path):
    """The loss falls, every step is recorded, and an overflowed one is kept in a step file."""
    pytest.importorskip("flax")
    printed = run("language_model.py", tmp_path / "run", devices=2)
    losses = [float(loss) for loss in re.findall(r"validation ([\d.]+)", printed)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 3.5 < losses[0]
    recorded = read_run(tmp_path / "run" / "run.jsonl")
    assert recorded.steps.tolist() == list(range(1, 41))
    assert 0 < recorded.skipped.sum() < 10
    assert (tmp_path / "run" / "bad.safetensors").exists()


@pytest.mark.thorough
def test_the_language_model_of_keras_learns(tmp_path):
    """In Keras's `fit` the loss falls, and a backup is left."""
    pytest.importorskip("keras")
    printed = run("language_model_keras.py", tmp_path / "run")
    losses = [float(loss) for loss in re.findall(r"val_loss: ([\d.]+)", printed)]
    assert losses[-1] < 3.7 < losses[0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["backup.npz"]


@pytest.mark.slow
def test_a_killed_language_model_goes_on_bit_for_bit(tmp_path):
    """After two kills by SIGKILL the last state is that of a run without, in every bit."""
    whole = states(run("language_model.py", tmp_path / "whole"))
    parts = [
        states(run("language_model.py", tmp_path / "killed", kill_at=kill_at))
        for kill_at in ("step 10:", "step 30:", None)
    ]
    assert [sum(name.startswith("restored") for name in part) for part in parts] == [0, 1, 1]
    for part in parts:
        assert {whole[name.removeprefix("restored ")] for name in part} == set(part.values())
    expected, found = saved(tmp_path / "whole"), saved(tmp_path / "killed")
    assert expected.keys() == found.keys()
    differing = [name for name, x in expected.items() if x.tobytes() != found[name].tobytes()]
    assert differing == []


@pytest.mark.slow
def test_four_devices_restore_what_eight_have_saved(tmp_path):
    """The restored state is the saved one in every bit; later steps agree but for rounding."""
    whole = states(run("language_model.py", tmp_path / "whole", devices=8))
    run("language_model.py", tmp_path / "killed", devices=8, kill_at="step 20:")
    printed = run("language_model.py", tmp_path / "killed", devices=8, words=["--devices=4"])
    [(name, state)] = [pair for pair in states(printed).items() if pair[0].startswith("restored")]
    assert state == whole[name.removeprefix("restored ")]
    expected, found = saved(tmp_path / "whole"), saved(tmp_path / "killed")
    weights = [name for name in expected if name.startswith("params") and "rngs" not in name]
    assert len(weights) > 5
    for name in weights:  # measured: 2e-5 after 20 steps
        difference = np.linalg.norm(found[name] - expected[name])
        assert difference < 2e-4 * np.linalg.norm(expected[name]), name


@pytest.mark.slow
def test_a_killed_fit_goes_on_bit_for_bit(tmp_path):
    """After a SIGKILL in its second epoch `fit` ends with the arrays of a run without."""
    run("language_model_keras.py", tmp_path / "whole")
    run("language_model_keras.py", tmp_path / "killed", kill_at="Epoch 2/3")
    assert "restored the state after epoch 1" in run("language_model_keras.py", tmp_path / "killed")
    expected, found = (np.load(tmp_path / name / "backup.npz") for name in ("whole", "killed"))
    assert len(expected.files) == len(found.files) > 50
    differing = [n for n in expected.files if expected[n].tobytes() != found[n].tobytes()]
    assert differing == []

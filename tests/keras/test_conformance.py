"""Tests of other libraries, run on the classes of gainstage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[1] / "conformance"


@pytest.mark.parametrize(
    "modes", [["wrapper"], pytest.param(["native"], marks=pytest.mark.slow)], ids=str
)
def test_the_tests_of_keras(modes):
    """Of the optimizer tests in Keras's wheel those fail that the list names with a reason, and no
    others; with another version of Keras than the list's a listed one may pass."""
    keras = pytest.importorskip("keras")
    if not (Path(keras.__file__).parent / "src/optimizers/optimizer_test.py").exists():
        pytest.skip(f"Keras {keras.__version__} is installed without its tests")
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run_keras.py"), *modes],
        capture_output=True, text=True, check=False, env={**os.environ, **cache},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_every_listed_failure_has_a_reason():
    """Each is a difference that is documented, or something that is not claimed."""
    known = json.loads((FOLDER / "keras_known.json").read_text())
    for name, reason in known["failures"].items():
        assert reason.startswith(("documented difference: ", "not claimed: ")), name

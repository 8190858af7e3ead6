"""Eight virtual CPU devices for every test, and a record of how often a function was traced."""

import atexit
import os
import shutil
import tempfile

import jax
import numpy as np
import pytest

collect_ignore = ["tests/typed.py"]  # which a type-checker reads

os.environ["KERAS_BACKEND"] = "jax"
jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure():
    """What a process has compiled in this run it does not compile again."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_modifyitems(items):
    """What waits for processes comes first: at the end one worker would wait for it alone."""
    items.sort(key=lambda item: "processes" not in item.path.parts)


@pytest.fixture
def rng():
    """Random numbers that are the same in every run."""
    return np.random.default_rng(0)

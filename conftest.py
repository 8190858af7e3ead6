"""Eight virtual CPU devices for every test, and a record of how often a function was traced."""

import os

import jax
import numpy as np
import pytest

collect_ignore = ["tests/typed.py"]  # which a type-checker reads

os.environ["KERAS_BACKEND"] = "jax"
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def rng():
    """Random numbers that are the same in every run."""
    return np.random.default_rng(0)

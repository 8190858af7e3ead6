"""Eight virtual CPU devices for every test, and a record of how often a function was traced."""

import atexit
import functools
import importlib.util
import os
import shutil
import sys
import tempfile

import jax
import numpy as np
import pytest
from jax._src import compiler

from gainstage._core.unscaled import SETTLED

collect_ignore = ["tests/typed.py"]  # which a type-checker reads

os.environ["KERAS_BACKEND"] = "jax"
if getattr(importlib.util.find_spec("keras"), "origin", None) is None:
    sys.modules["keras"] = None  # not installed: it would be the folder tests/keras
jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure():
    """What a process has compiled in this run it does not compile again."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_modifyitems(items):
    """What waits for processes comes first: at the end one worker would wait for it alone."""
    items.sort(key=lambda item: ("processes" not in item.path.parts, not as_users(item)))
    for item in filter(is_documentation, items):
        item.add_marker(pytest.mark.filterwarnings("error:No loss was multiplied"))


def is_documentation(item):
    """Whether a test runs what users read: a page, or the example of a docstring."""
    return "docs" in item.path.parts or isinstance(item, pytest.DoctestItem)


@pytest.fixture(autouse=True)
def as_in_a_new_process(request):
    """In what users read, a warning that others have seen before appears again."""
    if is_documentation(request.node):
        SETTLED.clear()


def as_users(node):
    """Whether a test is about bits or programs."""
    return node.get_closest_marker("as_users") is not None


# On a CPU these halve the time to compile, and round otherwise. For the first there is no option
# of JAX's, only `XLA_FLAGS`, which hold for a whole process.
QUICK = {
    "xla_cpu_use_fusion_emitters": False,  # jax 0.12 has no other emitters
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
usual_options = compiler.get_compile_options


def is_known(option):
    """Whether this XLA has an option."""
    try:
        jax.jit(lambda: 0, compiler_options={option: QUICK[option]})()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@functools.cache
def quick_options():
    """As `usual_options`, with `QUICK` unless a test says otherwise."""
    quick = {option: QUICK[option] for option in QUICK if is_known(option)}

    def options(*args, env_options_overrides=None, **kwargs):
        overrides = quick | (env_options_overrides or {})
        return usual_options(*args, env_options_overrides=overrides, **kwargs)

    return options


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request):
    """Modules marked `as_users` are compiled with all optimizations, the others quickly."""
    wanted = usual_options if as_users(request.node) else quick_options()
    if compiler.get_compile_options is not wanted:
        compiler.get_compile_options = wanted
        jax.clear_caches()


@pytest.fixture
def rng():
    """Random numbers that are the same in every run."""
    return np.random.default_rng(0)

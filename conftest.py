"""Eight virtual CPU devices for every test, and a record of how often a function was traced."""

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src import compiler, lru_cache
from jax._src.interpreters import mlir

collect_ignore = ["tests/typed.py"]  # which a type-checker reads

os.environ["KERAS_BACKEND"] = "jax"
if getattr(importlib.util.find_spec("keras"), "origin", None) is None:
    sys.modules["keras"] = None  # not installed: it would be the folder tests/keras
jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure():
    """What one worker has compiled in this run, none compiles again. Where the environment names a
    folder for it, as it may for every program that uses JAX, nor does a later run."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    lru_cache.LRUCache.put = put_whole
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # No test reads in a program where in the source an operation comes from.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    mlir.make_ir_context = shared_context


usual_put = lru_cache.LRUCache.put


def put_whole(cache, key, value):
    """Another worker may read while this one writes, so a file gets its name when it is written."""
    folder = Path(cache.path) / f"of-thread-{threading.get_native_id()}"
    usual_put(lru_cache.LRUCache(str(folder), max_size=-1), key, value)
    for path in folder.iterdir():
        path.replace(Path(cache.path) / path.name)


usual_context, shared = mlir.make_ir_context, threading.local()


def shared_context():
    """What a program is written in before it is compiled; JAX makes a new one for each, which takes
    a tenth of the time of all tests. Each thread has one for 200 programs."""
    shared.programs = getattr(shared, "programs", 0) + 1
    if shared.programs % 200 == 1:
        shared.context = usual_context()
    return shared.context


def pytest_collection_finish():
    """What was imported stays, so it need not be searched for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items):
    """What waits for processes comes first, then the largest file: at the end one worker would wait
    for it alone. In a file, what is compiled as users do comes before the rest."""
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}

    def place(item):
        path = item.path
        return "processes" not in path.parts, -sizes[path], path, not as_users(item)

    items.sort(key=place)
    for item in filter(is_documentation, items):
        item.add_marker(pytest.mark.filterwarnings("error:No loss was multiplied"))


def is_documentation(item):
    """Whether a test runs what users read: a page, or the example of a docstring."""
    return "docs" in item.path.parts or isinstance(item, pytest.DoctestItem)


def as_users(node):
    """Whether a test is about bits or programs."""
    return node.get_closest_marker("as_users") is not None


# On a CPU these make a twelfth of the time to compile, and round otherwise. For the first there is
# no option of JAX's, only `XLA_FLAGS`, which hold for a whole process.
QUICK = {
    "xla_cpu_use_fusion_emitters": False,  # jax 0.12 has no other emitters
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # one module for LLVM, not one for each thread
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


def pytest_collectstart():
    """What a file of tests computes when it is imported is compiled quickly."""
    compiler.get_compile_options = quick_options()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tests marked `as_users` are compiled with all optimizations, the others quickly."""
    wanted = usual_options if as_users(item) else quick_options()
    if compiler.get_compile_options is not wanted:
        compiler.get_compile_options = wanted
        jax.clear_caches()


@pytest.fixture
def rng():
    """Random numbers that are the same in every run."""
    return np.random.default_rng(0)

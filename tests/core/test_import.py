"""What `import gainstage` does, in an interpreter that has imported nothing else."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import gainstage as gs

FRESH = """
import importlib.metadata, json, sys
import jax, numpy, optax, safetensors
others = set(sys.modules)
known, importlib.metadata.version = importlib.metadata.version, None
import gainstage as gs
importlib.metadata.version = known
found = {"version": gs.__version__, "modules": list(sys.modules), "names": dir(gs)}
found["own"] = sorted(set(sys.modules) - others)
found["lazy"] = [
    gs.compat.tf2.LossScaleOptimizer.__name__, gs.interop.importers.from_torch.__name__,
    gs.diagnostics.JsonLines.__name__, gs.distributed.mean_gradients.__name__, dir(gs.compat)[-5:],
]
import jax
from jax._src import xla_bridge
found["started"] = xla_bridge.backends_are_initialized()
jax.config.update("jax_num_cpu_devices", 3)
print(json.dumps(found | {"devices": len(jax.devices())}))
"""


@pytest.fixture(scope="module")
def fresh():
    """What a fresh interpreter sees of the package, in a checkout that is not installed."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", FRESH], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_import_touches_no_device(fresh):
    """`import gainstage` creates no array and starts no backend, so users can configure jax."""
    assert not fresh["started"]
    assert fresh["devices"] == 3


def test_import_needs_no_extra(fresh):
    """`import gainstage` imports none of the optional dependencies."""
    extras = {"keras", "flax", "orbax", "jinja2", "matplotlib", "rich", "tensorboardX", "sklearn"}
    assert not (extras | {"torch"}) & set(fresh["modules"])


def test_import_is_little_work(fresh):
    """`import gainstage` after jax, numpy, optax and safetensors runs modules of these four, of
    Python and of its own alone."""
    packages = {name.partition(".")[0] for name in fresh["own"]}
    assert packages - sys.stdlib_module_names <= {
        "gainstage", "jax", "jaxlib", "numpy", "optax", "safetensors"
    }  # fmt: skip


def test_the_package_shows_its_public_names(fresh):
    """`dir` lists public names alone; packages are imported when they are first used."""
    assert set(gs.__all__) <= set(fresh["names"])
    others = [n for n in fresh["names"] if n not in gs.__all__ and not n.startswith("__")]
    assert sorted(others) == ["compat", "diagnostics", "distributed", "interop"]
    assert not {"gainstage.compat.tf2", "gainstage.diagnostics"} & set(fresh["modules"])
    words = ["LossScaleOptimizer", "from_torch", "JsonLines", "mean_gradients"]
    assert fresh["lazy"] == [*words, ["dtensor", "experimental", "stateful_scale", "tf2", "v1"]]
    for package in (gs, gs.compat, gs.interop):
        with pytest.raises(AttributeError, match="has no attribute 'typo'"):
            _ = package.typo


def test_the_version_is_that_of_the_sources(fresh):
    """A checkout that is not installed has a version too, and an installed one has the same."""
    assert fresh["version"] == gs.__version__ == version("gainstage")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("GradScaler", r"Write gainstage\.TrainState\.create"),
        ("DynamicScale", r"Write gainstage\.TrainState\.create"),
        ("LossScaleOptimizer", r"It is gainstage\.optimizers\.LossScaleOptimizer"),
        ("scale_loss", r"It is gainstage\.transforms\.scale_loss"),
        ("JsonLines", r"It is gainstage\.diagnostics\.JsonLines"),
        ("keras", r"It is gainstage\.interop\.keras"),
    ],
)
def test_a_name_that_is_elsewhere_is_said_where(name, place):
    """Who looks for a name at the top is told its module, or what does its work here."""
    with pytest.raises(AttributeError, match=place):
        getattr(gs, name)

"""Traces recorded from TensorFlow's DTensor optimizers, on one device and on a mesh of eight."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.compat import dtensor

GOLDENS = Path(__file__).parents[1] / "goldens"
TRACES = {
    f"{path.stem.removeprefix('dtensor_sgd_')}-{trace['id']}": trace
    for path in sorted(GOLDENS.glob("dtensor_*.json"))
    for trace in json.loads(path.read_text())["traces"]
}
AXES = [AxisType.Auto, AxisType.Explicit]


def make(trace, axes):
    """The mesh, the variables on it, and the optimizer of a trace."""
    names, sizes = zip(*trace["mesh"]["dims"], strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(axes,) * len(names))
    variables = []
    for v in trace["trainable"]:
        spec = PartitionSpec(*(None if s == "unsharded" else s for s in v["sharding_specs"]))
        value = jax.device_put(np.asarray(v["initial"], np.float32), NamedSharding(mesh, spec))
        variables.append(gs.optimizers.Variable(value, name=v["name"]))
    return mesh, variables, dtensor.SGD(**trace["config"], mesh=mesh, jit_compile=True)


def close(variables, recorded):
    for variable, expected in zip(variables, recorded, strict=True):
        expected = np.asarray(expected, np.float32)
        assert np.isclose(variable.numpy(), expected, 1e-4, 2e-6, equal_nan=True).all()


def cases():
    """Every trace on `Auto` axes, and every third on `Explicit` ones."""
    for i, name in enumerate(TRACES):
        for axes in AXES:
            seldom = axes == AxisType.Explicit and i % 3
            yield pytest.param(name, axes, marks=[pytest.mark.thorough] * bool(seldom))


@pytest.mark.parametrize(("name", "axes"), list(cases()), ids=str)
def test_values_and_layouts(name, axes):
    """Values follow the record, every slot lies like its variable, scalars on the whole mesh.

    Differences: averages move here, where those of the original are dead on a mesh, so of that
    trace only the steps before the first overwrite are compared; iterations are int32; without
    momentum there is no slot.
    """
    trace = TRACES[name]
    mesh, variables, opt = make(trace, axes)
    layouts = [v.sharding for v in variables]
    frequency = trace["config"].get("ema_overwrite_frequency")
    for i, step in enumerate(trace["steps"], start=1):
        if frequency and i >= frequency:
            break
        grads = [np.asarray(g, np.float32) for g in step["grads"]]
        opt.apply_gradients(zip(grads, variables, strict=True))
        close(variables, step["trainable"])
        close(getattr(opt, "momentums", []), step["slots"] if opt.momentum else [])
        assert int(opt.iterations) == step["iterations"]
    for variable, layout in zip(variables, layouts, strict=True):
        assert variable.value().sharding.is_equivalent_to(layout, variable.ndim)
    replicated = NamedSharding(mesh, PartitionSpec())
    for slot in opt.variables:
        like = [v for v in variables if slot.name.endswith(f"/{v.name}")]
        expected = like[0].sharding if like else replicated
        assert slot.value().sharding.is_equivalent_to(expected, slot.ndim)

"""Traces recorded from the v1 optimizers of TensorFlow 2.15."""

import json
from pathlib import Path

import numpy as np
import pytest

import gainstage as gs
from gainstage.compat import v1

RECORDED = Path(__file__).parents[1] / "goldens" / "tf_v1_mp_loss_scale_optimizer.json"
TRACES = {t["id"]: t for t in json.loads(RECORDED.read_text())["traces"]}


def array(value):
    return None if value is None else np.asarray(value, np.float32)


def build(config):
    if not isinstance(config, dict):
        return config
    arguments = dict(config)
    return getattr(v1, arguments.pop("class_name"))(**arguments)


def close(actual, expected):
    expected = array(expected)
    assert (np.abs(np.asarray(actual) - expected) <= 1e-4 * np.abs(expected) + 2e-6).all()


@pytest.mark.filterwarnings("ignore:No gradient for")
@pytest.mark.parametrize("name", TRACES)
def test_recorded_steps(name):
    """Gradients, weights, slots, scale and `global_step` follow the recorded run.

    Difference: a fixed scale skips what is not finite, where the record applies it and ends.
    """
    trace = TRACES[name]
    opt = v1.MixedPrecisionLossScaleOptimizer(
        build(trace["config"]["opt"]), build(trace["config"]["loss_scale"])
    )
    fixed = name == "mom-fixed"
    variables = [gs.Variable(array(v["initial"]), name=v["name"]) for v in trace["variables"]]
    global_step = gs.Variable(0)
    for step in trace["steps"]:
        true = [array(g) for g in step["true_grads"]]
        true += [None] * (len(variables) - len(true))

        def loss(true=true):
            parts = zip(variables, true, strict=True)
            return sum((v * g).sum() for v, g in parts if g is not None)

        if all(g is None or np.isfinite(g).all() for g in true):
            pairs = opt.compute_gradients(loss, variables)
            for (gradient, _), expected in zip(pairs, true, strict=True):
                assert (gradient is None) == (expected is None)
                if gradient is not None:
                    close(gradient, expected)
        else:
            pairs = list(zip(true, variables, strict=True))
        before = [v.numpy() for v in variables]
        assert opt.apply_gradients(pairs, global_step) is None
        if fixed and not all(np.isfinite(array(v)).all() for v in step["variables"]):
            assert all((v.numpy() == b).all() for v, b in zip(variables, before, strict=True))
            break
        close(opt.loss_scale, step["scale"])
        assert int(global_step) == step["global_step"]
        for variable, expected in zip(variables, step["variables"], strict=True):
            close(variable.numpy(), expected)

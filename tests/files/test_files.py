"""Files that an earlier version wrote are read by this one, and the run goes on."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files import make

import gainstage as gs
from gainstage.diagnostics import read_run, read_step
from gainstage.precision import Plan

VERSIONS = sorted(path for path in Path(__file__).parent.glob("[0-9]*") if path.is_dir())
pytestmark = pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)


def assert_goes_on(w, opt):
    """After two steps, the next two move the weight and the scale as they would have."""
    np.testing.assert_array_equal(w.numpy(), make.TWO_STEPS)
    assert [float(opt.dynamic_scale), int(opt.dynamic_counter), int(opt.iterations)] == [
        2**11,
        0,
        2,
    ]
    make.step(w, opt)  # the momentum of the file counts in it
    np.testing.assert_array_equal(w.numpy(), np.float32(make.TWO_STEPS) - 0.4375 * make.SLOPE)
    make.step(w, opt)
    assert float(opt.dynamic_scale) == 2**12


def test_the_state_of_an_optimizer_goes_on(folder):
    """What `save_own_variables` gave is loaded by position."""
    w, opt = make.optimizer()
    with np.load(folder / "optimizer.npz") as store:
        w.assign(store["w"])
        opt.load_own_variables({name: store[name] for name in store if name != "w"})
    assert_goes_on(w, opt)


def test_a_keras_model_goes_on(folder):
    """A model that Keras saved has the scale and the steps of its optimizer."""
    keras = pytest.importorskip("keras")
    pytest.importorskip("gainstage.interop.keras")  # it tells Keras of its classes
    model = keras.saving.load_model(folder / "model.keras")
    assert float(model.optimizer.dynamic_scale) == 2**11
    assert int(model.optimizer.iterations) == 2
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    before = float(model.evaluate(x, y, verbose=0))
    model.fit(x, y, 2, 1, verbose=0)
    assert float(model.optimizer.dynamic_scale) == 2**12
    assert model.evaluate(x, y, verbose=0) <= before


def test_a_recording_is_read(folder):
    """A run of three steps, the last of which was skipped, with its losses."""
    run = read_run(folder / "run.jsonl")
    assert run.steps.tolist() == [0, 1, 2]
    assert run.get("applied").tolist() == [True, True, False]
    assert run.get("loss").tolist() == [4.5, 1.05859375, 26704.0]
    assert {"gainstage", "jax"} <= set(run.made["versions"])


def test_a_step_file_is_read_and_looked_into(folder):
    """The arguments of the bad step are bit for bit there, and its cause is found."""
    bad = read_step(folder / "step.safetensors")
    assert (bad.step, bad.scale) == (2, 16.0)
    params, x = bad.args
    assert params["w"].dtype == x.dtype == np.float32
    np.testing.assert_array_equal(x, np.full((2, 3), 40.0))
    found = gs.xray(make.loss_fn, *bad.args, scale=bad.scale)
    assert not found.finite


def test_a_plan_is_followed(folder):
    """The product that the plan has in float16 is computed in float16."""
    plan = Plan.load(folder / "plan.json")
    loss = gs.autocast(make.planned, plan)
    program = str(jax.make_jaxpr(loss)(jnp.ones((16, 16)), jnp.ones((32, 16))))
    assert "f16[32,16] = dot_general" in program

"""Traces recorded from TensorFlow's DTensor optimizers, on one device and on a mesh of eight."""

import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
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
        variables.append(gs.Variable(value, name=v["name"]))
    return mesh, variables, dtensor.SGD(**trace["config"], mesh=mesh, jit_compile=True)


def close(variables, recorded):
    for variable, expected in zip(variables, recorded, strict=True):
        expected = np.asarray(expected, np.float32)
        assert np.isclose(variable.numpy(), expected, 1e-4, 2e-6, equal_nan=True).all()


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", TRACES)
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
        like = [v for v in variables if f"/{v.name}_" in slot.name]
        expected = like[0].sharding if like else replicated
        assert slot.value().sharding.is_equivalent_to(expected, slot.ndim)


def test_option_objects_are_honoured():
    """Option objects, mappings and plain keywords give the same steps, and one configuration."""
    runs = []
    for options in (
        {
            "gradients_clip_option": dtensor.GradientsClipOption(clipnorm=0.5),
            "ema_option": dtensor.EMAOption(True, 0.5, 2),
        },
        {
            "gradients_clip_option": {"clipnorm": 0.5},
            "ema_option": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        },
        {"clipnorm": 0.5, "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    ):
        var, opt = gs.Variable([1.0, 2.0]), dtensor.SGD(0.1, 0.9, weight_decay=0.1, **options)
        for _ in range(3):
            opt.apply_gradients([([3.0, 4.0], var)])
        runs.append((var.numpy().tolist(), opt.get_config()))
        assert type(opt).from_config(opt.get_config()).get_config() == opt.get_config()
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"amsgrad": True}, ValueError, "amsgrad=False"),
        ({"gradients_clip_option": 1.0}, TypeError, "GradientsClipOption"),
        ({"ema_option": True}, TypeError, "EMAOption"),
        ({"gradients_clip_option": {"clipnorm": 1.0}, "clipnorm": 1.0}, ValueError, "twice"),
        ({"mesh": "mesh"}, ValueError, "Mesh"),
        ({"momentum": 2.0}, ValueError, "momentum"),
        ({"clip": 2.0}, TypeError, "clip"),
        ({"learning_rate": "fast"}, TypeError, "learning_rate"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    """What the original ignores or lets crash is an error that names the argument."""
    with pytest.raises(error, match=message):
        dtensor.SGD(**arguments)


def test_wrong_options():
    """Option objects check themselves."""
    with pytest.raises(ValueError, match="at most one"):
        dtensor.GradientsClipOption(clipnorm=1.0, global_clipnorm=1.0)
    with pytest.raises(ValueError, match="ema_momentum"):
        dtensor.EMAOption(True, 1.5)
    with pytest.warns(UserWarning, match="decay has no effect"):
        dtensor.SGD(decay=None)


def test_two_argument_update_step():
    """An override with two arguments is called, and reads the rate of the step from the object."""

    class Sign(dtensor.SGD):
        def update_step(self, gradient, variable):
            self.assign_sub(variable, self.learning_rate * jnp.sign(gradient))

    for rate in (0.5, lambda: 0.5, gs.schedules.ExponentialDecay(0.5, 1, 1.0)):
        for compiled in (True, False):
            var, opt = gs.Variable(1.0), Sign(rate, jit_compile=compiled)
            opt.apply_gradients([(7.0, var)])
            assert (float(var), float(opt.learning_rate)) == (0.5, 0.5)
            opt = gs.LossScaleOptimizer(Sign(rate), 2.0)
            opt.minimize(lambda var=var: var * 3.0, [var])
            assert float(var) == 0.0


def test_documented_methods():
    """Methods return what the page says; a tape is told that there are none."""
    var = gs.Variable(1.0)
    opt = dtensor.SGD(0.5)
    assert opt.minimize(lambda: var**2, [var]) is None
    assert opt.apply_gradients([]) is None
    ((gradient, same),) = opt.compute_gradients(lambda: var * 2, [var])
    assert (float(gradient), same is var) == (2.0, True)
    for method in (opt.minimize, opt.compute_gradients):
        with pytest.raises(ValueError, match="pass the loss as a callable"):
            method(lambda: var * 2, [var], tape=object())
    opt.learning_rate = 0.25
    assert float(opt.learning_rate) == 0.25


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"])
def test_siblings(name):
    """The other classes take the same keywords and step as the core's."""
    mesh = jax.make_mesh((8,), ("x",))
    a, b = gs.Variable([1.0, 2.0]), gs.Variable([1.0, 2.0])
    clip = dtensor.GradientsClipOption(clipvalue=0.5)
    getattr(dtensor, name)(0.1, gradients_clip_option=clip, mesh=mesh).apply_gradients(
        [([1.0, 0.1], a)]
    )
    getattr(gs, name)(0.1, clipvalue=0.5).apply([[1.0, 0.1]], [b])
    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)


def test_siblings_have_the_arguments_of_their_rule():
    """A sibling's signature, configuration and clashes know its own arguments."""
    parameters = inspect.signature(dtensor.Adam).parameters
    assert [*parameters][:5] == ["learning_rate", "beta_1", "beta_2", "epsilon", "amsgrad"]
    opt = dtensor.Adam(0.1, 0.5)
    assert dtensor.Adam.from_config(opt.get_config()).beta_1 == 0.5
    assert gs.LossScaleOptimizer(opt, weight_decay=0.1).inner_optimizer is opt
    with pytest.raises(ValueError, match="clipnorm"):
        gs.LossScaleOptimizer(dtensor.Adam(clipnorm=1.0), clipnorm=2.0)


def test_slots_of_ones_own_in_the_documented_order():
    """`add_variable` takes (shape, dtype, initializer, name), the other an initial value."""
    opt, var = dtensor.SGD(), gs.Variable([1.0, 2.0])
    count = opt.add_variable((), "int32", "ones", "count")
    assert (int(count), count.dtype, count.name) == (1, jnp.int32, "SGD/count")
    assert opt.add_variable(name="x").shape == ()
    slot = opt.add_variable_from_reference(
        model_variable=var, variable_name="slot", initial_value=[3.0, 4.0]
    )
    assert slot.numpy().tolist() == [3.0, 4.0]
    assert opt.add_variable_from_reference(var, "other").numpy().tolist() == [0.0, 0.0]


def test_options_in_option_objects_are_given():
    """A clip option in an option object and another on the wrapper are told apart."""
    inner = dtensor.SGD(0.1, gradients_clip_option={"clipnorm": 1.0})
    with pytest.raises(ValueError, match="clipnorm on 'SGD'"):
        gs.LossScaleOptimizer(inner, clipvalue=0.5)
    with pytest.raises(TypeError, match="Expected a EMAOption for ema_option"):
        dtensor.SGD(ema_option={"momentum": 0.9})

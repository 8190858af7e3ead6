"""The migration guide: every example runs, and every row of its tables has a check that holds.

A row is named by its section and the text of its first cell. `@row(section, cell, ...)` registers
the check of one or several rows; the tests at the end run them, one by one.
"""

import copy
import inspect
import json
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage._core.configurable import serialize
from gainstage.compat import dtensor, experimental, tf2, v1

GUIDE = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", GUIDE, re.M))
PURPOSE = "differences"


def section_key(title):
    """The key of a section whose tables have rows: its number, or that of the differences."""
    if title == "What is different on purpose":
        return PURPOSE
    return int(title[0]) if title[0].isdigit() else None


ROWS = [
    (section_key(title), *(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]))
    for title, text in SECTIONS.items()
    if section_key(title) is not None
    for line in re.findall(r"^\|.*\|$", text, re.M)
    if not re.match(r"\| (there|what) \||\|---", line)
]
KEYS = [(section, cell.replace("`", "")) for section, cell, *_ in ROWS]

CHECKS = {}


def row(section, *cells):
    """Registers a check under one or several rows of a section."""

    def register(check):
        for cell in cells:
            assert (section, cell) not in CHECKS, f"two checks of {section}, {cell}"
            CHECKS[section, cell] = check
        return check

    return register


# ── what the checks share ────────────────────────────────────────────────────────────────────


def wrapped(inner=None, scale=8.0, growth=2, **options):
    return gs.LossScaleOptimizer(inner or gs.SGD(0.5), scale, growth, **options)


def v1_wrapped(scale=8, rate=0.5):
    return v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(rate), scale)


def values(variables):
    return [np.asarray(v).tolist() for v in variables]


def mesh_of_all():
    return jax.make_mesh((jax.device_count(),), ("x",))


def spread(mesh, *names):
    return NamedSharding(mesh, PartitionSpec(*names))


def on_mesh(mesh):
    """A variable of ones, two on each device."""
    ones = jnp.ones(2 * jax.device_count())
    return gs.Variable(jax.device_put(ones, spread(mesh, "x")), name="w")


def one_step(opt):
    """The weights 3 and 4 after a step on gradients 3 and 4."""
    a, b = gs.Variable(3.0), gs.Variable(4.0)
    opt.apply_gradients(opt.compute_gradients(lambda: a * 3.0 + b * 4.0, [a, b]))
    return pytest.approx([float(a), float(b)], rel=1e-6)


def two_steps(opt):
    """The weight 3 after two steps on the gradient 1."""
    w = gs.Variable(3.0)
    for _ in range(2):
        opt.apply_gradients(opt.compute_gradients(lambda: w * 1.0, [w]))
    return float(w)


def failing(error, match, call, *args, **kwargs):
    with pytest.raises(error, match=match):
        call(*args, **kwargs)


class Alternating(experimental.LossScale):
    """A live scale of a user's own: every second step is refused."""

    def __init__(self, value):
        self.value, self.seen = value, 0

    def __call__(self):
        return jnp.float32(self.value)

    def update(self, grads):
        self.seen += 1
        return None, self.seen % 2 == 1

    def get_config(self):
        return {"value": self.value}


# What each option makes of `one_step` with rate 0.5: without any it is [1.5, 2].
OPTIONS = {
    "weight_decay": (0.5, [0.75, 1.0]),
    "clipnorm": (1.0, [2.5, 3.5]),
    "clipvalue": (2.0, [2.0, 3.0]),
    "global_clipnorm": (1.0, [2.7, 3.6]),
}
# The same of `two_steps` with rate 1, with and without the option: after two steps the weights
# become the average of 2 and 1.
AVERAGED = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
AVERAGES = {"use_ema": 1.0, "ema_momentum": 1.99, "ema_overwrite_frequency": 1.0}


def check_option(option, make):
    value, expected = OPTIONS[option]
    assert one_step(make(0.5)) == [1.5, 2.0]
    assert one_step(make(0.5, **{option: value})) == expected


def check_average(option, make):
    assert two_steps(make(1.0, **AVERAGED)) == 1.5
    without = {name: value for name, value in AVERAGED.items() if name != option}
    assert two_steps(make(1.0, **without)) == pytest.approx(AVERAGES[option])


def wrapper_given(rate, **options):
    return wrapped(gs.SGD(rate), **options)


for option in OPTIONS:
    row(1, option)(lambda option=option: check_option(option, wrapper_given))
    row(3, option)(lambda option=option: check_option(option, dtensor.SGD))
for option in AVERAGES.keys() - {"use_ema"}:
    row(3, option)(lambda option=option: check_average(option, dtensor.SGD))
for option in AVERAGES.keys() - {"ema_overwrite_frequency"}:
    row(1, option)(lambda option=option: check_average(option, wrapper_given))


@row(1, "ema_overwrite_frequency")
def _():
    check_average("ema_overwrite_frequency", wrapper_given)
    opt, w = wrapper_given(1.0, **AVERAGED), gs.Variable(3.0)
    seen = []
    for gradient in (8.0, np.nan, 4.0):
        opt.apply([gradient], [w])
        seen.append(float(w))
    assert seen == [2.0, 2.0, 1.5]


# ── 1. Keras 3: arguments and attributes ─────────────────────────────────────────────────────


@row(1, "inner_optimizer")
def _():
    inner = gs.SGD(0.25)
    opt = wrapped(inner)
    assert opt.inner_optimizer is inner
    w = gs.Variable(1.0)
    opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == 0.75
    with pytest.raises(AttributeError):
        opt.inner_optimizer = gs.SGD()


@row(1, "initial_scale")
def _():
    assert float(gs.LossScaleOptimizer(gs.SGD()).loss_scale) == 2.0**15
    opt = wrapped(scale=np.int64(16))
    assert (opt.initial_scale, float(opt.scale_loss(2.0))) == (16.0, 32.0)
    assert float(wrapped(scale=2.0**-126).loss_scale) == 2.0**-126
    failing(ValueError, "initial_scale", wrapped, scale=2.0**127)


@row(1, "dynamic_growth_steps")
def _():
    w, opt = gs.Variable(1.0), wrapped(growth=2)
    scales = []
    for _ in range(4):
        opt.minimize(lambda: w * 1.0, [w])
        scales.append(float(opt.loss_scale))
    assert scales == [8.0, 16.0, 16.0, 32.0]
    assert gs.LossScaleOptimizer(gs.SGD()).dynamic_growth_steps == 2000


@row(1, "name")
def _():
    assert wrapped(name="mine").variables[0].name == "mine/step_counter"
    assert wrapped().name == wrapped().name == "loss_scale_optimizer"


@row(1, "dynamic")
def _():
    opt = gs.LossScaleOptimizer(gs.SGD(), initial_scale=8.0, dynamic=False)
    w = gs.Variable(1.0)
    opt.apply([np.inf], [w])
    assert (float(opt.loss_scale), float(w), opt.dynamic) == (8.0, 1.0, False)
    assert wrapped().dynamic


@row(1, "loss_scale_factor")
@row(PURPOSE, "loss_scale_factor of the inner optimizer")
def _():
    inside = wrapped(gs.SGD(0.5, loss_scale_factor=4.0))
    for opt in (inside, wrapped(loss_scale_factor=4.0)):
        assert float(opt.loss_scale) == float(opt.scale_loss(1.0)) == 32.0
        assert one_step(opt) == [1.5, 2.0]
        assert float(opt.dynamic_scale) == 8.0


@row(1, "gradient_accumulation_steps")
def _():
    opt, w = wrapped(gradient_accumulation_steps=2), gs.Variable(3.0)
    seen = []
    for gradient in (8.0, np.nan, 24.0):
        opt.apply([gradient], [w])
        seen.append(float(w))
    assert seen == [3.0, 3.0, 3.0 - 0.5 * (1.0 + 6.0) / 2]
    assert int(opt.iterations) == 1


@row(1, "new: on_bad_microbatch")
def _():
    accumulate = {"gradient_accumulation_steps": 2, "on_bad_microbatch": "drop_window"}
    opt, w = wrapped(gs.SGD(0.5), **accumulate), gs.Variable(3.0)
    seen = []
    for gradient in (8.0, np.nan, 4.0, 4.0):
        opt.apply([gradient], [w])
        seen.append(float(w))
    assert seen == [3.0, 3.0, 3.0, 3.0 - 0.5 * 1.0]


@row(1, "new: underflow_every")
def _():
    opt = wrapped(gs.SGD(0.1), telemetry=True, underflow_every=10)
    opt.apply([2.0**-26], [gs.Variable(1.0)])
    assert gs.report(opt).underflow.flushed == [1.0]


@row(1, "new: telemetry")
def _():
    w = gs.Variable(1.0)
    plain, opt = wrapped(gs.SGD(0.1)), wrapped(gs.SGD(0.1), telemetry=True)
    plain.build([gs.Variable(1.0)])
    opt.apply([np.nan], [w])
    assert len(opt.variables) == len(plain.variables) + 8
    assert "variable: 1 of 1" in str(gs.report(opt))
    assert (bool(gs.telemetry(opt).finite), int(gs.telemetry(opt).skipped_steps)) == (False, 1)


@row(1, "new: rule")
def _():
    rule = gs.DynamicLossScale(8.0, min_scale=4.0, backoff_factor=0.25, hysteresis=2)
    opt, w = gs.LossScaleOptimizer(gs.SGD(0.5), rule=rule), gs.Variable(1.0)
    scales = []
    for _ in range(2):
        opt.apply([np.inf], [w])
        scales.append(float(opt.loss_scale))
    assert scales == [8.0, 4.0]
    assert opt.rule == rule
    failing(ValueError, "cannot be combined", gs.LossScaleOptimizer, gs.SGD(), 8.0, rule=rule)


@row(1, "new: jit_compile")
def _():
    assert not wrapped(gs.SGD(0.5, jit_compile=False)).jit_compile
    traces = []

    class Counting(gs.SGD):
        def update_step(self, gradient, variable, learning_rate):
            traces.append(isinstance(gradient, jax.core.Tracer))
            super().update_step(gradient, variable, learning_rate)

    for compiled, traced in ((True, 1), (False, 3)):
        opt, w = wrapped(Counting(0.5), jit_compile=compiled), gs.Variable(3.0)
        traces.clear()
        for _ in range(3):
            opt.apply([8.0], [w])
        assert (len(traces), float(w)) == (traced, 1.75)  # the third is divided by 16


@row(1, "new: mesh")
def _():
    mesh = mesh_of_all()
    opt = wrapped(mesh=mesh)
    w = gs.Variable(jax.device_put(1.0, spread(mesh)))
    opt.build([w])
    assert opt.dynamic_scale.sharding == spread(mesh)
    by_itself = wrapped()
    by_itself.build([on_mesh(mesh)])
    assert by_itself.dynamic_scale.sharding == spread(mesh)


@row(1, "variables")
def _():
    opt = wrapped(gs.SGD(0.5, momentum=0.9))
    opt.build([gs.Variable(1.0, name="w")])
    assert [v.name for v in opt.variables] == [
        "loss_scale_optimizer/step_counter",
        "loss_scale_optimizer/dynamic_scale",
        "SGD/iteration",
        "SGD/learning_rate",
        "SGD/w_momentum",
    ]


@row(1, "iterations")
@row(PURPOSE, "iterations of the wrapper")
def _():
    opt, w = wrapped(), gs.Variable(1.0)
    counts = [int(opt.iterations)]
    for gradient in (1.0, np.nan, 1.0):
        opt.apply([gradient], [w])
        counts.append(int(opt.iterations))
    assert counts == [0, 1, 1, 2]
    assert opt.iterations is opt.inner_optimizer.iterations


@row(1, "learning_rate")
def _():
    traces = []

    class Counting(gs.SGD):
        def update_step(self, gradient, variable, learning_rate):
            traces.append(0)
            super().update_step(gradient, variable, learning_rate)

    opt, w = wrapped(Counting(0.5)), gs.Variable(3.0)
    opt.apply([8.0], [w])
    opt.learning_rate = 0.25
    opt.apply([8.0], [w])
    assert (float(w), float(opt.inner_optimizer.learning_rate), len(traces)) == (2.25, 0.25, 1)


@row(1, "dynamic_scale")
def _():
    opt = wrapped()
    assert (float(opt.dynamic_scale), opt.dynamic_scale.dtype) == (8.0, jnp.float32)
    opt.apply([np.inf], [gs.Variable(1.0)])
    assert float(opt.dynamic_scale) == 4.0


@row(1, "step_counter", "new: dynamic_counter")
def _():
    opt, w = wrapped(growth=3), gs.Variable(1.0)
    counts = [int(opt.step_counter)]
    for gradient in (1.0, 1.0, np.nan, 1.0):
        opt.apply([gradient], [w])
        counts.append(int(opt.dynamic_counter))
    assert counts == [0, 1, 2, 0, 1]
    assert opt.dynamic_counter is opt.step_counter
    assert gs.LossScaleOptimizer(gs.SGD(), 8.0, dynamic=False).step_counter is None


@row(1, "built")
def _():
    opt = wrapped()
    assert not opt.built
    opt.build([gs.Variable(1.0)])
    assert opt.built


@row(1, "new: loss_scale")
def _():
    opt = wrapped(loss_scale_factor=4.0)
    assert (float(opt.loss_scale), opt.loss_scale.dtype) == (32.0, jnp.float32)
    opt.apply([np.inf], [gs.Variable(1.0)])
    assert float(opt.loss_scale) == 16.0


# ── 1. Keras 3: methods ──────────────────────────────────────────────────────────────────────


@row(1, "add_variable")
def _():
    opt = wrapped()
    new = opt.add_variable((2,), initializer="ones", dtype="int32", aggregation="sum", name="x")
    assert (values([new]), new.dtype, new.name) == ([[1, 1]], jnp.int32, f"{opt.name}/x")
    assert new in opt.variables
    assert opt.add_variable(()).dtype == jnp.float32
    called = opt.add_variable((2,), lambda shape, dtype: jnp.full(shape, 3, dtype))
    assert values([called]) == [[3, 3]]


@row(1, "add_variable_from_reference")
def _():
    opt = wrapped()
    reference = on_mesh(mesh_of_all())
    slot = opt.add_variable_from_reference(reference, name="slot", initializer="ones")
    assert (slot.name, slot.sharding) == (f"{opt.name}/w_slot", reference.sharding)
    assert values([slot]) == values([reference])
    half = opt.add_variable_from_reference(gs.Variable(jnp.ones(2, jnp.float16)))
    assert (half.dtype, values([half])) == (jnp.float32, [[0, 0]])


@row(1, "apply")
@row(PURPOSE, "apply on JAX")
def _():
    w, opt = gs.Variable(3.0), wrapped()
    opt.apply([8.0], [w])
    assert float(w) == 2.5
    step = gs.jit(lambda g: opt.apply([g], [w]), state=([w], opt.variables))
    step(8.0)
    step(jnp.inf)
    assert (float(w), float(opt.loss_scale)) == (2.0, 8.0)  # doubled, then halved


@row(1, "apply_gradients")
@row(PURPOSE, "the result of apply_gradients")
def _():
    w, opt = gs.Variable(3.0), wrapped()
    counts = [int(opt.apply_gradients(iter([(8.0, w)]))) for _ in range(2)]
    assert (counts, float(w)) == ([1, 2], 2.0)


def check_assignments(make, method, expected):
    variable = gs.Variable([1.0, 2.0])
    getattr(make(), method)(variable, jnp.array([0.5, 0.5]))
    assert values([variable]) == [expected]


for method, expected in [
    ("assign", [0.5, 0.5]),
    ("assign_add", [1.5, 2.5]),
    ("assign_sub", [0.5, 1.5]),
]:
    for section, make in ((1, wrapped), (3, dtensor.SGD)):
        row(section, method)(
            lambda make=make, method=method, expected=expected: check_assignments(
                make, method, expected
            )
        )


@row(1, "build")
@row(PURPOSE, "a second build")
def _():
    w, opt = gs.Variable(1.0), wrapped(gs.SGD(0.5, momentum=0.9))
    assert len(opt.variables) == 4
    opt.build([w])
    before = list(opt.variables)
    opt.build([w])
    assert len(before) == 5
    assert all(a is b for a, b in zip(opt.variables, before, strict=True))
    failing(ValueError, "built with", opt.build, [gs.Variable(1.0)])


@row(1, "check_finite")
def _():
    opt = wrapped()
    assert bool(opt.check_finite([jnp.ones(2), None, np.float16(1)]))
    assert bool(opt.check_finite([]))
    assert not bool(opt.check_finite([jnp.ones(2), jnp.array([1.0, jnp.nan])]))
    assert not bool(opt.check_finite([jnp.inf]))


def check_exclusion(opt, **arguments):
    """The weight named bias, and it alone, does not decay."""
    bias, kernel = gs.Variable(1.0, name="bias"), gs.Variable(1.0, name="kernel")
    opt.exclude_from_weight_decay(**(arguments or {"var_list": [bias]}))
    opt.apply([0.0, 0.0], [bias, kernel])
    assert (float(bias), float(kernel)) == (1.0, 0.75)


@row(1, "exclude_from_weight_decay")
@row(PURPOSE, "exclude_from_weight_decay of the wrapper")
def _():
    for arguments in ({}, {"var_names": ["^b"]}, {"var_names": ["ias"]}):
        check_exclusion(wrapped(gs.SGD(0.5, weight_decay=0.5)), **arguments)
        check_exclusion(wrapped(weight_decay=0.5), **arguments)


@row(1, "finalize_variable_values")
def _():
    w, opt = gs.Variable(3.0), wrapped(gs.SGD(1.0), use_ema=True, ema_momentum=0.5)
    for _ in range(2):
        opt.minimize(lambda: w * 1.0, [w])
    assert float(w) == 1.0
    opt.finalize_variable_values([w])
    assert float(w) == 1.5


@row(1, "from_config")
@row(PURPOSE, "from_config")
def _():
    config = {  # as Keras writes it
        "name": "mine",
        "inner_optimizer": {
            "module": "keras.optimizers",
            "class_name": "SGD",
            "config": {"name": "SGD", "learning_rate": 0.5, "momentum": 0.0, "nesterov": False},
            "registered_name": None,
        },
        "initial_scale": 16.0,
        "dynamic_growth_steps": 3,
    }
    before = copy.deepcopy(config)
    opt = gs.LossScaleOptimizer.from_config(config)
    assert config == before
    assert (opt.name, opt.initial_scale, opt.dynamic_growth_steps) == ("mine", 16.0, 3)
    assert one_step(opt) == [1.5, 2.0]

    class Mine(gs.SGD):
        pass

    config["inner_optimizer"]["class_name"] = "Other"
    opt = gs.LossScaleOptimizer.from_config(config, custom_objects={"Other": Mine})
    assert type(opt.inner_optimizer) is Mine


@row(1, "get_config")
def _():
    opt = wrapped(gs.SGD(0.1, weight_decay=0.5), clipnorm=2.0)
    config = opt.get_config()
    assert (config["clipnorm"], config["initial_scale"], config["dynamic_growth_steps"]) == (
        2,
        8,
        2,
    )
    inner = config["inner_optimizer"]["config"]
    assert inner["weight_decay"] == 0.5
    assert "clipnorm" not in inner
    assert "weight_decay" not in config
    assert gs.LossScaleOptimizer.from_config(json.loads(json.dumps(config))).get_config() == config


def check_storing(make, save_and_load):
    """What one optimizer saved, another goes on with: their weights stay equal."""
    runs = []
    for _ in range(2):
        w, opt = gs.Variable(3.0), make()
        opt.build([w])
        runs.append((w, opt))
    (w, opt), (other_w, other) = runs
    for gradient in (8.0, np.nan if isinstance(opt, gs.LossScaleOptimizer) else 4.0, 8.0):
        opt.apply([gradient])
    opt.learning_rate = 0.125
    other_w.assign(w)
    save_and_load(opt, other)
    assert values(other.variables) == values(opt.variables)
    for each in (opt, other):
        each.apply([16.0])
    assert float(w) == float(other_w) < 3.0


def through_a_store(opt, other):
    store = {}
    opt.save_own_variables(store)
    assert list(store) == [str(i) for i in range(len(opt.variables))]
    assert all(isinstance(array, np.ndarray) for array in store.values())
    other.load_own_variables(store)


def through_weights(opt, other):
    other.set_weights([v.numpy() for v in opt.variables])


def with_momentum():
    return wrapped(gs.SGD(0.5, momentum=0.9))


def dtensor_with_momentum():
    return dtensor.SGD(0.5, momentum=0.9)


row(1, "load_own_variables", "save_own_variables")(
    lambda: check_storing(with_momentum, through_a_store)
)
row(3, "load_own_variables", "save_own_variables")(
    lambda: check_storing(dtensor_with_momentum, through_a_store)
)
row(1, "set_weights")(lambda: check_storing(with_momentum, through_weights))
row(PURPOSE, "set_weights of the wrapper")(lambda: check_storing(with_momentum, through_weights))
row(4, "weights", "set_weights")(
    lambda: check_storing(
        lambda: tf2.LossScaleOptimizer(gs.SGD(0.5, momentum=0.9), initial_scale=8), through_weights
    )
)


@row(1, "scale_loss")
@row(PURPOSE, "a loss in float16")
def _():
    opt, w = gs.LossScaleOptimizer(gs.SGD()), gs.Variable(1.0)
    for _ in range(2):
        scaled = opt.scale_loss(jnp.float16(4.0))
        assert (scaled.dtype, float(scaled)) == (jnp.float32, 2.0**17)
        assert float(opt.scale_loss(0.5)) == 2.0**14
        opt.build([w])
    with jax.enable_x64(True):
        assert opt.scale_loss(jnp.float64(1.0)).dtype == jnp.float64


@row(1, "stateless_apply")
def _():
    w, opt = gs.Variable(3.0), wrapped()
    opt.build([w])
    state = [v.value() for v in opt.variables]
    step = jax.jit(opt.stateless_apply)
    (new,), state = step(state, [8.0], [w.value()])
    assert (float(new), float(w), int(opt.iterations), int(state[2])) == (2.5, 3.0, 0, 1)
    (skipped,), state = step(state, [jnp.nan], [new])
    assert (float(skipped), float(state[1]), int(state[2])) == (2.5, 4.0, 1)
    many = jax.vmap(lambda g: opt.stateless_apply(state, [g], [new])[0][0])(jnp.array([4.0, 8.0]))
    assert many.tolist() == [2.0, 1.5]


@row(1, "update_step")
def _():
    w, opt = gs.Variable(3.0), wrapped(gs.SGD(0.5, momentum=0.5))
    opt.build([w])
    for expected in (2.5, 1.75):
        opt.update_step(jnp.float32(2.0), w, jnp.float32(0.25))
        assert float(w) == expected


@row(1, "new: minimize")
@row(PURPOSE, "minimize")
def _():
    w = gs.Variable(jnp.float16(3.0))
    value = wrapped().minimize(lambda: w * w, [w])
    assert (float(value), value.dtype, float(w)) == (9.0, jnp.float32, 0.0)
    w = gs.Variable(3.0)
    assert float(tf2.LossScaleOptimizer(gs.SGD()).minimize(lambda: w * w, [w])) == 9.0
    assert v1_wrapped().minimize(lambda: w * w, var_list=[w]) is None
    assert dtensor.SGD().minimize(lambda: w * w, [w]) is None


@row(1, "new: compute_gradients")
def _():
    a, b = gs.Variable(3.0), gs.Variable(4.0)
    pairs = wrapped().compute_gradients(lambda: a * a, [a, b])
    assert [(g if g is None else float(g), v) for g, v in pairs] == [(48.0, a), (None, b)]


# ── 1. Keras 3: errors ───────────────────────────────────────────────────────────────────────


@row(1, "ValueError: an unknown keyword")
def _():
    failing(TypeError, "Expected options among .*clipnorm.*got 'clip'", wrapped, clip=1.0)
    failing(TypeError, "got 'learning_rate'", wrapped, learning_rate=0.1)


@row(1, "ValueError: dynamic=False")
def _():
    failing(ValueError, "initial_scale", gs.LossScaleOptimizer, gs.SGD(), dynamic=False)
    arguments = {"initial_scale": 8.0, "dynamic_growth_steps": 2, "dynamic": False}
    failing(ValueError, "no dynamic_growth_steps", gs.LossScaleOptimizer, gs.SGD(), **arguments)


@row(1, "AttributeError: no optimizer is wrapped")
def _():
    for wrong in ("sgd", None, gs.SGD):
        failing(TypeError, "Expected an optimizer", gs.LossScaleOptimizer, wrong)


@row(1, "no error: a wrapper is wrapped")
def _():
    failing(TypeError, "not wrapped", wrapped, wrapped())


@row(1, "no error: one optimizer in two wrappers")
def _():
    inner = gs.SGD(name="shared")
    first = wrapped(inner, name="first")
    failing(ValueError, f"'shared' is already wrapped by '{first.name}'", wrapped, inner)


@row(1, "ValueError: an option on the wrapper")
def _():
    twice = "weight_decay here and weight_decay on 'SGD'"
    failing(ValueError, twice, wrapped, gs.SGD(weight_decay=0.1), weight_decay=0.2)
    clips = "clipnorm here and clipvalue on 'SGD'"
    failing(ValueError, clips, wrapped, gs.SGD(clipvalue=1.0), clipnorm=1.0)


@row(1, "ValueError: two clip options")
def _():
    failing(ValueError, "at most one of clipnorm", wrapped, clipnorm=1.0, clipvalue=1.0)
    failing(ValueError, "at most one of clipnorm", gs.SGD, clipnorm=1.0, global_clipnorm=1.0)


@row(1, "ValueError: gradient_accumulation_steps of 1")
def _():
    for wrong in (1, -2, 2.5):
        failing(ValueError, "gradient_accum", wrapped, gradient_accumulation_steps=wrong)


def check_ema_momentum(make):
    for wrong in (-0.1, 1.5):
        failing(ValueError, "ema_momentum", make, ema_momentum=wrong)
        failing(ValueError, "ema_momentum", make, use_ema=True, ema_momentum=wrong)


row(1, "ValueError: ema_momentum outside of [0, 1]")(lambda: check_ema_momentum(wrapped))


@row(1, "ValueError: ema_overwrite_frequency below 0")
@row(PURPOSE, "ema_overwrite_frequency=0")
def _():
    for wrong in (-1, 0, 1.5):
        failing(ValueError, "ema_over", wrapped, use_ema=True, ema_overwrite_frequency=wrong)


@row(1, "no error: scale arguments out of range")
def _():
    for wrong in (0.0, -8.0, np.inf, np.nan):
        failing(ValueError, "initial_scale", wrapped, scale=wrong)
    for wrong in (0, -1, 1.5):
        failing(ValueError, "dynamic_growth_steps", wrapped, growth=wrong)


def check_no_gradients(opt):
    w = gs.Variable(1.0)
    opt.build([w])
    before = values(opt.variables)
    failing(ValueError, "None for all of", opt.apply_gradients, [(None, w)])
    assert values(opt.variables) == before


row(1, "ValueError: all gradients are None")(lambda: check_no_gradients(wrapped()))
row(3, "ValueError: all gradients are None")(lambda: check_no_gradients(dtensor.SGD()))


@row(1, "warning: some gradients are None")
def _():
    a, b = gs.Variable(3.0, name="a"), gs.Variable(4.0, name="b")
    opt = wrapped(gs.SGD(0.5, momentum=0.5, weight_decay=0.1))
    opt.build([a, b])
    opt.apply([8.0, 8.0])
    before = [float(b), float(opt.inner_optimizer.momentums[1])]
    with pytest.warns(UserWarning, match=r"No gradient for \['b'\]"):
        opt.apply([8.0, None], [a, b])
    assert [float(b), float(opt.inner_optimizer.momentums[1])] == before


@row(1, "ValueError: a variable not built with")
def _():
    opt = wrapped()
    opt.build([gs.Variable(1.0)])
    failing(ValueError, "built with.*got 'new'", opt.apply, [1.0], [gs.Variable(1.0, name="new")])


@row(1, "ValueError: apply without variables before build")
def _():
    failing(ValueError, "built before apply without", wrapped().apply, [1.0])


@row(1, "ValueError: a wrong number of gradients")
def _():
    opt, w = wrapped(), gs.Variable(1.0)
    failing(ValueError, "Expected 1 gradients", opt.apply, [1.0, 2.0], [w])
    opt.build([w])
    failing(ValueError, "Expected 1 gradients", opt.apply, [1.0, 2.0])


@row(1, "ValueError: stateless_apply before build")
def _():
    failing(ValueError, "built before stateless_apply", wrapped().stateless_apply, [], [], [])


@row(1, "no error: a wrong number of optimizer_variables")
@row(PURPOSE, "stateless_apply with a list too short")
def _():
    opt = wrapped()
    opt.build([gs.Variable(1.0)])
    state = [v.value() for v in opt.variables]
    failing(ValueError, "optimizer_variables", opt.stateless_apply, state[:-1], [1.0], [1.0])
    failing(ValueError, "gradients", opt.stateless_apply, state, [1.0, 1.0], [1.0])
    failing(ValueError, "trainable_variables", opt.stateless_apply, state, [1.0], [])


def check_set_weights_unbuilt(opt):
    failing(ValueError, "built before set_weights", opt.set_weights, values(opt.variables))


row(1, "ValueError: set_weights before build")(lambda: check_set_weights_unbuilt(wrapped()))
row(3, "ValueError: set_weights before build")(lambda: check_set_weights_unbuilt(dtensor.SGD()))


@row(1, "ValueError: set_weights of another shape")
def _():
    opt = with_momentum()
    opt.build([gs.Variable([1.0, 2.0])])
    before = values(opt.variables)
    failing(ValueError, r"shape \(2,\)", opt.set_weights, [1, 2.0, 3, 4.0, [1.0, 2.0, 3.0]])
    failing(ValueError, "Expected 5 weights", opt.set_weights, [1, 2.0, 3, 4.0])
    assert values(opt.variables) == before


@row(1, "warning: load_own_variables of another length")
@row(PURPOSE, "loading another number of variables")
def _():
    opt, store = with_momentum(), {}
    opt.build([gs.Variable(1.0)])
    opt.save_own_variables(store)
    before = values(opt.variables)
    changed = {key: array + 1 for key, array in store.items()}
    less = {key: changed[key] for key in list(changed)[:-1]}
    failing(ValueError, "'0' to '4'", opt.load_own_variables, less)
    failing(ValueError, "Expected 5 weights", opt.load_own_variables, {**changed, "5": 1.0})
    assert values(opt.variables) == before


@row(1, "no error: exclude_from_weight_decay after build")
@row(PURPOSE, "exclusion after build")
def _():
    opt, w = wrapped(), gs.Variable(1.0)
    opt.build([w])
    failing(ValueError, "before build", opt.exclude_from_weight_decay, [w])


@row(1, "ValueError: finalize_variable_values of other variables")
def _():
    opt = wrapped(use_ema=True)
    opt.build([gs.Variable(1.0)])
    failing(ValueError, "built with", opt.finalize_variable_values, [gs.Variable(1.0)])


def check_rate_in_place_of_a_schedule(make):
    opt = make(gs.schedules.ExponentialDecay(0.5, 1, 0.5))
    with pytest.raises(TypeError, match="Expected a schedule or callable"):
        opt.learning_rate = 0.5
    opt = make(0.5)
    opt.learning_rate = gs.schedules.ExponentialDecay(0.25, 1, 0.5)
    assert float(opt.learning_rate) == 0.25


row(1, "TypeError: setting a number where a schedule is")(
    lambda: check_rate_in_place_of_a_schedule(lambda rate: wrapped(gs.SGD(rate)))
)
row(3, "TypeError: setting a number where a schedule is")(
    lambda: check_rate_in_place_of_a_schedule(dtensor.SGD)
)


@row(1, "NotImplementedError: no update_step")
def _():
    class Empty(gs.Optimizer):
        pass

    w = gs.Variable(1.0)
    failing(NotImplementedError, "Empty must define", wrapped(Empty(0.5)).apply, [1.0], [w])
    assert float(w) == 1.0


# ── 2. version 1 ─────────────────────────────────────────────────────────────────────────────


@row(2, "opt")
def _():
    w = gs.Variable(3.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(opt=v1.GradientDescentOptimizer(0.25), loss_scale=8)
    opt.minimize(lambda: w * 2.0, var_list=[w])
    assert float(w) == 2.5


@row(2, "loss_scale")
def _():
    w = gs.Variable(3.0)
    scales = []
    for scale in (8, "dynamic", v1.FixedLossScale(4), v1.DynamicLossScale(16.0)):
        opt = v1_wrapped(scale)
        before = float(opt.loss_scale)
        opt.apply_gradients([(np.inf, w)])
        scales.append((before, float(opt.loss_scale)))
    assert scales == [(8, 8), (2**15, 2**14), (4, 4), (16, 8)]
    assert float(v1_wrapped(gs.DynamicLossScale(0.5)).loss_scale) == 0.5

    scale = Alternating(3.0)
    opt = v1_wrapped(scale)
    for _ in range(2):
        opt.minimize(lambda: w * 1.0, var_list=[w])
    assert (float(opt.loss_scale), scale.seen, float(w)) == (3.0, 2, 2.5)


@row(2, "use_locking")
def _():
    weights = []
    for locked in (True, False):
        inner = v1.GradientDescentOptimizer(0.5, use_locking=locked)
        opt = v1.MixedPrecisionLossScaleOptimizer(inner, 8)
        assert opt._use_locking == locked
        given = v1.GradientDescentOptimizer(0.5)
        given = v1.MixedPrecisionLossScaleOptimizer(given, 8, use_locking=locked)
        assert given._use_locking == locked
        weights += [one_step(opt), one_step(given)]
    assert all(each == [1.5, 2.0] for each in weights)


@row(2, "name", "get_name")
def _():
    inner = v1.GradientDescentOptimizer(0.5, name="inner")
    assert v1.MixedPrecisionLossScaleOptimizer(inner, 8).get_name() == "inner"
    inner = v1.GradientDescentOptimizer(0.5)
    assert v1.MixedPrecisionLossScaleOptimizer(inner, 8, name="outer").get_name() == "outer"
    assert inner.get_name() == "GradientDescent"


def v1_weights(inner, gradients=(1.0, 2.0)):
    """The weight 3 after steps on these gradients, with a loss scale of 8."""
    w, opt = gs.Variable(3.0), v1.MixedPrecisionLossScaleOptimizer(inner, 8)
    for gradient in gradients:
        opt.minimize(lambda gradient=gradient: w * gradient, var_list=[w])
    return float(w)


@row(2, "tf.compat.v1.train.GradientDescentOptimizer")
def _():
    assert v1_weights(v1.GradientDescentOptimizer(0.5)) == 3.0 - 0.5 * (1.0 + 2.0)


@row(2, "tf.compat.v1.train.MomentumOptimizer")
def _():
    m1, m2 = 1.0, 0.5 * 1.0 + 2.0
    assert v1_weights(v1.MomentumOptimizer(0.5, 0.5)) == 3.0 - 0.5 * (m1 + m2)
    ahead = v1.MomentumOptimizer(0.5, 0.5, use_nesterov=True)
    assert v1_weights(ahead) == 3.0 - 0.5 * ((1.0 + 0.5 * m1) + (2.0 + 0.5 * m2))


@row(2, "tf.compat.v1.train.AdamOptimizer")
def _():
    rate, beta1, beta2, epsilon = 0.25, 0.5, 0.75, 0.125
    w, m, v = 3.0, 0.0, 0.0
    for t, g in enumerate((1.0, 2.0), start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        corrected = rate * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        w -= corrected * m / (v**0.5 + epsilon)
    opt = v1.AdamOptimizer(rate, beta1=beta1, beta2=beta2, epsilon=epsilon)
    assert v1_weights(opt) == pytest.approx(w, rel=1e-6)


@row(2, "compute_gradients")
def _():
    w, other = gs.Variable(3.0), gs.Variable(1.0)
    pairs = v1_wrapped().compute_gradients(lambda: w * 2.0, [w, other])
    assert [(g if g is None else float(g), v) for g, v in pairs] == [(2.0, w), (None, other)]

    def tiny():  # its gradient is 0 in float16, unless the loss is scaled
        return (w.value().astype("float16") * np.float16(2.0**-24)).astype("float32") / 64

    for opt, expected in ((v1.GradientDescentOptimizer(0.5), 0.0), (v1_wrapped(2**15), 2.0**-30)):
        ((gradient, _),) = opt.compute_gradients(tiny, [w])
        assert (float(gradient), gradient.dtype) == (expected, jnp.float32)


@row(2, "compute_gradients(loss)")
def _():
    w = gs.Variable([1.0, 2.0])
    ((gradient, _),) = v1_wrapped().compute_gradients(lambda: w**2, [w])
    assert gradient.tolist() == [2.0, 4.0]


@row(2, "compute_gradients(var_list)")
def _():
    w = gs.Variable(1.0)
    ((gradient, variable),) = v1_wrapped().compute_gradients(lambda: w**2, var_list=[w])
    assert (float(gradient), variable) == (2.0, w)
    failing(ValueError, "no collection", v1_wrapped().compute_gradients, lambda: w**2)


def check_without_effect(name, *settings):
    w = gs.Variable(1.0)
    for value in settings:
        opt = v1_wrapped()
        ((gradient, _),) = opt.compute_gradients(lambda: w**2, [w], **{name: value})
        assert float(gradient) == 2.0
        each = gs.Variable(1.0)
        opt.minimize(lambda each=each: each**2, var_list=[each], **{name: value})
        assert float(each) == 0.0


for name, settings in [
    ("gate_gradients", (0, 1, 2)),
    ("aggregation_method", (None, 0, 2)),
    ("colocate_gradients_with_ops", (False, True)),
]:
    row(2, f"compute_gradients({name})")(
        lambda name=name, settings=settings: check_without_effect(name, *settings)
    )


@row(2, "compute_gradients(grad_loss)")
def _():
    w = gs.Variable([1.0, 2.0])
    ((gradient, _),) = v1_wrapped().compute_gradients(lambda: w**2, [w], grad_loss=[3.0, 0.5])
    assert gradient.tolist() == [6.0, 2.0]


@row(2, "apply_gradients")
def _():
    for scale, after in ((8, 8.0), ("dynamic", 2.0**14)):
        w, opt = gs.Variable(3.0), v1_wrapped(scale)
        assert opt.apply_gradients([(2.0, w)]) is None
        assert opt.apply_gradients([(np.nan, w)]) is None
        assert (float(w), float(opt.loss_scale)) == (2.0, after)


@row(2, "apply_gradients(grads_and_vars)")
def _():
    w, opt = gs.Variable(3.0), v1_wrapped()
    opt.apply_gradients(grads_and_vars=zip([2.0], [w], strict=True))
    assert float(w) == 2.0


@row(2, "apply_gradients(global_step)")
def _():
    for scale in (8, "dynamic"):
        w, opt, step = gs.Variable(3.0), v1_wrapped(scale), gs.Variable(5)
        counts = []
        for gradient in (1.0, np.inf, 1.0):
            opt.apply_gradients([(gradient, w)], global_step=step)
            counts.append(int(step))
        assert counts == [6, 6, 7]


@row(2, "apply_gradients(name)")
def _():
    w, opt = gs.Variable(3.0), v1_wrapped()
    opt.apply_gradients([(2.0, w)], name="step")
    assert (float(w), opt.get_name()) == (2.0, "GradientDescent")


@row(2, "minimize")
def _():
    w, step, opt = gs.Variable([1.0, 2.0]), gs.Variable(0), v1_wrapped()
    arguments = {"gate_gradients": 1, "aggregation_method": None, "name": "step"}
    arguments |= {"colocate_gradients_with_ops": True, "grad_loss": [1.0, 0.5]}
    assert opt.minimize(lambda: w**2, global_step=step, var_list=[w], **arguments) is None
    assert (values([w]), int(step)) == ([[0.0, 1.0]], 1)


def v1_stepped():
    w = gs.Variable(3.0, name="w")
    inner = v1.MomentumOptimizer(0.5, 0.5)
    opt = v1.MixedPrecisionLossScaleOptimizer(inner, "dynamic")
    opt.minimize(lambda: w * 2.0, var_list=[w])
    return w, inner, opt


@row(2, "get_slot")
@row(PURPOSE, "get_slot of the wrapper")
def _():
    w, inner, opt = v1_stepped()
    assert float(opt.get_slot(w, "momentum")) == 2.0
    assert opt.get_slot(w, "momentum") is inner.get_slot(w, "momentum")
    assert opt.get_slot(w, "other") is None


@row(2, "get_slot_names")
def _():
    assert v1_stepped()[2].get_slot_names() == ["momentum"]
    assert v1_wrapped().get_slot_names() == []


@row(2, "variables")
def _():
    w, _, opt = v1_stepped()
    held = values(opt.variables())
    assert held == [1, 2.0**15, 1, 0.5, 2.0]  # good steps, scale, iterations, rate, momentum
    assert opt.get_slot(w, "momentum") in opt.variables()


@row(2, "ValueError: a malformed name")
def _():
    for wrong in ("", None, 3):
        failing(ValueError, "for name", v1.GradientDescentOptimizer, 0.1, name=wrong)
    for wrong in ("", 3):
        inner = v1.GradientDescentOptimizer(0.1)
        failing(ValueError, "name", v1.MixedPrecisionLossScaleOptimizer, inner, 8, name=wrong)


@row(2, "ValueError: opt is no v1 optimizer")
def _():
    for wrong in (gs.SGD(), "sgd", None):
        failing(ValueError, "Expected a v1 optim", v1.MixedPrecisionLossScaleOptimizer, wrong, 8)


@row(2, "no error: a wrapper is wrapped")
def _():
    failing(ValueError, "not wrapped", v1.MixedPrecisionLossScaleOptimizer, v1_wrapped(), 8)


row(2, "ValueError: loss_scale is None")(lambda: failing(ValueError, "Expected", v1_wrapped, None))
row(2, "ValueError: another string for loss_scale")(
    lambda: failing(ValueError, "Expected .*'fast'", v1_wrapped, "fast")
)
row(2, "ValueError: loss_scale below 1")(lambda: failing(ValueError, ">= 1", v1_wrapped, 0.5))


@row(2, "RuntimeError: the distributed form must be used")
def _():
    w, opt = gs.Variable(1.0, name="w"), v1_wrapped()
    opt.apply_gradients([(0.0, w)])
    state = ([w], opt.variables())
    numbers = jax.tree.map(lambda v: v.numpy(), state)

    def run(reduce):
        def local(gradient):
            step = gs.functional(lambda: opt.apply_gradients([(reduce(gradient[0]), w)]), state)
            return step(numbers)[1][0][0]

        specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
        sharded = jax.shard_map(local, mesh=mesh, **specs)
        return sharded(np.ones(jax.device_count(), np.float32))

    failing(RuntimeError, "'w' varies over a mesh axis", run, lambda g: g)
    assert float(run(lambda g: jax.lax.pmean(g, "x"))) == 0.5


@row(2, "ValueError: all gradients are None")
@row(PURPOSE, "the scale's step count before an error")
def _():
    w, opt = gs.Variable(1.0), v1_wrapped("dynamic")
    opt.apply_gradients([(1.0, w)])
    before = values(opt.variables())
    failing(ValueError, "None for all of", opt.apply_gradients, [(None, w)])
    assert values(opt.variables()) == before


@row(PURPOSE, "a wrapper around a wrapper")
def _():
    failing(ValueError, "not wrapped", v1.MixedPrecisionLossScaleOptimizer, v1_wrapped(), 2)


row(2, "ValueError: no variables")(
    lambda: failing(ValueError, "at least one", v1_wrapped().apply_gradients, [])
)


@row(2, "RuntimeError: the loss is not callable")
@row(PURPOSE, "a tensor as the loss")
def _():
    w = gs.Variable(1.0)
    failing(TypeError, "Expected a callable", v1_wrapped().minimize, w**2, var_list=[w])
    failing(TypeError, "Expected a callable", wrapped().minimize, w**2, [w])


# ── 3. DTensor: arguments and attributes ─────────────────────────────────────────────────────


@row(3, "learning_rate")
@row(PURPOSE, "a callable rate")
def _():
    schedule = gs.schedules.ExponentialDecay(0.5, 1, 0.5)
    for rate, expected in ((1, 1.0), (schedule, 2.25), (lambda: 0.25, 2.5), (0.5, 2.0)):
        w, opt = gs.Variable(3.0), dtensor.SGD(rate)
        for _ in range(2):
            opt.apply_gradients([(1.0, w)])
        assert float(w) == expected
    opt.learning_rate = 2.0
    opt.apply_gradients([(1.0, w)])
    assert (float(w), float(opt.learning_rate)) == (0.0, 2.0)
    assert float(dtensor.SGD().learning_rate) == pytest.approx(0.01)


@row(3, "momentum")
def _():
    assert two_steps(dtensor.SGD(0.5, momentum=0.5)) == 3.0 - 0.5 - (0.5 * 0.5 + 0.5)
    assert two_steps(dtensor.SGD(0.5, 1)) == 3.0 - 0.5 - (0.5 + 0.5)


@row(3, "nesterov")
def _():
    # m is -0.5, then -0.75; each step is 0.5 * m - 0.5.
    assert two_steps(dtensor.SGD(0.5, 0.5, nesterov=True)) == 3.0 - 0.75 - 0.875


@row(3, "amsgrad")
def _():
    assert two_steps(dtensor.SGD(0.5, amsgrad=False)) == 2.0
    failing(ValueError, "amsgrad=False", dtensor.SGD, amsgrad=True)


@row(3, "gradients_clip_option")
def _():
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        value, expected = OPTIONS[name]
        clip = dtensor.GradientsClipOption(**{name: value})
        assert one_step(dtensor.SGD(0.5, gradients_clip_option=clip)) == expected
        assert one_step(dtensor.SGD(0.5, gradients_clip_option={name: value})) == expected
        assert clip.get_config()[name] == value


@row(3, "ema_option")
def _():
    average = dtensor.EMAOption(**AVERAGED)
    assert two_steps(dtensor.SGD(1.0, ema_option=average)) == 1.5
    assert two_steps(dtensor.SGD(1.0, ema_option=AVERAGED)) == 1.5
    assert average.get_config() == AVERAGED


@row(3, "jit_compile")
def _():
    traced = []

    class Watching(dtensor.SGD):
        def update_step(self, gradient, variable):
            traced.append(isinstance(gradient, jax.core.Tracer))
            super().update_step(gradient, variable)

    for compiled in ({}, {"jit_compile": True}):
        assert two_steps(Watching(0.5, **compiled)) == 2.0
    assert traced == [False, False, True]


@row(3, "name")
def _():
    assert dtensor.SGD(name="mine").variables[0].name == "mine/iteration"
    assert dtensor.SGD().name == "SGD"


@row(3, "mesh")
def _():
    mesh = mesh_of_all()
    opt = dtensor.SGD(mesh=mesh)
    opt.build([gs.Variable(jax.device_put(1.0, spread(mesh)))])
    assert opt.iterations.sharding == opt.learning_rate.sharding == spread(mesh)
    opt = dtensor.SGD()
    opt.build([on_mesh(mesh)])
    assert opt.iterations.sharding == spread(mesh)
    assert two_steps(dtensor.SGD(0.5)) == 2.0


@row(3, "use_ema")
@row(PURPOSE, "averages on a mesh, in 2.15")
def _():
    check_average("use_ema", dtensor.SGD)
    mesh = mesh_of_all()
    w = on_mesh(mesh)
    opt = dtensor.SGD(1.0, use_ema=True, ema_momentum=0.5, mesh=mesh)
    for _ in range(2):
        opt.minimize(lambda: w.value().sum(), [w])
    assert values([w]) == [[-1.0] * w.size]
    opt.finalize_variable_values([w])
    assert values([w]) == [[-0.5] * w.size]
    assert w.value().sharding == spread(mesh, "x")


@row(3, "decay")
def _():
    with pytest.warns(UserWarning, match="decay has no effect"):
        opt = dtensor.SGD(0.5, decay=0.5)
    assert two_steps(opt) == 2.0


@row(3, "new: loss_scale_factor")
def _():
    opt, w = dtensor.SGD(0.5, loss_scale_factor=8.0), gs.Variable(3.0)
    assert float(opt.scale_loss(1.0)) == 8.0
    opt.minimize(lambda: w * 1.0, [w])
    opt.apply_gradients([(np.nan, w)])
    assert (float(w), int(opt.iterations)) == (2.5, 1)


@row(3, "new: group_small")
def _():
    variables = [gs.Variable([1.0, 2.0]), gs.Variable(3.0)]
    opt = dtensor.SGD(0.5, 0.9, group_small=True)
    opt.apply_gradients(zip([jnp.ones(2), jnp.ones(())], variables, strict=True))
    assert opt.momentums[0] is opt.momentums[1]
    assert [v.numpy().tolist() for v in variables] == [[0.5, 1.5], 2.5]


@row(3, "new: master_weights")
def _():
    w = gs.Variable(jnp.float16(1.0))
    opt = dtensor.SGD(2.0**-14, master_weights=True)
    for _ in range(64):
        opt.apply_gradients([(jnp.float16(1.0), w)])
    assert float(w) == 1.0 - 2.0**-8


@row(3, "new: shard_state_over")
def _():
    mesh = mesh_of_all()
    everywhere = NamedSharding(mesh, PartitionSpec())
    w = gs.Variable(jax.device_put(np.ones((64, 32), np.float32), everywhere))
    opt = dtensor.SGD(0.5, 0.9, shard_state_over=mesh.axis_names)
    opt.apply_gradients([(w.value(), w)])
    part = opt.momentums[0].value().addressable_shards[0].data
    assert part.size * len(jax.devices()) == w.size
    assert (w.numpy() == 0.5).all()


@row(3, "new: on_bad_microbatch")
def _():
    accumulate = {"gradient_accumulation_steps": 2, "on_bad_microbatch": "drop_window"}
    opt, w = dtensor.SGD(0.5, loss_scale_factor=8.0, **accumulate), gs.Variable(3.0)
    for gradient in (8.0, np.nan, 8.0, 8.0):
        opt.apply_gradients([(gradient, w)])
    assert float(w) == 3.0 - 0.5 * 1.0


@row(3, "new: gradient_accumulation_steps")
def _():
    opt, w = dtensor.SGD(0.5, gradient_accumulation_steps=2), gs.Variable(3.0)
    seen = []
    for gradient in (1.0, 3.0):
        opt.apply_gradients([(gradient, w)])
        seen.append(float(w))
    assert seen == [3.0, 2.0]


@row(3, "iterations")
def _():
    mesh = mesh_of_all()
    opt, w = dtensor.SGD(mesh=mesh), on_mesh(mesh)
    for _ in range(2):
        opt.apply_gradients([(np.ones(w.shape, np.float32), w)])
    assert (int(opt.iterations), opt.iterations.dtype) == (2, jnp.int32)
    assert opt.iterations.sharding == spread(mesh)


@row(3, "momentums")
def _():
    w = on_mesh(mesh_of_all())
    opt = dtensor.SGD(0.5, momentum=0.5)
    opt.apply_gradients([(np.ones(w.shape, np.float32), w)])
    (m,) = opt.momentums
    assert (values([m]), m.sharding) == ([[-0.5] * w.size], w.sharding)
    without = dtensor.SGD(0.5)
    without.build([w])
    assert len(without.variables) == 2


@row(3, "variables")
@row(PURPOSE, "variables of a DTensor optimizer")
def _():
    opt = dtensor_with_momentum()
    opt.build([gs.Variable(1.0, name="w")])
    names = ["SGD/iteration", "SGD/learning_rate", "SGD/w_momentum"]
    assert [v.name for v in opt.variables] == names


@row(3, "Adam, AdamW, RMSprop, Adagrad, Adadelta")
def _():
    for name in ("Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"):
        ours, core = getattr(dtensor, name), getattr(gs, name)
        expected = one_step(core(0.25, clipvalue=0.5)).expected
        clip = dtensor.GradientsClipOption(clipvalue=0.5)
        opt = ours(0.25, gradients_clip_option=clip, mesh=mesh_of_all())
        assert not opt.jit_compile
        assert one_step(opt) == expected
    assert float(dtensor.Adam(0.25, beta_1=0.5).beta_1) == 0.5


# ── 3. DTensor: methods and errors ───────────────────────────────────────────────────────────


@row(3, "add_variable")
def _():
    opt = dtensor.SGD()
    new = opt.add_variable(shape=(2,), dtype="int32", initializer="ones", name="x")
    assert (values([new]), new.dtype, new.name) == ([[1, 1]], jnp.int32, "SGD/x")
    assert new in opt.variables


@row(3, "add_variable_from_reference")
def _():
    opt, reference = dtensor.SGD(), on_mesh(mesh_of_all())
    slot = opt.add_variable_from_reference(reference, "slot")
    assert (slot.sharding, values([slot])) == (reference.sharding, [[0.0] * reference.size])
    assert "w" in slot.name
    assert "slot" in slot.name


@row(3, "aggregate_gradients")
def _():
    w = on_mesh(mesh_of_all())
    opt = dtensor.SGD(0.5)
    opt.apply_gradients([(np.ones(w.shape, np.float32), w)])
    assert values([w]) == [[0.5] * w.size]  # not summed over the devices


@row(3, "apply")
def _():
    w, opt = gs.Variable(3.0), dtensor.SGD(0.5)
    opt.apply([1.0], [w])
    opt.apply([1.0])
    assert float(w) == 2.0


@row(3, "apply_gradients")
def _():
    w, opt = gs.Variable(3.0), dtensor.SGD(0.5)
    assert opt.apply_gradients(zip([1.0], [w], strict=True)) is None
    assert opt.apply_gradients([]) is None
    assert (float(w), int(opt.iterations)) == (2.5, 1)


@row(3, "build")
def _():
    w, opt = gs.Variable([1.0, 2.0]), dtensor_with_momentum()
    opt.build([w])
    assert opt.momentums[0].shape == (2,)
    opt.apply([[1.0, 1.0]])
    assert values([w]) == [[0.5, 1.5]]


@row(3, "compute_gradients")
def _():
    a, b, opt = gs.Variable(3.0), gs.Variable(1.0), dtensor.SGD()
    pairs = opt.compute_gradients(lambda: a * a, [a, b], tape=None)
    assert [(g if g is None else float(g), v) for g, v in pairs] == [(6.0, a), (None, b)]
    failing(ValueError, "no tape", opt.compute_gradients, lambda: a * a, [a], tape=object())


@row(3, "exclude_from_weight_decay")
def _():
    for arguments in ({}, {"var_names": ["ias"]}):
        check_exclusion(dtensor.SGD(0.5, weight_decay=0.5), **arguments)


@row(3, "finalize_variable_values")
def _():
    w, opt = gs.Variable(3.0), dtensor.SGD(1.0, use_ema=True, ema_momentum=0.5)
    for _ in range(2):
        opt.minimize(lambda: w * 1.0, [w])
    opt.finalize_variable_values([w])
    assert float(w) == 1.5


@row(3, "from_config")
@row(PURPOSE, "from_config of a DTensor optimizer")
def _():
    opt = dtensor.SGD(0.5, 0.5, nesterov=True, ema_option=AVERAGED, clipnorm=1.0)
    again = dtensor.SGD.from_config(json.loads(json.dumps(opt.get_config())))
    assert type(again) is dtensor.SGD
    assert two_steps(again) == two_steps(opt)


@row(3, "get_config")
def _():
    opt = dtensor.SGD(0.1, 0.5, True, ema_option=AVERAGED, mesh=mesh_of_all(), jit_compile=True)
    config = opt.get_config()
    expected = {"learning_rate": 0.1, "momentum": 0.5, "nesterov": True, "name": "SGD", **AVERAGED}
    assert {name: config[name] for name in expected} == expected
    assert config["ema_option"] is config["gradients_clip_option"] is None
    assert not {"mesh", "jit_compile"} & set(config)


@row(3, "minimize")
def _():
    w, opt = gs.Variable(3.0), dtensor.SGD(0.5)
    assert opt.minimize(lambda: w * 1.0, [w], tape=None) is None
    assert float(w) == 2.5
    failing(ValueError, "no tape", opt.minimize, lambda: w * 1.0, [w], tape=object())


@row(3, "scale_loss")
def _():
    assert dtensor.SGD().scale_loss(3.0) == 3.0
    assert float(dtensor.SGD(loss_scale_factor=2.0).scale_loss(3.0)) == 6.0


@row(3, "set_weights")
def _():
    check_storing(dtensor_with_momentum, through_weights)
    mesh = mesh_of_all()
    w, opt = on_mesh(mesh), dtensor_with_momentum()
    opt.build([w])
    opt.set_weights([np.int64(3), 0.25, np.ones(w.shape)])
    assert (int(opt.iterations), float(opt.learning_rate)) == (3, 0.25)
    assert opt.momentums[0].value().sharding == w.sharding
    assert values(opt.momentums) == [[1.0] * w.size]


@row(3, "stateless_apply")
def _():
    w, opt = gs.Variable(3.0), dtensor.SGD(0.5)
    opt.build([w])
    state = [v.value() for v in opt.variables]
    (new,), state = jax.jit(opt.stateless_apply)(state, [1.0], [w.value()])
    assert (float(new), int(state[0]), float(w), int(opt.iterations)) == (2.5, 1, 3.0, 0)


@row(3, "update_step")
def _():
    class Sign(dtensor.SGD):
        def update_step(self, gradient, variable):
            self.assign_sub(variable, self.learning_rate * jnp.sign(gradient))

    assert one_step(Sign(0.5)) == [2.5, 3.5]
    assert two_steps(Sign(gs.schedules.ExponentialDecay(0.5, 1, 0.5), jit_compile=True)) == 2.25
    w, opt = gs.Variable(3.0), dtensor.SGD(0.5)
    opt.build([w])
    opt.update_step(jnp.float32(1.0), w)
    assert float(w) == 2.5


@row(3, "ValueError: momentum outside of [0, 1]")
def _():
    for wrong in (-0.1, 1.5):
        failing(ValueError, "momentum", dtensor.SGD, momentum=wrong)


@row(3, "ValueError: mesh is no mesh")
def _():
    failing(ValueError, r"Expected a jax.sharding.Mesh", dtensor.SGD, mesh="mesh")


@row(3, "TypeError: learning_rate is a string")
def _():
    failing(TypeError, "learning_rate", dtensor.SGD, "fast")


@row(3, "TypeError: an unknown keyword")
def _():
    failing(TypeError, "clip", dtensor.SGD, clip=1.0)


@row(3, "ValueError: the loss is not callable")
def _():
    w = gs.Variable(1.0)
    failing(TypeError, "Expected a callable", dtensor.SGD().compute_gradients, w**2, [w])


@row(3, "KeyError: a variable not built with")
def _():
    opt = dtensor.SGD()
    opt.build([gs.Variable(1.0)])
    new = gs.Variable(1.0, name="new")
    failing(ValueError, "built with.*got 'new'", opt.apply_gradients, [(1.0, new)])


@row(3, "no error: anything for an option object")
def _():
    failing(TypeError, "GradientsClipOption", dtensor.SGD, gradients_clip_option=1.0)
    failing(TypeError, "EMAOption", dtensor.SGD, ema_option=True)
    both = {"gradients_clip_option": {"clipnorm": 1.0}, "clipnorm": 1.0}
    failing(ValueError, "twice", dtensor.SGD, **both)


@row(3, "ValueError: two clip options")
def _():
    failing(ValueError, "at most one", dtensor.SGD, clipnorm=1.0, clipvalue=1.0)
    two = {"clipnorm": 1.0, "global_clipnorm": 1.0}
    failing(ValueError, "at most one", dtensor.GradientsClipOption, **two)


@row(3, "ValueError: ema_momentum outside of [0, 1]")
def _():
    check_ema_momentum(dtensor.SGD)
    check_ema_momentum(dtensor.EMAOption)


# ── 4. TensorFlow 2 ──────────────────────────────────────────────────────────────────────────


def tf2_unscaled(*args, **kwargs):
    """A wrapper that does not expect `get_scaled_loss` any more."""
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5), *args, **kwargs)
    opt.get_scaled_loss(1.0)
    opt.get_unscaled_gradients([])
    return opt


@row(4, "optimizer")
def _():
    inner = gs.SGD(0.5)
    opt = experimental.LossScaleOptimizer(optimizer=inner, loss_scale=8)
    assert opt.inner_optimizer is inner
    assert one_step_of_tf2(opt) == [1.5, 2.0]


def one_step_of_tf2(opt):
    a, b = gs.Variable(3.0), gs.Variable(4.0)
    opt.minimize(lambda: a * 3.0 + b * 4.0, [a, b])
    return pytest.approx([float(a), float(b)], rel=1e-6)


@row(4, "loss_scale")
def _():
    live = experimental.DynamicLossScale(64.0, 7)
    live.update([np.inf])
    for scale, expected in [
        (123, (123.0, False, None)),
        (0.5, (0.5, False, None)),
        ("dynamic", (2.0**15, True, 2000)),
        (experimental.FixedLossScale(8), (8.0, False, None)),
        (live, (64.0, True, 7)),  # its configuration, not its state
        (gs.FixedLossScale(8.0), (8.0, False, None)),
        (gs.DynamicLossScale(16.0, 3), (16.0, True, 3)),
    ]:
        opt = experimental.LossScaleOptimizer(gs.SGD(0.5), scale)
        assert (float(opt.loss_scale), opt.dynamic, opt.dynamic_growth_steps) == expected
        assert opt.loss_scale.dtype == jnp.float32
        assert one_step_of_tf2(opt) == [1.5, 2.0]
    assert float(live()) == 32.0


@row(4, "inner_optimizer")
def _():
    inner = gs.SGD(0.5)
    assert tf2.LossScaleOptimizer(inner_optimizer=inner).inner_optimizer is inner


@row(4, "dynamic")
def _():
    w = gs.Variable(1.0)
    for dynamic, after in ((True, 4.0), (False, 8.0)):
        opt = tf2_unscaled(dynamic=dynamic, initial_scale=8)
        opt.apply_gradients([(np.inf, w)])
        assert (opt.dynamic, float(opt.loss_scale)) == (dynamic, after)


@row(4, "initial_scale")
def _():
    opt = tf2_unscaled(initial_scale=8)
    opt.apply_gradients([(np.inf, gs.Variable(1.0))])
    assert (type(opt.initial_scale), opt.initial_scale, float(opt.loss_scale)) == (float, 8.0, 4.0)
    assert tf2.LossScaleOptimizer(gs.SGD()).initial_scale == 2.0**15


@row(4, "dynamic_growth_steps")
def _():
    w, opt = gs.Variable(1.0), tf2_unscaled(initial_scale=8, dynamic_growth_steps=2)
    scales = []
    for _ in range(3):
        opt.apply_gradients([(1.0, w)])
        scales.append(float(opt.loss_scale))
    assert (scales, opt.dynamic_growth_steps) == ([8.0, 16.0, 16.0], 2)
    assert tf2.LossScaleOptimizer(gs.SGD()).dynamic_growth_steps == 2000
    assert tf2.LossScaleOptimizer(gs.SGD(), False, 8).dynamic_growth_steps is None


@row(4, "dynamic_counter")
def _():
    w, opt = gs.Variable(1.0), tf2_unscaled()
    counts = []
    for gradient in (1.0, 1.0, np.nan):
        opt.apply_gradients([(gradient, w)])
        counts.append(int(opt.dynamic_counter.value()))
    assert counts == [1, 2, 0]
    assert tf2.LossScaleOptimizer(gs.SGD(), False, 8).dynamic_counter is None


@row(4, "learning_rate", "lr")
def _():
    for cls, name in ((tf2.LossScaleOptimizer, "lr"), (tf2.LossScaleOptimizer, "learning_rate")):
        opt, w = cls(gs.SGD(0.5)), gs.Variable(3.0)
        assert float(getattr(opt, name)) == 0.5
        setattr(opt, name, 0.25)
        opt.minimize(lambda w=w: w * 1.0, [w])
        assert (float(w), float(opt.inner_optimizer.learning_rate)) == (2.75, 0.25)


@row(4, "iterations")
def _():
    for arguments in ({}, {"dynamic": False, "initial_scale": 8}):
        opt, w = tf2_unscaled(**arguments), gs.Variable(1.0)
        opt.iterations = 5
        for gradient in (1.0, np.nan):
            opt.apply_gradients([(gradient, w)])
        assert (int(opt.iterations), float(w)) == (7, 0.5)


@row(4, "variables")
def _():
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5), initial_scale=8)
    w = gs.Variable(3.0)
    opt.minimize(lambda: w * 1.0, [w])
    assert values(opt.variables) == [1, 8.0, 1, 0.5]


@row(4, "clipnorm, clipvalue, global_clipnorm")
def _():
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        value, expected = OPTIONS[name]
        opt = tf2.LossScaleOptimizer(gs.SGD(0.5, **{name: value}))
        assert getattr(opt, name) == value
        assert one_step_of_tf2(opt) == expected
    assert tf2.LossScaleOptimizer(gs.SGD(weight_decay=0.5)).weight_decay == 0.5
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5))
    opt.clipnorm, opt.use_ema = 0.5, True
    inner = opt.inner_optimizer
    assert (inner.clipnorm, inner.use_ema, opt.clipnorm) == (0.5, True, 0.5)
    assert opt.get_config()["inner_optimizer"] == serialize(inner)


@row(4, "beta_1, momentum and so on")
def _():
    opt, w = tf2.LossScaleOptimizer(gs.Adam(0.5, beta_1=0.75)), gs.Variable(1.0)
    opt.epsilon = 0.25
    assert (opt.beta_1, opt.epsilon, opt.inner_optimizer.epsilon) == (0.75, 0.25, 0.25)
    assert not hasattr(opt, "nesterov")
    opt.minimize(lambda: w**2, [w])
    opt.beta_1 = 0.5
    opt.minimize(lambda: w**2, [w])
    twin, v = gs.Adam(0.5, beta_1=0.75, epsilon=0.25), gs.Variable(1.0)
    twin.minimize(lambda: v**2, [v])
    twin.beta_1 = 0.5
    twin.minimize(lambda: v**2, [v])
    assert float(w) == float(v)


@row(4, "get_slot")
@row(4, "get_slot_names")
def _():
    opt, w = tf2.LossScaleOptimizer(gs.Adam(0.5, beta_1=0.75)), gs.Variable(1.0)
    assert opt.get_slot_names() == []
    opt.minimize(lambda: w * 2.0, [w])
    assert opt.get_slot_names() == ["momentum", "velocity"]
    assert float(opt.get_slot(w, "momentum")) == 0.5
    failing(ValueError, "no slot 'm'", opt.get_slot, w, "m")


@row(4, "get_scaled_loss")
@row(PURPOSE, "get_scaled_loss of a Python float")
def _():
    opt = tf2.LossScaleOptimizer(gs.SGD())
    for loss in (4.0, np.float16(4.0), jnp.float16(4.0)):
        for scaled in (opt.get_scaled_loss(loss), opt.get_scaled_loss(lambda loss=loss: loss)()):
            assert (float(scaled), scaled.dtype) == (2.0**17, jnp.float32)


@row(4, "get_unscaled_gradients")
@row(PURPOSE, "unscaling in half precision")
def _():
    opt = tf2.LossScaleOptimizer(gs.SGD())
    grads = opt.get_unscaled_gradients((np.float16(2.0**-14), None, jnp.float32(2.0**15)))
    assert type(grads) is list
    assert (float(grads[0]), grads[1], float(grads[2])) == (2.0**-29, None, 1.0)
    assert grads[0].dtype == jnp.float32


@row(4, "apply_gradients")
def _():
    opt, w = tf2_unscaled(initial_scale=8), gs.Variable(3.0)
    opt.apply_gradients([(2.0, w)], name="step", experimental_aggregate_gradients=False)
    opt.apply_gradients(zip([np.inf], [w], strict=True))
    assert (float(w), float(opt.loss_scale), int(opt.iterations)) == (2.0, 4.0, 2)


@row(4, "minimize")
def _():
    opt, w = tf2.LossScaleOptimizer(gs.SGD(0.25)), gs.Variable(1.0)
    losses = [float(opt.minimize(lambda: w**2, var_list=each)) for each in (w, [w])]
    assert (losses, float(w)) == ([1.0, 0.25], 0.25)
    v = gs.Variable([1.0, 2.0])
    loss = tf2.LossScaleOptimizer(gs.SGD(0.25)).minimize(lambda: v**2, [v])
    assert (float(loss), v.numpy().tolist()) == (5.0, [0.5, 1.0])
    failing(ValueError, "no tape", opt.minimize, lambda: w**2, [w], tape=object())


@row(4, "get_config")
def _():
    inner = gs.SGD(0.5).get_config()
    config = tf2.LossScaleOptimizer(gs.SGD(0.5), initial_scale=8).get_config()
    assert config.pop("inner_optimizer")["config"] == inner
    assert config == {"dynamic": True, "initial_scale": 8.0, "dynamic_growth_steps": 2000}
    config = experimental.LossScaleOptimizer(gs.SGD(0.5), 8).get_config()
    assert config.pop("inner_optimizer")["config"] == inner
    assert config == {"dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": None}


@row(4, "from_config")
@row(PURPOSE, "from_config of a nested configuration")
def _():
    inner = {"class_name": "SGD", "config": {"learning_rate": 0.5}}
    fixed = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 8.0}}
    arguments = {"initial_loss_scale": 8.0, "increment_period": 3}
    dynamic = {"class_name": "DynamicLossScale", "config": arguments}
    for config, growth in [
        ({"optimizer": inner, "loss_scale": fixed}, None),
        ({"optimizer": inner, "loss_scale": dynamic}, 3),
        ({"inner_optimizer": inner, "initial_scale": 8.0, "dynamic_growth_steps": 3}, 3),
    ]:
        before = copy.deepcopy(config)
        for cls in (tf2.LossScaleOptimizer, experimental.LossScaleOptimizer):
            opt = cls.from_config(config)
            assert config == before
            assert (type(opt), opt.initial_scale, opt.dynamic_growth_steps) == (cls, 8.0, growth)
            assert one_step_of_tf2(opt) == [1.5, 2.0]


@row(4, "isinstance")
def _():
    old = experimental.LossScaleOptimizer(gs.SGD(), "dynamic")
    assert isinstance(old, tf2.LossScaleOptimizer)
    new = tf2.LossScaleOptimizer(gs.SGD())
    assert not isinstance(new, experimental.LossScaleOptimizer)


BOTH_CLASSES = (
    tf2.LossScaleOptimizer,
    lambda inner: experimental.LossScaleOptimizer(inner, "dynamic"),
)


@row(4, "TypeError: no optimizer is wrapped")
def _():
    for cls in BOTH_CLASSES:
        for wrong in ("sgd", None, v1.GradientDescentOptimizer(0.1)):
            failing(TypeError, "Expected an optimizer", cls, wrong)


@row(4, "TypeError: a wrapper is wrapped")
def _():
    for cls in BOTH_CLASSES:
        failing(TypeError, "not wrapped", cls, cls(gs.SGD()))


@row(4, "ValueError: one optimizer in two wrappers")
def _():
    for cls in BOTH_CLASSES:
        inner = gs.SGD()
        first = cls(inner)
        failing(ValueError, f"is already wrapped by {first.name!r}", cls, inner)


@row(4, "no error: the inner class overrides apply_gradients")
def _():
    class Halving(gs.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(g / 2, v) for g, v in grads_and_vars])

    for cls in BOTH_CLASSES:
        failing(TypeError, "Halving overrides apply_gradients.*update_step", cls, Halving(0.5))


@row(4, "TypeError: dynamic is no bool")
def _():
    for wrong in (1, "dynamic", None):
        failing(TypeError, "Expected a bool for dynamic", tf2.LossScaleOptimizer, gs.SGD(), wrong)


row(4, "ValueError: dynamic=False without initial_scale")(
    lambda: failing(ValueError, "Expected initial_scale", tf2.LossScaleOptimizer, gs.SGD(), False)
)
row(4, "ValueError: dynamic=False with dynamic_growth_steps")(
    lambda: failing(
        ValueError, "no dynamic_growth_steps", tf2.LossScaleOptimizer, gs.SGD(), False, 8.0, 2
    )
)


@row(4, "ValueError: another thing for loss_scale")
def _():
    for wrong in (None, "fast", [8.0], True, 0, -2.0, np.nan):
        failing(ValueError, "Expected", experimental.LossScaleOptimizer, gs.SGD(), wrong)


row(4, "TypeError: a LossScale of another class")(
    lambda: failing(
        ValueError, "Expected", experimental.LossScaleOptimizer, gs.SGD(), Alternating(2.0)
    )
)


@row(4, "ValueError: a multiplier other than 2")
def _():
    scale = experimental.DynamicLossScale(multiplier=4)
    failing(ValueError, "multiplier of 2", experimental.LossScaleOptimizer, gs.SGD(), scale)
    inner = {"class_name": "SGD", "config": {}}
    old = {"class_name": "DynamicLossScale", "config": {"multiplier": 4}}
    config = {"optimizer": inner, "loss_scale": old}
    failing(ValueError, "multiplier of 2", tf2.LossScaleOptimizer.from_config, config)


row(4, "ValueError: no gradients")(
    lambda: failing(ValueError, "at least one", tf2_unscaled().apply_gradients, [])
)
row(4, "ValueError: all gradients are None")(lambda: check_no_gradients(tf2_unscaled()))


@row(4, "RuntimeError: iterations set after build")
def _():
    opt = tf2.LossScaleOptimizer(gs.SGD())
    opt.build([gs.Variable(1.0)])
    with pytest.raises(RuntimeError, match="before the optimizer is built"):
        opt.iterations = 1


@row(4, "warning: gradients applied that were never unscaled")
def _():
    w = gs.Variable(1.0)
    for called, missing in (("get_scaled_loss", "get_unscaled_gradients"), ("", "get_scaled_loss")):
        opt = tf2.LossScaleOptimizer(gs.SGD())
        if called:
            getattr(opt, called)(1.0)
        with pytest.warns(UserWarning, match=f"{missing}.* to be called"):
            opt.apply_gradients([(1.0, w)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.apply_gradients([(1.0, w)])


# ── 5. live loss scales ──────────────────────────────────────────────────────────────────────


@row(5, "FixedLossScale(loss_scale_value)", "FixedLossScale.__call__")
def _():
    scale = experimental.FixedLossScale(loss_scale_value=np.int64(7))
    assert (float(scale()), scale().dtype, scale().shape) == (7.0, jnp.float32, ())
    assert one_step(gs.LossScaleOptimizer(gs.SGD(0.5), rule=scale)) == [1.5, 2.0]


def check_read_only(name):
    scale = experimental.DynamicLossScale(8.0, 3, 4.0)
    with pytest.raises(AttributeError):
        setattr(scale, name, 2)


@row(5, "DynamicLossScale(initial_loss_scale)")
def _():
    scale = experimental.DynamicLossScale(initial_loss_scale=64)
    assert (float(scale()), scale.initial_loss_scale) == (64.0, 64.0)
    scale.update([np.inf])
    assert (float(scale()), scale.initial_loss_scale) == (32.0, 64.0)
    assert float(experimental.DynamicLossScale(2.0**126)()) == 2.0**126
    assert float(experimental.DynamicLossScale()()) == 2.0**15
    check_read_only("initial_loss_scale")


@row(5, "DynamicLossScale(increment_period)")
def _():
    for period, expected in (
        (2, [8.0, 16.0, 16.0]),
        (1, [16.0, 32.0, 64.0]),
        (0, [16.0, 32.0, 64.0]),
    ):
        scale = experimental.DynamicLossScale(8.0, increment_period=period)
        seen = []
        for _ in range(3):
            scale.update([1.0])
            seen.append(float(scale()))
        assert (seen, scale.increment_period) == (expected, max(period, 1))
    assert experimental.DynamicLossScale().increment_period == 2000
    check_read_only("increment_period")


@row(5, "DynamicLossScale(multiplier)")
def _():
    scale = experimental.DynamicLossScale(8.0, 1, multiplier=4)
    scale.update([1.0])
    assert (float(scale()), scale.multiplier) == (32.0, 4.0)
    scale.update([np.nan])
    assert float(scale()) == 8.0
    assert experimental.DynamicLossScale().multiplier == 2.0
    check_read_only("multiplier")


@row(5, "LossScale.__call__", "LossScale.update")
def _():
    w, step = gs.Variable(3.0), gs.Variable(0)
    opt = v1_wrapped(Alternating(3.0))
    for _ in range(3):
        opt.minimize(lambda: w * 1.0, step, [w])
    assert (float(opt.loss_scale), float(w), int(step)) == (3.0, 2.0, 2)


@row(5, "LossScale.get_config", "LossScale.from_config")
def _():
    scale = Alternating(3.0)
    scale.update([])
    again = Alternating.from_config(scale.get_config())
    assert (type(again), again.value, again.seen) == (Alternating, 3.0, 0)


@row(5, "FixedLossScale.update")
@row(PURPOSE, "a fixed scale and an overflow")
def _():
    scale = experimental.FixedLossScale(8)
    assert scale.update([np.inf]) == (None, True)
    assert scale.update({}) == (None, True)
    fixed = [
        gs.LossScaleOptimizer(gs.SGD(0.5), 8.0, dynamic=False),
        gs.SGD(0.5, loss_scale_factor=8.0),
        tf2_unscaled(False, 8),
        experimental.LossScaleOptimizer(gs.SGD(0.5), scale),
        v1_wrapped(scale),
    ]
    for opt in fixed:
        w = gs.Variable(3.0)
        opt.minimize(lambda w=w: w * 1.0, var_list=[w])
        opt.apply_gradients([(np.nan, w)])
        assert float(w) == 2.5


@row(5, "FixedLossScale.get_config", "FixedLossScale.from_config")
def _():
    config = experimental.FixedLossScale(8).get_config()
    assert config == {"loss_scale_value": 8.0}
    assert float(experimental.FixedLossScale.from_config(config)()) == 8.0


@row(5, "DynamicLossScale.__call__")
def _():
    scale = experimental.DynamicLossScale(8.0)
    assert (scale().dtype, scale().shape, float(scale())) == (jnp.float32, (), 8.0)
    scale.update([np.inf])
    assert float(scale()) == 4.0


@row(5, "DynamicLossScale.update")
def _():
    scale = experimental.DynamicLossScale(4.0, 2)
    for grads, finite, after in [
        ({"w": [1.0, None], "b": jnp.ones(2, jnp.float16)}, True, 4.0),
        ([None], True, 8.0),
        (jnp.inf, False, 4.0),
        ([1.0, (np.nan,)], False, 2.0),
        ([np.nan], False, 1.0),
        ([np.nan], False, 1.0),
    ]:
        none, should_apply = scale.update(grads)
        assert (none, bool(should_apply), float(scale())) == (None, finite, after)
        assert should_apply.dtype == bool


@row(5, "DynamicLossScale.get_config", "DynamicLossScale.from_config")
def _():
    scale = experimental.DynamicLossScale(8, 3, 4)
    scale.update([np.inf])
    config = scale.get_config()
    assert config == {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 4.0}
    again = experimental.DynamicLossScale.from_config(config)
    assert (float(again()), again.get_config()) == (8.0, config)


@row(5, "repr")
def _():
    assert repr(experimental.FixedLossScale(8)) == "FixedLossScale(8.0)"
    scale = experimental.DynamicLossScale(8.0, 3, 4.0)
    scale.update([1.0])
    assert repr(scale) == (
        "DynamicLossScale(current_loss_scale=8.0, num_good_steps=1, "
        "initial_loss_scale=8.0, increment_period=3, multiplier=4.0)"
    )


@row(5, "TypeError: LossScale itself is made")
def _():
    failing(TypeError, "abstract", experimental.LossScale)

    class Half(experimental.LossScale):
        def __call__(self):
            return 1.0

    failing(TypeError, "abstract", Half)


@row(5, "ValueError: loss_scale_value is no number")
def _():
    for wrong in (None, "8", True):
        failing(ValueError, "loss_scale_value", experimental.FixedLossScale, wrong)


row(5, "ValueError: loss_scale_value below 1")(
    lambda: failing(ValueError, "loss_scale_value >= 1", experimental.FixedLossScale, 0.5)
)


@row(5, "TypeError: an argument is None")
def _():
    for name in ("initial_loss_scale", "increment_period", "multiplier"):
        failing(TypeError, name, experimental.DynamicLossScale, **{name: None})


@row(5, "ValueError: an argument of DynamicLossScale is text")
def _():
    for name in ("initial_loss_scale", "increment_period", "multiplier"):
        failing(TypeError, name, experimental.DynamicLossScale, **{name: "16"})


@row(5, "InvalidArgumentError: gradients of an integer dtype")
def _():
    scale = experimental.DynamicLossScale()
    failing(TypeError, "floating", scale.update, [jnp.ones(2, jnp.int32)])


@row(5, "AttributeError: multiplier is set")
def _():
    for name in ("initial_loss_scale", "increment_period", "multiplier"):
        check_read_only(name)


# ── differences ──────────────────────────────────────────────────────────────────────────────


@row(PURPOSE, "the scale's range")
def _():
    w = gs.Variable(1.0)
    for make, low in [
        (lambda scale: gs.LossScaleOptimizer(gs.SGD(0.0), scale, 1), 2.0**-24),
        (lambda scale: tf2_unscaled(True, scale, 1), 1.0),
        (lambda scale: v1_wrapped(v1.DynamicLossScale(scale, 1)), 1.0),
    ]:
        up, down = make(2.0**125), make(4 * low)
        for _ in range(4):
            up.apply_gradients([(1.0, w)])
            down.apply_gradients([(np.inf, w)])
        assert (float(up.loss_scale), float(down.loss_scale)) == (2.0**126, low)
        up.apply_gradients([(np.inf, w)])
        assert float(up.loss_scale) == 2.0**125


@row(PURPOSE, "a gradient that overflows when unscaled")
def _():
    w, opt = gs.Variable(1.0), wrapped(scale=2.0**-10)
    opt.apply([np.float32(2.0**127)], [w])
    assert (float(w), int(opt.iterations), float(opt.loss_scale)) == (1.0, 0, 2.0**-11)


@row(PURPOSE, "slots of float16 variables")
def _():
    w = gs.Variable(jnp.ones(2, jnp.float16))
    opt = wrapped(gs.Adam(0.5), use_ema=True, gradient_accumulation_steps=2)
    opt.build([w])
    slots = [v for v in opt.variables if v.shape == (2,)]
    assert [v.dtype for v in slots] == [jnp.float32] * 4
    assert w.dtype == jnp.float16


@row(PURPOSE, "the learning rate in a configuration")
def _():
    assert gs.SGD(0.1).get_config()["learning_rate"] == 0.1


@row(PURPOSE, "a schedule after a skipped step")
def _():
    def rate(opt):
        opt.apply_gradients([(np.nan, gs.Variable(1.0))])
        return float(opt.learning_rate)

    def inner():
        return gs.SGD(gs.schedules.ExponentialDecay(0.5, 1, 0.5))

    assert rate(wrapped(inner())) == 0.5
    for opt in (
        tf2.LossScaleOptimizer(inner()),
        experimental.LossScaleOptimizer(inner(), "dynamic"),
    ):
        opt.get_scaled_loss(1.0)
        opt.get_unscaled_gradients([])
        assert rate(opt) == 0.25


@row(PURPOSE, "moving averages")
def _():
    for opt in (
        wrapped(gs.SGD(1.0, **AVERAGED)),
        dtensor.SGD(1.0, **AVERAGED),
        tf2.LossScaleOptimizer(gs.SGD(1.0, **AVERAGED)),
    ):
        w = gs.Variable(3.0)
        for _ in range(2):
            opt.minimize(lambda w=w: w * 1.0, [w])
        assert float(w) == 1.5  # of 2 and 1; with 3 among them it would be 1.75


@row(PURPOSE, "growth")
def _():
    opt, w = wrapped(growth=2), gs.Variable(1.0)
    opt.build([w])
    opt.set_weights([7, 8.0, 0, 0.5])
    opt.apply([1.0])
    assert (float(opt.loss_scale), int(opt.step_counter)) == (16.0, 0)


@row(PURPOSE, "overwriting with averages")
def _():
    w = gs.Variable([np.inf, 1.0])
    opt = gs.SGD(0.5, **AVERAGED)
    for expected in ([np.inf, 1.0], [np.inf, 1.0]):
        opt.apply([[0.0, 0.0]], [w])
        assert values([w]) == [expected]


@row(PURPOSE, "accumulation with a gradient of None")
def _():
    a, b = gs.Variable(3.0), gs.Variable(3.0)
    opt = gs.SGD(0.5, gradient_accumulation_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for grads in ([1.0, 1.0], [1.0, None], [1.0, 1.0], [1.0, 2.0]):
            opt.apply(grads, [a, b])
    assert (float(a), float(b)) == (2.0, 3.0 - 0.5 * (1.0 + 1.0 + 2.0) / 2)


@row(PURPOSE, "options of the wrapper")
def _():
    for option in OPTIONS:
        check_option(option, wrapper_given)
        value, expected = OPTIONS[option]
        assert one_step(wrapped(gs.SGD(0.5, **{option: value}))) == expected


@row(PURPOSE, "integers for floats")
def _():
    assert two_steps(gs.SGD(1, momentum=0)) == 1.0
    assert two_steps(gs.SGD(np.float32(1), momentum=np.int32(1))) == 0.0


@row(PURPOSE, "a fixed scale below 1")
def _():
    for opt in (
        tf2.LossScaleOptimizer(gs.SGD(), False, 0.5),
        experimental.LossScaleOptimizer(gs.SGD(), 0.5),
    ):
        again = type(opt).from_config(opt.get_config())
        assert (again.dynamic, float(again.loss_scale)) == (False, 0.5)


@row(PURPOSE, "float16 gradients")
def _():
    w, opt = gs.Variable(jnp.ones(2, jnp.float16)), v1_wrapped(2**15)
    ((gradient, _),) = opt.compute_gradients(lambda: w.value().astype("float32") * 2.0**-12, [w])
    assert (gradient.dtype, gradient.tolist()) == (jnp.float32, [2.0**-12] * 2)
    opt.apply_gradients([(jnp.ones(2, jnp.float16), w)])
    assert values([w]) == [[0.5, 0.5]]


@row(PURPOSE, "FixedLossScale of inf or NaN")
def _():
    for wrong in (np.inf, np.nan):
        failing(ValueError, "loss_scale_value", experimental.FixedLossScale, wrong)


@row(PURPOSE, "DynamicLossScale out of range")
def _():
    for name, wrongs in [
        ("initial_loss_scale", (0, -8.0, np.inf, np.nan, 2.0**127)),
        ("increment_period", (-1, 1.5, np.inf)),
        ("multiplier", (0, -2.0, np.inf, np.nan)),
    ]:
        for wrong in wrongs:
            failing(ValueError, name, experimental.DynamicLossScale, **{name: wrong})


@row(PURPOSE, "option objects and amsgrad")
def _():
    clip, expected = {"clipnorm": OPTIONS["clipnorm"][0]}, OPTIONS["clipnorm"][1]
    assert one_step(dtensor.SGD(0.5, gradients_clip_option=clip)) == expected
    assert two_steps(dtensor.SGD(1.0, ema_option=AVERAGED)) == 1.5
    failing(ValueError, "amsgrad", dtensor.SGD, amsgrad=True)


@row(PURPOSE, "several losses in a tuple or list")
def _():
    failing(TypeError, "Sum several losses", wrapped().scale_loss, (1.0, 2.0))
    tx = gs.loss_scaled(optax.sgd(0.5), gs.FixedLossScale(8.0))
    w = jnp.float32(3.0)
    state = tx.init(w)
    for losses in (lambda w: (w, 2 * w), lambda w: [w, 2 * w]):
        failing(TypeError, "Expected a scalar loss", gs.value_and_grad(losses, state), w)
    loss, gradient = gs.value_and_grad(lambda w: w + 2 * w, state)(w)
    assert (float(loss), float(gradient)) == (9.0, 3.0)


@row(PURPOSE, "optax.contrib.schedule_free_eval_params(state, params)")
def _():
    def run(tx, value_and_grad):
        params = jnp.array([1.0, 2.0])
        state = tx.init(params)
        for _ in range(3):
            _, grads = value_and_grad(lambda p: (p**2).sum(), state)(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    tx = optax.contrib.schedule_free_sgd(0.25)
    averaged = optax.contrib.schedule_free_eval_params
    params, state = run(tx, lambda loss, _: jax.value_and_grad(loss))
    scaled_params, scaled_state = run(gs.loss_scaled(tx), gs.value_and_grad)
    assert averaged(scaled_state.inner, scaled_params).tolist() == averaged(state, params).tolist()
    assert averaged(state, params).tolist() != params.tolist()


# ── the tests ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("section", "cell"), KEYS, ids=lambda part: str(part))
def test_row(section, cell):
    """What the guide says of one argument, attribute, method, error or difference holds."""
    CHECKS[section, cell]()


def test_rows_and_checks_belong_together():
    """Every row is there once and has a check, and every check has a row."""
    assert len(KEYS) == len(set(KEYS))
    assert set(KEYS) == set(CHECKS)


@pytest.mark.parametrize("title", [title for title in SECTIONS if "```python" in SECTIONS[title]])
def test_blocks_run(title, capsys):
    """The Python blocks of a section run one after the other and print what their comments say."""
    blocks = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.S)
    scope = {}
    for block in blocks:
        exec(block, scope)
        said = re.findall(r"^(?: *print\(.*\)  )?# ((?:-?[\d.]+|True|False)(?: .*)?)$", block, re.M)
        assert capsys.readouterr().out.splitlines() == said


# What the five documents name: arguments, attributes and methods.
OPTION_NAMES = """weight_decay clipnorm clipvalue global_clipnorm use_ema ema_momentum
ema_overwrite_frequency"""
METHOD_NAMES = """add_variable add_variable_from_reference apply apply_gradients assign assign_add
assign_sub build exclude_from_weight_decay finalize_variable_values from_config get_config
load_own_variables save_own_variables scale_loss set_weights stateless_apply update_step"""
DOCUMENTED = {
    1: f"""inner_optimizer initial_scale dynamic_growth_steps name {OPTION_NAMES} loss_scale_factor
        gradient_accumulation_steps {METHOD_NAMES} check_finite""",
    2: """opt loss_scale use_locking name compute_gradients apply_gradients grads_and_vars
        global_step minimize ValueError RuntimeError""",
    3: f"""learning_rate momentum nesterov amsgrad gradients_clip_option ema_option jit_compile name
        mesh {OPTION_NAMES} {METHOD_NAMES} compute_gradients minimize""",
    4: """optimizer loss_scale dynamic dynamic_counter dynamic_growth_steps initial_scale
        inner_optimizer learning_rate lr get_config ValueError""",
    5: """DynamicLossScale LossScale FixedLossScale initial_loss_scale increment_period multiplier
        loss_scale_value __call__ update get_config from_config""",
}
CLASSES = {
    1: [gs.LossScaleOptimizer],
    2: [
        v1.MixedPrecisionLossScaleOptimizer,
        v1.GradientDescentOptimizer,
        v1.MomentumOptimizer,
        v1.AdamOptimizer,
    ],
    3: [dtensor.SGD, dtensor.GradientsClipOption, dtensor.EMAOption],
    4: [tf2.LossScaleOptimizer, experimental.LossScaleOptimizer],
    5: [experimental.FixedLossScale, experimental.DynamicLossScale],
}


def names_in(section, columns):
    """The identifiers in code in some columns of a section's tables."""
    cells = [cell for number, *cells in ROWS if number == section for cell in cells[columns]]
    return {name for cell in cells for code in re.findall("`(.*?)`", cell) for name in words(code)}


def words(code):
    return re.findall(r"[A-Za-z_]\w*", code)


@pytest.mark.parametrize("section", DOCUMENTED)
def test_every_documented_name_has_a_row(section):
    """Every argument, attribute and method that a document names is in the column of its names."""
    assert set(DOCUMENTED[section].split()) - names_in(section, slice(0, 1)) == set()


@pytest.mark.parametrize("section", CLASSES)
def test_every_argument_of_ours_has_a_row(section):
    """Every argument of the classes of a section is named in its tables, in one of two columns."""
    named = names_in(section, slice(0, 2))
    for cls in CLASSES[section]:
        assert set(inspect.signature(cls).parameters) - named == set(), cls

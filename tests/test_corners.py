"""Corners where features meet, or meet other libraries: each of these was wrong once."""

import functools
import json
import pickle
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gainstage as gs
from gainstage import distributed, schedules
from gainstage.compat import dtensor, tf2, v1
from gainstage.diagnostics import Alarm, Alarms, JsonLines, Run, read_run
from gainstage.diagnostics.findings import findings
from gainstage.diagnostics.runs import why_skipped
from gainstage.distributed import agreement, processes

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("rule", [gs.DynamicLossScale(4.0), gs.AdaptiveLossScale(4.0)])
@pytest.mark.parametrize("told", [{}, {"telemetry": True}, {"underflow_every": 1}])
def test_a_fresh_state_can_be_donated(rule, told):
    """An optax loop may donate what `init` returned: no two leaves are one array."""
    params = {"w": jnp.ones(4)}
    tx = gs.loss_scaled(optax.adam(0.1), rule, **{"telemetry": True} | told if told else {})
    state = tx.init(params)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        _, grads = gs.value_and_grad(lambda p: (p["w"] ** 2).sum(), state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = step(params, state)
    assert (params["w"] < 1).all()


# ── variables and steps ──────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("transform", [jax.grad, jax.vmap])
def test_a_step_under_a_transformation_is_an_error_that_changes_nothing(transform):
    """`apply` in a function that is differentiated or mapped raises, and all state is as before."""
    w = gs.Variable(jnp.ones(3), name="w")
    opt = gs.SGD(0.5, momentum=0.5)
    opt.build([w])
    opt.apply([jnp.ones(3)])
    before = [v.numpy() for v in [w, *opt.variables]]

    def loss(x):
        opt.apply([x * jnp.ones(3)], [w])
        return x

    with pytest.raises(ValueError, match="Expected variable"):
        transform(loss)(1.0 if transform is jax.grad else jnp.ones(2))
    jax.tree.map(np.testing.assert_array_equal, [v.numpy() for v in [w, *opt.variables]], before)
    opt.apply([jnp.ones(3)])
    assert int(opt.iterations) == 2


def test_a_pure_function_does_not_eat_its_arguments():
    """`functional` of a step that donates leaves the arrays that it was given."""
    w = gs.Variable(jnp.zeros(1000))
    held = []
    step = gs.jit(lambda: w.assign(w * 2), [w], donate=True)

    def twice():
        step()
        held.append(w.value())
        step()

    x = jnp.ones(1000)
    _, (new,) = gs.functional(twice, [w])([x])
    assert (new == 4).all()
    assert (x == 1).all()
    assert (held[0] == 2).all()
    assert (w.value() == 0).all()


def test_a_variable_stays_on_its_device():
    """`assign` and `load_state` of arrays from another device do not move anything."""
    here, there = (jax.device_put(jnp.ones(4), d) for d in jax.devices()[:2])
    w, other = gs.Variable(there), gs.Variable(here)
    one, two = gs.SGD(0.5, momentum=0.5), gs.SGD(0.5, momentum=0.5)
    one.apply([there], [w])
    two.apply([here], [other])
    w.assign(other)
    one.load_state(two.state())
    one.apply([there], [w])
    assert {v.value().device for v in [w, *one.variables]} == {jax.devices()[1]}


def test_arrays_on_a_chosen_device_compile_no_more():
    """Weights made by `jax.device_put`: one program, for another rate and other weights too."""
    x = jax.device_put(np.ones(8, np.float32), jax.devices()[0])
    w = gs.Variable(x)
    opt = gs.LossScaleOptimizer(gs.Adam(0.1, use_ema=True), telemetry=True)
    opt.apply([x], [w])
    for rate in (0.1, 0.2):
        opt.learning_rate = rate
        opt.apply([x], [w])
    w.assign(np.zeros(8))
    opt.apply([x], [w])
    assert opt._runner.program._compiled._cache_size() == 1


@pytest.mark.filterwarnings("ignore:No gradient for")
def test_a_group_takes_gradients_of_several_dtypes():
    """With `group_small` gradients of float64, of float32 and missing ones may be mixed."""
    with jax.enable_x64(True):
        a, b, c = (gs.Variable([1.0, 2.0], jnp.float32) for _ in range(3))
        opt = gs.SGD(0.5, group_small=True)
        opt.apply([np.ones(2), np.ones(2, np.float32), None], [a, b, c])
        assert [v.numpy().tolist() for v in (a, b, c)] == [[0.5, 1.5], [0.5, 1.5], [1.0, 2.0]]


@pytest.mark.parametrize("grouped", [False, True])
def test_every_slot_starts_as_its_own_request_says(grouped):
    """With `group_small`, too, a slot is what the initializer of its variable returns."""

    class Anchored(gs.Optimizer):
        elementwise = True

        def build(self, var_list):
            super().build(var_list)
            self.start = [
                self.add_variable_from_reference(v, "start", lambda *_, v=v: v.value() + 0)
                for v in var_list
            ]

        def update_step(self, gradient, variable, learning_rate):
            start = self.start[self._get_variable_index(variable)]
            self.assign(variable, variable - learning_rate * (gradient + variable - start))

    weights = [gs.Variable([1.0, 1.0]), gs.Variable([5.0, 5.0, 5.0])]
    opt = Anchored(0.5, group_small=grouped)
    for _ in range(2):
        opt.apply([jnp.zeros(2), jnp.zeros(3)], weights)
        opt.build(weights)
    assert [w.numpy().tolist() for w in weights] == [[1.0, 1.0], [5.0, 5.0, 5.0]]


def test_a_compiled_function_does_not_freeze_a_variable_that_is_lent():
    """A `jax.jit` inside of an uncompiled function on variables is told, whatever these hold."""
    w = gs.Variable(1.0, name="w")
    predict = jax.jit(lambda x: w * x)
    pure = gs.functional(predict, [w])
    with pytest.raises(ValueError, match="'w', whose value would be frozen"):
        pure([2.0], 10.0)
    assert float(jax.jit(pure)([2.0], 10.0)[0]) == 20.0
    assert float(jax.jit(lambda x: gs.functional(lambda: w * x, [w])([3.0])[0])(10.0)) == 30.0


def test_a_build_that_fails_is_no_build():
    """A wrapper on another mesh says so each time, and takes no step."""
    devices = np.array(jax.devices())
    ours, other = (jax.sharding.Mesh(part, ("d",)) for part in np.split(devices, 2))
    w = gs.Variable(jax.device_put(np.ones(8, np.float32), NamedSharding(ours, PartitionSpec("d"))))
    opt = gs.LossScaleOptimizer(gs.SGD(0.1, momentum=0.9), mesh=other)
    for _ in range(2):
        with pytest.raises(ValueError, match="Expected variables on the mesh"):
            opt.apply([np.ones(8, np.float32)], [w])
        assert not opt.built


@pytest.mark.filterwarnings("ignore:No gradient for")
def test_a_dropped_window_leaves_nothing():
    """`drop_window` drops the gradients of variables, too, that had none in the last microbatch."""
    a, b = gs.Variable(0.0), gs.Variable(0.0)
    inner = gs.SGD(1.0, gradient_accumulation_steps=2, on_bad_microbatch="drop_window")
    opt = gs.LossScaleOptimizer(inner, rule=gs.FixedLossScale(1.0))
    opt.apply([1.0, 8.0], [a, b])
    opt.apply([np.float32("inf"), None], [a, b])
    opt.apply([1.0, 1.0], [a, b])
    opt.apply([1.0, 1.0], [a, b])
    assert (float(a), float(b)) == (-1.0, -1.0)


def test_one_variable_is_excluded_from_decay():
    """A variable that is 0 counts as one all the same, and so does a vector."""
    for value in (0.0, [1.0, 2.0]):
        w, opt = gs.Variable(value), gs.SGD(0.1, weight_decay=0.1)
        opt.exclude_from_weight_decay(w)
        assert not opt._decays(w)


def test_an_option_of_the_wrapper_is_not_set_inside():
    """An option that the wrapper has is refused on the inner one, where it would do nothing."""
    opt = gs.LossScaleOptimizer(gs.SGD(1.0), 1.0, clipnorm=1.0)
    with pytest.raises(ValueError, match=r"Expected clipnorm to be set on .* where it is 1\.0"):
        opt.inner_optimizer.clipnorm = 0.25
    opt.clipnorm = None
    with pytest.raises(ValueError, match=r"Expected clipnorm to be set on .* where it is None"):
        opt.inner_optimizer.clipnorm = 0.25


# ── limits and schedules ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
@pytest.mark.parametrize(("limit", "gradient"), [(1e39, 1.0), (1e-60, 0.0)])
def test_limits_that_float32_does_not_hold_clip_as_far_as_it_goes(clip, limit, gradient):
    """A norm's limit above all numbers of float32 clips nothing, one below all does no harm."""
    w = gs.Variable(1.0)
    opt = gs.LossScaleOptimizer(gs.SGD(0.5, **{clip: limit}), initial_scale=4.0)
    opt.apply([4 * gradient], [w])
    assert float(w) == 1 - 0.5 * gradient


@pytest.mark.parametrize("never", [2**31 - 1, 1e10, 1e300])
def test_a_boundary_that_is_never_reached(never):
    """A boundary beyond all steps changes nothing, and one before all is passed from the start."""
    rate = schedules.PiecewiseConstantDecay([-never, 1, never], [8.0, 0.5, 0.25, 4.0])
    w = gs.Variable(0.0)
    opt = gs.SGD(rate)
    for expected in (-0.5, -1.0, -1.25):
        opt.apply([1.0], [w])
        assert float(w) == expected


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.ExponentialDecay(np.float32(0.5), np.int64(100), jnp.float32(0.5), np.True_),
        schedules.PolynomialDecay(jnp.float32(0.5), jnp.int32(100), cycle=np.False_),
        schedules.CosineDecay(np.float64(0.5), 100, warmup_target=1.0, warmup_steps=np.int32(3)),
        schedules.PiecewiseConstantDecay(jnp.array([10, 20]), np.array([1.0, 0.5, 0.25])),
    ],
)
def test_schedules_keep_numbers_of_python(schedule):
    """Whatever kind of number a schedule was made with, it is hashed, written as JSON and read."""
    config = json.loads(json.dumps(gs.SGD(schedule).get_config()))
    again = gs.SGD.from_config(config)._store.rate.source
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert all(type(n) in (bool, int, float, str, list, type(None))
               for n in schedule.get_config().values())  # fmt: skip


@pytest.mark.parametrize("scale", [0.1, 2.0**15, 2.0**27, 2.0**30])
def test_the_first_scale_is_the_one_that_was_given(scale):
    """Small ones in decimal notation, large ones to the last digit."""
    assert gs.LossScaleOptimizer(gs.SGD(), scale).initial_scale == scale
    if scale >= 1:
        assert tf2.LossScaleOptimizer(gs.SGD(), initial_scale=scale).initial_scale == scale


# ── configurations ───────────────────────────────────────────────────────────────────────────


def test_decay_that_was_taken_away_stays_away():
    """An AdamW whose decay is off is described so, by itself and inside of a wrapper."""
    adamw = gs.AdamW()
    adamw.weight_decay = None
    assert gs.AdamW.from_config(adamw.get_config()).weight_decay == 0
    opt = gs.LossScaleOptimizer(gs.AdamW())
    opt.weight_decay = None
    again = gs.LossScaleOptimizer.from_config(opt.get_config())
    assert again.weight_decay == 0
    w = gs.Variable(1.0)
    again.apply([0.0], [w])
    assert float(w) == 1.0


class Steady(gs.FixedLossScale):
    """A fixed scale of a user's own."""


def test_a_fixed_scale_of_ones_own_is_described_as_such():
    """A subclass of `FixedLossScale` comes back as that subclass."""
    opt = gs.LossScaleOptimizer(gs.SGD(), rule=Steady(8.0))
    again = gs.LossScaleOptimizer.from_config(opt.get_config(), {"Steady": Steady})
    assert again.rule == Steady(8.0)


# ── the documents' older classes ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("start", ["skipped", "later"])
@pytest.mark.filterwarnings("ignore:Expected get_")
def test_averages_of_tf2_start_with_the_weights(start):
    """A first step that is skipped counts there; the averages then are not taken to be 0."""
    w = gs.Variable(1.0)
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5, use_ema=True, ema_momentum=0.75))
    if start == "later":
        opt.iterations = 5
    opt.apply_gradients([(INF if start == "skipped" else 0.0, w)])
    opt.finalize_variable_values([w])
    assert float(w) == 1.0
    opt.apply_gradients([(1.0, w)])
    opt.finalize_variable_values([w])
    assert float(w) == 0.75 * 1.0 + 0.25 * 0.5


def test_the_old_name_of_the_rate_compiles_nothing():
    """`opt.lr = x`, every step, keeps the program."""
    w, opt = gs.Variable(1.0), tf2.LossScaleOptimizer(gs.SGD(0.5))
    opt.minimize(lambda: w * 1.0, [w])
    program = opt._runner.program
    opt.lr = 0.25
    opt.minimize(lambda: w * 1.0, [w])
    assert opt._runner.program is program
    assert float(w) == 0.25


def test_what_tensorflow_wrote_is_read():
    """A configuration of TensorFlow 2.3, with a `decay` of 0; another decay is refused."""
    inner = {"name": "SGD", "learning_rate": 0.01, "decay": 0.0, "momentum": 0.5, "nesterov": False}
    scale = {"initial_loss_scale": 64.0, "increment_period": 2000, "multiplier": 2.0}
    config = {
        "optimizer": {"class_name": "SGD", "config": inner},
        "loss_scale": {"class_name": "DynamicLossScale", "config": scale},
    }
    opt = tf2.LossScaleOptimizer.from_config(config)
    assert (opt.inner_optimizer.momentum, opt.initial_scale) == (0.5, 64.0)
    inner["decay"] = 0.1
    with pytest.raises(ValueError, match=r"Expected an optimizer without decay; got 0\.1"):
        tf2.LossScaleOptimizer.from_config(config)


def test_options_that_were_set_later_are_described():
    """An option set on the wrapper of TensorFlow 2 acts, and is in its configuration."""
    opt = tf2.LossScaleOptimizer(gs.SGD(0.5, weight_decay=0.5))
    opt.clipnorm, opt.weight_decay = 1.0, None
    again = tf2.LossScaleOptimizer.from_config(opt.get_config())
    assert (again.clipnorm, again.weight_decay) == (1.0, None)


def test_a_live_scale_of_version_1_is_one_object():
    """The scale that was handed over moves with the optimizer, and starts where it was."""
    w, live = gs.Variable(1.0), v1.DynamicLossScale(16.0)
    live.update([INF])
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), live)
    assert float(opt.loss_scale) == 8.0
    opt.apply_gradients([(INF, w)])
    assert float(live()) == float(opt.loss_scale) == 4.0
    assert not any(v.trainable for v in [*live.variables, *opt.variables()])


def test_a_subclass_of_a_live_scale_decides():
    """What a user's subclass overrides is called."""

    class Mine(v1.DynamicLossScale):
        def update(self, grads):
            super().update(grads)
            return None, False

    w = gs.Variable(1.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), Mine(16.0))
    opt.apply_gradients([(1.0, w)])
    assert float(w) == 1.0


@pytest.mark.parametrize("step", [0, jnp.int32(0)])
def test_a_step_that_cannot_be_counted_is_not_taken(step):
    """`global_step` is asked before anything moves."""
    w = gs.Variable(1.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), "dynamic")
    with pytest.raises(TypeError, match=r"Expected a gainstage\.Variable for global_step"):
        opt.apply_gradients([(1.0, w)], global_step=step)
    assert float(w) == 1.0


def test_a_users_scale_does_not_move_for_gradients_that_do_not_fit():
    """Gradients are checked before a scale of one's own hears of them."""

    class Mine(v1.DynamicLossScale):
        pass

    w, live = gs.Variable([1.0, 2.0]), Mine(16.0)
    opt = v1.MixedPrecisionLossScaleOptimizer(v1.GradientDescentOptimizer(0.5), live)
    with pytest.raises(ValueError, match="Expected"):
        opt.apply_gradients([(np.array([INF]), w)])
    assert float(live()) == 16.0


def test_options_in_option_objects_are_given():
    """A clip option in an option object and another on the wrapper are told apart."""
    inner = dtensor.SGD(0.1, gradients_clip_option={"clipnorm": 1.0})
    with pytest.raises(ValueError, match="clipnorm on 'SGD'"):
        gs.LossScaleOptimizer(inner, clipvalue=0.5)
    with pytest.raises(TypeError, match="Expected a EMAOption for ema_option"):
        dtensor.SGD(ema_option={"momentum": 0.9})


# ── meshes and processes ─────────────────────────────────────────────────────────────────────


def test_grouped_parameters_on_a_mesh():
    """Inside of `jax.jit` parameters do not say that they lie on a mesh, where none are grouped."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    params = {"a": jnp.ones(8), "b": jnp.ones(8)}
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    tx = gs.to_optax(gs.SGD(0.5, momentum=0.5, group_small=True))
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert (updates["a"] == -0.5).all()


def test_facts_do_not_name_the_device_of_a_process():
    """An optimizer that is not built is the same on every process: it names no device."""
    assert "evice" not in json.dumps(agreement._facts(gs.SGD(0.1)))


def test_a_machine_that_calls_itself_loopback_is_found(monkeypatch):
    """Where a machine's own name is 127.0.1.1 the others get an address that they can reach."""
    monkeypatch.setattr(processes, "_ipv4", lambda host: "127.0.1.1")
    found = processes._reachable("node0")
    assert found.count(".") == 3
    assert found != "127.0.0.1"
    assert processes._reachable("localhost") == "127.0.1.1"  # whoever says so means it


def test_replicas_of_complex_arrays_are_compared():
    """Both parts of complex numbers are in the sums."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    z = jax.device_put(jnp.array([1 + 2j, 3]), NamedSharding(mesh, PartitionSpec()))
    assert distributed.check_replicas({"z": z})
    assert (agreement.hashes(z) != agreement.hashes(z.conj())).any()


# ── recorded runs ────────────────────────────────────────────────────────────────────────────


def recorded(n, **numbers):
    columns = {name: np.broadcast_to(np.asarray(x, float), n) for name, x in numbers.items()}
    return Run(np.arange(n), columns)


@pytest.mark.parametrize(
    "scale", [2.0**24, np.maximum(2.0 ** (15.0 - np.arange(300)), 2.0**-24)], ids=["fixed", "low"]
)
def test_a_run_without_one_applied_step_is_told(scale):
    """A report on a run of which nothing was applied says so, though it does not know the rule."""
    run = recorded(300, finite=0, loss=1, max_abs=0, grad_norm=INF, loss_scale=scale)
    assert any("the scale stayed at" in line for line in findings(run).advice)


def test_a_run_that_does_not_scale_is_left_alone():
    """A scale of 1 in every step is meant so; another that never moves may be a fixed one."""
    calm = {"finite": 1, "loss": 1, "max_abs": 2.0**-10, "grad_norm": 1}
    assert not findings(recorded(300, loss_scale=1, **calm)).advice
    (advice, *_) = findings(recorded(300, loss_scale=2, **calm)).advice
    assert "it has never been another. Take 2^24" in advice


def test_gradients_that_stay_nan_are_nan_though_the_scale_comes_back():
    """A rule that goes back to where it was has seen NaN at the lowest scale, too."""
    fell = 2.0 ** -np.concatenate([np.arange(13.0), np.zeros(7)])
    scale = np.concatenate([np.ones(40), fell, np.ones(40)])
    bad = np.concatenate([np.zeros(40), np.ones(20), np.zeros(40)]).astype(bool)
    run = recorded(100, finite=~bad, grad_norm=np.where(bad, NAN, 1), loss=1, loss_scale=scale)
    assert {name: mask.sum() for name, mask in why_skipped(run).items()} == {
        "overflow": 0, "NaN": 20, "bad loss": 0,
    }  # fmt: skip


def test_alarms_say_what_the_rule_can_do():
    """A fixed scale is told of its own argument, and bounds are powers of two."""
    told = []
    with Alarms(gs.FixedLossScale(2.0**17), on_alarm=told.append) as alarms:
        alarms.look_at(lambda x: (x.astype(jnp.float16) ** 2).sum(), jnp.ones(3))
        for n in range(300):
            alarms.write(n, finite=n % 5 != 4, loss_scale=2.0**17, grad_norm=1.0, max_abs=1e-6)
    said = {alarm.kind: alarm.message for alarm in told}
    assert "loss_scale_value=2^15" in said["boundary"]
    assert "take a lower loss_scale_value" in said["skips"]
    again = pickle.loads(pickle.dumps(told[0]))
    assert (type(again), again.kind, str(again)) == (Alarm, "boundary", str(told[0]))


def test_an_interrupt_loses_no_step(monkeypatch, tmp_path):
    """Who waits for the steps may be interrupted; the end of the `with` writes what was waiting."""
    path, real = tmp_path / "run.jsonl", jax.device_get

    def once(tree):
        monkeypatch.setattr(jax, "device_get", real)
        raise KeyboardInterrupt

    with JsonLines(path, every=2) as run:
        run.write(0, loss=1.0)
        monkeypatch.setattr(jax, "device_get", once)
        with pytest.raises(KeyboardInterrupt):
            run.write(1, loss=2.0)
    assert read_run(path).numbers["loss"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "text",
    ["to do\n", '{"lr": 0.1}', '{"lr": 0.1}\n', "<p>\n{% endblock %}", '{"step": 0}\n\n', "[]"],
)
def test_files_of_something_else_are_left_as_they_are(text, tmp_path):
    """A file that ends in anything but a step is no recording."""
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match="Expected a file of JSON objects"):
        JsonLines(path)
    assert path.read_text() == text


@pytest.mark.parametrize("rest", ["", "{", '{"st', '{"step": 1, "lo', '{"step": 1}'])
def test_recordings_are_gone_on_with(rest, tmp_path):
    """A line that a killed process has left unfinished is dropped, one that it finished is not."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n' + rest)
    with JsonLines(path) as run:
        run.write(2, loss=3.0)
    assert read_run(path).steps.tolist() == ([0, 1, 2] if rest.endswith("}") else [0, 2])


def test_a_number_called_as_a_report_is_refused(tmp_path):
    """A number called `tensors` would make the file unreadable: it is refused before."""
    with JsonLines(tmp_path / "run.jsonl") as run:
        run.write(0, loss=1.0)
        with pytest.raises(ValueError, match="Expected another name than that of a report"):
            run.write(1, tensors=5)
    assert read_run(tmp_path / "run.jsonl").steps.tolist() == [0]


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_an_output_that_is_there_is_not_touched_before_the_work(suffix, capsys):
    """Looking whether a file can be written removes neither links nor empty files."""
    from gainstage.__main__ import main

    folder = Path(tempfile.mkdtemp())
    (folder / "empty").touch()
    link = folder / f"link{suffix}"
    link.symlink_to(folder / "empty")
    with pytest.raises(SystemExit):
        main(["report", "", "--output", str(link)])
    assert "Expected the file of a run" in capsys.readouterr().err
    assert link.is_symlink()
    assert link.read_bytes() == b""

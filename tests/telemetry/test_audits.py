"""What a recording, its alarms, its report and its step files keep of audits."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.__main__ import main
from gainstage.diagnostics import Alarms, JsonLines, StepRecorder, alarms_in, read_run, read_step

X = np.random.default_rng(0).standard_normal((64, 8), np.float32)
ERRORS = "audit_loss_error", "audit_gradient_error", "audit_tensor_error"


def sign_of(g):
    return jnp.sign(g.astype(jnp.float16)).astype(jnp.float32)


@jax.custom_vjp
def signed(x, is_wrong):
    """The identity; where it is wrong, its backward pass in float16 returns the sign of the
    cotangent."""
    return x


signed.defvjp(
    lambda x, is_wrong: (x, is_wrong),
    lambda is_wrong, g: (jnp.where(is_wrong, sign_of(g) * 1e-3, g), None),
)


def loss_fn(params, x, is_wrong):
    hidden = signed(jnp.tanh(x @ params["first"]["kernel"]), is_wrong)
    return jnp.mean((hidden @ params["last"] - 1.0) ** 2)


def run_of(steps, wrong, *writers, recorder=None, every=2):
    """A run of which some steps are wrong, as its writers and its recorder get it; the audits."""
    params = {"first": {"kernel": jnp.full((8, 4), 0.1)}, "last": jnp.full((4, 1), 0.5)}
    state = gs.TrainState.create(params, optax.sgd(1e-3), telemetry=True)
    step, found = gs.train_step(gs.autocast(loss_fn), audit_every=every), []
    for n in range(steps):
        batch = X * (1 + n / 10), jnp.asarray(n in wrong)
        state, loss = step(state, *batch)
        found.append(step.audit)
        for writer in writers:
            writer.write(n, state.info, loss=loss, audit=step.audit)
        if recorder is not None:
            recorder.write(n, state.info, state.params, *batch, audit=step.audit)
    return found


pytestmark = pytest.mark.filterwarnings("ignore:Audit of step:UserWarning")


def test_a_recording_has_the_errors_and_the_tensor(tmp_path):
    """A file has three errors of each audit, whether it was ok, and the worst tensor's name."""
    path = tmp_path / "run.jsonl"
    with JsonLines(path, every=3) as log:
        found = run_of(7, (), log)
    run = read_run(path)
    audited = [n for n, audit in enumerate(found) if audit is not None]
    assert audited == [0, 1, 2, 4, 6]
    assert np.flatnonzero(run.has("audit_ok")).tolist() == audited
    for n in audited:
        known = found[n]
        wanted = known.loss_error, known.gradient_error, known.worst[1]
        assert tuple(run.get(name)[n] for name in ERRORS) == wanted
        assert run.audited[n] == known.worst[0]
    line = json.loads(path.read_text().splitlines()[1])
    assert line["audit_ok"] is True
    assert line["audit_tensor"] in ("first/kernel", "last")


def test_tensorboard_has_the_errors(tmp_path):
    """Errors are scalars as any other; the name, which is no number, is left out."""
    pytest.importorskip("tensorboardX")
    from gainstage.interop.tensorboard import TensorBoard

    with TensorBoard(tmp_path) as board:
        run_of(3, (), board)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    assert all(f"train/{name}".encode() in data for name in ERRORS)
    assert b"audit_tensor\x12" not in data


def test_an_alarm_rings_for_audits_past_their_bounds(tmp_path):
    """Three audits in a row, or one by much, ring once, with the tensor and the step."""
    path, rung = tmp_path / "run.jsonl", []
    with JsonLines(path) as log, Alarms(on_alarm=rung.append, every=1) as alarms:
        run_of(24, range(8, 24), log, alarms)
    (alarm,) = rung
    assert (alarm.kind, alarm.message.count("'first/kernel'")) == ("audit", 1)
    assert "in an audit of step 8 " in alarm.message
    assert "gs.keep_float32()" in alarm.message
    assert [a.message for a in alarms_in(read_run(path))] == [alarm.message]


def test_one_audit_past_a_bound_rings_no_alarm():
    """A single batch that is a little past a bound is no alarm, nor is a healthy run."""
    for wrong in ((), (4,)):
        rung = []
        with Alarms(on_alarm=rung.append, every=1) as alarms:
            found = run_of(12, wrong, alarms)
        assert [audit.ok for audit in found if audit is not None].count(False) == len(wrong)
        assert rung == []


def test_the_report_counts_audits_and_names_the_worst_tensor(tmp_path, capsys):
    """`gainstage report` shows how many audits there were, their largest errors, and the alarm."""
    pytest.importorskip("rich")
    path = tmp_path / "run.jsonl"
    with JsonLines(path, rule=gs.DynamicLossScale()) as log:
        found = run_of(24, range(8, 24), log)
    assert main(["report", str(path), "--output", str(tmp_path / "run.html")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    audits = [audit for audit in found if audit is not None]
    assert f"Audits, past a bound │ {len(audits)}, {sum(not a.ok for a in audits)} │" in out
    assert "(first/kernel, step" in out
    assert "in an audit of step 8" in out
    assert "audit_tensor_error" not in out
    assert "Error of all gradients in audits" in (tmp_path / "run.html").read_text()


def test_a_recorder_keeps_the_batch_of_an_audit_past_its_bounds(tmp_path):
    """The first step whose audit is past a bound is saved; the next ones are not, until one is ok
    again."""
    path = tmp_path / "bad.safetensors"
    run_of(20, (*range(6, 12), *range(16, 20)), recorder=StepRecorder(path, keep=3))
    files = [read_step(file) for file in sorted(tmp_path.glob("*.safetensors"))]
    assert sorted(file.step for file in files) == [6, 16]
    for file in files:
        assert file.finite
        np.testing.assert_array_equal(file.args[1], X * np.float32(1 + file.step / 10))
        assert not gs.audit(gs.autocast(loss_fn), *file.args, scale=file.scale).ok


def test_an_audit_without_a_reference_is_recorded_as_nan(tmp_path):
    """Data that are not finite in float32 either have no errors, ring no alarm, and save no step
    twice."""
    path = tmp_path / "run.jsonl"
    half = gs.autocast(loss_fn)
    params = {"first": {"kernel": jnp.full((8, 4), 0.1)}, "last": jnp.full((4, 1), 0.5)}
    audit = gs.audit(half, params, X * np.nan, False, scale=1.0)
    with JsonLines(path) as log:
        log.write(0, loss=1.0, audit=audit)
    run = read_run(path)
    assert all(math.isnan(run.get(name)[0]) for name in ERRORS)
    assert run.get("audit_ok")[0] == 0


def test_something_else_than_an_audit_is_refused(tmp_path):
    """A number, or all audits of a run, are no audit of a step."""
    with JsonLines(tmp_path / "run.jsonl") as log:
        for wrong in (0.5, gs.train_step(gs.autocast(loss_fn), audit_every=1).audits):
            with pytest.raises(TypeError, match=r"Expected step\.audit"):
                log.write(0, loss=1.0, audit=wrong)
        log.write(0, loss=1.0, audit=None)

"""Recorded runs with a planted fault: the alarms, live, and the report name it."""

import json

import pytest
from telemetry.planted_runs import GOLDENS, PLANTED

from gainstage.diagnostics import Alarms, JsonLines, read_run
from gainstage.runs.skip_causes import why_skipped
from gainstage.runs.summary import summary

XRAY = "gs.xray(loss_fn, state, *batch) of such a step names"


def golden(name):
    """A recorded run."""
    return read_run(GOLDENS / f"run_{name}.jsonl")


def live(run):
    """The alarms that ring while the run goes on: nothing after a step is known to them."""
    found = []
    with Alarms(run.rule, on_alarm=found.append, every=1) as alarms:
        for place, step in enumerate(run.steps):
            record = {name: column[place].item() for name, column in run.numbers.items()}
            alarms.write(step.item(), **record)
    return [(alarm.kind, alarm.step, alarm.message) for alarm in found]


def causes(run):
    """How many steps were skipped for each cause."""
    return {name: int(mask.sum()) for name, mask in why_skipped(run).items() if mask.any()}


def test_an_overflow_in_the_backward_pass_is_called_one():
    """NaN gradients while the scale falls are probably an overflow; that they were finite at a
    lower scale settles it. Nobody is sent to the data, and the rule in use is not advised."""
    run = golden("backward_overflow")
    ((kind, step, message),) = live(run)
    assert (kind, step) == ("overflow", 57)
    assert message.startswith(
        "8 steps in a row were skipped because gradients were NaN, at scales from 2^15 to 2^8: "
        "probably an overflow in the backward pass, for the loss was finite. The scale still falls"
    )
    assert XRAY in message
    assert causes(run) == {"overflow": 10}
    (advice, _) = summary(run).advice  # and how to keep a step
    assert advice.startswith(
        "10 steps in a row were skipped because gradients were NaN, at scales from 2^15 to 2^6, "
        "and finite again at 2^5: an overflow in the backward pass, for the loss was finite."
    )
    assert XRAY in advice


def test_a_rule_that_is_not_given_the_loss_says_so():
    """`AdaptiveLossScale` without `value=` is told to be given the loss, not to be used; the report
    calls the steps what its advice calls them."""
    run = golden("loss_not_passed")
    ((kind, step, message),) = live(run)
    assert (kind, step) == ("loss", 23)
    assert "is not given the loss, so it cannot tell bad data from an overflow" in message
    assert "Pass it: update(..., value=loss)" in message
    assert causes(run) == {"NaN": 68}
    (advice, _) = summary(run).advice  # and how to keep a step
    assert advice.startswith("34 steps in a row were skipped because gradients were NaN, at")
    assert "update(..., value=loss)" in advice
    assert "finite again at 2^15, so it was not the scale: probably bad data" in advice
    assert "loss_scale=" not in advice


def test_a_loss_that_is_recorded_but_not_passed_is_noticed_at_once():
    """A scale that falls after a loss of NaN shows that `AdaptiveLossScale` is not given it."""
    run = golden("loss_not_passed")
    run.numbers["loss"] = run.get("grad_norm") * 0 + 1
    kinds = [(kind, step) for kind, step, _ in live(run)]
    assert kinds == [("loss", 17), ("data", 23)]
    assert causes(run) == {"bad loss": 68}
    advice = summary(run).advice
    assert "after a loss that was not finite" in advice[0]
    assert "not finite before any scaling" in advice[1]
    assert not any("loss_scale=" in sentence for sentence in advice)


def test_what_overflows_inside_of_the_network_bounds_what_is_advised():
    """A gradient that is far below the limit does not raise the advised scale above one that
    overflowed; the bare array has a name."""
    run = golden("overflow_inside")
    assert live(run) == []
    assert causes(run) == {"overflow": 7}
    found = summary(run)
    assert found.advice == []
    assert [row[0] for row in found.overflows.rows] == ["params"]
    assert run.get("loss_scale")[~run.skipped].max() == 2.0**8


def test_planted_runs_suggest_no_scale_that_overflowed(tmp_path):
    """Trained again, the run of a bare array suggests the scale that was finite."""
    report = PLANTED["overflow_inside"](tmp_path / "run.jsonl")
    assert report.underflow.suggested_scale == 2.0**8
    assert "(2^8 suggested, as 2^9 overflowed)" in str(report)
    assert "params: inf in 7 of 7 skipped steps, steps 0 to 6" in str(report)


@pytest.mark.parametrize("name", PLANTED)
def test_golden_runs_say_what_they_were_made_with(name):
    """The first line of each recording has rule, dtypes and versions, and the page shows them."""
    run = golden(name)
    first = json.loads((GOLDENS / f"run_{name}.jsonl").read_text().splitlines()[0])
    assert first == {"step": 0, "run": run.made}
    assert set(run.made) == {"rule", "dtypes", "versions"}
    for needed in ("jinja2", "matplotlib"):
        pytest.importorskip(needed)
    from gainstage.runs.report import page

    shown = page(run, summary(run), name)
    assert run.made["rule"] in shown
    assert "float32" in shown
    assert f"jax {run.made['versions']['jax']}" in shown
    assert summary(run).headline["Rule"] == run.made["rule"]


def test_without_the_rule_nothing_is_recommended(tmp_path):
    """A recording that does not say its rule is read too, and its report does not recommend what
    may be in use."""
    for name in PLANTED:
        lines = (GOLDENS / f"run_{name}.jsonl").read_text().splitlines()[1:]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        run = read_run(path)
        assert (run.rule, run.made) == (None, {})
        assert not any("AdaptiveLossScale" in sentence for sentence in summary(run).advice)
        with JsonLines(path) as more:
            more.write(len(run.steps), finite=True, loss_scale=4.0)
        assert set(read_run(path).made) == {"versions"}

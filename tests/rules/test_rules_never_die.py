"""Every state of a rule: a slice of `studies/rules_never_die.py`, which searches all rules."""

import dataclasses
import importlib
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

import gainstage as gs

for needed in ("rich",):
    pytest.importorskip(needed)

from studies import rules_machines as machines
from studies import rules_never_die as study
from studies.rules_invariants import broken_by
from studies.rules_search import Search, in_words

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "studies" / "results" / "rules" / "never_die.json").read_text())


def in_loop(rule=machines.USUAL, setting="usual", **how):
    """A rule in an optax loop, under each kind of batch."""
    row = f"`{type(rule).__name__}`"
    return machines.in_optax_loop(rule, machines.given_to(rule), row, setting, **how)


def broken(machine):
    """What breaks, and by which path."""
    found = broken_by(Search(machine))
    return {name: in_words(path) for name, path in found.items()}


def a_few():
    """A slice of all machines: of each kind of step one, with few states."""
    yield in_loop(machines.FIXED)
    yield in_loop()
    yield in_loop(machines.PATIENT, "hysteresis 2")
    yield in_loop(retries=machines.RETRIES)
    yield in_loop(dataclasses.replace(machines.ADAPTIVE, initial_loss_scale=4.0, max_scale=8.0))
    yield machines.optimizer(machines.USUAL, "`DynamicLossScale`", "", window=2, pure=True)


def test_no_reachable_state_is_dead():
    """In a slice of all machines nothing breaks but what the study knows and its page says."""
    results = study.examined(a_few())
    assert sum(row["states"] for row in results["rows"].values()) > 10_000
    assert study.new_breaks(results) == []


def test_the_search_finds_every_state():
    """From 2**3, scales in 13 powers of two times three counts are 39 states; each step counts."""
    search = Search(in_loop())
    assert sorted(set(search.scales)) == [2.0**n for n in range(-4, 9)]
    assert len(search) == 39
    assert search.changed[:, :2].all()
    assert not search.changed[:, 2].any()
    assert in_words(search.path(len(search) - 1))


@dataclasses.dataclass(frozen=True)
class NoMinimum(gs.DynamicLossScale):
    def update(self, state, finite, **measured):
        new = super().update(state, finite, **measured)
        return new._replace(scale=jnp.where(finite, new.scale, state.scale / 2))


@dataclasses.dataclass(frozen=True)
class ForgetsToReset(gs.DynamicLossScale):
    def update(self, state, finite, **measured):
        new = super().update(state, finite, **measured)
        count = jnp.minimum(state.good_steps + 1, self.increment_period)
        return new._replace(good_steps=jnp.where(finite, count, 0))


def take_the_smallest(rule, state, finite, **measured):
    """In place of `advance`: after a scale that no loss can have comes the smallest one."""
    new = rule.update(state, finite, **measured)
    is_scale = (state.scale > 0) & jnp.isfinite(state.scale)
    return new._replace(scale=jnp.where(is_scale, new.scale, rule.min_scale))


def mutant(kind):
    """A broken rule with the settings of the usual one."""
    return in_loop(kind(8.0, 3, **machines.SMALL))


def test_a_rule_without_a_minimum_is_found():
    """A scale that falls below its minimum breaks the bounds, after eight overflows."""
    assert broken(mutant(NoMinimum))["bounds"] == "8 x overflow"


def test_a_forgotten_reset_is_found():
    """A count that growth does not reset lets the scale grow each step, and loses more batches."""
    assert "overflow above" in broken(mutant(ForgetsToReset))["few lost"]


def test_a_bad_scale_that_becomes_the_smallest_is_found(monkeypatch):
    """A loaded NaN that becomes the smallest scale, not the first one, is no recovery."""
    monkeypatch.setattr("gainstage._scaling.scaled_step.advance", take_the_smallest)
    assert "load a scale of NaN" in broken(mutant(gs.DynamicLossScale))["recovers"]


def retry_without_limits(monkeypatch):
    """Retries as they were: whatever the loss is, each try lowers the scale for good."""
    module = importlib.import_module("gainstage.transforms.step")

    def may_help(applied, loss, before, after, retries):
        return ~applied & (before != after)

    monkeypatch.setattr(module, "may_help", may_help)
    monkeypatch.setattr(module, "with_first_scale_if_skipped", lambda last, first: last)


def test_a_retry_that_lowers_the_scale_each_time_is_found(monkeypatch):
    """With NaN in the data such retries lower the scale by more than one factor."""
    retry_without_limits(monkeypatch)
    assert broken(in_loop(retries=4))["bad data"] == "NaN data"


def test_the_command_fails_if_a_rule_breaks(tmp_path, monkeypatch, capsys):
    """It prints the table, says what is new, and its exit status is not 0."""
    monkeypatch.setattr(study, "machines", lambda: [mutant(NoMinimum)])
    monkeypatch.setattr(study, "installed", list)
    with pytest.raises(SystemExit, match="breaks 'bounds': 8 x overflow") as stopped:
        study.main([f"--output={tmp_path / 'x.json'}", f"--page={tmp_path / 'page.md'}"])
    assert stopped.value.code not in (None, 0)
    assert "| bounds | 8 x overflow |" in capsys.readouterr().out


def test_the_page_shows_the_results():
    """The table in the docs is that of the results, in which nothing new breaks."""
    text = (ROOT / "docs" / "evidence" / "faults.md").read_text()
    table = study.markdown(RESULTS)
    assert f"<!-- rules -->\n\n{table}\n\n<!-- end of rules -->" in text
    assert study.failures(RESULTS) == []


@pytest.mark.slow
def test_every_state_of_every_rule(tmp_path):
    """All of them, as the command of the docs searches them."""
    study.main([f"--output={tmp_path / 'x.json'}", f"--page={tmp_path / 'page.md'}"])

"""Injected faults: a slice of `studies/faults_never_reach_a_weight.py`, which tries them all."""

import json
from pathlib import Path

import pytest

from gainstage._scaling import scaled_step
from gainstage._variables.bridge import select

for needed in ("rich", "sklearn"):
    pytest.importorskip(needed)

from studies import faults_never_reach_a_weight as faults
from studies import files_survive_mutations as files

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]

SLICE = [
    ("SGD", "float16", "plain", "DynamicLossScale(min_scale=2**-24)"),
    ("Adam", "float16", "accumulation", "AdaptiveLossScale()"),
    ("Adam", "bfloat16", "ZeRO", "DynamicLossScale(min_scale=2**-24)"),
    ("SGD", "bfloat16", "EMA", "AdaptiveLossScale()"),
    ("Adam", "float32", "clipping", "DynamicLossScale()"),
]
MARKS = [[], [], [pytest.mark.thorough], [pytest.mark.slow], [pytest.mark.slow]]
QUICK = [
    pytest.param(names, id="-".join(names), marks=marks)
    for names, marks in zip(SLICE, MARKS, strict=True)
]
REPEATED = {"inf for 10 steps", "NaN data for 45 steps", "NaN data every 10 steps"}


@pytest.mark.parametrize("names", QUICK)
def test_a_fault_reaches_nothing_and_is_got_over(names):
    """Whatever the fault, the step changes the scale alone, and the run ends as without it."""
    training = faults.Training(faults.Configuration(*names))
    single = list(faults.single_faults(training))
    some = [single[i] for i in range(0, len(single), 4)]
    if names[2] != "ZeRO" and names != SLICE[0]:
        some += [fault for fault in faults.repeated_faults() if fault.row in REPEATED]
    clean, outcomes = training.outcomes(some)
    assert clean > 80
    assert len(outcomes) == len(some) >= 7
    assert [outcome for outcome in outcomes if not outcome.survived] == []


def test_the_measured_scale_is_got_back_after_a_storm():
    """The adaptive rule gets over gradients that are inf for 45 steps."""
    names = ("Adam", "float16", "plain", "AdaptiveLossScale()")
    training = faults.Training(faults.Configuration(*names))
    storm = [fault for fault in faults.repeated_faults() if fault.row == "inf for 45 steps"]
    _, (outcome,) = training.outcomes(storm)
    assert outcome.survived


def lets_everything_in(applies, update, state):
    return update(state)


def changes_what_it_skips(applies, update, state):
    result, state = select(applies, update, state)
    first, *others = state.weights
    return result, state._replace(weights=[first + 2.0**-6, *others])


@pytest.mark.parametrize("broken", [lets_everything_in, changes_what_it_skips])
def test_a_step_that_is_broken_does_not_survive(broken, monkeypatch):
    """The checks see a step that takes bad gradients, and one that changes what it skips."""
    monkeypatch.setattr(scaled_step, "select", broken)
    training = faults.Training(faults.Configuration(*SLICE[0]))
    _, outcomes = training.outcomes(list(faults.single_faults(training))[::6])
    assert outcomes
    assert not any(outcome.safe for outcome in outcomes)


@pytest.mark.parametrize("kind", files.KINDS)
def test_a_changed_file_is_read_as_it_says_or_refused(kind, tmp_path):
    """A hundred damaged and hostile files of each kind: no other error, nothing slow, no content
    that the checksums deny."""
    files.write_good_files(tmp_path)
    found = files.batch(str(tmp_path), kind, 1000, 100, str(tmp_path / "note"))
    assert sum(found.values()) == 100
    assert files.failures({kind: found}) == []


def test_the_page_shows_what_came_of_a_hundred_thousand_files():
    """The table of files is that of the results, and nothing in them has failed."""
    results = json.loads((ROOT / "studies" / "results" / "faults" / "files.json").read_text())
    assert files.markdown(results) in (ROOT / "docs" / "evidence" / "faults.md").read_text()
    assert files.failures(results["kinds"]) == []
    assert sum(sum(counts.values()) for counts in results["kinds"].values()) == 100_000


def test_the_page_shows_the_results():
    """The tables in the docs are those of the results, which cover every fault and option."""
    results = json.loads((ROOT / "studies" / "results" / "faults" / "cpu.json").read_text())
    text = (ROOT / "docs" / "evidence" / "faults.md").read_text()
    assert faults.markdown(results) in text
    assert_complete(results)


def assert_complete(results):
    """Every fault was tried with every optimizer, dtype, option and rule; none reached a weight."""
    tried = {(row, option): 0 for row, option, *_ in results["cells"]}
    for row, option, _, _, count, safe, *_ in results["cells"]:
        tried[row, option] += count
        assert safe == count
    alone = {"one device", "one process"}
    for row in faults.rows_in_order():
        for option in faults.OPTIONS:
            assert tried.get((row, option), 0) > 0 or (row in alone and option != "ZeRO")
    found = {tuple(cell[1:4]) for cell in results["cells"]}
    assert found == {
        configuration[2:3] + configuration[1:2] + configuration[3:]
        for configuration in faults.configurations()
    }


@pytest.mark.slow
def test_every_fault_in_every_configuration(tmp_path):
    """All of them, as the command of the docs tries them: none reaches a weight, and what is not a
    storm under a rule that lets the scale fall too far is got over."""
    output = tmp_path / "found.json"
    faults.main([f"--output={output}", f"--page={tmp_path / 'page.md'}"])
    results = json.loads(output.read_text())
    assert_complete(results)
    for row, _, dtype, rule, tried, _, survived, *_ in results["cells"]:
        copes = "min_scale" not in rule
        if dtype == "bfloat16" or copes or " step" not in row:
            assert survived == tried, (row, dtype, rule)

"""The description of a run in its recording: what it was made with."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gainstage as gs
from gainstage.diagnostics import JsonLines, read_run
from gainstage.runs.header import code_of, rule_of
from gainstage.runs.summary import headline

RULES = [
    gs.AdaptiveLossScale(),
    gs.AdaptiveLossScale(2.0**20, margin=2.0),
    gs.DynamicLossScale(),
    gs.DynamicLossScale(3.0, 7, hysteresis=2, min_scale=2.0**-3),
    gs.FixedLossScale(1.0),
    gs.FixedLossScale(2.0**-5),
]


@pytest.mark.parametrize("rule", RULES, ids=code_of)
def test_a_rule_comes_back_from_a_recording(rule, tmp_path):
    """The rule that is given to `JsonLines` is the one that `read_run` returns."""
    with JsonLines(tmp_path / "run.jsonl", rule=rule) as run:
        run.write(0, loss=1.0)
    back = read_run(tmp_path / "run.jsonl")
    assert back.rule == rule
    assert eval(f"gs.{back.made['rule']}") == rule
    assert headline(back)["Rule"] == code_of(rule)


def test_dtypes_and_versions_are_written(tmp_path):
    """Arrays and variables are counted by dtype; the versions are those that are installed."""
    params = {"a": jnp.ones(2, jnp.float16), "b": [gs.optimizers.Variable(1.0), np.ones(3)], "c": 3}
    with JsonLines(tmp_path / "run.jsonl", params=params) as run:
        run.write(0, loss=1.0)
    back = read_run(tmp_path / "run.jsonl")
    assert back.made["dtypes"] == {"float16": 1, "float32": 1, "float64": 1}
    assert back.made["versions"]["gainstage"] == gs.__version__
    assert headline(back)["Parameters"] == "1 float16, 1 float32, 1 float64"
    with pytest.raises(TypeError, match=r"None, or a rule for rule"):
        JsonLines(tmp_path / "other.jsonl", rule="adaptive")


def test_a_restart_says_it_again(tmp_path):
    """The first record of each start has a description, and the last one counts."""
    path = tmp_path / "run.jsonl"
    for start, rule in enumerate((gs.DynamicLossScale(), gs.AdaptiveLossScale())):
        with JsonLines(path, every=1, rule=rule) as run:
            for step in range(2 * start, 2 * start + 3):
                run.write(step, loss=float(start))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], "run" in line) for line in lines if "run" in line] == [
        (0, True),
        (2, True),
    ]
    back = read_run(path)
    assert back.rule == gs.AdaptiveLossScale()
    assert back.get("loss").tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    with JsonLines(path) as run:  # without a rule: what an earlier start said of it is gone
        run.write(5, loss=2.0)
    assert read_run(path).rule is None
    assert set(read_run(path).made) == {"versions"}


def test_a_recording_without_that_line_is_read(tmp_path):
    """Files may have no description, and a number of its name."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0, "run": 7}\n')
    back = read_run(path)
    assert (back.rule, dict(back.made), back.get("run").tolist()) == (None, {}, [7.0])


def test_nothing_is_written_before_the_first_step(tmp_path):
    """A run that ends before its first step leaves an empty file."""
    JsonLines(tmp_path / "run.jsonl", rule=gs.DynamicLossScale()).close()
    assert (tmp_path / "run.jsonl").read_text() == ""


def test_the_first_line_has_the_numbers_of_the_first_step(tmp_path):
    """The description is a part of the first record, so each line has its numbers."""
    with JsonLines(tmp_path / "run.jsonl", rule=gs.DynamicLossScale()) as run:
        run.write(3, loss=0.5)
    (line,) = (tmp_path / "run.jsonl").read_text().splitlines()
    first = json.loads(line)
    assert (first["step"], first["loss"]) == (3, 0.5)
    assert first["run"]["rule"] == "DynamicLossScale()"
    assert list(read_run(tmp_path / "run.jsonl").get("loss")) == [0.5]


def test_a_description_in_a_line_of_its_own_is_read(tmp_path):
    """Version 0.1 wrote it before the first step."""
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"step": 0, "run": {"rule": "DynamicLossScale()"}}\n{"step": 0, "loss": 1.0}\n'
    )
    back = read_run(path)
    assert (back.rule, back.steps.tolist()) == (gs.DynamicLossScale(), [0])
    assert back.has("loss").tolist() == [True]


@pytest.mark.parametrize(
    "run", ["{}", '{"dtypes": 3}', '{"dtypes": {"a": "b"}}', '{"versions": []}', '{"rule": 7}']
)
def test_a_damaged_line_loses_only_itself(run, tmp_path):
    """What is of other types in the first line is left out, and the steps are read."""
    (tmp_path / "run.jsonl").write_text(f'{{"step": 0, "run": {run}}}\n{{"step": 0, "a": 1}}\n')
    back = read_run(tmp_path / "run.jsonl")
    assert (back.rule, dict(back.made), back.get("a").tolist()) == (None, {}, [1.0])
    assert "Rule" not in headline(back)


class Mine(gs.LossScale):
    """A rule of the user, and no dataclass."""

    def init(self):
        return gs.typing.ScaleState(jnp.float32(8))

    def update(self, state, finite):
        return state


REFUSED = [
    "Mine()", "__import__('os').system('true')", "FixedLossScale(2.0**99999999)", "(" * 9000,
    "FixedLossScale(9**9**9**9)", "FixedLossScale(*[1])", "DynamicLossScale(**{})", "\0", "f(x)",
    "FixedLossScale(True)", "FixedLossScale('a')", "DynamicLossScale(typo=1)",
]  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text() | st.sampled_from(REFUSED))
def test_the_code_of_a_rule_is_read_and_never_run(code):
    """Whatever a file calls its rule, it is one of Gainstage's own, or none."""
    assert code_of(Mine()) == "Mine()"
    rule = rule_of(code)
    assert rule is None or (code not in REFUSED and type(rule) in map(type, RULES))

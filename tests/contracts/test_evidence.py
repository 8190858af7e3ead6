"""The evidence for the rule that measures: its results, and the page that shows them."""

import json
from pathlib import Path

import pytest

for needed in ("rich", "sklearn"):
    pytest.importorskip(needed)

from studies import adaptive_scale_loses_fewer_steps as evidence

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "studies" / "results" / "rules" / "float16.json").read_text())


def test_the_page_shows_the_results():
    """The table in the docs is that of the results."""
    text = (ROOT / "docs" / "evidence" / "adaptive-scale.md").read_text()
    assert f"<!-- results -->\n\n{evidence.markdown(RESULTS)}\n\n<!-- end of results -->" in text


def test_a_case_of_it_can_be_seen_again():
    """A start that is 2**10 too high costs the rule one step, and the other ten."""
    task = evidence.digits_task()
    lost = {}
    for name, make in evidence.RULES.items():
        trainer = evidence.Trainer(task, make())
        top = evidence.highest(trainer, 0)
        lost[name] = trainer.run(0, 30, scale=top * 2.0**10)["skipped"]
    assert lost["adaptive"] == 1
    assert lost["dynamic"] >= 10

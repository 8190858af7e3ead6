"""The times of saving on the page of checkpoints are those of the results."""

import json
from pathlib import Path

import pytest

from benchmarks import saving_a_state

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_times_that_were_measured():
    """The table is made of the results file, which has both sizes and all ways."""
    results = json.loads((ROOT / "benchmarks" / "results" / "saving" / "cpu.json").read_text())
    assert saving_a_state.markdown(results) in (ROOT / "docs" / "checkpoints.md").read_text()
    assert results["sizes"].keys() == saving_a_state.SIZES.keys()
    assert all([*table] == [*saving_a_state.NAMES[1:]] for table in results["sizes"].values())

"""The page on what a precision costs says what its results say."""

import json
from pathlib import Path

import pytest

from studies import price_page as page

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "studies" / "results" / "price_predicts_training.json").read_text())
PROGRAMS = json.loads((ROOT / "benchmarks" / "results" / "float8" / "programs.json").read_text())


def test_the_page_has_the_results():
    """Between the marks is the table of the results, and what it says."""
    text = (ROOT / "docs" / "evidence" / page.PAGE).read_text()
    assert (
        f"<!-- results -->\n\n{page.markdown(RESULTS, PROGRAMS)}\n\n<!-- end of results -->" in text
    )


def test_a_precision_far_out_of_the_budget_loses_by_it():
    """Year numbers in bfloat16 are out of the budget and double the loss; float16 is within."""
    found = {(p.model, p.precision): p for p in page.points(RESULTS["models"])}
    years = "features with an offset (NNX)"
    assert found[years, "bfloat16"].parts[0] > 3
    assert found[years, "bfloat16"].penalty > 0.9
    assert found[years, "float16"].parts[0] < 0.1


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 1, 2, 2], [1, 2, 1, 2], 0.0),
    ],
)
def test_the_rank_correlation_is_that_of_ranks(a, b, expected):
    """Equal numbers share a rank."""
    assert page.spearman(a, b) == pytest.approx(expected)

"""Ordinary functions under autocast: a slice of the study, and its page."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from studies import any_function as study
from studies import any_function_page as page
from studies.functions import FUNCTIONS, corpus

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "studies" / "results" / "autocast" / "any_function.json").read_text())
KNOWN = {name for name, _ in page.KNOWN}
SLICE = [
    pytest.param(name, marks=[] if place % 32 == 0 or name in KNOWN else pytest.mark.thorough)
    for place, name in enumerate(corpus())
    if place % 8 == 0 or name in KNOWN
]


@pytest.mark.parametrize("name", SLICE)
def test_an_ordinary_function_has_its_gradient_or_says_why_not(name):
    """An ordinary function has the gradient of float32 under autocast, or says why not; the known
    cases that do not are listed, and the list has no others."""
    row = study.examined(FUNCTIONS[name], arms=("autocast",))
    failed = {case: seen["autocast"] for case, seen in row["cases"].items() if "autocast" in seen}
    seen = {(name, case) for _, case in page.failures({name: row})}
    assert seen == {known for known in page.KNOWN if known[0] == name}, failed


def test_all_failures_have_a_cause():
    """The list of known cases is that of the results, so none is in the table without a cause."""
    assert set(page.failures(RESULTS["functions"])) == set(page.KNOWN)


def test_the_page_shows_the_results():
    """The table in the docs is that of the results, and they are of the whole corpus."""
    text = (ROOT / "docs" / "evidence" / page.PAGE).read_text()
    shown = page.markdown(RESULTS["functions"])
    assert f"<!-- {page.MARK} -->\n\n{shown}\n\n<!-- end of {page.MARK} -->" in text
    assert set(RESULTS["functions"]) == set(FUNCTIONS)


def test_most_functions_have_products_and_a_twin():
    """The corpus has about three hundred functions, and most can be compared with torch."""
    rows = corpus().values()
    assert len(rows) > 300
    assert sum(row.has_twin for row in rows) > 180

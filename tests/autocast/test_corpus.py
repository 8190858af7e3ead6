"""Ordinary functions under autocast: a slice of the study, and its page."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from gainstage.precision.policy import FOLLOWERS, WIDE_PRODUCTS
from studies import any_function as study
from studies import any_function_page as page
from studies import what_each_rule_is_for as rules
from studies.functions import FUNCTIONS, corpus
from studies.functions.reports import REPORTS
from studies.functions.twins import WIDE, is_narrow, products, twin_of

ROOT = Path(__file__).parents[2]
RULES = json.loads((ROOT / "studies" / "results" / "autocast" / "rules.json").read_text())
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


def test_few_cases_are_wrong():
    """Of the cases of the corpus at most 20 are wrong, and at most 5 of them in silence."""
    counts = rules.totals(RULES["functions"])
    assert set(RULES["functions"]) == set(FUNCTIONS)
    assert sum(counts.values()) == 1184
    assert counts["silent"] <= 5
    assert counts["silent"] + counts["loud"] <= 20


@pytest.mark.parametrize("name", list(corpus())[7::85])
def test_the_classes_of_cases_are_those_of_the_results(name):
    """A function of the study has the cases that the results have."""
    assert rules.classes(FUNCTIONS[name])[""] == RULES["functions"][name][""]


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_reports_of_others_have_the_gradients_of_the_results(report):
    """The essence of a public report is right, or wrong as the page says."""
    assert rules.classes(report)[""] == RULES["reports"][report.name][""]


def test_a_twin_has_wide_products():
    """The wide twin of a function has its products, with sides of 64 or more."""
    names = [name for name in RULES["twins"] if name in list(corpus())[::20]]
    for name in names:
        assert is_narrow(FUNCTIONS[name])
        wide = products(twin_of(FUNCTIONS[name]))
        assert len(wide) >= 1
        assert all(min(sides) >= WIDE for sides in wide)
    assert names


def test_the_page_of_rules_shows_the_results():
    """Its tables are those of the results, and of all rows and needs."""
    text = (ROOT / "docs" / "evidence" / rules.PAGE).read_text()
    shown = f"{rules.policies(RULES)}\n\n{rules.table(RULES)}"
    assert f"<!-- {rules.MARK} -->\n\n{shown}\n\n<!-- end of {rules.MARK} -->" in text


@pytest.mark.parametrize("row", FOLLOWERS, ids=lambda row: row.name)
def test_what_follows_a_product_saves_bytes(row):
    """Each row of the list says what it saves, as it was measured, and saves 0.5 % or more."""
    assert row.saves == rules.saved(RULES["models"], row.name)
    assert float(row.saves.partition("%")[0]) >= 0.5


def test_rules_of_cost_cost_no_bytes():
    """Large models read and write at most 1 % more than before cost was asked first, and their
    temporaries are no larger either."""
    before = RULES[rules.BEFORE]
    assert len(before) == len(RULES["models"]) == 15
    for name, sizes in before.items():
        pairs = zip(RULES["models"][name][""], sizes, strict=True)
        assert all(now <= 1.01 * then for now, then in pairs)


def test_no_two_rows_have_the_same_name():
    """The names of rows and needs are those by which the study switches them off."""
    assert len(set(rules.SWITCHES)) == len(rules.SWITCHES) > len(WIDE_PRODUCTS)


def test_most_functions_have_products_and_a_twin():
    """The corpus has about three hundred functions, and most can be compared with torch."""
    rows = corpus().values()
    assert len(rows) > 300
    assert sum(row.has_twin for row in rows) > 180

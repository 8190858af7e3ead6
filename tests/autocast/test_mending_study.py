"""Faults that are planted and mended: a slice of the study, and its page."""

import functools
import json
from pathlib import Path

import pytest

for needed in ("equinox", "flax", "matplotlib", "rich"):
    pytest.importorskip(needed)

from studies import a_run_mends_itself as study
from studies import mending_page as page
from studies.mending_planted import FAULTS, in_experts

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "studies" / "results" / "mending.json").read_text())
HOST = "mixture of experts"
SPOILED = [
    ("large operands", "float16"),
    ("sums by a product", "float16"),
    ("an offset of the weights", "bfloat16"),
    ("a large residual", "bfloat16"),
]


@functools.cache
def mended(fault, dtype):
    """A fault in a small model, what its mending found, and its plan."""
    return study.mended_fault(fault, HOST, dtype)


@pytest.mark.parametrize(("fault", "dtype"), SPOILED)
def test_a_line_that_spoils_a_model_is_mended_at_the_first_audit(fault, dtype):
    """A fault on one line is mended at the first audit, with at most one row of another line."""
    found = mended(fault, dtype)
    assert found["off"]
    assert found["when"] == 0
    assert found["rows"]
    assert len(found["other"]) <= page.ONE_MORE
    assert found["left"] > 0.25


@pytest.mark.parametrize(("fault", "dtype"), SPOILED[1:3])
def test_what_one_batch_mends_is_nearer_to_float32_on_others(fault, dtype):
    """What a batch has mended is nearer to float32 than the default rules on other batches too."""
    run = study.run_of(in_experts(FAULTS[fault]), dtype, 1)
    found = study.on_other_batches(run, mended(fault, dtype)["plan"], 0)
    assert page.nearer(found) >= page.NEARER
    assert page.beyond(found) <= page.MAY_BE_FURTHER


def test_all_that_was_mended_is_nearer_to_float32_on_others():
    """Each report and each fault that was mended is nearer to float32 on at least 18 of 20 batches
    that it has not seen, and on none further by more than a quarter of the bound."""
    reports = [name for name, row in RESULTS["reports"].items() if page.PRICES not in name]
    faults = [name for name, row in page.off(RESULTS).items() if row["plan"]]
    assert len(RESULTS["batches"]) == len(reports) + len(faults)
    for name, row in RESULTS["batches"].items():
        assert len(row["errors"]) == study.OTHERS, name
        assert page.nearer(row) >= page.NEARER, name
        assert page.beyond(row) <= page.MAY_BE_FURTHER, name


@pytest.mark.parametrize("name", page.TABLES)
def test_the_page_shows_the_results(name):
    """The tables in the docs are those of the results."""
    text = (ROOT / "docs" / "evidence" / page.PAGE).read_text()
    assert f"<!-- {name} -->\n\n{page.TABLES[name](RESULTS)}\n\n<!-- end of {name} -->" in text


def test_what_users_have_reported_trains_as_in_float32():
    """Each report ends within 1 % of the true loss of float32, the years on average within 3 %, and
    prices in Keras within 5 %."""
    ends = page.ends(RESULTS)
    assert abs(ends["prefix sums"]["reported"]) <= 0.01
    assert abs(ends["finite differences"]["reported"]) <= 0.03
    for name in ("prefix sums", "finite differences", "quiet audio"):
        assert abs(ends[name]["true"]) <= 0.01, name
    assert abs(ends[page.YEARS]["true"]) <= 0.03
    assert max(map(abs, ends[page.PRICES].values())) <= 0.05


def test_healthy_models_are_left_alone():
    """No model of the study without a fault was mended or told of, and its step is the same."""
    for name, row in RESULTS["models"].items():
        assert (row["when"], row["told"], row["same program"]) == ([], [], True), name


def test_all_planted_faults_were_mended():
    """Each of twenty and more faults was mended, with at most one row of another line."""
    spoiled = page.off(RESULTS)
    assert len(spoiled) >= 20
    for name, row in spoiled.items():
        assert row["when"] is not None, name
        assert len(row["other"]) <= page.ONE_MORE, name

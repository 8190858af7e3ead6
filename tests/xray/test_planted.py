"""Faults planted in models: a slice of the benchmark of the X-ray, and its results."""

import json
from pathlib import Path

import pytest

for needed in ("equinox", "flax", "keras", "rich"):
    pytest.importorskip(needed)

from benchmarks import xray_names_the_operation as benchmark

ROOT = Path(__file__).parents[2]
CASES = [
    benchmark.Case("Keras MLP", 1, "dense1", "custom_vjp", "scan and cond"),
    benchmark.Case("Keras MLP", 2, "dense2", "epsilon", "remat"),
    *(pytest.param(case, marks=pytest.mark.slow) for case in list(benchmark.cases(26))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_planted_fault_is_named_and_mended(case):
    """The right operation and the right layer, and a change that makes the step right."""
    found = benchmark.examined(case)
    assert (found["operation"], found["layer"], found["remedy"]) == (True, True, True), found


def test_the_page_shows_the_results():
    """The table in the docs is that of the results: 99 of 100 faults named, 95 of 100 mended, and
    no cause in a healthy step."""
    results = json.loads((ROOT / "benchmarks" / "results" / "xray" / "cpu.json").read_text())
    assert benchmark.markdown(results) in (ROOT / "docs" / "watching.md").read_text()
    found = results["summary"]["all"]
    assert (found["faults"], results["healthy"]) == (benchmark.COUNT, benchmark.HEALTHY)
    assert found["both"] >= 0.99 * found["faults"]
    assert found["mended"] >= 0.95 * found["with a remedy"]
    assert results["false"] == []

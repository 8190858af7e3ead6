"""Faults planted in models: a slice of the study of the X-ray, and its page."""

import functools
import json
from pathlib import Path

import pytest

for needed in ("equinox", "flax", "keras", "rich"):
    pytest.importorskip(needed)

from studies import xray_names_the_operation as study

ROOT = Path(__file__).parents[2]
# The cases of the study by their place in it, and two of its kinds that are tested every time.
OFTEN = {
    "custom_vjp": study.Case("Keras MLP", 1, "dense1", "custom_vjp", "scan and cond"),
    "epsilon": study.Case("Keras MLP", 2, "dense2", "epsilon", "remat"),
}


@functools.cache
def of_study():
    return list(study.cases(26))


@pytest.mark.parametrize(
    "case", [*OFTEN, *(pytest.param(i, marks=pytest.mark.slow) for i in range(26))]
)
def test_a_planted_fault_is_named_and_mended(case):
    """The right operation and the right layer, and a change that makes the step right."""
    found = study.examined(OFTEN[case] if case in OFTEN else of_study()[case])
    assert (found["operation"], found["layer"], found["remedy"]) == (True, True, True), found


def test_the_page_shows_the_results():
    """The table in the docs is that of the results."""
    results = json.loads((ROOT / "studies" / "results" / "xray" / "cpu.json").read_text())
    assert study.markdown(results) in (ROOT / "docs" / "evidence" / "planted-faults.md").read_text()

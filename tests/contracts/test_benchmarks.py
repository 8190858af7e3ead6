"""What the benchmarks measure, and what becomes of it."""

import json
import shutil
import weakref
from pathlib import Path

import jax.numpy as jnp
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
ROOT = Path(__file__).parents[2]

from benchmarks import harness, report

pytestmark = pytest.mark.repo

RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"


def test_the_page_of_several_devices(tmp_path):
    """Every claim of every device has its tables, and one picture shows them all; a page that has
    no place for them is replaced."""
    (tmp_path / "benchmarks.md").write_text("# A page of before")
    shutil.copy(RESULTS, tmp_path / "one.json")
    shutil.copy(RESULTS, tmp_path / "other.json")
    report.write(tmp_path, tmp_path)
    page, claims = (tmp_path / "benchmarks.md").read_text(), json.loads(RESULTS.read_text())
    assert [page.count(claim["claim"]) for claim in claims.values()] == [2] * len(claims)
    assert (tmp_path / "benchmarks.png").stat().st_size > 10_000


def test_the_page_of_the_documentation_is_that_of_the_results(tmp_path):
    """Its tables are in the results, and what is said around them is left alone."""
    page = ROOT / "docs" / "evidence" / "benchmarks.md"
    shutil.copytree(RESULTS.parent, tmp_path / "results")
    shutil.copy(page, tmp_path)
    report.write(tmp_path / "results", tmp_path)
    assert (tmp_path / "benchmarks.md").read_text() == page.read_text()


def test_the_page_of_a_gpu(tmp_path):
    """It has a table of each row that was measured, with the device and the versions, and a
    picture."""
    shutil.copytree(RESULTS.parent, tmp_path / "results")
    report.write(tmp_path / "results", tmp_path)
    page = (tmp_path / "benchmarks.md").read_text()
    measured = json.loads((RESULTS.parent / "devices" / "nvidia-h200.json").read_text())
    assert "### NVIDIA H200\n" in page
    assert f"torch 2.11.0+cu130, {measured['date']}" in page
    for cell in measured["parts"]["language_model"].values():
        for name, numbers in cell["variants"].items():
            assert f"| {name} | {numbers['ms']:.4g} | {numbers['tokens_s'] / 1e3:.1f} |" in page
    assert (tmp_path / "benchmarks-gpu.png").stat().st_size > 10_000


def test_nothing_measured_writes_nothing(tmp_path, capsys):
    """Without results there is no page of them, and no error."""
    report.write(tmp_path, tmp_path)
    assert "Nothing was measured" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_step_bears_what_it_frees():
    """When a step begins nobody holds what those before it carried."""
    carried = []

    def step(carry, inputs):
        assert not any(ref() for ref in carried)
        carried.append(weakref.ref(carry))
        return Carried([jnp.ones(())])

    harness.sample(step, [Carried([jnp.ones(())])], None, 3)
    assert len(carried) == 3


class Carried(list):
    """A list that can be referred to weakly."""


def test_repeats_in_which_a_baseline_is_missing():
    """A ratio is given only where all repeats have it, and the rest is kept."""

    def repeat(ms, **ratios):
        ratios = {name: {"median": value, "q1": 1, "q3": 2} for name, value in ratios.items()}
        return {"ours": {"ms": ms, "ratios": ratios}}

    both = harness.combine([repeat(1, a=2, b=3), repeat(3, a=4, b=5), repeat(2, a=3, b=1)])
    assert both["ours"]["ratios"]["a"] == {"median": 3, "q1": 1, "q3": 2, "low": 2, "high": 4}
    one = harness.combine([repeat(1, a=2, b=3), repeat(3, a=4)])
    assert list(one["ours"]["ratios"]) == ["a"]
    assert one["ours"]["ms"] == 2

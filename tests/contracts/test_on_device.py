"""The command that measures on a GPU: what it keeps, when it stops, and where it runs."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import beside_torch, on_device, peers

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]
# What a machine with a GPU may lack, and the package itself.
ABSENT = ("gainstage", "__editable__", "rich", "matplotlib", "keras")


@pytest.fixture
def bare(tmp_path):
    """Runs Python in the checkout where the package is not installed, nor the extras."""
    site = tmp_path / "site"
    site.mkdir()
    for folder in {Path(module.__file__).parents[1] for module in (jax, np)}:
        for path in folder.iterdir():
            if not path.name.lower().startswith(ABSENT):
                (site / path.name).symlink_to(path)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(["src", str(site)])}

    def run(*words):
        return subprocess.run(
            [sys.executable, "-S", *words],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_a_bare_checkout_is_enough(bare):
    """The command and all that it measures with are imported without metadata and extras."""
    code = "import benchmarks.on_device, gainstage as gs, sys; print(gs.__version__, gs.__file__)"
    done = bare("-c", f"{code}; assert not {{'rich', 'matplotlib'}} & set(sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == str(ROOT / "src" / "gainstage" / "__init__.py")


@pytest.mark.slow
def test_all_of_it_on_small_sizes(bare, tmp_path):
    """Each part measures something, and all variants of ours run and are compared with optax."""
    pytest.importorskip("sklearn")  # for its digits
    done = bare("-m", "benchmarks.on_device", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Not measured: nothing." in done.stdout
    (file,) = tmp_path.glob("*.json")
    results = json.loads(file.read_text())
    assert set(results["parts"]) == set(on_device.PARTS)
    assert results["device"]["gb_s"] > 0
    parts = results["parts"]
    assert parts["doctor"]["doctor"]["status"] == 0
    for name in ("optimizer_steps", "train_steps", "select", "eager"):
        for cell in parts[name].values():
            assert cell["missing"] == {}
            fewest = len(on_device.EAGER) if name == "eager" else 4
            assert len(cell["variants"]) >= fewest
            assert all(cell["baselines"][0] in v["ratios"] for v in cell["variants"].values())
    for cell in [*parts["autocast"].values(), *parts["float8"].values()]:
        assert cell["missing"] == {}
        assert all(one["peak_gb"] > 0 for one in cell["variants"].values())
    faults = parts["faults"]["configuration 0"]
    assert faults["survived"] == faults["safe"] == faults["tried"] > 0
    for masters in parts["master_weights"].values():
        assert masters["masters away from float32"] < 1e-3 < masters["without masters"]
        assert masters["weights that are not the masters rounded"] == 0
    assert all("ms" in parts["fp8_memory"]["products"][dtype] for dtype in on_device.DTYPES)


def test_models_under_autocast_are_measured():
    """Each variant takes a step and says how much memory it needs; retries need little more."""
    options = Namespace(rounds=2, shortest=0.0)
    cell = on_device.autocast("mixture of experts", True, time.perf_counter() + 100, options)
    assert cell["missing"] == {}
    assert set(cell["variants"]) == {"float32", "by hand", "autocast", "autocast, retries"}
    peaks = {name: one["peak_gb"] for name, one in cell["variants"].items()}
    assert peaks["autocast, retries"] < 1.2 * peaks["autocast"]
    assert cell["baselines"] == ["float32", "by hand"]


def parts(monkeypatch, **measures):
    """Replaces the parts by measurements of the test."""
    found = {
        name: on_device.Part(name, 500, lambda quick, one=one, name=name: {name: one})
        for name, one in measures.items()
    }
    monkeypatch.setattr(on_device, "PARTS", found)
    monkeypatch.setattr(on_device, "copy_bandwidth", lambda elements: {"gb_s": 1.0})


def kept(folder):
    (file,) = folder.glob("*.json")
    return json.loads(file.read_text())["parts"]


def test_a_measurement_is_written_before_the_next_begins(monkeypatch, tmp_path):
    """A run that is killed loses nothing of before; the next one measures what is left."""
    seen = []

    def second(until, options):
        seen.append(kept(tmp_path)["first"]["first"]["number"])
        if len(seen) < 2:
            raise ValueError("out of memory\nand more")
        return {"number": 2}

    counts = iter([1])
    parts(monkeypatch, first=lambda until, options: {"number": next(counts)}, second=second)
    words = ["--quick", f"--output={tmp_path}"]
    on_device.main(words)
    assert kept(tmp_path)["second"]["second"]["error"] == "ValueError: out of memory"
    on_device.main(words)
    assert kept(tmp_path)["second"]["second"]["number"] == 2
    assert seen == [1, 1]


def test_nothing_begins_when_the_time_is_up(monkeypatch, tmp_path, capsys):
    """The budget holds: what would begin too late is named, and what hangs is ended."""
    stopped = []
    monkeypatch.setattr(on_device, "stop", lambda: stopped.append(True))

    def hangs(until, options):
        time.sleep(1.0)
        return {}

    parts(monkeypatch, hangs=hangs, late=hangs)
    on_device.main(["--quick", "--budget=0.9", f"--output={tmp_path}"])
    assert stopped == [True]
    assert list(kept(tmp_path)) == ["hangs"]
    assert "Not measured: late (late)." in capsys.readouterr().out


def test_steps_are_compared_with_the_memory(capsys):
    """Ratios to the baseline, and bytes a second beside what the memory gave in the same rounds;
    a variant without time is missing, and the baseline is not."""
    case = peers.case((peers.OPTAX, peers.SELECT), peers.OPTAX, "tiny2", "adam")
    case = case._replace(traffic=10**6)
    options = Namespace(shortest=0.0, rounds=2)
    cell = on_device.compare(case, time.perf_counter() + 100, options)
    on_device.tell("steps", cell)
    optax, select = (cell["variants"][name] for name in (peers.OPTAX, peers.SELECT))
    assert optax["gb_s"] == pytest.approx(1 / optax["ms"])
    assert optax["of_bandwidth"] == pytest.approx(
        optax["gb_s"] / cell["variants"]["bandwidth"]["gb_s"]
    )
    assert f"optax {select['ratios']['optax']['median']:.3f}" in capsys.readouterr().out
    late = on_device.compare(case, 0.0, options)
    assert list(late["variants"]) == [peers.OPTAX]
    assert set(late["missing"].values()) == {"no time was left"}


def test_steps_are_compared_with_those_of_torch(monkeypatch):
    """PyTorch takes turns with ours, and both of its steps are baselines; without it there is
    nothing to compare."""
    asked = []

    def call(python, words, timeout):
        asked.append(words)
        return {"seconds": {beside_torch.PLAIN: 1.0, beside_torch.SCALED: 2.0}}

    monkeypatch.setattr(beside_torch, "call", call)
    options, until = Namespace(shortest=0.0, rounds=2), time.perf_counter() + 100
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "torch" in on_device.compare_with_torch(("tiny2", "sgd"), until, options)["missing"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    cell = on_device.compare_with_torch(("tiny2", "sgd"), until, options)
    assert asked == [["tiny2", "sgd", "cpu", 0, 2, 0.0]] * 3
    assert cell["rounds"] == 3
    ours = cell["variants"][peers.OURS]
    assert ours["ratios"][beside_torch.SCALED]["median"] == pytest.approx(ours["ms"] / 2000)


def test_the_page_of_a_device(monkeypatch, tmp_path):
    """It has tables of what is compared, and the numbers of the rest."""
    pytest.importorskip("matplotlib")
    case = peers.case((peers.OPTAX, peers.SELECT), peers.OPTAX, "tiny2", "adam")
    parts(
        monkeypatch,
        steps=lambda until, options: on_device.compare(case, until, options),
        other=lambda until, options: {"number": 12345},
    )
    on_device.main(["--quick", f"--output={tmp_path}"])
    on_device.main([f"--page={tmp_path / 'page.md'}", f"--output={tmp_path}"])
    page = (tmp_path / "page.md").read_text()
    assert "### steps" in page
    assert "| tiny2 | adam | float32 |" in page
    assert "12345" in page

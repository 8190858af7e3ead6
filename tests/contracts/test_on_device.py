"""The command that measures on a GPU: what it keeps, when it stops, and where it runs."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import beside_torch, language_model, on_device, peers

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
    """Each part measures something, and all variants of ours that need no GPU run."""
    done = bare("-m", "benchmarks.on_device", "--quick", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Not measured: nothing." in done.stdout
    (file,) = tmp_path.glob("*.json")
    results = json.loads(file.read_text())
    assert set(results["parts"]) == set(on_device.PARTS)
    assert results["device"]["gb_s"] > 0
    assert any((tmp_path / "compiled").iterdir())  # what a second run need not compile
    parts = results["parts"]
    assert parts["doctor"]["doctor"]["status"] == 0
    for name in ("gpt2", "optimizer_step"):
        for cell in parts[name].values():
            assert not [variant for variant in cell["missing"] if "torch" not in variant]
            assert len(cell["variants"]) >= 6
            assert all(cell["baselines"][0] in v["ratios"] for v in cell["variants"].values())
    (language,) = parts["language_model"].values()
    assert all("cuDNN" in name or "torch" in name for name in language["missing"])
    assert language["variants"]["gs.autocast float16"]["tokens_s"] > 0
    for cell in [language, *parts["autocast"].values()]:
        assert all(one["peak_gb"] > 0 for one in cell["variants"].values())
    assert all(cell["missing"] == {} for cell in parts["autocast"].values())
    for masters in parts["master_weights"].values():
        assert masters["masters away from float32"] < 1e-3 < masters["without masters"]
        assert masters["weights that are not the masters rounded"] == 0


def test_models_under_autocast_are_measured():
    """Each variant takes a step, and says how much memory it needs and how far its gradients are
    from those in float32."""
    options = Namespace(rounds=2, shortest=0.0)
    cell = on_device.autocast("mixture of experts", True, options)
    assert cell["missing"] == {}
    assert set(cell["variants"]) == {"float32", "by hand", "autocast"}
    assert cell["baselines"] == ["float32", "by hand"]
    off = {name: one["gradient_off"] for name, one in cell["variants"].items()}
    assert off["float32"] == 0
    assert 0 < off["autocast"] < 5e-3
    assert all(one["peak_gb"] > 0 for one in cell["variants"].values())


def test_a_variant_that_cannot_run_is_named(monkeypatch):
    """The others are measured."""

    def loss(params, batch):
        return jnp.mean((batch @ params) ** 2)

    def broken(params, batch):
        raise NotImplementedError("no such kernel")

    options = Namespace(rounds=2, shortest=0.0)
    losses = {"plain": (loss, None), "broken": (broken, None)}
    args = (jnp.ones((4, 4)), jnp.ones((8, 4)), optax.adam(1e-3), ["plain"], options)
    cell = on_device.train({"model": "a product"}, losses, *args)
    assert cell["missing"] == {"broken": "NotImplementedError: no such kernel"}
    assert list(cell["variants"]) == ["plain"]


def test_the_language_model_beside_torch(monkeypatch):
    """PyTorch has a process of its own, and what it says is part of the row; where it fails its
    last line is."""
    sizes = language_model.Sizes(64, 1, 1, 128, 64)
    name, options = language_model.TORCH_FLOAT16, Namespace(rounds=2, shortest=0.0)
    said = {"environment": {"torch": "2"}, "variants": {name: {"ms": 4.0, "peak_gb": 1.0}}}
    asked = []

    def run(command, **kwargs):
        asked.append([json.loads(word) for word in command[3:]])
        return Namespace(returncode=len(asked) - 1, stdout=json.dumps(said), stderr="a\nno GPU\n")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(on_device.subprocess, "run", run)
    cell = on_device.language(sizes, ["float32, optax"], [name], options)
    assert asked == [[list(sizes), 2, 0.0, name]]
    assert cell["variants"][name]["tokens_s"] == 128 / 4e-3
    assert cell["variants"]["float32, optax"]["loss"] > 0
    assert on_device.run_torch(sizes, [name], options)["missing"] == {name: "no GPU"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = on_device.run_torch(sizes, [name], options)["missing"]
    assert missing == {name: "PyTorch is not installed"}


def test_both_libraries_begin_with_the_same_weights():
    """The first loss in float32 is the same in PyTorch and in JAX."""
    torch = pytest.importorskip("torch")
    sizes = language_model.Sizes(64, 2, 2, 16, 32)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    params, ids = language_model.parameters(sizes), language_model.tokens(sizes)
    places = torch.from_numpy(language_model.first_tokens(sizes))
    scores = language_model.torch_model(sizes)(places[:, :-1]).flatten(0, 1)
    found = torch.nn.functional.cross_entropy(scores, places[:, 1:].flatten()).item()
    assert found == pytest.approx(float(language_model.loss(sizes, attend, params, ids)), rel=1e-5)


def parts(monkeypatch, **measures):
    """Replaces the parts by measurements of the test."""
    found = {
        name: on_device.Part(name, lambda quick, one=one, name=name: {name: on_device.Row(0, one)})
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

    def second(options):
        seen.append(kept(tmp_path)["first"]["first"]["number"])
        if len(seen) < 2:
            raise ValueError("out of memory\nand more")
        return {"number": 2}

    counts = iter([1])
    parts(monkeypatch, first=lambda options: {"number": next(counts)}, second=second)
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

    def hangs(options):
        time.sleep(1.0)
        return {}

    parts(monkeypatch, hangs=hangs, late=hangs)
    on_device.main(["--quick", "--budget=0.9", f"--output={tmp_path}"])
    assert stopped == [True]
    assert list(kept(tmp_path)) == ["hangs"]
    assert "Not measured: late (late)." in capsys.readouterr().out


def test_a_row_is_measured_whole_or_not_at_all(monkeypatch, tmp_path, capsys):
    """One that would take longer than what is left does not begin; a shorter one after it does."""
    found = {
        name: on_device.Part(name, lambda quick, s=s, name=name: {name: on_device.Row(s, numbers)})
        for name, s in (("long", 1000), ("short", 0))
    }

    def numbers(options):
        return {"number": 1}

    monkeypatch.setattr(on_device, "PARTS", found)
    monkeypatch.setattr(on_device, "copy_bandwidth", lambda elements: {"gb_s": 1.0})
    on_device.main(["--quick", "--budget=100", f"--output={tmp_path}"])
    assert list(kept(tmp_path)) == ["short"]
    assert "Not measured: long (long)." in capsys.readouterr().out


def test_steps_of_an_optimizer_are_compared(capsys, monkeypatch):
    """Ratios to the baseline, and the step of PyTorch beside them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(beside_torch, "call", lambda *args: {"seconds": {beside_torch.SCALED: 2.0}})
    options = Namespace(shortest=0.0, rounds=2)
    cell = on_device.optimizer_step("tiny2", options)
    on_device.tell("steps", cell)
    assert cell["missing"] == {}
    assert cell["variants"][beside_torch.SCALED]["ms"] == 2000
    median = cell["variants"][peers.OURS]["ratios"][peers.OPTAX]["median"]
    assert f"{median:.3f} (" in capsys.readouterr().out

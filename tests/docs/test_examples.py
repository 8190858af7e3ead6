"""The examples end in half precision where they do in float32, and the libraries alike."""

import importlib
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from docs.linting import watched, wrong

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]
EXAMPLES, PAGE = ROOT / "examples", ROOT / "docs" / "examples.md"
RESULTS = ROOT / "studies" / "results" / "examples.json"
NEEDS = {
    "optax": "sklearn",
    "haiku": "haiku",
    "linen": "flax",
    "nnx": "flax",
    "equinox": "equinox",
    "keras": "keras",
}
SEEDS = range(1)


@pytest.fixture(scope="module")
def trained():
    """`trained(library, dtype)`: the losses and the accuracy from each seed, of steps of which
    `lint` accuses none."""
    pytest.importorskip("sklearn")
    known = {}
    sys.path.insert(0, str(EXAMPLES))

    def run(library, dtype):
        if (library, dtype) not in known:
            pytest.importorskip(NEEDS[library])
            example = importlib.import_module(f"digits_{library}")
            with pytest.MonkeyPatch.context() as patch:
                found = watched(patch.setattr) if dtype == "float16" else None
                losses, right = zip(*(example.train(dtype, seed) for seed in SEEDS), strict=True)
            assert found is None or wrong(found.faults) == []
            known[library, dtype] = np.array(losses), np.array(right)
        return known[library, dtype]

    yield run
    sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("library", NEEDS)
def test_half_precision_ends_where_float32_does(trained, library, dtype):
    """Half precision tells digits within 1 point of float32."""
    (exact, exactly_right), (half, right) = trained(library, "float32"), trained(library, dtype)
    assert abs(exactly_right.mean() - right.mean()) <= 0.01
    assert right.mean() > 0.85
    np.testing.assert_allclose(half[:, :30], exact[:, :30], rtol=0.02)


# Asked for in equinox#221 (examples).
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("library", [library for library in NEEDS if library != "optax"])
def test_all_libraries_train_alike(trained, library, dtype):
    """The losses are those of the optax loop, step by step, but for rounding."""
    losses, wanted = trained(library, dtype)[0], trained("optax", dtype)[0]
    rtol = 1e-3 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(losses, wanted, rtol=rtol, atol=rtol / 10)


def test_two_lines_of_an_example_are_ours():
    """A train state and a step; in Keras one line."""
    for library in NEEDS:
        ours = (EXAMPLES / f"digits_{library}.py").read_text().count("# ours")
        assert ours == (1 if library == "keras" else 2), library


@pytest.fixture
def example(monkeypatch):
    """Returns the module of an example by its name."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_batch_norm_forgets_a_bad_batch(example):
    """Of a batch of NaN nothing is left: one step is skipped, and the running means predict."""
    pytest.importorskip("flax")
    for dtype in ("float32", "bfloat16", "float16"):
        losses, right, skipped = example("digits_batch_norm").train(dtype, 0)
        assert (skipped, len(losses)) == (1, 119)
        assert right > 0.85


def test_a_small_loss_needs_a_scale_in_float16(example, monkeypatch):
    """Float16 with a scale draws as float32 does, and without one it learns next to nothing."""
    small = example("small_loss")
    monkeypatch.setattr(small, "EPOCHS", 10)
    (_, exact), (_, scaled) = small.train("float32", 0), small.train("float16", 0)
    _, unscaled = small.train("float16", 0, loss_scale=1.0)
    assert scaled == pytest.approx(exact, rel=0.1)
    assert unscaled > 2 * exact


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_trains_as_in_float32(example, dtype):
    """The losses of the transformer are those of float32 but for rounding."""
    attention = example("attention")
    (exact, _), (losses, right) = attention.train("float32", 0), attention.train(dtype, 0)
    np.testing.assert_allclose(losses[:30], exact[:30], rtol=0.02)
    assert right > 0.85


def test_microbatches_save_memory_and_train_alike(example):
    """In four parts the program needs less memory, and the losses differ by rounding."""
    microbatches = example("microbatches")
    (whole, _, memory), (parts, _, less) = (microbatches.train("float32", 0, n) for n in (1, 4))
    np.testing.assert_allclose(parts, whole, rtol=0.01)
    assert less < 0.7 * memory


def test_fsdp_divides_all_and_trains_as_one_device(example):
    """Each of eight devices holds little more than an eighth, and the losses are those of one."""
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 devices")
    fsdp = example("fsdp")
    alone, all_of_it = fsdp.train("float32", 0, devices[:1])
    losses, held = fsdp.train("float32", 0, devices[:8])
    np.testing.assert_allclose(losses, alone, rtol=1e-3)
    assert held < 1.02 * all_of_it / 8


def test_the_page_has_each_script_and_the_numbers_of_the_study():
    """The table names all examples, and its cells are those of the results file."""
    page, results = PAGE.read_text(), json.loads(RESULTS.read_text())
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"digits.py"}
    assert {name for name in scripts if f"`{name}`" not in page} == set()
    for script, row in results.items():
        cells = " | ".join(row[dtype] for dtype in ("float32", "bfloat16", "float16"))
        assert re.search(rf"^\| .*`{script}`.* \| .* \| {re.escape(cells)} \|$", page, re.M), script

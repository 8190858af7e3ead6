"""The examples of the libraries train the same network to the same numbers."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from docs.linting import watched, wrong

pytestmark = pytest.mark.repo

EXAMPLES = Path(__file__).parents[2] / "examples"
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


@pytest.mark.parametrize("library", NEEDS)
def test_float16_ends_where_float32_does(trained, library):
    """With scaling, float16 tells digits within 1 point of float32."""
    (exact, exactly_right), (half, right) = trained(library, "float32"), trained(library, "float16")
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


def test_few_lines_of_an_example_are_ours():
    """One line of Keras, three of a framework with an optimizer, four of an optax loop."""
    ours = {"keras": 1, "linen": 3, "nnx": 3, "optax": 4, "haiku": 4, "equinox": 4}
    for path in EXAMPLES.glob("digits_*.py"):
        library = path.stem.removeprefix("digits_")
        assert path.read_text().count("# ours") == ours.get(library, 0), path

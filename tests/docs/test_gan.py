"""The GAN of the examples trains in half precision as in float32."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from docs.linting import watched, wrong

pytestmark = pytest.mark.repo
for needed in ("flax", "sklearn"):
    pytest.importorskip(needed)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def gan():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("gan")
    sys.path.remove(str(EXAMPLES))


def test_both_players_train_in_float16_as_in_float32(gan):
    """After 150 steps the images are nearer to digits than at first, as near in float16 as in
    float32, and so are the losses of both players; `lint` accuses neither step."""
    distances, ends = [], []
    for dtype in ("float32", "float16"):
        with pytest.MonkeyPatch.context() as patch:
            found = watched(patch.setattr) if dtype == "float16" else None
            generator, losses, skipped = gan.train(dtype, 0, steps=150)
        assert found is None or wrong(found.faults) == []
        assert max(skipped) <= 5
        distances.append(gan.distance(generator))
        ends.append(losses[-50:].mean(0))
    first = gan.distance(gan.Generator(gan.nnx.Rngs(0)))
    assert distances[0] < 0.9 * first
    assert distances[1] == pytest.approx(distances[0], rel=0.15)
    np.testing.assert_allclose(ends[1], ends[0], rtol=0.05)

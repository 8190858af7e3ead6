"""Gradients of real models under autocast: a slice of the study, and its page."""

import json
from pathlib import Path

import pytest

for needed in ("equinox", "flax", "matplotlib", "rich"):
    pytest.importorskip(needed)

import gainstage as gs
from gainstage.precision.program_costs import kept
from studies import autocast_keeps_the_gradient as study
from studies import autocast_page as page
from studies.autocast_models import MODELS

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "studies" / "results" / "autocast" / "cpu.json").read_text())
OFTEN = ("mixture of experts", "features with an offset (NNX)")
RARELY = [name for name in MODELS if name not in OFTEN]
NEEDS_A_PLAN = ("ResNet, BatchNorm (Linen)",)  # which keeps half of the products in float32
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in RARELY]
EACH = [*OFTEN, *SLOW]
FIRST = [pytest.param(OFTEN[0], marks=pytest.mark.thorough), *OFTEN[1:]]  # it takes the longest


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_gradients_are_as_exact_as_the_plan_says(name):
    """The error is at most 1 % with default rules and 0.5 % with a plan, or a quarter of that of
    bfloat16, and on another batch at most 1.5 times the prediction."""
    found, plan = study.errors(MODELS[name]())
    off = found["errors"]
    assert off["plan"] <= study.bound(off["bfloat16"])
    assert off["autocast"] <= page.LIMIT or name in NEEDS_A_PLAN
    assert max(off["plan"], found["other batch"]) <= page.OPTIMISTIC * found["predicted"]
    assert plan.measured.error == pytest.approx(off["plan"], rel=0.2)
    half, every = found["products"]["plan"]
    assert half == every or all(reason for _, reason, _ in found["products"]["why"])


# Its gate is float32, and so is what it multiplies.
MORE = {"mixture of experts": 1.03}


@pytest.mark.parametrize("name", EACH)
def test_no_more_is_kept_for_the_backward_pass_than_by_hand(name):
    """Default rules keep no more memory than the model by hand, or in float32 if there is none."""
    model = MODELS[name]()
    losses = {"float32": model.loss, "by hand": model.by_hand, "autocast": gs.autocast(model.loss)}
    sizes = {arm: kept(loss, model.params, model.batch(0)) for arm, loss in losses.items() if loss}
    limit = sizes.get("by hand", sizes["float32"])
    assert sizes["autocast"] <= MORE.get(name, page.NOISE) * limit, sizes


def test_the_page_shows_the_results():
    """The tables in the docs are those of the results."""
    text = (ROOT / "docs" / "evidence" / page.PAGE).read_text()
    assert f"<!-- results -->\n\n{page.markdown(RESULTS)}\n\n<!-- end of results -->" in text


def test_an_interrupted_study_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """A model that is in the results is not measured again."""
    measured = []

    def examined(name, rounds):
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return RESULTS["models"][name]

    monkeypatch.setattr(study, "examined", examined)
    words = ["--quick", f"--output={tmp_path / 'cpu.json'}"]
    with pytest.raises(KeyboardInterrupt):
        study.main(words)
    study.main(words)
    first, second, third = study.QUICK
    assert measured == [first, second, second, third]
    assert (
        page.error_table({n: RESULTS["models"][n] for n in study.QUICK}) in capsys.readouterr().out
    )

"""What `gainstage demo` claims, over several seeds, and how the command behaves."""

import contextlib
import io
import json
import sys

import numpy as np
import pytest

from gainstage import __main__ as command

for needed in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(needed)

from gainstage import demo
from gainstage.demo.training import BFLOAT16, FLOAT32, MODES, SCALED, UNSCALED, Task

# With one block in place of two, and a quarter of this process's patches.
SMALL = Task(steps=60, blocks=1, patches=4, ranks=256, other_ranks=(1,))


@pytest.fixture(
    scope="module",
    params=[(SMALL, 1), pytest.param((Task(), 3), marks=pytest.mark.slow)],
    ids=["short", "as the command"],
)
def denoised(request):
    """Comparisons of photographs that are denoised, from so many seeds."""
    task, seeds = request.param
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = [demo.compare(task, seed) for seed in range(seeds)]
    assert out.getvalue() == ""
    assert "100%" in err.getvalue()  # the bars
    return found


def times(found, mode):
    """The test error of a mode, as a multiple of that of float32, from each seed."""
    return np.array([one.times(one.by_mode[mode]) for one in found])


def test_scaled_float16_denoises_as_float32_does(denoised):
    """With loss scaling float16 ends within 1 % of the squared error of float32, on every seed."""
    assert (np.abs(times(denoised, SCALED) - 1) <= 0.01).all()


# Asked for in OLMo#524 (float16 unscaled).
def test_unscaled_float16_leaves_noise_in_photographs(denoised):
    """Without it float16 ends at least 0.5 dB below float32, on every seed."""
    assert (10 * np.log10(times(denoised, UNSCALED)) >= 0.5).all()


def test_bfloat16_and_a_small_batch_need_no_scaling(denoised):
    """bfloat16, and float16 on the batch of one process alone, end within 5 % of float32."""
    assert (np.abs(times(denoised, BFLOAT16) - 1) <= 0.05).all()
    ratios = [found.times(found.by_ranks[1]) for found in denoised]
    assert (np.abs(np.array(ratios) - 1) <= 0.05).all()


# Asked for in AnimaLoraStudio#316 (underflow).
def test_the_gradient_says_why(denoised):
    """The gradient of float16 is over 5 % off; scaled, it is closer than that of bfloat16, and at
    most a twentieth of the elements that were 0 are 0."""
    for found in denoised:
        error = {mode: found.by_mode[mode].measures["gradient_error"] for mode in MODES}
        assert error[FLOAT32] == 0
        assert error[UNSCALED] > 0.05
        assert error[SCALED] < error[BFLOAT16] < error[UNSCALED]
        flushed = {mode: found.by_mode[mode].measures["flushed_share"] for mode in MODES}
        assert flushed[FLOAT32] == 0
        assert flushed[UNSCALED] > 0.05
        assert flushed[SCALED] <= flushed[UNSCALED] / 20


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Runs the command with a comparison in place of its training: what was asked, and printed."""

    def run(found, *words):
        asked = []
        monkeypatch.setattr(demo, "compare", lambda *words: asked.append(words) or found)
        assert command.main(["demo", *words, "--output", str(tmp_path / "demo.png")]) == 0
        return asked, capfd.readouterr().out

    return run


def test_what_was_found_is_said_and_drawn(denoised, run, tmp_path):
    """The command prints the table, what suffers, what does not and where it begins, and draws. It
    ends with what `advise` says before the training."""
    asked, text = run(denoised[0])
    assert asked == [(Task(steps=160), 0)]
    for row in ("Squared error, test", "PSNR, test", "Gradient's relative error", "Steps skipped"):
        assert row in text
    for words in ("What suffers: the pictures", "What does not: bfloat16", "it needs no scaling."):
        assert words in " ".join(text.split())
    assert "advise says: Float16 needs loss scaling" in " ".join(text.split())
    assert "Use bfloat16: noise" in " ".join(text.split())
    assert "For your model: gainstage advise MODULE:FUNCTION\n" in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    assert "\x1b" not in text
    drawn = (tmp_path / "demo.png").read_bytes()
    assert drawn[:4] == b"\x89PNG"
    assert 20_000 < len(drawn) < 2_000_000


def test_json_is_all_there_is_on_standard_output(denoised, run, tmp_path):
    """`--json` prints one object; the bars go to standard error, the picture to its file."""
    words = ["--steps", "9", "--seed", "3", "--json"]
    asked, text = run(denoised[0], *words)
    assert asked == [(Task(steps=9), 3)]
    numbers = json.loads(text)
    about = [numbers[key] for key in ("steps", "seed", "picture")]
    assert about == [9, 3, str(tmp_path / "demo.png")]
    assert list(numbers["modes"]) == list(MODES)
    assert all(measures["test_error"] > 0 for measures in numbers["modes"].values())
    assert list(numbers["float16_by_ranks"]) == list(map(str, denoised[0].by_ranks))


def test_no_claim_that_the_run_did_not_show(denoised):
    """Where float16 ends as float32 does, the text says so, and names nothing that suffers."""
    found = denoised[0]
    exact = found.by_mode[FLOAT32]
    alike = found._replace(by_mode={**found.by_mode, UNSCALED: exact}, by_ranks={1: exact})
    text = " ".join(demo.conclusions(alike))
    assert "In this run float16 did about as well" in text
    assert "What suffers" not in text


def test_a_missing_extra_is_named(capsys, monkeypatch, tmp_path):
    """Without the extra the command says what to install and ends with status 1."""
    for name in [name for name in sys.modules if name.startswith("gainstage.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    assert command.main(["demo", "--output", str(tmp_path / "demo.png")]) == 1
    assert 'pip install ".[demo]"' in capsys.readouterr().err

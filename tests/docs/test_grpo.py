"""The example of reinforcement learning learns, and says how far sampler and trainer disagree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quick

pytestmark = pytest.mark.repo

EXAMPLES = Path(__file__).parents[2] / "examples"
# The quick form, and then the same weights in three dtypes.
CODE = """
import jax, numpy as np
import grpo

supervised, _ = grpo.main(["--quick"])
prompts, _ = grpo.problems(np.random.default_rng(1), 64)
for dtype in ("float32", "float16", "bfloat16"):
    tokens, sampled = grpo.sample(supervised, prompts, jax.random.key(0), dtype)
    scored = jax.jit(grpo.score, static_argnames="dtype")(supervised, tokens, dtype)
    print(dtype, grpo.mismatch(sampled, scored)["mean_abs_diff"])
"""


@pytest.fixture(scope="module")
def printed():
    """What the quick form printed, and a mean |dlogp| for each dtype."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        cwd=EXAMPLES, env=quick.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_reward_rises_in_the_quick_form(printed):
    """Solved problems teach most of the task; GRPO goes on from there and skips no step."""
    rewards = [float(n) for n in re.findall(r"^SFT \d+: reward ([\d.]+)", printed, re.MULTILINE)]
    assert rewards == sorted(rewards)
    assert rewards[0] < 0.1 < 0.5 < rewards[-1]
    line = r"^GRPO 10: reward ([\d.]+), mean \|dlogp\| (\S+), k3 KL \S+, scale 2\*\*15, 0 steps"
    [(reward, apart)] = re.findall(line, printed, re.MULTILINE)
    assert float(reward) > 0.5
    assert 0 < float(apart) < 1e-4


def test_float16_disagrees_a_tenth_as_much_as_bfloat16(printed):
    """At the same weights the mean |dlogp| of float16 is at most a tenth of bfloat16's, and the
    two programs compute the same in float32."""
    apart = {dtype: float(n) for dtype, n in re.findall(r"^(b?float\d+) (\S+)", printed, re.M)}
    assert apart["float32"] < 1e-6
    assert 10 * apart["float16"] < apart["bfloat16"]


def test_the_page_shows_what_the_example_prints():
    """Both runs on the page are of the lines that the example prints, from start to end."""
    page = (EXAMPLES.parent / "docs" / "rl.md").read_text()
    runs = re.findall(r"```text\n(SFT 1: .*?)```", page, re.DOTALL)
    assert len(runs) == 2
    line = r"(SFT \d+: reward [\d.]+|GRPO \d+: reward [\d.]+, mean \|dlogp\| \S+, k3 KL \S+, "
    line += r"scale 2\*\*\d+, \d+ steps skipped)"
    for run in runs:
        lines = run.splitlines()
        assert [text for text in lines if not re.fullmatch(line, text)] == []
        assert lines[-1].startswith("GRPO 150")

"""Every code block of the README runs, and the optax diff does what the README says."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = {
    language: re.findall(rf"```{language}\n(.*?)```", README, re.S)
    for language in ("python", "diff", "bash")
}
(DIFF,) = BLOCKS["diff"]
BEFORE = "".join(f"{line[1:]}\n" for line in DIFF.splitlines() if line[:1] in ("", " ", "-"))
AFTER = "".join(f"{line[1:]}\n" for line in DIFF.splitlines() if line[:1] in ("", " ", "+"))


def run(code, batches):
    """Runs the loop of the README; returns its losses and its last parameters."""
    losses, params = [], {"w": jnp.zeros(3), "b": jnp.zeros(())}

    def recorded():
        for batch in batches:
            yield batch
            losses.append(float(scope["loss"]))

    scope = {"params": params, "batches": recorded()}
    exec(code, scope)
    return losses, {name: np.asarray(value) for name, value in scope["params"].items()}


def make_batches(n):
    x = np.random.default_rng(0).normal(size=(n, 16, 3)).astype(np.float32)
    return [(jnp.asarray(a), jnp.asarray(a @ np.float32([1, -2, 3]))) for a in x]


# Asked for in jmp#47 (examples fail).
def test_python_blocks_run(capsys):
    """The document-style blocks run one after the other and print what they say."""
    scope = {}
    for block in BLOCKS["python"]:
        exec(block, scope)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["0.25 32768.0 1", "0 of 1 steps were skipped."]
    assert said[2] == "At step 0 and scale 2^15 (2^22 suggested):"


def test_two_lines_change():
    """The diff is one import and two changed lines."""
    lines = re.findall(r"^[+-].*", DIFF, re.M)
    assert [line[0] for line in lines] == ["+", "-", "+", "-", "+"]
    assert lines[0] == "+import gainstage as gs"


def test_the_losses_are_the_same_in_float32():
    """Before and after the two lines the loop gives the same losses and parameters."""
    batches = make_batches(30)
    before, after = run(BEFORE, batches), run(AFTER, batches)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-6)
    for name in before[1]:
        np.testing.assert_allclose(after[1][name], before[1][name], rtol=1e-6)
    assert before[0][-1] < before[0][0]


def test_an_overflow_is_as_if_the_batch_had_not_been_there():
    """After a batch that overflows the loop goes on, bit for bit, as if it had been left out."""
    batches = make_batches(20)
    x, y = batches[0]
    overflowing = (x * np.finfo(np.float32).max, y)
    with_it = run(AFTER, [*batches[:10], overflowing, *batches[10:]])
    without = run(AFTER, batches)
    assert not np.isfinite(with_it[0][10])
    assert with_it[0][:10] + with_it[0][11:] == without[0]
    for name in without[1]:
        assert with_it[1][name].tobytes() == without[1][name].tobytes()


def test_both_commands_stand_in_the_readme():
    """The commands to try and to test are the README's two shell blocks."""
    assert [block.strip() for block in BLOCKS["bash"]] == [
        'pip install ".[demo]" && gainstage demo',
        'pip install -e ".[test]" && pytest',
    ]

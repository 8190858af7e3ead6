"""Every code block of the README runs and prints what the README says."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from docs.linting import watched, wrong

import gainstage as gs
from examples import which_precision

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"


@pytest.fixture(
    scope="module",
    params=["2**10", pytest.param("2**17", marks=pytest.mark.thorough)],
    ids=["short", "as written"],
)
def blocks(request, tmp_path_factory):
    """The first loss, the output of each block with so many rows and what the README shows, whether
    they are as many as there, the loss's arguments at the end, the true weights, and the faults of
    the steps."""
    assert README.count("(2**17, 16)") == 1
    scope, printed = {"__name__": "docs"}, []
    with pytest.MonkeyPatch.context() as patch:
        found = watched(patch.setattr)
        patch.chdir(tmp_path_factory.mktemp("readme"))
        for code, expected in re.findall(BLOCK, README, re.DOTALL):
            said = []
            scope["print"] = lambda *values, said=said: said.append(" ".join(map(str, values)))
            exec(compile(code.replace("2**17", request.param), "train.py", "exec"), scope)
            printed.append(("\n".join(said), expected.strip()))
            if len(printed) == 1:
                first = scope["half"]
                end = jnp.copy(scope["state"].params), scope["x"], scope["y"]
    return first, printed, request.param == "2**17", end, scope["true_w"], found.faults


# Asked for in jmp#47 (examples fail).
def test_python_blocks_run(blocks):
    """The blocks run one after the other, and those with an output print exactly that; with fewer
    rows, as many lines."""
    _, printed, as_written, *_ = blocks
    shown = [(said, expected) for said, expected in printed if expected]
    assert shown
    for pair in shown:
        # The error of a step that was tried again is a rounding, which differs by processor.
        said, expected = (re.sub(r"within 0\.0\d%", "within 0.0_%", each) for each in pair)
        assert len(said.splitlines()) == len(expected.splitlines())
        assert said == expected or not as_written


def test_the_xray_finds_the_cause(blocks):
    """The X-ray of the README's loss at its end says what is lost without a scale, and which scales
    fit."""
    said = str(gs.xray(blocks[0], *blocks[3], scale=1.0))
    assert re.search(r"much is lost at scale 2\^0: .* the gradient of w is off by", said)
    assert re.search(r"cause: .*are flushed to 0", said)
    assert "scales that fit" in said


def test_no_step_is_accused(blocks):
    """`lint` finds nothing in the steps of the README."""
    assert wrong(blocks[5]) == []


@pytest.mark.thorough
def test_the_four_ways_of_the_first_program(blocks):
    """Run in float32, in float16 without a scale and with one, and in bfloat16, it ends as far from
    the true weights as the table says, within a tenth."""
    rows = dict(re.findall(r"^\| \**([^|*]+?)\** \| \**([\d.]+e-\d+)\** \|", README, re.M))
    loss_fn, (w, x, y) = blocks[0].__wrapped__, blocks[3]
    true_w, one = blocks[4], gs.FixedLossScale(1.0)
    ways = {
        "float32, with plain optax": (loss_fn, one),
        "float16, without a loss scale": (gs.autocast(loss_fn), one),
        "float16, with Gainstage": None,  # as the first block ran
        "bfloat16": (gs.autocast(loss_fn, "bfloat16"), one),
    }
    assert list(rows) == list(ways)
    if not blocks[2]:
        return
    for name, way in ways.items():
        if way:
            state = gs.TrainState.create(jnp.zeros((16, 16)), optax.adam(0.1), rule=way[1])
            step = gs.train_step(way[0])
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                for _ in range(200):
                    state, _ = step(state, x, y)
        end = state.params if way else w
        assert float(abs(end - true_w).mean()) == pytest.approx(float(rows[name]), rel=0.1)


@pytest.mark.repo
@pytest.mark.as_users
def test_the_advice_is_that_of_the_example():
    """Run again, it has the README's rows and recommendation; its numbers are within a tenth."""
    loss_fn, params, batches = which_precision.decoder()
    shown = re.search(r"```text\n(precision .*?)```", README, re.DOTALL)[1].rstrip().splitlines()
    advice = gs.advise(loss_fn, params, batches, card="T4", progress=False)
    found = str(advice).splitlines()
    ours, theirs = (
        next(line for line in lines if line.startswith("Float16 needs")) for lines in (found, shown)
    )
    percent = r"[\d.]+(?= %)"  # rounding differs by processor
    assert re.sub(percent, "", ours) == re.sub(percent, "", theirs)
    numbers = [[float(x) for x in re.findall(percent, line)] for line in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1)
    assert [line.split(":")[0] for line in shown[-3:]] == [
        line.split(":")[0] for line in found[-3:]
    ]
    for cost, line in zip(advice.costs, shown[1:5], strict=False):
        name, _, bias, *_ = re.split(r"\s{2,}", line)
        assert name == ("float16, scaled" if cost.name == "float16" else cost.name)
        assert float(bias.removesuffix(" %")) == pytest.approx(100 * cost.price.bias, rel=0.1)
        assert line.split()[-2:] == f"{1e6 * cost.seconds:.3g} us".split()


def make_batches(n):
    x = np.random.default_rng(0).normal(size=(n, 64, 16)).astype(np.float32)
    true_w = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
    return [(jnp.asarray(a), jnp.asarray(a @ true_w)) for a in x]


def train(loss_fn, tx, batches):
    """The losses and the last weights of the README's loop."""
    state, losses = gs.TrainState.create(jnp.zeros((16, 16)), tx), []
    step = gs.train_step(loss_fn)
    for x, y in batches:
        state, loss = step(state, x, y)
        losses.append(float(loss))
    return losses, np.asarray(state.params)


def test_the_losses_are_the_same_in_float32():
    """In float32 the README's loop has the losses and weights of plain optax."""

    def loss_fn(params, x, y):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    @jax.jit
    def plain(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    tx = optax.adamw(1e-2)
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    opt_state, before, after = tx.init(params), [], []
    state, step = gs.TrainState.create(params, tx), gs.train_step(loss_fn, donate=False)
    for x in np.random.default_rng(0).normal(size=(30, 16, 3)).astype(np.float32):
        y = x @ np.float32([1, -2, 3])
        params, opt_state, loss = plain(params, opt_state, x, y)
        before.append(float(loss))
        state, loss = step(state, x, y)
        after.append(float(loss))
    np.testing.assert_allclose(after, before, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-6)
    assert before[-1] < before[0]


def test_an_overflow_is_as_if_the_batch_had_not_been_there(blocks):
    """After a batch that overflows the loop goes on, bit for bit, as if it had been left out."""
    loss_fn, *_ = blocks
    batches = make_batches(20)
    x, y = batches[0]
    overflowing = (x * np.finfo(np.float32).max, y)
    tx = optax.adam(0.1)
    with_it = train(loss_fn, tx, [*batches[:10], overflowing, *batches[10:]])
    without = train(loss_fn, tx, batches)
    assert not np.isfinite(with_it[0][10])
    assert with_it[0][:10] + with_it[0][11:] == without[0]
    assert with_it[1].tobytes() == without[1].tobytes()


def test_both_commands_stand_in_the_readme():
    """The commands to try and to test are the README's two shell blocks."""
    assert [block.strip() for block in re.findall(r"```bash\n(.*?)```", README, re.S)] == [
        'pip install ".[demo]" && gainstage demo',
        'pip install -e ".[test]" && pytest',
    ]

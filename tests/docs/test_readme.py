"""Every code block of the README runs and prints what the README says."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from docs.linting import watched, wrong

import gainstage as gs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"


@pytest.fixture(
    scope="module",
    params=["range(20)", pytest.param("range(200)", marks=pytest.mark.thorough)],
    ids=["short", "as written"],
)
def blocks(request, tmp_path_factory):
    """The output of each block with so many steps and what the README shows, whether they are as
    many as there, the names at the end, and the faults of the steps."""
    assert README.count("range(200)") == 1
    scope, printed = {"__name__": "docs"}, []
    with pytest.MonkeyPatch.context() as patch:
        found = watched(patch.setattr)
        patch.chdir(tmp_path_factory.mktemp("readme"))
        for code, expected in re.findall(BLOCK, README, re.DOTALL):
            said = []
            scope["print"] = lambda *values, said=said: said.append(" ".join(map(str, values)))
            exec(compile(code.replace("range(200)", request.param), "train.py", "exec"), scope)
            printed.append(("\n".join(said), expected.strip()))
    return printed, request.param == "range(200)", scope, found.faults


# Asked for in jmp#47 (examples fail).
def test_python_blocks_run(blocks):
    """The blocks run one after the other, and those with an output print exactly that; after fewer
    steps, as many lines."""
    printed, as_written, *_ = blocks
    shown = [(said, expected) for said, expected in printed if expected]
    assert len(shown) == 3
    for pair in shown:
        assert len(pair[0].splitlines()) == len(pair[1].splitlines())
        if as_written:  # numbers with a fraction are rounded differently by processors
            said, expected = (re.sub(r"\d\.\d+", "_", each) for each in pair)
            assert said == expected
            said, expected = ([float(x) for x in re.findall(r"\d\.\d{4,}", each)] for each in pair)
            assert said == pytest.approx(expected, rel=0.01)


def test_the_function_that_makes_a_state_loads_one(blocks, tmp_path):
    """The line for saving and resuming works with the program's own `new_state`."""
    scope = blocks[2]
    gs.save(tmp_path / "run.safetensors", scope["state"])
    again = gs.load(tmp_path / "run.safetensors", scope["new_state"])
    assert all(map(np.array_equal, *map(jax.tree.leaves, (again, scope["state"]))))


def test_no_step_is_accused(blocks):
    """`lint` finds nothing in the steps of the README."""
    assert wrong(blocks[3]) == []


def test_the_two_lines_for_a_trainer_do_what_the_readme_says(blocks):
    """The loss has true gradients where unscaled float16 has zeros, and the transformation skips a
    NaN, which plain Adam lets into the weights."""
    scope = blocks[2]
    loss, tx, params = scope["trainer_loss"], scope["trainer_tx"], scope["new_state"]().params
    x = scope["x"]
    half = gs.autocast(scope["loss_fn"], "float16")
    exact, scaled, plain = (
        jax.jit(jax.grad(lambda p, f=f: 1e-6 * f(p, x, scope["y"])))(params)
        for f in (scope["loss_fn"], loss, half)
    )
    off = [np.linalg.norm(g["up"] - exact["up"]) / np.linalg.norm(exact["up"])
           for g in (scaled, plain)]  # fmt: skip
    assert off[0] < 0.01 < 0.5 < off[1]
    bad = jax.tree.map(lambda g: g * jnp.nan, exact)
    updates, _ = tx.update(bad, tx.init(params), params)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    plain_tx = optax.adam(1e-3)
    updates, _ = plain_tx.update(bad, plain_tx.init(params), params)
    assert np.isnan(updates["up"]).all()


def test_the_readme_is_short():
    """It is read in one sitting: its limits are those of the project's promise to a reader."""
    assert len(README.split()) <= 1300
    assert len(README.splitlines()) <= 160


# ── each number has its file ─────────────────────────────────────────────────────────────────────

RESULTS, STUDIES = ROOT / "benchmarks" / "results", ROOT / "studies" / "results"


def read(path):
    return json.loads(path.read_text())


def of_gpu(model, name):
    parts = read(RESULTS / "devices" / "nvidia-h200.json")["parts"]["language_model"]
    return next(case for key, case in parts.items() if key.startswith(model))["variants"][name]


def row_of_gpu(name):
    """The two numbers of a row of the table of the H200."""
    found = of_gpu("width 1024", name)
    tokens = float(f"{found['tokens_s']:.3g}")
    return f"{tokens:,.0f}", f"{found['peak_gb']:.1f} GB"


def verdicts(part, policy=""):
    """How many cases of a part of the corpus are right, loud and silent under a policy."""
    each = read(STUDIES / "autocast" / "rules.json")[part].values()
    found = [verdict for case in each for verdict in case.get(policy, case[""]) if verdict]
    return len(found), *(found.count(kind) for kind in ("right", "loud", "silent"))


def of_torch():
    each = read(STUDIES / "autocast" / "any_function.json")["functions"].values()
    cases = [case for f in each for case in f["cases"].values() if case["status"] == "counted"]
    found = [case["torch float16"]["is"] for case in cases if "torch float16" in case]
    return len(found), *(found.count(kind) for kind in ("right", "not finite", "off"))


def speed_of(name):
    ours, torch = (of_gpu("width 1024", n)["tokens_s"] for n in (name, TORCH16))
    return f"{ours / torch:.2f}"


def largest_move():
    """By how much a row of the table differs between two runs, as a share."""
    parts = read(RESULTS / "devices" / "nvidia-h200-earlier.json")["parts"]["language_model"]
    before = next(iter(parts.values()))["variants"]
    moved = [
        of_gpu("width 1024", name)["ms"] / before[name]["ms"] - 1
        for name in (*ROWS, "gs.autocast float16") if name in before
    ]  # fmt: skip
    return f"{100 * max(map(abs, moved)):.0f} %"


TORCH16 = "torch.autocast float16, GradScaler"
ROWS = {
    "float32, optax": "JAX, float32, plain optax",
    "bfloat16 by hand, optax, cuDNN": "JAX, bfloat16, cast by hand, cuDNN attention",
    "gs.autocast bfloat16, cuDNN": "**`gs.autocast`, bfloat16, cuDNN attention**",
    "gs.autocast float16, cuDNN": "**`gs.autocast`, float16, cuDNN attention, loss scale**",
    "gs.autocast float16": "`gs.autocast`, float16, without the line below",
    "torch.autocast bfloat16": "PyTorch, bfloat16, compiled, fused AdamW",
    TORCH16: "PyTorch, float16, `GradScaler`, compiled, fused AdamW",
}


def figures():
    """The parts of the README that hold measured numbers, as the results say them."""
    for name, title in ROWS.items():
        yield "| {} | {} | {} |".format(title, *row_of_gpu(name))
    fast, slow = speed_of("gs.autocast float16, cuDNN"), speed_of("gs.autocast float16")
    yield f"float16 has {fast} of PyTorch's speed with it, and {slow} without"
    yield f"speeds moved by up to {largest_move()}"
    names = "gs.autocast float16, cuDNN", "gs.autocast float8, cuDNN"
    half, eighth = (of_gpu("width 2048", name) for name in names)
    less = 1 - eighth["ms"] / half["ms"]
    yield (
        f"a step takes {100 * less:.0f} % less time than in float16 at that width, and gradients "
        f"are off by {100 * eighth['gradient_off']:.2g} %, where float16's are off by "
        f"{100 * half['gradient_off']:.2g} %"
    )
    gpt2 = read(RESULTS / "devices" / "nvidia-h200.json")["parts"]["gpt2"]["float16"]["variants"]
    cost = gpt2["ours, gs.train_step"]["ratios"]["no scaling"]["median"] - 1
    yield f"costs {100 * cost:.1f} % of a step of GPT-2"
    runs = read(STUDIES / "sampler" / "cpu.json")["runs"]
    coarse, fine = (
        sum(runs[f"{dtype}, seed {n}"]["mean_abs_diff"] for n in (0, 1))
        for dtype in ("bfloat16", "float16")
    )
    assert round(coarse / fine) == 7
    yield "float16 cuts the mismatch of sampler and trainer [sevenfold]"
    by_hand = verdicts("twins", "products by cost alone, all else float32")[1]
    for title, casts, (all_of, right, loud, silent) in (
        ("Gainstage", "by operation", verdicts("functions")),
        (
            "everything by hand, as policies of jmp and mpx do", "by module",
            verdicts("functions", "all of it cast by hand"),
        ),
        (
            "products alone by hand, all else float32", "by module",
            verdicts("functions", "products by cost alone, all else float32"),
        ),
        (
            f"Gainstage, sides of 64 or more (products by hand: {by_hand} right)", "by operation",
            verdicts("twins"),
        ),
        ("`torch.autocast`", "by operation", of_torch()),
    ):  # fmt: skip
        yield f"| {title} | {casts} | {right:,} of {all_of:,} | {loud} | {silent} |"
    dispatch = read(RESULTS / "cpu.json")["dispatch"]["cases"]
    many, two = (
        dispatch[f"{n}, loss and update"]["variants"]["ours, gs.train_step"]["ratios"]["optax"]
        for n in (148, 2)
    )
    yield (
        f"{many['median']:.2f} times as much as in plain optax with 148 small tensors, and "
        f"{two['median']:.1f} times with two"
    )


# Numbers that are no measurement: what something is, and versions.
FACTS = [
    "It needs Python 3.11 or newer and jax 0.10.2 or newer",
    "with 4,096 tokens",  # of the benchmark
    "8 blocks of width 1024, 16 x 1024 tokens",
    "is for layers of 2,048 and wider",
    "loses gradients below 6e-8",  # the smallest number of float16, 2**-24
    "after 2,000 good steps",  # `DynamicLossScale`
    "within 2 % of float32's",  # the bound of the study
    "with sides of 64 or more",
    "jaxamp 0.0.4 and grampax 0.1.0",
    "raise errors on jax 0.10.2",
    "Apache-2.0",
]


def test_every_number_is_in_a_results_file():
    """What the README says in numbers is made of the results, and nothing else has a number."""
    text = " ".join(re.sub(r"```.*?```", "", README, flags=re.S).split())
    for part in (*figures(), *FACTS):
        assert part in text, part
        text = text.replace(part, "", 1)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)  # code, and addresses
    names = r"[A-Za-z]+\d+|float\d+|GPT-2"  # such as H100, T4 and float16
    assert re.findall(r"\d[\d.,]*", re.sub(names, "", text)) == []


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


def test_an_overflow_is_as_if_the_batch_had_not_been_there():
    """After a batch that overflows the loop goes on, bit for bit, as if it had been left out."""
    loss_fn = gs.autocast(lambda w, x, y: jnp.mean((x @ w - y) ** 2))
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
    """The commands to try and to test are the lines of the README's shell block."""
    (block,) = re.findall(r"```bash\n(.*?)```", README, re.S)
    assert block.splitlines() == [
        'pip install ".[demo]" && gainstage demo',
        'pip install -e ".[test]" && pytest',
    ]

"""The benchmark of where float16 needs scaling: it resumes, and its page is that of its results."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equations import equations

for needed in ("matplotlib", "rich", "sklearn"):
    pytest.importorskip(needed)

from studies import needs_scaling_page as page
from studies import where_float16_needs_scaling as benchmark
from studies.tasks import TASKS, Task

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results" / "scaling" / "cpu.json"
RULES = ["dynamic", "adaptive"]
ARMS = ["float32", "adaptive"]


def line():
    """A task of three steps: one weight, a mean over four points."""

    def loss(params, x, dtype):
        return jnp.square(x.astype(dtype) * params["w"].astype(dtype)).astype(jnp.float32).mean()

    return Task(
        init=lambda seed: {"w": jnp.full(4, seed + 1.0)},
        loss=loss,
        batch=lambda rng: rng.standard_normal(4, np.float32),
        score=lambda params: jnp.square(params["w"]).sum(),
        optimizer=lambda steps: optax.sgd(0.1),
        steps=3,
        measure="square of the weight",
        elements=4,
        ranks=(1, 2**20),
    )


def run(folder, *words):
    """The benchmark on that task."""
    command = ["--seeds=1", f"--output={folder}/runs.json", f"--docs={folder}", *words]
    benchmark.main([*command, "--arms", *ARMS], {"line": line})


def test_an_interrupted_benchmark_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    """Finished runs are not repeated; the others follow, then the table and the picture."""
    done, original = [], benchmark.Bench.run

    def interrupted(self, trial):
        if len(done) == 2:
            raise KeyboardInterrupt
        return original(self, trial)

    monkeypatch.setattr(benchmark.Bench, "run", interrupted)
    monkeypatch.setattr(benchmark.Results, "add", noted(done, benchmark.Results.add))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(json.loads((tmp_path / "runs.json").read_text())["runs"]) == 2
    assert not (tmp_path / page.PAGE).exists()
    monkeypatch.setattr(benchmark.Bench, "run", original)
    run(tmp_path)
    assert len(done) == len(set(done)) == 4
    assert "about 0 minutes left" in capsys.readouterr().out
    text = (tmp_path / page.PAGE).read_text()
    assert text.count("| line | 4 elements |") == text.count("| line | 4,194,304 elements |") == 2
    assert (tmp_path / page.PICTURE).stat().st_size > 10_000


def noted(done, add):
    """`Results.add` that notes the trial."""

    def both(self, trial, found):
        done.append(trial)
        add(self, trial, found)

    return both


def test_the_loss_of_a_rank_is_its_share_of_the_global_mean():
    """An unscaled gradient that is a mean over 2**20 ranks underflows; a scaled one does not."""
    gradients = benchmark.Gradients(line())
    params = {"w": jnp.ones(4)}
    alone, many = (gradients.errors(params, ranks, 2.0**20) for ranks in (1, 2**24))
    assert alone["unscaled"]["one"] < 1e-3
    assert many["unscaled"]["one"] == many["unscaled"]["flushed"] == 1
    assert many["scaled"]["one"] < 1e-3


@pytest.mark.parametrize("name", TASKS)
def test_every_task_computes_in_the_dtype_of_its_arm(name):
    """Losses and gradients are float32 in every arm, and matrices are multiplied in its dtype."""
    task = TASKS[name]()
    params, batch = task.init(0), task.batch(np.random.default_rng(0))
    for dtype in ("float32", "bfloat16", "float16"):
        traced = jax.make_jaxpr(jax.value_and_grad(lambda p, d=dtype: task.loss(p, batch, d)))
        program = traced(params)
        assert {str(aval.dtype) for aval in program.out_avals} == {"float32"}
        assert {str(p.aval.dtype) for p in products(program.jaxpr)} == {dtype}


def products(jaxpr):
    """The results of all matrix products and convolutions in it."""
    for equation in equations(jaxpr):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield from equation.outvars


@pytest.fixture(scope="module")
def rows():
    """The results of the repository, by task and global batch."""
    made = {name: make() for name, make in TASKS.items()}
    return page.rows_of(json.loads(RESULTS.read_text())["runs"], made)


def test_only_seeds_that_all_arms_have_are_compared():
    """Of a benchmark that was interrupted in its second seed, the table has the first."""
    done = [("float32", 0, 1.0), ("adaptive", 0, 1.1), ("float32", 1, 5.0)]
    runs = [{"task": "line", "batch": 4, "arm": a, "seed": s, "score": x} for a, s, x in done]
    (row,) = page.rows_of(runs, {"line": line()})
    assert row.score("float32") == 1
    assert row.excess("adaptive") == pytest.approx(0.1)
    assert page.score(row, "adaptive") == "**1.1**"


def test_the_page_of_the_documentation_is_that_of_the_results(rows):
    """The tables in the docs are those of the results."""
    text = (ROOT / "docs" / "evidence" / page.PAGE).read_text()
    assert f"<!-- results -->\n\n{page.markdown(rows)}\n\n<!-- end of results -->" in text


def test_large_batches_need_scaling_and_small_ones_do_not(rows):
    """Unscaled, the language model and the denoiser get worse with the global batch; under both
    rules they are within 1 % of float32."""
    for task in ("language model", "denoising"):
        found = [row for row in rows if row.name == task]
        excess = [row.excess("unscaled") for row in found]
        assert excess == sorted(excess)
        assert excess[0] < page.WORSE < excess[-1]
        assert all(abs(row.excess(arm)) < page.WORSE for row in found for arm in RULES)


def test_scaled_gradients_are_more_exact_than_those_of_bfloat16(rows):
    """On every task, in one microbatch and in a sum."""
    measured = [row for row in rows if "adaptive" in row.runs]
    assert len(measured) > 10
    for row in measured:
        for key in ("one", "sum"):
            assert row.error("scaled", key) < row.error("bfloat16", key)

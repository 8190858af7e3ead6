"""The code of each page runs and prints what the page says; and no step that a page, an example or
a table of conformance shows as right is accused by `lint`."""

import functools
import importlib

import jax.numpy as jnp
import optax
import pytest
from conformance import test_optax, test_torch
from docs.linting import EXAMPLES, watched, wrong
from docs.pages import NEEDS, PAGES, TESTED, run

import gainstage as gs

pytestmark = [pytest.mark.repo, pytest.mark.thorough]


@pytest.mark.filterwarnings("ignore:.*half precision made:UserWarning")  # which a page shows
@pytest.mark.as_users
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in TESTED and "```python" in page.read_text()],
    ids=lambda page: page.stem,
)
def test_a_page(page, capsys, tmp_path, monkeypatch):
    """All blocks of a page run one after the other; a block of text behind one is what that
    prints."""
    for library in NEEDS.get(page.stem, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    found = watched(monkeypatch.setattr)
    for printed, output in run(page, capsys.readouterr):
        assert not output or printed == output
    assert wrong(found.faults) == []


def test_the_example_of_reinforcement_learning(monkeypatch):
    """Supervised steps, then those of GRPO."""
    monkeypatch.syspath_prepend(EXAMPLES)
    found = watched(monkeypatch.setattr)
    importlib.import_module("grpo").main(["--quick"])
    assert wrong(found.faults) == []
    assert found.seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(set(test_optax.FACTORIES) - set(test_optax.EXCLUDED)))
def test_a_transformation_of_optax(name, monkeypatch):
    """The step of the table of conformance, of every public transformation."""
    monkeypatch.setattr(test_optax, "one_by_one", lambda step, *_: step)
    tx = gs.with_loss_scale(optax.with_extra_args_support(test_optax.make(name)))
    differentiate = functools.partial(gs.value_and_grad, test_optax.loss)
    step, params, state = test_optax.stepping(name, tx, differentiate)
    assert wrong(gs.lint(step, params, state, jnp.float32(1.0))) == []


@pytest.mark.parametrize("case", ["plain", "clipping", "accumulation", "penalty", "losses"])
def test_a_run_that_is_that_of_torch(case, monkeypatch):
    """All steps of a run of the table of conformance, as one program."""
    monkeypatch.setattr(test_torch, "joined", lambda params: params)
    scaler = test_torch.Scaler(128.0, interval=1)
    assert wrong(gs.lint(lambda: test_torch.in_optax(case, scaler))) == []

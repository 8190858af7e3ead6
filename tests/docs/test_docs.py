"""The documentation: the code of each page runs, and prints what the page says."""

import functools
import re
import sys
from pathlib import Path

import jax
import pytest

import gainstage as gs
from gainstage.transforms.train_step import TrainStep

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
TESTED = {DOCS / "migrating.md", *DOCS.glob("start/*.md"), *DOCS.glob("from/*.md")}  # elsewhere
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
NEEDS = {
    "faq": ["equinox", "flax"],
    "optax-loops": ["equinox", "flax"],
    "sharded-optimizers": ["orbax.checkpoint"],
    "autocast": ["flax"],
    "kernels": ["equinox", "flax"],
}


def run(page, printed):
    """Runs the blocks of a page: for each what it printed, and what the page shows."""
    scope, found = {"__name__": "docs"}, []
    for code, output in re.findall(BLOCK, page.read_text(), re.DOTALL):
        exec(code, scope)
        found.append((printed().out.rstrip(), output.rstrip()))
    return found


@pytest.mark.as_users
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in TESTED and "```python" in page.read_text()],
    ids=lambda page: page.stem,
)
def test_code_blocks_run(page, capsys, tmp_path, monkeypatch):
    """Blocks run one after the other; a block of text behind one is what that prints."""
    for library in NEEDS.get(page.stem, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    for printed, output in run(page, capsys.readouterr):
        assert not output or printed == output


@pytest.fixture
def linted(monkeypatch):
    """What `lint` finds in the steps of a page, each at its first call."""
    faults, jit, take, seen = [], jax.jit, TrainStep.__call__, set()

    def linting_jit(fun=None, **options):
        if fun is None:
            return functools.partial(linting_jit, **options)
        compiled = jit(fun, **options)
        if options.keys() & {"static_argnums", "static_argnames"}:
            return compiled
        if sys._getframe(1).f_globals["__name__"] != "docs":
            return compiled

        def call(*args, **kwargs):
            if call not in seen:
                seen.add(call)
                faults.extend(gs.lint(compiled, *args, **kwargs))
            return compiled(*args, **kwargs)

        call.lower, call.trace = compiled.lower, compiled.trace
        return functools.update_wrapper(call, fun)

    def linting_step(self, state, *batch, **named):
        if self not in seen:
            seen.add(self)
            faults.extend(gs.lint(lambda state, *batch: take(self, state, *batch), state, *batch))
        return take(self, state, *batch, **named)

    monkeypatch.setattr(jax, "jit", linting_jit)
    monkeypatch.setattr(TrainStep, "__call__", linting_step)
    return faults, seen


@pytest.mark.thorough
@pytest.mark.parametrize(
    "page",
    [p for p in (*PAGES, ROOT / "README.md") if p not in TESTED and "train_step(" in p.read_text()],
    ids=lambda page: page.stem,
)
def test_lint_finds_nothing_in_the_steps_of_a_page(page, capsys, tmp_path, monkeypatch, linted):
    """No step that a page shows as right is accused."""
    for library in NEEDS.get(page.stem, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    run(page, capsys.readouterr)
    faults, seen = linted
    if not seen:
        pytest.skip("the page takes no step")
    assert [fault for fault in faults if fault.kind != "needless scale"] == []

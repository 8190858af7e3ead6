"""The documentation: the code of each page runs, and prints what the page says."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(set(DOCS.glob("**/*.md")) - {DOCS / "migrating.md"})  # that has a test of its own
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
NEEDS = {
    "faq": ["equinox", "flax"],
    "quickstart": ["equinox", "flax", "keras"],
    "scaling": ["orbax.checkpoint"],
}
LONG = {"trainers": ("2**15", "2**6")}  # how many rows, and how many suffice to run


def run(page, printed, change=lambda code: code):
    """Runs the blocks of a page: for each what it printed, and what the page shows."""
    scope, found = {"__name__": "docs"}, []
    for code, output in re.findall(BLOCK, page.read_text(), re.DOTALL):
        exec(change(code), scope)
        found.append((printed().out.rstrip(), output.rstrip()))
    return found


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.thorough] * (page.stem in LONG)) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_code_blocks_run(page, capsys, tmp_path, monkeypatch):
    """Blocks run one after the other; a block of text behind one is what that prints."""
    for library in NEEDS.get(page.stem, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    for printed, output in run(page, capsys.readouterr):
        assert not output or printed == output


@pytest.mark.parametrize("page", LONG)
def test_blocks_of_a_long_page_run_with_fewer_rows(page, capsys):
    """The blocks of a page that trains for seconds run with a small batch, and print as many lines
    as the page shows."""
    path, (many, few) = DOCS / f"{page}.md", LONG[page]
    assert many in path.read_text()
    for printed, output in run(path, capsys.readouterr, lambda code: code.replace(many, few)):
        assert not output or len(printed.splitlines()) == len(output.splitlines())


def test_fault_table_names_every_status():
    """The statuses and messages that the page on scaling promises are those of the code."""
    from gainstage.distributed.watchdog import TEMPORARY

    page = (DOCS / "scaling.md").read_text()
    assert {int(n) for n in re.findall(r"status (\d+)", page)} == {TEMPORARY, 1}

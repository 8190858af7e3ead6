"""The documentation: the code of each page runs, and prints what the page says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(set(DOCS.glob("**/*.md")) - {DOCS / "migrating.md"})  # that has a test of its own
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
NEEDS = {
    "faq": ["equinox", "flax"],
    "quickstart": ["equinox", "flax", "keras"],
    "scaling": ["orbax.checkpoint"],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page, capsys, tmp_path, monkeypatch):
    """Blocks run one after the other; a block of text behind one is what that prints."""
    for library in NEEDS.get(page.stem, []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "docs"}
    for code, output in re.findall(BLOCK, page.read_text(), re.DOTALL):
        exec(code, scope)
        printed = capsys.readouterr().out
        assert not output or printed.rstrip() == output.rstrip()


def test_fault_table_names_every_status():
    """The statuses and messages that the page on scaling promises are those of the code."""
    from gainstage.distributed.watchdog import TEMPORARY

    page = (DOCS / "scaling.md").read_text()
    assert {int(n) for n in re.findall(r"status (\d+)", page)} == {TEMPORARY, 1}

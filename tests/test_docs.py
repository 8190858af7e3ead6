"""Every code block of the documentation runs, and prints what the page says it does."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(set(DOCS.glob("**/*.md")) - {DOCS / "migrating.md"})  # that has a test of its own
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page, capsys):
    """Blocks run one after the other; a block of text behind one is what that prints."""
    scope = {"__name__": "docs"}
    for code, output in re.findall(BLOCK, page.read_text(), re.DOTALL):
        exec(code, scope)
        printed = capsys.readouterr().out
        assert not output or printed == output


def test_fault_table_names_every_status():
    """The statuses and messages that the page on scaling promises are those of the code."""
    from gainstage.distributed.watchdog import TEMPORARY

    page = (DOCS / "scaling.md").read_text()
    assert {int(n) for n in re.findall(r"status (\d+)", page)} == {TEMPORARY, 1}

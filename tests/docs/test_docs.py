"""The documentation: the code of each page runs, and prints what the page says."""

import re
from pathlib import Path

import pytest

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
    "checkpoints": ["flax", "orbax.checkpoint"],
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

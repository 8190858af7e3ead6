"""The pages of the documentation, and how their code is run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
TESTED = {DOCS / "migrating.md", *DOCS.glob("start/*.md"), *DOCS.glob("from/*.md")}  # elsewhere
BLOCK = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
NEEDS = {
    "bad-steps": ["keras"],
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

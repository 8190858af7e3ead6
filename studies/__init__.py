"""Evidence: what scaling does to training. Each study is a command; see README.md."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DOCS = RESULTS.parents[1] / "docs" / "evidence"  # where the pages of the studies lie

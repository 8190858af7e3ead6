"""What a run was like: writers of its numbers, and the report on them."""

from gainstage.diagnostics.runs import Run, read_run
from gainstage.diagnostics.writers import JsonLines, Writer, described

__all__ = ["JsonLines", "Run", "Writer", "described", "read_run"]

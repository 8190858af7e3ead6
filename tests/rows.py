"""Which rows of docs/migrating.md a test holds."""

import ast
from pathlib import Path

DOCUMENTS = Path(__file__).parent / "documents"


def row(section, *cells):
    """Marks a test that holds rows of the page, named by section and first cell."""
    assert isinstance(section, (int, str))
    assert cells
    return lambda test: test


def rows_held():
    """All rows that tests in `tests/documents` name, as (section, cell), in order."""
    trees = [ast.parse(path.read_text()) for path in sorted(DOCUMENTS.glob("test_*.py"))]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    marks = [call.args for call in calls if getattr(call.func, "id", None) == "row"]
    return [
        (ast.literal_eval(section), ast.literal_eval(cell))
        for section, *cells in marks
        for cell in cells
    ]

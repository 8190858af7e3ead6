"""The notebook is the page on a loop of one's own, as it ran."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.repo

jupytext = pytest.importorskip("jupytext")

spec = importlib.util.spec_from_file_location(
    "notebook", Path(__file__).parents[2] / ".ci/notebook.py"
)
notebook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebook)


@pytest.fixture(scope="module")
def cells():
    """The cells of the notebook in the folder."""
    return jupytext.read(notebook.NOTEBOOK).cells


def test_it_has_the_text_and_code_of_the_page(cells):
    """Its cells are those of the page, so a change of the page needs `.ci/notebook.py`."""
    page = notebook.cells_of(notebook.PAGE.read_text())
    assert [cell.source for cell in cells] == [cell.source for cell in page.cells]


def test_its_outputs_are_those_of_the_page(cells):
    """Each cell ran, without a warning, and printed what the page shows."""
    blocks = r"```python\n(.*?)\n```(?:\n\n```text\n(.*?)```)?"
    shown = dict(re.findall(blocks, notebook.PAGE.read_text(), re.DOTALL))
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) == len(shown)
    for place, cell in enumerate(code, 1):
        assert cell.execution_count == place
        assert {output.name for output in cell.outputs} <= {"stdout"}
        assert "".join(output.text for output in cell.outputs) == shown[cell.source]

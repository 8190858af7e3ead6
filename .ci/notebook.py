"""Makes docs/start/own-loop.ipynb of the page beside it, with the outputs of this machine.

pip install --group dev -e ".[flax]" equinox && python .ci/notebook.py
"""

import re
from pathlib import Path

import jupytext

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs/start/own-loop.md", ROOT / "docs/start/own-loop.ipynb"


def cells_of(page: str):
    """The page as a notebook that has not run, without the outputs that the page shows."""
    shown = re.compile(r"(```python\n.*?```)\n\n```text\n.*?```", re.DOTALL)
    commands = re.compile(r"```bash\n(.*?)\n```")  # text, where jupytext would make a cell
    return jupytext.reads(commands.sub(r"`\1`", shown.sub(r"\1", page)), fmt="md")


def main() -> None:
    """Runs the notebook and writes it."""
    from nbclient import NotebookClient  # of the group `dev`: the tests only read the notebook

    notebook = cells_of(PAGE.read_text())
    NotebookClient(notebook, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ in each run
    jupytext.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()

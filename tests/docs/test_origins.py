"""The pages for those who come from another library: before and after print what they show."""

import importlib.util
import subprocess
import sys

import pytest
from docs.linting import watched, wrong
from docs.pages import DOCS, ROOT

pytestmark = pytest.mark.repo

SCRIPT = ROOT / ".ci/origins.py"
spec = importlib.util.spec_from_file_location("origins", SCRIPT)
origins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(origins)

PAGES = sorted((DOCS / "from").glob("*.md"))
CASES = [(page, title) for page in PAGES for title in origins.titles(page)]
DIFFERENT = "## What differs"


@pytest.mark.parametrize(
    ("page", "title"), CASES, ids=[f"{page.stem}: {title}" for page, title in CASES]
)
def test_examples_print_what_the_page_shows(page, title, monkeypatch):
    """The examples of one title run in order and print the text behind them, and `lint` accuses no
    step of ours.

    They are skipped where what they need is missing; those of Gainstage alone always run.
    """
    if title != "Gainstage" and (reason := origins.missing(title)):
        pytest.skip(reason)
    found = watched(monkeypatch.setattr)
    for shown, printed in origins.run(page, title):
        assert printed == shown
    assert wrong(found.faults) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_example_is_left_out(page):
    """Every block of Python has a title and its output, and each page shows both sides."""
    text = page.read_text()
    assert len(origins.BLOCK.findall(text)) == text.count("```python")
    assert "Gainstage" in origins.titles(page)
    assert len(origins.titles(page)) > 1


def pairs(text):
    """The outputs of examples that belong together: those of an original, then Gainstage's."""
    before, after = [], []
    for title, _, shown in origins.BLOCK.findall(text):
        ours = title.startswith("Gainstage")
        if after and not ours:
            yield before, after
            before, after = [], []
        (after if ours else before).append(shown)
    if before or after:
        yield before, after


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_before_and_after_print_the_same(page):
    """Before and after print the same, except in the section on what differs, where none does.

    Code of Keras needs no second block where only its import differs.
    """
    same, different = page.read_text().split(DIFFERENT)
    for before, after in (pair for section in same.split("\n## ") for pair in pairs(section)):
        assert len(set(before)) == 1
        assert set(after) == set(before) or (page.stem == "keras" and not after)
    for before, after in pairs(different):
        assert len(set(before)) == len(set(after)) == 1
        assert set(before) != set(after)


def test_code_of_keras_needs_another_import_alone(tmp_path, monkeypatch):
    """With the `LossScaleOptimizer` of Gainstage, the examples of Keras print what they show."""
    if reason := origins.missing("Gainstage, Keras"):
        pytest.skip(reason)
    page, text = tmp_path / "keras.md", (DOCS / "from" / "keras.md").read_text()
    assert text.count("from keras.optimizers import LossScaleOptimizer  #") == 1
    page.write_text(
        text.replace("from keras.optimizers import", "from gainstage.interop.keras import")
    )
    found = watched(monkeypatch.setattr)
    examples = list(origins.run(page, "Keras 3.15"))
    assert [printed for _, printed in examples] == [shown for shown, _ in examples]
    assert wrong(found.faults) == []


def example(title, code, shown):
    """An example of a page."""
    return f'```python title="{title}"\n{code}\n```\n\n```text\n{shown}\n```\n\n'


@pytest.mark.parametrize(
    ("examples", "status", "last"),
    [
        ([("Library 1.10", "x = 1\nprint(x)", "1"), ("Library 1.10", "print(x)", "1")], 0, "2 run"),
        ([("Library 1.10", "x = 1\nprint(x)", "2")], 1, "1 run"),
        ([("Library 1.1", "1 / 0", "")], 1, "skipped: needs Library 1.1; got 1.10.3"),
        ([("Library, Absent 1.0", "1 / 0", "")], 1, "skipped: No module named 'absent'"),
        ([("Library", "x = 1\nprint(x)", "1"), ("Library, sys", "print(x)", "1")], 0, "2 run"),
    ],
)
def test_the_script(examples, status, last, tmp_path):
    """It fails if an output is wrong or nothing ran, and says which titles it skipped and why."""
    page = tmp_path / "page.md"
    page.write_text("".join(example(*parts) for parts in examples))
    (tmp_path / "library.py").write_text("__version__ = '1.10.3'\n")
    command = [sys.executable, SCRIPT, page]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == f"page.md, {examples[-1][0]}: {last}"

"""The six ways in: each page runs as a whole, in a process of its own, as a new user would."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest
from docs.pages import DOCS, ROOT

from docs import linting

pytestmark = pytest.mark.repo

WAYS = sorted((DOCS / "start").glob("*.md"))
NEEDS = {"keras-fit": ["keras"], "own-loop": ["flax", "equinox"], "trainer": ["flax"]}
BLOCK = r'```python(?: title="Gainstage")?\n(.*?)```(?:\n\n```text\n(.*?)```)?'
TORCH = r'```python title="torch [\d.]+"\n(.*?)```\n\n```text\n(.*?)```'
COMMAND = r"```bash\n(gainstage .*?)\n```(?:\n\nprints, among other things:\n\n```text\n(.*?)```)?"


def run(command, folder):
    """What a command prints in a folder; a warning of ours is an error there."""
    env = dict(os.environ, KERAS_BACKEND="jax", PYTHONWARNINGS="error::UserWarning")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", WAYS, ids=lambda page: page.stem)
def test_a_page_runs_from_its_first_line_to_its_last(page, tmp_path):
    """The code of a page is one script that prints what the page shows, with no step that `lint`
    accuses; then its commands run."""
    for library in NEEDS.get(page.stem, []):
        pytest.importorskip(library)
    blocks = re.findall(BLOCK, page.read_text(), re.S)
    (tmp_path / "train.py").write_text("".join(code for code, _ in blocks))
    shown = "".join(output for _, output in blocks)
    assert run([sys.executable, linting.__file__, "train.py"], tmp_path) == shown
    for command, lines in re.findall(COMMAND, page.read_text(), re.S):
        printed = run([sys.executable, "-m", *shlex.split(command)], tmp_path)
        assert set(lines.splitlines()) <= set(printed.splitlines()), printed


def test_the_torch_script_prints_what_ours_does(tmp_path):
    """The script of torch ends at the loss and the scale of ours; it runs where torch is."""
    page = (DOCS / "start/torch-amp.md").read_text()
    ((code, shown),) = re.findall(TORCH, page, re.S)
    assert shown == re.findall(BLOCK, page, re.S)[0][1]
    if not find_spec("torch"):
        pytest.skip("needs torch")
    (tmp_path / "script.py").write_text(code)
    done = [sys.executable, "-W", "ignore", "script.py"]
    assert subprocess.check_output(done, cwd=tmp_path, text=True) == shown


@pytest.mark.parametrize("page", WAYS, ids=lambda page: page.stem)
def test_a_way_in_is_short_and_complete(page):
    """It has at most 500 words, says what to install, and ends with a look at the result."""
    text = page.read_text()
    assert len(text.split()) <= 500
    assert "pip install" in re.findall(r"```bash\n(.*?)```", text, re.S)[0]
    assert "Look at it" in text or "gainstage report" in text


def test_there_are_six_and_the_readme_links_them():
    """README and the home page lead to each of them."""
    assert len(WAYS) == 6
    for page in WAYS:
        name = f"start/{page.name}"
        assert f"(docs/{name})" in (ROOT / "README.md").read_text()
        assert f"({name})" in (DOCS / "index.md").read_text()

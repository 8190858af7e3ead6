"""A release is what its tag, its version and its changelog say."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.repo

ROOT = Path(__file__).parents[2]


def script(name):
    """A script of the release, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release, site = script("release"), script("site")

ADDRESS = "https://host.example/Owner/name"
README = "![A](docs/a.png) [b](docs/b.md#c) [d](https://d.example) [e](#e) [f](docs/f.ipynb)\n"


@pytest.fixture
def project(tmp_path):
    """A project of version 1.2.3, whose changelog has this heading."""

    def make(heading):
        (tmp_path / "src/gainstage").mkdir(parents=True)
        (tmp_path / "src/gainstage/__init__.py").write_text('__version__ = "1.2.3"\n')
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## 1.2.2\n")
        (tmp_path / "pyproject.toml").write_text('[project]\nname = "gainstage"\n')
        (tmp_path / "README.md").write_text(README)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("tag", "heading", "message"),
    [
        ("v1.2.3", "1.2.3 (2026-01-31)", ""),
        ("v1.2.4", "1.2.4 (2026-01-31)", "Expected the tag v1.2.3"),
        ("1.2.3", "1.2.3 (2026-01-31)", "Expected the tag v1.2.3"),
        ("v1.2.3", "1.2.3 (unreleased)", "Expected CHANGELOG.md to begin"),
        ("v1.2.3", "1.2.4 (2026-01-31)", "Expected CHANGELOG.md to begin"),
    ],
)
def test_only_what_agrees_is_released(project, tag, heading, message):
    """The tag, the version and the dated section of the changelog name the same version."""
    root = project(heading)
    said = release.main(tag, ADDRESS, root)
    assert said.startswith(message)
    assert bool(said) == bool(message)
    assert ((root / "README.md").read_text() == README) == bool(message)


def test_a_release_names_the_addresses_of_its_repository(project):
    """The command succeeds, the package has the project's addresses, and each link of its README is
    whole."""
    root = project("1.2.3 (2026-01-31)")
    (root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release.py", root / ".ci")
    subprocess.run([sys.executable, root / ".ci/release.py", "v1.2.3", ADDRESS], check=True)
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"] == {
        "name": "gainstage",
        "urls": {
            "Documentation": "https://owner.github.io/name/",
            "Repository": ADDRESS,
            "Issues": f"{ADDRESS}/issues",
            "Changelog": f"{ADDRESS}/blob/v1.2.3/CHANGELOG.md",
        },
    }
    assert (root / "README.md").read_text() == (
        f"![A]({ADDRESS}/raw/v1.2.3/docs/a.png) [b]({ADDRESS}/blob/v1.2.3/docs/b.md#c) "
        "[d](https://d.example) [e](#e) "
        "[f](https://colab.research.google.com/github/Owner/name/blob/v1.2.3/docs/f.ipynb)\n"
    )


def test_actions_are_pinned():
    """Every action of every workflow is pinned by the hash of a commit, with its version."""
    lines = [
        line
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert lines
    assert all(re.search(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line) for line in lines)


def test_each_minor_version_keeps_its_documentation(tmp_path):
    """A new version adds a folder or replaces that of its minor version; `latest` is the newest,
    whatever the order of the releases, and nothing of a replaced site is left."""
    built, pages = tmp_path / "site", tmp_path / "pages"
    for version in ("0.9.0", "0.10.0", "0.9.1"):
        built.mkdir()
        (built / "index.html").write_text(version)
        (built / f"only-{version}.html").touch()
        site.main(version, built, pages)
        shutil.rmtree(built)
    shown = {path.parent.name: path.read_text() for path in pages.glob("*/index.html")}
    assert shown == {"0.9": "0.9.1", "0.10": "0.10.0", "latest": "0.10.0"}
    assert not (pages / "0.9/only-0.9.0.html").exists()
    listed = json.loads((pages / "versions.json").read_text())
    assert [(row["version"], row["aliases"]) for row in listed] == [
        ("0.10", ["latest"]),
        ("0.9", []),
    ]
    assert "latest/" in (pages / "index.html").read_text()


def test_the_workflow_tests_the_oldest_jax():
    """A job has the oldest Python and the oldest jax that the package admits, and pages name
    both."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    (jax,) = [d.removeprefix("jax>=") for d in project["dependencies"] if d.startswith("jax>=")]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.search(rf'- python: "{python}"\n +jax: {re.escape(jax)}\b', workflow)
    assert set(re.findall(r"jax: (\d[\d.]*)", workflow)) == {jax}
    for page in ("README.md", "docs/index.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text()
        assert re.search(rf"Python {python} or newer,? (and )?jax {jax} or newer", text), page
    stability = (ROOT / "docs/stability.md").read_text()
    assert f"| Python | {python} |" in stability
    assert f"| jax | {jax} |" in stability

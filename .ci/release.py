"""Checks that a tag, the version and the changelog agree, and writes the addresses of the project:

python .ci/release.py v0.1.0 https://github.com/OWNER/NAME

The addresses are those of the repository that releases, so its files do not name them.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(tag: str, address: str, root: Path = ROOT) -> str:
    """What is wrong with releasing the tag, or an empty string."""
    source = (root / "src/gainstage/__init__.py").read_text()
    version = re.search(r'__version__ = "(.+)"', source)[1]
    heading = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.M)[1]
    if tag != f"v{version}":
        return f"Expected the tag v{version}, as in `__version__`; got {tag!r}."
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        return f"Expected CHANGELOG.md to begin with '## {version} (YYYY-MM-DD)'; got {heading!r}."
    write_addresses(tag, address, root)
    return ""


def write_addresses(tag: str, address: str, root: Path) -> None:
    """Adds `[project.urls]`, and completes the README's links for the package's page; those to a
    notebook open it in Colab."""
    _, owner, name = address.rsplit("/", 2)
    urls = {
        "Documentation": f"https://{owner.lower()}.github.io/{name}/",
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
    }
    project, readme = root / "pyproject.toml", root / "README.md"
    rows = "".join(f'{label} = "{url}"\n' for label, url in urls.items())
    project.write_text(f"{project.read_text()}\n[project.urls]\n{rows}")
    colab = f"https://colab.research.google.com/github/{owner}/{name}/blob/{tag}/"
    whole = re.sub(r"\]\((?!http)([^)]*\.ipynb\))", rf"]({colab}\g<1>", readme.read_text())
    whole = re.sub(r"(!\[[^]]*\]\()(?!http)", rf"\g<1>{address}/raw/{tag}/", whole)
    readme.write_text(re.sub(r"\]\((?!http|#)", f"]({address}/blob/{tag}/", whole))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)  # an empty string would exit with 1

"""Checks that a tag, the version and the changelog agree: python .ci/release.py v0.1.0"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(tag: str, root: Path = ROOT) -> str:
    """What is wrong with releasing the tag, or an empty string."""
    source = (root / "src/gainstage/__init__.py").read_text()
    version = re.search(r'__version__ = "(.+)"', source)[1]
    heading = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.M)[1]
    if tag != f"v{version}":
        return f"Expected the tag v{version}, as in `__version__`; got {tag!r}."
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        return f"Expected CHANGELOG.md to begin with '## {version} (YYYY-MM-DD)'; got {heading!r}."
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Adds a built site to the sites of other versions: python .ci/site.py 0.1.0 site pages

`pages` then has a folder for each minor version, `latest` with the newest, and `versions.json`, for
the version selector of the site. The tool mike does this for MkDocs; its form for Zensical is not
released.
"""

import json
import shutil
import sys
from pathlib import Path

HOME = '<!doctype html><meta http-equiv="refresh" content="0; url=latest/">\n'


def main(version: str, site: Path, pages: Path) -> list[str]:
    """Returns the minor versions in `pages`, newest first, with this site in place."""
    minor = ".".join(version.split(".")[:2])
    _replace(site, pages / minor)
    known = [path.name for path in pages.iterdir() if path.name.replace(".", "").isdecimal()]
    known.sort(key=lambda name: [int(number) for number in name.split(".")], reverse=True)
    _replace(pages / known[0], pages / "latest")
    rows = [{"version": v, "title": v, "aliases": ["latest"] * (v == known[0])} for v in known]
    (pages / "versions.json").write_text(json.dumps(rows, indent=1) + "\n")
    (pages / "index.html").write_text(HOME)
    (pages / ".nojekyll").touch()  # GitHub Pages would leave out files that begin with _
    return known


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


if __name__ == "__main__":
    print("\n".join(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))

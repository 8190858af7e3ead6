"""Counts the words of the pages, as `wc -w` does: python .ci/words.py

What a command writes, between the marks `<!-- results -->` and `<!-- end of results -->` or the
like, is counted apart.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = re.compile(r"<!-- ([a-z ]+) -->.*?<!-- end of \1 -->", re.DOTALL)


def words(page: Path) -> tuple[int, int]:
    """The words of a page that somebody wrote, and those that a command wrote."""
    text = page.read_text()
    written = len(GENERATED.sub("", text).split())
    return written, len(text.split()) - written


def main() -> int:
    """Prints the words of each page, and returns how many are written in all."""
    counts = {page: words(page) for page in sorted(DOCS.glob("**/*.md"))}
    for page, (written, generated) in counts.items():
        print(f"{written:6} {generated or '':6} {page.relative_to(DOCS)}")
    total, generated = map(sum, zip(*counts.values(), strict=True))
    print(f"{total:6} {generated:6} in all: written, and generated")
    return total


if __name__ == "__main__":
    main()

"""Runs the examples of the pages that show code before and after a move to Gainstage.

python .ci/origins.py docs/from/torch.md

The title of an example names what it needs: "torch 2.13", "Gainstage", or "Gainstage, Keras". The
examples of one title run in order, in one namespace, and print the text behind them; for the last
of these titles those of "Gainstage" run too. A title is skipped if a library is missing or has
another version. This script needs the standard library alone, of Python 3.7 or newer, so that it
also runs where only an old library can be installed.
"""

import contextlib
import importlib
import io
import re
import sys
import warnings
from pathlib import Path

BLOCK = re.compile(r'```python title="(.*?)"\n(.*?)```\n\n```text\n(.*?)```', re.DOTALL)


def titles(page):
    """The titles of the examples of a page, each once."""
    return list(dict.fromkeys(title for title, _, _ in BLOCK.findall(page.read_text())))


def missing(title):
    """What the examples of a title need and do not find; None if they can run."""
    for part in title.split(", "):
        name, _, version = part.partition(" ")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the library's own affair
                library = importlib.import_module(name.lower())
        except ModuleNotFoundError as error:
            return str(error)
        if version and not f"{library.__version__}.".startswith(f"{version}."):
            return f"needs {name} {version}; got {library.__version__}"
    return None


def run(page, title):
    """Runs the examples of a title; yields what each should print and what it printed."""
    scope = {"__name__": "origins"}
    for name, code, shown in BLOCK.findall(page.read_text()):
        if not set(name.split(", ")) <= set(title.split(", ")):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            if name != "Gainstage":
                warnings.simplefilter("ignore")
            exec(compile(code, f"{page.name}, {name}", "exec"), scope)
        yield shown, printed.getvalue()


def main(pages):
    """Reports on each title of each page; 1 if an example printed something else, or none ran."""
    results = []
    for page in map(Path, pages):
        for title in titles(page):
            reason = missing(title)
            pairs = [] if reason else list(run(page, title))
            for shown, printed in pairs:
                results.append(shown == printed)
                if shown != printed:
                    print(f"expected:\n{shown}got:\n{printed}")
            done = f"skipped: {reason}" if reason else f"{len(pairs)} run"
            print(f"{page.name}, {title}: {done}")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

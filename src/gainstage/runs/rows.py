"""Tables, and text from files, for the terminal and for pages."""

from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 200  # characters of a name


class Rows(NamedTuple):
    """A table: its title, the names of its columns, its cells, and lines above and below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    lead: Sequence[str] = ()


def printable(text: str, longest: int = LONGEST) -> str:
    """Cuts and escapes a name from a file, so that it is one line and safe in a terminal."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return cut if cut.isprintable() else cut.encode("unicode_escape").decode("ascii")

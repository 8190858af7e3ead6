"""`gainstage lint`: whether a user's step scales its loss once, and divides once."""

import sys
from typing import Any

from gainstage._xray.from_file import imported_from
from gainstage.transforms.lint import Fault, lint


def main(words: str) -> int:
    """Prints what is found.

    Args:
        words: "module:function", of a function that returns (step, arguments).

    Returns:
        The exit status: 0 if nothing is found, else 1.
    """
    try:
        found = _found(imported_from("MODULE:FUNCTION", words, _called, "gainstage lint"), words)
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    for fault in found:
        print(fault)
    if not found:
        print(
            "Nothing found: each gradient is multiplied by the loss scale once, and divided once."
        )
    return 1 if found else 0


def _found(given: Any, words: str) -> list[Fault]:
    """The faults of what a function has returned."""
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], tuple)):
        kind = f"a tuple of {len(given)}" if isinstance(given, tuple) else type(given).__name__
        raise ValueError(
            f"Expected (step, arguments) from {words}, with a tuple of arguments; got {kind}."
        )
    step, arguments = given
    return lint(step, *arguments)


def _called(function: Any) -> Any:
    return function()

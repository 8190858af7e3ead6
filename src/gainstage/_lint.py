"""`gainstage lint`: whether a user's step scales its loss once, and divides once."""

import operator
import sys
from typing import Any

from gainstage._xray.from_file import imported_from
from gainstage.transforms.lint import Reading, read_program


def main(words: str) -> int:
    """Prints what is found.

    Args:
        words: "module:function", of a function that returns (step, arguments).

    Returns:
        The exit status: 0 if nothing is found, else 1.
    """
    try:
        reading = _found(
            imported_from("MODULE:FUNCTION", words, operator.call, "gainstage lint"), words
        )
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    for fault in reading.faults:
        print(fault)
    if not reading.faults:
        print(_no_fault(reading))
    return 1 if reading.faults else 0


def _no_fault(reading: Reading) -> str:
    """What it means that nothing was found."""
    if not reading.has_scale:
        return "Nothing to check: there is no loss scale of gainstage in this step."
    if reading.unknown:
        return (
            f"Nothing found, but {reading.unknown} of the gradients cannot be followed, as through "
            f"a kernel or a callback."
        )
    return "Nothing found: each gradient is multiplied by the loss scale once, and divided once."


def _found(returned: Any, words: str) -> Reading:
    """What is read of what a function has returned."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], tuple)):
        kind = (
            f"a tuple of {len(returned)}"
            if isinstance(returned, tuple)
            else type(returned).__name__
        )
        raise ValueError(
            f"Expected (step, arguments) from {words}, with a tuple of arguments; got {kind}."
        )
    step, arguments = returned
    return read_program(step, *arguments)

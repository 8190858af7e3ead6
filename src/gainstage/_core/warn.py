"""Warnings that name the line of the user's code, however deep in the library they arise."""

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])


def warn(message: str) -> None:
    """`warnings.warn`, at the first line of the call stack that is outside of the library."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)

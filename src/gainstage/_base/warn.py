"""Warnings that name the line of the user's code, however deep in the library they arise."""

import os
import re
import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

# The folders of Python and of this package, and those of what is installed.
_OWN = tuple(
    f"{folder}{os.sep}" for folder in (sysconfig.get_path("stdlib"), Path(__file__).parents[1])
)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def warn(message: str) -> None:
    """`warnings.warn`, at the first line of the call stack that is the user's own."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and is_installed(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def is_installed(file: str) -> bool:
    """Whether a file is of this package, of Python or of a library, instead of the user's own."""
    return file.startswith((*_OWN, "<frozen ")) or bool(_INSTALLED.search(file))

"""Warnings that name the line of the user's code, however deep in the library they arise."""

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import jax

# The folders of the library, and of JAX, which calls it while it traces.
INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *jax.__path__))


def warn(message: str) -> None:
    """`warnings.warn`, at the first line of the call stack that is outside of the library and of
    JAX."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)

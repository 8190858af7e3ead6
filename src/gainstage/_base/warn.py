"""Warnings that name the line of the user's code, however deep in the library they arise."""

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

# The libraries that call this one: JAX while it traces, and those that differentiate with it.
CALLERS = ("jax", "flax", "equinox", "keras", "optax")


def warn(message: str) -> None:
    """`warnings.warn`, at the first line of the call stack that is outside of the library and of
    those that call it."""
    folders = library_folders()
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def library_folders() -> tuple[str, ...]:
    """The folders of the library, and of those that call it."""
    loaded = (sys.modules[name] for name in CALLERS if name in sys.modules)
    folders = [Path(__file__).parents[1], *(path for module in loaded for path in module.__path__)]
    return tuple(f"{folder}{os.sep}" for folder in folders)

"""Bridges to other libraries: Keras, TensorBoard, and the loss-scale states of torch and Flax.

Users import its modules, of which some need an extra, so each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["importers", "keras", "tensorboard"]

if TYPE_CHECKING:
    from gainstage.interop import importers, keras, tensorboard
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Older TensorFlow APIs over the same objects: signatures and conversions.

Users import its modules; no other room needs it.
"""

from gainstage.compat import dtensor, experimental, stateful_scale, tf2, v1

__all__ = ["dtensor", "experimental", "stateful_scale", "tf2", "v1"]


def __dir__() -> list[str]:
    return __all__

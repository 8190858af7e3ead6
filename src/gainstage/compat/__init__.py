"""Older TensorFlow APIs over the same objects: signatures and conversions.

Users import its modules; no other room needs it.
"""

from typing import TYPE_CHECKING

from gainstage._base.lazy import lazy

if TYPE_CHECKING:
    from gainstage.compat import dtensor as dtensor
    from gainstage.compat import experimental as experimental
    from gainstage.compat import tf2 as tf2
    from gainstage.compat import v1 as v1
else:
    __getattr__, __dir__ = lazy(globals(), "dtensor", "experimental", "tf2", "v1")

"""Bridges to other libraries; the names of their files begin with that of the library.

Users import its modules; no other room needs it.
"""

from typing import TYPE_CHECKING

from gainstage._base.lazy import lazy

if TYPE_CHECKING:
    from gainstage.interop import importers as importers
    from gainstage.interop import keras as keras
    from gainstage.interop import tensorboard as tensorboard
else:
    __getattr__, __dir__ = lazy(globals(), "importers", "keras", "tensorboard")

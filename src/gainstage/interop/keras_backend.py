"""Imports Keras; raises if it is not installed or not on the JAX backend."""

import importlib
from typing import Any

from gainstage._base.extras import missing_package

try:
    keras: Any = importlib.import_module("keras")
except ModuleNotFoundError as _error:
    if _error.name != "keras":  # the module of another backend is missing
        raise ImportError("Expected Keras on the JAX backend; set KERAS_BACKEND=jax.") from _error
    raise missing_package("keras", "keras") from _error

if keras.backend.backend() != "jax":
    raise ImportError(
        f"Expected Keras on the JAX backend; got {keras.backend.backend()!r}. Set "
        f"KERAS_BACKEND=jax before keras is imported."
    )

PACKAGE = "gainstage"  # the package name that Keras registers the classes with

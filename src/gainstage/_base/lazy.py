"""Lazy imports of a package's modules (PEP 562)."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy(
    namespace: dict[str, Any], *modules: str
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package with lazy modules.

    Args:
        namespace: the package's `globals()`.
        *modules: the names of modules inside it.
    """
    package = namespace["__name__"]

    def import_attribute(name: str) -> ModuleType:
        if name in modules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        special = (name for name in namespace if name.startswith("__"))
        return [*namespace.get("__all__", ()), *modules, *special]

    return import_attribute, names

"""Lazy imports of a package's modules (PEP 562)."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy(
    namespace: dict[str, Any], *modules: str, **others: str
) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package with lazy modules.

    Args:
        namespace: the package's `globals()`.
        *modules: the names of modules inside it.
        **others: what to use instead of names that the package does not have.
    """
    package = namespace["__name__"]

    def import_attribute(name: str) -> ModuleType:
        if name in modules:
            return import_module(f"{package}.{name}")
        advice = f". {others[name]}" if name in others else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")

    def names() -> list[str]:
        special = (name for name in namespace if name.startswith("__"))
        return [*namespace.get("__all__", ()), *modules, *special]

    return import_attribute, names

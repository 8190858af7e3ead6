"""The operators of an object that holds an array."""

from collections.abc import Callable
from typing import Any, Never, Protocol

import jax
from jax.typing import ArrayLike


class _Unary(Protocol):
    def __call__(self) -> jax.Array: ...


class _Binary(Protocol):
    def __call__(self, other: "ArrayLike | Operators", /) -> jax.Array: ...


class _Item(Protocol):
    def __call__(self, index: Any, /) -> jax.Array: ...


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: "Operators", *others: Any) -> jax.Array:
        others = tuple(x.value() if isinstance(x, Operators) else x for x in others)
        return getattr(self.value(), name)(*others)

    apply.__name__ = name
    return apply


def _refused(self: "Operators", other: Never) -> Never:  # type checkers refuse it too
    raise TypeError(
        f"Expected `assign`, `assign_add` or `assign_sub` to change {self.name!r}: an operator "
        f"such as += would put an array in its place."
    )


class Operators:
    """Applies operators to `value()`."""

    name: str

    def value(self) -> jax.Array:
        """Returns the array."""
        raise NotImplementedError

    __neg__: _Unary = _operator("__neg__")
    __pos__: _Unary = _operator("__pos__")
    __abs__: _Unary = _operator("__abs__")
    __add__: _Binary = _operator("__add__")
    __sub__: _Binary = _operator("__sub__")
    __mul__: _Binary = _operator("__mul__")
    __truediv__: _Binary = _operator("__truediv__")
    __floordiv__: _Binary = _operator("__floordiv__")
    __mod__: _Binary = _operator("__mod__")
    __pow__: _Binary = _operator("__pow__")
    __matmul__: _Binary = _operator("__matmul__")
    __radd__: _Binary = _operator("__radd__")
    __rsub__: _Binary = _operator("__rsub__")
    __rmul__: _Binary = _operator("__rmul__")
    __rtruediv__: _Binary = _operator("__rtruediv__")
    __rfloordiv__: _Binary = _operator("__rfloordiv__")
    __rmod__: _Binary = _operator("__rmod__")
    __rpow__: _Binary = _operator("__rpow__")
    __rmatmul__: _Binary = _operator("__rmatmul__")
    __lt__: _Binary = _operator("__lt__")
    __le__: _Binary = _operator("__le__")
    __gt__: _Binary = _operator("__gt__")
    __ge__: _Binary = _operator("__ge__")
    __getitem__: _Item = _operator("__getitem__")
    __iadd__ = _refused
    __isub__ = _refused
    __imul__ = _refused
    __itruediv__ = _refused
    __ifloordiv__ = _refused
    __imod__ = _refused
    __ipow__ = _refused
    __imatmul__ = _refused

"""The operators and array methods of an object that holds an array."""

from collections.abc import Callable
from typing import Any, Never, Protocol

import jax
from jax.typing import ArrayLike

from gainstage._base._jax import refuse_as_argument


class _Unary(Protocol):
    def __call__(self) -> jax.Array: ...


class _Binary(Protocol):
    def __call__(self, other: "ArrayLike | Operators", /) -> jax.Array: ...


class _Item(Protocol):
    def __call__(self, index: Any, /) -> jax.Array: ...


class _Method(Protocol):
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: "Operators", *others: Any, **options: Any) -> Any:
        others = tuple(x.value() if isinstance(x, Operators) else x for x in others)
        return getattr(self.value(), name)(*others, **options)

    apply.__name__, apply.__doc__ = name, f"Calls `{name}` of the array."
    return apply


def _attribute(name: str) -> Any:
    return property(lambda self: getattr(self.value(), name), doc=f"`{name}` of the array.")


def _refuse_operator(self: "Operators", other: Never) -> Never:  # type checkers refuse it too
    raise TypeError(
        f"Expected `assign`, `assign_add` or `assign_sub` to change {self.name!r}: an operator "
        f"such as += would put an array in its place."
    )


def _refused_as_argument(variable: "Operators") -> Never:
    name = variable.name if variable.name.isidentifier() else "variable"
    raise ValueError(  # JAX replaces a TypeError by one of its own
        f"Expected an array; got the variable {variable.name!r}. Pass its value to functions of "
        f"JAX, as in `jnp.sum({name}.value())`."
    )


class Operators:
    """Applies operators and array methods to `value()`."""

    name: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_as_argument(cls, _refused_as_argument)

    def value(self) -> jax.Array:
        """Returns the array."""
        raise NotImplementedError

    def _number(self) -> Any:
        """The value, for a conversion to a Python number."""
        raise NotImplementedError

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        return self._number().__index__()

    def __bool__(self) -> bool:
        return bool(self._number())

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
    __iadd__ = _refuse_operator
    __isub__ = _refuse_operator
    __imul__ = _refuse_operator
    __itruediv__ = _refuse_operator
    __ifloordiv__ = _refuse_operator
    __imod__ = _refuse_operator
    __ipow__ = _refuse_operator
    __imatmul__ = _refuse_operator

    all: _Method = _operator("all")
    any: _Method = _operator("any")
    argmax: _Method = _operator("argmax")
    argmin: _Method = _operator("argmin")
    argsort: _Method = _operator("argsort")
    astype: _Method = _operator("astype")
    clip: _Method = _operator("clip")
    conj: _Method = _operator("conj")
    conjugate: _Method = _operator("conjugate")
    copy: _Method = _operator("copy")
    cumprod: _Method = _operator("cumprod")
    cumsum: _Method = _operator("cumsum")
    diagonal: _Method = _operator("diagonal")
    dot: _Method = _operator("dot")
    flatten: _Method = _operator("flatten")
    item: _Method = _operator("item")
    max: _Method = _operator("max")
    mean: _Method = _operator("mean")
    min: _Method = _operator("min")
    nonzero: _Method = _operator("nonzero")
    prod: _Method = _operator("prod")
    ravel: _Method = _operator("ravel")
    repeat: _Method = _operator("repeat")
    reshape: _Method = _operator("reshape")
    round: _Method = _operator("round")
    sort: _Method = _operator("sort")
    squeeze: _Method = _operator("squeeze")
    std: _Method = _operator("std")
    sum: _Method = _operator("sum")
    swapaxes: _Method = _operator("swapaxes")
    take: _Method = _operator("take")
    tolist: _Method = _operator("tolist")
    trace: _Method = _operator("trace")
    transpose: _Method = _operator("transpose")
    var: _Method = _operator("var")
    T: Any = _attribute("T")
    at: Any = _attribute("at")
    imag: Any = _attribute("imag")
    mT: Any = _attribute("mT")  # noqa: N815 - the name of the array API
    nbytes: Any = _attribute("nbytes")
    real: Any = _attribute("real")

"""Statistics of the numbers in one array."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


class Typed(Protocol):
    """An array, or its description."""

    @property
    def dtype(self) -> np.dtype: ...


class Numbers(NamedTuple):
    """Counts of elements, and statistics of the finite ones."""

    size: int
    nan: int
    inf: int
    zero: int
    max: float
    rms: float
    first_bad: int = -1  # the place of the first non-finite element, in a flat array

    @property
    def bad(self) -> int:
        """The number of non-finite elements."""
        return self.nan + self.inf


def numbers_of(x: ArrayLike) -> Numbers:
    """Returns the statistics of a floating or complex array."""
    a = np.asarray(jax.device_get(x))
    wide = a.dtype.kind == "c" or a.dtype == np.float64
    a = np.abs(a if wide else a.astype(np.float32)).ravel()
    if not a.size:
        return Numbers(0, 0, 0, 0, 0.0, 0.0)
    nan, inf, first = 0, 0, -1
    top = float(a.max())
    if not np.isfinite(top):
        finite = np.isfinite(a)
        nan = int(np.isnan(a).sum())
        inf = int(a.size - finite.sum()) - nan
        first = int(np.argmin(finite))
        a = np.where(finite, a, np.zeros((), a.dtype))
        top = float(a.max())
    zero = a.size - int(np.count_nonzero(a)) - nan - inf
    return Numbers(a.size, nan, inf, zero, top, _rms(a, top), first)


def _rms(a: np.ndarray, top: float) -> float:
    if top == 0:
        return 0.0
    if not 1e-15 < top < 1e15:  # the squares would exceed float32
        a = a / np.asarray(top, a.dtype)
        return top * float(np.sqrt(np.dot(a, a) / a.size))
    return float(np.sqrt(np.dot(a, a) / a.size))


def has_floats(x: Typed) -> bool:
    """Whether an array, or its description, has floating or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def largest(dtype: DTypeLike) -> float:
    """The largest finite number of a dtype."""
    return float(jnp.finfo(dtype).max)


def smallest(dtype: DTypeLike) -> float:
    """The smallest positive number of a dtype, including subnormal numbers."""
    return float(jnp.finfo(dtype).smallest_subnormal)


def relative_error(x: ArrayLike, ref: ArrayLike, of_ref: Numbers) -> float:
    """The norm of the difference over the norm of the reference; 0 if one is not finite."""
    if of_ref.bad or not of_ref.rms:
        return 0.0
    a, b = (np.asarray(jax.device_get(v)) for v in (x, ref))
    wide = np.result_type(b.dtype, np.float32)
    difference = numbers_of(np.subtract(a.astype(wide), b.astype(wide)))
    return 0.0 if difference.bad else difference.rms / of_ref.rms


def whole_error(
    gradients: Sequence[Any], scale: float, references: Sequence[Any], scale_of_references: float
) -> float:
    """The norm of the difference of all gradients, relative to that of the references."""
    difference = norm = 0.0
    for gradient, reference in zip(gradients, references, strict=True):
        if not hasattr(gradient, "dtype") or gradient.dtype.kind not in "fVc":
            continue
        wide = np.complex128 if np.iscomplexobj(gradient) else np.float64
        g, r = (np.asarray(jax.device_get(x)).astype(wide) for x in (gradient, reference))
        r = r / scale_of_references
        with np.errstate(all="ignore"):
            difference += float(np.square(np.abs(g / scale - r)).sum())
        norm += float(np.square(np.abs(r)).sum())
    return math.sqrt(difference / norm) if norm else math.nan if difference else 0.0

"""Fused kernels that take half precision, such as flash attention, in functions in float32."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from gainstage._programs import in_dtype
from gainstage._programs.scopes import KERNEL
from gainstage._variables.types import P, R
from gainstage.precision.plan import DTYPES
from gainstage.transforms.retrace import CAST_TO, IS_KEPT, SINGLE, explain_float32

__all__ = ["half_only"]


def half_only(kernel: Callable[P, R], *, float32: Callable[P, R] | None = None) -> Callable[P, R]:
    """Returns a function that gives `kernel` half precision under `autocast`.

    A library chooses its fused kernel by the dtype of its arguments, and autocast traces a function
    in float32. Wrap what has a derivative of its own and is fast in half precision only: attention
    of cuDNN, Pallas kernels, calls of `jax.ffi`. Under `autocast` the float32 arrays among its
    arguments are cast to the dtype of `autocast` ("float8" means float16 here), and its results in
    half precision count as float32, as those of a product do. Autocast changes nothing inside.

    Elsewhere the function is `float32`, or `kernel` as it is: without `autocast`, inside of
    `keep_float32`, and where a measured plan keeps it in float32. Arrays that you have cast to half
    precision yourself, with no float32 array beside them, always go to `kernel` as they are.

    Args:
        kernel: a function of arrays and pytrees. It gets float32 arrays, also those of numpy, in
            half precision, and all else as it is. Pass arrays as arguments: what it closes over is
            not cast.
        float32: what is called with float32 arrays, if `kernel` refuses them. It takes the same
            arguments and returns results of the same shapes. Default: `kernel`.

    Raises:
        TypeError: `kernel` or `float32` is not callable; from the call, they return results of
            different shapes.

    Examples:
        >>> import gainstage as gs
        >>> import jax, jax.numpy as jnp
        >>> def flash(q, k, v):  # stands for a fused kernel
        ...     assert q.dtype == jnp.float16
        ...     return jax.nn.softmax(q @ k.T) @ v
        >>> def attention(q, k, v):
        ...     return jax.nn.softmax(q @ k.T) @ v
        >>> attend = gs.half_only(flash, float32=attention)
        >>> x = jnp.ones((4, 8))
        >>> print(gs.autocast(lambda x: attend(x, x, x))(x).dtype, attend(x, x, x).dtype)
        float32 float32

    Source: `torch.amp.custom_fwd(cast_inputs=torch.float16)`.
    """
    for name, own in (("kernel", kernel), ("float32", kernel if float32 is None else float32)):
        if not callable(own):
            raise TypeError(f"Expected a function for {name} of half_only; got {own!r}.")
    wide = kernel if float32 is None else float32

    @functools.wraps(kernel)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves = jax.tree.leaves((args, kwargs))
        if not any(map(_is_single, leaves)):
            return kernel(*args, **kwargs)
        if not CAST_TO.value or IS_KEPT.value:
            try:
                return wide(*args, **kwargs)
            except Exception as error:
                explain_float32(error)
                raise
        return _as_one_equation(kernel, wide, (args, kwargs))

    return chosen


def _as_one_equation(kernel: Callable[..., R], wide: Callable[..., R], arguments: Any) -> R:
    """The call as one equation: a `cond` of which `autocast` takes one program. All that retraces
    the function finds the same program, whichever is computed."""
    leaves, tree = jax.tree.flatten(arguments)
    # Numpy arrays stay concrete: a kernel may read a mask when it is traced.
    is_operand = [_is_single(x) and isinstance(x, jax.Array) for x in leaves]
    operands = [x for x, is_own in zip(leaves, is_operand, strict=True) if is_own]
    half = DTYPES[CAST_TO.value]
    types = list[_Results]()  # those in float32

    def called(version: Callable[..., R], dtype: np.dtype, xs: tuple[jax.Array, ...]) -> R:
        each = iter(xs)
        given = [next(each) if is_own else x for x, is_own in zip(leaves, is_operand, strict=True)]
        args, kwargs = jax.tree.unflatten(
            tree, [x.astype(dtype) if _is_single(x) else x for x in given]
        )
        with CAST_TO(""):
            return version(*args, **kwargs)

    def in_half_precision(*xs: jax.Array) -> R:
        try:
            computed = called(kernel, half, xs)
        except Exception as error:
            error.add_note(
                f"gainstage.half_only passed {half} to this kernel, as autocast asks for."
            )
            if "cudnn" in str(error).lower() and jax.default_backend() != "gpu":
                error.add_note(
                    "There is no cuDNN without a GPU: take the kernel only where "
                    'jax.default_backend() == "gpu", and else the function without it.'
                )
            raise
        results = _results_of(computed)
        wanted = types[0] if types else results
        if (results.structure, results.shapes) != (wanted.structure, wanted.shapes):
            raise TypeError(
                f"Expected results of the same shapes from kernel and float32 of "
                f"gainstage.half_only; got {results.shapes} and {wanted.shapes}."
            )
        counted = [SINGLE if dtype == half else dtype for dtype in wanted.dtypes]
        dtypes = iter(wanted.dtypes if types else counted)
        return jax.tree.map(lambda x: _settled(x, next(dtypes)), computed)

    def in_float32(*xs: jax.Array) -> R:
        try:
            results = called(wide, SINGLE, xs)
        except Exception:
            if wide is not kernel:
                raise
        else:
            types.append(_results_of(results))
            return results
        return in_half_precision(*xs)  # a kernel that refuses float32, and nothing in its place

    # `cond` traces its first program first. With `jax.disable_jit` it would compute that at once.
    with jax.named_scope(KERNEL), jax.disable_jit(False):
        return jax.lax.cond(True, in_float32, in_half_precision, *operands)


class _Results(NamedTuple):
    """What the results of a function are."""

    structure: Any
    shapes: list[tuple[int, ...]]
    dtypes: list[Any]


def _results_of(found: Any) -> _Results:
    leaves, structure = jax.tree.flatten(found)
    dtypes = [getattr(x, "dtype", None) for x in leaves]
    return _Results(structure, [np.shape(x) for x in leaves], dtypes)


def _settled(x: Any, dtype: Any) -> Any:
    """A result in half precision, in the dtype that it has in float32."""
    return x.astype(dtype) if in_dtype.is_half(x) else x


def _is_single(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and x.dtype == SINGLE

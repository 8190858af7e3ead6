"""Float8 products with delayed scaling, and casts that count what they clamp."""

# A finite check cannot see that a cast clamped. So each cast counts, and returns its counts from
# the backward pass as the gradient of its scaling state. It counts tensors per power of two instead
# of keeping a maximum. Counts may be added or averaged, by autodiff (if a state is used twice),
# `vmap`, `scan`, microbatches or devices.

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from gainstage._base import checks
from gainstage._base.warn import warn
from gainstage._scaling.float8_states import DotScaling, Scaling, Seen
from gainstage._variables.sharding import varying_like
from gainstage._variables.types import PyTree
from gainstage.precision.float8_product import (
    BITS,
    Dims,
    Tensor8,
    bits_to_fit,
    in_a_gradient,
    product,
    to_left,
    to_right,
)

__all__ = ["DotScaling", "Scaling", "Seen", "cast", "dot", "dot_scaling", "scaling", "update"]

Scalings = TypeVar("Scalings")  # a pytree of them

MOST_STEPS = 2**24  # steps: float32 cannot count further


def scaling() -> Scaling:
    """Returns the first scaling of a tensor, with a factor of 1.

    Examples:
        >>> from gainstage.precision import float8
        >>> state = float8.scaling()
        >>> x8, seen = float8.cast([3.0, 1000.0], state.factor, "float8_e4m3fn")
        >>> state = float8.update(state, seen)
        >>> print(x8, state.clamped, state.factor)
        [3 448] 1.0 0.25
    """
    zero, sizes = jnp.float32(0), jnp.zeros(2 * BITS + 1, jnp.float32)
    seen = Seen(sizes, zero, zero)
    return Scaling(jnp.float32(1), jnp.full_like(sizes, MOST_STEPS), zero, zero, zero, seen)


def dot_scaling() -> DotScaling:
    """Returns the first scalings of a product, for `dot`."""
    return DotScaling(scaling(), scaling(), scaling())


def cast(x: npt.ArrayLike, factor: ArrayLike, dtype: DTypeLike) -> tuple[jax.Array, Seen]:
    """Multiplies a tensor by a factor, clamps it to the range of a small dtype, and casts it.

    inf and NaN become NaN and are never clamped: such a step has to be skipped. A dtype without
    NaN (float4_e2m1fn) can only count them.

    Args:
        x: an array of any floating dtype.
        factor: a scalar; if it is a power of two, only the cast rounds.
        dtype: the dtype of the result, of at most 8 bits, such as "float8_e4m3fn".

    Returns:
        The array in `dtype`, and its counts, a `Seen`.

    Raises:
        TypeError: `dtype` is not a floating dtype of at most 8 bits.

    Examples:
        >>> from gainstage.precision import float8
        >>> x8, seen = float8.cast([1.0, -5.0, float("inf")], 2.0, "float4_e2m1fn")
        >>> print(x8[:2], seen.clamped, seen.nonfinite)
        [2 -6] 1.0 1.0
    """
    dtype, low, high = _range(dtype)
    x = jnp.asarray(x, jnp.float32)
    finite, scaled = jnp.isfinite(x), x * factor
    clamped = finite & ((scaled < low) | (scaled > high))
    kept = jnp.where(finite, jnp.clip(scaled, low, high), jnp.nan)

    def count(mask: jax.Array) -> jax.Array:
        return mask.sum(dtype=jnp.int32).astype(jnp.float32)

    largest = jnp.where(finite, jnp.abs(x), 0).max(initial=0)
    bits = bits_to_fit(largest, high)
    best = (jnp.arange(-BITS, BITS + 1) == bits) & (largest > 0)
    seen = Seen(best.astype(jnp.float32), count(clamped), count(~finite))
    return kept.astype(dtype), seen


def dot(
    x: npt.ArrayLike,
    w: npt.ArrayLike,
    state: DotScaling,
    *,
    dtype: DTypeLike = "float8_e4m3fn",
    grad: DTypeLike = "float8_e5m2",
) -> jax.Array:
    """A float8 product, forwards and backwards, with float32 sums.

    Differentiate with respect to `state` too, and pass that gradient to `update`. The operands are
    stored in float8 for the backward pass. It has no second derivative.

    Args:
        x: an array [..., k] of a floating dtype.
        w: an array [k, ...] of a floating dtype.
        state: a `dot_scaling()`, one per product.
        dtype: the dtype of the operands, of at most 8 bits.
        grad: the dtype of the result's cotangent.

    Returns:
        The product over k, of shape [*x.shape[:-1], *w.shape[1:]], in the wider of their dtypes.

    Raises:
        TypeError: `state` is not a `DotScaling`, an array is not floating, or a dtype not small;
            from a second derivative.
        ValueError: the shapes do not fit.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gainstage.precision import float8
        >>> state, x, w = float8.dot_scaling(), jnp.ones((2, 3)), jnp.full((3, 1), 500.0)
        >>> def loss(w, state):
        ...     return float8.dot(x, w, state).sum()
        >>> for _ in range(2):
        ...     value, (grads, seen) = jax.value_and_grad(loss, (0, 1))(w, state)
        ...     state = float8.update(state, seen)
        ...     print(value, grads.ravel(), state.w.clamped)
        2688.0 [2. 2. 2.] 3.0
        3072.0 [2. 2. 2.] 0.0

    Source: Micikevicius et al., 2022, arXiv:2209.05433 (e4m3 forwards, e5m2 backwards).
    """
    if not isinstance(state, DotScaling):
        raise TypeError(
            f"Expected a gainstage.precision.float8.DotScaling for state; got {state!r}."
        )
    x, w = jnp.asarray(x), jnp.asarray(w)
    for name, array in (("x", x), ("w", w)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"Expected a floating array for {name}; got {array.dtype}.")
    if not x.ndim or not w.ndim or x.shape[-1] != w.shape[0]:
        raise ValueError(f"Expected [..., k] and [k, ...] for x and w; got {x.shape}, {w.shape}.")
    dtypes = (_range(dtype)[0], _range(grad)[0], x.dtype, w.dtype, jnp.result_type(x, w))
    # In `jax.shard_map`, replicated arguments are made varying, as their cotangents are: JAX then
    # adds those up.
    arguments = (x, w, state)
    return _dot(dtypes, *varying_like(arguments, jax.tree.leaves(arguments)))


# What the backward pass needs: the operands in float8, the counts of their casts, and the factor
# of the cotangent.
Kept = tuple[Tensor8, Tensor8, Seen, Seen, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(dtypes: tuple[np.dtype, ...], x: jax.Array, w: jax.Array, state: DotScaling) -> jax.Array:
    return _forward(dtypes, x, w, state)[0]


def _dims(x: jax.Array) -> Dims:
    """The last axis of the left operand, and the first of the right one."""
    return ((x.ndim - 1,), (0,)), ((), ())


def _forward(
    dtypes: tuple[np.dtype, ...], x: jax.Array, w: jax.Array, state: DotScaling
) -> tuple[jax.Array, Kept]:
    x8, seen_x = cast(x, state.x.factor, dtypes[0])
    w8, seen_w = cast(w, state.w.factor, dtypes[0])
    left, right = Tensor8(x8, 1 / state.x.factor), Tensor8(w8, 1 / state.w.factor)
    out = product(left, right, _dims(x)).astype(dtypes[4])
    kept = in_a_gradient(left), in_a_gradient(right)
    return out, (*kept, seen_x, seen_w, state.cotangent.factor)


def _forward_of_primals(dtypes: tuple[np.dtype, ...], *primals: PyTree) -> tuple[jax.Array, Kept]:
    _, w, state = primals
    if w.perturbed and not state.x.factor.perturbed:
        warn(
            "The weights of a float8 product are differentiated, but its state is not, so its "
            "factors stay as they are. Differentiate the state too, with argnums=(0, 1), and pass "
            "its gradient to gainstage.precision.float8.update."
        )
    return _forward(dtypes, *jax.tree.map(lambda primal: primal.value, primals))


def _backward(
    dtypes: tuple[np.dtype, ...], kept: Kept, cotangent: Any
) -> tuple[jax.Array, jax.Array, DotScaling]:
    if isinstance(cotangent, SymbolicZero):
        unused: Any = cotangent.aval
        cotangent = jnp.zeros(unused.shape, unused.dtype)
    left, right, seen_x, seen_w, factor = kept
    g8, seen_g = cast(cotangent, factor, dtypes[1])
    g, dims = in_a_gradient(Tensor8(g8, 1 / factor)), _dims(left.x)
    to_x, to_w = to_left(g, left.x, right, dims), to_right(g, left, right.x, dims)
    zeros = [None] * 5  # `custom_vjp` takes None for zeros
    seen = (Scaling._make([*zeros, seen]) for seen in (seen_x, seen_w, seen_g))
    return to_x.astype(dtypes[2]), to_w.astype(dtypes[3]), DotScaling(*seen)


_dot.defvjp(_forward_of_primals, _backward, symbolic_zeros=True)


def update(
    states: Scalings,
    seen: PyTree,
    applied: ArrayLike = True,
    *,
    history: int = 1024,
    margin: int = 0,
) -> Scalings:
    """Returns the scalings for the next step: the largest recent element fits, `margin` bits below.

    A tensor is ignored if it was all zeros, not finite, or in a skipped step. Its factor and
    history then stay, and `stale` grows. Clamped elements are always counted.

    Args:
        states: a pytree of `Scaling` and `DotScaling`, also stacked for `jax.lax.scan`.
        seen: the gradient with respect to `states`, or a `Seen` for each `Scaling`.
        applied: whether the step was applied, a bool or bool scalar.
        history: the number of steps that the largest element is remembered, an integer >= 1.
        margin: free bits above it, an integer >= 0.

    Raises:
        TypeError: `seen` is not such a pytree, or an argument is not a number.
        ValueError: an argument is out of range, or `seen` has another structure.

    Source: `DelayedScaling` of Transformer Engine, with factors that are powers of two.
    """
    history = checks.integer("history", history, low=1, high=MOST_STEPS)
    margin = checks.integer("margin", margin, low=0, high=BITS)
    applied = jnp.asarray(applied)

    def one(state: Scaling, new: object) -> Scaling:
        new = new.seen if isinstance(new, Scaling) else new
        if not isinstance(new, Seen):
            raise TypeError(
                f"Expected the gradient of states for seen, or a Seen for each; got {new!r}."
            )
        usable = applied & (new.nonfinite == 0) & (new.sizes > 0).any(-1)
        ages = jnp.where(new.sizes > 0, 0, jnp.minimum(state.history + 1, MOST_STEPS))
        ages = jnp.where(usable[..., None], ages, state.history)
        recent = ages < history
        bits = jnp.clip(jnp.argmax(recent, -1) - BITS - margin, -BITS, BITS)
        return state._replace(
            factor=jnp.where(recent.any(-1), jnp.ldexp(jnp.float32(1), bits), state.factor),
            history=ages,
            clamped=new.clamped,
            clamped_steps=state.clamped_steps + (new.clamped > 0),
            stale=jnp.where(usable, 0, state.stale + 1),
        )

    return jax.tree.map(one, states, seen, is_leaf=lambda node: isinstance(node, Scaling))


def _range(dtype: DTypeLike) -> tuple[np.dtype, float, float]:
    """Returns a small dtype with its lowest and highest number."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits > 8:
        raise TypeError(f"Expected a floating dtype of at most 8 bits; got {dtype}.")
    info = jnp.finfo(dtype)
    low = float(info.min)
    # float8_e8m0fnu has no sign and no zero, and starts at a subnormal of float32.
    return dtype, max(low, 2.0**-BITS) if low > 0 else low, float(info.max)

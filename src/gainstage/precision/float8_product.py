"""Products of float8 tensors, forwards and backwards, each tensor with a unit of its own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from gainstage._base._jax import batches_next
from gainstage._variables.sharding import typed_sharding, varying_axes, varying_like

E4M3 = np.dtype(jnp.float8_e4m3fn)  # of operands
E5M2 = np.dtype(jnp.float8_e5m2)  # of cotangents
BITS = 126  # units are from 2**-126 to 2**126: beyond, they or their reciprocals flush to 0

Axes = tuple[int, ...]
Dims = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]  # of `jax.lax.dot_general`


class Tensor8(NamedTuple):
    """A tensor in float8: its numbers are `x` times `unit`."""

    x: jax.Array  # float8
    unit: jax.Array  # float32


def bits_to_fit(largest: jax.Array, limit: float) -> jax.Array:
    """The exponent of the largest power of two that keeps a number, times it, within a limit."""
    part, top = np.frexp(limit)
    own, exponent = jnp.frexp(largest)  # not `log2`, which would round
    return jnp.clip(int(top) - exponent - (own > jnp.float32(part)), -BITS, BITS)


@custom_vmap
def _max_abs(x: jax.Array) -> jax.Array:
    """The largest absolute number of a tensor."""
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    axes = varying_axes(largest)
    return lax.pmax(largest, tuple(sorted(axes))) if axes else largest


@_max_abs.def_vmap
def _largest_of_all(size: int, is_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return _max_abs(x), False


def rounded(x: jax.Array, dtype: np.dtype) -> Tensor8:
    """A tensor in float8, whose unit is such that its largest number just fits.

    On a mesh that is the largest number on all devices, and under `jax.vmap` that of all examples.
    An inf or NaN stays non-finite, so that the step is skipped. Its derivative is 0: `multiply` has
    that of the product.
    """
    return _round_to_float8(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_to_float8(x: jax.Array, dtype: np.dtype) -> Tensor8:
    largest = _max_abs(x)
    bits = bits_to_fit(largest, float(jnp.finfo(dtype).max))
    bits = jnp.where((largest > 0) & jnp.isfinite(largest), bits, 0)
    wide = x.astype(jnp.float32) * jnp.ldexp(jnp.float32(1), bits)
    return Tensor8(wide.astype(dtype), jnp.ldexp(jnp.float32(1), -bits))


@_round_to_float8.defjvp
def _no_derivative(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[Tensor8, Tensor8]:
    small = _round_to_float8(*primals, dtype)
    # A zero that depends on the tangent: JAX would forget another one, and `in_a_gradient` would
    # not see that it is differentiated. Nothing computes it.
    zero = 0 * jnp.sum(tangents[0], dtype=jnp.float32)
    axes = varying_axes(zero)
    zero = lax.psum(zero, tuple(sorted(axes))) if axes else zero
    return small, Tensor8(jnp.zeros_like(small.x), zero)


@jax.custom_jvp
def in_a_gradient(x: Tensor8) -> Tensor8:
    """A tensor of a gradient. Its derivative, which would be a second one, is refused."""
    return x


@in_a_gradient.defjvp
def _no_second_derivative(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "A float8 product has no second derivative, because its operands and its cotangent are "
        "rounded to float8. Compute the function whose gradient is differentiated again in half "
        'precision: gainstage.autocast(fun, "float16").'
    )


def to_operand(x: jax.Array) -> Tensor8:
    """An operand of a product in float8."""
    return rounded(x, E4M3)


def product_of_tensors(
    a: Tensor8, b: Tensor8, dims: Dims, sharding: NamedSharding | None = None
) -> jax.Array:
    """The product in float32."""
    out = lax.dot_general(a.x, b.x, dims, preferred_element_type=jnp.float32, out_sharding=sharding)
    return out * a.unit * b.unit  # one after the other: the product of both could overflow


def to_left(g: Tensor8, a: jax.Array, b: Tensor8, dims: Dims) -> jax.Array:
    """The derivative of a product with respect to its left operand `a`, in float32.

    Args:
        g: the cotangent of the product.
        a: an array of the shape and the sharding of the operand.
        b: the right operand.
        dims: those of the product.
    """
    (over_a, over_b), (batch_a, batch_b) = dims
    free_a, free_b = _rest(a, over_a, batch_a), _rest(b.x, over_b, batch_b)
    first = len(batch_a) + len(free_a)
    columns, batch = tuple(range(first, g.x.ndim)), tuple(range(len(batch_a)))
    order = [*batch_a, *free_a, *(over_a[i] for i in np.argsort(over_b))]
    out = product_of_tensors(g, b, ((columns, free_b), (batch, batch_b)), _in_order(a, order))
    return _moved(out, order)


def to_right(g: Tensor8, a: Tensor8, b: jax.Array, dims: Dims) -> jax.Array:
    """The derivative of a product with respect to its right operand `b`, in float32."""
    (over_a, over_b), (batch_a, batch_b) = dims
    free_a, free_b = _rest(a.x, over_a, batch_a), _rest(b, over_b, batch_b)
    rows = tuple(range(len(batch_a), len(batch_a) + len(free_a)))
    order = [*batch_b, *(over_b[i] for i in np.argsort(over_a)), *free_b]
    batch = tuple(range(len(batch_a)))
    out = product_of_tensors(a, g, ((free_a, rows), (batch_a, batch)), _in_order(b, order))
    return _moved(out, order)


def _rest(x: jax.Array, *used: Axes) -> Axes:
    return tuple(i for i in range(x.ndim) if not any(i in axes for axes in used))


def _in_order(x: jax.Array, order: Sequence[int]) -> NamedSharding | None:
    """The sharding of an array, if its type has one, with its axes in another order."""
    sharding = typed_sharding(x)
    if sharding is None:
        return None
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[i] for i in order)))


def _moved(out: jax.Array, order: Sequence[int]) -> jax.Array:
    """The array whose axis `order[i]` is axis `i` of `out`."""
    return lax.transpose(out, tuple(int(i) for i in np.argsort(order)))


class ProductSpec(NamedTuple):
    """What a product does, apart from its operands."""

    dims: Dims
    dtype: np.dtype  # of the result
    of_x: np.dtype  # of the derivatives
    of_w: np.dtype
    sharding: NamedSharding | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiplied(
    spec: ProductSpec, x: jax.Array, w: jax.Array, x8: Tensor8, w8: Tensor8
) -> jax.Array:
    return product_of_tensors(x8, w8, spec.dims, spec.sharding).astype(spec.dtype)


def _forward(
    spec: ProductSpec, x: jax.Array, w: jax.Array, x8: Tensor8, w8: Tensor8
) -> tuple[jax.Array, tuple[Tensor8, Tensor8]]:
    out = product_of_tensors(x8, w8, spec.dims, spec.sharding).astype(spec.dtype)
    return out, (in_a_gradient(x8), in_a_gradient(w8))


def _backward(spec: ProductSpec, kept: tuple[Tensor8, Tensor8], g: jax.Array) -> tuple[Any, ...]:
    (x8, w8), g8 = kept, in_a_gradient(rounded(g, E5M2))
    to_x, to_w = to_left(g8, x8.x, w8, spec.dims), to_right(g8, x8, w8.x, spec.dims)
    return to_x.astype(spec.of_x), to_w.astype(spec.of_w), None, None


_multiplied.defvjp(_forward, _backward)


def multiply(spec: ProductSpec, x: jax.Array, w: jax.Array, x8: Tensor8, w8: Tensor8) -> jax.Array:
    """The product of `x8` and `w8`, to which `x` and `w` have been rounded.

    The cotangent is rounded too, and the backward pass keeps the float8 tensors alone. The examples
    of `jax.vmap` are rows of one product, if they share the right operand: `jax.grad` around it
    would otherwise store a gradient for each example.
    """
    run = _of_examples(spec) if batches_next() else functools.partial(_multiplied, spec)
    # In `jax.shard_map`, replicated operands are made varying, as their cotangents are: JAX then
    # adds those up.
    operands = (x, w, x8, w8)
    return run(*varying_like(operands, jax.tree.leaves(operands)))


@functools.cache
def _of_examples(spec: ProductSpec) -> Callable[..., jax.Array]:
    """A product inside of `jax.vmap`."""
    one = functools.partial(_multiplied, spec)
    product_of_examples = custom_vmap(one)

    @product_of_examples.def_vmap
    def together(size: int, is_batched: Any, *operands: Any) -> tuple[jax.Array, bool]:
        if is_batched[0] == is_batched[1]:
            in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
            return jax.vmap(one, in_axes)(*operands), True
        x, w, *small = operands
        side = int(is_batched[1])  # of the operand with examples
        if is_batched[2 + side].unit:  # the same for all of them
            small[side] = small[side]._replace(unit=small[side].unit[0])
        over, batch = spec.dims
        new = spec._replace(dims=(_later(over, side), _later(batch, side)), sharding=None)
        rows = x.ndim - len(over[0]) - len(batch[0])
        place = len(batch[0]) + (rows if side else 0)
        return jnp.moveaxis(multiply(new, x, w, *small), place, 0), True

    return product_of_examples


def _later(axes: tuple[Axes, Axes], side: int) -> tuple[Axes, Axes]:
    """The axes of two operands, one of which gets a new first axis."""
    left, right = (
        tuple(axis + (number == side) for axis in own) for number, own in enumerate(axes)
    )
    return left, right

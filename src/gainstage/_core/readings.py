"""Reads the gradients once: whether all are finite, and the norms that clipping needs."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gainstage._core.bridge import compiled_if_eager
from gainstage._core.gradients import float32_or_wider, real_parts
from gainstage._core.packing import CHUNK, bundle, chunk_for, chunk_of, fold
from gainstage._core.sharding import (
    axes_of,
    is_first,
    knows_what_varies,
    on_one_device,
    typed_sharding,
    varying,
    varying_axes,
    varying_like,
)
from gainstage._core.variable import placed


class Inspection(NamedTuple):
    """The properties of the true gradients, from one reading of the scaled ones."""

    finite: jax.Array  # bool scalar: whether all their elements, and the norms, are finite
    norms: list[jax.Array]  # the norms that clipping divides by, for `gradients.clip`
    norm: jax.Array | None  # the norm of all gradients together, if requested


class Request(NamedTuple):
    """What to read beside whether the gradients are finite."""

    norms: bool = False  # whether to compute norms
    each: bool = False  # whether to compute one norm per gradient, instead of one for all
    limit: float = math.inf  # the limit that norms are clipped to
    bounded: bool = False  # whether to check the norm of the sums with the accumulators


# The squares of float32 numbers use half of its exponents. A norm is computed from the squares
# times the first of these factors for which their sum is finite.
FACTORS = (2.0**80, 1.0, 2.0**-90)
FLUSHED = 2.0**-60  # a smaller sum of squares may miss some that were flushed to zero
# Devices also send norms as squares: a single norm in two ranges, separated by this value.
LARGE = 2.0**12


@compiled_if_eager
def inspect(
    grads: Sequence[Any],
    scale: jax.Array | float = 1.0,
    limits: Mapping[str, float] | None = None,
    onto: Sequence[Any] = (),
    shardings: Sequence[Any] = (),
    norm: bool = False,
) -> Inspection:
    """Reads scaled gradients once: whether the true ones are finite, and their norms.

    On a mesh each device reads its own shards. One `psum` of 4 bytes, and 4 per norm, combines
    them. Norms are correct over the whole range of float32. On a mesh they are correct above
    `2**-104`, and with `clipnorm` from `2**-40` to `2**70` times the limit.

    Args:
        grads: arrays of any floating dtype, or None; complex ones only without shardings.
        scale: the scale of the gradients.
        limits: the active clip option, as for `gradients.clip`.
        onto: finite accumulators to which the true gradients will be added. Their sums are checked,
            and the norm of all sums too, if `limits` has one.
        shardings: the sharding of each gradient, None if it is on one device. If empty, only the
            arrays' own types are known.
        norm: whether to compute the norm of all gradients even if clipping needs none. Inside
            `jax.shard_map(check_vma=False)` it is NaN for finite gradients.

    Raises:
        ValueError: clipping by a norm inside `jax.shard_map(check_vma=False)`.
    """
    grads = [g if g is not None and jnp.issubdtype(g.dtype, jnp.inexact) else None for g in grads]
    if any(map(jnp.iscomplexobj, grads)):
        grads = real_parts([g for g in grads if g is not None])
    known = bool(shardings) or on_one_device(False, [g for g in grads if g is not None])
    shardings = shardings or [typed_sharding(gradient) for gradient in grads]
    here = [i for i, gradient in enumerate(grads) if gradient is not None]
    columns = [[column[i] for i in here] for column in (grads, onto) if column]
    spread = {i: shardings[i] for i in here if isinstance(shardings[i], NamedSharding)}
    limits = {name: limit for name, limit in (limits or {}).items() if name != "clipvalue"}
    clips = bool(limits) and not onto
    request = Request(clips or norm, clips and "clipnorm" in limits, bounded=bool(limits and onto))
    if clips:
        request = request._replace(limit=min(limits.values()))
    mesh = jax.sharding.get_abstract_mesh()
    unknown = bool(mesh.manual_axes) and not knows_what_varies(mesh)
    if unknown and clips:
        (name,) = limits
        raise ValueError(
            f"{name} needs to know which gradients differ between devices, and "
            f"jax.shard_map(check_vma=False) does not say. Use check_vma=True, or clip the "
            f"gradients before the step."
        )
    if not here:
        finite, norms = jnp.array(True), jnp.zeros(int(not request.each))
    elif mesh.manual_axes:  # inside of `jax.shard_map`
        axes = [varying_axes(gradient) for gradient in columns[0]]
        ordered = set(mesh.manual_axes) == set(mesh.axis_names)
        finite, norms = _read(columns, scale, request, axes, mesh.manual_axes, ordered)
    elif spread:
        alone = NamedSharding(next(iter(spread.values())).mesh, PartitionSpec())
        finite, norms = _read_mesh(columns, scale, request, [spread.get(i, alone) for i in here])
    else:
        finite, norms = _read(columns, scale, request, [frozenset()] * len(here), (), known)
    if not request.norms:
        return Inspection(finite, [], None)
    whole = _together(norms)
    whole = jnp.where(finite, jnp.nan, whole) if unknown else whole
    finite = finite & jnp.isfinite(norms).all() if clips else finite
    return Inspection(finite, list(norms) if clips else [], whole if norm else None)


def all_finite(tree: Any) -> jax.Array:
    """Returns whether every element of a pytree is finite: a bool scalar, True if it is empty."""
    return inspect([jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]).finite


@compiled_if_eager
def norms(
    grads: Sequence[Any], limits: Mapping[str, float], shardings: Sequence[Any] = ()
) -> list[jax.Array]:
    """Returns the norms that `gradients.clip` divides by, for unscaled gradients."""
    clips = any(name != "clipvalue" for name in limits)
    return inspect(grads, 1.0, limits, shardings=shardings).norms if clips else []


def _read_mesh(
    columns: Sequence[Sequence[jax.Array]],
    scale: jax.Array | float,
    request: Request,
    shardings: Sequence[NamedSharding],
) -> tuple[jax.Array, Any]:
    """Reads sharded arrays: each device its shards, then one sum over all devices."""
    mesh, specs = shardings[0].mesh, [sharding.spec for sharding in shardings]
    axes = [axes_of(spec) for spec in specs]
    everywhere: Any = jax.shard_map(
        lambda columns, scale: _read(columns, scale, request, axes, mesh.axis_names),
        mesh=mesh,
        in_specs=([specs] * len(columns), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    columns = [[placed(x, s) for x, s in zip(c, shardings, strict=True)] for c in columns]
    return everywhere(columns, jnp.asarray(scale, jnp.float32))


def _read(
    columns: Sequence[Sequence[jax.Array]],
    scale: jax.Array | float,
    request: Request,
    axes: Sequence[frozenset[str]],
    everywhere: Sequence[str],
    ordered: bool = True,
) -> tuple[jax.Array, Any]:
    """Reads the gradients on all devices: whether the true ones are finite, and their norms.

    Args:
        columns: the gradients on this device, and the accumulators if there are any.
        scale, request: as for `_read_here`.
        axes: for each gradient, the mesh axes along which it varies.
        everywhere: all mesh axes; empty off a mesh.
        ordered: as for `_read_here`.
    """
    if request.each or not ordered:
        pairs = [*zip(axes, zip(*columns, strict=True), strict=True)]
    else:
        pairs = bundle(axes, *columns)
    finite, norms = _read_here([row for _, row in pairs], scale, request, everywhere, ordered)
    if everywhere and request.norms:  # count replicas once, on their first device
        first = {own: is_first(axis for axis in everywhere if axis not in own) for own in axes}
        norms = jnp.where(jnp.array([first[own] for own, _ in pairs]), norms, 0)
    if request.norms and not request.each:
        norms = _together(norms)[None]
    if not everywhere:
        return finite, norms
    packed = _packed(norms, request) if request.norms else jnp.zeros(1)
    packed = packed.at[-1].set(jnp.where(finite, packed[-1], jnp.inf))
    packed = lax.psum(varying(packed, everywhere), tuple(everywhere))
    return jnp.isfinite(packed[-1]), _unpacked(packed, request) if request.norms else None


def _read_here(
    rows: Sequence[tuple[jax.Array, ...]],
    scale: jax.Array | float,
    request: Request,
    everywhere: Sequence[str],
    ordered: bool,
) -> tuple[jax.Array, Any]:
    """Reads the gradients on this device: whether the true ones are finite, and each row's norm.

    A finite sum proves that all of its terms are finite, and a CPU computes sums of float32 numbers
    or of their squares fastest. If the sum is too large or not finite, it proves nothing; the CPU
    then reads the gradients a second time. Other devices check each element at once.

    Args:
        rows: gradients, each with its accumulator if there is one.
        scale: the scale of the gradients.
        request: what to read.
        everywhere: all mesh axes, for the norm of the sums over all devices.
        ordered: whether the arrays are known to be on this device.
    """
    scale = jnp.asarray(
        scale, jnp.result_type(jnp.float32, *(float32_or_wider(x.dtype) for x, *_ in rows))
    )

    def on_cpu() -> tuple[jax.Array, Any]:
        adds = len(rows[0]) > 1
        proved, sums = _quickly([x for x, *_ in rows], scale, request, adds, everywhere, ordered)
        norms = jnp.sqrt(sums) / scale if request.norms else None
        exactly = functools.partial(_exactly, rows, scale, request, everywhere, sums, ordered)
        return lax.cond(proved, lambda: (proved, norms), exactly)

    if ordered and not request.norms and not request.bounded:
        return lax.platform_dependent(cpu=on_cpu, default=lambda: (_at_once(rows, scale), None))
    return lax.platform_dependent(
        cpu=on_cpu, default=lambda: _exactly(rows, scale, request, everywhere)
    )


def _at_once(rows: Sequence[tuple[jax.Array, ...]], scale: jax.Array) -> jax.Array:
    """Whether the true gradients are finite: one GPU kernel per row, and one for all rows."""
    each = []
    for gradient, *onto in rows:
        x = gradient.astype(float32_or_wider(gradient.dtype))
        finite = jnp.isfinite(sum(onto, x * (1 / scale).astype(x.dtype)))
        # XLA:GPU would reduce a matrix to one number in two kernels.
        last = -1 if finite.ndim > 1 and finite.shape[-1] >= 64 else None
        each.append(finite.all(axis=last).reshape(-1))
    # The barrier keeps XLA from a separate kernel for the reduction of each vector.
    return lax.optimization_barrier(jnp.concatenate(each)).all() if len(each) > 1 else each[0].all()


def _quickly(
    arrays: Sequence[jax.Array],
    scale: jax.Array,
    request: Request,
    adds: bool,
    everywhere: Sequence[str],
    ordered: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes sums over scaled gradients, and whether they prove that all is finite. They are sums
    of squares if norms are requested or there are accumulators, else of the elements."""
    squares = request.norms or adds

    longest, term = chunk_for(arrays), jnp.square if squares else lambda x: x

    @jax.jit  # traced once for each shape
    def in_chunks(before: jax.Array, x: jax.Array) -> jax.Array:
        # A CPU adds chunks to each other on all cores, but sums one chunk on a single core. The
        # start is 0, but XLA must not know: the loops then run in turn and share their memory.
        start = jnp.full(chunk_of(x.size, longest), jnp.isnan(before)).astype(jnp.float32)
        more: Any = lambda so_far, x: so_far + term(x.astype(jnp.float32))  # noqa: E731
        return jnp.sum(fold(more, start, x.reshape(-1), longest=longest))

    before, each = jnp.zeros(()), []
    before = varying_like(before, arrays) if everywhere else before
    for x in arrays:
        if ordered and x.dtype == jnp.float16:  # XLA:CPU would store it in float32
            before = in_chunks(before, x)
            each.append(before.astype(scale.dtype))
        else:
            x = x.astype(float32_or_wider(x.dtype))
            each.append(jnp.sum(term(x)).astype(scale.dtype))
    sums = jnp.stack(each)
    total = jnp.sum(sums)
    if not squares:
        # With a scale below 1 an element may overflow although the sum is finite.
        largest = jnp.asarray(max(float(jnp.finfo(x.dtype).max) for x in arrays), scale.dtype)
        return jnp.isfinite(total) & jnp.isfinite(largest / scale), sums
    # Elements below 2**100 cannot make a finite float32 sum, or norm, overflow.
    proved = jnp.sqrt(total) / scale < 2.0**100
    # Squares that were flushed to zero belong to norms far below any other limit.
    small = request.limit * scale <= 2.0**-30
    return proved & (~small | (sums > FLUSHED).all()), sums


def _exactly(
    rows: Sequence[tuple[jax.Array, ...]],
    scale: jax.Array,
    request: Request,
    everywhere: Sequence[str],
    sums: jax.Array | None = None,
    ordered: bool = False,
) -> tuple[jax.Array, Any]:
    """Returns the result of `_read_here` from a check of each element.

    Args:
        rows, scale, request, everywhere, ordered: as for `_read_here`.
        sums: on a CPU, the sums from `_quickly`.
    """
    on_cpu = sums is not None
    factors: Any = jnp.asarray(FACTORS, scale.dtype)
    if sums is not None and request.norms:  # one for each row
        factors = jnp.where(sums < FLUSHED, factors[0], factors[1])
        factors = jnp.where(jnp.isfinite(sums), factors, FACTORS[2])[:, None]
    devices = math.prod(map(lax.axis_size, everywhere))
    bound = jnp.asarray(2.0**-64 * devices**0.5, scale.dtype)

    def look(
        scalars: Sequence[jax.Array], so_far: Any, gradient: jax.Array, *onto: jax.Array
    ) -> Any:
        x = gradient.astype(float32_or_wider(gradient.dtype))
        inverse, bound, *factors = (scalar.astype(x.dtype) for scalar in scalars)
        new = sum(onto, x * inverse)
        terms = [x * factor for factor in factors] + [new * bound] * request.bounded
        more = [jnp.sum(jnp.square(term)).astype(scale.dtype) for term in terms]
        # XLA:CPU (jaxlib 0.10.2) stores the result of `isfinite`.
        finite = jnp.isfinite(jnp.sum(new - new)) if on_cpu else jnp.isfinite(new).all()
        return so_far[0] & finite, [old + one for old, one in zip(so_far[1], more, strict=True)]

    def read(scalars: Any, so_far: Any, *row: jax.Array) -> Any:
        stored = row[0].dtype.itemsize < 4 or len(row) > 1  # by XLA:CPU, in float32
        longest = CHUNK if ordered and stored else 0
        return fold(functools.partial(look, scalars), so_far, *row, longest=longest)

    read_once = jax.jit(read)  # traced once for rows of one shape
    finite = jnp.array(True)
    each: list[Any] = []
    for i, row in enumerate(rows):
        own = [*factors[i if on_cpu else slice(None)]] if request.norms else []
        # The barrier hides that factors are constants: XLA would compute (c x)**2 as c**2 x**2,
        # which overflows. On a CPU each row waits for the one before; otherwise XLA would store
        # scalars that several rows share as arrays of their shape.
        before = finite if on_cpu else True
        *scalars, _ = lax.optimization_barrier([1 / scale, bound, *own, before])
        nothing = [jnp.zeros_like(scale)] * (len(own) + request.bounded)
        start = (finite, nothing)
        start = varying_like(start, row) if everywhere else start
        finite, found = read_once(scalars, start, *row)
        each.append(jnp.stack(found) if found else None)
    if request.bounded:
        finite &= jnp.isfinite(jnp.sum(jnp.stack(each)[:, -1]))
    if not request.norms:
        return finite, None
    found = jnp.stack(each)[:, : factors.shape[-1]]
    return finite, _norms(found, factors, scale)


def _norms(sums: jax.Array, factors: jax.Array, scale: jax.Array) -> jax.Array:
    """The norms of true gradients, from the sums of squares of scaled ones times each factor."""
    # In this order an intermediate overflows or underflows only if the result does. The barrier
    # keeps XLA (jaxlib 0.10.2) from computing a / b / c as a / (b c).
    divisors = jnp.maximum(factors, 1), jnp.minimum(factors, 1) * jnp.maximum(scale, 1)
    each = jnp.sqrt(sums)
    for divisor in (*divisors, jnp.minimum(scale, 1)):
        each = lax.optimization_barrier(each / divisor)
    place = jnp.argmax(jnp.isfinite(sums).at[:, -1].set(True), axis=1)
    return jnp.take_along_axis(each, place[:, None], axis=1)[:, 0]


def _times(x: jax.Array, factor: float) -> jax.Array:
    """`x * factor`, to be squared; XLA would compute `(c x)**2` as `c**2 x**2`, which overflows."""
    return x * lax.optimization_barrier(jnp.asarray(factor, x.dtype))


def _together(norms: jax.Array) -> jax.Array:
    """The norm of all arrays together, from the norm of each."""
    largest = jnp.max(norms, initial=0)
    whole = largest * jnp.sqrt(jnp.sum(jnp.square(norms / largest)))
    return jnp.where((largest > 0) & jnp.isfinite(largest), whole, jnp.sum(norms))


def _packed(norms: jax.Array, request: Request) -> jax.Array:
    """Norms of parts, as numbers whose sum over all devices gives the norms of the whole.

    They are squares, followed by one number that becomes inf if something is not finite. For a
    single norm, that number is its square if it is at least `LARGE`, else 0.
    """
    if request.each:
        return jnp.append(jnp.square(_times(norms, _unit(request))), 0)
    large = norms >= LARGE
    small = _times(jnp.where(large, 0, norms), 2.0**41)
    # The norm of finite elements may be inf: then send a number that is too large.
    rest = jnp.minimum(_times(jnp.where(large, norms, 0), 2.0**-75), 2.0**55)
    return jnp.square(jnp.append(small, rest))


def _unpacked(packed: jax.Array, request: Request) -> jax.Array:
    """The norms of the whole, from the sum of all devices' `_packed`."""
    norms = jnp.sqrt(packed[:-1])
    if request.each:
        return norms / _unit(request)
    norm = jnp.hypot(norms * 2.0**-41, jnp.sqrt(packed[-1:]) * 2.0**75)
    return jnp.where(jnp.isnan(norms), jnp.nan, norm)  # nan beside inf


def _unit(request: Request) -> float:
    """The power of two by which norms are multiplied before they are squared."""
    return 2.0 ** min(max(-20 - math.frexp(request.limit)[1], -100), 100)

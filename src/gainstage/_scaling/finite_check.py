"""Reads the gradients once: whether all are finite, and the norms that clipping needs."""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from gainstage._scaling.gradients import Clip, float32_or_wider, real_parts
from gainstage._scaling.norms import from_sums, pack, together, unit_for, unpack
from gainstage._variables.bridge import compiled_if_eager
from gainstage._variables.sharding import (
    axes_of,
    is_first,
    knows_what_varies,
    on_one_device,
    typed_sharding,
    varying,
    varying_axes,
    varying_like,
)
from gainstage._variables.types import PyTree, Tree
from gainstage._variables.variable import placed

Key = TypeVar("Key", bound=Hashable)
Keyed: TypeAlias = tuple[Key, tuple[jax.Array, ...]]
BUNDLE = 64  # arrays: XLA:GPU fuses the computation of so many into one `concatenate`
CHUNK = 2**15  # elements: this many float32 numbers fit into a core's cache


class Inspection(NamedTuple):
    """The properties of the true gradients, from one reading of the scaled ones."""

    finite: jax.Array  # bool scalar: whether all their elements, and the norms, are finite
    norms: list[jax.Array]  # the norms that clipping divides by, for `gradients.clipped`
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
SMALL = 4096  # elements: the largest array that is joined with others, and read in one chunk
SMALLEST_SUM = 2.0**-60  # a smaller sum of squares may miss some that were flushed to zero


@compiled_if_eager
def read_gradients(
    grads: Sequence[Any],
    scale: jax.Array | float = 1.0,
    clip: Clip | None = None,
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
        clip: how gradients will be clipped: by norms, which must then be finite too.
        onto: finite accumulators to which the true gradients will be added. Their sums are checked,
            and the norm of all sums too, if they are clipped by it.
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
    is_local = bool(shardings) or on_one_device(False, [g for g in grads if g is not None])
    shardings = shardings or [typed_sharding(gradient) for gradient in grads]
    here = [i for i, gradient in enumerate(grads) if gradient is not None]
    columns = [[column[i] for i in here] for column in (grads, onto) if column]
    spread = {i: shardings[i] for i in here if isinstance(shardings[i], NamedSharding)}
    clip = clip if clip and clip.by_norm else None
    clips = clip is not None and not onto
    request = Request(clips or norm, bounded=clip is not None and bool(onto))
    if clip and clips:
        request = request._replace(each=clip.each, limit=clip.limit)
    mesh = jax.sharding.get_abstract_mesh()
    unknown = bool(mesh.manual_axes) and not knows_what_varies(mesh)
    if unknown and clip and clips:
        raise ValueError(
            f"{clip.option} needs to know which gradients differ between devices, and "
            f"jax.shard_map(check_vma=False) does not say. Use check_vma=True, or clip the "
            f"gradients before the step."
        )
    if not here:
        finite, norms = jnp.array(True), jnp.zeros(int(not request.each))
    elif mesh.manual_axes:  # inside of `jax.shard_map`
        is_local = set(mesh.manual_axes) == set(mesh.axis_names)
        reader = Reader(request, tuple(mesh.manual_axes), is_local)
        finite, norms = reader.read(columns, scale, [varying_axes(x) for x in columns[0]])
    elif spread:
        mesh = next(iter(spread.values())).mesh
        alone = NamedSharding(mesh, PartitionSpec())
        reader = Reader(request, mesh.axis_names)
        finite, norms = reader.read_mesh(columns, scale, [spread.get(i, alone) for i in here])
    else:
        reader = Reader(request, (), is_local)
        finite, norms = reader.read(columns, scale, [frozenset()] * len(here))
    if not request.norms:
        return Inspection(finite, [], None)
    whole = together(norms)
    whole = jnp.where(finite, jnp.nan, whole) if unknown else whole
    finite = finite & jnp.isfinite(norms).all() if clips else finite
    return Inspection(finite, list(norms) if clips else [], whole if norm else None)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether every element of a pytree is finite: a bool scalar, True if it is empty."""
    return read_gradients([jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]).finite


@compiled_if_eager
def norms(
    grads: Sequence[Any], clip: Clip | None, shardings: Sequence[Any] = ()
) -> list[jax.Array]:
    """Returns the norms that `gradients.clipped` divides by, for unscaled gradients."""
    needed = clip is not None and clip.by_norm
    return read_gradients(grads, 1.0, clip, shardings=shardings).norms if needed else []


class Reader(NamedTuple):
    """How gradients are read: decided once, from their devices and the request."""

    request: Request = Request()
    everywhere: tuple[str, ...] = ()  # all mesh axes; empty off a mesh
    is_local: bool = True  # whether the elements of each array are known to be on this device

    def per_platform(
        self,
        exactly: Callable[[int], Tree],
        on_cpu: Callable[[Callable[[], Tree]], Tree] = lambda exactly: exactly(),
    ) -> Tree:
        """Returns a reduction over the arrays as each platform computes it fastest.

        Args:
            exactly: the reduction with `fold`, a function of the most elements of a chunk.
            on_cpu: how a CPU computes it, a function of `exactly` in chunks.
        """
        in_chunks = functools.partial(exactly, CHUNK if self.is_local else 0)
        return lax.platform_dependent(cpu=lambda: on_cpu(in_chunks), default=lambda: exactly(0))

    def read_mesh(
        self,
        columns: Sequence[Sequence[jax.Array]],
        scale: jax.Array | float,
        shardings: Sequence[NamedSharding],
    ) -> tuple[jax.Array, Any]:
        """Reads sharded arrays: each device its shards, then one sum over all devices."""
        specs = [sharding.spec for sharding in shardings]
        axes = [axes_of(spec) for spec in specs]
        mapped: Callable[..., tuple[jax.Array, Any]] = jax.shard_map(
            lambda columns, scale: self.read(columns, scale, axes),
            mesh=shardings[0].mesh,
            in_specs=([specs] * len(columns), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        columns = [[placed(x, s) for x, s in zip(c, shardings, strict=True)] for c in columns]
        return mapped(columns, jnp.asarray(scale, jnp.float32))

    def read(
        self,
        columns: Sequence[Sequence[jax.Array]],
        scale: jax.Array | float,
        axes: Sequence[frozenset[str]],
    ) -> tuple[jax.Array, Any]:
        """Reads the gradients on all devices: whether the true ones are finite, and their norms.

        A finite sum proves that all of its terms are finite, and a CPU computes sums of float32
        numbers or of their squares fastest. If the sum is too large or not finite, it proves
        nothing; the CPU then reads the gradients a second time. Other devices check each element
        at once.

        Args:
            columns: the gradients on this device, and the accumulators if there are any.
            scale: the scale of the gradients.
            axes: for each gradient, the mesh axes along which it varies.
        """
        request, everywhere = self.request, self.everywhere
        pairs, large = [*zip(axes, zip(*columns, strict=True), strict=True)], len(axes)
        if self.is_local and not request.each:
            alone, joined = bundle(axes, *columns)
            pairs, large = [*alone, *joined], len(alone)
        rows = [row for _, row in pairs]
        wide = (float32_or_wider(x.dtype) for x, *_ in rows)
        factor = jnp.asarray(scale, np.result_type(np.float32, *wide))

        def on_cpu() -> tuple[jax.Array, Any]:
            # XLA:CPU would compute the sum of joined arrays as one of each.
            hidden = map(lax.optimization_barrier, rows[large:])
            return self._on_cpu([*rows[:large], *hidden], factor)

        once: Callable[[], Any] = lambda: self._exactly(rows, factor)  # noqa: E731
        if self.is_local and not request.norms and not request.bounded:
            once = lambda: (_at_once(rows, factor), None)  # noqa: E731
        finite, norms = lax.platform_dependent(cpu=on_cpu, default=once)
        if everywhere and request.norms:  # count replicas once, on their first device
            first = {own: is_first(axis for axis in everywhere if axis not in own) for own in axes}
            norms = jnp.where(jnp.array([first[own] for own, _ in pairs]), norms, 0)
        if request.norms and not request.each:
            norms = together(norms)[None]
        if not everywhere:
            return finite, norms
        unit = unit_for(request.limit) if request.each else None
        packed = pack(norms, unit) if request.norms else jnp.zeros(1)
        packed = packed.at[-1].set(jnp.where(finite, packed[-1], jnp.inf))
        packed = lax.psum(varying(packed, everywhere), everywhere)
        return jnp.isfinite(packed[-1]), unpack(packed, unit) if request.norms else None

    def _on_cpu(
        self, rows: Sequence[tuple[jax.Array, ...]], scale: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Reads sums over scaled gradients, and all elements only if the sums prove nothing. They
        are sums of squares if norms are requested or there are accumulators, else of the elements.

        Args:
            rows: gradients, each with its accumulator if there is one.
            scale: the scale of the gradients.
        """
        request, arrays = self.request, [x for x, *_ in rows]
        squares = request.norms or len(rows[0]) > 1
        # A chunk has 0.5 % of all elements, within bounds.
        longest = min(max(sum(x.size for x in arrays) // 200, CHUNK), 8 * CHUNK)
        term = jnp.square if squares else lambda x: x

        @jax.jit  # traced once for each shape
        def in_chunks(before: jax.Array, x: jax.Array) -> jax.Array:
            # A CPU adds chunks to each other on all cores, but sums one chunk on a single core. The
            # start is 0, but XLA must not know: the loops then run in turn and share their memory.
            start = jnp.full(chunk_of(x.size, longest), jnp.isnan(before)).astype(jnp.float32)
            add = lambda so_far, x: so_far + term(x.astype(jnp.float32))  # noqa: E731
            return jnp.sum(fold(add, start, x.reshape(-1), longest=longest))

        before, each = jnp.zeros(()), []
        before = varying_like(before, arrays) if self.everywhere else before
        for x in arrays:
            if self.is_local and x.dtype == jnp.float16:  # XLA:CPU would store it in float32
                before = in_chunks(before, x)
                each.append(before.astype(scale.dtype))
            else:
                x = x.astype(float32_or_wider(x.dtype))
                each.append(jnp.sum(term(x)).astype(scale.dtype))
        sums = jnp.stack(each)
        total = jnp.sum(sums)
        if squares:
            # Elements below 2**100 cannot make a finite float32 sum, or norm, overflow.
            proved = jnp.sqrt(total) / scale < 2.0**100
            # Squares that were flushed to zero belong to norms far below any other limit.
            small = request.limit * scale <= 2.0**-30
            proved &= ~small | (sums > SMALLEST_SUM).all()
        else:
            # With a scale below 1 an element may overflow although the sum is finite.
            largest = max(float(jnp.finfo(x.dtype).max) for x in arrays)
            proved = jnp.isfinite(total)
            proved &= jnp.isfinite(jnp.asarray(largest, scale.dtype) / scale)
        norms = jnp.sqrt(sums) / scale if request.norms else None
        return lax.cond(proved, lambda: (proved, norms), lambda: self._exactly(rows, scale, sums))

    def _exactly(
        self,
        rows: Sequence[tuple[jax.Array, ...]],
        scale: jax.Array,
        sums: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns whether the true gradients are finite, and each row's norm, from each element.

        Args:
            rows, scale: as for `_on_cpu`.
            sums: on a CPU, the sums that prove nothing.
        """
        request, everywhere, on_cpu = self.request, self.everywhere, sums is not None
        factors = jnp.asarray(FACTORS, scale.dtype)
        if sums is not None and request.norms:  # one for each row
            factors = jnp.where(sums < SMALLEST_SUM, factors[0], factors[1])
            factors = jnp.where(jnp.isfinite(sums), factors, FACTORS[2])[:, None]
        devices = math.prod(map(lax.axis_size, everywhere))
        bound = jnp.asarray(2.0**-64 * devices**0.5, scale.dtype)

        def look(
            scalars: Sequence[jax.Array], so_far: PyTree, gradient: jax.Array, *onto: jax.Array
        ) -> PyTree:
            x = gradient.astype(float32_or_wider(gradient.dtype))
            inverse, bound, *factors = (scalar.astype(x.dtype) for scalar in scalars)
            new = sum(onto, x * inverse)
            terms = [x * factor for factor in factors] + [new * bound] * request.bounded
            more = [jnp.sum(jnp.square(term)).astype(scale.dtype) for term in terms]
            # XLA:CPU (jaxlib 0.10.2) stores the result of `isfinite`.
            finite = jnp.isfinite(jnp.sum(new - new)) if on_cpu else jnp.isfinite(new).all()
            return so_far[0] & finite, [old + one for old, one in zip(so_far[1], more, strict=True)]

        read = jax.jit(  # traced once for rows of one shape
            lambda longest, scalars, so_far, *row: fold(
                functools.partial(look, scalars), so_far, *row, longest=longest
            ),
            static_argnums=0,
        )
        finite, each = jnp.array(True), list[Any]()
        for i, row in enumerate(rows):
            scalars_of_row = [*factors[i if on_cpu else slice(None)]] if request.norms else []
            # The barrier hides that factors are constants: XLA would compute (c x)**2 as c**2 x**2,
            # which overflows. On a CPU each row waits for the one before; otherwise XLA would store
            # scalars that several rows share as arrays of their shape.
            before = finite if on_cpu else True
            *scalars, _ = lax.optimization_barrier([1 / scale, bound, *scalars_of_row, before])
            nothing = [jnp.zeros_like(scale)] * (len(scalars_of_row) + request.bounded)
            start = (finite, nothing)
            start = varying_like(start, row) if everywhere else start
            stored = row[0].dtype.itemsize < 4 or len(row) > 1  # by XLA:CPU, in float32
            longest = CHUNK if on_cpu and self.is_local and stored else 0
            finite, found = read(longest, scalars, start, *row)
            each.append(jnp.stack(found) if found else None)
        if request.bounded:
            finite &= jnp.isfinite(jnp.sum(jnp.stack(each)[:, -1]))
        if not request.norms:
            return finite, None
        found = jnp.stack(each)[:, : factors.shape[-1]]
        return finite, from_sums(found, factors, scale)


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


def bundle(
    keys: Sequence[Key], *columns: Sequence[jax.Array]
) -> tuple[list[Keyed[Key]], list[Keyed[Key]]]:
    """Joins the small rows of one key and one dtype; returns the others, and those that are joined:
    keys and rows of arrays.

    Use it only for a reduction over everything, because the array of an element is lost.
    """
    large, small = [], dict[Any, Any]()
    for key, row in zip(keys, zip(*columns, strict=True), strict=True):
        if row[0].size > SMALL:
            large.append((key, row))
        else:
            small.setdefault((key, *(x.dtype for x in row)), []).append(row)
    joined = [
        (
            key,
            tuple(lax.concatenate([x.reshape(-1) for x in c], 0) for c in zip(*some, strict=True)),
        )
        for (key, *_), rows in small.items()
        for some in [rows[i : i + BUNDLE] for i in range(0, len(rows), BUNDLE)]
    ]
    return large, joined


def fold(fn: Callable[..., Tree], so_far: Tree, *arrays: jax.Array, longest: int = CHUNK) -> Tree:
    """Computes `fn(so_far, *arrays)`, a reduction, as a loop over chunks of large arrays.

    XLA:CPU (jaxlib 0.10.2) stores the operand of a reduction, unless it is the input itself or one
    of a few float32 operations on it. The operand of a chunk fits into the cache.

    Args:
        fn: a function of the result so far and chunks of the arrays; returns the new result.
        so_far: a pytree of small arrays, of the types that `fn` returns.
        arrays: arrays of one shape, on one device.
        longest: the most elements of a chunk; 0 for no loop.
    """
    chunk = chunk_of(arrays[0].size, longest) if longest else arrays[0].size
    if chunk == arrays[0].size:
        return fn(so_far, *arrays)
    tables = [x.reshape(-1, chunk) for x in arrays]

    def more(i: jax.Array, so_far: Tree) -> Tree:
        return fn(so_far, *(lax.dynamic_index_in_dim(t, i, keepdims=False) for t in tables))

    return lax.fori_loop(0, arrays[0].size // chunk, more, so_far)


def chunk_of(size: int, longest: int) -> int:
    """The number of elements per chunk of an array; all of them if it should not be divided."""
    chunk = next((n for n in range(min(size // 2, longest), 0, -1) if size % n == 0), 1)
    return size if size <= SMALL or chunk < SMALL // 4 else chunk

"""What of a product is half precision: its result, its operands, a number that multiplies."""

import enum
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn
from gainstage._programs import jaxprs

# A constant between these is too large to be added in half precision, and no mask.
OFFSETS = 16.0, 4096.0


class Width(enum.Enum):
    """What of a product is in float32."""

    HALF = enum.auto()  # nothing
    RESULT = enum.auto()  # not the operands
    ALL = enum.auto()


def width(
    eqn: JaxprEqn, held: Sequence[bool], is_batched: bool, is_square: bool, leads: bool
) -> Width:
    """What of a product is in float32 by default.

    Args:
        eqn: a product.
        held: for each operand that is float32 in the program, whether it is in half precision.
        is_batched: whether `jax.vmap` gives an operand another axis.
        is_square: whether it multiplies an array with itself.
        leads: whether its result must be exact, for what is computed with it.
    """
    axes = _free_axes(eqn)
    # An outer product may be one of positions and frequencies, of which follows a sine.
    is_outer = eqn.primitive.name == "dot_general" and not any(eqn.params["dimension_numbers"][0])
    if not held or _is_precise(eqn) or (is_outer and not any(held)):
        return Width.ALL
    is_square |= not any(axes)
    # A norm, a count, or a matrix times a vector: it may be large, and costs little in float32.
    may_be_large = bool(axes) and not is_batched and (is_square or not all(axes))
    if not may_be_large and not leads:
        return Width.HALF
    # The operands of a norm may be large too.
    return Width.ALL if is_square and not all(held) else Width.RESULT


def _is_precise(eqn: JaxprEqn) -> bool:
    """Whether the user asks for a product as exact as float32, as by `precision="highest"`.

    On a GPU `Precision.HIGH` is TF32, which has the digits of float16. So it is no such request,
    nor is an algorithm with operands of TF32, float16 or bfloat16, unless it multiplies several
    times for more digits.
    """
    precision = eqn.params.get("precision")
    if isinstance(precision, lax.DotAlgorithmPreset):
        return precision.name.startswith(("F32_", "F64_")) or "_X" in precision.name
    if isinstance(precision, lax.DotAlgorithm):
        sides = precision.lhs_precision_type, precision.rhs_precision_type
        is_repeated = precision.num_primitive_operations > 1
        return is_repeated or any(jnp.finfo(side).bits >= 32 for side in sides)
    each = precision if isinstance(precision, tuple) else (precision,)
    return lax.Precision.HIGHEST in each


def _free_axes(eqn: JaxprEqn) -> list[int]:
    """How many axes of each operand of a `dot_general` are neither summed nor those of a batch;
    none of another product."""
    if eqn.primitive.name != "dot_general":
        return []
    contracted, batch = eqn.params["dimension_numbers"]
    operands = zip(eqn.invars, contracted, batch, strict=True)
    return [len(jaxprs.array(v).shape) - len(c) - len(b) for v, c, b in operands]


def in_range(dtype: np.dtype, x: ArrayLike) -> bool:
    """Whether a dtype holds the sizes of all finite numbers of an array, but for 0."""
    sizes, limits = np.abs(np.asarray(x, np.float64)), jnp.finfo(dtype)
    held = (sizes == 0) | (sizes >= float(limits.tiny)) & (sizes <= float(limits.max))
    return bool((held | ~np.isfinite(sizes)).all())


def is_offset(x: ArrayLike) -> bool:
    """Whether a constant has numbers that are too large to be added in half precision."""
    sizes = np.abs(np.asarray(x, np.float64))
    return bool(((sizes > OFFSETS[0]) & (sizes < OFFSETS[1])).any())


def holds(dtype: np.dtype, number: float, is_planned: bool) -> bool:
    """Whether a number that multiplies may be rounded to half precision. A plan has measured what
    that costs, unless the number is subnormal there."""
    if is_planned:
        return not 0 < abs(number) < float(jnp.finfo(dtype).tiny)
    return float(dtype.type(number)) == number

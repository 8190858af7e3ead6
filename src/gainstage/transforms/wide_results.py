"""Operations on half-precision arrays that are computed in float32, because their results may be
too large for half precision. The backward pass keeps the half-precision arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gainstage._core import jaxprs
from gainstage._core._jax import JaxprEqn
from gainstage.transforms.replay import SINGLE, Operand

# Bounded functions, whose results are in half precision: each with its derivative, by its result.
BOUNDED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": lambda y: 1 - y * y,
    "logistic": lambda y: y * (1 - y),
}


def power_of(eqn: JaxprEqn) -> int:
    """The integer to whose power an equation raises its operand, such as 2 in a variance; 0 if it
    does something else."""
    name = eqn.primitive.name
    twice = name == "mul" and eqn.invars[0] is eqn.invars[1]
    if twice or name == "square":
        return 2
    exponent = eqn.params["y"] if name == "integer_pow" else 0
    return 0 if exponent == 1 else exponent


def power(eqn: JaxprEqn, value: Operand) -> jax.Array:
    """The power in float32 of a half-precision array, which the backward pass keeps instead."""
    exponent = power_of(eqn)

    @jax.custom_jvp
    def raised(wide: jax.Array, kept: jax.Array) -> jax.Array:
        return jaxprs.bind(eqn, [wide] * len(eqn.invars))[0]

    @raised.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def product(kept: jax.Array, tangent: jax.Array) -> jax.Array:
            factor = jax.lax.integer_pow(kept.astype(SINGLE), exponent - 1)
            return exponent * factor * tangent

        return raised(*primals), product(primals[1], tangents[0])

    return raised(value.float32, value.x)


def bounded(eqn: JaxprEqn, wide: jax.Array, dtype: np.dtype) -> jax.Array:
    """The result in half precision of a bounded function of a float32 array. The backward pass
    keeps the result, and computes with it in half precision: XLA would keep float32 otherwise."""
    slope = BOUNDED[eqn.primitive.name]

    @jax.custom_jvp
    def function(wide: jax.Array) -> jax.Array:
        return jaxprs.bind(eqn, [wide])[0].astype(dtype)

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        result = function(*primals)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def product(kept: jax.Array, tangent: jax.Array) -> jax.Array:
            return slope(kept) * tangent.astype(dtype)

        return result, product(result, tangents[0])

    return function(wide)


def may_be_large(eqn: JaxprEqn) -> bool:
    """Whether a product is a square, or an operand has no axis that stays: a norm, a count, or a
    matrix times a vector. Its result may be large, and costs little in float32."""
    return eqn.primitive.name == "dot_general" and (is_square(eqn) or not all(_free_axes(eqn)))


def is_square(eqn: JaxprEqn) -> bool:
    """Whether a product is of an array with itself, or leaves no axis, as a norm does."""
    return eqn.invars[0] is eqn.invars[1] or not any(_free_axes(eqn))


def _free_axes(eqn: JaxprEqn) -> list[int]:
    """How many axes of each operand of a product are neither summed nor those of a batch."""
    contracted, batch = eqn.params["dimension_numbers"]
    operands = zip(eqn.invars, contracted, batch, strict=True)
    return [len(jaxprs.array(v).shape) - len(c) - len(b) for v, c, b in operands]


def wide_product(eqn: JaxprEqn, xs: Sequence[jax.Array]) -> jax.Array:
    """A product of half-precision operands with a result in float32."""
    params = {**eqn.params, "preferred_element_type": SINGLE, "precision": None}
    return jaxprs.bind(eqn, list(xs), params)[0]

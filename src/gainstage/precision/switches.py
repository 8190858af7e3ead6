"""A function whose operations are each in the precision that a switch says, in one program."""

import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn, Literal, Var
from gainstage._programs import jaxprs
from gainstage._programs.in_dtype import is_float32
from gainstage._programs.jaxprs import Path
from gainstage.precision.float8_product import E5M2, rounded, to_operand
from gainstage.transforms.retrace import SINGLE, Replay, Retraced, as_written, replayed


class Switch(enum.IntEnum):
    """What a switch says."""

    FLOAT32 = 0
    HALF = 1  # the half-precision dtype of the plan
    BFLOAT16 = 2
    FLOAT8 = 3  # operands and cotangent in float8, the result in half precision


# For each path, the number of its switch and its half-precision dtypes; at others it is in float32.
Positions = Mapping[Path, tuple[int, Mapping[Switch, np.dtype]]]


def switched(
    fun: Callable[..., Any], positions: Positions, switches: jax.Array, half: str
) -> Callable[..., Any]:
    """Returns `fun`, rounded as the switches say. Numbers are rounded to a dtype and computed in
    float32; `half` is as for `replayed`."""

    def compute(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
        number, dtypes = positions.get(path, (0, {}))
        if not dtypes:
            return as_written(eqn, values)
        switch = switches[number]

        def to_half(x: ArrayLike) -> Any:
            y = x
            for own, dtype in dtypes.items():
                y = jnp.where(switch == own, jnp.asarray(x, dtype).astype(SINGLE), y)
            return y

        def operand(x: ArrayLike, variable: Var | Literal) -> ArrayLike:
            if not is_float32(variable):
                return x
            if Switch.FLOAT8 not in dtypes:
                return to_half(x)
            return _as_float8(x, to_half(x), switch == Switch.FLOAT8)

        xs = [operand(v.x, var) for v, var in zip(values, eqn.invars, strict=True)]
        if jaxprs.is_kernel(eqn):
            found = [v.x for v in as_written(eqn, list(map(Retraced, xs)))]
        else:
            found = jaxprs.bind(eqn, xs)
        results = []
        for x, var in zip(found, eqn.outvars, strict=True):
            y = to_half(x) if is_float32(var) else x
            if Switch.FLOAT8 in dtypes:
                y = _cotangent8(y, switch == Switch.FLOAT8)
            results.append(Retraced(y))
        return results

    return replayed(fun, lambda program: Replay(compute), half=half)


def _as_float8(x: ArrayLike, half: jax.Array, is_small: jax.Array) -> jax.Array:
    """An operand with the numbers that it has in float8 if `is_small`, with the derivative of
    `half`."""
    small = to_operand(jnp.asarray(x))
    numbers = small.x.astype(jnp.float32) * small.unit
    return half + lax.stop_gradient(jnp.where(is_small, numbers - half, 0))


@jax.custom_vjp
def _cotangent8(x: jax.Array, is_small: jax.Array) -> jax.Array:
    """An array whose cotangent has the numbers that it has in float8 if `is_small`."""
    return x


def _kept_switch(x: jax.Array, is_small: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, is_small


def _rounded_cotangent(is_small: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    small = rounded(g, E5M2)
    return jnp.where(is_small, small.x.astype(g.dtype) * small.unit, g), None


_cotangent8.defvjp(_kept_switch, _rounded_cotangent)

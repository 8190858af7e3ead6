"""A function whose operations are each in the precision that a switch says, in one program."""

# Numbers are rounded where autocast would have them in half precision, and all is computed in
# float32. So one program, compiled once, is each of the programs that a choice of precisions makes.

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from gainstage._base._jax import JaxprEqn, Literal, Var
from gainstage._programs import jaxprs
from gainstage._programs.code_lines import CodeLine, code_lines
from gainstage._programs.in_dtype import is_float32
from gainstage._programs.jaxprs import AnyJaxpr, Path
from gainstage._programs.operations import PRODUCTS
from gainstage.precision.autocast import Caster, Casting
from gainstage.precision.calls import Call
from gainstage.precision.float8_product import E5M2, rounded, to_operand
from gainstage.precision.plan import DTYPES
from gainstage.precision.policy import Level
from gainstage.precision.wide_results import BOUNDED
from gainstage.transforms.retrace import SINGLE, Replay, Retraced, as_written

OF_UNIT = 16  # bytes that are read as fast as a matrix unit in half precision saves an element


class Rounded(NamedTuple):
    """An operation that autocast may round."""

    line: CodeLine
    levels: tuple[Level, ...]  # at which it may be, below float32; the narrowest first
    operands: bool  # whether its operands are rounded, else the result alone
    eqn: JaxprEqn
    times: int  # how often it is run; a `while` loop counts as one iteration

    @property
    def is_product(self) -> bool:
        """Whether a matrix unit computes it."""
        return self.eqn.primitive.name in PRODUCTS or jaxprs.is_kernel(self.eqn)

    def at(self, level: Level) -> Level:
        """Its own level, if the level of its line is this."""
        return next((own for own in self.levels if own >= level), Level.FLOAT32)

    def cost(self, level: Level) -> float:
        """What it reads and writes at a level, in bytes; what a product in float32 takes longer is
        added."""
        own, eqn = self.at(level), self.eqn
        is_wide = own is Level.FLOAT32
        ins, outs = (
            sum(float(np.prod(jaxprs.array(v).shape)) for v in side if is_float32(v))
            for side in (eqn.invars, eqn.outvars)
        )
        size = 4 if is_wide else 1 if own is Level.FLOAT8 else 2
        unit = OF_UNIT * (is_wide and self.is_product)
        result = 4 if own >= Level.RESULT else 2
        return self.times * (ins * (size + unit) + outs * (result + unit))


Emulations = dict[tuple[Path, str], Rounded]  # by path, and by the key of their line


# `(caster, operation, results, path) -> levels below float32, the narrowest first, and whether
# operands are rounded`.
LevelsOf = Callable[[Caster, Call, Sequence[Retraced], Path], tuple[tuple[Level, ...], bool]]


class Collected:
    """Casts as ever, and notes the operations that may be at other levels.

    Args:
        levels_of: says at which levels an operation may be.

    Attributes:
        places: the operations that have levels.
    """

    def __init__(self, levels_of: LevelsOf) -> None:
        self._levels_of = levels_of
        self.places: Emulations = {}

    def begin(self, casting: Casting, program: AnyJaxpr) -> Replay:
        """How one program is computed."""
        caster, lines = Caster(casting, program), code_lines(program)
        times = {
            path: math.prod(eqn.params.get("length", 1) for eqn in eqns)
            for path, eqns in jaxprs.operations_within(program)
        }

        def compute(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
            results = caster.compute(eqn, values, path)
            call = caster.call(eqn, values, path)
            levels, operands = self._levels_of(caster, call, results, path)
            if levels:
                line = lines[path]
                self.places[path, line.key] = Rounded(line, levels, operands, eqn, times[path])
            return results

        return Replay(compute, caster.constant)


def by_rules(
    caster: Caster, call: Call, results: Sequence[Retraced], path: Path
) -> tuple[tuple[Level, ...], bool]:
    """The levels of an operation from the one at which autocast has it."""
    if call.name in PRODUCTS:
        own = caster.level(call, path)
        wider = (Level.HALF,) * (own is Level.FLOAT8) + (Level.RESULT,) * (own < Level.RESULT)
        return (own, *wider) if own < Level.FLOAT32 else (), True
    pairs, halves = zip(results, call.eqn.outvars, strict=True), DTYPES.values()
    is_half = any(is_float32(v) and getattr(r.x, "dtype", None) in halves for r, v in pairs)
    of_wide = call.name in BOUNDED and not any(call.held)
    return (Level.HALF,) * is_half, not of_wide


class Emulated:
    """Rounds the operations of some places as their levels say.

    Args:
        places: the places, as `Collected` has found them.
        numbers: the number of the line of each key.
        levels: the level of each line, an array.
        room: by how much a number must be below the largest that half precision holds.
    """

    def __init__(
        self, places: Emulations, numbers: Mapping[str, int], levels: Any, room: float = 1.0
    ):
        self._places, self._numbers, self._room = places, numbers, room
        self._levels: Any = levels

    def begin(self, casting: Casting, program: AnyJaxpr) -> Replay:
        """How one program is computed."""
        dtypes = {Level.BFLOAT16: DTYPES["bfloat16"]}
        lines = code_lines(program)

        def compute(eqn: JaxprEqn, values: list[Retraced], path: Path) -> list[Retraced]:
            place = self._places.get((path, lines[path].key))
            if place is None:
                return as_written(eqn, values)
            level = self._levels[self._numbers[place.line.key]]
            # At a level that this operation has not, it is at its next wider one.
            bounds = zip((-1, *place.levels), place.levels, strict=False)
            is_at = {own: (level > lower) & (level <= own) for lower, own in bounds}

            def half(x: ArrayLike, *levels: Level) -> Any:
                y = x
                for own in levels:
                    if own in is_at:
                        small = self._rounded(x, dtypes.get(own, casting.dtype))
                        y = jnp.where(is_at[own], small, y)
                return y

            def operand(x: ArrayLike, variable: Var | Literal) -> ArrayLike:
                if not is_float32(variable) or not place.operands:
                    return x
                y = half(x, Level.FLOAT8, Level.HALF, Level.BFLOAT16, Level.RESULT)
                return _as_float8(x, y, is_at[Level.FLOAT8]) if Level.FLOAT8 in is_at else y

            pairs = zip(values, eqn.invars, strict=True)
            computed = as_written(eqn, [Retraced(operand(v.x, var)) for v, var in pairs])
            results = []
            for value, var in zip(computed, eqn.outvars, strict=True):
                y = value.x
                if is_float32(var):
                    y = half(y, Level.FLOAT8, Level.HALF, Level.BFLOAT16)
                if Level.FLOAT8 in is_at:
                    y = _cotangent8(y, is_at[Level.FLOAT8])
                results.append(Retraced(y))
            return results

        return Replay(compute)

    def forget(self) -> None:
        """Forgets the levels, which belong to one trace: JAX keeps this with what it compiled."""
        self._levels = None

    def _rounded(self, x: ArrayLike, dtype: np.dtype) -> jax.Array:
        """An array with the numbers that it has in half precision."""
        small = jnp.asarray(x, dtype).astype(SINGLE)
        if self._room == 1:
            return small
        # Infinities are those of a mask, which half precision holds.
        size = lax.stop_gradient(jnp.abs(x))
        is_large = (size > float(jnp.finfo(dtype).max) / self._room) & jnp.isfinite(size)
        return jnp.where(is_large, jnp.inf, small)


def _as_float8(x: ArrayLike, half: Any, is_small: jax.Array) -> jax.Array:
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

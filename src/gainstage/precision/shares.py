"""What each line of a function adds to the error of its loss and gradients in half precision."""

# With one line in half precision and the rest in float32, the difference to float32 is the share of
# that line. Shares add up, so they predict each choice: n + 1 runs of one compiled program say what
# a search through all choices would.

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gainstage._programs.code_lines import CodeLine
from gainstage._variables.sharding import replicated_like
from gainstage.precision.autocast import INSTEAD
from gainstage.precision.emulated import Collected, Emulated, Emulations, Rounded
from gainstage.precision.noise_and_bias import Parts
from gainstage.precision.plan import FLOAT8, RESULT, WIDE, PlanEntry
from gainstage.precision.policy import Level
from gainstage.precision.samples import Samples, exact_products, is_finite

SKETCH = 2**12  # numbers to which a gradient is added up; its norms stay, to a few percent
Levels = np.ndarray  # one for each line


class Results(NamedTuple):
    """What a run on a batch returns."""

    loss: float
    gradients: Parts  # a sketch of each

    @property
    def is_finite(self) -> bool:
        """Whether all of it is."""
        return is_finite([self.loss, *self.gradients])

    def minus(self, other: "Results") -> "Results":
        """The differences to other results."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        with np.errstate(all="ignore"):
            return Results(self.loss - other.loss, [g - o for g, o in pairs])


class Line:
    """The operations of one kind on one line of code.

    Args:
        places: the operations.
    """

    def __init__(self, places: Sequence[Rounded]):
        self.places: Sequence[Rounded] = places
        self.code: CodeLine = places[0].line
        found = {level for place in places for level in place.levels}
        self.levels: tuple[Level, ...] = (*sorted(found), Level.FLOAT32)  # at which it may be

    @functools.cached_property
    def costs(self) -> dict[Level, float]:
        """What it reads and writes at each level."""
        return {level: sum(p.cost(level) for p in self.places) for level in self.levels}

    def name_at(self, level: Level, dtype: str) -> str:
        """The name of a level, with the half-precision dtype of a plan."""
        names = {
            Level.FLOAT8: FLOAT8, Level.BFLOAT16: "bfloat16", Level.RESULT: RESULT,
            Level.FLOAT32: WIDE,
        }  # fmt: skip
        return names.get(level, "float16" if dtype == FLOAT8 else dtype)

    def operation(self, level: Level, dtype: str, **numbers: Any) -> PlanEntry:
        """The row of a plan in which it is at this level."""
        code, name = self.code, self.name_at(level, dtype)
        return PlanEntry(code.name, name, code.line, code.text, code.layer, code.key, **numbers)


class Emulation:
    """A function on some batches, of which each line may be at any level.

    Args:
        samples: a function under autocast, and its arguments.
        collected: notes the lines.
        room: as for `Emulated`.
    """

    def __init__(self, samples: Samples, collected: Collected, room: float = 1.0):
        self._samples, self._room = samples, room
        with INSTEAD(collected):
            samples.trace()
        self._places: Emulations = collected.places
        lines: dict[str, list[Rounded]] = {}
        for place in self._places.values():
            lines.setdefault(place.line.key, []).append(place)
        self.lines: list[Line] = [Line(places) for places in lines.values()]
        self._numbers = {key: number for number, key in enumerate(lines)}
        everywhere = replicated_like(samples.arrays)
        self._program = jax.jit(self._run, out_shardings=everywhere)

    def narrowest(self, fits: Callable[[int, Level], bool] = lambda number, level: True) -> Levels:
        """The narrowest level of each line that fits, `(number of the line, level) -> bool`."""
        each = (
            next((level for level in line.levels if fits(number, level)), Level.FLOAT32)
            for number, line in enumerate(self.lines)
        )
        return np.array(list(each), np.int32)

    @property
    def widest(self) -> Levels:
        """The levels at which all is in float32."""
        return np.full(len(self.lines), Level.FLOAT32, np.int32)

    def at(self, number: int, level: Level) -> Levels:
        """The levels at which one line is at this level, and the rest in float32."""
        levels = self.widest
        levels[number] = level
        return levels

    def run(self, levels: Levels, scale: float, number: int = 0) -> Results:
        """The loss and gradients of a batch at some levels and a loss scale."""
        with exact_products():
            found = self._program(levels, jnp.float32(scale), self._samples.arrays[number])
            loss, *gradients = jax.device_get(found)
        return Results(float(loss), gradients)

    def of_each_line(
        self, scale: float, batches: int, tick: Callable[[], Any]
    ) -> dict[tuple[int, Level], list[Results]]:
        """The results with a line alone below float32, for each line and each of these levels.

        Args:
            scale: the loss scale.
            batches: the number of batches, of which these are the first.
            tick: called after each run.
        """
        found: dict[tuple[int, Level], list[Results]] = {}
        for number, line in enumerate(self.lines):
            for level in line.levels[:-1]:
                levels, each = self.at(number, level), found.setdefault((number, level), [])
                for batch in range(batches):
                    each.append(self.run(levels, scale, batch))
                    tick()
        return found

    @property
    def pieces(self) -> int:
        """The number of runs on a batch that `of_each_line` takes."""
        return sum(len(line.levels) - 1 for line in self.lines)

    def _run(self, levels: jax.Array, scale: jax.Array, arrays: Sequence[Any]) -> list[jax.Array]:
        emulated = Emulated(self._places, self._numbers, levels, self._room)
        with INSTEAD(emulated):
            loss, *gradients = self._samples.gradients_of(self._samples.fun, scale, arrays)
        emulated.forget()
        return [loss, *map(_sketched, gradients)]


def _sketched(x: jax.Array) -> jax.Array:
    """The sketch of an array, also of one that is in shards by its type."""
    if jax.typeof(x).sharding.mesh.explicit_axes:
        whole: Any = jax.sharding.auto_axes(_sketch, out_sharding=PartitionSpec())
        found: jax.Array = whole(x)
        return found
    return _sketch(x)


def _sketch(x: jax.Array) -> jax.Array:
    """A float32 vector with the products and norms that an array has, which are exact if it is
    small, and to a few percent else: its elements are added up, with signs by chance."""
    flat = jnp.ravel(x).astype(jnp.float32)
    if flat.size <= SKETCH:
        return flat
    signs = jax.random.rademacher(jax.random.key(flat.size), (flat.size,), jnp.float32)
    padded = jnp.pad(flat * signs, (0, -flat.size % SKETCH))
    return padded.reshape(-1, SKETCH).sum(axis=0)


def chosen(
    lines: Sequence[Line], levels: Levels, left: Callable[[Levels], float], limit: float
) -> Levels:
    """The levels of the lines that leave no more than a limit, and cost little.

    What takes away most for its price goes first, line by line. Then the dearest goes back, if what
    is left stays within the limit.

    Args:
        lines: the lines.
        levels: the levels from which it begins.
        left: what is left at some levels.
        limit: the largest that may be.
    """
    found, total = levels.copy(), sum(line.costs[Level.FLOAT32] for line in lines) or 1.0

    def moved(number: int, level: Level) -> Levels:
        other = found.copy()
        other[number] = level
        return other

    while (now := left(found)) > limit:
        each = [
            (number, level)
            for number, line in enumerate(lines)
            for level in line.levels
            if level > found[number]
        ]
        if not each:
            break

        def worth(step: tuple[int, Level], now: float = now) -> float:
            number, level = step
            costs = lines[number].costs
            price = max(costs[level] - costs[Level(found[number])], 0.0) / total
            return float(now - left(moved(*step))) / (price + 1e-3)

        number, level = max(each, key=worth)
        found[number] = level
    raised = [n for n in range(len(lines)) if found[n] > levels[n]]
    for number in sorted(raised, key=lambda n: -lines[n].costs[Level(int(found[n]))]):
        lower = (at for at in lines[number].levels if levels[number] <= at < found[number])
        back = next((at for at in lower if left(moved(number, at)) <= limit), None)
        if back is not None:
            found[number] = back
    return found

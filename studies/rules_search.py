"""All states that a loss-scale rule can reach, found by breadth-first search.

A *machine* is a rule with the step of a user around it. Its state is a row of scalars: those that
decide on the next scale. From every reachable state one step is taken with every input, by the
compiled step itself, vmapped over rows. Weights and slots are the same before each step, and the
step reports whether it has changed them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CHUNK = 1024  # rows of one call, so that a machine is compiled once


class Input(NamedTuple):
    """A batch: its true gradient, the largest scaled gradient that does not overflow, its loss."""

    name: str
    gradient: float = 1.0
    limit: float = np.inf
    loss: float = 1.0
    rises: bool = False  # whether steps with it must raise the scale to its maximum

    @property
    def is_data(self) -> bool:
        """Whether the loss itself is not finite, at any scale."""
        return not np.isfinite(self.loss)

    @property
    def threshold(self) -> float:
        """The largest scale at which the gradient is finite; inf if it always is."""
        if self.is_data:
            return 0.0
        return self.limit / self.gradient if self.gradient else np.inf


class Machine(NamedTuple):
    """A rule, the step around it, and what the invariants need to know of both."""

    row: str  # of the table
    setting: str
    step: Callable[[list[Any], tuple[Any, ...]], tuple[list[Any], jax.Array]]
    first: list[np.ndarray]  # the first state
    inputs: Sequence[Input]
    scale: int = 0  # the place of the scale in a state
    start: float = 0.0  # the first scale of the rule
    bounds: tuple[float, float] = (0.0, np.inf)  # of the scale; a peer's are these
    factors: tuple[float, float] = (0.5, 2.0)  # of one decrease, and of one increase
    period: int = 0  # finite steps before an increase; 0 if the scale never changes
    allowed: float = 1.0  # batches that may be lost in a period
    mixes: bool = True  # whether finite batches may be among those that overflow
    ours: bool = True
    reload: Callable[[list[np.ndarray]], list[np.ndarray]] | None = None
    retries: int = 0


SMALL = jnp.float16(1)  # makes a loss one that needs a loss scale


@jax.custom_vjp
def network(w: jax.Array, gradient: Any, limit: Any, loss: Any) -> jax.Array:
    """A loss with a chosen value and gradient. A gradient beyond the limit becomes inf, as in the
    backward pass of a float16 network."""
    return SMALL * (jnp.asarray(loss, jnp.float32) + 0 * w)


def _forward(w: jax.Array, gradient: Any, limit: Any, loss: Any) -> Any:
    return network(w, gradient, limit, loss), (gradient, limit)


def _backward(kept: Any, cotangent: jax.Array) -> Any:
    gradient, limit = kept
    scaled = cotangent * gradient
    return jnp.where(jnp.abs(scaled) > limit, jnp.inf, scaled), None, None, None


network.defvjp(_forward, _backward)


def changed(before: Any, after: Any) -> jax.Array:
    """Whether any bit of a pytree is another one."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    bits = [(_bits(jnp.asarray(a)) != _bits(jnp.asarray(b))).any() for a, b in pairs]
    return jnp.stack(bits).any()


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.uint32)


class Search:
    """The states of a machine, and where each input leads from each of them."""

    def __init__(self, machine: Machine, limit: int = 2_000_000):
        self.machine = machine
        self.types = [x.dtype for x in machine.first]
        self._run = jax.jit(jax.vmap(self._one))
        first = np.array([[_word(x) for x in machine.first]], np.uint32)
        count = len(machine.inputs)
        index = {first.tobytes(): 0}
        rows, nexts, flags, parents = [first], [], [], [np.array([[-1, -1]])]
        frontier, done = first, 0
        while len(frontier):
            new, moved = self.after(frontier)
            nexts_here = np.empty(len(new), np.int64)
            fresh, from_where = [], []
            for place, key in enumerate(_keys(new)):
                found = index.get(key)
                if found is None:
                    found = index[key] = len(index)
                    fresh.append(place)
                    from_where.append((done + place // count, place % count))
                nexts_here[place] = found
            nexts.append(nexts_here)
            flags.append(moved)
            done += len(frontier)
            frontier = new[fresh]
            if fresh:
                rows.append(frontier)
                parents.append(np.array(from_where))
            if len(index) > limit:
                raise RuntimeError(f"{machine.row} has more than {limit} states.")
        self.rows, self.parents = np.concatenate(rows), np.concatenate(parents)
        self.next = np.concatenate(nexts).reshape(-1, count)
        self.changed = np.concatenate(flags).reshape(-1, count)
        self.scales = self.scales_of(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _one(self, row: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = self.machine.inputs
        table = jnp.array([[i.gradient, i.limit, i.loss] for i in inputs], jnp.float32)[number]
        leaves = [
            row[i] != 0 if t.kind == "b" else lax.bitcast_convert_type(row[i], t)
            for i, t in enumerate(self.types)
        ]
        new, moved = self.machine.step(leaves, tuple(table))
        words = [_bits(jnp.asarray(x, t)) for x, t in zip(new, self.types, strict=True)]
        return jnp.stack(words), moved

    def after(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states after each input, by state and then by input, and whether it was applied."""
        count = len(self.machine.inputs)
        numbers = np.tile(np.arange(count, dtype=np.int32), len(rows))
        return self.step(np.repeat(rows, count, axis=0), numbers)

    def step(self, repeated: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states after one input each, and whether it was applied."""
        new, moved = np.empty_like(repeated), np.empty(len(repeated), bool)
        for start in range(0, len(repeated), CHUNK):
            part, number = repeated[start : start + CHUNK], numbers[start : start + CHUNK]
            missing = CHUNK - len(part)
            padded = np.pad(part, ((0, missing), (0, 0)), "edge")
            found, was = self._run(padded, np.pad(number, (0, missing)))
            new[start : start + CHUNK] = np.asarray(found)[: len(part)]
            moved[start : start + CHUNK] = np.asarray(was)[: len(part)]
        return new, moved

    def scales_of(self, rows: np.ndarray) -> np.ndarray:
        """The scale in each of the states."""
        return rows[:, self.machine.scale].copy().view(np.float32).astype(np.float64)

    def leaves(self) -> list[np.ndarray]:
        """Each scalar of a state, for all states."""
        columns = [self.rows[:, i].copy() for i in range(len(self.types))]
        return [
            x.astype(bool) if t.kind == "b" else x.view(t)
            for x, t in zip(columns, self.types, strict=True)
        ]

    def inputs_where(self, wanted: Callable[[Input], bool]) -> list[int]:
        """The numbers of some inputs."""
        return [n for n, given in enumerate(self.machine.inputs) if wanted(given)]

    def path(self, state: int) -> list[str]:
        """The names of the inputs on a shortest way to a state."""
        names = []
        while state:
            state, number = self.parents[state]
            names.append(self.machine.inputs[number].name)
        return names[::-1]


def _word(x: np.ndarray) -> int:
    return int(x) if x.dtype == bool else int(x.reshape(1).view(np.uint32)[0])


def _keys(rows: np.ndarray) -> list[bytes]:
    width = rows.shape[1] * rows.itemsize
    return np.ascontiguousarray(rows).view(f"V{width}").ravel().tolist()


def in_words(path: Sequence[str]) -> str:
    """A path, with what repeats written once: `2 x finite, 3 x (overflow, finite)`."""
    parts, place = [], 0
    while place < len(path):
        counts = {size: _repeats(path[place:], size) for size in (1, 2, 3, 4)}
        size = max(counts, key=lambda size: (size * counts[size] * (counts[size] > 1), -size))
        count, names = counts[size], ", ".join(path[place : place + size])
        names = f"({names})" if size > 1 else names
        parts.append(f"{count} x {names}" if count > 1 else names)
        place += size * count
    return ", ".join(parts) or "at once"


def _repeats(path: Sequence[str], size: int) -> int:
    """How often the first names of a path follow each other."""
    count = 1
    while list(path[count * size : (count + 1) * size]) == list(path[:size]):
        count += 1
    return count

"""Small functions as users write them, by family: the corpus of `any_function.py`.

Each is a float32 loss of parameters and data, written without a thought of half precision. The two
strings of `function` name its parameters and its data. A name is followed by its shape and by what
it holds: nothing for normal numbers (weights divided by the root of their inputs), `=1` for numbers
near 1, `*0.2` for normal numbers times 0.2, `<10` for integers below 10, `+` for positive numbers,
`%` for numbers between 0 and 1, `?` for zeros and ones, and `!` for normal numbers. Integers and
the last three stay as they are where the rest is multiplied by 100 or divided by it.
"""

import inspect
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

FAMILIES = {
    "losses": "losses",
    "attention": "attention and softmax",
    "layers": "norms, gates, activations",
    "statistics": "likelihoods, statistics",
    "distances": "distances, contrastive losses",
    "physics": "physics",
    "recurrences": "recurrences",
    "convolutions": "convolutions, pooling",
    "policies": "reinforcement learning",
    "generative": "generative models",
    "graphs": "graphs, embeddings",
    "derivatives": "own derivatives, quantizers",
    "algebra": "linear algebra, FFT, einsum",
    "sums": "masks, counts, long sums",
}
Arrays = dict[str, np.ndarray]


class Function(NamedTuple):
    """A loss, and how to draw its arguments."""

    family: str
    body: Callable[..., Any]
    params: str
    data: str
    scales: str  # what is multiplied: "data" or "params"

    @property
    def name(self) -> str:
        """Its name, in words."""
        return self.body.__name__.replace("_", " ")

    @property
    def has_twin(self) -> bool:
        """Whether torch computes it too: then its first argument is a namespace."""
        return next(iter(inspect.signature(self.body).parameters)) == "xp"

    def loss(self, space: Any) -> Callable[[Any, Any], Any]:
        """The loss `(params, data)` in this namespace."""
        given = (space,) if self.has_twin else ()
        return lambda params, data: self.body(*given, **params, **data)

    def arguments(self, factor: float = 1.0) -> tuple[Arrays, Arrays]:
        """Its parameters and data, of which one is multiplied by the factor."""
        rng = np.random.default_rng(zlib.crc32(self.body.__name__.encode()))
        return tuple(  # type: ignore[return-value]
            drawn(rng, text, part == "params", factor if part == self.scales else 1.0)
            for part, text in (("params", self.params), ("data", self.data))
        )


FUNCTIONS: dict[str, Function] = {}


def function(
    params: str, data: str, scales: str = "data"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function to the corpus."""

    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        row = Function(body.__module__.rpartition(".")[2], body, params, data, scales)
        if row.name in FUNCTIONS:
            raise ValueError(f"Expected one function of a name; got two: {row.name}.")
        FUNCTIONS[row.name] = row
        return body

    return add


def drawn(rng: np.random.Generator, text: str, is_params: bool, factor: float) -> Arrays:
    """The arrays that a text describes."""
    return {
        words[0]: one(rng, words[1:], is_params, factor)
        for words in (part.split() for part in text.split(",") if part.strip())
    }


def one(rng: np.random.Generator, words: list[str], is_params: bool, factor: float) -> np.ndarray:
    """An array of a shape and of what the last word says."""
    shape = tuple(int(word) for word in words if word.isdigit())
    kind = next((word for word in words if not word.isdigit()), "")
    if kind.startswith("<"):
        return rng.integers(0, int(kind[1:]), shape, dtype=np.int32)
    if kind in ("%", "?", "!"):
        draws = {"%": rng.random, "?": lambda s: rng.integers(0, 2, s), "!": rng.standard_normal}
        return np.asarray(draws[kind](shape), np.float32)  # type: ignore[operator]
    if kind == "+":
        found = 0.1 + 1.9 * rng.random(shape)
    elif kind.startswith("="):
        found = float(kind[1:]) * (1 + 0.1 * rng.standard_normal(shape))
    elif kind.startswith("*"):
        found = float(kind[1:]) * rng.standard_normal(shape)
    else:
        inputs = np.prod(shape[1:]) if len(shape) > 3 else shape[-2] if len(shape) > 1 else 100
        found = rng.standard_normal(shape) * (inputs**-0.5 if is_params else 1.0)
    return np.asarray(factor * found, np.float32)


def corpus() -> dict[str, Function]:
    """All functions, by name."""
    for family in FAMILIES:
        import_module(f".{family}", __name__)
    return FUNCTIONS

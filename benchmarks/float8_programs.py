"""Compiles gradients of a language model for an H100, in float16 and float8: bytes, temporaries,
float8 products, and what the card needs at least by its rates. No device is there: nothing runs.

Run: `python -m benchmarks.float8_programs`; it needs `pip install --group programs`.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gainstage as gs
from gainstage.precision.cards import H100
from gainstage.precision.float8_rule import PRODUCTS_OF_A_STEP
from gainstage.precision.program_costs import products_of

from . import hlo, lowered
from .harness import RESULTS, file_to_write
from .models import transformer
from .programs import environment

PATH = RESULTS / "float8" / "programs.json"
WIDTHS = 4096, 2048, 1024  # all linear layers gain by float8 at the first, none at the last
DTYPES = "float16", "float8"


class Program(NamedTuple):
    """The gradient of a loss, compiled."""

    moved: int  # bytes that its kernels read and write
    temp: int  # bytes
    kernels: int
    products: int  # in float8
    arithmetic_ms: float  # of all products, at the card's rates
    memory_ms: float  # of all bytes


def program(loss: Any, params: Any, batch: Any) -> Program:
    """Compiles the gradient at a loss scale of 2**15."""

    def scaled(params: Any, batch: Any) -> Any:
        return loss(params, batch) * 2.0**15

    traced = jax.jit(jax.value_and_grad(scaled)).trace(params, batch)
    executable = traced.lower(lowering_platforms=("cuda",)).compile()
    text = executable.as_text() or ""
    counts = hlo.counts(text)
    moved = counts.read + counts.written
    kernels = [line for line in text.splitlines() if re.match(r"%\S*(gemm|dot)\S* \(", line)]
    arithmetic = sum(p.operations / H100.rate(p.dtype) for p in products_of(loss, params, batch))
    return Program(
        moved,
        executable.memory_analysis().temp_size_in_bytes,
        counts.kernels,
        sum("f8e" in line for line in kernels),
        1e3 * PRODUCTS_OF_A_STEP * arithmetic,
        1e3 * moved / (1e12 * H100.memory),
    )


def programs(width: int) -> dict[str, Program]:
    """Those of a language model of two blocks and 8,192 letters, on 8 sequences of 1,024."""
    model = transformer(jnp.float32, width, 2, letters=8192, places=1024, batch=(8, 1024))
    args = lowered.planned_everywhere((model.params, model.batch), lowered.target("h100"))
    return {dtype: program(gs.autocast(model.loss, dtype), *args) for dtype in DTYPES}


def markdown(content: dict[str, Any]) -> str:
    """The table of the results."""
    head = (
        "| width | dtype | float8 products | bytes, MB | temporaries, MB | arithmetic, ms | "
        "memory, ms |\n|---:|---|---:|---:|---:|---:|---:|"
    )
    rows = [
        f"| {width} | {dtype} | {p.products} | {p.moved / 1e6:,.0f} | {p.temp / 1e6:,.0f} | "
        f"{p.arithmetic_ms:.2f} | {p.memory_ms:.2f} |"
        for width, found in content["widths"].items()
        for dtype, p in ((dtype, Program(**numbers)) for dtype, numbers in found.items())
    ]
    return "\n".join([head, *rows])


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles, prints the table, and writes the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--widths", nargs="*", type=int, default=list(WIDTHS), metavar="N")
    parser.add_argument("--json", type=file_to_write, default=PATH, metavar="PATH")
    options = parser.parse_args(argv)
    if message := lowered.missing("h100"):
        raise SystemExit(message)
    content: dict[str, Any] = {"environment": environment(), "widths": {}}
    for width in options.widths:
        found = {dtype: p._asdict() for dtype, p in programs(width).items()}
        content["widths"][str(width)] = found
        print(f"width {width}: compiled", flush=True)
    Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    print(markdown(content))


if __name__ == "__main__":
    main()

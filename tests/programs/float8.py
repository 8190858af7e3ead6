"""Compiles gradients of language models for an H100, in float16 and float8."""

import json
import re

import jax
import jax.numpy as jnp

import gainstage as gs
from benchmarks import hlo
from benchmarks.lowered import planned_everywhere, target
from benchmarks.models import transformer

WIDTHS = 2048, 256  # one at which all linear layers gain by float8, and one at which none does


def sizes(loss, *args):
    """What the gradient moves and stores, and how many of its products read float8."""

    def scaled(params, batch):
        return loss(params, batch) * 2.0**15

    program = jax.jit(jax.value_and_grad(scaled)).trace(*args).lower(lowering_platforms=("cuda",))
    executable = program.compile()
    text = executable.as_text()
    counts = hlo.counts(text)
    products = [line for line in text.splitlines() if re.match(r"%\S*(gemm|dot)\S* \(", line)]
    return {
        "moved": counts.read + counts.written,
        "temp": executable.memory_analysis().temp_size_in_bytes,
        "kernels": counts.kernels,
        "float8 products": sum("f8e" in line for line in products),
    }


def main():
    """Prints the sizes of each program."""
    found = {}
    for width in WIDTHS:
        model = transformer(jnp.float32, width, 2, letters=8192, places=1024, batch=(8, 1024))
        args = planned_everywhere((model.params, model.batch), target("h100"))
        dtypes = ("float16", "float8")
        found[width] = {dtype: sizes(gs.autocast(model.loss, dtype), *args) for dtype in dtypes}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""With large tensors a scaled `apply` is faster than other JAX libraries; an optax loop, than flax.

With a thousand tiny ones those that compile in a minute are about as fast.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from . import harness, peers

VARIANTS = (
    peers.OPTAX,
    peers.OURS,
    peers.OURS_IN_OPTAX,
    "optax.apply_if_finite",
    "Keras LossScaleOptimizer",
    "flax DynamicScale",
    "jmp",
    "mpx",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures the step alone; all are compiled and donate their state."""
    options = harness.arguments(
        __doc__,
        argv,
        sets=("one resnet50 gpt2 tiny1000", "tiny20"),
        optimizers=("sgd adam", "sgd adam"),
        dtypes=("float32 float16", "float32 float16"),
    )
    cells = product(options.sets, options.optimizers, options.dtypes)
    cases = [peers.case(VARIANTS, peers.OPTAX, *cell) for cell in cells]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()

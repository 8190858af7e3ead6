"""An eager `apply` with loss scaling is many times faster than that of Keras on JAX without.

On tensors of 64 elements: what is measured is the dispatch. A compiled optax step is the measure
of what a step costs that is not eager.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from . import harness, peers

VARIANTS = (
    peers.KERAS_EAGER,
    "Keras LossScaleOptimizer, eager",
    "ours, eager",
    "ours, eager, no scaling",
    peers.OPTAX,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures as many variables as ResNet-50 has, and a thousand."""
    options = harness.arguments(
        __doc__, argv, sets=("tiny161 tiny1000", "tiny20"), optimizers=("sgd adam", "sgd adam")
    )
    cells = product(options.sets, options.optimizers)
    cases = [peers.case(VARIANTS, peers.KERAS_EAGER, *cell) for cell in cells]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()

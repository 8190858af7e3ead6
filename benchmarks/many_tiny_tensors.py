"""Thousands of small tensors cost little more than handing them to a program and back.

The floor is a program with the arguments and results of our step that does nothing else.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from . import harness, peers

VARIANTS = (
    peers.OPTAX,
    peers.FLOOR,
    peers.OURS,
    peers.OURS_IN_OPTAX,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures sets of tensors of 64 elements."""
    options = harness.arguments(
        __doc__, argv, sets=("tiny1000 tiny5000", "tiny20"), optimizers=("sgd adam", "sgd adam")
    )
    cells = product(options.sets, options.optimizers)
    cases = [peers.case(VARIANTS, peers.OPTAX, *cell) for cell in cells]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()

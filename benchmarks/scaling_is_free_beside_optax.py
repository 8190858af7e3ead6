"""Loss scaling adds to an optimizer step little more than one read of the gradients.

The step alone, gradients given: nothing is there that could hide the check.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from . import harness, peers

VARIANTS = (
    peers.OPTAX,
    peers.OURS,
    "ours, stateless_apply",
    peers.OURS_IN_OPTAX,
    peers.OURS_IN_TRAIN_STEP,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each set of parameters, with each optimizer and dtype of the gradients."""
    options = harness.arguments(
        __doc__,
        argv,
        sets=("one resnet50 gpt2", "tiny20"),
        optimizers=("sgd adam", "sgd adam"),
        dtypes=("float32 float16", "float32 float16"),
    )
    cells = product(options.sets, options.optimizers, options.dtypes)
    cases = [peers.case(VARIANTS, peers.OPTAX, *cell) for cell in cells]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()

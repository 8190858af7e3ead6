"""With clipping by the global norm the check costs nothing: the norm tells what is not finite."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from . import harness, peers

VARIANTS = (peers.OPTAX, peers.OURS, peers.OURS_IN_OPTAX)


def main(argv: Sequence[str] | None = None) -> None:
    """Holds clipping and scaling against `optax.clip_by_global_norm` without scaling."""
    options = harness.arguments(
        __doc__,
        argv,
        sets=("one resnet50 gpt2", "tiny20"),
        optimizers=("sgd adam", "sgd adam"),
        dtypes=("float32 float16", "float32"),
    )
    cells = product(options.sets, options.optimizers, options.dtypes)
    cases = [peers.case(VARIANTS, peers.OPTAX, *cell, clip=True) for cell in cells]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()

"""Moving averages and accumulation cost what they cost in optax; scaling adds its one reading.

The baselines are `optax.incremental_update` of the weights and `optax.MultiSteps`.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from . import harness, peers

VARIANTS = (peers.OPTAX, peers.OURS)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each option by itself."""
    options = harness.arguments(
        __doc__,
        argv,
        sets=("one resnet50", "tiny20"),
        optimizers=("sgd adam", "sgd adam"),
        options=("ema accumulate", "ema accumulate"),
    )
    cells = product(options.sets, options.optimizers, options.options)
    cases = [
        peers.case(VARIANTS, peers.OPTAX, tensors, kind, **{option: True})
        for tensors, kind, option in cells
    ]
    harness.run(Path(__file__).stem, __doc__, cases, options)


if __name__ == "__main__":
    main()

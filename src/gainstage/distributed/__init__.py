"""Training on a mesh of many devices, in one process or several.

The mesh, the collectives and the processes are JAX's own; users import what a step needs beside.
"""

from gainstage.distributed.agreement import assert_consistent, check_replicas
from gainstage.distributed.reduction import mean_gradients, sum_in_float32

__all__ = [
    "assert_consistent",
    "check_replicas",
    "mean_gradients",
    "sum_in_float32",
]


def __dir__() -> list[str]:
    return __all__

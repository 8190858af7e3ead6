"""Training on a mesh of many devices, in one process or several.

The mesh and the collectives are JAX's own; users import what processes need around a step.
"""

from gainstage.distributed.agreement import assert_consistent, check_replicas
from gainstage.distributed.memory_table import describe_layout
from gainstage.distributed.processes import initialize
from gainstage.distributed.reduction import headroom, mean_gradients, sum_in_float32
from gainstage.distributed.watchdog import Watchdog

__all__ = [
    "Watchdog",
    "assert_consistent",
    "check_replicas",
    "describe_layout",
    "headroom",
    "initialize",
    "mean_gradients",
    "sum_in_float32",
]


def __dir__() -> list[str]:
    return __all__

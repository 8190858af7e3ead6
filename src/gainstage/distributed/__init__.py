"""Training on a mesh of many devices, in one process or several.

The mesh, the shardings and the collectives are JAX's own. This package adds what many processes
need around a step: to meet, to agree, to stay in sync, and to end together.
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

"""Names that JAX does not promise to keep: no other module imports from where they are.

Each was seen in jax 0.10.0, 0.10.2, 0.11.2 and 0.12.0.1. A jaxpr here is what `jax.make_jaxpr`
returns: a `ClosedJaxpr` in jax 0.10, a `Jaxpr` since.
"""

from typing import Any

from jax.core import Tracer  # whether a value belongs to a program that is being traced

# Across processes: a step's configuration is compared, an address is sent to all.
from jax.experimental import multihost_utils

# A gradient that XLA for CPU computes transposed is stored once: see `gradients.row_major`.
from jax.experimental.layout import Layout, with_layout_constraint

# `Literal`: an operand of an equation that is a number. `get_opaque_trace_state`: the trace that a
# variable is bound in.
from jax.extend.core import Literal, get_opaque_trace_state
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = [
    "Layout",
    "Literal",
    "Tracer",
    "get_opaque_trace_state",
    "holds_arrays",
    "multihost_utils",
    "used_arguments",
    "with_layout_constraint",
]


def holds_arrays(sharding: Any) -> bool:
    """Whether arrays can be put there: on the devices of a `jax.experimental.topologies` they
    cannot, which are only for compiling, and local to no process."""
    device = next(iter(sharding.device_set))
    return bool(device.client.local_devices())


def used_arguments(program: Any) -> list[bool]:
    """Which arguments the only result of a jaxpr depends on."""
    # In jax 0.10 a jaxpr wraps the one that this takes. Since 0.11 it is its own `jaxpr`, which JAX
    # calls a legacy name.
    return dce_jaxpr(getattr(program, "jaxpr", program), [True])[1]

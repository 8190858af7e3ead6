"""Names that JAX does not promise to keep: no other module imports from where they are.

Each was seen in jax 0.10.0, 0.10.2, 0.11.2 and 0.12.0.1. A jaxpr here is what `jax.make_jaxpr`
returns: a `ClosedJaxpr` in jax 0.10, a `Jaxpr` since.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# Where in the user's files an equation comes from: nothing public tells the frames.
from jax._src.source_info_util import user_frames
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
    "bind",
    "get_opaque_trace_state",
    "holds_arrays",
    "is_jaxpr",
    "multihost_utils",
    "open_jaxpr",
    "scan_counts",
    "used_arguments",
    "user_frames",
    "with_layout_constraint",
]


def holds_arrays(sharding: Any) -> bool:
    """Whether arrays can be put there: on the devices of a `jax.experimental.topologies` they
    cannot, which are only for compiling, and local to no process."""
    device = next(iter(sharding.device_set))
    return bool(device.client.local_devices())


def used_arguments(program: Any) -> list[bool]:
    """Which arguments the only result of a jaxpr depends on."""
    return dce_jaxpr(open_jaxpr(program), [True])[1]


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, with its constants or without."""
    return hasattr(value, "eqns")


def open_jaxpr(program: Any) -> Any:
    """A jaxpr without its constants."""
    # In jax 0.10 a jaxpr wraps this one. Since 0.11 it is its own `jaxpr`, which JAX calls a legacy
    # name.
    return getattr(program, "jaxpr", program)


def bind(eqn: Any, values: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The results of an equation of a jaxpr, with these parameters, for these operands."""
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(dict(params)))
    return list(found) if eqn.primitive.multiple_results else [found]


def scan_counts(params: Mapping[str, Any], operands: int) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    parts = params["ft_in"].update(range(operands)).unpack()  # since jax 0.12
    return len(list(parts[0])), len(list(parts[1]))

"""Names of JAX that may move: only this module imports them.

Each exists in jax 0.10.2, 0.11.2 and 0.12.0.1. A jaxpr here is what `jax.make_jaxpr`
returns: a `ClosedJaxpr` in jax 0.10, a `Jaxpr` since.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The user's source line of an equation: no public API has the frames.
from jax._src.source_info_util import user_frames
from jax.core import Tracer  # whether a value belongs to a traced program

# For several processes: compares configurations, broadcasts an address.
from jax.experimental import multihost_utils

# Stores a gradient once that XLA:CPU computes transposed: see `gradients.row_major`.
from jax.experimental.layout import Layout, with_layout_constraint

# `Literal`: an operand of an equation that is a number. `get_opaque_trace_state`: the trace in
# which a variable is bound.
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
    """Whether arrays can have this sharding. They cannot on devices of
    `jax.experimental.topologies`, which are only for compiling and local to no process."""
    device = next(iter(sharding.device_set))
    return bool(device.client.local_devices())


def used_arguments(program: Any) -> list[bool]:
    """Whether the only result of a jaxpr depends on each argument."""
    return dce_jaxpr(open_jaxpr(program), [True])[1]


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, with or without its constants."""
    return hasattr(value, "eqns")


def open_jaxpr(program: Any) -> Any:
    """A jaxpr without its constants."""
    # In jax 0.10, `make_jaxpr` returns a wrapper of this jaxpr. Since 0.11 a jaxpr is its own
    # `jaxpr`, which JAX calls a legacy name.
    return getattr(program, "jaxpr", program)


def bind(eqn: Any, values: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Evaluates an equation of a jaxpr with these parameters on these operands."""
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(dict(params)))
    return list(found) if eqn.primitive.multiple_results else [found]


def scan_counts(params: Mapping[str, Any], operands: int) -> tuple[int, int]:
    """The number of constants and the number of carries among the operands of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    parts = params["ft_in"].update(range(operands)).unpack()  # since jax 0.12
    return len(list(parts[0])), len(list(parts[1]))

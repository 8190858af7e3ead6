"""Names of JAX that may move: only this module imports them.

Each exists in jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

# No public API has these. `core`: the trace to which new operations belong. `core`, `dtypes`: the
# classes that functions of JAX take as arguments. `source_info_util`: the user's source line of an
# equation, and a context that hands it on.
from jax._src import core, dtypes, source_info_util

# `ShapedArray`: the type of an array in a program. `Tracer`: whether a value belongs to one.
from jax.core import AbstractValue, ShapedArray, Tracer

# For several processes: compares configurations, broadcasts an address.
from jax.experimental import multihost_utils

# Stores a gradient once that XLA:CPU computes transposed: see `gradients.row_major`.
from jax.experimental.layout import Layout, with_layout_constraint

# `Literal`: an operand of an equation that is a number. `get_opaque_trace_state`: the trace in
# which a variable is bound. `jaxpr_as_fun`: runs a program. The others are the types of a program.
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    get_opaque_trace_state,
    jaxpr_as_fun,
)
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = [
    "AbstractValue",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Layout",
    "Literal",
    "Primitive",
    "ShapedArray",
    "Tracer",
    "Var",
    "dce_jaxpr",
    "get_opaque_trace_state",
    "holds_arrays",
    "jaxpr_as_fun",
    "multihost_utils",
    "refuse_as_argument",
    "return_to_trace",
    "source_info_util",
    "trace_of",
    "user_frames",
    "with_layout_constraint",
]


user_frames = source_info_util.user_frames


def holds_arrays(sharding: Any) -> bool:
    """Whether arrays can have this sharding. They cannot on devices of
    `jax.experimental.topologies`, which are only for compiling and local to no process."""
    device = next(iter(sharding.device_set))
    return bool(device.client.local_devices())


def return_to_trace() -> Callable[[], AbstractContextManager[None]]:
    """Returns a function that makes a context in which operations belong to the current trace, also
    inside of a loop's body or another function that is traced later."""
    trace = core.trace_ctx.trace
    return lambda: core.set_current_trace(trace)


def trace_of(tracer: Any) -> object:
    """The trace that a tracer belongs to."""
    return tracer._trace


def refuse_as_argument(cls: type, refuse: Callable[[Any], NoReturn]) -> None:
    """Makes JAX call `refuse` where an object of this class is an argument of its functions. JAX's
    own error names `__jax_array__`, which it calls only in functions that are not compiled."""
    core.pytype_aval_mappings[cls] = dtypes.canonicalize_value_handlers[cls] = refuse

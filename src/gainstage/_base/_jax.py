"""Names of JAX that may move: only this module imports them.

Each exists in jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

# No public API has these. `core`: the trace to which new operations belong. `core`, `dtypes`: the
# classes that functions of JAX take as arguments. `linear_util`: a function of a program, changed.
# `source_info_util`: the user's source line of an equation, and a context that hands it on. `ad`,
# `ad_util`, `batching`: whether a value is differentiated, and what its derivative is.
from jax._src import core, dtypes, linear_util, source_info_util
from jax._src.ad_util import Zero
from jax._src.interpreters.ad import JVPTrace, JVPTracer, LinearizeTrace, LinearizeTracer
from jax._src.interpreters.batching import BatchTrace, BatchTracer

# `ShapedArray`: the type of an array in a program. `Tracer`: whether a value belongs to one.
from jax.core import AbstractValue, ShapedArray, Tracer

# For several processes: compares configurations, broadcasts an address.
from jax.experimental import multihost_utils

# Stores a gradient once that XLA:CPU computes transposed: see `gradients.row_major`.
from jax.experimental.layout import Layout, with_layout_constraint

# `Literal`: an operand of an equation that is a number. `get_opaque_trace_state`: the trace in
# which a variable is bound. `jaxpr_as_fun`: runs a program. `new_jaxpr_eqn` and `primitives`: an
# equation that is added to a program. The others are the types of a program.
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    get_opaque_trace_state,
    jaxpr_as_fun,
    new_jaxpr_eqn,
    primitives,
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
    "batch_size",
    "batches_next",
    "computed_by",
    "dce_jaxpr",
    "differentiations",
    "get_opaque_trace_state",
    "given_arrays",
    "holds_arrays",
    "is_batched",
    "is_differentiated",
    "is_written_zero",
    "jaxpr_as_fun",
    "multihost_utils",
    "new_jaxpr_eqn",
    "primitives",
    "refuse_as_argument",
    "return_to_trace",
    "source_info_util",
    "trace_ctx",
    "trace_of",
    "user_frames",
    "values_in",
    "with_layout_constraint",
]


user_frames = source_info_util.user_frames


@linear_util.transformation2  # type: ignore[untyped-decorator]
def given_arrays(function: Callable[..., Any], *args: Any) -> Any:
    """The backward pass of a `jax.custom_vjp`, given arrays of JAX: what its forward pass keeps of
    the constants of a program would be arrays of numpy, which no traced index can index."""
    return function(*(jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args))


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


trace_of = operator.attrgetter("_trace")  # the trace that a tracer belongs to
trace_ctx = core.trace_ctx  # its `trace` is that of new operations


def computed_by(values: Iterable[Any], known: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The equations of a trace that compute values from known ones and others, the last ones
    first, and these others, which no equation has computed, such as arguments of the trace."""
    todo, seen = deque(values), set(map(id, known))
    equations: dict[int, Any] = {}
    inputs: list[Any] = []
    while todo:
        tracer = todo.popleft()
        if id(tracer) in seen:
            continue
        seen.add(id(tracer))
        equation = getattr(tracer, "parent", None)
        if equation is None:
            inputs.append(tracer)
        elif id(equation) not in equations:
            equations[id(equation)] = equation
            todo.extend(equation.in_tracers)
    return list(equations.values()), inputs


def values_in(tree: Any) -> list[Any]:
    """The values of the arrays in a pytree, and of their derivatives, as the program that is traced
    now has them: below the tracers of `jax.grad` and `jax.vmap`."""
    todo, found = jax.tree.leaves(tree), list[Any]()
    while todo:
        x = todo.pop()
        if isinstance(x, BatchTracer):
            todo.append(x.val)
        elif isinstance(x, (JVPTracer, LinearizeTracer)):
            todo += x.primal, x.tangent
        elif not isinstance(x, Zero):
            found.append(x)
    return found


def is_written_zero(x: Any) -> bool:
    """Whether a value of the program that is traced now is a constant of zeros, as JAX writes the
    gradient of what a function does not use."""
    equation = getattr(x, "parent", None)
    if equation is None or equation.primitive.name != "broadcast_in_dim":
        return False
    number: Any = getattr(equation.in_tracers[0], "val", None)
    return isinstance(number, Literal) and not np.any(np.asarray(number.val))


def is_differentiated(tracer: Any) -> bool:
    """Whether derivatives with respect to a tracer are computed, inside of `jax.vmap` too."""
    while isinstance(tracer, BatchTracer):
        tracer = tracer.val
    return isinstance(tracer, (JVPTracer, LinearizeTracer))


def differentiations() -> dict[int, Any]:
    """The transformations that differentiate what is computed now, by their identities."""
    trace, tags = core.trace_ctx.trace, dict[int, Any]()
    while trace is not None:
        if isinstance(trace, (JVPTrace, LinearizeTrace)):
            # Inside of a `jax.shard_map` the trace is another, and the tag the same. All tags are
            # equal to each other.
            tags[id(trace.tag)] = trace.tag
        trace = getattr(trace, "parent_trace", None)
    return tags


def is_batched(x: Any) -> bool:
    """Whether `jax.vmap` around a function gives a value another axis."""
    while isinstance(x, (JVPTracer, LinearizeTracer)):
        x = x.primal
    return isinstance(x, BatchTracer)


def batch_size(x: Any) -> int:
    """The number of examples that `jax.vmap` around a function gives to a value, 1 without."""
    size = 1
    while isinstance(x, (JVPTracer, LinearizeTracer, BatchTracer)):
        if isinstance(x, BatchTracer):
            axis = x.batch_dim
            size *= x.val.shape[axis] if isinstance(axis, int) else 1
            x = x.val
        else:
            x = x.primal
    return size


def batches_next() -> bool:
    """Whether `jax.vmap` is the first transformation of the next operation: what is differentiated
    is then what it makes of it."""
    return isinstance(trace_ctx.trace, BatchTrace)


def refuse_as_argument(cls: type, refuse: Callable[[Any], NoReturn]) -> None:
    """Makes JAX call `refuse` where an object of this class is an argument of its functions. JAX's
    own error names `__jax_array__`, which it calls only in functions that are not compiled."""
    core.pytype_aval_mappings[cls] = dtypes.canonicalize_value_handlers[cls] = refuse

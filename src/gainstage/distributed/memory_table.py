"""The memory of an optimizer's variables and state on each device."""

import math

from gainstage._variables.sharding import on_mesh
from gainstage._variables.variable import Variable
from gainstage.optimizers._internals import store_of
from gainstage.optimizers.optimizer import Optimizer


def describe_layout(optimizer: Optimizer) -> str:
    """Returns a table of the shardings of variables and state, and of the bytes on each device.

    Nothing is allocated. Build the optimizer for planned variables (made from a
    `jax.ShapeDtypeStruct`) to see what a run would need.

    Args:
        optimizer: an optimizer, built.

    Returns:
        A table for `print`: one line per variable, with the state that belongs to it, and the
        totals.

    Raises:
        ValueError: the optimizer is not built.

    Examples:
        >>> import jax, jax.numpy as jnp, gainstage as gs
        >>> from gainstage import distributed
        >>> kernel = jax.ShapeDtypeStruct((50257, 768), jnp.float16)
        >>> opt = gs.LossScaleOptimizer(gs.optimizers.Adam(1e-3))
        >>> opt.build([gs.Variable(kernel, name="kernel")])
        >>> print(distributed.describe_layout(opt))
        variable  shape         dtype    layout  bytes    state  layout  bytes
        kernel    (50257, 768)  float16  -       77.2 MB  2      -       309 MB
        on each device: 77.2 MB of variables, 309 MB of state
        in all: 77.2 MB of variables, 309 MB of state, on 1 device
    """
    if not optimizer.built:
        raise ValueError(f"Expected {optimizer.name!r} to be built before describe_layout.")
    variables, state = optimizer.trainable_variables, optimizer.variables
    rows = [["variable", "shape", "dtype", "layout", "bytes", "state", "layout", "bytes"]]
    for variable in variables:
        own = store_of(optimizer).state_of(variable)
        rows.append(
            [variable.name, str(variable.shape), str(variable.dtype), _sharding([variable])]
        )
        rows[-1] += [_bytes([variable]), str(len(own)), _sharding(own), _bytes(own)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    devices = max(len(v.sharding.device_set) if v.sharding else 1 for v in variables)
    lines.append(f"on each device: {_bytes(variables)} of variables, {_bytes(state)} of state")
    whole = f"{_bytes(variables, whole=True)} of variables, {_bytes(state, whole=True)} of state"
    lines.append(f"in all: {whole}, on {devices} device{'s' * (devices > 1)}")
    return "\n".join(lines)


def _sharding(variables: list[Variable]) -> str:
    """The sharding of some variables; if they differ, the most frequent."""
    specs = [sharding and sharding.spec for sharding in map(on_mesh, variables)]
    written = [str(tuple(spec)).replace("'", "") if spec and any(spec) else "-" for spec in specs]
    return max(written, key=written.count, default="-")


def _bytes(variables: list[Variable], whole: bool = False) -> str:
    """The memory of some variables on one device, or in total."""
    total = 0
    for variable in variables:
        shape: tuple[int, ...] = variable.shape
        if variable.sharding is not None and not whole:
            shape = variable.sharding.shard_shape(shape)
        total += math.prod(shape) * variable.dtype.itemsize
    return _written(total)


def _written(count: float) -> str:
    """Formats a number of bytes with three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

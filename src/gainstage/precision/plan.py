"""Which operations of a function are in half precision, as a table."""

import collections
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base._jax import JaxprEqn
from gainstage._base.warn import warn
from gainstage._programs import jaxprs
from gainstage._programs.in_dtype import is_float32
from gainstage._programs.jaxprs import AnyJaxpr
from gainstage._programs.operations import Trait, names_with
from gainstage._programs.patterns import moves
from gainstage.precision.noise_and_bias import Price

__all__ = ["Operation", "Plan"]

LINEAR_ALGEBRA = names_with(Trait.ALGEBRA)
VERSION = 2  # of the file
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(jnp.bfloat16)}  # of plans
FLOAT8 = "float8"  # of products in a plan, and the default with them


class Operation(NamedTuple):
    """One operation of a function, a row of a `Plan`."""

    path: tuple[int, ...]  # where it is in the program
    name: str  # JAX's name, such as `dot_general`
    dtype: str  # of the computation: "float32", "float16", "bfloat16", or "float8" of a product
    line: str  # file and line
    layer: str  # from `jax.named_scope`, as in Flax Linen, Haiku and Keras
    share: float  # the relative error of the gradient if only this line is in its dtype
    noise: float  # what that adds to the noise of the batches; NaN if there was one batch
    bias: float  # and to the mean gradient; of what is in float32, all three are those in half
    largest: float  # the largest absolute number among its operands and results
    reason: str = ""  # why it is not in a smaller dtype


class Plan:
    """Which operations of a function are in half precision, as `precision.tune` measured it.

    `print` it: a table with a row for each line of the model. `gainstage.autocast(fun, plan)` uses
    it. It belongs to one function, for any batch size and any length of a sequence.

    Attributes:
        dtype: the half-precision dtype, such as "float16".
        operations: a tuple of `Operation`, in the order of the program.
        predicted: the `Price` that the shares predict.
        measured: the `Price` of the function under `autocast`, on other batches than those of the
            shares if there are four or more.
        shapes: those of the arrays of the first argument, the parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gainstage import precision
        >>> xs = [(x,) for x in jnp.eye(3).reshape(3, 1, 3)]
        >>> plan = precision.tune(lambda w, x: ((x @ w) ** 2).mean(), jnp.arange(3.0), xs)
        >>> print(plan.dtype, [operation.name for operation in plan.operations][0])
        float16 dot_general

    Source: `precision.tune` makes plans; `load` reads one from a file.
    """

    def __init__(
        self,
        dtype: str,
        operations: Sequence[Operation],
        predicted: Price,
        measured: Price,
        shapes: Sequence[Sequence[int]] = (),
    ):
        self.shapes: tuple[tuple[int, ...], ...] = tuple(map(tuple, shapes))
        self.dtype: str = dtype
        self.operations: tuple[Operation, ...] = tuple(operations)
        self.predicted: Price = predicted
        self.measured: Price = measured
        self._warned = False
        self._dtypes = {o.path: o.dtype for o in self.operations}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and repr(self._facts()) == repr(other._facts())  # NaN

    def __hash__(self) -> int:
        return hash((self.dtype, tuple((o.path, o.dtype) for o in self.operations)))

    def _facts(self) -> tuple[Any, ...]:
        return self.dtype, self.operations, self.predicted, self.measured, self.shapes

    def dtype_of(self, path: tuple[int, ...]) -> str:
        """The dtype of the operation with this path; "" for one that the plan does not name."""
        return self._dtypes.get(path, "")

    def check(self, program: AnyJaxpr) -> None:
        """Raises a ValueError if a program is not the one that was measured."""
        operations = [(path, jaxprs.name_of(eqn)) for path, eqn in operations_of(program)]
        planned = [(operation.path, operation.name) for operation in self.operations]
        if operations == planned:
            self._look_at_shapes(program)
            return
        both = zip(planned, operations, strict=False)
        at = next(
            (i for i, (a, b) in enumerate(both) if a != b), min(len(planned), len(operations))
        )
        names = [
            f"{rows[at][1]} as operation {at} at {rows[at][0]}"
            if at < len(rows)
            else f"{len(rows)} operations"
            for rows in (planned, operations)
        ]
        line = self.operations[at].line if at < len(planned) else ""
        raise ValueError(
            f"Expected the function that the plan was measured on, with {names[0]}"
            f"{line and f' ({line})'}; got {names[1]}. Measure again: "
            f"gainstage.precision.tune(fun, params, batches)."
        )

    def _look_at_shapes(self, program: AnyJaxpr) -> None:
        """Warns once of parameters of other shapes: their sums are of other lengths."""
        arguments = [jaxprs.array(v).shape for v in jaxprs.open_jaxpr(program).invars]
        other = [pair for pair in zip(self.shapes, arguments, strict=False) if pair[0] != pair[1]]
        if other and not self._warned:
            self._warned = True
            warn(
                f"This plan was measured with parameters of other shapes: {other[0][0]}, and now "
                f"{other[0][1]}. Sums are longer or shorter, and so are their errors. Measure "
                f"again: gainstage.precision.tune(fun, params, batches)."
            )

    def to_json(self) -> str:
        """Returns the plan as text, for `from_json`."""
        rows = [_as_json(operation) for operation in self.operations]
        prices = {name: _as_json(getattr(self, name)) for name in ("predicted", "measured")}
        content = {"gainstage plan": VERSION, "dtype": self.dtype, **prices}
        return json.dumps({**content, "shapes": self.shapes, "operations": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads a plan from the text that `to_json` returned.

        Raises:
            ValueError: it is no plan.
        """
        try:
            content = json.loads(text)
            if content["gainstage plan"] != VERSION:
                raise ValueError(f"version {content['gainstage plan']}")
            dtype = content["dtype"]
            if dtype not in list(DTYPES):
                raise ValueError(f"dtype {dtype!r}")
            predicted, measured = (_price(content[name]) for name in ("predicted", "measured"))
            rows = [_operation(row) for row in content["operations"]]
            return cls(dtype, rows, predicted, measured, content["shapes"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"Expected a plan of version {VERSION} that Plan.to_json returned; "
                f"got {checks.brief(error)}."
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes the plan to a JSON file.

        Args:
            path: the file, which is replaced.
        """
        temporary = Path(f"{path}.part")
        temporary.write_text(self.to_json(), encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan from a JSON file.

        Args:
            path: the file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no plan.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"Expected a plan of version {VERSION} that Plan.save wrote in {path}; "
                f"got {checks.brief(error.__cause__ or error)}."
            ) from error

    def __str__(self) -> str:
        counts = collections.Counter(operation.dtype for operation in self.operations)
        parts = [f"{counts[name]} in {name}" for name in (FLOAT8, *DTYPES) if counts[name]]
        lines = [
            f"Of {len(self.operations)} operations {' and '.join(parts) or 'none'}: "
            f"{self.measured.told()} (predicted: {self.predicted.told()})."
        ]
        each: dict[Any, list[Operation]] = {}
        for operation in self.operations:
            alike = operation.name, operation.dtype, operation.line, operation.layer
            each.setdefault((*alike, bool(operation.reason)), []).append(operation)
        head = ("operation", "count", "dtype", "error", "noise", "bias", "largest", "line", "why")
        rows: list[tuple[str, ...]] = [head]
        for (name, dtype, line, layer, _), some in each.items():
            worst = max(some, key=lambda operation: operation.largest)
            shares = [max(getattr(o, of) for o in some) for of in ("share", "noise", "bias")]
            numbers = [f"{share:.3%}" if share == share else "" for share in shares]
            place = f"{line} {layer}".strip()
            rows.append(
                (name, str(len(some)), dtype, *numbers, f"{worst.largest:.3g}", place, worst.reason)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan({self.dtype!r}, {len(self.operations)} operations, {self.measured.told()})"


def _as_json(row: NamedTuple) -> dict[str, Any]:
    """The fields of a row, with None for NaN and "inf" for inf, which JSON has not."""
    unknown = {name: None for name, x in row._asdict().items() if x != x}
    endless = {name: "inf" for name, x in row._asdict().items() if x == math.inf}
    return {**row._asdict(), **unknown, **endless}


def _numbers_in(
    content: dict[str, Any], names: Sequence[str], unknown: Sequence[str]
) -> dict[str, float]:
    """Numbers of a file; those of `unknown` may be None, for NaN."""
    found = {name: math.inf if content[name] == "inf" else content[name] for name in names}
    numbers: dict[str, Any] = {
        name: math.nan if x is None and name in unknown else x for name, x in found.items()
    }
    if not all(map(_is_count, numbers.values())):
        raise ValueError(f"the row {checks.brief(content)}")
    return numbers


def _price(content: dict[str, Any]) -> Price:
    """A price of a file."""
    return Price(**_numbers_in(content, Price._fields, Price._fields))


def _operation(row: dict[str, Any]) -> Operation:
    """A row of a file."""
    numbers = _numbers_in(row, ("share", "noise", "bias", "largest"), ("noise", "bias"))
    operation = Operation(**{**row, **numbers, "path": tuple(row["path"])})
    texts = (operation.name, operation.line, operation.layer, operation.reason)
    are_right = all(map(_is_count, operation.path)) and all(isinstance(x, str) for x in texts)
    of_product = [FLOAT8] if operation.name == "dot_general" else []
    if not are_right or operation.dtype not in ("float32", *DTYPES, *of_product):
        raise ValueError(f"the row {checks.brief(row)}")
    return operation


def _is_count(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def operations_of(program: AnyJaxpr) -> list[tuple[tuple[int, ...], JaxprEqn]]:
    """The paths and equations that a plan decides on: those with float32 results and operands,
    that compute."""
    return [
        (path, eqn)
        for path, eqn in jaxprs.operations(program)
        if not moves(eqn)
        and eqn.primitive.name not in (jaxprs.OPAQUE | LINEAR_ALGEBRA)
        and not eqn.primitive.name.startswith("custom_")
        and "callback" not in eqn.primitive.name
        and any(is_float32(v) for v in eqn.invars)
        and any(is_float32(v) for v in eqn.outvars)
    ]

"""Which operations of a function are in half precision, as a table."""

import json
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

__all__ = ["Operation", "Plan"]

LINEAR_ALGEBRA = names_with(Trait.ALGEBRA)
VERSION = 1  # of the file
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(jnp.bfloat16)}  # of plans
FLOAT8 = "float8"  # of products in a plan, and the default rule with them


class Operation(NamedTuple):
    """One operation of a function, a row of a `Plan`."""

    path: tuple[int, ...]  # where it is in the program
    name: str  # JAX's name, such as `dot_general`
    dtype: (
        str  # in which it is computed: "float32", "float16", "bfloat16", and "float8" of products
    )
    line: str  # file and line
    layer: str  # from `jax.named_scope`, as in Flax Linen, Haiku and Keras
    share: float  # the relative error of the gradient if only this line is in half precision
    largest: float  # the largest absolute number among its operands and results
    reason: str = ""  # why it is in float32


class Plan:
    """Which operations of a function are in half precision, as `precision.tune` measured it.

    `print` it: a table with a row for each line of the model. `gainstage.autocast(fun, plan)` uses
    it. It belongs to one function, for any batch size and any length of a sequence.

    Attributes:
        dtype: the half-precision dtype, such as "float16".
        operations: a tuple of `Operation`, in the order of the program.
        predicted: the relative error of the gradient that the shares predict.
        measured: the relative error of the gradient of the function under `autocast`.
        shapes: those of the arrays of the first argument, the parameters.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gainstage import precision
        >>> plan = precision.tune(lambda w, x: ((x @ w) ** 2).mean(), jnp.ones(3), jnp.ones((2, 3)))
        >>> print(plan.dtype, [operation.name for operation in plan.operations][0])
        float16 dot_general

    Source: `precision.tune` makes plans; `load` reads one from a file.
    """

    def __init__(
        self,
        dtype: str,
        operations: Sequence[Operation],
        predicted: float,
        measured: float,
        shapes: Sequence[Sequence[int]] = (),
    ):
        self.shapes: tuple[tuple[int, ...], ...] = tuple(map(tuple, shapes))
        self.dtype: str = dtype
        self.operations: tuple[Operation, ...] = tuple(operations)
        self.predicted: float = predicted
        self.measured: float = measured
        self._warned = False
        self._dtypes = {o.path: o.dtype for o in self.operations}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash((self.dtype, self.operations))

    def _facts(self) -> tuple[Any, ...]:
        return self.dtype, self.operations, self.predicted, self.measured, self.shapes

    def dtype_of(self, path: tuple[int, ...]) -> str:
        """The dtype of the operation with this path; "" for one that the plan does not name."""
        return self._dtypes.get(path, "")

    def check(self, program: AnyJaxpr) -> None:
        """Raises a ValueError if a program is not the one that was measured."""
        found = [(path, eqn.primitive.name) for path, eqn in operations_of(program)]
        known = [(operation.path, operation.name) for operation in self.operations]
        if found == known:
            self._look_at_shapes(program)
            return
        both = zip(known, found, strict=False)
        at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(known), len(found)))
        names = [
            f"{rows[at][1]} as operation {at} at {rows[at][0]}"
            if at < len(rows)
            else f"{len(rows)} operations"
            for rows in (known, found)
        ]
        line = self.operations[at].line if at < len(known) else ""
        raise ValueError(
            f"Expected the function that the plan was measured on, with {names[0]}"
            f"{line and f' ({line})'}; got {names[1]}. Measure again: "
            f"gainstage.precision.tune(fun, *args)."
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
                f"again: gainstage.precision.tune(fun, *args)."
            )

    def to_json(self) -> str:
        """Returns the plan as text, for `from_json`."""
        rows = [operation._asdict() for operation in self.operations]
        content = {
            "gainstage plan": VERSION, "dtype": self.dtype, "predicted": self.predicted,
            "measured": self.measured, "shapes": self.shapes, "operations": rows,
        }  # fmt: skip
        return json.dumps(content, indent=1)

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
            dtype, errors = content["dtype"], (content["predicted"], content["measured"])
            if dtype not in list(DTYPES) or not all(map(_is_number, errors)):
                raise ValueError(f"dtype {dtype!r}, errors {errors}")
            rows = [_operation(row) for row in content["operations"]]
            return cls(dtype, rows, errors[0], errors[1], content["shapes"])
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
        halves = sum(operation.dtype == self.dtype for operation in self.operations)
        lines = [
            f"{halves} of {len(self.operations)} operations in {self.dtype}: "
            f"the gradient is off by {self.measured:.2%} (predicted: {self.predicted:.2%})."
        ]
        each: dict[Any, list[Operation]] = {}
        for operation in self.operations:
            alike = operation.name, operation.dtype, operation.line, operation.layer
            each.setdefault((*alike, bool(operation.reason)), []).append(operation)
        rows = [("operation", "count", "dtype", "share", "largest", "line", "why")]
        for (name, dtype, line, layer, _), some in each.items():
            worst = max(some, key=lambda operation: operation.largest)
            share = max(operation.share for operation in some)
            numbers = str(len(some)), dtype, f"{share:.3%}", f"{worst.largest:.3g}"
            rows.append((name, *numbers, f"{line} {layer}".strip(), worst.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Plan({self.dtype!r}, {len(self.operations)} operations, measured={self.measured:.2g})"
        )


def _operation(row: dict[str, Any]) -> Operation:
    """A row of a file."""
    operation = Operation(**{**row, "path": tuple(row["path"])})
    numbers = (*operation.path, operation.share, operation.largest)
    texts = (operation.name, operation.line, operation.layer, operation.reason)
    are_right = all(map(_is_number, numbers)) and all(isinstance(text, str) for text in texts)
    of_product = [FLOAT8] if operation.name == "dot_general" else []
    if not are_right or operation.dtype not in ("float32", *DTYPES, *of_product):
        raise ValueError(f"the row {checks.brief(row)}")
    return operation


def _is_number(x: object) -> bool:
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

"""Which operations of a function are in which precision, by their lines of code, as a table."""

import collections
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gainstage._base import checks
from gainstage._base.tensor_file import TensorFile, replacing
from gainstage._programs.code_lines import CodeLine
from gainstage._programs.operations import PRODUCTS
from gainstage.precision.noise_and_bias import GradientAccuracy

__all__ = ["Plan", "PlanEntry"]

VERSION = 3  # of the file
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(jnp.bfloat16)}  # of plans
FLOAT8 = "float8"  # of a `dot_general` in a plan, and the default with them
RESULT = "float32 result"  # of a product, with operands in half precision
WIDE = "float32"
UNMEASURED = GradientAccuracy(math.nan, math.nan)
MOST_LINES = 5  # lines of code that are named for keep_float32


class PlanEntry(NamedTuple):
    """The operations of one kind on one line of code, a row of a `Plan`."""

    name: str  # JAX's name, such as `dot_general`
    dtype: str  # "float32", "float16", "bfloat16"; of a product also "float8", "float32 result"
    line: str  # file and line
    text: str  # the code that stands there
    layer: str  # from `jax.named_scope`, as in Flax Linen, Haiku and Keras
    key: str  # by which the line is found again
    error: float = math.nan  # the relative error of the gradient if only this is in half precision
    noise: float = math.nan  # what that adds to the noise of the batches; NaN if there was one
    bias: float = math.nan  # and to the mean gradient
    reason: str = ""  # why it is not in a smaller dtype

    @property
    def code(self) -> str:
        """The line with its text; without a line, the layer."""
        return f"{self.line} (`{self.text}`)" if self.line else f"{self.layer} ({self.name})"

    @property
    def place(self) -> str:
        """The line and the layer, as text."""
        return f"{self.line} {self.layer}".strip()


class Plan:
    """Which operations of a function are in which precision, where the default rules do not say it.

    `print` it: a table with a row for each kind of operation on each line of code, and the lines to
    put into `keep_float32`. `gainstage.autocast(fun, plan)` uses it. `gainstage.mend`, and a
    `train_step` with `mend=True`, return the lines that float32 takes back; `precision.find_plan`
    one for each line. A line is found again by its text and those of the calls around it, so a plan
    is good for any batch size, any number of equal layers, and another run of the same code.

    Args:
        dtype: "float16", "bfloat16" or "float8", whose default rules hold for all other operations.
        entries: the rows, a `PlanEntry` each.
        predicted: the `GradientAccuracy` that the shares of the operations predict.
        measured: the `GradientAccuracy` of the function under `autocast`.
        left: the part of what the default rules have in half precision that is still there.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gainstage import precision
        >>> xs = [(x,) for x in jnp.eye(64).reshape(2, 32, 64)]
        >>> plan = precision.find_plan(lambda w, x: ((x @ w) ** 2).mean(), jnp.ones((64, 32)), xs)
        >>> print(plan.dtype, [operation.name for operation in plan.entries][0])
        float16 dot_general

    Source: `precision.find_plan` and `gainstage.mend` make plans; `load` reads one from a file.
    """

    def __init__(
        self,
        dtype: str,
        entries: Sequence[PlanEntry] = (),
        predicted: GradientAccuracy = UNMEASURED,
        measured: GradientAccuracy = UNMEASURED,
        left: float = math.nan,
    ):
        self.dtype: str = dtype
        self.entries: tuple[PlanEntry, ...] = tuple(entries)
        self.predicted: GradientAccuracy = predicted
        self.measured: GradientAccuracy = measured
        self.left: float = left
        self._dtypes: dict[str, str] = {o.key: o.dtype for o in self.entries}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and repr(self._facts()) == repr(other._facts())  # NaN

    def __hash__(self) -> int:
        return hash((self.dtype, tuple(self._dtypes.items())))

    def _facts(self) -> tuple[Any, ...]:
        return self.dtype, self.entries, self.predicted, self.measured, self.left

    def dtype_of(self, key: str) -> str:
        """The dtype of the operations with this key; "" for those that the plan does not name."""
        return self._dtypes.get(key, "")

    def with_plan(self, other: "Plan") -> "Plan":
        """The plan with the rows of another in the place of those of the same lines."""
        own = {operation.key: operation for operation in (*self.entries, *other.entries)}
        return Plan(self.dtype, list(own.values()), other.predicted, other.measured, other.left)

    def check(self, lines: Mapping[Any, CodeLine]) -> None:
        """Raises a ValueError if a program has not all lines of the plan."""
        there = {line.key for line in lines.values()}
        missing = [operation for operation in self.entries if operation.key not in there]
        if missing:
            raise ValueError(
                f"Expected the function that the plan was made for, with {missing[0].code}; got "
                f"one that lacks {len(missing)} of its {len(self.entries)} rows. If its code "
                f"was changed, measure again: gainstage.mend or gainstage.precision.find_plan."
            )

    def to_json(self) -> str:
        """Returns the plan as text, for `from_json`."""
        rows = [_as_json(operation) for operation in self.entries]
        prices = {name: _as_json(getattr(self, name)) for name in ("predicted", "measured")}
        left = None if math.isnan(self.left) else self.left
        content = {"gainstage plan": VERSION, "dtype": self.dtype, **prices, "left": left}
        return json.dumps({**content, "operations": rows}, indent=1)

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
            if dtype not in (*DTYPES, FLOAT8):
                raise ValueError(f"dtype {dtype!r}")
            predicted, measured = (_price(content[name]) for name in ("predicted", "measured"))
            rows = [_operation(row) for row in content["operations"]]
            return cls(dtype, rows, predicted, measured, **_numbers_in(content, ["left"]))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"Expected a plan of version {VERSION} that Plan.to_json returned; "
                f"got {checks.brief(error)}."
            ) from error

    def save(self, path: str | Path) -> None:
        """Writes the plan to a JSON file.

        Args:
            path: the file, which is replaced.
        """
        with replacing(Path(path)) as part:
            part.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan from a JSON file, or from the file of a state that was saved with it.

        Args:
            path: the file that `save` wrote, or `gainstage.save(path, state, plan=plan)`.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no plan.
        """
        try:
            return cls.from_json(_text_in(Path(path)))
        except ValueError as error:
            raise ValueError(
                f"Expected a plan of version {VERSION} that Plan.save wrote in {path}; "
                f"got {checks.brief(error.__cause__ or error)}."
            ) from error

    def lines_to_keep(self) -> str:
        """The lines to put into `keep_float32`, as text; "" if there are none."""
        wide = (o for o in self.entries if o.dtype in (WIDE, RESULT) and o.line)
        lines = list(dict.fromkeys(o.code for o in wide))
        more = f" and {len(lines) - MOST_LINES} more" * (len(lines) > MOST_LINES)
        return f"{', '.join(lines[:MOST_LINES])}{more}"

    def __str__(self) -> str:
        counts = collections.Counter(operation.dtype for operation in self.entries)
        parts = [f"{dtype} ({count})" for dtype, count in sorted(counts.items())]
        text = f"{self.dtype} by the default rules"
        text += f", with rows in {' and '.join(parts)}" * bool(parts)
        if not all(map(math.isnan, (self.measured.noise, self.measured.error))):
            text += f": {self.measured.told()}"
        if not all(map(math.isnan, (self.predicted.noise, self.predicted.error))):
            text += f" (predicted: {self.predicted.told()})"
        text += "."
        if not math.isnan(self.left):
            text += f" {self.left:.0%} of what they have in half precision is left."
        if not self.entries:
            return text
        rows: list[tuple[str, ...]] = [
            ("operation", "dtype", "error", "noise", "bias", "line", "why")
        ]
        for o in self.entries:
            numbers = [_percentage(x) for x in (o.error, o.noise, o.bias)]
            rows.append((o.name, o.dtype, *numbers, o.place, o.reason))
        shown = [column for column in zip(*rows, strict=True) if any(column[1:])]
        lines = [text, *aligned(list(zip(*shown, strict=True)))]
        keep = self.lines_to_keep()
        if keep and not counts.keys() & {*DTYPES, FLOAT8}:
            lines.append(f"As code: with gainstage.keep_float32(): around {keep}.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan({self.dtype!r}, {len(self.entries)} operations, {self.measured.told()})"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _percentage(x: float) -> str:
    """A number of a row as text; "" for NaN."""
    return f"{x:.3%}" if math.isfinite(x) else "inf" * (x == math.inf)


def _as_json(row: NamedTuple) -> dict[str, Any]:
    """The fields of a row, with None for NaN and "inf" for inf, which JSON has not."""
    unknown = {name: None for name, x in row._asdict().items() if x != x}
    endless = {name: "inf" for name, x in row._asdict().items() if x == math.inf}
    return {**row._asdict(), **unknown, **endless}


def _numbers_in(content: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Numbers of a file, which may be None, for NaN."""
    known: dict[Any, Any] = {"inf": math.inf, None: math.nan}
    found = {name: known.get(content[name], content[name]) for name in names}
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in found.values()):
        raise ValueError(f"the row {checks.brief(content)}")
    return found


def _price(content: dict[str, Any]) -> GradientAccuracy:
    """A price of a file."""
    return GradientAccuracy(**_numbers_in(content, GradientAccuracy._fields))


def _operation(row: dict[str, Any]) -> PlanEntry:
    """A row of a file."""
    operation = PlanEntry(**{**row, **_numbers_in(row, ("error", "noise", "bias"))})
    texts = ("name", "line", "text", "layer", "key", "reason")
    are_texts = all(isinstance(getattr(operation, name), str) for name in texts)
    allowed = (
        WIDE, *DTYPES,
        *(RESULT,) * (operation.name in PRODUCTS),
        *(FLOAT8,) * (operation.name == "dot_general"),
    )  # fmt: skip
    if not are_texts or operation.dtype not in allowed:
        raise ValueError(f"the row {checks.brief(row)}")
    return operation


def _text_in(path: Path) -> str:
    """The text of a plan in a file of its own, or in that of a state."""
    with path.open("rb") as file:
        is_state = file.read(9)[8:] == b"{"  # after the length of its header
    if not is_state:
        return path.read_text(encoding="utf-8")
    with TensorFile(path) as file:
        text = file.facts.get("plan")
    if not isinstance(text, str):
        raise ValueError("a state that was saved without a plan")
    return text

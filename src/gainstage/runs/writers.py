"""Writers: record the numbers of steps, and read many steps at a time from the device."""

import abc
import atexit
import contextlib
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from gainstage._base import checks
from gainstage._base._jax import Tracer
from gainstage._base.arrays import ARRAYS
from gainstage._base.checks import brief
from gainstage._base.importing import check_not_importing
from gainstage._base.signals import deferred_signals
from gainstage._base.warn import warn
from gainstage._scaling.step_telemetry import StepInfo
from gainstage._variables.variable import Variable
from gainstage.rules.loss_scale import Rule, as_rule
from gainstage.runs.header import header
from gainstage.runs.telemetry import Report
from gainstage.training.audit import AuditResult

Record = dict[str, Any]  # the step, and its numbers by name
KEPT = 10_000  # records that are stored while they cannot be written
START = '{"step": '  # of each line
RESERVED = {"run": "description of the run", "tensors": "reports"}  # what a file has by name
_BEGAN_AGAIN = (
    "The step of {writer}.write began again at {step}, but the counts of the telemetry go on. A "
    "step that goes back replaces all later records, as after a checkpoint. Count steps over all "
    "epochs: write(epoch * steps_per_epoch + n, ...)."
)
_UNREAD = (
    "Could not read {names}: {error}. All other numbers are written. If the array was donated to a "
    "later step, let the compiled step return it, or pass float({name}), for which Python waits."
)


class Writer(abc.ABC):
    """Writes the numbers of steps. Subclass it and implement `put`.

    To read a number of the latest step is to wait for that step. So a writer keeps the arrays, and
    reads those of many steps at once. With several processes, only the first writes.

    A failed write, for example on a full disk, does not stop the run. It warns once, and keeps up
    to 10,000 records for the next flush. Nor does a number that cannot be read, because its array
    was donated to a later step: a warning names it, once, and all others are written.

    Args:
        every: the number of steps between reads and writes, an integer >= 1.

    Raises:
        TypeError, ValueError: `every` is not such an integer.
    """

    def __init__(self, every: int = 50):
        self.every: int = checks.integer("every", every, low=1)
        self._waiting: list[Record] = []
        self._unwritten: list[Record] = []  # read, but not written yet
        self._failed = False  # whether the last write failed
        self._told = False  # whether it has warned of steps that begin again
        self._unread: set[str] = set()  # the numbers that it has warned of
        self._is_closed = False
        self._first: int | None = None  # the first step of all records
        self._taken = (-1, 0)  # the last step, and the steps that its telemetry counts
        atexit.register(self.close)  # for a program that ends without it

    @abc.abstractmethod
    def put(self, records: list[Record]) -> None:
        """Writes the records of several steps, as Python numbers, in the order of `write`. Of an
        audit there is `audit_tensor` too, the name of a tensor.

        After an `OSError` it is called again, with the same records and newer ones.
        """

    def write(
        self,
        step: int,
        info: StepInfo | None = None,
        *,
        audit: AuditResult | None = None,
        **numbers: Any,
    ) -> None:
        """Records the numbers of a step.

        Args:
            step: the index of the step, a Python integer >= 0. An earlier index means that the run
                has gone back to that step.
            info: the result of `gainstage.diagnostics.telemetry`, if any.
            audit: `step.audit` of a `train_step`, or the result of `gainstage.audit`, if any: its
                errors are recorded as `audit_loss_error`, `audit_gradient_error` and
                `audit_tensor_error`, with `audit_ok`.
            **numbers: more scalars by name, such as `loss=loss`; arrays need not be ready.

        Raises:
            TypeError: `step` is not an integer, `info` or `audit` is something else, or a number is
                not a scalar, or not a real number that float64 holds.
            ValueError: a number has the name `run` or `tensors`, is beyond the range of float64, or
                was donated; or the writer is closed.
        """
        self._check_open()
        if not isinstance(info, StepInfo | None):
            raise TypeError(
                f"Expected state.info, or what gainstage.diagnostics.telemetry returned, for info; "
                f"got {brief(repr(info))}. Write other numbers by name: write({step!r}, loss=loss)."
            )
        if not isinstance(audit, AuditResult | None):
            raise TypeError(
                f"Expected step.audit, or what gainstage.audit returned, for audit; got "
                f"{brief(repr(audit))}."
            )
        numbers = {**({} if info is None else info._asdict()), **numbers}
        for name in numbers.keys() & RESERVED.keys():
            raise ValueError(
                f"The name {name!r} is reserved for the {RESERVED[name]}; got {name}="
                f"{brief(numbers[name])}."
            )
        record = {"step": _checked_step(step)}
        record |= {name: _current_number(name, number) for name, number in numbers.items()}
        self._waiting.append(record | ({} if audit is None else {"audit": audit}))
        if len(self._waiting) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Writes all recorded numbers, but for those whose array was donated."""
        waiting = [] if jax.process_index() else self._waiting
        read, errors = _read(waiting)  # may be interrupted: `self._waiting` is still there
        pairs = zip(waiting, read, strict=True)
        records = [_plain_record({n: found[n] for n in old if n in found}) for old, found in pairs]
        again = [record["step"] for record in records if self._begins_again(record)]
        with deferred_signals():
            self._waiting = []
            self._put_away(records)
        if again and not self._told:
            self._told = True
            warn(_BEGAN_AGAIN.format(writer=type(self).__name__, step=again[0]))
        new = {name: error for name, error in errors.items() if name not in self._unread}
        self._unread |= new.keys()
        if new:
            name = next(iter(new))
            warn(_UNREAD.format(names=", ".join(new), name=name, error=str(new[name]).rstrip(".")))

    def _check_open(self) -> None:
        check_not_importing()
        if self._is_closed:
            raise ValueError(
                f"{type(self).__name__} is closed. Create a new one, or close it later."
            )

    def _begins_again(self, record: Record) -> bool:
        """Whether a record has the first step again, although the run goes on."""
        if "applied_steps" not in record or "skipped_steps" not in record:
            return False
        step, taken = record["step"], record["applied_steps"] + record["skipped_steps"]
        self._first = step if self._first is None else self._first
        (last, before), self._taken = self._taken, (step, taken)
        return step <= self._first and step < last and before < taken

    def _put_away(self, records: list[Record]) -> None:
        """Writes the records, after those of failed writes; keeps all of them if it fails again."""
        records, self._unwritten = self._unwritten + records, []
        failed, self._failed = self._failed, False
        if not records:
            return
        try:
            self.put([dict(record) for record in records])
        except OSError as error:
            self._unwritten, self._failed = records[-KEPT:], True
            if not failed:
                warnings.warn(
                    f"{type(self).__name__} could not write ({error}); it tries again at each "
                    f"flush, and keeps the last {KEPT} records until then.",
                    stacklevel=4,
                )

    def close(self) -> None:
        """Writes all recorded numbers and ends; warns if some could not be written.

        Python calls it when it exits, if nobody has.
        """
        self.flush()
        atexit.unregister(self.close)
        self._is_closed = True
        lost, self._unwritten = len(self._unwritten), []
        if lost:
            records = f"{lost} record{'s' * (lost > 1)}"
            warnings.warn(
                f"{type(self).__name__} is closed; {records} could not be written.", stacklevel=2
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class JsonLines(Writer):
    """Appends one JSON object per step to a file, for `gainstage report` or any other reader.

    JSON has no infinity and no NaN: they are written as the strings "inf", "-inf" and "nan". The
    first record, also after each restart, has `run`, which describes the run: its `rule`, the
    `dtypes` of its parameters, and the `versions` of Gainstage and JAX, with the `device`. The
    first step, and the last of each write, have `written_at`: seconds since 1970.

    A file only grows: all lines of a flush are appended by one write, so two processes with one
    file on a local disk keep all of their lines, except on Windows. What a killed process left of
    a line stays there as a line of its own, which `read_run` skips.

    Args:
        path: the file; created if missing, else appended to.
        every: as for every `Writer`.
        rule: the rule of the run, for `gainstage report`: `opt.rule`, or the rule of
            `with_loss_scale`.
        params: a pytree of the parameters, for their dtypes.

    Raises:
        OSError: the file cannot be created.
        TypeError: `rule` is not a rule.
        ValueError: the file has other contents.

    Examples:
        >>> import tempfile, pathlib
        >>> from gainstage.diagnostics import JsonLines, read_run
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> import gainstage as gs
        >>> with JsonLines(path, rule=gs.DynamicLossScale(2.0**10)) as run:
        ...     run.write(0, loss=0.5)
        ...     run.write(1, loss=float("nan"))
        >>> back = read_run(path)
        >>> print(back.get("loss"), back.made["rule"])
        [0.5 nan] DynamicLossScale(2.0**10)
    """

    def __init__(
        self,
        path: str | Path,
        every: int = 50,
        *,
        rule: Rule | None = None,
        params: Any = None,
    ):
        super().__init__(every)
        self._path = Path(path)
        self._header: Any = header(None if rule is None else as_rule("rule", rule), params)
        self._started = time.time()
        if not jax.process_index():
            _check_is_recording(self._path)

    def write_report(self, step: int, report: Report) -> None:
        """Appends the numbers of each tensor, after all earlier records.

        `gainstage report` shows the last such line of a file.

        Args:
            step: the last step that the report covers, as for `write`.
            report: the result of `gainstage.diagnostics.report`.
        """
        self._check_open()
        step = _checked_step(step)
        self.flush()
        if jax.process_index():
            return
        tensors = {
            name: {key: _in_json(_python_number(value)) for key, value in known.items()}
            for name, known in report.tensors().items()
        }
        self._put_away([{"step": step, "tensors": tensors}])

    def put(self, records: list[Record]) -> None:
        steps = [record for record in records if "tensors" not in record]
        if steps and self._header is not None:
            steps[0].setdefault("written_at", round(self._started, 3))
        if steps:
            steps[-1].setdefault("written_at", round(time.time(), 3))
        if self._header is not None:
            records[0] = {"step": records[0]["step"], "run": self._header, **records[0]}
        lines = [json.dumps({k: _in_json(v) for k, v in r.items()}) for r in records]
        _append("".join(f"{line}\n" for line in lines).encode(), self._path)
        self._header = None


def _read(waiting: list[Record]) -> tuple[list[Record], dict[str, RuntimeError]]:
    """The records from the device without the numbers that cannot be read, and why, by name."""
    try:
        return jax.device_get(waiting), {}
    except RuntimeError:  # an array was donated, or the computation of one failed
        read, errors = list[Record](), dict[str, RuntimeError]()
    for record in waiting:
        read.append({})
        for name, number in record.items():
            try:
                read[-1][name] = jax.device_get(number)
            except RuntimeError as error:
                errors.setdefault(name, error)
    return read, errors


def _plain_record(record: Record) -> Record:
    """A record as Python numbers; an audit is several."""
    audit = record.pop("audit", None)
    numbers = {name: _python_number(number) for name, number in record.items()}
    return numbers | ({} if audit is None else audit.record())


def _checked_step(step: Any) -> int:
    return checks.integer("step", _current_number("step", step), low=0, high=2**53)


def _current_number(name: str, number: Any) -> Any:
    """A number at its current value, which may not be ready yet, if a file can hold it."""
    number = number.value() if isinstance(number, Variable) else number
    if isinstance(number, Tracer):
        raise TypeError(f"{name} has no value while it is traced. Return it, and write the result.")
    if isinstance(number, jax.Array) and number.is_deleted():
        raise ValueError(
            f"{name} was donated to a step. Write it before, or let the step return it."
        )
    if shape := getattr(number, "shape", ()):
        raise TypeError(f"Expected a scalar for {name}; got shape {shape}.")
    kind = number.dtype if isinstance(number, ARRAYS) else type(number).__name__
    is_real = isinstance(kind, np.dtype) and np.can_cast(kind, np.float64)
    if not is_real and not isinstance(number, (bool, int, float)):
        raise TypeError(f"Expected a number for {name}; got {brief(number)}, a {kind}.")
    if isinstance(number, int) and abs(number) > sys.float_info.max:
        raise ValueError(
            f"Expected a number for {name} that float64 holds; got one of {number.bit_length()} "
            f"bits."
        )
    return number.item() if isinstance(number, (np.generic, np.ndarray)) else number


def _check_is_recording(path: Path) -> None:
    """Creates a file. Of one that is there, the last line must be a record or a part of one."""
    path.open("ab").close()
    end = path.read_bytes().rsplit(b"\n", 2)[-2:] if path.is_file() else [b""]
    lines = [line.decode(errors="replace") for line in end]
    for line in lines if lines[-1] else lines[:-1]:
        if not _is_record_or_part(line):
            raise ValueError(f"Expected a file of JSON objects at {path}; got {line[:60]!r}.")


def _is_record_or_part(line: str) -> bool:
    try:
        return "step" in dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return line.startswith("{") and (START.startswith(line) or START in line)


def _append(lines: bytes, path: Path) -> None:
    """Appends lines by one write, which no other process splits, and before it ends a torn line.
    Without a lock, that of another process may look torn, and then an empty line is written."""
    with path.open("ab+", buffering=0) as file:
        with contextlib.suppress(ImportError, OSError):  # on Windows, and where locks do not work
            from fcntl import LOCK_EX, flock

            flock(file, LOCK_EX)  # until the file is closed
        if file.seekable() and file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        if (written := file.write(lines)) != len(lines):  # the disk is full
            raise OSError(f"wrote {written} of {len(lines)} bytes")


def _python_number(number: Any) -> Any:
    return number.item() if hasattr(number, "item") else number


def _in_json(number: Any) -> Any:
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number

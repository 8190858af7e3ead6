"""TensorBoard: a writer of event files, without TensorFlow."""

import contextlib
import math
import os
import socket
import time
from pathlib import Path

import jax

from gainstage._base.extras import missing_package
from gainstage.runs.writers import Record, Writer

try:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboardX.record_writer import RecordWriter, directory_check
    from tensorboardX.summary import scalar
except ModuleNotFoundError as _error:
    raise missing_package("tensorboardX", "tensorboard") from _error

__all__ = ["TensorBoard"]


def __dir__() -> list[str]:
    return __all__


class TensorBoard(Writer):
    """Writes every number of a step as a scalar, such as `train/loss_scale`. TensorBoard draws no
    non-finite numbers; they are left out.

    Args:
        logdir: the folder of the event file, created if missing. TensorBoard shows each folder as
            a run of its own.
        every: the number of steps between reads and writes, an integer >= 1.

    Examples:
        >>> import tempfile
        >>> from gainstage.interop.tensorboard import TensorBoard
        >>> with TensorBoard(tempfile.mkdtemp()) as board:
        ...     board.write(0, loss=0.5)
    """

    def __init__(self, logdir: str | Path, every: int = 50):
        super().__init__(every)
        self._logdir = str(logdir)
        self._files = 0
        self._file = None if jax.process_index() else self._new_file()

    def put(self, records: list[Record]) -> None:
        old = self._file
        try:
            self._file = file = old or self._new_file()
            for record in records:
                for name, number in record.items():
                    if name != "step" and not isinstance(number, str) and math.isfinite(number):
                        summary = scalar(f"train/{name}", float(number))
                        event = Event(wall_time=time.time(), step=record["step"], summary=summary)
                        file.write(event.SerializeToString())
            file.flush()
        except OSError:  # TensorBoard stops reading a file at a torn event
            failed = self._file
            self._close_file()
            if failed is not None and old is None:
                Path(failed.path).unlink(missing_ok=True)
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._close_file()

    def _new_file(self) -> RecordWriter:
        """Opens an event file here: an error in tensorboardX's own thread would be lost."""
        directory_check(self._logdir)
        place = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{self._files}"
        self._files += 1
        file = RecordWriter(f"{self._logdir}/events.out.tfevents.{place}")
        first = Event(wall_time=time.time(), file_version="brain.Event:2")
        file.write(first.SerializeToString())
        return file

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

"""TensorBoard: a writer of event files, without TensorFlow."""

import math
from pathlib import Path

import jax

from gainstage.diagnostics.writers import Record, Writer

try:
    from tensorboardX import SummaryWriter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'Expected tensorboardX to be installed; run: pip install "gainstage[tensorboard]"',
        name="tensorboardX",
    ) from error


class TensorBoard(Writer):
    """Writes every number of a step as a scalar, `train/loss_scale` and so on; TensorBoard draws
    no numbers that are not finite, and they are left out.

    Args:
        logdir: the folder of the event file, made if missing.
        every: after so many steps the numbers are read and written, an integer >= 1.
        prefix: what stands before the names.

    Examples:
        >>> import tempfile
        >>> from gainstage.interop.tensorboard import TensorBoard
        >>> with TensorBoard(tempfile.mkdtemp()) as board:
        ...     board.write(0, loss=0.5)
    """

    def __init__(self, logdir: str | Path, every: int = 50, prefix: str = "train/"):
        super().__init__(every)
        self._prefix = prefix
        self._events = None if jax.process_index() else SummaryWriter(str(logdir))

    def put(self, records: list[Record]) -> None:
        assert self._events is not None
        for record in records:
            step = record.pop("step")
            for name, number in record.items():
                if math.isfinite(number):
                    self._events.add_scalar(f"{self._prefix}{name}", float(number), step)
        self._events.flush()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._events is not None:
                self._events.close()

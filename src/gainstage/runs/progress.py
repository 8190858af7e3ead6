"""A progress bar that shows the loss, the scale and the skipped steps."""

from typing import Any

import jax

from gainstage._base.extras import missing
from gainstage._scaling.step_telemetry import StepInfo
from gainstage.runs.writers import Record, Writer, described

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
except ModuleNotFoundError as _error:
    raise missing("rich", "report") from _error

__all__ = ["ProgressBar"]


class ProgressBar(Writer):
    """A progress bar on standard error; it writes nothing to standard output.

    Args:
        total: the number of steps.
        description: the text before the bar.
        every: the number of steps between updates of the numbers behind the bar, >= 1.

    Examples:
        >>> from gainstage.diagnostics import ProgressBar
        >>> with ProgressBar(total=3) as bar:
        ...     for step in range(3):
        ...         bar.write(step, loss=1.0 / (step + 1))
    """

    def __init__(self, total: int, description: str = "training", every: int = 10):
        super().__init__(every)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=Console(stderr=True),
            disable=jax.process_index() > 0,
            redirect_stdout=False,  # leave the user's prints unchanged
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(description, total=total, numbers="")
        self._bar.start()

    def write(self, step: int, info: StepInfo | None = None, **numbers: Any) -> None:
        super().write(step, info, **numbers)
        self._bar.advance(self._task)

    def put(self, records: list[Record]) -> None:
        self._bar.update(self._task, numbers=described(records[-1]))

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._bar.stop()

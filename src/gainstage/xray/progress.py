"""A progress bar for the X-ray, in a terminal with rich installed."""

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gainstage._core import jaxprs
from gainstage.xray.program import Program


@contextlib.contextmanager
def counted(program: Program, progress: bool) -> Iterator[Callable[[], Any]]:
    """Yields a function to call after each operation; it updates the bar, if there is one."""
    if not progress or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    total = max(jaxprs.count(program.jaxpr), 1)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task, done = bar.add_task("X-ray", total=total), itertools.count(1)

        def tick() -> None:
            number = next(done)
            if number % 16 == 0:
                again, into = divmod(number, total)
                words = f"trying change {again}" if again else "X-ray"
                bar.update(task, completed=into, description=words)

        yield tick

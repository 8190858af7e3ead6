"""A progress bar for long work, in a terminal with rich installed."""

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def counted(
    total: int, words: str, again: str = "", every: int = 1, shows: bool = True
) -> Iterator[Callable[[], Any]]:
    """Yields a function to call after each piece of work; it updates the bar, if there is one.

    Args:
        total: the number of pieces.
        words: what is done.
        again: what is done after these pieces, with the same number of them each time.
        every: the number of pieces between updates.
        shows: whether to show a bar.
    """
    if not shows or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    total = max(total, 1)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task, done = bar.add_task(words, total=total), itertools.count(1)

        def tick() -> None:
            number = next(done)
            if number % every == 0:
                turn, into = divmod(number, total)
                now = f"{again} {turn}" if again and turn else words
                bar.update(task, completed=into if again else number, description=now)

        yield tick

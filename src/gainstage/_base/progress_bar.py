"""A progress bar for long work in a terminal with rich installed, and lines elsewhere."""

import contextlib
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

QUIET = 10.0  # seconds between lines, and those of work that needs none


@contextlib.contextmanager
def counted(
    total: int,
    words: str,
    again: str = "",
    every: int = 1,
    shows: bool = True,
    seconds: float | None = None,
) -> Iterator[Callable[[], Any]]:
    """Yields a function to call after each piece of work, which shows how much is done.

    Args:
        total: the number of pieces.
        words: what is done.
        again: what is done after these pieces, with the same number of them each time.
        every: the number of pieces between updates of a bar.
        shows: whether to show anything.
        seconds: an estimate of the time of all pieces; None without one.
    """
    total = max(total, 1)
    if not shows:
        yield lambda: None
        return
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _lines(total, words, again, seconds)
        return
    from rich.console import Console
    from rich.progress import Progress

    if seconds is not None:
        words = f"{words}, about {seconds:.0f} s"
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task, done = bar.add_task(words, total=total), itertools.count(1)

        def tick() -> None:
            number = next(done)
            if number % every == 0:
                turn, into = divmod(number, total)
                now = f"{again} {turn}" if again and turn else words
                bar.update(task, completed=into if again else number, description=now)

        yield tick


def _lines(total: int, words: str, again: str, seconds: float | None) -> Callable[[], None]:
    """A function that writes a line now and then, as in CI, in a notebook or under `nohup`."""
    start, done = time.monotonic(), itertools.count(1)
    last = start
    if seconds is not None and seconds > QUIET:
        print(f"{words}: about {seconds:.0f} s", file=sys.stderr, flush=True)

    def tick() -> None:
        nonlocal last
        number, now = next(done), time.monotonic()
        if now - last < QUIET:
            return
        last = now
        turn, into = divmod(number, total)
        what = f"{again} {turn}: {into}" if again and turn else f"{words}: {number}"
        print(f"{what} of {total}, after {now - start:.0f} s", file=sys.stderr, flush=True)

    return tick

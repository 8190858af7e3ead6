"""Signals wait while arrays change hands.

Python runs the handler of a signal between two instructions of the main thread, and the handler may
raise, as that of Ctrl-C does. A step that reuses the memory of its arguments must not end there:
between the call and the storing of its results nobody has a value.
"""

# The functions of `signal`, whose wrappers take 20 us of a step to look handlers up in an enum.
import _signal  # pyright: ignore[reportMissingImports]
import signal
import threading
from collections.abc import Callable
from typing import Any, Self

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class deferred_signals:  # noqa: N801 - is called like a function, `with deferred_signals():`
    """Handlers of signals that arrive inside of the `with` run at its end.

    In other threads it does nothing: Python runs handlers in the main thread alone.
    """

    def __enter__(self) -> Self:
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._waiting: list[int] = []
        self._over = False
        if threading.get_ident() == threading.main_thread().ident:
            try:
                for number in _NUMBERS:
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _signal.signal(number, self._wait)
            except BaseException:  # of a handler that has not been replaced yet
                self.__exit__()
                raise
        return self

    def _wait(self, number: int, frame: Any) -> None:
        if self._over:  # but not put back yet
            self._handlers[number](number, frame)
        else:
            self._waiting.append(number)

    def __exit__(self, *error: object) -> None:
        self._over = True
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        finally:
            _deliver(self._waiting)


def _deliver(numbers: list[int]) -> None:
    """Raises signals again, the others too if a handler ends with an exception."""
    if numbers:
        try:
            _signal.raise_signal(numbers[0])
        finally:
            _deliver(numbers[1:])

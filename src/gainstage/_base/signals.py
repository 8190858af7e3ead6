"""Defers signals while arrays are donated."""

# Python runs a signal handler between two instructions of the main thread. The handler may raise,
# as the one of Ctrl-C does. A step that donates its arguments must not end between the call and the
# storing of its results, because then the values are lost.

# The functions of `signal`; its wrappers take 20 us of a step for an enum lookup.
import _signal  # pyright: ignore[reportMissingImports]
import signal
import threading
from collections.abc import Callable
from typing import Any, Self

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class deferred_signals:  # noqa: N801 - is called like a function, `with deferred_signals():`
    """Defers signal handlers that are due inside the `with` until its end.

    In other threads it does nothing: Python runs handlers only in the main thread.
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
            except BaseException:  # from a handler that is not replaced yet
                self.__exit__()
                raise
        return self

    def _wait(self, number: int, frame: Any) -> None:
        if self._over:  # the handlers are not all restored yet
            self._handlers[number](number, frame)
        else:
            self._waiting.append(number)

    def __exit__(self, *error: object) -> None:
        self._over = True
        try:
            _restore(list(self._handlers.items()))
        finally:
            _deliver(self._waiting)


def _restore(handlers: list[tuple[int, Any]]) -> None:
    """Restores handlers, all of them even if one that is restored already raises in between."""
    raised: BaseException | None = None
    while handlers:
        try:
            while handlers:
                _signal.signal(*handlers[-1])
                handlers.pop()
        except BaseException as error:  # of a handler, which may be any
            raised = error
    if raised is not None:
        raise raised


def _deliver(numbers: list[int]) -> None:
    """Raises signals again, and the remaining ones even if a handler raises."""
    if numbers:
        try:
            _signal.raise_signal(numbers[0])
        finally:
            _deliver(numbers[1:])

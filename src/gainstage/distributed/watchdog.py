"""How processes end together: one that dies, fails or stands still takes the others along.

A collective whose partner is gone may fail at once, or wait for ever. So every process keeps a
connection to process 0, which the operating system closes when either end dies, and a thread that
watches it; the thread can end the process even while a collective hangs.

The heartbeat of `jax.distributed` does not replace it. With jax 0.10.2, two processes and a
heartbeat of 10 s, after a `kill -9` the other process is aborted only when the heartbeat is over,
with a C++ stack. After an uncaught exception, or where a process sleeps in Python, the heartbeat
goes on, and the other process waits for more than a minute.
"""

import atexit
import contextlib
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

TEMPORARY = 75  # EX_TEMPFAIL: what failed may succeed when it is tried again
BYE = 0xFFFFFFFF  # sent before a process ends as it should; else the number of one that is lost
WORD = 4  # bytes
ADVICE = (
    "The state of this run is lost with it: start all processes again, and restore the last "
    "checkpoint."
)


class Watchdog:
    """Ends this process, with a message, if another is gone or no step is taken any more.

    `gainstage.distributed.initialize` makes one. Used alone it minds the `patience` only.

    Args:
        patience: the seconds that may pass between two calls of `feed`; None for ever.

    Examples:
        >>> from gainstage import distributed
        >>> watchdog = distributed.Watchdog(patience=600)
        >>> for _ in range(3):
        ...     watchdog.feed()  # and take a step
        >>> watchdog.close()
    """

    def __init__(self, patience: float | None = None):
        if patience is not None and not patience > 0:
            raise ValueError(f"Expected a number of seconds > 0 for patience; got {patience!r}.")
        self.patience = patience
        self._fed: float | None = None
        self._peers: dict[socket.socket, int] = {}  # those that are minded
        self._left: list[socket.socket] = []  # those that said goodbye, and may be told it
        self._told = threading.Event()
        self._thread: threading.Thread | None = None
        self._old_hook = sys.excepthook

    def feed(self) -> None:
        """Says that a step has been started, or that something else goes on that takes its time."""
        self._fed = time.monotonic()
        self._start()

    def close(self) -> None:
        """Says goodbye to the other processes: from now on this one may end, and takes its time.

        It is called at the end of a process that ends by itself, `sys.exit` included: where that
        means a failure, raise an exception instead."""
        self._fed = self.patience = None
        sys.excepthook = self._old_hook
        for peer in [*self._peers, *self._left]:
            with contextlib.suppress(OSError):
                peer.sendall(BYE.to_bytes(WORD))

    # ── the connections: a star around process 0 ─────────────────────────────────────────────

    def host(self, listener: socket.socket, token: bytes, count: int) -> None:
        """Waits for `count - 1` other processes that know the token, and watches them."""
        with listener:
            while len(self._peers) < count - 1:
                peer, _ = listener.accept()
                peer.settimeout(5)  # a stranger may say nothing
                hello = _receive(peer, len(token) + WORD)
                peer.settimeout(None)
                if hello[:-WORD] == token:
                    self._peers[peer] = int.from_bytes(hello[-WORD:])
                else:
                    peer.close()
        self._watch()

    def join(self, address: tuple[str, int], token: bytes, number: int) -> None:
        """Connects to process 0, and watches it."""
        peer = socket.create_connection(address)
        peer.sendall(token + number.to_bytes(WORD))
        self._peers[peer] = 0
        self._watch()

    def _watch(self) -> None:
        atexit.register(self.close)
        sys.excepthook = self._end_with
        os.register_at_fork(after_in_child=self._forget)
        self._start()

    def _forget(self) -> None:
        """In a forked child: it is not part of the run, and must not speak for its parent."""
        for peer in [*self._peers, *self._left]:
            peer.close()
        self._peers, self._left, self.patience = {}, [], None
        sys.excepthook = self._old_hook

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        if self._thread is None and (self._peers or self.patience):
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            while self._peers or self.patience:
                # Without sockets a selector would not wait.
                events = selector.select(0.2) if self._peers else time.sleep(0.2)
                for key, _ in events or ():
                    self._hear(selector, key.fileobj)
                fed, patience = self._fed, self.patience
                if fed and patience and time.monotonic() - fed > patience:
                    self._end(
                        f"Expected a step within {patience:g} s; none was taken. A process may "
                        f"hang, or have taken another path than the others."
                    )

    def _hear(self, selector: selectors.BaseSelector, peer: Any) -> None:
        word = _receive(peer, WORD)
        if not word:
            self._lose(self._peers[peer])
        elif int.from_bytes(word) == BYE:
            selector.unregister(peer)
            self._left.append(peer)  # first, so that it is never in neither
            del self._peers[peer]
        else:
            self._lose(int.from_bytes(word))

    def _lose(self, number: int) -> None:
        for peer in self._peers:  # process 0 tells the others, who would only miss it
            with contextlib.suppress(OSError):
                peer.sendall(number.to_bytes(WORD))
        time.sleep(1)  # for an error of this process's own, which may be the same, to be printed
        self._end(f"Expected all processes to stay; process {number} is gone.")

    def _end(self, message: str) -> None:
        self._told.set()
        print(f"\n{message} {ADVICE}", file=sys.stderr, flush=True)
        _exit(TEMPORARY)

    def _end_with(
        self, cls: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """What happens to an uncaught exception: leaving would wait for the others first."""
        traceback.print_exception(cls, error, trace)
        # A collective fails where another process has died: the thread knows which.
        if isinstance(error, RuntimeError) and self._peers:
            self._told.wait(2)
        if self._told.is_set():
            time.sleep(1)  # the thread ends the process
        print(f"\nThis process fails, and all others with it. {ADVICE}", file=sys.stderr)
        _exit(1)


def _receive(peer: socket.socket, count: int) -> bytes:
    """So many bytes, or none if the other end is gone."""
    received = b""
    while len(received) < count:
        try:
            more = peer.recv(count - len(received))
        except OSError:
            more = b""
        if not more:
            return b""
        received += more
    return received


def _exit(status: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)

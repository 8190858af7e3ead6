"""Ends all processes together: if one dies, fails or hangs, the others end too."""

# If a process is gone, a collective of the others may fail at once or wait for ever. So each
# process keeps a connection to process 0. The operating system closes it when either end dies. A
# thread watches the connection, and can end the process even while a collective hangs.
#
# The heartbeat of `jax.distributed` is not enough. Measured without the watchdog, two processes and
# the defaults of jax 0.10.2 and 0.12.0, the same in both: after a `kill -9` of process 0 the other
# aborts at once, of process 1 after 100 s. After an uncaught exception both abort after 300 s, with
# a C++ stack. While one sleeps in Python both are still there after 420 s, as the heartbeat goes
# on. A launcher that ends all when one exits mends the killed process, but neither of the others.

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

TEMPORARY = 75  # EX_TEMPFAIL: a retry may succeed
BYE = 0xFFFFFFFF  # the message before a normal exit; any other is the number of a lost process
WORD = 4  # bytes
ADVICE = (
    "The state of this run is lost with it: start all processes again, and restore the last "
    "checkpoint."
)


class Watchdog:
    """Ends this process, with a message, if another is gone or no step is taken for too long.

    `gainstage.distributed.initialize` creates one. Used alone, it checks `patience` only.

    Args:
        patience: the largest number of seconds between two calls of `feed`; None for no limit.

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
        self._peers: dict[socket.socket, int] = {}  # connections that are watched
        self._left: list[socket.socket] = []  # connections whose process exits normally
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._old_hook = sys.excepthook

    def feed(self) -> None:
        """Reports progress: a step, or other work that takes time."""
        self._fed = time.monotonic()
        self._start()

    def close(self) -> None:
        """Tells the other processes that this one exits normally, which may take a while.

        A process that ends by itself calls this at exit, also after `sys.exit`. To report a
        failure, raise an exception instead."""
        self._fed = self.patience = None
        sys.excepthook = self._old_hook
        for peer in [*self._peers, *self._left]:
            with contextlib.suppress(OSError):
                peer.sendall(BYE.to_bytes(WORD))

    # ── the connections: a star around process 0 ─────────────────────────────────────────────

    def host(self, listener: socket.socket, token: bytes, count: int) -> None:
        """Waits for `count - 1` other processes that send the token, and watches them."""
        with listener:
            while len(self._peers) < count - 1:
                peer, _ = listener.accept()
                peer.settimeout(5)  # a foreign program may send nothing
                hello = _receive(peer, len(token) + WORD)
                peer.settimeout(None)
                if hello[:-WORD] == token:
                    self._peers[peer] = int.from_bytes(hello[-WORD:])
                else:
                    peer.close()
        self._watch()

    def join(self, address: tuple[str, int], token: bytes, number: int) -> None:
        """Connects to process 0, and watches the connection."""
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
        """Closes the connections in a forked child, which is not part of the run."""
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
                if not self._peers:  # without sockets `select` would not wait
                    time.sleep(0.2)
                for key, _ in selector.select(0.2) if self._peers else ():
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
            self._left.append(peer)  # before the removal, so that one list always has it
            del self._peers[peer]
        else:
            self._lose(int.from_bytes(word))

    def _lose(self, number: int) -> None:
        for peer in self._peers:  # process 0 informs the others, which cannot see the loss
            with contextlib.suppress(OSError):
                peer.sendall(number.to_bytes(WORD))
        time.sleep(1)  # let this process print its own error first, which may be the same
        self._end(f"Expected all processes to stay; process {number} is gone.")

    def _end(self, message: str) -> None:
        self._ended.set()
        print(f"\n{message} {ADVICE}", file=sys.stderr, flush=True)
        _exit(TEMPORARY)

    def _end_with(
        self, cls: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The hook for uncaught exceptions: a normal exit would wait for the other processes."""
        traceback.print_exception(cls, error, trace)
        # A collective also fails if another process died; then the thread names that process.
        if isinstance(error, RuntimeError) and self._peers:
            self._ended.wait(2)
        if self._ended.is_set():
            time.sleep(1)  # the thread ends the process
        print(f"\nThis process fails, and all others with it. {ADVICE}", file=sys.stderr)
        _exit(1)


def _receive(peer: socket.socket, count: int) -> bytes:
    """Receives this number of bytes; none if the other end is gone."""
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

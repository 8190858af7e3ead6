"""Connects the processes of a run: `jax.distributed.initialize` with clear errors and timeouts."""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import sys
import threading
from typing import Any

import jax
import numpy as np

from gainstage._base._jax import multihost_utils
from gainstage.distributed.watchdog import TEMPORARY, Watchdog

TOKEN = 16  # bytes that identify a process of this run


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 60,
    heartbeat: float = 10,
    patience: float | None = None,
    **options: Any,
) -> Watchdog:
    """Connects the processes of a run, and ends this one if another is gone.

    Call it in every process, after `jax.config` and before any computation. From then on an
    uncaught exception ends all processes at once, each with a message; JAX itself would wait for
    minutes. After a failed step the donated state is gone: restart all processes from the last
    checkpoint.

    SIGTERM also ends all processes. JAX itself would take it for a preemption notice, and run on
    until `multihost_utils.reached_preemption_sync_point`. If you call that in each step, set the
    environment variable `JAX_ENABLE_PREEMPTION_SERVICE=1`.

    Args:
        coordinator_address: "host:port" of process 0, the same for all. A loopback address is
            bound as such, not on all interfaces. None if JAX detects the cluster (Slurm, MPI).
        num_processes: the number of processes; None as above.
        process_id: the index of this process, from 0; None as above.
        timeout: the seconds to wait for the other processes to connect.
        heartbeat: the seconds of silence after which JAX considers a machine lost.
        patience: the largest number of seconds between two calls of `Watchdog.feed`, after the
            first call; None for no limit.
        **options: further options of `jax.distributed.initialize`.

    Returns:
        The watchdog. With a `patience`, call its `feed` once per step.

    Raises:
        OSError: another program on this machine listens on the port of process 0.
        ValueError: the address has no port, or `patience` is not a number > 0.

    A second connection goes to a port of process 0 that the system chooses. A firewall between
    machines has to allow it.

    A process that waits in vain, or loses another, exits with status 75, which by convention means
    that a retry may succeed.

    Source: `jax.distributed.initialize`.
    """
    if coordinator_address is not None:
        host, colon, port = coordinator_address.rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError(
                f'Expected "host:port" for coordinator_address; got {coordinator_address!r}.'
            )
        if _is_loopback(host):
            options.setdefault("coordinator_bind_address", coordinator_address)
        if process_id == 0:
            _check_free(options.get("coordinator_bind_address", f":{port}"))
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)
    watchdog = Watchdog(patience)
    late = threading.Timer(timeout, _give_up, (coordinator_address, num_processes, timeout))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            # Longer than `late`: JAX would abort with a C++ stack.
            initialization_timeout=int(2 * timeout) + 30,
            heartbeat_timeout_seconds=int(heartbeat),
            **options,
        )
        if jax.process_count() > 1:
            _introduce(watchdog, coordinator_address)
    finally:
        late.cancel()
    return watchdog


def _introduce(watchdog: Watchdog, coordinator_address: str | None) -> None:
    """Connects all processes to process 0; JAX broadcasts its address and a token."""
    if jax.process_index() == 0:
        host = coordinator_address.rpartition(":")[0] if coordinator_address else None
        listener = socket.create_server((reachable(host or socket.gethostname()), 0))
        ip, port = listener.getsockname()
        token = secrets.token_bytes(TOKEN)
        letter = [*ipaddress.IPv4Address(ip).packed, *port.to_bytes(2), *token]
    else:
        listener, letter = None, [0] * (6 + TOKEN)
    sent = multihost_utils.broadcast_one_to_all(np.array(letter, np.uint8))
    received = np.asarray(sent, np.uint8).tobytes()
    address = (str(ipaddress.IPv4Address(received[:4])), int.from_bytes(received[4:6]))
    token = received[6:]
    if listener is not None:
        watchdog.host(listener, token, jax.process_count())
    else:
        watchdog.join(address, token, jax.process_index())


def _give_up(address: str | None, count: int | None, timeout: float) -> None:
    there = f" at {address}" if address else ""
    print(
        f"Expected {count or 'all'} processes to meet{there} within {timeout:g} s; they did not. "
        f"Start all of them with the same coordinator_address and num_processes, each with a "
        f"process_id of its own, and check that the address can be reached.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(TEMPORARY)


def _check_free(address: str) -> None:
    """Raises if the port is in use: JAX would abort in C++, or share it with another run."""
    host, _, port = address.rpartition(":")
    host = "" if host == "[::]" else host
    try:
        with contextlib.suppress(socket.gaierror):
            socket.create_server((host, int(port))).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(
                errno.EADDRINUSE,
                f"Expected a free port for process 0; got {port}, on which another program "
                f"listens. Choose another port in coordinator_address, in every process.",
            ) from error


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (host.startswith("127.") and host.count(".") == 3)


def reachable(host: str) -> str:
    """The address at which other machines reach this one, whose name is `host`."""
    address = _ipv4(host)
    if not address.startswith("127.") or _is_loopback(host):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # Debian calls itself 127.0.1.1
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it selects the outgoing interface
        except OSError:
            return address
        return probe.getsockname()[0]


def _ipv4(host: str) -> str:
    return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])

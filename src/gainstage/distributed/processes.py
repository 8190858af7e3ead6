"""How processes meet: `jax.distributed.initialize`, which neither hangs nor aborts unexplained."""

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

from gainstage._core._jax import multihost_utils
from gainstage.distributed.watchdog import TEMPORARY, Watchdog

TOKEN = 16  # bytes that tell a peer from a stranger


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
    """Joins the processes of a run, and ends this one if another is gone.

    Call it in every process, after `jax.config` and before any computation. From then on an
    uncaught exception ends the process at once, and so all others, with a message each; JAX by
    itself would wait for minutes. What a failed step leaves behind cannot be used: start all
    processes again, and restore the last checkpoint.

    SIGTERM ends the process, and so all others. JAX by itself would take it for a notice that
    `multihost_utils.reached_preemption_sync_point` reports, and run on; set the environment
    variable `JAX_ENABLE_PREEMPTION_SERVICE=1` if you ask for that in each step.

    Args:
        coordinator_address: "host:port" of process 0, the same for all. A loopback address is
            bound as such, not on all interfaces. None where JAX knows the cluster (Slurm, MPI).
        num_processes: how many there are; None as above.
        process_id: which one this is, from 0; None as above.
        timeout: the seconds to wait for the others to arrive.
        heartbeat: the seconds after which JAX gives up a machine that is silent.
        patience: the seconds that may pass between two calls of `Watchdog.feed`, after the first;
            None for ever.
        **options: others of `jax.distributed.initialize`.

    Returns:
        The watchdog, to be fed once a step if there is a `patience`.

    Raises:
        OSError: another program on this machine listens on the port of process 0.
        ValueError: an address without a port, or a patience that is no number > 0.

    A second connection goes to a port of process 0 that the system chooses: a firewall between
    machines has to let it pass.

    A process that waits in vain, or loses another, ends with status 75, which by convention asks
    for another try.

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
            # JAX would abort with a stack of C++; it is left to `late`.
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
    """Connects all processes to process 0, whose address and token go round by JAX."""
    if jax.process_index() == 0:
        host = coordinator_address.rpartition(":")[0] if coordinator_address else None
        listener = socket.create_server((_reachable(host or socket.gethostname()), 0))
        ip, port = listener.getsockname()
        token = secrets.token_bytes(TOKEN)
        letter = [*ipaddress.IPv4Address(ip).packed, *port.to_bytes(2), *token]
    else:
        listener, letter = None, [0] * (6 + TOKEN)
    sent = multihost_utils.broadcast_one_to_all(np.array(letter, np.uint8))
    letter = np.asarray(sent, np.uint8).tobytes()
    address = (str(ipaddress.IPv4Address(letter[:4])), int.from_bytes(letter[4:6]))
    token = letter[6:]
    if listener is not None:
        watchdog.host(listener, token, jax.process_count())
    else:
        watchdog.join(address, token, jax.process_index())


def _give_up(address: str | None, count: int | None, timeout: float) -> None:
    there = f" at {address}" if address else ""
    print(
        f"Expected {count or 'all'} processes to meet{there} within {timeout:g} s; they did not. "
        f"Start all of them with the same coordinator_address and num_processes, each with a "
        f"process_id of its own, and see that the address can be reached.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(TEMPORARY)


def _check_free(address: str) -> None:
    """JAX would end in C++, or share the port with another run."""
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


def _reachable(host: str) -> str:
    """The address at which other machines find this one, whose name this is."""
    address = _ipv4(host)
    if not address.startswith("127.") or _is_loopback(host):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # Debian calls itself 127.0.1.1
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks for the way out
        except OSError:
            return address
        return probe.getsockname()[0]


def _ipv4(host: str) -> str:
    return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])

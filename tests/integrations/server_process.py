"""A server in a process group of its own, of which nothing is left afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integrations.server_load import HOST


class ServerError(RuntimeError):
    """A server that has ended or does not answer in time; with the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def tail(log: Path, lines: int = 40) -> str:
    """The last lines of a log, the long ones cut."""
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(line[:300] for line in said[-lines:])


def healthy(port: int, path: str) -> bool:
    """Whether a GET is answered with 200 within five seconds."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextmanager
def serving(
    words: Sequence[str],
    ports: Sequence[int],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    health: str = "/health",
    timeout: float = 180,
) -> Iterator[float]:
    """A server while the block runs, from when all its ports are healthy. Then its process group is ended, by force if
    ten seconds do not do.

    Args:
        words: the command.
        log: file for what it prints.
        environment: more of it.
        timeout: seconds until it must be healthy.

    Yields:
        Seconds that it took to start.

    Raises:
        ServerError: it ended before, or was not healthy in time.
    """
    start = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
    try:
        waiting = list(ports)
        while waiting:
            if process.poll() is not None:
                raise ServerError(f"the server ended with {process.returncode}:\n{tail(log)}")
            if time.monotonic() - start > timeout:
                raise ServerError(f"the server was not healthy after {timeout:.0f} s:\n{tail(log)}")
            waiting = [port for port in waiting if not healthy(port, health)]
            time.sleep(0.2)
        yield time.monotonic() - start
    finally:
        end(process)


def end(process: subprocess.Popen, grace: float = 10) -> None:
    """End the group that a process leads: SIGTERM, and SIGKILL for what is left after `grace` seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

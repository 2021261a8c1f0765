"""A server in a process group of its own, of which nothing is left afterwards."""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integrations.server_load import HOST

FIRST_PORT, LAST_PORT, APART = 10_000, 32_000, 500
TROUBLE = re.compile(r"Traceback|^\w*Error: |\bERROR ")


class ServerError(RuntimeError):
    """A server has ended or does not answer in time; with the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, far from each other and below those that systems give out: servers take more for
    themselves, at random or counted from the one that they are given."""
    found: list[int] = []
    for port in range(FIRST_PORT + random.randrange(APART), LAST_PORT, APART):
        with socket.socket() as one, suppress(OSError):
            one.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise ServerError(f"free ports = {len(found)}: must be at least {count}")


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log, the long ones cut; before them as many from the first that names an error, if that is
    further up."""
    said = [line[:300] for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
    end = max(0, len(said) - lines)
    first = next((at for at, line in enumerate(said[:end]) if TROUBLE.search(line)), end)
    return "\n".join([*said[first : min(first + lines, end)], *said[end:]])


def healthy(port: int, path: str) -> bool:
    """Whether a GET is answered with 200 within five seconds; another one's port may answer with something else."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=5) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False


class Server:
    """A server's process, from when it is made until `end`."""

    def __init__(self, words: Sequence[str], port: int, log: Path, environment: Mapping[str, str], health: str) -> None:
        self.port, self._health, self._log = port, health, log
        self._start = time.monotonic()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )

    def check(self) -> None:
        """ServerError if it has ended."""
        if self._process.poll() is not None:
            raise ServerError(f"the server ended with {self._process.returncode}:\n{tail(self._log)}")

    def healthy_after(self) -> float | None:
        """Seconds since its start, if it is healthy. ServerError: it has ended."""
        self.check()
        return time.monotonic() - self._start if healthy(self.port, self._health) else None

    def late(self, timeout: float) -> ServerError:
        """What to raise where it is not healthy in time."""
        return ServerError(f"the server was not healthy after {timeout:.0f} s:\n{tail(self._log)}")

    def end(self, grace: float = 10) -> None:
        """End its process group: SIGTERM, and SIGKILL for what is left once its leader has ended, or after `grace`
        seconds."""
        for how, most in ((signal.SIGTERM, grace), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, how)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(most)


@contextmanager
def serving(
    words: Sequence[str],
    port: int,
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    health: str = "/health",
    timeout: float = 180,
) -> Iterator[float]:
    """A server while the block runs, from when it is healthy.

    Args:
        words: the command.
        log: file for what it prints.
        environment: more of it.
        health: path that a GET answers with 200 once the server is healthy.
        timeout: seconds until it must be healthy.

    Yields:
        Seconds that it took to start.

    Raises:
        ServerError: it ended before, or was not healthy in time.
    """
    server = Server(words, port, log, environment or {}, health)
    end = time.monotonic() + timeout
    try:
        while (seconds := server.healthy_after()) is None:
            if time.monotonic() > end:
                raise server.late(timeout)
            time.sleep(0.2)
        yield seconds
    finally:
        server.end()

"""Which machine this is, and whether another process on it still runs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple, Self

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
ZOMBIE, DEAD = "Z", "X"


def machine() -> str:
    """The identity of the running kernel, which containers on one machine share; its name where that is hidden."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


class Process(NamedTuple):
    """A process, so that others on its machine can tell whether it has ended.

    Attributes:
        machine: where it runs.
        namespace: of process ids there; empty where that is hidden.
        pid: its id.
        started: when, in clock ticks since the machine started; None where that is hidden.
    """

    machine: str
    namespace: str
    pid: int
    started: str | None

    @classmethod
    def own(cls) -> Self:
        """The one that calls."""
        try:
            namespace = os.readlink(PID_NAMESPACE)
        except OSError:
            namespace = ""
        state = _state_and_start(os.getpid())
        return cls(machine(), namespace, os.getpid(), state and state[1])

    def sees_end_of(self, other: Process) -> bool:
        """Whether another process is sure to have ended; False where it cannot be seen from this one."""
        if not self.namespace or (self.machine, self.namespace) != (other.machine, other.namespace):
            return False
        try:
            os.kill(other.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            return False
        found = _state_and_start(other.pid)
        if found is None or other.started is None:
            return False
        state, started = found
        return state in (ZOMBIE, DEAD) or started != other.started


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """(state, time of the start) of a process; None where that is hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]

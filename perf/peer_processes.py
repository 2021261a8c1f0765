"""Processes that `perf.peers` has started: what they do, and how they end."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)', re.MULTILINE)


@dataclass
class Worker:
    """The process of one rank."""

    process: subprocess.Popen
    log: Path
    place: Path

    def at(self) -> tuple[str | None, str]:
        """The peer that it measures (None: it starts) and what it is doing."""
        peer, _, what = self.place.read_text().partition(": ") if self.place.exists() else ("", "", "")
        return peer or None, what

    def messages(self) -> tuple[list[str], list[str]]:
        """Lines of its log that name an error, and all lines; without stacks."""
        text = re.split(r"^.*\(most recent call first\):$", self.log.read_text(errors="replace"), flags=re.M)[0]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return [line for line in lines if "Error" in line or " WARN " in line], lines

    def frames(self) -> list[str]:
        """Where the main thread of a process is that was told to write its stacks: the innermost frame and this
        project's two innermost."""
        stacks = self.log.read_text(errors="replace").split("(most recent call first):\n")[1:]
        found = FRAME.findall(stacks[-1]) if stacks else []
        ours = [frame for frame in found[1:] if Path(frame[0]).parent == Path(__file__).parent]
        return [f"{name} ({Path(file).name}:{line})" for file, line, name in found[:1] + ours[:2]]


def wait_for_all(workers: Sequence[Worker], budgets: Mapping[str, float], start_s: float) -> list[int | None]:
    """Exit codes once all have ended, one has failed, or a budget is spent, before the first peer `start_s`; None for
    those that still run."""
    peer, end = None, time.monotonic() + start_s
    while True:
        codes = [worker.process.poll() for worker in workers]
        now = workers[0].at()[0]
        if now is not None and now != peer:
            peer, end = now, time.monotonic() + budgets[now]
        if None not in codes or any(codes) or time.monotonic() >= end:
            return codes
        time.sleep(0.1)


def places(workers: Sequence[Worker]) -> str:
    """What ranks were doing, those that did the same together, and an error that one has named."""
    ranks: dict[str, list[str]] = {}
    for rank, worker in enumerate(workers):
        inside = " < ".join(worker.frames())
        text = f"{worker.at()[1] or 'starting'}{f', in {inside}' if inside else ''}"
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"rank {', '.join(same)}: {text}" for text, same in ranks.items()]
    errors = [error for worker in workers for error in worker.messages()[0]]
    return "; ".join(parts + [error[:200] for error in errors[-1:]])

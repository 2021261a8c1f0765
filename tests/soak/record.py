"""What a long run has found so far, in a JSON file from which a later call goes on; and its progress on a terminal."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cute_ep.errors import EPInputError
from cute_ep.library import source_hash
from cute_ep.machine import environment

from .rounds import Outcome

LINE_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""


class Record:
    """The state of one run of rounds, kept in a file.

    Attributes:
        next: number of the first deployment that has not run.
        rounds, wrong_bytes, seconds: sums over all that have.
        kinds: rounds and operations by what they were.
        failures: {"deployment", "reproduce", "what"} each.
    """

    def __init__(self, path: Path, seed: int, devices: str, command: str, places: Sequence[str]) -> None:
        """A new run, or the one in `path`. `places`: the devices that may be used.

        Raises:
            EPInputError: the file is damaged, or of another seed, other devices, or other kernels.
        """
        self.path, self.command = path, command
        self.identity = {"seed": seed, "devices": devices, "source_hash": source_hash()}
        self.environment = environment(places, command)
        self.next, self.rounds, self.wrong_bytes, self.seconds = 0, 0, 0, 0.0
        self.kinds: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        if path.exists():
            self._read()

    @property
    def good(self) -> bool:
        return not self.failures and not self.wrong_bytes

    def add(self, number: int, outcome: Outcome, reproduce: str, seconds: float) -> None:
        """Count a deployment and write the file."""
        self.next = number + 1
        self.rounds += outcome.rounds
        self.wrong_bytes += outcome.wrong_bytes
        self.kinds += outcome.kinds
        self.seconds += seconds
        if outcome.failures:
            self.failures.append({"deployment": number, "reproduce": reproduce, "what": outcome.failures})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        part.replace(self.path)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.identity,
            "environment": self.environment,
            "next": self.next,
            "rounds": self.rounds,
            "wrong_bytes": self.wrong_bytes,
            "seconds": round(self.seconds, 1),
            "kinds": dict(sorted(self.kinds.items())),
            "failures": self.failures,
        }

    def summary(self) -> str:
        gpus = Counter(self.environment["gpus"].values())
        where = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "the CPU"
        return (
            f"soak: {self.rounds} rounds of {self.next} deployments on {where} in {self.seconds:.0f} s, "
            f"{self.wrong_bytes} wrong bytes, {len(self.failures)} deployments failed; {self.path}"
        )

    def _read(self) -> None:
        try:
            old = json.loads(self.path.read_text())
            found = {name: old[name] for name in self.identity}
            if found == self.identity:
                self.next, self.rounds, self.wrong_bytes = old["next"], old["rounds"], old["wrong_bytes"]
                self.seconds, self.kinds, self.failures = old["seconds"], Counter(old["kinds"]), old["failures"]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise EPInputError(f"out = {self.path}: no state of a run ({error}); remove it") from None
        if found != self.identity:
            raise EPInputError(f"out = {self.path}: is of {found}, this run is {self.identity}; remove it")


class Bar:
    """Progress: a bar on a terminal, elsewhere a line every LINE_EVERY_S seconds."""

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        self._console, self._total, self._done = console, total, done
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), MofNCompleteColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=done)
        self._told = time.monotonic()

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, count: int, what: str | None = None) -> None:
        """`count` more are done; `what` is going on from now."""
        self._done += count
        self._bar.update(self._task, advance=count, **({} if what is None else {"description": what}))
        if not self._console.is_terminal and time.monotonic() - self._told > LINE_EVERY_S:
            self._told = time.monotonic()
            self._console.print(f"{self._done} of {self._total}", highlight=False)

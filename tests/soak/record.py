"""What a long run has found so far, in a JSON file from which a later call goes on; and its progress on a terminal."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import cute_ep
from cute_ep.aot.library import source_hash
from cute_ep.api.errors import EPInputError
from cute_ep.bench.machine import environment

from .rounds import Outcome

LINE_EVERY_S = 10.0
"""Between two lines of progress where there is no terminal."""


def check_writable(path: Path) -> None:
    """Make the folder of a file that will be written. EPInputError: it cannot be."""
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise EPInputError(f"out = {path}: must be a file that can be written ({error})") from None


def host_hash() -> str:
    """Digest of the Python that launches kernels and draws rounds, which `source_hash` does not cover. The
    tests of this folder do neither."""
    digest = hashlib.sha256()
    for folder in (Path(cute_ep.__file__).parent, Path(__file__).parent):
        for path in sorted(set(folder.rglob("*.py")) - set(folder.glob("test_*.py"))):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Record:
    """The state of one run of rounds, kept in a file.

    Attributes:
        environment: of this call; the file has one for each call that has added to it.
        next: number of the first deployment that has not run.
        rounds, wrong_bytes, seconds: sums over all that have.
        kinds: rounds and operations by what they were.
        failures: {"deployment", "reproduce", "what"} each.
    """

    def __init__(self, path: Path, seed: int, devices: str, command: str, places: Sequence[str]) -> None:
        """A new run, or the one in `path`. `places`: the devices that may be used.

        Raises:
            EPInputError: the file is damaged, or of another seed, other devices, other code or another torch; or it
                cannot be written.
        """
        check_writable(path)
        self.path, self.command = path, command
        self.environment = environment(places, command)
        self.identity = {
            "seed": seed,
            "devices": devices,
            "source_hash": source_hash(),
            "host_hash": host_hash(),
            "gpus": self.environment["gpus"],
            "torch": self.environment["torch"],
        }
        self._earlier: list[dict[str, Any]] = []
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
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        part.replace(self.path)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.identity,
            "environments": [*self._earlier, self.environment],
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
                self._earlier = old["environments"]
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

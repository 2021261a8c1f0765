"""What a rank still waits for, flag by flag: `EPCommunicator.flags`, `EPTimeout.flags` and `cute-ep flags`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cute_ep.api.errors import EPInputError

NOT_CALLED = "it did not call it, its launch is behind other work of its stream, it has given up, or its device failed"
"""Why a rank has done nothing of a call."""

MEANINGS = {
    "dispatch_consumed": "it has launched no dispatch since it received that round, so its buffers may still be in use",
    "table": f"it has sent nothing of this dispatch: {NOT_CALLED}",
    "entries": "it has sent the counts of this dispatch, but not the experts of these tokens",
    "message_ready": "it has sent the routing of this dispatch, but not these rows",
    "combine_consumed": "it has launched no combine since it received that round, so its buffers may still be in use",
    "return_rounds": f"it has not begun this combine: {NOT_CALLED}",
    "arrived": "this piece of its mail has not come (last index: 0 rows, 1 scale factors, 2 routes or sums): "
    f"{NOT_CALLED}, or the network",
    "free": "it has not read this rank's mail of that round, so no other can be sent",
    "calls": "it has not made this call",
}
"""What it means for a flag of each name that its peer has not stored it."""


ALTERNATING = ("table", "entries", "return_rounds")
"""Two sets of words, for rounds of either parity."""


@dataclass(frozen=True)
class Flag:
    """Neighbouring flags that a peer has not stored yet.

    Attributes:
        name: region of the arena (docs/protocol.md, "Memory map") or, over nodes, "arrived" and "free" of the mail map
            (`layouts.maps.mail`); "calls" on the reference backend.
        index: of the first flag, as the region is indexed.
        count: how many there are.
        operation, round: "dispatch" or "combine", and the round that needs them. Rounds are counted from 1.
        peer: the rank that stores them.
        seen, needed: round that the first flag has, and the least that it must have.
    """

    name: str
    index: tuple[int, ...]
    count: int
    operation: str
    round: int
    peer: int
    seen: int
    needed: int

    def __str__(self) -> str:
        return self.words(f"rank {self.peer}")

    def words(self, peer: str) -> str:
        """What has not come, with these words for the rank that stores it."""
        place = self.name + "".join(f"[{index}]" for index in self.index)
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        every = "of every other round the last is" if self.name in ALTERNATING else "round"
        rounds = f"{every} {self.seen}, must be {self.needed}"
        return f"{self.operation} round {self.round} needs {peer}: {place}{more}: {rounds}: {MEANINGS[self.name]}"


@dataclass(frozen=True)
class Flags:
    """The flags of one rank that are behind.

    Attributes:
        rank: whose they are.
        completed: rounds that the rank has completed: "dispatches sent", "dispatches received", "combines sent",
            "combines received"; over nodes also "frames" and "sums", sent and received.
        behind: flags that the rank's next rounds need, or the rounds that it waits in, and that have not come.
    """

    rank: int
    completed: dict[str, int]
    behind: tuple[Flag, ...]

    def __str__(self) -> str:
        rounds = ", ".join(f"{number} {what}" for what, number in self.completed.items())
        lines = [f"rank {self.rank} has completed {rounds}"]
        for flag in self.behind:
            lines.append(f"  {flag.words('this rank' if flag.peer == self.rank else f'rank {flag.peer}')}")
        return "\n".join(lines if self.behind else [*lines, "  nothing is behind"])

    def write(self, path: str | Path) -> None:
        """Write them to a file that `Flags.read` and `cute-ep flags` take."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Flags:
        """What `write` has written.

        Raises:
            EPInputError: the file cannot be read, or is not such a file.
        """
        try:
            given = json.loads(Path(path).read_text())
            behind = tuple(Flag(**one | {"index": tuple(one["index"])}) for one in given["behind"])
            return cls(given["rank"], given["completed"], behind)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EPInputError(f"{path}: must be a file of Flags.write ({type(error).__name__}: {error})") from error


def slowest(ranks: Sequence[Flags]) -> str:
    """Which ranks to look at first, in words: those that others wait for and that are not among `ranks`, else those
    that have completed the fewest rounds."""
    here = {one.rank for one in ranks}
    waiting = {
        peer: [one.rank for one in ranks if peer in {flag.peer for flag in one.behind}]
        for peer in sorted({flag.peer for one in ranks for flag in one.behind} - here)
    }
    if waiting:
        texts = [f"rank {peer}, for which rank(s) {others} wait" for peer, others in waiting.items()]
        return f"look first at {'; '.join(texts)}: there are no flags of it here"
    done = {one.rank: sum(one.completed.values()) for one in ranks}
    behind = [rank for rank, rounds in done.items() if rounds == min(done.values())]
    if len(behind) < len(ranks):
        return f"look first at rank(s) {behind}: they have completed the fewest rounds"
    return "all ranks have completed as many rounds"

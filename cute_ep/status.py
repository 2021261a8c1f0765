"""What a rank's kernels report to the host: peers that did not arrive in time, and what was wrong with the input."""

from __future__ import annotations

from collections.abc import Mapping

from cute_ep.driver import HostMemory
from cute_ep.errors import EPInputError, EPTimeout
from cute_ep.layouts.routing import INPUT_ERRORS, Phase, StatusWord


def raise_input_error(rank: int, found: Mapping[Phase, tuple[int, int, int]]) -> None:
    """EPInputError unless `found` is empty: (index, expected, seen) of each kind out of INPUT_ERRORS."""
    texts = []
    for phase in INPUT_ERRORS:
        if phase in found:
            index, expected, seen = found[phase]
            texts.append(
                f"topk_ids.flatten()[{index}] = {seen}: must be -1 or in [0, {expected})"
                if phase == Phase.EXPERT_ID
                else f"out holds {expected} rows, but those that arrived take {seen}"
            )
    if texts:
        raise EPInputError(f"rank {rank}: {'; '.join(texts)}")


class Status:
    """One rank's status records, in host memory that its kernels store to: one for each of `peers` ranks, itself
    among them, and one for each of INPUT_ERRORS."""

    def __init__(self, rank: int, peers: int) -> None:
        self.rank, self.peers = rank, peers
        self.memory = HostMemory(len(StatusWord) * (peers + len(INPUT_ERRORS)))
        self._phases = slice(StatusWord.PHASE, len(StatusWord) * peers, len(StatusWord))
        self.address, self.free = self.memory.address, self.memory.free

    @property
    def failed(self) -> bool:
        """Whether a wait of this rank has timed out."""
        return any(self.memory.words[self._phases])

    def raise_timeout(self) -> None:
        """EPTimeout when a wait has timed out: it names the peers, the phase, the epochs expected and seen."""
        if not self.failed:
            return
        missing = {peer: record for peer, record in enumerate(self._records()[: self.peers]) if record[0]}
        details = [
            f"GRID: {seen} of {expected} receiving CTAs came together; were they resident together?"
            if phase == Phase.GRID
            else f"{Phase(phase).name} of rank {peer}, index {index}: expected epoch {expected}, saw {seen}"
            for peer, (phase, index, expected, seen) in missing.items()
        ]
        phases = sorted({Phase(record[0]).name for record in missing.values()})
        raise EPTimeout(" / ".join(phases), self.rank, tuple(missing), tuple(details))

    def raise_input_error(self) -> None:
        """EPInputError when a kernel found this rank's input wrong, once; of each kind the latest is told."""
        found = {}
        for number, (phase, index, expected, seen) in enumerate(self._records()[self.peers :], start=self.peers):
            if phase:
                self.memory.words[len(StatusWord) * number] = Phase.NONE
                found[Phase(phase)] = index, expected, seen - (1 << 32) if seen >> 31 else seen
        raise_input_error(self.rank, found)

    def _records(self) -> list[tuple[int, int, int, int]]:
        """(phase, index, expected, seen) of every peer, then of every kind of input error."""
        width, words = len(StatusWord), self.memory.words
        starts = range(0, len(words), width)
        return [(words[at], words[at + 1], words[at + 2], words[at + 3]) for at in starts]

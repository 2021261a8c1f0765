"""What a rank's kernels report to the host: peers that did not arrive in time, and what was wrong with the input."""

from __future__ import annotations

from collections.abc import Sequence

from cute_ep.api.errors import EPError, EPTimeout, raise_input_error
from cute_ep.layouts.maps.arena import StateWord
from cute_ep.layouts.maps.routing import INPUT_ERRORS, Phase, StatusWord
from cute_ep.runtime.driver import HostMemory

ORDER_OPERATIONS = {StateWord.DISPATCH_SEND_EPOCH: "dispatch", StateWord.COMBINE_SEND_EPOCH: "combine"}


class Status:
    """One rank's status records, in host memory that its kernels store to: one for each of `peers`, the ranks that it
    exchanges messages with, itself among them, and one for each of INPUT_ERRORS."""

    def __init__(self, rank: int, peers: tuple[int, ...]) -> None:
        self.rank, self.peers = rank, peers
        self.memory = HostMemory(len(StatusWord) * (len(peers) + len(INPUT_ERRORS)))
        self._phases = slice(StatusWord.PHASE, len(StatusWord) * len(peers), len(StatusWord))
        self._kinds = slice(len(StatusWord) * len(peers), None, len(StatusWord))
        self.address, self.free = self.memory.address, self.memory.free

    @property
    def failed(self) -> bool:
        """Whether a wait of this rank has timed out, or a launch came out of order."""
        return any(self.memory.words[self._phases])

    def raise_failure(self) -> None:
        """EPTimeout when a wait has timed out: names the peers, the phase, the epochs expected and seen. EPError when a
        fused launch has found a round that was sent and not received, or ranks have combined other batches."""
        if not self.failed:
            return
        records = dict(zip(self.peers, self._records(), strict=False))
        missing = {peer: record for peer, record in records.items() if record[0]}
        for phase, word, received, sent in missing.values():
            if phase == Phase.ORDER:
                operation = ORDER_OPERATIONS[StateWord(word)]
                raise EPError(
                    f"rank {self.rank}: a fused {operation} ran when {sent} rounds had been sent and {received} "
                    "received (were graphs replayed in another order than captured?); it did nothing, and the "
                    "communicator is unusable: close all ranks and connect again"
                )
        if others := {peer: record for peer, record in missing.items() if record[0] == Phase.PAIR}:
            _, number, own, _ = next(iter(others.values()))
            told = ", ".join(f"rank {peer} rows of dispatch round {seen}" for peer, (*_, seen) in others.items())
            raise EPError(
                f"rank {self.rank}: combine round {number} has the batch of dispatch round {own} here, but {told}: all "
                "ranks must combine the batches of the same dispatch rounds in the same order (were graphs replayed "
                "in another order on some rank?); the sums are wrong, and the communicator is unusable: close all "
                "ranks and connect again"
            )
        details = [
            f"GRID: {seen} of {expected} receiving CTAs came together; were they resident together?"
            if phase == Phase.GRID
            else f"{Phase(phase).name} of rank {peer}, index {index}: expected epoch {expected}, saw {seen}"
            for peer, (phase, index, expected, seen) in missing.items()
        ]
        phases = sorted({Phase(record[0]).name for record in missing.values()})
        raise EPTimeout(" / ".join(phases), self.rank, tuple(missing), tuple(details))

    def take_input_errors(self) -> dict[Phase, tuple[int, int, int]]:
        """What kernels have found wrong with this rank's input, and then forgotten: (index, expected, seen) of the
        latest of each kind."""
        found: dict[Phase, tuple[int, int, int]] = {}
        if not any(self.memory.words[self._kinds]):
            return found
        for number, (phase, index, expected, seen) in list(enumerate(self._records()))[len(self.peers) :]:
            if phase:
                self.memory.words[len(StatusWord) * number] = Phase.NONE
                found[Phase(phase)] = index, expected, seen - (1 << 32) if seen >> 31 else seen
        return found

    def raise_input_error(self, others: Sequence[str] = ()) -> None:
        """EPInputError of what `take_input_errors` finds. `others`: what else is wrong, in words."""
        raise_input_error(self.rank, self.take_input_errors(), others)

    def _records(self) -> list[tuple[int, int, int, int]]:
        """(phase, index, expected, seen) of every peer, then of every kind of input error."""
        width, words = len(StatusWord), self.memory.words
        starts = range(0, len(words), width)
        return [(words[at], words[at + 1], words[at + 2], words[at + 3]) for at in starts]
